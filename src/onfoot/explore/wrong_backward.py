"""The backward pass of a network in the checker's pieces, so that a known mistake can replace some of them.

The checker writes every layer's backward pass as small named functions ("pieces"). Here the pieces of all layers make
up the backward pass of the network, so one replacement acts wherever it is used, or in one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from onfoot.check.layer import Mistake, Pieces
from onfoot.check.layers import attention_variants, block, cross_entropy, embedding, layer_norm, linear, multi_head
from onfoot.check.layers import rms_norm as rms
from onfoot.check.layers import swiglu as glu
from onfoot.explore.jobs import progress
from onfoot.explore.study_context import StudyContext
from onfoot.models.params import HEAD, POSITION_TABLE, names_of, token_table

PARAMETER = 0.1  # the value for a mistake that has a parameter, such as a learning rate
BLOCK_LAYERS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")  # as the block's arguments
AROUND = (cross_entropy.NEXT_PIECES, embedding.TIED_PIECES)  # before and after the blocks
SKIPS = Pieces(skip_mlp=block.PIECES.skip_mlp, skip_attention=block.PIECES.skip_attention)
TABLES = {
    "gpt2": (block.PIECES, *AROUND),
    "llama": (
        attention_variants.ROPE_PIECES, attention_variants.GROUPED_PIECES, multi_head.HEAD_PIECES,
        linear.PIECES, rms.PIECES, glu.PIECES, SKIPS, *AROUND,
    ),
}  # fmt: skip
Thunk = Callable[[], np.ndarray]


def network_pieces(m: StudyContext, mistake: Mistake | None = None) -> Pieces:
    """Every piece of the network's backward pass, with those of a mistake replaced."""
    pieces = Pieces(**{name: piece for table in TABLES[m.family] for name, piece in vars(table).items()})
    return pieces if mistake is None else pieces.with_changes(changes_of(mistake, pieces))


def changes_of(mistake: Mistake, pieces: Pieces) -> dict[str, Callable[..., Any]]:
    return mistake.apply(pieces, PARAMETER) if mistake.parameter else mistake.apply(pieces)


class Deferred(Mapping[str, np.ndarray]):
    """Gradients by name. Of a large model each is computed when it is read, and only the last one is kept."""

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self._thunks: dict[str, Thunk] = {}
        self._values: dict[str, np.ndarray] = {}

    def put(self, name: str, thunk: Thunk) -> None:
        self._thunks[name] = thunk
        if self.keeps:
            self._values[name] = thunk()

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._values:
            self._values = {name: self._thunks[name]()}
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._thunks)

    def __len__(self) -> int:
        return len(self._thunks)


