"""What `onfoot train` does where nothing is said: tokenizer, vocabulary, and the loss in bits per byte."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onfoot.data.compression import xz_loss
from onfoot.data.corpus import Text, builtin_text, first_pieces
from onfoot.train import pretrain
from onfoot.train.options import TrainOptions

WORDS = "the cat sat on the mat and looked at the moon while it rained in the old town by the sea; nobody spoke. "
LETTERS = re.compile(r"[^\W\d_]{3,}")  # a word of three or more letters
SMALL: dict[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": 8, "context": 16, "batch_size": 2, "steps": 2}
QUIET: dict[str, Any] = {"warmup": 1, "eval_every": 2, "eval_windows": 20, "sample_tokens": 0, "quiet": True}


def text_of(n: int) -> list[Text]:
    return [Text("made", text=(WORDS * (n // len(WORDS) + 1))[:n])]


@pytest.mark.parametrize(
    ("characters", "settings", "size"),
    [
        (99_999, {}, 257),  # 256 bytes and the end-of-text token
        (100_000, {}, 300),
        (100_000, {"vocab_size": 280}, 280),
        (130_000, {}, 310),
        (100_000, {"dp_clip": 1.0, "dp_noise": 1.0, "dp_delta": 1e-5}, 257),
        (50, {"tokenizer": "byte"}, 257),
    ],
    ids=str,
)
def test_the_tokenizer_follows_the_length_of_the_text(
    monkeypatch: pytest.MonkeyPatch, characters: int, settings: dict[str, Any], size: int
) -> None:
    monkeypatch.setattr(pretrain, "SMALL_VOCABULARY", 300)
    monkeypatch.setattr(pretrain, "LARGE_VOCABULARY", 310)
    monkeypatch.setattr(pretrain, "LONG", 120_000)
    assert pretrain.make_tokenizer(TrainOptions(**settings), text_of(characters)).size == size


def test_the_tokenizer_has_not_seen_the_held_out_text() -> None:
    train, held_out = (WORDS * 2000)[:90_000], ("zyxwvu " * 2000)[:10_000]
    texts = [Text("made", text=train + held_out)]
    options = TrainOptions(tokenizer="bpe", vocab_size=400)
    tokenizer = pretrain.make_tokenizer(options, texts)
    assert len(tokenizer.encode("zyxwvu")) == 6
    seen = pretrain.make_tokenizer(TrainOptions(tokenizer="bpe", vocab_size=400, validation=0.01), texts)
    assert len(seen.encode("zyxwvu")) < 6


@pytest.mark.parametrize("n", [1, 3, 7, 10, 99])
def test_the_first_characters_of_several_texts(n: int) -> None:
    texts = [Text("a", text="abc"), Text("b", text="defg"), Text("c", text="hij")]
    assert "".join(first_pieces(texts, n)) == "abcdefghij"[:n]


def test_bits_per_byte_of_a_model_of_bytes_are_its_loss(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 40)
    trainer = pretrain.start(tmp_path / "run", TrainOptions(texts=[str(path)], **SMALL, **QUIET))
    loss = trainer.run().validation_loss
    assert loss is not None and trainer.bigram is not None
    said = dict(pretrain.bits_per_byte(trainer, loss))
    assert said["the model"] == pytest.approx(loss / math.log(2), rel=1e-12)
    assert said["the bigram model"] == pytest.approx(trainer.bigram / math.log(2), rel=1e-12)
    assert said["xz -9 after the training text"] < 1.5  # only repeats


def test_bits_per_byte_do_not_depend_on_the_length_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 400)
    options = TrainOptions(texts=[str(path)], tokenizer="bpe", vocab_size=300, **SMALL, **QUIET)
    trainer = pretrain.start(tmp_path / "run", options)
    source: Any = trainer.source
    measured = source.held_out.tokens[1 : 20 * 16 + 1]
    n_bytes = len(trainer.model.tokenizer.decode(measured.tolist()))  # type: ignore[union-attr]
    said = dict(pretrain.bits_per_byte(trainer, 3.0))
    assert said["the model"] == pytest.approx(3.0 * 320 / n_bytes / math.log(2), rel=1e-12)


def test_xz_needs_eight_bits_for_noise_and_almost_none_for_repeats() -> None:
    noise = np.random.default_rng(0).bytes(20_000)
    assert xz_loss(noise, noise[5000:15000]) < 0.3
    assert xz_loss(noise, np.random.default_rng(1).bytes(10_000)) == pytest.approx(8 * math.log(2), rel=0.01)


@pytest.mark.slow
def test_the_default_run_learns_its_text_in_a_minute_and_is_the_same_twice(tmp_path: Path) -> None:
    first, second = (pretrain.start(tmp_path / name, TrainOptions(quiet=True)) for name in ("first", "second"))
    for trainer in (first, second):
        trainer.run()
    said = dict(pretrain.bits_per_byte(first, first.state.best_loss))
    assert said["the model"] * math.log(2) <= 1.30
    assert said["the model"] < said["the bigram model"] - 0.2
    assert len(builtin_text().text or "") > 300_000
    weights = [(tmp_path / name / "last" / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert weights[0] == weights[1]
    assert min(first.state.seconds, second.state.seconds) < 75  # 27 on two free cores
    first.options = replace(first.options, sample_tokens=1000)  # enough to count words
    tokenizer, sample = first.model.tokenizer, first.sample()
    assert tokenizer is not None and sample is not None
    made = sample.removeprefix(tokenizer.decode(first.source.prompt().tolist()))
    known = set(LETTERS.findall(tokenizer.decode(first.source.train.tokens.tolist())))
    words = LETTERS.findall(made)
    assert len(words) > 100 and made != sample
    assert sum(word in known for word in words) >= 0.8 * len(words), words
