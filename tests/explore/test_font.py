"""The mathematics font: it has every character of the formulas, is small and licensed, and every formula uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from make_font import FAMILY, characters
from waiting import open_view, settled, until

from onfoot.explore.glossary import glossary
from onfoot.explore.page import FONT, STATIC, font, style
from onfoot.explore.study import Study

LOADED = f"[...document.fonts].some(one => one.family.includes('{FAMILY}') && one.status === 'loaded')"
LEAVES = "math :is(mi, mo, mn, mtext)"


def characters_of(node: Any) -> set[str]:
    """The characters that a formula shows."""
    if isinstance(node, str):
        return set(node)
    return {one for child in node[1:] if not isinstance(child, dict) for one in characters_of(child)}


def test_the_font_has_every_character_of_the_formulas_and_a_licence(study: Study) -> None:
    trees = [*study.document["math"].values(), *(entry["tree"] for entry in glossary()["entries"])]
    needed = set().union(*map(characters_of, trees))
    assert len(needed) > 60 and {"Δ", "∑", "⊖"} <= needed
    assert sorted(needed - characters()) == []
    assert font().startswith(b"wOF2") and len(font()) < 80_000
    assert f'url("{FONT}")' in style() and f'"{FAMILY}"' in style()
    licence = (STATIC / "onfoot-math-license.txt").read_text(encoding="utf-8")
    assert "SIL OPEN FONT LICENSE Version 1.1" in licence and "The STIX Fonts Project Authors" in licence


def fonts_of_formulas(page: Any) -> dict[str, int]:
    """The fonts that the browser takes for the formulas, with the number of characters in each."""
    found: dict[str, int] = {}
    session = page.context.new_cdp_session(page)
    session.send("DOM.enable")
    session.send("CSS.enable")
    root = session.send("DOM.getDocument")["root"]["nodeId"]
    for node in session.send("DOM.querySelectorAll", {"nodeId": root, "selector": LEAVES})["nodeIds"]:
        for used in session.send("CSS.getPlatformFontsForNode", {"nodeId": node})["fonts"]:
            name = used["familyName"] if used["isCustomFont"] else f"{used['familyName']} (installed)"
            found[name] = found.get(name, 0) + int(used["glyphCount"])
    session.detach()
    return found


@pytest.mark.parametrize("where", ["served", "exported"])
def test_every_formula_of_the_page_is_set_in_its_own_font(watched: Any, port: int, exported: Path, where: str) -> None:
    page = watched.open(f"http://127.0.0.1:{port}/" if where == "served" else exported.as_uri())
    settled(page)
    until(page, LOADED)
    for view in ("map", "step", "mistakes"):
        open_view(page, view)
        page.wait_for_selector("#panel math")
        used = fonts_of_formulas(page)
        assert set(used) == {FAMILY} and used[FAMILY] > 5, (view, used)
    page.get_by_role("button", name="Symbols").click()
    used = fonts_of_formulas(page)
    assert set(used) == {FAMILY} and used[FAMILY] > 300, used
    allowed = ("file:", "data:") if where == "exported" else (f"http://127.0.0.1:{port}/", "data:")
    assert all(url.startswith(allowed) for url in watched.asked)
