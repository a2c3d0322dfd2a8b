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
FRESH = "def test_that_fails(fresh): assert fresh < 0"
RANDOM = """
from hypothesis import given, strategies as st
seen = []
@given(st.integers(0, 10**9))
def test_random(n): seen.append(n)
def test_show(): print("examples:", seen)
"""


def pytest_on(folder: Path, source: str, *options: str, ci: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs pytest on one file under this project's conftest.py, in CI or not."""
    (folder / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = optional\naddopts = -q -ra -p no:cacheprovider\n")
    (folder / "test_it.py").write_text(source)
    env = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder, env=env | ({"CI": "true"} if ci else {}), capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_in_ci_a_skip_is_a_failure_that_says_why(tmp_path: Path, processes: tuple[str, ...]) -> None:
    done = pytest_on(tmp_path, SKIPPING, *processes)
    assert done.returncode == 1
    refused = "test_it.py::{} was to be left out, and in CI nothing is: Skipped: {}\n"
    for name, reason in {
        "test_that_skips_itself": "no browser here",
        "test_that_is_marked": "no second core",
        "test_that_is_optional_without_a_reason": "no mood",
        "test_whose_fixture_skips": "no ranks",
    }.items():
        assert refused.format(name, reason) in done.stdout
    counts = done.stdout.splitlines()[-1]
    assert [f"{n} {what}" in counts for n, what in ((1, "passed"), (1, "skipped"))] == [True, True]
    assert "no AVX-512" in done.stdout  # said, and no failure


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_in_ci_a_file_without_its_package_is_a_failure(tmp_path: Path, processes: tuple[str, ...]) -> None:
    done = pytest_on(tmp_path, MODULE, *processes)
    assert done.returncode not in (0, 5)
    assert "test_it.py was to be left out, and in CI nothing is: Skipped: could not import 'no_such_pack" in done.stdout


@pytest.mark.parametrize("source", [SKIPPING, MODULE], ids=["tests", "a file"])
def test_elsewhere_what_cannot_run_is_skipped(tmp_path: Path, source: str) -> None:
    done = pytest_on(tmp_path, source, ci=False)
    assert done.returncode in (0, 5) and "failed" not in done.stdout and "skipped" in done.stdout


def test_random_examples_are_the_same_each_time_unless_a_seed_is_given(tmp_path: Path) -> None:
    def examples(*options: str) -> str:
        output = pytest_on(tmp_path, RANDOM, "-s", *options).stdout
        said = f"random examples of seed {options[0].split('=')[1]}; {options[0]} repeats them" if options else ""
        assert said in output and ("random examples" in output) == bool(options)
        (line,) = (line for line in output.splitlines() if "examples: [" in line)
        return line.split("examples:")[1]

    same, seven = examples(), examples("--hypothesis-seed=7")
    assert examples() == same and examples("--hypothesis-seed=7") == seven != same


def test_a_failed_test_says_its_fresh_seed_and_a_run_can_have_it_again(tmp_path: Path) -> None:
    first, second = (re.search(r"fresh seed, (\d+);", pytest_on(tmp_path, FRESH).stdout) for _ in range(2))
    assert first is not None and second is not None and first[1] != second[1]
    assert f"fresh seed, {first[1]};" in pytest_on(tmp_path, FRESH, f"--hypothesis-seed={first[1]}").stdout


def test_ci_says_that_it_is_ci() -> None:
    lines = (Path(__file__).parents[1] / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("export CI=true") for line in lines[: lines.index("make test")])
