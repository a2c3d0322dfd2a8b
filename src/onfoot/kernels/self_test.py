"""Self-test: whether the kernels match their formulas on this CPU. Runs once, after compilation and before use.

Each file's pairs are compared with `ops` in float64, on shapes that are not multiples of a vector, for a random
upstream gradient. `compiler` runs this in a separate process: a kernel that crashes ends only that one, and the last
line it printed is the file that was being tested.
"""

from __future__ import annotations

import ast
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from onfoot import kernels, ops
from onfoot.ops import tangents as formulas
from onfoot.ops.cross_entropy import IGNORE
from onfoot.quantized import FORMS, FrozenWeight, HalfWeight, QuantizedWeight, rounded

CLOSE = 1e-4  # relative to each array's norm; correct kernels are within 2e-6
Table = Mapping[str, Callable[..., Any]]
Found = Iterator[tuple[str, Any, Any]]  # a name, the kernel's result, the formula's result
ROWS = (1, 37)  # few, and more than a register tile


FROZEN = ("BF16", "F16", *FORMS)  # the kinds of frozen weights


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random numbers in float32."""
    return rng.standard_normal(shape).astype(np.float32)


def frozen(rng: np.random.Generator, kind: str, rows: int, columns: int) -> FrozenWeight:
    """A random weight of that kind."""
    if kind not in FORMS:
        return HalfWeight(kind, rounded(normal(rng, rows, columns), kind))
    form, blocks = FORMS[kind], columns // FORMS[kind].block
    codes = rng.integers(0, 128 if form.bits == 8 else 256, (rows, blocks, form.n_bytes))
    codes = codes.astype(np.int8) - np.int8(64) if form.bits == 8 else codes.astype(np.uint8)
    scales = [normal(rng, rows, blocks).astype(form.scale) for _ in range(1 + form.has_minimum)]
    return QuantizedWeight(kind, codes, *scales)


def pattern(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """A dropout pattern, about half of it 0."""
    return (2.0 * (rng.random(shape) < 0.5)).astype(np.float32)


def exact(x: Any) -> Any:
    """The same numbers in float64."""
    return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype == np.float32 else x


def pair(table: Table, rng: np.random.Generator, name: str, args: tuple[Any, ...], grads: str) -> Found:
    """A pair's output and gradients; `grads` are the names of the gradients."""
    y, saved = table[f"{name}_forward"](*args)
    truth, s_truth = getattr(ops, f"{name}_forward")(*map(exact, args))
    dy = rng.standard_normal(np.shape(truth))
    yield f"{name}: y", y, truth
    ours = table[f"{name}_backward"](dy.astype(np.float32) if dy.shape else float(dy), saved)
    right = getattr(ops, f"{name}_backward")(dy.astype(np.float32).astype(np.float64) if dy.shape else dy, s_truth)
    one = len(grads.split()) == 1
    for grad, a, b in zip(grads.split(), [ours] if one else ours, [right] if one else right, strict=True):
        yield f"{name}: {grad}", a, b


def activation(table: Table, rng: np.random.Generator) -> Found:
    for name in ("gelu_erf", "gelu_tanh", "relu"):
        yield from pair(table, rng, name, (3 * normal(rng, 5, 203),), "dx")


def attention(table: Table, rng: np.random.Generator) -> Found:
    for n, causal, packed in ((1, True, False), (131, True, False), (37, False, False), (131, True, True)):
        q, k, v = normal(rng, 2, 3, n, 19), normal(rng, 2, 3, n + 11, 19), normal(rng, 2, 3, n + 11, 23)
        start = rng.integers(0, np.arange(n) + 1, (2, 1, n)) if packed else None
        for keep in (None, pattern(rng, 2, 3, n, n + 11)):
            yield from pair(table, rng, "attention", (q, k, v, causal, start, keep), "dq dk dv")
    parts = [normal(rng, 3, 5, width) for width in (7, 19, 4)]
    yield "side_by_side: y", table["side_by_side"](parts), np.concatenate(parts, axis=-1)


