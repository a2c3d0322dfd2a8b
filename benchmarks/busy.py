"""How much slower a busy machine makes a step and a token: `python benchmarks/busy.py [RESULTS.json]`.

Each job runs alone and beside one endless loop per core, in turn; the median of several rounds counts, because beside
such loops the best step is luck.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import onfoot
from onfoot.bench.jobs import GPT2, SMALL, SMALL_LLAMA
from onfoot.bench.machine import describe
from onfoot.generate.loop import stream
from onfoot.generate.sampling import Sampling

ROUNDS = 5


def tokens(config: object) -> Callable[[], None]:
    model = onfoot.create(config)
    greedy = Sampling(0.0, None, None, None, 1.0)
    going = iter(())

    def one() -> None:
        nonlocal going
        try:
            next(going)
        except StopIteration:
            going = stream(model, [np.arange(4)], min(900, model.config.n_positions - 4), greedy)
            next(going)

    return one


def steps(config: object) -> Callable[[], None]:
    model = onfoot.create(config)
    optimizer = onfoot.AdamW(model)
    batch = np.random.default_rng(0).integers(0, config.vocab_size, (12, 64))
    return lambda: model.train_step(optimizer, batch)


JOBS = {
    "a token of GPT-2 124M": (lambda: tokens(GPT2), 20),
    "a token of the small GPT-2": (lambda: tokens(SMALL), 50),
    "a step of the small GPT-2, 12 × 64": (lambda: steps(SMALL), 20),
    "a step of the small LLaMA, 12 × 64": (lambda: steps(SMALL_LLAMA), 20),
}


def seconds(one: Callable[[], None], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        one()
    return (time.perf_counter() - begin) / count


def main() -> None:
    results = {}
    for name, (make, count) in JOBS.items():
        one = make()
        seconds(one, count)
        alone, busy = [], []
        for _ in range(ROUNDS):
            alone.append(seconds(one, count))
            loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
            try:
                time.sleep(0.5)
                busy.append(seconds(one, count))
            finally:
                for loop in loops:
                    loop.kill()
                    loop.wait()
        quiet, loud = statistics.median(alone), statistics.median(busy)
        results[name] = {"alone_ms": 1e3 * quiet, "busy_ms": 1e3 * loud, "times": loud / quiet}
        print(f"{name:40} {1e3 * quiet:8.2f} ms alone, {1e3 * loud:8.2f} ms busy: {loud / quiet:.2f} ×", flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({"machine": describe(), "jobs": results}, file, indent=1, ensure_ascii=False)


if __name__ == "__main__":
    main()
