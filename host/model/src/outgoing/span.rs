//! Spans of outgoing messages.

use opentelemetry::trace::SpanKind;

use super::Destination;
use crate::trace::NewSpan;

/// Creates the span of an operation on an outgoing message: its emit, or an attempt to send it. The
/// names are those of the tenant and of the consumer that emitted it.
pub fn new_outgoing_span(
    operation: &'static str,
    kind: SpanKind,
    destination: &Destination,
    id: &str,
    (tenant, consumer): (&str, &str),
) -> NewSpan {
    let (system, name) = match destination {
        Destination::Kafka { topic } => ("kafka", topic),
        Destination::Inbox { consumer } => ("oncebox", consumer),
        Destination::Http { endpoint } => ("http", endpoint),
    };
    // Handlers choose names, and there may be any number of them.
    NewSpan::new(format!("{operation} {}", destination.kind()), kind)
        .with("messaging.system", system)
        .with("messaging.operation.name", operation)
        .with("messaging.operation.type", operation)
        .with("messaging.destination.name", name.clone())
        .with("messaging.message.id", id.to_owned())
        .with("oncebox.tenant", tenant.to_owned())
        .with("oncebox.consumer", consumer.to_owned())
}
