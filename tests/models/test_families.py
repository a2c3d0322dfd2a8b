"""Mistral, Qwen2's windows, Qwen3 and dynamic RoPE: every pass against transformers or the engine in float64."""

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
from onfoot.generate.cache import KVCache
from onfoot.generate.loop import step
from onfoot.models.model import Model
from oracles import assert_close

SMALL = onfoot.LlamaConfig(
    vocab_size=23, hidden_size=24, intermediate_size=17, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=32, rope_theta=50.0,
)  # fmt: skip
MIXED = ("full_attention", "sliding_attention", "full_attention")
DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral", "sliding_window": 4},
    "mistral, window of one": {"model_type": "mistral", "sliding_window": 1},
    "mistral without a window": {"model_type": "mistral"},
    "mistral, one key/value head": {"model_type": "mistral", "sliding_window": 3, "num_key_value_heads": 1},
    "qwen2, last layers": {"model_type": "qwen2", "sliding_window": 5, "layer_types": MIXED[:2] + MIXED[1:2]},
    "qwen2, mixed layers": {"model_type": "qwen2", "sliding_window": 5, "layer_types": MIXED},
    "qwen3": {"model_type": "qwen3", "head_dim": 10},
    "qwen3 tied, as many heads": {"model_type": "qwen3", "tie_word_embeddings": True, "num_key_value_heads": 6},
    "qwen3 with biases": {"model_type": "qwen3", "attention_bias": True, "head_dim": 2},
    "qwen3, mixed layers": {"model_type": "qwen3", "sliding_window": 3, "layer_types": MIXED},
    "dynamic": {"max_position_embeddings": 8, "rope_scaling": DYNAMIC},
    "dynamic, short": {"max_position_embeddings": 30, "rope_scaling": DYNAMIC},
}


