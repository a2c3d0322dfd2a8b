"""Installs a wheel into a fresh environment outside the repository, and uses it as a newcomer would.

    python tests/release/smoke.py dist/onfoot-0.1.0-py3-none-any.whl --python python3.12

Only the core dependencies are installed. The kernels are compiled anew, in an own cache, unless --cache names one.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = "".join(f"the quick brown fox jumps over the lazy dog, for the {n}th time.\n" for n in range(60))
SMALL = ["--steps", "8", "--context", "16", "--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--vocab-size", "300"]

RIGHT = """
import numpy as np

def gelu_backward(x, dy):
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    du = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return dy * (0.5 * (1 + np.tanh(u)) + 0.5 * x * (1 - np.tanh(u) ** 2) * du)
"""
WRONG = RIGHT.replace(" * du)", ")")

TYPED = """
import numpy as np

import onfoot

config = onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=16, vocab_size=11)
model: onfoot.Model = onfoot.create(config, seed=0)
loss, grads = model.loss_and_grads(np.zeros((1, 4), dtype=np.int64))
number: float = loss
names: list[str] = sorted(grads)
"""
MISTYPED = TYPED.replace("number: float = loss", "number: str = loss")


class Installed:
    """An environment with the wheel, and an empty folder to work in."""

    def __init__(self, folder: Path, python: str, cache: Path | None = None) -> None:
        self.folder, self.home = folder / "work", folder / "environment"
        self.folder.mkdir(parents=True)
        subprocess.run([python, "-m", "venv", str(self.home)], check=True)
        self.bin = self.home / ("Scripts" if sys.platform == "win32" else "bin")
        ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "ONFOOT_COMPILING")
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        self.environment = {**kept, "XDG_CACHE_HOME": str(cache or folder / "cache"), "COLUMNS": "100"}

    def install(self, *what: str) -> None:
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)

    def run(self, program: str, *arguments: str, status: int = 0) -> str:
        """The output of a program of the environment, which must end with this status."""
        done = subprocess.run(
            [str(self.bin / program), *arguments], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, encoding="utf-8", errors="replace", check=False,
        )  # fmt: skip
        said = f"{done.stdout}\n{done.stderr}"
        if done.returncode != status:
            raise AssertionError(f"{program} {' '.join(arguments)} ended with {done.returncode}, not {status}:\n{said}")
        return said

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")


def require(text: str, *parts: str) -> None:
    """Raises an AssertionError unless the text has every part."""
    missing = [part for part in parts if part not in text]
    if missing:
        raise AssertionError(f"{missing} missing from:\n{text}")


def imports(env: Installed) -> str:
    code = "import onfoot, sys; print(onfoot.__file__, onfoot.__version__, '.'.join(map(str, sys.version_info[:3])))"
    file, version, python = env.run("python", "-c", code).split()
    require(file, str(env.home))  # the wheel's, not the repository's
    return f"onfoot {version} on Python {python}"


def readme(env: Installed) -> str:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    env.write("example.py", code[1])
    expected = code[1].rstrip().splitlines()[-1].removeprefix("# ")
    require(env.run("python", "example.py"), expected)
    return expected


def shows(env: Installed) -> str:
    require(env.run("onfoot", "--help"), "train", "walk", "check", "learn")
    require(env.run("onfoot", "table", "--preset", "gpt2"), "124,439,808")
    require(env.run("onfoot", "walk"), "finite difference")
    return "--help, table --preset gpt2, walk"


def trains(env: Installed) -> str:
    env.write("text.txt", TEXT)
    said = env.run("onfoot", "train", "text.txt", "--out", "run", "--seed", "1", *SMALL)
    require(said, "validation loss")
    assert "falling back to NumPy" not in said, said  # every kernel matches its formula
    written = {path.name for path in (env.folder / "run").iterdir()}
    assert {"run.json", "log.jsonl", "best", "last", "loss.png"} <= written, written
    require(env.run("onfoot", "info", "run"), "parameters")
    code = "import onfoot; print(onfoot.load('run').engine)"
    require(env.run("python", "-c", code), "numba")  # float32: the kernels have been compiled
    return next(line for line in said.splitlines() if "validation loss" in line)


def generates(env: Installed) -> str:
    options = ["--prompt", "the quick", "--max-new-tokens", "8", "--seed", "0"]
    one, again = (env.run("onfoot", "generate", "run", *options) for _ in range(2))
    assert one == again
    require(one, "the quick")
    return " ".join(one.split())


def checks(env: Installed) -> str:
    env.write("right.py", RIGHT)
    env.write("wrong.py", WRONG)
    require(env.run("onfoot", "check", "right.py:gelu_backward", "--layer", "gelu"), "passes")
    said = env.run("onfoot", "check", "wrong.py:gelu_backward", "--layer", "gelu", status=1)
    require(said, "✗")
    return "a right function passes, a wrong one does not"


def learns(env: Installed) -> str:
    env.run("onfoot", "learn", "make", "exercises")
    env.run("onfoot", "learn", "make", "solved", "--with-solutions")
    require(env.run("onfoot", "learn", "check", "1", "--folder", "exercises", status=1), "not written yet")
    solved = (env.folder / "solved" / "e01_linear.py").read_text(encoding="utf-8")
    env.write("exercises/e01_linear.py", solved)
    require(env.run("onfoot", "learn", "check", "1", "--folder", "exercises"), "Solved: linear_backward")
    said = env.run("onfoot", "learn", "derivation", "1", "--folder", "exercises")
    require(said, "from", "derivations", "# Linear", "FC.2")  # the page is in the wheel
    env.run("onfoot", "learn", "derivation", "19", "--folder", "exercises")
    return "exercise 1: not written, then solved, then derived"


def explores(env: Installed) -> str:
    env.run("onfoot", "explore", "--text", "the value of the value", "--export", "page.html")
    page = (env.folder / "page.html").read_text(encoding="utf-8")
    require(page, "<html", "<script", "</html>")
    return f"one page of {len(page.encode()):,} bytes"


def serves(env: Installed) -> str:
    """With the extra: the modules of the server and of the page's server import."""
    env.run("python", "-c", "import onfoot.explore.server, onfoot.serve.server")
    return "the servers of explore and serve import"


