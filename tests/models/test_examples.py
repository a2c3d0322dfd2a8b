"""Gradients per example: against the gradients of each example alone, and against PyTorch's autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import onfoot
from llama_oracle import batch as llama_batch
from llama_oracle import in_float64, random_config, scrambled_llama
from onfoot.models import examples
from onfoot.models.model import Model
from onfoot.models.step import checked_batch
from oracles import assert_close, gpt2_logits, scrambled

EXACT = 1e-10
ROUNDED = {"float64": EXACT, "float32": 2e-4}
Grads = dict[str, np.ndarray]


def gpt2(tied: bool, engine: str = "numpy", dtype: str = "float64", **changes: Any) -> Model:
    """A small model of odd sizes, away from its initial values."""
    sizes = {"vocab_size": 61, "n_positions": 23, "n_embd": 15, "n_layer": 2, "n_head": 3, "n_inner": 34} | changes
    config = onfoot.GPT2Config(tie_word_embeddings=tied, lm_head_bias=not tied, **sizes)
    return Model(config, scrambled(onfoot.create(config).params, 1), dtype, engine)


def llama(tied: bool, engine: str = "numpy", dtype: str = "float64", seed: int = 3) -> Model:
    return scrambled_llama(random_config(seed, 2, tied, "qwen2", vocab_size=53), seed, dtype, engine)


def with_lora(model: Model, targets: list[str] | None) -> Model:
    """LoRA layers away from their initial values, where half of all gradients are 0."""
    model.add_lora(3, 5.0, targets)
    rng = np.random.default_rng(8)
    for name in sorted(model.trainable):
        model.params[name] = rng.normal(0, 0.3, model.params[name].shape).astype(model.dtype)
    return model


def a_batch(model: Model, seed: int, b: int = 4, t: int = 13) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that repeat and targets, a third of them −100, all of them in the second row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 7, (b, t))
    targets = rng.integers(0, model.config.vocab_size, (b, t))
    targets[rng.random((b, t)) < 0.3] = -100
    targets[0, 0], targets[1] = 3, -100
    return tokens, targets


def some_segments(seed: int, b: int = 4, t: int = 13) -> np.ndarray:
    """One to five examples per row."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(0, 5, (b, t)), axis=1)


def pieces(tokens: np.ndarray, targets: np.ndarray, segments: np.ndarray | None) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every example as a batch of its own."""
    numbers = np.zeros_like(tokens) if segments is None else segments
    return [
        (tokens[b][numbers[b] == k][None], targets[b][numbers[b] == k][None])
        for b in range(len(tokens))
        for k in np.unique(numbers[b])
    ]


def one_by_one(model: Model, parts: list[tuple[np.ndarray, np.ndarray]], divisor: float) -> list[Grads]:
    """The gradients of every example alone, as `loss_and_grads` has them."""
    return [
        {name: np.asarray(g, np.float64) for name, g in model.loss_and_grads(*part, divisor=divisor)[1].items()}
        for part in parts
    ]


def norm(grads: Grads) -> float:
    return float(np.sqrt(sum((g**2).sum() for g in grads.values())))


def agree(model: Model, expected: list[Grads], batch: tuple[Any, Any], segments: Any, tolerance: float) -> None:
    """Norms, and every example's gradient of every parameter."""
    assert_close(model.example_norms(*batch, segments=segments), [norm(g) for g in expected], tolerance, "norms")
    grads = model.example_grads(*batch, segments=segments)
    assert grads.keys() == model.trainable
    for name, each in grads.items():
        assert_close(np.asarray(each), np.stack([g[name] for g in expected]), tolerance, name)


