"""Arrays that do not go together, between guard pages, against every pair, single and setter.

A valid call has one argument changed. It must be refused, or give what NumPy's formula gives for the same arguments. A
crash ends the child process that made the call, and is reported with it; an answer that the formula does not give is a
failure too. `python -m campaigns.arrays SEED INDEX` repeats one attempt.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from campaigns import Outcome, calls, models_called
from campaigns.calls import Call
from campaigns.guard import guard_kernels, guarded
from onfoot.recording import pool

COUNT = 20_000
INVALID = "a parameter changed in place"  # by itself, without anything else changed
REFUSALS = (ValueError, TypeError, IndexError, AttributeError)
CLOSE = 1e-4  # of the norm: this is about the wrong numbers, not about rounding
FLOOR = 0.1  # of the norm: a norm over two features is little but rounding
Rng = np.random.Generator


def other_size(rng: Rng, x: np.ndarray) -> np.ndarray:
    """One element more or less along an axis."""
    axis = int(rng.integers(x.ndim))
    if rng.random() < 0.5:
        return np.take(x, range(x.shape[axis] - 1), axis)
    return np.concatenate([x, np.take(x, [0], axis)], axis)


def unaligned(rng: Rng, x: np.ndarray) -> np.ndarray:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    made = np.ndarray(x.shape, x.dtype, memory, 1)
    made[...] = x
    return made


def read_only(rng: Rng, x: np.ndarray) -> np.ndarray:
    made = guarded(x)
    made.flags.writeable = False
    return made


def mapped(rng: Rng, x: np.ndarray) -> np.ndarray:
    with tempfile.NamedTemporaryFile() as file:
        file.write(np.ascontiguousarray(x).tobytes())
        file.flush()
        made = np.memmap(file.name, x.dtype, "r", shape=x.shape)
        return made if rng.random() < 0.5 else np.asarray(made)


def spread(rng: Rng, x: np.ndarray) -> np.ndarray:
    """The same numbers, every second element of a larger array."""
    larger = np.zeros(tuple(2 * n for n in x.shape), x.dtype)
    larger[tuple(slice(None, None, 2) for _ in x.shape)] = x
    return larger[tuple(slice(None, None, 2) for _ in x.shape)]


def as_tensor(rng: Rng, x: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(x))


def wild_integers(rng: Rng, x: np.ndarray) -> np.ndarray:
    made = x.copy()
    made.reshape(-1)[int(rng.integers(x.size))] = rng.choice([-1, -101, 1 << 20, 1 << 40, -(1 << 63), (1 << 63) - 1])
    return guarded(made)


def odd_values(rng: Rng, x: np.ndarray) -> np.ndarray:
    made = x.copy()
    made.reshape(-1)[int(rng.integers(x.size))] = rng.choice([np.nan, np.inf, -np.inf])
    return guarded(made)


SHAPES: dict[str, Callable[[Rng, np.ndarray], Any]] = {
    "other size": lambda rng, x: guarded(other_size(rng, x)),
    "cut": lambda rng, x: x[..., :-1],
    "cut in front": lambda rng, x: x[1:],
    "one row": lambda rng, x: guarded(x[:1]),
    "one column": lambda rng, x: guarded(x[..., :1]),
    "transposed": lambda rng, x: x.T,
    "another axis": lambda rng, x: x[None],
    "an axis behind": lambda rng, x: x[..., None],
    "flat": lambda rng, x: x.reshape(-1),
    "in two": lambda rng, x: x.reshape(2, -1) if x.size % 2 == 0 else x.reshape(1, -1),
    "no numbers": lambda rng, x: x[:0],
    "no axes": lambda rng, x: x.reshape(-1)[0].reshape(()),
    "a number": lambda rng, x: x.reshape(-1)[0].item(),
    "nothing": lambda rng, x: None,
}
KINDS: dict[str, Callable[[Rng, np.ndarray], Any]] = {
    **{kind: (lambda rng, x, kind=kind: x.astype(kind)) for kind in ("f8", "f2", ">f4", "i4", "c8", "O", "?")},
    "u8": lambda rng, x: np.abs(x).astype("u8"),
    "broadcast": lambda rng, x: np.broadcast_to(x[:1], x.shape),
    "broadcast columns": lambda rng, x: np.broadcast_to(x[..., :1], x.shape),
    "Fortran order": lambda rng, x: np.asfortranarray(x),
    "reversed": lambda rng, x: x[tuple(slice(None, None, -1) for _ in x.shape)],
    "spread": spread,
    "read-only": read_only,
    "mapped": mapped,
    "unaligned": unaligned,
    "matrix": lambda rng, x: np.asmatrix(x.reshape(-1, x.shape[-1])),
    "masked": lambda rng, x: np.ma.masked_less(x, 0),
    "list": lambda rng, x: x.tolist(),
    "tensor": as_tensor,
}
INTEGERS = {"out of range": wild_integers}
FLOATS = {"not finite": odd_values}


def guarded_call(rng: Rng, call: Call) -> None:
    """The call's own arrays, between guard pages."""
    at_end = rng.random() < 0.7
    for i, x in enumerate(call.args):
        if isinstance(x, np.ndarray):
            flipped = x.ndim == 2 and not x.flags.c_contiguous
            call.args[i] = guarded(x.T, at_end).T if flipped else guarded(x, at_end)


