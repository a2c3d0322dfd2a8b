"""Chat with a model: its template, prompt ids and stop conditions, and conversations that keep the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onfoot.arrays import to_numpy
from onfoot.formats.chat import ChatTemplate, Message, chat_prompt_ids
from onfoot.generate.cache import KVCache
from onfoot.generate.decode import StreamDecoder
from onfoot.generate.loop import step
from onfoot.generate.sampling import Sampling, next_token
from onfoot.generate.stop import StopStrings, texts

if TYPE_CHECKING:
    from onfoot.models.model import Model

CHAT_SAMPLING = Sampling(temperature=0.2, top_p=0.9)  # small models ramble at higher temperatures
MAX_CONTEXT = 8192  # tokens of a conversation, unless the model allows fewer


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


class MessageTooLongError(ValueError):
    """A message for which the context has no room."""


class Chat:
    """A conversation with a model; the KV cache is kept, so that a turn computes new tokens only.

    When the context is full, the oldest turns are forgotten, but never the system message.
    """

    def __init__(
        self,
        model: Model,
        sampling: Sampling = CHAT_SAMPLING,
        *,
        system: str | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> None:
        if not model.config.causal:
            raise ValueError("cannot chat with causal=False: tokens would attend to later tokens")
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        self.model, self.template, self.sampling, self.seed = model, template_of(model), sampling, seed
        self.stop_ids, self.end_of_turn = ends(model)
        self.stop, self.system = stop, system  # strings after which an answer ends, and the system message
        self.turns: list[Message] = []  # the user's and the model's messages
        self.context = min(model.config.n_positions, MAX_CONTEXT)
        self.n_computed = 0  # tokens that the model has computed
        self.n_forgotten = 0  # turns that the last question made it forget
        self.why = ""  # why the last answer ended: "end", "length", "context" (it is full) or "stopped"
        self._cache = KVCache(self.context)
        self._ids: list[int] = []  # the tokens of the cache are the first of these

    def reset(self) -> None:
        """Forgets all turns, but not the system message."""
        self.turns = []

    def ask(self, question: str, max_new_tokens: int) -> Iterator[str]:
        """The answer, piece by piece. If it is not read to the end, what was read is the answer."""
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
        self.turns.append({"role": "user", "content": question})
        try:
            ids = self._prompt(max_new_tokens)
        except ValueError:
            self.turns.pop()
            raise
        n_new, n_before, said, self.why = min(max_new_tokens, self.context - len(ids)), len(ids), "", "stopped"
        stop = StopStrings(self.end_of_turn, self.stop)
        try:
            for text in texts(StreamDecoder(tokenizer), self._tokens(ids, n_new), self.stop_ids, stop):
                said += text
                yield text
            full = len(self._ids) - n_before == n_new and self._ids[-1] not in self.stop_ids
            self.why = ("length" if n_new == max_new_tokens else "context") if full else "end"
        finally:
            self.turns.append({"role": "assistant", "content": said})

    def _messages(self) -> list[Message]:
        return [*([] if self.system is None else [{"role": "system", "content": self.system}]), *self.turns]

    def _prompt(self, max_new_tokens: int) -> list[int]:
        """The ids up to the answer, without the oldest turns if the context has no room for all of them."""
        assert self.model.tokenizer is not None
        encode = partial(chat_prompt_ids, self.model.tokenizer, self.template)
        ids, before = encode(self._messages()), len(self.turns)
        if len(ids) + min(max_new_tokens, self.context // 4) > self.context:
            while len(self.turns) > 1 and len(ids) > self.context // 2:  # half, so that it does not happen every time
                self.turns = self.turns[2:]
                ids = encode(self._messages())
        self.n_forgotten = (before - len(self.turns)) // 2
        if len(ids) >= self.context:
            raise MessageTooLongError(
                f"this message and the system message have {len(ids):,} tokens, but the context has {self.context:,}; "
                f"shorten it"
            )
        return ids

    def _tokens(self, ids: list[int], n_new: int) -> Iterator[int]:
        """Up to n_new sampled tokens after these; computes only what is not in the cache."""
        known = next((i for i, (a, b) in enumerate(zip(self._ids, ids, strict=False)) if a != b), len(self._ids))
        self._cache.length = min(known, self._cache.length, len(ids) - 1)
        self._ids = list(ids)
        rng = np.random.default_rng([self.seed, 0])
        for _ in range(n_new):
            fresh = np.asarray([self._ids[self._cache.length :]], np.int64)  # (1, T)
            logits = to_numpy(step(self.model, fresh, np.zeros(1, np.int64), self._cache))[0]  # (V,)
            self.n_computed += fresh.size
            self._ids.append(next_token(logits, np.asarray(self._ids), self.sampling, rng))
            yield self._ids[-1]