MODELS: dict[str, Callable[..., Model]] = {
    "gpt2 tied": lambda **how: gpt2(True, **how),
    "gpt2 untied": lambda **how: gpt2(False, **how),
    "gpt2 wide": lambda **how: gpt2(True, n_embd=36, n_inner=40, vocab_size=97, **how),
    "gpt2 LoRA": lambda **how: with_lora(gpt2(True, **how), None),
    "gpt2 LoRA on parts": lambda **how: with_lora(gpt2(False, **how), ["c_attn.q", "c_attn.v", "lm_head"]),
    "llama tied": lambda **how: llama(True, **how),
    "llama untied": lambda **how: llama(False, **how),
    "llama LoRA": lambda **how: with_lora(llama(True, **how), None),
}
ENGINES = [("numpy", "float64"), ("torch", "float64"), ("numba", "float32")]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(("engine", "dtype"), ENGINES)
@pytest.mark.parametrize("kind", MODELS)
def test_examples_have_the_gradients_of_each_alone(kind: str, engine: str, dtype: str, packed: bool) -> None:
    model = MODELS[kind](engine=engine, dtype=dtype)
    batch = a_batch(model, 5)
    segments = some_segments(6) if packed else None
    divisor = float((batch[1] != -100).sum())
    expected = one_by_one(model, pieces(*batch, segments), divisor)
    agree(model, expected, batch, segments, ROUNDED[dtype])


def by_autograd(
    params: Grads, logits: Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor], part: Any, divisor: float
) -> Grads:
    leaves = {k: torch.tensor(np.asarray(v), dtype=torch.float64, requires_grad=True) for k, v in params.items()}
    y = logits(leaves, torch.tensor(part[0]))
    target = torch.tensor(part[1]).flatten()
    (F.cross_entropy(y.flatten(0, 1), target, ignore_index=-100, reduction="sum") / divisor).backward()
    return {k: v.grad.numpy() if v.grad is not None else np.zeros(v.shape) for k, v in leaves.items()}


@pytest.mark.parametrize(("rows", "long"), [(13, 0), (30, 64)], ids=["one by one", "a few"])
@pytest.mark.parametrize("kind", ["gpt2 tied", "gpt2 wide", "llama untied", "gpt2 LoRA"])
@pytest.mark.parametrize(("engine", "dtype"), ENGINES)
def test_groups_of_any_size_give_the_same(
    monkeypatch: pytest.MonkeyPatch, rows: int, long: int, kind: str, engine: str, dtype: str
) -> None:
    model = MODELS[kind](engine=engine, dtype=dtype)
    batch, segments = a_batch(model, 5), some_segments(6)
    divisor = float((batch[1] != -100).sum())
    expected = one_by_one(model, pieces(*batch, segments), divisor)
    monkeypatch.setattr(examples, "ROWS", rows)
    monkeypatch.setattr(examples, "LONG", long)
    agree(model, expected, batch, segments, ROUNDED[dtype])


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("width", [15, 36])
def test_examples_of_gpt2_equal_autograd(tied: bool, packed: bool, width: int) -> None:
    model = gpt2(tied, n_embd=width)
    batch, segments = a_batch(model, 15), some_segments(16) if packed else None
    divisor = float((batch[1] != -100).sum())
    expected = [
        by_autograd(dict(model.params), lambda p, x: gpt2_logits(p, model.config, x), part, divisor)
        for part in pieces(*batch, segments)
    ]
    agree(model, expected, batch, segments, EXACT)


