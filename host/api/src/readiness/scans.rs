//! Scans of inboxes for readiness. Each reads up to a million rows, so that few run at a time, and
//! requests for one consumer share the last one.

use std::{sync::Arc, time::Duration};

use oncebox_control::{Consumer, Control, InboxScan};
use oncebox_model::{InboxError, policy::Policy};
use tokio::time::timeout;

use crate::{
    Api,
    error::{ApiError, Code},
    shared_answers::SharedAnswers,
};

/// Scans that run at a time.
const AT_ONCE: usize = 2;
/// Time for which a scan is given to further requests.
const FRESH: Duration = Duration::from_secs(60);
/// The same for a scan that failed.
const FRESH_FAILURE: Duration = Duration::from_secs(5);

/// The last scan of each consumer's inbox, by the key of the consumer and its revision.
pub(crate) type InboxScans = SharedAnswers<(i32, i64), Arc<InboxScan>, Arc<InboxError>>;

/// Creates the store of scans.
pub(crate) fn scans() -> InboxScans {
    SharedAnswers::new(AT_ONCE, FRESH, FRESH_FAILURE)
}

/// Returns the scan of a consumer's inbox, of at most a minute ago. One that takes too long goes on
/// without the request.
pub(super) async fn scanned(
    api: &Api,
    control: &Control,
    row: &Consumer,
    policy: &Policy,
) -> Result<Arc<InboxScan>, ApiError> {
    let key = (row.consumer_id, row.revision);
    let (control, row, policy) = (control.clone(), row.clone(), policy.clone());
    let scan = async move {
        control.consumers().scan_inbox(&row, &policy).await.map(Arc::new).map_err(Arc::new)
    };
    let answer_max = api.limits().request_timeout * 4 / 5;
    let answer = timeout(answer_max, api.inbox_scans().get(api.tasks(), key, scan)).await;
    let found = answer.map_err(|_| {
        let text = format!(
            "the inbox was not read within {} ms; ask again for its result",
            answer_max.as_millis()
        );
        ApiError::new(Code::Timeout, text)
    })?;
    let found = found.map_err(|error| {
        let text = "the host failed to read the inbox; its log says why";
        ApiError::host(Code::Internal, text, error)
    })?;
    found.map_err(|error| {
        let text = "the inbox cannot be read at present; ask again later";
        ApiError::host(Code::Unavailable, text, error)
    })
}
