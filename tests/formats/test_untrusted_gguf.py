"""Untrusted GGUF files: written by the gguf package, then corrupted; each gives a one-line error that names it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import onfoot
from onfoot.formats.gguf import GgufFile

NUMBER, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, at: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at)


def file(pairs: list[bytes], tensors: list[bytes], data: bytes = bytes(256), **counts: int) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, counts.get("n_tensors", len(tensors)), counts.get("n_pairs", len(pairs)))
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


ONE = tensor("a", [4])
WRONG: dict[str, tuple[bytes, str]] = {
    "more pairs than bytes": (file([], [], n_pairs=2**62), "truncated"),
    "more tensors than bytes": (file([], [], n_tensors=2**62), "truncated"),
    "a string longer than the file": (file([struct.pack("<Q", 2**63) + b"x"], []), "truncated"),
    "a string of 2^64 - 1 bytes": (file([struct.pack("<Q", 2**64 - 1)], []), "truncated"),
    "an array longer than the file": (file([pair("k", ARRAY, struct.pack("<IQ", 0, 2**60))], []), "truncated"),
    "an array of doubles that overflows": (file([pair("k", ARRAY, struct.pack("<IQ", 12, 2**61))], []), "truncated"),
    "an array of strings longer than the file": (
        file([pair("k", ARRAY, struct.pack("<IQ", 8, 2**40))], []),
        "truncated",
    ),
    "arrays in arrays": (file([pair("k", ARRAY, struct.pack("<IQ", 9, 1) * 100_000)], []), "levels"),
    "an unknown type": (file([pair("k", 77, bytes(8))], []), "unknown metadata type 77"),
    "a key twice": (file([pair("k", NUMBER, bytes(4))] * 2, []), "duplicate metadata key 'k'"),
    "a tensor twice": (file([], [ONE, ONE]), "duplicate tensor a"),
    "no dimension": (file([], [tensor("a", [])]), "0 dimensions"),
    "many dimensions": (file([], [tensor("a", [1] * 9)]), "9 dimensions"),
    "a billion dimensions": (file([], [text("a") + struct.pack("<I", 10**9)]), "dimensions"),
    "an empty dimension": (file([], [tensor("a", [4, 0])]), "which has no elements"),
    "a huge dimension": (file([], [tensor("a", [2**63, 4])]), "truncated"),
    "a product that overflows to 16 bytes": (file([], [tensor("a", [2**62, 2**4 + 1, 2**2])]), "truncated"),
    "a place beyond the file": (file([], [tensor("a", [4], at=2**63)]), "truncated"),
    "a place that is not aligned": (file([], [tensor("a", [4], at=4)]), "not a multiple of 32"),
    "overlapping tensors": (file([], [tensor("a", [16]), tensor("b", [4], at=32)]), "b overlaps"),
    "the same place twice": (file([], [tensor("a", [4]), tensor("b", [4])]), "b overlaps"),
    "rows that are no blocks": (file([], [tensor("a", [4, 8], 8)]), "rows of 4 numbers"),
    "an odd name": (file([], [tensor("a\n\x1b[31m", [4], 99)]), r"a\\n\\x1b"),
}
for bad in (0, 1, 3, 33, 2**31, 2**32 - 1):
    WRONG[f"an alignment of {bad}"] = (
        file([pair("general.alignment", NUMBER, struct.pack("<I", bad))], [ONE]), f"alignment must be .*, got {bad}$",
    )  # fmt: skip
WRONG["an alignment that is a text"] = (
    file([pair("general.alignment", STRING, text("32"))], [ONE]),
    "alignment must be .*, got '32'",
)


@pytest.mark.parametrize("name", WRONG)
def test_impossible_headers_are_rejected_before_anything_is_allocated(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.gguf"
    data, message = WRONG[name]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        GgufFile(path)
    assert "x.gguf" in str(caught.value) and "\n" not in str(caught.value)


def test_the_same_file_without_the_fault_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(file([pair("k", NUMBER, bytes(4))], [ONE, tensor("b", [4], at=32)]))
    read = GgufFile(tmp_path / "x.gguf")
    assert read.metadata == {"k": 0} and list(read.tensors) == ["a", "b"]
    assert np.asarray(read.read("a")).shape == (4,)


def written(path: Path, change: Callable[[gguf.GGUFWriter, dict[str, Any]], None]) -> Path:
    """A small llama file written by the gguf package with changed metadata."""
    config = onfoot.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    from onfoot.formats.gguf_model import gguf_name

    writer = gguf.GGUFWriter(str(path), "llama")
    values: dict[str, Any] = {
        "context_length": 16, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    change(writer, values)
    for name, value in values.items():
        add = {int: writer.add_uint64, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"llama.{name}", value)
    for name, value in onfoot.create(config, engine="numpy").params.items():
        writer.add_tensor(gguf_name(name), np.asarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["context_length", "embedding_length", "block_count", "feed_forward_length",
                                  "attention.head_count", "attention.head_count_kv",
                                  "attention.key_length"])  # fmt: skip
@pytest.mark.parametrize("value", [0, 10**9, 2**63, 1.5, "4", [4]])
def test_sizes_that_the_tensors_do_not_have_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = written(tmp_path / "x.gguf", lambda writer, values: values.update({name: value}))
    if name == "context_length" and value == 10**9:  # RoPE needs no table: any context length is valid
        return
    with pytest.raises(ValueError, match=r"x\.gguf") as caught:
        onfoot.load(path, engine="numpy")
    assert "\n" not in str(caught.value)


def tokenizer_of(**changes: Any) -> Callable[[gguf.GGUFWriter, dict[str, Any]], None]:
    def add(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
        parts = {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b", "ab", "<|x|>"], "merges": ["a b"], **changes}
        for name, value in parts.items():
            (writer.add_string if isinstance(value, str) else writer.add_array)(f"tokenizer.ggml.{name}", value)

    return add


@pytest.mark.parametrize(
    "changes",
    [{"tokens": [1, 2]}, {"merges": [1]}, {"tokens": "abc"}, {"merges": ["a", "b c d"]}, {"merges": ["x y"]},
     {"token_type": "abc"}, {"pre": "x\ny"}, {"tokens": [f"t{i}" for i in range(301)], "merges": ["t0 t1"]}],
    ids=str,
)  # fmt: skip
def test_tokenizers_that_do_not_work_or_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert onfoot.load(written(tmp_path / "good.gguf", tokenizer_of())).tokenizer.encode("ab") == [2]
    path = written(tmp_path / "x.gguf", tokenizer_of(**changes))
    with pytest.raises(ValueError, match=r"x\.gguf") as caught:
        onfoot.load(path, engine="numpy")
    assert "\n" not in str(caught.value)


def test_ids_beyond_the_vocabulary_are_refused_with_both_numbers(tmp_path: Path) -> None:
    tokens = ["a", "b", "ab", *(f"t{i}" for i in range(299))]
    path = written(tmp_path / "x.gguf", tokenizer_of(tokens=tokens))
    with pytest.raises(ValueError, match=r"x\.gguf: the tokenizer has ids up to 301, but the model has vocab_size=300"):
        onfoot.load(path, engine="numpy")
