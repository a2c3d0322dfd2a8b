"""What another system would trip over, found on this one: text without an encoding, and names that only POSIX has.

It does not show that the package runs on Windows; nothing has been run there.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
POSIX_MODULES = "crypt", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"
POSIX_NAMES = {
    "os": ["fork", "geteuid", "getuid", "killpg", "register_at_fork", "sched_getaffinity", "sysconf"],
    "signal": ["SIGALRM", "SIGHUP", "SIGKILL", "SIGPIPE", "alarm", "setitimer"],
    "mmap": ["MADV_DONTNEED", "MADV_HUGEPAGE", "MAP_ANONYMOUS", "MAP_NORESERVE", "MAP_PRIVATE"],
}  # fmt: skip
EXTRAS = (
    "datasets", "dp_accounting", "huggingface_hub", "jax", "lm_eval", "mpi4py", "pyarrow", "starlette", "tensorboard",
    "torch", "transformers", "uvicorn", "wandb",
)  # fmt: skip
NEED_AN_EXTRA = {
    "onfoot.bench.peers", "onfoot.explore.connections", "onfoot.explore.serve", "onfoot.explore.server",
    "onfoot.lm_eval", "onfoot.serve.run", "onfoot.serve.server", "onfoot.torch",
}  # fmt: skip

# Runs several commands in one process; its status is the highest of theirs.
RUN = (
    "import sys; from onfoot.cli import app; "
    "sys.exit(max(app(one.split(), standalone_mode=False) or 0 for one in sys.argv[1:]))"
)

# Everything that onfoot depends on is imported first: it is only our own modules that must not need these names.
IMPORT_ALL = """
import importlib, os, pkgutil, signal, mmap, sys
import filelock, jinja2, llvmlite.binding, matplotlib.pyplot, numpy, platformdirs, rich.console, rich.progress
import rich.table, threadpoolctl, tokenizers, typer, typer.testing
import asyncio, concurrent.futures, http.server, multiprocessing
modules, names, extras = eval(sys.argv[1])
for name in [*modules, *extras]:
    sys.modules[name] = None
for module, missing in names.items():
    for name in missing:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
import onfoot
failed, imported = {}, 0
for found in pkgutil.walk_packages(onfoot.__path__, "onfoot.", onerror=lambda name: None):
    if ".course" in found.name or found.name.endswith("__main__"):  # exercises, and the program
        continue
    try:
        importlib.import_module(found.name)
        imported += 1
    except (ImportError, AttributeError) as error:
        failed[found.name] = str(error)
print((imported, failed))
"""


def without_encoding(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that read or write text in whatever encoding the system prefers."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        options = {option.arg: option.value for option in node.keywords}
        if "encoding" in options:
            continue
        path = isinstance(node.func, ast.Attribute)  # its read_text and write_text, not ours of formats/
        starts = name in ("run", "Popen", "check_output", "check_call") and {"text", "universal_newlines"} & set(
            options
        )
        reads, writes = name == "read_text" and not node.args, name == "write_text" and len(node.args) < 2
        if starts or (path and (reads or writes)):
            yield node
        elif name in ("open", "fdopen") and ast.unparse(node.func) not in ("os.open", "webbrowser.open"):
            modes = [*node.args, *([options["mode"]] if "mode" in options else [])]
            texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
            if not any(isinstance(text, str) and set(text) <= set("rwxab+") and "b" in text for text in texts):
                yield node


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("path.read_text()", 1),
        ("path.read_text('utf-8')", 0),
        ("path.write_text(x)", 1),
        ("path.write_text(x, encoding='utf-8')", 0),
        ("open(path)", 1),
        ("open(path, 'rb')", 0),
        ("open(path, mode='wb')", 0),
        ("path.open('w')", 1),
        ("os.open(path, flags)", 0),
        ("os.fdopen(2, 'w')", 1),
        ("subprocess.run(x, text=True)", 1),
        ("subprocess.run(x, encoding='utf-8', text=True)", 0),
    ],
)
def test_text_without_an_encoding_is_seen(code: str, found: int) -> None:
    assert len(list(without_encoding(ast.parse(code)))) == found


def test_every_text_that_the_package_reads_or_writes_has_an_encoding() -> None:
    files = [path for path in SOURCE.rglob("*.py") if "course" not in path.parts]
    assert len(files) > 300
    calls = [
        f"{path.relative_to(SOURCE).as_posix()}: {ast.unparse(node)}"
        for path in files
        for node in without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert calls == ["onfoot/learn/grade_find.py: archive.open(info)"]  # a member of a zip file, read as bytes


def test_every_module_imports_without_the_names_of_posix_and_without_any_extra() -> None:
    given = repr((POSIX_MODULES, POSIX_NAMES, EXTRAS))
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, given], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    imported, failed = ast.literal_eval(done.stdout.splitlines()[-1])
    assert imported > 300
    assert set(failed) == NEED_AN_EXTRA, failed


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required_packages() -> set[str]:
    """The packages that `pip install onfoot` brings, without any extra: the dependencies, theirs, and so on."""
    text = (SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8").split("\ndependencies = [")[1].split("\n]")[0]
    waiting, found = re.findall(r'(?m)^    "([\w.-]+)', text), set[str]()
    assert len(waiting) > 5
    while waiting:
        name = normal(waiting.pop())
        if name not in found:
            found.add(name)
            try:
                needed = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:  # for another system
                continue
            waiting += [re.split(r"[^\w.-]", one)[0] for one in needed if "extra ==" not in one]
    return found


def test_a_learner_needs_no_package_but_the_dependencies_and_no_module_of_posix(tmp_path: Path) -> None:
    """No other module can be imported, in the processes of `onfoot learn` and in those that it starts."""
    blocked, required = tmp_path / "blocked", required_packages()
    blocked.mkdir()
    others = [
        name
        for name, packages in importlib.metadata.packages_distributions().items()
        if not required & {normal(package) for package in packages} and name.isidentifier() and name[0] != "_"
    ]
    packages = {*others, *EXTRAS, "pytest"} - {"onfoot", *sys.stdlib_module_names}
    for name in {*packages, *POSIX_MODULES}:
        (blocked / f"{name}.py").write_text(f"raise ImportError('{name} is blocked')\n", encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(blocked), str(SOURCE)]),
        "PYTHONIOENCODING": "utf-8",
    }

    def learn(*commands: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", RUN, *(f"learn {one}" for one in commands)]
        return subprocess.run(
            program, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False
        )

    made = learn("course", "map --folder course", "hint 1 --folder course")
    assert made.returncode == 0 and "wrote the exercises to course" in made.stdout, made.stderr
    assert "hint 1 of 3" in made.stdout
    file = tmp_path / "course" / "e01_linear.py"
    solution = SOURCE / "onfoot" / "learn" / "course" / "solutions" / "e01_linear.py"
    file.write_text(solution.read_text(encoding="utf-8"), encoding="utf-8")
    checked = learn("check 1 --folder course")
    assert checked.returncode == 0 and "Solved: linear_backward" in checked.stdout, checked.stdout + checked.stderr
    file.write_text("import torch\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    seen = learn("check 1 --folder course")  # the block holds in the process of the function too
    assert seen.returncode == 1 and "torch is blocked" in " ".join(seen.stdout.split()), seen.stdout + seen.stderr
