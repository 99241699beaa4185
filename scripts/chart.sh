#!/usr/bin/env bash
# Builds `chart-check`, which renders the chart of packaging/chart with Helm's engine and checks the manifests, and
# prints its path. With nothing changed it takes a second; the first build takes about a minute on two cores.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd -P)
"$root/scripts/install.sh" go
program=$root/target/tools/bin/chart-check
mkdir -p "$(dirname "$program")"
# The name of the file changes at once, so that another process never starts a half-written one.
(cd "$root/packaging/chart/check" && go build -trimpath -buildvcs=false -mod=readonly -o "$program.$$" . && mv "$program.$$" "$program")
echo "$program"
