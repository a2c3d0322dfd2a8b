"""The reference, made from the code itself: public names from their docstrings, commands from their options.

A directive writes Markdown and has it read as if it stood on the page. What has no docstring, no help text or no
comment is a warning, and so fails the build.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from onfoot_docs.commands import command_pages
from onfoot_docs.fields import field_table
from onfoot_docs.sources import ROOT, page_name

logger = logging.getLogger(__name__)


class Generated(SphinxDirective):
    """A directive whose content is Markdown made by a function of its argument."""

    optional_arguments = 1
    final_argument_whitespace = True  # several words are one argument
    make: Callable[[str], Iterator[str]]

    def run(self) -> list[nodes.Node]:
        text = "\n".join(type(self).make(self.arguments[0] if self.arguments else ""))
        container = nodes.Element()
        self.state.nested_parse(StringList(text.splitlines(), self.env.docname), self.content_offset, container, True)
        return container.children


def public(words: str) -> Iterator[str]:
    """The public names of a module (`__all__`), or those that are named behind it; classes with their methods."""
    module, *names = words.split()
    owner = import_module(module)
    for name in names or owner.__all__:
        thing = getattr(owner, name)
        if not name.startswith("__") and not inspect.ismodule(thing):
            yield from _entry(f"{module}.{name}", thing, _comment_of(owner, name))


def _entry(name: str, thing: Any, comment: str) -> Iterator[str]:
    if inspect.isclass(thing):
        yield from _directive("class", name + _signature(thing), thing, _own_doc(thing))
        for member, value in vars(thing).items():
            function = inspect.unwrap(getattr(value, "__func__", value))
            if member.startswith("_") or not (inspect.isfunction(function) or isinstance(value, property)):
                continue
            getter = value.fget if isinstance(value, property) else function
            kind = "attribute" if isinstance(value, property) else "method"
            signature = "" if kind == "attribute" else _signature(function)
            yield from _directive(kind, f"{name}.{member}{signature}", getter, _own_doc(getter))
    elif callable(thing):
        function = getattr(thing, "forward", thing)
        yield from _directive("function", name + _signature(thing), function, _own_doc(thing))
    else:
        yield from _directive("data", name, None, comment)


def _own_doc(thing: Any) -> str:
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def _directive(kind: str, signature: str, thing: Any, text: str) -> Iterator[str]:
    if not text:
        logger.warning("%s has no docstring", signature.partition("(")[0], type="docstring")
    # A class that a module only passes on has its target where it is at home, so that a type leads to one place.
    passed_on = kind == "class" and not thing.__module__.startswith(signature.partition("(")[0].rpartition(".")[0])
    yield from (
        f"````{{py:{kind}}} {signature}",
        *([":no-index:"] if passed_on else []),
        "",
        text.replace("$", r"\$"),
        "",
    )
    if thing is not None and (place := _place(thing)):
        yield from (place, "")
    yield from ("````", "")


def _signature(thing: Any) -> str:
    """A signature with its types as they are written in the source, and without `self`."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [
        p.replace(annotation=_Written(p.annotation)) if p.annotation is not p.empty else p
        for p in found.parameters.values()
        if p.name not in ("self", "cls")
    ]
    returned = found.empty if inspect.isclass(thing) else found.return_annotation
    text = str(found.replace(parameters=parameters, return_annotation=found.empty))
    text = re.sub(r"<[a-z][^<>]*>", "...", text).replace("\n", " ")  # a default that is an object
    return text if returned is found.empty else f"{text} -> {_Written(returned)!r}"


class _Written:
    """An annotation as text: without the quotes that a postponed one has."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation

    def __repr__(self) -> str:
        text = getattr(self.annotation, "__forward_arg__", self.annotation)
        return text if isinstance(text, str) else inspect.formatannotation(text)


def _place(thing: Any) -> str:
    """A link to the source of a function or class."""
    try:
        file, line = inspect.getsourcefile(inspect.unwrap(thing)), inspect.getsourcelines(inspect.unwrap(thing))[1]
    except (OSError, TypeError):
        return ""
    if not file or not file.startswith(str(ROOT)):
        return ""
    name = file[len(str(ROOT)) + 1 :]
    return f"[source](source:{page_name(name)}#L{max(line, 1)})"


def _comment_of(owner: Any, name: str) -> str:
    """What a constant is: the comment behind or above its definition."""
    for module in (owner, *(vars(owner).get(one) for one in vars(owner))):
        module = inspect.getmodule(module) if not inspect.ismodule(module) else module
        if module is None or not getattr(module, "__name__", "").startswith("onfoot") or name not in vars(module):
            continue
        lines = inspect.getsource(module).splitlines()
        for at, line in enumerate(lines):
            if re.match(rf"{name}\b[^=]*=", line):
                if "  # " in line:
                    return line.partition("  # ")[2]
                above = lines[at - 1]
                if above.startswith("# "):
                    return above.removeprefix("# ")
    return ""


def setup(app: Sphinx) -> None:
    for name, make in (("public", public), ("commands", command_pages), ("fields", field_table)):
        app.add_directive(name, type(name.title(), (Generated,), {"make": staticmethod(make)}))
