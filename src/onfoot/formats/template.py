"""Renders untrusted Jinja templates with limits on time, on output and on the size of every value.

A chat template comes with a downloaded model. Jinja's sandbox denies it access to Python's objects; this module keeps
it from running forever and from filling the memory. Every operation that creates a value is checked, beforehand if it
could make a large value from small ones, and every loop iteration checks the time.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, wraps
from itertools import islice
from threading import local
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

TEMPLATE_BYTES = 1 << 17
TOKENS = 12_000  # per template: compiling takes up to 0.2 ms per token
SECONDS = 1.0  # of CPU time of this thread, so that a busy machine makes no difference
CHARACTERS = 1 << 23  # per value, and of the output
ITEMS = 1 << 18  # per value, including nested items
BITS = 1 << 12  # per integer

# Not used by chat templates: these can make large values from small ones, and `random` is not reproducible.
REFUSED_FILTERS = ("batch", "center", "filesizeformat", "forceescape", "format", "pprint", "random", "slice",
                   "striptags", "urlize", "wordwrap", "xmlattr")  # fmt: skip
REFUSED_METHODS = ("center", "encode", "expandtabs", "format", "format_map", "ljust", "maketrans", "rjust", "translate",
                   "zfill")  # fmt: skip
LONG_FORMAT = re.compile(r"\*|\d{4}")  # a computed width, or one of 4 or more digits


BEGIN, END = "\ufdd0", "\ufdd1"  # mark answers in a rendered text; Unicode reserves both for such uses within a program


class _Usage(local):
    """The resources used by the current rendering of this thread."""

    deadline = 0.0
    operations = 0
    written = 0
    marks = False  # whether answers are marked


_usage = _Usage()


def render(source: str, **variables: Any) -> str:
    """The rendered template; a template that fails or exceeds a limit raises an exception of any type."""
    if len(source) > TEMPLATE_BYTES:
        raise TemplateError(f"it has {len(source):,} characters; the limit is {TEMPLATE_BYTES:,}")
    template = _compile(source)
    _usage.deadline, _usage.operations, _usage.written = time.thread_time() + SECONDS, 0, 0
    return template.render(**variables)


def render_spans(source: str, **variables: Any) -> tuple[str, list[tuple[int, int]]]:
    """The rendered template, and the (begin, end) of each {% generation %} block in it: the model's own words."""
    _usage.marks = True
    try:
        marked = render(source, **variables)
    finally:
        _usage.marks = False
    text, spans, begin = "", [], 0
    for piece in re.split(f"([{BEGIN}{END}])", marked):
        if piece == BEGIN:
            begin = len(text)
        elif piece == END:
            spans.append((begin, len(text)))
        else:
            text += piece
    return text, [(begin, end) for begin, end in spans if begin < end]


def check_time() -> None:
    """Counts one operation, and checks the time at every 16th."""
    _usage.operations += 1
    if not _usage.operations % 16 and time.thread_time() > _usage.deadline:
        raise TemplateError(f"it takes longer than {SECONDS:g} s")


def checked(value: Any) -> Any:
    """The value, if it is not too large and there is time left; an iterator becomes a list."""
    check_time()
    if isinstance(value, str):
        if len(value) > CHARACTERS:
            raise TemplateError(f"a value has more than {CHARACTERS:,} characters")
    elif isinstance(value, list | tuple | dict):
        _check_size(value)
    elif isinstance(value, int):
        if value.bit_length() > BITS:
            raise TemplateError(f"a number has more than {BITS:,} bits")
    elif isinstance(value, Iterator):
        value = _to_list(value)
        _check_size(value)
    return value


def _to_list(values: Iterable[Any]) -> list[Any]:
    out = []
    for value in values:
        out.append(value)
        if len(out) > ITEMS:
            raise TemplateError(f"a list has more than {ITEMS:,} items")
    return out


def _check_size(value: Any) -> None:
    """Raises TemplateError if a value has too many characters or items; repeated ones count each time."""
    characters = items = 0
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            characters += len(item)
        elif isinstance(item, dict):
            items += len(item)
            characters += sum(len(key) for key in item if isinstance(key, str))
            stack += item.values() if items <= ITEMS else ()
        elif isinstance(item, list | tuple | range):
            items += len(item)
            stack += item if items <= ITEMS and not isinstance(item, range) else ()
        if characters > CHARACTERS:
            raise TemplateError(f"a value has more than {CHARACTERS:,} characters")
        if items > ITEMS:
            raise TemplateError(f"a value has more than {ITEMS:,} items")


def written(value: Any) -> str:
    """The text of a piece of output, or of a {% set %} block."""
    text = str(checked(value))
    _usage.written += len(text)
    if _usage.written > CHARACTERS:
        raise TemplateError(f"it writes more than {CHARACTERS:,} characters")
    return text


def _joined(separator: str, values: Iterable[Any]) -> str:
    texts = [str(value) for value in _to_list(values)]
    if sum(map(len, texts)) + len(separator) * len(texts) > CHARACTERS:
        raise TemplateError(f"a value has more than {CHARACTERS:,} characters")
    return separator.join(texts)


def _replaced(text: str, old: str, new: str, count: int = -1) -> str:
    found = text.count(old) if count is None or count < 0 else min(text.count(old), count)
    if len(text) + found * len(new) > CHARACTERS:
        raise TemplateError(f"a value has more than {CHARACTERS:,} characters")
    return text.replace(old, new, -1 if count is None else count)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    if isinstance(indent, int) and not 0 <= indent <= 16:
        raise TemplateError(f"tojson: indent must be from 0 to 16, got {indent}")
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)  # jinja2's filter would escape HTML


