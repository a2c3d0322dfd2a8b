"""A pytest plugin that proves docs/paper/: each test in its tables fails once the function beside it raises.

    python -m pytest -p raise_instead TESTS

runs every test once per function of its rows, with that function's code replaced by an exception, so that it is gone
under every name and in every table that holds it. A test must call the function and fail in at least one of its cases;
what survives is printed, and is the exit status.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

calls = 0  # of the function that raises
pairs: dict[tuple[str, str], set[str]] = {}  # (file, test) -> functions that it has survived so far


def raises(*args: Any, **kwargs: Any) -> None:
    import raise_instead  # this code runs with the globals of the function that it replaces

    raise_instead.calls += 1
    raise RuntimeError("this function was replaced")


@contextmanager
def replaced(found: Any) -> Iterator[None]:
    """Within this block, a call of this function (below its decorators) or class raises."""
    if inspect.isclass(found):
        with mock.patch.object(found, "__new__" if "__new__" in vars(found) else "__init__", raises):
            yield
        return
    while hasattr(found, "__wrapped__"):
        if hasattr(found, "cache_clear"):
            found.cache_clear()
        found = found.__wrapped__
    code, found.__code__ = found.__code__, raises.__code__
    try:
        yield
    finally:
        found.__code__ = code


def fails_without(found: Any, test: Any, arguments: dict[str, Any]) -> bool:
    """Whether the test calls this function or class, and fails if that raises."""
    before = calls
    try:
        with replaced(found):
            test(**arguments)
    except BaseException:  # hypothesis and pytest.fail raise others than Exception
        return calls > before
    return False


def pytest_configure() -> None:
    from test_crosswalk import IDENTITY, all_rows, path_of

    for row in all_rows():
        if row.code != IDENTITY:
            pairs.setdefault((str(path_of(row.file)), row.test), set()).add(row.code)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    from test_crosswalk import symbol

    survived = pairs[str(pyfuncitem.path), pyfuncitem.originalname]
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    survived -= {code for code in sorted(survived) if fails_without(symbol(code), pyfuncitem.obj, arguments)}
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    left = [f"{test} passes without {code}" for (_, test), codes in pairs.items() for code in sorted(codes)]
    print("\n" + "\n".join(left))
    session.exitstatus = session.exitstatus or len(left)
