//! Fail points and sabotage for the test suite. Without the feature `test-hooks` both
//! compile to nothing.
//!
//! A fail point is armed by the environment: `ONCEBOX_FAILPOINT=inbox:claim:after` kills
//! the process the first time it comes by, `inbox:claim:after@7` the seventh time. A
//! sabotage, `ONCEBOX_SABOTAGE=ack_before_commit`, switches a named defect on, so that
//! the suite can show that it would notice.

/// Every fail point, in the order in which a message passes them.
pub const POINTS: &[&str] = &[
    "inbox:claim:before",
    "inbox:claim:after",
    "inbox:handle:before",
    "inbox:handle:after",
    "inbox:fail:after",
    "inbox:complete:before",
    "inbox:complete:after",
    "inbox:commit:before",
    "inbox:commit:after",
    "inbox:park:before",
    "inbox:park:after",
    "retry:lease:before",
    "retry:lease:after",
    "retry:handle:after",
    "retry:commit:before",
    "retry:commit:after",
    "kafka:assign:after",
    "kafka:ack:before",
    "kafka:ack:after",
    "kafka:revoke:before",
    "kafka:commit:before",
    "kafka:commit:after",
];

/// A step of the protocol; the process may die here.
#[cfg(not(feature = "test-hooks"))]
#[inline(always)]
pub fn point(_name: &str) {}

/// Whether a named defect is switched on.
#[cfg(not(feature = "test-hooks"))]
#[inline(always)]
pub const fn sabotage(_name: &str) -> bool {
    false
}

#[cfg(feature = "test-hooks")]
pub use armed::{point, sabotage, switch_sabotage};

#[cfg(feature = "test-hooks")]
mod armed {
    use std::sync::{
        LazyLock, OnceLock, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    };

    struct Armed {
        name: String,
        passes: u64,
        seen: AtomicU64,
    }

    /// A step of the protocol; the process dies here when the point is armed.
    pub fn point(name: &str) {
        static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
        debug_assert!(super::POINTS.contains(&name), "fail point `{name}` is not listed");
        let armed = ARMED.get_or_init(|| std::env::var("ONCEBOX_FAILPOINT").ok().map(|text| parse(&text)));
        let Some(armed) = armed.as_ref().filter(|armed| armed.name == name) else { return };
        if armed.seen.fetch_add(1, Ordering::Relaxed) + 1 == armed.passes {
            eprintln!("fail point `{name}`: killing this process");
            kill_self();
        }
    }

    fn parse(text: &str) -> Armed {
        let (name, passes) = text.split_once('@').unwrap_or((text, "1"));
        let passes = passes.parse().expect("ONCEBOX_FAILPOINT is `<name>@<count>`");
        Armed { name: name.to_owned(), passes, seen: AtomicU64::new(0) }
    }

    /// SIGKILL, as the kernel or an operator would: no destructor, no flush, no goodbye.
    fn kill_self() -> ! {
        let pid = std::process::id().to_string();
        let _ = std::process::Command::new("kill").args(["-9", &pid]).status();
        std::process::abort()
    }

    static SABOTAGE: LazyLock<RwLock<Option<String>>> = LazyLock::new(|| RwLock::new(std::env::var("ONCEBOX_SABOTAGE").ok()));

    /// Whether a named defect is switched on.
    pub fn sabotage(name: &str) -> bool {
        SABOTAGE.read().unwrap_or_else(PoisonError::into_inner).as_deref() == Some(name)
    }

    /// Switch to another defect, or to none: for tests that run the inbox in their own process.
    pub fn switch_sabotage(name: Option<&str>) {
        *SABOTAGE.write().unwrap_or_else(PoisonError::into_inner) = name.map(str::to_owned);
    }
}
