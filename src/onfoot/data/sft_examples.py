"""Reads records into token ids and a mask of the completion tokens, which are the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.data import corpus
from onfoot.data.example import Example
from onfoot.data.example_file import ExampleFile, StoredExamples, choose, lengths_of, target_counts
from onfoot.data.records import READERS, ReadLog, fields_of, records
from onfoot.formats.chat import ChatTemplate, Message, Part, calls_tools, check_messages, check_text
from onfoot.formats.files import parse_json, shown
from onfoot.formats.tokenizer import Tokenizer

INSTRUCTION = "Instruction:\n{instruction}\n\nAnswer:\n"
INSTRUCTION_WITH_INPUT = "Instruction:\n{instruction}\n\nInput:\n{input}\n\nAnswer:\n"
FORMS = {
    "prompt": ("prompt", "completion"), "instruction": ("instruction", "output"), "messages": ("messages",),
    "conversations": ("conversations",), "text": ("text",),
}  # fmt: skip
OPTIONAL = {"prompt": (), "instruction": ("input",)}
NAMES = {  # of the forms, as reports say them
    "prompt": "prompts and completions", "instruction": "Alpaca instructions", "messages": "conversations",
    "conversations": "ShareGPT conversations", "text": "texts, in which every token is a target",
}  # fmt: skip
MEANINGS = {"prompt": "a prompt with its answer", "messages": "a conversation", "text": "a text"}
SAME_MEANING = {"instruction": "prompt", "conversations": "messages"}
ACCEPTED = (
    '{"prompt", "completion"}, {"instruction", "output"} with or without "input", {"messages"}, {"conversations"} or '
    '{"text"}'
)
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
ON_LONG = ("refuse", "truncate", "skip")


@dataclass(frozen=True)
class Examples:
    """The examples that fit, and counts of those that were truncated or dropped."""

    kept: Sequence[Example]
    max_length: int
    truncated: int = 0  # how many of `kept` were truncated
    cut_away: int = 0  # dropped: truncation would have removed the entire completion
    skipped: int = 0  # dropped because they were too long

    @property
    def read(self) -> int:
        return len(self.kept) + self.cut_away + self.skipped

    def report(self) -> str:
        """How many examples were kept, truncated and dropped."""
        n_targets, n_tokens = int(target_counts(self.kept).sum()), int(lengths_of(self.kept).sum())
        lines = [f"{len(self.kept):,} of {self.read:,} examples, {n_tokens:,} tokens, {n_targets:,} of them targets"]
        longer = f"longer than max_length={self.max_length}"
        if self.truncated:
            lines.append(f"{self.truncated:,} {longer}: truncated at the end")
        if self.cut_away:
            lines.append(f"{self.cut_away:,} {longer}: dropped, as truncation would remove the entire completion")
        if self.skipped:
            lines.append(f"{self.skipped:,} {longer}: skipped")
        return "\n".join(lines)


def read_examples(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    log: ReadLog | None = None,
    templated: bool = False,
    folder: Path | None = None,
) -> StoredExamples:
    """All examples of the files, datasets and folders, in order and untruncated; the log counts them by format.

    They are in a temporary file, in `folder` if one is given, so that they may exceed memory.
    """
    if not paths:
        raise ValueError(f"no data: pass a file, such as a .jsonl file; each line must be one of {ACCEPTED}")
    log = log or ReadLog()
    with ExampleFile(folder) as file:
        for text in corpus.find_texts(paths, tuple(READERS)):
            assert text.path is not None
            reader = FileReader(template, tokenizer, log, templated)
            before, n_bad = len(file), log.n_bad
            for example in log.read(records(text.path), reader.example):
                file.append(example)
                log.count.done += 1
            if len(file) == before and log.n_bad == n_bad:
                raise ValueError(f"{text.path} has no records; each must be one of {ACCEPTED}")
        if not len(file):
            raise ValueError(f"no example can be read: {log.bad_report()}")
        return file.examples()


class FileReader:
    """Reads the examples of one file, which must all have the same meaning."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, log: ReadLog, templated: bool = False) -> None:
        self.template, self.tokenizer, self.log, self.templated = template, tokenizer, log, templated
        self.meaning, self.first = "", ""  # of the first example, and its place

    def example(self, value: Any, where: str) -> Example:
        """A record as an example; raises ValueError if its meaning differs from that of the file's first one."""
        form = form_of(value)
        meaning = SAME_MEANING.get(form, form)
        example = read_example(value, self.template, self.tokenizer, where, self.templated)
        if self.meaning and meaning != self.meaning:
            raise ValueError(
                f"{MEANINGS[meaning]}, but the file begins with {MEANINGS[self.meaning]} "
                f"({self.first.rpartition(', ')[2]}); put them into separate files"
            )
        self.meaning, self.first = meaning, self.first or where
        self.log.formats[NAMES[form]] += 1
        return example


