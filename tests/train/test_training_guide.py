"""The guide to the trainer: its Python code, as it stands on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import onfoot
from onfoot.train.options import CHANGEABLE

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_code_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("a rose is a rose is a rose. " * 200, encoding="utf-8")
    names: dict[str, Any] = {}
    first, squares, examples, loop, callbacks, find_lr = BLOCKS
    exec(first.replace("steps=200", "steps=6, sample_tokens=0").replace("eval_every=50", "eval_every=3"), names)
    assert Path("runs/book/checkpoints/step-0000006").is_dir()
    exec(squares, names)
    lines = [json.dumps({"prompt": f"{a}+1=", "completion": f"{a + 1}"}) for a in range(9)]
    Path("examples.jsonl").write_text("\n".join(lines), encoding="utf-8")
    exec(examples, names)
    assert list(Path("runs/tuned").rglob("adapter_config.json"))
    names["model"] = onfoot.load("runs/book")  # the run's best checkpoint
    names["trainer"] = onfoot.Trainer(names["model"], names["Squares"](), onfoot.TrainingOptions(steps=3, quiet=True))
    exec(loop, names)
    assert names["step"].step == 3
    exec(callbacks.replace("runs/book", "runs/again"), names)
    exec(find_lr, names)
    assert names["found"].suggestion > 0
    assert '"perplexity"' in Path("runs/again/log.jsonl").read_text(encoding="utf-8")


def test_the_guide_lists_what_may_change() -> None:
    listed = re.search(r"These may change: (.*?)\. `run\.json`", PAGE, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`--([\w-]+)`", listed[1])) == {name.replace("_", "-") for name in CHANGEABLE}
