"""Finds a user's functions: in a module, a file, a folder of files, a dict, or a list of these."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from onfoot.engine import ENGINES, OPS
from onfoot.own_engine.pairs import PAIRS

HALVES = ("forward", "backward")
KNOWN = ("auto", *ENGINES)
WHOLE = ("one_head", "self_attention", "block", "tied", "gpt2", "softmax")  # larger or smaller parts, as in the course


class Found(NamedTuple):
    """Functions by name, the hash of each file that they come from, and what to call their source."""

    functions: dict[str, Callable[..., Any]]
    files: dict[str, str]
    name: str


def is_own(engine: Any) -> bool:
    """Whether this is a user's own engine and not the name of one of ours; nothing is imported."""
    if not isinstance(engine, str | os.PathLike):
        return isinstance(engine, ModuleType | Mapping | Sequence)
    text = os.fspath(engine)
    if text in KNOWN or not text:
        return False
    if text.endswith(".py") or "/" in text or os.sep in text or Path(text).is_dir():
        return True
    top = text.partition(".")[0]
    if not text.replace(".", "").isidentifier():
        return False
    with contextlib.suppress(ValueError, ImportError):
        return Path(f"{top}.py").is_file() or importlib.util.find_spec(top) is not None
    return False


def find_functions(source: Any) -> Found:
    """The functions of a source whose names are those of pairs; a ValueError for half a pair or an unknown one."""
    functions, files, names = dict[str, Callable[..., Any]](), dict[str, str](), list[str]()
    for one in source if isinstance(source, list | tuple) else [source]:
        found = _of_one(one)
        functions |= found.functions  # a later source replaces the pairs of an earlier one
        files |= found.files
        names.append(found.name)
    for name in functions:
        pair, _, half = name.rpartition("_")
        other = f"{pair}_{HALVES[half == 'forward']}"
        if other not in functions:
            raise ValueError(
                f"{_all(names)} has {name} without {other}: what a forward saves is private to its pair, so both are "
                f"replaced together"
            )
    if not functions:
        raise ValueError(f"{_all(names)} defines no pair; a pair is NAME_forward and NAME_backward; {_names()}")
    return Found(functions, files, _all(names))


def _of_one(source: Any) -> Found:
    if isinstance(source, ModuleType):
        return Found(_pairs_of(vars(source), source.__name__), hashes([source]), f"module {source.__name__}")
    if isinstance(source, Mapping):
        return Found(_pairs_of(_flat(source), "the dict", strict=True), {}, "own")
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"an engine is a name, a module, a file, or a dict of functions, got a {type(source).__name__}"
        )
    text = os.fspath(source)
    path = Path(text)
    if path.is_dir():
        return _of_folder(path)
    if text.endswith(".py") or "/" in text or os.sep in text:
        with _beside(path.resolve().parent) as before:
            module = import_file(path)
            files = hashes([module, *_new_files(path.resolve().parent, before)])
        return Found(_pairs_of(vars(module), text), files, path.name)
    with _beside(Path.cwd()) as before:
        module = _imported(lambda: importlib.import_module(text), text)
        files = hashes([module, *_new_files(Path.cwd(), before)])
    return Found(_pairs_of(vars(module), text), files, f"module {text}")


def _of_folder(folder: Path) -> Found:
    """The pairs of all files in a folder, in the order of their names."""
    modules, broken = import_folder(folder)
    for why in broken.values():
        raise ValueError(why)
    if not modules:
        raise ValueError(f"{folder} has no Python files")
    functions: dict[str, Callable[..., Any]] = {}
    for path, module in modules.items():
        functions |= _pairs_of(vars(module), str(path))
    return Found(functions, hashes(list(modules.values())), folder.name or str(folder))


def import_folder(folder: Path, files: Sequence[Path] | None = None) -> tuple[dict[Path, ModuleType], dict[Path, str]]:
    """These files of a folder, or all Python files directly in it, imported, and why the others cannot be.

    They may import each other, and files beside them.
    """
    modules, broken = dict[Path, ModuleType](), dict[Path, str]()
    with _beside(folder.resolve()):
        for path in sorted(folder.glob("*.py")) if files is None else files:
            try:
                modules[path] = import_file(path)
            except ValueError as error:
                sys.modules.pop(path.stem, None)
                broken[path] = " ".join(str(error).split())
    return modules, broken


