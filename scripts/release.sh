#!/usr/bin/env bash
# Makes everything that is released, in target/release-files: a tarball, a Debian package, an npm package and
# a Python wheel with the program, its bill of materials, the licences of what it is linked from, and
# checksums. `scripts/release_test.sh` tries them in clean roots.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/step.sh

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -1)
export SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
out=target/release-files
work=target/release-work
rm -rf "$out" "$work"
mkdir -p "$out" "$work"

step "install what is missing"
./scripts/install.sh host release

step "build"
# Functions of equal code are kept once: Rust promises no function an address of its own. librdkafka compares the address
# of one, `rd_kafka_log_syslog`, whose code no other function has.
RUSTFLAGS="-C link-arg=-Wl,--icf=all" CARGO_INCREMENTAL=0 cargo build --locked --profile dist --bin oncebox
program=$work/oncebox
strip -o "$program" target/dist/oncebox

step "what goes with the program"
share=$work/share
mkdir -p "$share"/{man/man1,bash-completion/completions,zsh/vendor-completions,fish/vendor_completions.d}
mkdir -p "$share"/{oncebox/examples,doc/oncebox}
"$program" manual "$share/man/man1" > "$work/manual.log"
gzip -9n "$share"/man/man1/*.1
"$program" completions bash > "$share/bash-completion/completions/oncebox"
"$program" completions zsh > "$share/zsh/vendor-completions/_oncebox"
"$program" completions fish > "$share/fish/vendor_completions.d/oncebox.fish"
cp guest-examples/components/ledger.wasm guest-examples/ledger/{schema.sql,messages.jsonl} "$share/oncebox/examples/"
cp packaging/debian/environment.example "$share/oncebox/"
cp docs/alerts.yml docs/dashboard.json docs/openapi.json "$share/oncebox/"
./scripts/licences.py "$work/LICENSES.txt"
gzip -9nc CHANGELOG.md > "$share/doc/oncebox/changelog.gz"
gzip -9nc "$work/LICENSES.txt" > "$share/doc/oncebox/LICENSES.txt.gz"
{ cat LICENSE-MIT; echo; cat LICENSE-APACHE; } > "$share/doc/oncebox/copyright"

step "bill of materials"
if ! test -x target/tools/bin/cargo-cyclonedx; then
    cargo install --locked --quiet --root target/tools cargo-cyclonedx --version 0.5.9
fi
target/tools/bin/cargo-cyclonedx cyclonedx --manifest-path host/cli/Cargo.toml --format json \
    --override-filename oncebox-sbom --quiet
find host bench tests -name 'oncebox-sbom.json' ! -path 'host/cli/*' -delete
mv host/cli/oncebox-sbom.json "$out/oncebox-$version.cdx.json"

step "tarball"
folder=oncebox-$version-x86_64-linux
mkdir -p "$work/$folder/bin"
cp "$program" "$work/$folder/bin/"
cp -r "$share" "$work/$folder/"
cp README.md LICENSE-MIT LICENSE-APACHE host/server/oncebox.sample.toml packaging/debian/oncebox.service \
    "$work/$folder/"
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" \
    -C "$work" -c "$folder" | gzip -9n > "$out/$folder.tar.gz"

step "Debian package"
root=$work/deb
mkdir -p "$root"/{DEBIAN,usr/bin,etc/oncebox,lib/systemd/system}
cp "$program" "$root/usr/bin/"
cp -r "$share" "$root/usr/"
cp host/server/oncebox.sample.toml "$root/etc/oncebox/oncebox.toml"
cp packaging/debian/oncebox.service "$root/lib/systemd/system/"
cp packaging/debian/{postinst,prerm,postrm} "$root/DEBIAN/"
echo /etc/oncebox/oncebox.toml > "$root/DEBIAN/conffiles"
mkdir -p "$work/shlibs/debian"
printf 'Source: oncebox\n\nPackage: oncebox\nArchitecture: amd64\n' > "$work/shlibs/debian/control"
depends=$(cd "$work/shlibs" && dpkg-shlibdeps -O -e "$OLDPWD/$program" 2>/dev/null | sed 's/^shlibs:Depends=//')
sed -e "s/@VERSION@/$version/" -e "s/@DEPENDS@/$depends/" -e "s/@SIZE@/$(du -sk "$root" | cut -f1)/" \
    packaging/debian/control > "$root/DEBIAN/control"
find "$root" -type d -exec chmod 755 {} +
find "$root" -type f ! -path '*/DEBIAN/*' ! -path '*/bin/*' -exec chmod 644 {} +
dpkg-deb --root-owner-group -Zxz --build "$root" "$out/oncebox_${version}_amd64.deb"

step "npm package"
mkdir -p "$work/npm/bin"
cp "$program" "$work/npm/bin/"
cp -r "$share/oncebox/examples" README.md "$work/npm/"
cp "$work/LICENSES.txt" "$work/npm/"
sed "s/@VERSION@/$version/" packaging/npm/package.json > "$work/npm/package.json"
npm pack --silent "./$work/npm" --pack-destination "$out"

step "Python wheel"
./packaging/python/wheel.py "$version" "$program" linux_x86_64 README.md "$out"

step "checksums"
cp "$work/LICENSES.txt" "$out/oncebox-$version.LICENSES.txt"
(cd "$out" && sha256sum -- * > SHA256SUMS)
ls -l "$out"
steps_done
