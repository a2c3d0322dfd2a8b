"""LLaMA and Qwen2: logits, loss and every gradient against transformers, on random small configurations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from llama_oracle import batch, in_float64, in_transformers, loss_and_grads, random_config, scrambled_llama
from onfoot.arrays import to_numpy
from onfoot.config import RopeScaling
from onfoot.models.model import Model
from oracles import assert_close, directional_difference

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SMALL = onfoot.LlamaConfig(
    vocab_size=23, hidden_size=24, intermediate_size=17, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=32, rope_theta=50.0,
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "heads of another width": {"head_dim": 10},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama3 scaling": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 16}, "rope_theta": 500.0},
    "qwen2": {"model_type": "qwen2"},
    "tied": {"tie_word_embeddings": True},
}


def check_against_transformers(config: onfoot.LlamaConfig, seed: int, folder: Path, engine: str = "numpy") -> None:
    model = scrambled_llama(config, seed, engine=engine)
    tokens, targets = batch(config, seed)
    with in_float64():
        logits, expected_loss, expected = loss_and_grads(in_transformers(model, folder), tokens, targets)
    assert_close(to_numpy(model.logits(tokens)), logits, 1e-10, "logits")
    loss, grads = model.loss_and_grads(tokens, targets)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert set(grads) == set(expected) == set(model.params)
    for name, grad in grads.items():
        assert_close(to_numpy(grad), expected[name], 1e-10, name)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_logits_loss_and_every_gradient_equal_transformers(tmp_path: Path, ratio: int, tied: bool, kind: str) -> None:
    for seed in range(4):
        check_against_transformers(random_config(seed, ratio, tied, kind), seed, tmp_path)


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_equals_transformers(tmp_path: Path, variant: str, engine: str) -> None:
    check_against_transformers(replace(SMALL, **VARIANTS[variant]), 5, tmp_path, engine)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_float32_agrees_with_transformers_as_they_are(tmp_path: Path, kind: str) -> None:
    model = scrambled_llama(replace(SMALL, model_type=kind), 1, "float32")
    tokens, targets = batch(SMALL, 1)
    logits, expected_loss, expected = loss_and_grads(in_transformers(model, tmp_path, torch.float32), tokens, targets)
    assert_close(model.logits(tokens), logits, 1e-5)
    loss, grads = model.loss_and_grads(tokens, targets)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, grad in grads.items():
        assert grad.dtype == np.float32
        assert_close(grad, expected[name], 1e-5, name)


def test_transformers_in_float64_is_not_float64_by_itself(tmp_path: Path) -> None:
    """Why the oracle is patched: its norms and angles round to float32."""
    model = scrambled_llama(SMALL, 1)
    tokens, _ = batch(SMALL, 1)
    theirs = in_transformers(model, tmp_path)
    with torch.no_grad():
        rounded = theirs(torch.tensor(tokens)).logits.numpy()
    error = np.linalg.norm(rounded - model.logits(tokens)) / np.linalg.norm(rounded)
    assert 1e-9 < error < 1e-5


@pytest.mark.parametrize("variant", ["qwen2", "biases everywhere", "llama3 scaling"])
def test_gradients_agree_with_a_finite_difference(variant: str) -> None:
    model = scrambled_llama(replace(SMALL, **VARIANTS[variant], attention_dropout=0.2), 3)
    tokens, targets = batch(SMALL, 3)
    _, grads = model.loss_and_grads(tokens, targets, dropout_seed=4)
    names = list(model.params)
    start = [model.params[n] for n in names]
    rng = np.random.default_rng(0)
    directions = [rng.normal(size=p.shape) for p in start]

    def loss(*values: np.ndarray) -> Any:
        model.params.update(zip(names, values, strict=True))
        return model.loss_and_grads(tokens, targets, dropout_seed=4)[0]

    slope = directional_difference(loss, start, directions, 1.0, 1e-5)
    by_hand = sum(float((grads[n] * d).sum()) for n, d in zip(names, directions, strict=True))
    assert slope == pytest.approx(by_hand, rel=1e-6)


def test_the_keys_bias_is_live_under_rope() -> None:
    """Without RoPE its gradient is 0: it shifts every score of a row alike. Turned by position, it does not."""
    model = scrambled_llama(replace(SMALL, model_type="qwen2"), 2)
    tokens, targets = batch(SMALL, 2)
    _, grads = model.loss_and_grads(tokens, targets)
    for b in range(2):
        assert np.linalg.norm(grads[f"model.layers.{b}.self_attn.k_proj.bias"]) > 1e-3


def test_where_the_text_begins_does_not_matter() -> None:
    """RoPE is relative: the same tokens behind an example that they cannot see have the same logits."""
    model = scrambled_llama(SMALL, 2)
    tokens, _ = batch(SMALL, 2, 1, 12)
    alone, _ = model.loss_and_grads(tokens[:, 5:])
    segments = np.array([[0] * 5 + [1] * 7])
    targets = np.full_like(tokens, -100)
    targets[:, 5:-1] = tokens[:, 6:]
    assert model.loss(tokens, targets, segments=segments) == pytest.approx(alone, rel=1e-12)


def test_microbatches_add_up_to_the_whole_batch() -> None:
    model = scrambled_llama(SMALL, 2)
    tokens, targets = batch(SMALL, 2, b=4)
    n = int((targets != -100).sum())
    _, whole = model.loss_and_grads(tokens, targets)
    parts = [model.loss_and_grads(tokens[i : i + 2], targets[i : i + 2], divisor=n)[1] for i in (0, 2)]
    for name in whole:
        assert_close(parts[0][name] + parts[1][name], whole[name], 1e-12, name)


@pytest.mark.parametrize("engine", ["numpy", "torch"])
@pytest.mark.parametrize("pieces", [[11], [1] * 11, [4, 1, 6]], ids=str)
def test_cached_logits_equal_uncached_ones(pieces: list[int], engine: str) -> None:
    from onfoot.generate.cache import KVCache
    from onfoot.generate.loop import step

    model = scrambled_llama(replace(SMALL, **VARIANTS["llama3 scaling"]), 0, engine=engine)
    tokens, _ = batch(SMALL, 0, 3, 11)
    full = to_numpy(model.logits(tokens))
    cache, place = KVCache(11), 0
    for n in pieces:
        logits = to_numpy(step(model, tokens[:, place : place + n], np.zeros(3, int), cache))
        place += n
        assert_close(logits, full[:, place - 1], 1e-12)
    assert cache.n_numbers == 2 * 2 * 3 * 11 * 3 * 4  # keys and values, blocks, batch, tokens, KV heads, width


def test_greedy_text_equals_transformers_whatever_the_lengths(tmp_path: Path) -> None:
    model = scrambled_llama(SMALL, 0)
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [4]]
    together = model.generate(prompts, 12, temperature=0)
    with in_float64():
        theirs = in_transformers(model, tmp_path)
        for prompt, out in zip(prompts, together, strict=True):
            expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
            assert (out == expected[0].numpy()).all()


def test_any_of_several_end_tokens_stops_a_text() -> None:
    free = scrambled_llama(SMALL, 0).generate([[1, 2, 3]], 10, temperature=0)[0]
    ends = (22 if 22 not in free else 21, int(free[5]))
    model = scrambled_llama(replace(SMALL, eos_token_id=ends), 0)
    out = model.generate([[1, 2, 3]], 10, temperature=0)[0]
    assert out[-1] in ends and (out == free[: len(out)]).all() and len(out) <= 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, "num_attention_heads=6 is not divisible by num_key_value_heads=4"),
        ({"hidden_size": 25}, "hidden_size=25 is not divisible by num_attention_heads=6; .* head_dim"),
        ({"head_dim": 5}, "a head size of 5 is odd"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be > 0, got 0.0"),
        ({"attention_dropout": 1.0}, r"attention_dropout must be in \[0, 1\), got 1.0"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported; choose from llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen2", "attention_bias": True}, "'qwen2' has fixed biases"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope scaling 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope scaling 'linear' requires a factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be >= 1, got 0.5"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor=4.0 must be above 0 and below"),
    ],
    ids=str,
)
def test_bad_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_bad_input_is_refused_as_for_any_model() -> None:
    model = scrambled_llama(SMALL, 0)
    with pytest.raises(ValueError, match="sequence of 33 tokens exceeds n_positions=32"):
        model.logits(np.zeros((1, 33), int))
    with pytest.raises(ValueError, match="token id 23 is outside"):
        model.loss(np.array([[1, 23]]))
    with pytest.raises(ValueError, match=r"missing parameter 'model\.norm\.weight'"):
        Model(SMALL, {k: v for k, v in model.params.items() if k != "model.norm.weight"})
    with pytest.raises(ValueError, match="no layer matches 'c_attn'; choose from down_proj, gate_proj"):
        model.add_lora(r=2, targets=["c_attn"])


def test_a_scaling_that_means_nothing_is_none() -> None:
    assert replace(SMALL, rope_scaling={"rope_type": "default"}).rope_scaling is None
    assert isinstance(replace(SMALL, rope_scaling=LLAMA3).rope_scaling, RopeScaling)
