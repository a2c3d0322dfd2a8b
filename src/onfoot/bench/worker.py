"""One contender in a separate process: `python -m onfoot.bench.worker JOB CONTENDER THREADS` prints a line of JSON.

A separate process keeps thread pools and memory apart: the reported peak is that of this contender only.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from onfoot.bench.jobs import Job, find
from onfoot.bench.machine import peak_bytes


def prepare(job: Job, contender: str, threads: int) -> Callable[[], float]:
    if contender.startswith("onfoot"):
        from onfoot.bench import ours

        if job.new_tokens:
            return ours.generator(job, int8=contender.endswith("int8"))
        return ours.trainer(job, lora=contender.endswith("lora"))
    import torch

    from onfoot.bench import peers

    torch.set_num_threads(threads)
    if contender == "peft":
        return peers.peft_trainer(job)
    if contender == "transformers":
        return peers.generator(job)
    return peers.trainer(job, compiled=contender == "compile")


def measure(job: Job, contender: str, threads: int) -> dict[str, Any]:
    """The best time after a warm-up, and the process's peak memory."""
    step = prepare(job, contender, threads)
    for _ in range(2):
        result = step()
    times = []
    for _ in range(job.repeats):
        begin = time.perf_counter()
        result = step()
        times.append(time.perf_counter() - begin)
    return {"seconds": min(times), "peak_bytes": peak_bytes(), "result": result}


if __name__ == "__main__":
    name, contender, threads = sys.argv[1:]
    print(json.dumps(measure(find(name), contender, int(threads))))
