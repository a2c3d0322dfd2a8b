"""Conversations as text: a model's own Jinja chat template, or ChatML where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from onfoot.formats.files import one_line, plain_name, read_json, read_text, shown
from onfoot.formats.huggingface import write_json
from onfoot.formats.template import TEMPLATE_BYTES, render
from onfoot.formats.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROLES = ("system", "user", "assistant")
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"

Message = dict[str, Any]  # "role" and "content", both strings


class Part(NamedTuple):
    """A piece of text that is encoded by itself, and whether it is what the model has to say."""

    text: str
    learn: bool


@dataclass(frozen=True)
class ChatTemplate:
    """How a conversation is written for one model."""

    source: str = CHATML
    bos: str = ""
    eos: str = ""
    name: str = "ChatML"  # where it is from, for messages to the user

    @classmethod
    def find(cls, folder: str | Path) -> ChatTemplate:
        """The template in a model's folder: chat_template.jinja, or tokenizer_config.json's; ChatML without either."""
        if not Path(folder).is_dir():
            raise ValueError(f"{folder} is not a folder")
        config_path, path = Path(folder) / CONFIG_FILE, Path(folder) / TEMPLATE_FILE
        config = read_json(config_path) if config_path.exists() else {}
        special = {"bos": _token(config.get("bos_token")), "eos": _token(config.get("eos_token"))}
        if path.exists():  # comes first in transformers too
            return cls(read_text(path, TEMPLATE_BYTES), **special, name=str(path))
        if config.get("chat_template") is not None:
            return cls(_default_template(config["chat_template"], config_path), **special, name=str(config_path))
        return cls(**special)

    def save(self, folder: str | Path) -> None:
        """Writes the template beside a saved tokenizer, so that `find` and AutoTokenizer give the same texts."""
        path = Path(folder) / CONFIG_FILE
        config = read_json(path) if path.is_file() else {}
        config.pop("chat_template", None)
        for name, token in (("bos_token", self.bos), ("eos_token", self.eos)):
            if token or name in self.source:
                config[name] = token or None
        write_json(path, config)
        (Path(folder) / TEMPLATE_FILE).write_text(self.source, encoding="utf-8")

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The conversation as one text; with a generation prompt it ends where the assistant's next answer begins."""
        try:
            return render(
                self.source,
                messages=list(messages),
                tools=None,
                documents=None,
                bos_token=self.bos,
                eos_token=self.eos,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program, and may fail in any way
            raise ValueError(f"the chat template of {self.name} fails: {one_line(error)}") from None

    def parts(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> list[Part]:
        """The conversation cut where the assistant's turns begin and end; each turn has its end marker with it.

        What follows the last turn is left out, or, with a generation prompt, is the last part. So the texts that a
        model was trained on and those that it goes on from are cut, and encoded, in the same way.
        """
        check_messages(messages)
        parts: list[Part] = []
        text = ""
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._longer(text, messages[:k], True)
                after = self._longer(before, messages[: k + 1], False)
                if after == before:
                    raise ValueError(f"the chat template of {self.name} writes nothing for message {k + 1}")
                parts += [Part(before[len(text) :], False), Part(after[len(before) :], True)]
                text = after
        if add_generation_prompt:
            parts.append(Part(self._longer(text, messages, True)[len(text) :], False))
        return parts

    def end_of_turn(self) -> str:
        """What the template writes behind an answer, space aside: where generation has to stop. May be empty."""
        question, answer = {"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": "ANSWER"}
        return self.render([question, answer], False).rpartition("ANSWER")[2].strip()

    def _longer(self, beginning: str, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The rendered messages, which have to go on from `beginning`: else where an answer stands cannot be told."""
        text = self.render(messages, add_generation_prompt)
        if not text.startswith(beginning):
            same = next((i for i, (a, b) in enumerate(zip(text, beginning, strict=False)) if a != b), len(text))
            raise ValueError(
                f"the chat template of {self.name} rewrites what came before message {max(len(messages), 1)}: "
                f"{beginning[same : same + 40]!r} becomes {text[same : same + 40]!r}, so that where the answers stand "
                f"cannot be told; put a {TEMPLATE_FILE} that only appends text into the model's folder, or give "
                f'"prompt" and "completion"'
            )
        return text


def chat_prompt(template: ChatTemplate | str | Path, messages: Sequence[Message]) -> str:
    """The text that a model answers to: the conversation up to where its next answer begins."""
    check_messages(messages)
    found = template if isinstance(template, ChatTemplate) else ChatTemplate.find(template)
    return found.render(messages, True)


def chat_prompt_ids(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message]) -> list[int]:
    """The ids of that text, encoded part by part: the very ids that training had before such an answer."""
    return [i for part in template.parts(messages, True) for i in tokenizer.encode(part.text)]


def check_messages(messages: Any) -> None:
    """Refuses what is not a list of {"role", "content"} with known roles and strings."""
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list of at least one {"role", "content"}')
    for k, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ValueError(f'message {k} is not an object with "role" and "content"')
        if message["role"] not in ROLES:
            raise ValueError(f"message {k} has the role {shown(message['role'])}; known are {', '.join(ROLES)}")
        check_text(message["content"], f'"content" of message {k}')


def check_text(value: Any, what: str) -> str:
    """`value`, where it is a string that has UTF-8."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is not a string but {repr(value)[:40]}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} has half a surrogate pair, \\u{ord(value[error.start]):04x}, at {error.start}"
        ) from None
    return value


def _default_template(value: Any, path: Path) -> str:
    """The template itself, or the one called "default" in a list of {name, template}."""
    if isinstance(value, list):
        pairs = [(v.get("name"), v.get("template")) for v in value if isinstance(v, dict)]
        named = {name: template for name, template in pairs if isinstance(name, str)}
        if "default" not in named:
            names = ", ".join(map(plain_name, list(named)[:8]))
            raise ValueError(f'{path}: of its chat templates ({names}) none is called "default"')
        value = named["default"]
    if not isinstance(value, str):
        raise ValueError(f'{path}: "chat_template" is neither a string nor a list of {{name, template}}')
    return value


def _token(value: Any) -> str:
    """A special token's text, as tokenizer_config.json may write it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
