"""The pairs of `ops`, fused for the CPU and compiled by Numba: same signatures, same results up to rounding.

`table()` has the functions that replace those of `ops` in an engine; nothing else here is imported before it. Kernels
take NumPy arrays of float32; for anything else the formulas of `ops` are called.

The files: `jit` (how a kernel is written and called), `build` (compiles kernels, the only file that needs Numba),
`library` (loads machine code), `compiler` and `self_test` (build it and compare it with the formulas), `manifest`,
`private` and `symbols` (checksums, permissions, missing symbols), `cpu` and `simd` (vectors), `buffers` (memory),
`shapes`; the others are the kernels. Threads are in `recording/pool`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

# file -> the pairs in it, and its other functions for an engine
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
# file -> the pairs whose tangents are in it
TANGENTS: Mapping[str, tuple[str, ...]] = {
    "tangents_activation": ("gelu_erf", "gelu_tanh", "relu", "swiglu"),
    "tangents_attention": ("attention", "grouped_query"),
    "tangents_linear": ("dropout", "embedding", "frozen_linear", "linear", "lora_linear", "rope"),
    "tangents_norm": ("layer_norm", "rms_norm"),
}
LOGITS = 26 << 20  # the most logits that the fused head and loss hold at a time: 512 tokens × 50,000
FUSED = ("frozen_logits_loss", "logits_loss")  # pairs that `ops` does not have
SINGLES: Mapping[str, tuple[str, ...]] = {
    "attention": ("side_by_side",),
    "cached_attention": ("cached_attention",),
    "embedding": ("embedding_add_backward",),
    "layer_norm": ("layer_norm_skip_backward",),
    "linear": ("frozen_linear_skip", "linear_skip", "weight_gradient"),
    "logits_loss": ("logits_loss_gradients", "logits_loss_value"),
    "lora": ("lora_linear_skip",),
    "noise": ("add_noise",),
    "rms_norm": ("rms_norm_skip_backward",),
    "tangents_loss": ("logits_loss_tangents",),
    "update": ("adamw_updates", "add", "sum_first", "sum_of_squares"),
}

FILES = sorted({*PAIRS, *SINGLES, *TANGENTS})

_loading = threading.Lock()


def say(message: str) -> None:
    """Prints one line for the user to stderr."""
    print(f"onfoot: {message}", file=sys.stderr, flush=True)


class Kernels(NamedTuple):
    """The functions that replace those of `ops` in an engine."""

    table: dict[str, Callable[..., Any]]  # name -> function, for every kernel that is correct on this CPU
    missing: str = ""  # why there are no kernels at all
    slower: float = 0.0  # a step's time relative to NumPy, if that was measured


def found() -> Kernels:
    """The kernels for this CPU, which are compiled first if necessary.

    A file's kernels are used all or not at all, so that a forward and its backward always belong together.
    """
    with _loading:  # machine code is loaded once, even if several threads need it
        return _found()


@lru_cache(maxsize=1)
def _found() -> Kernels:
    try:
        library = import_module("onfoot.kernels.library")
        code = library.load().code
    except Exception as error:  # whatever is missing on this machine, NumPy still works
        way_out = "; kernels need Numba: pip install numba" if isinstance(error, ModuleNotFoundError) else ""
        return Kernels({}, f"{error}{way_out}")
    out: dict[str, Callable[..., Any]] = {}
    for file in FILES:
        if file in code.refused:
            continue
        try:
            module = import_module(f"onfoot.kernels.{file}")
            for kernel in module.KERNELS:
                kernel.prepare()
        except Exception as error:
            say(f"cannot compile the kernels of {file!r} ({error}); falling back to NumPy for them")
            continue
        out |= {name: getattr(module, name) for name in names(file)}
    library.release_compiler()
    for file, reason in code.refused.items():
        if reason not in code.refused:
            others = ", ".join(repr(other) for other, base in sorted(code.refused.items()) if base == file)
            also = f" and for {others}, which build on them" if others else ""
            wrong = f"the kernels of {file!r} do not match their formula on this CPU ({reason})"
            say(f"{wrong}; falling back to NumPy for them{also}")
    return Kernels(out, "" if out else "no kernel matches its formula on this CPU", code.slower)


def names(file: str) -> list[str]:
    """The names of the functions that an engine gets from a file."""
    halves = [f"{pair}_{half}" for pair in PAIRS.get(file, ()) for half in ("forward", "backward")]
    kinds = ("tangent", "backward_tangent")
    return [*halves, *SINGLES.get(file, ()), *(f"{pair}_{kind}" for pair in TANGENTS.get(file, ()) for kind in kinds)]


def table() -> dict[str, Callable[..., Any]]:
    """Name -> function, for everything that has a kernel; empty if there are none."""
    return found().table
