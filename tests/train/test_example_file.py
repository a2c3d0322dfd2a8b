"""Examples in a temporary file: the same examples, rows and batches as in memory, which they do not fill."""

from __future__ import annotations

import errno
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.data.example import Example
from onfoot.data.example_file import ExampleFile, StoredExamples, StoredPairs, choose, lengths_of, target_counts
from onfoot.data.packing import Rows
from onfoot.data.preference_source import Pairs, fit_pairs, split_pairs
from onfoot.data.sft import SftSource, load_source
from onfoot.data.sft_examples import fit, split_examples
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train import finetune
from onfoot.train.options import FinetuneOptions

PLAIN = ChatTemplate()


def made(n: int, seed: int = 3, longest: int = 30) -> list[Example]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        size = int(rng.integers(3, longest))
        learn = np.arange(size) >= rng.integers(1, size)
        question = ["", "why?", "how \ud800 ü\n"][i % 3]
        out.append(
            Example(
                rng.integers(0, 1 << 30, size).astype(np.int32), learn, f"a b.jsonl, line {i}", question, i % 2 == 0
            )
        )
    return out


def stored(examples: list[Example], folder: Path | None = None) -> StoredExamples:
    with ExampleFile(folder) as file:
        for example in examples:
            file.append(example)
        return file.examples()


def same(a: Example, b: Example) -> bool:
    texts = (a.where, a.question, a.templated) == (b.where, b.question, b.templated)
    arrays = np.array_equal(a.ids, b.ids) and np.array_equal(a.learn, b.learn)
    return texts and arrays and a.ids.dtype == b.ids.dtype and a.learn.dtype == b.learn.dtype


def test_examples_come_back_as_they_were_written() -> None:
    examples = made(40)
    read = stored(examples)
    assert len(read) == 40
    assert all(same(a, b) for a, b in zip(read, examples, strict=True))
    assert same(read[-1], examples[-1]) and same(read[5:9][1], examples[6])
    with pytest.raises(IndexError):
        read[40]
    assert lengths_of(read).tolist() == [len(e) for e in examples]
    assert target_counts(read).tolist() == [e.n_targets for e in examples]
    assert read.n_templated == 20


def test_a_choice_is_in_its_own_order_and_truncated() -> None:
    examples, order = made(40), np.array([7, 3, 39, 0])
    read = choose(stored(examples), order, 9)
    assert isinstance(read, StoredExamples)
    expected = [examples[i].cut(9) if len(examples[i]) > 9 else examples[i] for i in order]
    assert all(same(a, b) for a, b in zip(read, expected, strict=True))
    assert read.lengths.tolist() == [len(e) for e in expected]
    assert read.target_counts.tolist() == [e.n_targets for e in expected]
    assert all(same(a, b) for a, b in zip(read[::-1], expected[::-1], strict=True))
    again = read.choose(np.array([2]))
    assert same(again[0], expected[2])