def grouped_query(table: Table, rng: np.random.Generator) -> Found:
    for n in ROWS:
        q, k, v = normal(rng, 2, 6, n, 19), normal(rng, 2, 2, n + 11, 19), normal(rng, 2, 2, n + 11, 23)
        for keep in (None, pattern(rng, 2, 6, n, n + 11)):
            yield from pair(table, rng, "grouped_query", (q, k, v, True, None, keep), "dq dk dv")


def cross_entropy(table: Table, rng: np.random.Generator) -> Found:
    yield from pair(table, rng, "cross_entropy", (4 * normal(rng, 37, 203), targets(rng, 37, 203), 7.0), "dlogits")


def targets(rng: np.random.Generator, n: int, vocabulary: int) -> np.ndarray:
    """Random targets, some of them ignored."""
    made = rng.integers(0, vocabulary, n)
    made[1::4] = IGNORE
    return made


def dropout(table: Table, rng: np.random.Generator) -> Found:
    yield from pair(table, rng, "dropout", (normal(rng, 5, 203), pattern(rng, 5, 203)), "dx")


def embedding(table: Table, rng: np.random.Generator) -> Found:
    ids, weight, held = rng.integers(0, 5, (3, 7)), normal(rng, 5, 67), normal(rng, 5, 67)
    yield from pair(table, rng, "embedding", (ids, weight), "dweight")
    for kind in FROZEN:
        blocks = frozen(rng, kind, 5, 96)
        yield f"embedding {kind}: y", table["embedding_forward"](ids, blocks)[0], blocks.floats(ids, np.float64)
    dy, before = normal(rng, 3, 7, 67), exact(held)
    table["embedding_add_backward"](dy, table["embedding_forward"](ids, weight)[1], held)
    right = before + ops.embedding_backward(exact(dy), ops.embedding_forward(ids, exact(weight))[1])
    yield "embedding_add_backward: dweight", held, right


def layer_norm(table: Table, rng: np.random.Generator) -> Found:
    for n in ROWS:
        args = 3 * normal(rng, n, 203) + 2, normal(rng, 203), normal(rng, 203), 1e-5
        yield from pair(table, rng, "layer_norm", args, "dx dweight dbias")
        dy, skip_gradient = normal(rng, n, 203), normal(rng, n, 203)
        ours = table["layer_norm_skip_backward"](dy, table["layer_norm_forward"](*args)[1], skip_gradient)
        dx, *right = ops.layer_norm_backward(exact(dy), ops.layer_norm_forward(*map(exact, args))[1])
        for grad, a, b in zip(("dx", "dweight", "dbias"), ours, (exact(skip_gradient) + dx, *right), strict=True):
            yield f"layer_norm_skip_backward: {grad}", a, b


def rms_norm(table: Table, rng: np.random.Generator) -> Found:
    for n in ROWS:
        args = 3 * normal(rng, n, 203) + 2, normal(rng, 203), 1e-6
        yield from pair(table, rng, "rms_norm", args, "dx dweight")
        dy, skip_gradient = normal(rng, n, 203), normal(rng, n, 203)
        ours = table["rms_norm_skip_backward"](dy, table["rms_norm_forward"](*args)[1], skip_gradient)
        dx, dweight = ops.rms_norm_backward(exact(dy), ops.rms_norm_forward(*map(exact, args))[1])
        for grad, a, b in zip(("dx", "dweight"), ours, (exact(skip_gradient) + dx, dweight), strict=True):
            yield f"rms_norm_skip_backward: {grad}", a, b


def linear(table: Table, rng: np.random.Generator) -> Found:
    for n, depth, columns in ((1, 67, 101), (37, 67, 101), (75, 401, 53)):
        x, weight, bias, skip = normal(rng, n, depth), normal(rng, depth, columns), normal(rng, columns), None
        for w in (weight, np.ascontiguousarray(weight.T).T):
            yield from pair(table, rng, "linear", (x, w, bias), "dx dweight dbias")
            yield from pair(table, rng, "frozen_linear", (x, w, bias), "dx")
        skip = normal(rng, n, columns)
        yield "weight_gradient: dweight", table["weight_gradient"](x, skip), ops.weight_gradient(exact(x), exact(skip))
        right = exact(skip) + ops.linear_forward(exact(x), exact(weight), exact(bias))[0]
        for name in ("linear_skip", "frozen_linear_skip"):
            yield f"{name}: y", table[name](x, weight, bias, skip)[0], right
    for kind in FROZEN:
        blocks = frozen(rng, kind, 67, 96)
        for n in (1, 3, 37):
            x, up = normal(rng, n, 96), normal(rng, n, 67)
            y, saved = table["frozen_linear_forward"](x, blocks.T, None)
            floats = np.asarray(blocks, np.float64)
            yield f"frozen_linear in {kind}: y", y, exact(x) @ floats.T
            yield f"frozen_linear in {kind}: dx", table["frozen_linear_backward"](up, saved), exact(up) @ floats


