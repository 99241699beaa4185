//! The part about who sees what is stuck: the consumer runs, its hosts are read, bounds are set.

use oncebox_model::status::{ConsumerState, TenantState};

use super::{Counted, DesiredRun, LiveHost, ReadinessFact, ReadinessInput, listed};

/// Longest time since a request for a host's metrics for which they count as read, seconds.
const SCRAPED_WITHIN_S: i64 = 300;

impl LiveHost {
    /// Returns whether the host runs the consumer as it is to run now.
    fn runs(&self, revision: i64) -> bool {
        matches!(self.status.as_str(), "running" | "idle") && self.status_revision >= revision
    }

    fn is_scraped(&self) -> bool {
        self.scraped_ago_s.is_some_and(|seconds| seconds <= SCRAPED_WITHIN_S)
    }
}

impl ReadinessInput<'_> {
    pub(super) fn observability(&self) -> Vec<ReadinessFact> {
        vec![self.state(), self.hosts(), self.scrapes(), self.bounds()]
    }

    /// Answers whether the consumer is to run.
    fn state(&self) -> ReadinessFact {
        const NAME: &str = "state";
        const RESUME: &str = "`oncebox consumer resume`";
        let DesiredRun { state, tenant_state, is_quarantined, is_sought, .. } = self.facts.desired;
        let (found, advice) = match (state, tenant_state) {
            (_, TenantState::Suspended) => ("its tenant is suspended", "`oncebox tenant resume`"),
            (_, TenantState::Deleting) => {
                ("its tenant is being deleted", "it cannot pass any more")
            }
            (ConsumerState::Paused, _) => ("it is paused", RESUME),
            (ConsumerState::Draining, _) => ("it is drained, and reads no records", RESUME),
            (ConsumerState::Deleting, _) => ("it is being deleted", "it cannot pass any more"),
            (ConsumerState::Running, TenantState::Active) if is_quarantined => {
                ("no host starts it, since its start ended one (quarantine)", RESUME)
            }
            (ConsumerState::Running, TenantState::Active) if is_sought => {
                ("its offsets are to be set first", "wait, or take `oncebox consumer seek` back")
            }
            (ConsumerState::Running, TenantState::Active) => {
                return ReadinessFact::met(NAME, "it is to run");
            }
        };
        ReadinessFact::not_met(NAME, found, advice)
    }

    /// Returns the hosts that run the consumer.
    fn running(&self) -> impl Iterator<Item = &LiveHost> {
        let revision = self.facts.desired.revision;
        self.facts.hosts.iter().filter(move |host| host.runs(revision))
    }

    fn hosts(&self) -> ReadinessFact {
        const NAME: &str = "hosts";
        const ADVICE: &str = "`oncebox consumer show` has the reason of each host";
        let hosts = &self.facts.hosts;
        if hosts.is_empty() {
            let advice = "start one: `oncebox serve`";
            return ReadinessFact::not_met(NAME, "no host is running", advice);
        }
        let failing = hosts.iter().filter(|host| host.status == "failing");
        let failing: Vec<_> = failing.map(|host| format!("`{}`", host.name)).collect();
        if !failing.is_empty() {
            let found = format!("it fails on {}", listed(&failing));
            return ReadinessFact::not_met(NAME, found, ADVICE);
        }
        match self.running().count() {
            0 => ReadinessFact::not_met(NAME, "no host runs it as it is now", ADVICE),
            1 => ReadinessFact::met(NAME, "1 host runs it"),
            count => ReadinessFact::met(NAME, format!("{count} hosts run it")),
        }
    }

    fn scrapes(&self) -> ReadinessFact {
        const NAME: &str = "metrics";
        const ADVICE: &str = "let Prometheus read `/metrics` of every host (`http.listen`), or set \
            `telemetry.metrics` there";
        if self.running().next().is_none() {
            return ReadinessFact::not_known(NAME, "no host runs it", ADVICE);
        }
        let unread = self.running().filter(|host| !host.is_scraped());
        let unread: Vec<_> = unread.map(|host| format!("`{}`", host.name)).collect();
        if unread.is_empty() {
            let found = format!(
                "the metrics of every host that runs it were read within {SCRAPED_WITHIN_S} s"
            );
            return ReadinessFact::met(NAME, found);
        }
        let found = format!(
            "nobody has read the metrics of {} within {SCRAPED_WITHIN_S} s",
            listed(&unread)
        );
        ReadinessFact::not_met(NAME, found, ADVICE)
    }

    fn bounds(&self) -> ReadinessFact {
        let alerts = &self.policy.alerts;
        let bounds = [alerts.pending_age_s, alerts.parked, alerts.dead_letters, alerts.collisions];
        match bounds.iter().filter(|bound| **bound > 0).count() {
            0 => ReadinessFact::not_met(
                "bounds",
                "nothing that is open in the inbox is an alert (`[alerts]`)",
                "set a bound of `[alerts]`",
            ),
            count => ReadinessFact::met(
                "bounds",
                format!(
                    "{} of 4 on what is open can raise an alert",
                    Counted(count as i64, "bound")
                ),
            ),
        }
    }
}
