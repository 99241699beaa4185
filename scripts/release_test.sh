#!/usr/bin/env bash
# Tries what `scripts/release.sh` made, each in a clean root of Debian 12 that knows nothing of this folder, and the
# Debian package on Ubuntu 22.04, too: installs it as a user would, and measures the time from there to the first
# effect. Needs root.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/step.sh
files=$PWD/target/release-files
debian=http://deb.debian.org/debian
ubuntu=http://archive.ubuntu.com/ubuntu
first_effect_max=60
program_bytes_max=$((60 * 1000 * 1000))

fail() {
    echo "release_test.sh: $*" >&2
    exit 1
}
test "$(id -u)" = 0 || fail "run as root: a clean root is made with debootstrap, and entered with chroot"
test -f "$files/SHA256SUMS" || fail "nothing is released yet; run scripts/release.sh"

step "checksums"
(cd "$files" && sha256sum --check --quiet SHA256SUMS)

step "clean roots"
command -v debootstrap > /dev/null || apt-get install -y -qq debootstrap
command -v curl > /dev/null || apt-get install -y -qq curl
# Debian 12 has no package with Ubuntu's keys.
keys=target/ubuntu-keyring
if ! test -f "$keys/made"; then
    mkdir -p "$keys"
    curl -fsS -o "$keys/package.deb" "$ubuntu/pool/main/u/ubuntu-keyring/ubuntu-keyring_2021.03.26_all.deb"
    sha256sum --check --quiet <<< "0d0e7ed6b112f5d03eabf3c7eb01ebdacf9c57714b279e90495cfc58c8c4520f  $keys/package.deb"
    dpkg-deb -x "$keys/package.deb" "$keys"
    touch "$keys/made"
fi

# clean_root <suite> <keyring> <mirror>: makes target/release-root-<suite>, unless it is there.
clean_root() {
    local suite=$1 root=$PWD/target/release-root-$1 file
    if test -f "$root/made"; then return; fi
    rm -rf "$root"
    debootstrap --variant=minbase --keyring="$2" "$suite" "$root" "$3" > "target/release-root-$suite.log"
    # The machine's own way to packages.
    cp -r /etc/apt/apt.conf.d "$root/etc/apt/"
    rm -f "$root"/etc/apt/apt.conf.d/docker-*
    for file in /etc/apt/auth.conf.d /etc/ssl/certs /usr/local/share/ca-certificates; do
        mkdir -p "$root$file" && cp -rT "$file" "$root$file"
    done
    touch "$root/made"
}
clean_root bookworm /usr/share/keyrings/debian-archive-keyring.gpg "$debian"
clean_root jammy "$keys/usr/share/keyrings/ubuntu-archive-keyring.gpg" "$ubuntu"

# try <suite> <name> <command that installs> <packages that the installer itself needs…>: a copy of the suite's root, in
# which the command installs and a user who is not root has the first effect.
try() {
    local base=$PWD/target/release-root-$1 name=$2 install=$3 root=$PWD/target/release-try
    shift 3
    step "$name"
    rm -rf "$root"
    cp -a "$base" "$root"
    mkdir -p "$root/release"
    cp "$files"/* "$root/release/"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    for file in "$HOME/.npmrc" /etc/pip.conf "$HOME/.config/pip/pip.conf"; do
        if test -f "$file"; then mkdir -p "$root$(dirname "$file")" && cp "$file" "$root$file"; fi
    done
    cat > "$root/try.sh" <<TRY
set -euo pipefail
mount -t proc proc /proc
mount -t devpts devpts /dev/pts 2> /dev/null || true
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
if [ -n "$*" ]; then apt-get install -y -qq --no-install-recommends $* > /packages.log 2>&1; fi
useradd --create-home stranger
began=\$SECONDS
($install) > /install.log 2>&1 || { tail -30 /install.log; exit 1; }
echo "installed after \$((SECONDS - began)) s"
su stranger -c 'bash /effect.sh'
echo "first effect after \$((SECONDS - began)) s"
echo \$((SECONDS - began)) > /took
TRY
    cat > "$root/effect.sh" <<'EFFECT'
set -euo pipefail
export PATH=$PATH:/opt/oncebox/bin
mkdir -p ~/first && cd ~/first
oncebox --version
oncebox dev /examples/ledger.wasm --schema /examples/schema.sql > dev.log 2>&1 &
host=$!
trap 'tail -20 dev.log >&2; kill $host' ERR
oncebox send /examples/messages.jsonl
for _ in $(seq 300); do
    if oncebox inbox list --json 2> /dev/null | grep -q '"completed"'; then
        kill $host
        wait $host || true
        exit 0
    fi
    sleep 0.1
done
false
EFFECT
    mkdir -p "$root/examples"
    cp guest-examples/components/ledger.wasm guest-examples/ledger/{schema.sql,messages.jsonl} "$root/examples/"
    unshare --mount --pid --fork --kill-child chroot "$root" bash /try.sh
    (($(cat "$root/took") <= first_effect_max)) || fail "$name: the first effect took longer than $first_effect_max s"
}

step "the program"
tar -xzf "$files"/oncebox-*-x86_64-linux.tar.gz -C target/release-work --wildcards '*/bin/oncebox' --transform 's|.*/||'
bytes=$(stat -c %s target/release-work/oncebox)
echo "$bytes bytes, needs $(objdump -T target/release-work/oncebox | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)"
((bytes <= program_bytes_max)) || fail "the program has $bytes bytes, more than $program_bytes_max"

try jammy "Debian package, on Ubuntu" "apt-get install -y -qq /release/oncebox_*_amd64.deb" ""
try bookworm "Debian package" "apt-get install -y -qq /release/oncebox_*_amd64.deb" systemd
root=target/release-try
test -f "$root/usr/share/man/man1/oncebox.1.gz" || fail "no manual page"
test -f "$root/usr/share/bash-completion/completions/oncebox" || fail "no completions"
test "$(stat -c %U "$root/etc/oncebox/oncebox.toml")" = root || fail "the configuration is not root's"
chroot "$root" getent passwd oncebox > /dev/null || fail "no user for the host"
chroot "$root" systemd-analyze --man=no verify oncebox.service || fail "systemd has something against the unit"
chroot "$root" systemd-analyze security --offline=yes --threshold=20 --no-pager oncebox.service \
    > target/release-unit.log || fail "the unit is exposed, see target/release-unit.log"
tail -1 target/release-unit.log
chroot "$root" dpkg --purge oncebox > /dev/null
test ! -e "$root/etc/oncebox" || fail "a purge leaves the configuration"

try bookworm "npm package" \
    "npm install --global --silent /release/oncebox-*.tgz" nodejs npm postgresql libssl3
try bookworm "Python wheel" \
    "python3 -m venv /opt/oncebox && /opt/oncebox/bin/pip install --quiet /release/oncebox-*.whl" \
    python3-venv postgresql libssl3
try bookworm "tarball" \
    "mkdir -p /opt/oncebox && tar -xzf /release/oncebox-*-x86_64-linux.tar.gz -C /opt/oncebox --strip-components=1" \
    postgresql libssl3
rm -rf target/release-try
steps_done
