"""A new family in some sixty lines, outside of src: attention and MLP in parallel after one norm.

x + attention(norm(x)) + mlp(norm(x)): recorded, planned and replayed like GPT-2 and LLaMA, against autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import onfoot
from onfoot.generate.cache import KVCache
from onfoot.generate.loop import step
from onfoot.models import families, head
from onfoot.models.layout import Layout
from onfoot.models.model import Model
from onfoot.models.params import NAMES
from onfoot.models.run import Run
from onfoot.ops.multi_head import merge_heads, split_heads
from oracles import assert_close

pytest.importorskip("numba")

# The family: a configuration, names and shapes, the network.

EPS = 1e-5


@dataclass(frozen=True)
class ParallelConfig:
    """A block whose attention and MLP read the same norm."""

    vocab_size: int = 41
    n_positions: int = 16
    n_embd: int = 24
    n_layer: int = 2
    n_head: int = 3
    tie_word_embeddings: bool = False
    causal: bool = True
    model_type = "parallel"
    eos_ids = ()


def shapes(config: ParallelConfig) -> dict[str, tuple[int, ...]]:
    d = config.n_embd
    linears = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (3 * d, d), "down": (d, 3 * d)}  # (out, in)
    out: dict[str, tuple[int, ...]] = {"words.weight": (config.vocab_size, d), "places.weight": (config.n_positions, d)}
    for b in range(config.n_layer):
        out |= {
            f"blocks.{b}.norm.weight": (d,),
            **{f"blocks.{b}.{name}.weight": size for name, size in linears.items()},
        }
    out |= {"norm.weight": (d,)}
    return out if config.tie_word_embeddings else out | {"lm_head.weight": (config.vocab_size, d)}


def block_forward(run: Run, config: ParallelConfig, b: int, x: Any, layout: Layout) -> tuple[Any, Any]:
    name = f"blocks.{b}"
    h, s_norm = run.rms_norm(f"{name}.norm", x, EPS)
    (q, s_q), (k, s_k), (v, s_v) = (run.linear(f"{name}.{part}", h) for part in "qkv")
    q, k, v = (split_heads(part, config.n_head) for part in (q, k, v))
    heads, s_attention = run.attention(f"{name}.attention", q, k, v, config.causal, layout.start, 0.0)
    y, s_o = run.linear_skip(f"{name}.o", heads, x)
    up, s_up = run.linear(f"{name}.up", h)
    bent, s_bent = run.activation(f"{name}.act", "gelu_tanh", up)
    y, s_down = run.linear_skip(f"{name}.down", bent, y)
    return y, (s_norm, s_q, s_k, s_v, s_attention, s_o, s_up, s_bent, s_down)


def block_backward(run: Run, config: ParallelConfig, b: int, dy: Any, saved: Any) -> Any:
    name, add = f"blocks.{b}", run.engine.add
    s_norm, s_q, s_k, s_v, s_attention, s_o, s_up, s_bent, s_down = saved
    d_bent = run.linear_skip_backward(f"{name}.down", dy, s_down)
    dh = run.linear_backward(f"{name}.up", run.activation_backward(f"{name}.act", "gelu_tanh", d_bent, s_bent), s_up)
    d_heads = run.linear_skip_backward(f"{name}.o", dy, s_o)
    grads = run.attention_backward(f"{name}.attention", d_heads, s_attention)
    for part, grad, s_part in zip("qkv", grads, (s_q, s_k, s_v), strict=True):
        dh = add(dh, run.linear_backward(f"{name}.{part}", merge_heads(grad), s_part))
    return run.rms_norm_backward(f"{name}.norm", dh, s_norm, skip_gradient=dy)


def features_forward(run: Run, config: ParallelConfig, tokens: Any, layout: Layout) -> tuple[Any, Any]:
    words, s_words = run.embedding("words.weight", tokens)
    places, s_places = run.embedding("places.weight", layout.positions)
    x, blocks = run.engine.add(words, places), []
    for b in range(config.n_layer):
        x, saved = run.block(block_forward, config, b, x, layout)
        blocks.append(saved)
    y, s_norm = run.rms_norm("norm", x, EPS)
    return y, (s_words, s_places, blocks, s_norm)


def features_backward(run: Run, config: ParallelConfig, dy: Any, saved: Any) -> None:
    s_words, s_places, blocks, s_norm = saved
    d = run.rms_norm_backward("norm", dy, s_norm)
    for b in reversed(range(config.n_layer)):
        d = run.block_backward(block_backward, config, b, d, blocks.pop())
    run.embedding_backward("words.weight", d, s_words)
    run.embedding_backward("places.weight", d if s_places.ids.ndim == 2 else run.engine.sum_first(d), s_places)


NETWORK = SimpleNamespace(
    **{name: getattr(head, name) for name in ("head_forward", "head_backward", "loss_forward", "loss_backward")},
    features_forward=features_forward,
    features_backward=features_backward,
)
PARAMETERS = SimpleNamespace(
    BLOCKS="blocks.", TOKEN_TABLE="words.weight", OUT_IN=True, TARGETS=("q", "v", "up", "down"), shapes=shapes,
    part_columns=lambda config, layer: {}, initial_std=lambda config, name: 0.1,
)  # fmt: skip

# The proofs


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    families.register(ParallelConfig, NETWORK, PARAMETERS)
    yield
    del families.NETWORKS[ParallelConfig], NAMES[ParallelConfig]


def logits_of(params: dict[str, torch.Tensor], config: ParallelConfig, tokens: torch.Tensor) -> torch.Tensor:
    """The same network out of PyTorch's own layers; an adapter is added to the weights."""

    def linear(layer: str, x: torch.Tensor) -> torch.Tensor:
        weight = params[f"{layer}.weight"]
        if f"{layer}.lora_A.default.weight" in params:
            weight = weight + 2 * params[f"{layer}.lora_B.default.weight"] @ params[f"{layer}.lora_A.default.weight"]
        return F.linear(x, weight)

    x = F.embedding(tokens, params["words.weight"]) + params["places.weight"][: tokens.shape[1]]
    for b in range(config.n_layer):
        h = F.rms_norm(x, x.shape[-1:], params[f"blocks.{b}.norm.weight"], EPS)
        q, k, v = (linear(f"blocks.{b}.{p}", h).unflatten(-1, (config.n_head, -1)).transpose(1, 2) for p in "qkv")
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        mlp = linear(f"blocks.{b}.down", F.gelu(linear(f"blocks.{b}.up", h), approximate="tanh"))
        x = x + linear(f"blocks.{b}.o", heads) + mlp
    x = F.rms_norm(x, x.shape[-1:], params["norm.weight"], EPS)
    return F.linear(x, params["words.weight" if config.tie_word_embeddings else "lm_head.weight"])


