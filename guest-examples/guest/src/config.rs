//! Settings of the deployment. They are fixed for as long as a version is live.

use std::{fmt::Display, str::FromStr};

use crate::{Failure, Result, sys};

/// A setting, as it was given.
pub fn get(key: &str) -> Option<String> {
    sys::config::get(key)
}

/// Every setting.
pub fn all() -> Vec<(String, String)> {
    sys::config::all()
}

/// A setting as a Rust type, `None` when it is not there: `config::parse::<u32>("units_max")?`.
///
/// One that does not parse fails the message, to be tried again: the deployment is wrong, not
/// the message, and a deployment can be mended while the message waits.
pub fn parse<T: FromStr<Err: Display>>(key: &str) -> Result<Option<T>> {
    get(key)
        .map(|text| text.parse().map_err(|error| wrong(key, error)))
        .transpose()
}

/// The same for a setting that must be there.
pub fn require<T: FromStr<Err: Display>>(key: &str) -> Result<T> {
    parse(key)?.ok_or_else(|| wrong(key, "it is not set; deploy with a value for it"))
}

fn wrong(key: &str, why: impl Display) -> Failure {
    Failure::Other(format!("setting `{key}`: {why}"))
}
