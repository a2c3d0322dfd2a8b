"""Tokenizes text files into one memory-mapped file of token ids, so that a corpus may exceed memory."""

from __future__ import annotations

import hashlib
import os
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.formats.files import open_file, parse_json, read_json, shown
from onfoot.formats.tokenizer import Tokenizer
from onfoot.formats.write import write_json

PIECE = 1 << 20  # bytes of text that are tokenized at a time
SUFFIXES = (".txt", ".jsonl")
DTYPES = ("uint16", "uint32")  # of token ids: the smaller one that fits the vocabulary
BOM = BOM_UTF8.decode()  # byte order mark, which some editors put at the start of a file


@dataclass(frozen=True)
class Text:
    """A text file, or a text in memory."""

    name: str
    path: Path | None = None
    text: str | None = None


def builtin_text() -> Text:
    """The Python language reference, which ships with Python: about 0.46 MB."""
    from pydoc_data.topics import topics

    return Text("pydoc_data.topics", text="\n\n".join(topics[key] for key in sorted(topics)))


def find_texts(paths: Sequence[Path], suffixes: Sequence[str] = SUFFIXES) -> list[Text]:
    """The given files, and the files in the given folders, in a fixed order."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if _suffix(p) in suffixes and p.is_file())
            if not inside:
                raise ValueError(f"the folder {path} has no {' or '.join(suffixes)} file")
            found += inside
        elif path.is_file() and _suffix(path) not in suffixes:
            what = f"a {path.suffix} file" if path.suffix else "a file without a suffix"
            expected = " or ".join(suffixes)
            raise ValueError(f"{path} is {what}, expected {expected}; rename or convert it")
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path} does not exist")
    for path in found:
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty")
    return [Text(str(path), path=path) for path in found]


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def documents(text: Text) -> Iterator[Iterator[str]]:
    """The documents of a file, each an iterator over pieces: one per .txt file, one per line of a .jsonl file."""
    if text.text is not None:
        yield iter([text.text])
    elif text.path is not None and _suffix(text.path) == ".jsonl":
        for number, value in json_lines(text.path):
            if not isinstance(value, dict) or not isinstance(value.get("text"), str):
                raise ValueError(f'{text.path}, line {number}: the field "text" is missing or not a string')
            yield iter([_check_surrogates(value["text"], f"{text.path}, line {number}")])
    elif text.path is not None:
        yield file_pieces(text.path)


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a .jsonl file with their line numbers. Blank lines and a leading BOM are skipped."""
    offset = 0
    with open_file(path) as file:  # as bytes: JSON strings may contain Unicode line separators
        for number, data in enumerate(file, start=1):
            line = _decode(data, f"{path}, line {number}", offset)
            offset += len(data)
            if number == 1:
                line = line.removeprefix(BOM)
            if line.strip():
                yield number, parse_json(line, f"{path}, line {number}:")


def file_pieces(path: Path) -> Iterator[str]:
    """The text in pieces that end at line ends where possible, so that tokens are rarely split."""
    rest, offset = b"", 0
    with open_file(path) as file:
        if file.read(len(BOM_UTF8)) == BOM_UTF8:
            offset = len(BOM_UTF8)
        file.seek(offset)
        while block := file.read(PIECE):
            block = rest + block
            cut = block.rfind(b"\n") + 1
            if cut == 0 and len(block) < 16 * PIECE:  # no line end yet
                rest = block
                continue
            if cut == 0:
                cut = len(block) - next((i for i in range(1, 5) if block[-i] & 0xC0 != 0x80), 0)
            yield _decode(block[:cut], path, offset)
            rest, offset = block[cut:], offset + cut
    if rest:
        yield _decode(rest, path, offset)


def _check_surrogates(text: str, name: str) -> str:
    """The text, unless it has an unpaired surrogate, which JSON allows but UTF-8 does not."""
    half = next((c for c in text if "\ud800" <= c <= "\udfff"), None) if not text.isascii() else None
    if half is not None:
        raise ValueError(f"{name}: the text has an unpaired surrogate, \\u{ord(half):04x}")
    return text


def _decode(data: bytes, name: Path | str, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at position {offset + error.start:,}; "
            f"convert it first, for example with: iconv -f latin1 -t utf-8"
        ) from None


def all_pieces(texts: Iterable[Text]) -> Iterator[str]:
    for text in texts:
        for document in documents(text):
            yield from document


