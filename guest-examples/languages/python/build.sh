#!/usr/bin/env bash
# Builds the component: ./build.sh [output.wasm]
# Needs Python 3.10 or newer with venv. Several projects share one installation when ONCEBOX_TOOLCHAINS
# names a folder. The component carries a Python of its own; yours only runs the compiler.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/order-placed.wasm}")
cd "$here"

missing() { # missing <program> <what to do>
    echo "build.sh: there is no \`$1\` on the path; $2" >&2
    exit 1
}
command -v python3 >/dev/null || missing python3 "apt-get install python3 python3-venv"

venv=${ONCEBOX_TOOLCHAINS:+$ONCEBOX_TOOLCHAINS/python}
venv=${venv:-.venv}
if ! cmp -s requirements.txt "$venv/.installed"; then
    python3 -c 'import ensurepip, venv' 2>/dev/null || {
        echo "build.sh: \`python3\` cannot make a virtual environment; apt-get install python3-venv" >&2
        exit 1
    }
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement requirements.txt
    cp requirements.txt "$venv/.installed"
fi

# `"$venv"/bin/componentize-py --wit-path wit --world handler bindings .` writes the contract's types for editors.
"$venv/bin/componentize-py" --wit-path wit --world handler componentize app --output "$out"
