"""Fused, quantised, LLaMA and LoRA kernels on 1, 2 and 3 threads, against the formulas in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot import kernels, ops
from onfoot.models.model import Model
from onfoot.quantized import KINDS, quantize

pytest.importorskip("numba")
TABLE = kernels.table()
CLOSE = 4e-6


def close(ours: Any, truth: Any, most: float = CLOSE) -> bool:
    return np.shape(ours) == np.shape(truth) and bool(np.linalg.norm(ours - truth) <= most * np.linalg.norm(truth))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def exact(*arrays: np.ndarray) -> list[np.ndarray]:
    return [x.astype(np.float64) for x in arrays]


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_head_and_loss_in_one(rows: int, threads: int) -> None:
    rng = np.random.default_rng(rows)
    x, weight, bias = normal(rng, rows, 33), normal(rng, 130, 33), normal(rng, 130)
    targets = rng.integers(0, 130, rows)
    loss, saved = TABLE["logits_loss_forward"](x, weight, bias, targets, 3.0)
    x64, w64, b64 = exact(x, weight, bias)
    logits, s_head = ops.linear_forward(x64, w64.T, b64)
    right, s_loss = ops.cross_entropy_forward(logits, targets, 3.0)
    dx, dweight, dbias = ops.linear_backward(ops.cross_entropy_backward(1.0, s_loss), s_head)
    assert loss == pytest.approx(right, rel=1e-6)
    ours = TABLE["logits_loss_backward"](1.0, saved)
    assert close(ours[0], dx) and close(ours[1], dweight.T) and close(ours[2], dbias)


@pytest.mark.parametrize("rows", [1, 5, 20, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_products_with_weights_in_blocks(kind: str, rows: int, threads: int) -> None:
    rng = np.random.default_rng(rows)
    x, weight, bias, skip, dy = (normal(rng, *s) for s in ((rows, 96), (45, 96), (45,), (rows, 45), (rows, 45)))
    blocks = quantize(weight, kind)
    full = np.asarray(blocks, np.float64)
    y, saved = TABLE["frozen_linear_skip"](x, blocks.T, bias, skip)
    assert close(y, x.astype(np.float64) @ full.T + bias + skip)
    assert close(TABLE["frozen_linear_backward"](dy, saved), dy.astype(np.float64) @ full)


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_companion_beside_a_layer_and_a_skip(blocks: bool, rows: int, threads: int) -> None:
    rng = np.random.default_rng(rows)
    x, weight, skip, down, up, dy = (
        normal(rng, *s) for s in ((rows, 64), (64, 45), (rows, 45), (64, 3), (3, 45), (rows, 45))
    )
    given: Any = quantize(np.ascontiguousarray(weight.T)).T if blocks else weight
    full = np.asarray(given, np.float64)
    y, saved = TABLE["lora_linear_skip"](x, given, None, skip, down, up, 0.5)
    right, right_saved = ops.lora_linear_forward(*exact(x, full), None, *exact(down, up), 0.5)
    assert close(y, right + skip)
    ours = TABLE["lora_linear_backward"](dy, saved)
    assert all(
        close(a, b) for a, b in zip(ours, ops.lora_linear_backward(dy.astype(np.float64), right_saved), strict=True)
    )


CONFIGS: dict[str, Any] = {
    "gpt2": onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=24, vocab_size=53),
    "llama": onfoot.LlamaConfig(
        vocab_size=53, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24,
    ),
}  # fmt: skip


def twins(config: Any, lora: bool, kind: str | None) -> tuple[Model, Model]:
    made = onfoot.create(config, 0, engine="numba"), onfoot.create(config, 0, "float64", "numpy")
    rng = np.random.default_rng(0)
    if lora:
        for model in made:
            model.add_lora(r=3)
    for name, p in made[0].params.items():
        p += rng.normal(0, 0.1, p.shape).astype(np.float32)
        made[1].params[name][...] = p
    if kind:
        for model in made:
            model.quantize(kind)
    return made


@pytest.mark.parametrize(("lora", "kind"), [(False, None), (True, None), (True, "Q8_0"), (True, "Q4_1")])
@pytest.mark.parametrize("family", CONFIGS)
def test_networks_and_generation(family: str, lora: bool, kind: str | None, threads: int) -> None:
    ours, truth = twins(CONFIGS[family], lora, kind)
    tokens = np.random.default_rng(1).integers(0, 53, (3, 17))
    loss, grads = ours.loss_and_grads(tokens)
    right, expected = truth.loss_and_grads(tokens)
    assert loss == pytest.approx(right, rel=1e-6)
    most = max(np.linalg.norm(g) for g in expected.values())
    for name, g in grads.items():
        assert np.linalg.norm(g - expected[name]) <= 1e-5 * max(np.linalg.norm(expected[name]), 1e-3 * most), name
    for model in (ours, truth):
        model.use_adapter(None)  # so that the decoder takes the tokens
    assert (ours.generate(tokens[:, :4], 8, temperature=0) == truth.generate(tokens[:, :4], 8, temperature=0)).all()


@pytest.mark.parametrize("columns", [3, 4099])
def test_an_array_is_added_again_and_again_from_where_each_thread_begins(columns: int, threads: int) -> None:
    rng = np.random.default_rng(columns)
    x, y = normal(rng, 12_000 // columns, columns), normal(rng, columns)
    assert (TABLE["add"](x, y) == x + y).all()
