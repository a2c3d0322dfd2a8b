"""A function that crashes, hangs, exits or prints without end is reported like any other; the checker goes on."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot.check
from onfoot.check import IsolatedFunction
from onfoot.check.isolated import DiedError, RaisedError
from onfoot.check.wire import decode, encode, receive, send
from onfoot.cli import app

KERNELS = """
import ctypes, os, sys, threading, time
import numpy as np

def gradients(x, weight, bias, dout):
    return dout @ weight.T, np.einsum("bti,bto->io", x, dout), dout.sum(axis=(0, 1))

def right(x, weight, bias, dout):
    return gradients(x, weight, bias, dout)

def wrong(x, weight, bias, dout):
    dx, dweight, dbias = gradients(x, weight, bias, dout)
    return dx, dweight, dout.mean(axis=(0, 1))

def crash_on_one_token(x, weight, bias, dout):
    if x.shape[1] == 1:
        ctypes.string_at(0)
    return gradients(x, weight, bias, dout)

def always_crash(x, weight, bias, dout):
    ctypes.string_at(0)

def abort(x, weight, bias, dout):
    os.abort()

def hang_on_one_token(x, weight, bias, dout):
    while x.shape[1] == 1:
        time.sleep(0.01)
    return gradients(x, weight, bias, dout)

def native_hang(x, weight, bias, dout):
    return sum(range(10**12))

def leave(x, weight, bias, dout):
    os._exit(0)

def leave_politely(x, weight, bias, dout):
    sys.exit(0)

def interrupt(x, weight, bias, dout):
    raise KeyboardInterrupt

def print_for_ever(x, weight, bias, dout):
    while True:
        print("again and again")

def print_once(x, weight, bias, dout):
    print("from Python")
    os.write(1, b"from below\\n")
    return gradients(x, weight, bias, dout)

def ask(x, weight, bias, dout):
    return input()

def overwrite(x, weight, bias, dout):
    found = gradients(x, weight, bias, dout)
    x *= 2
    return found

def reshape(x, weight, bias, dout):
    found = gradients(x, weight, bias, dout)
    x.shape = (x.size,)
    return found

def close_everything(x, weight, bias, dout):
    os.closerange(0, 100)
    return gradients(x, weight, bias, dout)

def with_a_thread(x, weight, bias, dout):
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return gradients(x, weight, bias, dout)

def text(x, weight, bias, dout):
    dx, dweight, dbias = gradients(x, weight, bias, dout)
    return dx, dweight, "dbias"

def numbers(x, weight, bias, dout):
    return [g.tolist() for g in gradients(x, weight, bias, dout)]

def some(x, weight, bias, dout):
    return {"dbias": dout.sum(axis=(0, 1))}

def picky(x, weight, bias, dout):
    assert x.shape[1] % 8 == 0, "tokens must be a multiple of 8"
    return gradients(x, weight, bias, dout)
picky.sizes = {"tokens_multiple_of": 8}

def raising(x, weight, bias, dout):
    return np.zeros(3) @ np.zeros(4)

def tensors(x, weight, bias, dout):
    import torch
    assert isinstance(x, torch.Tensor)
    found = dout @ weight.T, torch.einsum("bti,bto->io", x, dout), dout.sum((0, 1))
    x.mul_(2)
    return found

def print_much(x, weight, bias, dout):
    for _ in range(32 if x.shape[1] == 1 else 0):
        sys.stdout.write("x" * 2**20)
    return gradients(x, weight, bias, dout)

def print_like_a_crash(x, weight, bias, dout):
    print("Fatal Python error: this is only a line")
    return gradients(x, weight, bias, dout)

def note(pid):
    with open("children", "a") as file:
        file.write(f"{pid}\\n")

def fork(x, weight, bias, dout):
    if pid := os.fork():
        note(pid)
    return gradients(x, weight, bias, dout)

