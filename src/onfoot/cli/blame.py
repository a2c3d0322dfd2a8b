"""`onfoot blame`: which training examples made a model say this?"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from onfoot.cli.console import Sheet, show_sheet, show_text
from onfoot.cli.options import Threads, check_writable

if TYPE_CHECKING:
    from onfoot.blame.query import Query
    from onfoot.blame.report import Report
    from onfoot.blame.run import OpenRun
    from onfoot.blame.scores import Scores

CONTEXT = 12  # tokens shown before and after a window
WIDTH = 120  # characters of an example in the table


def blame(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder of onfoot train or onfoot finetune.")],
    prompt: Annotated[str | None, typer.Option(help="The text before the completion.", show_default=False)] = None,
    completion: Annotated[
        str | None, typer.Option(help="The text to explain: why is it likely, or unlikely?", show_default=False)
    ] = None,
    queries: Annotated[
        Path | None,
        typer.Option(help="A .jsonl file with a prompt and completion per line, instead.", show_default=False),
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="Explain each query on its own, not their sum.")] = False,
    top: Annotated[int, typer.Option(help="Examples to show that helped most, and that hurt most.", min=1)] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the scores of all examples to this file.", show_default=False)
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write an offline page to this file.", show_default=False)
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="TracIn instead: gradient dot products at the kept checkpoints.")
    ] = False,
    verify: Annotated[
        int, typer.Option(help="Retrain without each of the N highest and the N lowest, and compare.", min=0)
    ] = 0,
    since: Annotated[
        int, typer.Option(help="Consider only what was learned after this step; 0: in the whole training.", min=0)
    ] = 0,
    checkpoint: Annotated[
        str, typer.Option(help="The checkpoint to explain: best, last, or the step of a kept one.")
    ] = "best",
    memory: Annotated[
        int | None,
        typer.Option(
            help="MB of memory for replayed states, beyond which they are in temporary files; by default a quarter of "
            "the machine's.",
            min=1,
            show_default=False,
        ),
    ] = None,
    threads: Threads = None,
) -> None:
    """Find the training examples that made a model say this, by replaying its training backwards.

    The score of an example is the rise of the query's loss, in nats, that is predicted if the example's targets had
    been left out of every step: examples with positive scores helped, those with negative scores hurt. The scores are
    exact derivatives through every step of the run (AdamW, clipping, schedule, packing).
    """
    from onfoot.blame.query import encode_query, read_queries
    from onfoot.blame.report import Report, added
    from onfoot.blame.run import open_run

    if (completion is None) == (queries is None):
        raise ValueError("give either --completion (with or without --prompt) or --queries FILE.jsonl")
    if queries is not None and prompt is not None:
        raise ValueError("--prompt cannot be used with --queries: each line of the file has its own prompt")
    if each and queries is None:
        raise ValueError("--each: only valid with --queries")
    check_writable(json_file, "--json")
    check_writable(html_file, "--html")
    lines = [{"prompt": prompt or "", "completion": completion}] if queries is None else read_queries(queries)
    opened = open_run(run, checkpoint, threads, None if memory is None else memory << 20)
    for warning in opened.warnings:
        show_text(warning, "yellow")
    if since >= opened.last:
        raise ValueError(f"--since must be below the checkpoint's step, {opened.last:,}; got {since:,}")
    asked = [encode_query(opened.trainer, line) for line in lines]
    losses = _losses(opened, asked)
    _say_query(opened, asked, losses)
    if fast:
        scores = _fast(opened, asked, since)
    else:
        scores = _exact(opened, asked, since, verify * 2 * (len(asked) if each else 1), merge=not each)
    if each or len(asked) == 1 or fast:
        reports = [Report([q], loss, s) for q, loss, s in zip(asked, losses, scores, strict=True)]
        reports = reports if each else [added(reports)]
    else:
        reports = [Report(asked, sum(losses), scores[0])]
    for report in reports:
        _verify(opened, report, verify, since)
    for i, report in enumerate(reports, start=1):
        _show(report, opened, top, f"query {i}: " if each else "", exact=not fast)
    if json_file is not None:
        _write_json(json_file, reports, opened, each)
        show_text(f"\nscores of all {len(opened.examples):,} examples: {json_file}")
    if html_file is not None:
        from onfoot.blame.page import page
        from onfoot.formats.write import write_text

        write_text(html_file, page(f"Why did {run} say that?", reports, opened.examples, opened.last, top, not fast))
        show_text(f"page: {html_file}")


def _losses(opened: OpenRun, asked: list[Query]) -> list[float]:
    replay = opened.replay
    replay.put_params(replay.at(opened.last).params)
    return [query.loss(replay.model) for query in asked]


def _say_query(opened: OpenRun, asked: list[Query], losses: list[float]) -> None:
    n_targets, loss = sum(query.n_targets for query in asked), sum(losses)
    what = asked[0].text(opened.examples.tokenizer) if len(asked) == 1 else f"{len(asked)} queries"
    mean = f"{loss / n_targets:.4f} per token"
    show_text(f"{what}\nloss {loss:.4f} nats over {n_targets} tokens ({mean}) at step {opened.last:,}")


def _exact(opened: OpenRun, asked: list[Query], since: int, retrainings: int, merge: bool) -> list[Scores]:
    """The scores of each query, or with `merge` those of the sum of all."""
    from onfoot.blame.scores import replay_backwards
    from onfoot.train.progress import duration

    replay = opened.replay
    plan = replay.plan(opened.last, since)
    replay.put_params(replay.at(opened.last).params)
    gradients = [replay.layout.flat(query.gradient(replay.model)) for query in asked]
    if merge:
        gradients = [np.sum(gradients, axis=0)]
    forward, backward = _measure(opened, gradients[0])
    seconds = plan.replayed * forward + plan.steps * backward * len(gradients) + retrainings * opened.last * forward
    space = f"{plan.disk / 1e6:,.0f} MB in temporary files" if plan.disk else f"{plan.memory / 1e6:,.0f} MB of memory"
    states = f"{len(plan.segments):,} known state{'s' if len(plan.segments) > 1 else ''}"
    show_text(f"replaying {plan.steps:,} steps backwards from {states}: about {duration(seconds)}, {space} for states")
    with _progress(plan.steps) as done:
        return replay_backwards(replay, replay.backwards(plan), gradients, len(opened.examples), lambda step: done())


def _measure(opened: OpenRun, gradient: np.ndarray) -> tuple[float, float]:
    """Seconds of one training step, and of one step backwards."""
    from onfoot.blame.adjoint import Adjoints
    from onfoot.blame.scores import Scores, step_backwards

    replay = opened.replay
    replay.put(0, replay.initial)
    replay.forward()  # the first one is recorded
    begin = time.monotonic()
    step = replay.forward()
    forward = time.monotonic() - begin
    for _ in range(2):  # here too
        begin = time.monotonic()
        step_backwards(replay, step, Adjoints.of_query(gradient), Scores.zeros(len(opened.examples)))
    return forward, time.monotonic() - begin


def _fast(opened: OpenRun, asked: list[Query], since: int) -> list[Scores]:
    from onfoot.blame.fast import segments, tracin

    show_text(f"gradient dot products at {len(segments(opened.replay, opened.last)):,} kept checkpoints (TracIn)")
    with _progress(opened.last - since) as done:
        return tracin(opened.replay, opened.last, asked, len(opened.examples), lambda step: done(), since)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A progress bar; the function that it gives counts one more step."""
    from onfoot.train.progress import Reporter

    count = 0
    with Reporter(total) as report:

        def done() -> None:
            nonlocal count
            count += 1
            report.update(count, {})

        yield done


