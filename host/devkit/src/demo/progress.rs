//! The progress of the demo, and the time of its next kill.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressStyle};

use super::{
    TENANTS,
    input::{Input, PlannedDelivery},
    tenant_of,
};
use crate::terminal;

/// Counts by tenant, and a bar.
pub(super) struct Progress {
    /// Number of rows that the inbox holds in the end.
    pub(super) distinct: u64,
    delivered: [u64; TENANTS.len()],
    events: [u64; TENANTS.len()],
    malformed: [u64; TENANTS.len()],
    kills: usize,
    kills_wanted: usize,
    bar: ProgressBar,
}

impl Progress {
    pub(super) fn new(plan: &[PlannedDelivery], input: &Input, kills_wanted: usize) -> Self {
        let (mut delivered, mut malformed) = ([0; TENANTS.len()], [0; TENANTS.len()]);
        for delivery in plan {
            let tenant = tenant_of(input, *delivery);
            delivered[tenant] += 1;
            malformed[tenant] += u64::from(matches!(delivery, PlannedDelivery::Malformed(..)));
        }
        let mut events = [0; TENANTS.len()];
        input.events().for_each(|event| events[event.tenant] += 1);
        let distinct = events.iter().sum::<u64>() + malformed.iter().sum::<u64>();
        Self { distinct, delivered, events, malformed, kills: 0, kills_wanted, bar: bar(distinct) }
    }

    pub(super) fn delivered(&self, tenant: usize) -> u64 {
        self.delivered[tenant]
    }

    pub(super) fn events(&self, tenant: usize) -> u64 {
        self.events[tenant]
    }

    pub(super) fn malformed(&self, tenant: usize) -> u64 {
        self.malformed[tenant]
    }

    pub(super) fn kills(&self) -> usize {
        self.kills
    }

    pub(super) fn kills_wanted(&self) -> usize {
        self.kills_wanted
    }

    /// Returns whether a kill is left.
    pub(super) fn has_kills_left(&self) -> bool {
        self.kills < self.kills_wanted
    }

    /// Returns whether the next kill is due. Kills are spread evenly over the work.
    pub(super) fn kill_is_due(&self, settled: u64) -> bool {
        self.has_kills_left()
            && settled >= self.distinct * (self.kills as u64 + 1) / (self.kills_wanted as u64 + 1)
    }

    pub(super) fn killed(&mut self) {
        self.kills += 1;
        self.say(&format!(
            "killed the host with a transaction open ({} of {}), started it again",
            self.kills, self.kills_wanted
        ));
    }

    pub(super) fn show(&self, settled: u64, published: u64, sent: u64) {
        self.bar.set_position(settled);
        terminal::tell(
            &self.bar,
            &format!(
                "{published} of {} delivered, {sent} sent",
                self.delivered.iter().sum::<u64>()
            ),
        );
    }

    pub(super) fn finish(&self) {
        self.bar.finish();
        self.say("everything is settled and sent; stopping the host and counting");
    }

    fn say(&self, text: &str) {
        if self.bar.is_hidden() {
            eprintln!("{:>6} of {} settled: {text}", self.bar.position(), self.distinct);
        } else {
            self.bar.println(terminal::cell(text));
        }
    }
}

fn bar(distinct: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        let bar = ProgressBar::hidden();
        bar.set_length(distinct);
        return bar;
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} settled, {msg} [{elapsed}]")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(distinct).with_style(style)
}
