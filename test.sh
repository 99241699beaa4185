#!/usr/bin/env bash
# The whole suite: formatting, lints, docs, unit tests, the promises on real PostgreSQL and Kafka, and
# the guests rebuilt from their sources, in every language. Arguments go to `cargo test`, after which
# nothing else runs.
set -euo pipefail
cd "$(dirname "$0")"
step() { printf '\n== %s\n' "$*"; }

step "install what is missing"
./scripts/install.sh host tests
if [ $# -gt 0 ]; then
    cargo build --quiet --workspace --bins
    exec cargo test --workspace "$@"
fi

step "formatting, committed components, code of others"
./scripts/requirements_test.py
cargo fmt --all --check
cargo fmt --all --check --manifest-path guest-examples/Cargo.toml
./guest-examples/build.sh check
git apply --check -R third_party/sqlx-postgres.patch third_party/rdkafka-sys.patch # what differs from what was published

step "build"
cargo build --workspace --bins --tests

step "guests, rebuilt from their sources"
rebuilt="$PWD/target/rebuilt-components"
mkdir -p "$rebuilt"
ONCEBOX_ENCODE="$PWD/target/debug/oncebox component encode" ./guest-examples/build.sh build "$rebuilt"

step "guests in other languages"
./guest-examples/languages/build.sh

step "tests"
rm -f target/reached.txt target/guest-tests.log
./scripts/run_tests.py target/tests.log
cargo test --workspace --doc --quiet
./scripts/requirements.py target/tests.log target/guest-tests.log
./scripts/states.py target/reached.txt
# Of the whole workspace, as above: another selection would compile half of it again, with other features.
ONCEBOX_COMPONENTS="$rebuilt" cargo test --workspace --test guest_examples

step "lints and docs"
cargo clippy --workspace --all-targets -- -D warnings
cargo clippy --workspace --all-targets --features oncebox-guest/test --manifest-path guest-examples/Cargo.toml -- -D warnings
RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet
RUSTDOCFLAGS="-D warnings" cargo doc -p oncebox-guest --features test --no-deps --quiet --manifest-path guest-examples/Cargo.toml
step "all green"
