"""onfoot.torch: the pairs inside PyTorch's autograd, held against gradcheck and against PyTorch's own functions."""

from __future__ import annotations

import importlib
import math
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onfoot.torch
from onfoot import ops
from onfoot.engine import OPS
from onfoot.ops.dropout import dropout_pattern
from onfoot.torch import Head, function

IDS = torch.tensor([[4, 0, 4], [2, 4, 0]])  # 4 and 0 repeat, 1 and 3 never occur
TARGETS = torch.tensor([[3, -100, 0], [6, 3, -100]])
HEAD_3_2 = [(4, 3), (3,), (4, 3), (3,), (4, 2), (2,)]  # d = 4, d_ρ = 3, d_h = 2
HEAD_2_5 = [(4, 2), (2,), (4, 2), (2,), (4, 5), (5,)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


KEEP = torch.from_numpy(dropout_pattern((2, 3, 5), 0.4, seed=1, dtype="float64"))
FROZEN_W, FROZEN_B = normal(5, 7, seed=11), normal(7, seed=12)
START = torch.tensor([[0, 0, 2], [0, 1, 1]])
ANGLES = torch.arange(5.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.01])
COS, SIN = ANGLES.cos(), ANGLES.sin()
REFERENCE = normal(2, 7, seed=13)


def masked_attention(q, k, v, mask, keep=None):
    """Attention by PyTorch's own softmax; the booleans of `mask` say what is seen."""
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    rho = scores.softmax(-1)
    return (rho if keep is None else rho * keep) @ v


def behind(n_q: int, n_k: int) -> torch.Tensor:
    """The last query stands beside the last key."""
    return torch.ones(n_q, n_k).tril(n_k - n_q).bool()


def native_head(a, p, causal):
    q, k, v = (F.linear(a, w.T, b) for w, b in ((p[0], p[1]), (p[2], p[3]), (p[4], p[5])))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def native_heads(a, p, causal):
    return torch.cat([native_head(a, p[:6], causal), native_head(a, p[6:], causal)], -1)


def native_multi_head(query, key, value, w_q, b_q, w_k, b_k, w_v, b_v):
    """PyTorch's own layer of two heads, from (B, T, C) to (T, B, C) and back; its output projection does nothing."""
    d = query.shape[-1]
    y, _ = F.multi_head_attention_forward(
        *(x.transpose(0, 1) for x in (query, key, value)), d, 2, None, torch.cat([b_q, b_k, b_v]), None, None,
        False, 0.0, torch.eye(d, dtype=query.dtype), None, use_separate_proj_weight=True,
        q_proj_weight=w_q.T, k_proj_weight=w_k.T, v_proj_weight=w_v.T, need_weights=False,
    )  # fmt: skip
    return y.transpose(0, 1)


def native_rope(x, interleaved):
    """The rotation as a product of complex numbers."""
    turn = torch.polar(torch.ones_like(ANGLES), ANGLES)
    if interleaved:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn).flatten(-2)
    turned = torch.complex(*x.chunk(2, dim=-1)) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)


def native_dpo(chosen, rejected):
    margin = 0.7 * ((chosen - rejected) - (REFERENCE[0] - REFERENCE[1]))
    return (-0.8 * F.logsigmoid(margin) - 0.2 * F.logsigmoid(-margin)).sum() / 5


class Case(NamedTuple):
    ours: Callable[..., torch.Tensor]
    native: Callable[..., torch.Tensor]
    shapes: list[tuple[int, ...]]