@pytest.mark.parametrize("targets", [["c_attn", "c_fc"], ["c_attn.q", "c_attn.k", "c_proj"]], ids=["whole", "parts"])
def test_examples_of_lora_equal_autograd(targets: list[str]) -> None:
    model = with_lora(gpt2(True), targets)
    adapter = model.adapters["default"]

    def logits(leaves: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        """The network with the low-rank products added to the weights."""
        merged = {name: value for name, value in leaves.items() if ".lora_" not in name}
        for name, lora in adapter.layers.items():
            low_rank = lora.scale * (leaves[adapter.up(name)] @ leaves[adapter.down(name)]).T
            weight = merged[f"{lora.base_layer}.weight"]
            columns = lora.columns or slice(0, weight.shape[1])
            padded = F.pad(low_rank, (columns.start, weight.shape[1] - columns.stop))
            merged[f"{lora.base_layer}.weight"] = weight + padded
        return gpt2_logits(merged, model.config, tokens)

    batch, segments = a_batch(model, 25), some_segments(26)
    divisor = float((batch[1] != -100).sum())
    all_grads = [by_autograd(dict(model.params), logits, part, divisor) for part in pieces(*batch, segments)]
    expected = [{name: g[name] for name in model.trainable} for g in all_grads]
    agree(model, expected, batch, segments, EXACT)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_examples_of_llama_equal_autograd(tied: bool, tmp_path: Path) -> None:
    model = llama(tied)
    batch, segments = llama_batch(model.config, 4, 3, 11), some_segments(6, 3, 11)
    divisor = float((batch[1] != -100).sum())
    model.save(tmp_path)
    expected = []
    with in_float64():
        for tokens, targets in pieces(*batch, segments):
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
            y = theirs.eval()(torch.tensor(tokens)).logits.flatten(0, 1)
            loss = F.cross_entropy(y, torch.tensor(targets).flatten(), ignore_index=-100, reduction="sum")
            (loss / divisor).backward()
            expected.append({name: p.grad.numpy() for name, p in theirs.named_parameters()})
    agree(model, expected, batch, segments, EXACT)


@pytest.mark.parametrize("kind", MODELS)
def test_the_gradients_of_the_examples_sum_to_that_of_the_batch(kind: str) -> None:
    model = MODELS[kind]()
    batch, segments = a_batch(model, 35), some_segments(36)
    grads = model.loss_and_grads(*batch, segments=segments)[1]
    for name, each in model.example_grads(*batch, segments=segments).items():
        assert_close(each.sum(axis=0), grads[name], EXACT, name)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("engine", "dtype"), ENGINES)
def test_a_weighted_sum_is_that_of_the_gradients(kind: str, engine: str, dtype: str) -> None:
    model = MODELS[kind](engine=engine, dtype=dtype)
    batch, segments = a_batch(model, 45), some_segments(46)
    each = model.example_grads(*batch, segments=segments)
    checked = checked_batch(model, *batch, None, segments)
    weights = np.random.default_rng(1).normal(size=len(each[next(iter(each))]))
    sums: Grads = {}
    examples.example_pass(model, checked).weighted(weights, sums.__setitem__)
    assert sums.keys() == model.trainable
    for name, total in sums.items():
        expected = np.tensordot(weights, np.asarray(each[name], np.float64), 1)
        assert_close(np.asarray(total), expected, ROUNDED[dtype], name)
        assert total.dtype == model.params[name].dtype


def test_norms_scale_with_the_divisor_and_move_with_their_rows() -> None:
    model = gpt2(True)
    tokens, targets = a_batch(model, 55)
    norms = model.example_norms(tokens, targets, divisor=1.0)
    assert_close(7 * model.example_norms(tokens, targets, divisor=7.0), norms, EXACT)
    order = [2, 0, 3, 1]
    assert_close(model.example_norms(tokens[order], targets[order], divisor=1.0), norms[order], EXACT)
    assert norms[1] == 0  # all its targets are −100


def test_without_targets_each_token_predicts_the_next_of_its_own_example() -> None:
    model = gpt2(True)
    tokens, segments = a_batch(model, 65)[0], some_segments(66)
    parts = [(part[0], None) for part in pieces(tokens, tokens, segments) if part[0].shape[1] > 1]
    n_targets = sum(part[0].shape[1] - 1 for part in parts)
    expected = [norm(g) for g in one_by_one(model, parts, n_targets)]
    norms = model.example_norms(tokens, segments=segments)
    assert_close(norms[norms > 0], expected, EXACT)


