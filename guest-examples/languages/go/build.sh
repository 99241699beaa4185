#!/usr/bin/env bash
# Builds the component: ./build.sh [output.wasm]
# Needs Go 1.25 or newer (the stock compiler, not TinyGo) and `oncebox`, which turns Go's module into a
# component; ONCEBOX_ENCODE names another command for that.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/order-placed.wasm}")
cd "$here"

# The bindings link to names of Go's runtime, hence checklinkname; -s -w leave out what only a debugger reads.
core=$(mktemp)
trap 'rm -f "$core"' EXIT
GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -ldflags='-s -w -checklinkname=0' -o "$core" .
${ONCEBOX_ENCODE:-oncebox component encode} "$core" -o "$out"
