"""Several Python threads, and forked processes: results equal those of a single thread."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import numpy as np
import pytest

import onfoot
from onfoot.generate.loop import stream
from onfoot.generate.sampling import Sampling
from onfoot.recording.recorded_array import data_address
from onfoot.recording.recorder import Recorder

pytest.importorskip("numba")
CONFIG = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=48)


def test_working_memory_is_a_threads_own() -> None:
    from onfoot.kernels import buffers

    mine, others = buffers.scratch(2, 100), []
    thread = threading.Thread(target=lambda: others.append(buffers.scratch(2, 100)))
    thread.start()
    thread.join()
    assert mine is buffers.scratch(2, 100) and not np.shares_memory(mine, others[0])
    with Recorder(2).recording():
        places = {data_address(buffers.scratch(2, 100)) for _ in range(2)}
    assert len(places) == 2 and data_address(mine) not in places  # a recording's calls have theirs
    assert mine is buffers.scratch(2, 100)


def test_a_generation_may_be_continued_by_another_thread() -> None:
    """Its recording has its own memory: what the first thread computes meanwhile does not change it."""
    model = onfoot.create(CONFIG, 1, engine="numba")
    right = model.generate(np.arange(3)[None], 20, temperature=0)[0, 3:]
    tokens = stream(model, [np.arange(3)], 20, Sampling(temperature=0))
    out = [int(next(tokens)[0]) for _ in range(3)]
    began, before = threading.Event(), sys.getswitchinterval()

    def go_on() -> None:
        began.set()
        out.extend(int(new[0]) for new in tokens)

    thread = threading.Thread(target=go_on)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        began.wait()
        while thread.is_alive():
            model.logits(np.array([[7]]))
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert out == right.tolist()


@pytest.mark.parametrize("sequences", [4, 3])  # a list for each of two threads, and one for both
def test_threads_that_ask_for_one_step_at_once_get_the_bits_of_one_alone(
    sequences: int, on_threads: Callable[[int], None]
) -> None:
    on_threads(2)
    model = onfoot.create(CONFIG, 1, engine="numba")
    tokens = np.random.default_rng(0).integers(0, 48, (sequences, 12))
    loss, right = model.loss_and_grads(tokens)
    wrong, before = [], sys.getswitchinterval()

    def ask() -> None:
        for _ in range(60):
            found, grads = model.loss_and_grads(tokens)
            wrong.extend(name for name in right if found != loss or (grads[name] != right[name]).any())

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == [] and len(model._steps) == 1


def test_a_step_within_a_step_has_the_bits_of_one_alone(threads: int) -> None:
    model = onfoot.create(CONFIG, 1, engine="numba")
    tokens = np.random.default_rng(0).integers(0, 48, (6, 12))
    loss, right = model.loss_and_grads(tokens)
    inner: list[tuple[float, dict[str, np.ndarray]]] = []
    taken: dict[str, np.ndarray] = {}

    def on_gradient(name: str, grad: np.ndarray) -> None:
        taken[name] = grad
        inner.append(model.loss_and_grads(tokens))

    model.loss_and_grads(tokens, on_gradient=on_gradient)
    assert len(inner) == len(right)
    for found, grads in [*inner, (loss, taken)]:
        assert found == loss and all((grads[name] == right[name]).all() for name in right)


def test_memory_is_handed_back_from_several_threads_at_once() -> None:
    """Blocks that one thread frees are taken by others while they are being counted."""
    from onfoot.kernels.buffers import Pool

    pool, errors = Pool(), []

    def take(size: int) -> None:
        try:
            for i in range(400):
                held = [pool.empty((size + 64 * (i % 5),)) for _ in range(3)]
                for n, x in enumerate(held):
                    x[[0, -1]] = n
                assert all((x[[0, -1]] == n).all() for n, x in enumerate(held))
        except Exception as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=take, args=(n,)) for n in (9_000, 9_000, 600_000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []


FORK = """
    import multiprocessing, os, sys
    import numpy as np, onfoot
    from onfoot.recording import pool

    config = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=48)
    model = onfoot.create(config, 1, engine="numba")
    tokens = np.arange(48).reshape(4, 12)

    def use(queue=None):
        loss, grads = model.loss_and_grads(tokens)
        step = model.train_step(onfoot.AdamW(model), tokens)
        out = loss, float(sum((g.astype(float) ** 2).sum() for g in grads.values())), model.generate(
            tokens[:, :3], 5, temperature=0).tolist(), pool.threads(), step
        pool.set_threads(2)
        out = *out, pool.threads()
        return out if queue is None else queue.put(out)

    before = model.loss_and_grads(tokens)  # the threads are at work before the fork
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=use, args=(queue,))
    child.start()
    child.join(100)
    assert child.exitcode == 0, f"the child ended with {child.exitcode}"
    theirs, ours = queue.get(), use()
    assert theirs[3] == theirs[5] == 1 and ours[3] == 2, (theirs[3], ours[3])
    assert np.allclose(theirs[:2], ours[:2], rtol=1e-5) and theirs[2] == ours[2], (theirs, ours)
    print("the same")
"""


def test_a_forked_process_goes_on_computing_on_one_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "2", "NUMBA_NUM_THREADS": "2"},
    )
    assert done.stdout.strip() == "the same", done.stderr


THREADS = """
    import threading
    import numpy as np
    from onfoot.recording import pool
    from onfoot.kernels.product import product

    pool._most = 4
    a = np.random.default_rng(0).standard_normal((200, 200)).astype(np.float32)
    right = product(a, a)
    for i in range(200):
        for n in (3, 1, 4, 2):
            pool.set_threads(n)
        assert pool.threads() == pool.native.started == 2
        assert (product(a, a) == right).all()
        names = [t.name for t in threading.enumerate() if t.name.startswith("onfoot-")]
        assert names == ["onfoot-1"], names
    print("the same")
"""


def test_threads_end_before_others_take_their_numbers() -> None:
    """Two threads with the same number would both run a kernel, and the next barrier would wait for ever."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(THREADS)], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "the same", done.stderr
