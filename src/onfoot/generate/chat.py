"""Chat with a model: its template, prompt ids and stop conditions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onfoot.formats.chat import ChatTemplate, Message, chat_prompt_ids

if TYPE_CHECKING:
    from onfoot.models.model import Model


def template_of(model: Model) -> ChatTemplate:
    """The chat template of the model's folder or GGUF file; ChatML if it has none."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError("chat needs a tokenizer, but this model has none")
    if model.source is not None and Path(model.source).is_dir():
        return ChatTemplate.find(model.source)
    special = {"bos": tokenizer.bos or "", "eos": tokenizer.eos or ""}
    if tokenizer.chat_template is None:
        return ChatTemplate(**special)
    return ChatTemplate(tokenizer.chat_template, **special, name=model.source or "this model")


def prompt_ids(model: Model, messages: Sequence[Message]) -> np.ndarray:
    """The ids of a conversation up to the start of the model's next answer, (T,)."""
    template = template_of(model)
    assert model.tokenizer is not None
    return np.asarray(chat_prompt_ids(model.tokenizer, template, messages), dtype=np.int64)


def ends(model: Model) -> tuple[tuple[int, ...], list[str]]:
    """The stop ids and stop strings of an answer; a string if the end-of-turn marker is not a single token."""
    assert model.tokenizer is not None
    text = template_of(model).end_of_turn()
    ids = model.tokenizer.encode(text) if text else []
    if len(ids) == 1:
        return (*model.config.eos_ids, ids[0]), []
    return model.config.eos_ids, [text] if text else []
