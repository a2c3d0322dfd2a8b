"""The autoregressive loop: sample a token, append it, repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.generate.cache import KVCache
from onfoot.generate.decode import StreamDecoder
from onfoot.generate.sampling import Sampling, next_token
from onfoot.generate.stop import StopStrings, texts
from onfoot.models import inputs
from onfoot.models.families import network
from onfoot.models.layout import Layout, in_window

if TYPE_CHECKING:
    from onfoot.models.model import Model


def stream(
    model: Model,
    prompts: Sequence[np.ndarray],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    slide: bool = False,
) -> Iterator[np.ndarray]:
    """Yields one new token per prompt, (B,), max_new_tokens times.

    One forward pass processes the prompts; after that each step computes one row. Shorter prompts are padded on the
    left, and no token attends to the padding. Each prompt has its own random generator, so its samples do not depend on
    the other prompts. With `slide`, generation continues with the last half of the context when it is full.
    """
    if not model.config.causal:
        raise ValueError("cannot generate with causal=False: tokens would attend to later tokens")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    if seed < 0:
        raise ValueError(f"seed must be >= 0, got {seed}")
    lengths = np.array([len(p) for p in prompts])
    longest = int(lengths.max())
    limit = model.config.n_positions
    if longest + max_new_tokens > limit and not slide:
        raise ValueError(
            f"a prompt of {longest} tokens plus {max_new_tokens} new tokens exceeds n_positions={limit}; shorten the "
            f"prompt, generate at most {limit - longest} new tokens, or use slide (continue with the last half)"
        )
    pad = longest - lengths  # (B,)
    tokens = np.zeros((len(prompts), longest + max_new_tokens), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, pad[row] : longest] = prompt
    generators = [np.random.default_rng([seed, row]) for row in range(len(prompts))]
    origin = fresh = 0  # the start of the context, and of the tokens that are not in the cache yet
    cache = KVCache(min(longest + max_new_tokens, limit))
    for end in range(longest, longest + max_new_tokens):
        if end - origin > limit:
            origin = fresh = end - max(limit // 2, 1)
            cache = KVCache(limit)
        logits = to_numpy(step(model, tokens[:, fresh:end], np.maximum(pad - origin, 0), cache))  # (B, V)
        for row, rng in enumerate(generators):
            tokens[row, end] = next_token(logits[row], tokens[row, pad[row] : end], sampling, rng)
        yield tokens[:, end].copy()
        fresh = end


def step(model: Model, tokens: np.ndarray, pad: np.ndarray, cache: KVCache) -> Any:
    """The logits of the last token of each row, (B, V); appends the tokens to the cache."""
    engine, b, t = model.engine, *tokens.shape
    index = cache.length + np.arange(t)
    positions = np.maximum(index - pad[:, None], 0)  # (B, T): the first token after the padding has position 0
    start = None if not pad.any() else np.broadcast_to(pad[:, None], (b, t))
    layout = in_window(model.config, Layout(positions, start, cache.capacity), index, b)
    if engine.records and t == 1 and cache.length:
        from onfoot.models.recorded import next_logits

        logits = next_logits(model, tokens, layout, cache)
        if logits is not None:
            cache.length += t
            return logits
    layout = layout.map(lambda _, x: engine.integers(x))
    net, run = network(model.config), model.new_run(keep_saved=False, cache=cache)
    features, _ = net.features_forward(run, model.config, engine.integers(tokens), layout)
    cache.length += t
    return net.head_forward(run, model.config, features[:, -1:])[0][:, 0]


def generate(
    model: Model,
    tokens: Any,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    slide: bool = False,
) -> Any:
    """The prompts with their continuations: an array (B, T + new) for an array, a list of arrays for a list.

    A row ends after a token in `stop_ids`, or when its new text contains a string in `stop`. In an array, shorter rows
    are padded with their last token.
    """
    if stop and model.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, but this model has none; use stop_ids")
    as_list = isinstance(tokens, list | tuple) and bool(tokens) and not np.isscalar(tokens[0])
    rows = tokens if as_list else to_numpy(tokens)
    if not as_list and len(rows) and rows.ndim != 2:
        raise ValueError(f"tokens must have shape (batch, tokens), got {rows.shape}; or pass a list of prompts")
    prompts = [
        inputs.check_tokens(np.asarray(row)[None], model.config.vocab_size, model.config.n_positions)[0] for row in rows
    ]
    if not prompts:
        raise ValueError("no prompts given; at least one is required")
    new: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    decoders = [StreamDecoder(model.tokenizer) for _ in prompts] if stop else []  # type: ignore[arg-type]
    found = [StopStrings(after=stop) for _ in decoders]
    for column in stream(model, prompts, max_new_tokens, sampling, seed, slide):
        for row, token in enumerate(column.tolist()):
            if not done[row]:
                new[row].append(token)
                done[row] = token in stop_ids or (bool(stop) and found[row].add(decoders[row].add(token))[1])
        if all(done):
            break
    if as_list:
        return [np.concatenate([prompt, row]) for prompt, row in zip(prompts, new, strict=True)]
    width = max(map(len, new))
    return np.stack(
        [
            np.concatenate([p, row, [row[-1]] * (width - len(row))]).astype(np.int64)
            for p, row in zip(prompts, new, strict=True)
        ]
    )


def generate_texts(
    model: Model,
    prompts: Sequence[str],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    stop_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    slide: bool = False,
) -> list[str]:
    """The prompts with their continuations, as texts; a text ends before a token in `stop_ids`, or after a `stop`."""
    ids = [np.asarray(inputs.encode(model.tokenizer, prompt), dtype=np.int64) for prompt in prompts]
    out = []
    rows = generate(model, ids, max_new_tokens, sampling, seed, stop_ids, stop, slide)
    for prompt, known, row in zip(prompts, ids, rows, strict=True):
        decoder = StreamDecoder(model.tokenizer)  # type: ignore[arg-type]
        for token in known.tolist():
            decoder.add(token)
        new = row[len(known) :].tolist()
        out.append(prompt + "".join(texts(decoder, new, stop_ids, StopStrings(after=stop))))
    return out


def stream_text(
    model: Model,
    prompt: str | Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop: Sequence[str] = (),
    slide: bool = False,
) -> Iterator[str]:
    """The text after a prompt, piece by piece, up to an end-of-sequence token or the end of a stop string."""
    if model.tokenizer is None:
        raise ValueError("text needs a tokenizer, but this model has none; use model.generate with token ids")
    ids = model.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise ValueError("an empty prompt has no tokens; give some text, or the id of a start token")
    known = inputs.check_tokens(np.asarray(ids)[None], model.config.vocab_size, model.config.n_positions)[0]
    steps = stream(model, [known], max_new_tokens, sampling, seed, slide)
    first = next(steps)  # invalid arguments raise here, not at the first piece
    decoder = StreamDecoder(model.tokenizer)
    for token in ids:
        decoder.add(token)
    new = (int(tokens[0]) for tokens in chain([first], steps))
    return texts(decoder, new, model.eos_ids, StopStrings(after=stop))
