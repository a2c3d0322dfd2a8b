"""Loads a user's function or class: `module:name`, `path/to/file.py:name`, or a file with one of them."""

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


def load_object(target: str, layer: str = "") -> Any:
    """Returns the function, class or instance named by `target`; raises a ValueError if it cannot be found.

    Modules are searched for in the current directory first. If `target` has no name, the function `<layer>_backward` or
    `backward` is used, else the only public function or class of the module.
    """
    where, name = _split(target)
    if not where:
        raise ValueError(f"no file or module before the colon in {target!r}; give module:name or file.py:name")
    module = load_file(Path(where)) if where.endswith(".py") else _from_name(where)
    if name:
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                raise ValueError(f"{where} has no {name!r}; it defines {_listed(_functions(module))}")
            found = getattr(found, part)
    else:
        found = _default_function(module, where, layer)
    if not callable(found) and not isinstance(found, (tuple, list)) and not hasattr(found, "backward"):
        raise ValueError(f"{name!r} in {where} must be a function, a class or a pair, got {type(found).__name__}")
    return found


def _split(target: str) -> tuple[str, str]:
    where, colon, name = target.rpartition(":")
    if not colon or name.endswith(".py") or "/" in name or "\\" in name:
        return target, ""
    return where, name


def load_file(path: Path) -> ModuleType:
    """Imports a file, which may import files beside it; raises a ValueError if that fails."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look up their module there
    sys.path.insert(0, str(path.resolve().parent))  # so that it can import files beside it
    return _import(lambda: spec.loader.exec_module(module) or module, str(path))  # type: ignore[union-attr]


def _from_name(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return _import(lambda: importlib.import_module(name), name)


def _import(load: Callable[[], ModuleType], name: str) -> ModuleType:
    """Imports the module; anything it raises becomes a one-line ValueError."""
    try:
        return load()
    except (Exception, SystemExit) as error:
        raise ValueError(f"cannot import {name}: {type(error).__name__}: {error}") from error


def _functions(module: ModuleType) -> list[str]:
    """Names of the public functions and classes defined in the module itself."""
    return [
        name
        for name, value in vars(module).items()
        if (inspect.isfunction(value) or _is_layer(value) or _wraps_function(value))
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def _is_layer(value: Any) -> bool:
    """Whether it is a class with a forward or a backward method."""
    return inspect.isclass(value) and (hasattr(value, "forward") or hasattr(value, "backward"))


def _wraps_function(value: Any) -> bool:
    """Whether it is a callable made of a function, such as JAX's custom_vjp."""
    return callable(value) and inspect.isfunction(getattr(value, "__wrapped__", None))


def _default_function(module: ModuleType, where: str, layer: str) -> Any:
    names = _functions(module)
    for name in (f"{layer}_backward", "backward", *(n for n in names if _plain(n) == _plain(layer))):
        if name in names:
            return getattr(module, name)
    if len(names) != 1:
        raise ValueError(f"cannot choose a function in {where}: it defines {_listed(names)}; pass {where}:NAME")
    return getattr(module, names[0])


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "no public function"
