#!/bin/sh
# The kernels on the lowest and the newest Numba and NumPy that pyproject.toml allows, each in an environment of its own:
# `build.py` uses interfaces of Numba that may change from one version to the next.
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
cp -r "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$root/src" "$root/tests" "$root/campaigns" "$work/source"
cd "$work/source"

lowest() { sed -n "s/^ *\"$1>=\([0-9.]*\)[\",].*/$1==\1/p" pyproject.toml; }

try() {
    environment=$work/$1
    shift
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check . "$@" pytest hypothesis
    "$environment/bin/pip" list --disable-pip-version-check 2>/dev/null | grep -E "^(numba|llvmlite|numpy) "
    XDG_CACHE_HOME=$environment/cache PYTHONPATH= "$environment/bin/python" -m pytest -p no:cacheprovider \
        tests/kernels/test_kernel_gradients.py tests/kernels/test_self_proof.py
}

try lowest "$(lowest numba)" "$(lowest llvmlite)" "$(lowest numpy)"
try newest
