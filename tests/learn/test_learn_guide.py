"""docs/learn.md has every exercise and every command (tests/docs runs what it shows)."""

from __future__ import annotations

from onfoot.learn import EXERCISES
from onfoot.learn.course import COURSE
from pages import DOCS

GUIDE = (DOCS / "learn.md").read_text(encoding="utf-8")


def test_the_guide_lists_every_exercise_and_command() -> None:
    for exercise in EXERCISES:
        assert f"| {exercise.number} | {exercise.title} |" in GUIDE
    assert f"{len(EXERCISES)} exercises" in GUIDE
    welcome = (COURSE / "README.md").read_text(encoding="utf-8")
    for command in ("check", "hint", "map", "show"):
        assert f"`onfoot learn {command}" in GUIDE and f"`onfoot learn {command}" in welcome
