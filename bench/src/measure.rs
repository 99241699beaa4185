//! CPU time of processes over time, read from `/proc`.

use std::{
    collections::BTreeMap,
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Result, anyhow};
use libc::pid_t;
use serde::{Deserialize, Serialize};

const INTERVAL: Duration = Duration::from_millis(25);

/// CPU time of the three parties, microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    /// The measured process.
    pub consumer: f64,
    /// PostgreSQL, all of its processes.
    pub database: f64,
    /// The broker.
    pub broker: f64,
}

impl Cpu {
    /// Combines the times of each party.
    pub fn map2(self, other: Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            consumer: combine(self.consumer, other.consumer),
            database: combine(self.database, other.database),
            broker: combine(self.broker, other.broker),
        }
    }

    /// Returns the times multiplied by a factor.
    pub fn scaled(self, by: f64) -> Self {
        self.map2(self, |part, _| part * by)
    }
}

/// The sampled processes.
#[derive(Debug, Clone, Copy)]
pub struct Parties {
    /// The measured process.
    pub consumer: pid_t,
    /// The postmaster.
    pub database: pid_t,
    /// The broker.
    pub broker: pid_t,
}

/// A thread that samples the CPU time of the parties at intervals.
pub struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Samples>,
}

/// Total CPU time of the parties at points in time, which are microseconds since the Unix epoch.
pub struct Samples(Vec<(f64, Cpu)>);

impl Sampler {
    /// Starts the thread.
    pub fn start(parties: Parties) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut samples = Vec::new();
            let mut last = Cpu::default();
            while !stopped.load(Ordering::Relaxed) {
                // The time of a process that has just ended appears late, in its parent's: the
                // maximum keeps the totals from falling.
                last = look(parties).map2(last, f64::max);
                samples.push((now_us(), last));
                std::thread::sleep(INTERVAL);
            }
            Samples(samples)
        });
        Self { stop, thread }
    }

    /// Stops the thread and returns its samples.
    pub fn finish(self) -> Result<Samples> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the thread that reads `/proc` panicked"))
    }
}

impl Samples {
    /// Returns the CPU time between two points in time.
    pub fn between(&self, from: f64, to: f64) -> Cpu {
        self.at(to).map2(self.at(from), |later, earlier| later - earlier)
    }

    /// Returns the total CPU time at a point in time, interpolated between the two samples around
    /// it.
    fn at(&self, time: f64) -> Cpu {
        let after = self.0.partition_point(|(at, _)| *at < time);
        match (after.checked_sub(1).and_then(|before| self.0.get(before)), self.0.get(after)) {
            (Some((before_at, before)), Some((after_at, after))) => {
                let share = (time - before_at) / (after_at - before_at);
                before.map2(*after, |before, after| before + share * (after - before))
            }
            (Some((_, only)), None) | (None, Some((_, only))) => *only,
            (None, None) => Cpu::default(),
        }
    }
}

/// Returns the time, microseconds since the Unix epoch.
pub fn now_us() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64() * 1e6)
}

fn look(parties: Parties) -> Cpu {
    let of = |pid| times(pid).map_or(0.0, |times| times.own);
    let postmaster = times(parties.database).map_or(0.0, |times| times.own + times.reaped);
    let backends: f64 = children(parties.database).into_iter().map(of).sum();
    Cpu {
        consumer: of(parties.consumer),
        database: postmaster + backends,
        broker: of(parties.broker),
    }
}

/// Returns the CPU time of a process by kind of thread, microseconds. Threads whose names differ
/// only in a number at the end are of one kind. Leaves out threads that have ended.
pub fn by_thread(pid: pid_t) -> BTreeMap<String, f64> {
    let mut kinds = BTreeMap::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let name = fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        let kind = name.trim().trim_end_matches(|last: char| last.is_ascii_digit() || last == '-');
        let cpu = fs::read_to_string(thread.path().join("stat")).ok().and_then(|stat| parse(&stat));
        *kinds.entry(kind.to_owned()).or_insert(0.0) += cpu.map_or(0.0, |times| times.own);
    }
    kinds
}

/// Returns the memory of a process that is resident, bytes; 0 where it cannot be read.
pub fn resident_bytes(pid: pid_t) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    kibibytes(&status, "VmRSS:") * 1_024.0
}

