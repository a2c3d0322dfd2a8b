"""Details of GGUF: alignment, the last byte, every metadata type, and defaults for missing keys."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from test_gguf import CONFIG, TOKENS, metadata_of, write_gguf

import onfoot
from llama_oracle import scrambled_llama
from onfoot.formats import gguf as gguf_file
from onfoot.formats.gguf import GgufFile
from onfoot.formats.gguf_tokenizer import read_tokenizer


def write(path: Path, arrays: dict[str, np.ndarray], alignment: int | None = None, **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for name, (add, value) in metadata.items():
        getattr(writer, add)(name, value)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 8, 16, 64, 256, 4096])
def test_tensors_start_at_multiples_of_the_alignment(tmp_path: Path, alignment: int | None) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"t{i}": rng.normal(size=n).astype(np.float32) for i, n in enumerate((3, 5, 8, 1, 7))}
    path = write(tmp_path / "x.gguf", arrays, alignment)
    file, reader = GgufFile(path), gguf.GGUFReader(str(path))
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].begin == tensor.data_offset
        np.testing.assert_array_equal(file.read(tensor.name), arrays[tensor.name])


def test_a_file_that_is_one_byte_short_is_truncated_and_a_complete_one_is_not(tmp_path: Path) -> None:
    array = np.arange(8, dtype=np.float32)  # 32 bytes: no padding after it
    path = write(tmp_path / "x.gguf", {"t": array}, name=("add_string", "a text"), numbers=("add_array", [1, 2, 3]))
    whole = path.read_bytes()
    file = GgufFile(path)
    assert file.tensors["t"].begin + 32 == len(whole)
    np.testing.assert_array_equal(file.read("t"), array)
    cut = tmp_path / "cut.gguf"
    for n in range(4, len(whole)):  # wherever it ends
        cut.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            GgufFile(cut)
    cut.write_bytes(whole + b"\0")
    np.testing.assert_array_equal(GgufFile(cut).read("t"), array)


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_may_end_with_the_file(tmp_path: Path, version: int) -> None:
    path = tmp_path / "x.gguf"
    key = b"general.name"
    text = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, 2) + b"ab"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 1) + text)
    assert GgufFile(path).metadata == {"general.name": "ab"}
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version + 2, 0, 1) + text)
    with pytest.raises(ValueError, match=f"GGUF version {version + 2} is not supported"):
        GgufFile(path)


def test_a_header_that_is_longer_than_what_is_read_of_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = b"general.name"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    header += struct.pack("<IQ", 8, 2) + b"ab"
    path = tmp_path / "x.gguf"
    path.write_bytes(header + bytes(64))
    for limit in (len(header) - 1, len(header) - 2):
        monkeypatch.setattr(gguf_file, "HEADER_BYTES", limit)
        with pytest.raises(ValueError, match=f"its header exceeds {limit} bytes"):
            GgufFile(path)
    monkeypatch.setattr(gguf_file, "HEADER_BYTES", len(header))
    assert GgufFile(path).metadata == {"general.name": "ab"}


def test_every_kind_of_metadata_is_read(tmp_path: Path) -> None:
    values = {
        "u8": ("add_uint8", 200), "i8": ("add_int8", -100), "u16": ("add_uint16", 60000), "i16": ("add_int16", -30000),
        "u32": ("add_uint32", 4_000_000_000), "i32": ("add_int32", -2_000_000_000), "f32": ("add_float32", 0.5),
        "u64": ("add_uint64", 2**60), "i64": ("add_int64", -(2**60)), "f64": ("add_float64", 0.1),
        "yes": ("add_bool", True), "no": ("add_bool", False), "text": ("add_string", "Grüße"),
        "texts": ("add_array", ["a", "", "c"]), "ints": ("add_array", [1, -2, 3]), "floats": ("add_array", [0.5, 2.0]),
    }  # fmt: skip
    file = GgufFile(write(tmp_path / "x.gguf", {}, **values))
    for name, (_, value) in values.items():
        read = file.metadata[name]
        assert (read.tolist() if isinstance(read, np.ndarray) else read) == value, name


def test_a_shape_is_read_rows_first(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    file = GgufFile(write(tmp_path / "x.gguf", {"t": array}))
    assert file.tensors["t"].shape == (2, 3, 4)
    np.testing.assert_array_equal(file.read("t"), array)


def test_quantised_rows_must_be_a_multiple_of_the_block_size(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    name = b"t"
    entry = struct.pack("<Q", 1) + name + struct.pack("<IQQIQ", 2, 16, 2, 8, 0)  # Q8_0 of (2, 16)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + entry + bytes(200))
    with pytest.raises(ValueError, match="t has rows of 16 numbers, not a multiple of 32"):
        GgufFile(path)


def model(**changes: Any) -> Any:
    return scrambled_llama(onfoot.LlamaConfig.from_dict({**CONFIG.to_dict(), **changes}), 0, "float32")


def load(tmp_path: Path, m: Any, **options: Any) -> Any:
    return onfoot.load(write_gguf(m, tmp_path / "model.gguf", **options))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 16},
        {"rope_theta": 12345.0},
        {"rms_norm_eps": 1e-6},
        {"attention_bias": True},
        {"model_type": "qwen2", "num_key_value_heads": 1},
    ],
    ids=str,
)
def test_configuration_and_logits_survive_a_round_trip(tmp_path: Path, changes: dict[str, Any]) -> None:
    m = model(**changes)
    metadata = {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
    read = load(tmp_path, m, metadata=metadata if "head_dim" in changes else {})
    assert read.config == m.config
    np.testing.assert_array_equal(read.logits(TOKENS), m.logits(TOKENS))


def test_linear_scaling_is_read_with_its_factor(tmp_path: Path) -> None:
    m = model(rope_scaling={"rope_type": "linear", "factor": 4.0})
    read = load(tmp_path, m, metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert read.config == m.config
    np.testing.assert_array_equal(read.logits(TOKENS), m.logits(TOKENS))
    assert np.abs(read.logits(TOKENS) - model().logits(TOKENS)).max() > 1e-3


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_two_factors_are_told_apart(tmp_path: Path, factor: float) -> None:
    from onfoot.ops.rope import frequencies

    scaling = {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 8192}
    m = model(rope_theta=500000.0, rope_scaling=scaling)
    divisors = frequencies(5e5, 8) / frequencies(5e5, 8, m.config.rope_scaling)
    read = load(tmp_path, m, extra={"rope_freqs.weight": divisors.astype(np.float32)})
    assert read.config.rope_scaling.factor == factor


def bare(tmp_path: Path, leave_out: str) -> Any:
    """A file without one of its metadata keys."""
    m = model(num_key_value_heads=4, rope_theta=10000.0)
    writer_values = {
        "context_length": 24, "embedding_length": 32, "block_count": 2, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }  # fmt: skip
    from test_gguf import permuted

    from onfoot.formats.gguf_model import gguf_name

    writer = gguf.GGUFWriter(str(tmp_path / "bare.gguf"), "llama")
    for name, value in writer_values.items():
        if name != leave_out:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{name}", value)
    for name, value in m.params.items():
        array = np.asarray(value)
        writer.add_tensor(gguf_name(name), permuted(array, 4) if ".q_proj." in name or ".k_proj." in name else array)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 7)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return m, tmp_path / "bare.gguf"


@pytest.mark.parametrize("silent", ["rope.freq_base", "attention.head_count_kv"])
def test_missing_metadata_has_llamas_defaults(tmp_path: Path, silent: str) -> None:
    m, path = bare(tmp_path, silent)
    read = onfoot.load(path)
    np.testing.assert_array_equal(read.logits(TOKENS), m.logits(TOKENS))
    assert read.config.rope_theta == 10000.0 and read.config.n_kv_head == 4
    assert (read.config.eos_token_id, read.config.bos_token_id) == (7, 5)
    assert read.config.vocab_size == 40


@pytest.mark.parametrize("needed", ["context_length", "block_count", "attention.head_count", "feed_forward_length"])
def test_missing_metadata_without_a_default_is_an_error_that_names_it(tmp_path: Path, needed: str) -> None:
    _, path = bare(tmp_path, needed)
    with pytest.raises(ValueError, match=f"has no metadata key llama.{needed}"):
        onfoot.load(path)


def test_partial_rotation_and_other_value_sizes_are_rejected(tmp_path: Path) -> None:
    for name in ("rope.dimension_count", "attention.value_length"):
        with pytest.raises(ValueError, match=f"llama.{name} must be the head size 8, got 4"):
            load(tmp_path, model(), metadata={name: 4})


def test_control_and_user_tokens_are_never_split_and_only_control_tokens_are_hidden(tmp_path: Path) -> None:
    metadata = metadata_of("gpt-2")
    metadata["tokenizer.ggml.token_type"][-2:] = [3, 4]
    tokenizer = read_tokenizer(metadata, tmp_path)
    n = len(metadata["tokenizer.ggml.tokens"])
    assert tokenizer.encode("<|im_start|>the<|im_end|>")[0] == n - 2
    assert tokenizer.encode("<|im_start|>the<|im_end|>")[-1] == n - 1
    assert tokenizer.decode([n - 2, n - 1]) == "<|im_end|>"


def test_special_ids_beyond_the_tokens_are_none(tmp_path: Path) -> None:
    metadata = metadata_of("gpt-2")
    n = len(metadata["tokenizer.ggml.tokens"])
    tokenizer = read_tokenizer({**metadata, "tokenizer.ggml.eos_token_id": n}, tmp_path)
    assert tokenizer.eos is None and tokenizer.bos == "<|im_start|>"


def test_llama_matches_full_words_first_and_qwen_normalizes_unicode(tmp_path: Path) -> None:
    metadata = metadata_of("llama-bpe")
    tokens = metadata["tokenizer.ggml.tokens"]
    index = len(tokens)
    longer = {
        **metadata, "tokenizer.ggml.tokens": [*tokens, "zqzq"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1],
    }  # fmt: skip
    assert read_tokenizer(longer, tmp_path).encode("zqzq") == [index]
    assert len(read_tokenizer({**longer, "tokenizer.ggml.pre": "gpt-2"}, tmp_path).encode("zqzq")) == 4
    apart, whole = "e\u0301", "\u00e9"
    qwen = read_tokenizer(metadata_of("qwen2"), tmp_path)
    assert qwen.encode(apart) == qwen.encode(whole)
    llama = read_tokenizer(metadata, tmp_path)
    assert llama.encode(apart) != llama.encode(whole)
