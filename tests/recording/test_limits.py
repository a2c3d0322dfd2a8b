"""What recordings may not cost: memory that nobody needs, recordings made again and again, a thread that hangs."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from policies import POLICIES, Policy, lora, recompute

import onfoot
from onfoot.kernels.elementary import exp
from onfoot.memory import Job, plan
from onfoot.models import recorded
from onfoot.models.run import Dropped
from onfoot.models.step import checked_batch, choose, unrecorded_loss
from onfoot.ops.cross_entropy import IGNORE
from onfoot.recording import recorder
from onfoot.recording.recorded_array import CannotRecord
from onfoot.recording.recorder import INPUT, Recorder

pytest.importorskip("numba")
Threads = Callable[[int], None]
GPT2 = POLICIES["gpt2"]


def test_a_system_without_such_address_space_runs_unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows' mmap has no MAP_PRIVATE."""
    model, right = GPT2.model(), GPT2.model().loss(*GPT2.batch()[:2])
    monkeypatch.delattr(recorder.mmap, "MAP_PRIVATE")
    assert model.loss(*GPT2.batch()[:2]) == pytest.approx(right, rel=1e-6) and len(model._steps) == 0
    with pytest.raises(ValueError, match="cannot record a step"):
        plan(Job(onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=9), 1, 8))


@pytest.mark.parametrize("change", [lambda model: None, recompute], ids=["kept", "recomputed"])
def test_a_dropout_pattern_is_one_input_however_often_it_is_used(
    change: Callable[[onfoot.Model], None], on_threads: Threads
) -> None:
    on_threads(1)
    policy = Policy("gpt2", {"attn_pdrop": 0.2}, change, drops=True)
    model, (tokens, targets, options) = policy.model(), policy.batch()
    model.loss_and_grads(tokens, targets, **options)
    (entry,) = model._steps._kept.values()
    ((replay,), keys) = entry.replays, [slot.key for slot in entry.replays[0].recording.inputs]
    assert (
        sum(isinstance(key, Dropped) for key in keys)
        == 2
        == len({*keys} - {*["tokens", "targets", "divisor"]} - {"positions"})
    )
    patterns = 2 * 6 * 2 * 11 * 11 * 4  # two blocks of sequences × heads × queries × keys
    assert patterns <= replay.recording.bytes_of(INPUT) < patterns + 4096
    assert replay._memory == {}  # between steps there are none


def test_patterns_that_are_too_large_together_are_drawn_one_by_one(
    monkeypatch: pytest.MonkeyPatch, on_threads: Threads
) -> None:
    on_threads(1)
    policy = POLICIES["gpt2 dropout in attention"]
    tokens, targets, options = policy.batch()
    right = policy.model().loss_and_grads(tokens, targets, **options)
    monkeypatch.setattr(recorder, "MAX_INPUTS", 10_000)
    model = policy.model()
    loss, grads = model.loss_and_grads(tokens, targets, **options)
    assert len(model._steps) == 0 and loss == right[0]
    assert all((grads[name] == right[1][name]).all() for name in grads)


@pytest.mark.parametrize("change", ["quantize", "params"])
def test_weights_that_are_replaced_are_freed_without_another_step(change: str) -> None:
    model = GPT2.model()
    model.loss_and_grads(*GPT2.batch()[:2])
    old = weakref.ref(model.params["transformer.h.0.mlp.c_fc.weight"])
    if change == "quantize":
        model.quantize()
    else:
        model.params = {name: value.copy() for name, value in model.params.items()}
    gc.collect()
    assert old() is None


def test_a_model_and_its_adapter_in_turn_are_recorded_once_each() -> None:
    model, (tokens, targets, _) = Policy("gpt2", change=lora()).model(), GPT2.batch()
    losses = []
    for _ in range(3):
        for name in ("default", None):
            model.use_adapter(name)
            losses.append(model.loss(tokens, targets))
        if len(losses) == 2:
            made = {id(entry) for entry in model._steps._kept.values()}
    assert losses[:2] * 3 == losses and losses[0] != losses[1]
    assert {id(entry) for entry in model._steps._kept.values()} == made and len(made) == 2


