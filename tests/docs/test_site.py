"""The site: it builds without a warning, and ten tasks are done from its front page in at most three clicks.

`make docs` builds the site and runs these tests on it; SITE names the folder. Without SITE, they build it themselves.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from pages import DOCS, ROOT

pytestmark = pytest.mark.slow

FOUND = {  # task -> what the last click shows, behind its anchor
    "Where is equation 40 computed?": r'^id="L\d+">\s*dx = .* # eq 40\b',
    "Resume a run with a lower learning rate": r"onfoot train --resume runs/book --lr 5e-4",
    "Which test proves the tied gradient?": r"def test_the_two_paths_of_a_tied_table_add_up",
    "Fine-tune on private data": r"--dp-epsilon E",
    "What does a report of `onfoot check` mean?": r"residual",
    "Run a fine-tune in Ollama": r"ollama create captain",
    "What is the default of `onfoot finetune --lora-plus`?": r"--lora-plus\s+1\.0",
    "Which files are in a run folder?": r"manifest\.json",
    "What does `Model.loss_and_grads` return?": r"gradient",
    "Where is a published formula wrong about the causal mask?": r"The score of a masked token is −∞",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site that `make docs` has built, or one that is built in the same way."""
    if built := os.environ.get("SITE"):
        return ROOT / built
    out = tmp_path_factory.mktemp("site")
    command = next(line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "-m sphinx" in line)
    options = re.search(r"-m sphinx (.*) docs build/site", command)
    assert options and "-W" in options[1] and "-n" in options[1]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options[1].replace("build/doctrees", str(out / "trees")).split(), "docs",
         str(out / "html")],
        cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out / "html"


def text_of(markup: str) -> str:
    markup = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", markup)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", "", markup))).strip()


def links_of(markup: str) -> list[tuple[str, str]]:
    """The text and the address of every link."""
    found = re.findall(r'<a\b[^>]*?href="([^"]*)"[^>]*>(.*?)</a>', markup, re.DOTALL)
    return [(text_of(inner), unescape(address)) for address, inner in found]


def click(page: Path, anchor: str, label: str) -> tuple[Path, str]:
    """The page and the anchor behind a link, chosen by its words: the first one from where the reader is, or any."""
    markup = page.read_text(encoding="utf-8")
    at = markup.index(f'id="{anchor}"') if anchor else 0
    links = links_of(markup[at:]) + links_of(markup)
    chosen = [address for text, address in links if text == label] or [a for text, a in links if label in text]
    assert chosen, f"{page.name} has no link {label!r}"
    file, _, anchor = chosen[0].partition("#")
    return ((page.parent / unquote(file)).resolve() if file else page), anchor


def tasks() -> dict[str, list[str]]:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (DOCS / "trial.md").read_text(encoding="utf-8"), re.MULTILINE)[1:]
    return {task: clicks.split(" → ") for task, clicks in rows}


def test_ten_tasks_are_done_in_three_clicks(site: Path) -> None:
    listed = tasks()
    assert set(listed) == set(FOUND) and len(listed) == 10
    for task, clicks in listed.items():
        assert len(clicks) <= 3, task
        page, anchor = site / "index.html", ""
        for label in clicks:
            page, anchor = click(page, anchor, label)
        markup = page.read_text(encoding="utf-8")
        at = markup.index(f'id="{anchor}"') if anchor else 0
        assert re.search(FOUND[task], text_of(markup[at:])), task


def test_every_page_is_at_most_three_clicks_from_the_front_page(site: Path) -> None:
    reached, new = set(), {site / "index.html"}
    for _ in range(3):
        reached |= new
        addresses = {
            (page, address.partition("#")[0]) for page in new for _, address in links_of(page.read_text("utf-8"))
        }
        targets = {(page.parent / unquote(file)).resolve() for page, file in addresses if file and ":" not in file}
        new = {target for target in targets if target.suffix == ".html" and target.is_file()} - reached
    reached |= new
    pages = {
        site / path.relative_to(DOCS).with_suffix(".html")
        for path in DOCS.rglob("*.md")
        if path.parent.name != "images"
    }
    assert {page.resolve() for page in pages} <= {page.resolve() for page in reached}


def test_formulas_are_mathml_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    page = (site / "equations" / "attention.html").read_text(encoding="utf-8")
    assert page.count("<math") > 80 and "\\mathrm" not in page
    for file in (site / "index.html", site / "equations" / "attention.html", site / "live.html"):
        loaded = re.findall(
            r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="([^"]+)"', file.read_text(encoding="utf-8")
        )
        assert loaded and not [address for address in loaded if re.match(r"[a-z]+:|//", address)]


def test_the_readme_is_a_page_with_its_picture(site: Path) -> None:
    page, anchor = click(site / "index.html", "", "README")
    markup = page.read_text(encoding="utf-8")
    assert (page, anchor) == (site / "overview.html", "") and "hand-written gradient" in text_of(markup)
    (picture,) = re.findall(r'<img [^>]*src="([^"]+explore-tour.gif)"', markup)
    assert (site / picture).is_file()
    for label, file in (("security", "security.html"), ("Changes", "changelog.html")):
        assert click(site / "index.html", "", label)[0] == site / file
    assert click(page, "", "SECURITY.md")[0] == site / "security.html"
    assert not (site / "source" / "README.md.html").exists()


