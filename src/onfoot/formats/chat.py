"""Renders conversations as text with a model's Jinja chat template, or with ChatML if it has none."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from onfoot.formats.files import one_line, plain_name, read_json, read_text, shown
from onfoot.formats.template import BEGIN, END, TEMPLATE_BYTES, render, render_spans
from onfoot.formats.tokenizer import Tokenizer
from onfoot.formats.write import write_json, write_text

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = ("system", "user", "assistant", "tool")
MARKS = re.compile(r"\{%[-+]?\s*generation\b")
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

Message = dict[str, Any]  # "role" and "content", both strings; an answer may have "tool_calls" instead of content
Tools = list[Any] | None  # descriptions of the tools that the model may call
Rendered = TypeVar("Rendered")


class Part(NamedTuple):
    """A piece of a conversation; `learn` is true for the assistant's answers."""

    text: str
    learn: bool


@dataclass(frozen=True)
class ChatTemplate:
    """A model's chat template with its special tokens."""

    source: str = CHATML
    bos: str = ""
    eos: str = ""
    name: str = "ChatML"  # its file, for error messages

    @property
    def is_fallback(self) -> bool:
        """Whether it is ChatML because the model has no template of its own."""
        return self.name == ChatTemplate.name

    @classmethod
    def find(cls, folder: str | Path) -> ChatTemplate:
        """The template in a folder's chat_template.jinja or tokenizer_config.json; ChatML if there is neither."""
        if not Path(folder).is_dir():
            raise ValueError(f"{folder} is not a folder")
        config_path, path = Path(folder) / CONFIG_FILE, Path(folder) / TEMPLATE_FILE
        config = read_json(config_path) if config_path.exists() else {}
        special = {"bos": _token(config.get("bos_token")), "eos": _token(config.get("eos_token"))}
        if path.exists():  # takes precedence in transformers too
            return cls(read_text(path, TEMPLATE_BYTES), **special, name=str(path))
        if config.get("chat_template") is not None:
            return cls(_default_template(config["chat_template"], config_path), **special, name=str(config_path))
        return cls(**special)

    def save(self, folder: str | Path) -> None:
        """Saves the template next to a saved tokenizer, so that `find` and AutoTokenizer render the same text."""
        path = Path(folder) / CONFIG_FILE
        config = read_json(path) if path.is_file() else {}
        config.pop("chat_template", None)
        for name, token in (("bos_token", self.bos), ("eos_token", self.eos)):
            if token or name in self.source:
                config[name] = token or None
        write_json(path, config)
        write_text(Path(folder) / TEMPLATE_FILE, self.source)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools = None) -> str:
        """The conversation as one text; a generation prompt starts the assistant's next answer."""
        return self._rendered(render, messages, add_generation_prompt, tools)

    def _rendered(
        self, how: Callable[..., Rendered], messages: Sequence[Message], add_generation_prompt: bool, tools: Tools
    ) -> Rendered:
        try:
            return how(
                self.source,
                messages=list(messages),
                tools=tools,
                documents=None,
                bos_token=self.bos,
                eos_token=self.eos,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program and can raise anything
            raise ValueError(f"the chat template of {self.name} failed: {one_line(error)}") from None

    def parts(self, messages: Sequence[Message], tools: Tools = None) -> list[Part]:
        """The conversation split at the start and end of each assistant turn; a turn includes its end-of-turn marker.

        A template with {% generation %} blocks says itself what the assistant's words are, as in transformers.
        Messages after the last turn are dropped.
        """
        check_messages(messages)
        last = max((k for k, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        messages = messages[: last + 1]
        self._check_rendered(messages, tools)
        return self._marked_parts(messages, tools) or self._turns(messages, tools)

    def completion_parts(
        self, prompt: Sequence[Message], completion: Sequence[Message], tools: Tools = None
    ) -> list[Part]:
        """The text of a conversation up to the start of the next answer, and that of the messages that complete it."""
        check_messages(prompt, '"prompt"')
        check_messages(completion, '"completion"')
        messages = [*prompt, *completion]
        self._check_rendered(messages, tools)
        before = self.render(prompt, True, tools)
        after = self._render_after(before, messages, False, tools)
        return [Part(before, False), Part(after[len(before) :], True)]

    def _marked_parts(self, messages: Sequence[Message], tools: Tools) -> list[Part]:
        """The parts of a template with {% generation %} blocks; none if it has no such block."""
        if not MARKS.search(self.source):
            return []
        text, spans = self._rendered(render_spans, messages, False, tools)
        if not spans:
            return []
        if text != self.render(messages, False, tools):
            raise ValueError(f"a message has the character U+{ord(BEGIN):X} or U+{ord(END):X}; remove it")
        parts, done = [], 0
        for begin, end in spans:
            parts += [Part(text[done:begin], False), Part(text[begin:end], True)]
            done = end
        return [*parts, Part(text[done:], False)]

    def _check_rendered(self, messages: Sequence[Message], tools: Tools) -> None:
        """Raises ValueError for a system or tool message that the template leaves out without an error."""
        text: str | None = None
        for k, message in enumerate(messages):
            if message["role"] in ("system", "tool") and message["content"].strip():
                text = self.render(messages, False, tools) if text is None else text
                other = [*messages[:k], {**message, "content": message["content"] + "?"}, *messages[k + 1 :]]
                if message["content"].strip() not in text and self.render(other, False, tools) == text:
                    raise ValueError(
                        f"the chat template of {self.name} leaves out message {k + 1} (role {message['role']}); "
                        f"remove it, or use a model whose template has this role"
                    )

    def _turns(self, messages: Sequence[Message], tools: Tools) -> list[Part]:
        """The parts of a template without marks: an answer is what follows its generation prompt."""
        parts: list[Part] = []
        text = ""
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render_after(text, messages[:k], True, tools)
                after = self._render_after(before, messages[: k + 1], False, tools)
                if after == before:
                    raise ValueError(f"the chat template of {self.name} renders nothing for message {k + 1}")
                parts += [Part(before[len(text) :], False), Part(after[len(before) :], True)]
                text = after
        return parts

    def end_of_turn(self) -> str:
        """The text after an answer, without whitespace, at which generation stops; may be empty."""
        question, answer = {"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}
        return self.render([question, answer], False).rpartition("ANSWER")[2].strip()

    def _render_after(
        self, prefix: str, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools = None
    ) -> str:
        """The rendered messages, which must start with `prefix`: otherwise the answers cannot be located in them."""
        text = self.render(messages, add_generation_prompt, tools)
        if not text.startswith(prefix):
            i = next((i for i, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b), len(text))
            raise ValueError(
                f"the chat template of {self.name} changes the text before message {max(len(messages), 1)}: "
                f"{prefix[i : i + 40]!r} becomes {text[i : i + 40]!r}, so the answers cannot be located; "
                f"put a {TEMPLATE_FILE} that only appends text into the model's folder, or use "
                f'"prompt" and "completion"'
            )
        return text


def chat_prompt(template: ChatTemplate | str | Path, messages: Sequence[Message]) -> str:
    """The prompt of a conversation: its text up to the start of the model's next answer."""
    check_messages(messages)
    chat_template = template if isinstance(template, ChatTemplate) else ChatTemplate.find(template)
    return chat_template.render(messages, True)


def chat_prompt_ids(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """The ids of the prompt, encoded as one text, as in training; its special tokens are in the template."""
    return tokenizer.encode(chat_prompt(template, messages))


def check_messages(messages: Any, name: str = '"messages"') -> None:
    """Raises ValueError unless `messages` is a list of {"role", "content"} with known roles and string contents.

    An answer may have "tool_calls" and no content.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{name} must be a non-empty list of {{"role", "content"}} objects')
    for k, message in enumerate(messages, start=1):
        if isinstance(message, dict) and calls_tools(message) and message.get("content") is None:
            continue
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ValueError(f'message {k} must be an object with "role" and "content"')
        if message["role"] not in ROLES:
            raise ValueError(f"message {k} has unknown role {shown(message['role'])}; choose from {', '.join(ROLES)}")
        check_text(message["content"], f'"content" of message {k}')


def calls_tools(message: Message) -> bool:
    """Whether a message is an answer that calls tools, which needs no content."""
    return message.get("role") == "assistant" and bool(message.get("tool_calls"))


def check_text(value: Any, what: str) -> str:
    """The value, if it is a string that UTF-8 can encode; otherwise raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, got {repr(value)[:40]}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has an unpaired surrogate, \\u{ord(value[error.start]):04x}, at position {error.start}"
        ) from None
    return value


def _default_template(value: Any, path: Path) -> str:
    """The template, or the one named "default" in a list of {name, template}."""
    if isinstance(value, list):
        pairs = [(v.get("name"), v.get("template")) for v in value if isinstance(v, dict)]
        named = {name: template for name, template in pairs if isinstance(name, str)}
        if "default" not in named:
            names = ", ".join(map(plain_name, list(named)[:8]))
            raise ValueError(f'{path}: none of its chat templates ({names}) is named "default"')
        value = named["default"]
    if not isinstance(value, str):
        raise ValueError(f'{path}: "chat_template" must be a string or a list of {{name, template}}')
    return value


def _token(value: Any) -> str:
    """A special token's text from its entry in tokenizer_config.json."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