def read_example(
    value: Any, template: ChatTemplate, tokenizer: Tokenizer, where: str, templated: bool = False
) -> Example:
    """One record as an example; with `templated`, prompts and completions become messages."""
    if form_of(value) == "text":
        return encode_text(check_text(value["text"], '"text"'), tokenizer, where)
    messages = as_messages(value, tokenizer) if templated else None
    if messages is not None:
        value = {"messages": messages}
    parts = read_parts(value, template)
    if not is_chat(value):
        return encode(parts, tokenizer, where)
    return replace(encode_chat(parts, tokenizer, where), question=_question(value), templated=messages is not None)


def _question(value: dict[str, Any]) -> str:
    """The first message of the user in a conversation."""
    if "conversations" in value:
        messages: Any = sharegpt_messages(value)
    else:
        messages = value.get("messages") or value["prompt"]
    return next((m["content"] for m in messages if m["role"] == "user" and isinstance(m["content"], str)), "")


def as_messages(value: Any, tokenizer: Tokenizer) -> list[Message] | None:
    """A prompt and completion, or an instruction and output, as messages of the user and of the assistant.

    None if the example has messages already, or a blank prompt, or if its prompt has special tokens: then it is
    already formatted.
    """
    form = form_of(value)
    if is_chat(value) or form not in OPTIONAL:
        return None
    texts = [check_text(value[name], f'"{name}"') for name in (form, *OPTIONAL[form]) if value.get(name)]
    question, answer = "\n\n".join(texts).strip(), check_text(value[FORMS[form][1]], f'"{FORMS[form][1]}"').strip()
    if not question or not answer or any(token and token in question for token in tokenizer.special_tokens):
        return None
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def is_chat(value: dict[str, Any]) -> bool:
    """Whether a record has messages, which the chat template renders."""
    return form_of(value) in ("messages", "conversations") or isinstance(value.get("prompt"), list)


def read_parts(value: Any, template: ChatTemplate) -> list[Part]:
    """The texts of one example, alternating prompts and completions."""
    form = form_of(value)
    if form == "text":
        return [Part(check_text(value["text"], '"text"'), True)]
    tools = _tools(value)
    if form == "messages":
        return _chat_parts(value["messages"], template, tools)
    if form == "conversations":
        return _chat_parts(sharegpt_messages(value), template, tools)
    if isinstance(value.get("prompt"), list):
        return template.completion_parts(value["prompt"], value["completion"], tools)
    given = [*FORMS[form], *(name for name in OPTIONAL[form] if value.get(name) is not None)]
    texts = {name: check_text(value[name], f'"{name}"') for name in given}
    if form == "instruction":
        prompt = (INSTRUCTION_WITH_INPUT if texts.get("input") else INSTRUCTION).format(**texts)
    else:
        prompt = texts["prompt"]
    answer = FORMS[form][1]
    if not texts[answer]:
        raise ValueError(f'"{answer}" is empty, so the example has no targets; fill it in or remove the line')
    return [Part(prompt, False), Part(texts[answer], True)]