def mutate(rng: Rng, call: Call) -> str:
    """Changes one argument, or swaps two; says which."""
    arrays = [i for i, x in enumerate(call.args) if isinstance(x, np.ndarray)]
    numbers = [i for i, x in enumerate(call.args) if type(x) is int]
    if len(arrays) > 1 and rng.random() < 0.08:
        i, j = (int(x) for x in rng.choice(arrays, 2, replace=False))
        call.args[i], call.args[j] = call.args[j], call.args[i]
        return f"arguments {i} and {j} swapped"
    if numbers and (not arrays or rng.random() < 0.15):
        i = int(rng.choice(numbers))
        call.args[i] = int(rng.choice([0, -1, call.args[i] - 1, call.args[i] + 1, 2 * call.args[i], 1 << 40]))
        return f"argument {i} is {call.args[i]}"
    if not arrays:
        return "nothing changed"
    i = int(rng.choice(arrays))
    x = call.args[i]
    more = INTEGERS if x.dtype.kind == "i" else FLOATS
    table = [SHAPES, SHAPES, KINDS, more][int(rng.choice([0, 1, 2, 2, 2, 3]))]
    name = str(rng.choice(list(table)))
    call.args[i] = table[name](rng, x)
    return f"argument {i} {getattr(x, 'shape', '')}: {name}"


def flat(x: Any) -> list[np.ndarray]:
    """All arrays of a result."""
    if isinstance(x, tuple | list):
        return [one for part in x for one in flat(part)]
    return [] if x is None else [np.asarray(x)]


def copied(x: Any) -> Any:
    """Arguments for the formula, which may write into them."""
    return x.copy() if type(x) is np.ndarray else copy.deepcopy(x)


def answer(function: Callable[..., Any], args: list[Any]) -> Any:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return flat(function(*args))
        except Exception as error:
            return error


