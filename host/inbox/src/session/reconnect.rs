//! Backoff while a tenant's database is unavailable: one connection at a time tries it, instead of
//! every partition and worker of the tenant.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use oncebox_model::error::InboxError;
use tokio::time::Instant;

/// Availability of a tenant's database, as its sessions on this host know it.
#[derive(Debug)]
pub(crate) struct ConnectBackoff {
    /// The tenant's role, for log and metrics.
    login: String,
    since: Mutex<Option<Since>>,
    losses: Mutex<VecDeque<Loss>>,
}

/// A session that was lost.
#[derive(Debug)]
struct Loss {
    at: Instant,
    /// Message that ran on it; none where it was idle.
    who: Option<String>,
}

#[derive(Debug)]
struct Since {
    /// Time of the next attempt to connect; none while an attempt is under way.
    next: Option<Instant>,
    /// Pause after that attempt, if it fails.
    pause: Duration,
}

/// The one attempt to connect to a database that is unavailable. At most one exists at a time.
struct Try<'a>(&'a ConnectBackoff);

/// First pause between attempts; each later one is twice as long.
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// Most lost sessions that are remembered.
const LOSSES_MAX: usize = 64;
/// Longest pause between attempts: a database that is back is noticed within it.
const PAUSE_MAX: Duration = Duration::from_secs(5);

impl ConnectBackoff {
    pub(crate) fn new(login: &str) -> Self {
        Self { login: login.to_owned(), since: Mutex::default(), losses: Mutex::default() }
    }

    /// Returns whether the database is known to be unavailable.
    pub(crate) fn is_known(&self) -> bool {
        self.lock().is_some()
    }

    /// Records that a session was lost, with the message that ran on it.
    pub(crate) fn lost(&self, who: Option<&str>) {
        let mut losses = self.losses.lock().expect("no panic while held");
        if losses.len() == LOSSES_MAX {
            losses.pop_front();
        }
        losses.push_back(Loss { at: Instant::now(), who: who.map(str::to_owned) });
    }

    /// Returns whether a session was lost since then that was idle, or ran another message than
    /// `who`.
    pub(crate) fn has_lost_others(&self, who: &str, since: Instant) -> bool {
        let losses = self.losses.lock().expect("no panic while held");
        losses.iter().any(|loss| loss.at >= since && loss.who.as_deref() != Some(who))
    }

    /// Opens a connection, unless the database is unavailable and its next attempt is not due yet.
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

    /// Permits an attempt to connect. While the database is unavailable, permits one attempt at a
    /// time.
    fn attempt(&self) -> Result<Option<Try<'_>>, InboxError> {
        let mut since = self.lock();
        let Some(away) = since.as_mut() else { return Ok(None) };
        let wait =
            away.next.map_or(PAUSE_MIN, |next| next.saturating_duration_since(Instant::now()));
        if !wait.is_zero() {
            return Err(InboxError::DatabaseUnavailable { retry_after: wait.min(PAUSE_MIN * 2) });
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

    /// Records that an attempt failed, and sets the time of the next one. A connection that was
    /// under way when the first one failed reports the outage that is already known.
    fn is_away(&self, attempt: Option<Try<'_>>) {
        // Forgotten, not dropped: its drop takes the lock that is taken below.
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
    /// Lets the next attempt begin at once: this one was given up before there was an answer.
    fn drop(&mut self) {
        if let Some(away) = &mut *self.0.lock() {
            away.next = Some(Instant::now());
        }
    }
}
