"""Modelfiles for Ollama: which GGUF files make a model, its chat template and where an answer ends."""

from __future__ import annotations

import os
from pathlib import Path

from onfoot.formats.chat import CHATML, ChatTemplate
from onfoot.formats.tokenizer import Tokenizer

# ChatML as a Go template. Ollama recognises other templates itself, from the GGUF file's metadata.
GO_CHATML = """{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
GO_PLAIN = "{{ .Prompt }}"
USER = {"role": "user", "content": "QUESTION"}
EXAMPLE = [
    {"role": "system", "content": "SYSTEM"},
    USER,
    {"role": "assistant", "content": "ANSWER"},
    USER,
]


def modelfile(folder: Path, base: Path, adapter: Path | None, tokenizer: Tokenizer | None) -> str:
    """The text of a Modelfile in a folder, with the paths of its files relative to that folder."""
    lines = [f"FROM {_relative(base, folder)}"]
    if adapter is not None:
        lines.append(f"ADAPTER {_relative(adapter, folder)}")
    if tokenizer is None or tokenizer.chat_template is None:
        lines.append(f'TEMPLATE """{GO_PLAIN}"""')
    stops = [] if tokenizer is None or tokenizer.eos is None else [tokenizer.eos]
    if tokenizer is not None and tokenizer.chat_template is not None:
        template = ChatTemplate(tokenizer.chat_template, tokenizer.bos or "", tokenizer.eos or "", tokenizer.name)
        if template.render(EXAMPLE, True) == ChatTemplate(CHATML).render(EXAMPLE, True):
            lines.append(f'TEMPLATE """{GO_CHATML}"""')
            lines += _default_system(template)
        stops.append(template.end_of_turn())
    for stop in dict.fromkeys(stops):
        if stop and '"' not in stop and "\n" not in stop:
            lines.append(f'PARAMETER stop "{stop}"')
    return "\n".join(lines) + "\n"


def _default_system(template: ChatTemplate) -> list[str]:
    """The system message that a ChatML template begins with if a conversation has none."""
    text = template.render([USER], True).partition("<|im_end|>")[0].removeprefix("<|im_start|>system\n")
    with_it = ChatTemplate(CHATML).render([{"role": "system", "content": text}, USER], True)
    return [f'SYSTEM """{text}"""'] if template.render([USER], True) == with_it and '"""' not in text else []


def _relative(path: Path, folder: Path) -> str:
    """A path as Ollama finds it from the Modelfile's folder: with ./ in front, a bare name would be a model's."""
    try:
        text = os.path.relpath(path, folder)
    except ValueError:  # another drive of Windows
        return str(path)
    return text if text.startswith("..") else os.path.join(".", text)
