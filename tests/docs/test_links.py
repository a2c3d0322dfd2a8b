"""No dead link in the documentation: files and anchors of every page, as GitHub reads them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import DOCS, ROOT, all_pages, anchors, prose

LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")
IMAGES = DOCS / "images"


def broken_links(path: Path) -> list[str]:
    broken = []
    for link in ("".join(found) for found in LINK.findall(prose(path))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            broken.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{link}: no such anchor")
    return broken


@pytest.mark.parametrize("page", [*all_pages(), "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_every_relative_link_resolves(page: str) -> None:
    assert broken_links(ROOT / page) == []


def test_planted_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A *heading*, twice\n[a](other.md) [b](#nowhere) [c](#a-heading-twice) `[d](code.md)` [e](https://x.y/z)\n"
    )
    assert broken_links(page) == ["other.md: no such file", "#nowhere: no such anchor"]


def test_every_page_but_the_fragments_can_be_reached_from_the_front_page() -> None:
    reached, new = set(), {DOCS / "index.md"}
    while new:
        reached |= new
        links = {
            (page.parent / link[0].partition("#")[0]).resolve() for page in new for link in LINK.findall(prose(page))
        }
        new = {link for link in links if link.suffix == ".md" and DOCS in link.parents} - reached
    assert {path for path in DOCS.rglob("*.md") if path.parent != IMAGES} <= reached


def test_what_is_written_for_readers_outside_the_folder_has_a_page_of_the_site() -> None:
    pages = {path.read_text(encoding="utf-8").strip() for path in DOCS.glob("*.md")}
    files = [path.name for path in ROOT.glob("*.md")]
    assert {"README.md", "SECURITY.md"} <= set(files)
    assert {f"See [{name}](../{name})." for name in files} <= pages


def test_every_picture_is_remade_by_a_command_and_shown() -> None:
    listed = re.findall(r"^\| ([\w.*-]+) \| `[^`]+`", (IMAGES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    pictures = {path.name for path in IMAGES.iterdir() if path.suffix != ".md"}
    assert pictures == {picture for picture in pictures for name in listed if Path(picture).match(name)}
    assert all(any(Path(picture).match(name) for picture in pictures) for name in listed)
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in all_pages())
    assert not [picture for picture in pictures if f"images/{picture}" not in text]
