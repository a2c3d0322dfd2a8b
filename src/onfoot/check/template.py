"""The function that a user fills in: the arguments, shapes and gradients of a layer."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onfoot.check.layer import Layer


def template(layer: Layer, options: Mapping[str, Any], file: str = "my_{layer}.py") -> str:
    """Returns a file with a function to fill in; a gradient left as None is not judged."""
    keywords = [f"{name}={value!r}" for name, value in options.items()]
    file = file.format(layer=layer.name)
    head = f"def {layer.name}_backward({', '.join((*layer.arguments, *keywords))}):"
    if len(head) > 100:
        lines = textwrap.wrap(", ".join((*layer.arguments, *keywords)) + ",", 92)
        head = "\n".join([f"def {layer.name}_backward(", *(f"    {line}" for line in lines), "):"])
    results = ", ".join(layer.gradients)
    what = "Returns the updated" if "dout" not in layer.arguments else "Returns"
    body = [
        *textwrap.wrap(f'"""{what} {results}.', 92),
        "",
        *(line for text in layer.contract for line in textwrap.wrap(text, 92, subsequent_indent="  ")),
        '"""',
        *(f"{name} = None  # TODO; while it is None, it is not judged" for name in _results(layer)),
        *_returned(_results(layer)),
    ]
    indented = "\n".join(f"    {line}".rstrip() for line in body)
    usage = f"onfoot check {file}:{layer.name}_backward --layer {layer.name}"
    return f'"""Fill in the gradients, then run:\n\n    {usage}\n"""\n\nimport numpy as np\n\n\n{head}\n{indented}\n'


def _returned(names: list[str]) -> list[str]:
    line = f"return {', '.join(names)}"
    return [line] if len(line) <= 92 else ["return (", *(f"    {name}," for name in names), ")"]


def _results(layer: Layer) -> list[str]:
    """The names of the results; AdamW's have the names of its arguments."""
    return [f"new_{name}" if name in layer.arguments else name for name in layer.gradients]


def write_template(layer: Layer, options: Mapping[str, Any], target: str) -> str:
    """Writes the template to a new file, and returns its path."""
    path = Path(target)
    if path.suffix != ".py":
        raise ValueError(f"{target}: the template is written to a file whose name ends in .py")
    if path.exists():
        raise ValueError(f"{target} exists and is not overwritten; give another name")
    try:
        path.write_text(template(layer, options, path.name), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror}") from None
    return str(path)
