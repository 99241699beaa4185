#!/usr/bin/env bash
# Builds the component: ./build.sh [output.wasm]
# Needs Go 1.25 or newer (the stock compiler, not TinyGo) and `oncebox`, which turns Go's module into a
# component; ONCEBOX_ENCODE names another command for that.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/order-placed.wasm}")
cd "$here"

missing() { # missing <program> <what to do>
    echo "build.sh: there is no \`$1\` on the path; $2" >&2
    exit 1
}
command -v go >/dev/null || missing go "install Go 1.25 or newer (https://go.dev/dl)"
encode=${ONCEBOX_ENCODE:-oncebox component encode}
command -v "${encode%% *}" >/dev/null || missing "${encode%% *}" "add its folder to PATH"

# The bindings link to names of Go's runtime, hence checklinkname; -s -w leave out what only a debugger reads.
core=$(mktemp)
trap 'rm -f "$core"' EXIT
GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -ldflags='-s -w -checklinkname=0' -o "$core" .
$encode "$core" -o "$out"
