#!/usr/bin/env bash
# All tests: unit tests, the promises on real PostgreSQL and Kafka, and the guests rebuilt from their sources, in every
# language. With arguments, only the tests whose names have one of these parts; what follows `--` goes to the test
# binaries.
set -euo pipefail
cd "$(dirname "$0")"
source scripts/step.sh

step "install what is missing"
./scripts/install.sh host tests

step "the release before, for tests of upgrades"
./scripts/previous_release.sh || test $# -gt 0 # tests that need it say so

step "build"
cargo build --workspace --bins --tests
if [ $# -gt 0 ]; then exec ./scripts/run_tests.py target/tests.log "$@"; fi

step "guests, rebuilt from their sources"
rebuilt="$PWD/target/rebuilt-components"
mkdir -p "$rebuilt"
ONCEBOX_ENCODE="$PWD/target/debug/oncebox component encode" ./guest-examples/build.sh build "$rebuilt"

step "guests in other languages"
./guest-examples/languages/build.sh

step "tests"
rm -f target/reached.txt target/guest-tests.log
./scripts/run_tests.py target/tests.log
./scripts/requirements.py target/tests.log target/guest-tests.log
./scripts/states.py target/reached.txt

step "components that are not the committed bytes"
if ! ./guest-examples/build.sh compare "$rebuilt"; then
    ONCEBOX_COMPONENTS="$rebuilt" ./scripts/run_tests.py target/rebuilt-tests.log guest_examples::
fi
steps_done
