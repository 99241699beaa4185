#!/usr/bin/env bash
# Installs what the build (`host`), the suite (`tests`), `release.sh` (`release`) and the examples in other
# languages (`typescript`, `javascript`, `python`, `go`, `c`) need and the machine lacks. Safe to run again, as
# root or as a user with sudo. Debian and Ubuntu by apt; elsewhere it says what to install.
set -euo pipefail

missing=()
need() { # need <package> <test…>
    local package=$1
    shift
    "$@" >/dev/null 2>&1 || missing+=("$package")
}
has() { command -v "$1"; }

for part in "$@"; do
    case $part in
    host)
        need build-essential has cc
        need build-essential has make
        need pkg-config has pkg-config
        need libssl-dev pkg-config --exists openssl
        need zlib1g-dev pkg-config --exists zlib
        need postgresql eval 'ls /usr/lib/postgresql/*/bin/initdb || command -v initdb'
        ;;
    release)
        need dpkg-dev has dpkg-shlibdeps
        need npm has npm
        need python3 has python3
        ;;
    tests)
        need default-jdk-headless has java
        need maven has mvn
        need openssl has openssl
        need kcat has kcat
        need postgresql-client has pg_isready
        need pgbouncer eval 'has pgbouncer || test -x /usr/sbin/pgbouncer'
        need prometheus has promtool
        need chromium-headless-shell has chromium-headless-shell
        need nodejs has node
        need npm has npm
        ;;
    typescript | javascript)
        need nodejs has node
        need npm has npm
        ;;
    python)
        need python3 has python3
        need python3-venv python3 -c 'import ensurepip, venv'
        ;;
    go)
        # Debian's own is too old to build components, so it is not installed but asked for.
        has go >/dev/null || { echo "install.sh: there is no \`go\`; install Go 1.25 or newer" >&2; exit 1; }
        ;;
    c)
        need clang-14 has clang-14
        need lld-14 has wasm-ld-14
        need wasi-libc test -d /usr/lib/wasm32-wasi
        need libclang-rt-14-dev-wasm32 eval 'ls /usr/lib/llvm-14/lib/clang/*/lib/*/libclang_rt.builtins-wasm32.a'
        ;;
    *)
        echo "install.sh: \`$part\` is not \`host\`, \`tests\` or a language of guest-examples/languages" >&2
        exit 2
        ;;
    esac
done

if ! command -v cargo >/dev/null; then
    echo "install.sh: there is no \`cargo\`; install Rust 1.95 or newer, for example with rustup" >&2
    exit 1
fi
[ ${#missing[@]} -eq 0 ] && exit 0

mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
if ! command -v apt-get >/dev/null; then
    echo "install.sh: install the equivalents of these Debian packages first: ${missing[*]}" >&2
    exit 1
fi
sudo=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "install.sh: as root, run: apt-get install ${missing[*]}" >&2; exit 1; }
    sudo=(sudo)
fi
echo "installing ${missing[*]}"
"${sudo[@]}" apt-get update -qq
# Packages start servers of their own, which nothing here uses.
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
