"""Formulas as MathML: the elements have the same content as the text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from onfoot.config import GPT2Config
from onfoot.explore.mathml import markup, tree
from onfoot.explore.page import script
from onfoot.explore.study import Study
from onfoot.tables import formulas

KNOWN = {"math", "mi", "mn", "mo", "mtext", "mspace", "msub", "msup", "msubsup", "mover", "msqrt", "mrow"}
CHILDREN = {"msub": 2, "msup": 2, "msubsup": 3, "mover": 2}


def read(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(markup(tree(text)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a_5", "<msub><mi>a</mi><mn>5</mn></msub>"),
        ("w_tokᵗ", "<msubsup><mi>w</mi><mtext>tok</mtext><mi>t</mi></msubsup>"),
        ("Δ_3^h", '<msubsup><mi mathvariant="normal">Δ</mi><mn>3</mn><mi>h</mi></msubsup>'),
        ("~b_1", '<mover accent="true"><msub><mi>b</mi><mn>1</mn></msub><mo>~</mo></mover>'),
        ("√d_ρ", '<msqrt><msub><mi>d</mi><mi mathvariant="normal">ρ</mi></msub></msqrt>'),
        ("g'(a_7)", '<msup><mi>g</mi><mo>′</mo></msup><mo stretchy="false">(</mo><msub><mi>a</mi><mn>7</mn></msub>'),
        ("−∞", "<mn>−∞</mn>"),
        ("a < b", "<mo>&lt;</mo>"),
    ],
)
def test_scripts_accents_and_roots_are_elements(text: str, expected: str) -> None:
    assert expected in markup(tree(text))


def test_every_formula_of_the_tables_and_of_the_page_becomes_well_formed_mathml(study: Study) -> None:
    texts = {formula.text for formula in formulas(GPT2Config()).values()} | set(study.document["math"])
    assert len(texts) > 120
    for text in texts:
        for element in read(text).iter():
            assert element.tag in KNOWN, text
            assert len(element) == CHILDREN.get(element.tag, len(element)), text
            assert not (element.text and "_" in element.text), text


def test_non_latin_letters_are_upright(study: Study) -> None:
    """Otherwise a machine without a mathematical font shows boxes instead of Δ, ρ and ∂."""
    letters = [element for text in study.document["math"] for element in read(text).iter("mi")]
    others = [element for element in letters if not (element.text or "").isascii()]
    assert {element.text for element in others} >= {"Δ", "ρ", "∂", "σ"}
    assert all(element.get("mathvariant") == "normal" for element in others)


def test_every_equation_that_the_page_names_is_derived_in_the_docs(study: Study) -> None:
    pages = Path(__file__).resolve().parents[2] / "docs" / "equations"
    labels = {id for page in pages.glob("*.md") for id in re.findall(r"\*\*\(([\w.]+)\)\*\*", page.read_text("utf-8"))}
    named = {id for tensor in study.tensors for id in tensor.formula.equations}
    named |= set(re.findall(r'line\("([A-Z]+\.\d)"', script()))  # those of the optimizer's arithmetic
    assert len(named) > 25 and "ADAM.5" in named
    assert named <= labels


def test_nothing_of_a_formula_is_lost(study: Study) -> None:
    def letters(text: str) -> list[str]:
        kept = text.replace("ā", "a¯").replace("Σ", "∑").replace("'s", "").replace("'", "′")
        raised = kept.translate(str.maketrans("ᵗᵇ³²", "tb32"))
        return sorted(c for c in raised if c not in " _^{}√()")  # a root takes the place of its brackets

    formulas = [text for text in study.document["math"] if "'s" not in text]
    assert len(formulas) > 90
    for text in formulas:
        assert letters("".join(read(text).itertext())) == letters(text), text