def test_only_trainable_parameters_count() -> None:
    model = gpt2(True)
    batch = a_batch(model, 75)
    names = ["transformer.h.1.mlp.c_fc.bias", "transformer.h.1.attn.c_attn.weight", "transformer.ln_f.weight"]
    grads = model.example_grads(*batch, names=names)
    model.trainable = set(names)
    squares = sum((g.reshape(4, -1) ** 2).sum(axis=1) for g in grads.values())
    assert_close(model.example_norms(*batch), np.sqrt(squares), EXACT)
    assert model.example_grads(*batch).keys() == set(names)


def test_recomputed_blocks_give_the_same_norms() -> None:
    model = gpt2(True)
    batch = a_batch(model, 85)
    norms = model.example_norms(*batch)
    model.recompute = True
    assert_close(model.example_norms(*batch), norms, EXACT)


def _no_cross(self: examples.Tied, head: examples.Group, rows: examples.Group) -> np.ndarray:
    return np.zeros(len(rows.rows))


def _no_repeats(self: examples.Rows, group: examples.Group) -> np.ndarray:
    return (group.take(self.dy) ** 2).sum(axis=(1, 2))


def _norms_of_rows(self: examples.Product, x: Any, dy: Any) -> np.ndarray:
    return ((x**2).sum(axis=2) * (dy**2).sum(axis=2)).sum(axis=1)


def _half_the_cross(self: examples.Tied) -> np.ndarray:
    groups = zip(self.head.spans.groups, self.rows.spans.groups, strict=True)
    return self.head.squares() + self.rows.squares() + np.concatenate([self._cross(*pair) for pair in groups])


def _mean_of_rows(engine: Any, spans: examples.Spans, x: Any) -> examples.Formed:
    return examples.Formed(engine, np.concatenate([group.take(x).mean(axis=1) for group in spans.groups]))


def _no_padding(self: examples.Group, x: Any) -> Any:
    return x[self.rows]


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (examples.Tied, "_cross", _no_cross),
        (examples.Tied, "squares", _half_the_cross),
        (examples.Rows, "_squares", _no_repeats),
        (examples.Product, "_squares", _norms_of_rows),
        ("onfoot.models.example_engine", "sums", _mean_of_rows),
        (examples.Group, "take", _no_padding),
    ],
    ids=[
        "no cross term",
        "cross term once",
        "no repeated tokens",
        "norms of rows",
        "means, not sums",
        "padding counts",
    ],
)
def test_planted_bugs_are_caught(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Any) -> None:
    model = gpt2(True, n_embd=36, n_inner=40, vocab_size=97)
    batch, segments = a_batch(model, 95), some_segments(96)
    expected = [norm(g) for g in one_by_one(model, pieces(*batch, segments), float((batch[1] != -100).sum()))]
    assert_close(model.example_norms(*batch, segments=segments), expected, EXACT)
    target = (f"{owner}.{name}",) if isinstance(owner, str) else (owner, name)
    monkeypatch.setattr(*target, wrong)
    wrong_by = np.abs(model.example_norms(*batch, segments=segments) - expected)
    assert wrong_by.max() > 1e-6 * max(expected)


def test_gradients_that_do_not_fit_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2(True)
    batch = a_batch(model, 5)
    monkeypatch.setattr(examples.os, "sysconf", lambda name: 128)  # a machine of 16 KiB
    with pytest.raises(ValueError, match=r"4 examples of 1 parameters take 0\.0 GB, more than half .* example_norms"):
        model.example_grads(*batch, names=["transformer.h.0.attn.c_attn.weight"], divisor=1.0)
    with pytest.raises(ValueError, match="fewer names"):
        model.example_grads(*batch)


def test_names_must_be_trainable_parameters() -> None:
    model = with_lora(gpt2(True), None)
    batch = a_batch(model, 5)
    with pytest.raises(ValueError, match=r"'transformer\.wte\.weight' is frozen"):
        model.example_grads(*batch, names=["transformer.wte.weight"])
    with pytest.raises(ValueError, match="'nothing' is not a parameter"):
        model.example_grads(*batch, names=["nothing"])
    with pytest.raises(ValueError, match=r"must be a list of parameters, got the string 'x'"):
        model.example_grads(*batch, names="x")