def check(config: onfoot.LlamaConfig, seed: int, folder: Path, engine: str = "numpy", t: int = 14) -> None:
    """Logits, loss and all gradients against transformers in float64, from the folder that the model was saved in."""
    model = scrambled_llama(config, seed, engine=engine)
    tokens, targets = batch(config, seed, 2, t)
    with in_float64():
        logits, expected_loss, expected = loss_and_grads(in_transformers(model, folder), tokens, targets)
    assert_close(to_numpy(model.logits(tokens)), logits, 1e-10, "logits")
    loss, grads = model.loss_and_grads(tokens, targets)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert set(grads) == set(expected) == set(model.params)
    for name, grad in grads.items():
        assert_close(to_numpy(grad), expected[name], 1e-10, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_every_gradient_equal_transformers(tmp_path: Path, family: str) -> None:
    check(replace(SMALL, **FAMILIES[family]), 3, tmp_path)


@pytest.mark.parametrize("family", ["qwen3, mixed layers", "mistral", "dynamic"])
def test_the_engine_torch_agrees_too(tmp_path: Path, family: str) -> None:
    check(replace(SMALL, **FAMILIES[family]), 4, tmp_path, "torch")


@pytest.mark.parametrize("kind", ["mistral", "qwen3"])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_odd_shapes_equal_transformers(tmp_path: Path, ratio: int, kind: str) -> None:
    for seed in range(3):
        config = random_config(seed, ratio, seed == 1, kind, sliding_window=seed + 2)
        check(config, seed, tmp_path, t=7 + seed)


@pytest.mark.parametrize("length", [5, 8, 9, 20, 24])
def test_dynamic_frequencies_depend_on_the_length_as_in_transformers(tmp_path: Path, length: int) -> None:
    """Up to max_position_embeddings they are RoPE's own; beyond, those of the whole sequence get lower."""
    config = replace(SMALL, **FAMILIES["dynamic"])
    assert config.n_positions == 24
    check(config, 1, tmp_path, t=length)
    plain = Model(
        replace(config, rope_scaling=None, max_position_embeddings=32), scrambled_llama(config, 1).params, "float64"
    )
    tokens, _ = batch(config, 1, 2, length)
    same = np.allclose(plain.logits(tokens), scrambled_llama(config, 1).logits(tokens), rtol=1e-9, atol=0)
    assert same == (length <= 8)


def test_a_longer_sequence_than_dynamic_scaling_allows_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 25 tokens exceeds n_positions=24"):
        scrambled_llama(replace(SMALL, **FAMILIES["dynamic"]), 1).logits(np.zeros((1, 25), int))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_loaded_as_it_was(tmp_path: Path, family: str) -> None:
    model = scrambled_llama(replace(SMALL, **FAMILIES[family]), 2)
    model.save(tmp_path / "a")
    again = onfoot.load(tmp_path / "a", "float64")
    assert [again.config.window(b) for b in range(3)] == [model.config.window(b) for b in range(3)]
    assert again.config.rope_scaling == model.config.rope_scaling
    tokens, _ = batch(SMALL, 0, 2, 13)
    assert (again.logits(tokens) == model.logits(tokens)).all()
    again.save(tmp_path / "b")
    assert (tmp_path / "a/config.json").read_bytes() == (tmp_path / "b/config.json").read_bytes()


# Packed examples

PACKED = np.array([[0] * 6 + [1] * 9 + [2] * 2, [0] * 1 + [1] * 16])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_examples_have_the_losses_and_gradients_that_each_has_alone(family: str) -> None:
    model = scrambled_llama(replace(SMALL, **FAMILIES[family]), 5)
    tokens, _ = batch(SMALL, 5, *PACKED.shape)
    alone = [tokens[row, PACKED[row] == i][None] for row, n in ((0, 3), (1, 2)) for i in range(n)]
    longest = max(part.shape[1] for part in alone)
    assert longest == 16  # dynamic frequencies are those of the longest example
    loss, total = 0.0, dict.fromkeys(model.params, 0.0)
    for part in alone:
        padded = np.zeros((1, longest), int)
        padded[:, : part.shape[1]] = part
        targets = np.full_like(padded, -100)
        targets[:, : part.shape[1] - 1] = part[:, 1:]
        one, grads = model.loss_and_grads(padded, targets, divisor=12)
        loss += one
        total = {name: total[name] + grad for name, grad in grads.items()}
    packed_loss, packed = model.loss_and_grads(tokens, segments=PACKED, divisor=12)
    assert packed_loss == pytest.approx(loss, rel=1e-12)
    for name, grad in packed.items():
        assert_close(grad, total[name], 1e-10, name)


# The engine "numba"


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_agree_with_the_formulas_in_float64(family: str, packed: bool) -> None:
    config = replace(SMALL, **FAMILIES[family])
    exact, fast = scrambled_llama(config, 6), scrambled_llama(config, 6, "float32", "numba")
    tokens, targets = batch(config, 6, *PACKED.shape)
    options = {"segments": PACKED} if packed else {}
    expected_loss, expected = exact.loss_and_grads(tokens, targets, **options)
    loss, grads = fast.loss_and_grads(tokens, targets, **options)
    assert len(fast._steps) == 1  # recorded
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, grad in grads.items():
        assert_close(grad, expected[name], 3e-5, name)


@pytest.mark.parametrize("window", [1, 37, 96, 97, 200])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_windows_that_end_within_a_block_of_queries(window: int, kv_heads: int) -> None:
    """The kernels compute 96 queries at a time, and skip the keys that none of them attends to."""
    config = onfoot.LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=256, model_type="mistral", sliding_window=window,
    )  # fmt: skip
    exact, fast = scrambled_llama(config, 7), scrambled_llama(config, 7, "float32", "numba")
    tokens, targets = batch(config, 7, 2, 211)
    segments = np.cumsum(np.isin(np.arange(211), [50, 173]))[None].repeat(2, 0)
    for options in ({}, {"segments": segments}):
        _, expected = exact.loss_and_grads(tokens, targets, **options)
        _, grads = fast.loss_and_grads(tokens, targets, **options)
        for name, grad in grads.items():
            assert_close(grad, expected[name], 1e-4, name)


