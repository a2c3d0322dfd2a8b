"""What the checker says about an exercise is said in words that its file or its page has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onfoot.check.mistakes import mistakes_of
from onfoot.check.words import ARGUMENTS, PIECES
from onfoot.learn.course import COURSE, EXERCISES, Exercise, foundations
from onfoot.learn.words import FACTORS, factor_words, own_words

SYMBOLS = (
    *("dout", "γ", "ā", "x̂", "B·n", "Φ", "φ", "ρ", "σ", "δ", "Δ", "μ", "θ", "α", "β", "∘", "m̂", "v̂"),
    *("d_k", "d_v", "y_pred", "y_gt", "dS", "diag(", "ddof", "ohe", "normed", "rstd", "drho", "draw", "scale"),
)
NAMED = json.loads((Path(__file__).parent / "wrong" / "named.json").read_text(encoding="utf-8"))


def known(exercise: Exercise) -> str:
    """The file and page of an exercise, and of those whose files it imports."""
    return "".join(
        (COURSE / f).read_text(encoding="utf-8") for one in (exercise, *foundations(exercise)) for f in one.files
    )


@pytest.mark.parametrize("exercise", EXERCISES, ids=[one.stem for one in EXERCISES])
def test_no_symbol_is_used_that_the_exercise_does_not_have(exercise: Exercise) -> None:
    text = known(exercise)
    for part in exercise.parts:
        options = part.layer.with_options(part.options)
        said = [words for one in mistakes_of(part.layer, options) for words in (one.name, one.explains)]
        said += [words for name in vars(part.layer.pieces) for words in PIECES.get(name, ())]
        said += [
            f"{part.layer.gradients[0]} is {name} = 24 times too {how}"
            for name in FACTORS
            for how in ("small", "large")
        ]
        shown = [own_words(one, part.function) for one in said if one]
        assert [(s, one) for one in shown for s in SYMBOLS if s in one and s not in text] == []
        assert len(shown) > 5
    assert [(s, one) for one in NAMED[exercise.stem] for s in SYMBOLS if one and s in one and s not in text] == []


def test_a_word_is_translated_and_another_that_contains_it_is_not() -> None:
    assert own_words("dbias: doutᵗ x, dout, my_dout", "linear_backward") == "dbias: dyᵗ x, dy, my_dout"
    assert own_words("the upstream gradient dout is ignored", "tied_backward").endswith("dlogits is ignored")
    assert own_words(ARGUMENTS["cumulative"], "gelu_tanh_backward") == "(1 + tanh u)/2"


def test_a_factor_is_explained() -> None:
    name = "dbias is B·n = 24 times too small"
    assert own_words(name, "linear_backward") == "dbias is 24 times too small"
    assert (
        factor_words(name)
        == "24 is the number of tokens in the batch: as if averaged over the tokens, where a sum belongs."
    )
    assert factor_words("dk is √d_k = 2.65 times too large") == "2.65 is √D: the division by √D is missing."
    assert own_words("mean(g ∘ ā) is d times too large", "layer_norm_backward") == (
        "mean(g * normed) is the number of features times too large"
    )
    assert factor_words("dx is 2 times too large") == ""
