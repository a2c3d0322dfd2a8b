"""Runs a user's function in a process of its own, so that a crash, a hang or an exit is an answer like any other.

with IsolatedFunction("kernel.py:backward", timeout=30) as backward:
    print(onfoot.check.attention(backward))
"""

from __future__ import annotations

import contextlib
import inspect
import os
import queue
import re
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.arrays import is_torch
from onfoot.check.forms.form import Expected, FormError
from onfoot.check.wire import as_array, decode, encode, receive, send

TIMEOUT = 30.0  # seconds per call
IMPORT_SECONDS = 60.0  # PyTorch alone may take ten
GRACE = 5.0  # seconds after which a process that should have ended by itself is ended
OUTPUT = 20_000  # characters of the function's own output that are shown
START = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.append(sys.argv[1]); "
    "from onfoot.check.worker import main; main(*sys.argv[2:])"
)
DUMP_LINES = 5_000  # of Python's report of a crash that are read
DUMPS = ("Fatal Python error", "Windows fatal exception", "Timeout (")


class DiedError(Exception):
    """The process ended or hung during a call; `kind` is crash, exit or timeout."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RaisedError(Exception):
    """The function raised: the type, the message and the line."""


class IsolatedFunction:
    """A function in another process; calling it calls that function. A process that died is started again."""

    code = START  # what the process runs
    most_waiting = 0  # answers that wait to be read; 0 is any number

    def __init__(self, target: str, layer: str = "", timeout: float = TIMEOUT) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be > 0 seconds, got {timeout:g}")
        self.target, self.layer, self.timeout = target, layer, timeout
        self.expected: Expected | None = None  # the layer as which the object is checked
        self.described = False
        self.replaced: list[str] = []  # functions of NumPy that the last call replaced
        self.shown = 0  # characters of its output, of all processes
        self._start()

    def _start(self) -> None:
        """Starts the process, and a thread for each thing that is done while it runs."""
        self.process = self._spawn()
        self.dump: list[str] = []
        self.answers: queue.Queue[tuple[dict[str, Any], list[np.ndarray]] | None] = queue.Queue(self.most_waiting)
        self.threads = [threading.Thread(target=work, args=(self.process,), daemon=True) for work in self._works()]
        for thread in self.threads:
            thread.start()
        self.loaded = self.held = False
        self.imported = {"numpy"}  # the kinds of arrays that the process has made

    def _spawn(self) -> subprocess.Popen[bytes]:
        """A new process that imports the file and then waits for calls."""
        environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}  # threads cost more than they bring on small arrays
        return self._popen(IMPORT_SECONDS, environment)

    def _popen(
        self, seconds: float, environment: Mapping[str, str], folder: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Python running `code`, in a session of its own; the import may take so many seconds."""
        root = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-c", self.code, root, self.target, self.layer, str(seconds)]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=folder, start_new_session=True
        )

    def _works(self) -> list[Callable[[subprocess.Popen[bytes]], None]]:
        """What is done in threads while the process runs."""
        return [self._read_answers, self._read_output]

    def _read_answers(self, process: subprocess.Popen[bytes]) -> None:
        stream, answers = process.stdout, self.answers
        assert stream is not None
        try:
            while True:
                answers.put(receive(stream))
        except (EOFError, OSError, ValueError):
            answers.put(None)

    def _read_output(self, process: subprocess.Popen[bytes]) -> None:
        """Shows what the function prints, up to a limit, and keeps what Python reports of a crash."""
        stream, dump = process.stderr, self.dump
        assert stream is not None
        for line in iter(lambda: stream.readline(2**16), b""):
            text = line.decode(errors="replace")
            begin = min((at for word in DUMPS if (at := text.find(word)) >= 0), default=-1)  # maybe after a print
            if dump or begin >= 0:
                if len(dump) < DUMP_LINES:  # a function may print such words itself, and go on
                    dump.append(text[max(begin, 0) :])
            elif self.shown < OUTPUT:
                self.shown += len(text)
                _show(text if self.shown < OUTPUT else text + "… the function prints more; the rest is not shown\n")

    def load(self) -> None:
        """Waits until the user's file is imported; raises a ValueError if it cannot be."""
        if self.loaded:
            return
        try:
            header, _ = self._answer(IMPORT_SECONDS)
        except DiedError as death:
            raise ValueError(f"cannot import {self.target}: {death}") from None
        if "invalid" in header:
            raise ValueError(header["invalid"])
        self.loaded = True
        self.__name__ = self.__qualname__ = str(header["name"])
        self.sizes = header["sizes"]
        if header["parameters"] is not None:
            self.__signature__ = inspect.Signature([_parameter(*p) for p in header["parameters"]])

    def hold(self, expected: Expected) -> list[RemoteForm]:
        """The forms that the object may have as this layer; raises a ValueError if there is none."""
        ended = self.process.poll()
        if ended is not None:
            self._start()
        self.load()
        self.expected = expected
        try:
            return [RemoteForm(self, i, found) for i, found in enumerate(self._hold())]
        except DiedError as death:
            raise ValueError(f"cannot inspect {self.target}: {death}") from None

    def _hold(self) -> list[dict[str, Any]]:
        assert self.expected is not None
        self._send({"hold": self.expected.to_dict()}, [])
        answer, _ = self._answer(IMPORT_SECONDS)
        if "invalid" in answer:
            raise ValueError(answer["invalid"])
        self.held = True
        return list(answer["forms"])

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        torch = any(is_torch(x) for x in arguments)
        plain = [as_array(x) if is_torch(x) else x for x in arguments]
        returned = self.run(plain, options, "torch" if torch else "numpy")
        return _as_tensors(returned) if torch else returned

    def run(
        self,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        arrays: str,
        frozen: bool = False,
        form: RemoteForm | None = None,
        dtype: str = "",
    ) -> Any:
        """Calls the function with NumPy arrays, or with tensors made of them, and returns NumPy arrays.

        Arguments that the function changes are changed here too; `frozen` ones raise instead, if they are NumPy arrays.
        With a `form`, the object is called in that form. Raises DiedError, RaisedError or FormError.
        """
        if self.process.poll() is not None:
            self._start()
        self.load()
        if form is not None and not self.held:
            self._hold()
        found: list[np.ndarray] = []
        trees = [encode(x, found) for x in arguments]
        header = {
            "arguments": trees,
            "options": dict(options),
            "arrays": arrays,
            "timeout": self.timeout,
            "frozen": frozen,
            "form": None if form is None else form.index,
            "dtype": dtype,
        }
        threading.Thread(target=self._send, args=(header, found), daemon=True).start()  # it may not be reading
        answer, received = self._answer(self.timeout, 0.0 if arrays in self.imported else IMPORT_SECONDS)
        self.imported.add(arrays)
        if form is not None and answer.get("sentence"):
            form.sentence, form.takes = answer["sentence"], answer["takes"]
        if "form" in answer:
            raise FormError(answer["form"])
        if "raised" in answer:
            raise RaisedError(answer["raised"])
        self.replaced = answer["replaced"]
        for i, tree in answer["changed"].items():
            _overwrite(arguments[int(i)], decode(tree, received))
        return decode(answer["returned"], received)

    def _send(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the process is gone; the answer says how
            send(self.process.stdin, header, arrays)

    def _answer(self, seconds: float, importing: float = 0.0) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The next message of the process; raises DiedError if it ends or hangs."""
        try:
            answer = self.answers.get(timeout=seconds + importing + GRACE)
        except queue.Empty:
            self.close()
            raise DiedError("timeout", f"it did not return within {seconds:g} seconds") from None
        if answer is not None:
            return answer
        status = self._wait()
        where = _place("".join(self.dump))
        if self.dump and self.dump[0].startswith("Timeout"):
            raise DiedError("timeout", f"it did not return within {seconds:g} seconds{where}")
        if status is None or 0 <= status < 256:
            raise DiedError("exit", f"it ended the process with status {status}, as os._exit does{where}")
        raise DiedError("crash", f"its process died of {_signal(status)}{where}")

    def _wait(self) -> int | None:
        try:
            status: int | None = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            status = None
        self.close()
        return status

    def close(self) -> None:
        """Ends the process, and those that the function has started from it."""
        if self.process.poll() is None:
            _kill(self.process)
            self.process.wait()
        for thread in self.threads:
            thread.join(GRACE)

    def __enter__(self) -> IsolatedFunction:
        self.load()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RemoteForm:
    """A form of an object in another process; see `forms.form.Form`."""

    def __init__(self, function: IsolatedFunction, index: int, described: Mapping[str, Any]) -> None:
        self.function, self.index = function, index
        self.sentence: str = described["sentence"]
        self.takes_upstream: bool = described["takes_upstream"]
        self.own_sizes: dict[str, Any] | None = described["own_sizes"]
        self.takes: list[str] | None = described["takes"]
        self.kinds: tuple[str, ...] = tuple(described["kinds"])
        self.loaded: tuple[str, ...] = tuple(described["loaded"])

    def run(
        self, given: Sequence[Any], options: Mapping[str, Any], arrays: str, dtype: str = "", frozen: bool = False
    ) -> Any:
        return self.function.run(given, options, arrays, frozen, self, dtype)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads its own group, with the group."""
    with contextlib.suppress(AttributeError, ProcessLookupError, PermissionError):  # Windows has no killpg
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _parameter(name: str, kind: int, optional: bool) -> inspect.Parameter:
    default = None if optional else inspect.Parameter.empty
    return inspect.Parameter(name, inspect._ParameterKind(kind), default=default)


def _overwrite(argument: Any, changed: Any) -> None:
    """Gives an argument the values that the function left in it."""
    if isinstance(argument, np.ndarray):
        same = isinstance(changed, np.ndarray) and changed.shape == argument.shape
        argument[...] = changed if same else argument + 1  # reshaped: any other value says that it was modified


def _as_tensors(value: Any) -> Any:
    import torch

    if isinstance(value, (tuple, list)):
        return type(value)(_as_tensors(part) for part in value)
    if isinstance(value, dict):
        return {key: _as_tensors(part) for key, part in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _place(dump: str) -> str:
    """The file and line of the user's code in Python's report of a crash: the current thread, else the last one."""
    threads = re.split(r"(?m)^(?=Thread |Current thread )", dump)
    current = [one for one in threads if one.startswith("Current")] or threads[-1:]
    frames = re.findall(r'File "(.+)", line (\d+)', "".join(current))
    own = str(Path(__file__).parent)
    return place([(file, line) for file, line in frames if not file.startswith(own)])


def place(frames: Sequence[tuple[str, Any]]) -> str:
    """The innermost line, of those given as (file, line) with it first, that is not Python's or a package's."""
    libraries = (sysconfig.get_path("stdlib"), "site-packages", "<")
    own = [(file, line) for file, line in frames if not any(library in file for library in libraries)]
    return f" ({Path(own[0][0]).name}, line {own[0][1]})" if own else ""


def _signal(status: int) -> str:
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"
        return f"{name}, as when memory runs out" if name == "SIGKILL" else name
    return "an access violation" if status == 0xC0000005 else f"error 0x{status:X}"


def _show(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it
        sys.stderr.write(text)
