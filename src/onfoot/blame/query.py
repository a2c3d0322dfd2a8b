"""The question: a prompt and a completion, encoded as the run's own examples are, and the gradient of its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.arrays import Array
from onfoot.data.corpus import find_texts
from onfoot.data.records import READERS, ReadLog, first_record, json_lines
from onfoot.data.sft_examples import form_of, read_example
from onfoot.formats.chat import check_text
from onfoot.formats.tokenizer import Tokenizer
from onfoot.generate.chat import template_of
from onfoot.models.model import Model
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.loop import Trainer
from onfoot.train.options import FinetuneOptions

Line = dict[str, Any]  # a prompt with its completion, or any other form of an example


@dataclass(frozen=True)
class Query:
    """A text; its loss is −log P(completion | prompt) in nats, the sum over the completion's tokens."""

    line: Line
    ids: np.ndarray  # (n + 1,)
    learn: np.ndarray  # (n + 1,), True for ids of the completion

    @property
    def targets(self) -> np.ndarray:
        """(n,)"""
        return np.where(self.learn[1:], self.ids[1:], IGNORE)

    @property
    def n_targets(self) -> int:
        return int(self.learn[1:].sum())

    def text(self, tokenizer: Tokenizer) -> str:
        """The prompt and the completion, as the model sees them."""
        first = int(self.learn.argmax())
        return f"{tokenizer.decode(self.ids[:first].tolist())!r} → {tokenizer.decode(self.ids[first:].tolist())!r}"

    def loss(self, model: Model) -> float:
        return model.loss(self.ids[None, :-1], self.targets[None], divisor=1.0)

    def gradient(self, model: Model) -> dict[str, Array]:
        return model.loss_and_grads(self.ids[None, :-1], self.targets[None], divisor=1.0)[1]


def read_queries(path: Path) -> list[Line]:
    """The lines of a .jsonl file of queries."""

    def checked(value: Any, where: str) -> Line:
        form_of(value)
        return value

    lines = list(ReadLog().read(json_lines(path), checked))
    if not lines:
        raise ValueError(f'{path} has no queries; each line must have "prompt" and "completion"')
    return lines


def encode_query(trainer: Trainer, line: Line) -> Query:
    """The query as the run's own examples are encoded: plain text in training, a rendered example in fine-tuning."""
    model = trainer.model
    if form_of(line) == "prompt":
        for name in ("prompt", "completion"):
            check_text(line[name], f'"{name}"')
        if not line["completion"]:
            raise ValueError("the completion is empty, so the query has no loss; give the text to be explained")
    if isinstance(trainer.options, FinetuneOptions):
        query = _as_example(trainer, trainer.options, line)
    else:
        query = _as_text(model, line)
    limit = model.config.n_positions
    if len(query.ids) - 1 > limit:
        raise ValueError(
            f"the query has {len(query.ids) - 1:,} tokens, more than n_positions={limit} of the model; shorten it"
        )
    return query


def _as_example(trainer: Trainer, options: FinetuneOptions, line: Line) -> Query:
    """A prompt and completion take the form of the run's first example; other forms are kept."""
    model = trainer.model
    assert model.tokenizer is not None
    shown = line
    if form_of(line) == "prompt":
        first = first_record(_first_file(options.data))
        prompt, completion = line["prompt"], line["completion"]
        roles = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        forms = {
            "prompt": line,
            "instruction": {"instruction": prompt, "output": completion},
            "messages": {"messages": roles},
            "conversations": {"messages": roles},
            "text": line,
        }
        line = forms[form_of(first)]
    example = read_example(line, template_of(model), model.tokenizer, "the query", options.template)
    return Query(shown, example.ids.astype(np.int64), example.learn)


def _first_file(data: Sequence[str]) -> Path:
    path = find_texts([Path(p) for p in data], tuple(READERS))[0].path
    assert path is not None
    return path


def _as_text(model: Model, line: Line) -> Query:
    """The ids of the prompt, then those of the completion; without a prompt, the EOS token comes first.

    The texts of such a run have no BOS token, and neither has the query.
    """
    tokenizer = model.tokenizer
    assert tokenizer is not None
    if form_of(line) != "prompt":
        raise ValueError('a run of onfoot train has plain texts; give queries with "prompt" and "completion"')
    prompt, completion = tokenizer.encode(line["prompt"]), tokenizer.encode_after(line["prompt"], line["completion"])
    if not prompt and tokenizer.eos_id is not None:
        prompt = [tokenizer.eos_id]
    ids, learn = np.array(prompt + completion, np.int64), np.array([False] * len(prompt) + [True] * len(completion))
    if not learn[1:].any():
        raise ValueError("no token comes before the completion; give a prompt")
    return Query(line, ids, learn)
