"""Finds the submissions in what a teacher has collected: folders, zip files, Python files and notebooks."""

from __future__ import annotations

import ast
import hashlib
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from onfoot.learn.course import EXERCISES, Exercise
from onfoot.learn.notebook_code import code_of
from onfoot.terminal import printable

LONGEST = 2**20  # bytes of a file that is read
LONGEST_NAME = 100
MOST = 200  # files of a submission
STEM = re.compile(r"e(\d\d)_[a-z0-9_]+", re.IGNORECASE)
ALL_FILES = {exercise.file for exercise in EXERCISES}
KINDS = (".py", ".ipynb", ".zip")


@dataclass
class Submission:
    """What one student handed in: the text of each file, by the name that it has in the course."""

    student: str
    files: dict[str, bytes] = field(default_factory=dict)  # "e01_linear.py" -> its text; other modules as they are
    notes: list[str] = field(default_factory=list)  # what was left out

    def has(self, exercise: Exercise) -> bool:
        return exercise.file in self.files

    def digest(self) -> str:
        """The SHA-256 of all files."""
        found = hashlib.sha256()
        for name, text in sorted(self.files.items()):
            found.update(f"{name}\0{len(text)}\0".encode())
            found.update(text)
        return found.hexdigest()


def check_paths(paths: Iterable[Path]) -> None:
    """Raises a ValueError if one of the paths does not exist."""
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")


def find_submissions(paths: Iterable[Path]) -> list[Submission]:
    """The submissions, in the order given and then by name; names that occur twice get a number."""
    paths = list(paths)
    check_paths(paths)
    found: list[Submission] = []
    for path in paths:
        if path.is_dir() and not _holds_exercises(path):
            children = sorted(child for child in path.iterdir() if _can_be_one(child))
            if not children:
                raise ValueError(
                    f"{path} has no submissions: expected files such as {EXERCISES[0].file}, "
                    f"or a folder, .zip, .py or .ipynb per student"
                )
            found += _joined(read_submission(child) for child in children)
        else:
            found.append(read_submission(path))
    names: dict[str, int] = {}
    for submission in found:
        names[submission.student] = names.get(submission.student, 0) + 1
        if names[submission.student] > 1:
            submission.student += f" ({names[submission.student]})"
    return found


def one_submission(paths: Iterable[Path]) -> list[Submission]:
    """One submission, whatever its files are called: a folder is read as it is, also if it is empty."""
    paths = list(paths)
    check_paths(paths)
    if len(paths) != 1:
        names = ", ".join(map(str, paths))
        raise ValueError(f"Gradescope grades one submission at a time, got {len(paths)}: {names}; give one of them")
    submission = read_submission(paths[0])
    if paths[0].is_dir():
        for archive in sorted(child for child in paths[0].glob("*.zip") if _can_be_one(child)):
            packed = read_submission(archive)
            submission.files = packed.files | submission.files
            submission.notes += packed.notes
    return [submission]


def _can_be_one(path: Path) -> bool:
    hidden = path.name.startswith((".", "__"))
    return not hidden and not path.is_symlink() and (path.is_dir() or path.suffix.lower() in KINDS)


def _holds_exercises(folder: Path) -> bool:
    """Whether a folder is one submission: it has a file named as an exercise, and nothing more in the name."""
    stems = {exercise.stem for exercise in EXERCISES}
    return any(child.stem.lower() in stems and child.suffix in (".py", ".ipynb") for child in folder.iterdir())


def _joined(submissions: Iterable[Submission]) -> list[Submission]:
    """Single files of one student (ada_e01_linear.py, ada_e02_activation.py) are one submission."""
    found: dict[str, Submission] = {}
    for one in submissions:
        if one.student in found and not set(one.files) & set(found[one.student].files):
            found[one.student].files |= one.files
        else:
            found[one.student if one.student not in found else f"{one.student}\0{len(found)}"] = one
    return list(found.values())


def read_submission(path: Path) -> Submission:
    """Reads a folder, a zip file, a Python file or a notebook."""
    if path.is_dir():
        submission = Submission(printable(path.resolve().name))
        _add(submission, _folder_files(path, submission))
    elif path.suffix.lower() == ".zip":
        submission = Submission(printable(path.stem))
        try:
            with zipfile.ZipFile(path) as archive:
                _add(submission, _zip_files(archive, submission))
        except (zipfile.BadZipFile, OSError, RuntimeError, NotImplementedError) as error:
            submission.notes.append(f"{path.name} cannot be read: {error}")
    elif path.suffix.lower() in (".py", ".ipynb"):
        rest = STEM.sub("", path.stem).strip(" _-.") if STEM.search(path.stem) else path.stem
        submission = Submission(printable(rest or path.stem))
        _add(submission, iter([(path.name, *_read(path, submission))]))
    else:
        raise ValueError(f"{path} is not a submission: expected a folder, .zip, .py or .ipynb")
    return submission