def encoded(texts: Sequence[Text], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The token ids of the texts, piece by piece. The EOS token ends each document if there may be several."""
    several = _several(texts)
    for text in texts:
        yield from _encoded_text(text, tokenizer, several)


def _several(texts: Sequence[Text]) -> bool:
    """Whether there may be several documents."""
    return len(texts) > 1 or any(t.path is not None and _suffix(t.path) == ".jsonl" for t in texts)


def _encoded_text(text: Text, tokenizer: Tokenizer, several: bool) -> Iterator[list[int]]:
    for document in documents(text):
        for piece in document:
            yield tokenizer.encode(piece)
        if several and tokenizer.eos_id is not None:
            yield [tokenizer.eos_id]


def write_tokens(texts: Sequence[Text], tokenizer: Tokenizer, folder: Path) -> np.ndarray:
    """Tokenizes into folder/tokens.bin and returns it memory-mapped. The EOS token separates documents."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(DTYPES[tokenizer.size > 1 << 16])
    count, digest, several = 0, hashlib.sha256(), _several(texts)
    starts: list[int] = []  # the position of each text's first token
    partial = folder / "tokens.bin.partial"
    with partial.open("wb") as file:
        for text in texts:
            starts.append(count)
            for piece in _encoded_text(text, tokenizer, several):
                ids = np.asarray(piece, dtype=dtype)
                file.write(ids.tobytes())
                digest.update(ids.tobytes())
                count += ids.size
    meta = {
        "tokens": count, "dtype": dtype.name, "sha256": digest.hexdigest(), "sources": [t.name for t in texts],
        "starts": starts,
    }  # fmt: skip
    write_json(folder / "tokens.json", meta)
    partial.replace(folder / "tokens.bin")
    return open_tokens(folder)


def open_tokens(folder: Path) -> np.ndarray:
    """The token ids of a run, memory-mapped: the file must not be truncated during the run."""
    path, meta = folder / "tokens.bin", _read_meta(folder)
    dtype = np.dtype(meta["dtype"])
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != meta["tokens"] * dtype.itemsize:
        raise ValueError(f"{path} has {size:,} bytes, which is not {meta['tokens']:,} {dtype} tokens: truncated?")
    if meta["tokens"] == 0:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _read_meta(folder: Path) -> dict[str, Any]:
    """tokens.json: the number of ids in tokens.bin, their dtype and their checksum."""
    if not (folder / "tokens.bin").exists() or not (folder / "tokens.json").exists():
        raise ValueError(f"tokens.bin or tokens.json is missing in {folder}; start a new run")
    path = folder / "tokens.json"
    meta = read_json(path)
    if meta.get("dtype") not in DTYPES:
        raise ValueError(f"{path}: unknown dtype {shown(meta.get('dtype'))}; expected {' or '.join(DTYPES)}")
    if type(meta.get("tokens")) is not int or not 0 <= meta["tokens"] < 1 << 60:
        raise ValueError(f"{path}: tokens must be the number of ids, got {shown(meta.get('tokens'))}")
    if not isinstance(meta.get("sha256"), str):
        raise ValueError(f"{path}: sha256 must be a checksum, got {shown(meta.get('sha256'))}")
    return meta


def check_tokens(folder: Path) -> None:
    """Raises ValueError if tokens.bin has changed since it was written: a resumed run needs the same tokens."""
    path, expected = folder / "tokens.bin", _read_meta(folder)["sha256"]
    digest = hashlib.sha256()
    with open_file(path) as file:
        while block := file.read(PIECE):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise ValueError(
            f"{path} has changed since the run started (its SHA-256 differs from tokens.json); restore the original "
            f"file, or start a new run"
        )


def bigram_entropy(tokens: np.ndarray, vocab_size: int) -> float:
    """H(next | current) of the token pairs, in nats: the lowest loss of any bigram model on these tokens."""
    pairs: dict[int, int] = {}
    for begin in range(0, len(tokens) - 1, PIECE):
        part = np.asarray(tokens[begin : begin + PIECE + 1], dtype=np.int64)
        if part.max() >= vocab_size:
            name = getattr(tokens, "filename", "the token stream")
            raise ValueError(f"{name} has the id {part.max()}, but vocab_size is {vocab_size}; start a new run")
        codes, counts = np.unique(part[:-1] * vocab_size + part[1:], return_counts=True)
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            pairs[code] = pairs.get(code, 0) + count
    codes = np.fromiter(pairs, dtype=np.int64)
    counts = np.fromiter(pairs.values(), dtype=np.float64)
    first = np.bincount(codes // vocab_size, weights=counts)
    return float(-(counts * np.log(counts / first[codes // vocab_size])).sum() / counts.sum())
