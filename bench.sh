#!/usr/bin/env bash
# Measures the host against the same effect written by hand, on a real Kafka and a real PostgreSQL that
# it starts itself. docs/benchmark.md says what is measured and how.
#
#   ./bench.sh                     everything but what lasts
#   ./bench.sh --quick             one short round, without plots
#   ./bench.sh --variants b,c,d    some of a, b, b1, c, c1, c2, c3, d, d64, e, f, g:<language>
#   ./bench.sh --parts history,removal,soak   what lasts: hours, and tens of gigabytes of disk
#   ./bench.sh --parts outgoing    outgoing messages, beside an outbox by hand: half an hour
#   ./bench.sh --parts hosts       one host and two, and pauses while one leaves and comes
#   ./bench.sh --parts pages       every page of the console beside 10 million messages
#   ./bench.sh --json file         everything that was measured, as data
#   ./bench.sh --release           programs built with the release profile
#   ./bench.sh --help              the rest
set -euo pipefail
cd "$(dirname "$0")"

profile=measure
arguments=()
for argument in "$@"; do
    if [[ $argument == --release ]]; then profile=release; else arguments+=("$argument"); fi
done

./scripts/install.sh host tests

# The programs that are measured are built without the tests' fail points, which the program that
# measures has: hence two builds. Both are optimised, since `isolation` runs a host in the program that
# measures.
cargo build --quiet --profile "$profile" -p oncebox-cli -p oncebox-bench-consumer --bins
mkdir -p target/bench/bin
cp "target/$profile/oncebox" "target/$profile/bench-consumer" target/bench/bin/
cargo build --quiet --profile "$profile" -p oncebox-bench --bin bench

if command -v npm >/dev/null && ! cmp -s bench/node/package-lock.json target/bench/node/package-lock.json; then
    rm -rf target/bench/node
    mkdir -p target/bench/node
    cp bench/node/package.json bench/node/package-lock.json target/bench/node/
    (cd target/bench/node && npm ci --silent --no-audit --no-fund) ||
        { rm -rf target/bench/node; echo "bench.sh: npm failed; the variant (f) is left out" >&2; }
fi
if [[ -d target/bench/node ]]; then cp bench/node/consumer.js target/bench/node/; fi

exec "target/$profile/bench" --profile "$profile" "${arguments[@]}"