def lora(table: Table, rng: np.random.Generator) -> Found:
    for n in ROWS:
        x, weight, bias = normal(rng, n, 67), normal(rng, 67, 101), normal(rng, 101)
        args = x, weight, bias, normal(rng, 67, 5), normal(rng, 5, 101), 0.5
        yield from pair(table, rng, "lora_linear", args, "dx ddown dup")
        skip = normal(rng, n, 101)
        y, _ = table["lora_linear_skip"](x, weight, bias, skip, *args[3:])
        yield "lora_linear_skip: y", y, exact(skip) + ops.lora_linear_forward(*map(exact, args))[0]


def logits_loss(table: Table, rng: np.random.Generator) -> Found:
    x, weight, bias, wanted = normal(rng, 2, 19, 43), normal(rng, 203, 43), normal(rng, 203), targets(rng, 38, 203)
    args = x, weight, bias, wanted.reshape(2, 19), 7.0
    logits, s_head = ops.linear_forward(exact(x), exact(weight).T, exact(bias))
    loss, s_loss = ops.cross_entropy_forward(logits, args[3], 7.0)
    dx, dweight, dbias = ops.linear_backward(ops.cross_entropy_backward(0.3, s_loss), s_head)
    ours, saved = table["logits_loss_forward"](*args)
    frozen, s_frozen = table["frozen_logits_loss_forward"](*args)
    yield "logits_loss: loss", ours, loss
    yield "frozen_logits_loss: loss", frozen, loss
    yield "logits_loss_value: loss", table["logits_loss_value"](*args), loss
    dlogits = ops.cross_entropy_backward(1.0, s_loss).reshape(-1, 203)
    for name, a, b in zip(
        ("loss", "dx", "dlogits"), table["logits_loss_gradients"](*args), (loss, dx / 0.3, dlogits), strict=True
    ):
        yield f"logits_loss_gradients: {name}", a, b
    grads = table["logits_loss_backward"](0.3, saved)
    for name, a, b in zip(("dx", "dweight", "dbias"), grads, (dx, dweight.T, dbias), strict=True):
        yield f"logits_loss: {name}", a, b
    yield "frozen_logits_loss: dx", table["frozen_logits_loss_backward"](0.3, s_frozen), dx


def rope(table: Table, rng: np.random.Generator) -> Found:
    angle = 9 * normal(rng, 37, 13)
    x = normal(rng, 2, 37, 3, 26).swapaxes(1, 2)
    yield from pair(table, rng, "rope", (x, np.cos(angle), np.sin(angle)), "dx")


def swiglu(table: Table, rng: np.random.Generator) -> Found:
    yield from pair(table, rng, "swiglu", (4 * normal(rng, 5, 203), normal(rng, 5, 203)), "dgate dup")


def update(table: Table, rng: np.random.Generator) -> Found:
    p, m, g, v = normal(rng, 1003), normal(rng, 1003), normal(rng, 1003), rng.random(1003, np.float32)
    right = [exact(x) for x in (p, m, v, g)]
    yield "add: y", table["add"](p, g), right[0] + right[3]
    yield "sum_first: y", table["sum_first"](np.stack([p, g, v])), right[0] + right[3] + right[2]
    yield "sum_of_squares: y", table["sum_of_squares"](g), np.sum(right[3] ** 2)
    table["adamw_updates"]([(p, m, v, g, 0.1)], 1e-2, (0.9, 0.95), 1e-8, 3, 0.5)
    ops.adamw_updates([(*right, 0.1)], 1e-2, (0.9, 0.95), 1e-8, 3, 0.5)
    for name, a, b in zip(("p", "m", "v"), (p, m, v), right, strict=False):
        yield f"adamw_updates: {name}", a, b