@pytest.mark.parametrize("engine", ["numpy", "torch", "numba"])
@pytest.mark.parametrize("pieces", [[13], [1] * 13, [4, 1, 1, 7]], ids=str)
@pytest.mark.parametrize(
    "family", ["mistral", "mistral, window of one", "qwen3", "qwen3, mixed layers", "qwen2, mixed layers"]
)
def test_cached_logits_equal_uncached_ones(family: str, pieces: list[int], engine: str) -> None:
    dtype, tolerance = ("float32", 2e-5) if engine == "numba" else ("float64", 1e-12)
    config = replace(SMALL, **FAMILIES[family])
    full = scrambled_llama(config, 0).logits(batch(config, 0, 3, 13)[0])
    model = scrambled_llama(config, 0, dtype, engine)
    tokens, _ = batch(config, 0, 3, 13)
    cache, place = KVCache(13), 0
    for n in pieces:
        logits = to_numpy(step(model, tokens[:, place : place + n], np.zeros(3, int), cache))
        place += n
        assert_close(logits, full[:, place - 1], tolerance)


@pytest.mark.parametrize("family", ["mistral", "qwen3", "qwen2, last layers", "dynamic, short"])
def test_greedy_text_equals_transformers_whatever_the_lengths(tmp_path: Path, family: str) -> None:
    config = replace(SMALL, **FAMILIES[family])
    model, fast = scrambled_llama(config, 0), scrambled_llama(config, 0, "float32", "numba")
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5, 4, 3], [4]]
    together, on_kernels = (m.generate(prompts, 12, temperature=0) for m in (model, fast))
    with in_float64():
        theirs = in_transformers(model, tmp_path)
        for prompt, out, fast_out in zip(prompts, together, on_kernels, strict=True):
            expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
            assert (out == expected[0].numpy()).all()
            assert (fast_out == out).all()


# LoRA, gradients per example, second order

PASSES = ["mistral", "qwen3", "qwen3, mixed layers", "dynamic"]


@pytest.mark.parametrize("engine", ["numpy", "numba"])
@pytest.mark.parametrize("family", PASSES)
def test_lora_gradients_equal_those_of_the_merged_weights(family: str, engine: str) -> None:
    """∂A = scale Bᵗ ∂W and ∂B = scale ∂W Aᵗ, with ∂W from the pass without an adapter."""
    dtype, tolerance = ("float32", 5e-5) if engine == "numba" else ("float64", 1e-10)
    config = replace(SMALL, **FAMILIES[family])
    model = scrambled_llama(config, 8, dtype, engine)
    model.add_lora(r=2, alpha=6)
    rng = np.random.default_rng(8)
    for name in sorted(model.trainable):
        model.params[name] = rng.normal(0, 0.3, model.params[name].shape)
    tokens, targets = batch(config, 8, *PACKED.shape)
    _, grads = model.loss_and_grads(tokens, targets, segments=PACKED)
    low_rank = {name: model.params[name].astype("float64") for name in model.trainable}
    merged = scrambled_llama(config, 8)
    for down in (name for name in low_rank if ".lora_A." in name):
        weight = down.partition(".lora_A")[0] + ".weight"
        merged.params[weight] = merged.params[weight] + 3 * low_rank[down.replace("lora_A", "lora_B")] @ low_rank[down]
    _, whole = merged.loss_and_grads(tokens, targets, segments=PACKED)
    for down in (name for name in low_rank if ".lora_A." in name):
        up, dw = down.replace("lora_A", "lora_B"), whole[down.partition(".lora_A")[0] + ".weight"]
        assert_close(grads[down], 3 * low_rank[up].T @ dw, tolerance, down)
        assert_close(grads[up], 3 * dw @ low_rank[down].T, tolerance, up)


