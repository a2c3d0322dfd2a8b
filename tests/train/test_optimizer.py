"""AdamW, clipping and schedules, against PyTorch's."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import onfoot
from onfoot.models.model import Model
from onfoot.train.optimizer import clip_scale, global_norm
from onfoot.train.schedule import learning_rate
from oracles import assert_close, gpt2_logits, scrambled

CONFIG = onfoot.GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2)


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_twenty_steps_give_pytorchs_weights(engine: str) -> None:
    params = scrambled(onfoot.create(CONFIG).params, 0)
    model = Model(CONFIG, params, "float64", engine)
    optimizer = onfoot.AdamW(model, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    leaves = {k: torch.tensor(v, requires_grad=True) for k, v in params.items()}
    groups = [
        {"params": [p for p in leaves.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in leaves.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    peer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens = rng.integers(0, 17, (3, 8))
        loss = model.train_step(optimizer, tokens)
        peer.zero_grad()
        logits = gpt2_logits(leaves, CONFIG, torch.tensor(tokens))
        expected = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), torch.tensor(tokens)[:, 1:].flatten()
        )
        expected.backward()
        for i in range(CONFIG.n_layer):  # autograd's noise around 0, which Adam would blow up to whole steps
            leaves[f"transformer.h.{i}.attn.c_attn.bias"].grad[8:16] = 0
        peer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-9)
    for name, leaf in leaves.items():
        assert_close(np.asarray(model.params[name]), leaf.detach().numpy(), 1e-8, name)


def test_one_step_lowers_the_loss_and_a_large_decay_shrinks_only_matrices() -> None:
    model = onfoot.create(CONFIG, dtype="float64")
    tokens = np.arange(8)[None]
    optimizer = onfoot.AdamW(model, lr=1e-2)
    first = model.train_step(optimizer, tokens)
    assert model.loss(tokens) < first
    decay = onfoot.AdamW(model, lr=1e-9, weight_decay=1e8)  # 1 − lr·wd = 0.9, with steps of next to nothing
    before = {k: v.copy() for k, v in model.params.items()}
    model.train_step(decay, tokens)
    assert_close(model.params["transformer.wte.weight"], 0.9 * before["transformer.wte.weight"], 1e-6)
    assert_close(model.params["transformer.ln_f.weight"], before["transformer.ln_f.weight"], 1e-6)


def test_clipping_is_by_the_global_norm() -> None:
    grads = {"a": np.full((2, 3), 3.0, np.float32), "b": np.full(4, -2.0, np.float32)}
    norm = global_norm(grads)
    assert norm == pytest.approx(np.sqrt(6 * 9 + 4 * 4))
    assert clip_scale(norm, 100.0) == 1.0 and clip_scale(norm, 0) == 1.0  # 0: no limit
    scale = clip_scale(norm, 1.0)
    assert global_norm({name: g * scale for name, g in grads.items()}) == pytest.approx(1.0, rel=1e-6)


def test_a_scaled_step_is_the_step_of_scaled_gradients() -> None:
    ours, theirs = (onfoot.create(CONFIG, dtype="float64") for _ in range(2))
    _, grads = ours.loss_and_grads(np.arange(8)[None])
    onfoot.AdamW(ours).step(grads, scale=0.25)
    onfoot.AdamW(theirs).step({name: 0.25 * g for name, g in grads.items()})
    for name, p in ours.params.items():
        assert_close(p, theirs.params[name], 1e-12)


def test_schedules_warm_up_and_decay() -> None:
    for kind, end in (("cosine", 0.1), ("linear", 0.1), ("constant", 1.0)):
        rates = [learning_rate(s, 110, 2.0, 10, kind) for s in range(110)]
        assert rates[0] == pytest.approx(0.2) and rates[9] == rates[10] == pytest.approx(2.0)
        assert all(a >= b for a, b in pairwise(rates[10:]))
        assert rates[-1] == pytest.approx(2.0 * end, rel=0.2)
    assert learning_rate(60, 110, 2.0, 10, "linear") == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    with pytest.raises(ValueError, match="unknown schedule 'step'; choose from cosine, linear, constant"):
        learning_rate(0, 1, 1.0, 0, "step")


def test_bad_optimizer_settings_are_refused() -> None:
    model = onfoot.create(CONFIG)
    for settings, message in (
        ({"lr": -1}, "lr must be >= 0, got -1"),
        ({"betas": (0.9, 1.0)}, "betas must be in"),
        ({"weight_decay": -1}, "weight_decay must be >= 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            onfoot.AdamW(model, **settings)


def test_an_optimizer_made_before_the_adapter_says_so_and_changes_nothing() -> None:
    model = onfoot.create(CONFIG)
    optimizer = onfoot.AdamW(model)
    model.add_lora(r=2)
    before = {name: value.copy() for name, value in model.params.items()}
    with pytest.raises(
        ValueError, match=r"lora.* was not trainable when this optimizer was created.*create a new AdamW after"
    ):
        model.train_step(optimizer, np.arange(8)[None])
    assert optimizer.steps == 0 and all((model.params[name] == before[name]).all() for name in before)
    assert np.isfinite(model.train_step(onfoot.AdamW(model), np.arange(8)[None]))
