#!/usr/bin/env bash
# Builds the program of the release before this one from this repository's history, beside which tests of upgrades run
# this one: target/releases/oncebox-<version>. Does nothing where it is built. `tests/previous_release` has the version
# and its commit, which has the tag v<version>.
set -euo pipefail
cd "$(dirname "$0")/.."
read -r version commit < tests/previous_release
program=$PWD/target/releases/oncebox-$version
if test -x "$program"; then exit 0; fi

if ! git cat-file -e "$commit^{commit}" 2> /dev/null; then
    git fetch --quiet --unshallow || true
    git cat-file -e "$commit^{commit}" || {
        echo "previous_release.sh: commit $commit of release $version is not in this clone; clone the whole history" >&2
        exit 1
    }
fi
source=$PWD/target/releases/$version
rm -rf "$source"
mkdir -p "$source"
git archive "$commit" | tar -x -C "$source"
# In the same folder as this release, so that what both depend on is compiled once. The program is put under
# `target/debug` there, where the next build of this release puts its own again.
cd "$source"
# Lints are for this release.
unset RUSTC_WORKSPACE_WRAPPER
CARGO_TARGET_DIR=$(dirname "$(dirname "$source")") cargo build --locked -p oncebox-cli --bin oncebox
cp ../../debug/oncebox "$program.part"
mv "$program.part" "$program"
