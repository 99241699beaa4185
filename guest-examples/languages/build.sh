#!/usr/bin/env bash
# Builds the examples in other languages, and of each the variant with a bug that the tests need.
#
#   build.sh [language…]    all of them by default, into target/languages
#
# Toolchains are installed once: npm's and pip's below target/languages/toolchains, clang by apt, Go's
# modules in Go's own cache. ONCEBOX_ENCODE is the command that turns Go's and C's core modules into
# components; `oncebox component encode` by default.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd -P)
root=$(cd "$here/../.." && pwd -P)
out=$root/target/languages
export ONCEBOX_TOOLCHAINS=$out/toolchains
export ONCEBOX_ENCODE=${ONCEBOX_ENCODE:-$root/target/debug/oncebox component encode}

build() { # build <language> <component> [handler…]
    local language=$1 component=$2 work=$out/src/$2
    shift 2
    rm -rf "$work"
    mkdir -p "$work"
    # Links become the files they point to, as `oncebox new` writes them.
    cp -RL "$here/$language/." "$work/"
    [ $# -eq 0 ] || cp "$@" "$work/"
    echo "$component"
    "$work/build.sh" "$out/$component.wasm" >"$work/build.log" 2>&1 || {
        cat "$work/build.log" >&2
        echo "build.sh: \`$component\` was not built" >&2
        return 1
    }
}

[ $# -gt 0 ] || set -- typescript javascript python go c
"$root/scripts/install.sh" "$@"
for language in "$@"; do
    build "$language" "$language"
    build "$language" "$language-crash" "$here/crash/$language"/*
done
