"""Untrusted folders: any bad file gives a one-line error that names it, quickly and with little memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

import onfoot
from onfoot.formats.tensors import TensorFile

GPT2 = onfoot.GPT2Config(vocab_size=29, n_positions=16, n_embd=12, n_layer=2, n_head=3)
LLAMA = onfoot.LlamaConfig(
    vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip


@pytest.fixture(params=[GPT2, LLAMA], ids=["gpt2", "llama"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    onfoot.create(request.param, engine="numpy").save(tmp_path / "model")
    return tmp_path / "model"


def refused(folder: Path, named: str) -> str:
    """The one-line error of loading the folder, which names the file."""
    with pytest.raises(ValueError) as caught:
        onfoot.load(folder, engine="numpy")
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1000
    assert str(folder) in text and named in text
    return text


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


SIZES = {
    "gpt2": ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"),
    "llama": (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings",
    ),
}  # fmt: skip


def test_sizes_that_no_file_could_hold_are_refused_at_once(folder: Path) -> None:
    path = folder / "config.json"
    whole = path.read_text()
    for name in SIZES[json.loads(whole)["model_type"]]:
        for value in (10**9, 2**31, 2**64, 10**400, -1, 0, 1.5, "12", True, [12], {}):
            change(path, **{name: value})
            if not (value == 10**9 and name in ("max_position_embeddings",)):  # RoPE needs no table
                refused(folder, str(folder))
            path.write_text(whole)


def test_more_layers_than_there_are_tensors_are_refused_before_they_are_listed(folder: Path) -> None:
    name = "n_layer" if "gpt2" in (folder / "config.json").read_text() else "num_hidden_layers"
    change(folder / "config.json", **{name: 9_999})
    assert "9,999 layers" in refused(folder, "tensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "0.1", True, None, [1.0]])
def test_values_that_are_not_finite_numbers_are_rejected_by_name(folder: Path, value: Any) -> None:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    for name in ("layer_norm_epsilon", "resid_pdrop") if kind == "gpt2" else ("rms_norm_eps", "attention_dropout"):
        whole = (folder / "config.json").read_text()
        change(folder / "config.json", **{name: value})
        assert name in refused(folder, "config.json")
        (folder / "config.json").write_text(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": "yes"},
        {"eos_token_id": {"a": 1}},
        {"eos_token_id": [1, "2"]},
        {"bos_token_id": 1.5},
        {"model_type": ["gpt2"]},
        {"model_type": "x\ny"},
    ],
    ids=str,
)
def test_other_fields_of_wrong_types_are_refused(folder: Path, changes: dict[str, Any]) -> None:
    change(folder / "config.json", **changes)
    refused(folder, "config.json")


@pytest.mark.parametrize(
    "scaling",
    ["linear", ["linear"], {"rope_type": "linear", "factor": "2"}, {"rope_type": ["linear"], "factor": 2},
     {"rope_type": "llama3", "factor": 8, "low_freq_factor": None},
     {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": "8192"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rope_scalings_that_make_no_sense_are_refused(tmp_path: Path, field: str, scaling: Any) -> None:
    onfoot.create(LLAMA, engine="numpy").save(tmp_path)
    change(tmp_path / "config.json", **{"rope_parameters": None, field: scaling})
    refused(tmp_path, "config.json")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 100_000, b'{"a": [' + b"[" * 500 + b"]" * 500 + b"]}",
     b'{"model_type": "gpt2", "model_type": "llama"}', b'{"n_layer": ' + b"1" * 10_000 + b"}", b"null", b'"x"', b"[]",
     b"[" + b"[]," * 1_100_000 + b"[]]"],
    ids=["empty", "bytes", "deep list", "deep object", "500 levels", "a key twice", "a long number", "null", "a string",
         "a list", "a million values"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_invalid_or_oversized_json_is_rejected(folder: Path, name: str, content: bytes) -> None:
    from onfoot.formats.tokenizer import byte_tokenizer

    byte_tokenizer().save(folder, 16)
    change(folder / "config.json", vocab_size=29)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    if name == "tokenizer_config.json":  # only read with a tokenizer; byte_tokenizer has too many ids for this model
        small = {
            "version": "1.0",
            "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
            "added_tokens": [],
        }
        (folder / "tokenizer.json").write_text(json.dumps(small))
        onfoot.load(folder, engine="numpy")
    (folder / name).write_bytes(content)
    refused(folder, name)


NOT_FILES: dict[str, Callable[[Path], None]] = {
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("what", NOT_FILES)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_only_regular_files_are_read(folder: Path, name: str, what: str) -> None:
    (folder / name).unlink()
    NOT_FILES[what](folder / name)
    refused(folder, name)


@pytest.mark.parametrize("what", ["a pipe", "a folder", "a device"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_only_regular_files_of_a_tokenizer_are_read(tmp_path: Path, name: str, what: str) -> None:
    from onfoot.formats.tokenizer import byte_tokenizer

    model = onfoot.create(onfoot.GPT2Config(vocab_size=257, n_positions=16, n_embd=12, n_layer=2, n_head=3))
    model.tokenizer = byte_tokenizer()
    model.save(tmp_path / "model")
    (tmp_path / "model" / name).unlink(missing_ok=True)
    NOT_FILES[what](tmp_path / "model" / name)
    refused(tmp_path / "model", name)


def tensor_file(header: Any, body: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


WRONG = {
    "overlap": tensor_file({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6), "c": entry("U8", [2], 6, 8)}),
    "hole": tensor_file({"a": entry("U8", [2], 0, 2), "b": entry("F32", [1], 4, 8)}),
    "bytes behind": tensor_file({"a": entry("F32", [1], 0, 4)}),
    "backwards": tensor_file({"a": entry("F32", [1], 4, 0)}),
    "huge product": tensor_file({"a": entry("F32", [2**32, 2**32], 0, 8)}),
    "product that overflows to the right size": tensor_file({"a": entry("U8", [2**63, 2**63, 8], 0, 8)}),
    "huge offset": tensor_file({"a": entry("F32", [2], 0, 2**70)}),
    "shape and bytes": tensor_file({"a": entry("F32", [3], 0, 8)}),
    "many dimensions": tensor_file({"a": entry("F64", [1] * 70, 0, 8)}),
    "metadata of numbers": tensor_file({"__metadata__": {"a": 1}, "a": entry("F64", [1], 0, 8)}),
    "one byte short": tensor_file({"a": entry("F64", [1], 0, 8)}, bytes(7)),
    "deep": tensor_file(b'{"a": ' + b"[" * 100_000),
    "length": struct.pack("<Q", 2**63) + b"{}",
    "empty": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_tensor_files_that_safetensors_refuses_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(WRONG[name])
    if name != "many dimensions":  # which no array of NumPy can have
        with pytest.raises((SafetensorError, OverflowError)):
            load_file(path)
    with pytest.raises(ValueError, match=r"x\.safetensors") as caught:
        dict(TensorFile(path))
    assert "\n" not in str(caught.value)


def test_a_duplicate_name_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    one = json.dumps(entry("F32", [1], 0, 4))
    path.write_bytes(tensor_file(f'{{"a": {one}, "a": {one}}}'.encode(), bytes(4)))
    with pytest.raises(ValueError, match=r"x\.safetensors .*duplicate key 'a'"):
        TensorFile(path)


def test_what_safetensors_allows_is_read_as_it_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    number = struct.pack("<f", 1.5)
    header = {"s": entry("U8", [1], 0, 1), "odd": entry("F32", [1], 1, 5), "none": entry("F32", [0, 3], 5, 5),
              "scalar": entry("F32", [], 5, 9)}  # fmt: skip
    path.write_bytes(tensor_file(header, b"\7" + number + number))
    theirs = load_file(path)
    ours = dict(TensorFile(path))
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].shape == value.shape and ours[name].dtype == value.dtype
        assert np.array_equal(ours[name], value)


def test_a_file_that_becomes_shorter_while_it_is_used_does_not_crash_the_process(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones(100_000, np.float32)}, path)
    file = TensorFile(path)
    whole = file["a"]
    os.truncate(path, 1000)
    assert whole.sum() == 100_000  # reading a memory map would crash the process here
    with pytest.raises(ValueError, match=r"x\.safetensors became shorter"):
        file["a"]


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "sub/x", "", "a\0b", "x" * 5000, 3, None, ["a"], "..", "a\nb"]
)
def test_an_index_names_only_files_in_its_own_folder(tmp_path: Path, shard: Any) -> None:
    folder = tmp_path / "model"
    onfoot.create(GPT2, engine="numpy").save(folder)
    os.replace(folder / "model.safetensors", tmp_path / "model.safetensors")
    index = {"weight_map": {"transformer.wte.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "model")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    onfoot.create(GPT2, engine="numpy").save(tmp_path)
    whole = tmp_path / "model.safetensors"
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(whole.read_bytes())
    whole.unlink()
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path, "a.safetensors and b.safetensors")


def test_an_adapter_of_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "base_model_name_or_path": str(tmp_path)})
    )
    assert "an adapter itself" in refused(tmp_path, "adapter")
