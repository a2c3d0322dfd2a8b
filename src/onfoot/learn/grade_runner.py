"""The judge's side of a submission's process: calls it, limits what it may answer and print, and ends it wholly."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.check.forms import Expected, Form, FormError
from onfoot.check.isolated import DUMPS, GRACE, DiedError, RaisedError, RemoteForm
from onfoot.check.wire import receive
from onfoot.learn.grade_limits import Limits, clean_environment
from onfoot.learn.isolated import IsolatedExercise

START = (
    "import sys; sys.dont_write_bytecode = True; sys.path[:] = [p for p in sys.path if p]; "
    "sys.path.append(sys.argv[1]); from onfoot.check.worker import main; "
    "from onfoot.learn.grade_child import load_limited; main(*sys.argv[2:], load_limited)"
)
KEPT_OUTPUT = 2000  # characters of what a submission prints
DUMP_LINES = 200
STARTUP_SECONDS = 30.0  # until Python and NumPy are there
LOOK = 0.2  # seconds between two looks at the size of its folder


class LimitedExercise(IsolatedExercise):
    """The function of a part of an exercise, in a process with limits. What comes back is never trusted."""

    code = START
    most_waiting = 2
    adopts = False  # whether orphans become children of this process, which has no other children

    def __init__(self, path: Path, adapter: str, limits: Limits) -> None:
        self.folder, self.limits = path.parent, limits
        self.seconds_left = limits.seconds  # of waiting for the answers to all calls
        self.printed, self.n_printed, self.excess = "", 0, ""
        self.final: DiedError | None = None  # a limit was reached: it is not called again
        super().__init__(path, adapter, limits.call_seconds)

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = clean_environment(self.folder, self.limits)
        return self._popen(self.timeout, environment, self.folder if self.folder.is_dir() else None)

    def _works(self) -> list[Callable[[subprocess.Popen[bytes]], None]]:
        return [*super()._works(), self._watch_folder]

    def _read_answers(self, process: subprocess.Popen[bytes]) -> None:
        stream, answers = process.stdout, self.answers
        assert stream is not None
        answer: tuple[dict[str, Any], list[np.ndarray]] | None
        while True:
            try:
                answer = receive(stream, self.limits.answer_bytes)
            except Exception as error:  # the end, or what is not an answer
                answer = None
                if "not a message" in str(error):
                    largest = self.limits.answer_bytes
                    self._end(process, f"what it returns is not an answer, or more than {largest:,} bytes")
            while True:
                try:
                    answers.put(answer, timeout=LOOK)
                    break
                except queue.Full:  # more answers than questions
                    if process.poll() is not None:
                        return
            if answer is None:
                return

    def _read_output(self, process: subprocess.Popen[bytes]) -> None:
        stream, dump = process.stderr, self.dump
        assert stream is not None
        for line in iter(lambda: stream.readline(2**16), b""):
            text = line.decode(errors="replace")
            begin = min((at for word in DUMPS if (at := text.find(word)) >= 0), default=-1)
            if dump or begin >= 0:
                dump.extend([text[max(begin, 0) :]] if len(dump) < DUMP_LINES else [])
            else:
                self.printed = (self.printed + text)[:KEPT_OUTPUT]
            self.n_printed += len(line)
            if self.n_printed > self.limits.output_bytes:
                self._end(process, f"it prints more than {self.limits.output_bytes:,} bytes")
                return

    def _watch_folder(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            if folder_bytes(self.folder) > self.limits.folder_bytes:
                self._end(process, f"it writes more than {self.limits.folder_bytes:,} bytes to its folder")
                return
            time.sleep(LOOK)

    def _end(self, process: subprocess.Popen[bytes], why: str) -> None:
        self.excess = why
        end_group(process)

    def load(self) -> None:
        """Waits until the file is imported; raises a ValueError if it cannot be."""
        if self.loaded:
            return
        try:
            header, _ = self._answer(self.timeout, STARTUP_SECONDS)  # the import itself is timed in its process
        except DiedError as death:
            raise ValueError(f"cannot import {Path(self.target).name}: {death}") from None
        if not isinstance(header, dict) or "invalid" in header:
            raise ValueError(str(dict(header).get("invalid", "not an answer"))[:KEPT_OUTPUT])
        self.loaded = True
        self.__name__ = self.__qualname__ = self.layer
        self.sizes = None  # all sizes are judged, whatever it declares

    def hold(self, expected: Expected) -> list[RemoteForm]:
        """The forms of the function; after a limit was reached, one whose calls say which."""
        if self.final is None and self.loaded and self.process.poll() is not None:
            try:
                self._start()
                self.load()
            except ValueError as error:  # it was imported before: a call has ended it and removed what it needs
                self.final = DiedError("crash", str(error))
        if self.final is None:
            return super().hold(expected)
        return [RemoteForm(self, 0, {**Form(expected).describe(), "kinds": ["numpy"], "loaded": []})]

    def run(
        self,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        arrays: str,
        frozen: bool = False,
        form: RemoteForm | None = None,
        dtype: str = "",
    ) -> Any:
        """Calls the function; what is not an answer of ours counts as a crash."""
        if self.final is not None:
            raise self.final
        try:
            returned = super().run(arguments, options, arrays, frozen, form, dtype)
            check_sizes(returned, self.limits.answer_bytes // 8)
        except RaisedError as error:
            raise RaisedError(str(error)[:KEPT_OUTPUT]) from None
        except (DiedError, FormError):
            raise
        except ValueError as error:  # it was started again, and can no longer be imported
            raise DiedError("crash", str(error)) from None
        except Exception:
            self.close()
            raise DiedError("crash", "what came back from its process is not an answer") from None
        return returned

    def _answer(self, seconds: float, spare: float = 0.0) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The next answer, if there is time left; the reason that the process died, if it was a limit."""
        begun = time.monotonic()
        try:
            if self.seconds_left <= 0:
                self.close()
                raise DiedError("timeout", f"it takes longer than {self.limits.seconds:g} seconds in all")
            return super()._answer(seconds + spare)
        except DiedError as death:
            kind, why = death.kind, str(death).replace(f"{seconds + spare:g} seconds", f"{seconds:g} seconds")
            if self.excess:
                kind, why = "crash", self.excess
            elif "SIGXCPU" in why:
                kind, why = "timeout", f"it needs more than {self.limits.seconds:g} seconds of CPU time"
            found = DiedError(kind, why)
            if self.excess or kind == "timeout":
                self.final = found
            raise found from None
        finally:
            if self.loaded:  # starting Python is not the submission's time
                self.seconds_left -= time.monotonic() - begun

    def close(self) -> None:
        """Ends the process and all that it has started."""
        end_group(self.process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        if self.adopts:
            end_orphans()
        for thread in self.threads:
            thread.join(GRACE)
        streams = (self.process.stdin, self.process.stdout, self.process.stderr)
        for stream in streams if not any(thread.is_alive() for thread in self.threads) else ():
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.close()


def check_sizes(value: Any, largest: int) -> None:
    """Raises DiedError if an array that was returned could make the judge compute with more than that many numbers."""
    if isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            check_sizes(part, largest)
    elif isinstance(value, np.ndarray):
        size = 1
        for n in value.shape:
            size *= max(n, 1)  # an empty array of a large shape has large sums
        if size > largest:
            raise DiedError("crash", f"it returns an array of the shape {value.shape}, which is too large")


def folder_bytes(folder: Path) -> int:
    """The size of all files in a folder; links are not followed."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512 if os.name == "posix" else 0
    return total


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its group; on Windows, its tree."""
    if sys.platform == "win32":
        if process.poll() is None:
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)
            process.kill()
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def end_orphans() -> None:
    """Ends all children of this process: those that a submission left behind, which the judge has adopted (Linux)."""
    me = str(os.getpid())
    for _ in range(100):
        found = [pid for pid, parent in parents() if parent == me]
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if not found:
            return


def parents() -> list[tuple[int, str]]:
    """(id, id of the parent) of every process; empty where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found.append((int(stat.parent.name), fields[1]))
    return found
