//! Host processes on real brokers: crashes, hand-overs, outages, swaps, many tenants and hostile ones.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod at_rest;
mod brokers;
mod consumer_starts;
mod consumers;
mod crash_recovery;
mod databases;
mod endpoints;
mod failover;
mod fairness;
mod horizon;
mod hostile;
mod hot_swap;
mod ingress;
mod lifecycle;
mod many_tenants;
mod observed;
mod outages;
mod outgoing;
mod own_database;
mod readiness;
mod rebalance;
mod references;
mod replay;
mod retention;
mod rights;
mod sagas;
mod samples;
mod schema_registry;
mod storage;
mod tenant_moves;
mod traces;
mod upgrade;
