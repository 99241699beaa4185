//! Lines into the host's log, which adds the tenant, consumer, message and version by itself.
//!
//! ```
//! use oncebox_guest::log;
//!
//! let units = 3;
//! log::info!("{units} units reserved");
//! ```

pub use crate::bindings::handler::oncebox::handler::log::Level;
#[doc(inline)]
pub use crate::{
    __debug as debug, __error as error, __info as info, __trace as trace, __warn as warn,
};

/// Writes a line.
pub fn write(level: Level, line: &str) {
    crate::sys::log(level, line);
}

/// A panic is a trap, which carries no text out of a component; so its text goes to the log.
pub(crate) fn panics() {
    #[cfg(target_family = "wasm")]
    std::panic::set_hook(Box::new(|panic| write(Level::Error, &panic.to_string())));
}

/// Writes a line of level trace. Takes what `format!` takes.
#[doc(hidden)]
#[macro_export]
macro_rules! __trace {
    ($($line:tt)+) => {
        $crate::log::write($crate::log::Level::Trace, &::std::format!($($line)+))
    };
}

/// Writes a line of level debug. Takes what `format!` takes.
#[doc(hidden)]
#[macro_export]
macro_rules! __debug {
    ($($line:tt)+) => {
        $crate::log::write($crate::log::Level::Debug, &::std::format!($($line)+))
    };
}

/// Writes a line of level info. Takes what `format!` takes.
#[doc(hidden)]
#[macro_export]
macro_rules! __info {
    ($($line:tt)+) => {
        $crate::log::write($crate::log::Level::Info, &::std::format!($($line)+))
    };
}

/// Writes a line of level warn. Takes what `format!` takes.
#[doc(hidden)]
#[macro_export]
macro_rules! __warn {
    ($($line:tt)+) => {
        $crate::log::write($crate::log::Level::Warn, &::std::format!($($line)+))
    };
}

/// Writes a line of level error. Takes what `format!` takes.
#[doc(hidden)]
#[macro_export]
macro_rules! __error {
    ($($line:tt)+) => {
        $crate::log::write($crate::log::Level::Error, &::std::format!($($line)+))
    };
}
