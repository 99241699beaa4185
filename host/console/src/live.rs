//! Pages that follow what changes, by server-sent events.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use futures::{Stream, StreamExt, future::BoxFuture, stream};
use maud::html;

use crate::{layout::Page, refusal::Refusal, state::StreamPermit, visit::Visit};

/// Shortest pause between two looks.
const PAUSE: Duration = Duration::from_secs(2);

/// Pause as a multiple of the time that the look before took, so that an open page that is slow to
/// make keeps a connection of the database for a tenth of the time at most.
const PAUSE_FACTOR: u32 = 9;

/// Looks without a change after which a comment is sent, so that a browser that is gone is noticed.
const QUIET_LOOKS: u32 = 7;

/// Returns whether a request asks for the changes of a page instead of the page.
pub(crate) fn is_asked(headers: &HeaderMap) -> bool {
    headers
        .get(header::ACCEPT)
        .and_then(|accept| accept.to_str().ok())
        .is_some_and(|accept| accept.contains("text/event-stream"))
}

/// What makes a page. The code around it is the same for all pages.
pub(crate) type Render =
    Arc<dyn Fn(Visit) -> BoxFuture<'static, Result<Page, Refusal>> + Send + Sync>;

/// What a stream knows between two looks.
struct Follower {
    visit: Visit,
    render: Render,
    /// The changing part as it was sent last.
    sent: Option<String>,
    quiet_looks: u32,
    /// Pause before the next look; none before the first.
    pause: Option<Duration>,
    /// Whether the session has ended.
    is_over: bool,
    _permit: StreamPermit,
}

/// Returns the changing part of a page now and after each change, until the session ends or the
/// host does.
pub(crate) fn follow(visit: Visit, render: Render) -> Response {
    // Without room the page stays as it is, and asks no more.
    let Some(permit) = visit.console.0.streams.enter(visit.principal().token_id()) else {
        return events(stream::iter([Ok(END.into())]));
    };
    let mut visit = visit;
    visit.client.is_refresh = true;
    let stop = visit.console.0.stop.clone();
    let follower = Follower {
        visit,
        render,
        sent: None,
        quiet_looks: 0,
        pause: None,
        is_over: false,
        _permit: permit,
    };
    let looks = stream::unfold(follower, |mut follower| async move {
        let event = follower.look().await?;
        Some((Ok(event.into()), follower))
    });
    events(looks.take_until(stop.cancelled_owned()))
}

/// Returns the answer to a page whose session is over.
pub(crate) fn over() -> Response {
    events(stream::iter([Ok(session_over().into())]))
}

/// The event at which a page asks for no more changes.
const END: &str = "event: end\ndata: end\n\n";

/// Returns the events that tell a page that its session is over.
fn session_over() -> String {
    let notice = html! {
        p.refusal role="alert" { "The session is over. " a href="/console/login" { "Sign in" } }
    };
    event(&notice.into_string()) + END
}

fn events(events: impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static) -> Response {
    let headers =
        [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    (headers, Body::from_stream(events)).into_response()
}

impl Follower {
    /// Waits for a change and returns it as an event; `None` at the end.
    async fn look(&mut self) -> Option<String> {
        loop {
            if let Some(pause) = self.pause {
                tokio::time::sleep(pause).await;
            }
            if self.is_over {
                return None;
            }
            let began = Instant::now();
            if !self.visit.is_valid().await {
                self.is_over = true;
                return Some(session_over());
            }
            let Some(shown) = self.render().await else {
                self.is_over = true;
                return Some(END.to_owned());
            };
            self.pause = Some(PAUSE.max(began.elapsed() * PAUSE_FACTOR));
            if self.sent.as_ref() != Some(&shown) {
                self.quiet_looks = 0;
                let event = event(&shown);
                self.sent = Some(shown);
                return Some(event);
            }
            self.quiet_looks += 1;
            if self.quiet_looks >= QUIET_LOOKS {
                self.quiet_looks = 0;
                return Some(": nothing changed\n\n".to_owned());
            }
        }
    }

    /// Returns the changing part of the page, or why there is none at present; `None` for a page
    /// that does not change.
    async fn render(&mut self) -> Option<String> {
        let visit = self.visit.clone();
        let _turn = visit.console.0.refreshes.acquire().await;
        match (self.render)(visit.clone()).await {
            Ok(page) => page.is_live.then(|| page.body.into_string()),
            Err(refusal) => {
                Some(html! { p.refusal role="alert" { (refusal.detail) } }.into_string())
            }
        }
    }
}

/// Returns a text as an event. Each of its lines is a line of data.
fn event(text: &str) -> String {
    let mut event = String::with_capacity(text.len() + 16);
    for line in text.split(['\n', '\r']) {
        event.extend(["data: ", line, "\n"]);
    }
    event.push('\n');
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_text_ends_no_event() {
        assert_eq!(event("a\nb\r\nevent: x"), "data: a\ndata: b\ndata: \ndata: event: x\n\n");
    }
}
