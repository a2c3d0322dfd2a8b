"""Valid uses of whole models (passes, decoders, setters, steps), each with the formulas that say what they should give.

The formulas are those of the engine "numpy", which knows nothing of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import onfoot
from campaigns.calls import Call, Rng, normal, sizes
from onfoot import kernels, ops
from onfoot.models.model import Model

EPS = 1e-5


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


def gpt2_pass(rng: Rng) -> Call:
    config = gpt2_config(rng)
    params = list(_model(rng, "numpy", config, 1).params.values())
    shape = (int(rng.integers(2, 5)), int(rng.integers(1, 9)))
    tokens, targets = rng.integers(0, config.vocab_size, (2, *shape))

    def ours(tokens: Any, targets: Any, heads: int, *params: Any) -> Any:
        return kernels.table()["gpt2_pass"](tokens, targets, 5.0, params, heads, EPS, True)

    def right(tokens: Any, targets: Any, heads: int, *params: Any) -> Any:
        names = onfoot.create(config, engine="numpy").params
        sizes = {"n_head": heads, "vocab_size": np.shape(params[0])[0]}  # which nothing else tells the kernel
        model = Model(onfoot.GPT2Config.from_dict({**config.to_dict(), **sizes}),
                      dict(zip(names, params, strict=True)), engine="numpy")  # fmt: skip
        loss, grads = model.loss_and_grads(tokens, targets, divisor=5.0)
        return loss, [grads[name] for name in names]

    return Call("gpt2_pass", ours, right, [tokens, targets, config.n_head, *params])


def _decoder_call(
    rng: Rng, name: str, layers: Sequence[Sequence[tuple[Any, Any]]], caches: list[Any], width: int, step: Any
) -> Call:
    """Arguments: x, length, start, then every array of the layers and of the cache."""
    batch, _, room, _ = caches[0].shape
    start = rng.integers(0, 3, batch)
    layout = [[bias is not None for _, bias in block] for block in layers]
    arrays = [x for block in layers for pair in block for x in pair if x is not None]

    def unpacked(arrays: Sequence[Any]) -> tuple[list[list[tuple[Any, Any]]], list[tuple[Any, Any]]]:
        rest = iter(arrays)
        block = [[(next(rest), next(rest) if bias else None) for bias in one] for one in layout]
        return block, [(next(rest), next(rest)) for _ in layout]

    def ours(x: Any, length: int, start: Any, *arrays: Any) -> Any:
        decoder = kernels.table()[name](*_decoder_arguments(name, unpacked(arrays), start, caches))
        if decoder is None:
            raise ValueError("the decoder does not take these")
        return decoder(x, length).copy()

    def right(x: Any, length: int, start: Any, *arrays: Any) -> Any:
        if not 0 <= length < room or np.min(start) < 0 or np.max(start) > length:
            raise IndexError("no such place")
        return step(*unpacked(arrays), x, length, np.reshape(start, -1))

    args = [normal(rng, batch, 1, width), int(rng.integers(2, room)), start, *arrays, *caches]
    return Call(name, ours, right, args)


def _angles(room: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    angle = np.arange(room)[:, None] / (1.0 + np.arange(half))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _decoder_arguments(name: str, unpacked: Any, start: Any, caches: list[Any]) -> tuple[Any, ...]:
    layers, cache = unpacked
    if name == "gpt2_decoder":
        return layers, cache, start, EPS, "gelu_tanh"
    _, _, room, d = caches[0].shape
    return layers, cache, start, EPS, *_angles(room, d // 2)


def _attend(q: Any, k: Any, v: Any, keys: Any, values: Any, length: int, start: Any) -> Any:
    keys, values = keys.copy(), values.copy()
    keys[:, :, length], values[:, :, length] = k[:, :, 0], v[:, :, 0]
    seen = keys[:, :, : length + 1], values[:, :, : length + 1]
    y = ops.grouped_query_forward(q, *seen, True, np.reshape(start, (-1, 1, 1)))[0]
    return y.swapaxes(1, 2).reshape(y.shape[0], 1, -1)


def _heads(x: Any, n: int) -> Any:
    return x.reshape(x.shape[0], 1, n, x.shape[-1] // n).swapaxes(1, 2)


def _linear(x: Any, layer: tuple[Any, Any]) -> Any:
    return ops.linear_forward(x, *layer)[0]


def _gpt2_step(layers: Any, cache: Any, x: Any, length: int, start: Any) -> Any:
    for (norm1, attn, proj, norm2, expand, contract), (keys, values) in zip(layers, cache, strict=True):
        n, d_k = keys.shape[1], keys.shape[3]
        qkv = _linear(ops.layer_norm_forward(x, *norm1, EPS)[0], attn)
        q, k, v = (_heads(part, n) for part in np.split(qkv, [n * d_k, 2 * n * d_k], axis=-1))
        x = x + _linear(_attend(q, k, v, keys, values, length, start), proj)
        a8 = ops.gelu_tanh_forward(_linear(ops.layer_norm_forward(x, *norm2, EPS)[0], expand))[0]
        x = x + _linear(a8, contract)
    return x


def _llama_step(layers: Any, cache: Any, x: Any, length: int, start: Any) -> Any:
    for (norm1, to_q, to_k, to_v, out, norm2, gate, up, down), (keys, values) in zip(layers, cache, strict=True):
        n, d = keys.shape[1], keys.shape[3]
        cos, sin = (one[length - np.asarray(start)][:, None, None] for one in _angles(keys.shape[2], d // 2))
        a2 = ops.rms_norm_forward(x, norm1[0], EPS)[0]
        q, k, v = _linear(a2, to_q), _linear(a2, to_k), _linear(a2, to_v)
        q = ops.rope_forward(_heads(q, q.shape[-1] // d), cos, sin)[0]
        k = ops.rope_forward(_heads(k, n), cos, sin)[0]
        x = x + _linear(_attend(q, k, _heads(v, n), keys, values, length, start), out)
        a6 = ops.rms_norm_forward(x, norm2[0], EPS)[0]
        x = x + _linear(ops.swiglu_forward(_linear(a6, gate), _linear(a6, up))[0], down)
    return x


def gpt2_decoder(rng: Rng) -> Call:
    blocks, batch, heads, room, d_k, d_v, c, f = sizes(rng, 8, 1, 6)
    room += 3
    shapes = [(c, heads * (2 * d_k + d_v)), (heads * d_v, c), (c, f), (f, c)]
    layers = []
    for _ in range(blocks):
        attn, proj, expand, contract = ((normal(rng, *s), normal(rng, s[1])) for s in shapes)
        norms = [(normal(rng, c), normal(rng, c)) for _ in range(2)]
        layers.append([norms[0], attn, proj, norms[1], expand, contract])
    caches = [normal(rng, batch, heads, room, d) for _ in range(blocks) for d in (d_k, d_v)]
    return _decoder_call(rng, "gpt2_decoder", layers, caches, c, _gpt2_step)


def llama_decoder(rng: Rng) -> Call:
    blocks, batch, shared, group, room, half, c, f = sizes(rng, 8, 1, 5)
    room, d = room + 3, 2 * half
    shapes = [(c, shared * group * d), (c, shared * d), (c, shared * d), (shared * group * d, c)]
    shapes += [(c, f), (c, f), (f, c)]
    layers = []
    for _ in range(blocks):
        made = [(normal(rng, *reversed(s)).T, normal(rng, s[1]) if rng.random() < 0.3 else None) for s in shapes]
        layers.append([(normal(rng, c), None), *made[:4], (normal(rng, c), None), *made[4:]])
    caches = [normal(rng, batch, shared, room, d) for _ in range(blocks) for _ in "kv"]
    return _decoder_call(rng, "llama_decoder", layers, caches, c, _llama_step)


def _twins(rng: Rng) -> tuple[Callable[[str], Model], np.ndarray]:
    config = gpt2_config(rng) if rng.random() < 0.6 else llama_config(rng)
    tokens = rng.integers(0, config.vocab_size, (2, int(rng.integers(2, 8))))
    return lambda engine: _model(rng, engine, config, 1), tokens


def _use(model: Model, optimizer: Any, tokens: np.ndarray) -> Any:
    """What a model says and learns: its logits, a step, and the parameters after it."""
    before = np.array(model.logits(tokens[:, :1]))
    loss = model.train_step(optimizer, tokens)
    return before, loss, model.loss(tokens), list(model.params.values())


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
    "gpt2_pass": gpt2_pass,
    "gpt2_decoder": gpt2_decoder,
    "llama_decoder": llama_decoder,
    "setter": setter,
    "changed in place": changed_in_place,
    "step": step,
}
