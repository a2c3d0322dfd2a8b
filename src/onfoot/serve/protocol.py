"""OpenAI's requests and responses: what a request asks for, checked, and the JSON objects of its answer.

Unknown fields are ignored; those that would change the answer and are not supported are refused.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onfoot.formats.chat import check_text
from onfoot.formats.files import shown
from onfoot.formats.tokenizer import Tokenizer
from onfoot.generate.chat import ends, prompt_ids
from onfoot.generate.decode import token_bytes
from onfoot.generate.sampling import Sampling
from onfoot.models.model import Model
from onfoot.serve.answer import Piece, TokenLogprob

MAX_STOP = 4  # stop strings
MAX_STOP_LENGTH = 200  # characters of one
MAX_TOP = 20  # most likely tokens with their log-probabilities
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
# Fields that would change the answer, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "web_search_options": (None,),
}


class RequestError(ValueError):
    """A request that is refused, with its HTTP status and OpenAI's error code."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code

    def to_json(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Limits:
    """The largest values that a request may ask for."""

    context: int  # tokens of a prompt and its answer
    max_tokens: int  # of one answer
    max_choices: int = 16  # answers of one request


@dataclass(frozen=True)
class Served:
    """The model, under its public name, with the limits of its requests."""

    model: Model
    name: str
    limits: Limits
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.model.tokenizer is not None  # `onfoot serve` checks this
        return self.model.tokenizer


@dataclass(frozen=True)
class Order:
    """What a request asks for: n answers to each prompt."""

    is_chat: bool
    prompts: list[list[int]]
    n: int
    max_tokens: list[int]  # of the answers to each prompt
    sampling: Sampling
    seed: int
    stop_ids: tuple[int, ...]
    stop: list[str]
    top_logprobs: int | None
    stream: bool
    include_usage: bool


def read_order(body: Any, served: Served, is_chat: bool) -> Order:
    """The checked request; raises RequestError."""
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    _check_model(body, served)
    for name, harmless in UNSUPPORTED.items():
        if body.get(name) not in harmless:
            raise RequestError(f"{name} is not supported by this server; remove it", name)
    stop_ids, stop = served.model.eos_ids, _stop(body)
    if is_chat:
        prompts = [_chat_prompt(body, served)]
        more_ids, more = ends(served.model)
        stop_ids, stop = (*stop_ids, *more_ids), [*stop, *more]
    else:
        prompts = _text_prompts(body, served)
    n = _integer(body, "n", 1, 1, served.limits.max_choices)
    if n * len(prompts) > served.limits.max_choices:
        raise RequestError(
            f"n={n} answers to {len(prompts)} prompts exceed the limit of {served.limits.max_choices} answers per "
            f"request; send several requests",
            "n",
        )
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError("stream_options must be an object", "stream_options")
    seed = _integer(body, "seed", None, -(2**63), 2**63 - 1)
    return Order(
        is_chat,
        prompts,
        n,
        [_max_tokens(body, served, len(prompt), is_chat) for prompt in prompts],
        _sampling(body),
        secrets.randbits(32) if seed is None else seed % 2**64,
        stop_ids,
        stop,
        _top_logprobs(body, is_chat),
        _boolean(body, "stream"),
        _boolean(options, "include_usage"),
    )


def _check_model(body: dict[str, Any], served: Served) -> None:
    name = body.get("model")
    if not isinstance(name, str):
        raise RequestError(f"model must be a string: {served.name!r}", "model")
    if name != served.name:
        message = f"the model {shown(name)} does not exist; this server has {served.name!r}"
        raise RequestError(message, "model", 404, "model_not_found")


def _integer(body: dict[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise RequestError(f"{name} must be an integer in [{low}, {high}], got {shown(value)}", name)
    return value


def _number(body: dict[str, Any], name: str, default: Any, low: float, high: float) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not low <= value <= high:
        raise RequestError(f"{name} must be a number in [{low:g}, {high:g}], got {shown(value)}", name)
    return float(value)


def _boolean(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise RequestError(f"{name} must be true or false, got {shown(value)}", name)
    return bool(value)


def _sampling(body: dict[str, Any]) -> Sampling:
    """OpenAI's temperature and top_p; top_k, min_p and repetition_penalty as other servers name them."""
    top_p, top_k = _number(body, "top_p", None, 0, 1), _integer(body, "top_k", None, -1, 2**31)
    return Sampling(
        _number(body, "temperature", 1.0, 0, 2),
        top_k if top_k is not None and top_k > 0 else None,
        max(top_p, 1e-9) if top_p is not None else None,  # 0 keeps the most likely token
        _number(body, "min_p", None, 0, 1),
        _number(body, "repetition_penalty", 1.0, 0.01, 100),
    )


def _stop(body: dict[str, Any]) -> list[str]:
    value = body.get("stop")
    stop = [value] if isinstance(value, str) else value or []
    if not isinstance(stop, list) or len(stop) > MAX_STOP:
        raise RequestError(f"stop must be a string or a list of at most {MAX_STOP} strings", "stop")
    for text in stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
            raise RequestError(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters, got {shown(text)}", "stop")
    return stop


def _top_logprobs(body: dict[str, Any], is_chat: bool) -> int | None:
    if not is_chat:
        return _integer(body, "logprobs", None, 0, MAX_TOP)
    top = _integer(body, "top_logprobs", 0, 0, MAX_TOP)
    if _boolean(body, "logprobs"):
        return top
    if top:
        raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
    return None


def _max_tokens(body: dict[str, Any], served: Served, n_prompt: int, is_chat: bool) -> int:
    """The most tokens of an answer; by default what fits, for completions 16."""
    limits = served.limits
    room = limits.context - n_prompt
    if room < 1:
        raise RequestError(
            f"a prompt of {n_prompt} tokens leaves no room for an answer: the context is {limits.context} tokens; "
            f"shorten it",
            "messages" if is_chat else "prompt",
            code="context_length_exceeded",
        )
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    wanted = _integer(body, name, None, 1, limits.max_tokens)
    if wanted is None:
        return min(room, limits.max_tokens if is_chat else COMPLETION_TOKENS)
    if wanted > room:
        raise RequestError(
            f"a prompt of {n_prompt} tokens plus {name}={wanted} exceeds the context of {limits.context} tokens; "
            f"shorten the prompt or ask for at most {room} tokens",
            name,
            code="context_length_exceeded",
        )
    return wanted


def _chat_prompt(body: dict[str, Any], served: Served) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a non-empty list of objects with role and content", "messages")
    try:
        return prompt_ids(served.model, [_message(message, k) for k, message in enumerate(messages)]).tolist()
    except RequestError:
        raise
    except ValueError as error:
        raise RequestError(str(error), "messages") from None


def _message(message: Any, k: int) -> dict[str, str]:
    """A message with its content as one string; a developer's is the system's."""
    where = f"messages[{k}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with role and content", where)
    if message.get("tool_calls") or message["role"] in ("tool", "function"):
        raise RequestError(f"{where}: tools are not supported by this server", where)
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise RequestError(f"{where}: only content parts of type text are supported", where)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{where}: content must be a string or a list of text parts, got {shown(content)}", where)
    return {"role": "system" if message["role"] == "developer" else message["role"], "content": content}


def _text_prompts(body: dict[str, Any], served: Served) -> list[list[int]]:
    """The prompts of /v1/completions: a text, token ids, or a list of either."""
    prompt = body.get("prompt")
    several = prompt if isinstance(prompt, list) and prompt and not all(type(i) is int for i in prompt) else [prompt]
    if len(several) > served.limits.max_choices:
        raise RequestError(f"{len(several)} prompts exceed the limit of {served.limits.max_choices}", "prompt")
    return [_text_prompt(one, served) for one in several]


def _text_prompt(prompt: Any, served: Served) -> list[int]:
    vocab_size = served.model.config.vocab_size
    if isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
        if not all(0 <= i < vocab_size for i in prompt):
            raise RequestError(f"token ids must be in [0, {vocab_size})", "prompt")
        return prompt
    if not isinstance(prompt, str):
        raise RequestError(f"prompt must be a string, token ids, or a list of either, got {shown(prompt)}", "prompt")
    try:
        ids = served.tokenizer.encode(check_text(prompt, "prompt"), add_special_tokens=True)
    except ValueError as error:
        raise RequestError(str(error), "prompt") from None
    if not ids and served.tokenizer.eos_id is not None:
        return [served.tokenizer.eos_id]  # the start of a document
    if not ids:
        raise RequestError("an empty prompt has no tokens; give some text", "prompt")
    return ids


# Responses


class Response:
    """The JSON objects of one answer, in OpenAI's form."""

    def __init__(self, order: Order, served: Served) -> None:
        self.order, self.served = order, served
        self.id = f"{'chatcmpl' if order.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.n_tokens, self.n_reused = [0] * order.n * len(order.prompts), [0] * len(order.prompts)

    def count(self, index: int, piece: Piece) -> None:
        """Counts the tokens of a piece for the usage."""
        self.n_tokens[index] = max(self.n_tokens[index], piece.n_tokens)
        prompt = index // self.order.n
        self.n_reused[prompt] = max(self.n_reused[prompt], piece.n_reused)

    def usage(self) -> dict[str, Any]:
        """The tokens of the prompts and of the answers; cached ones were not computed again."""
        n_prompt, n_new = sum(map(len, self.order.prompts)), sum(self.n_tokens)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_new,
            "total_tokens": n_prompt + n_new,
            "prompt_tokens_details": {"cached_tokens": sum(self.n_reused)},
        }

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.served.name, "choices": choices}

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The response to a request that is not streamed, from the pieces of each choice."""
        choices = []
        for index, parts in enumerate(pieces):
            text = "".join(piece.text for piece in parts)
            entries = [entry for piece in parts for entry in piece.logprobs]
            logprobs = self._logprobs(entries) if self.order.top_logprobs is not None else None
            shape = {"message": {"role": "assistant", "content": text}} if self.order.is_chat else {"text": text}
            choices.append({"index": index, **shape, "logprobs": logprobs, "finish_reason": parts[-1].finish_reason})
        kind = "chat.completion" if self.order.is_chat else "text_completion"
        return {**self._object(kind, choices), "usage": self.usage()}

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream of a chat begins with: the role of each choice."""
        if not self.order.is_chat:
            return []
        return [self._chunk(i, {"delta": {"role": "assistant", "content": ""}}) for i in range(len(self.n_tokens))]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a stream for one piece: its text, then the finish reason."""
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        if not self.order.is_chat:
            return [self._chunk(index, {"text": piece.text}, logprobs, piece.finish_reason)]
        out = []
        if piece.text or logprobs:
            out.append(self._chunk(index, {"delta": {"content": piece.text}}, logprobs))
        if piece.finish_reason is not None:
            out.append(self._chunk(index, {"delta": {}}, None, piece.finish_reason))
        return out

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream whose request asked for the usage."""
        return {**self._object(self._chunk_kind, []), "usage": self.usage()}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.order.is_chat else "text_completion"

    def _chunk(self, index: int, shape: Any, logprobs: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, **shape, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self.order.include_usage else {}
        return {**self._object(self._chunk_kind, [choice]), **usage}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        if not self.order.is_chat:
            return {
                "tokens": [self._text(entry.token) for entry in entries],
                "token_logprobs": [entry.logprob for entry in entries],
                "top_logprobs": [{self._text(i): value for i, value in reversed(entry.top)} for entry in entries],
                "text_offset": [entry.offset for entry in entries],
            }
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._token(i, value) for i, value in entry.top]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self.served.tokenizer, token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _text(self, token: int) -> str:
        return token_bytes(self.served.tokenizer, token).decode("utf-8", "replace")
