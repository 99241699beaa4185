//! A tenant's database that is away: one connection at a time tries it, instead of every partition
//! and worker of the tenant.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use oncebox_model::{error::InboxError, hooks};
use tokio::time::Instant;

/// Whether a tenant's database answers, as its sessions on this host know.
#[derive(Debug)]
pub(crate) struct Away {
    /// The tenant's role, for log and metrics.
    login: String,
    since: Mutex<Option<Since>>,
    losses: Mutex<VecDeque<Loss>>,
}

/// A session that was lost.
#[derive(Debug)]
struct Loss {
    at: Instant,
    /// Who ran on it; none where nobody did.
    who: Option<String>,
}

#[derive(Debug)]
struct Since {
    /// When the next connection may try; none while one does.
    next: Option<Instant>,
    /// How long the one after it waits.
    pause: Duration,
}

/// The one connection that tries a database that is away.
struct Try<'a>(&'a Away);

/// The first pause; it doubles.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// Sessions that are remembered as lost.
const LOSSES_MAX: usize = 64;
/// The longest one: a database that is back is noticed within it.
const PAUSE_MAX: Duration = Duration::from_secs(5);

impl Away {
    pub(crate) fn new(login: &str) -> Self {
        Self { login: login.to_owned(), since: Mutex::default(), losses: Mutex::default() }
    }

    /// Whether the database is known not to answer.
    pub(crate) fn is_known(&self) -> bool {
        self.lock().is_some()
    }

    /// Remember that a session was lost, and who ran on it.
    pub(crate) fn lost(&self, who: Option<&str>) {
        let mut losses = self.losses.lock().expect("no panic while held");
        if losses.len() == LOSSES_MAX {
            losses.pop_front();
        }
        losses.push_back(Loss { at: Instant::now(), who: who.map(str::to_owned) });
    }

    /// Whether a session on which somebody else ran, or nobody, was lost since then.
    pub(crate) fn has_lost_others(&self, who: &str, since: Instant) -> bool {
        let losses = self.losses.lock().expect("no panic while held");
        losses.iter().any(|loss| loss.at >= since && loss.who.as_deref() != Some(who))
    }

    /// Open a connection, unless the database is known to be away and it is not time to try it
    /// again.
    pub(crate) async fn connect<T>(
        &self,
        connecting: impl Future<Output = Result<T, InboxError>>,
    ) -> Result<T, InboxError> {
        let attempt = self.attempt()?;
        let connected = connecting.await;
        match (&connected, attempt) {
            (Ok(_), attempt) => self.is_back(attempt),
            (Err(_), attempt) => self.is_away(attempt),
        }
        connected
    }

    /// Leave to connect; as the only one where the database is away.
    fn attempt(&self) -> Result<Option<Try<'_>>, InboxError> {
        let mut since = self.lock();
        let Some(away) = since.as_mut().filter(|_| !hooks::sabotage("everyone_tries")) else {
            return Ok(None);
        };
        let wait =
            away.next.map_or(PAUSE_MIN, |next| next.saturating_duration_since(Instant::now()));
        if !wait.is_zero() {
            return Err(InboxError::DatabaseAway { again_in: wait.min(PAUSE_MIN * 2) });
        }
        away.next = None;
        Ok(Some(Try(self)))
    }

    fn is_back(&self, attempt: Option<Try<'_>>) {
        if let Some(attempt) = attempt {
            std::mem::forget(attempt);
        }
        if self.lock().take().is_some() {
            self.turned(false);
        }
    }

    /// Connections that were on their way when the first one failed say the same as that one.
    fn is_away(&self, attempt: Option<Try<'_>>) {
        // It locks what is locked here when it is dropped.
        let has_tried = attempt.map(std::mem::forget).is_some();
        let mut since = self.lock();
        match &mut *since {
            Some(away) if has_tried => {
                away.next = Some(Instant::now() + away.pause);
                away.pause = (away.pause * 2).min(PAUSE_MAX);
            }
            Some(_) => {}
            None => {
                *since =
                    Some(Since { next: Some(Instant::now() + PAUSE_MIN), pause: PAUSE_MIN * 2 });
                self.turned(true);
            }
        }
    }

    fn turned(&self, is_away: bool) {
        metrics::gauge!("oncebox_database_away", "login" => self.login.clone())
            .set(f64::from(u8::from(is_away)));
        if is_away {
            tracing::warn!(
                login = self.login,
                "a tenant's database is away; one connection at a time tries it"
            );
        } else {
            tracing::info!(login = self.login, "a tenant's database answers again");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Since>> {
        self.since.lock().expect("no panic while held")
    }
}

impl Drop for Try<'_> {
    /// Whoever tried gave up before there was an answer; the next one may.
    fn drop(&mut self) {
        if let Some(away) = &mut *self.0.lock() {
            away.next = Some(Instant::now());
        }
    }
}
