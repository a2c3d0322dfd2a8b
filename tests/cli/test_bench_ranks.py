"""`onfoot bench --ranks`: results are measured, printed and written; invalid arguments are rejected."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onfoot.cli import app, bench_ranks

TINY = {"layers": 1, "width": 16, "heads": 2, "vocab": 32, "context": 8, "rows": 2, "bucket_mb": 0.005}
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
try:
    import mpi4py
except ImportError:
    mpi4py = None  # type: ignore[assignment]


@pytest.mark.skipif(MPIEXEC is None or mpi4py is None, reason='needs pip install "onfoot[mpi]"')
def test_each_number_of_ranks_is_measured_with_and_without_sharding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ranks, "SIZES", TINY)
    monkeypatch.setenv("COLUMNS", "160")
    result = CliRunner().invoke(app, ["bench", "--ranks", "1,3", "--rounds", "1", "--out", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(r["ranks"], r["shard"]) for r in found] == [(1, False), (3, False), (3, True)]
    assert {r["tokens"] for r in found} == {3 * 8}  # one row per rank, and the same batch for every count
    assert found[0]["hidden"] is None and all(r["hidden"] <= 1 and r["memory_mb"] > 10 for r in found[1:])
    assert {"during: waiting", "after: waiting", "sums", "update"} <= set(found[1]["seconds"])
    assert "memory per rank" in result.output and result.output.count("sharded") >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "two"], '--ranks must be positive integers such as "1,2,4", got two'),
        (["--ranks", "1,0"], '--ranks must be positive integers such as "1,2,4", got 1,0'),
        (["--ranks", ","], '--ranks must be positive integers such as "1,2,4", got ,'),
        (["--ranks", "1", "--rounds", "0"], "--rounds must be >= 1, got 0"),
        (["--ranks", "1", "full-4x256", "--threads", "1"], "--ranks cannot be used with --threads, JOBS"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2 and message in result.output.replace("\n", " ")


def test_without_mpi4py_one_rank_is_measured_and_several_name_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = (
        f"from onfoot.cli import bench_ranks; bench_ranks.SIZES = {TINY!r}; bench_ranks.bench_ranks('1', 1); "
        "from onfoot.cli import app; app(['bench', '--ranks', '1,2'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert result.returncode == 2 and "tokens per step" in result.stdout, result.stderr
    assert 'mpi4py is not installed; install mpi4py and MPICH with pip install "onfoot[mpi]"' in result.stderr
    assert "Traceback" not in result.stderr
