"""Reads preference pairs: two answers to the same prompt, of which one is preferred."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from onfoot.data import corpus
from onfoot.data.example import Example
from onfoot.data.example_file import ExampleFile, StoredPairs
from onfoot.data.records import READERS, ReadLog, Record, fields_of, records
from onfoot.data.sft_examples import read_example
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import Tokenizer

PREFERENCES = '{"prompt", "chosen", "rejected"}, or {"chosen", "rejected"} that begin with the same prompt'


class Preference(NamedTuple):
    """Two examples with the same prompt; only their answers are targets."""

    chosen: Example
    rejected: Example


def read_preferences(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    log: ReadLog | None = None,
    folder: Path | None = None,
) -> StoredPairs:
    """All preference pairs of the files, datasets and folders, in order and untruncated, in a temporary file."""
    if not paths:
        raise ValueError(f"no data: pass a file, such as a .jsonl file; each line must be one of {PREFERENCES}")
    log = log or ReadLog()
    files = [text.path for text in corpus.find_texts(paths, tuple(READERS)) if text.path is not None]
    found = chain.from_iterable(map(records, files))
    return store_preferences(found, tokenizer, template, log, ", ".join(map(str, paths)), folder)


def store_preferences(
    found: Iterable[Record],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    log: ReadLog,
    name: str,
    folder: Path | None = None,
) -> StoredPairs:
    """The preference pairs of records in a temporary file; `name` is what errors call the records."""

    def pair(value: Any, where: str) -> Preference:
        made = read_preference(value, tokenizer, template, where)
        log.formats["preference pairs"] += 1
        return made

    with ExampleFile(folder) as file:
        for chosen, rejected in log.read(found, pair):
            file.append(chosen)
            file.append(rejected)
            log.count.done += 1
        if not len(file):
            raise ValueError(f"{name}: no preference pairs; {log.bad_report() or PREFERENCES}")
        return StoredPairs(file.examples())


def read_preference(value: Any, tokenizer: Tokenizer, template: ChatTemplate, where: str) -> Preference:
    """One record as a pair. Each answer is encoded as the completion of the prompt, as in fine-tuning."""
    if not isinstance(value, dict) or "chosen" not in value or "rejected" not in value:
        found = f"the fields {fields_of(value)}" if isinstance(value, dict) else "not an object"
        raise ValueError(f"found {found}; expected {PREFERENCES}")
    prompt, chosen, rejected = value.get("prompt"), value["chosen"], value["rejected"]
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise ValueError('"chosen" and "rejected" must both be texts, or both be lists of messages')
    if chosen == rejected:
        raise ValueError('"chosen" and "rejected" are the same, so there is nothing to prefer; remove the line')
    if prompt is None or type(prompt) is not type(chosen):  # both begin with it; some datasets repeat its text
        n = common_length(chosen, rejected)
        if prompt is None and n == 0:
            raise ValueError('no "prompt", and "chosen" and "rejected" do not begin with the same one')
        if prompt is None or n:
            prompt, chosen, rejected = chosen[:n], chosen[n:], rejected[n:]
        else:
            prompt = [{"role": "user", "content": prompt}] if isinstance(chosen, list) else prompt
    rest = {name: value[name] for name in ("tools",) if name in value}
    made = []
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        try:
            if isinstance(answer, list) and not any(map(is_assistant, answer)):
                raise ValueError("no assistant message after the prompt, so it has no targets; add one")
            made.append(read_example({**rest, "prompt": prompt, "completion": answer}, template, tokenizer, where))
        except ValueError as error:
            raise ValueError(f'"{name}": {error}') from None
    return Preference(*made)


def is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def common_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many messages, or characters without a space at their end, both have in common at the start, as in TRL."""
    pairs = zip(chosen, rejected, strict=False)
    n = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return n - 1 if n and isinstance(chosen, str) and chosen[n - 1] == " " else n