def encode(parts: Sequence[Part], tokenizer: Tokenizer, where: str) -> Example:
    """The ids of a prompt, which are those of generation, the ids of its completion, and the EOS token.

    Together they are the tokenizer's ids of the whole text, unless one of its tokens would span both. An example
    without a prompt starts with the BOS token if the tokenizer adds it, or with EOS, as generation does.
    """
    prompt, completion = parts
    before = tokenizer.bos_ids + tokenizer.encode(prompt.text)
    if not before and tokenizer.eos_id is not None:
        before = [tokenizer.eos_id]
    after = tokenizer.encode_after(prompt.text, completion.text)
    ids, learn = before + after, [False] * len(before) + [True] * len(after)
    return _example(ids, learn, completion.text, (tokenizer.eos,), tokenizer, where)


def encode_text(text: str, tokenizer: Tokenizer, where: str) -> Example:
    """The ids of a text, with BOS if the tokenizer adds it, and the EOS token; all are targets, except the first."""
    ids = tokenizer.bos_ids + tokenizer.encode(text)
    return _example(ids, [True] * len(ids), text, (tokenizer.eos,), tokenizer, where)


def encode_chat(parts: Sequence[Part], tokenizer: Tokenizer, where: str) -> Example:
    """The ids of a conversation, encoded as one text; those of the answers are learned.

    The EOS token is appended unless a special token, such as <|im_end|>, already ends the last turn.
    """
    text = "".join(part.text for part in parts)
    encoding = tokenizer.encoding(text)
    learn, end = np.zeros(len(encoding.ids), dtype=bool), 0
    first, last = np.array(encoding.offsets or [(0, 0)]).T  # of each id; some tokenizers leave spaces out
    for part in parts:
        begin, end = end, end + len(part.text)
        if part.learn:
            learn |= (last > begin) & ((first < end) | ((first == end) & (last == end)))
    return _example(encoding.ids, learn.tolist(), text, tokenizer.special_tokens, tokenizer, where)


def _example(
    ids: list[int], learn: list[bool], text: str, ends: Sequence[str | None], tokenizer: Tokenizer, where: str
) -> Example:
    """The example of these ids, followed by the EOS token unless one of `ends` is already at the end of the text."""
    if tokenizer.eos_id is not None and not text.rstrip().endswith(tuple(end for end in ends if end)):
        ids, learn = [*ids, tokenizer.eos_id], [*learn, True]
    if not any(learn[1:]):
        raise ValueError("no targets: the completion has at most one token, and no token precedes it")
    return Example(np.asarray(ids, dtype=np.int32), np.asarray(learn, dtype=bool), where)


def fit(examples: Sequence[Example], max_length: int, on_long: str = "refuse") -> Examples:
    """Applies `max_length`: longer examples raise ValueError, or are truncated at the end, or skipped."""
    if max_length < 1:
        raise ValueError(f"max_length must be >= 1, got {max_length}")
    if on_long not in ON_LONG:
        raise ValueError(f"unknown on_long {on_long!r}; choose from {', '.join(ON_LONG)}")
    lengths = lengths_of(examples)
    long = np.flatnonzero(lengths > max_length)
    if long.size and on_long == "refuse":
        first = examples[int(long[0])]
        raise ValueError(
            f"{first.where}: {len(first):,} tokens exceed max_length={max_length} ({len(long):,} of "
            f"{len(examples):,} examples are too long, the longest has {int(lengths.max()):,}); raise --max-length "
            f"(up to the model's n_positions), or pass --on-long truncate or --on-long skip "
            f"(FinetuneOptions(on_long=…) in Python)"
        )
    keep = lengths <= max_length
    if on_long == "truncate":
        keep[long] = [examples[i].cut(max_length).n_targets > 0 for i in long.tolist()]
    dropped, truncated = int((~keep).sum()), int(keep[long].sum())
    kept = choose(examples, np.flatnonzero(keep), max_length)
    if not kept:
        raise ValueError(
            f"{_first(examples)}none of the {len(examples):,} examples remain with max_length={max_length}, "
            f"on_long={on_long!r}: {nothing_left(lengths, on_long)}"
        )
    cut_away, skipped = (dropped, 0) if on_long == "truncate" else (0, dropped)
    return Examples(kept, max_length, truncated, cut_away, skipped)


