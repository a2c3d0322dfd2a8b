#!/bin/sh
# Fetches axe-core, the checker of accessibility, into a cache if npm and the network are there. Its tests are optional.
set -eu

VERSION=4.14.0
SHA256=20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878

say() { echo "tests of accessibility: $*" >&2; }
folder="${XDG_CACHE_HOME:-$HOME/.cache}/onfoot-tests"
path="$folder/axe-core-$VERSION.js"

if [ -n "${ONFOOT_AXE:-}" ] || [ -f "$path" ]; then
    exit 0
elif ! command -v npm >/dev/null; then
    say "skipped: npm was not found; set ONFOOT_AXE to the path of axe.min.js"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! (cd "$work" && npm pack --silent "axe-core@$VERSION" >/dev/null 2>&1); then
    say "skipped: npm could not fetch axe-core@$VERSION; set ONFOOT_AXE to the path of axe.min.js"
    exit 0
fi
tar -xzf "$work/axe-core-$VERSION.tgz" -C "$work" package/axe.min.js
if ! echo "$SHA256  $work/package/axe.min.js" | sha256sum -c - >/dev/null 2>&1; then
    say "skipped: the SHA-256 of axe-core@$VERSION is not the one in $0"
    exit 0
fi
mkdir -p "$folder"
mv "$work/package/axe.min.js" "$path"
say "axe-core $VERSION is in $folder"
