"""A new exercise from a template: five files that work as they are, to be changed into the exercise that is wanted."""

from __future__ import annotations

import keyword
from pathlib import Path

from onfoot.learn.course import EXERCISES

GIVEN = '''"""Exercise {number}: {name}. The page is {stem}.md; check with: python check_{stem}.py"""

import numpy as np


def {name}_forward(x, weight):
    """y = x² weight. Given: x (N, C), weight (C,). Returns y (N, C) and what is saved."""
    return x * x * weight, (x, weight)


def {name}_backward(dy, saved):
    """The gradients of x and weight, from dy (N, C), the gradient of y.{to_write}"""
    x, weight = saved
    dx = {dx}  # shape (N, C)
    dweight = {dweight}  # shape (C,)
    return dx, dweight
'''
PAGE = """# Exercise {number}: {name}

File: `{stem}.py`. Write the body of `{name}_backward`.

## What is given

    y[n, c] = x[n, c]² weight[c]

| array | shape | |
|---|---|---|
| `x` | (N, C) | |
| `weight` | (C,) | the same for every row |
| `y`, `dy` | (N, C) | `dy` is the gradient of y |

## What to derive

The one thing that is new in this exercise, and nothing of the answer.

## Identities that you need

## A small example

Numbers for pencil and paper.

## When you are done

`python check_{stem}.py` compares your gradients with finite differences. What is `None` is not written yet.
"""
HINTS = """# Hints for exercise {number}

## 1
Where to look: which shapes there are, and which of them must be summed.

## 2
One entry, written out with its indices.

## 3
The formula in words.
"""
CHECK = '''"""Checks exercise {number} against finite differences: python check_{stem}.py [FILE]"""

import importlib.util
import sys
from pathlib import Path

import numpy as np

import onfoot.check

NAMES = ["dx", "dweight"]  # the gradients of the arguments of {name}_forward, in their order


def main(path):
    exercise = load(path)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((5, 3)), rng.standard_normal(3)]  # odd sizes: a wrong axis cannot hide
    y, saved = exercise.{name}_forward(*inputs)
    found = exercise.{name}_backward(rng.standard_normal(y.shape), saved)
    if found is None:
        print(f"{name}_backward returns nothing: end it with return {{', '.join(NAMES)}}")
        return 1
    if len(NAMES) == 1 and not isinstance(found, (tuple, list)):
        found = (found,)
    if not isinstance(found, (tuple, list)) or len(found) != len(NAMES):
        got = f"{{len(found)}} values" if isinstance(found, (tuple, list)) else f"one {{type(found).__name__}}"
        print(f"{name}_backward must return {{', '.join(NAMES)}}, got {{got}}")
        return 1
    written = [i for i, gradient in enumerate(found) if gradient is not None]
    missing = [name for i, name in enumerate(NAMES) if i not in written]
    passed = False
    if written:
        report = onfoot.check.gradients(
            exercise.{name}_forward,
            without_none(exercise.{name}_backward),
            inputs,
            wrt=written,
            names=[NAMES[i] for i in written],
            saved=True,
        )
        print(report)
        passed = report.passed
    if missing:
        print(f"not written yet: {name}_backward returns None for {{', '.join(missing)}}")
    return 0 if passed and not missing else 1


def without_none(backward):
    def written(dy, saved):
        found = backward(dy, saved)
        if not isinstance(found, (tuple, list)):
            return found  # a single gradient
        return tuple(gradient for gradient in found if gradient is not None)

    written.__qualname__ = backward.__name__
    return written


def load(path):
    if not Path(path).is_file():
        sys.exit(f"{{path}}: no such file; give the file of the exercise, as in: python check_{stem}.py {stem}.py")
    spec = importlib.util.spec_from_file_location("exercise", path)
    exercise = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(exercise)
    except Exception as error:
        sys.exit(f"{{path}} cannot be imported: {{type(error).__name__}}: {{error}}")
    for name in ("{name}_forward", "{name}_backward"):
        if not callable(getattr(exercise, name, None)):
            sys.exit(f"{{path}} has no function {{name}}")
    return exercise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("{stem}.py")))
'''


def stem_of(name: str, number: int | None) -> str:
    """The name of the files; raises a ValueError if they could not be imported."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii() or name != name.lower():
        raise ValueError(f"the name must be a lower-case name of Python such as conv or rms_norm, got {name!r}")
    if number is not None and not 1 <= number <= 99:
        raise ValueError(f"the number must be 1 to 99, got {number}")
    return f"e{number or EXERCISES[-1].number + 1:02}_{name}"


def template_files(name: str, number: int | None = None) -> dict[str, str]:
    """The files of a new exercise, by their path in its folder."""
    stem = stem_of(name, number)
    words = {"name": name, "stem": stem, "number": int(stem[1:3])}
    unsolved = {"dx": "None", "dweight": "None", "to_write": " To write."}
    solved = {"dx": "2 * x * weight * dy", "dweight": "np.sum(x * x * dy, axis=0)", "to_write": ""}
    return {
        f"{stem}.py": GIVEN.format(**words, **unsolved),
        f"{stem}.md": PAGE.format(**words),
        f"{stem}.hints.md": HINTS.format(**words),
        f"solutions/{stem}.py": GIVEN.format(**words, **solved),
        f"check_{stem}.py": CHECK.format(**words),
    }


def write_template(name: str, folder: Path, number: int | None = None) -> list[Path]:
    """Writes the files of a new exercise; raises a ValueError if one of them is there already."""
    files = {folder / path: text for path, text in template_files(name, number).items()}
    for path in files:
        if path.exists():
            raise ValueError(f"{path} exists; choose another name, number or folder")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(files)


def next_steps(name: str, number: int | None = None) -> str:
    """What to do with the files."""
    stem = stem_of(name, number)
    return (
        f"Change the forward pass, then the solution, until this passes: python check_{stem}.py solutions/{stem}.py\n"
        f"Students get {stem}.py, {stem}.md and check_{stem}.py. How it becomes part of the course: docs/teaching.md"
    )
