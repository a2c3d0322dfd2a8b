"""Every symbol of every formula is explained: on hover, on focus, on a tap, and in one panel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from waiting import VIEWS, open_view, until

from onfoot.explore.glossary import ENTRIES, PAPER, find, symbols_of
from onfoot.explore.study import Study

DOCS = Path(__file__).parents[2] / "docs" / "equations" / "README.md"


def test_every_symbol_of_every_formula_of_the_page_is_in_the_glossary(study: Study) -> None:
    parts = [study.document, study.training, study.optimizer(1e-3, 1), study.lora]
    formulas = {text for part in parts for text in part["math"]}
    assert len(formulas) > 250
    missing = {symbol: text for text in formulas for symbol in symbols_of(text) if find(symbol) is None}
    assert missing == {}


def test_a_formula_is_split_into_the_symbols_that_are_explained() -> None:
    assert symbols_of("Δ_5 = Δ_10 + LNᵇ_5(Δ_6)") == ["Δ_5", "Δ_10", "LNᵇ_5", "Δ_6"]
    assert symbols_of("∂w_6 = a_6ᵗ Δ_7") == ["∂", "w_6", "a_6", "ᵗ", "Δ_7"]
    assert symbols_of("~((Δ_3^h vᵗ) ⊖ ρ) ∘ ρ") == ["~", "Δ_3^h", "v", "ᵗ", "⊖", "ρ", "∘", "ρ"]
    assert symbols_of("an unknown θ_1") == ["θ_1"] and find("θ_1") is None  # so a new symbol would be noticed


def test_an_entry_is_a_plain_sentence_and_a_symbol_has_one() -> None:
    assert len({entry.symbol for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert entry.name and len(entry.meaning) >= 8 and entry.meaning[-1] in ".…", entry


def test_the_paper_is_named_as_the_documentation_names_it() -> None:
    documented = re.sub(r"\s+", " ", DOCS.read_text(encoding="utf-8"))
    author, title, number = re.fullmatch(r"(.+), “(.+)”, (.+)", PAPER).groups()  # type: ignore[union-attr]
    assert f'{author}, "{title}" ({number}' in documented


def tip(page: Any) -> str:
    page.wait_for_selector("#gloss-tip")
    return " ".join(page.locator("#gloss-tip").inner_text().split())


def test_hovering_explains_the_symbol_under_the_pointer(page: Any) -> None:
    page.evaluate("location.hash = 'view=map&step=0.4&cell=0,0'")
    until(page, "document.getElementById('step-name').textContent.startsWith('FC attProj')")
    formula = page.locator('.figure[data-tensor="0.∂w_3"] .formula')
    formula.locator("msubsup").last.wait_for()
    formula.locator("mi", has_text="∂").hover()
    assert "gradient of. How the loss changes" in tip(page)
    formula.locator("mi", has_text="w").hover()
    assert page.locator("#gloss-tip .gloss").get_attribute("data-symbol") == "w_3"
    formula.locator("mi", has_text=re.compile("^t$")).hover()
    assert "transpose. Rows become columns." in tip(page)
    formula.locator("mi", has_text="a").hover()
    assert "here the output of Multi-head attention" in tip(page) and "22 × 32" in tip(page)
    page.locator("#text").hover()
    assert page.locator("#gloss-tip").is_hidden()


def test_focusing_a_formula_lists_its_symbols_and_an_equation_its_paper(page: Any) -> None:
    page.locator('.row[data-step="embedding"]').click()
    formula = page.locator('.figure[data-tensor="Δ_1"] .formula')
    formula.focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "eq"
    assert "Equation 40 of" in tip(page) and PAPER in tip(page) and "NET.2: an equation of onfoot’s own" in tip(page)
    page.keyboard.press("Shift+Tab")
    assert page.locator("#gloss-tip .gloss").evaluate_all("all => all.map(x => x.dataset.symbol)") == [
        "Δ_1 Δ_5 Δ_2",
        "LNᵇ_1",
    ]
    assert formula.get_attribute("aria-describedby") == "gloss-tip"
    page.keyboard.press("Escape")
    assert page.locator("#gloss-tip").is_hidden() and formula.get_attribute("aria-describedby") is None
    assert PAPER in page.locator("footer.cite").inner_text()


def test_a_tap_explains_the_symbol(browser: Any, port: int) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("main[aria-busy=false]")
    page.locator('.row[data-step="embedding"]').tap()
    page.locator('.figure[data-tensor="Δ_1"] .where mo', has_text="∘").first.tap()
    assert "elementwise product" in tip(page)
    box = page.locator("#gloss-tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360
    context.close()


def test_the_panel_lists_every_symbol_and_closes_by_escape(page: Any) -> None:
    page.get_by_role("button", name="Symbols").click()
    panel = page.locator("dialog#symbols[open]")
    assert panel.locator(".gloss").count() == len(ENTRIES)
    assert PAPER in panel.inner_text()
    page.keyboard.press("Escape")
    until(page, "!document.querySelector('dialog[open]')")


def test_the_arithmetic_of_adamw_is_explained_and_every_view_names_the_paper(page: Any) -> None:
    page.locator("#tab-step").click()
    page.wait_for_selector(".arithmetic .sum")
    rows = page.locator(".arithmetic-table tr")
    assert rows.locator(".formula math").count() == 5 and page.locator(".plain-math").count() == 0
    first = rows.first.locator(".formula")
    first.locator("mtext", has_text="lr").hover()
    assert "learning rate. How far a training step moves" in tip(page)
    first.locator("mi", has_text="λ").hover()
    assert "weight decay. By how much" in tip(page)
    rows.nth(3).locator(".formula mi", has_text="β").hover()
    assert "decay rate of v. Of AdamW" in tip(page)
    rows.nth(1).locator(".formula").focus()
    page.keyboard.press("Tab")
    assert "ADAM.3: an equation of onfoot’s own" in tip(page)
    for view in VIEWS:
        open_view(page, view)
        assert PAPER in page.locator("footer.cite").inner_text() and page.locator("footer.cite").is_visible()
