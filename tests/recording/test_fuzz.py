"""No stale recording is ever replayed: random walks, interruptions, threads and copies, against the formulas."""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from policies import POLICIES, Policy, lora, recompute
from walk import walk

from onfoot.generate.cache import KVCache
from onfoot.generate.loop import step
from onfoot.models import recorded
from onfoot.models.model import Model
from onfoot.recording import replay
from onfoot.recording.recorded_array import active

pytest.importorskip("numba")
Threads = Callable[[int], None]
GPT2, LLAMA = POLICIES["gpt2"], POLICIES["llama"]
DEEP = Policy("gpt2", {"n_layer": 6})  # several hundred calls
LARGE = Policy("gpt2", {"n_embd": 96, "vocab_size": 12000, "n_layer": 1})  # gradients are returned before the last call


@pytest.mark.parametrize("seed", range(5))
def test_a_walk_through_all_that_can_be_done_to_models(seed: int, on_threads: Threads) -> None:
    assert walk(seed, 100, on_threads) > (100, 0)


def test_a_walk_that_nobody_has_taken_before(fresh: int, on_threads: Threads) -> None:
    assert walk(fresh, 100, on_threads)[0] == 100


def without(*names: str) -> Callable[[recorded.Entry, Model], bool]:
    """`Entry.is_current` with a planted mistake: some fields are not compared."""
    is_current = recorded.Entry.is_current

    def planted(entry: recorded.Entry, model: Model) -> bool:
        now = {
            "engine": model.engine,
            "config": model.config,
            "adapter": recorded._adapter(model),
            "params": list(model.params.values()),
        }
        return is_current(entry._replace(**{name: now[name] for name in names}), model)

    return planted