/// Returns the memory of a process and its children, bytes. Of memory that processes share, each
/// has its part. Processes that may not be read are left out.
pub fn shared_out_bytes(parent: pid_t) -> f64 {
    let of = |pid: pid_t| {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        kibibytes(&rollup, "Pss:")
    };
    children(parent).into_iter().chain([parent]).map(of).sum::<f64>() * 1_024.0
}

/// Returns the value of a line such as `VmRSS:     123 kB`; 0 where there is none.
fn kibibytes(text: &str, name: &str) -> f64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    let number = value.and_then(|value| value.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0.0)
}

fn children(parent: pid_t) -> Vec<pid_t> {
    let list =
        fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Time of the machine's processors since it started, ticks.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Ticks in which the machine had work.
    wanted: f64,
    /// Part of `wanted` that the hypervisor gave to other machines.
    stolen: f64,
}

impl Machine {
    /// Reads `/proc/stat`; zeros where it cannot be read.
    pub fn now() -> Self {
        Self::parse(&fs::read_to_string("/proc/stat").unwrap_or_default())
    }

    /// Parses the first line: user, nice, system, idle, iowait, irq, softirq, steal, and guest
    /// times, which user and nice contain already.
    fn parse(stat: &str) -> Self {
        let ticks: Vec<f64> = stat
            .lines()
            .next()
            .unwrap_or_default()
            .split_whitespace()
            .skip(1)
            .flat_map(str::parse)
            .collect();
        let at = |field: usize| ticks.get(field).copied().unwrap_or_default();
        let stolen = at(7);
        Self { wanted: at(0) + at(1) + at(2) + at(5) + at(6) + stolen, stolen }
    }

    /// Returns the share of the time wanted since `before` that went to other machines.
    pub fn stolen_since(self, before: Self) -> f64 {
        (self.stolen - before.stolen) / (self.wanted - before.wanted).max(1.0)
    }
}

struct ProcessTimes {
    /// User and system time of all threads, microseconds.
    own: f64,
    /// User and system time of children that have ended, microseconds.
    reaped: f64,
}

/// Reads `/proc/<pid>/stat`; `None` when the process is gone.
fn times(pid: pid_t) -> Option<ProcessTimes> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse(stat: &str) -> Option<ProcessTimes> {
    // The fields after the name: the state is field 3 of proc(5), and utime, stime, cutime and
    // cstime are 14 to 17.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11).map(str::parse::<f64>);
    let mut pair = || Some(fields.next()?.ok()? + fields.next()?.ok()?);
    let tick_us = 1e6 / ticks_per_second();
    Some(ProcessTimes { own: pair()? * tick_us, reaped: pair()? * tick_us })
}

fn ticks_per_second() -> f64 {
    // SAFETY: plain library call with a constant argument.
    (unsafe { libc::sysconf(libc::_SC_CLK_TCK) }) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_other_machines_took_is_a_share_of_what_was_wanted() {
        let before = Machine::parse("cpu  100 0 50 1000 5 0 10 40 0 0\ncpu0 1 2 3\n");
        let after = Machine::parse("cpu  160 0 70 5000 9 0 10 60 0 0\n");
        assert_eq!(after.stolen_since(before), 0.2);
        assert_eq!(Machine::parse("").stolen_since(Machine::parse("")), 0.0);
    }

    #[test]
    fn time_between_samples_is_interpolated() {
        let cpu = |consumer| Cpu { consumer, ..Cpu::default() };
        let samples = Samples(vec![(0.0, cpu(0.0)), (100.0, cpu(50.0)), (200.0, cpu(250.0))]);
        assert_eq!(samples.between(50.0, 150.0).consumer, 125.0);
        assert_eq!(samples.between(-10.0, 900.0).consumer, 250.0);
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let rollup = "5583-7ffd ---p 00000000 00:00 0 [rollup]\nRss: 884 kB\nPss:       385 kB\n";
        assert_eq!(kibibytes(rollup, "Pss:"), 385.0);
        assert_eq!(kibibytes(rollup, "Swap:"), 0.0);
        let pid = std::process::id() as pid_t;
        assert!(resident_bytes(pid) > 1e6 && shared_out_bytes(pid) > 1e5);
    }

    #[test]
    fn work_of_this_process_is_seen() {
        let pid = std::process::id() as pid_t;
        let before = times(pid).expect("this process has a row in /proc").own;
        let begun = std::time::Instant::now();
        while times(pid).is_some_and(|times| times.own <= before) {
            assert!(begun.elapsed() < Duration::from_secs(10), "a busy loop burns no CPU time");
        }
    }
}
