#!/usr/bin/env bash
# Builds the component: ./build.sh [output.wasm]
# Needs Node 18 or newer. Several projects share one installation when ONCEBOX_TOOLCHAINS names a folder.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/order-placed.wasm}")
cd "$here"

missing() { # missing <program> <what to do>
    echo "build.sh: there is no \`$1\` on the path; $2" >&2
    exit 1
}
for program in node npm; do
    command -v "$program" >/dev/null || missing "$program" "apt-get install nodejs npm, or Node 18 or newer (https://nodejs.org)"
done

# Exact versions in package.json pin everything: neither compiler has dependencies but its own binary.
tools=${ONCEBOX_TOOLCHAINS:+$ONCEBOX_TOOLCHAINS/typescript}
tools=${tools:-.}
if ! cmp -s package.json "$tools/node_modules/.installed"; then
    mkdir -p "$tools"
    [ "$tools" = . ] || cp package.json "$tools/"
    npm install --prefix "$tools" --no-package-lock --no-audit --no-fund --loglevel=error
    cp package.json "$tools/node_modules/.installed"
fi

# The type checker also writes the JavaScript; libraries beside the handler are JavaScript already.
"$tools/node_modules/.bin/tsc"
cp ./*.js build/

# --sync: the host calls a handler and waits for its answer; there is no event loop.
"$tools/node_modules/.bin/componentize-qjs" --wit wit --world handler --js build/handler.js --module-root build --sync --opt-size --output "$out"
