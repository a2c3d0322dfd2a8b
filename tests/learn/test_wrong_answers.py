"""Typical wrong answers, written by somebody who saw only the exercises, are found and named as they were meant.

`wrong/` has six per exercise, each with the sentence by which a teacher would name it; `wrong/named.json` has the name
that the judge gives, as it was compared with that sentence by a reader: null where it gives none.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from onfoot.learn.course import EXERCISES, SOLUTIONS, Exercise
from onfoot.learn.judge import judge

FOLDER = Path(__file__).with_name("wrong")
NAMED: dict[str, list[str | None]] = json.loads((FOLDER / "named.json").read_text(encoding="utf-8"))
QUICK = 1  # answers per exercise that every run judges


def answers(exercise: Exercise) -> list[dict[str, Any]]:
    path = FOLDER / f"wrong_{exercise.stem}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


CASES = [
    pytest.param(exercise, i, id=f"{exercise.stem}-{i}", marks=[] if i < QUICK else pytest.mark.slow)
    for exercise in EXERCISES
    for i in range(len(NAMED[exercise.stem]))
]


@pytest.mark.parametrize(("exercise", "i"), CASES)
def test_a_typical_wrong_answer_is_found_and_named_as_it_was_meant(exercise: Exercise, i: int, tmp_path: Path) -> None:
    for file in SOLUTIONS.glob("*.py"):
        shutil.copy(file, tmp_path)
    wrong = answers(exercise)[i]
    (tmp_path / exercise.file).write_text(wrong["code"], encoding="utf-8")
    verdict = judge(tmp_path, exercise)
    assert verdict.status == "wrong", wrong["mistake"]
    names = [name for part in verdict.parts for name in part.mistakes]
    expected = NAMED[exercise.stem][i]
    assert (expected in names) if expected is not None else not names, (wrong["mistake"], names)


def test_of_six_wrong_answers_to_an_exercise_five_are_named() -> None:
    for exercise in EXERCISES:
        assert len(answers(exercise)) == len(NAMED[exercise.stem]) == 6
        unnamed = Counter(NAMED[exercise.stem])[None]
        assert unnamed <= 1, (exercise.stem, unnamed)
