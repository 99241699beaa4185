#!/usr/bin/env bash
# Formatting, lints, documentation of the code, and whether what is committed matches its sources.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/step.sh

step "install what is missing"
./scripts/install.sh host

step "formatting"
cargo fmt --all --check
cargo fmt --all --check --manifest-path guest-examples/Cargo.toml

step "committed components, changed code of others, the rules of the requirements"
./guest-examples/build.sh check
git apply --check -R third_party/sqlx-postgres.patch third_party/rdkafka-sys.patch # what differs from what was published
./scripts/requirements_test.py

guests=(--manifest-path guest-examples/Cargo.toml --workspace --features oncebox-guest/test,oncebox-guest/emit,oncebox-guest/trace)

step "lints"
(
    source scripts/lints.sh
    cargo build --workspace --bins --tests
    CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 cargo build "${guests[@]}" --all-targets # as the tests build them
)

step "documentation of the code, and its examples"
(
    source scripts/lints.sh
    export RUSTDOC="$PWD/scripts/document.sh"
    cargo test --workspace --doc --quiet
    CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 cargo test "${guests[@]}" --doc --quiet
)
steps_done
