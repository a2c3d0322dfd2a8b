"""Edge cases of safetensors, Hugging Face folders and tokenizers: the last byte, tied weights, every field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import onfoot
from llama_oracle import scrambled_llama
from onfoot.formats.huggingface import ARCHITECTURES, load_config, transformers_config
from onfoot.formats.tensors import TensorFile, write_tensors
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer
from onfoot.quantized import quantize

SIZES: dict[str, Any] = {"vocab_size": 29, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 3}
LLAMA: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 24,
}  # fmt: skip


def test_a_tensor_file_that_is_one_byte_short_is_truncated_and_a_complete_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, {"a": np.arange(5, dtype=np.float32), "b": np.arange(3.0)})
    whole = path.read_bytes()
    assert set(TensorFile(path)) == {"a", "b"}
    for n in (len(whole) - 1, len(whole) - 20, 9, 8, 7, 0):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=r"x\.safetensors"):
            TensorFile(path)
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    assert len(TensorFile(path)) == 0
    path.write_bytes((3).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="not a safetensors file, or is truncated"):
        TensorFile(path)


def test_written_tensors_are_aligned_ordered_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for n in range(1, 9):  # headers of every length
        arrays = {"x" * n: np.arange(3, dtype=np.int8), "double": np.arange(2.0), "half": np.ones(3, np.float16)}
        write_tensors(path, arrays)
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert header % 8 == 0
        with safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
        entries = json.loads(path.read_bytes()[8 : 8 + header])
        for name, array in arrays.items():
            begin, end = entries[name]["data_offsets"]
            assert begin % array.dtype.itemsize == 0 and end - begin == array.nbytes
            np.testing.assert_array_equal(TensorFile(path)[name], array)
            np.testing.assert_array_equal(load_file(path)[name], array)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]},
        {"dtype": "F9", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
    ],
    ids=str,
)
def test_entries_that_do_not_add_up_are_refused(tmp_path: Path, entry: dict[str, Any]) -> None:
    header = json.dumps({"t": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match=r"x\.safetensors"):
        TensorFile(path)["t"]


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    from safetensors.torch import save_file as save_torch

    value = torch.tensor([1.0, -2.5, 3.14159, 1e30, 1e-30], dtype=torch.bfloat16)
    save_torch({"t": value}, tmp_path / "x.safetensors")
    np.testing.assert_array_equal(TensorFile(tmp_path / "x.safetensors")["t"], value.float().numpy())


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window must be true or false, got 1"),
        ("qwen2", {"layer_types": ["sliding_attention"]}, "sliding_attention, but sliding_window is not set"),
        ("qwen3", {"layer_types": ["chunked_attention"]}, "layer_types .* are not supported"),
        ("mistral", {"layer_types": ["full_attention"]}, "layer_types .* are not supported, only sliding_attention"),
    ],
)
def test_options_that_change_the_mathematics_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    config = (
        onfoot.GPT2Config(**SIZES)
        if family == "gpt2"
        else onfoot.LlamaConfig.from_dict({**LLAMA, "model_type": family})
    )
    onfoot.create(config).save(tmp_path)
    load_config(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path)


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
)
def test_transformers_reads_the_same_configuration(tmp_path: Path, family: str, scaling: Any) -> None:
    config = onfoot.LlamaConfig.from_dict(
        {**LLAMA, "model_type": family, "rope_theta": 777.0, "rope_scaling": scaling, "rms_norm_eps": 3e-6}
    )
    scrambled_llama(config, 0, "float32").save(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == [ARCHITECTURES[family]]
    assert getattr(theirs, "sliding_window", None) == config.sliding_window
    assert theirs.rope_parameters["rope_theta"] == 777.0 and theirs.rms_norm_eps == 3e-6
    assert theirs.rope_parameters["rope_type"] == (scaling or {"rope_type": "default"})["rope_type"]
    assert theirs.rope_parameters.get("factor") == (scaling or {}).get("factor")
    assert theirs.num_key_value_heads == 2 and theirs.hidden_act == "silu"
    assert load_config(tmp_path) == config
    values = transformers_config(config, "float32")
    assert ("attention_bias" in values) == (family in ("llama", "qwen3")) and values["dtype"] == "float32"


def test_the_end_token_is_in_the_generation_configuration(tmp_path: Path) -> None:
    onfoot.create(onfoot.GPT2Config(**SIZES, eos_token_id=7, bos_token_id=3)).save(tmp_path)
    theirs = GenerationConfig.from_pretrained(tmp_path)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (7, 3)


def test_a_folder_loaded_in_8_bits_has_each_weight_quantised_along_its_inputs(tmp_path: Path) -> None:
    config = onfoot.GPT2Config(vocab_size=33, n_positions=16, n_embd=32, n_layer=1, n_head=2, n_inner=64)
    model = onfoot.create(config)
    model.save(tmp_path)
    blocks = onfoot.load(tmp_path, quantized=True)
    name = "transformer.h.0.mlp.c_fc.weight"
    right = np.asarray(quantize(np.ascontiguousarray(model.params[name].T))).T  # blocks run along the inputs
    np.testing.assert_array_equal(np.asarray(blocks.params[name]), right)
    assert np.abs(right - model.params[name]).max() > 0
    table = "transformer.wte.weight"
    np.testing.assert_array_equal(np.asarray(blocks.params[table]), np.asarray(quantize(model.params[table])))
    assert isinstance(blocks.params["transformer.ln_f.weight"], np.ndarray)


def test_a_tokenizer_as_large_as_the_model_fits_and_one_larger_does_not(tmp_path: Path) -> None:
    for size, fits in ((257, True), (258, True), (256, False)):
        onfoot.create(onfoot.GPT2Config(**{**SIZES, "vocab_size": size})).save(tmp_path)
        byte_tokenizer().save(tmp_path, 16)
        if fits:
            assert onfoot.load(tmp_path).tokenizer is not None
        else:
            with pytest.raises(ValueError, match="use the model's own tokenizer"):
                onfoot.load(tmp_path)


def test_only_constants_of_old_files_are_ignored(tmp_path: Path) -> None:
    onfoot.create(onfoot.GPT2Config(**SIZES)).save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    save_file({**tensors, "transformer.h.0.attn.bias": np.ones((1, 1, 16, 16), np.float32)}, path)
    onfoot.load(tmp_path)
    save_file({**tensors, "transformer.h.0.mlp.bias": np.ones(3, np.float32)}, path)
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.mlp\.bias"):
        onfoot.load(tmp_path)


def test_bos_eos_and_template_are_saved_with_a_tokenizer(tmp_path: Path) -> None:
    backend = byte_tokenizer().backend
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer(backend, "</s>", "<s>", "{{ messages }}")
    assert tokenizer.eos_id == 258 and tokenizer.size == 259
    tokenizer.save(tmp_path, 77)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.bos_token, theirs.eos_token, theirs.model_max_length) == ("<s>", "</s>", 77)
    again = Tokenizer.load(tmp_path)
    assert (again.bos, again.eos, again.chat_template) == ("<s>", "</s>", "{{ messages }}")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "in the configuration"}))
    assert Tokenizer.load(tmp_path).chat_template == "{{ messages }}"  # chat_template.jinja takes precedence
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer.load(tmp_path).chat_template == "in the configuration"
    special = {"eos_token": {"content": "<s>"}, "bos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **special}))
    again = Tokenizer.load(tmp_path)
    assert (again.bos, again.eos) == ("</s>", "<s>")
    assert Tokenizer(backend, "<none>", "<none>").eos is None


def test_without_a_bos_token_the_eos_token_is_used(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path, 16)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.bos_token == theirs.eos_token == "<|endoftext|>"


def test_a_bpe_vocabulary_has_the_requested_size() -> None:
    text = " ".join(f"{i * i % 977:x}{i % 89}" for i in range(5000))
    assert bpe_tokenizer(iter([text]), 400).size == 400
    assert bpe_tokenizer(iter([text]), 257).size == 257
    with pytest.raises(ValueError, match=r"vocab_size must be >= 257 for BPE .*, got 256"):
        bpe_tokenizer(iter([text]), 256)


def test_errors_name_the_character_and_its_position() -> None:
    tokenizer = char_tokenizer(["abc"])
    assert tokenizer.size == 5  # including the unknown and the end-of-text token
    with pytest.raises(ValueError, match="the character 'z' is not in"):
        tokenizer.encode("abzq")
    with pytest.raises(ValueError, match=r"an unpaired surrogate, '\\ud800', at position 2"):
        byte_tokenizer().encode("ab\ud800")
    assert tokenizer.decode([tokenizer.eos_id or 0, *tokenizer.encode("cab")]) == "cab"
