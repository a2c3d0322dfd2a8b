"""Two revisions side by side: `python benchmarks/revisions.py OLD NEW [JOB ...] [--rounds N] [--out FILE]`.

OLD and NEW are checkouts (`git worktree add ../old REVISION` makes one). Each job runs in a process per revision, in turn;
the best step of all rounds counts, and the least peak memory. Only the public API is used, so that old revisions run too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS = {"gpt2": ["c_attn", "c_proj", "c_fc"],
          "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}  # fmt: skip
GPT2 = "GPT2Config()"
SMALL = "GPT2Config(n_layer=4, n_head=4, n_embd=128, n_positions=64, vocab_size=65)"
SMOLLM2 = (
    "LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,"
    " num_key_value_heads=3, max_position_embeddings=2048, rope_theta=100000.0, tie_word_embeddings=True)"
)
SMALL_LLAMA = (
    "LlamaConfig(vocab_size=65, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,"
    " num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True)"
)
# name: configuration, what is done, sequences, tokens, repeats
JOBS = {
    "full-4x256": (GPT2, "full", 4, 256, 3),
    "full-1x1024": (GPT2, "full", 1, 1024, 3),
    "lora-4x256": (GPT2, "lora", 4, 256, 3),
    "small-12x64": (SMALL, "full", 12, 64, 200),
    "llama-full": (SMOLLM2, "full", 2, 256, 3),
    "llama-lora": (SMOLLM2, "lora", 2, 256, 3),
    "llama-small": (SMALL_LLAMA, "full", 12, 64, 200),
    "llama-small-lora": (SMALL_LLAMA, "lora", 12, 64, 200),
    "generate": (GPT2, "generate", 1, 16, 4),
    "generate-int8": (GPT2, "int8", 1, 16, 4),
    "llama-generate": (SMOLLM2, "generate", 1, 16, 4),
    "generate-small": (SMALL, "generate", 1, 16, 20),
}


def worker(name: str) -> None:
    """One job on the onfoot that is imported; a line of JSON."""
    import numpy as np

    import onfoot

    text, what, batch, length, repeats = JOBS[name]
    config = eval(text, vars(onfoot))  # one of the texts above
    rng = np.random.default_rng(0)
    tokens, targets = (rng.integers(0, config.vocab_size, (batch, length)) for _ in range(2))
    if what in ("full", "lora"):
        model = onfoot.create(config, seed=0)
        if what == "lora":
            model.add_lora(r=16, alpha=16, targets=LAYERS["gpt2" if text.startswith("GPT2") else "llama"])
        optimizer = onfoot.AdamW(model, lr=3e-4)

        def step() -> None:
            model.train_step(optimizer, tokens, targets)

    else:
        with tempfile.TemporaryDirectory() as folder:  # written by another process: its memory is not ours
            write = f"import onfoot; onfoot.create(onfoot.{config!r}, seed=0).save({folder!r})"
            subprocess.run([sys.executable, "-c", write], check=True, capture_output=True)
            model = onfoot.load(folder, quantized=what == "int8")
        new = min(64, config.n_positions - length)

        def step() -> None:
            model.generate(tokens, new, temperature=0, stop_ids=())

    times = []
    for _ in range(repeats + 2):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    status = Path("/proc/self/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    print(json.dumps({"seconds": min(times[2:]), "peak_bytes": peak}))


def measure(checkout: Path, name: str, threads: int) -> dict[str, float]:
    numbers = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "OPENBLAS", "NUMBA")}
    environment = {**os.environ, **numbers, "PYTHONPATH": str(checkout / "src")}
    command = [sys.executable, __file__, "--worker", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed in {checkout}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"of {', '.join(JOBS)}; none: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from onfoot.bench.machine import describe

    results: dict[str, dict[str, float]] = {}
    for name in given.jobs or JOBS:
        rounds = [
            (measure(given.old.resolve(), name, given.threads), measure(given.new.resolve(), name, given.threads))
            for _ in range(given.rounds)
        ]
        old, new = ({key: min(one[i][key] for one in rounds) for key in rounds[0][i]} for i in range(2))
        results[name] = {
            "old_seconds": old["seconds"], "new_seconds": new["seconds"], "speed": old["seconds"] / new["seconds"],
            "old_bytes": old["peak_bytes"], "new_bytes": new["peak_bytes"], "memory": new["peak_bytes"] / old["peak_bytes"],
        }  # fmt: skip
        print(
            f"{name:18} {1e3 * old['seconds']:9.1f} -> {1e3 * new['seconds']:9.1f} ms: {results[name]['speed']:.2f} ×   "
            f"{old['peak_bytes'] / 1e6:7.0f} -> {new['peak_bytes'] / 1e6:7.0f} MB: {results[name]['memory']:.2f} ×",
            flush=True,
        )
        if given.out:
            figures = {"machine": describe(), "rounds": given.rounds, "jobs": results}
            given.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        main()
