//! `emit`: messages that a guest sends, and withdraws, with the transaction of its message.
//!
//! An emit goes through three steps. The host checks the bounds of its values. It finds the message
//! that causes it and checks the caps of that message. It derives the id, and keeps the outgoing
//! message until the run has ended well; the inbox then writes it with the completion.

mod bounds;
mod log;
mod stop;

use oncebox_model::outgoing::{Destination, OutboxMode, OutgoingMessage, outgoing_id};

pub(crate) use log::EmitLog;

use self::{bounds::Bounded, stop::EmitStop};
use crate::{
    bindings::emitter::oncebox::handler0_2_0::emit::{self, Error, Options, Outgoing},
    host::sql::{ConnectionLost, SqlStop},
    state::StoreState,
};

impl emit::Host for StoreState {
    async fn emit(
        &mut self,
        destination: String,
        message: Outgoing,
        options: Options,
    ) -> wasmtime::Result<Result<String, Error>> {
        let moment = self.session.next_moment();
        let result = self.keep(&destination, message, options, moment);
        self.answer(result)
    }

    async fn cancel(&mut self, token: String) -> wasmtime::Result<Result<bool, Error>> {
        let moment = self.session.next_moment();
        let result = self.withdraw(&token, moment).await;
        self.answer(result)
    }
}

impl StoreState {
    /// Checks an emit and keeps its message. Returns the id of the message.
    fn keep(
        &mut self,
        destination: &str,
        message: Outgoing,
        options: Options,
        moment: u64,
    ) -> Result<String, EmitStop> {
        self.check_grant()?;
        self.check_withheld()?;
        let Bounded { destination, due, bytes } =
            bounds::check(destination, &message, &options).map_err(EmitStop::refused)?;
        self.check_allowed(&destination)?;
        let cause = self.emits.cause(options.cause.as_deref()).map_err(EmitStop::refused)?;
        let ordinal = self.emits.admit(cause, bytes, &self.limits).map_err(EmitStop::limit)?;
        let cause_id = self.emits.cause_id(cause);
        let id = outgoing_id(&self.facts.tenant, &self.facts.consumer, cause_id, ordinal);
        let kept = OutgoingMessage {
            ordinal,
            id: id.clone(),
            destination,
            event_type: message.event_type,
            content_type: message.content_type,
            key: options.key,
            headers: message.headers,
            payload: message.payload,
            due,
            cancel_token: options.cancel_token,
        };
        self.emits.keep(cause, kept, moment);
        Ok(id)
    }

    /// Withdraws what was emitted with a token: by earlier messages, in the database, and by this
    /// run, which has written nothing yet.
    async fn withdraw(&mut self, token: &str, moment: u64) -> Result<bool, EmitStop> {
        self.check_grant()?;
        bounds::check_token(token).map_err(EmitStop::refused)?;
        self.session.admit_call(&self.limits).map_err(EmitStop::of_sql)?;
        if self.outbox.mode.is_replay() {
            // What the first run emitted is sent, or is to be sent; a replay changes neither.
            self.emits.cancelled(token, false, moment);
            return Ok(false);
        }
        let tx = match self.tx() {
            Ok(tx) => tx,
            Err(SqlStop::Guest(error)) => return Err(EmitStop::of_sql(error)),
            Err(SqlStop::Host(lost)) => return Err(EmitStop::Host(lost)),
        };
        self.wait_for_enqueued().await;
        if tx.is_broken().await || tx.has_earlier_failed().await {
            return Err(EmitStop::Host(ConnectionLost));
        }
        if let Some(error) = tx.error().await {
            return Err(EmitStop::of_statement(&error));
        }
        let cancelled = self.outbox.canceller.cancel(&tx, token).await;
        let is_lost = cancelled.is_err() && tx.is_broken().await;
        let in_database = match cancelled {
            Ok(found) => found,
            Err(_) if is_lost => return Err(EmitStop::Host(ConnectionLost)),
            Err(error) => return Err(EmitStop::of_database(&error)),
        };
        let in_run = self.emits.cancel(token, moment);
        self.emits.cancelled(token, in_database || in_run, moment);
        Ok(in_database || in_run)
    }

    /// Refuses what a deployment without the grant may not do. Such a component is not even loaded,
    /// except in a trial of its start.
    fn check_grant(&self) -> Result<(), EmitStop> {
        match self.may_emit {
            true => Ok(()),
            false => Err(EmitStop::refused(
                "messages are sent by the handler only, and its deployment needs the grant `emit`"
                    .to_owned(),
            )),
        }
    }

    /// Refuses an emit of a replayed run, where the policy withholds it.
    fn check_withheld(&self) -> Result<(), EmitStop> {
        match self.outbox.mode {
            OutboxMode::Open | OutboxMode::Suppressed => Ok(()),
            OutboxMode::Withheld => Err(EmitStop::refused(
                "this run is a replay, and the consumer's policy says `replay.emit = \
                    \"withheld\"`; do not emit where `delivery` is `replay`"
                    .to_owned(),
            )),
        }
    }

    fn check_allowed(&self, destination: &Destination) -> Result<(), EmitStop> {
        match self.outbox.allows(destination) {
            true => Ok(()),
            false => Err(EmitStop::refused(format!(
                "the destination `{destination}` is not allowed for this tenant; an operator \
                    allows it with `oncebox tenant limits --destinations-allowed`"
            ))),
        }
    }

    /// Returns the answer for the guest, and records what fails the message even when the guest
    /// answers ok. A lost connection ends the guest instead.
    fn answer<T>(&mut self, result: Result<T, EmitStop>) -> wasmtime::Result<Result<T, Error>> {
        match result {
            Ok(value) => Ok(Ok(value)),
            Err(EmitStop::Host(lost)) => Err(lost.into()),
            Err(EmitStop::Guest(error)) => {
                let (kind, text) = stop::fault(&error);
                self.session.fail(kind, text);
                Ok(Err(error))
            }
        }
    }
}