def _read(path: Path, submission: Submission) -> tuple[int, bytes]:
    """The size and the text of a file; the text is empty if it is too large or cannot be read."""
    try:
        size = path.stat().st_size
        return size, path.read_bytes() if size <= LONGEST else b""
    except OSError as error:
        submission.notes.append(f"{printable(path.name)} cannot be read: {error.strerror}")
        return 0, b""


def _folder_files(folder: Path, submission: Submission) -> Iterator[tuple[str, int, bytes]]:
    for path in sorted(folder.rglob("*"), key=lambda path: (len(path.parts), path)):
        parts = path.relative_to(folder).parts
        if path.suffix.lower() in (".py", ".ipynb") and path.is_file() and not path.is_symlink() and _visible(parts):
            yield path.name, *_read(path, submission)


def _zip_files(archive: zipfile.ZipFile, submission: Submission) -> Iterator[tuple[str, int, bytes]]:
    members = sorted(archive.infolist(), key=lambda info: (info.filename.count("/"), info.filename))
    for info in members:
        parts = Path(info.filename.replace("\\", "/")).parts
        if info.is_dir() or not parts or Path(parts[-1]).suffix.lower() not in (".py", ".ipynb") or not _visible(parts):
            continue
        if info.file_size > LONGEST:
            yield parts[-1], info.file_size, b""
            continue
        try:
            with archive.open(info) as file:  # never unpacked: a name in the archive is not a path here
                text = file.read(LONGEST + 1)
        except Exception as error:  # a wrong checksum, a password, an unknown compression
            submission.notes.append(f"{parts[-1]} cannot be read: {error}")
            continue
        yield parts[-1], len(text), text


def _visible(parts: tuple[str, ...]) -> bool:
    hidden = (".", "__MACOSX", "__pycache__")
    return not any(part.startswith(hidden) and part != ".." for part in parts)


def _add(submission: Submission, files: Iterator[tuple[str, int, bytes]]) -> None:
    """Adds the files under the names of the course; the first of each name counts."""
    for n, (name, size, text) in enumerate(files):
        if n >= MOST:
            submission.notes.append(f"only the first {MOST} files were read")
            return
        if size > LONGEST:
            submission.notes.append(f"{name} has {size:,} bytes and was left out; at most {LONGEST:,} are read")
            continue
        if name.lower().endswith(".ipynb"):
            try:
                text = code_of(text).encode()
            except ValueError as error:
                submission.notes.append(f"{name} is not a notebook: {error}")
                continue
        chosen = course_name(name, text)
        why = "" if chosen in ALL_FILES else _why_unknown(name, text)
        if why:
            submission.notes.append(f"{printable(name)[:LONGEST_NAME]} is of no exercise: {why}")
        if not chosen.removesuffix(".py").isidentifier() or len(chosen) > LONGEST_NAME:
            submission.notes.append(f"{printable(name)[:LONGEST_NAME]} was left out: it is not the name of a module")
            continue
        if chosen in submission.files:
            if submission.files[chosen] != text:
                submission.notes.append(f"{name} was left out: there is another {chosen}")
            continue
        submission.files[chosen] = text


def course_name(name: str, text: bytes) -> str:
    """The name that a file has in the course: found by its name, else by the functions that it defines."""
    stem = Path(name).stem
    for exercise in EXERCISES:
        if exercise.stem in stem.lower():
            return exercise.file
    fitting = _fitting(text)
    return fitting[0].file if len(fitting) == 1 else f"{stem}.py"


def _fitting(text: bytes) -> list[Exercise]:
    """The exercises whose functions a file defines; a file that is not valid Python is searched for `def`."""
    tree = _parsed(text)
    if tree is None:
        defined = set(re.findall(r"(?m)^def (\w+)\(", text.decode(errors="replace")))
    else:
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [one for one in EXERCISES if {part.function for part in one.parts} <= defined]


def _parsed(text: bytes) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _why_unknown(name: str, text: bytes) -> str:
    """Why a file is of no exercise, "" if it may be a module that an exercise imports."""
    fitting = _fitting(text)
    if len(fitting) > 1:
        return (
            f"it has the functions of exercises {', '.join(str(one.number) for one in fitting)}; hand in one file each"
        )
    if name.lower().endswith(".ipynb") or _parsed(text) is None:
        return f"neither its name nor its functions are those of one; name it as in {EXERCISES[0].stem}"
    return ""


def foreign_imports(text: bytes) -> list[str]:
    """The modules that a file imports beside NumPy, Python's own and the exercises."""
    import sys

    tree = _parsed(text)
    if tree is None:
        return []
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0]: None for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names[node.module.split(".")[0]] = None
    own = {exercise.stem for exercise in EXERCISES}
    return [name for name in names if name != "numpy" and name not in sys.stdlib_module_names and name not in own]
