"""docs/paper/ is complete and true: each item of the documents has a row, and what a row names exists.

The items are in `paper_items.py`, compiled from the documents and not from the pages. A row names a page (with an
anchor), a function of the package and a test; all three are looked up. A numbered equation that has lines of code must
name a function that carries its number.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

import test_equation_ids as equations
from onfoot.ops import Head
from pages import anchors
from paper_items import DISPLAYS, ITEMS, NUMBERED, UNNUMBERED
from raise_instead import fails_without

ROOT = Path(__file__).resolve().parents[1]
PAPER = ROOT / "docs" / "paper"
IDENTITY = "(identity)"  # in the column of code: algebra that the test computes, and no line of the package
ROW = re.compile(
    r"^\| (.+?) \| (.+?) \| \[[^]]+\]\(([^)]+)\) \| (`[\w.]+`|\(identity\)) \| \[`(test_\w+)`\]\(([^)]+)\) \|$"
)


class Row(NamedTuple):
    page: str  # of docs/paper
    heading: str
    item: str
    link: str
    code: str
    test: str
    file: str


def rows_of(page: str, text: str) -> list[Row]:
    rows, heading = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        if not line.startswith("| ") or " | what it says | " in line or (page, heading) not in ITEMS:
            continue
        parts = ROW.match(line)
        assert parts, f"{page}: a row needs item, words, page, code and test: {line[:80]}"
        item, _, link, code, test, file = parts.groups()
        rows.append(Row(page, heading, item, link, code.strip("`"), test, file))
    return rows


def all_rows() -> list[Row]:
    return [row for page in sorted(PAPER.glob("*.md")) for row in rows_of(page.name, page.read_text("utf-8"))]


@cache
def path_of(link: str) -> Path | None:
    """The file that a link of these pages leads to; None if there is none."""
    path = (PAPER / link).resolve()
    return path if path.is_file() else None


@cache
def symbol(name: str) -> Any:
    """The object of this name in the package; None if there is none."""
    parts = f"onfoot.{name}".split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part, None)
        return None if isinstance(found, ModuleType) else found
    return None


@cache
def functions_of(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@cache
def anchors_of(page: Path) -> frozenset[str]:
    return frozenset(anchors(page))


@cache
def carried_by(name: str) -> frozenset[str]:
    """The equations that lines of this function carry; none of an identity."""
    if name == IDENTITY:
        return frozenset()
    comments = equations.ids_of_comments(inspect.getsource(symbol(name)))
    return frozenset(number for _, ids in comments for number in ids or ())


@cache
def in_code() -> dict[str, bool]:
    """Each equation, and whether it has lines of code (and is not only a definition or a property)."""
    return {label.id: not label.place.startswith("(") for label in equations.all_labels()}


def complaints(rows: list[Row]) -> list[str]:
    """Everything that is missing in these rows, or that they name and that does not exist."""
    found = []
    for (page, heading), items in ITEMS.items():
        there = [row.item for row in rows if (row.page, row.heading) == (page, heading)]
        found += [f"{page}, {heading}: no row for {item}" for item in items if item not in there]
        found += [f"{page}, {heading}: {item} is not an item of the document" for item in there if item not in items]
        found += [f"{page}, {heading}: {item} has several rows" for item in set(there) if there.count(item) > 1]
    for row in rows:
        where = f"{row.page}, {row.item}"
        file, _, anchor = row.link.partition("#")
        target = path_of(file)
        if target is None:
            found.append(f"{where}: no page {file}")
        elif anchor and anchor not in anchors_of(target):
            found.append(f"{where}: no anchor #{anchor} on {file}")
        if row.code != IDENTITY and symbol(row.code) is None:
            found.append(f"{where}: onfoot has no {row.code}")
        test = path_of(row.file)
        if test is None or ROOT / "tests" not in test.parents or row.test not in functions_of(test):
            found.append(f"{where}: no test {row.test} in {row.file}")
        if row.heading == "With a number":
            number = row.item.strip("()")
            if anchor != "eq-" + number.replace(".", "-"):
                found.append(f"{where}: its anchor is #{anchor}")
            known = row.code == IDENTITY or symbol(row.code) is not None
            if known and in_code().get(number) and number not in carried_by(row.code):
                found.append(f"{where}: no line of {row.code} carries it")
    return found


def test_every_item_of_the_documents_has_a_page_code_and_a_test() -> None:
    assert complaints(all_rows()) == []


@pytest.mark.slow
def test_each_named_test_fails_once_the_function_beside_it_raises() -> None:
    tests = sorted({f"{path_of(row.file)}::{row.test}" for row in all_rows() if row.code != IDENTITY})
    command = [sys.executable, "-m", "pytest", "-p", "raise_instead", "-p", "no:xdist", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*command, *tests], cwd=ROOT, env=env, capture_output=True, text=True)
    assert re.findall(r".* passes without .*", done.stdout) == []
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_a_test_that_calls_a_function_counts_as_failing_without_it() -> None:
    same = symbol("ops.attention.softmax")  # also bound in this test, under another name
    assert fails_without(same, lambda: same(np.ones(3)), {})
    assert fails_without(symbol("ops.attention_head.Head"), lambda: Head(*range(6)), {})
    assert not fails_without(same, lambda: None, {})
    assert not fails_without(same, lambda: pytest.fail("for another reason"), {})
    assert same(np.ones(2)).tolist() == [0.5, 0.5] and Head(*range(6)).b_v == 5  # they are back


def test_the_lists_have_as_many_items_as_the_documents() -> None:
    assert (len(NUMBERED), NUMBERED[0], NUMBERED[-1]) == (63, "(1)", "(55.b)")
    assert (len(UNNUMBERED), sum(DISPLAYS.values())) == (64, 64)
    assert [f"({number})" for number in equations.OF_THE_PAPER] == NUMBERED
    assert all(len(set(items)) == len(items) for items in ITEMS.values())


def test_the_readme_links_to_every_page_of_the_tables() -> None:
    text = (PAPER / "README.md").read_text("utf-8")
    assert {page for page, _ in ITEMS} == {page.name for page in PAPER.glob("*.md")} - {"README.md"}
    assert all(f"]({page})" in text for page, _ in ITEMS)


def changed(rows: list[Row], which: str, **to: str) -> list[str]:
    """The complaints after one field of an item's row was changed."""
    assert sum(row.item == which for row in rows) == 1
    return complaints([row._replace(**to) if row.item == which else row for row in rows])


