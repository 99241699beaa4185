#!/usr/bin/env bash
# Builds the component: ./build.sh [output.wasm]
# Needs Python 3.10 or newer with venv. Several projects share one installation when ONCEBOX_TOOLCHAINS
# names a folder. The component carries a Python of its own; yours only runs the compiler.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(realpath -m "${1:-$here/order-placed.wasm}")
cd "$here"

venv=${ONCEBOX_TOOLCHAINS:+$ONCEBOX_TOOLCHAINS/python}
venv=${venv:-.venv}
if ! cmp -s requirements.txt "$venv/.installed"; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement requirements.txt
    cp requirements.txt "$venv/.installed"
fi

# `"$venv"/bin/componentize-py --wit-path wit --world handler bindings .` writes the contract's types for editors.
"$venv/bin/componentize-py" --wit-path wit --world handler componentize app --output "$out"
