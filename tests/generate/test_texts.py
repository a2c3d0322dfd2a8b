"""Texts where token ids are accepted: `generate` and `loss` encode them, and `generate` decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import onfoot
from onfoot.formats.tokenizer import Tokenizer, add_bos, bpe_tokenizer, byte_tokenizer

PROMPTS = ["über ", "the quick brown fox", "a"]


def model(tokenizer: Tokenizer | None = None, **settings: Any) -> onfoot.Model:
    tokenizer = tokenizer or byte_tokenizer()
    sizes = {"n_positions": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, **settings}
    config = onfoot.GPT2Config(vocab_size=tokenizer.size, bos_token_id=None, eos_token_id=None, **sizes)
    one = onfoot.create(config, 3, "float64", "numpy")
    one.tokenizer = tokenizer
    return one


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return bpe_tokenizer(iter(["the quick brown fox jumps über the lazy dog. " * 20]), 300)


@pytest.mark.parametrize("seed", range(3))
def test_a_text_is_continued_as_its_ids_are_and_as_the_stream_is(words: Tokenizer, seed: int) -> None:
    one = model(words)
    for prompt in PROMPTS:
        text = one.generate(prompt, 12, 0.9, seed=seed)
        ids = np.array(words.encode(prompt))[None]
        assert text == words.decode(one.generate(ids, 12, 0.9, seed=seed)[0].tolist())
        assert text == prompt + "".join(one.stream(prompt, 12, 0.9, seed=seed)) and len(text) > len(prompt)


def test_several_texts_give_a_list_in_the_order_of_the_prompts(words: Tokenizer) -> None:
    one = model(words)
    texts = one.generate(PROMPTS, 9, seed=5)
    rows = one.generate([words.encode(p) for p in PROMPTS], 9, seed=5)
    assert texts == [words.decode(row.tolist()) for row in rows]
    assert one.generate(tuple(PROMPTS), 9, seed=5) == texts
    assert one.generate(PROMPTS[:1], 9, seed=5) == texts[:1]  # a list, although it has one


def test_a_text_ends_before_an_end_token_and_after_a_stop_string(words: Tokenizer) -> None:
    one = model(words)
    ids = one.generate(np.array(words.encode("über "))[None], 12, seed=1)[0]
    known = len(words.encode("über "))
    ended = one.generate("über ", 12, seed=1, stop_ids=[int(ids[known + 4])])
    first = int(np.flatnonzero(ids[known:] == ids[known + 4])[0])
    assert ended == words.decode(ids[: known + first].tolist())
    text = one.generate("über ", 12, seed=1)
    piece = text[8:10]
    end = text.index(piece, len("über ")) + 2
    assert one.generate("über ", 12, seed=1, stop=[piece]) == text[:end]
    assert one.generate("über ", 12, seed=1, stop=piece) == text[:end]  # one string, not two letters
    assert "über " + "".join(one.stream("über ", 12, seed=1, stop=piece)) == text[:end]


def test_the_start_token_of_the_tokenizer_is_seen_by_the_model_but_not_in_the_text() -> None:
    tokenizer = byte_tokenizer()
    add_bos(tokenizer.backend, "<|endoftext|>")
    one = model(tokenizer)
    ids = np.array([[tokenizer.eos_id, *byte_tokenizer().encode("fox")]])
    text = one.generate("fox", 8, 0)
    assert text == "fox" + tokenizer.decode(one.generate(ids, 8, 0)[0, 4:].tolist())
    assert one.loss("fox") == one.loss(ids)


def test_the_loss_of_texts_is_that_of_transformers(words: Tokenizer, tmp_path: Path) -> None:
    one = model(words)
    one.save(tmp_path)
    words.save(tmp_path, 40)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.pad_token = tokenizer.eos_token
    for texts in ("the quick fox", ["the quick fox", "über the lazy dog, and so on.", "fox jumps"]):
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        if isinstance(texts, str):
            batch = {name: x.reshape(1, -1) for name, x in batch.items()}
        labels = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
        with torch.no_grad():
            logits = theirs(**batch).logits[:, :-1]
        expected = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
        assert one.loss(texts) == pytest.approx(expected, rel=1e-12)


def test_what_cannot_be_is_said_in_words() -> None:
    one = model()
    for call, said in (
        (lambda: one.generate("", 3), "an empty text has no tokens"),
        (lambda: one.generate(["fox", ""], 3), "an empty text has no tokens"),
        (lambda: one.generate(["fox", [1, 2]], 3), "1 of 2 items are texts and the others are not"),
        (lambda: one.generate("x" * 39, 2), "exceeds n_positions=40"),
        (lambda: one.loss("x" * 41), "a sequence of 41 tokens exceeds n_positions=40"),
        (lambda: one.loss("fox", np.array([[1, 2, 3]])), "a text has its own next tokens as targets"),
        (lambda: one.logits("fox"), "tokens must be integers"),
        (lambda: one.loss_and_grads(["fox"]), "tokens must be integers"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
    both = model(causal=False)
    with pytest.raises(ValueError, match="several texts need causal=True"):
        both.loss(["fox", "dog jumps"])
    assert both.loss("fox") > 0
    one.tokenizer = None
    for call in (lambda: one.generate("fox", 3), lambda: one.loss("fox"), lambda: one.stream("fox", 3)):
        with pytest.raises(ValueError, match="text needs a tokenizer, but this model has none"):
            call()
