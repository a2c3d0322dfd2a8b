"""Everything that the documentation shows is run, and prints what it says; or the page says why not.

Blocks that are marked as slow run in `make test-all` only, which CI does not run.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from pages import DOCS, Block, agrees, all_pages, blocks_of, commands_of, page_blocks, run_page

GUIDES = {  # pages whose test also looks at what the run made
    "README.md": "test_readme.py",
    "docs/blame.md": "cli/test_blame.py",
    "docs/private.md": "train/test_private_guide.py",
    "docs/preferences.md": "train/test_preferences_guide.py",
    "docs/export.md": "formats/test_export_guide.py",
    "docs/training.md": "train/test_training_guide.py",
}
WITH_CODE = [page for page in all_pages() if page not in GUIDES and any(b.is_code for b in page_blocks(page))]
SLOW = [page for page in WITH_CODE if any(b.slow and b.not_run is None for b in page_blocks(page))]


@pytest.mark.parametrize("page", WITH_CODE)
def test_what_a_page_shows_is_what_happens(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW)
def test_what_a_page_shows_is_what_happens_in_the_slow_blocks_too(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path, slow=True)


def test_the_pages_with_a_test_of_their_own_are_run_by_it() -> None:
    for page, test in GUIDES.items():
        assert f'run_page("{page}"' in (DOCS.parent / "tests" / test).read_text(encoding="utf-8")


def without_steps_left(lines: list[str]) -> list[str]:
    """The lines that resume a run with no more steps than the lines before have given it."""
    done: dict[str, int] = {}  # run folder -> its steps
    found = []
    for line in lines:
        steps, run = re.search(r"onfoot train.* --steps (\d+)", line), re.search(r" --(out|resume) ([\w/]+)", line)
        if steps and run:
            found += [line] if run[1] == "resume" and int(steps[1]) <= done.get(run[2], 0) else []
            done[run[2]] = int(steps[1])
    return found


def test_a_run_that_is_resumed_with_a_number_of_steps_has_some_left() -> None:
    first = "onfoot train book.txt --out runs/a --steps 300"
    for steps, left in ((400, 100), (300, 0), (8, -292)):
        resumed = f"onfoot train --resume runs/a --steps {steps} --lr 1e-3"
        assert without_steps_left([first, resumed]) == ([resumed] if left <= 0 else [])
    lines = {
        page: [line for b in page_blocks(page) if b.language in ("sh", "console") for line in b.text.splitlines()]
        for page in all_pages()
    }
    assert {page: found for page, shown in lines.items() if (found := without_steps_left(shown))} == {}


@pytest.mark.slow
def test_the_first_run_prints_the_figures_of_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "tutorials" / "first_run.md").read_text(encoding="utf-8").partition("Stop a run with")[0]
    (tmp_path / "page.md").write_text(re.sub("<!-- run with.*?-->", "", page), encoding="utf-8")
    monkeypatch.setattr("pages.ROOT", tmp_path)
    trained, info = (printed for printed in run_page("page.md", tmp_path / "run").printed[1:])
    parameters = re.search(r"^parameters +[\d,]+$", page, re.MULTILINE)
    assert parameters and agrees(parameters[0], info, False)
    shown, printed = (re.search(r"validation loss ([\d.]+) .*perplexity", text) for text in (page, trained))
    assert shown and printed
    assert float(printed[1]) == pytest.approx(float(shown[1]), abs=0.02)  # rounding differs from machine to machine


def test_what_guides_import_is_in_the_reference() -> None:
    reference = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    listed = {words[0]: words[1:] for words in map(str.split, re.findall(r"{public} (.*)", reference))}
    missing = [
        f"{page}: {module}.{name.strip()}"
        for page in all_pages()
        if not page.startswith("docs/equations/")  # examples beside the derivation, which links to the code
        for module, names in re.findall(
            r"^from (onfoot[\w.]*) import (.*)$", (DOCS.parent / page).read_text("utf-8"), re.M
        )
        for name in names.split(",")
        if module not in listed or (listed[module] and name.strip() not in listed[module])
    ]
    assert missing == []


def test_every_equation_page_has_an_example_that_asserts_something() -> None:
    for page in (page for page in all_pages() if page.startswith("docs/equations/")):
        examples = [block.text for block in page_blocks(page) if block.language == "python"]
        assert any("assert" in example for example in examples), page


def test_a_block_that_is_not_run_says_why() -> None:
    reasons = [block.not_run for page in all_pages() for block in page_blocks(page) if block.not_run is not None]
    assert reasons and all(len(why.split()) >= 2 for why in reasons)


def test_every_output_that_is_shown_is_compared_or_says_why_not() -> None:
    unexplained = [f"{page}, line {line}" for page in all_pages() for line in of_unknown_origin(page_blocks(page))]
    assert unexplained == []


def of_unknown_origin(blocks: list[Block]) -> list[int]:
    """The lines of blocks that look like output, and are neither compared with one nor say why not."""
    found = []
    for before, block in itertools.pairwise([None, *blocks]):
        assert block is not None
        made = block.language.startswith("{")  # a directive of the site
        shows = not block.is_code and not made and (not block.language or block.follows)
        explained = block.not_run is not None or any(block.mark(name) is not None for name in ("output", "file"))
        compared = before is not None and block.follows and before.not_run is None and not block.language
        if shows and not explained and not compared:
            found.append(block.line)
    return found


# The runner itself.


def blocks(*parts: str) -> list[Block]:
    return blocks_of("\n\n".join(parts))


def test_marks_belong_to_the_block_behind_them() -> None:
    first, second = blocks("<!-- slow -->\n<!-- exit 2 -->\n```sh\nonfoot info x\n```", "```\nout\n```")
    assert first.slow and first.mark("exit") == "2" and not first.follows
    assert second.follows and not second.marks
    (alone,) = blocks("```sh\nls\n```", "words")
    assert not alone.marks


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        (("```sh\nls\n```", "```\nout\n```"), []),
        (("```sh\nls\n```", "words", "```\nout\n```"), [7]),
        (("<!-- not run: why not -->\n```sh\nls\n```", "```\nout\n```"), [6]),
        (("```sh\nls\n```", "```json\n{}\n```"), [5]),
        (("```sh\nls\n```", "<!-- output -->\n```json\n{}\n```"), []),
        (("```sh\nls\n```", "words", "```json\n{}\n```"), []),
    ],
)
def test_what_looks_like_output_needs_a_command_or_a_reason(parts: tuple[str, ...], lines: list[int]) -> None:
    assert of_unknown_origin(blocks(*parts)) == lines


def test_unknown_and_lost_marks_are_errors() -> None:
    with pytest.raises(AssertionError, match="unknown mark"):
        blocks("<!-- norun: x -->\n```sh\nls\n```")
    with pytest.raises(AssertionError, match="before no block"):
        blocks("<!-- slow -->", "words", "```sh\nls\n```")


def test_commands_are_joined_and_comments_left_out() -> None:
    assert commands_of('# a\n\nonfoot a \\\n  --b 1  # c\nonfoot d "x\ny"\n') == [
        "onfoot a    --b 1  # c",
        'onfoot d "x\ny"',
    ]


@pytest.mark.parametrize(
    ("shown", "printed", "vary", "same"),
    [
        ("a  b", "x\na b\ny", False, True),
        ("a\n...\nd", "a\nb\nc\nd", False, True),
        ("d\n...\na", "a\nb\nc\nd", False, False),
        ("loss 2.5... nats", "loss 2.5178 nats", False, True),
        ("loss 2.5 nats", "loss 2.6 nats", False, False),
        ("loss 2.5 nats", "loss 2.6 nats", True, True),
        ("loss 2.5 nats", "gain 2.6 nats", True, False),
    ],
)
def test_output_is_compared(shown: str, printed: str, vary: bool, same: bool) -> None:
    assert agrees(shown, printed, vary) is same


@pytest.mark.parametrize(
    "page",
    [
        "```python\nassert 1 == 2\n```",
        "```python\nprint(1)\n```\n\n```\n2\n```",
        "```console\n$ onfoot --version-of-nothing\n```",
        "```console\n$ onfoot table --preset gpt2 --block 0\nno such line\n```",
        "<!-- output of: onfoot table --preset gpt2 --block 0 -->\n```\nno such line\n```",
        '```sh\npip install "onfoot[nothing]"\n```',
        "```sh\nmake nothing\n```",
        "<!-- exit 1 -->\n```sh\ntrue && true\n```",
    ],
)
def test_planted_lies_are_found(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pages.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    (tmp_path / "Makefile").write_text("", encoding="utf-8")
    with pytest.raises((AssertionError, SystemExit)):
        run_page("page.md", tmp_path / "run")