def leave_a_child(x, weight, bias, dout):
    if x.shape[1] == 1:
        pid = os.fork()
        time.sleep(0 if pid else 1000)
        note(pid)
    return gradients(x, weight, bias, dout)

def stop(x, weight, bias, dout):
    os.kill(os.getpid(), 19)

def terminate(x, weight, bias, dout):
    os.kill(os.getpid(), 15)

def recurse(x, weight, bias, dout):
    return recurse(x, weight, bias, dout)

def raise_on_every_rounding(x, weight, bias, dout):
    np.seterr(all="raise")
    np.random.seed(0)
    return gradients(x, weight, bias, dout)

def replace_numpy(x, weight, bias, dout):
    found = gradients(x, weight, bias, dout)
    np.copy = np.asarray = np.shape = None
    return found

def close_stdout(x, weight, bias, dout):
    sys.stdout.close()
    return gradients(x, weight, bias, dout)

def generator(x, weight, bias, dout):
    yield from gradients(x, weight, bias, dout)

def huge(x, weight, bias, dout):
    _, dweight, dbias = gradients(x, weight, bias, dout)
    return np.broadcast_to(0.0, (10**5, 10**5, 10**5)), dweight, dbias

def complex_numbers(x, weight, bias, dout):
    return [g.astype(complex) for g in gradients(x, weight, bias, dout)]

def masked(x, weight, bias, dout):
    dx, dweight, dbias = gradients(x, weight, bias, dout)
    return dx, dweight, np.ma.masked_array(dbias, np.arange(len(dbias)) == 0)

def objects(x, weight, bias, dout):
    return [g.astype(object) for g in gradients(x, weight, bias, dout)]

def inside_itself(x, weight, bias, dout):
    found = list(gradients(x, weight, bias, dout))
    found[2] = found
    return found

class Silent(BaseException):
    def __str__(self):
        raise ValueError

def raise_what_cannot_be_printed(x, weight, bias, dout):
    raise Silent
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kernels.py").write_text(KERNELS)
    return tmp_path


def run(*arguments: str):
    return CliRunner().invoke(app, ["check", *arguments])


# name -> exit status, words of the report
REPORTED = {
    "right": (0, ["✓ passes: every gradient agrees"]),
    "wrong": (1, ["✗ wrong: dbias", "B·n"]),
    "crash_on_one_token": (
        1,
        ["crash: its process died of SIG", "(kernels.py, line 17)", "x (1, 1, ", "(“one token”)"],
    ),
    "always_crash": (1, ["crash: its process died of SIG", "(“the first call”)", "(“one token”)", "not run, because"]),
    "abort": (1, ["crash: its process died of SIGABRT (kernels.py, line 24)"]),
    "hang_on_one_token": (1, ["timeout: it did not return within 1 seconds (kernels.py, line ", "(“one token”)"]),
    "native_hang": (1, ["timeout: it did not return within 1 seconds (kernels.py, line 32)", "(“the first call”)"]),
    "leave": (1, ["exit: it ended the process with status 0, as os._exit does", "(“the first call”)"]),
    "leave_politely": (1, ["raises: it raises SystemExit: 0 (kernels.py, line 38)"]),
    "interrupt": (1, ["raises: it raises KeyboardInterrupt: (kernels.py, line 41)"]),
    "print_for_ever": (1, ["timeout: it did not return within 1 seconds"]),
    "ask": (1, ["raises: it raises EOFError"]),
    "overwrite": (0, ["note: it modifies its argument x in place (kernels.py, line ", "✓ passes"]),
    "reshape": (0, ["note: it modifies its argument x in place: ", "✓ passes"]),
    "close_everything": (1, ["✗ fails"]),
    "with_a_thread": (0, ["✓ passes"]),
    "text": (1, ["type: dbias is a value of type str; expected a floating-point array"]),
    "numbers": (0, ["✓ passes"]),
    "some": (0, ["not given, and not judged: dx, dweight", "✓ passes: dbias agrees to rounding"]),
    "picky": (0, ["✓ passes"]),
    "raising": (1, ["raises: it raises ValueError: matmul", "(kernels.py, line "]),
    "tensors": (0, ["PyTorch tensors", "✓ passes", "note: it modifies its argument x in place (kernels.py, line "]),
    "print_much": (0, ["✓ passes"]),
    "print_like_a_crash": (0, ["✓ passes"]),
    "stop": (1, ["timeout: it did not return within 1 seconds", "(“the first call”)"]),
    "terminate": (1, ["crash: its process died of SIGTERM"]),
    "recurse": (1, ["raises: it raises RecursionError: maximum recursion depth exceeded", "(kernels.py, line "]),
    "raise_on_every_rounding": (0, ["✓ passes"]),
    "replace_numpy": (0, ["note: it replaces numpy.copy: whoever uses it afterwards", "✓ passes"]),
    "close_stdout": (0, ["✓ passes"]),
    "generator": (1, ["count: it returns a value of type generator; expected 3: dx, dweight, dbias"]),
    "huge": (1, ["shape: dx has shape (100000, 100000, 100000); expected ("]),
    "complex_numbers": (1, ["type: dx is an array of complex128; expected a floating-point array"]),
    "masked": (1, ["nan: dbias: 1 of ", " entries are nan or infinite"]),
    "objects": (1, ["type: dx is an array of object; expected a floating-point array"]),
    "inside_itself": (1, ["raises: it raises RecursionError"]),
    "raise_what_cannot_be_printed": (1, ["raises: it raises Silent: (kernels.py, line "]),
}


