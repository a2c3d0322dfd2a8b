"""Arrays of a recording: views work, values are neither read nor written."""

from __future__ import annotations

import copy
import ctypes
import math
import mmap
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from policies import POLICIES, Policy, lora, quantized

from onfoot.engine import get_engine
from onfoot.models import recorded
from onfoot.recording.recorded_array import CannotRecord, RecordedArray, active, data_address
from onfoot.recording.recorder import Recorder

pytest.importorskip("numba")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the system tells which pages are in memory")


def in_memory(begin: int, end: int) -> int:
    """The number of resident pages: those that were read or written."""
    told = (ctypes.c_ubyte * -(-(end - begin) // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), told) == 0
    return int((np.frombuffer(told, np.uint8) & 1).sum())


def touched(recorder: Recorder) -> int:
    """The pages of a recorder's address space that were read or written."""
    assert len(recorder._spaces) == 1
    return sum(in_memory(begin, recorder._next + mmap.PAGESIZE) for begin, _, _ in recorder._spaces)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    get_engine("numba")  # the kernels are there
    made = Recorder(1)
    with made.recording():
        yield made


REFUSED: dict[str, Callable[[Any, Any, np.ndarray], Any]] = {
    # x is (4, 6), ids (4,), both recorded arrays; plain is (4, 6) with values
    "ufunc": lambda x, ids, plain: np.exp(x),
    "ufunc with numbers": lambda x, ids, plain: plain + x,
    "number": lambda x, ids, plain: 3 * x,
    "in place": lambda x, ids, plain: x.__iadd__(1),
    "into numbers": lambda x, ids, plain: plain.__iadd__(x),
    "out": lambda x, ids, plain: np.add(plain, plain, out=x),
    "product": lambda x, ids, plain: plain @ x.T,
    "at": lambda x, ids, plain: np.add.at(plain, ids, plain),
    "reduce": lambda x, ids, plain: np.add.reduce(x),
    "comparison": lambda x, ids, plain: x == 0,
    "sum": lambda x, ids, plain: x.sum(),
    "np.sum": lambda x, ids, plain: np.sum(x),
    "max": lambda x, ids, plain: ids.max(),
    "argmin": lambda x, ids, plain: x.argmin(),
    "argsort": lambda x, ids, plain: x.argsort(),
    "nonzero": lambda x, ids, plain: x.nonzero(),
    "searchsorted": lambda x, ids, plain: x[0].searchsorted(1.0),
    "compress": lambda x, ids, plain: x.compress([True], 0),
    "choose": lambda x, ids, plain: ids.choose([1, 2]),
    "partition": lambda x, ids, plain: x.partition(1),
    "sort": lambda x, ids, plain: x.sort(),
    "put": lambda x, ids, plain: x.put(0, 1),
    "setfield": lambda x, ids, plain: x.setfield(1.0, np.float32),
    "byteswap": lambda x, ids, plain: x.byteswap(),
    "astype": lambda x, ids, plain: x.astype(np.float64),
    "astype of its own": lambda x, ids, plain: x.astype(np.float32, copy=False),
    "flatten": lambda x, ids, plain: x.flatten(),
    "ravel": lambda x, ids, plain: x.ravel(),
    "flat": lambda x, ids, plain: x.flat[0],
    "imag": lambda x, ids, plain: x.imag,
    "tolist": lambda x, ids, plain: x.tolist(),
    "tobytes": lambda x, ids, plain: x.tobytes(),
    "item": lambda x, ids, plain: x.item(0),
    "one number": lambda x, ids, plain: x[0, 1],
    "numbers one by one": lambda x, ids, plain: list(x[0]),
    "float": lambda x, ids, plain: float(x[:1, 0].reshape(())),
    "int": lambda x, ids, plain: int(ids[:1].reshape(())),
    "complex": lambda x, ids, plain: complex(x[:1, 0].reshape(())),
    "bool": lambda x, ids, plain: bool(x),
    "in": lambda x, ids, plain: 3 in x,
    "index": lambda x, ids, plain: [1, 2][ids[:1].reshape(())],
    "sqrt": lambda x, ids, plain: math.sqrt(x[:1, 0].reshape(())),
    "list of rows": lambda x, ids, plain: x[[0, 1]],
    "rows by ids": lambda x, ids, plain: x[ids],
    "rows by numbers": lambda x, ids, plain: x[np.arange(2)],
    "mask": lambda x, ids, plain: x[plain == 0],
    "True": lambda x, ids, plain: x[True],
    "ids beside a slice": lambda x, ids, plain: x[:, ids],
    "bound of a slice": lambda x, ids, plain: x[: ids[:1].reshape(())],
    "concatenate": lambda x, ids, plain: np.concatenate([plain, x]),
    "stack": lambda x, ids, plain: np.stack([x, x]),
    "where": lambda x, ids, plain: np.where(plain > 0, x, plain),
    "einsum": lambda x, ids, plain: np.einsum("ij->i", x),
    "clip": lambda x, ids, plain: np.clip(x, 0, 1),
    "copyto": lambda x, ids, plain: np.copyto(plain, x),
    "zeros_like": lambda x, ids, plain: np.zeros_like(x),
    "assignment": lambda x, ids, plain: x.__setitem__(slice(None), plain),
    "assignment to some columns": lambda x, ids, plain: x.__setitem__((slice(None), slice(2)), 0.0),
    "assignment of integers": lambda x, ids, plain: ids.__setitem__(slice(None), 0),
    "copy of integers": lambda x, ids, plain: ids.copy(),
    "order of columns": lambda x, ids, plain: x.reshape(-1, order="F"),
    "shown": lambda x, ids, plain: str(x),
    "shown in an error": lambda x, ids, plain: f"{x!r}",
    "pickle": lambda x, ids, plain: pickle.dumps(x),
    "deepcopy": lambda x, ids, plain: copy.deepcopy(x),
    "copy.copy": lambda x, ids, plain: copy.copy(x),
    "broadcast, then computed": lambda x, ids, plain: np.broadcast_to(x, (2, 4, 6)) + 1,
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_numpy_would_compute_is_refused(case: str, recorder: Recorder) -> None:
    x, ids = recorder.empty((4, 6)), recorder.empty((4,), np.int64)
    with pytest.raises(CannotRecord):
        REFUSED[case](x, ids, np.ones((4, 6), np.float32))
    assert recorder._calls == []


VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda x: x[1:, :, ::2],
    "row": lambda x: x[1],
    "row by a number of NumPy's": lambda x: x[np.int64(1)],
    "from behind": lambda x: x[:, ::-1],
    "new axis": lambda x: x[:, None],
    "ellipsis": lambda x: x[..., 1:],
    "one number as an array": lambda x: x[1, 2, 3, ...],
    "nothing": lambda x: x[2:],
    "T": lambda x: x.T,
    "transpose": lambda x: x.transpose(0, 2, 1),
    "swapaxes": lambda x: x.swapaxes(1, 2),
    "np.swapaxes": lambda x: np.swapaxes(x, 0, 2),
    "squeeze": lambda x: x[:1].squeeze(),
    "reshape": lambda x: x.reshape(6, 4),
    "reshape as a tuple": lambda x: x.reshape((-1, 2)),
    "reshape of a part": lambda x: x[:, :, 2:].reshape(6, 2),
    "heads": lambda x: x.reshape(2, 3, 2, 2).swapaxes(1, 2),
    "broadcast": lambda x: np.broadcast_to(x[0], (5, 3, 4)),
}


@pytest.mark.parametrize("case", VIEWS)
def test_views_are_those_of_numpy(case: str, recorder: Recorder) -> None:
    x, same = recorder.empty((2, 3, 4)), np.zeros((2, 3, 4), np.float32)
    made, expected = VIEWS[case](x), VIEWS[case](same)
    assert type(made) is RecordedArray and made.dtype == expected.dtype
    assert (made.shape, made.strides) == (expected.shape, expected.strides)
    assert data_address(made) - data_address(x) == data_address(expected) - data_address(same)
    assert recorder._calls == []


def test_the_rows_of_an_array_are_views(recorder: Recorder) -> None:
    x = recorder.empty((3, 4))
    assert [data_address(row) - data_address(x) for row in x] == [0, 16, 32]


@on_linux
def test_no_view_touches_memory_and_a_number_that_is_read_is_seen(recorder: Recorder) -> None:
    x = recorder.empty((2, 3, 4))
    for view in VIEWS.values():
        view(x)
    assert touched(recorder) == 0
    float(x.view(np.ndarray)[0, 0, 0])
    assert touched(recorder) == 1
    with pytest.raises(CannotRecord, match="read or written by NumPy"):
        recorder.finish()


UNASKED: dict[str, Callable[[Any, Any, np.ndarray], Any]] = {
    "array": lambda x, ids, plain: np.array(x),
    "ascontiguousarray": lambda x, ids, plain: np.ascontiguousarray(x.T),
    "assignment": lambda x, ids, plain: plain.__setitem__(slice(None), x),
    "rows by ids": lambda x, ids, plain: plain[ids],
    "take": lambda x, ids, plain: plain.take(ids, 0),
    "dot": lambda x, ids, plain: plain.dot(np.asarray(x).T),
    "a list of arrays": lambda x, ids, plain: np.array([x, x]),
}


@on_linux
@pytest.mark.parametrize("case", UNASKED)
def test_what_numpy_reads_unasked_makes_the_recording_void(case: str, recorder: Recorder) -> None:
    """An array cannot refuse these, but a step recorded with them is not replayed."""
    x, ids = recorder.empty((4, 6)), recorder.empty((4,), np.int64)
    recorder.finish()
    UNASKED[case](x, ids, np.ones((4, 6), np.float32))
    with pytest.raises(CannotRecord, match="read or written by NumPy"):
        recorder.finish()


COPIES: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda x: x.swapaxes(0, 1).reshape(6, 4),
    "reshape of columns": lambda x: x[..., 1:3].reshape(-1),
    "reshape of what is broadcast": lambda x: np.broadcast_to(x[:1], (2, 3, 4)).reshape(-1),
    "copy": lambda x: x.T.copy(),
}


@pytest.mark.parametrize("case", COPIES)
def test_where_there_is_no_view_a_kernel_copies(case: str, recorder: Recorder) -> None:
    from onfoot.recording.replay import Replay

    numbers = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    x = recorder.input((2, 3, 4), np.float32, "x")
    made = COPIES[case](x)
    assert type(made) is RecordedArray and made.flags.c_contiguous and len(recorder._calls) == 1
    recorder.event("copied", made)
    replay, found = Replay(recorder.finish()), []
    replay.inputs()[0][1][...] = numbers
    replay.run(lambda event, array: found.append(array), as_final=False)
    assert (found[0] == COPIES[case](numbers)).all() and found[0].shape == made.shape


def test_numbers_are_filled_in_by_a_kernel(recorder: Recorder) -> None:
    from onfoot.recording.replay import Replay

    x = recorder.input((5,), np.float32, "x")
    y = x.reshape(1, 5).swapaxes(0, 1).copy()
    y[1:3] = 7
    recorder.event("filled", y)
    replay, found = Replay(recorder.finish()), []
    replay.inputs()[0][1][...] = np.arange(5)
    replay.run(lambda event, array: found.append(array), as_final=False)
    assert found[0][:, 0].tolist() == [0, 7, 7, 3, 4]


def test_a_recorder_hears_the_calls_of_its_own_thread_alone() -> None:
    model = POLICIES["gpt2"].model()
    tokens, targets, _ = POLICIES["gpt2"].batch()
    right, results, recorders = model.loss(tokens, targets), [], []

    def work() -> None:
        recorders.append(active.recorder)
        results.append(model.loss(tokens, targets))
        results.append(float(model.logits(tokens)[0, 0, 0]))

    recorder = Recorder(1)
    with recorder.recording():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert active.recorder is recorder and recorder._calls == []
    assert active.recorder is None and recorders == [None]
    assert results == [right, float(model.logits(tokens)[0, 0, 0])]


def test_nothing_is_being_recorded_after_an_error() -> None:
    recorder = Recorder(1)
    for error in (CannotRecord("no"), ValueError("wrong"), KeyboardInterrupt()):
        with pytest.raises(type(error)), recorder.recording():
            raise error
        assert active.recorder is None
    with recorder.recording(), pytest.raises(CannotRecord, match="another step"), Recorder(1).recording():
        pass
    assert active.recorder is None


def test_an_error_in_the_network_while_it_is_recorded_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    model = POLICIES["gpt2"].model()
    tokens, targets, _ = POLICIES["gpt2"].batch()
    right = Policy("gpt2").model("numpy").loss(tokens, targets)

    def fail(*args: Any) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(recorded, "forward_backward", fail)
        with pytest.raises(ZeroDivisionError, match="planted"):
            model.loss_and_grads(tokens, targets)
    assert active.recorder is None and len(model._steps) == 0
    assert model.loss_and_grads(tokens, targets)[0] == pytest.approx(right, rel=1e-6) and len(model._steps) == 1


class Watched(Recorder):
    """Counts the pages of its address space that are in memory when a step has been recorded."""

    seen: list[int]

    def finish(self) -> Any:
        self.seen.append(touched(self))
        return super().finish()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(Watched, "seen", [], raising=False)
    monkeypatch.setattr(recorded, "Recorder", Watched)
    return Watched.seen


@on_linux
@pytest.mark.parametrize("name", POLICIES)
def test_recording_reads_and_writes_nothing(name: str, watched: list[int], on_threads: Callable[[int], None]) -> None:
    policy = POLICIES[name]
    model = policy.model()
    for threads in (1, 2):
        on_threads(threads)
        tokens, targets, options = policy.batch()
        model.loss_and_grads(tokens, targets, **options)
        model.loss(tokens, targets, segments=options.get("segments"))
    assert watched == [0] * len(watched) and len(watched) >= len(model._steps)


def test_policies_are_recorded() -> None:
    """All but those that are known not to be."""
    without = []
    for name, policy in POLICIES.items():
        model = policy.model()
        tokens, targets, options = policy.batch()
        model.loss_and_grads(tokens, targets, **options)
        model.loss(tokens, targets, segments=options.get("segments"))
        without += [] if len(model._steps) == 2 else [name]
    assert set(without) <= {"gpt2 lora on parts"}


@on_linux
@pytest.mark.parametrize(
    "policy",
    [
        Policy("gpt2"),
        Policy("gpt2", change=lora()),
        Policy("llama"),
        Policy("llama", {"tie_word_embeddings": True}, lora()),
        Policy("llama", change=quantized("Q8_0")),
    ],
    ids=["gpt2", "gpt2 lora", "llama", "llama tied, lora", "llama Q8_0"],
)
@pytest.mark.parametrize("prompts", [[[1, 2, 3]], [[1, 2, 3], [4], [5, 6]]], ids=["one", "of several lengths"])
def test_recording_a_token_reads_and_writes_nothing(
    policy: Policy, prompts: list[list[int]], watched: list[int]
) -> None:
    model = policy.model()
    tokens = model.generate([np.array(p) for p in prompts], 5, temperature=0)
    twin = policy.model("numpy").generate([np.array(p) for p in prompts], 5, temperature=0)
    assert [one.tolist() for one in tokens] == [one.tolist() for one in twin]
    assert watched == [0]
