"""Tokens without a target have no logits; the loss and every gradient are those of all logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.arrays import to_numpy
from onfoot.models import head, step
from onfoot.models.layout import Targets
from onfoot.models.model import Model
from onfoot.models.step import choose
from oracles import scrambled

FAMILIES = {
    "gpt2": onfoot.GPT2Config(vocab_size=37, n_positions=90, n_embd=12, n_layer=2, n_head=3),
    "gpt2 untied": onfoot.GPT2Config(
        vocab_size=37, n_positions=90, n_embd=12, n_layer=1, n_head=2, tie_word_embeddings=False, lm_head_bias=True
    ),
    "llama": onfoot.LlamaConfig(
        vocab_size=37, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=90, tie_word_embeddings=True,
    ),
    "llama untied": onfoot.LlamaConfig(
        vocab_size=37, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=3,
        max_position_embeddings=90,
    ),
}  # fmt: skip
ENGINES = [("numpy", "float64", 1e-12), ("torch", "float64", 1e-12), ("numba", "float32", 2e-6)]
LORA = {"full": None, "blocks": [], "head": ["lm_head"]}


def made(family: str, engine: str, dtype: str, lora: str) -> Model:
    config: Any = FAMILIES[family]
    one = Model(config, scrambled(onfoot.create(config).params, 3), dtype, engine)
    targets = LORA[lora]
    if targets is not None:
        blocks = ["c_attn", "c_proj"] if family.startswith("gpt2") else ["q_proj", "down_proj"]
        one.add_lora(r=3, alpha=5, targets=[*blocks, *targets])
        rng = np.random.default_rng(1)
        for name in sorted(one.trainable):
            one.params[name][...] = one.engine.floats(rng.normal(0, 0.2, one.params[name].shape), dtype)
    return one


def batch(packed: bool) -> dict[str, Any]:
    """Three sequences in which 70 % of the tokens are prompts, one of them without any target."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 37, (3, 87)), rng.integers(0, 37, (3, 87))
    targets[:, 5:50] = targets[:2, 60:75] = targets[2] = -100
    segments = np.repeat([0, 1, 2], [20, 37, 30])[None].repeat(3, 0) if packed else None
    return {"tokens": tokens, "targets": targets, "segments": segments}


def results(one: Model, given: dict[str, Any]) -> dict[str, np.ndarray]:
    loss, grads = one.loss_and_grads(**given)
    out = {name: to_numpy(grad) for name, grad in grads.items()}
    rng = np.random.default_rng(2)
    direction = {name: one.engine.floats(rng.normal(size=out[name].shape), one.dtype) for name in sorted(out)}
    out |= {f"H u {name}": to_numpy(x) for name, x in one.hvp(direction=direction, **given).items()}
    out["dots"] = np.asarray(one.example_dots(direction=direction, **given))
    out["norms"] = np.asarray(one.example_norms(**given))
    return out | {"loss": np.asarray(loss), "loss alone": np.asarray(one.loss(**given))}


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("lora", LORA)
@pytest.mark.parametrize(("engine", "dtype", "close"), ENGINES, ids=[engine for engine, *_ in ENGINES])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_gradients_tangents_and_norms_are_those_of_all_logits(
    family: str, engine: str, dtype: str, close: float, lora: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = batch(packed)
    assert choose(given["targets"]).rows is not None
    masked = results(made(family, engine, dtype, lora), given)
    monkeypatch.setattr(step, "choose", lambda ids, *_, **__: Targets(ids))
    whole = results(made(family, engine, dtype, lora), given)
    assert set(masked) == set(whole)
    for name, expected in whole.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(masked[name], expected, rtol=0, atol=close * max(scale, 1e-30), err_msg=name)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prompts_cost_no_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, given = made(family, "numpy", "float64", "full"), batch(False)
    shapes: list[Any] = []
    forward = head.head_forward

    def spy(run: Any, config: Any, x: Any) -> Any:
        shapes.append(x.shape)
        return forward(run, config, x)

    monkeypatch.setattr(head, "head_forward", spy)
    one.loss_and_grads(**given)
    n_targets = int((given["targets"] != -100).sum())
    assert shapes == [(n_targets, 12)] and n_targets < given["tokens"].size / 3
    shapes.clear()
    one.trace(given["tokens"], given["targets"])  # which shows all logits
    assert shapes == [(3, 87, 12)]
