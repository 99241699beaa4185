#!/usr/bin/env bash
# Builds the component: ./build.sh [output.wasm]
# Needs clang, lld and wasi-libc (Debian: clang lld wasi-libc libclang-rt-14-dev-wasm32) and `oncebox`, which
# turns the module into a component; ONCEBOX_ENCODE names another command for that. With the WASI SDK
# set CC to its clang.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/order-placed.wasm}")
cd "$here"

missing() { # missing <program> <what to do>
    echo "build.sh: there is no \`$1\` on the path; $2" >&2
    exit 1
}

cc=${CC:-$(command -v clang-14 || command -v clang || true)}
[ -n "$cc" ] || missing clang "apt-get install clang-14 lld-14 wasi-libc libclang-rt-14-dev-wasm32, or set CC to the clang of the WASI SDK"
if [ -z "${CC:-}" ]; then
    command -v wasm-ld-14 >/dev/null || command -v wasm-ld >/dev/null || missing wasm-ld "apt-get install lld-14"
    [ -d /usr/lib/wasm32-wasi ] || {
        echo "build.sh: there is no C library for WebAssembly in /usr/lib/wasm32-wasi; apt-get install wasi-libc libclang-rt-14-dev-wasm32" >&2
        exit 1
    }
fi
encode=${ONCEBOX_ENCODE:-oncebox component encode}
command -v "${encode%% *}" >/dev/null || missing "${encode%% *}" "add its folder to PATH"
core=$(mktemp)
trap 'rm -f "$core"' EXIT
# A reactor has no main: it is called through its exports. The object files hold the contract's types.
"$cc" --target=wasm32-wasi -mexec-model=reactor -std=gnu11 -Os -Wall -Wextra -Werror -fno-strict-aliasing -Wl,--strip-all \
    -o "$core" ./*.c bindings/*.c bindings/*_component_type.o
$encode "$core" -o "$out"
