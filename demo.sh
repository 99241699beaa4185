#!/usr/bin/env bash
# The main job on real input: installs what is missing, builds, and runs `oncebox demo`.
set -euo pipefail
cd "$(dirname "$0")"
./scripts/install.sh host
cargo build --quiet -p oncebox-cli || { echo "demo.sh: the build failed" >&2; exit 1; }
exec ./target/debug/oncebox demo "$@"
