"""Data-parallel training on this machine: memory a rank, what of the sums is hidden, and the model on paper beside it.

    python benchmarks/parallel.py [paper | waits | network | memory | all]

Waits are measured in shared memory and, as root on Linux, over a network of a chosen rate: two processes with network
namespaces of their own as hosts, joined by a link that `tc` slows down, with one rank on each. Namespaces and link are
gone when those processes end. The tables of docs/parallel.md are what this prints.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import log2
from pathlib import Path
from typing import Any

from onfoot.bench.ranks import mpiexec, run_measure
from onfoot.config import preset
from onfoot.models.params import count, shapes

SIZES: dict[str, Any] = {"layers": 6, "width": 256, "heads": 4, "vocab": 512, "context": 64, "rows": 16, "rounds": 9}
BUCKETS = (0.5, 1, 2, 4, 32)  # MB; the last holds everything
GPT2: dict[str, Any] = {"layers": 12, "width": 768, "heads": 12, "context": 32, "rounds": 0}
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def table(head: list[str], rows: list[list[str]]) -> None:
    """Prints Markdown."""
    print("| " + " | ".join(head) + " |\n|" + " ---: |" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
    print()


def memory(vocab: int) -> None:
    """The peak memory of a rank that trains GPT-2 124M on one row, and what of it is weights, sums and means."""
    rows = []
    for n in (1, 2, 4):
        sizes = {**GPT2, "rows": n, "vocab": vocab}
        plain = run_measure(n, **sizes)
        state, shared = (plain["parameters"] * b / 1e6 for b in (16, 4 + 12 / n))
        row = [str(n), f"{state:,.0f}", f"{plain['memory_mb']:,.0f}"]
        if n > 1:
            sharded = run_measure(n, shard=True, **sizes)
            row += [f"{shared:,.0f}", f"{sharded['memory_mb']:,.0f}", f"{sharded['buffers_mb']:,.0f}"]
        rows.append([*row, "–", "–", "–"][:6])
    print(f"a vocabulary of {vocab:,}: {plain['parameters'] / 1e6:.1f} M parameters\n")
    table(["ranks", "estimated, MB", "peak, MB", "sharded: estimated, MB", "peak, MB", "of which buckets, MB"], rows)


def waits(launcher: list[str] | None, where: str) -> None:
    """What is waited for with sums after and during the backward pass, and what the model on paper says."""
    rows = []
    for bucket in BUCKETS:
        found = run_measure(2, launcher, bucket_mb=bucket, **SIZES)
        seconds = found["seconds"]
        speed = found["bytes"] / seconds["sums"]  # 2 (n − 1) / n is 1 for two ranks
        tail = found["tail_bytes"] / speed
        after, during, busy = (seconds[k] for k in ("after: waiting", "during: waiting", "during: moving"))
        rows.append(
            [
                f"{bucket:g}", str(found["buckets"]), f"{1e3 * seconds['sums']:.1f}", f"{speed / 1e9:.2f}",
                f"{1e3 * after:.1f}", f"{1e3 * tail:.1f}", f"{1e3 * during:.1f}", f"{1 - during / after:.0%}",
                f"{1e3 * busy:.1f}", f"{found['hidden']:.0%}",
            ]
        )  # fmt: skip
        backward = seconds["alone: gradients"]
    print(
        f"{found['bytes'] / 1e6:.1f} MB of gradients, two ranks, {where}; forward and backward pass "
        f"{1e3 * backward:.0f} ms; medians of {SIZES['rounds']} rounds\n"
    )
    table(
        ["bucket, MB", "buckets", "sums alone, ms", "GB/s", "wait without overlap, ms", "estimated tail, ms",
         "wait with overlap, ms", "hidden", "thread CPU time, ms", "hidden, net of CPU time"], rows,
    )  # fmt: skip


def paper(flops: float = 1e11, tokens: int = 4096, n: int = 16) -> None:
    """How communication grows: see docs/parallel.md for the formulas."""
    rows = []
    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        config = preset(name)
        parameters = count(shapes(config))
        grads, last = 4 * parameters, 4 * config.vocab_size * config.n_embd
        backward = 4 * parameters * tokens / flops
        row = [name, f"{parameters / 1e6:,.0f} M", f"{grads / 1e6:,.0f}", f"{backward:,.1f}"]
        for gigabits in (10, 100):
            speed = gigabits / 8 * 1e9
            whole, tail = (2 * (n - 1) / n * b / speed for b in (grads, last))
            row += [f"{whole:.2f}", f"{tail:.2f}", f"{tail / (1.5 * backward + tail):.2%}"]
        rows.append(row)
    table(
        ["model", "parameters", "gradients, MB", "backward, s", "10 Gb/s: sums, s", "tail, s", "% of step",
         "100 Gb/s: sums, s", "tail, s", "% of step"], rows,
    )  # fmt: skip
    rows = []
    for gigabits, latency in ((1, 50e-6), (10, 30e-6), (100, 30e-6), (100, 3e-6)):
        speed = gigabits / 8 * 1e9
        least = 2 * (n - 1) / n * flops / speed
        bucket = 10 * log2(n) * latency * speed * n / (n - 1)
        rows.append([f"{gigabits}", f"{latency * 1e6:.0f}", f"{least:,.0f}", f"{bucket / 1e6:.1f}"])
    table(["Gb/s", "µs per message", "min tokens per rank and step", "min bucket, MB"], rows)


@contextmanager
def two_hosts(rate: str) -> Iterator[list[str]]:
    """Two network namespaces with a link of that rate between them; the command that starts a rank in each."""
    apart = ["unshare", "--net", "--uts", "sleep", "infinity"]
    hosts = [subprocess.Popen(apart) for _ in ADDRESSES]
    ways = [["nsenter", "-t", str(host.pid), "--net", "--uts"] for host in hosts]
    try:
        for host in hosts:
            while os.readlink(f"/proc/{host.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                time.sleep(0.01)
        run(*ways[0], *f"ip link add eth0 type veth peer name eth0 netns {hosts[1].pid}".split())
        for way, address in zip(ways, ADDRESSES, strict=True):
            run(*way, "hostname", address)  # a name that every host can find
            run(*way, *f"ip addr add {address}/24 dev eth0".split())
            for device in ("eth0", "lo"):
                run(*way, *f"ip link set {device} up".split())
            run(*way, *f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 100ms".split())
        time.sleep(1)  # until the link is up
        with tempfile.TemporaryDirectory() as folder:
            shell = Path(folder) / "ssh"  # what mpiexec takes for ssh: HOST COMMAND; only the second host is another
            options = 'while [ "${1#-}" != "$1" ]; do shift; done'
            shell.write_text(f'#!/bin/sh\n{options}\nshift\nexec {" ".join(ways[1])} sh -c "$*"\n')
            shell.chmod(0o755)
            wire = ["env", "UCX_TLS=tcp,self", "UCX_NET_DEVICES=eth0"]  # or else UCX finds that memory is shared
            ranks = [mpiexec(), "-launcher", "ssh", "-launcher-exec", str(shell), "-hosts", ",".join(ADDRESSES)]
            yield [*ways[0], *wire, *ranks, "-n", "2", "-ppn", "1"]
    finally:
        for host in hosts:
            host.kill()
            host.wait()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    asked = sys.argv[1] if len(sys.argv) > 1 else "all"
    if asked not in ("paper", "waits", "network", "memory", "all"):
        sys.exit(f"unknown: {asked}\n{__doc__}")
    if asked in ("paper", "all"):
        paper()
    if asked in ("waits", "all"):
        waits(None, "in shared memory")
    if asked == "network" or (asked == "all" and sys.platform == "linux" and os.geteuid() == 0):
        with two_hosts("1gbit") as launcher:
            waits(launcher, "over TCP at 1 Gb/s")
    if asked in ("memory", "all"):
        for vocab in (50257, 1024):  # as it is, and with small tables
            memory(vocab)


if __name__ == "__main__":
    main()
