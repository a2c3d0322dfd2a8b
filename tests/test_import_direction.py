"""Dependencies point one way, as CONTRIBUTING.md draws it: no part of the package imports one that stands above it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import onfoot

PACKAGE = Path(onfoot.__file__).parent
# The lowest first: each may import those before it.
ORDER = [
    "arrays", "ops", "quantized", "threads", "terminal", "plots", "recording", "kernels", "engine", "own_engine",
    "config", "models", "formats", "generate", "data", "attribution", "curvature", "probe", "tables", "memory", "check",
    "torch", "train", "blame", "evaluation", "lm_eval", "learn",
    "__init__", "bench", "explore", "serve", "cli", "__main__",
]  # fmt: skip
ALLOWED = {
    ("recording/recorder.py", "kernels"): "a copy and a fill that a recorded step needs",
    ("recording/replay.py", "kernels"): "the memory that results lie in, and their sum over threads",
    ("config.py", "formats"): "how a value from a file is shown in an error",
    ("models/load.py", "formats"): "load",
    ("models/model.py", "formats"): "Model.save and adapters",
    ("models/model.py", "generate"): "Model.generate",
    ("check/engines.py", "__init__"): "oracles are whole models",
    ("train/fingerprint.py", "__init__"): "the version",
}


def imports(tree: ast.AST) -> set[str]:
    """The parts of the package that a file imports anywhere, except for type checkers alone."""
    unchecked = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in unchecked:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "onfoot":
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} - {"onfoot"}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.split(".")[0] == "onfoot"}
    parts = {name.split(".")[1] if "." in name else "__init__" for name in names}
    return {part if part in ORDER else "__init__" for part in parts}


@cache
def all_imports() -> dict[Path, set[str]]:
    """What each file imports."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE): imports(ast.parse(path.read_text(encoding="utf-8"))) for path in files}


def against(order: list[str]) -> set[tuple[str, str]]:
    """(file, part) of each import that goes up."""
    found = set()
    for file, parts in all_imports().items():
        mine = file.parts[0].removesuffix(".py")
        found |= {(file.as_posix(), part) for part in parts if order.index(part) > order.index(mine)}
    return found


def test_every_part_of_the_package_has_its_place() -> None:
    parts = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert parts == set(ORDER)


def test_no_import_goes_against_the_direction() -> None:
    assert against(ORDER) == set(ALLOWED)


def test_an_import_against_the_direction_is_seen() -> None:
    assert imports(ast.parse("def f():\n    from onfoot.train.loop import Trainer")) == {"train"}
    assert imports(ast.parse("from onfoot import models, create")) == {"models", "__init__"}
    assert ("train/loop.py", "models") in against([*reversed(ORDER)])
