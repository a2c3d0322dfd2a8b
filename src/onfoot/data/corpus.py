"""Tokenizes text files into one memory-mapped file of token ids, so that a corpus may exceed memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from onfoot.data.count import Count
from onfoot.data.records import ReadLog, check_dataset_dict, decode, fields_of, has_records, is_dataset, records
from onfoot.formats.files import open_file, read_json, shown
from onfoot.formats.tokenizer import Tokenizer
from onfoot.formats.write import write_json

PIECE = 1 << 20  # bytes of text that are tokenized at a time
SUFFIXES = (".txt", ".md", ".rst", ".tex", ".py", ".jsonl", ".parquet")  # of the files that a folder is searched for
DTYPES = ("uint16", "uint32")  # of token ids: the smaller one that fits the vocabulary
STDIN = "-"  # the name of standard input
EXAMPLE_FIELDS = {"prompt", "completion", "instruction", "messages", "conversations", "chosen"}  # not those of texts
SIGNATURES = {  # how some files begin that are not text
    b"%PDF-": "a PDF file",
    b"PK\x03\x04": "a ZIP archive (.zip, .docx, .epub, …)",
    b"\x1f\x8b": "compressed with gzip",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}


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


def find_texts(paths: Sequence[Path], suffixes: Sequence[str] = ()) -> list[Text]:
    """The given files and datasets, and the files in the given folders, in a fixed order.

    With `suffixes`, these are the only kinds of files; without, a file may have any suffix, and folders are searched
    for files that are known to be text. Hidden files and folders inside are left out.
    """
    found: list[Path] = []
    for path in paths:
        check_dataset_dict(path)
        if is_dataset(path):
            found.append(path)
        elif path.is_dir():
            inside = list(_inside(path, suffixes or SUFFIXES))
            if not inside:
                raise ValueError(f"the folder {path} has no {_or(suffixes or SUFFIXES)} file")
            found += inside
        elif path.is_file() and suffixes and _suffix(path) not in suffixes:
            what = f"a {path.suffix} file" if path.suffix else "a file without a suffix"
            text = "; plain text is for: onfoot train FILE --init MODEL" if path.suffix in (".txt", ".md") else ""
            raise ValueError(f"{path} is {what}, expected {_or(suffixes)}; rename or convert it{text}")
        elif path.is_file():
            found.append(path)
        elif path.exists():
            raise ValueError(f"{path} is not a regular file; onfoot train reads standard input with the name -")
        else:
            raise ValueError(f"{path} does not exist")
    for path in found:
        _check_readable(path)
    return [Text(str(path), path=path) for path in found]


def _inside(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    """The files with one of the suffixes, and the saved datasets, in a folder and in those inside it."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if is_dataset(path) or (path.is_file() and _suffix(path) in suffixes):
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from _inside(path, suffixes)


def _or(names: Sequence[str]) -> str:
    """a, b or c"""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _check_readable(path: Path, name: str = "") -> None:
    """Raises ValueError for an empty file, and for a file that is plainly not text; `name` is for its messages."""
    name = name or str(path)
    if path.is_dir():
        return
    with open_file(path) as file:
        head = file.read(1 << 13)
    if not head:
        raise ValueError(f"{name} is empty")
    if _suffix(path) == ".parquet":
        return
    kind = next((kind for start, kind in SIGNATURES.items() if head.startswith(start)), None)
    if kind is None and b"\0" in head and not _is_json_lines(path, head):
        kind = f"a binary file (byte 0 at position {head.index(0):,})"
    if kind is not None:
        raise ValueError(f"{name} is {kind}, not UTF-8 text; convert it first")


def _is_json_lines(path: Path, head: bytes) -> bool:
    """Whether a file with a byte 0 near its start is JSON Lines all the same: the line with that byte is bad.

    In UTF-16, of which the byte order mark may be missing, about every other byte is 0.
    """
    starts = head.removeprefix(BOM_UTF8).lstrip()[:1] in (b"{", b"[")
    return _suffix(path) == ".jsonl" and starts and 4 * head.count(0) < len(head)


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def save_stdin(path: Path) -> Text:
    """Standard input as a file, which is complete once it exists."""
    if not path.is_file():
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, PIECE)
        partial.replace(path)
    _check_readable(path, "standard input")
    return Text("standard input", path=path)


def documents(text: Text, log: ReadLog | None = None) -> Iterator[Iterator[str]]:
    """The documents of a file, each an iterator over pieces: one per text file, or one per record with "text"."""
    log = log or ReadLog()
    if text.text is not None:
        yield iter([text.text])
    elif text.path is not None and has_records(text.path):
        for document in log.read(records(text.path), _text_of):
            yield iter([document])
    elif text.path is not None:
        yield file_pieces(text.path)


