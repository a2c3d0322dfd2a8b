"""A conversation: the answers of `generate`, with the KV cache kept, turns forgotten when the context is full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.formats.tokenizer import Tokenizer, byte_tokenizer
from onfoot.generate.chat import CHAT_SAMPLING, Chat, MessageTooLongError, prompt_ids
from onfoot.generate.sampling import Sampling
from onfoot.models.model import Model

BYTES = byte_tokenizer()
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
GREEDY = Sampling(temperature=0)


def lively(family: str, n_positions: int = 256, template: str | None = TEMPLATE, engine: str = "auto") -> Model:
    """A model that writes letters only, and different ones after every text."""
    config: Any = onfoot.GPT2Config(
        vocab_size=257, n_positions=n_positions, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=False
    )
    if family == "llama":
        config = onfoot.LlamaConfig(
            vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=n_positions, tie_word_embeddings=False,
        )  # fmt: skip
    rng = np.random.default_rng(3)
    params = {name: x + rng.normal(0, 0.5, x.shape) for name, x in onfoot.create(config).params.items()}
    others = np.setdiff1d(np.arange(257), BYTES.encode("abcdefghijklmnopqrstuvwxyz ,."))
    params["lm_head.weight"][others] = 0  # a logit of 0, where the largest of 29 letters is larger
    model = Model(config, params, engine=engine)
    model.tokenizer = Tokenizer(BYTES.backend, BYTES.eos, None, template)
    return model


@pytest.mark.parametrize("engine", ["numpy", "numba", "torch"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("sampling", [GREEDY, CHAT_SAMPLING, Sampling(1.2, top_k=5, repetition_penalty=1.3)], ids=str)
def test_every_answer_is_that_of_generate_and_only_new_tokens_are_computed(
    family: str, engine: str, sampling: Sampling
) -> None:
    model = lively(family, engine=engine)
    chat = Chat(model, sampling, system="be brief", seed=5)
    messages: list[dict[str, str]] = [{"role": "system", "content": "be brief"}]
    known: list[int] = []  # the tokens that have gone through the model
    for question in ("hello", "and now?", "é"):
        messages.append({"role": "user", "content": question})
        ids = prompt_ids(model, messages)
        settings = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        more = {"repetition_penalty": sampling.repetition_penalty, "stop_ids": chat.stop_ids}
        out = model.generate([ids], 12, seed=5, **settings, **more)[0]
        new = [token for token in out[len(ids) :].tolist() if token not in chat.stop_ids]
        before = chat.n_computed
        pieces = list(chat.ask(question, 12))
        messages.append({"role": "assistant", "content": BYTES.decode(new)})
        assert "".join(pieces) == messages[-1]["content"] and chat.turns == messages[1:]
        shared = next(i for i in range(len(ids)) if known[i : i + 1] != [ids[i]])
        assert shared == len(known)
        assert chat.n_computed - before == len(out) - 1 - shared  # the last token is sampled, and never computed
        known = out[:-1].tolist()


def test_a_reset_keeps_the_system_message_and_a_new_one_replaces_it() -> None:
    model = lively("llama")
    chat = Chat(model, GREEDY, system="one")
    first = "".join(chat.ask("hi", 8))
    "".join(chat.ask("more", 8))
    before = chat.n_computed
    chat.reset()
    assert "".join(chat.ask("hi", 8)) == first
    assert chat.n_computed - before == 8  # the whole prompt is known; its last token is computed again
    chat.reset()
    chat.system = "two"
    other = "".join(chat.ask("hi", 8))
    assert other == "".join(Chat(model, GREEDY, system="two").ask("hi", 8)) != first


def test_an_answer_that_is_not_read_to_the_end_is_kept_as_far_as_it_was_read() -> None:
    model = lively("gpt2")
    chat, whole = Chat(model, GREEDY), "".join(Chat(model, GREEDY).ask("hi", 20))
    answer = chat.ask("hi", 20)
    read = next(answer) + next(answer) + next(answer)
    answer.close()  # type: ignore[attr-defined]
    assert (chat.turns[-1]["content"], chat.why) == (read, "stopped") and whole.startswith(read) and len(read) == 3
    plain = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": read},
        {"role": "user", "content": "x"},
    ]
    ids = prompt_ids(model, plain)
    out = model.generate([ids], 6, 0, stop_ids=chat.stop_ids)[0][len(ids) :]
    assert "".join(chat.ask("x", 6)) == BYTES.decode(out.tolist())


def test_a_full_context_forgets_the_oldest_turns_and_never_the_system_message() -> None:
    model = lively("gpt2", n_positions=64)
    chat = Chat(model, GREEDY, system="S")
    forgotten = 0
    for number in range(9):
        "".join(chat.ask(f"question {number}", 6))
        forgotten += chat.n_forgotten
        assert len(chat.turns) == 2 * (number + 1 - forgotten)
        messages = [{"role": "system", "content": "S"}, *chat.turns]
        assert chat.turns[-2]["content"] == f"question {number}"
        assert len(prompt_ids(model, messages[:-1])) + 6 <= 64
        ids = prompt_ids(model, messages[:-1])
        out = model.generate([ids], 6, 0, stop_ids=chat.stop_ids)[0][len(ids) :]
        assert chat.turns[-1]["content"] == BYTES.decode(out.tolist())  # as if the turns had never been
    assert forgotten >= 5


def test_an_answer_ends_where_the_context_or_its_limit_does() -> None:
    model = lively("gpt2", n_positions=32)
    chat = Chat(model, GREEDY)
    assert len("".join(chat.ask("x" * 20, 100))) == 32 - 27 and chat.why == "context"
    chat.reset()
    assert len("".join(chat.ask("x", 3))) == 3 and chat.why == "length"
    chat.reset()
    with pytest.raises(MessageTooLongError, match=r"have 37 tokens, but the context has 32; shorten it"):
        list(chat.ask("x" * 30, 3))
    assert chat.turns == []
    with pytest.raises(ValueError, match=r"max_new_tokens must be >= 1, got 0"):
        list(chat.ask("x", 0))
    with pytest.raises(ValueError, match=r"seed must be >= 0, got -1"):
        Chat(model, seed=-1)
    with pytest.raises(ValueError, match=r"cannot chat with causal=False"):
        Chat(onfoot.create(onfoot.GPT2Config(257, 8, 8, 1, 1, causal=False)))


def test_an_answer_ends_before_the_end_of_a_turn_and_after_a_stop_string(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively("gpt2", template=None)  # ChatML, whose end of turn is a string here
    written = "yes, it is<|im_end|>\n<|im_start|>"

    def tokens(chat: Chat, ids: list[int], n_new: int) -> Any:
        chat._ids = list(ids)
        for token in BYTES.encode(written):
            chat._ids.append(token)
            yield token

    monkeypatch.setattr(Chat, "_tokens", tokens)
    chat = Chat(model)
    assert "".join(chat.ask("x", 99)) == chat.turns[-1]["content"] == "yes, it is" and chat.why == "end"
    assert "".join(Chat(model, stop=["es,"]).ask("x", 99)) == "yes,"
