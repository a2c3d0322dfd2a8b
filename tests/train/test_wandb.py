"""Weights & Biases: a run logged offline by the command, read back from the file that `wandb sync` would upload."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onfoot.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.optional("wandb is a large package that nothing else needs")]
BLOCK, HEADER = 1 << 15, 7  # bytes of a block of LevelDB's log format, and of the headers of the file and of a record
SMALL = ["--n-embd", 16, "--n-layer", 1, "--n-head", 2, "--context", 16, "--batch-size", 2, "--engine", "numpy"]


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    data, at, parts = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block, too short for a header
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


def onfoot(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(w) for w in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60, encoding="utf-8")
    return path


def test_a_run_is_logged_and_can_be_read_back(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "fox-run"
    given = ["--steps", 6, "--eval-every", 3, "--sample-tokens", 0, "--log", "wandb", "--out", run]
    assert onfoot("train", text, *SMALL, *given)[0] == 0
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    steps: dict[int, dict[str, Any]] = {}
    names, config = set(), dict[str, Any]()
    for data in wandb_records(file):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            steps.setdefault(items["_step"], {}).update(items)
        elif record.WhichOneof("record_type") == "run":
            names.add((record.run.project, record.run.display_name))
            config |= {u.key: json.loads(u.value_json) for u in record.run.config.update if u.key}
    assert names == {("onfoot", "fox-run")}
    assert (config["steps"], config["n_embd"], config["lr"]) == (6, 16, 0.003)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    trained, measured = ({r["step"]: r for r in log if name in r} for name in ("loss", "val_loss"))
    assert sorted(trained) == [n for n in sorted(steps) if "train/loss" in steps[n]] == [1, 2, 3, 4, 5, 6]
    for n, record in trained.items():
        for theirs, ours in (("train/loss", "loss"), ("train/lr", "lr"), ("train/grad_norm", "grad_norm")):
            assert steps[n][theirs] == pytest.approx(record[ours], rel=1e-12)
    assert {n: s["validation/loss"] for n, s in steps.items() if "validation/loss" in s} == pytest.approx(
        {n: record["val_loss"] for n, record in measured.items()}
    )


def test_a_user_who_is_not_logged_in_is_told_what_to_do(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    given = [*SMALL, "--steps", 3, "--sample-tokens", 0, "--log", "wandb", "--out", run]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    done = subprocess.run(  # a process of its own: wandb keeps its mode
        [sys.executable, "-m", "onfoot", "train", text, *map(str, given)],
        env={**environment, "HOME": str(tmp_path)},  # where a key would be
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2 and "Traceback" not in said
    assert "Weights & Biases cannot start: No API key configured" in said and "WANDB_MODE=offline" in said
    code, said = onfoot("train", "--resume", run, "--log", "none")  # nothing is lost
    assert code == 0 and (run / "best" / "config.json").is_file()
