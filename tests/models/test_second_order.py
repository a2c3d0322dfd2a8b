"""H u and G u of whole networks: PyTorch's double backward, finite differences and the properties of a Hessian."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import llama_oracle
import onfoot
from onfoot.models import dual
from onfoot.models.model import Model
from onfoot.models.second_order import tangent_pass
from oracles import assert_close, gpt2_logits, scrambled

Leaves = dict[str, torch.Tensor]


def gpt2(seed: int, **changes: Any) -> Model:
    """A small GPT-2 with odd sizes, away from its initial values."""
    rng = np.random.default_rng(seed)
    config = onfoot.GPT2Config(
        **{
            "n_layer": int(rng.integers(1, 4)),
            "n_head": int(rng.integers(1, 4)),
            "n_embd": 12,
            "n_positions": 11,
            "vocab_size": int(rng.integers(5, 17)),
            "activation_function": str(rng.choice(["gelu_new", "gelu"])),
            **changes,
        }
    )
    return Model(config, scrambled(onfoot.create(config).params, seed), "float64", "numpy")


def llama(seed: int, tied: bool, kind: str = "llama") -> Model:
    config = llama_oracle.random_config(seed, ratio=1 + seed % 3, tied=tied, kind=kind)
    return llama_oracle.scrambled_llama(config, seed, engine="numpy")


def with_lora(model: Model, targets: list[str] | None, seed: int) -> Model:
    model.add_lora(r=2, alpha=3, targets=targets)
    rng = np.random.default_rng(seed)
    for name in sorted(model.trainable):
        model.params[name] = rng.normal(0, 0.4, model.params[name].shape)
    return model


def batch(model: Model, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, 5])
    tokens, targets = rng.integers(0, model.config.vocab_size, (2, 3, 7))
    targets[rng.random((3, 7)) < 0.3] = -100
    targets[0, 0] = 0
    return tokens, targets


def direction(model: Model, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([seed, 6])
    return {name: rng.normal(size=model.params[name].shape) for name in sorted(model.trainable)}


SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 2, 2, 2, 3]])


class Reference:
    """The same network by PyTorch's own layers (GPT-2) or by transformers (LLaMA), as a function of its parameters."""

    def __init__(self, model: Model, folder: Path, segments: np.ndarray | None = None) -> None:
        self.model, self.segments = model, segments
        self.frozen = {k: torch.tensor(np.asarray(p)) for k, p in model.params.items() if k not in model.trainable}
        self.leaves = {
            k: torch.tensor(np.asarray(model.params[k]), requires_grad=True) for k in sorted(model.trainable)
        }
        self.is_gpt2 = isinstance(model.config, onfoot.GPT2Config)
        if not self.is_gpt2:
            bare = Model(model.config, {k: p for k, p in model.params.items() if "lora_" not in k}, "float64", "numpy")
            with llama_oracle.in_float64():
                self.theirs = llama_oracle.in_transformers(bare, folder)

    def weights(self) -> Leaves:
        """The parameters that the network reads: an adapter's products are added to its base."""
        weights = {**self.frozen, **self.leaves}
        if self.model.active_adapter is None:
            return weights
        adapter = self.model.adapters[self.model.active_adapter]
        for name, layer in adapter.layers.items():
            down, up = (self.leaves[n] for n in (adapter.down(name), adapter.up(name)))  # (r, in), (out, r)
            added, key = layer.scale * up @ down, f"{layer.base_layer}.weight"  # (out, in)
            if not self.is_gpt2 or layer.base_layer == "lm_head":
                weights[key] = weights[key] + added
                continue
            base = weights[key].clone()
            base[:, layer.columns if layer.columns is not None else slice(None)] += added.T
            weights[key] = base
        return {k: w for k, w in weights.items() if "lora_" not in k}

    def examples(self, tokens: np.ndarray, targets: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """One row each: packed examples stand alone."""
        if self.segments is None:
            return [(t[None], y[None]) for t, y in zip(tokens, targets, strict=True)]
        return [
            (tokens[r][None, self.segments[r] == s], targets[r][None, self.segments[r] == s])
            for r in range(len(tokens))
            for s in np.unique(self.segments[r])
        ]

    def logits(self, weights: Leaves, tokens: np.ndarray) -> torch.Tensor:
        if self.is_gpt2:
            return gpt2_logits(weights, self.model.config, torch.tensor(tokens))
        with llama_oracle.in_float64():
            return torch.func.functional_call(self.theirs, weights, (torch.tensor(tokens),)).logits

    def losses(self, tokens: np.ndarray, targets: np.ndarray) -> list[torch.Tensor]:
        """Each example's part of the batch's mean loss."""
        weights, n = self.weights(), int((targets != -100).sum())
        return [self.loss(self.logits(weights, t), y) / n for t, y in self.examples(tokens, targets)]

    def loss(self, logits: torch.Tensor, targets: np.ndarray) -> torch.Tensor:
        flat = torch.tensor(targets).flatten()
        return F.cross_entropy(logits.flatten(0, 1), flat, ignore_index=-100, reduction="sum")

    def hvp(self, tokens: np.ndarray, targets: np.ndarray, u: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        with sdpa_kernel(SDPBackend.MATH):
            names = list(self.leaves)
            grads = torch.autograd.grad(
                sum(self.losses(tokens, targets)), list(self.leaves.values()), create_graph=True
            )
            along = sum((g * torch.tensor(u[n])).sum() for n, g in zip(names, grads, strict=True))
            made = torch.autograd.grad(along, list(self.leaves.values()), allow_unused=True)
        return {n: np.zeros(u[n].shape) if g is None else g.numpy() for n, g in zip(names, made, strict=True)}

    def gauss_newton(self, tokens: np.ndarray, targets: np.ndarray, u: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Jᵗ H J u, example by example: J u by the double-backward trick, H by autograd on the logits."""
        leaves, n = list(self.leaves.values()), int((targets != -100).sum())
        total = {name: np.zeros(x.shape) for name, x in u.items()}
        with sdpa_kernel(SDPBackend.MATH):
            for t, y in self.examples(tokens, targets):
                z = self.logits(self.weights(), t)
                v = torch.zeros_like(z, requires_grad=True)
                pulled = torch.autograd.grad(z, leaves, v, create_graph=True, allow_unused=True)
                pairs = zip(self.leaves, pulled, strict=True)
                along = sum((g * torch.tensor(u[name])).sum() for name, g in pairs if g is not None)
                (z_dot,) = torch.autograd.grad(along, v, retain_graph=True)
                fixed = z.detach().requires_grad_()
                (slope,) = torch.autograd.grad(self.loss(fixed, y) / n, fixed, create_graph=True)
                (curved,) = torch.autograd.grad((slope * z_dot).sum(), fixed)
                for name, g in zip(self.leaves, torch.autograd.grad(z, leaves, curved, allow_unused=True), strict=True):
                    total[name] += 0 if g is None else g.numpy()
        return total


def assert_equal(got: dict[str, Any], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """All parameters as one vector, and each of them relative to it."""
    assert set(got) == set(expected)
    scale = np.sqrt(sum((x**2).sum() for x in expected.values()))
    for name, x in expected.items():
        assert np.linalg.norm(np.asarray(got[name]) - x) <= tolerance * scale, name


MODELS: dict[str, Callable[[int], Model]] = {
    "gpt2, tied": lambda seed: gpt2(seed, tie_word_embeddings=True),
    "gpt2, untied with bias": lambda seed: gpt2(seed, tie_word_embeddings=False, lm_head_bias=True),
    "gpt2, odd head widths": lambda seed: gpt2(seed, n_head=2, head_dim=5, qk_head_dim=3),
    "gpt2, lora": lambda seed: with_lora(gpt2(seed), None, seed),
    "gpt2, lora on parts and head": lambda seed: with_lora(
        gpt2(seed, tie_word_embeddings=False), ["c_attn.q", "c_attn.v", "lm_head"], seed
    ),
    "llama, tied": lambda seed: llama(seed, True),
    "llama, untied": lambda seed: llama(seed, False),
    "qwen2": lambda seed: llama(seed, True, "qwen2"),
    "llama, lora": lambda seed: with_lora(llama(seed, False), None, seed),
    "llama, lora on two": lambda seed: with_lora(llama(seed, True), ["k_proj", "gate_proj"], seed),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_second_order_equals_double_backward(name: str, packed: bool, seed: int, tmp_path: Path) -> None:
    model = MODELS[name](seed)
    tokens, targets = batch(model, seed)
    u, segments = direction(model, seed), SEGMENTS if packed else None
    reference = Reference(model, tmp_path, segments)
    done = tangent_pass(model, tokens, targets, u, segments=segments)
    assert_equal(done.hvp, reference.hvp(tokens, targets, u), 1e-9)
    gauss_newton = model.hvp(tokens, targets, u, kind="gauss-newton", segments=segments)
    assert_equal(gauss_newton, reference.gauss_newton(tokens, targets, u), 1e-9)

    loss, grads = model.loss_and_grads(tokens, targets, segments=segments)
    assert done.loss == loss
    assert_equal(done.grads, grads, 1e-15)
    dots = model.example_dots(tokens, targets, u, segments=segments)
    expected = []
    for one in reference.losses(tokens, targets):
        made = torch.autograd.grad(one, list(reference.leaves.values()), retain_graph=True, allow_unused=True)
        pairs = zip(reference.leaves, made, strict=True)
        expected.append(sum(float((g * torch.tensor(u[n])).sum()) for n, g in pairs if g is not None))
    assert_close(dots, np.array(expected), 1e-10)
    assert_close(dots.sum(), sum((grads[n] * u[n]).sum() for n in u), 1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_the_hessian_is_symmetric_and_linear_and_gauss_newton_positive(name: str) -> None:
    model = MODELS[name](7)
    tokens, targets = batch(model, 7)
    u, v = direction(model, 1), direction(model, 2)

    def dot(a: dict[str, Any], b: dict[str, Any]) -> float:
        return float(sum((a[n] * b[n]).sum() for n in a))

    for kind in dual.KINDS:
        hu, hv = (model.hvp(tokens, targets, x, kind=kind) for x in (u, v))
        scale = np.sqrt(dot(hu, hu) * dot(v, v))
        assert abs(dot(v, hu) - dot(u, hv)) <= 1e-12 * scale
        both = model.hvp(tokens, targets, {n: 2 * u[n] - 3 * v[n] for n in u}, kind=kind)
        assert_equal(both, {n: 2 * hu[n] - 3 * hv[n] for n in u}, 1e-12)
    for seed in range(5):
        w = direction(model, seed)
        assert dot(w, model.hvp(tokens, targets, w, kind="gauss-newton")) >= 0


@pytest.mark.parametrize("name", MODELS)
def test_h_u_is_the_difference_of_our_own_gradients(name: str) -> None:
    model = MODELS[name](11)
    tokens, targets = batch(model, 11)
    u, h = direction(model, 3), 2e-5
    start = {n: np.array(model.params[n]) for n in u}

    def grads(step: float) -> dict[str, np.ndarray]:
        for n in u:
            model.params[n] = start[n] + step * u[n]
        return model.loss_and_grads(tokens, targets, divisor=5.0)[1]

    a, b, c, d = (grads(x) for x in (h, -h, 2 * h, -2 * h))
    grads(0.0)
    slope = {n: (8 * (a[n] - b[n]) - (c[n] - d[n])) / (12 * h) for n in u}
    assert_equal(model.hvp(tokens, targets, u, divisor=5.0), slope, 1e-7)


def test_directions_without_effect_have_no_curvature() -> None:
    """b_k shifts all scores of a row alike, and lm_head's bias all logits."""
    model = gpt2(3, tie_word_embeddings=False, lm_head_bias=True, n_head=2)
    tokens, targets = batch(model, 3)
    width = model.config.n_head * model.config.key_width
    name = "transformer.h.0.attn.c_attn.bias"
    keys = np.zeros(model.params[name].shape)
    keys[width : 2 * width] = np.random.default_rng(0).normal(size=width)
    for moved in ({name: keys}, {"lm_head.bias": np.ones(model.config.vocab_size)}):
        for kind in dual.KINDS:
            made = model.hvp(tokens, targets, moved, kind=kind)
            assert max(np.abs(x).max() for x in made.values()) <= 1e-14


def test_a_parameter_that_is_left_out_does_not_move() -> None:
    model = gpt2(4)
    tokens, targets = batch(model, 4)
    u = direction(model, 4)
    some = {n: x for n, x in u.items() if ".h.0.mlp" in n}
    zeros = {n: x if n in some else np.zeros_like(x) for n, x in u.items()}
    assert_equal(model.hvp(tokens, targets, some), model.hvp(tokens, targets, zeros), 1e-14)
    nothing = model.hvp(tokens, targets, {})
    assert set(nothing) == model.trainable and not any(x.any() for x in nothing.values())


def test_dropout_is_that_of_the_gradient() -> None:
    model = gpt2(5, resid_pdrop=0.3, attn_pdrop=0.2, embd_pdrop=0.1)
    tokens, targets = batch(model, 5)
    u = direction(model, 5)
    done = tangent_pass(model, tokens, targets, u, dropout_seed=9)
    loss, grads = model.loss_and_grads(tokens, targets, dropout_seed=9)
    assert done.loss == loss and loss != model.loss(tokens, targets)
    assert_equal(done.grads, grads, 1e-15)
    v = direction(model, 6)
    other = tangent_pass(model, tokens, targets, v, dropout_seed=9)
    left, right = (sum((x.hvp[n] * y[n]).sum() for n in u) for x, y in ((done, v), (other, u)))
    assert left == pytest.approx(right, rel=1e-10)


def test_logits_come_in_parts_and_blocks_may_be_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2(6, tie_word_embeddings=True)
    tokens, targets = batch(model, 6)
    u = direction(model, 6)
    expected = {kind: model.hvp(tokens, targets, u, kind=kind) for kind in dual.KINDS}
    monkeypatch.setattr(dual, "PART", 4 * model.config.vocab_size)  # 4 of 21 tokens
    for kind in dual.KINDS:
        assert_equal(model.hvp(tokens, targets, u, kind=kind), expected[kind], 1e-13)
    model.recompute = True
    assert_equal(model.hvp(tokens, targets, u), expected["hessian"], 1e-13)


@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_other_engines_agree(engine: str) -> None:
    dtype, tolerance = ("float64", 1e-12) if engine == "torch" else ("float32", 1e-4)
    for made in (gpt2(8), with_lora(gpt2(9), None, 9), llama(8, True), with_lora(llama(9, False), None, 9)):
        other = Model(made.config, {n: p for n, p in made.params.items() if "lora_" not in n}, dtype, engine)
        if made.active_adapter is not None:
            other.add_lora(r=2, alpha=3)
            for name in made.trainable:
                other.params[name] = made.params[name]
        tokens, targets = batch(made, 8)
        u = direction(made, 8)
        for kind in dual.KINDS:
            assert_equal(other.hvp(tokens, targets, u, kind=kind), made.hvp(tokens, targets, u, kind=kind), tolerance)
        dots = other.example_dots(tokens, targets, u, segments=SEGMENTS)
        assert_close(dots, made.example_dots(tokens, targets, u, segments=SEGMENTS), tolerance)


def test_a_planted_bug_in_one_op_shows_in_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpt2(10)
    tokens, targets = batch(model, 10)
    u = direction(model, 10)
    right = model.hvp(tokens, targets, u)
    real = dual.tangents.layer_norm_backward_tangent

    def wrong(dy: Any, dy_dot: Any, saved: Any, saved_dot: Any) -> Any:
        return real(dy, dy_dot, saved, saved_dot._replace(rstd=0 * saved_dot.rstd))

    monkeypatch.setattr(dual.tangents, "layer_norm_backward_tangent", wrong)
    with pytest.raises(AssertionError):
        assert_equal(model.hvp(tokens, targets, u), right, 1e-6)


def test_what_cannot_be_is_refused() -> None:
    model = gpt2(0)
    tokens, targets = batch(model, 0)
    with pytest.raises(ValueError, match="unknown kind 'fisher'; choose from hessian, gauss-newton"):
        model.hvp(tokens, targets, {}, kind="fisher")
    with pytest.raises(ValueError, match="the direction has 'w', which is not a trainable parameter"):
        model.hvp(tokens, targets, {"w": np.zeros(3)})
    with pytest.raises(
        ValueError, match=r"the direction of transformer\.ln_f\.bias has shape \(3,\), expected \(12,\)"
    ):
        model.example_dots(tokens, targets, {"transformer.ln_f.bias": np.zeros(3)})
