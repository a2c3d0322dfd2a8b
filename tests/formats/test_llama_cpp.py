"""llama.cpp itself runs the exported files: the same token ids, and the same logits with and without an adapter."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onfoot
from llama_oracle import scrambled_llama
from onfoot.config import RopeScaling
from onfoot.formats.gguf_export import export_adapter, export_model
from onfoot.formats.gguf_tokenizer import read_tokenizer
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer
from oracles import assert_close

pytestmark = [pytest.mark.slow, pytest.mark.optional("llama-cpp-python is compiled from source, which takes a while")]

TEXT = "the quick brown fox 2024, isn't it?\n日本 é  a"
LLAMA = onfoot.LlamaConfig(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5,
)  # fmt: skip
GPT2 = onfoot.GPT2Config(vocab_size=320, n_positions=256, n_embd=64, n_layer=2, n_head=2)
CONFIGS: dict[str, Any] = {
    "llama": LLAMA,
    "tied llama with biases": replace(LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama 3": replace(LLAMA, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0)),
    "llama with linear scaling": replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0)),
    "llama with wide heads": replace(LLAMA, head_dim=32),
    "qwen2": replace(LLAMA, model_type="qwen2"),
    "gpt2": GPT2,
    "untied gpt2": replace(GPT2, tie_word_embeddings=False, n_inner=96),
}
# llama.cpp computes GELU with a table of 16-bit floats; everything else is in float32
LIMITS = {"gpt2": 2e-3}


def run(path: Path, ids: list[int], adapter: Path | None = None) -> tuple[np.ndarray, Any]:
    """The logits (T, V) of llama.cpp, and its model."""
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(
        str(path), lora_path=None if adapter is None else str(adapter), logits_all=True, n_ctx=256, n_threads=1,
        type_k=0, type_v=0, flash_attn=False, verbose=False,
    )  # fmt: skip
    theirs.eval(ids)
    return np.array(theirs.scores[: len(ids)]), theirs


def scrambled(config: Any) -> Any:
    if isinstance(config, onfoot.LlamaConfig):
        return scrambled_llama(config, 0, "float32", "numpy")
    model, rng = onfoot.create(config, engine="numpy"), np.random.default_rng(0)
    for name, value in model.params.items():
        model.params[name] = value + rng.normal(0, 0.2, value.shape).astype(np.float32)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_ids_and_logits_with_and_without_an_adapter(tmp_path: Path, name: str) -> None:
    model = scrambled(CONFIGS[name])
    model.tokenizer = bpe_tokenizer(iter([TEXT * 30]), 300)
    ids, limit = model.tokenizer.encode(TEXT), LIMITS.get(model.config.model_type, 1e-5)
    export_model(model, tmp_path / "model.gguf")
    logits, theirs = run(tmp_path / "model.gguf", ids)
    assert theirs.tokenize(TEXT.encode(), add_bos=False, special=True) == ids
    assert theirs.detokenize(ids).decode() == TEXT
    assert theirs.token_eos() == model.tokenizer.eos_id
    plain = model.logits([ids])[0]
    assert_close(logits, plain, limit)
    model.add_lora(r=3, alpha=7, use_rslora=name == "llama 3")
    rng = np.random.default_rng(1)
    for parameter in sorted(model.trainable):
        model.params[parameter] = rng.normal(0, 0.2, model.params[parameter].shape)
    export_adapter(model, tmp_path / "adapter.gguf")
    adapted = model.logits([ids])[0]
    assert np.abs(adapted - plain).max() > 100 * limit
    assert_close(run(tmp_path / "model.gguf", ids, tmp_path / "adapter.gguf")[0], adapted, limit)


@pytest.mark.parametrize("type_", ["f16", "bf16", "q8_0", "q4_0", "q4_1"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_type_is_read(tmp_path: Path, name: str, type_: str) -> None:
    """llama.cpp rounds activations to 8 bits where weights are quantised, so its logits are near ours, not equal."""
    model = scrambled(CONFIGS[name])
    model.tokenizer = bpe_tokenizer(iter([TEXT * 30]), 300)
    ids = model.tokenizer.encode(TEXT)
    export_model(model, tmp_path / "model.gguf", type_)
    expected = onfoot.load(tmp_path / "model.gguf", engine="numpy").logits([ids])[0]
    assert_close(run(tmp_path / "model.gguf", ids)[0], expected, 0.1)


def test_sentencepiece_ids_and_an_adapter_of_parts(tmp_path: Path) -> None:
    sentencepiece, out = pytest.importorskip("sentencepiece"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{TEXT} {i} fox box brow" for i in range(300)]), model_writer=out, vocab_size=320,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        minloglevel=2,
    )  # fmt: skip
    trained = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    ids = range(trained.get_piece_size())
    types = [
        2 if trained.is_unknown(i) else 3 if trained.is_control(i) else 6 if trained.is_byte(i) else 1 for i in ids
    ]
    tokenizer: Tokenizer = read_tokenizer(
        {
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [trained.id_to_piece(i) for i in ids],
            "tokenizer.ggml.scores": np.array([trained.get_score(i) for i in ids], np.float32),
            "tokenizer.ggml.token_type": np.array(types, np.int32), "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        },
        tmp_path,
    )  # fmt: skip
    model = scrambled(LLAMA)
    model.tokenizer = tokenizer
    export_model(model, tmp_path / "model.gguf")
    _, theirs = run(tmp_path / "model.gguf", [1, 5])
    for text in (TEXT, "  two spaces", "a", "foxes\tand boxes 😀", "<s>fox</s> box"):
        assert theirs.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text), text
    assert theirs.tokenize(b"fox", add_bos=True) == tokenizer.backend.encode("fox").ids == [1, *trained.encode("fox")]
    gpt2 = scrambled(GPT2)
    export_model(gpt2, tmp_path / "gpt2.gguf")
    gpt2.add_lora(r=2, alpha=9, targets=["c_attn.q", "c_attn.v", "c_fc"])
    for parameter in sorted(gpt2.trainable):
        gpt2.params[parameter] = np.random.default_rng(1).normal(0, 0.2, gpt2.params[parameter].shape)
    export_adapter(gpt2, tmp_path / "adapter.gguf")
    logits, _ = run(tmp_path / "gpt2.gguf", [5, 9, 200, 7], tmp_path / "adapter.gguf")
    assert_close(logits, gpt2.logits([[5, 9, 200, 7]])[0], 2e-3)
