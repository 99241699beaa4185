//! The span of an attempt to send.

use oncebox_model::{
    outgoing::{Destination, new_outgoing_span},
    trace::{self, Span},
};
use opentelemetry::trace::SpanKind;

use crate::{outcome::Sent, reason::OutgoingReason, row::OutgoingRow};

/// Sends a message within the span of the attempt, below that of its emit. It has none where the
/// message is not traced.
pub(crate) async fn in_span(
    row: &OutgoingRow,
    destination: Option<&Destination>,
    names: (&str, &str),
    send: impl Future<Output = Sent>,
) -> Sent {
    let span = send_span(row, destination, names);
    let sent = trace::within(span.as_ref(), send).await;
    end_span(span, &sent);
    sent
}

/// Begins the span of an attempt to send a message.
fn send_span(
    row: &OutgoingRow,
    destination: Option<&Destination>,
    (tenant, consumer): (&str, &str),
) -> Option<Span> {
    let parent = trace::traced(row.trace_parent.as_deref())?;
    new_outgoing_span("send", SpanKind::Client, destination?, &row.id, (tenant, consumer))
        .with("messaging.message.body.size", row.payload.as_ref().map_or(0, Vec::len) as i64)
        .with("oncebox.event_type", row.event_type.clone())
        .with("oncebox.attempt", i64::from(row.attempt()))
        .begin_below(&parent)
}

/// Ends the span of an attempt with its result.
fn end_span(span: Option<Span>, sent: &Sent) {
    let Some(span) = span else { return };
    match sent {
        Sent::Confirmed | Sent::Answered(_) | Sent::Marked { .. } => {}
        Sent::Lost => span.fail("lease_lost"),
        Sent::Unsent => span.fail("not_sent"),
        Sent::Unconfirmed { .. } => span.fail(OutgoingReason::Unconfirmed.as_str()),
        Sent::Limited { .. } => span.fail("limited"),
        Sent::Failed { reason, .. }
        | Sent::Later { reason, .. }
        | Sent::Parked { reason, .. }
        | Sent::Away { reason, .. } => span.fail(reason.as_str()),
    }
    span.end();
}
