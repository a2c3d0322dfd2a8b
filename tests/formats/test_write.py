"""Atomic writes: the old file or the new one, never half of either, and on disk when the call returns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from onfoot.formats import write


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), write.atomic_write(path) as file:
        file.write(b"half of the new")
        raise RuntimeError
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with write.atomic_write(path) as file:
        file.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_link_is_replaced_and_its_target_is_not(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("precious")
    link.symlink_to(target)
    (tmp_path / ".link.new").symlink_to(target)  # a temporary name that someone else has prepared
    write.write_text(link, "new")
    assert target.read_text() == "precious" and link.read_text() == "new" and not link.is_symlink()


def test_file_and_folder_are_flushed_in_that_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    real = os.fsync

    def fsync(descriptor: Any) -> None:
        flushed.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(write.os, "fsync", fsync)
    write.write_json(tmp_path / "values.json", {"a": 1})
    assert flushed == [(tmp_path / "values.json").stat().st_ino, tmp_path.stat().st_ino]
    assert json.loads((tmp_path / "values.json").read_text()) == {"a": 1}
