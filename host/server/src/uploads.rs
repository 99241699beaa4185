//! What the API asks of the runtime and of the broker's client.

use bytes::Bytes;
use oncebox_admin::{Checked, Checking, Components, Problem, Unchecked};
use oncebox_inbox::policy::Policy;
use oncebox_runtime::Runtime;
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::cli::check_kafka;

/// Uploads as this process can look at them: by compiling them.
pub(crate) struct Uploads {
    pub(crate) runtime: Runtime,
}

impl Components for Uploads {
    fn check(&self, upload: Bytes) -> Checking<'_> {
        Box::pin(async move {
            let refused = |text: String| Unchecked::Refused(vec![Problem { code: "invalid_component".to_owned(), text }]);
            let is_core = upload.get(..8).is_some_and(|head| head.starts_with(b"\0asm") && head[6..] == [0, 0]);
            let (component, source_digest) = if is_core {
                let made = oncebox_runtime::encode_component(&upload).map_err(|error| refused(error.to_string()))?;
                (Bytes::from(made), Some(Sha256::digest(&upload).into()))
            } else {
                (upload, None)
            };
            let loaded = self.runtime.load(&component).await.map_err(|error| refused(error.to_string()))?;
            let report = json!({ "size": component.len(), "imports": loaded.imports() });
            Ok(Checked { digest: loaded.digest(), component, source_digest, report, is_compiled: true })
        })
    }

    fn submit(&self, _digest: [u8; 32]) {
        // What was looked at was compiled.
    }

    fn check_policy(&self, tenant: &str, consumer: &str, policy: &Policy) -> Result<(), String> {
        check_kafka(tenant, consumer, policy).map_err(|error| error.to_string())
    }
}