def noise(table: Table, rng: np.random.Generator) -> Found:
    ours, right = normal(rng, 3007), np.zeros(3007)
    right += ours
    table["add_noise"](ours, 0.7, 0x123456789ABCDEF0)
    ops.add_noise(right, 0.7, 0x123456789ABCDEF0)
    yield "add_noise: x", ours, right


def cached_attention(table: Table, rng: np.random.Generator) -> Found:
    batch, heads, shared, room, width = 3, 6, 2, 9, 19
    keys, values = normal(rng, batch, shared, room, width), normal(rng, batch, shared, room, width + 4)
    begins = np.array([0, 0, 2])
    for n in (2, 7):
        q, k = normal(rng, batch, heads, 1, width), normal(rng, batch, shared, 1, width)
        v = normal(rng, batch, shared, 1, width + 4)
        all_k = np.concatenate([keys[:, :, :n], k], axis=2)
        all_v = np.concatenate([values[:, :, :n], v], axis=2)
        right, _ = ops.grouped_query_forward(exact(q), exact(all_k), exact(all_v), True, begins[:, None, None])
        ours = table["cached_attention"](q, k, v, keys, values, np.array([n]), begins)
        yield "cached_attention: y", ours, right
        yield "cached_attention: keys", keys[:, :, n], k[:, :, 0]
        yield "cached_attention: values", values[:, :, n], v[:, :, 0]
    slots, lengths = np.array([2, 0]), np.array([8, 3])
    ours = table["cached_attention"](q[:2], k[:2], v[:2], keys, values, lengths, None, slots)
    for row, (slot, n) in enumerate(zip(slots, lengths, strict=True)):  # each in its own slot, of its own length
        all_k, all_v = exact(keys[slot : slot + 1, :, : n + 1]), exact(values[slot : slot + 1, :, : n + 1])
        right, _ = ops.grouped_query_forward(exact(q[row : row + 1]), all_k, all_v, True)
        yield "cached_attention: y of a slot", ours[row : row + 1], right
        yield "cached_attention: keys of a slot", keys[slot, :, n], k[row, :, 0]
        yield "cached_attention: values of a slot", values[slot, :, n], v[row, :, 0]


def along(table: Table, rng: np.random.Generator, name: str, args: tuple[Any, ...], moving: str) -> Found:
    """A pair's tangents; `moving` are the numbers of the arguments that move, "-" for one that does not."""
    dots = [None if i == "-" or args[int(i)] is None else normal(rng, *args[int(i)].shape) for i in moving.split()]
    _, saved = table[f"{name}_forward"](*args)
    truth, s_truth = getattr(ops, f"{name}_forward")(*map(exact, args))
    up, up_dot = normal(rng, *truth.shape), normal(rng, *truth.shape)
    y_dot, saved_dot = table[f"{name}_tangent"](*dots, saved)
    right, s_right = getattr(formulas, f"{name}_tangent")(*map(exact, dots), s_truth)
    yield f"{name}_tangent: y", y_dot, right
    ours = table[f"{name}_backward_tangent"](up, up_dot, saved, saved_dot)
    right = getattr(formulas, f"{name}_backward_tangent")(exact(up), exact(up_dot), s_truth, s_right)
    for i, (a, b) in enumerate(zip(*((x if isinstance(x, tuple) else (x,)) for x in (ours, right)), strict=True)):
        if b is not None:
            yield f"{name}_backward_tangent: gradient {i}", a, b