def verdict(ours: Any, right: Any, close: float) -> str:
    """ "" where a call was refused, "=" where it gave what the formula gives; otherwise what is wrong."""
    if isinstance(ours, Exception):
        if isinstance(ours, REFUSALS) or type(ours) is type(right):
            return "" if "\n" not in str(ours) else f"not one line: {ours!r}"
        return f"{type(ours).__name__}: {ours}"
    if isinstance(right, ValueError) and "the loss is nan" in str(right):  # from a weight that is not finite
        return "="
    if isinstance(right, Exception):
        return f"accepted; the formula refuses: {type(right).__name__}: {right}"
    if [x.shape for x in ours] != [x.shape for x in right]:
        return f"shapes {[x.shape for x in ours]}; the formula's are {[x.shape for x in right]}"
    for a, b in zip(ours, right, strict=True):
        a, b = (np.asarray(x, np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
        same = (np.isnan(a) & np.isnan(b)) | (a == b)  # the same infinity, too
        a, b = np.where(same, 0, a), np.where(same, 0, b)
        if close < np.inf and not np.linalg.norm(a - b) <= close * max(float(np.linalg.norm(b)), FLOOR):
            return f"off by {np.linalg.norm(a - b):.3g} of {np.linalg.norm(b):.3g}"
    return "="


MAKERS: dict[str, Callable[[Rng], Call]] = {
    **{f"{which}_forward": (lambda rng, which=which: calls.forward(rng, which)) for which in calls.MAKERS},
    **{f"{which}_backward": (lambda rng, which=which: calls.backward(rng, which)) for which in calls.MAKERS},
    **calls.SINGLES,
    **models_called.CALLS,
}


def attempt(seed: int, index: int, say: Callable[[str], None] = lambda line: None) -> tuple[str, str]:
    """One call with one thing changed: what it was, and the verdict."""
    rng = np.random.default_rng([seed, index])
    name = str(rng.choice(list(MAKERS)))
    say(f"{index} {name} (the call itself)")
    pool.set_threads(int(rng.integers(1, 3)))
    call = MAKERS[name](rng)
    guarded_call(rng, call)
    what = "nothing changed" if rng.random() < 0.05 else mutate(rng, call)
    say(f"{index} {call.name}: {what}")
    theirs = [copied(x) for x in call.args]
    ours = answer(call.ours, call.args)
    close = {"not finite": np.inf, "f2": 2e-2}.get(what.rpartition(": ")[2], CLOSE)
    found = verdict(ours, answer(call.formula, theirs), close)
    if (
        what == "nothing changed"
        and not found
        and not call.name.startswith(INVALID)
        and "another call" not in call.name
    ):
        found = f"a valid call was refused: {ours}"
    return f"{call.name}: {what}", found


def child(seed: int, first: int, last: int, log: Path) -> None:
    """Attempts one after the other; the one under way is written down before it is made."""
    guard_kernels()
    found: Counter[str] = Counter()
    with log.open("r+b", buffering=0) as file:

        def say(line: str) -> None:
            file.seek(0)
            file.write(line.encode()[:200].ljust(200))

        for index in range(first, last):
            what, result = attempt(seed, index, say)
            found["refused" if not result else "as the formula" if result == "=" else "wrong"] += 1
            if result not in ("", "="):
                print(json.dumps(f"seed {seed} index {index}, {what}: {result}"), flush=True)
        print(json.dumps(found))


def run(count: int, seed: int) -> Outcome:
    """Batches in child processes; one that crashes goes on behind the call that crashed it."""
    found: Counter[str] = Counter({"refused": 0, "as the formula": 0, "wrong": 0, "crashes": 0})
    failures: list[str] = []
    batch, index = 2000, 0
    with tempfile.NamedTemporaryFile() as log:
        while index < count:
            last = min(index + batch, count)
            arguments = [str(x) for x in (seed, index, last, log.name)]
            done = subprocess.run(
                [sys.executable, "-m", "campaigns.arrays", *arguments], capture_output=True, text=True
            )
            said = [json.loads(line) for line in done.stdout.splitlines()]
            failures += [line for line in said if isinstance(line, str)]
            if done.returncode == 0:
                found.update(said[-1])
                index = last
            else:
                line = Path(log.name).read_text().strip()
                reason = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode > 0 else ""
                failures.append(f"seed {seed}, {line}: the process ended with {done.returncode} {reason}")
                found["crashes"] += 1
                if not line:
                    break  # it did not even begin
                found["before a crash"] += int(line.split()[0]) - index
                index = int(line.split()[0]) + 1
            if sys.stderr.isatty() or index % 5000 == 0:
                print(f"  {index:,} of {count:,}: {dict(found)}", flush=True)
    return Outcome(dict(found) | {"calls": len(MAKERS)}, failures)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        guard_kernels()
        print(attempt(int(sys.argv[1]), int(sys.argv[2])))
    else:
        child(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
