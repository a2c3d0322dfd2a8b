"""The generation loop, compared with a loop without cache, padding and batching."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

import onfoot
from onfoot.formats.tokenizer import Tokenizer
from onfoot.models.model import Model
from oracles import scrambled

CONFIG = onfoot.GPT2Config(vocab_size=31, n_positions=10, n_embd=12, n_layer=2, n_head=2)


def model(config: onfoot.GPT2Config = CONFIG, scale: float = 0.5) -> Model:
    return Model(config, scrambled(onfoot.create(config).params, 0, scale=scale), "float64", "numpy")


def one_by_one(
    m: Model, prompts: list[list[int]], n: int, seed: int, temperature: float, penalty: float = 1.0
) -> list[list[int]]:
    """What generation promises: a row sees its own tokens, at most n_positions of them, and halves a full context.

    Where the context is cut is decided for all rows together, counted from the begin of the longest prompt.
    """
    limit, longest = m.config.n_positions, max(map(len, prompts))
    rows = [list(prompt) for prompt in prompts]
    generators = [np.random.default_rng([seed, row]) for row in range(len(rows))]
    first = 0
    for end in range(longest, longest + n):
        if end - first > limit:
            first = end - max(limit // 2, 1)
        for row, tokens in enumerate(rows):
            seen = tokens[max(first - (longest - len(prompts[row])), 0) :]
            scores = torch.tensor(np.asarray(m.logits(np.array([seen])))[:, -1])
            scores = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), scores)
            if temperature == 0:
                tokens.append(int(scores.argmax()))
                continue
            below = torch.cumsum((scores[0] / temperature).softmax(-1), 0).numpy()
            tokens.append(int((below <= generators[row].random()).sum()))
    return rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 1.7, 0.6])
@pytest.mark.parametrize("lengths", [(3,), (3, 10, 1), (2, 5)], ids=str)
def test_ragged_prompts_slide_as_they_would_without_cache_and_padding(
    lengths: tuple[int, ...], penalty: float, temperature: float
) -> None:
    m, rng = model(), np.random.default_rng(5)
    prompts = [rng.integers(1, 31, n).tolist() for n in lengths]
    out = m.generate(prompts, 33, temperature, seed=3, repetition_penalty=penalty, slide=True)
    assert [row.tolist() for row in out] == one_by_one(m, prompts, 33, 3, temperature, penalty)


def test_the_penalty_does_not_count_the_padding() -> None:
    """Token 0 is the padding and the most likely token here; it is penalised only after it was generated."""
    m = model(scale=0.05)
    m.params["transformer.ln_f.bias"][:] = 1
    m.params["transformer.wte.weight"][0] = 1
    m.params["transformer.wte.weight"][1] = 0.9
    short, long, said = m.generate([[5], [5, 6, 7], [0, 6]], 1, 0.0, repetition_penalty=1.2)
    assert (short[-1], long[-1], said[-1]) == (0, 0, 1)


def test_a_context_of_one_position_slides() -> None:
    m = model(onfoot.GPT2Config(vocab_size=31, n_positions=1, n_embd=12, n_layer=1, n_head=2))
    (out,) = m.generate([[4]], 5, 0.0, slide=True)
    for before, after in pairwise(out):
        assert after == np.argmax(np.asarray(m.logits(np.array([[before]])))[0, -1])


def test_a_context_can_be_filled_to_its_end_and_not_beyond() -> None:
    m = model()
    assert m.generate([[1, 2, 3]], 7, 0.0)[0].size == 10
    with pytest.raises(ValueError, match=r"3 tokens plus 8 new tokens exceeds n_positions=10; .* at most 7 new tokens"):
        m.generate([[1, 2, 3]], 8, 0.0)


def test_every_row_has_its_own_random_generator() -> None:
    m = model(scale=0.1)
    rows = m.generate([[1, 2]] * 3, 8, seed=4)
    assert len({tuple(row.tolist()) for row in rows}) == 3
    assert (rows[1] != m.generate([[1, 2]], 8, seed=5)[0]).any()  # seed + 1 is not the generator of the next row


def pieces() -> Tokenizer:
    """A tokenizer with tokens of several characters: a stop string can be inside one or span two."""
    vocab = {text: i for i, text in enumerate(["ab", "cde", "f", "gh", "x"])}
    backend = Backend(models.WordLevel(vocab, unk_token="x"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, None)


class Script:
    """A random generator whose draws pick given tokens from a flat distribution over 5."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = iter(tokens)

    def random(self) -> float:
        return (next(self.tokens) + 0.5) / 5


def scripted(monkeypatch: pytest.MonkeyPatch, *rows: list[int]) -> Model:
    """A model with equally likely tokens, and predetermined draws per row."""
    m = model(onfoot.GPT2Config(vocab_size=5, n_positions=32, n_embd=4, n_layer=1, n_head=1))
    m.params["transformer.wte.weight"][:] = 0
    m.tokenizer = pieces()
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Script(rows[seed[1]]))
    return m


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["d"], "abcde"),  # inside a token
        (["bc"], "abcde"),  # across two
        (["zz", "f"], "abcdef"),  # the second of two
        (["gh"], "abcdefgh"),  # a token of its own
        (["cdex"], "abcdefghcdex"),
    ],
    ids=str,
)
def test_a_stop_string_ends_a_row_at_any_position(monkeypatch: pytest.MonkeyPatch, stop: list[str], text: str) -> None:
    m = scripted(monkeypatch, [0, 1, 2, 3, 1, 4, 0, 0])
    (out,) = m.generate([[2]], 8, stop=stop)
    assert m.tokenizer is not None and m.tokenizer.decode(out[1:].tolist()) == text


def test_a_stop_string_in_the_prompt_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    m = scripted(monkeypatch, [0, 0, 0])
    assert m.generate([[1]], 3, stop=["d", "ea"])[0].tolist() == [1, 0, 0, 0]


def test_finished_rows_are_padded_with_their_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(tokens: Any) -> Any:
        with monkeypatch.context() as patch:
            return scripted(patch, [3, 0, 0, 0, 0], [0, 2, 1, 3, 0]).generate(tokens, 5, stop_ids=[4, 3])

    assert asked(np.array([[2], [2]])).tolist() == [[2, 3, 3, 3, 3], [2, 0, 2, 1, 3]]
    assert [row.tolist() for row in asked([[2], [2]])] == [[2, 3], [2, 0, 2, 1, 3]]
