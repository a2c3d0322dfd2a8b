"""Collects every message of the package that a user can see: `python tests/messages.py` rewrites `tests/messages.txt`.

Errors, warnings, printed lines, table headings and help texts, as they stand in the source: {...} is filled in at run
time. The file is there to be read from top to bottom; `test_messages.py` keeps it up to date.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "onfoot"
PAGE = Path(__file__).with_name("messages.txt")
SHOWS = {  # functions whose text arguments reach the user
    "print", "say", "show_text", "show_sheet", "Sheet", "write", "echo", "secho", "warn", "update", "log", "option",
    "Option", "Argument", "BadParameter", "Exit", "fail", "reject_with", "Typer", "command", "status", "complaint",
    "announce",
}  # fmt: skip


def text_of(node: ast.AST) -> str | None:
    """A string expression as a template; None where it is not one."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None and right is None else (left or "{...}") + (right or "{...}")
    return None


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def texts_in(node: ast.AST) -> Iterator[str]:
    """All strings in the arguments of a call, outermost first."""
    found = text_of(node)
    if found is not None:
        yield found
        return
    for child in ast.iter_child_nodes(node):
        yield from texts_in(child)


def messages_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            calls = [node.exc]
        elif isinstance(node, ast.Call) and name_of(node) in SHOWS:
            calls = [node]
        else:
            continue
        for call in calls:
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                yield from ((node.lineno, text) for text in texts_in(argument))


@cache
def collect() -> str:
    """The page: a section per file, its messages in the order of the source."""
    sections = []
    for path in sorted(SOURCE.rglob("*.py")):
        found = sorted(messages_of(ast.parse(path.read_text(encoding="utf-8"))))
        lines = dict.fromkeys(" ".join(text.split()) for _, text in found)
        shown = [line for line in lines if len(line.split()) > 1]
        if shown:
            sections.append("\n".join([f"# {path.relative_to(SOURCE).as_posix()}", *(f"  {line}" for line in shown)]))
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    PAGE.write_text(collect(), encoding="utf-8")
    print(f"{PAGE.name}: {sum(line.startswith('  ') for line in collect().splitlines()):,} messages")
