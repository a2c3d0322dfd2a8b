"""The mutants' campaign itself: its list is up to date, and it tells what is noticed from what is not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from campaigns.mutants import ROOT, SOURCE, Mutant, judge, spread
from campaigns.mutants_list import MUTANTS

REPORT = ("bench/test_report.py",)
PLANTED = [
    Mutant("bench/report.py", "1000 * self.seconds", "10 * self.seconds", REPORT),
    Mutant("bench/report.py", "The best of all rounds.", "The best of them all.", REPORT),
    Mutant("bench/report.py", "no such text", "whatever", REPORT),
    Mutant("bench/report.py", "no such text either", "whatever", REPORT, equivalent="it is not there"),
]


@pytest.mark.parametrize("folder", sorted({m.folder for m in MUTANTS}))
def test_every_mutant_can_be_planted(folder: str) -> None:
    """The text of each stands exactly once in its file: what is rewritten there is rewritten in the list too."""
    stale = [f"{m.name}: {why}" for m in MUTANTS if m.folder == folder and (why := m.stale())]
    assert stale == []


def test_the_list_covers_every_folder_with_tests_that_exist() -> None:
    counted = [m for m in MUTANTS if not m.equivalent]
    assert len(counted) >= 250
    folders = {p.name for p in (SOURCE / "onfoot").iterdir() if p.is_dir() and any(p.glob("*.py"))}
    assert {*Counter(m.folder for m in counted)} == folders | {"onfoot"}
    assert [m.name for m in MUTANTS if m.old == m.new or not m.tests] == []
    named = {test.partition("::")[0] for m in MUTANTS for test in m.tests}
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []
    assert [key for key, n in Counter((m.file, m.old, m.new) for m in MUTANTS).items() if n > 1] == []


def test_a_wrong_line_is_killed_a_harmless_one_survives_and_a_missing_one_is_stale() -> None:
    before = Path(SOURCE / "onfoot" / "bench" / "report.py").read_bytes()
    outcome = judge(PLANTED, workers=1, verbose=False, warm=False)
    bench = outcome.figures["folders"]["bench"]
    assert (bench["killed"], bench["total"], bench["score"]) == (1, 2, 0.5)
    assert bench["survivors"] == [PLANTED[1].name]
    assert (
        len(outcome.failures) == 2 and outcome.failures[0].startswith("stale: ") and "survives" in outcome.failures[1]
    )
    assert len(outcome.figures["equivalent"]) == 1
    assert Path(SOURCE / "onfoot" / "bench" / "report.py").read_bytes() == before


def test_a_part_of_the_list_has_something_of_every_folder() -> None:
    folders = {m.folder for m in MUTANTS}
    some = spread(MUTANTS, len(folders))
    assert {m.folder for m in some} == folders and len(some) == len(folders)
    assert len(spread(MUTANTS, 10_000)) == len(MUTANTS)
