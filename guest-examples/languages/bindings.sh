#!/usr/bin/env bash
# Writes the committed bindings of Go and C again, after a change of `wit/`.
#
#   bindings.sh
#
# It needs wit-bindgen, in the version that the bindings name:
#   cargo install wit-bindgen-cli --version 0.61.1 --no-default-features --features c,go
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd -P)
root=$(cd "$here/../.." && pwd -P)
version=0.61.1

case $(wit-bindgen --version 2>/dev/null || true) in
*" $version") ;;
*)
    echo "bindings.sh: there is no wit-bindgen $version on the path; cargo install wit-bindgen-cli --version $version --no-default-features --features c,go" >&2
    exit 1
    ;;
esac
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Of version 0.1: what every project has.
handler=("$root/wit" --world handler)
wit-bindgen go "${handler[@]}" --pkg-name example.com/order-placed/bindings --out-dir "$here/go/bindings"
wit-bindgen c "${handler[@]}" --out-dir "$here/c/bindings"

# Of version 0.2: the import that it adds, which a project has beside the others.
emitter=("$root/wit" "$root/wit/0.2" --world oncebox:handler/emitter@0.2.0)
emit=oncebox_handler_0_2_0_emit
wit-bindgen go "${emitter[@]}" --pkg-name example.com/order-placed/bindings --out-dir "$scratch"
# The exports are those of the other world, so only the import is taken.
rm -rf "$here/order-events/go/bindings"
mkdir -p "$here/order-events/go/bindings"
cp -R "$scratch/$emit" "$here/order-events/go/bindings/"
# Without the other name the version would be part of every identifier.
wit-bindgen c "${emitter[@]}" --rename oncebox:handler/emit@0.2.0=oncebox_handler_emit \
    --out-dir "$here/order-events/c/bindings"
