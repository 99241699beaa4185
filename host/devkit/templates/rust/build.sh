#!/usr/bin/env bash
# Builds the component: ./build.sh [output.wasm]
# Takes what is there: a toolchain with the target wasm32-wasip2, or Debian's rustc-web with the
# standard library's sources (for which ONCEBOX_LLD may name a rust-lld or wasm-ld) and `oncebox`,
# which makes a component of what that builds; ONCEBOX_ENCODE names another command for it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/{{name}}.wasm}")
cd "$here"

# Whether the active toolchain has a standard library for this target.
has_target() {
    compgen -G "$(rustc --print target-libdir --target "$1" 2>/dev/null)/libstd-*.rlib" >/dev/null
}

# Debian's rustc comes without a linker for WebAssembly; rustup's toolchains ship one.
find_linker() {
    local lld
    for lld in "${ONCEBOX_LLD:-}" "$(rustc --print sysroot 2>/dev/null)"/lib/rustlib/*/bin/rust-lld; do
        if [[ -x $lld ]]; then echo "$lld"; return; fi
    done
    return 1
}

# A core module, built for no system, and what makes a component of it.
build_bare() {
    local encode=${ONCEBOX_ENCODE:-oncebox component encode}
    if ! command -v "${encode%% *}" >/dev/null; then
        echo "\`${encode%% *}\` is not on the path; add its folder to PATH" >&2
        exit 1
    fi
    "$@" cargo build --release --target wasm32-unknown-unknown --target-dir target "${std[@]}"
    $encode target/wasm32-unknown-unknown/release/{{crate}}.wasm -o "$out" >/dev/null
}

std=()
if ! command -v cargo >/dev/null; then
    echo "cargo is not on the path; install Rust (https://rustup.rs), then \`rustup target add wasm32-wasip2\`" >&2
    exit 1
elif has_target wasm32-wasip2; then
    cargo build --release --target wasm32-wasip2 --target-dir target
    cp target/wasm32-wasip2/release/{{crate}}.wasm "$out"
elif has_target wasm32-unknown-unknown; then
    build_bare env
elif [[ -d /usr/lib/rustlib/src/rust/library/vendor && -x /usr/bin/rustc ]] && linker=$(find_linker); then
    std=(-Zbuild-std=std,panic_abort)
    build_bare env RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 \
        CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER="$linker"
else
    echo "no toolchain here builds for WebAssembly; either \`rustup target add wasm32-wasip2\`, or, on Debian," >&2
    echo "\`apt-get install rustc-web rust-web-src libstd-rust-web-dev lld\` and ONCEBOX_LLD=\$(command -v wasm-ld)" >&2
    exit 1
fi
echo "wrote \`$out\`"
