"""The input that the page opens with if the user names none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from onfoot.data.corpus import open_tokens
from onfoot.explore.default_model import TEXT
from onfoot.explore.texts import read_text

if TYPE_CHECKING:
    from onfoot.models.model import Model

READ = 2_000  # tokens of a run's data that are searched for a line
TOKENS = range(8, 33)  # of a line that fits the screen
IDS = 8  # of a model without a tokenizer


def choose_input(model: Model, folder: Path | None) -> dict[str, str]:
    """A line of the run's data, else the default text, else ids: {"kind": "text" or "ids", "value": …}."""
    for text in _texts(model, folder):
        try:
            read_text(model, text)
        except ValueError:  # no tokenizer, or not its characters, or too long
            continue
        return {"kind": "text", "value": text}
    n = min(IDS, model.config.n_positions)
    return {"kind": "ids", "value": " ".join(str(i % model.config.vocab_size) for i in range(1, n + 1))}


def _texts(model: Model, folder: Path | None) -> Iterator[str]:
    if folder is not None and model.tokenizer is not None:
        yield from _lines(model, folder)
    yield TEXT


def _lines(model: Model, folder: Path) -> Iterator[str]:
    """Lines of the text that a run was trained on, those that fit the screen; then its beginning."""
    data = next(
        (path / "data" for path in (folder, *folder.resolve().parents[:2]) if (path / "run.json").is_file()), None
    )
    if data is None or model.tokenizer is None:
        return
    try:
        ids = open_tokens(data)[:READ].tolist()
        for line in model.tokenizer.decode(ids).splitlines()[:-1]:
            if len(model.tokenizer.encode(line.strip())) in TOKENS:
                yield line.strip()
        yield model.tokenizer.decode(ids[: TOKENS.stop - 1])
    except (OSError, ValueError):  # a run whose data are elsewhere
        return