QKV = [(2, 3, 4), (2, 5, 4), (2, 5, 3)]  # n_q = 3, n_k = 5, d_ρ = 4, d_h = 3
CASES = {
    "linear": Case(onfoot.torch.linear, lambda x, w, b: F.linear(x, w.T, b), [(2, 3, 5), (5, 7), (7,)]),
    "linear without bias": Case(onfoot.torch.linear, lambda x, w: F.linear(x, w.T), [(3, 5), (5, 1)]),
    "linear on one token": Case(onfoot.torch.linear, lambda x, w, b: F.linear(x, w.T, b), [(5,), (5, 2), (2,)]),
    "linear with only a bias that trains": Case(
        lambda x, b: onfoot.torch.linear(x, FROZEN_W, b), lambda x, b: F.linear(x, FROZEN_W.T, b), [(3, 5), (7,)]
    ),
    "linear, frozen": Case(
        lambda x: onfoot.torch.linear(x, FROZEN_W, FROZEN_B), lambda x: F.linear(x, FROZEN_W.T, FROZEN_B), [(2, 3, 5)]
    ),
    "embedding": Case(lambda w: onfoot.torch.embedding(IDS, w), lambda w: F.embedding(IDS, w), [(5, 3)]),
    "layer_norm": Case(
        lambda x, w, b: onfoot.torch.layer_norm(x, w, b, 1e-3),
        lambda x, w, b: F.layer_norm(x, (5,), w, b, 1e-3),
        [(2, 3, 5), (5,), (5,)],
    ),
    "relu": Case(onfoot.torch.relu, F.relu, [(3, 5)]),
    "gelu_tanh": Case(onfoot.torch.gelu_tanh, lambda x: F.gelu(x, approximate="tanh"), [(3, 5)]),
    "gelu_erf": Case(onfoot.torch.gelu_erf, F.gelu, [(3, 5)]),
    "attention": Case(
        onfoot.torch.attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 3)],
    ),
    "attention, not causal": Case(
        lambda q, k, v: onfoot.torch.attention(q, k, v, causal=False), F.scaled_dot_product_attention, QKV
    ),
    "attention behind cached keys": Case(
        onfoot.torch.attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=behind(3, 5)),
        QKV,
    ),
    "attention with keys shared by all heads": Case(
        onfoot.torch.attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=behind(3, 5)),
        [(2, 2, 3, 4), (2, 1, 5, 4), (1, 1, 5, 3)],
    ),
    "attention within a segment, with dropout": Case(
        lambda q, k, v: onfoot.torch.attention(q, k, v, start=START, keep=KEEP),
        lambda q, k, v: masked_attention(q, k, v, behind(3, 5) & (torch.arange(5) >= START[..., None]), KEEP),
        QKV,
    ),
    "head": Case(
        lambda a, *p: onfoot.torch.head(a, Head(*p)), lambda a, *p: native_head(a, p, True), [(2, 5, 4), *HEAD_3_2]
    ),
    "head, not causal": Case(
        lambda a, *p: onfoot.torch.head(a, Head(*p), causal=False),
        lambda a, *p: native_head(a, p, False),
        [(5, 4), *HEAD_3_2],
    ),
    "heads": Case(
        lambda a, *p: onfoot.torch.heads(a, [Head(*p[:6]), Head(*p[6:])]),
        lambda a, *p: native_heads(a, p, True),
        [(2, 3, 4), *HEAD_3_2, *HEAD_2_5],
    ),
    "multi_head": Case(
        lambda *p: onfoot.torch.multi_head(*p, n_head=2, causal=False),
        native_multi_head,
        [(2, 3, 4), (2, 5, 6), (2, 5, 3), (4, 4), (4,), (6, 4), (4,), (3, 4), (4,)],
    ),
    "multi_head without biases, causal": Case(
        lambda q, k, v, *w: onfoot.torch.multi_head(q, k, v, w[0], None, w[1], None, w[2], None, 1),
        lambda q, k, v, *w: F.scaled_dot_product_attention(q @ w[0], k @ w[1], v @ w[2], attn_mask=behind(3, 5)),
        [(2, 3, 4), (2, 5, 4), (2, 5, 4), (4, 3), (4, 3), (4, 5)],
    ),
    "grouped_query": Case(
        onfoot.torch.grouped_query,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [(2, 6, 5, 4), (2, 2, 5, 4), (2, 2, 5, 3)],
    ),
    "batch_norm": Case(
        lambda x, w, b: onfoot.torch.batch_norm(x, w, b, 1e-3),
        lambda x, w, b: F.batch_norm(x.flatten(0, 1), None, None, w, b, True, eps=1e-3).view_as(x),
        [(2, 3, 5), (5,), (5,)],
    ),
    "rms_norm": Case(
        lambda x, w: onfoot.torch.rms_norm(x, w, 1e-3),
        lambda x, w: F.rms_norm(x, (5,), w, 1e-3),
        [(2, 3, 5), (5,)],
    ),
    "rope": Case(lambda x: onfoot.torch.rope(x, COS, SIN), lambda x: native_rope(x, False), [(2, 5, 6)]),
    "rope, interleaved": Case(
        lambda x: onfoot.torch.rope(x, COS, SIN, interleaved=True), lambda x: native_rope(x, True), [(2, 5, 6)]
    ),
    "swiglu": Case(onfoot.torch.swiglu, lambda gate, up: F.silu(gate) * up, [(3, 5), (3, 5)]),
    "dpo_loss": Case(
        lambda c, r: onfoot.torch.dpo_loss(c, r, *REFERENCE, beta=0.7, label_smoothing=0.2, divisor=5.0),
        native_dpo,
        [(7,), (7,)],
    ),
    "cross_entropy": Case(
        lambda a: onfoot.torch.cross_entropy(a, TARGETS),
        lambda a: F.cross_entropy(a.reshape(-1, 7), TARGETS.reshape(-1)),
        [(2, 3, 7)],
    ),
    "cross_entropy, summed": Case(
        lambda a: onfoot.torch.cross_entropy(a, TARGETS, divisor=1),
        lambda a: F.cross_entropy(a.reshape(-1, 7), TARGETS.reshape(-1), reduction="sum"),
        [(2, 3, 7)],
    ),
    "lora": Case(
        lambda x, d, u: onfoot.torch.lora(x, d, u, 0.7), lambda x, d, u: 0.7 * x @ (d @ u), [(2, 3, 5), (5, 2), (2, 7)]
    ),
    "lora_linear": Case(
        lambda x, d, u: onfoot.torch.lora_linear(x, FROZEN_W, FROZEN_B, d, u, 0.7),
        lambda x, d, u: x @ (FROZEN_W + 0.7 * d @ u) + FROZEN_B,
        [(2, 3, 5), (5, 2), (2, 7)],
    ),
    "lora_linear without bias, with dropout": Case(
        lambda x, d, u: onfoot.torch.lora_linear(x, FROZEN_W, None, d, u, 0.7, KEEP),
        lambda x, d, u: x @ FROZEN_W + 0.7 * (x * KEEP) @ (d @ u),
        [(2, 3, 5), (5, 2), (2, 7)],
    ),
    "dropout": Case(lambda x: onfoot.torch.dropout(x, KEEP), lambda x: x * KEEP, [(2, 3, 5)]),
}


