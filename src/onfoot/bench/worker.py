"""One contender in a process of its own: `python -m onfoot.bench.worker JOB CONTENDER THREADS`, a line of JSON out.

A process of its own keeps thread pools and memory apart: the peak it reports is its own and nobody else's.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onfoot.bench.jobs import Job, find


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
    """The best time of several after a warm-up, and the process's peak memory."""
    step = prepare(job, contender, threads)
    for _ in range(2):
        result = step()
    times = []
    for _ in range(job.repeats):
        begin = time.perf_counter()
        result = step()
        times.append(time.perf_counter() - begin)
    return {"seconds": min(times), "peak_bytes": peak_bytes(), "result": result}


def peak_bytes() -> int:
    """This process's own peak. On Linux ru_maxrss would count what the parent held when it started this process."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    name, contender, threads = sys.argv[1:]
    print(json.dumps(measure(find(name), contender, int(threads))))
