//! Fail points, and sabotage for the test suite.
//!
//! A fail point kills the process at a step of the protocol. Code arms it with [`arm`]: the worker
//! processes of `oncebox verify` do so, a host never. While no point is armed, passing one costs
//! one relaxed load.
//!
//! With the feature `test-hooks` the environment arms points as well.
//! `ONCEBOX_FAILPOINT=inbox:claim:after` kills the process the first time it passes the point,
//! `inbox:claim:after@7` the seventh time. Sabotage exists with that feature only:
//! `ONCEBOX_SABOTAGE=ack_before_commit` switches a named defect on, so that the suite can show that
//! it would notice the defect. `ONCEBOX_CLOCK_AHEAD_S` puts the host's clock ahead by that many
//! seconds.

// Every defect by name.
mod defects;
// Every fail point by name.
mod points;

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU8, Ordering},
};

pub use defects::Defect;
use points::is_known;
pub use points::{
    ACTION_POINTS, ARCHIVE_ERASE_POINTS, CHANGE_POINTS, COPY_POINTS, ERASE_POINTS, INGRESS_POINTS,
    JOB_POINTS, MOVE_POINTS, OUTGOING_POINTS, POINTS, REFERENCE_POINTS, REMOVAL_POINTS,
    REPLAY_POINTS, RETENTION_POINTS, SCHEMA_POINTS, TENANT_DATABASE_POINTS,
};

/// State in which no point is armed, and only [`arm`] can arm one.
const IDLE: u8 = 0;
/// State in which a point is armed.
const ARMED: u8 = 1;
/// State in which the environment has not been read yet.
#[cfg(feature = "test-hooks")]
const UNREAD: u8 = 2;

#[cfg(not(feature = "test-hooks"))]
const AT_START: u8 = IDLE;
#[cfg(feature = "test-hooks")]
const AT_START: u8 = UNREAD;

static STATE: AtomicU8 = AtomicU8::new(AT_START);
static POINT: Mutex<Option<Armed>> = Mutex::new(None);

/// The armed point, and how often the process passes it alive.
struct Armed {
    name: String,
    passes_left: u64,
}

/// Marks a step of the protocol; the process dies here when the point is armed.
#[inline(always)]
pub fn point(name: &str) {
    if STATE.load(Ordering::Relaxed) != IDLE {
        pass(name);
    }
}

/// Returns whether a point is armed. The host then sends at once what it would send together with a
/// later statement.
#[inline(always)]
pub fn is_armed(name: &str) -> bool {
    STATE.load(Ordering::Relaxed) != IDLE && is_the_armed(name)
}

#[cold]
fn is_the_armed(name: &str) -> bool {
    #[cfg(feature = "test-hooks")]
    test_hooks::read_environment();
    armed().as_ref().is_some_and(|armed| armed.name == name)
}

/// Arms a point: the process dies when it passes the point for the nth time, counted from 1.
/// Replaces the point that was armed before. Returns false where the point is unknown or the count
/// is zero; then nothing changes.
pub fn arm(name: &str, nth: u64) -> bool {
    if nth == 0 || !is_known(name) {
        return false;
    }
    *armed() = Some(Armed { name: name.to_owned(), passes_left: nth - 1 });
    STATE.store(ARMED, Ordering::SeqCst);
    true
}

/// Disarms the armed point, so that the process lives.
pub fn disarm() {
    STATE.store(IDLE, Ordering::SeqCst);
    *armed() = None;
}

fn armed() -> std::sync::MutexGuard<'static, Option<Armed>> {
    POINT.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cold]
fn pass(name: &str) {
    #[cfg(feature = "test-hooks")]
    test_hooks::read_environment();
    debug_assert!(is_known(name), "fail point `{name}` is not listed");
    let mut armed = armed();
    let Some(armed) = armed.as_mut().filter(|armed| armed.name == name) else { return };
    if armed.passes_left > 0 {
        armed.passes_left -= 1;
        return;
    }
    eprintln!("fail point `{name}`: killing this process");
    kill_self();
}

