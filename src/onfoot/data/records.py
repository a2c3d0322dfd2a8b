"""Reads records, which are fields by name, one at a time: JSON Lines, JSON, CSV, Parquet, and saved datasets.

A record comes with its file and line. What cannot be read comes as a ValueError in its place, so that the reader may
skip it.
"""

from __future__ import annotations

import csv
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from onfoot.data.count import Count
from onfoot.formats.files import TEXT_BYTES, one_line, open_file, parse_json, plain_name, read_json, shown

BOM = BOM_UTF8.decode()  # byte order mark, which some editors put at the start of a file
BLOCK = 1 << 16  # bytes of a .json file that are read at a time
ROWS = 256  # rows of a table that become Python objects at a time
END_IN_QUOTES, TOO_LARGE = "unexpected end of data", "field larger than"  # errors of csv that end in a quoted field
NESTED = ("messages", "conversations", "tools", "chosen", "rejected")  # columns of a CSV file that may hold JSON
DATASET = ("state.json", "dataset_info.json")  # what Dataset.save_to_disk writes beside the .arrow files
DATASET_DICT = "dataset_dict.json"

Record = tuple[str, Any]  # "file, line", and the value, or a ValueError that says why it cannot be read
Out = TypeVar("Out")


class ReadLog:
    """Converts records, and counts their formats and those that are bad; a bad one raises unless `skip_bad`."""

    def __init__(self, skip_bad: bool = False, count: Count | None = None) -> None:
        self.skip_bad = skip_bad
        self.count = count or Count("records")  # what is read so far, for those who wait
        self.formats: Counter[str] = Counter()  # examples by the name of their format
        self.n_bad, self.first_bad = 0, ""

    def read(self, found: Iterable[Record], convert: Callable[[Any, str], Out]) -> Iterator[Out]:
        """The converted records; `convert` gets a value and its place, and raises ValueError for a bad one."""
        for where, value in found:
            try:
                if isinstance(value, ValueError):
                    raise value
                out = convert(value, where)
            except ValueError as error:
                text = str(error)
                wrong = ValueError(text if text.startswith(where) else f"{where}: {text}")
                if not self.skip_bad:
                    raise wrong from None
                self.n_bad += 1
                self.first_bad = self.first_bad or str(wrong)
                continue
            yield out

    def report(self) -> str:
        """The formats with their numbers of examples, and how many records were skipped."""
        counts = "; ".join(f"{name}, {n:,} {'example' if n == 1 else 'examples'}" for name, n in self.formats.items())
        return "\n".join(line for line in (counts, self.bad_report()) if line)

    def bad_report(self) -> str:
        """How many records were skipped, with the first of them; empty if there were none."""
        what = "bad record" if self.n_bad == 1 else "bad records"
        return f"{self.n_bad:,} {what} skipped, the first: {self.first_bad}" if self.n_bad else ""


def records(path: Path) -> Iterator[Record]:
    """The records of a file or of a saved dataset, in order; blank lines are left out."""
    return _dataset(path) if is_dataset(path) else READERS[path.suffix.lower()](path)


def has_records(path: Path) -> bool:
    """Whether a path is read as records and not as one text: by its suffix, or as a saved dataset."""
    return path.suffix.lower() in READERS or is_dataset(path)


