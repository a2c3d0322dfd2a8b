"""The pairs of `ops`, fused for the CPU and compiled by Numba: same signatures, same results to rounding.

`table()` is what an engine lays over `ops`; nothing else here is imported before it. Pairs take NumPy arrays of
float32; anything else goes to the formulas of `ops`.

The files: `jit` (how a kernel is written and called), `build` (compiles them, the only place that needs Numba),
`library` (loads machine code), `compiler` and `proof` (make it and compare it with the formulas), `manifest`, `private`
and `symbols` (keep it safe), `pool` (threads), `cpu` and `simd` (vectors), `buffers` (memory), `shapes`;
the others are the kernels.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

# file -> the pairs in it, and what else an engine has from it
PAIRS: Mapping[str, tuple[str, ...]] = {
    "activation": ("gelu_erf", "gelu_tanh", "relu"),
    "attention": ("attention",),
    "cross_entropy": ("cross_entropy",),
    "dropout": ("dropout",),
    "embedding": ("embedding",),
    "grouped_query": ("grouped_query",),
    "layer_norm": ("layer_norm",),
    "linear": ("frozen_linear", "linear"),
    "logits_loss": ("frozen_logits_loss", "logits_loss"),
    "lora": ("lora_linear",),
    "rms_norm": ("rms_norm",),
    "rope": ("rope",),
    "swiglu": ("swiglu",),
}
LOGITS = 26 << 20  # of head and loss in one, the most logits that exist at a time: 512 tokens of 50,000
FUSED = ("frozen_logits_loss", "logits_loss")  # those that `ops` lacks
SINGLES: Mapping[str, tuple[str, ...]] = {
    "attention": ("side_by_side",),
    "cached_attention": ("cached_attention",),
    "embedding": ("embedding_add_backward",),
    "layer_norm": ("layer_norm_skip_backward",),
    "linear": ("frozen_linear_skip", "linear_skip"),
    "logits_loss": ("logits_loss_value",),
    "lora": ("lora_linear_skip",),
    "rms_norm": ("rms_norm_skip_backward",),
    "update": ("adamw_updates", "add", "sum_first", "sum_of_squares"),
}

_loading = threading.Lock()


def say(message: str) -> None:
    """One line for the user, on the error stream."""
    print(f"onfoot: {message}", file=sys.stderr, flush=True)


class Kernels(NamedTuple):
    """What an engine lays over `ops`."""

    table: dict[str, Callable[..., Any]]  # name -> function, for everything that has a kernel and is right here
    missing: str = ""  # why there are none at all
    slower: float = 0.0  # how many times as long as NumPy a step takes, where that was in doubt


def found() -> Kernels:
    """The kernels for this CPU, which are compiled first if need be.

    A file's kernels are taken together, so that the halves of a pair are never of two kinds.
    """
    with _loading:  # machine code is loaded once, whichever threads ask for it
        return _found()


@lru_cache(maxsize=1)
def _found() -> Kernels:
    try:
        code = import_module("onfoot.kernels.library").load().code
    except Exception as error:  # whatever a machine may lack, there is a way to compute
        way_out = "; they need Numba: pip install numba" if isinstance(error, ModuleNotFoundError) else ""
        return Kernels({}, f"{error}{way_out}")
    out: dict[str, Callable[..., Any]] = {}
    for file in sorted({*PAIRS, *SINGLES}):
        if file in code.refused:
            continue
        try:
            module = import_module(f"onfoot.kernels.{file}")
            for kernel in module.KERNELS:
                kernel.prepare()
        except Exception as error:
            say(f"the kernels of {file!r} do not compile here ({error}); NumPy takes over for them")
            continue
        out |= {name: getattr(module, name) for name in names(file)}
    for file, reason in code.refused.items():
        if reason not in code.refused:
            others = ", ".join(repr(other) for other, base in sorted(code.refused.items()) if base == file)
            also = f" and for {others}, which build on them" if others else ""
            wrong = f"the kernels of {file!r} disagree with their formula on this CPU ({reason})"
            say(f"{wrong}: NumPy takes over for them{also}")
    return Kernels(out, "" if out else "none of them is right on this CPU", code.slower)


def names(file: str) -> list[str]:
    """What an engine has from a file."""
    halves = [f"{pair}_{half}" for pair in PAIRS.get(file, ()) for half in ("forward", "backward")]
    return [*halves, *SINGLES.get(file, ())]


def table() -> dict[str, Callable[..., Any]]:
    """Name -> function, for everything that has a kernel; empty where there are none."""
    return found().table
