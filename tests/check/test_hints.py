"""A report of a function that cannot be judged says what may help: sizes, another layer, something to judge."""

from __future__ import annotations

import numpy as np
import pytest

import onfoot.check
from onfoot.check.load import load_object


def test_a_function_for_certain_sizes_is_told_how_to_choose_them() -> None:
    def backward(x, dout):
        assert x.shape[-1] == 64, "width must be 64"
        return dout * (x > 0)

    report = onfoot.check.relu(backward, dtypes="float64")
    assert not report.passed
    assert "note: if it takes certain sizes only: --width 64, or a declaration `sizes`" in str(report)
    assert onfoot.check.relu(backward, dtypes="float64", width=64).passed


def test_a_size_may_be_named_by_its_letter_or_not_at_all() -> None:
    def lettered(x, dout):
        assert x.shape[1] % 16 == 0, "T must be a multiple of 16"

    def bare(x, dout):
        if x.shape[1] % 16:
            raise AssertionError  # as a bare assert does

    report = onfoot.check.relu(lettered, dtypes="float64")
    assert any(note.startswith("if it takes certain sizes only: --tokens 16, or") for note in report.warnings)
    report = onfoot.check.relu(bare, dtypes="float64")
    assert any(note.startswith("if it asserts certain sizes: --batch, --tokens, --width") for note in report.warnings)


def test_a_function_of_another_layer_is_told_which() -> None:
    def layer_norm_backward(x, weight, bias, dout):
        return dout, dout.sum((0, 1)), dout.sum((0, 1))

    report = onfoot.check.rms_norm(layer_norm_backward, dtypes="float64")
    assert not report.passed and "give --layer layer_norm if it is meant" in str(report)


def test_an_unfilled_template_has_nothing_to_judge() -> None:
    report = onfoot.check.linear(lambda x, weight, bias, dout: (None, None, None), dtypes="float64")
    assert report.verdict == "fails: nothing to judge yet: it returns None; begin with dx"


HUGE = [("gelu", {"tokens": 10**8}), ("linear", {"tokens": 64, "width": 10**5}), ("attention", {"tokens": 10**5})]


@pytest.mark.parametrize(("layer", "sizes"), HUGE)
def test_huge_sizes_are_refused_before_anything_is_drawn(layer: str, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"arrays of one case would have about .* entries; at most 6e\+07 are checked"):
        getattr(onfoot.check, layer)(lambda *x: x, **sizes)


def test_large_sizes_are_not_refused() -> None:
    assert onfoot.check.relu(lambda x, dout: dout * (x > 0), tokens=1, batch=1, width=4096, dtypes="float64").passed


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ValueError, match=r"no file or module before the colon in .:attn.; give module:name"):
        load_object(":attn")
    with pytest.raises(ValueError, match=r"width must be a number >= 1 or several of them, got 0$"):
        onfoot.check.relu(np.abs, width=[0])