def test_planted_omissions_and_wrong_names_are_found() -> None:
    rows = all_rows()
    for item in ("(25)", "§3.1, 7", "Footnote 3", "Table of §4", "Figure of §7", "Appendix B", "table of gradients"):
        (complaint,) = complaints([row for row in rows if row.item != item])
        assert complaint.endswith(f"no row for {item}")
    (complaint,) = complaints([*rows, next(row for row in rows if row.item == "§4")])
    assert complaint.endswith("§4 has several rows")
    assert len(changed(rows, "Footnote 2", item="Footnote 5")) == 2
    assert changed(rows, "Table 1", link="../equations/nowhere.md") == [
        "sections.md, Table 1: no page ../equations/nowhere.md"
    ]
    assert len(changed(rows, "Table 1", link="../equations/attention_head.md#table-9")) == 1
    assert changed(rows, "Table 1", code="tables.table_9") == ["sections.md, Table 1: onfoot has no tables.table_9"]
    assert len(changed(rows, "Table 1", code="no_such_module.table_1")) == 1
    assert len(changed(rows, "Table 1", code="tables")) == 1  # a module is not a function
    assert len(changed(rows, "Table 1", test="test_that_nobody_wrote")) == 1
    assert len(changed(rows, "Table 1", file="../../tests/test_readme.py")) == 1  # there, but not in this file
    assert len(changed(rows, "Table 1", file="../../src/onfoot/tables.py")) == 1
    assert len(changed(rows, "(25)", link="../equations/attention.md#eq-26")) == 1
    (complaint,) = changed(rows, "(25)", code="ops.attention.visible")
    assert complaint.endswith("no line of ops.attention.visible carries it")
    (complaint,) = changed(rows, "(25)", code=IDENTITY)  # but a line of the package computes it
    assert complaint.endswith("no line of (identity) carries it")


@pytest.mark.parametrize("line", ["| (25) | words | page | `code` | test |", "| (25) | words | [p](q.md) | `c` |"])
def test_a_row_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(AssertionError, match="a row needs"):
        rows_of("equations.md", f"## With a number\n\n{line}\n")