@pytest.mark.parametrize("engine", ["numpy", "torch", "numba"])
@pytest.mark.parametrize("family", PASSES)
def test_gradients_of_each_example_are_those_of_its_targets_alone(family: str, engine: str) -> None:
    dtype, tolerance = ("float32", 5e-5) if engine == "numba" else ("float64", 1e-10)
    config = replace(SMALL, **FAMILIES[family])
    model, exact = scrambled_llama(config, 9, dtype, engine), scrambled_llama(config, 9)
    tokens, targets = batch(config, 9, *PACKED.shape)
    targets[:, 0] = targets[:, -1] = targets[0, 7] = 3  # each example has one
    grads = model.example_grads(tokens, targets, segments=PACKED, divisor=5)
    norms = model.example_norms(tokens, targets, segments=PACKED, divisor=5)
    for e, (row, i) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]):
        own = np.full_like(targets, -100)
        own[row] = np.where(PACKED[row] == i, targets[row], -100)
        _, expected = exact.loss_and_grads(tokens, own, segments=PACKED, divisor=5)
        for name in exact.params:
            assert_close(to_numpy(grads[name])[e], expected[name], tolerance, name)
        assert norms[e] == pytest.approx(np.sqrt(sum((g**2).sum() for g in expected.values())), rel=1e-4)


@pytest.mark.parametrize("family", PASSES)
def test_second_order_equals_a_difference_of_gradients(family: str) -> None:
    config = replace(SMALL, **FAMILIES[family])
    model, fast = scrambled_llama(config, 10), scrambled_llama(config, 10, "float32", "numba")
    tokens, targets = batch(config, 10, *PACKED.shape)
    rng = np.random.default_rng(10)
    direction = {name: rng.normal(size=p.shape) for name, p in model.params.items()}
    sides = []
    for sign in (1, -1):
        moved = {name: p + sign * 2e-6 * direction[name] for name, p in model.params.items()}
        sides.append(Model(config, moved, "float64").loss_and_grads(tokens, targets, segments=PACKED)[1])
    expected = {name: (sides[0][name] - sides[1][name]) / 4e-6 for name in direction}
    hvp = model.hvp(tokens, targets, direction, segments=PACKED)
    on_kernels = fast.hvp(tokens, targets, direction, segments=PACKED)
    assert set(hvp) == set(on_kernels) == set(model.params)
    for name in hvp:
        assert_close(hvp[name], expected[name], 1e-6, name)
        assert_close(on_kernels[name], hvp[name], 3e-4, name)


# Configurations


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": 4}, "model_type 'llama' has no sliding window"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be an integer >= 1, got 0"),
        ({"model_type": "mistral", "attention_bias": True}, "'mistral' has fixed biases"),
        ({"model_type": "qwen3", "mlp_bias": True}, "'qwen3' has fixed biases: leave mlp_bias False"),
        ({"model_type": "qwen3", "layer_types": MIXED}, "sliding_attention, but sliding_window is not set"),
        ({"model_type": "qwen2", "layer_types": MIXED[:2]}, "one entry per layer; got 2, but num_hidden_layers=3"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 3}, "layer_types .* are not supported"),
        ({"head_dim": 2, "rope_scaling": DYNAMIC}, "needs a head size of at least 4, got 2"),
    ],
    ids=str,
)
def test_bad_configurations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **fields)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3"])
def test_fields_that_a_file_leaves_out_have_transformers_values(kind: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(kind)
    ours = onfoot.LlamaConfig.from_dict({"model_type": kind})
    assert (ours.n_positions, ours.vocab_size, ours.inner_width) == (
        theirs.max_position_embeddings, theirs.vocab_size, theirs.intermediate_size,
    )  # fmt: skip
    assert (ours.n_layer, ours.n_head, ours.n_kv_head, ours.n_embd) == (
        theirs.num_hidden_layers, theirs.num_attention_heads, theirs.num_key_value_heads, theirs.hidden_size,
    )  # fmt: skip
    assert ours.key_width == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.sliding_window, ours.bos_token_id, ours.eos_token_id, ours.rope_theta, ours.rms_norm_eps) == (
        theirs.sliding_window, theirs.bos_token_id, theirs.eos_token_id, theirs.rope_parameters["rope_theta"],
        theirs.rms_norm_eps,
    )  # fmt: skip