PLANTED = {
    "params": (["another_array", "other_arrays_for_all"], ["loss", "gradients"]),
    "adapter": (["new_adapter", "another_adapter", "another_scale"], ["loss"]),
    "config": (["another_configuration"], ["loss", "gradients"]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_recording_that_is_not_looked_at_closely_is_found_out(
    name: str, on_threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert walk(0, 60, on_threads, *PLANTED[name], most=1) > (60, 0)
    monkeypatch.setattr(recorded.Entry, "is_current", without(name))
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(6):
            walk(seed, 60, on_threads, *PLANTED[name], most=1)


def test_a_token_behind_a_change_of_the_model_is_not_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    model, name = GPT2.model(), "transformer.h.1.mlp.c_fc.weight"

    def logits() -> np.ndarray:
        """The logits of a token after the model has changed, with a KV cache from before."""
        cache, before = KVCache(8), model.params[name]
        for tokens in ([[1, 2, 3]], [[4]]):
            step(model, np.array(tokens), np.zeros(1, np.int64), cache)
        model.params[name] = before * np.float32(-3)
        last = np.array(step(model, np.array([[5]]), np.zeros(1, np.int64), cache))
        model.params[name] = before
        return last

    found = logits()
    with monkeypatch.context() as unrecorded:
        unrecorded.setattr(recorded, "next_logits", lambda *args: None)
        np.testing.assert_allclose(found, logits(), rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(recorded.Entry, "is_current", without("params"))
    assert not np.allclose(found, logits(), rtol=1e-2)


def test_a_recording_of_what_does_not_train_any_more_is_found_out(
    on_threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert walk(0, 60, on_threads, ["frozen", "thawed_in_place"], ["gradients"], most=1) > (60, 0)
    monkeypatch.setattr(recorded, "frozenset", lambda names: None, raising=False)
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(6):
            walk(seed, 60, on_threads, ["frozen", "thawed_in_place"], ["gradients"], most=1)


def assert_right(model: Model, policy: Policy, seed: int = 0, sequences: int = 6) -> None:
    """A step, a loss and some generated tokens equal those of the formulas."""
    exact = policy.model("numpy", "float64")
    for name, value in model.params.items():
        exact.params[name][...] = value
    tokens, targets, options = policy.batch(seed, sequences)
    loss, grads = model.loss_and_grads(tokens, targets, **options)
    right, expected = exact.loss_and_grads(tokens, targets, **options)
    assert loss == pytest.approx(right, rel=1e-5) and grads.keys() == expected.keys()
    largest = max(float(np.linalg.norm(x)) for x in expected.values())
    for name, grad in grads.items():
        size = max(float(np.linalg.norm(expected[name])), 1e-3 * largest)
        assert np.linalg.norm(grad - expected[name]) <= 1e-5 * size, name
    assert model.loss(tokens, targets) == pytest.approx(exact.loss(tokens, targets), rel=1e-5)
    assert (
        model.generate(tokens[:1, :3], 4, temperature=0).tolist()
        == exact.generate(tokens[:1, :3], 4, temperature=0).tolist()
    )
    assert active.recorder is None and not any(entry.lock.locked() for entry in model._steps._kept.values())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("policy", [GPT2, LARGE, LLAMA], ids=["gpt2", "large", "llama"])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_raised_while_gradients_are_taken_leaves_a_model_that_works(
    policy: Policy, error: type[BaseException], threads: int, on_threads: Threads
) -> None:
    on_threads(threads)
    model = policy.model()
    tokens, targets, _ = policy.batch()
    for at in (0, 3, 11):
        taken: list[str] = []

        def on_gradient(name: str, grad: np.ndarray, at: int = at, taken: list[str] = taken) -> None:
            if len(taken) == at:
                raise error("enough")
            taken.append(name)

        with pytest.raises(error, match="enough"):
            model.loss_and_grads(tokens, targets, on_gradient=on_gradient)
        assert len(taken) == at
    assert_right(model, policy)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("policy", [DEEP, LARGE], ids=["deep", "large"])
@pytest.mark.parametrize("nth", [1, 2])
def test_ctrl_c_between_calls_leaves_a_model_that_works(
    policy: Policy, nth: int, threads: int, on_threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_threads(threads)
    model = policy.model()
    tokens, targets, _ = policy.batch(sequences=1)
    model.loss_and_grads(tokens, targets)
    run_list, parts = replay.run_list, []

    def interrupted(table: np.ndarray, threads: int) -> None:
        run_list(table, threads)
        parts.append(len(table))
        if len(parts) == nth:
            signal.raise_signal(signal.SIGINT)

    for entry in model._steps._kept.values():
        for one in entry.replays:
            one.pace.calls = 4
    with monkeypatch.context() as planted:
        planted.setattr(replay, "run_list", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.loss_and_grads(tokens, targets)
    assert len(parts) == nth and sum(parts) < sum(len(one.table) for one in entry.replays)
    assert_right(model, policy, sequences=1)


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C after some time, unless the work is done before."""
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C while something is deleted
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="alarms are of POSIX")
@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_at_any_moment_leaves_a_model_that_works(threads: int, on_threads: Threads) -> None:
    on_threads(threads)
    rng = np.random.default_rng(threads)
    models = [(policy.model(), policy) for policy in (GPT2, Policy("llama", change=lora()))]
    for i in range(60):
        model, policy = models[i % 2]
        with interrupted_after(float(rng.uniform(1e-4, 8e-3))):
            for sequences in (6, 1, 3):  # recorded, replayed, generated
                tokens, targets, _ = policy.batch(i, sequences)
                model.loss_and_grads(tokens, targets)
                model.loss(tokens, targets)
                model.generate(tokens[:, :2], 3)
        if i % 10 > 7:
            model._steps._kept.clear()
    for model, policy in models:
        assert active.recorder is None
        model._steps._kept.clear()
        assert_right(model, policy)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("policy", [GPT2, LARGE, LLAMA], ids=["gpt2", "large", "llama"])
def test_a_model_may_be_used_while_its_gradients_are_taken(policy: Policy, threads: int, on_threads: Threads) -> None:
    on_threads(threads)
    model = policy.model()
    tokens, targets, _ = policy.batch()
    others = [policy.batch(1, n)[:2] for n in (6, 1, 3)]
    alone = [model.loss_and_grads(*other) for other in others]
    right, expected = model.loss_and_grads(tokens, targets)
    text = model.generate(tokens[:2, :3], 3, temperature=0)
    inner: list[Any] = []

    def on_gradient(name: str, grad: np.ndarray) -> None:
        n = len(inner)
        if n == len(others):
            return
        loss, grads = model.loss_and_grads(*others[n])
        inner.append((n, loss, grads, model.loss(*others[n]), model.generate(tokens[:2, :3], 3, temperature=0)))
        assert (grad == expected[name]).all()

    loss, _ = model.loss_and_grads(tokens, targets, on_gradient=on_gradient)
    assert loss == right and len(inner) == len(others)
    for n, other_loss, grads, only_loss, tokens_then in inner:
        assert other_loss == alone[n][0] and only_loss == pytest.approx(other_loss, rel=1e-6)
        assert (tokens_then == text).all() and all((grad == alone[n][1][name]).all() for name, grad in grads.items())
    assert_right(model, policy)


@pytest.mark.parametrize("policy", [GPT2, LARGE], ids=["gpt2", "large"])
def test_there_may_be_fewer_threads_or_more_before_a_step_has_ended(policy: Policy, on_threads: Threads) -> None:
    on_threads(3)
    model = policy.model()
    for n in (1, 4, 2, 3):
        model.loss_and_grads(*policy.batch()[:2], on_gradient=lambda name, grad, n=n: on_threads(n))
    assert_right(model, policy)


def test_threads_that_are_gone_before_their_lists_are_run_are_not_waited_for(
    on_threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_threads(2)
    model, fill = GPT2.model(), recorded.fill

    def fewer(*args: Any) -> None:
        fill(*args)
        on_threads(1)

    monkeypatch.setattr(recorded, "fill", fewer)
    loss, _ = model.loss_and_grads(*GPT2.batch()[:2])
    (entry,) = model._steps._kept.values()
    assert len(entry.replays) == 2 and loss == pytest.approx(model.loss(*GPT2.batch()[:2]), rel=1e-6)
    assert_right(model, GPT2)


@pytest.mark.parametrize("kept", [16, 1])
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_of_python_get_what_each_would_get_alone(
    threads: int, kept: int, on_threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for one recording, each thread evicts the other's."""
    monkeypatch.setattr(recorded, "KEPT", kept)
    on_threads(threads)
    model, errors = GPT2.model(), []
    batches = [GPT2.batch(seed, sequences)[:2] for seed, sequences in ((0, 6), (1, 6), (2, 2), (3, 1))]
    alone = [(model.loss_and_grads(*batch), model.generate(batch[0][:, :2], 4, temperature=0)) for batch in batches]

    def work(first: int) -> None:
        try:
            for i in range(12):
                n = (first + i) % len(batches)
                (right, expected), text = alone[n]
                loss, grads = model.loss_and_grads(*batches[n])
                assert loss == right and all((grad == expected[name]).all() for name, grad in grads.items())
                assert model.loss(*batches[n]) == pytest.approx(right, rel=1e-6)
                assert (model.generate(batches[n][0][:, :2], 4, temperature=0) == text).all()
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    assert_right(model, GPT2)


def test_a_recording_that_another_thread_drops_meanwhile_is_used_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, is_current = GPT2.model(), recorded.Entry.is_current
    tokens, targets, _ = GPT2.batch()
    loss, _ = model.loss_and_grads(tokens, targets)

    def dropped(entry: recorded.Entry, model: Model) -> bool:
        model._steps._kept.clear()
        return is_current(entry, model)

    monkeypatch.setattr(recorded.Entry, "is_current", dropped)
    assert model.loss_and_grads(tokens, targets)[0] == loss and len(model._steps) == 0


@pytest.mark.parametrize("policy", [GPT2, Policy("llama", change=lora())], ids=["gpt2", "llama lora"])
def test_a_copy_of_a_model_begins_without_recordings_and_lives_by_itself(policy: Policy) -> None:
    model = policy.model()
    tokens, targets, _ = policy.batch()
    model.loss_and_grads(tokens, targets)
    other = copy.deepcopy(model)
    assert len(model._steps) == 1 and len(other._steps) == 0
    for name, value in other.params.items():
        value *= np.float32(1.1)
        assert not np.shares_memory(value, model.params[name])
    assert_right(other, policy)
    assert_right(model, policy)
    assert other.loss(tokens, targets) != model.loss(tokens, targets)


def test_a_copy_of_a_cache_goes_its_own_way() -> None:
    model, cache, none = GPT2.model(), KVCache(6), np.zeros(1, np.int64)
    for tokens in ([[1, 2]], [[3]], [[4]]):
        step(model, np.array(tokens), none, cache)
    assert cache.step.replay is not None
    other = copy.deepcopy(cache)
    step(model, np.array([[7]]), none, other)
    found = [step(model, np.array([[token]]), none, which) for which, token in ((cache, 5), (other, 5))]
    for tokens, logits in zip(([1, 2, 3, 4, 5], [1, 2, 3, 4, 7, 5]), found, strict=True):
        np.testing.assert_allclose(logits[0], model.logits(np.array([tokens]))[0, -1], rtol=1e-4, atol=1e-5)


def test_arrays_that_are_not_the_models_any_more_are_let_go() -> None:
    model = Policy("llama", change=lora()).model()
    for n in (1, 2, 3):
        model.loss_and_grads(*LLAMA.batch(0, n)[:2])
    old = weakref.ref(model.params["model.layers.0.mlp.up_proj.weight"])
    assert old() is not None
    model.quantize()
    model.loss(*LLAMA.batch()[:2])
    gc.collect()
    assert old() is None and len(model._steps) == 1


def test_where_there_is_no_address_space_steps_run_without_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    model = GPT2.model()
    monkeypatch.setattr("onfoot.recording.recorder.mmap.mmap", refuse)
    assert_right(model, GPT2)
    assert len(model._steps) == 0


def test_recordings_are_few_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "KEPT", 3)
    model = GPT2.model()
    for n in (1, 2, 3, 4, 2, 5):
        model.loss_and_grads(*GPT2.batch(0, n)[:2])
        assert len(model._steps) <= 3
    assert [key[0][0] for key in model._steps._kept] == [4, 2, 5]


def test_another_policy_is_another_recording() -> None:
    model = GPT2.model()
    batch = GPT2.batch()[:2]
    counts = []
    for change in (lambda m: None, recompute, lambda m: m.trainable.discard("transformer.wpe.weight"), lambda m: None):
        change(model)
        model.loss_and_grads(*batch)
        counts.append(len(model._steps))
    assert counts == [1, 2, 3, 3]
