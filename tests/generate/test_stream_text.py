"""Text generated piece by piece is the text generated at once."""

from __future__ import annotations

import numpy as np
import pytest

import onfoot
from onfoot.formats.tokenizer import bpe_tokenizer, byte_tokenizer

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
    assert len(pieces) > 5
    assert "".join(one.stream(prompt, 20, 0.9, seed=seed)) == "".join(pieces)


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
