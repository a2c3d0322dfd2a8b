"""The process that loads a user's function and calls it, when `onfoot check` runs it in isolation.

Messages come in through the standard input and go out through the standard output. Before the user's file is imported,
both are replaced: what the function prints goes to the standard error, and it finds its standard input empty.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import IO, Any

import numpy as np

from onfoot.check.forms import Expected, Form, FormError, forms_of
from onfoot.check.guard import most_entries, numpy_restored
from onfoot.check.load import load_object
from onfoot.check.wire import as_array, decode, encode, receive, send


def main(target: str, layer: str, import_seconds: str, load: Callable[[str, str], Any] = load_object) -> None:
    """Loads the function, describes it, and answers calls until the standard input ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    reports = os.fdopen(os.dup(2), "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    faulthandler.enable(reports)
    watch(float(import_seconds), reports)
    try:
        function = load(target, layer)
    except ValueError as error:
        send(answers, {"invalid": str(error)}, [])
        return
    finally:
        faulthandler.cancel_dump_traceback_later()
    send(answers, described(function), [])
    forms: list[Form] = []
    with contextlib.suppress(EOFError):
        while True:
            header, arrays = receive(requests)
            if "hold" in header:
                watch(float(import_seconds), reports)
                forms = hold(function, header["hold"], answers)
                faulthandler.cancel_dump_traceback_later()
            else:
                answer(function, forms, header, arrays, answers, reports)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(0)  # threads that the function left behind must not keep the process


def watch(seconds: float, reports: Any) -> None:
    """Ends the process after that time, with a report of where it was. Works inside native code as well."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=reports)


def described(function: Any) -> dict[str, Any]:
    """The name, parameters and declared sizes of the function."""
    try:
        found = inspect.signature(function).parameters.values()
        parameters = [[p.name, int(p.kind), p.default is not p.empty] for p in found]
    except (TypeError, ValueError):
        parameters = None
    declared = getattr(function, "sizes", None)
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return {"name": name, "parameters": parameters, "sizes": plain(declared) if isinstance(declared, dict) else None}


def hold(function: Any, described: dict[str, Any], answers: IO[bytes]) -> list[Form]:
    """Recognises the object as a layer, and sends the forms that it may have."""
    try:
        forms = forms_of(function, Expected.from_dict(described))
    except ValueError as error:
        send(answers, {"invalid": str(error)}, [])
        return []
    send(answers, {"forms": [form.describe() for form in forms]}, [])
    return forms


def plain(declared: dict[Any, Any]) -> dict[str, Any]:
    """Declared sizes as JSON can hold them."""
    return {
        str(name): value if isinstance(value, (int, float, str)) else [int(n) for n in value]
        for name, value in declared.items()
    }


def answer(
    function: Any,
    forms: list[Form],
    header: dict[str, Any],
    arrays: list[np.ndarray],
    answers: IO[bytes],
    reports: Any,
) -> None:
    """Calls the function once and sends what it returned, or what it raised, and the arguments that it changed."""
    form = None if header["form"] is None else forms[header["form"]]
    as_tensors = header["arrays"] == "torch" and form is None
    given = [decode(tree, arrays, tensor if as_tensors else np.copy) for tree in header["arguments"]]
    for x in given if header["frozen"] and header["arrays"] == "numpy" else ():
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    before = [as_array(x) for x in given]
    before = [None if x is None else x.copy() for x in before]
    if header["arrays"] != "numpy":
        import_module(header["arrays"])  # its time is not the function's
    watch(header["timeout"], reports)
    process = os.getpid()
    replaced: list[str] = []
    try:
        with np.errstate(all="ignore"), numpy_restored(replaced):
            returned = _called(function, form, given, header)
        found: list[np.ndarray] = []
        tree = encode(returned, found, most_entries([np.shape(x) for x in given]))
        changed = {}
        for i, (old, new) in enumerate(zip(before, given, strict=True)):
            now = None if old is None else as_array(new)
            if old is not None and (now is None or now.shape != old.shape or now.tobytes() != old.tobytes()):
                changed[str(i)] = encode(now, found)
        out: dict[str, Any] = {"returned": tree, "changed": changed, "replaced": replaced}
    except FormError as error:
        out, found = {"form": str(error)}, []
    except BaseException as error:
        from onfoot.check.call import location, raised

        out, found = {"raised": raised(error) + location(error, __file__)}, []
    finally:
        if os.getpid() != process:
            os._exit(0)  # the function has forked: only the process that was asked answers
        faulthandler.cancel_dump_traceback_later()
    with contextlib.suppress(Exception):  # the function may have closed or replaced it
        sys.stdout.flush()
    of_form = {} if form is None else {"sentence": form.sentence, "takes": form.takes}
    send(answers, {**out, **of_form}, found)


def _called(function: Any, form: Form | None, given: list[Any], header: dict[str, Any]) -> Any:
    def call() -> Any:
        if form is None:
            return function(*given, **header["options"])
        return form.run(given, header["options"], header["arrays"], header["dtype"])

    if header["frozen"] and header["arrays"] != "numpy":  # tensors cannot be read-only
        from onfoot.check.writes import writing_line

        raise ValueError("read-only" + writing_line(call, [x for x in map(as_array, given) if x is not None]))
    return call()


def tensor(x: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(x.copy())
