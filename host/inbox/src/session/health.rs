//! Health of a tenant's database and of the sessions on it: outages, restarts, silence.

use std::time::{Duration, Instant};

use oncebox_model::hooks::{self, Defect};
use sqlx::{Connection, PgConnection};

use super::pool::{OTHERS_NOTICE, PROBE, Sessions, is_full};

impl Sessions {
    /// Returns whether a session, on which `who` ran from `began`, broke alone. It did if the
    /// server answers another connection, was not restarted since then, and no other session was
    /// lost. An outage is no message's fault.
    pub(crate) async fn broke_alone(&self, who: &str, began: Instant) -> bool {
        self.away.lost(Some(who));
        if hooks::sabotage(Defect::OutagesCharged) {
            return true;
        }
        !self.away.is_known() && self.answers(began).await && self.idle_ones_live().await && {
            // Other sessions may be about to notice.
            tokio::time::sleep(OTHERS_NOTICE).await;
            !self.away.has_lost_others(who, began.into())
        }
    }

    /// Returns whether the server answers a new connection of the host, and was already up at
    /// `began`. Sessions that were lost together ask once.
    async fn answers(&self, began: Instant) -> bool {
        const STARTED: &str =
            "SELECT extract(epoch FROM now() - pg_postmaster_start_time())::float8";
        let broke_at = Instant::now();
        let mut asked = self.asked.lock().await;
        if let Some((at, uptime)) = *asked
            && at >= broke_at
        {
            return uptime.is_some_and(|uptime| uptime > at.duration_since(began));
        }
        let asking = async {
            let mut connection =
                PgConnection::connect_with(&self.host_pool.connect_options()).await?;
            let uptime: f64 = sqlx::query_scalar(STARTED).fetch_one(&mut connection).await?;
            let _ = connection.close().await;
            Ok::<_, sqlx::Error>(uptime)
        };
        let uptime = match tokio::time::timeout(PROBE, asking).await {
            Ok(Ok(uptime)) => Some(Duration::try_from_secs_f64(uptime).unwrap_or_default()),
            // The server is up and has no room for the connection.
            Ok(Err(error)) if is_full(&error) => Some(Duration::MAX),
            _ => None,
        };
        let at = Instant::now();
        *asked = Some((at, uptime));
        uptime.is_some_and(|uptime| uptime > at.duration_since(began))
    }

    /// Returns whether the idle sessions of this tenant, and an idle one of the host, are still
    /// alive. Drops those that are not.
    async fn idle_ones_live(&self) -> bool {
        let idle = std::mem::take(&mut *self.idle.lock().expect("no panic while held"));
        let pinged = idle.into_iter().map(|mut session| async move {
            let answer = tokio::time::timeout(PROBE, session.connection.ping()).await;
            matches!(answer, Ok(Ok(()))).then_some(session)
        });
        let mut live = true;
        for session in futures::future::join_all(pinged).await {
            match session {
                Some(session) => self.keep(session),
                None => live = false,
            }
        }
        if live && let Some(mut connection) = self.host_pool.try_acquire() {
            live = matches!(tokio::time::timeout(PROBE, connection.ping()).await, Ok(Ok(())));
            if !live {
                drop(connection.detach());
            }
        }
        live
    }

    /// Returns for how long the database has left a question of this host unanswered; none while no
    /// question is open.
    pub fn silent_for(&self) -> Option<Duration> {
        self.silence.lasts()
    }

    /// Returns whether the database answers a login. The connection counts against no budget and is
    /// closed again.
    pub async fn is_in_reach(&self) -> bool {
        let access = self.access();
        let probes = self.budget.probes(&access.options);
        let asking = probes.ask(self.away.connect(async {
            let silent = |_| sqlx::Error::Io(std::io::ErrorKind::TimedOut.into());
            let connection =
                tokio::time::timeout(PROBE, self.log_in(&access)).await.map_err(silent)??;
            let _ = connection.close().await; // opening it was the question
            Ok(())
        }));
        let is_in_reach = asking.await.is_ok();
        if is_in_reach {
            // An earlier caller may have stopped waiting, and left its question open.
            self.silence.answered();
        }
        is_in_reach
    }
}
