"""Special tokens in chat: a template gets the tokenizer's bos and eos, for every source of the model."""

from __future__ import annotations

from pathlib import Path

import onfoot
from onfoot.formats.tokenizer import Tokenizer, byte_tokenizer
from onfoot.generate.chat import ends, prompt_ids, template_of
from onfoot.models.model import Model

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
USER = {"role": "user", "content": "hi"}


def small(chat_template: str | None) -> Model:
    backend = byte_tokenizer().backend
    backend.add_special_tokens(["<s>", "</s>"])
    config = onfoot.GPT2Config(vocab_size=259, n_positions=32, n_embd=4, n_layer=1, n_head=1, eos_token_id=7)
    model = onfoot.create(config)
    model.tokenizer = Tokenizer(backend, "</s>", "<s>", chat_template)
    return model


def test_bos_and_eos_are_the_tokenizers() -> None:
    model = small(TEMPLATE)
    assert model.tokenizer is not None
    ids = prompt_ids(model, [USER]).tolist()
    assert model.tokenizer.backend.decode(ids, skip_special_tokens=False) == "<s>hi</s>>"
    assert ids[0] == 257 and 258 in ids
    assert ends(model) == ((7, 258), [])


def test_a_model_from_a_gguf_file_has_its_template(tmp_path: Path) -> None:
    model = small(TEMPLATE)
    file = tmp_path / "model.gguf"
    file.touch()
    (tmp_path / "chat_template.jinja").write_text("another's")
    model.source = str(file)
    assert template_of(model).source == TEMPLATE
