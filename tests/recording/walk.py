"""A random walk through what can be done to models in one process, each beside a twin of formulas in float64.

After every step of the walk, what our model computes is compared with what its twin does. Shapes and policies come
back again and again, so most steps are replayed, and a recording that is stale anywhere shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from policies import config_of, scramble_adapter

import onfoot
from onfoot.models.model import Model
from onfoot.ops.cross_entropy import IGNORE
from onfoot.quantized import Quantized
from onfoot.recording import pool

CLOSE = 1e-5  # of a gradient's norm, and of a loss
DROPOUT = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "llama": ("attention_dropout",)}


class Pair:
    """A model on kernels, and the same in float64."""

    def __init__(self, family: str, rng: np.random.Generator) -> None:
        tied = bool(rng.random() < 0.5)
        config = config_of(family, tie_word_embeddings=tied)
        first = onfoot.create(config, engine="numpy").params
        params = {
            name: rng.normal(1.0 if ".ln_" in name or "norm" in name else 0.0, 0.15, value.shape).astype(np.float32)
            for name, value in first.items()
        }
        self.family, self.rng = family, rng
        self.ours, self.exact = Model(config, params, engine="numba"), Model(config, params, "float64", "numpy")
        self.adapters = 0
        self.shapes = [self.a_shape() for _ in range(3)]  # they come back again and again

    def both(self, change: Callable[[Model], None]) -> None:
        """Makes the same change to both, then copies our values to the exact one."""
        for model in (self.ours, self.exact):
            change(model)
        for name, value in self.ours.params.items():
            if not isinstance(value, Quantized):
                self.exact.params[name][...] = value

    # What changes a model

    def a_parameter(self) -> str:
        names = [name for name, value in self.ours.params.items() if not isinstance(value, Quantized)]
        return names[self.rng.integers(len(names))]

    def changed_in_place(self) -> None:
        name = self.a_parameter()
        self.ours.params[name] *= np.float32(self.rng.uniform(0.8, 1.2))
        self.both(lambda model: None)

    def another_array(self) -> None:
        name = self.a_parameter()
        value = self.ours.params[name] * np.float32(self.rng.uniform(0.8, 1.2))
        before = self.ours.params[name]
        self.ours.params[name] = value
        before[...] = np.nan  # it must not be read any more
        self.both(lambda model: None)

    def other_arrays_for_all(self) -> None:
        old = dict(self.ours.params)
        self.ours.params = {name: x if isinstance(x, Quantized) else x.copy() for name, x in old.items()}
        for value in old.values():
            if not isinstance(value, Quantized):
                value[...] = np.nan

    def new_adapter(self) -> None:
        if self.ours.merged is not None or self.adapters == 3:
            return
        self.adapters += 1
        blocks = ["c_attn", "c_fc"] if self.family == "gpt2" else ["q_proj", "v_proj", "down_proj"]
        choices = [None, blocks, [*blocks, "lm_head"], ["c_attn.q", "c_proj"] if self.family == "gpt2" else blocks[:1]]
        targets = choices[self.rng.integers(len(choices))]
        dropout = float(self.rng.choice([0.0, 0.3]))
        name, seed = f"a{self.adapters}", self.adapters

        def add(model: Model) -> None:
            model.add_lora(r=2, alpha=3, targets=targets, dropout=dropout, name=name)
            scramble_adapter(model, seed)

        self.both(add)

    def another_adapter(self) -> None:
        if self.ours.merged is None:
            names = [None, *self.ours.adapters]
            name = names[self.rng.integers(len(names))]
            self.both(lambda model: model.use_adapter(name))

    def another_scale(self) -> None:
        """Of one LoRA layer, which stays where it is."""
        if self.ours.active_adapter is not None:
            name, factor = self.ours.active_adapter, float(self.rng.uniform(0.5, 2))
            layer = next(iter(self.ours.adapters[name].layers))

            def change(model: Model) -> None:
                layers = model.adapters[name].layers
                layers[layer] = replace(layers[layer], alpha=factor * layers[layer].alpha)

            self.both(change)

    def merged(self) -> None:
        if self.ours.merged is not None:
            self.both(lambda model: model.unmerge_adapter())
        elif self.ours.active_adapter is not None and not self.ours.quantized:
            self.both(lambda model: model.merge_adapter())

    def frozen(self) -> None:
        if self.ours.merged is None and self.rng.random() < 0.4:  # all that can train does so again
            self.both(lambda model: model.use_adapter(model.active_adapter))
            return
        names = sorted(self.ours.trainable)
        kept = {name for name in names if self.rng.random() < 0.5}

        def freeze(model: Model) -> None:
            model.trainable = set(kept)

        self.both(freeze)

    def thawed_in_place(self) -> None:
        """Changes the set in place, instead of replacing it."""
        if self.ours.trainable:
            name = sorted(self.ours.trainable)[-1]
            self.both(lambda model: model.trainable.discard(name))

    def quantized(self) -> None:
        if self.ours.merged is None and self.rng.random() < 0.2:
            kind = str(self.rng.choice(["Q8_0", "Q4_1", "Q4_0"]))
            self.both(lambda model: model.quantize(kind))

    def another_configuration(self) -> None:
        field = "layer_norm_epsilon" if self.family == "gpt2" else str(self.rng.choice(["rms_norm_eps", "rope_theta"]))
        value = float(self.rng.choice([1e-5, 1e-3, 1e-2])) * (1e4 if field == "rope_theta" else 1)
        dropped = str(self.rng.choice(DROPOUT[self.family]))
        p = float(self.rng.choice([0.0, 0.2]))

        def change(model: Model) -> None:
            model.config = replace(model.config, **{field: value, dropped: p})

        self.both(change)

    def recomputed(self) -> None:
        def change(model: Model) -> None:
            model.recompute = not model.recompute

        self.both(change)

    def copied(self) -> None:
        """Continues with a copy; changes to the first model must not affect it."""
        first = self.ours
        self.ours = copy.deepcopy(first)
        for value in first.params.values():
            if not isinstance(value, Quantized):
                value[...] = np.nan

    # What a model computes

    def a_shape(self) -> tuple[int, int, float, bool]:
        """Sequences, tokens, the fraction of ignored targets, and whether examples are packed."""
        rng = self.rng
        ignored = float(rng.choice([0.0, 0.0, 0.05, 0.5, 0.9, 1.0]))
        return int(rng.choice([1, 2, 3, 4, 6])), int(rng.choice([1, 5, 9])), ignored, bool(rng.random() < 0.25)

    def batch(self) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, Any]]:
        rng = self.rng
        *size, ignored, packed = self.shapes[rng.integers(3)] if rng.random() < 0.8 else self.a_shape()
        tokens, targets = rng.integers(0, 61, (2, *size))
        targets[rng.random(size) < ignored] = IGNORE
        options: dict[str, Any] = {}
        if rng.random() < 0.3 or (targets == IGNORE).all():
            options["divisor"] = float(rng.uniform(1, 20))
        if packed:
            options["segments"] = np.cumsum(rng.random(size) < 0.3, axis=1)
        return (tokens, targets), options

    def loss(self) -> None:
        batch, options = self.batch()
        assert_close(self.ours.loss(*batch, **options), self.exact.loss(*batch, **options), "loss")

    def gradients(self) -> None:
        batch, options = self.batch()
        if self.rng.random() < 0.4:
            options["dropout_seed"] = int(self.rng.integers(100))
        right, expected = self.exact.loss_and_grads(*batch, **options)
        found: dict[str, np.ndarray] = {}
        takes = bool(self.rng.random() < 0.3)
        loss, left = self.ours.loss_and_grads(*batch, **options, on_gradient=found.__setitem__ if takes else None)
        assert_close(loss, right, "loss")
        assert (found if takes else left).keys() == expected.keys() and not (left if takes else found)
        found |= left
        largest = max((float(np.linalg.norm(x)) for x in expected.values()), default=0.0)
        for name, grad in found.items():
            assert_close(grad, expected[name], name, least=largest)

    def trained(self) -> None:
        if not self.ours.trainable:
            return
        batch, options = self.batch()
        options.pop("divisor", None)
        batch[1][0, 0] = 3
        before = {name: np.array(self.ours.params[name]) for name in self.ours.trainable}
        loss = self.ours.train_step(onfoot.AdamW(self.ours, lr=1e-3), *batch, **options)
        assert_close(loss, self.exact.loss(*batch, **options), "loss before a step")
        assert any((self.ours.params[name] != value).any() for name, value in before.items())
        self.both(lambda model: None)

    def generated(self) -> None:
        prompts = [self.rng.integers(0, 61, n) for n in self.rng.integers(1, 6, self.rng.integers(1, 4))]
        for prompt, row in zip(prompts, self.ours.generate(prompts, 4, temperature=0), strict=True):
            assert row.size == prompt.size + 4
            logits = self.exact.logits(row[None, :-1])[0, prompt.size - 1 :]
            chosen = np.take_along_axis(logits, row[prompt.size :, None], 1)[:, 0]
            assert (chosen >= logits.max(axis=1) - 1e-3).all(), "another token was likelier"

    def logits(self) -> None:
        (tokens, _), _ = self.batch()
        assert_close(self.ours.logits(tokens), self.exact.logits(tokens), "logits")


def assert_close(found: Any, expected: Any, what: str, least: float = 0.0) -> None:
    assert np.shape(found) == np.shape(expected), what
    error = float(np.linalg.norm(np.asarray(found, np.float64) - expected))
    assert error <= CLOSE * max(float(np.linalg.norm(expected)), least), f"{what}: {error:.1e}"


COMPUTES = ("loss", "gradients", "gradients", "gradients", "trained", "generated", "logits")
CHANGES = (
    "changed_in_place", "another_array", "other_arrays_for_all", "new_adapter", "another_adapter", "another_adapter",
    "another_scale", "merged", "frozen", "frozen", "thawed_in_place", "quantized", "another_configuration",
    "recomputed", "copied",
)  # fmt: skip


def walk(
    seed: int,
    steps: int,
    on_threads: Callable[[int], None],
    changes: Sequence[str] = CHANGES,
    computes: Sequence[str] = COMPUTES,
    most: int = 3,
) -> tuple[int, int]:
    """Returns the number of steps, and of recordings at the end."""
    rng = np.random.default_rng(seed)
    pairs = [Pair("gpt2", rng), Pair("llama", rng)]
    told: list[str] = []
    try:
        for _ in range(steps):
            if rng.random() < 0.1:
                on_threads(int(rng.integers(1, most + 1)))
            pair = pairs[rng.integers(len(pairs))]
            kinds = changes if rng.random() < 0.25 else computes
            told.append(f"{pair.family} {kinds[rng.integers(len(kinds))]} on {pool.threads()}")
            getattr(pair, told[-1].split()[1])()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, step {len(told)}: {error}; before: {', '.join(told[-12:])}") from None
    return len(told), sum(len(pair.ours._steps) for pair in pairs)
