"""The process that judges one exercise of one submission: it computes the verdict, and runs the submission beside it.

The question comes as JSON on the standard input, the verdict goes as JSON to the standard output. The process of the
submission is a child of this one, with limits; it only ever receives arrays and returns arrays.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

from onfoot.learn.course import Exercise, get_exercise
from onfoot.learn.grade_limits import MIB, Limits, set_limits
from onfoot.learn.grade_runner import LimitedExercise
from onfoot.learn.grade_sandbox import adopt_orphans, die_with_parent
from onfoot.learn.judge import judge
from onfoot.learn.verdict import Verdict

LONGEST = 4000  # characters of a text: the name of a type is the submission's, too
MEMORY = 6144 * MIB  # of the judge itself


def judge_limited(folder: Path, exercise: Exercise, limits: Limits) -> dict[str, Any]:
    """The verdict on an exercise, as `Verdict.to_dict` has it, and what the submission printed."""
    started: list[LimitedExercise] = []

    def start(path: Path, adapter: str) -> LimitedExercise:
        started.append(LimitedExercise(path, adapter, limits))
        return started[-1]

    try:
        verdict = judge(folder, exercise, start=start)
    except Exception as error:  # whatever it returned, the batch goes on
        verdict = Verdict(exercise, "failed", f"{exercise.file} cannot be judged: {type(error).__name__}")
    finally:
        for function in started:
            function.close()
    found = plain(verdict.to_dict(), str(folder))
    return {**found, "printed": plain(started[0].printed if started else "", str(folder))}


def plain(value: Any, folder: str) -> Any:
    """The value without the name of the temporary folder, and with no text longer than is read."""
    if isinstance(value, str):
        without = value[:LONGEST].replace(folder + "/", "").replace(folder + "\\", "").replace(folder, ".")
        return re.sub(r" \(grade_child\.py, line \d+\)", "", without)  # a line of ours
    if isinstance(value, dict):
        return {key: plain(part, folder) for key, part in value.items()}
    return [plain(part, folder) for part in value] if isinstance(value, list) else value


def main() -> None:
    """Answers one question."""
    question = json.loads(sys.stdin.read())
    answers = sys.stdout
    sys.stdout = sys.stderr
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the submission's process as well
    LimitedExercise.adopts = adopt_orphans()
    set_limits(RLIMIT_AS=MEMORY, RLIMIT_CORE=0)
    verdict = judge_limited(Path(question["folder"]), get_exercise(question["exercise"]), Limits(**question["limits"]))
    # The secret proves that the answer is from here: a process of the same user could write to this pipe.
    answers.write(json.dumps({"secret": question["secret"], "verdict": verdict}))
    answers.flush()