@pytest.mark.parametrize("on_long", ["truncate", "skip"])
@pytest.mark.parametrize("pack", [True, False])
def test_batches_are_those_of_examples_in_memory(on_long: str, pack: bool) -> None:
    def source(examples: Any) -> tuple[SftSource, str]:
        read = fit(examples, 17, on_long)
        train, held_out = split_examples(read.kept, 0.2, 5)
        about = read.report()
        return SftSource(Rows(train, 17, 1, pack), Rows(held_out, 17, 1, pack), 3, 2, about=about), about

    examples = made(60)
    (ours, about), (expected, same_about) = source(stored(examples)), source(examples)
    assert isinstance(ours.train.examples, StoredExamples) and isinstance(expected.train.examples, list)
    assert about == same_about and ours.report() == expected.report()
    assert ours.fingerprint() == expected.fingerprint()
    assert ours.question() == expected.question()
    assert list(ours.train.plan) == list(expected.train.plan) and ours.train.width == expected.train.width
    for step in range(40):  # several epochs
        for a, b in zip(ours.microbatches(step), expected.microbatches(step), strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        for x, y in zip(ours.example_numbers(step), expected.example_numbers(step), strict=True):
            assert np.array_equal(x, y)
    for a, b in zip(ours.validation(), expected.validation(), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_pairs_stay_together_through_fitting_and_splitting() -> None:
    examples = made(60)
    pairs = StoredPairs(stored(examples))
    assert len(pairs) == 30 and same(pairs[4][0], examples[8]) and same(pairs[-1][1], examples[59])
    kept, report = fit_pairs(pairs, 20, "skip")
    expected = [i for i in range(30) if max(len(examples[2 * i]), len(examples[2 * i + 1])) <= 20]
    assert [c.where for c, _ in kept] == [examples[2 * i].where for i in expected]
    assert f"{len(expected)} of 30 pairs" in report
    train, held_out = split_pairs(kept, 0.3, 1)
    order = np.random.default_rng(1).permutation(len(kept))
    n = round(len(kept) * 0.3)
    assert [c.where for c, _ in held_out] == [kept[int(i)][0].where for i in order[:n]]
    assert [r.where for _, r in train] == [kept[int(i)][1].where for i in sorted(order[n:])]
    assert Pairs(train, 0).longest == max(len(e) for pair in train for e in pair)


def lines(path: Path, n: int) -> Path:
    with path.open("w") as file:
        for i in range(n):
            file.write(json.dumps({"prompt": f"{i} " + "word " * (50 + i % 7), "completion": "yes " * 20}) + "\n")
    return path


def peak(path: Path, n: int) -> int:
    """Bytes that Python and NumPy had allocated at most while n examples were read and 20 steps were made."""
    lines(path, n)
    tracemalloc.start()
    source = load_source([path], byte_tokenizer(), PLAIN, max_length=512, batch_size=4, seed=1)
    source.fingerprint(), source.report(), source.question()
    for step in range(20):
        source.microbatches(step)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def test_memory_does_not_grow_with_the_tokens_of_the_examples(tmp_path: Path) -> None:
    peak(tmp_path / "first.jsonl", 20)  # whatever is allocated only once
    few, many = peak(tmp_path / "few.jsonl", 150), peak(tmp_path / "many.jsonl", 1500)
    per_example = (many - few) / 1350
    assert per_example < 250  # their ids and masks are 5 bytes per token, of about 340


def test_nothing_is_left_in_the_run_folder_and_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    model = onfoot.create(onfoot.GPT2Config(vocab_size=257, n_positions=64, n_embd=12, n_layer=1, n_head=2))
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path / "base")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}:", "completion": f"{i * i}"}) + "\n" for i in range(30)))
    settings = FinetuneOptions(
        model=str(tmp_path / "base"), data=[str(data)], full=True, steps=6, eval_every=9, save_every=3, sample_tokens=0,
        quiet=True, lr=1e-3, keep=9,
    )  # fmt: skip
    trainer = finetune.start(tmp_path / "run", settings)
    assert not [p for p in (tmp_path / "run").iterdir() if p.name.startswith(".examples-")]
    whole = trainer.run()
    steps = iter(finetune.start(tmp_path / "half", settings))
    for _ in range(3):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    resumed, _ = finetune.resume(tmp_path / "half")
    assert resumed.run().validation_loss == whole.validation_loss
    assert all(np.array_equal(p, trainer.model.params[n]) for n, p in resumed.model.params.items())


def test_a_full_disk_is_said_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            pass

    file = ExampleFile(tmp_path)
    file._file.close()
    monkeypatch.setattr(file, "_file", Full())
    with pytest.raises(ValueError, match=r"after 0 bytes: No space left on device; make room, or choose another disk"):
        file.append(made(1)[0])


def test_a_folder_that_cannot_be_written_is_replaced_by_the_systems_own(tmp_path: Path) -> None:
    assert same(stored(made(1), tmp_path / "missing")[0], made(1)[0])