def n_bytes(texts: Sequence[Text]) -> int:
    """The size of the texts; 0 where it is not that of their files, because there are records."""
    if any(text.path is not None and has_records(text.path) for text in texts):
        return 0
    return sum(len((text.text or "").encode()) if text.path is None else text.path.stat().st_size for text in texts)


def _text_of(value: Any, where: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        found = f"; it has the fields {fields_of(value)}" if isinstance(value, dict) else ""
        examples = isinstance(value, dict) and value.keys() & EXAMPLE_FIELDS
        hint = "; examples are for onfoot finetune MODEL --data FILE" if examples else ""
        raise ValueError(f'the field "text" is missing or not a string{found}{hint}')
    return _check_surrogates(value["text"], where)


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
            yield decode(block[:cut], path, offset)
            rest, offset = block[cut:], offset + cut
    if rest:
        yield decode(rest, path, offset)


def _check_surrogates(text: str, name: str) -> str:
    """The text, unless it has an unpaired surrogate, which JSON allows but UTF-8 does not."""
    half = next((c for c in text if "\ud800" <= c <= "\udfff"), None) if not text.isascii() else None
    if half is not None:
        raise ValueError(f"{name}: the text has an unpaired surrogate, \\u{ord(half):04x}")
    return text


def all_pieces(texts: Iterable[Text], log: ReadLog | None = None) -> Iterator[str]:
    for text in texts:
        for document in documents(text, log):
            yield from document


def characters(texts: Iterable[Text], log: ReadLog | None = None) -> int:
    """The number of characters of the texts."""
    return sum(len(piece) for piece in all_pieces(texts, log))


def first_pieces(texts: Sequence[Text], left: int, log: ReadLog | None = None) -> Iterator[str]:
    """The first characters of the texts, in pieces."""
    for piece in all_pieces(texts, log):
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            return


def _several(texts: Sequence[Text]) -> bool:
    """Whether there may be several documents."""
    return len(texts) > 1 or any(t.path is not None and has_records(t.path) for t in texts)


def _encoded_documents(text: Text, tokenizer: Tokenizer, several: bool, log: ReadLog) -> Iterator[Iterator[list[int]]]:
    for document in documents(text, log):
        pieces = (tokenizer.encode(piece) for piece in _counted(document, log.count))
        yield chain(pieces, [[tokenizer.eos_id]]) if several and tokenizer.eos_id is not None else pieces


def _counted(pieces: Iterable[str], count: Count) -> Iterator[str]:
    for piece in pieces:
        yield piece
        count.done += len(piece.encode())


def write_tokens(texts: Sequence[Text], tokenizer: Tokenizer, folder: Path, log: ReadLog | None = None) -> np.ndarray:
    """Tokenizes into folder/tokens.bin and returns it memory-mapped. The EOS token separates documents.

    The log counts the bytes of the text that is tokenized.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(DTYPES[tokenizer.size > 1 << 16])
    count, digest, several, log = 0, hashlib.sha256(), _several(texts), log or ReadLog()
    n_documents = 0
    starts: list[int] = []  # the position of each text's first token
    partial = folder / "tokens.bin.partial"
    with partial.open("wb") as file:
        for text in texts:
            starts.append(count)
            for document in _encoded_documents(text, tokenizer, several, log):
                n_documents += 1
                for piece in document:
                    ids = np.asarray(piece, dtype=dtype)
                    file.write(ids.tobytes())
                    digest.update(ids.tobytes())
                    count += ids.size
    if not count and log.n_bad:
        raise ValueError(f"no text is left: {log.bad_report()}")
    meta = {
        "tokens": count, "dtype": dtype.name, "sha256": digest.hexdigest(), "sources": [t.name for t in texts],
        "starts": starts, "about": _about(texts, n_documents, log),
    }  # fmt: skip
    write_json(folder / "tokens.json", meta)
    partial.replace(folder / "tokens.bin")
    return open_tokens(folder)


def mapped_tokens(texts: Sequence[Text], tokenizer: Tokenizer, log: ReadLog | None = None) -> np.ndarray:
    """The tokens of the texts, memory-mapped from a temporary file, so that they may exceed memory."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a mapping outlives its file, except on Windows
        return write_tokens(texts, tokenizer, Path(folder), log)


def _about(texts: Sequence[Text], n_documents: int, log: ReadLog) -> str:
    """What was read, in a line or two."""
    paths = [text.path for text in texts if text.path is not None]
    if not paths:
        return ""
    kinds = Counter("saved dataset" if path.is_dir() else _suffix(path) or "without suffix" for path in paths)
    several = f"{len(paths):,} files ({', '.join(f'{n:,} {kind}' for kind, n in kinds.items())})"
    source = several if len(paths) > 1 else texts[0].name
    lines = [f"{n_documents:,} document{'s' * (n_documents != 1)} from {source}", log.bad_report()]
    return "\n".join(line for line in lines if line)


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