def _indented(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * min(max(int(width), 0), 1000)
    lines = str(text).splitlines() or [""]
    if len(text) + len(lines) * len(space) > CHARACTERS:
        raise TemplateError(f"a value has more than {CHARACTERS:,} characters")
    rest = [space + line if line or blank else line for line in lines[1:]]
    return "\n".join([space + lines[0] if first else lines[0], *rest])


def _summed(values: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
    total = start
    for value in _to_list(values):
        number = value if attribute is None else value[attribute]
        if not isinstance(number, int | float) or not isinstance(total, int | float):
            raise TemplateError("sum: only numbers can be added")
        total += number
    return total


def _rounded(value: float, precision: int = 0) -> float:
    return round(value, min(max(precision, -30), 30))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _Namespace(Namespace):
    """`namespace()` with a constant repr, because a namespace may contain itself."""

    def __repr__(self) -> str:
        return "<namespace>"


class _GenerationTag(Extension):
    """Renders the content of {% generation %} ... {% endgeneration %}, which some templates put around answers."""

    tags = {"generation"}  # noqa: RUF012 (declared so in jinja2)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("generated"), [], [], body).set_lineno(line)

    def generated(self, caller: Callable[[], str]) -> str:
        """The text of a block, marked if asked for."""
        text = caller()
        return f"{BEGIN}{text}{END}" if _usage.marks else text


class _Guard(NodeTransformer):
    """Adds the checks to a parsed template: around expressions that create values or text, and to each loop."""

    @staticmethod
    def call(name: str, *arguments: Any) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)

    def visit_literal(self, node: nodes.Expr) -> nodes.Node:
        return self.call("checked", self.generic_visit(node))

    visit_List = visit_Dict = visit_literal  # noqa: N815 (jinja2's names)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        visited = self.generic_visit(node)
        return self.call("checked", visited) if node.ctx == "load" else visited

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self.call("concatenated", *node.nodes)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        texts = [nodes.Const(n.data) if isinstance(n, nodes.TemplateData) else n for n in node.nodes]
        return nodes.Output([self.call("written", n) for n in texts])

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = self.call("checked", node.iter)
        in_time = self.call("in_time")
        node.body.insert(0, nodes.If(nodes.Not(in_time), [], [], []))
        if node.test is not None:
            node.test = nodes.And(in_time, node.test)
        return node


def in_time() -> bool:
    """True; raises TemplateError when the time is up."""
    check_time()
    return True


def concatenated(*values: Any) -> str:
    return _joined("", (checked(value) for value in values))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    checked = staticmethod(checked)
    written = staticmethod(written)
    in_time = staticmethod(in_time)
    concatenated = staticmethod(concatenated)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guard().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[return-value]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_time()
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers and left.bit_length() * max(right, 0) > BITS:
            raise TemplateError(f"a number has more than {BITS:,} bits")
        if operator == "*" and not numbers:
            for value, times in ((left, right), (right, left)):
                limit = CHARACTERS if isinstance(value, str) else ITEMS
                if hasattr(value, "__len__") and isinstance(times, int) and len(value) * times > limit:
                    raise TemplateError(f"a value has more than {limit:,} characters or items")
        if operator == "%" and isinstance(left, str):
            self._check_format(left)
            checked(right)
        return checked(super().call_binop(context, operator, left, right))

    def _check_format(self, text: str) -> None:
        if LONG_FORMAT.search(text):
            raise TemplateError(f"the format {text[:40]!r} has a width that is not a number of at most 3 digits")

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if function is written or function is checked:  # by far the most frequent calls
            return function(*args)
        check_time()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            if name in REFUSED_METHODS:
                raise TemplateError(f"the string method {name} is not available")
            if name == "join" and len(args) == 1:
                return _joined(owner, args[0])
            if name == "replace" and 2 <= len(args) <= 3:
                return checked(_replaced(owner, *args))
        return checked(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """`"{} {}".format(...)` without widths that would fill the memory."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__

        @wraps(wrapped)
        def formatted(*args: Any, **kwargs: Any) -> str:
            self._check_format(text)
            return str(checked(wrapped(*(checked(x) for x in args), **{k: checked(x) for k, x in kwargs.items()})))

        return formatted


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        check_time()
        return checked(function(*args, **kwargs))

    return guarded


@lru_cache(maxsize=8)
def _compile(source: str) -> Template:
    """The compiled template. It gets no date, so that the same data give the same tokens every day."""
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # no constant folding: nothing is evaluated outside the time limit
        extensions=["jinja2.ext.loopcontrols", _GenerationTag],
    )
    replacements: dict[str, Callable[..., Any]]
    replacements = {"tojson": _to_json, "indent": _indented, "sum": _summed, "replace": _replaced, "round": _rounded}
    replacements["join"] = lambda values, d="", attribute=None: _joined(
        str(d), values if attribute is None else (environment.getitem(value, attribute) for value in values)
    )
    filters: dict[str, Any] = {name: f for name, f in environment.filters.items() if name not in REFUSED_FILTERS}
    filters |= replacements
    environment.filters = {name: _guarded(f) for name, f in filters.items()}
    tests: dict[str, Any] = environment.tests
    environment.tests = {name: _guarded(f) for name, f in tests.items()}
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    environment.globals |= {"raise_exception": _raise_exception, "namespace": _Namespace}
    tokens = sum(1 for _ in islice(environment.lex(source), TOKENS + 1))
    if tokens > TOKENS:
        raise TemplateError(f"it has more than {TOKENS:,} tokens")
    return environment.from_string(source)