def by_autograd(model: Model, tokens: np.ndarray, targets: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    leaves = {k: torch.tensor(np.asarray(v), dtype=torch.float64, requires_grad=True) for k, v in model.params.items()}
    logits = logits_of(leaves, model.config, torch.tensor(tokens))
    loss = F.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=-100)
    loss.backward()
    return loss.item(), {name: leaves[name].grad.numpy() for name in model.trainable}


def scrambled(engine: str, dtype: str, tied: bool, lora: bool = False) -> Model:
    model = onfoot.create(ParallelConfig(tie_word_embeddings=tied), dtype=dtype, engine=engine)
    if lora:
        model.add_lora(r=4, alpha=8)
    rng = np.random.default_rng(1)
    for name in sorted(model.params):
        model.params[name][...] = rng.normal(1.0 if "norm" in name else 0.0, 0.2, model.params[name].shape)
    return model


def batch(seed: int = 0, sequences: int = 4, n: int = 11) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, 41, (2, sequences, n))
    targets[rng.random(targets.shape) < 0.3] = -100
    return tokens, targets


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("engine", "dtype", "tolerance"), [("numpy", "float64", 1e-11), ("numba", "float32", 1e-5)])
def test_gradients_are_those_of_autograd(
    engine: str, dtype: str, tolerance: float, tied: bool, lora: bool, threads: int
) -> None:
    model = scrambled(engine, dtype, tied, lora)
    for recompute in (False, True):
        model.recompute = recompute
        for seed in range(2):
            loss, grads = model.loss_and_grads(*batch(seed))
            right, expected = by_autograd(model, *batch(seed))
            assert loss == pytest.approx(right, rel=tolerance) and grads.keys() == expected.keys()
            for name, grad in grads.items():
                assert_close(grad, expected[name], tolerance, name)
    assert engine == "numpy" or len(model._steps) == 2  # each policy was recorded, and replayed for the second batch


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_it_trains_recorded(lora: bool, threads: int) -> None:
    model = scrambled("numba", "float32", True, lora)
    optimizer = onfoot.AdamW(model, lr=1e-2)
    losses = [model.train_step(optimizer, *batch()) for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0] and len(model._steps) == 1
    assert model.loss(*batch()) == pytest.approx(by_autograd(model, *batch())[0], rel=1e-5)


def test_a_recorded_step_is_the_step_bit_for_bit(on_threads: Callable[[int], None]) -> None:
    on_threads(1)
    model, plain = scrambled("numba", "float32", False), scrambled("numba", "float32", False)
    plain._steps = None
    segments = np.cumsum(np.random.default_rng(3).random((4, 11)) < 0.2, axis=1)
    for options in ({}, {"segments": segments}):
        for seed in range(2):
            (loss, grads), (other, expected) = (m.loss_and_grads(*batch(seed), **options) for m in (model, plain))
            assert loss == other and all((grads[name] == expected[name]).all() for name in expected)
    assert len(model._steps) == 2


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_it_generates_with_recorded_tokens(lora: bool) -> None:
    model = scrambled("numba", "float32", False, lora)
    params = {k: torch.tensor(np.asarray(v), dtype=torch.float64) for k, v in model.params.items()}
    text = model.generate(np.array([[1, 2, 3]]), 8, temperature=0)
    expected = logits_of(params, model.config, torch.tensor(text))[0, 2:-1].argmax(-1)
    assert text[0, 3:].tolist() == expected.tolist()
    cache = KVCache(5)
    for tokens in ([[1, 2, 3]], [[4]], [[5]]):
        logits = step(model, np.array(tokens), np.zeros(1, np.int64), cache)
    right = logits_of(params, model.config, torch.tensor([[1, 2, 3, 4, 5]]))[0, -1].numpy()
    assert_close(logits[0], right, 1e-5)
    assert cache.step is not None and cache.step.replay is not None


def test_one_that_is_not_registered_is_refused() -> None:
    class Unknown(SimpleNamespace):
        pass

    for config in (Unknown(), "gpt2"):
        with pytest.raises(ValueError, match="config must be a GPT2Config or a LlamaConfig, got"):
            onfoot.create(config)