def tangents_linear(table: Table, rng: np.random.Generator) -> Found:
    x, w, b = normal(rng, 3, 19, 40), normal(rng, 40, 56), normal(rng, 56)
    yield from along(table, rng, "linear", (x, w, b), "0 1 2")
    yield from along(table, rng, "linear", (x, normal(rng, 56, 40).T, None), "0 1 2")
    yield from along(table, rng, "linear", (x, w, b), "0 - -")
    yield from along(table, rng, "frozen_linear", (x, w, b), "0 - -")
    for keep in (None, pattern(rng, 3, 19, 40)):
        lora = x, w, b, normal(rng, 40, 3), normal(rng, 3, 56), 0.5, keep
        yield from along(table, rng, "lora_linear", lora, "0 - - 3 4")
    yield from along(table, rng, "dropout", (x, pattern(rng, 3, 19, 40)), "0")
    turns = [f(rng.uniform(0, 6, (19, 4))).astype(np.float32) for f in (np.cos, np.sin)]
    yield from along(table, rng, "rope", (normal(rng, 2, 3, 19, 8), *turns), "0")
    yield from along(table, rng, "embedding", (np.array([[3, 1, 3]]), normal(rng, 7, 40)), "1")


def tangents_norm(table: Table, rng: np.random.Generator) -> Found:
    x, w, b = normal(rng, 3, 19, 40), normal(rng, 40), normal(rng, 40)
    yield from along(table, rng, "layer_norm", (x, w, b, 1e-5), "0 1 2")
    yield from along(table, rng, "layer_norm", (x, w, b, 1e-5), "0 - -")
    yield from along(table, rng, "rms_norm", (x, w, 1e-5), "0 1")
    yield from along(table, rng, "rms_norm", (x, w, 1e-5), "0 -")


def tangents_activation(table: Table, rng: np.random.Generator) -> Found:
    for name in ("gelu_tanh", "gelu_erf", "relu"):
        yield from along(table, rng, name, (2 * normal(rng, 5, 203),), "0")
    yield from along(table, rng, "swiglu", (2 * normal(rng, 5, 203), normal(rng, 5, 203)), "0 1")


def tangents_attention(table: Table, rng: np.random.Generator) -> Found:
    for n, causal, packed in ((1, True, False), (131, True, False), (37, False, False), (131, True, True)):
        q, k, v = normal(rng, 2, 3, n, 19), normal(rng, 2, 3, n + 11, 19), normal(rng, 2, 3, n + 11, 23)
        start = rng.integers(0, np.arange(n) + 1, (2, 1, n)) if packed else None
        for keep in (None, pattern(rng, 2, 3, n, n + 11)):
            yield from along(table, rng, "attention", (q, k, v, causal, start, keep), "0 1 2")
    q, k, v = normal(rng, 2, 6, 37, 19), normal(rng, 2, 2, 37, 19), normal(rng, 2, 2, 37, 23)
    yield from along(table, rng, "grouped_query", (q, k, v), "0 1 2")


def tangents_loss(table: Table, rng: np.random.Generator) -> Found:
    x, w, b = ([normal(rng, *shape) for _ in range(2)] for shape in ((37, 40), (90, 40), (90,)))
    targets = np.where(rng.random(37) < 0.2, IGNORE, rng.integers(0, 90, 37))
    head, s_head = ops.linear_forward(exact(x[0]), exact(w[0]).T, exact(b[0]))
    head_dot, s_head_dot = formulas.linear_tangent(exact(x[1]), exact(w[1]).T, exact(b[1]), s_head)
    loss, s_loss = ops.cross_entropy_forward(head, targets, 7.0)
    d = ops.cross_entropy_backward(1.0, s_loss)
    d_dot = formulas.cross_entropy_backward_tangent(1.0, 0.0, s_loss, head_dot)
    ours = table["logits_loss_tangents"](x, w, b, targets, 7.0, True, "hessian")
    half = table["logits_loss_tangents"](x, w, b, targets, 7.0, True, "gauss-newton")
    yield "logits_loss_tangents: loss", ours[0], loss
    yield "logits_loss_tangents: tokens", ours[1], formulas.token_tangents(head_dot, s_loss)
    truths = ops.linear_backward(d, s_head), formulas.linear_backward_tangent(d, d_dot, s_head, s_head_dot)
    for i, (grad, dot, first_order) in enumerate(zip(*truths, ops.linear_backward(d_dot, s_head), strict=True)):
        grad, dot, first_order = (array.T for array in (grad, dot, first_order)) if i == 1 else (grad, dot, first_order)
        yield f"logits_loss_tangents: gradient {i}", ours[2 + i][0], grad
        yield f"logits_loss_tangents: tangent of gradient {i}", ours[2 + i][1], dot
        yield f"logits_loss_tangents: Gauss-Newton {i}", half[2 + i][1], first_order