VARIATIONS = {  # of what another function does, too
    *("always_crash", "leave_politely", "ask", "reshape", "close_everything", "with_a_thread", "text", "numbers"),
    *("print_much", "print_like_a_crash", "stop", "recurse", "raise_on_every_rounding", "close_stdout", "huge"),
    *("complex_numbers", "objects", "inside_itself"),
}


@pytest.mark.parametrize(
    "function", [pytest.param(name, marks=pytest.mark.slow if name in VARIATIONS else []) for name in REPORTED]
)
def test_whatever_a_function_does_there_is_a_report(here: Path, function: str) -> None:
    status, words = REPORTED[function]
    arrays = ["--arrays", "torch" if function == "tensors" else "numpy"]
    seconds = "1" if "timeout" in words[0] else "60"
    result = run(f"kernels.py:{function}", "--layer", "linear", "--timeout", seconds, "--dtype", "float64", *arrays)
    text = " ".join(result.stdout.split())
    assert result.exit_code == status, result.output
    assert [word for word in words if word not in text] == []


def test_a_hang_in_float32_is_told_apart_from_what_passed_in_float64(here: Path) -> None:
    code = "from kernels import gradients\n\ndef f(x, *more):\n    while x.dtype == 'float32':\n        pass\n"
    (here / "narrow.py").write_text(f"{code}    return gradients(x, *more)\n")
    small = ["--layer", "linear", "--tokens", "3", "--width", "4", "--timeout", "1"]
    text = " ".join(run("narrow.py:f", *small).stdout.split())
    assert "timeout: it did not return within 1 seconds (narrow.py, line " in text
    assert "(“odd sizes” in float32)" in text and "not run in float32, because the function hung" in text


def test_a_crash_in_one_case_does_not_hide_the_others(here: Path) -> None:
    report = json.loads(run("kernels.py:crash_on_one_token", "--layer", "linear", "--json").stdout)
    assert [case["case"] for case in report["cases"] if not case["ok"]] == ["one token"]
    assert len(report["cases"]) > 10 and report["wrong"] == []