def import_file(path: Path) -> ModuleType:
    """A Python file as a module; anything that it raises becomes a one-line ValueError."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; --engine takes {', '.join(KNOWN)}, or a file of your own pairs")
    known = sys.modules.get(path.stem)
    if known is not None and Path(getattr(known, "__file__", None) or ".").resolve() == path.resolve():
        return known  # a file beside it has imported it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[path.stem] = module  # dataclasses look up their module there, and files beside it import it

    def run() -> ModuleType:
        loader.exec_module(module)
        return module

    return _imported(run, str(path))


def _imported(load: Callable[[], ModuleType], name: str) -> ModuleType:
    try:
        return load()
    except SyntaxError as error:
        raise ValueError(f"{error.filename or name}, line {error.lineno}: {error.msg}: {error.text or ''}") from error
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        where = f" (line {frames[-1].lineno} of {frames[-1].filename})" if len(frames) > 1 else ""
        raise ValueError(f"cannot import {name}: {type(error).__name__}: {error}{where}") from error


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[set[str]]:
    """While it is open, imports find the files of this folder first, and read them anew.

    Afterwards `sys.modules` is as it was: another folder may have files of the same names.
    """
    stems = {path.stem for path in folder.glob("*.py")}
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name in stems and _is_free(name)}
    before, place = set(sys.modules), str(folder)
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    try:
        yield before
    finally:
        sys.path.remove(place)
        for name in [n for n in sys.modules if n in stems and n not in before]:
            del sys.modules[name]
        sys.modules.update(hidden)
        if place not in sys.path:
            sys.path.append(place)  # for imports inside functions


def _is_free(name: str) -> bool:
    """Whether a module may be imported again: not one of Python, of an installed package, or of a program."""
    file = getattr(sys.modules[name], "__file__", None) or ""
    return name not in sys.stdlib_module_names and "site-packages" not in file and name != "__main__"


def _new_files(folder: Path, before: set[str]) -> list[ModuleType]:
    """The modules of this folder that were imported on the way."""
    new = [module for name, module in list(sys.modules.items()) if name not in before]
    return [m for m in new if Path(getattr(m, "__file__", None) or "/").resolve().parent == folder]


def hashes(modules: Sequence[ModuleType]) -> dict[str, str]:
    """The SHA-256 of each module's file, by its path."""
    files = sorted({str(Path(m.__file__).resolve()) for m in modules if getattr(m, "__file__", None)})  # type: ignore[arg-type]
    return {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files}


def _flat(source: Mapping[str, Any]) -> dict[str, Any]:
    """{"linear": (forward, backward)} as {"linear_forward": forward, "linear_backward": backward}."""
    out: dict[str, Any] = {}
    for name, value in source.items():
        if isinstance(value, tuple | list) and len(value) == 2:
            out |= {f"{name}_{half}": function for half, function in zip(HALVES, value, strict=True)}
        else:
            out[name] = value
    return out


def _pairs_of(names: Mapping[str, Any], where: str, strict: bool = False) -> dict[str, Callable[..., Any]]:
    """The functions whose names are those of pairs; a ValueError for a name that only looks like one."""
    out: dict[str, Callable[..., Any]] = {}
    for name, value in names.items():
        pair, _, half = name.rpartition("_")
        looks = half in HALVES and not name.startswith("_") and callable(value)
        if looks and pair in PAIRS:
            out[name] = value
        elif strict or (looks and pair not in WHOLE and getattr(value, "__module__", None) == names.get("__name__")):
            raise ValueError(
                f"{where} has {name}, which no engine knows; {_names()}; a helper's name may begin with an underscore"
            )
    theirs = {name.rpartition("_")[0] for name, value in out.items() if value is not OPS[name]}
    return {name: value for name, value in out.items() if name.rpartition("_")[0] in theirs}


def _names() -> str:
    return f"the pairs are {', '.join(PAIRS)}"


def _all(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))