@pytest.mark.parametrize("threads", [1, 2])
def test_masked_prompts_of_all_lengths_need_few_recordings(threads: int, on_threads: Threads) -> None:
    on_threads(threads)
    policy, rng = Policy("gpt2", {"n_positions": 96, "n_layer": 1}), np.random.default_rng(0)
    model, exact = policy.model(), policy.model("numpy", "float64")
    made = 0
    original = recorded.record

    def counted(*args: object) -> object:
        nonlocal made
        made += 1
        return original(*args)  # type: ignore[arg-type]

    recorded.record = counted  # type: ignore[assignment]
    results = []
    try:
        for _ in range(60):
            tokens = rng.integers(0, 61, (8, 96))
            targets = tokens.copy()
            targets[np.arange(96) < rng.integers(10, 86, (8, 1))] = IGNORE
            results.append((tokens, targets, *model.loss_and_grads(tokens, targets)))
    finally:
        recorded.record = original
    for tokens, targets, loss, grads in results[::20]:
        right, expected = exact.loss_and_grads(tokens, targets)
        assert loss == pytest.approx(right, rel=1e-5)
        for name in grads:
            size = max(float(np.linalg.norm(expected[name])), 1e-2)
            assert np.linalg.norm(grads[name] - expected[name]) <= 1e-5 * size
    assert 1 <= made <= 9


def test_rows_with_a_target_are_padded_to_a_coarse_grid() -> None:
    sizes = set()
    for n in range(1, 900):
        ids = np.full((8, 128), IGNORE)
        ids.reshape(-1)[:n] = 1
        chosen = choose(ids)
        assert chosen.chosen is not None and (chosen.chosen != IGNORE).sum() == n
        sizes.add(chosen.chosen.size)
    assert sizes == {128 * k for k in range(1, 9)}


def test_what_is_handed_out_is_not_used_again() -> None:
    from onfoot.kernels.update import add

    made = Recorder(threads=1)
    with made.recording():
        x = made.input((64,), np.float32, "x")
        y = add(x, x)
        made.event("y", y)
        made.event("z", add(y, y))
        with pytest.raises(CannotRecord, match="y is used again"):
            made.finish()


def test_a_shape_that_does_not_exist_is_an_error_and_not_a_copy() -> None:
    made = Recorder(threads=1)
    with made.recording(), pytest.raises(ValueError, match="reshape"):
        made.empty((2, 3)).reshape(7)


def test_a_pass_that_is_not_recorded_leaves_no_cycle() -> None:
    model = onfoot.create(
        onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=128, n_positions=64, vocab_size=9), engine="numba"
    )
    tokens = np.zeros((32, 64), np.int64)  # 2^18 numbers: what is computed again is remembered
    gc.collect()
    gc.disable()
    try:
        run = model.new_run()
        unrecorded_loss(run, model.config, checked_batch(model, tokens, tokens))
        alive = weakref.ref(run)
        del run
        assert alive() is None
    finally:
        gc.enable()


def test_a_token_outside_the_vocabulary_is_refused_by_a_recorded_step() -> None:
    from onfoot.generate.cache import KVCache
    from onfoot.generate.loop import step

    model, cache = GPT2.model(), KVCache(8)
    for tokens in ([[1, 2]], [[3]]):
        step(model, np.array(tokens), np.zeros(1, np.int64), cache)
    with pytest.raises(ValueError, match="61"):
        step(model, np.array([[10**9]]), np.zeros(1, np.int64), cache)
    long = KVCache(1000)
    step(model, np.array([[1, 2]]), np.zeros(1, np.int64), long)
    with pytest.raises(ValueError, match="n_positions=24"):
        step(model, np.array([[3]]), np.zeros(1, np.int64), long)


HAMMER = """
import threading, time, numpy as np, onfoot
from onfoot.recording import pool
pool._most = 3
model = onfoot.create(onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=50), engine="numba")
tokens = np.arange(6 * 16).reshape(6, 16) % 50
right, stop, wrong = model.loss_and_grads(tokens)[0], threading.Event(), []
def work():
    while not stop.is_set():
        if abs(model.loss_and_grads(tokens)[0] - right) > 1e-5 or abs(model.loss(tokens) - right) > 1e-5:
            wrong.append(1)
def change(seed):
    rng = np.random.default_rng(seed)
    while not stop.is_set():
        onfoot.set_threads(int(rng.integers(1, 4)))
threads = [threading.Thread(target=work) for _ in range(2)]
threads += [threading.Thread(target=change, args=(i,)) for i in range(2)]
[t.start() for t in threads]
time.sleep(6)
stop.set()
[t.join() for t in threads]
print("ended", len(wrong))
"""


def test_changing_the_number_of_threads_meanwhile_neither_hangs_nor_changes_results() -> None:
    done = subprocess.run([sys.executable, "-c", HAMMER], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["ended", "0"], done.stderr


def test_a_nan_of_any_bits_stays_one_in_softmax() -> None:
    from onfoot import kernels

    assert callable(exp)
    q, k, v = (np.random.default_rng(i).standard_normal((1, 1, 9, 8)).astype(np.float32) for i in range(3))
    q[0, 0, 3, 2] = np.array([0x7FC00001], np.uint32).view(np.float32)[0]
    y, _ = kernels.table()["attention_forward"](q, k, v)
    assert np.isnan(y[0, 0, 3]).all() and np.isfinite(y[0, 0, :3]).all()
