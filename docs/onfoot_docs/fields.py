"""The fields of a dataclass as a table: name, type, default, and what it is, from its help or its comment."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module

from sphinx.util import logging

from onfoot_docs.commands import code, plain

logger = logging.getLogger(__name__)


def field_table(name: str) -> Iterator[str]:
    """The table of `module:Class`."""
    module, _, cls_name = name.partition(":")
    cls = getattr(import_module(module), cls_name)
    comments: dict[str, str] = {}
    for parent in reversed(cls.__mro__[:-1]):
        comments |= dict(re.findall(r"^    (\w+): [^#\n]*  # (.*)$", inspect.getsource(parent), re.MULTILINE))
    yield from (inspect.cleandoc(cls.__doc__ or ""), "", "| field | type | default | |", "|---|---|---|---|")
    for field in fields(cls):
        about = field.metadata.get("help") or comments.get(field.name, "")
        if not about:
            logger.warning("%s.%s has neither help nor a comment", cls_name, field.name, type="docstring")
        default = "required" if field.default is MISSING else code(repr(field.default))
        kind = field.type if isinstance(field.type, str) else field.type.__name__
        yield f"| `{field.name}` | {code(kind)} | {default} | {plain(about)} |"
    yield ""