def is_dataset(path: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk`."""
    return path.is_dir() and all((path / name).is_file() for name in DATASET)


def check_dataset_dict(path: Path) -> None:
    """Raises ValueError for a folder that was written by `DatasetDict.save_to_disk`: one of its splits is needed."""
    if (path / DATASET_DICT).is_file():
        splits = read_json(path / DATASET_DICT).get("splits")
        names = [path / name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        raise ValueError(f"{path} has several splits; give one of them: {', '.join(map(str, names))}")


def first_record(path: Path) -> Any:
    """The first record that can be read, or None."""
    return next((value for _, value in records(path) if not isinstance(value, ValueError)), None)


def decode(data: bytes, name: Path | str, offset: int) -> str:
    """The text of UTF-8 bytes that begin at this offset of a file."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at position {offset + error.start:,}; "
            f"convert it first, for example with: iconv -f latin1 -t utf-8"
        ) from None


def json_lines(path: Path) -> Iterator[Record]:
    """The values of a .jsonl file. Blank lines and a leading BOM are skipped."""
    offset = 0
    with open_file(path) as file:  # as bytes: JSON strings may contain Unicode line separators
        for number, data in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                line = decode(data, where, offset).removeprefix(BOM if number == 1 else "")
                if line.strip():
                    yield where, parse_json(line, f"{where}:")
            except ValueError as error:
                yield where, error
            offset += len(data)


def json_entries(path: Path) -> Iterator[Record]:
    """The entries of the list in a .json file; a file that begins with an object is read as JSON Lines."""
    with open_file(path) as file:
        head = file.read(BLOCK).removeprefix(BOM_UTF8).lstrip()
    start, first = head[:1], head.partition(b"\n")[0].rstrip()
    if start == b"{" and not first.endswith((b"{", b"[", b",")):  # which an object over several lines does
        yield from json_lines(path)
        return
    if start != b"[":
        raise ValueError(f"{path} must have a list of objects, [{{…}}, {{…}}], or one object per line")
    yield from _entries(path)


def _entries(path: Path) -> Iterator[Record]:
    """The entries of a list, of which only the current one is in memory."""
    decoder, number = json.JSONDecoder(), 0
    with open_file(path) as file:
        text, rest = _more(file, path, b"", BLOCK)
        text = text.removeprefix(BOM).lstrip().removeprefix("[")
        while True:
            text = text.lstrip()
            where = f"{path}, entry {number + 1}"
            try:
                _, end = decoder.raw_decode(text)
            except RecursionError:
                parse_json(text, f"{where}:")
                raise ValueError(f"{where}: nested too deeply") from None
            except json.JSONDecodeError as error:
                if text.startswith("]") and number == 0:
                    _check_end(file, path, text[1:], rest)
                    return
                cut = error.pos > len(text) - 16 or error.msg.startswith("Unterminated string")
                more, rest = _more(file, path, rest, max(BLOCK, len(text))) if cut else ("", rest)
                if not more or len(text) > TEXT_BYTES:
                    raise ValueError(f"{where}: not valid JSON: {error.msg}") from None
                text += more
                continue
            number += 1
            try:
                yield where, parse_json(text[:end], f"{where}:")
            except ValueError as error:
                yield where, error
            text = text[end:].lstrip()
            while not text:
                text, rest = _more(file, path, rest, BLOCK)
                if not text:
                    raise ValueError(f"{where}: the list has no end; is the file truncated?")
                text = text.lstrip()
            if text.startswith("]"):
                _check_end(file, path, text[1:], rest)
                return
            if not text.startswith(","):
                raise ValueError(f"{where}: expected a comma or the end of the list, got {shown(text[:20])}")
            text = text[1:]


def _check_end(file: Any, path: Path, text: str, rest: bytes) -> None:
    """Raises ValueError if anything but white space follows the list: it would be dropped without a word."""
    while not text.strip():
        text, rest = _more(file, path, rest, BLOCK)
        if not text:
            return
    found = shown(text.strip()[:20])
    raise ValueError(f"{path}: after the end of the list comes {found}; put all entries into one list")


def _more(file: Any, path: Path, rest: bytes, size: int) -> tuple[str, bytes]:
    """More text of a file, and the bytes of an incomplete character at its end."""
    data = rest + file.read(size)
    end = len(data)
    if data and data[-1] & 0x80 and len(data) > len(rest):
        first = next((i for i in range(1, 5) if i <= end and data[-i] & 0xC0 == 0xC0), 0)
        length = 1 if not first else 2 + (data[-first] >= 0xE0) + (data[-first] >= 0xF0)
        end -= first if first < length else 0
    return decode(data[:end], path, file.tell() - len(data)), data[end:]


def csv_rows(path: Path) -> Iterator[Record]:
    """The rows of a .csv or .tsv file as records; its first line has the names of the fields.

    A quote that is not closed raises ValueError: it is not one bad record, but takes the rest of the file with it.
    """
    csv.field_size_limit(TEXT_BYTES)
    wrong: list[ValueError] = []  # of lines that are not UTF-8

    def lines(file: Iterable[bytes]) -> Iterator[str]:
        offset = 0
        for number, data in enumerate(file, start=1):
            try:
                yield decode(data, f"{path}, line {number}", offset).removeprefix(BOM if number == 1 else "")
            except ValueError as error:
                wrong.append(error)
                yield data.decode("utf-8", errors="replace")
            offset += len(data)

    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with open_file(path) as file:
        reader = csv.reader(lines(file), delimiter=delimiter, strict=True)
        names: list[str] | None = None
        while True:
            first = reader.line_num + 1
            where = f"{path}, line {first}"
            try:
                row = next(reader)
                if wrong:
                    error, wrong[:] = wrong[0], []
                    raise error
                if not any(row):
                    continue
                if names is None:
                    names = _header(row, where)
                    continue
                if len(row) != len(names):
                    raise ValueError(f"{len(row)} fields, but the first line names {len(names)}")
                yield where, {name: _cell(name, cell) for name, cell in zip(names, row, strict=True)}
            except StopIteration:
                return
            except csv.Error as error:
                wrong.clear()
                where = _lines(path, first, reader.line_num)
                why = ValueError(f"{where}: not valid CSV: {error}")
                if str(error) == END_IN_QUOTES:
                    line = _open_quote(path, delimiter, first)
                    raise ValueError(
                        f"{path}, line {line}: the quote that opens here is not closed, so the rest of the file is one "
                        f'field; close it, and write a quote inside a field twice, as in "one ""word"""'
                    ) from None
                if str(error).startswith(TOO_LARGE):
                    raise ValueError(f"{why}; is a quote not closed?") from None
                if names is None:
                    raise why from None
                yield where, why
            except ValueError as error:
                if names is None:
                    raise
                yield _lines(path, first, reader.line_num), error


def _lines(path: Path, first: int, last: int) -> str:
    """The place of a row, which may have several lines."""
    return f"{path}, line {first}" if last <= first else f"{path}, lines {first} to {last}"


def _open_quote(path: Path, delimiter: str, first: int) -> int:
    """The line where the quote opens that the row from line `first` on does not close."""
    with open_file(path) as file:
        text = (line.decode("utf-8", errors="replace") for line in islice(file, first - 1, None))
        reader = csv.reader(text, delimiter=delimiter)
        field = next(reader)[-1]  # from the quote to the end of the file
    n_lines = max(1, field.count("\n") + (not field.endswith("\n")))
    return first + reader.line_num - n_lines


def _header(row: list[str], where: str) -> list[str]:
    names = [name.strip() for name in row]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{where}: the column {shown(twice)} occurs twice")
    return names


def _cell(name: str, cell: str) -> Any:
    return parse_json(cell, f'"{name}":') if name in NESTED and cell.lstrip()[:1] in ("[", "{") else cell


def parquet_rows(path: Path) -> Iterator[Record]:
    """The rows of a .parquet file as records."""
    arrow = _pyarrow(path)
    with open_file(path) as file, _arrow_errors(arrow, path):
        yield from _rows(arrow.parquet.ParquetFile(file).iter_batches(ROWS), path, 0)


def _dataset(path: Path) -> Iterator[Record]:
    """The rows of a dataset that Hugging Face's `Dataset.save_to_disk` has written."""
    arrow = _pyarrow(path)
    state = read_json(path / DATASET[0])
    if state.get("_indices_data_files"):
        raise ValueError(f"{path} selects rows by an index; save it again after dataset.flatten_indices()")
    files = state.get("_data_files")
    names = [file.get("filename") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    inside = {file.name for file in path.iterdir() if file.is_file()}
    done = 0
    for name in names:
        if not isinstance(name, str) or name not in inside:
            raise ValueError(f"{path / DATASET[0]} names the file {shown(name)}, which is not in the folder")
        with _arrow_errors(arrow, path / name), open_file(path / name) as file:
            for batch in arrow.ipc.open_stream(file):
                batch.validate(full=True)  # pyarrow reads outside its memory where offsets are wrong
                yield from _rows((batch.slice(i, ROWS) for i in range(0, batch.num_rows, ROWS)), path, done)
                done += batch.num_rows


def _rows(batches: Iterable[Any], path: Path, done: int) -> Iterator[Record]:
    """The rows of Arrow batches, without empty (null) fields: tables have all fields in all rows."""
    for batch in batches:
        for row in batch.to_pylist():
            done += 1
            yield f"{path}, row {done}", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f'reading {path} needs pyarrow: pip install "onfoot[parquet]"') from None
    return pyarrow


@contextmanager
def _arrow_errors(arrow: Any, path: Path) -> Iterator[None]:
    """One-line errors that name the file; some of pyarrow's are ValueErrors of several lines."""
    try:
        yield
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {one_line(error)}") from None


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": json_lines,
    ".json": json_entries,
    ".csv": csv_rows,
    ".tsv": csv_rows,
    ".parquet": parquet_rows,
}


def fields_of(value: Any) -> str:
    """The names of a record's fields, for error messages."""
    return ", ".join(map(plain_name, list(value)[:8])) or "(none)"
