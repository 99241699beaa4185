//! The runtime and the broker's client, as the API uses them.

use bytes::Bytes;
use oncebox_api::{Checked, Checking, Components, ProblemBody, Unchecked};
use oncebox_model::policy::Policy;

use crate::{brokers::check_kafka, compile::Compilations};

/// Uploads, as this process checks and compiles them.
pub struct Uploads {
    /// Components of this process.
    pub components: Compilations,
}

impl Components for Uploads {
    fn check(&self, upload: Bytes) -> Checking<'_> {
        Box::pin(async move {
            let inspected = self
                .components
                .check(upload.into())
                .await
                .map_err(|busy| Unchecked::Busy(busy.to_string()))?;
            let inspected = inspected.map_err(|problems| {
                let told = |problem: oncebox_runtime::Problem| ProblemBody {
                    code: problem.code,
                    text: problem.text,
                };
                Unchecked::Refused(problems.into_iter().map(told).collect())
            })?;
            let report = serde_json::to_value(&inspected.report)
                .map_err(|error| Unchecked::Busy(error.to_string()))?;
            let component = inspected.component.into();
            Ok(Checked {
                component,
                digest: inspected.digest,
                source_digest: inspected.source_digest,
                report,
                is_compiled: false,
            })
        })
    }

    fn submit(&self, digest: [u8; 32]) {
        if let Err(busy) = self.components.submit(&digest) {
            // It stays queued in its row, where the host finds it later.
            tracing::warn!(%busy, digest = hex::encode(digest), "a component waits to be compiled");
        }
    }

    fn check_policy(&self, tenant: &str, consumer: &str, policy: &Policy) -> Result<(), String> {
        check_kafka(tenant, consumer, policy).map_err(|error| error.to_string())
    }
}
