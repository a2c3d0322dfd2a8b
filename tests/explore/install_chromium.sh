#!/bin/sh
# Installs Debian's Chromium for the browser tests if it is missing and the user may. In CI a failure is an error.
set -eu

say() { echo "browser tests: $*" >&2; }
skip() {
    say "skipped: $*"
    [ -z "${CI:-}" ]
    exit
}

if [ -n "${ONFOOT_CHROMIUM:-}" ] || command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then
    exit 0
elif ! command -v apt-get >/dev/null; then
    skip "neither Chromium nor apt-get was found; set ONFOOT_CHROMIUM to the path of Chromium"
elif [ "$(id -u)" = 0 ]; then
    as_root=""
elif sudo -n true 2>/dev/null; then
    as_root="sudo -n"
else
    skip "installing Chromium needs root; run: sudo apt-get install chromium"
fi

say "installing Debian's chromium"
$as_root apt-get -qq update || say "apt-get update failed; using the existing package lists"
if ! apt-cache show chromium >/dev/null 2>&1; then
    skip "apt-get has no package chromium; set ONFOOT_CHROMIUM to the path of Chromium"
fi
# from here on a failure is an error
$as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends chromium >/dev/null
command -v chromium >/dev/null
