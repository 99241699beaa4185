#!/usr/bin/env bash
# In the place of `rustdoc` under `cargo test --doc`: documents a crate, and runs its examples if it has any. `cargo doc`
# would check all dependencies once more, which `cargo test` finds built.
set -euo pipefail
run=("$@") document=() sources=
while (($#)); do
    case $1 in
    --test) ;;
    --test-run-directory) shift ;;
    *.rs) document+=("$1") sources=${1%/*} ;;
    *) document+=("$1") ;;
    esac
    shift
done
rustdoc "${document[@]}" -D warnings --out-dir "$(dirname "$0")/../target/doc"
# Without a look, the crates without examples take as long again.
if [ -n "$sources" ] && grep -rqE '//[/!] *```(rust|ignore|no_run|should_panic|compile_fail)?$' "$sources"; then
    exec rustdoc "${run[@]}"
fi
