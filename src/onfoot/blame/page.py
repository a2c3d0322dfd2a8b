"""The page of `onfoot blame --html`: the ranked examples of each query, with the tokens and steps that matter."""

from __future__ import annotations

from html import escape

import numpy as np

from onfoot.blame.examples import Examples
from onfoot.blame.report import Report
from onfoot.formats.tokenizer import Tokenizer

CONTEXT = 24  # tokens shown before and after a window
STYLE = """
:root { color-scheme: light dark; --up: 30, 150, 80; --down: 200, 60, 50; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-top: 2rem; }
blockquote { margin: 1rem 0; padding: .5rem 1rem; border-left: 4px solid #8888; white-space: pre-wrap; }
article { border: 1px solid #8885; border-radius: 6px; padding: .6rem 1rem; margin: .8rem 0; }
header { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; }
.up { color: rgb(var(--up)); } .down { color: rgb(var(--down)); } .score { font-weight: 600; min-width: 6rem; }
.place, .note { opacity: .7; font-size: .9em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0; }
pre i { font-style: normal; opacity: .45; }
svg { width: 100%; height: 48px; } svg line { stroke: #8888; }
svg .up { fill: rgb(var(--up)); } svg .down { fill: rgb(var(--down)); }
"""


def page(title: str, reports: list[Report], examples: Examples, steps: int, top: int, exact: bool) -> str:
    """The whole page, without scripts or external resources."""
    unit = "nats" if exact else "TracIn, not in nats"
    how = (
        "A score is the predicted rise of the loss, in nats, if the example had been left out of training; green "
        "helped, red hurt. A token's colour is its share of the score."
        if exact
        else "A score is a sum of gradient dot products at the kept checkpoints (TracIn); green helped, red hurt."
    )
    body = "".join(_report(report, examples, steps, top, unit) for report in reports)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>\n<h1>{escape(title)}</h1>\n<p>{how}</p>\n{body}</html>\n"
    )


def _report(report: Report, examples: Examples, steps: int, top: int, unit: str) -> str:
    quotes = "".join(
        f"<blockquote>{_marked(examples.tokenizer, query.ids, np.zeros(len(query.ids) - 1), query.learn)}</blockquote>"
        for query in report.queries
    )
    parts = [
        f"<h2>loss {report.loss:.4f} nats over {report.n_targets} tokens</h2>{quotes}",
        _timeline(_per_step(report, steps), "sum of absolute scores by step"),
        f'<p class="note">How much each step matters: step 1 to {steps:,} from left to right.</p>',
    ]
    for heading, numbers in (("Helped most", report.helped(top)), ("Hurt most", report.hurt(top))):
        parts.append(f"<h3>{heading}</h3>" + ("" if numbers else '<p class="note">none</p>'))
        parts += [_example(report, number, examples, steps, unit) for number in numbers]
    if report.unseen:
        parts.append(f'<p class="note">{report.unseen:,} examples were seen by no step: score 0.</p>')
    return "\n".join(parts) + "\n"


def _example(report: Report, number: int, examples: Examples, steps: int, unit: str) -> str:
    score = report.scores.totals[number]
    sign = "up" if score > 0 else "down"
    retrained = f"; retrained without it: {report.retrained[number]:+.4f}" if number in report.retrained else ""
    seen = report.scores.by_step.get(number, [])
    before, after = examples.context(number, CONTEXT)
    marked = _marked(examples.tokenizer, examples.ids(number), report.scores.tokens[number])
    values = np.zeros(steps)
    for step, value in seen:
        values[step] += value
    return (
        f'<article><header><span class="score {sign}">{score:+.4f}</span><span>{unit}{retrained}</span>'
        f'<span class="place">{escape(str(examples.place(number)))}, seen {len(seen)} ×</span></header>'
        f"<pre><i>{escape(before)}</i>{marked}<i>{escape(after)}</i></pre>"
        f"{_timeline(values, 'score by step')}</article>"
    )


def _per_step(report: Report, steps: int) -> np.ndarray:
    """The sum of the absolute scores of each step's examples, (steps,)."""
    values = np.zeros(steps)
    for seen in report.scores.by_step.values():
        for step, value in seen:
            values[step] += abs(value)
    return values


def _timeline(values: np.ndarray, label: str) -> str:
    """A bar per step, up for helped and down for hurt, as an SVG."""
    largest = float(np.abs(values).max()) or 1.0
    bars = "".join(
        f'<rect class="{"up" if v > 0 else "down"}" x="{i}" width="1" '
        f'y="{24 - max(v, 0) / largest * 23:.2f}" height="{abs(v) / largest * 23:.2f}"/>'
        for i, v in enumerate(values.tolist())
        if v
    )
    return (
        f'<svg viewBox="0 0 {len(values)} 48" preserveAspectRatio="none" role="img" aria-label="{label}">'
        f'<title>{label}</title><line x1="0" x2="{len(values)}" y1="24" y2="24" stroke-width=".5"/>{bars}</svg>'
    )


def _marked(tokenizer: Tokenizer, ids: np.ndarray, scores: np.ndarray, bold: np.ndarray | None = None) -> str:
    """The tokens' texts; each but the first has its score, that of predicting it, as its colour and tooltip."""
    largest = float(np.abs(scores).max()) or 1.0
    out = []
    for i, text in enumerate(pieces(tokenizer, ids)):
        value = float(scores[i - 1]) if i else 0.0
        shown = f"<b>{escape(text)}</b>" if bold is not None and bold[i] else escape(text)
        share = abs(value) / largest
        if share < 0.02:
            out.append(shown)
            continue
        colour = "--up" if value > 0 else "--down"
        out.append(
            f'<span style="background: rgba(var({colour}), {0.6 * share:.2f})" title="{value:+.5f}">{shown}</span>'
        )
    return "".join(out)


def pieces(tokenizer: Tokenizer, ids: np.ndarray) -> list[str]:
    """The text of each token; one that ends inside a character has none, and the next has all of it."""
    out, begin = [], 0
    numbers = [int(i) for i in ids]
    for i in range(len(numbers)):
        first = max(0, begin - 1)  # with the token before, because some tokenizers drop a leading space
        before = tokenizer.decode(numbers[first:begin])
        text = tokenizer.decode(numbers[first : i + 1])[len(before) :]
        complete = not text.endswith("\ufffd")
        out.append(text if complete else "")
        begin = i + 1 if complete else begin
    return out
