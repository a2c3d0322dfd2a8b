"""What is shown while the start of a run takes long, and who counts how much is done."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from onfoot.data import corpus
from onfoot.data.count import Count
from onfoot.data.records import ReadLog
from onfoot.data.sft import load_source
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train import start
from onfoot.train.start import Working


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (Count("examples", 0, 12_000), "12,000 examples"),
        (Count("answers", 40_000, 1_500), "1,500 of 40,000 answers"),
        (Count("bytes", 79_000_000, 12_400_000), "12 of 79 MB"),
        (Count("bytes", 0, 3_600_000_000), "3,600 MB"),
    ],
)
def test_a_count_says_how_much_is_done(count: Count, said: str) -> None:
    assert str(count) == said


def working(out: io.StringIO, clock: list[float], terminal: bool) -> Working:
    """What shows long work, on a terminal or in a pipe, with this clock."""
    console = Console(file=out, width=40, force_terminal=terminal, force_interactive=terminal, color_system=None)
    return Working(console, lambda: clock[0])


def test_long_work_has_a_line_every_ten_seconds_where_there_is_no_terminal() -> None:
    out, clock, count = io.StringIO(), [100.0], Count("examples")
    shown = working(out, clock, terminal=False)
    shown.begin("reading and tokenizing a-file-with-a-name-beyond-the-width.jsonl", count)
    for _ in range(50):
        clock[0] += 0.5
        count.done += 1_000
        shown.tick()
    shown.begin("fitting a bigram model")
    for _ in range(21):
        clock[0] += 0.5
        shown.tick()
    assert out.getvalue().splitlines() == [
        "reading and tokenizing a-file-with-a-name-beyond-the-width.jsonl",
        "  20,000 examples, 0:10 so far",
        "  40,000 examples, 0:20 so far",
        "fitting a bigram model",
        "  0:10 so far",
    ]


def test_on_a_terminal_the_line_below_changes_and_is_gone_when_something_else_begins() -> None:
    out, clock, count = io.StringIO(), [0.0], Count("bytes", 79_000_000)
    shown = working(out, clock, terminal=True)
    shown.begin("tokenizing the text", count)
    seen = []
    for seconds in range(1, 4):
        clock[0], count.done = float(seconds), seconds * 1_000_000
        before = len(out.getvalue())
        shown.tick()
        seen.append(out.getvalue()[before:])
    for seconds, text in enumerate(seen, start=1):
        assert f"  {seconds} of 79 MB, 0:0{seconds} so far" in text
        assert text.count("\n") == 0  # in place
    before = len(out.getvalue())
    shown.begin("creating the model")
    after = out.getvalue()[before:]
    assert "\x1b[2K" in after and after.index("\x1b[2K") < after.index("creating the model")  # erased first
    assert after.endswith("creating the model\n")


def test_a_thread_ticks_until_the_work_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, ticks = [], []
    shown = working(io.StringIO(), [0.0], terminal=False)

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) > 3

    monkeypatch.setattr(shown._over, "wait", wait)
    monkeypatch.setattr(shown, "tick", lambda: ticks.append(1))
    with shown:
        shown._thread.join()  # ends by itself, as the work is over at the fourth wait
    assert waits == [start.WORKING_EVERY] * 4 and len(ticks) == 3 and start.WORKING_EVERY <= 1


def test_output_that_nobody_reads_ends_the_thread_and_not_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = working(io.StringIO(), [0.0], terminal=False)

    ticks = []

    def tick() -> None:
        ticks.append(1)
        raise BrokenPipeError

    monkeypatch.setattr(shown._over, "wait", lambda seconds: False)  # the work is never over
    monkeypatch.setattr(shown, "tick", tick)
    with shown:
        shown._thread.join()
    assert ticks == [1]


def test_the_bytes_are_counted_where_a_text_is_tokenized_and_not_in_the_passes_before(tmp_path: Path) -> None:
    text = corpus.Text("a", text="grüße")
    log = ReadLog(count=Count("bytes", corpus.n_bytes([text])))
    assert list(corpus.all_pieces([text], log)) == ["grüße"] and (log.count.done, log.count.total) == (0, 7)
    corpus.write_tokens([text], byte_tokenizer(), tmp_path, log)
    assert log.count.done == 7


def test_whoever_reads_files_counts_what_is_read(tmp_path: Path) -> None:
    texts, examples = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    texts.write_text('{"text": "abc"}\n{"text": "de"}\n')
    examples.write_text('{"prompt": "a", "completion": "b"}\n' * 5)
    found = corpus.find_texts([texts])
    corpus.write_tokens(found, byte_tokenizer(), tmp_path, log := ReadLog(count=Count("bytes")))
    assert log.count.done == 5
    assert corpus.n_bytes(found) == 0  # the file's size is not that of its texts
    (tmp_path / "c.txt").write_text("x" * 99)
    assert corpus.n_bytes(corpus.find_texts([tmp_path / "c.txt"])) == 99
    load_source(
        [examples], byte_tokenizer(), ChatTemplate(), max_length=9, batch_size=1, count=(count := Count("examples"))
    )
    assert count.done == 5
