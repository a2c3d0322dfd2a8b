#!/bin/sh
# The kernels on the lowest Numba and NumPy that pyproject.toml allows, in an environment of its own: `build.py` uses
# interfaces of Numba that change from one version to the next. The newest ones are those that `make test` has.
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/source"
for part in pyproject.toml setup.py README.md LICENSE docs src tests campaigns; do cp -r "$root/$part" "$work/source"; done
cd "$work/source"

lowest() { sed -n "s/^ *\"$1>=\([0-9.]*\)[\",].*/$1==\1/p" pyproject.toml; }

python=$work/environment/bin/python
"${PYTHON:-python3}" -m venv "$work/environment"
"$python" -m pip install --quiet --disable-pip-version-check \
    . "$(lowest numba)" "$(lowest llvmlite)" "$(lowest numpy)" pytest pytest-xdist hypothesis
"$python" -m pip list --disable-pip-version-check 2>/dev/null | grep -E "^(numba|llvmlite|numpy) "
XDG_CACHE_HOME=$work/cache PYTHONPATH= "$python" -m pytest -p no:cacheprovider -n auto \
    tests/kernels/test_kernel_gradients.py tests/kernels/test_self_test.py