@pytest.mark.parametrize("first", [0, 2, 9])
def test_qwen_windows_begin_at_max_window_layers(first: int) -> None:
    values = {"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 7, "max_window_layers": first}
    config = onfoot.LlamaConfig.from_dict({**values, "use_sliding_window": True})
    assert [config.window(b) for b in range(4)] == [7 if b >= first else None for b in range(4)]
    assert onfoot.LlamaConfig.from_dict(values).sliding_window is None


def test_llama3_scaling_without_an_original_length_uses_the_models_own() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    made = replace(SMALL, rope_scaling=scaling).rope_scaling
    assert made is not None and made.original_max_position_embeddings == 32


# The trace


@pytest.mark.parametrize("family", ["mistral", "qwen2, mixed layers", "qwen3, mixed layers", "dynamic"])
def test_traced_activations_gradients_and_attention_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    config = replace(SMALL, **FAMILIES[family])
    model = scrambled_llama(config, 11)
    tokens, targets = batch(config, 11, 2, 13)
    trace = model.trace(tokens, targets, input_gradient=True)
    with in_float64():
        theirs = in_transformers(model, tmp_path)
        out = theirs(torch.tensor(tokens), output_hidden_states=True, output_attentions=True)
        for hidden in out.hidden_states:
            hidden.retain_grad()
        flat = torch.tensor(targets).flatten()
        loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), flat, ignore_index=-100)
        loss.backward()
    assert trace.loss == pytest.approx(loss.item(), rel=1e-12)
    for b, block in enumerate(trace.blocks):
        assert_close(block.a[1], out.hidden_states[b].detach().numpy(), 1e-10, f"a_1 of block {b}")
        assert_close(block.delta[1], out.hidden_states[b].grad.numpy(), 1e-10, f"Δ_1 of block {b}")
        assert_close(block.rho, out.attentions[b].detach().numpy(), 1e-10, f"ρ of block {b}")
        assert_close(block.a[10], block.a[5] + block.a[9], 1e-12)
        assert_close(block.a[8], block.a["g"] / (1 + np.exp(-block.a["g"])) * block.a["u"], 1e-12)
    assert_close(trace.a[11], out.hidden_states[-1].detach().numpy(), 1e-10)
    assert_close(trace.delta[11], out.hidden_states[-1].grad.numpy(), 1e-10)
    table = model.params["model.embed_tokens.weight"]
    assert_close(trace.delta[0], out.hidden_states[0].grad.numpy() @ table.T, 1e-10)
    _, grads = model.loss_and_grads(tokens, targets)
    for name, grad in grads.items():
        assert_close(trace.grads[name], grad, 1e-12, name)


@pytest.mark.parametrize("family", ["mistral", "qwen3, mixed layers"])
def test_the_errors_within_a_traced_block_give_its_gradients(family: str) -> None:
    """∂w = aᵗ Δ of the layers around: the sums Δ_2 and Δ_6, both branches of the MLP, and Δ_3."""
    model = scrambled_llama(replace(SMALL, **FAMILIES[family]), 12)
    tokens, targets = batch(SMALL, 12, 2, 13)
    trace = model.trace(tokens, targets)
    assert [name for name, b, _ in trace.items() if b == 1][:8] == ["a_1", "a_2", "q", "k", "v", "ρ", "a_3", "a_4"]
    for b, block in enumerate(trace.blocks):
        name = f"model.layers.{b}"
        pairs = {
            "mlp.gate_proj": ("g", 6),
            "mlp.up_proj": ("u", 6),
            "mlp.down_proj": (9, 8),
            "self_attn.o_proj": (4, 3),
        }
        for layer, (delta, a) in pairs.items():
            expected = np.einsum("bto,bti->oi", block.delta[delta], block.a[a])
            assert_close(trace.grads[f"{name}.{layer}.weight"], expected, 1e-10, layer)
        for layer, before, after in (("input_layernorm", 1, 2), ("post_attention_layernorm", 5, 6)):
            x = block.a[before]
            normed = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.config.rms_norm_eps)
            expected = (normed * block.delta[after]).sum((0, 1))
            assert_close(trace.grads[f"{name}.{layer}.weight"], expected, 1e-10, layer)
        assert np.abs(block.delta_causal.sum(-1)).max() < 1e-12 * np.abs(block.delta_causal).max()


