//! Batteries for the first run: a private PostgreSQL and an embedded broker, so that
//! `oncebox dev`, `oncebox demo` and the tests need neither to be running beforehand.
//!
//! The host that talks to them is the same code as in production; nothing is stubbed.
//! Both die with the process that started them, however it ends. Linux only: the death
//! signal and user namespaces have no portable counterpart.

pub mod broker;
pub mod postgres;
pub mod process;

use std::net::{Ipv4Addr, TcpListener};

use anyhow::Context;

/// Returns a port of 127.0.0.1 that is free at this moment. It is outside the range that the system
/// gives to outgoing connections: one of those could take it while its server restarts.
///
/// # Errors
/// None of 1,000 random ports is free.
pub fn free_port() -> anyhow::Result<u16> {
    let mut candidates = std::iter::repeat_with(|| rand::random_range(20_000..32_768)).take(1000);
    let free = candidates.find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok());
    free.context("no free port on 127.0.0.1 between 20000 and 32767")
}