def inputs(case: Case) -> list[torch.Tensor]:
    return [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(case.shapes)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    case = CASES[name]
    assert torch.autograd.gradcheck(case.ours, inputs(case))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_pytorch(name: str) -> None:
    case = CASES[name]
    xs = inputs(case)
    ours, native = case.ours(*xs), case.native(*xs)
    torch.testing.assert_close(ours, native, rtol=1e-12, atol=1e-13)
    dy = normal(*ours.shape, seed=99)
    for got, expected in zip(torch.autograd.grad(ours, xs, dy), torch.autograd.grad(native, xs, dy), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_every_public_function_runs_its_own_node(name: str) -> None:
    node = CASES[name].ours(*inputs(CASES[name])).grad_fn.name().removesuffix("Backward").removeprefix("Frozen")
    assert node == name.replace(",", "").split()[0].title().replace("_", "")


def test_every_public_function_has_a_case() -> None:
    assert {name.replace(",", "").split()[0] for name in CASES} == set(onfoot.torch.__all__) - {"Head"}


WITHOUT_A_FUNCTION = {"frozen_linear": "linear runs it where neither weight nor bias requires a gradient"}


def test_every_pair_of_the_formulas_has_its_function() -> None:
    modules = [importlib.import_module(f"onfoot.ops.{one.name}") for one in pkgutil.iter_modules(ops.__path__)]
    pairs = {
        name.removesuffix("_forward")
        for module in modules
        for name, made in vars(module).items()
        if name.endswith("_forward") and made.__module__ == module.__name__
    }
    assert {name.removesuffix("_forward") for name in OPS if name.endswith("_forward")} <= pairs
    assert pairs - set(onfoot.torch.__all__) == set(WITHOUT_A_FUNCTION)
    assert "FrozenLinear" in onfoot.torch.linear(normal(3, 5).requires_grad_(), FROZEN_W).grad_fn.name()


def unscaled_attention_backward(dy, saved):
    dq, dk, dv = ops.attention_backward(dy, saved)
    return dq * math.sqrt(saved.q.shape[-1]), dk, dv


def weight_outside_layer_norm_backward(dy, saved):
    dx, dweight, dbias = ops.layer_norm_backward(dy, saved._replace(weight=torch.ones_like(saved.weight)))
    return dx * saved.weight, dweight, dbias


def repeats_lost_embedding_backward(dy, saved):
    dweight = dy.new_zeros(saved.n_rows, dy.shape[-1])
    dweight[saved.ids] = dy
    return dweight


@pytest.mark.parametrize(
    ("forward", "backward", "wrt", "args", "shapes"),
    [
        (ops.attention_forward, unscaled_attention_backward, ["q", "k", "v"], (), QKV),
        (ops.layer_norm_forward, weight_outside_layer_norm_backward, ["x", "weight", "bias"], (), [(3, 5), (5,), (5,)]),
        (ops.embedding_forward, repeats_lost_embedding_backward, ["weight"], (IDS,), [(5, 3)]),
        (ops.gelu_tanh_forward, ops.gelu_erf_backward, ["x"], (), [(3, 5)]),
    ],
)
def test_a_wrong_backward_is_caught(forward: Any, backward: Any, wrt: Any, args: Any, shapes: Any) -> None:
    planted = function.differentiable(forward, backward, wrt)
    xs = [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    assert not torch.autograd.gradcheck(lambda *xs: planted(*args, *xs), xs, raise_exception=False)


def test_one_tensor_as_query_key_and_value_receives_the_sum_of_three_gradients() -> None:
    x = normal(2, 5, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: onfoot.torch.attention(x, x, x), [x])


def test_a_query_that_sees_no_key_gives_zero_and_receives_no_gradient() -> None:
    q, k, v = (normal(n, 3, seed=n).requires_grad_() for n in (5, 2, 2))
    y = onfoot.torch.attention(q, k, v)  # the first three queries stand before the first key
    y.sum().backward()
    assert (y[:3] == 0).all() and (y[3:] != 0).all()
    assert (q.grad[:3] == 0).all()
    assert k.grad.isfinite().all() and v.grad.isfinite().all()


def test_arguments_that_need_no_gradient_get_none() -> None:
    xs = inputs(CASES["heads"])
    frozen = {0, 3, 8}  # a, one bias, one weight
    for i in frozen:
        xs[i].requires_grad_(False)
    CASES["heads"].ours(*xs).sum().backward()
    assert {i for i, x in enumerate(xs) if x.grad is None} == frozen


def test_an_argument_without_a_formula_for_its_gradient_is_refused_not_ignored() -> None:
    x, weight, down, up = normal(3, 5), normal(5, 7).requires_grad_(), normal(5, 2), normal(2, 7)
    with pytest.raises(ValueError, match=r"lora_linear: weight requires a gradient.*weight\.detach"):
        onfoot.torch.lora_linear(x, weight, None, down, up, 1.0)
    with torch.no_grad():
        expected = x @ (weight + down @ up)
        torch.testing.assert_close(onfoot.torch.lora_linear(x, weight, None, down, up, 1.0), expected)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    x = normal(3, 5).requires_grad_()
    y = onfoot.torch.gelu_erf(x).sum()
    with pytest.raises(RuntimeError, match=r"gelu_erf: its gradient is a formula.*create_graph=True"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize(
    ("name", "changed"),
    [("linear", 1), ("attention", 2), ("heads", 12), ("multi_head", 7), ("rms_norm", 1), ("lora", 0)],
)
def test_a_tensor_changed_between_the_passes_is_detected(name: str, changed: int) -> None:
    xs = inputs(CASES[name])
    y = CASES[name].ours(*xs)
    with torch.no_grad():
        xs[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", CASES)
def test_what_was_saved_is_freed_by_the_backward_pass(name: str) -> None:
    y = CASES[name].ours(*inputs(CASES[name]))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def saved_sizes(run: Callable[[], torch.Tensor]) -> list[int]:
    sizes: list[int] = []

    def pack(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run()
    return sorted(sizes)


def test_every_saved_tensor_is_known_to_autograd() -> None:
    xs = inputs(CASES["heads"])
    a, one_head = 2 * 3 * 4, [12, 3, 12, 3, 8, 2]
    other_head = [8, 2, 8, 2, 20, 5]
    inside = [2 * 3 * 3, 2 * 3 * 3, 2 * 3 * 2, 2 * 9, 2 * 3 * 2, 2 * 3 * 2, 2 * 3 * 5, 2 * 9]  # q, k, v, ρ of each
    assert saved_sizes(lambda: CASES["heads"].ours(*xs)) == sorted([a, a, *one_head, *other_head, *inside])


def test_a_frozen_linear_layer_does_not_keep_its_input() -> None:
    x, weight = normal(1000, 5).requires_grad_(), normal(5, 7)
    assert saved_sizes(lambda: onfoot.torch.linear(x, weight)) == [35]
    assert saved_sizes(lambda: onfoot.torch.linear(x, weight.requires_grad_())) == [35, 5000]


def test_checkpointing_recomputes_and_gives_the_same_gradients() -> None:
    xs = inputs(CASES["head"])
    plain = torch.autograd.grad(CASES["head"].ours(*xs).square().sum(), xs)
    again = torch.autograd.grad(checkpoint(CASES["head"].ours, *xs, use_reentrant=False).square().sum(), xs)
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


class Block(nn.Module):
    """One block and a head, on PyTorch's layers."""

    def __init__(self, vocab: int = 11, d: int = 6, n_head: int = 2) -> None:
        super().__init__()
        self.n_head = n_head
        self.table = nn.Embedding(vocab, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.expand, self.contract = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.logits = nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens)
        q, k, v = self.linear(self.qkv, self.norm(self.norm1, x)).chunk(3, -1)
        y = self.attend(*(part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in (q, k, v)))
        x = x + self.linear(self.proj, y.transpose(1, 2).flatten(2))
        x = x + self.linear(self.contract, self.gelu(self.linear(self.expand, self.norm(self.norm2, x))))
        return self.loss(self.linear(self.logits, x), targets)

    def embed(self, tokens):
        return self.table(tokens)

    def norm(self, layer, x):
        return layer(x)

    def linear(self, layer, x):
        return layer(x)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def gelu(self, x):
        return F.gelu(x, approximate="tanh")

    def loss(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class OnFootBlock(Block):
    """The same parameters; every layer's value and gradient from the pairs."""

    def embed(self, tokens):
        return onfoot.torch.embedding(tokens, self.table.weight)

    def norm(self, layer, x):
        return onfoot.torch.layer_norm(x, layer.weight, layer.bias, layer.eps)

    def linear(self, layer, x):
        return onfoot.torch.linear(x, layer.weight.T, layer.bias)

    def attend(self, q, k, v):
        return onfoot.torch.attention(q, k, v, causal=True)

    def gelu(self, x):
        return onfoot.torch.gelu_tanh(x)

    def loss(self, logits, targets):
        return onfoot.torch.cross_entropy(logits, targets)


def test_a_module_of_pairs_trains_a_step_like_one_of_pytorch_layers() -> None:
    torch.manual_seed(0)
    native = Block().double()
    for p in native.parameters():
        nn.init.normal_(p, 0.3, 0.5)  # away from initial values: norms not 1, biases not 0
    ours = OnFootBlock().double()
    ours.load_state_dict(native.state_dict())
    tokens = torch.randint(0, 11, (3, 7))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100

    steps = []
    for model in (native, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        steps.append((loss, [p.grad for p in model.parameters()], list(model.parameters())))
    torch.testing.assert_close(*(step[0] for step in steps), rtol=1e-13, atol=0)
    for kind in (1, 2):
        for one, other in zip(steps[0][kind], steps[1][kind], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_a_module_of_pairs_runs_under_autocast_in_both_passes() -> None:
    torch.manual_seed(0)
    model = OnFootBlock()
    tokens = torch.randint(0, 11, (3, 7))
    grads = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(tokens, tokens)
        assert loss.dtype == torch.float32
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    for full, half in zip(*grads, strict=True):
        assert half.dtype == torch.float32
        assert 0 < (half - full).norm() < 0.05 * full.norm() + 1e-3  # bfloat16 keeps 8 bits


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: onfoot.torch.embedding(torch.tensor([0, -1]), normal(5, 3)), r"id -1 is outside 0 \.\.\. 4"),
        (lambda: onfoot.torch.embedding(torch.tensor([5]), normal(5, 3)), r"id 5 is outside 0 \.\.\. 4"),
        (lambda: onfoot.torch.embedding(torch.tensor([1], dtype=torch.uint8), normal(5, 3)), r"got torch\.uint8"),
        (lambda: onfoot.torch.cross_entropy(normal(2, 5), torch.tensor([1, 5])), r"target 5 is outside 0 \.\.\. 4"),
        (lambda: onfoot.torch.cross_entropy(normal(2, 5), torch.tensor([1, -1])), "target -1 is outside"),
        (lambda: onfoot.torch.cross_entropy(normal(2, 5), torch.tensor([-100, -100])), "all 2 targets are -100"),
        (lambda: onfoot.torch.cross_entropy(normal(2, 5), torch.tensor([1])), r"have shape \(2,\), got \(1,\)"),
    ],
)
def test_what_indexing_would_accept_in_silence_is_refused(call: Callable[[], torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_module_named_torch_does_not_shadow_pytorch() -> None:
    assert function.torch is torch and onfoot.torch.torch is torch
    assert onfoot.torch is not torch


def test_without_pytorch_the_import_says_what_to_install() -> None:
    script = "import sys; sys.modules['torch'] = None; import onfoot; import onfoot.torch"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'ImportError: onfoot.torch needs PyTorch: pip install "onfoot[torch]"' in done.stderr
