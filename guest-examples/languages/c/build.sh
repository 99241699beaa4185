#!/usr/bin/env bash
# Builds the component: ./build.sh [output.wasm]
# Needs clang, lld and wasi-libc (Debian: clang lld wasi-libc libclang-rt-14-dev-wasm32) and `oncebox`, which
# turns the module into a component; ONCEBOX_ENCODE names another command for that. With the WASI SDK
# set CC to its clang.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/order-placed.wasm}")
cd "$here"

cc=${CC:-$(command -v clang-14 || command -v clang)}
core=$(mktemp)
trap 'rm -f "$core"' EXIT
# A reactor has no main: it is called through its exports. The object file holds the contract's types.
"$cc" --target=wasm32-wasi -mexec-model=reactor -std=gnu11 -Os -Wall -Wextra -Werror -fno-strict-aliasing -Wl,--strip-all \
    -o "$core" ./*.c bindings/handler.c bindings/handler_component_type.o
${ONCEBOX_ENCODE:-oncebox component encode} "$core" -o "$out"
