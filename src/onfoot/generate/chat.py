"""Conversations with a model: its chat template, the ids it answers to, and the tokens that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onfoot.formats.chat import ChatTemplate, Message, chat_prompt_ids

if TYPE_CHECKING:
    from onfoot.models.model import Model


def template_of(model: Model) -> ChatTemplate:
    """The model's own template: from its GGUF file, or from the folder it was loaded from; ChatML without either."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError("a conversation needs a tokenizer, and this model has none")
    if model.source is not None and Path(model.source).is_dir():
        return ChatTemplate.find(model.source)
    special = {"bos": tokenizer.bos or "", "eos": tokenizer.eos or ""}
    if tokenizer.chat_template is None:
        return ChatTemplate(**special)
    return ChatTemplate(tokenizer.chat_template, **special, name=model.source or "this model")


def prompt_ids(model: Model, messages: Sequence[Message]) -> np.ndarray:
    """The ids of a conversation up to where the model's next answer begins, (T,)."""
    template = template_of(model)
    assert model.tokenizer is not None
    return np.asarray(chat_prompt_ids(model.tokenizer, template, messages), dtype=np.int64)


def ends(model: Model) -> tuple[tuple[int, ...], list[str]]:
    """Where an answer stops: ids, and a text where the template's end of a turn is not one token."""
    assert model.tokenizer is not None
    text = template_of(model).end_of_turn()
    ids = model.tokenizer.encode(text) if text else []
    if len(ids) == 1:
        return (*model.config.eos_ids, ids[0]), []
    return model.config.eos_ids, [text] if text else []
