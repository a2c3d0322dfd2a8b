#!/bin/sh
# Makes Chromium available to the browser tests: Debian's own, where it is missing and may be installed. In CI it must be.
set -eu

say() { echo "browser tests: $*" >&2; }
skip() {
    say "skipped, for $*"
    [ -z "${CI:-}" ]
    exit
}

if [ -n "${ONFOOT_CHROMIUM:-}" ] || command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then
    exit 0
elif ! command -v apt-get >/dev/null; then
    skip "there is no Chromium and no apt-get; set ONFOOT_CHROMIUM to a Chromium of your own"
elif [ "$(id -u)" = 0 ]; then
    as_root=""
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    skip "installing Chromium takes root: sudo apt-get install chromium"
fi

say "installing Debian's chromium"
$as_root apt-get -qq update || say "apt-get update failed; going on with the lists that are there"
if ! apt-cache show chromium >/dev/null 2>&1; then
    skip "apt-get has no package chromium here; set ONFOOT_CHROMIUM to a Chromium of your own"
fi
# from here on the install can work, so it must
$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends chromium >/dev/null
command -v chromium >/dev/null