COMPARISONS: Mapping[str, Callable[[Table, np.random.Generator], Found]] = {  # simple ones first
    "activation": activation,
    "attention": attention,
    "cached_attention": cached_attention,
    "cross_entropy": cross_entropy,
    "dropout": dropout,
    "embedding": embedding,
    "grouped_query": grouped_query,
    "layer_norm": layer_norm,
    "linear": linear,
    "logits_loss": logits_loss,
    "lora": lora,
    "noise": noise,
    "rms_norm": rms_norm,
    "rope": rope,
    "swiglu": swiglu,
    "tangents_activation": tangents_activation,
    "tangents_attention": tangents_attention,
    "tangents_linear": tangents_linear,
    "tangents_loss": tangents_loss,
    "tangents_norm": tangents_norm,
    "update": update,
}


def disagreement(table: Table, file: str) -> str:
    """The error of a file's kernels, such as "layer_norm: dx: 3e-02"; empty if they are correct."""
    try:
        for name, ours, truth in COMPARISONS[file](table, np.random.default_rng(0)):
            ours, truth = np.asarray(ours, np.float64), np.asarray(truth, np.float64)
            if ours.shape != truth.shape:
                return f"{name}: shape {ours.shape}, not {truth.shape}"
            off = np.linalg.norm(ours - truth) / max(float(np.linalg.norm(truth)), 1e-12)
            if not off <= CLOSE:  # true for NaN too
                return f"{name}: {off:.0e}"
    except (MemoryError, OSError):  # not the kernels' fault
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return ""


@lru_cache(maxsize=1)
def builds_on() -> dict[str, set[str]]:
    """File -> the kernel files that it imports, directly or indirectly."""
    direct: dict[str, set[str]] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        inside = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module == "onfoot.kernels":
                inside |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onfoot.kernels."):
                inside.add(str(node.module).rpartition(".")[2])
        direct[path.stem] = inside
    reached = {file: set(inside) for file, inside in direct.items()}
    for _ in direct:
        for inside in reached.values():
            inside |= {far for near in [*inside] for far in direct.get(near, ())}
    return reached


def with_dependents(refused: dict[str, str]) -> dict[str, str]:
    """The refused files, and the files that import them, each with the refused file that it imports."""
    out = dict(refused)
    for file, inside in builds_on().items():
        if file in COMPARISONS and file not in refused and inside & refused.keys():
            out[file] = min(inside & refused.keys())
    return out


def slower(table: Table) -> float:
    """The time of a linear layer and its gradients relative to NumPy, or 0 on CPUs with FMA, where kernels are faster.

    Nearly all the time of a step is spent in such layers.
    """
    from onfoot.kernels import cpu

    if cpu.MULTIPLIES_AND_ADDS or "linear_backward" not in table:
        return 0.0
    rng = np.random.default_rng(0)
    args = [rng.standard_normal(shape).astype(np.float32) for shape in ((256, 256), (256, 1024), (1024,))]
    dy, seconds = np.ones((256, 1024), np.float32), list[float]()
    for pairs in (table, vars(ops)):
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            pairs["linear_backward"](dy, pairs["linear_forward"](*args)[1])
            times.append(time.perf_counter() - begun)
        seconds.append(min(times))
    return round(seconds[0] / seconds[1], 2)


def main() -> None:
    from onfoot.kernels import library
    from onfoot.recording import pool

    library.use(Path(sys.argv[1]))
    found = kernels.found()
    if found.missing:
        raise SystemExit(found.missing)
    refused = dict(library.code().refused)
    pool.set_threads(min(pool.threads(), 2))  # every pass divides evenly between two
    for file in COMPARISONS:
        if file in with_dependents(refused):
            continue
        if all(name in found.table for name in kernels.names(file)):
            print(file, flush=True)
            wrong = disagreement(found.table, file)
            if wrong:
                refused[file] = wrong
    print(json.dumps({"refused": with_dependents(refused), "slower": slower(found.table)}))
