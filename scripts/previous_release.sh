#!/usr/bin/env bash
# Builds the program of the release before this one from this repository's history, beside which tests of upgrades run
# this one: target/releases/oncebox-<version>-<commit>. Does nothing where it is built. `tests/previous_release` has the
# version and its commit, which has the tag v<version>.
set -euo pipefail
cd "$(dirname "$0")/.."
read -r version commit < tests/previous_release
program=$PWD/target/releases/oncebox-$version-$commit
component=$program-ledger.wasm
if test -x "$program" && test -f "$component"; then exit 0; fi

if ! git cat-file -e "$commit^{commit}" 2> /dev/null; then
    git fetch --quiet --unshallow || true
    git cat-file -e "$commit^{commit}" || {
        echo "previous_release.sh: commit $commit of release $version is not here; work in a clone with the whole history" >&2
        exit 1
    }
fi
mkdir -p target/releases
git show "$commit:guest-examples/components/ledger.wasm" > "$component.part"
mv "$component.part" "$component"
if test -x "$program"; then exit 0; fi
source=$PWD/target/releases/source
rm -rf "$source"
mkdir -p "$source"
git archive "$commit" | tar -x -C "$source"
# In the same folder as this release, so that what both depend on is compiled once. The program of this release, which
# has the same place there, is put back.
own=$PWD/target/debug/oncebox
former=$PWD/target/releases/former
rm -f "$former"
if test -f "$own"; then cp -p "$own" "$former"; fi
# Lints are for this release.
unset RUSTC_WORKSPACE_WRAPPER CARGO_BUILD_TARGET
(cd "$source" && CARGO_TARGET_DIR=$PWD/../.. cargo build --locked -p oncebox-cli --bin oncebox)
cp "$own" "$program.part"
rm -f "$own"
if test -f "$former"; then mv "$former" "$own"; fi
mv "$program.part" "$program"
rm -rf "$source"
