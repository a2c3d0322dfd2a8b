"""Parameters: a plain dict from Hugging Face's tensor name to an array; their shapes, counts and initial values.

What differs between families is in modules such as `gpt2_params`; the functions here take any configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from onfoot.arrays import Shape
from onfoot.config import Config, GPT2Config, LlamaConfig
from onfoot.models import gpt2_params, llama_params
from onfoot.models.gpt2_params import HEAD, POSITION_TABLE, TOKEN_TABLE, block_shapes

__all__ = [
    "HEAD",
    "POSITION_TABLE",
    "TOKEN_TABLE",
    "Drawn",
    "Stored",
    "block_shapes",
    "count",
    "default_targets",
    "initialise",
    "layer_order",
    "linear_shapes",
    "lora_count",
    "names_of",
    "part_columns",
    "quantizable",
    "shapes",
    "stored_weights",
    "token_table",
]


class Stored(NamedTuple):
    """How a linear layer's weight is stored: the tensor's name, and whether it is wᵗ, (out, in)."""

    tensor: str
    out_in: bool


class Drawn(Mapping[str, Any]):
    """A family's initial values, each drawn when it is read, so that no two need to exist at the same time.

    They must be read in the order of the forward pass, in which they are drawn.
    """

    def __init__(self, config: Config, seed: int, dtype: str) -> None:
        self._shapes = shapes(config)
        self._values = initial_values(config, seed, dtype)

    def __getitem__(self, name: str) -> Any:
        drawn, value = next(self._values)
        if drawn != name:
            raise KeyError(f"{name}: initial values are drawn in order, and {drawn} is next")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes


NAMES: dict[type, Any] = {GPT2Config: gpt2_params, LlamaConfig: llama_params}  # `families.register` adds others


def find(families: Mapping[type, Any], config: Any) -> Any:
    """The entry for a configuration's class, or a ValueError if its family is unknown."""
    for kind in type(config).__mro__:
        if kind in families:
            return families[kind]
    raise ValueError(
        f"config must be a GPT2Config or a LlamaConfig, got {type(config).__name__}; "
        f"onfoot.preset('gpt2') returns one by name"
    )


def names_of(config: Config) -> Any:
    """The module with the parameter names and shapes of a configuration's family."""
    return find(NAMES, config)


def token_table(config: Config) -> str:
    """The name of the token embedding, (V, C)."""
    return names_of(config).TOKEN_TABLE


def default_targets(config: Config) -> tuple[str, ...]:
    """The linear layers of a block, as LoRA's targets."""
    return names_of(config).TARGETS


def shapes(config: Config) -> dict[str, Shape]:
    """Every parameter's name and shape, in the order of the forward pass. The head is stored (vocabulary, width)."""
    return names_of(config).shapes(config)


def linear_shapes(config: Config) -> dict[str, tuple[int, int]]:
    """Every linear layer's name and (in, out), including the head: the layers that LoRA can adapt."""
    family = names_of(config)
    out: dict[str, tuple[int, int]] = {}
    for name, shape in shapes(config).items():
        if len(shape) == 2 and name.startswith(family.BLOCKS):
            out[name.removesuffix(".weight")] = (shape[1], shape[0]) if family.OUT_IN else (shape[0], shape[1])
    out[HEAD] = (config.n_embd, config.vocab_size)
    return out


@lru_cache(maxsize=8)
def stored_weights(config: Config) -> Mapping[str, Stored]:
    """How every linear layer's weight is stored. If tied, the head's is the token table: w_11 = w_tokᵗ."""
    out_in = names_of(config).OUT_IN
    head = token_table(config) if config.tie_word_embeddings else f"{HEAD}.weight"
    return {layer: Stored(f"{layer}.weight", out_in) for layer in linear_shapes(config)} | {HEAD: Stored(head, True)}


def quantizable(config: Config) -> dict[str, bool]:
    """The tensors that can be quantized (linear weights, the token table), and whether each is stored (out, in)."""
    return dict(stored_weights(config).values()) | {token_table(config): True}


def part_columns(config: Config, layer: str) -> dict[str, slice]:
    """The named parts of a layer's columns: queries, keys and values of GPT-2's c_attn; other layers have none."""
    return names_of(config).part_columns(config, layer)


@lru_cache(maxsize=8)
def hidden_matrices(config: Config) -> Mapping[str, tuple[slice, ...]]:
    """The weights of the blocks' linear layers, with the columns of each matrix: several if they are side by side."""
    found = [f"{layer}.weight" for layer in linear_shapes(config) if layer != HEAD]
    parts = {name: part_columns(config, name.removesuffix(".weight")).values() for name in found}
    return {name: tuple(columns) or (slice(None),) for name, columns in parts.items()}


@lru_cache(maxsize=8)
def layer_order(config: Config) -> Mapping[str, int]:
    """Every layer that has parameters, numbered in the order of the forward pass."""
    layers = dict.fromkeys(name.rpartition(".")[0] for name in shapes(config))
    return {layer: i for i, layer in enumerate([*(x for x in layers if x != HEAD), HEAD])}


def count(shapes_by_name: dict[str, Shape]) -> int:
    """The number of parameters."""
    return sum(math.prod(shape) for shape in shapes_by_name.values())


def lora_count(layers: Sequence[tuple[int, int]], r: int) -> int:
    """The number of parameters of rank-r LoRA layers: r (in + out) each."""
    return sum(r * (n_in + n_out) for n_in, n_out in layers)


def initialise(config: Config, seed: int, dtype: str) -> dict[str, np.ndarray]:
    """The family's initial values: normal weights, biases 0, norms 1."""
    return dict(initial_values(config, seed, dtype))


def initial_values(config: Config, seed: int, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """The initial values one by one, in the order of the forward pass."""
    rng = np.random.default_rng(seed)
    for name, shape in shapes(config).items():
        if name.endswith(".bias"):
            value = np.zeros(shape)
        elif len(shape) == 1:
            value = np.ones(shape)
        else:
            value = rng.normal(0.0, names_of(config).initial_std(config, name), shape)
        yield name, value.astype(dtype)
