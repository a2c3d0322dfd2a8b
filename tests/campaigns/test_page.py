"""docs/reliability.md has the figures of `campaigns/results/`, and none that failed."""

from __future__ import annotations

import json
import re

from campaigns import CAMPAIGNS
from campaigns.page import BEGIN, END, PAGE, RESULTS, table

RECORDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")}


def test_the_page_shows_the_results() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == table()
    assert all(f"| `{name}` |" in page for name in CAMPAIGNS)


def test_the_row_of_mutants_counts_those_that_ran_and_those_that_survived() -> None:
    (row,) = (line for line in table().splitlines() if line.startswith("| `mutants` |"))
    counts = re.search(r"`mutants` \| (\d+) \|.* killed: (\d+); survived: (\d+);", row)
    assert counts
    total, killed, survived = map(int, counts.groups())
    assert total == RECORDS["mutants"]["figures"]["total"] == killed + survived


def test_the_results_are_of_campaigns_and_without_failures() -> None:
    assert {"fuzz", "kills", "arrays", "threads", "engines", "mutants"} <= set(RECORDS) <= set(CAMPAIGNS)
    assert {name: record["failures"] for name, record in RECORDS.items() if record["failures"]} == {}


def test_the_attacks_were_as_large_as_is_claimed() -> None:
    assert RECORDS["fuzz"]["figures"]["inputs"] >= 200_000
    assert RECORDS["threads"]["figures"]["one-row logits"] >= 100_000
    assert RECORDS["kills"]["figures"]["kill"] >= 1_000


def test_every_folder_s_tests_notice_nine_mutants_of_ten() -> None:
    figures = RECORDS["mutants"]["figures"]
    assert figures["total"] >= 250
    assert set(figures["scores"]) >= {"cli", "explore", "formats", "generate", "kernels", "models", "ops", "train"}
    assert min(figures["scores"].values()) >= 0.9
