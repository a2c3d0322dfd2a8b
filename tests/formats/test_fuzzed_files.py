"""Hundreds of mutated GGUF and safetensors files: each loads, or ends in a one-line ValueError that names the file."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import onfoot
from campaigns.fuzz_corpus import GPT2, LLAMA, TEXT, sentencepiece_tokenizer
from campaigns.fuzz_mutations import mutate
from onfoot.formats.gguf import TYPES, GgufFile
from onfoot.formats.gguf_export import export_adapter, export_model
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer

COUNT = 300  # mutations of each kind of file
WIDE = replace(GPT2, n_embd=32)


def bpe() -> Tokenizer:
    return bpe_tokenizer(iter([TEXT * 10]), 280)


def gguf_file(config: Any, type_: str, tokenizer: Callable[[], Tokenizer]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        model = onfoot.create(config, engine="numpy")
        model.tokenizer = tokenizer()
        export_model(model, folder / "model.gguf", type_)
        return folder / "model.gguf"

    return write


def safetensors_file(config: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        onfoot.create(config, engine="numpy").save(folder)
        return folder / "model.safetensors"

    return write


KINDS: dict[str, Callable[[Path], Path]] = {
    "gguf of a gpt2, f16": gguf_file(GPT2, "f16", bpe),
    "gguf of a gpt2, q8_0": gguf_file(WIDE, "q8_0", bpe),
    "gguf of a llama, bf16": gguf_file(LLAMA, "bf16", bpe),
    "gguf of a llama with sentencepiece, q4_1": gguf_file(LLAMA, "q4_1", sentencepiece_tokenizer),
    "safetensors of a gpt2": safetensors_file(GPT2),
    "safetensors of a llama": safetensors_file(LLAMA),
}


def verdict(path: Path, quantized: bool = False) -> str:
    """ "read", or "refused" for a ValueError of one line that names the file; anything else fails."""
    source = path if path.suffix == ".gguf" else path.parent
    try:
        model = onfoot.load(source, engine="numpy", quantized=quantized and path.suffix == ".gguf")
        if model.tokenizer is not None:
            model.tokenizer.decode(model.tokenizer.encode(TEXT))
    except ValueError as error:
        assert type(error) is ValueError
        assert str(source) in str(error) and "\n" not in str(error) and len(str(error)) < 1500
        return "refused"
    return "read"


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_read_or_refused_with_one_line(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path)
    whole, random = path.read_bytes(), Random(f"mutations of {kind}")
    assert verdict(path) == "read"
    verdicts = []
    for i in range(COUNT):
        path.write_bytes(mutate(whole, path.name, random))
        verdicts.append(verdict(path, quantized=i % 2 == 0))
    assert verdicts.count("refused") > 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = KINDS[kind](tmp_path)
    whole, random = path.read_bytes(), Random(f"cuts of {kind}")
    header = len(whole) // 4
    for n in [0, 1, 3, 4, 7, 8, 23, 24, *(random.randrange(header) for _ in range(100)), *(
        random.randrange(len(whole) - 64) for _ in range(100)
    )]:  # fmt: skip
        path.write_bytes(whole[:n])
        assert verdict(path) == "refused", n


def places_of_types(path: Path) -> Iterator[tuple[str, int]]:
    """Where the type id of each tensor is in a file."""
    data = path.read_bytes()
    for name, entry in GgufFile(path).tensors.items():
        text = struct.pack("<Q", len(name)) + name.encode()
        yield name, data.index(text) + len(text) + 4 + 8 * len(entry.shape)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("gguf")])
@pytest.mark.parametrize("number", [*sorted(TYPES), 4, 5, 31, 36, 41, 255, 2**31, 2**32 - 1])
def test_every_type_id_at_every_tensor_is_read_or_refused(tmp_path: Path, kind: str, number: int) -> None:
    path = KINDS[kind](tmp_path)
    whole = path.read_bytes()
    for quantized, (_, at) in zip((True, False) * 20, places_of_types(path), strict=False):
        path.write_bytes(whole[:at] + struct.pack("<I", number) + whole[at + 4 :])
        assert verdict(path, quantized) in ("read", "refused")


def test_sizes_and_offsets_beyond_the_file_are_refused(tmp_path: Path) -> None:
    path = KINDS["gguf of a gpt2, f16"](tmp_path)
    whole = path.read_bytes()
    for _, at in list(places_of_types(path))[:6]:
        for begin in (at - 8, at + 4):  # the last dimension, the offset
            for value in (0, 1, 31, 33, 2**31, 2**40, 2**62, 2**63, 2**64 - 32, 2**64 - 1):
                path.write_bytes(whole[:begin] + struct.pack("<Q", value) + whole[begin + 8 :])
                assert verdict(path) in ("read", "refused")
                path.write_bytes(whole[:begin] + struct.pack("<Q", max(value, 2**31)) + whole[begin + 8 :])
                assert verdict(path) == "refused"


def test_an_adapter_file_is_not_taken_for_a_model(tmp_path: Path) -> None:
    model = onfoot.create(GPT2, engine="numpy")
    model.add_lora(r=2)
    export_adapter(model, tmp_path / "model.gguf")
    whole, random = (tmp_path / "model.gguf").read_bytes(), Random(7)
    for _ in range(COUNT // 3):
        (tmp_path / "model.gguf").write_bytes(mutate(whole, "model.gguf", random))
        assert verdict(tmp_path / "model.gguf") == "refused"
