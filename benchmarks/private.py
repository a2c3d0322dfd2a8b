"""Measures what private training costs: a private step over the ordinary step, in time and in memory.

    python benchmarks/private.py [THREADS]     # GPT-2-like, 6 layers of width 384, 4 × 256 tokens, full and LoRA

Steps alternate, so that a busy machine slows both; the ratio is that of the best of each. The peak memory of each is
measured in a process of its own (Linux). On a machine with other work, one thread gives the most reliable ratios.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import onfoot
from onfoot.models.inputs import no_step
from onfoot.models.model import Model
from onfoot.threads import cores, set_threads
from onfoot.train.optimizer import AdamW
from onfoot.train.private_step import Settings, private_step
from onfoot.train.step import Microbatch, accumulated_step

ROUNDS = 6
BATCH, TOKENS = 4, 256
CASES = {
    "full": {},
    "full, vocabulary of 4,096": {"vocab_size": 4096},
    "LoRA, r = 16": {"r": 16},
}


def steps_of(case: str) -> dict[str, Callable[[], object]]:
    """The two steps of a case, on the same model: clipped by the global norm, and private."""
    settings = dict(CASES[case])
    r = settings.pop("r", 0)
    sizes = {"vocab_size": 50257, "n_positions": TOKENS, "n_embd": 384, "n_layer": 6, "n_head": 6} | settings
    model: Model = onfoot.create(onfoot.GPT2Config(**sizes))
    if r:
        model.add_lora(r)
    optimizer = AdamW(model, lr=1e-4)
    tokens = np.random.default_rng(0).integers(0, sizes["vocab_size"], (BATCH, TOKENS + 1))
    batch = Microbatch(tokens[:, :-1], tokens[:, 1:])
    with_ = Settings(clip=1.0, noise=1.0, expected=BATCH, seed=0, step=0)
    return {
        "ordinary": lambda: accumulated_step(model, optimizer, [batch], BATCH * TOKENS, None, 1.0, no_step),
        "private": lambda: private_step(model, optimizer, [batch], None, with_, no_step),
    }


def times(case: str) -> dict[str, float]:
    """The seconds of the best step of each kind."""
    steps = steps_of(case)
    best = dict.fromkeys(steps, math.inf)
    for i in range(ROUNDS + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if i:  # the first of each compiles and records
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def peak(case: str, name: str) -> float:
    """The peak memory of a process that runs only these steps, in MB."""
    code = (
        f"import sys; sys.argv = ['', {case!r}, {name!r}]; import runpy; runpy.run_path({__file__!r}, run_name='peak')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    print(f"{'':28}{'ordinary':>10}{'private':>10}{'ratio':>7}{'ordinary':>11}{'private':>10}{'ratio':>7}")
    for case in CASES:
        seconds = times(case)
        memory = {name: peak(case, name) for name in seconds}
        rows = [*seconds.values(), seconds["private"] / seconds["ordinary"]]
        rows += [*memory.values(), memory["private"] / memory["ordinary"]]
        print("{:28}{:8.2f} s{:8.2f} s{:7.2f}{:8.0f} MB{:7.0f} MB{:7.2f}".format(case, *rows), flush=True)


if __name__ == "peak":
    one = steps_of(sys.argv[1])[sys.argv[2]]
    for _ in range(2):
        one()
    status = Path("/proc/self/status").read_text()
    print(int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024)
elif __name__ == "__main__":
    set_threads(int(sys.argv[1]) if len(sys.argv) > 1 else len(cores()))
    main()
