"""The smoke test and the tests that need no PyTorch, from the wheel, on each supported Python that is installed here.

    python tests/release/pythons.py dist/onfoot-0.1.0-py3-none-any.whl [--only 3.12] [--cache FOLDER]

The interpreters are those of pyenv and those on the PATH (`python3.12`). One that is missing is named and left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from smoke import ROOT, STEPS, Installed, smoke

# Tests whose references need no PyTorch: finite differences, exact numbers, files, the command line, untrusted input.
TESTS = (
    "tests/recording/test_plan.py", "tests/formats/test_write.py", "tests/formats/test_tokenizer.py",
    "tests/train/test_data.py", "tests/train/test_example_file.py", "tests/train/test_template_limits.py",
    "tests/models/test_inputs.py", "tests/models/test_show_reports.py", "tests/cli/test_walk.py",
    "tests/cli/test_table.py", "tests/check/test_command.py", "tests/learn/test_folder.py",
    "tests/own_engine/test_compared_pairs.py",
)  # fmt: skip


def supported() -> list[str]:
    """The versions that the metadata names, such as 3.12."""
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))


def interpreter(version: str) -> str | None:
    """A program of this version that runs, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    kept = sorted(pyenv.glob(f"{version}.*/bin/python"))
    for program in [*map(str, reversed(kept)), shutil.which(f"python{version}")]:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if program is None:
            continue
        done = subprocess.run([program, "-c", code], capture_output=True, encoding="utf-8", check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return program
    return None


def tests(env: Installed) -> str:
    """Runs the tests in a copy beside the installed wheel: the repository's sources are not there."""
    for name in ("tests", "docs", "campaigns"):  # some tests read a page, or a campaign
        shutil.copytree(ROOT / name, env.folder / name, ignore=shutil.ignore_patterns("__pycache__", "images"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, env.folder)
    said = env.run("python", "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", *TESTS)
    return said.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", action="append", metavar="VERSION", help="one of them; may be repeated")
    parser.add_argument("--cache", type=Path, help="a folder for compiled kernels that is kept")
    given = parser.parse_args()
    failed = []
    for version in given.only or supported():
        python = interpreter(version)
        if python is None:
            print(f"Python {version}: not installed here, so not tested", flush=True)
            continue
        print(f"Python {version}", flush=True)
        with tempfile.TemporaryDirectory(prefix="onfoot-python-") as folder:
            env = Installed(Path(folder), python, given.cache and given.cache.resolve())
            try:
                env.install(str(given.wheel.resolve()))
                for line in smoke(env, STEPS):
                    print(line, flush=True)
                env.install("pytest", "hypothesis")
                for line in smoke(env, [tests]):
                    print(line, flush=True)
            except (AssertionError, OSError, subprocess.CalledProcessError) as error:
                print(f"  failed: {error}", flush=True)
                failed.append(version)
    if failed:
        sys.exit(f"failed on Python {', '.join(failed)}")


if __name__ == "__main__":
    main()
