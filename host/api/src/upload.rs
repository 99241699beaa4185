//! Receiving an upload, with bounds of its size, its time, and the number of uploads at a time.

use axum::{body::Body, extract::Request};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use sha2::{Digest, Sha256};
use tokio::{
    sync::SemaphorePermit,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    Api,
    error::{ApiError, Code},
    extract::{check_length, too_large},
};

/// Waits for a permit, then for the whole body. Refuses a body with another digest.
pub(crate) async fn receive<'a>(
    api: &'a Api,
    request: Request<Body>,
    digest: &[u8; 32],
) -> Result<(SemaphorePermit<'a>, Bytes), ApiError> {
    let limits = api.limits();
    check_length(request.headers(), limits.component_bytes_max)?;
    let turn = timeout(limits.request_timeout, api.uploads().acquire()).await;
    let busy = || {
        ApiError::new(
            Code::Unavailable,
            format!("{} uploads run already; try again later", limits.uploads_max),
        )
    };
    let turn = turn.map_err(|_| busy())?.map_err(|_| busy())?;
    let (bytes, found) = read(api, request.into_body()).await?;
    if found != *digest {
        let detail = format!(
            "the digest in the path is not that of the body, which is `{}`; it may have been \
                damaged on its way",
            hex::encode(found)
        );
        return Err(ApiError::invalid(detail));
    }
    Ok((turn, bytes))
}

async fn read(api: &Api, body: Body) -> Result<(Bytes, [u8; 32]), ApiError> {
    let limits = api.limits();
    let deadline = Instant::now() + limits.upload_timeout;
    let late = |_| ApiError::new(Code::Timeout, "the upload did not go on; nothing of it was kept");
    let (mut chunks, mut bytes, mut hash) =
        (body.into_data_stream(), BytesMut::new(), Sha256::new());
    loop {
        let chunk = timeout_at(deadline.min(Instant::now() + limits.idle_timeout), chunks.next())
            .await
            .map_err(late)?;
        let Some(chunk) = chunk else { return Ok((bytes.freeze(), hash.finalize().into())) };
        let chunk =
            chunk.map_err(|_| ApiError::invalid("the upload broke off; nothing of it was kept"))?;
        if bytes.len() + chunk.len() > limits.component_bytes_max {
            return Err(too_large(limits.component_bytes_max));
        }
        hash.update(&chunk);
        bytes.extend_from_slice(&chunk);
    }
}