class Backward:
    """The backward pass of the network with a mistake in one block, or everywhere; see `signals` and `grads`."""

    def __init__(self, m: StudyContext, mistake: Mistake | None = None, block: int | None = None) -> None:
        self.m = m
        self.planted_in = block
        self.wrong = self._recording(network_pieces(m, mistake))
        self.p = self.wrong if block is None else self._recording(network_pieces(m))
        self.outputs: dict[str, list[np.ndarray]] = {}
        self.signals: dict[str, np.ndarray] = {}  # by array id
        self.grads = Deferred(keeps=not m.frozen)  # by parameter name
        with np.errstate(all="ignore"):
            self._run()

    def _recording(self, pieces: Pieces) -> Pieces:
        """The same pieces, whose results are also put into `outputs`. A weight's gradient is a function without
        arguments."""

        def recorded(name: str, piece: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                if name in ("dweight", "scatter"):
                    return lambda: piece(*arguments)
                out = piece(*arguments)
                self.outputs.setdefault(name, []).append(out)
                return out

            return call

        return Pieces(**{name: recorded(name, piece) for name, piece in vars(pieces).items()})

    def weight(self, name: str) -> np.ndarray:
        """A weight in float64, as the formulas have it: (in, out)."""
        value = np.asarray(self.m.weight(name))
        return value.T if names_of(self.m.config).OUT_IN and value.ndim == 2 else value

    def _run(self) -> None:
        m, p, trace, config = self.m, self.p, self.m.trace, self.m.config
        tokens, tied = token_table(config), config.tie_word_embeddings
        (d12,) = cross_entropy.next_steps(p, trace.a[12], m.tokens, 1.0)
        a11 = trace.a[11]
        d11 = p.through(d12, m.weight(tokens if tied else f"{HEAD}.weight").T, a11)
        head = p.dweight(a11, d12)
        if getattr(config, "lm_head_bias", False):
            self._store(f"{HEAD}.bias", p.dbias(d12))
        self.signals |= {"Δ_12": d12, "Δ_11": d11}
        d = self._final_norm(d11)
        for b in reversed(range(config.n_layer)):
            progress("the backward pass with the mistake", config.n_layer - 1 - b, config.n_layer)
            self.signals[f"{b}.Δ_10"] = d
            self.outputs.clear()
            self.p = self.wrong if self.planted_in in (None, b) else p
            d = self._block(b, d)
        self.p = p
        self.signals["Δ_1"] = d
        looked_up = p.scatter(p.table_ids(m.tokens), d, config.vocab_size)
        if tied:
            self.grads.put(tokens, lambda: p.both_paths(looked_up(), np.swapaxes(head(), -1, -2)))
        else:
            self.grads.put(tokens, looked_up)
            self.grads.put(f"{HEAD}.weight", lambda: np.swapaxes(head(), -1, -2))
        if POSITION_TABLE in m.params:
            positions = np.arange(m.tokens.shape[1])[None]
            self.grads.put(POSITION_TABLE, p.scatter(positions, d, config.n_positions))

    def _store(self, name: str, value: Any) -> None:
        """Stores a gradient, an array or a function that returns it."""
        self.grads.put(name, value if callable(value) else lambda: value)

    def _final_norm(self, d11: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _block(self, b: int, d10: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class GPT2Backward(Backward):
    """GPT-2's blocks, by the steps of the checker's layer "block"."""

    def _pair(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        return self.weight(f"{layer}.weight"), self.m.params[f"{layer}.bias"]

    def _store_pair(self, layer: str, pair: list[Any]) -> None:
        for name, value in zip(("weight", "bias"), pair, strict=True):
            self._store(f"{layer}.{name}", value)

    def _final_norm(self, d11: np.ndarray) -> np.ndarray:
        d, *norm = layer_norm.steps(self.p, self.m.trace.blocks[-1].a[10], *self._pair("transformer.ln_f"), d11)
        self._store_pair("transformer.ln_f", norm)
        return d

    def _block(self, b: int, d10: np.ndarray) -> np.ndarray:
        config, name = self.m.config, f"transformer.h.{b}"
        parameters = [value for short in BLOCK_LAYERS for value in self._pair(f"{name}.{short}")]
        a1 = self.m.trace.blocks[b].a[1]
        d1, *grads = block.steps(self.p, a1, *parameters, d10, n_head=config.n_head, causal=config.causal)
        for i, short in enumerate(BLOCK_LAYERS):
            self._store_pair(f"{name}.{short}", grads[2 * i : 2 * i + 2])
        through = dict(zip((8, 6, 3, 2), self.outputs["through"], strict=True))  # contract, expand, attProj, c_attn
        through |= {7: self.outputs["gelu_dx"][0], 5: self.outputs["skip_mlp"][0]}
        self.signals |= {f"{b}.Δ_{i}": through[i] for i in (8, 7, 6, 5, 3)}
        self.signals[f"{b}.Δ_scaled"] = self.outputs["dscores"][0]
        self.signals[f"{b}.Δ_2"] = through[2]
        return d1


def backward_of(m: StudyContext, mistake: Mistake | None = None, block: int | None = None) -> Backward:
    """The backward pass of the network with a mistake: everywhere, or in one block."""
    from onfoot.explore.wrong_backward_llama import LlamaBackward  # which is a Backward

    return (LlamaBackward if m.family == "llama" else GPT2Backward)(m, mistake, block)
