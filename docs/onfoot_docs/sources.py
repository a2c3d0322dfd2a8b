"""Pages that show files of the repository: the sources of the package, and whatever else a page links to.

Every line has an anchor `#L12`, and a comment `# eq 25` links to the derivation of the equation.
"""

from __future__ import annotations

import html
import inspect
import io
import re
import tokenize
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 200_000  # bytes of a file that are shown
EQUATIONS = re.compile(r"# eq ((?:(?:\d+(?:\.[a-d])?|[A-Z]+\.\d+)(?:, )?)+)")
ANCHOR = re.compile(r'<a id="eq-([^"]+)">')


def page_name(file: str) -> str:
    """The name of the page that shows a file or folder."""
    return f"source/{file}"


def wanted(env: BuildEnvironment) -> set[str]:
    """The files that pages link to, beside the package's own."""
    if not hasattr(env, "onfoot_sources"):
        env.onfoot_sources = set()  # type: ignore[attr-defined]
    return env.onfoot_sources  # type: ignore[attr-defined,no-any-return]


@cache
def equation_lines(path: Path) -> dict[int, list[str]]:
    """Line -> the ids of the equations that it carries."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    found = ((t.start[0], EQUATIONS.search(t.string)) for t in tokens if t.type == tokenize.COMMENT)
    return {line: ids[1].rstrip(", ").split(", ") for line, ids in found if ids}


@cache
def _derivations() -> dict[str, str]:
    """The anchor of an equation without its `eq-` -> the page that derives it."""
    pages = sorted((ROOT / "docs" / "equations").glob("*.md"))
    return {anchor: page.stem for page in pages for anchor in ANCHOR.findall(page.read_text(encoding="utf-8"))}


@cache
def tests() -> dict[str, tuple[str, int]]:
    """The name of a test -> its file and line."""
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    return {name: (file, line) for file in files for name, line in tests_of(file).items()}


@cache
def tests_of(file: str) -> dict[str, int]:
    """The names of the tests of a file -> their lines."""
    lines = enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), 1)
    return {name[1]: number for number, line in lines if (name := re.match(r" *def (test_\w+)", line))}


@cache
def function(name: str) -> tuple[str, int, int] | None:
    """File, first and last line of a function or class, by its name relative to the package."""
    if not re.fullmatch(r"\w+(\.\w+)+", name):
        return None
    try:
        found = inspect.unwrap(resolve_name(f"onfoot.{name}"))
        lines, first = inspect.getsourcelines(found)
    except (ImportError, AttributeError, TypeError):
        return None
    file = Path(inspect.getsourcefile(found) or "").relative_to(ROOT).as_posix()
    return None if inspect.ismodule(found) else (file, first, first + len(lines) - 1)


def setup(app: Sphinx) -> None:
    app.connect("html-collect-pages", _write)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} — onfoot</title>
<link rel="stylesheet" href="{up}_static/pygments.css"><link rel="stylesheet" href="{up}_static/source.css"></head>
<body><nav><a href="{up}index.html">onfoot</a> · <a href="{up}search.html">Search</a></nav>
<h1>{heading}</h1>
{body}
</body></html>
"""


def _write(app: Sphinx) -> list[Any]:
    """Writes the source pages, after all other pages have said what they link to."""
    files = shown_files(app.env)
    folders = {name for name in wanted(app.env) if (ROOT / name).is_dir()}
    folders |= {parent.as_posix() for file in files | folders for parent in Path(file).parents if parent.parts}
    for name in sorted(files | folders):
        body = _folder(app, name) if (ROOT / name).is_dir() else _file(app, name)
        trail = [(page_name(parent.as_posix()), parent.name) for parent in reversed(Path(name).parents) if parent.parts]
        heading = [
            f'<a href="{app.builder.get_relative_uri(page_name(name), page)}">{part}</a>' for page, part in trail
        ]
        out = Path(app.outdir) / f"{page_name(name)}.html"
        out.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * page_name(name).count("/")
        text = PAGE.format(name=name, up=up, heading=" / ".join([*heading, Path(name).name]), body=body)
        out.write_text(text, encoding="utf-8")
    return []


def shown_files(env: BuildEnvironment) -> set[str]:
    """The files that have a page: the package's sources, and what pages link to."""
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")}
    return package | {name for name in wanted(env) if (ROOT / name).is_file()}


def _folder(app: Sphinx, name: str) -> str:
    known = {path for path in (ROOT / name).iterdir() if not path.name.startswith((".", "__pycache__"))}
    rows = []
    shown = shown_files(app.env)
    for path in sorted(known, key=lambda path: (path.is_file(), path.name)):
        file = path.relative_to(ROOT).as_posix()
        if file in shown or any(one.startswith(file + "/") for one in shown):
            address = app.builder.get_relative_uri(page_name(name), page_name(file))
            rows.append(f'<li><a href="{address}">{html.escape(path.name)}</a>{_about(path)}</li>')
        else:
            rows.append(f"<li>{html.escape(path.name)}{_about(path)}</li>")
    return f"<ul>{''.join(rows)}</ul>"


def _about(path: Path) -> str:
    """The first line of a module's docstring."""
    if path.suffix != ".py":
        return ""
    first = re.match(r'"""(.*)', path.read_text(encoding="utf-8"))
    return f" — {html.escape(first[1].removesuffix(chr(34) * 3))}" if first else ""


def _file(app: Sphinx, name: str) -> str:
    """A file as a list of lines, each with its anchor; comments stand out, and ids of equations are links."""
    path = ROOT / name
    text = html.escape(path.read_bytes()[:LIMIT].decode("utf-8", "replace"), quote=False)
    here, python = page_name(name), path.suffix == ".py"

    def derived(ids: re.Match[str]) -> str:
        return re.sub(r"[A-Z]+\.\d+|\d+(?:\.[a-d])?", lambda id: _derivation(app, here, id[0]), ids[0])

    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        if python and "# " in line:
            line = re.sub(r"(^|  )(# .*)$", r'\1<span class="c1">\2</span>', EQUATIONS.sub(derived, line))
        lines.append(f'<span id="L{number}">{line}</span>')
    more = "<p>The beginning of a longer file.</p>" if path.stat().st_size > LIMIT else ""
    return '<pre class="highlight">' + "\n".join(lines) + f"</pre>{more}"


def _derivation(app: Sphinx, here: str, id: str) -> str:
    """A link from an equation's id to its derivation."""
    anchor = id.lower().replace(".", "-")
    page = _derivations().get(anchor)
    if page is None:
        return id
    return f'<a href="{app.builder.get_relative_uri(here, "equations/" + page)}#eq-{anchor}">{id}</a>'
