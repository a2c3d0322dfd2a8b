"""All checks of a test session as one HTML page, which needs no other file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from onfoot.check.session import Entry

STYLE = """
:root { color-scheme: light dark; --text: #1d2430; --back: #fff; --soft: #5c6675; --line: #d9dee6; --box: #f5f7fa;
  --good: #17713b; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --back: #14171c; --soft: #9aa4b2; --line: #323945;
  --box: #1c2128; --good: #6fd08c; --bad: #ff8a80; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto;
  padding: 2rem 1rem; max-width: 62rem; }
h1 { font-size: 1.4rem; } p { color: var(--soft); }
details { border-bottom: 1px solid var(--line); }
summary { cursor: pointer; padding: .5rem 0; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); }
.test { color: var(--soft); font-size: .85rem; display: block; }
pre { background: var(--box); padding: 1rem; overflow-x: auto; font-size: .85rem; line-height: 1.4; }
"""


def page(entries: Sequence[Entry]) -> str:
    """The page: the number of checks, then the wrong ones, then the right ones, each with its report."""
    wrong = [entry for entry in entries if not entry["passed"]]
    right = [entry for entry in entries if entry["passed"]]
    count = f"{len(entries)} check{'s' if len(entries) != 1 else ''}: {len(wrong)} wrong, {len(right)} right"
    body = "\n".join(_section(entry) for entry in (*wrong, *right))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Gradient checks: {len(wrong)} wrong</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>Gradient checks</h1>\n<p>{count}</p>\n{body}\n</body>\n</html>\n"
    )


def _section(entry: Entry) -> str:
    good = bool(entry["passed"])
    mark, colour = ("✓", "good") if good else ("✗", "bad")
    return (
        f'<details{"" if good else " open"}><summary><b class="{colour}">{mark} {escape(entry["title"])}</b> '
        f'{escape(entry["verdict"])}<span class="test">{escape(entry["test"])}</span></summary>\n'
        f"<pre>{escape(entry['report'])}</pre></details>"
    )
