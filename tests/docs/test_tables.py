"""The tables and figures in the documentation are what the committed benchmarks say."""

from __future__ import annotations

import importlib.util

import pytest

from pages import ROOT, all_pages

spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
assert spec and spec.loader
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


def test_every_table_is_on_one_page() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in all_pages())
    assert sorted(name for _, name, _, _ in tables.PLACE.findall(text)) == sorted(tables.TABLES)


@pytest.mark.parametrize("page", [page for page in all_pages() if "<!-- end -->" in (ROOT / page).read_text("utf-8")])
def test_the_tables_of_a_page_are_those_of_the_benchmarks(page: str) -> None:
    """If not: `make tables` rewrites them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert tables.rewritten(text) == text


def test_a_changed_figure_is_found() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for shown, wrong in (("1.34 ×", "1.43 ×"), ("1.47 times", "1.74 times")):  # in a table, in a paragraph
        assert tables.rewritten(text.replace(shown, wrong, 1)) == text != text.replace(shown, wrong, 1)
