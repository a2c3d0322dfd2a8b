"""The kernels' self-test: those that do not match their formula on this CPU are replaced by NumPy."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine_code import USE, in_cache, python, write

from onfoot import kernels
from onfoot.kernels import compiler, library, self_test

pytest.importorskip("numba")
TABLE = kernels.table()
FILES = {name: file for file in self_test.COMPARISONS for name in kernels.names(file)}


def slightly_off(result: Any) -> Any:
    """The same result with every float a thousandth too large."""
    if isinstance(result, np.ndarray) and result.dtype == np.float32:
        return result * np.float32(1.001)
    if isinstance(result, np.floating | float):
        return result * 1.001
    if isinstance(result, dict):
        return {name: slightly_off(value) for name, value in result.items()}
    if type(result) in (tuple, list):
        return type(result)(map(slightly_off, result))
    return result  # what a pair saved


def test_kernels_that_are_right_are_not_refused() -> None:
    assert {file: wrong for file in self_test.COMPARISONS if (wrong := self_test.disagreement(TABLE, file))} == {}
    assert library.code().refused == {}


def test_every_kernel_is_called_in_its_files_proof() -> None:
    called: set[str] = set()

    def noted(name: str) -> Callable[..., Any]:
        return lambda *args, **others: (called.add(name), TABLE[name](*args, **others))[1]

    watched = {name: noted(name) for name in TABLE}
    for file in self_test.COMPARISONS:
        called.clear()
        assert self_test.disagreement(watched, file) == ""
        assert {*kernels.names(file)} <= called
    assert {*FILES} == {*TABLE} and {*self_test.COMPARISONS} == {*kernels.FILES}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_kernel_that_is_slightly_wrong_is_refused(name: str) -> None:
    def wrong(*args: Any, **others: Any) -> Any:
        written_by = {"adamw_updates": lambda: args[0][0][0], "add_noise": lambda: args[0]}
        written_by["embedding_add_backward"] = lambda: args[2]
        if name in written_by:  # these write into what they are given
            TABLE[name](*args, **others)
            written_by[name]()[...] *= np.float32(1.001)
            return None
        return slightly_off(TABLE[name](*args, **others))

    said = self_test.disagreement({**TABLE, name: wrong}, FILES[name])
    assert said.partition(":")[0] in (name, name.rpartition("_")[0]), said
    assert 1e-4 < float(said.rpartition(": ")[2]) < 1e-2


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_refused(value: float) -> None:
    def wrong(*args: Any) -> Any:
        y, saved = TABLE["layer_norm_forward"](*args)
        y[-1, -1] = value
        return y, saved

    assert self_test.disagreement({**TABLE, "layer_norm_forward": wrong}, "layer_norm").startswith("layer_norm: y: ")


def test_a_kernel_that_raises_is_refused() -> None:
    def wrong(*args: Any) -> Any:
        raise RuntimeError("no such instruction\nand more")

    assert self_test.disagreement({**TABLE, "rope_forward": wrong}, "rope") == "RuntimeError: no such instruction"


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_what_may_pass_is_no_verdict(error: type[Exception]) -> None:
    def wrong(*args: Any) -> Any:
        raise error("for now")

    with pytest.raises(error):
        self_test.disagreement({**TABLE, "rope_forward": wrong}, "rope")


def test_what_builds_on_a_refused_file_is_refused_with_it() -> None:
    refused = self_test.with_dependents({"linear": "linear: dx: 3e-02"})
    assert refused.keys() >= {"linear", "logits_loss", "lora", "rms_norm"}
    assert {refused[file] for file in refused if file != "linear"} == {"linear"}
    assert refused.keys().isdisjoint({"activation", "attention", "cached_attention", "layer_norm", "rope", "swiglu"})
    assert self_test.with_dependents({"attention": "x"}).keys() >= {"cached_attention", "grouped_query"}
    assert self_test.with_dependents({"layer_norm": "x"}) == {
        "layer_norm": "x",
        "rms_norm": "layer_norm",
        "tangents_norm": "layer_norm",
    }
    assert self_test.with_dependents({"swiglu": "x"}) == {"swiglu": "x", "tangents_activation": "swiglu"}
    assert self_test.with_dependents({"tangents_loss": "x"}) == {"tangents_loss": "x"}
    assert self_test.with_dependents({}) == {}


def test_a_refused_file_is_left_to_numpy_with_one_line(tmp_path: Path) -> None:
    refused = self_test.with_dependents({"linear": "linear: dx: 3e-02"})
    in_cache(tmp_path, library.code()._replace(refused=refused))
    code = USE + (
        "print(ours.engine.linear_forward is truth.engine.linear_forward, ours.engine.has('logits_loss_forward'), "
        "ours.engine.has('cached_attention'), len(ours._steps))"
    )
    done = python(code, tmp_path)
    assert done.stdout.split() == ["numba", "True", "True", "False", "True", "0"]  # what NumPy computes is not recorded
    others = ", ".join(map(repr, sorted({*refused} - {"linear"})))
    assert "'logits_loss', 'lora'" in others
    assert done.stderr == (
        "onfoot: the kernels of 'linear' do not match their formula on this CPU (linear: dx: 3e-02); falling back to "
        f"NumPy for them and for {others}, which build on them\n"
    )


def test_a_formula_that_kernels_do_not_follow_refuses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test after compiling, in a package whose formula was changed but whose machine code was not."""
    shutil.copytree(library.PACKAGE, tmp_path / "onfoot", ignore=shutil.ignore_patterns("__pycache__", "static"))
    formula = tmp_path / "onfoot" / "ops" / "layer_norm.py"
    changed = formula.read_text().replace("def layer_norm_backward(", "def layer_norm_backward_of_before(")
    formula.write_text(
        changed + "\n\ndef layer_norm_backward(dy, saved):\n"
        "    dx, *others = layer_norm_backward_of_before(dy, saved)\n    return dx * 1.01, *others\n"
    )
    monkeypatch.setattr(compiler, "IMPORTS", tmp_path)
    folder = write(tmp_path / "work")
    proven = compiler.prove(folder, library.code()._replace(refused={}))
    assert proven.refused == {
        "layer_norm": "layer_norm: dx: 1e-02",
        "rms_norm": "layer_norm",
        "tangents_norm": "layer_norm",
    }


def test_a_proof_that_cannot_begin_is_an_error_and_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(module: str, work: Path) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(["sh", "-c", "echo MemoryError >&2; exit 1"], text=True, **pipes)

    monkeypatch.setattr(compiler, "start", start)
    with pytest.raises(ImportError, match="MemoryError"):
        compiler.prove(tmp_path, library.code())
