//! The savepoint resource of `sql`. The host makes the names; a guest cannot use them in SQL.

use wasmtime::component::Resource;

use super::sql::{Error, SqlStop, control};
use crate::{bindings::oncebox::handler::sql, state::StoreState};

/// A guest's handle of a savepoint, which may have ended.
#[derive(Debug, Clone, Copy)]
pub struct Savepoint {
    id: u64,
}

impl sql::HostSavepoint for StoreState {
    async fn open(&mut self) -> wasmtime::Result<Result<Resource<Savepoint>, Error>> {
        let result = self.open_savepoint().await;
        match self.session.answer(result)? {
            Ok(savepoint) => Ok(Ok(self.table.push(savepoint)?)),
            Err(error) => Ok(Err(error)),
        }
    }

    async fn rollback(
        &mut self,
        handle: Resource<Savepoint>,
    ) -> wasmtime::Result<Result<(), Error>> {
        let savepoint = *self.table.get(&handle)?;
        let result = self.roll_back_to(savepoint).await;
        self.session.answer(result)
    }

    async fn release(
        &mut self,
        handle: Resource<Savepoint>,
    ) -> wasmtime::Result<Result<(), Error>> {
        let savepoint = *self.table.get(&handle)?;
        let result = self.release_savepoint(savepoint).await;
        self.session.answer(result)
    }

    async fn drop(&mut self, handle: Resource<Savepoint>) -> wasmtime::Result<()> {
        let savepoint = self.table.delete(handle)?;
        self.forget(savepoint.id).await
    }
}

impl StoreState {
    async fn open_savepoint(&mut self) -> Result<Savepoint, SqlStop> {
        self.session.admit_call(&self.limits).map_err(SqlStop::Guest)?;
        self.session.may_open(&self.limits).map_err(SqlStop::Guest)?;
        let id = self.session.next_savepoint();
        self.control(format!("SAVEPOINT guest_{id}")).await?;
        self.session.opened(id);
        Ok(Savepoint { id })
    }

    async fn control(&mut self, statement: String) -> Result<(), SqlStop> {
        let result = control(&self.tx()?, statement).await;
        self.note_answers().await;
        result
    }

    async fn roll_back_to(&mut self, Savepoint { id }: Savepoint) -> Result<(), SqlStop> {
        self.admit_savepoint(id)?;
        self.wait_for_enqueued().await; // an error among the answers is undone with its statement
        self.control(format!("ROLLBACK TO SAVEPOINT guest_{id}")).await?;
        // An aborted transaction opens no savepoint, so any error is younger than this one.
        self.tx()?.recovered().await;
        self.session.rolled_back(id);
        self.emits.undo_since(id);
        Ok(())
    }

    async fn release_savepoint(&mut self, Savepoint { id }: Savepoint) -> Result<(), SqlStop> {
        self.admit_savepoint(id)?;
        self.control(format!("RELEASE SAVEPOINT guest_{id}")).await?;
        self.session.released(id);
        Ok(())
    }

    fn admit_savepoint(&mut self, id: u64) -> Result<(), SqlStop> {
        self.session.admit_call(&self.limits).map_err(SqlStop::Guest)?;
        match self.session.is_open(id) {
            true => Ok(()),
            false => Err(SqlStop::Guest(Error::Refused(
                "this savepoint is gone: it was released, or an earlier one was released or rolled \
                    back".to_owned(),
            ))),
        }
    }

    /// Releases a savepoint whose handle the guest has dropped. An aborted transaction has nothing
    /// to release, and the attempt would be a second error.
    async fn forget(&mut self, id: u64) -> wasmtime::Result<()> {
        if !self.session.is_open(id) {
            return Ok(());
        }
        if self.tx_error().await.is_none()
            && let Err(SqlStop::Host(lost)) =
                self.control(format!("RELEASE SAVEPOINT guest_{id}")).await
        {
            return Err(lost.into());
        }
        self.session.released(id);
        Ok(())
    }

    /// Releases all savepoints that the guest left open, so that the next message of this
    /// transaction does not begin inside one.
    pub(crate) async fn forget_savepoints(&mut self) -> wasmtime::Result<()> {
        match self.session.outermost() {
            Some(id) => self.forget(id).await,
            None => Ok(()),
        }
    }
}
