"""A user's function by name: `module:function`, `path/to/file.py:function`, or a file with one such function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(target: str, layer: str = "") -> Callable[..., Any]:
    """The function that `target` names; a ValueError says what is missing.

    The current directory is searched for modules first. Without a function's name, the module's only public function
    is taken, or the one named `backward` or `<layer>_backward`.
    """
    where, name = _split(target)
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    if name:
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                raise ValueError(f"{where} has no {name!r}; it has {_listed(_functions(module))}")
            found = getattr(found, part)
    else:
        found = _only(module, where, layer)
    if inspect.isclass(found):
        raise ValueError(f"{name!r} of {where} is a class; give a function, or a method of an object of the module")
    if not callable(found):
        raise ValueError(f"{name!r} of {where} is no function but {type(found).__name__}")
    return found


def _split(target: str) -> tuple[str, str]:
    where, colon, name = target.rpartition(":")
    if not colon or name.endswith(".py") or "/" in name or "\\" in name:
        return target, ""
    return where, name


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and the like look their module up
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import its neighbours
    return _executed(lambda: spec.loader.exec_module(module) or module, str(path))  # type: ignore[union-attr]


def _from_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return _executed(lambda: importlib.import_module(name), name)


def _executed(load: Callable[[], ModuleType], name: str) -> ModuleType:
    """Whatever the user's code raises on import becomes one line."""
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot import {name}: {type(error).__name__}: {error}") from error


def _functions(module: ModuleType) -> list[str]:
    """The public functions that a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _only(module: ModuleType, where: str, layer: str) -> Any:
    names = _functions(module)
    for name in (f"{layer}_backward", "backward"):
        if name in names:
            return getattr(module, name)
    if len(names) != 1:
        raise ValueError(f"which function of {where}? It has {_listed(names)}; give {where}:NAME")
    return getattr(module, names[0])


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "no public function"
