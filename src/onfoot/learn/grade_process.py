"""Starts a judge's process on the files of a submission, in a folder of their own, and reads its verdict."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onfoot.learn.course import Exercise
from onfoot.learn.grade_limits import Limits

JUDGE = (
    "import sys; sys.dont_write_bytecode = True; sys.path[:] = [p for p in sys.path if p]; "
    "sys.path.append(sys.argv[1]); from onfoot.learn.grade_judge import main; main()"
)
EXTRA_SECONDS = 240.0  # per function, beside the time of its calls: starts of processes, and the judge itself
LONGEST = 2**22  # characters of a verdict


def run_judge(
    files: dict[str, bytes], exercise: Exercise, limits: Limits, running: dict[int, subprocess.Popen[str]]
) -> dict[str, Any]:
    """The verdict of a new judge's process on these files, which are written to a folder of their own."""
    root = str(Path(__file__).resolve().parents[2])
    home = Path(tempfile.mkdtemp(prefix="onfoot-grade-")).resolve()
    try:
        folder = home / "submission"
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_bytes(text)
        secret = secrets.token_hex()
        question = {
            "folder": str(folder),
            "exercise": exercise.number,
            "limits": asdict(limits),
            "secret": secret,
        }
        process = subprocess.Popen(
            [sys.executable, "-c", JUDGE, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            errors="replace",
            cwd=home,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        running[process.pid] = process
        try:
            seconds = len(exercise.parts) * (limits.seconds + EXTRA_SECONDS)
            out, _ = process.communicate(json.dumps(question), seconds)
        except (subprocess.TimeoutExpired, OSError):
            end_judge(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
            return {"status": "not graded", "message": "the judge did not finish; read the file yourself"}
        finally:
            del running[process.pid]
        return read_verdict(out, secret)
    finally:
        remove(home)


def end_judge(process: subprocess.Popen[str]) -> None:
    """Asks a judge's process to end, which ends the submission's first; Windows ends both at once."""
    with contextlib.suppress(OSError):
        if sys.platform == "win32":
            subprocess.run(["taskkill", "/F", "/T", "/PID", str(process.pid)], capture_output=True, check=False)
        else:
            process.terminate()


def read_verdict(out: str, secret: str) -> dict[str, Any]:
    """The verdict in what a judge's process wrote; without the secret, it is not from the judge."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = json.loads(out[:LONGEST])
        if secrets.compare_digest(found["secret"], secret):
            return dict(found["verdict"])
    return {"status": "not graded", "message": "the judge's process was ended by something; read the file yourself"}


def remove(folder: Path) -> None:
    """Deletes a folder, also if a submission took away its own permissions."""

    def mend(function: Callable[..., Any], path: str, error: Any) -> None:
        with contextlib.suppress(OSError):
            os.chmod(Path(path).parent, stat.S_IRWXU)
            os.chmod(path, stat.S_IRWXU)
            function(path)

    for _ in range(3):
        shutil.rmtree(folder, onerror=mend)
        if not folder.exists():
            return
