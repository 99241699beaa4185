//! One request and its answer on a connection.

use std::{pin::pin, time::SystemTime};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{body::Incoming, client::conn::http1::Builder};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::{Instant, timeout_at},
};

use crate::{
    connect::timed_out,
    error::{SendError, SendStage},
    response::{BodyEnd, Response},
    text::causes,
};

/// Most headers of an answer, and most bytes of its head.
const HEADERS_MAX: usize = 100;
const HEAD_BYTES_MAX: usize = 32 << 10;
/// Most bytes that are read ahead.
const BUFFER_BYTES_MAX: usize = 64 << 10;

/// Sends a request and reads its answer, with at most so many bytes of its body. The connection
/// ends with it, whatever else the endpoint sends.
pub(crate) async fn exchange<S>(
    endpoint: &str,
    stream: S,
    request: hyper::Request<Full<Bytes>>,
    body_bytes_max: usize,
    deadline: Instant,
) -> Result<Response, SendError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let handshake = Builder::new()
        .max_headers(HEADERS_MAX)
        .max_header_size(HEAD_BYTES_MAX)
        .max_buf_size(BUFFER_BYTES_MAX)
        .handshake(TokioIo::new(stream))
        .await;
    let (mut requests, connection) = handshake.map_err(|error| broken(endpoint, &error))?;
    let answered = async move {
        let head = timeout_at(deadline, requests.send_request(request)).await;
        let head = head.map_err(|_| timed_out(endpoint, SendStage::Answer))?;
        let (head, body) = head.map_err(|error| broken(endpoint, &error))?.into_parts();
        let mut response =
            Response::of_head(head.status.as_u16(), &head.headers, SystemTime::now());
        (response.body, response.body_end) = read(body, body_bytes_max, deadline).await;
        Ok::<_, SendError>(response)
    };
    // The connection has no task of its own: this function drives it up to the answer.
    let mut answered = pin!(answered);
    tokio::select! {
        biased;
        answer = &mut answered => answer,
        _ = connection => answered.await,
    }
}

/// Reads a body up to a bound and a deadline.
async fn read(mut body: Incoming, bytes_max: usize, deadline: Instant) -> (Vec<u8>, BodyEnd) {
    let mut bytes = Vec::new();
    loop {
        let frame = match timeout_at(deadline, body.frame()).await {
            Ok(None) => return (bytes, BodyEnd::Whole),
            Ok(Some(Ok(frame))) => frame,
            Ok(Some(Err(_))) => return (bytes, BodyEnd::Broken),
            Err(_) => return (bytes, BodyEnd::Late),
        };
        let Some(data) = frame.data_ref() else { continue };
        let room = bytes_max - bytes.len();
        bytes.extend_from_slice(&data[..data.len().min(room)]);
        if data.len() > room {
            return (bytes, BodyEnd::Cut);
        }
    }
}

fn broken(endpoint: &str, error: &hyper::Error) -> SendError {
    let (endpoint, why) = (endpoint.to_owned(), causes(error));
    if error.is_parse() {
        SendError::BadAnswer { endpoint, why }
    } else {
        SendError::Broken { endpoint, why }
    }
}
