"""Reads pairs of a chosen and a rejected answer to the same prompt, for preference tuning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onfoot.data import corpus
from onfoot.data.sft_examples import Example, encode_chat, read_example
from onfoot.formats.chat import ChatTemplate, check_messages
from onfoot.formats.tokenizer import Tokenizer

ACCEPTED = '{"prompt", "chosen", "rejected"} with texts or lists of messages, or {"chosen", "rejected"} conversations'


def read_preferences(
    paths: Sequence[Path], tokenizer: Tokenizer, template: ChatTemplate
) -> list[tuple[Example, Example]]:
    """The (chosen, rejected) examples of .jsonl files, in order and untruncated; only answers are targets."""
    if not paths:
        raise ValueError(f"no data: pass a .jsonl file; each line must be {ACCEPTED}")
    pairs: list[tuple[Example, Example]] = []
    for text in corpus.find_texts(paths, (".jsonl",)):
        assert text.path is not None
        before = len(pairs)
        for number, value in corpus.json_lines(text.path):
            where = f"{text.path}, line {number}"
            try:
                pairs.append(read_preference(value, tokenizer, template, where))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        if len(pairs) == before:
            raise ValueError(f"{text.path} has only blank lines; each line must be {ACCEPTED}")
    return pairs


def read_preference(value: Any, tokenizer: Tokenizer, template: ChatTemplate, where: str) -> tuple[Example, Example]:
    """The pair of one line. The prompt of two conversations is what they have in common at the start."""
    if not isinstance(value, dict) or "chosen" not in value or "rejected" not in value:
        raise ValueError(f"not a preference pair; expected {ACCEPTED}")
    chosen, rejected, prompt = value["chosen"], value["rejected"], value.get("prompt")
    if chosen == rejected:
        raise ValueError('"chosen" and "rejected" are the same, so the pair prefers nothing; remove the line')
    if isinstance(chosen, list) and isinstance(rejected, list):
        if prompt is None:
            prompt, chosen, rejected = _split(chosen, rejected)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        first, second = (_conversation(prompt, answer, tokenizer, template, where) for answer in (chosen, rejected))
    elif prompt is None:
        raise ValueError(f'found "chosen" and "rejected" but no "prompt"; expected {ACCEPTED}')
    else:
        first, second = (
            read_example({"prompt": prompt, "completion": answer}, template, tokenizer, where)
            for answer in (chosen, rejected)
        )
    return first, second


def _split(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The messages that both conversations start with, and the rest of each."""
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    return chosen[:same], chosen[same:], rejected[same:]


def _conversation(prompt: Any, answer: Any, tokenizer: Tokenizer, template: ChatTemplate, where: str) -> Example:
    """A conversation of which only the assistant's messages after the prompt are targets."""
    check_messages(prompt)
    check_messages(answer)
    if not any(message["role"] == "assistant" and message["content"] for message in answer):
        raise ValueError("no assistant message after the prompt, so the answer has no targets; add one")
    given = sum(message["role"] == "assistant" for message in prompt)
    parts = template.parts([*prompt, *answer])  # two per assistant message
    parts = [part._replace(learn=part.learn and i >= 2 * given) for i, part in enumerate(parts)]
    return encode_chat(parts, tokenizer, where)
