"""From lines of .jsonl to token ids and a mask: which of them the model has to learn to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.data import corpus
from onfoot.formats.chat import ChatTemplate, Part, check_messages, check_text
from onfoot.formats.files import plain_name
from onfoot.formats.tokenizer import Tokenizer
from onfoot.ops.cross_entropy import IGNORE

INSTRUCTION = "Instruction:\n{instruction}\n\nAnswer:\n"
INSTRUCTION_WITH_INPUT = "Instruction:\n{instruction}\n\nInput:\n{input}\n\nAnswer:\n"
FORMS = {"prompt": ("prompt", "completion"), "instruction": ("instruction", "output"), "messages": ("messages",)}
OPTIONAL = {"prompt": (), "instruction": ("input",)}
ACCEPTED = '{"prompt", "completion"}, {"instruction", "output"} with or without "input", or {"messages"}'
ON_LONG = ("refuse", "truncate", "skip")


@dataclass(frozen=True, eq=False)
class Example:
    """The ids of one example. The last is only a target, so an example takes one position less than it has ids."""

    ids: np.ndarray  # (n + 1,)
    learn: np.ndarray  # (n + 1,), whether an id belongs to a completion
    where: str  # file and line

    def __len__(self) -> int:
        return len(self.ids) - 1

    @property
    def tokens(self) -> np.ndarray:
        """What goes into the model, (n,)."""
        return self.ids[:-1]

    @property
    def targets(self) -> np.ndarray:
        """What each token has to predict: its successor where that belongs to a completion, else −100, (n,)."""
        return np.where(self.learn[1:], self.ids[1:], IGNORE)

    @property
    def n_targets(self) -> int:
        return int(self.learn[1:].sum())

    @property
    def prompt(self) -> np.ndarray:
        """The ids before the first completion."""
        return self.ids[: int(self.learn.argmax())]

    def cut(self, length: int) -> Example:
        """Its first `length` tokens and their targets."""
        return Example(self.ids[: length + 1], self.learn[: length + 1], self.where)


@dataclass(frozen=True)
class Examples:
    """Examples that fit, and what became of those that did not."""

    kept: list[Example]
    max_length: int
    truncated: int = 0  # of those that were kept
    cut_away: int = 0  # dropped: the cut would have left nothing of the completion
    skipped: int = 0  # dropped for being long

    @property
    def read(self) -> int:
        return len(self.kept) + self.cut_away + self.skipped

    def report(self) -> str:
        """How many examples there are, and every one that was changed or left out."""
        n_targets, n_tokens = sum(e.n_targets for e in self.kept), sum(map(len, self.kept))
        lines = [f"{len(self.kept):,} of {self.read:,} examples, {n_tokens:,} tokens with {n_targets:,} to learn"]
        longer = f"longer than max_length={self.max_length}"
        if self.truncated:
            lines.append(f"{self.truncated:,} {longer}: cut at the end")
        if self.cut_away:
            lines.append(f"{self.cut_away:,} {longer}: left out, for the cut took the whole completion")
        if self.skipped:
            lines.append(f"{self.skipped:,} {longer}: left out")
        return "\n".join(lines)


def read_examples(paths: Sequence[Path], tokenizer: Tokenizer, template: ChatTemplate) -> list[Example]:
    """Every example of the given .jsonl files (and of folders that hold such), in order and whole."""
    if not paths:
        raise ValueError(f"no data was given; a .jsonl file is needed, each line one of {ACCEPTED}")
    examples: list[Example] = []
    for text in corpus.find_texts(paths, (".jsonl",)):
        assert text.path is not None
        before = len(examples)
        for number, value in corpus.json_lines(text.path):
            where = f"{text.path}, line {number}"
            try:
                examples.append(encode(read_parts(value, template), tokenizer, where))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        if len(examples) == before:
            raise ValueError(f"{text.path} holds no example, only blank lines; each line must be one of {ACCEPTED}")
    return examples


def read_parts(value: Any, template: ChatTemplate) -> list[Part]:
    """The texts of one example, prompts and completions in turn; the last is a completion."""
    form = _form(value)
    if form == "messages":
        return _chat_parts(value["messages"], template)
    texts = {name: check_text(value[name], f'"{name}"') for name in (*FORMS[form], *OPTIONAL[form]) if name in value}
    if form == "instruction":
        prompt = (INSTRUCTION_WITH_INPUT if texts.get("input") else INSTRUCTION).format(**texts)
    else:
        prompt = texts["prompt"]
    answer = FORMS[form][1]
    if not texts[answer]:
        raise ValueError(f'"{answer}" is empty: there is nothing to learn; fill it or remove the line')
    return [Part(prompt, False), Part(texts[answer], True)]


def encode(parts: Sequence[Part], tokenizer: Tokenizer, where: str) -> Example:
    """The parts' ids one behind the other, each encoded by itself, as in generation, and the end token behind them.

    An example without a prompt begins with the end token, as generation without a prompt does.
    """
    ids: list[int] = []
    learn: list[bool] = []
    mark, end = tokenizer.eos, tokenizer.eos_id
    for part in parts:
        new = tokenizer.encode(part.text)
        if part.learn and not ids and end is not None:
            ids, learn = [end], [False]
        ids += new
        learn += [part.learn] * len(new)
    if mark is not None and end is not None and not parts[-1].text.rstrip().endswith(mark):
        ids.append(end)
        learn.append(True)
    if not any(learn[1:]):
        raise ValueError("no token to learn: the completion has at most one, and none before it to predict it from")
    return Example(np.asarray(ids, dtype=np.int32), np.asarray(learn, dtype=bool), where)


def fit(examples: Sequence[Example], max_length: int, on_long: str = "refuse") -> Examples:
    """The examples within `max_length` tokens. Longer ones are refused, or cut at the end, or left out, and counted."""
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: at least 1 is needed")
    if on_long not in ON_LONG:
        raise ValueError(f"unknown on_long {on_long!r}; known are {', '.join(ON_LONG)}")
    long = [e for e in examples if len(e) > max_length]
    if long and on_long == "refuse":
        raise ValueError(
            f"{long[0].where}: {len(long[0]):,} tokens are more than max_length={max_length} ({len(long):,} of "
            f"{len(examples):,} examples are too long, the longest has {max(map(len, long)):,}); raise it with "
            f"--max-length as far as the model has positions, or choose --on-long truncate to cut them or --on-long "
            f"skip to leave them out"
        )
    kept: list[Example] = []
    truncated = cut_away = skipped = 0
    for example in examples:
        if len(example) <= max_length:
            kept.append(example)
        elif on_long == "skip":
            skipped += 1
        elif (shorter := example.cut(max_length)).n_targets:
            kept.append(shorter)
            truncated += 1
        else:
            cut_away += 1
    if not kept:
        raise ValueError(
            f"{_first(examples)}none of the {len(examples):,} examples is left with max_length={max_length}, "
            f"on_long={on_long!r}; raise max_length"
        )
    return Examples(kept, max_length, truncated, cut_away, skipped)


def _first(examples: Sequence[Example]) -> str:
    """Where the examples begin, as the beginning of an error."""
    return f"{examples[0].where}: " if examples else ""


def split_examples(examples: Sequence[Example], fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Examples for training, in order, and a random `fraction` of them, at least one, for validation."""
    if not 0 < fraction < 1:
        raise ValueError(f"validation={fraction}: a share between 0 and 1 is needed")
    if len(examples) < 2:
        raise ValueError(
            f"{_first(examples)}{len(examples)} example cannot be split into training and validation; give at "
            f"least 2, or a validation file of its own"
        )
    n = min(max(1, round(len(examples) * fraction)), len(examples) - 1)
    order = np.random.default_rng(seed).permutation(len(examples))
    return [examples[i] for i in sorted(order[n:])], [examples[i] for i in order[:n]]


def _form(value: Any) -> str:
    """Which of the known forms an example has; it may have other fields besides."""
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object; accepted is {ACCEPTED}")
    whole = [form for form, names in FORMS.items() if all(name in value for name in names)]
    if len(whole) > 1:
        raise ValueError(f"fields of {len(whole)} forms ({', '.join(whole)}) in one example; leave all but one out")
    if not whole:
        missing = [(form, n) for form, names in FORMS.items() for n in names if form in value and n not in value]
        fields = ", ".join(map(plain_name, list(value)[:8])) or "(none)"
        what = f'"{missing[0][0]}" but no "{missing[0][1]}"' if missing else f"the fields {fields}"
        raise ValueError(f"{what}; accepted is {ACCEPTED}")
    return whole[0]


def _chat_parts(messages: Any, template: ChatTemplate) -> list[Part]:
    check_messages(messages)
    answers = [k for k, message in enumerate(messages, start=1) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("no message of the assistant: there is nothing to learn; add one or remove the line")
    for k in answers:
        if not messages[k - 1]["content"]:
            raise ValueError(f"message {k} of the assistant is empty: there is nothing to learn; fill or remove it")
    return template.parts(messages)
