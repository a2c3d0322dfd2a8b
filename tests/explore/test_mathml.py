"""Formulas as MathML: what a text says is what the elements say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from onfoot.config import GPT2Config
from onfoot.explore.mathml import markup, tree
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
        ("Δ_3^h", "<msubsup><mi>Δ</mi><mn>3</mn><mi>h</mi></msubsup>"),
        ("~b_1", '<mover accent="true"><msub><mi>b</mi><mn>1</mn></msub><mo>~</mo></mover>'),
        ("√d_ρ", "<msqrt><msub><mi>d</mi><mi>ρ</mi></msub></msqrt>"),
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


def test_nothing_of_a_formula_is_lost(study: Study) -> None:
    def letters(text: str) -> list[str]:
        kept = text.replace("ā", "a¯").replace("Σ", "∑").replace("'s", "").replace("'", "′")
        raised = kept.translate(str.maketrans("ᵗᵇ³²", "tb32"))
        return sorted(c for c in raised if c not in " _^{}√()")  # a root takes the place of its brackets

    for text in study.document["math"]:
        if "'s" not in text:
            assert letters("".join(read(text).itertext())) == letters(text), text
