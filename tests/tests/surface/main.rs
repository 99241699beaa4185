//! What an operator, a developer or a client meets: commands, the API, uploads, pages.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod admin_api;
mod apply;
mod benchmark;
mod browser;
mod chart;
mod choose;
mod cli;
mod cli_server;
mod compilations;
mod compiler_process;
mod console;
mod docs;
mod endpoints;
mod erase;
mod handler_test;
mod local_services;
mod tidy;
mod upload_fuzz;
mod verify;
