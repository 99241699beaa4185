#!/usr/bin/env bash
# Builds the examples in other languages: of each the one that books orders, its variant with a bug that
# the tests need, and the one that sends messages.
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

# The contract with `emit`: version 0.2, and below it version 0.1, which it includes. Both have a world
# of the name `handler`.
emitting=$out/wit
write_emitting() {
    rm -rf "$emitting"
    mkdir -p "$emitting/deps/handler"
    cp "$root"/wit/0.2/*.wit "$emitting/"
    cp "$root"/wit/*.wit "$emitting/deps/handler/"
}

build() { # build <language> <component> <contract> [file or folder over those of the language…]
    local language=$1 component=$2 contract=$3 work=$out/src/$2
    shift 3
    rm -rf "$work"
    mkdir -p "$work"
    # Links become the files they point to, as `oncebox new` writes them.
    cp -RL "$here/$language/." "$work/"
    rm -rf "$work/wit"
    cp -RL "$contract" "$work/wit"
    [ $# -eq 0 ] || cp -RL "$@" "$work/"
    echo "$component"
    "$work/build.sh" "$out/$component.wasm" >"$work/build.log" 2>&1 || {
        cat "$work/build.log" >&2
        echo "build.sh: \`$component\` was not built" >&2
        return 1
    }
}

[ $# -gt 0 ] || set -- typescript javascript python go c
"$root/scripts/install.sh" "$@"
write_emitting
for language in "$@"; do
    build "$language" "$language" "$root/wit"
    build "$language" "$language-crash" "$root/wit" "$here/crash/$language"/*
    build "$language" "$language-order-events" "$emitting" "$here/order-events/$language"/* \
        "$here"/../order-events/{schema.sql,messages.jsonl}
done
