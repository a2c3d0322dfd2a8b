"""Problems other than wrong values are reported by kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from planted.attention import all_heads

from onfoot.check import attention, embedding, gradients, linear, softmax_cross_entropy
from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS
from onfoot.check.report import LayerReport


def right(q, k, v, dout):
    return all_heads(q, k, v, dout, True)


def kinds(report: LayerReport) -> set[str]:
    return {p.kind for o in report.failed for p in o.problems}


def raising(q, k, v, dout):
    raise RuntimeError("no backward today\nsecond line")


def one_of_an_unknown_shape(q, k, v, dout):
    return right(q, k, v, dout)[0].sum(axis=-1)


def nothing(q, k, v, dout):
    return None


def only_none(q, k, v, dout):
    return None, None, None


def unknown_names(q, k, v, dout):
    return {"dq": right(q, k, v, dout)[0], "hidden": k}


def not_always(q, k, v, dout):
    return right(q, k, v, dout)[: 2 if len(q) == 1 else 3]


def with_none(q, k, v, dout):
    dq, _, dv = right(q, k, v, dout)
    return dq, None, dv


def with_text(q, k, v, dout):
    dq, dk, _ = right(q, k, v, dout)
    return dq, dk, "dv"


def integers(q, k, v, dout):
    return tuple(g.astype(int) for g in right(q, k, v, dout))


def complex_numbers(q, k, v, dout):
    return tuple(g.astype(complex) for g in right(q, k, v, dout))


def flattened(q, k, v, dout):
    dq, dk, dv = right(q, k, v, dout)
    return dq, dk, dv.reshape(dv.shape[0], -1)


def nan(q, k, v, dout):
    dq, dk, dv = right(q, k, v, dout)
    dk[..., 0, 0] = np.nan
    return dq, dk, dv


def infinite(q, k, v, dout):
    dq, dk, dv = right(q, k, v, dout)
    dv[0, 0, 0] = np.inf
    return dq, dk, dv


def mutating(q, k, v, dout):
    found = right(q, k, v, dout)
    q *= 2
    return found


def random(q, k, v, dout):
    dq, dk, dv = right(q, k, v, dout)
    return dq, dk, dv * (1 + 1e-4 * np.random.default_rng().random())


def leaving(q, k, v, dout):
    raise SystemExit(0)


def reshaping(q, k, v, dout):
    found = right(q, k, v, dout)
    q.shape = (q.size,)
    return found


def remembering(q, k, v, dout):
    """Adds to the previous result, like gradients that are not zeroed."""
    found = right(q, k, v, dout)
    key = q.tobytes()
    remembered[key] = (
        found if key not in remembered else tuple(a + b for a, b in zip(found, remembered[key], strict=True))
    )
    return remembered[key]


remembered: dict[bytes, Any] = {}


def a_generator(q, k, v, dout):
    yield from right(q, k, v, dout)


def one_stack(q, k, v, dout):
    return [right(q, k, v, dout)]


def objects(q, k, v, dout):
    dq, dk, dv = right(q, k, v, dout)
    return dq, dk, dv.astype(object)


def masked(q, k, v, dout):
    dq, dk, dv = right(q, k, v, dout)
    return dq, dk, np.ma.masked_array(dv, np.arange(dv.size).reshape(dv.shape) == 0)


def huge(q, k, v, dout):
    return np.broadcast_to(0.0, (10**5, 10**5, 10**5)), *right(q, k, v, dout)[1:]


def huge_alone(q, k, v, dout):
    return np.broadcast_to(0.0, (10**5, 10**5, 10**5))


def inside_itself(q, k, v, dout):
    found = list(right(q, k, v, dout))
    found[2] = found
    return found


class NoDtype:
    @property
    def dtype(self):
        raise RuntimeError("no dtype today")


def unreadable(q, k, v, dout):
    return *right(q, k, v, dout)[:2], NoDtype()


class Silent(BaseException):
    def __str__(self):
        raise ValueError


def silent(q, k, v, dout):
    raise Silent


def recursive(q, k, v, dout):
    return recursive(q, k, v, dout)


def too_few_arguments(q, k, v):
    return q, k, v


REPORTED: dict[Callable[..., Any], tuple[str, str]] = {
    raising: ("raises", "it raises RuntimeError: no backward today (test_bad_input.py, line "),
    one_of_an_unknown_shape: ("count", "it returns an array of float64; expected 3: dq, dk, dv"),
    nothing: ("count", "it returns None; expected 3"),
    only_none: ("count", "nothing to judge yet: it returns None; begin with dq"),
    unknown_names: ("count", "it returns hidden; expected dq, dk, dv"),
    not_always: ("count", "it does not return dv"),
    with_text: ("type", "dv is a value of type str"),
    integers: ("type", "dq is an array of int64"),
    complex_numbers: ("type", "dq is an array of complex128"),
    flattened: ("shape", "dv has shape (5, "),
    nan: ("nan", "dk: 20 of 560 entries are nan or infinite"),
    infinite: ("nan", "dv: "),
    random: ("random", "dv: a second call with the same inputs differs by "),
    leaving: ("raises", "it raises SystemExit: 0"),
    remembering: ("random", "dq: a second call with the same inputs differs by 5.0e-01"),
    a_generator: ("count", "it returns a value of type generator; expected 3"),
    one_stack: ("count", "it returns a value of type list; expected 3"),
    objects: ("type", "dv is an array of object"),
    masked: ("nan", "dv: 1 of 560 entries are nan or infinite"),
    huge: ("shape", "dq has shape (100000, 100000, 100000); expected ("),
    huge_alone: ("count", "it returns an array of float64; expected 3"),
    inside_itself: ("type", "dv is a value of type list; expected a floating-point array"),
    unreadable: ("type", "what it returns cannot be read: RuntimeError: no dtype today"),
    silent: ("raises", "it raises Silent: (test_bad_input.py, line "),
    recursive: ("raises", "it raises RecursionError: maximum recursion depth exceeded"),
    too_few_arguments: (
        "form",
        "it takes no upstream gradient, and its result on NumPy arrays cannot be differentiated",
    ),
}


@pytest.mark.parametrize("function", REPORTED, ids=lambda f: f.__name__)
def test_each_kind_of_problem_is_reported(function: Callable[..., Any]) -> None:
    kind, message = REPORTED[function]
    report = attention(function, arrays="numpy")
    text = " ".join(str(report).split())
    assert not report.passed
    assert kinds(report) == {kind}
    assert (f"{kind}: " in text or message.startswith("nothing")) and message in text
    assert "(q, k, v, dout) → dq, dk, dv" in text  # the contract is shown above


def replacing_numpy(q, k, v, dout):
    found = right(q, k, v, dout)
    np.exp, np.linalg.norm = np.sin, np.cos
    return found


WARNED: dict[Callable[..., Any], str] = {
    replacing_numpy: "note: it replaces numpy.exp: whoever uses it afterwards gets other values",
    with_none: "not given, and not judged: dk",
    mutating: "note: it modifies its argument q in place (test_bad_input.py, line ",
    reshaping: "note: it modifies its argument q in place: ",
}


@pytest.mark.parametrize("function", WARNED, ids=lambda f: f.__name__)
def test_right_results_with_a_flaw_pass_with_a_warning(function: Callable[..., Any]) -> None:
    report = attention(function, arrays="numpy")
    assert report.passed, str(report)
    assert WARNED[function] in " ".join(str(report).split())


def test_numpy_and_its_error_state_are_as_before_after_a_check() -> None:
    before, exp, norm = np.geterr(), np.exp, np.linalg.norm

    def backward(q, k, v, dout):
        np.seterr(all="raise")
        return replacing_numpy(q, k, v, dout)

    assert attention(backward, arrays="numpy").passed
    assert (np.geterr(), np.exp, np.linalg.norm) == (before, exp, norm)


def test_an_interrupt_from_the_keyboard_ends_the_check() -> None:
    def backward(q, k, v, dout):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attention(backward)


def test_a_nested_list_alone_in_a_tuple_is_read() -> None:
    def backward(ids, weight, dout):
        dweight = np.zeros_like(weight)
        np.add.at(dweight, ids, dout)
        return (dweight.tolist(),)

    assert embedding(backward, dtypes="float64").passed


@pytest.mark.parametrize("sizes", [{"tokens": 1}, {"tokens": 2, "batch": 1}, {"width": 1}])
def test_the_smallest_sizes_can_be_chosen(sizes: dict[str, int]) -> None:
    def loss(logits, targets, dout):
        y = np.exp(logits - logits.max(-1, keepdims=True))
        y /= y.sum(-1, keepdims=True)
        counted = targets >= 0
        return (y - np.eye(y.shape[-1])[targets.clip(0)]) * counted[..., None] * (dout / counted.sum())

    assert softmax_cross_entropy(loss, strict=True, **sizes).passed


def test_a_table_of_one_row_can_be_checked() -> None:
    def backward(ids, weight, dout):
        dweight = np.zeros_like(weight)
        np.add.at(dweight, ids, dout)
        return dweight

    assert embedding(backward, vocabulary=1).passed


def test_a_mask_with_zero_times_infinity_gets_a_hint() -> None:
    def backward(q, k, v, dout):
        mask = np.tril(np.ones((q.shape[-2], k.shape[-2])))
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + (1 - mask) * -np.inf
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
        a = e / e.sum(axis=-1, keepdims=True)
        da = dout @ v.swapaxes(-1, -2)
        ds = a * (da - (a * da).sum(axis=-1, keepdims=True)) / np.sqrt(q.shape[-1])
        return ds @ k, ds.swapaxes(-1, -2) @ q, a.swapaxes(-1, -2) @ dout

    report = attention(backward)
    assert kinds(report) == {"nan"}
    assert "0 · inf is nan" in str(report)
    assert report.diagnosis is not None and report.diagnosis.findings == []  # nan has too many causes: no diagnosis


def test_a_function_that_raises_in_one_case_only_is_judged_by_the_others() -> None:
    def backward(q, k, v, dout):
        if q.shape[-2] == 1:
            raise ValueError("one token is too few")
        return right(q, k, v, dout)

    report = attention(backward)
    assert [o.case.name for o in report.failed] == ["one token", "one token"]
    assert report.wrong == []
    assert "one token is too few" in str(report)


@pytest.mark.parametrize(("accepted", "refused"), [("float64", "float32"), ("float32", "float64")])
def test_a_dtype_that_the_function_refuses_is_a_note_and_the_other_is_judged(accepted: str, refused: str) -> None:
    def backward(x, weight, bias, dout, factor=1):
        if x.dtype != accepted:
            raise TypeError(f"{accepted} only")
        rows, drows = x.reshape(-1, x.shape[-1]), dout.reshape(-1, dout.shape[-1])
        return factor * dout @ weight.T, rows.T @ drows, drows.sum(axis=0)

    right = check_layer(LAYERS["linear"], backward)
    assert right.passed and {o.dtype for o in right.outcomes} == {accepted}
    assert f"not judged in {refused}: it raises in every case, TypeError: {accepted} only" in " ".join(right.warnings)
    wrong = check_layer(LAYERS["linear"], lambda *a: backward(*a, factor=2))
    assert wrong.wrong == ["dx"] and wrong.diagnosis is not None
    assert [f.name for f in wrong.diagnosis.findings] == ["dx is 2 times too large"]
    assert not check_layer(LAYERS["linear"], backward, strict=True).passed
    assert not check_layer(LAYERS["linear"], backward, dtypes=[refused]).passed


def test_inputs_are_fresh_in_every_call() -> None:
    def backward(x, weight, bias, dout):
        found = dout @ weight.T, np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))
        x[:] = weight[:] = dout[:] = 0
        return found

    report = linear(backward)
    assert report.passed and len(report.warnings) == 3  # x, weight and dout
    assert report.wrong == []  # the values are correct: every call gets fresh copies


def test_lists_and_tuples_and_plain_numbers_are_read() -> None:
    def backward(x, weight, bias, dout):
        dx, dweight, dbias = dout @ weight.T, np.einsum("bti,bto->io", x, dout), dout.sum((0, 1))
        return [dx.tolist(), dweight.tolist(), dbias.tolist()]

    assert linear(backward, dtypes="float64").passed


def test_none_for_an_input_without_gradient_is_ignored() -> None:
    def backward(ids, weight, dout):
        dweight = np.zeros_like(weight)
        np.add.at(dweight, ids, dout)
        return None, dweight

    assert embedding(backward).passed


def test_a_loss_may_be_differentiated_without_an_upstream_gradient() -> None:
    def backward(logits, targets):
        y = np.exp(logits - logits.max(-1, keepdims=True))
        y /= y.sum(-1, keepdims=True)
        y[np.arange(len(y))[:, None], np.arange(y.shape[1]), targets] -= 1
        return y / targets.size

    assert softmax_cross_entropy(backward).passed


def test_options_are_passed_to_a_function_that_has_them() -> None:
    seen = []

    def backward(q, k, v, dout, causal=None):
        seen.append(causal)
        return all_heads(q, k, v, dout, causal)

    assert attention(backward, causal=False).passed
    assert set(seen) == {False}


def test_what_the_function_prints_does_not_reach_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    def backward(q, k, v, dout):
        print("debugging")
        return right(q, k, v, dout)

    assert attention(backward, dtypes="float64").passed
    out, err = capsys.readouterr()
    assert out == "" and "debugging" in err


BAD_CALLS = {
    "no option nonsense": lambda: attention(right, nonsense=1),
    "unknown dtype 'float8'": lambda: attention(right, dtypes=["float8"]),
    "dtypes is empty": lambda: attention(right, dtypes=[]),
    "arrays must be one of auto, numpy, torch, jax, got 'mlx'": lambda: attention(right, arrays="mlx"),
    "'right' of type str cannot be checked as attention; tried a backward function": lambda: attention("right"),
    "layer attention has no layout 'rows'; choose from auto, bthd, sequence": lambda: attention(right, layout="rows"),
    "NumPy has no bfloat16": lambda: attention(right, dtypes="bfloat16", arrays="numpy"),
    "there is nothing to check": lambda: gradients(np.sum, np.sum, [3, "x"]),
    "argument 1 is not a floating-point array": lambda: gradients(np.sum, np.sum, [np.ones(2), 3], wrt=[1]),
    "2 names for 1 gradients": lambda: gradients(np.sum, np.sum, [np.ones(2)], names=["a", "b"]),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_invalid_arguments_raise(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BAD_CALLS[message]()