/// Kills this process with SIGKILL, as the kernel or an operator would: no destructor, no flush.
fn kill_self() -> ! {
    // SAFETY: plain system call, with a signal that no handler can be installed for.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    std::process::abort()
}

/// Aborts the process, with the feature `test-hooks`, when a consumer has subscribed to the topic
/// that `ONCEBOX_CRASH_TOPIC` names. That topic stands for one that crashes a native library and
/// that no bound excludes.
pub fn subscribed(topics: &[String]) {
    #[cfg(feature = "test-hooks")]
    if std::env::var("ONCEBOX_CRASH_TOPIC").is_ok_and(|topic| topics.contains(&topic)) {
        eprintln!("a topic that a native library cannot bear: this process aborts");
        std::process::abort();
    }
    #[cfg(not(feature = "test-hooks"))]
    let _ = topics;
}

/// Returns whether a defect is switched on.
#[cfg(not(feature = "test-hooks"))]
#[inline(always)]
pub const fn sabotage(_defect: Defect) -> bool {
    false
}

#[cfg(feature = "test-hooks")]
pub use test_hooks::{host_clock, sabotage, switch_sabotage};

/// Returns the time by the clock of this host, which decides nothing.
#[cfg(not(feature = "test-hooks"))]
#[inline(always)]
pub fn host_clock() -> chrono::DateTime<chrono::Utc> {
    chrono::Utc::now()
}

#[cfg(feature = "test-hooks")]
mod test_hooks {
    use std::sync::{LazyLock, Once, PoisonError, RwLock, atomic::Ordering};

    use super::{Defect, IDLE, STATE, UNREAD, arm};

    /// Arms the point that `ONCEBOX_FAILPOINT` names, once.
    pub(super) fn read_environment() {
        static READ: Once = Once::new();
        READ.call_once(|| {
            let Ok(text) = std::env::var("ONCEBOX_FAILPOINT") else {
                let _ = STATE.compare_exchange(UNREAD, IDLE, Ordering::SeqCst, Ordering::SeqCst); // armed by code already
                return;
            };
            let (name, nth) = text.split_once('@').unwrap_or((&text, "1"));
            let nth = nth.parse().expect("ONCEBOX_FAILPOINT is `<name>@<count>`");
            assert!(arm(name, nth), "ONCEBOX_FAILPOINT: there is no fail point `{name}`");
        });
    }

    static SABOTAGE: LazyLock<RwLock<Option<Defect>>> = LazyLock::new(|| {
        let name = std::env::var("ONCEBOX_SABOTAGE").ok();
        RwLock::new(name.and_then(|name| Defect::named(&name)))
    });

    /// Returns whether a defect is switched on.
    pub fn sabotage(defect: Defect) -> bool {
        *SABOTAGE.read().unwrap_or_else(PoisonError::into_inner) == Some(defect)
    }

    static CLOCK_AHEAD_S: LazyLock<i64> = LazyLock::new(|| {
        std::env::var("ONCEBOX_CLOCK_AHEAD_S")
            .map_or(0, |text| text.parse().expect("ONCEBOX_CLOCK_AHEAD_S is a number of seconds"))
    });

    /// Returns the time by the clock of this host, put ahead by `ONCEBOX_CLOCK_AHEAD_S` seconds.
    pub fn host_clock() -> chrono::DateTime<chrono::Utc> {
        chrono::Utc::now() + chrono::TimeDelta::seconds(*CLOCK_AHEAD_S)
    }

    /// Switches to another defect, or to none: for tests that run the inbox in their own process.
    pub fn switch_sabotage(defect: Option<Defect>) {
        *SABOTAGE.write().unwrap_or_else(PoisonError::into_inner) = defect;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_points_that_exist_can_be_armed_and_others_are_passed_alive() {
        assert!(!arm("inbox:claim:aftr", 1) && !arm("inbox:claim:after", 0));
        assert!(arm("inbox:claim:after", 3));
        point("inbox:claim:before");
        point("inbox:claim:after");
        point("inbox:claim:after");
        assert_eq!(armed().as_ref().map(|armed| armed.passes_left), Some(0));
        disarm();
        point("inbox:claim:after"); // and this test goes on
    }
}