def typed(env: Installed) -> str:
    """With mypy: a user's script is checked against the annotations in the wheel."""
    env.write("typed.py", TYPED)
    env.write("mistyped.py", MISTYPED)
    require(env.run("python", "-m", "mypy", "--strict", "typed.py"), "Success")
    said = env.run("python", "-m", "mypy", "--strict", "mistyped.py", status=1)
    require(said, '"float"', '"str"')
    return "a script is accepted, one with a wrong type is not"


STEPS: list[Callable[[Installed], str]] = [imports, readme, shows, trains, generates, checks, learns, explores]


def smoke(env: Installed, steps: list[Callable[[Installed], str]]) -> Iterator[str]:
    """Runs the steps; yields a line for each that passed."""
    for step in steps:
        begin = time.perf_counter()
        result = step(env)
        yield f"  {step.__name__:10} {time.perf_counter() - begin:6.1f} s  {result}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environment")
    parser.add_argument("--cache", type=Path, help="a folder for compiled kernels that is kept")
    parser.add_argument("--extras", action="store_true", help="afterwards the extra explore as well")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onfoot-smoke-") as folder:
        env = Installed(Path(folder), given.python, given.cache and given.cache.resolve())
        env.install(str(given.wheel.resolve()))
        for line in smoke(env, STEPS):
            print(line, flush=True)
        if given.extras:
            env.install(f"{given.wheel.resolve()}[explore]")
            for line in smoke(env, [explores, serves]):
                print(line, flush=True)


if __name__ == "__main__":
    main()
