"""How the tests are run: in CI a skip is a failure, and the seed of random examples repeats them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPING = """
import pytest
def test_that_runs(): assert True
def test_that_skips_itself(): pytest.skip("no browser here")
@pytest.mark.skip(reason="no second core")
def test_that_is_marked(): pass
@pytest.mark.optional("AVX-512 is not in every CPU")
def test_that_is_optional(): pytest.skip("no AVX-512")
@pytest.mark.optional
def test_that_is_optional_without_a_reason(): pytest.skip("no mood")
@pytest.fixture
def missing(): pytest.skip("no ranks")
def test_whose_fixture_skips(missing): pass
"""
MODULE = 'import pytest\npytest.importorskip("no_such_package_at_all")\ndef test_more(): pass\n'
RANDOM = """
from hypothesis import given, strategies as st
seen = []
@given(st.integers(0, 10**9))
def test_random(n): seen.append(n)
def test_that_fails(fresh): assert fresh < 0, f"examples: {seen}"
"""


def pytest_on(folder: Path, *options: str, ci: bool = True, seed: str = "", **sources: str) -> str:
    """What pytest says of some files under this project's conftest.py, in CI or not, and its status."""
    (folder / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = optional\naddopts = -q -ra -p no:cacheprovider\n")
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(source)
    env = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST_")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "FRESH_SEED": seed} | ({"CI": "true"} if ci else {})
    plugins = ["-p", "xdist", "-p", "_hypothesis_pytestplugin", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *plugins, *options]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    return f"{done.stdout}\nstatus {done.returncode}"


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_in_ci_a_skip_is_a_failure_that_says_why(tmp_path: Path, processes: tuple[str, ...]) -> None:
    said = pytest_on(tmp_path, *processes, it=SKIPPING, file=MODULE)
    refused = "{} was to be left out, and in CI nothing is: Skipped: {}"
    for name, reason in {
        "test_it.py::test_that_skips_itself": "no browser here\n",
        "test_it.py::test_that_is_marked": "no second core\n",
        "test_it.py::test_that_is_optional_without_a_reason": "no mood\n",
        "test_it.py::test_whose_fixture_skips": "no ranks\n",
        "test_file.py": "could not import 'no_such_package_at_all'",
    }.items():
        assert refused.format(name, reason) in said
    assert "no AVX-512" in said and " 1 passed, 1 skipped" in said and said.endswith("status 1")


def test_elsewhere_what_cannot_run_is_skipped(tmp_path: Path) -> None:
    said = pytest_on(tmp_path, ci=False, it=SKIPPING, file=MODULE)
    assert "1 passed, 6 skipped" in said and said.endswith("status 0")


def test_random_examples_are_the_same_and_fresh_seeds_new_unless_a_seed_is_given(tmp_path: Path) -> None:
    def run(*options: str) -> tuple[str, str]:
        said = pytest_on(tmp_path, *options, it=RANDOM)
        assert ("random examples of seed" in said) == bool(options)
        (seed,), (examples, *_) = re.findall(r"fresh seed, (\d+);", said), re.findall(r"examples: \[([^\]]*)", said)
        return seed, examples

    (first, same), (second, same_again) = run(), run()
    assert first != second and same == same_again != ""
    (seed, others), again = run(f"--hypothesis-seed={first}"), run(f"--hypothesis-seed={first}")
    assert seed == first and others != same and again == (seed, others)
    assert "fresh seed, 12345;" in pytest_on(tmp_path, seed="12345", it=RANDOM)


def test_ci_says_that_it_is_ci() -> None:
    lines = (Path(__file__).parents[1] / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("export CI=true") for line in lines[: lines.index("make test")])
