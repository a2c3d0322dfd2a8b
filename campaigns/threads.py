"""Several Python threads at once, switched as often as Python can: every result must have the bits of one alone.

Two threads ask a small model for one row of logits, again and again, and those calls are counted. Beside them others
generate with a cache (floats, 8 bits, LLaMA) and compute gradients, on the same model or on their own; two of them ask
for the same step, which is recorded once and replayed by both.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import onfoot
from campaigns import Outcome
from onfoot.models.model import Model
from onfoot.recording import pool

COUNT = 100_000
PROMPTS = 16
Work = Callable[[int], bytes]  # what a piece of work gives, for the prompt of that number


def models(seed: int) -> tuple[Model, Model, Model]:
    """A GPT-2, the same in 8 bits, and a LLaMA, away from their initial values."""
    gpt2 = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=48)
    llama = onfoot.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    made = [onfoot.create(config, seed) for config in (gpt2, gpt2, llama)]
    rng = np.random.default_rng(seed)
    for model in made:
        for p in model.params.values():
            p += rng.normal(0, 0.2, p.shape).astype(np.float32)
    made[1].quantize("int8")
    return made[0], made[1], made[2]


def bits(x: Any) -> bytes:
    """All numbers of a result."""
    if isinstance(x, dict):
        return b"".join(bits(x[name]) for name in sorted(x))
    if isinstance(x, tuple):
        return b"".join(map(bits, x))
    return np.ascontiguousarray(x).tobytes()


def works(seed: int) -> tuple[Work, dict[str, Work]]:
    """One row of logits, and what is done beside it."""
    gpt2, small, llama = models(seed)
    rows = np.random.default_rng([seed, 1]).integers(0, 48, (PROMPTS, 1, 4))

    def generates(model: Model) -> Work:
        return lambda i: bits(model.generate(rows[i], 6, seed=i))

    def gradients(i: int) -> bytes:
        return bits(gpt2.loss_and_grads(np.repeat(rows[i], 4, 0)))

    return lambda i: bits(gpt2.logits(rows[i, :, :1])), {
        "generation": generates(gpt2),
        "gradients": gradients,
        "generation in 8 bits": generates(small),
        "generation of LLaMA": generates(llama),
        "gradients of LLaMA": lambda i: bits(llama.loss_and_grads(rows[i])),
        "logits of LLaMA": lambda i: bits(llama.logits(rows[i, :, :1])),
        "the same gradients": gradients,
    }


class Beside:
    """Threads that each go through their work, and write down what is not as it was alone."""

    def __init__(self, expected: dict[str, list[bytes]]) -> None:
        self.expected = expected
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.enough = threading.Event()

    def check(self, name: str, work: Work, i: int) -> None:
        try:
            if work(i) != self.expected[name][i]:
                self.wrong.append(f"{name}, prompt {i}: other bits than alone")
        except Exception as error:
            self.wrong.append(f"{name}, prompt {i}: {type(error).__name__}: {error}")
        self.done[name] += 1

    def count(self, name: str, work: Work, times: int) -> None:
        for i in range(times):
            self.check(name, work, i % PROMPTS)

    def until_enough(self, names: Sequence[str], table: dict[str, Work]) -> None:
        i = 0
        while not self.enough.is_set():
            name = names[i % len(names)]
            self.check(name, table[name], i // len(names) % PROMPTS)
            i += 1


def together(count: int, logits: Work, others: dict[str, Work]) -> Beside:
    """`count` rows of logits from two threads, with two more beside them."""
    table = {"one-row logits": logits, **others}
    beside = Beside({name: [work(i) for i in range(PROMPTS)] for name, work in table.items()})
    names = list(others)
    rows = [threading.Thread(target=beside.count, args=("one-row logits", logits, count // 2)) for _ in range(2)]
    rest = [threading.Thread(target=beside.until_enough, args=(part, others)) for part in (names[::2], names[1::2])]
    for thread in (*rows, *rest):
        thread.start()
    for thread in rows:
        thread.join()
    beside.enough.set()
    for thread in rest:
        thread.join()
    return beside


def run(count: int, seed: int) -> Outcome:
    """Most of it with kernels on one thread each, the rest on two: a pool of threads for every thread of Python's."""
    logits, others = works(seed)
    done: Counter[str] = Counter()
    wrong: list[str] = []
    before, interval = pool.threads(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for kernel_threads, part in ((1, count - count // 50), (2, count // 50)):
            pool.set_threads(kernel_threads)
            beside = together(part, logits, others)
            done += beside.done
            wrong += [f"seed {seed}, kernels on {kernel_threads} threads, {line}" for line in beside.wrong]
    finally:
        sys.setswitchinterval(interval)
        pool.set_threads(before)
    return Outcome({**done, "wrong": len(wrong)}, wrong)
