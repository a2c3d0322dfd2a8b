"""Text generated piece by piece is the text generated at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.formats.tokenizer import bpe_tokenizer, byte_tokenizer
from onfoot.generate import loop

CONFIG = onfoot.GPT2Config(vocab_size=300, n_positions=48, n_embd=16, n_layer=1, n_head=2)


def model(tokenizer: str = "bpe") -> onfoot.Model:
    made = onfoot.create(CONFIG, 3)
    made.params["transformer.wte.weight"][...] *= 30  # far from uniform
    made.tokenizer = byte_tokenizer() if tokenizer == "byte" else bpe_tokenizer(iter(["über naïve café " * 40]), 290)
    return made


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_pieces_are_the_text(tokenizer: str, seed: int) -> None:
    one = model(tokenizer)
    assert one.tokenizer is not None
    prompt = one.tokenizer.encode("naïve ")
    ids = one.generate([np.array(prompt)], 20, 0.9, seed=seed)[0].tolist()
    pieces = list(one.stream("naïve ", 20, 0.9, seed=seed))
    ends = ids[:-1] if ids[-1] in one.eos_ids else ids
    assert one.tokenizer.decode(prompt) + "".join(pieces) == one.tokenizer.decode(ends)
    assert len(pieces) > 5 and "" not in pieces
    assert "".join(one.stream(prompt, 20, 0.9, seed=seed)) == "".join(pieces)


def test_no_piece_is_empty_where_a_character_takes_several_tokens() -> None:
    one = model("byte")
    assert one.tokenizer is not None
    euro = one.tokenizer.encode("€")  # three bytes: nothing can be shown before the last

    def next_byte(*_: Any, **__: Any) -> Iterator[np.ndarray]:
        return (np.array([token]) for token in [*euro, *euro, *one.tokenizer.encode("abc"), *euro[:1]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "stream", next_byte)
        assert list(one.stream("x")) == ["€", "€", "a", "b", "c", "\ufffd"]
        assert list(one.stream("x", stop="€")) == ["€"]


def test_it_ends_after_a_stop_string() -> None:
    text = "".join(model().stream("über ", 20, 0))
    assert "".join(model().stream("über ", 20, 0, stop=[text[3:5]])) == text[: text.index(text[3:5]) + 2]


def test_errors_come_before_the_first_piece() -> None:
    one = model()
    with pytest.raises(ValueError, match="exceeds n_positions=48"):
        one.stream("über", 100)
    with pytest.raises(ValueError, match="an empty prompt has no tokens"):
        one.stream("")
    with pytest.raises(ValueError, match="temperature must be >= 0"):
        one.stream("über", temperature=-1)
    one.tokenizer = None
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        one.stream("über")
