"""A slice of the campaign `fuzz`: hostile files for every reader, the same ones each time."""

from __future__ import annotations

from pathlib import Path

from campaigns import fuzz, fuzz_corpus, fuzz_mutations


def test_no_reader_fails_otherwise_than_with_a_value_error() -> None:
    outcome = fuzz.run(1500, 16)
    assert outcome.failures == []
    assert outcome.figures["inputs"] == 1500
    assert outcome.figures["refused"] > 700 and outcome.figures["read"] > 200  # neither all nor nothing


def test_the_same_seed_gives_the_same_inputs(tmp_path: Path) -> None:
    cases = fuzz_corpus.build(tmp_path / "corpus")

    def hostile(seed: int, index: int) -> tuple[str, bytes]:
        random, case, file = fuzz.choose(cases, seed, index)
        return f"{case.name}/{file}", fuzz_mutations.mutate((case.folder / file).read_bytes(), file, random)

    first, again, other = ([hostile(seed, i) for i in range(40)] for seed in (3, 3, 4))
    assert first == again
    assert sum(a != b for a, b in zip(first, other, strict=True)) > 35
