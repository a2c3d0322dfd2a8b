"""Every message that a user can see is on one page, `tests/messages.txt`, and none has a banned turn of phrase."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from messages import PAGE, SOURCE, collect

ROOT = SOURCE.parents[1]
UNIT = r"(nats|tokens|bytes|numbers|sequences|memory|bits|steps|ms|seconds|one file|one page|one line)"
PER = r"(token|second|rank|step|microbatch|file|op|byte|layer|head|row|parameter|block|sequence)"
BANNED = re.compile(
    rf"\b{UNIT} an? {PER}\b|cannot be had|\bwere had\b|companion|lookout|\bhow they were\b|\blet go\b"
    r"|(?<!there )\bis no (adapter|model|folder|number|array)\b",
    re.IGNORECASE,
)
PROSE = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def banned(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if BANNED.search(line)]


def test_the_page_has_every_message() -> None:
    assert collect() == PAGE.read_text(encoding="utf-8"), "rewrite it with: python tests/messages.py"
    assert collect().count("\n  ") > 600


def test_no_message_has_a_banned_turn_of_phrase() -> None:
    assert banned(collect()) == []


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_page_has_a_banned_turn_of_phrase(path: Path) -> None:
    assert banned(path.read_text(encoding="utf-8")) == []


def test_no_source_has_a_banned_turn_of_phrase() -> None:
    files = [path for path in SOURCE.rglob("*") if path.suffix in (".py", ".js", ".html", ".css")]
    assert {path.name: found for path in files if (found := banned(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize("text", ["1.9 nats a token", "port 80 cannot be had", "12 bytes a rank", "x is no adapter"])
def test_a_banned_turn_of_phrase_is_seen(text: str) -> None:
    assert banned(text) == [text]


def test_a_message_is_found_wherever_it_is_made() -> None:
    assert "lr must" in collect() or "lr=" in collect()
    assert "validation loss" in collect()
