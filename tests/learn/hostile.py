"""Submissions of every kind that a class, or an attacker, may hand in, with the verdict that each must get."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onfoot.learn.course import SOLUTIONS

TARGETS = {
    1: ("e01_linear.py", "linear_backward"),
    2: ("e02_activation.py", "gelu_tanh_backward"),
    3: ("e03_cross_entropy.py", "cross_entropy_backward"),
}
FILES = {number: file for number, (file, _) in TARGETS.items()} | {16: "e16_swiglu.py"}
PASSED, WRONG, FAILED, IMPORT, SYNTAX = "passed", "wrong", "failed", "import", "syntax"


@dataclass(frozen=True)
class Handed:
    """One submission: its kind, its file, and the verdict."""

    kind: str
    number: int
    text: str
    status: str
    says: str = ""  # in what is said about it

    @property
    def file(self) -> str:
        return FILES[self.number]


# (kind, what the backward pass does before it returns the right gradients, what is said)
IN_CALL = [
    ("segfault", "import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    ("abort", "import os; os.abort()", "SIGABRT"),
    ("kills itself", "import os; os.kill(os.getpid(), 9)", "SIGKILL"),
    ("raises", "1 / 0", "ZeroDivisionError"),
    ("recursion", "f = lambda: f(); f()", "RecursionError"),
    ("endless", "while True: pass", "did not return within"),
    ("sleeps", "import time; time.sleep(1e6)", "did not return within"),
    ("endless, alarm off", "import faulthandler as f; f.cancel_dump_traceback_later()\n    while True: pass", ""),
    ("fork bomb", "import os\n    while True: os.fork()", "Operation not permitted"),
    ("starts programs", "import subprocess; subprocess.run(['sleep', '1000'])", "Operation not permitted"),
    ("processes", "import multiprocessing as m; m.Process(target=print).start()", "not permitted"),
    ("new session", "import os; os.setsid()", "Operation not permitted"),
    ("memory in steps", "x = []\n    while True: x.append(np.zeros(10**7))", "MemoryError"),
    ("memory at once", "bytearray(10**11)", "MemoryError"),
    ("prints gigabytes", "while True: print('x' * 100_000)", "prints more than"),
    ("writes to stderr", "import sys\n    while True: sys.stderr.write('x' * 99 + '\\n')", "prints more than"),
    ("exits", "import sys; sys.exit(0)", "SystemExit"),
    ("exits hard", "import os; os._exit(0)", "ended the process with status 0"),
    ("large file", "f = open('big', 'wb')\n    while True: f.write(bytes(10**6))", "OSError"),
    (
        "many files",
        "import itertools\n    for i in itertools.count(): open(f'{i}', 'wb').write(bytes(10**6))",
        "to its folder",
    ),
    ("writes elsewhere", "open('/tmp/onfoot_was_here', 'w')", "PermissionError"),
    ("reads elsewhere", "open('/etc/passwd')", "PermissionError"),
    ("imports the judge", "import onfoot.ops", "ModuleNotFoundError"),
    ("network", "import socket; socket.socket()", "Operation not permitted"),
    ("kills the judge", "import os; os.kill(os.getppid(), 9)", "Operation not permitted"),
    ("kills everyone", "import os; os.kill(-1, 9)", "Operation not permitted"),
    ("lifts the limits", "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**60, 2**60))", "limit"),
    ("huge array", "return np.zeros(5 * 10**7)", "it returns 400,000,000 bytes"),
    ("three huge arrays", "return (np.ones((3000, 3000)),) * 3", "it returns 216,000,000 bytes"),
    ("empty array of a huge shape", "return np.zeros((0, 10**15)), None, None", ""),
    ("a text", "return 'right'", ""),
    (
        "writes to the judge's pipe",
        "import os\n    for i in range(3, 60):\n        try: os.write(i, b'\\0' * 200)\n        except OSError: pass",
        "not an answer",
    ),
    (
        "floods the judge's pipe",
        "import os\n    while True:\n        for i in range(3, 9):\n            try: os.write(i, b'x' * 60_000)\n"
        "            except OSError: pass",
        "not an answer",
    ),
]
# (kind, what the file does when it is imported, what is said)
AT_IMPORT = [
    ("raises at import", "raise RuntimeError('no')", "RuntimeError"),
    ("endless at import", "while True: pass", "did not return within"),
    ("fork bomb at import", "import os\nwhile True: os.fork()", "Operation not permitted"),
    ("exits at import", "import sys; sys.exit(0)", "SystemExit"),
    ("exits hard at import", "import os; os._exit(0)", "status 0"),
    ("memory at import", "x = bytearray(10**11)", "MemoryError"),
    ("prints at import", "while True: print('y' * 100_000)", "prints more than"),
    ("uses the judge", "from onfoot.ops import linear_backward", "onfoot"),
    (
        "reads the solution",
        "open(__import__('onfoot').__path__[0] + '/learn/course/solutions/e01_linear.py')",
        "onfoot",
    ),
    ("imports nothing there is", "import a_module_that_is_not_there", "ModuleNotFoundError"),
    ("kills the judge at import", "import os; os.kill(os.getppid(), 15)", "Operation not permitted"),
]
# (kind, what the file does besides; its gradients are right)
HARMLESS = [
    ("right", ""),
    ("right, prints", "print('hello', '\\x1b[31m', 'ü' * 50)"),
    ("right, writes a file", "open('notes.txt', 'w').write('mine')"),
    ("right, forks in vain", "import os\ntry: os.fork()\nexcept OSError: pass"),
    ("right, starts threads", "import threading, time\nthreading.Thread(target=time.sleep, args=(1e5,)).start()"),
    ("right, changes NumPy's comparisons", "np.allclose = np.array_equal = lambda *a, **k: False"),
    ("right, other line ends", None),
]
# (kind, how the file of a wrong answer tries to be judged right)
TAMPERING = [
    ("patches NumPy", "np.allclose = np.array_equal = lambda *a, **k: True; np.linalg.norm = lambda *a, **k: 0.0"),
    (
        "patches all modules",
        "import gc, sys\nfor o in [o for o in gc.get_objects() if type(o).__name__ in ('Budget', 'Case', 'Part')]:\n"
        "    try: o.ok = True\n    except Exception: pass\nsys.modules['onfoot'] = np",
    ),
    ("declares sizes", "{function}.sizes = {{'tokens': 1, 'batch': 1}}"),
    ("hides as numpy", "import sys; sys.modules['numpy.testing'] = sys"),
]
# (exercise, right line, wrong line, the name of the mistake)
MISTAKES = [
    (1, "np.sum(rows(dy), axis=0)", "np.mean(rows(dy), axis=0)", "times too small"),
    (1, "np.sum(rows(dy), axis=0)", "2 * np.sum(rows(dy), axis=0)", "2 times too large"),
    (1, "rows(x).T @ rows(dy)", "-rows(x).T @ rows(dy)", "sign"),
    (1, "(rows(dy) @ weight.T)", "(rows(dy) @ weight.T / len(rows(dy)))", "times too small"),
    (2, "np.where(x <= 0, 0, dy)", "dy", ""),
    (2, "np.where(x <= 0, 0, dy)", "np.where(x <= 0, 0, 1.0) + 0 * dy", ""),
    (2, "du = ROOT_2_OVER_PI * (1 + 3 * CUBIC * x2)", "du = ROOT_2_OVER_PI * (1 + CUBIC * x2)", ""),
    (2, "return dy * (0.5 * (1 + tanh)", "return 2 * dy * (0.5 * (1 + tanh)", "2 times too large"),
    (3, "(dloss / divisor)", "dloss", ""),
    (3, "(dloss / divisor)", "(1 / divisor)", ""),
    (3, "-= 1", "+= 1", ""),
    (3, "(drho - (drho * rho).sum(axis=-1, keepdims=True)) * rho", "drho * rho", ""),
    # right in the shapes of another layout: one sequence at a time, all tokens as rows, another order
    (1, "rows(x).T @ rows(dy)", "x.T @ dy", "fits only some of the shapes"),
    (1, "np.sum(rows(dy), axis=0)", "dy.sum(axis=tuple(range(2)))", "fits only some of the shapes"),
    (1, ".reshape(*dy.shape[:-1], weight.shape[0])", "", "a reshape is missing"),
    (1, "return dx, dweight, dbias", "return dweight, dx, dbias", "returned in another order"),
    (2, "np.where(x <= 0, 0, dy)", "np.where(x <= 0, 0, dy).reshape(-1, x.shape[-1])", "a reshape is missing"),
    (3, "dlogits.reshape(logits.shape)", "dlogits", "a reshape is missing"),
    (16, "return dgate, dup", "return dgate.ravel(), dup.ravel()", "a reshape is missing"),
]


def solution(number: int) -> str:
    return (SOLUTIONS / FILES[number]).read_text(encoding="utf-8")


def mistaken(number: int, right: str, wrong: str) -> str:
    text = solution(number)
    assert text.count(right) == 1, (number, right)
    return text.replace(right, wrong)


def in_call(number: int, code: str) -> str:
    name = TARGETS[number][1]
    wrapped = f"def {name}(dy, saved):\n    {code}\n    return the_right_one(dy, saved)\n"
    return f"{solution(number)}\n\nthe_right_one = {name}\n\n\n{wrapped}"


def submissions() -> list[Handed]:
    """200 submissions, in an order that mixes the kinds."""
    found = list(_all())
    extra = [Handed(f"right, again {i}", 1 + i % 3, solution(1 + i % 3), PASSED) for i in range(200 - len(found))]
    mixed = found + extra
    return [mixed[i * 77 % len(mixed)] for i in range(len(mixed))]  # 77 and 200 have no common factor


def _all() -> Iterator[Handed]:
    for number, (_, function) in TARGETS.items():
        for kind, code, says in IN_CALL:
            yield Handed(kind, number, in_call(number, code), FAILED, says)
        for kind, code, says in AT_IMPORT:
            yield Handed(kind, number, f"{solution(number)}\n\n{code}\n", IMPORT, says)
        for kind, extra in HARMLESS:
            text = solution(number) + f"\n{extra}\n" if extra is not None else solution(number).replace("\n", "\r\n")
            yield Handed(kind, number, text, PASSED)
        wrong = next(one for one in MISTAKES if one[0] == number)
        for kind, code in TAMPERING:
            text = mistaken(*wrong[:3]) + "\n" + code.format(function=function) + "\n"
            yield Handed(f"wrong, {kind}", number, text, WRONG, wrong[3])
        yield Handed("not Python", number, solution(number) + "\ndef (:\n", SYNTAX, "not valid Python")
    for number, right, line, says in MISTAKES:
        yield Handed(f"mistake {line}", number, mistaken(number, right, line), WRONG, says)
    deletes = "import os, shutil; shutil.rmtree(os.path.dirname(os.path.abspath(__file__)), ignore_errors=True)"
    yield Handed("right, deletes its folder", 1, f"{solution(1)}\n{deletes}\n", PASSED)
    yield Handed("deletes its folder and dies", 1, in_call(1, f"{deletes}; os._exit(3)"), FAILED)


def write(handed: list[Handed], folder: Path) -> dict[str, Handed]:
    """Writes each as the folder of a student; returns them by name."""
    found = {f"s{i:03} {one.kind}".replace("/", "")[:60].strip(): one for i, one in enumerate(handed)}
    for student, one in found.items():
        (folder / student).mkdir(parents=True)
        (folder / student / one.file).write_bytes(one.text.encode())
    return found
