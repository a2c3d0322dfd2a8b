"""What the process of a submission does before it loads the submission's file: it gives up what it does not need."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onfoot.check.call  # noqa: F401  (the worker needs it when the function raises)
from onfoot.learn.adapters import load
from onfoot.learn.grade_limits import VARIABLE, apply_limits, from_text, limit_processes
from onfoot.learn.grade_sandbox import die_with_parent, forbid_calls, forbid_files, python_paths

PACKAGE = Path(__file__).resolve().parents[1]
KEPT = ("onfoot.check.call", "onfoot.check.isolated")


def load_limited(target: str, adapter: str) -> Any:
    """The function of a submission, loaded under the limits of the environment."""
    limits = from_text(os.environ.pop(VARIABLE))
    die_with_parent()
    if limits.filtered:
        readable = python_paths(hidden=PACKAGE)
        hide_onfoot()
        forbid_files(Path(target).parent, readable)
    apply_limits(limits)
    if not (limits.filtered and forbid_calls()):  # afterwards no limit can be changed
        limit_processes()
    return bounded(load(target, adapter), limits.answer_bytes)


def bounded(function: Callable[..., Any], most: int) -> Callable[..., Any]:
    """The function, which raises instead of returning more bytes than the judge reads."""

    def call(*arguments: Any, **options: Any) -> Any:
        returned = function(*arguments, **options)
        size = size_of(returned)
        if size > most:
            raise ValueError(f"it returns {size:,} bytes; at most {most:,} are read")
        return returned

    return call


def size_of(value: Any) -> int:
    """The bytes of all arrays in a returned value."""
    if isinstance(value, (tuple, list, dict)):
        return sum(map(size_of, value.values() if isinstance(value, dict) else value))
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def hide_onfoot() -> None:
    """Makes `import onfoot` fail: an exercise that is solved with onfoot's own gradients is not solved."""
    for name in [name for name in sys.modules if name.split(".")[0] == "onfoot"]:
        if name not in KEPT:
            del sys.modules[name]
    sys.modules["onfoot"] = None  # type: ignore[assignment]
