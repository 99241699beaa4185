#!/usr/bin/env bash
# Builds the guest examples into components.
#
#   build.sh build [outdir]   build all, into guest-examples/components by default
#   build.sh check            fail when a committed component is older than its sources
#   build.sh compare <dir>    fail when a component there has other bytes than the committed one
#   build.sh flags            the compiler's flags, as CARGO_ENCODED_RUSTFLAGS takes them
#
# The compiler is Debian's rustc-web with the standard library built from its sources: it
# needs no toolchain beside the one that builds the host, and gives the same bytes anywhere.
# ONCEBOX_ENCODE   command that turns a core module into a component: <core.wasm> -o <out.wasm>
# ONCEBOX_LLD      path of rust-lld or wasm-ld, where the active toolchain has none
set -euo pipefail
export LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd -P)
root=$(dirname "$here")
rustc=/usr/bin/rustc
target=wasm32-unknown-unknown
packages=(rustc-web rust-web-src libstd-rust-web-dev)

# Every folder with a cdylib is an example.
examples() {
    grep -l '"cdylib"' "$here"/*/Cargo.toml | while read -r manifest; do
        basename "$(dirname "$manifest")"
    done
}

# One hash over the sources of an example: its own, and what it is linked with. The contract is in
# the SDK's bindings. Tests, and the harness they use, are not part of a component.
sources_hash() {
    local own=("guest-examples/$1" guest-examples/guest guest-examples/guest/macros)
    if [[ $1 == github-* ]]; then own+=(guest-examples/github); fi
    (
        cd "$root"
        {
            for folder in "${own[@]}"; do
                find "$folder/src" "$folder/Cargo.toml" -type f \
                    -not -path '*/src/test/*' -not -path '*/src/tests.rs'
            done
            ls guest-examples/Cargo.toml guest-examples/Cargo.lock
        } | sort | while read -r file; do sha256sum "$file"; done | sha256sum | cut -d' ' -f1
    )
}

check() {
    local stale=0 name recorded
    for name in $(examples); do
        recorded=$(cat "$here/components/$name.sources.sha256" 2>/dev/null || true)
        if [[ ! -f $here/components/$name.wasm || $recorded != "$(sources_hash "$name")" ]]; then
            echo "stale: guest-examples/components/$name.wasm" >&2
            stale=1
        fi
    done
    if ((stale)); then
        echo "its sources changed since it was built; run guest-examples/build.sh build" >&2
        return 1
    fi
    echo "all components match their sources"
}

compare() {
    local name differ=0
    for name in $(examples); do
        cmp -s "$1/$name.wasm" "$here/components/$name.wasm" && continue
        echo "$name.wasm differs from the committed component" >&2
        differ=1
    done
    return $differ
}

install_packages() {
    local package missing=() sudo=()
    for package in "${packages[@]}"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    if ((${#missing[@]} == 0)); then return; fi
    if ((EUID != 0)); then sudo=(sudo); fi
    "${sudo[@]}" apt-get update -qq
    "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

# Debian's rustc comes without a linker for WebAssembly; rustup's toolchains ship one.
find_linker() {
    local lld
    for lld in "${ONCEBOX_LLD:-}" "$(cd "$root" && rustc --print sysroot)"/lib/rustlib/*/bin/rust-lld; do
        if [[ -x $lld ]]; then echo "$lld"; return; fi
    done
    echo "rust-lld not found: install a toolchain with rustup (\`rustup toolchain install stable\`)," >&2
    echo "or \`apt-get install lld\` and set ONCEBOX_LLD to the path of its wasm-ld" >&2
    return 1
}

# No path of the building machine may get into a component, or its bytes would differ.
compiler_flags() {
    local std registry flags
    std=$("$rustc" --print sysroot)/lib/rustlib/src/rust
    flags=("--remap-path-prefix=$here=guest-examples")
    for registry in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*; do
        flags+=("--remap-path-prefix=$registry=registry")
    done
    flags+=("--remap-path-prefix=$std=rust" "--remap-path-prefix=$(realpath "$std")=rust")
    (IFS=$'\x1f'; printf '%s' "${flags[*]}")
}

compile() {
    local linker flags
    linker=$(find_linker)
    cd "$here"
    cargo fetch --quiet --locked # fills the registry folders that the flags name
    flags=$(compiler_flags)
    RUSTC=$rustc RUSTC_WORKSPACE_WRAPPER='' RUSTC_BOOTSTRAP=1 CARGO_ENCODED_RUSTFLAGS=$flags \
        CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=$linker \
        cargo build --release --locked --target $target --target-dir "$here/target" \
        -Zbuild-std=std,panic_abort
}

build() {
    mkdir -p "$1"
    local out name core encode
    out=$(cd "$1" && pwd -P)
    encode=${ONCEBOX_ENCODE:-cargo run --quiet --manifest-path ../Cargo.toml -p oncebox-cli -- component encode}
    install_packages
    compile
    cd "$here"
    for name in $(examples); do
        core=target/$target/release/${name//-/_}.wasm
        $encode "$core" -o "$out/$name.wasm"
        sources_hash "$name" >"$out/$name.sources.sha256"
        echo "$name.wasm $(wc -c <"$out/$name.wasm") bytes"
    done
}

case ${1:-} in
    build) build "${2:-$here/components}" ;;
    check) check ;;
    compare) compare "$2" ;;
    flags) compiler_flags ;;
    *) sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