def test_what_is_printed_goes_to_the_standard_error_and_has_a_limit(here: Path) -> None:
    result = run("kernels.py:print_once", "--layer", "linear", "--json", "--dtype", "float64")
    assert result.exit_code == 0 and json.loads(result.stdout)["passed"] is True
    assert "from Python" in result.stderr and "from below" in result.stderr
    result = run("kernels.py:print_for_ever", "--layer", "linear", "--timeout", "1")
    assert "again" in result.stderr and len(result.stderr) < 30_000
    assert "the function prints more; the rest is not shown" in result.stderr


IMPORTS = {
    "import os; os._exit(3)": "cannot import bad.py: it ended the process with status 3",
    "import ctypes; ctypes.string_at(0)": "cannot import bad.py: its process died of SIG",
    "raise SystemExit(0)": "cannot import bad.py: SystemExit: 0",
    "def f(:": "cannot import bad.py: SyntaxError",
    "x = 1": "cannot choose a function in bad.py: it defines no public function",
}


@pytest.mark.parametrize("code", IMPORTS)
def test_a_file_that_cannot_be_imported_ends_with_status_2(here: Path, code: str) -> None:
    (here / "bad.py").write_text(code)
    result = run("bad.py", "--layer", "linear")
    assert result.exit_code == 2 and result.stdout == ""
    assert IMPORTS[code] in " ".join(result.stderr.split())


