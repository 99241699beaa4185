//! Stored records as the API shows them: masked by the policy of their consumer, whoever asks.

use oncebox_control::Control;
use oncebox_model::{
    InboxError,
    masking::{MASKED, Mask},
    record::Headers,
};

use crate::error::ApiError;

/// Returns the mask of a consumer's messages.
pub(crate) async fn mask_of(
    control: &Control,
    tenant: &str,
    consumer: &str,
) -> Result<Mask, ApiError> {
    mask_of_any(control, tenant, consumer, |_| true).await
}

/// Returns the mask of the messages of a consumer that may be deleted, also where another one has
/// its name now. The policy of a deleted consumer is not known, so everything is masked.
pub(crate) async fn mask_of_any(
    control: &Control,
    tenant: &str,
    consumer: &str,
    is_it: impl FnOnce(i32) -> bool,
) -> Result<Mask, ApiError> {
    match control.consumers().get(tenant, consumer).await {
        Ok(consumer) if is_it(consumer.consumer_id) => Ok(consumer.policy()?.mask()),
        Ok(_) => Ok(Mask::everything()),
        Err(InboxError::NotFound(_)) => Ok(Mask::everything()),
        Err(error) => Err(error.into()),
    }
}

/// The texts of a record, masked.
pub(crate) struct MaskedRecord<'a> {
    mask: &'a Mask,
    /// Whether anything was masked so far.
    pub(crate) is_masked: bool,
}

impl<'a> MaskedRecord<'a> {
    pub(crate) fn new(mask: &'a Mask) -> Self {
        Self { mask, is_masked: false }
    }

    pub(crate) fn key(&mut self, key: Option<&[u8]>) -> Option<String> {
        let is_masked = self.mask.has_key();
        key.map(|key| self.value(key, is_masked))
    }

    pub(crate) fn ordering_key(&mut self, key: Option<&[u8]>) -> Option<String> {
        let is_masked = self.mask.has_ordering_key();
        key.map(|key| self.value(key, is_masked))
    }

    pub(crate) fn headers(&mut self, headers: &Headers) -> Vec<(String, String)> {
        let header = |(name, value): &(String, Vec<u8>)| {
            let is_masked = self.mask.has_header(name);
            (name.clone(), self.value(value, is_masked))
        };
        headers.iter().map(header).collect()
    }

    pub(crate) fn payload(&mut self, payload: Option<&[u8]>) -> Option<String> {
        let payload = payload?;
        let masked = self.mask.payload(payload);
        self.is_masked |= masked.is_some();
        Some(masked.unwrap_or_else(|| text(payload)))
    }

    /// Returns the payload of a record that was never understood.
    pub(crate) fn raw_payload(&mut self, payload: Option<&[u8]>) -> Option<String> {
        let is_masked = self.mask.has_raw_payload();
        payload.map(|payload| self.value(payload, is_masked))
    }

    fn value(&mut self, value: &[u8], is_masked: bool) -> String {
        self.is_masked |= is_masked;
        if is_masked { MASKED.to_owned() } else { text(value) }
    }
}

fn text(bytes: &[u8]) -> String {
    std::str::from_utf8(bytes).map_or_else(|_| format!("0x{}", hex::encode(bytes)), str::to_owned)
}
