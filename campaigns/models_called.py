"""Valid uses of whole models (passes, a cache, setters, steps), each with the formulas that say what they should give.

The formulas are those of the engine "numpy", which knows nothing of kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import onfoot
from campaigns.calls import Call, Rng, normal, sizes
from onfoot import kernels, ops
from onfoot.models.model import Model


def gpt2_config(rng: Rng, **more: Any) -> onfoot.GPT2Config:
    layers, heads, width, v = (int(rng.integers(*x)) for x in ((1, 3), (1, 4), (1, 5), (2, 20)))
    return onfoot.GPT2Config(
        n_layer=layers, n_head=heads, n_embd=2 * heads * width, n_positions=9, vocab_size=v, **more
    )


def llama_config(rng: Rng) -> onfoot.LlamaConfig:
    layers, shared, group, half, v = (int(rng.integers(*x)) for x in ((1, 3), (1, 3), (1, 3), (1, 4), (2, 20)))
    return onfoot.LlamaConfig(
        vocab_size=v, hidden_size=2 * half * shared * group, intermediate_size=int(rng.integers(1, 20)),
        num_hidden_layers=layers, num_attention_heads=shared * group, num_key_value_heads=shared,
        max_position_embeddings=9,
    )  # fmt: skip


def _model(rng: Rng, engine: str, config: Any, seed: int) -> Model:
    model = onfoot.create(config, seed, engine=engine)
    noise = np.random.default_rng(seed)
    for p in model.params.values():
        p += noise.normal(0, 0.1, p.shape).astype(np.float32)
    return model


def cached_attention(rng: Rng) -> Call:
    """One new token of each sequence over a cache, to which it is added."""
    batch, shared, group, room, d_k, d_v = sizes(rng, 6, 1, 6)
    room += 3
    new = [normal(rng, batch, shared * group, 1, d_k), normal(rng, batch, shared, 1, d_k)]
    new.append(normal(rng, batch, shared, 1, d_v))
    caches = [normal(rng, batch, shared, room, d) for d in (d_k, d_v)]
    length = np.array([int(rng.integers(2, room))])

    def ours(*args: Any) -> Any:
        y = kernels.table()["cached_attention"](*args)
        if y is None:
            raise ValueError("the kernel does not take these")
        return y

    def right(q: Any, k: Any, v: Any, keys: Any, values: Any, length: Any, start: Any) -> Any:
        (n,) = length
        if not 0 <= n < keys.shape[2]:
            raise IndexError("no such place")
        keys, values = keys.copy(), values.copy()
        keys[:, :, n], values[:, :, n] = k[:, :, 0], v[:, :, 0]
        seen = keys[:, :, : n + 1], values[:, :, : n + 1]
        first = None if start is None else np.reshape(start, (-1, 1, 1))
        return ops.grouped_query_forward(q, *seen, True, first)[0]

    return Call("cached_attention", ours, right, [*new, *caches, length, rng.integers(0, 3, batch)])


def _twins(rng: Rng) -> tuple[Callable[[str], Model], np.ndarray]:
    config = gpt2_config(rng) if rng.random() < 0.6 else llama_config(rng)
    tokens = rng.integers(0, config.vocab_size, (2, int(rng.integers(2, 8))))
    return lambda engine: _model(rng, engine, config, 1), tokens


def _use(model: Model, optimizer: Any, tokens: np.ndarray) -> Any:
    """What a model says and learns: its logits, a step, and the parameters after it."""
    before = np.array(model.logits(tokens[:, :1]))
    loss = model.train_step(optimizer, tokens)
    return before, loss, model.loss(tokens), list(model.params.values())


def recorded(rng: Rng) -> Call:
    """A step of other tokens and targets after one that was recorded."""
    make, tokens = _twins(rng)
    targets = rng.integers(0, make("numpy").config.vocab_size, tokens.shape)

    def use(engine: str, tokens_: Any, targets_: Any) -> Any:
        model = make(engine)
        model.loss_and_grads(tokens, targets, divisor=5.0)
        loss, grads = model.loss_and_grads(tokens_, targets_, divisor=5.0)
        return loss, [grads[name] for name in model.params], model.loss(tokens_, targets_, divisor=5.0)

    return Call("recorded", lambda *a: use("numba", *a), lambda *a: use("numpy", *a), [tokens, targets])


def setter(rng: Rng) -> Call:
    make, tokens = _twins(rng)
    name = str(rng.choice(list(make("numpy").params)))
    value = normal(rng, *make("numpy").params[name].shape)

    def ours(value: Any) -> Any:
        model = make("numba")
        model.params[name] = value
        return _use(model, onfoot.AdamW(model, eps=1e-3), tokens)

    def right(value: Any) -> Any:
        model = make("numpy")
        if np.shape(value) != model.params[name].shape:
            raise ValueError("another shape")
        model.params[name][...] = np.asarray(value)
        return _use(model, onfoot.AdamW(model, eps=1e-3), tokens)

    return Call(f"params[{name}] = ", ours, right, [value])


def changed_in_place(rng: Rng) -> Call:
    """A parameter whose flags or shape were changed behind the model's back."""
    make, tokens = _twins(rng)
    names = list(make("numpy").params)

    def use(engine: str, which: int, how: int) -> Any:
        model = make(engine)
        optimizer = onfoot.AdamW(model, eps=1e-3)
        p = model.params[names[which % len(names)]]
        if how % 4 == 0:
            p.flags.writeable = False
        else:
            p.shape = [(-1,), p.shape[::-1], (1, *p.shape)][how % 4 - 1]
        out = _use(model, optimizer, tokens)
        return *out, model.generate(tokens[:, :1], 3, temperature=0)

    which, how = int(rng.integers(1, len(names))), int(rng.integers(1, 5))
    return Call("a parameter changed in place", lambda *a: use("numba", *a), lambda *a: use("numpy", *a), [which, how])


def step(rng: Rng) -> Call:
    make, _ = _twins(rng)
    names = list(make("numpy").params)
    grads = [normal(rng, *p.shape) for p in make("numpy").params.values()]

    def use(engine: str, *grads: Any) -> Any:
        model = make(engine)
        optimizer = onfoot.AdamW(model, eps=1e-3)
        optimizer.step(dict(zip(names, grads, strict=True)))
        return list(model.params.values())

    return Call("AdamW.step", lambda *g: use("numba", *g), lambda *g: use("numpy", *g), grads)


CALLS: dict[str, Callable[[Rng], Call]] = {
    "cached_attention": cached_attention,
    "recorded": recorded,
    "setter": setter,
    "changed in place": changed_in_place,
    "step": step,
}