def test_a_file_that_hangs_on_import_is_ended(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "bad.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr("onfoot.check.isolated.IMPORT_SECONDS", 1)
    with pytest.raises(
        ValueError, match=r"cannot import bad.py: it did not return within 1 seconds \(bad.py, line 2\)"
    ):
        IsolatedFunction("bad.py").load()


def test_without_isolation_the_function_runs_in_this_process(here: Path) -> None:
    (here / "own_kernels.py").write_text(KERNELS)
    (here / "mine.py").write_text(
        "import os\nfrom own_kernels import right\ndef f(*x):\n    os.environ['SEEN'] = 'yes'\n    return right(*x)\n"
    )
    assert run("mine.py:f", "--layer", "linear").exit_code == 0 and "SEEN" not in os.environ
    assert run("mine.py:f", "--layer", "linear", "--no-isolated").exit_code == 0
    assert os.environ.pop("SEEN") == "yes"


INVALID = {
    "--no-isolated --timeout 3": "--timeout needs --isolated",
    "--timeout 0": "timeout must be > 0 seconds, got 0",
    "--tokens many": "--tokens must be a number or several with commas, got 'many'",
    "--tokens -3": "tokens must be a number >= 1",
    "--heads 3": "layer linear has no size heads; its sizes are batch, tokens, width",
}


@pytest.mark.parametrize("options", INVALID)
def test_invalid_options_end_with_status_2(here: Path, options: str) -> None:
    result = run("kernels.py:right", "--layer", "linear", *options.split())
    assert result.exit_code == 2 and result.stdout == ""
    assert INVALID[options] in " ".join(result.stderr.split())


def test_sizes_on_the_command_line(here: Path) -> None:
    options = ["--tokens", "8,16", "--width", "24", "--batch", "3", "--json"]
    report = json.loads(run("kernels.py:picky", "--layer", "linear", *options).stdout)
    shapes = {tuple(case["shapes"]["x"]) for case in report["cases"]}
    assert report["passed"] and shapes == {(3, 8, 24), (3, 16, 24)}


# The function from Python


def test_an_isolated_function_can_be_called_and_checked(here: Path) -> None:
    with IsolatedFunction("kernels.py:wrong", timeout=20) as backward:
        report = onfoot.check.linear(backward, seed=3)
        x = np.ones((1, 2, 3))
        dx, _, dbias = backward(x, np.ones((3, 2)), np.ones(2), np.ones((1, 2, 2)))
        process = backward.process
    assert report.wrong == ["dbias"] and report.function == "wrong"
    assert dx.tolist() == [[[2.0] * 3] * 2] and dbias.tolist() == [1.0, 1.0]
    assert process.poll() is not None


def test_a_process_that_died_is_started_again(here: Path) -> None:
    zeros = [np.zeros((2, 2)), np.zeros(2)]
    with IsolatedFunction("kernels.py:crash_on_one_token") as backward:
        for _ in range(2):
            with pytest.raises(DiedError, match="died of") as death:
                backward(np.zeros((1, 1, 2)), *zeros, np.zeros((1, 1, 2)))
            assert death.value.kind == "crash"
            assert len(backward(np.zeros((1, 3, 2)), *zeros, np.zeros((1, 3, 2)))) == 3
    with IsolatedFunction("kernels.py:raising") as backward, pytest.raises(RaisedError, match="ValueError: matmul"):
        backward(*zeros, *zeros)


def test_tensors_go_to_the_process_and_come_back(here: Path) -> None:
    torch = pytest.importorskip("torch")
    x, weight, bias, dout = (torch.ones(shape, dtype=torch.float64) for shape in ((1, 2, 3), (3, 2), (2,), (1, 2, 2)))
    with IsolatedFunction("kernels.py:tensors") as backward:
        dx, _, dbias = backward(x, weight, bias, dout)
    assert isinstance(dx, torch.Tensor) and dbias.tolist() == [2.0, 2.0]


def ends(pid: int) -> bool:
    """Whether a process ends within ten seconds; it may wait for whoever adopted it to collect it."""
    for _ in range(1000):
        stat = Path(f"/proc/{pid}/stat")
        try:
            os.kill(pid, 0)
            if stat.exists() and ") Z " in stat.read_text():
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("function", ["fork", "leave_a_child"])
def test_processes_that_the_function_starts_end_with_the_check(here: Path, function: str) -> None:
    assert run(f"kernels.py:{function}", "--layer", "linear", "--dtype", "float64").exit_code == 0
    children = [int(line) for line in (here / "children").read_text().split()]
    assert len(children) > (10 if function == "fork" else 1)
    assert all(ends(pid) for pid in children)


def test_a_killed_checker_leaves_no_process_behind(here: Path) -> None:
    code = (
        "import os, signal, time\nfrom onfoot.check import IsolatedFunction\n"
        "f = IsolatedFunction('kernels.py:right'); f.load()\nprint(f.process.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert ends(child)


# The messages


def sent(value: object) -> object:
    arrays: list[np.ndarray] = []
    stream = io.BytesIO()
    send(stream, {"value": encode(value, arrays)}, arrays)
    stream.seek(0)
    header, received = receive(stream)
    return decode(header["value"], received)


def test_values_arrive_as_they_were_sent() -> None:
    for x in (
        np.arange(6.0).reshape(2, 3).T,
        np.float32([1, np.nan, np.inf]),
        np.zeros((0, 3)),
        np.int64([1]),
        np.ones((), complex),
    ):
        got = sent(x)
        assert isinstance(got, np.ndarray)
        assert got.dtype == x.dtype and got.shape == x.shape and got.tobytes() == np.ascontiguousarray(x).tobytes()
    assert sent((None, [1, 2.5], {"dx": True}, "text")) == (None, [1, 2.5], {"dx": True}, "text")
    opaque = sent((object(), np.array([None], dtype=object)))
    assert type(opaque[0]).__name__ == "object" and opaque[1].dtype == "object"  # type: ignore[index]
    bfloat16 = pytest.importorskip("torch").ones(3).bfloat16()
    assert sent(bfloat16).dtype == np.float32  # type: ignore[attr-defined]


def test_what_is_not_a_message_ends_the_stream_and_is_never_unpickled() -> None:
    objects = io.BytesIO()
    np.save(objects, np.array([print], dtype=object), allow_pickle=True)
    blob = objects.getvalue()
    for bad in (
        b"",
        b"hello",
        b"x" * 100,
        struct.pack(">QQ", 2, len(blob)) + b"{}" + blob,
        struct.pack(">QQ", 2, 0) + b"{,",
    ):
        with pytest.raises(EOFError):
            receive(io.BytesIO(bad))
