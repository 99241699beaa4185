//! The protocol, in this process, on a real PostgreSQL: claim, run, complete, commit, retry, and what the
//! control plane writes.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod archive;
mod breaker;
mod clock;
mod counted;
mod deployments;
mod doctor;
mod effect_once;
mod endpoints;
mod enqueued;
mod erase;
mod failures;
mod host_functions;
mod identity;
mod inbox_schema;
mod jobs;
mod known;
mod leases;
mod light;
mod locks;
mod lost_commits;
mod order;
mod outgoing;
mod redrive;
mod references;
mod replay;
mod retention;
mod round_trips;
mod shadow;
mod sql_values;
mod storage;
mod tenant_isolation;
mod tenant_locks;
mod tenant_moves;
mod tenants;
