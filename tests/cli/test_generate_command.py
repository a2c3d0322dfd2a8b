"""`onfoot generate`: every option reaches the sampler, and exactly the generated text is printed as it is generated."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.formats.tokenizer import Tokenizer, byte_tokenizer
from onfoot.generate.chat import prompt_ids
from onfoot.models.model import Model

BYTES = byte_tokenizer()
CONFIG = onfoot.GPT2Config(vocab_size=257, n_positions=48, n_embd=16, n_layer=1, n_head=2)
PROMPT = "The text"
TEMPLATE = "{% for m in messages %}{{ m['content'] }};{% endfor %}"


def run(*arguments: Any, status: int = 0, text: str | None = None) -> str:
    result = CliRunner().invoke(app, ["generate", *map(str, arguments)], input=text)
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


def lively(config: onfoot.GPT2Config = CONFIG) -> Model:
    """A model with a peaked distribution over printable letters, so that every setting changes the text."""
    model = onfoot.create(config)
    rng = np.random.default_rng(3)
    for name, value in model.params.items():
        value += rng.normal(0, 0.25, value.shape).astype(np.float32)
        model.params[name] = value
    printable = BYTES.encode("abcdefghijklmnopqrstuvwxyz ,.")
    table = model.params["transformer.wte.weight"]
    others = np.setdiff1d(np.arange(config.vocab_size), printable)
    model.params["transformer.ln_f.bias"][0] = 9
    table[:, 0] = 0
    table[others, 0] = -9  # never generated
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "model"
    model = lively()
    model.tokenizer = Tokenizer(BYTES.backend, BYTES.eos, None, TEMPLATE)
    model.save(path)
    return path


def expected(folder: Path, *prompts: str, **settings: Any) -> list[str]:
    model = onfoot.load(folder)
    ids = [np.asarray(BYTES.encode(prompt)) for prompt in prompts]
    return [BYTES.decode(out.tolist()) for out in model.generate(ids, **{"temperature": 0.8, **settings})]


SETTINGS = [
    {"temperature": 0.3},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.5, "top_p": 0.3},
    {"temperature": 1.5, "min_p": 0.4},
    {"repetition_penalty": 3.0, "temperature": 0.0},
    {"seed": 9},
    {},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_setting_reaches_the_sampler_for_one_prompt_and_for_two(folder: Path, settings: dict[str, Any]) -> None:
    typed = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    output = run(folder, "--prompt", PROMPT, "--max-new-tokens", 30, *typed)
    (one,) = expected(folder, PROMPT, max_new_tokens=30, **settings)
    assert output == one + "\n"
    without = {name: value for name, value in settings.items() if name == "temperature"}
    same = expected(folder, PROMPT, max_new_tokens=30, **without) == [one]
    assert same == (settings == without)  # every setting changes the text of this model
    two = run(folder, "--prompt", PROMPT, "--prompt", "And", "--max-new-tokens", 30, *typed)
    first, second = expected(folder, PROMPT, "And", max_new_tokens=30, **settings)
    assert two == f"--- 1 ---\n{first}\n--- 2 ---\n{second}\n"


def test_two_prompts_stop_and_slide_as_one_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = expected(folder, PROMPT, "And", max_new_tokens=70, slide=True)
    assert len(first) > 48 + len(PROMPT)
    assert run(folder, "--prompt", PROMPT, "--prompt", "And", "--max-new-tokens", 70, "--slide") == (
        f"--- 1 ---\n{first}\n--- 2 ---\n{second}\n"
    )
    stop = first[len(PROMPT) + 3 : len(PROMPT) + 5]
    cut = first[: first.index(stop, len(PROMPT)) + 2]
    assert run(folder, "--prompt", PROMPT, "--max-new-tokens", 70, "--slide", "--stop", stop) == cut + "\n"
    made: list[int] = []
    generate = Model.generate

    def watched(self: Model, *arguments: Any, **named: Any) -> Any:
        found = generate(self, *arguments, **named)
        made.extend(len(row) for row in found)
        return found

    monkeypatch.setattr(Model, "generate", watched)
    both = run(folder, "--prompt", PROMPT, "--prompt", "And", "--max-new-tokens", 70, "--slide", "--stop", stop)
    assert both.startswith(f"--- 1 ---\n{cut}\n--- 2 ---\n")
    assert made[0] == len(cut)  # no token after the stop text was generated


def test_without_a_number_the_context_is_filled_or_200_tokens_come(folder: Path) -> None:
    assert len(run(folder, "--prompt", PROMPT, "--temperature", 0)) == 48 + 1
    assert len(run(folder, "--prompt", "x" * 48, "--slide", "--temperature", 0)) == 48 + 200 + 1
    full = run(folder, "--prompt", "x" * 48, status=2)
    assert "48 tokens plus 1 new tokens exceeds n_positions=48" in full


def test_many_positions_still_give_200_tokens(tmp_path: Path) -> None:
    model = lively(onfoot.GPT2Config(vocab_size=257, n_positions=300, n_embd=16, n_layer=1, n_head=2))
    model.tokenizer = BYTES
    model.save(tmp_path)
    assert len(run(tmp_path, "--prompt", PROMPT)) == len(PROMPT) + 200 + 1
    assert len(run(tmp_path, "--prompt", PROMPT, "--chat")) == 200 + 1


def test_without_a_prompt_a_new_document_starts(folder: Path) -> None:
    model = onfoot.load(folder)
    out = model.generate([[256]], 12, 0.8)[0]
    assert run(folder, "--max-new-tokens", 12) == BYTES.decode(out.tolist()) + "\n"


def test_the_eos_token_ends_the_text_and_is_not_printed(tmp_path: Path) -> None:
    model = lively()
    model.tokenizer = BYTES
    model.params["transformer.wte.weight"][256, 0] = 9
    model.save(tmp_path)
    assert run(tmp_path, "--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 9) == PROMPT + "\n"


def test_nothing_is_printed_after_the_eos_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [*BYTES.encode("yes"), 256, *BYTES.encode("no")])
    assert run(folder, "--prompt", "x", "--max-new-tokens", 6) == "xyes\n"


def test_ids_go_in_and_out_where_there_is_no_tokenizer(tmp_path: Path) -> None:
    model = lively()
    model.save(tmp_path)
    out = model.generate([[3, 1, 4]], 5, 0.8)[0]
    assert run(tmp_path, "--tokens", "3 1 4", "--max-new-tokens", 5) == " ".join(map(str, out)) + "\n"


def scripted(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    monkeypatch.setattr("onfoot.generate.loop.stream", lambda *_, **__: iter([np.array([token]) for token in tokens]))


def test_a_character_that_is_never_finished_is_written_in_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, [*BYTES.encode("aé"), BYTES.encode("é")[0]])
    assert run(folder, "--prompt", "x", "--max-new-tokens", 4) == "xaé\ufffd\n"


def test_a_stop_text_may_span_several_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, BYTES.encode("one two three"))
    assert run(folder, "--prompt", "x", "--stop", "zz", "--stop", "two", "--max-new-tokens", 13) == "xone two\n"


def test_a_conversation_remembers_both_sides(folder: Path) -> None:
    model = onfoot.load(folder)
    messages: list[dict[str, str]] = []
    shown = ""
    for question in ("a", "b", "c"):
        messages.append({"role": "user", "content": question})
        ids = prompt_ids(model, messages)
        assert BYTES.decode(ids.tolist()) == "".join(m["content"] + ";" for m in messages)
        new = model.generate([ids], 6, 0.2, top_p=0.9, stop_ids=())[0][len(ids) :]
        messages.append({"role": "assistant", "content": BYTES.decode(new.tolist())})
        shown += f"> {messages[-1]['content']}\n"
    assert run(folder, "--chat", "--max-new-tokens", 6, text="a\nb\nc\n") == f"{shown}> \n"


def test_a_question_leaves_room_for_an_answer_up_to_the_last_position(folder: Path) -> None:
    assert len(run(folder, "--chat", "--prompt", "x" * 40, "--temperature", 0)) == 48 - 41 + 1
    assert len(run(folder, "--chat", "--prompt", "x" * 46, "--temperature", 0)) == 1 + 1


def test_the_end_of_a_turn_ends_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [*BYTES.encode("yes"), 256, *BYTES.encode("no")]
    monkeypatch.setattr("onfoot.generate.chat.next_token", lambda *_: tokens.pop(0))
    model_end = TEMPLATE.replace(";", "<|endoftext|>")
    monkeypatch.setattr("onfoot.generate.chat.template_of", lambda m: onfoot.formats.chat.ChatTemplate(model_end))
    assert run(folder, "--chat", "--prompt", "x") == "yes\n"


def test_an_adapter_changes_the_text(folder: Path, tmp_path: Path) -> None:
    model = lively(onfoot.GPT2Config(vocab_size=257, n_positions=48, n_embd=32, n_layer=1, n_head=2))
    model.tokenizer = BYTES
    model.save(tmp_path / "base")
    base = onfoot.load(tmp_path / "base")
    base.add_lora(r=2)
    for name in base.trainable:
        base.params[name] = np.random.default_rng(0).normal(0, 1, base.params[name].shape).astype(np.float32)
    base.save_adapter(tmp_path / "adapter")
    typed = ("--prompt", PROMPT, "--max-new-tokens", 30)
    (tuned,) = (BYTES.decode(o.tolist()) for o in base.generate([BYTES.encode(PROMPT)], 30, 0.8))
    assert run(tmp_path / "base", "--adapter", tmp_path / "adapter", *typed) == tuned + "\n"
    assert run(tmp_path / "base", *typed) != tuned + "\n"


def test_quantized_is_passed_to_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    load = onfoot.load

    def watched(*arguments: Any, **named: Any) -> Any:
        asked.append(inspect.signature(load).bind(*arguments, **named).arguments.get("quantized", False))
        return load(*arguments)

    monkeypatch.setattr(onfoot, "load", watched)
    run(folder, "--prompt", "x", "--max-new-tokens", 1, "--quantized")
    run(folder, "--prompt", "x", "--max-new-tokens", 1)
    assert asked == [True, False]
