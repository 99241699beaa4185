#!/usr/bin/env bash
# Installs what the build (`host`) and the suite (`tests`) need and the machine lacks. Safe to run again,
# as root or as a user with sudo. Debian and Ubuntu by apt; elsewhere it says what to install.
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
    tests)
        need default-jdk-headless has java
        need maven has mvn
        ;;
    *)
        echo "install.sh: \`$part\` is not \`host\` or \`tests\`" >&2
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
# The package starts a server of its own, which nothing here uses.
"${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
