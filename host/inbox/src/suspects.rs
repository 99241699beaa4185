//! A detector of bad message ids: one payload that comes again under another id was probably given
//! its id by a relay or a consumer, and will not be deduplicated (S1-049). It only warns.

use std::collections::{HashMap, VecDeque};

use crate::{consumer::ConsumerInbox, message::Message};

/// Payloads remembered per partition.
const REMEMBERED: usize = 1_024;
/// Payloads shorter than this repeat by chance.
const PAYLOAD_BYTES_MIN: usize = 64;

/// The payloads a partition saw last, and the ids they came with.
#[derive(Debug, Default)]
pub(crate) struct Suspects {
    ids: HashMap<[u8; 32], String>,
    order: VecDeque<[u8; 32]>,
    warned: bool,
}

impl Suspects {
    /// Warn when this payload came before under another id.
    pub(crate) fn observe(&mut self, consumer: &ConsumerInbox, message: &Message) {
        if self.is_suspect(message) {
            metrics::counter!("oncebox_suspect_ids_total", "tenant" => consumer.tenant.clone(), "consumer" => consumer.name.clone())
                .increment(1);
            // The counter has every case; one line per assignment is enough to find it.
            if std::mem::replace(&mut self.warned, true) {
                return;
            }
            tracing::warn!(
                tenant = consumer.tenant,
                consumer = consumer.name,
                message_id = message.id,
                trace_id = message.trace_id(),
                "the same payload came under another message id; ids that change between deliveries defeat deduplication"
            );
        }
    }

    fn is_suspect(&mut self, message: &Message) -> bool {
        let Some(hash) = message.payload_hash.filter(|_| message.record.payload.as_ref().is_some_and(|p| p.len() >= PAYLOAD_BYTES_MIN))
        else {
            return false;
        };
        if let Some(known) = self.ids.get(&hash) {
            return *known != message.id;
        }
        self.order.push_back(hash);
        self.ids.insert(hash, message.id.clone());
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.ids.remove(&oldest);
        }
        false
    }
}
