//! Handlers in every language: the committed examples, the SDK, the first hour of a newcomer.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

mod first_hour;
mod guest_examples;
mod guest_languages;
mod guest_sdk;