def test_functions_have_space_before_their_arguments_and_matrices_fences_of_their_own(site: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (site / "equations").glob("*.html")]
    logs = [
        name
        for page in pages
        for name in re.findall(r"<mi>(?:log|ln|exp|sin|cos)</mi>(?:<m(?:sub|under|row)>)*<(\w+)", page)
    ]
    assert logs.count("mspace") > 10 and set(logs) <= {"mspace", "mo"}
    after = [what for page in pages for what in re.findall(r"</mtable><mo[^>]*>\)</mo>(</?\w+)", page)]
    assert len(after) > 10 and set(after) == {"</mrow"}


def test_the_search_finds_the_pages_of_a_word_without_a_server(site: Path) -> None:
    script = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(script.removeprefix("Search.setIndex(").removesuffix(")"))

    def pages(word: str) -> set[str]:
        found = [index[terms].get(word, []) for terms in ("terms", "titleterms")]
        numbers = [n for one in found for n in (one if isinstance(one, list) else [one])]
        return {index["docnames"][n] for n in numbers}

    expected = {"softmax": "equations/attention", "ollama": "export", "seccomp": "teaching", "slurm": "parallel"}
    assert {word: page for word, page in expected.items() if page not in pages(word)} == {}  # words are stems
    assert not pages("nosuchword")
    # A browser refuses to fetch the text of a page that was opened as a file, so there are no excerpts to fetch.
    options = (site / "_static" / "documentation_options.js").read_text(encoding="utf-8")
    assert re.search(r"SHOW_SEARCH_SUMMARY: false", options)


def test_the_tables_of_the_paper_link_to_the_line_of_the_code_and_of_the_test(site: Path) -> None:
    page = site / "paper" / "equations.html"
    rows = re.findall(r"<tr\b.*?</tr>", page.read_text(encoding="utf-8"), re.DOTALL)
    numbered = {text_of(row).split(" ")[0]: links_of(row) for row in rows if "<td>" in row}
    assert len(numbered) > 60
    for where, links in numbered.items():
        _, *functions, (test, proof) = links  # an identity has no function
        for name, code in functions:
            assert re.search(
                rf"def {name.rpartition('.')[2]}\b|class {name.rpartition('.')[2]}\b|# eq ", line(page, code)
            ), where
        assert f"def {test}(" in line(page, proof), where
    assert "# eq 25" in line(page, numbered["(25)"][1][1])


def line(page: Path, address: str) -> str:
    """The line of a source file that a link leads to."""
    file, _, anchor = address.partition("#")
    markup = (page.parent / file).resolve().read_text(encoding="utf-8")
    found = re.search(rf'<span id="{anchor}">(.*)$', markup, re.MULTILINE)
    assert found, address
    return text_of(found[1])


def test_the_explorer_is_exported_once_and_opened_at_several_steps(site: Path) -> None:
    frames = {
        page.stem: re.findall(r'<iframe src="([^"]+)"', page.read_text(encoding="utf-8"))
        for page in (site / "live.html", *(site / "equations").glob("*.html"))
    }
    shown = {name: [unescape(address).partition("explorer/")[2] for address in found] for name, found in frames.items()}
    assert shown.pop("live") == ["value.html#tour=1"]
    assert {name for name, found in shown.items() if found} == {"attention", "layer_norm", "network"}
    assert [path.name for path in (site / "explorer").iterdir()] == ["value.html"]
    assert (site / "explorer" / "value.html").stat().st_size > 1e6


def test_the_reference_begins_with_training_and_shows_types(site: Path) -> None:
    commands = re.findall(r"<h2>(onfoot \w+)<", (site / "reference" / "cli.html").read_text(encoding="utf-8"))
    assert commands[:2] == ["onfoot train", "onfoot finetune"] and len(commands) == 18
    text = text_of((site / "reference" / "api.html").read_text(encoding="utf-8"))
    assert re.search(r"attention_forward\(\s*q: Array,.*?\)\s*→\s*tuple\[Array, AttentionSaved\]", text)


def test_a_dead_link_a_missing_docstring_and_an_equation_without_a_target_fail_the_build(tmp_path: Path) -> None:
    (tmp_path / "equations").mkdir()
    (tmp_path / "index.md").write_text(
        "# Planted\n\n## Explanation\n\n[a](equations/one.md) [b](nowhere.md) [c](equations/one.md#nowhere)\n\n"
        "$\\nosuchcommand{x}$\n\n```{public} undocumented\n```\n"
    )
    (tmp_path / "equations" / "one.md").write_text("# One\n\n**(25)** without an anchor\n")
    (tmp_path / "undocumented.py").write_text("__all__ = ['f']\n\n\ndef f():\n    return 1\n")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-n", "-W", "--keep-going", "-c", str(DOCS), str(tmp_path),
         str(tmp_path / "out")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}"},
    )  # fmt: skip
    assert done.returncode != 0
    for expected in (
        "nowhere.md: no such file",
        "index.html: equations/one.html#nowhere: no such anchor",
        "equation (25) has no target",
        "undocumented.f has no docstring",
        "is not known",
    ):
        assert expected in done.stderr, expected