def _verify(opened: OpenRun, report: Report, n: int, since: int) -> None:
    """Retrains without each of the examples with the n highest and n lowest scores."""
    from onfoot.blame.leave_out import retrained_losses

    if not n:
        return
    numbers = [*report.helped(n), *report.hurt(n)]
    with _progress(len(numbers) * opened.last) as done:
        for number in numbers:
            losses = retrained_losses(opened.replay, opened.last, report.queries, [number], done, since)
            report.retrained[number] = sum(losses) - report.loss


def _show(report: Report, opened: OpenRun, top: int, prefix: str, exact: bool) -> None:
    unit = "nats" if exact else "TracIn"
    columns = [f">{unit}", *([">retrained"] if report.retrained else []), ">seen", "where", "text"]
    parts = (
        (f"{prefix}helped most: without it, the loss would be higher", report.helped(top)),
        (f"{prefix}hurt most: without it, the loss would be lower", report.hurt(top)),
    )
    for title, numbers in parts:
        rows = [_row(report, number, opened) for number in numbers]
        show_sheet(Sheet(title, columns, rows, [] if rows else ["none"]))
    if report.unseen:
        show_text(f"\n{report.unseen:,} of {len(opened.examples):,} examples were seen by no step: score 0")
    if exact and report.out_of_range:
        show_text(
            "\nthe largest score exceeds the loss itself: this training is too unstable for a first-order prediction; "
            "try --since, --verify, or a training with a lower --lr",
            "yellow",
        )


def _row(report: Report, number: int, opened: OpenRun) -> tuple[str, ...]:
    examples, scores = opened.examples, report.scores
    retrained = [f"{report.retrained[number]:+.4f}" if number in report.retrained else ""] if report.retrained else []
    before, after = examples.context(number, CONTEXT)
    text = f"{before}[{examples.text(number)}]{after}" if before or after else examples.text(number)
    text = text.replace("\n", "⏎")
    seen = f"{len(scores.by_step.get(number, ())):,} ×"
    place = str(examples.place(number))
    return f"{scores.totals[number]:+.4f}", *retrained, seen, place, text if len(text) <= WIDTH else f"{text[:WIDTH]}…"


def _write_json(path: Path, reports: list[Report], opened: OpenRun, each: bool) -> None:
    from onfoot.formats.write import write_text

    found = [_json_list(report.as_json(opened.examples)) for report in reports]
    heads = [f'"query": {json.dumps(report.queries[0].line)}, "loss": {json.dumps(report.loss)}' for report in reports]
    parts = [f'{{{head}, "examples": {examples}}}' for head, examples in zip(heads, found, strict=True)]
    write_text(path, f"[{', '.join(parts)}]\n" if each else f"{found[0]}\n")


def _json_list(values: list[Any]) -> str:
    """A JSON list with one value per line."""
    return "[\n" + ",\n".join(json.dumps(value, ensure_ascii=False) for value in values) + "\n]"
