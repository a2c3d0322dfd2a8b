"""What the process of a submission does before it loads the submission's file: it gives up what it does not need."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import onfoot
import onfoot.check.call  # the worker needs it when the function raises
from onfoot.learn.adapters import load
from onfoot.learn.grade_limits import VARIABLE, apply_limits, from_text, limit_processes
from onfoot.learn.grade_sandbox import die_with_parent, forbid_calls, forbid_files, python_paths

KEPT = ("onfoot.check.call", "onfoot.check.isolated")


def load_limited(target: str, adapter: str) -> Any:
    """The function of a submission, loaded under the limits of the environment."""
    limits = from_text(os.environ.pop(VARIABLE))
    die_with_parent()
    if limits.filtered:
        readable = python_paths(hidden=Path(onfoot.__file__).parent)
        hide_onfoot()
        forbid_files(Path(target).parent, readable)
    apply_limits(limits)
    if not (limits.filtered and forbid_calls()):  # afterwards no limit can be changed
        limit_processes()
    return load(target, adapter)


def hide_onfoot() -> None:
    """Makes `import onfoot` fail: an exercise that is solved with onfoot's own gradients is not solved."""
    for name in [name for name in sys.modules if name.split(".")[0] == "onfoot"]:
        if name not in KEPT:
            del sys.modules[name]
    sys.modules["onfoot"] = None  # type: ignore[assignment]
