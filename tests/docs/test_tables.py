"""The tables and figures in the documentation are what the committed benchmarks say."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from pages import ROOT, all_pages


def benchmark(name: str) -> Any:
    """A script of benchmarks/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = benchmark("tables")


def test_every_table_is_on_one_page() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in all_pages())
    assert sorted(name for _, name, _, _ in tables.PLACE.findall(text)) == sorted(tables.TABLES)


@pytest.mark.parametrize("page", [page for page in all_pages() if "<!-- end -->" in (ROOT / page).read_text("utf-8")])
def test_the_tables_of_a_page_are_those_of_the_benchmarks(page: str) -> None:
    """If not: `make tables` rewrites them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tables.rewritten(text) == text


def test_the_tables_of_the_estimate_of_several_ranks_are_those_of_its_formulas(
    capsys: pytest.CaptureFixture[str],
) -> None:
    benchmark("parallel").paper()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 12
    shown = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if row not in shown] == []


def test_a_changed_figure_is_found() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for shown, wrong in (("1.34 ×", "1.43 ×"), ("1.47 times", "1.74 times")):  # in a table, in a paragraph
        assert tables.rewritten(text.replace(shown, wrong, 1)) == text != text.replace(shown, wrong, 1)