def test_attribution_of_a_qwen3_model_predicts_small_changes() -> None:
    from onfoot.attribution import attribute

    config = replace(SMALL, **FAMILIES["qwen3, mixed layers"])
    model = scrambled_llama(config, 13)
    table = model.params["model.embed_tokens.weight"]
    model.params["model.embed_tokens.weight"] = table[:1] + 1e-4 * (table - table[:1])  # all tokens are nearly alike
    result = attribute(model, batch(config, 13, 1, 9)[0][0], n_swaps=5)
    for swap in result.swaps:
        assert swap.actual == pytest.approx(swap.predicted, rel=1e-2)
        assert swap.predicted < 0


@pytest.mark.parametrize("n", [1, 2])
def test_each_thread_has_the_windows_of_its_own_sequences(n: int, on_threads: Any) -> None:
    on_threads(n)
    config = replace(SMALL, **FAMILIES["qwen3, mixed layers"])
    exact, fast = scrambled_llama(config, 14), scrambled_llama(config, 14, "float32", "numba")
    tokens, targets = batch(config, 14, *PACKED.shape)
    _, expected = exact.loss_and_grads(tokens, targets, segments=PACKED)
    _, grads = fast.loss_and_grads(tokens, targets, segments=PACKED)
    for name, grad in grads.items():
        assert_close(grad, expected[name], 3e-5, name)


# Sizes, memory and commands

RELEASED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama 3.2 1B": (
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
        1_235_814_400,
    ),
    "Mistral 7B": ({"model_type": "mistral"}, 7_241_732_096),
    "Qwen2.5 0.5B": (
        {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
        494_032_768,
    ),
    "Qwen3 0.6B": (
        {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
        596_049_920,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_have_as_many_parameters_as_in_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from onfoot.memory import Job, plan
    from onfoot.models.params import count, shapes

    values, n = RELEASED[name]
    config = onfoot.LlamaConfig.from_dict(values)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    expected = {key: tuple(p.shape) for key, p in theirs.named_parameters()}
    assert {key: tuple(shape) for key, shape in shapes(config).items()} == expected
    assert count(shapes(config)) == n
    planned = plan(Job(config, 1, 8))
    assert (planned.weights, planned.moments) == (4 * n, 8 * n)


def test_info_and_attribute_read_a_saved_model(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from onfoot.cli import app

    config = replace(SMALL, **FAMILIES["qwen3, mixed layers"])
    model = scrambled_llama(config, 1, "float32")
    model.save(tmp_path)
    shown = CliRunner().invoke(app, ["info", str(tmp_path), "--tensors"])
    assert shown.exit_code == 0, shown.output
    assert "qwen3" in shown.output and f"{model.n_params:,}" in shown.output and "window of 3 tokens" in shown.output
    assert "model.layers.2.self_attn.k_norm.weight" in shown.output
    told = CliRunner().invoke(app, ["attribute", str(tmp_path), "--tokens", "3 1 4 1 5 9", "--top", "2"])
    assert told.exit_code == 0, told.output
    assert f"loss {model.loss(np.array([[3, 1, 4, 1, 5, 9]])):.4f}" in told.output