def nothing_left(lengths: np.ndarray, on_long: str) -> str:
    """Why no example remains, and what can be done, whether or not max_length is already the model's maximum."""
    longer = "raise --max-length (up to the model's n_positions)"
    if on_long == "truncate":
        return f"every prompt alone is that long, so that no completion is left; shorten the prompts, or {longer}"
    shortest = int(lengths.min()) if lengths.size else 0
    return f"the shortest has {shortest:,} tokens; shorten them, pass --on-long truncate, or {longer}"


def _first(examples: Sequence[Example]) -> str:
    """The location of the first example, as a prefix of an error."""
    return f"{examples[0].where}: " if examples else ""


def split_examples(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Splits off a random `fraction`, at least one example, for validation; the rest, in order, is for training."""
    if not 0 < fraction < 1:
        raise ValueError(f"validation must be in (0, 1), got {fraction}")
    if len(examples) < 2:
        raise ValueError(
            f"{_first(examples)}cannot split {len(examples)} example into training and validation; provide at least 2, "
            f"or a separate validation file"
        )
    n = min(max(1, round(len(examples) * fraction)), len(examples) - 1)
    order = np.random.default_rng(seed).permutation(len(examples))
    return choose(examples, np.sort(order[n:])), choose(examples, order[:n])


def has_text(value: Any) -> bool:
    """Whether a record is a text and not an example with targets of its own."""
    return isinstance(value, dict) and "text" in value and value.keys() & FORMS.keys() == {"text"}


def form_of(value: Any) -> str:
    """The form of an example, a key of FORMS; additional fields are allowed."""
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object; expected {ACCEPTED}")
    if "chosen" in value and "rejected" in value:
        raise ValueError(
            f'a preference pair ("chosen" and "rejected"): pass --dpo, or FinetuneOptions(dpo=True) in Python; '
            f"otherwise expected {ACCEPTED}"
        )
    others = [form for form in FORMS if form != "text" and form in value]
    complete = [form for form, names in FORMS.items() if all(name in value for name in names)]
    if "text" in complete and others:
        complete.remove("text")  # the same example once more, as some datasets have it
    if len(complete) > 1:
        raise ValueError(f"fields of {len(complete)} forms ({', '.join(complete)}) in one example; remove all but one")
    if not complete:
        missing = [(form, n) for form, names in FORMS.items() for n in names if form in value and n not in value]
        what = f'"{missing[0][0]}" but no "{missing[0][1]}"' if missing else f"the fields {fields_of(value)}"
        raise ValueError(f"found {what}; expected {ACCEPTED}")
    return complete[0]


def sharegpt_messages(value: dict[str, Any]) -> list[Message]:
    """The messages of a ShareGPT record: its turns of {"from", "value"}, after its own "system" if it has one."""
    turns = value["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError('"conversations" must be a non-empty list of {"from", "value"} objects')
    if all(isinstance(turn, dict) and "role" in turn for turn in turns):
        return turns  # some datasets have OpenAI's messages under this name
    messages: list[Message] = [{"role": "system", "content": value["system"]}] if value.get("system") else []
    for k, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
            raise ValueError(f'turn {k} must be an object with "from" and "value"')
        role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        if role is None:
            raise ValueError(f"turn {k} is from {shown(turn['from'])}; choose from {', '.join(SHAREGPT_ROLES)}")
        messages.append({"role": role, "content": turn["value"]})
    return messages


def _tools(value: dict[str, Any]) -> list[Any] | None:
    """The tools of a record with messages: a list, or the JSON text of one."""
    tools = value.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, '"tools":')
    if tools and not isinstance(tools, list):
        raise ValueError(f'"tools" must be a list of tool descriptions, got {shown(tools)}')
    return tools or None


def _chat_parts(messages: Any, template: ChatTemplate, tools: list[Any] | None = None) -> list[Part]:
    check_messages(messages)
    answers = [k for k, message in enumerate(messages, start=1) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("no assistant message, so the example has no targets; add one or remove the line")
    for k in answers:
        if not messages[k - 1].get("content") and not calls_tools(messages[k - 1]):
            raise ValueError(f"message {k} (assistant) is empty, so it has no targets; fill it in or remove it")
    return template.parts(messages, tools)
