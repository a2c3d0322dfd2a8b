"""Machine code runs only if it is ours and intact; otherwise it is compiled again. No failure is remembered."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from llvmlite import binding
from machine_code import USE, compilations, in_cache, python, write

from onfoot.kernels import compiler, library, manifest, private, symbols
from onfoot.recording import pool

pytest.importorskip("numba")
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no owners of this kind")


@pytest.fixture(scope="session")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of objects that a process may use instead of compiling."""
    return write(tmp_path_factory.mktemp("given") / "objects")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of an object": lambda folder: flip(folder / "product.product.o", 3000),
    "the end of an object": lambda folder: cut(folder / "attention.forward.o"),
    "an empty object": lambda folder: (folder / "linear.backward.o").write_bytes(b""),
    "an object": lambda folder: (folder / "attention.forward.o").unlink(),
    "a bit of the manifest": lambda folder: flip(folder / "manifest", 200),
    "the end of the manifest": lambda folder: cut(folder / "manifest"),
    "the manifest": lambda folder: (folder / "manifest").unlink(),
    "everything": lambda folder: [path.unlink() for path in folder.iterdir()] and None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_machine_code_is_compiled_again_with_a_line(tmp_path: Path, given: Path, damage: str) -> None:
    folder = in_cache(tmp_path)
    DAMAGES[damage](folder)
    before = len(compilations(given))
    done = python(USE, tmp_path, given)
    assert done.stdout.split() == ["numba", "True"], done.stderr
    assert f"the machine code in {folder} is damaged" in done.stderr
    assert len(compilations(given)) == before + 1
    assert manifest.read(folder).objects == library.code().objects


def test_the_first_run_says_that_it_compiles_and_the_next_does_not(tmp_path: Path, given: Path) -> None:
    first, second = python(USE, tmp_path, given), python(USE, tmp_path)
    assert "compiling the kernels for this CPU" in first.stderr and "damaged" not in first.stderr
    assert second.stderr == "" and second.stdout.split() == ["numba", "True"]


@posix
def test_the_cache_is_made_private(tmp_path: Path, given: Path) -> None:
    umask = "import os; os.umask(0)\n"
    done = python(umask + USE, tmp_path / "new" / "cache", given)
    assert done.stdout.split() == ["numba", "True"], done.stderr
    folder = tmp_path / "new" / "cache" / "onfoot" / library.folder_name()
    assert [path.stat().st_mode & 0o777 for path in (folder.parents[1], folder.parent, folder)] == [0o700] * 3
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith("work-")] == []


def other_user(home: Path) -> str:
    return "import os; me = os.geteuid(); os.geteuid = lambda: me + 1\n"


def other_writers(home: Path) -> str:
    (home / "onfoot").chmod(0o777)
    return ""


def a_link(home: Path) -> str:
    (home / "onfoot").rename(home / "elsewhere")
    (home / "onfoot").symlink_to(home / "elsewhere")
    return ""


def not_a_folder(home: Path) -> str:
    shutil.rmtree(home)
    home.write_text("not a folder")
    return ""


@posix
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (other_user, "belongs to another user"),
        (other_writers, "other users can write to"),
        (a_link, "is not a folder, or is a symbolic link"),
        (not_a_folder, "exists"),
    ],
)
def test_a_cache_that_is_not_ours_alone_is_not_read(
    tmp_path: Path, given: Path, spoil: Callable[[Path], str], said: str
) -> None:
    """Its machine code would end the process; a fresh private folder takes its place, and nothing is left of that."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    planted = library.code()._replace(objects=dict.fromkeys(library.code().objects, b"not machine code"))
    in_cache(home, planted)
    temporary.mkdir()
    for name in {"root", os.environ.get("USER", "root"), str(os.getuid())}:  # where a guess would find it
        in_cache(temporary, planted).parent.rename(temporary / f"onfoot-{name}")
    before = sorted(temporary.iterdir())
    done = python(spoil(home) + USE, home, given, TMPDIR=str(temporary))
    assert done.stdout.split() == ["numba", "True"], done.stderr
    lines = [line for line in done.stderr.splitlines() if "compiling them for this process only" in line]
    assert len(lines) == 1 and said in lines[0], done.stderr
    assert sorted(temporary.iterdir()) == before
    assert compilations(given)[-1].startswith(f"{temporary}/onfoot-") and not Path(compilations(given)[-1]).exists()


READ_ONLY = "import os; os.access = lambda path, mode: mode == os.R_OK\n"


def test_a_cache_that_cannot_be_written_is_read_where_it_is_whole(tmp_path: Path, given: Path) -> None:
    in_cache(tmp_path)
    done = python(READ_ONLY + USE, tmp_path)
    assert done.stdout.split() == ["numba", "True"] and done.stderr == ""
    done = python(READ_ONLY + USE, tmp_path / "empty", given)
    assert done.stdout.split() == ["numba", "True"]
    home = tmp_path / "empty" / "onfoot"
    assert f"cannot write to {home}); compiling them for this process only" in done.stderr
    assert [*(tmp_path / "empty" / "onfoot").iterdir()] == []


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, given: Path) -> None:
    refuse = "def refuse(*args, **others): raise NotImplementedError('no locks here')\n"
    done = python(f"import filelock\n{refuse}filelock.FileLock.acquire = refuse\n" + USE, tmp_path, given)
    assert done.stdout.split() == ["numba", "True"] and "no locks" not in done.stderr
    assert python(USE, tmp_path).stderr == ""


@posix
@pytest.mark.parametrize("spoiled", ["folder", "manifest", "object"])
def test_a_folder_or_file_that_others_may_write_to_is_compiled_again(tmp_path: Path, given: Path, spoiled: str) -> None:
    folder = in_cache(tmp_path)
    {"folder": folder, "manifest": folder / "manifest", "object": folder / "rope.turn.o"}[spoiled].chmod(0o777)
    done = python(USE, tmp_path, given)
    assert done.stdout.split() == ["numba", "True"], done.stderr
    assert "is damaged (other users can write to" in done.stderr
    assert folder.stat().st_mode & 0o777 == 0o700


@posix
def test_a_link_in_place_of_a_folder_or_an_object_is_not_followed(tmp_path: Path, given: Path) -> None:
    folder = in_cache(tmp_path)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    done = python(USE, tmp_path, given)
    assert "is not a folder, or is a symbolic link" in done.stderr and done.stdout.split() == ["numba", "True"]
    assert not folder.is_symlink() and (tmp_path / "elsewhere" / "manifest").exists()
    (folder / "rope.turn.o").unlink()
    (folder / "rope.turn.o").symlink_to(tmp_path / "elsewhere" / "rope.turn.o")
    with pytest.raises(OSError):
        manifest.read(folder)


@posix
@pytest.mark.optional("only root may give files away")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files away")
def test_another_users_file_is_refused_whatever_the_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    os.chown(path, 12345, -1)
    with pytest.raises(PermissionError, match=r"belongs to another user \(uid 12345\)"):
        private.read_own(path)


BUILDER = "import sys; from onfoot.kernels import build; build.compiled = {}; sys.argv[1:] = [{!r}]; build.main()"


@pytest.mark.parametrize(
    ("error", "remembered"),
    [
        ("OSError(28, 'No space left on device')", False),
        ("MemoryError('no memory')", False),
        ("KeyboardInterrupt()", False),
        ("NotImplementedError('it needs something')", True),
    ],
)
def test_only_what_a_kernel_cannot_help_is_remembered(tmp_path: Path, error: str, remembered: bool) -> None:
    """A full disk or an interrupt ends the compiler; a kernel that does not compile is recorded."""
    fail = f"lambda kernel: (_ for _ in ()).throw({error})"
    done = python(BUILDER.format(fail, str(tmp_path)), tmp_path, ONFOOT_COMPILING="1")
    assert (done.returncode == 0) == remembered, done.stderr
    assert bool([*tmp_path.glob("*.error")]) == remembered


@posix
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("kill -KILL $$", "the compiler was killed by SIGKILL"),
        ("echo OSError: No space left on device >&2; exit 1", "OSError: No space left on device"),
    ],
)
def test_a_compiler_that_is_ended_leaves_nothing_and_the_next_process_tries_again(
    tmp_path: Path, given: Path, end: str, said: str
) -> None:
    broken = (
        "import subprocess; from onfoot.kernels import compiler\n"
        f"compiler.start = lambda module, work: subprocess.Popen(['sh', '-c', {end!r}], stdout=subprocess.PIPE, "
        "stderr=subprocess.PIPE, text=True)\n"
    )
    done = python(broken + USE, tmp_path)
    assert done.stdout.split() == ["numpy", "True"], done.stderr
    assert f"no kernels available ({said}" in done.stderr
    assert [path for path in (tmp_path / "onfoot").iterdir() if path.suffix != ".lock"] == []
    assert python(USE, tmp_path, given).stdout.split() == ["numba", "True"]


def test_of_two_processes_at_once_one_compiles(tmp_path: Path, given: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    before = len(compilations(given))
    with ThreadPoolExecutor(2) as both:
        done = [*both.map(lambda _: python(USE, tmp_path, given), range(2))]
    assert [one.stdout.split() for one in done] == [["numba", "True"]] * 2, [one.stderr for one in done]
    assert len(compilations(given)) == before + 1


def test_compiling_runs_nothing_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numba.py").write_text("open('ran', 'w')")
    (tmp_path / "onfoot").mkdir()
    (tmp_path / "onfoot" / "__init__.py").write_text("open('ran', 'w')")
    work = tmp_path / "work"
    work.mkdir()
    for name in library.code().objects:  # nothing is left to compile
        (work / f"{name}.taken").touch()
    monkeypatch.chdir(tmp_path)
    process = compiler.start("build", work)
    error = process.communicate()[1]
    assert process.returncode == 0 and not (tmp_path / "ran").exists(), error


def test_the_folders_name_covers_all_that_is_compiled_in() -> None:
    """Everything that the kernels' sources import from onfoot, directly or not, except the self-test."""
    package = library.PACKAGE
    covered = {path.relative_to(package).as_posix() for path in library.sources()}
    seen: set[str] = set()
    open_ = [f"kernels/{path.name}" for path in (package / "kernels").glob("*.py") if path.name != "self_test.py"]
    while open_:
        at = open_.pop()
        if at in seen:
            continue
        seen.add(at)
        for node in ast.walk(ast.parse((package / at).read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onfoot"):
                base = "/".join((node.module or "").split(".")[1:])
                wanted = [f"{base}.py", f"{base}/__init__.py"] if base else []
                wanted += [f"{base}/{alias.name}.py".lstrip("/") for alias in node.names]
                wanted += [f"{base}/{alias.name}/__init__.py".lstrip("/") for alias in node.names]
                open_ += [path for path in wanted if (package / path).exists()]
    assert {"ops/cross_entropy.py", "ops/activation.py", "quantized.py"} <= seen <= covered


@pytest.mark.parametrize("source", ["ops/cross_entropy.py", "kernels/linear.py", "quantized.py"])
def test_another_constant_anywhere_is_another_folder(tmp_path: Path, source: str) -> None:
    shutil.copytree(library.PACKAGE, tmp_path / "onfoot", ignore=shutil.ignore_patterns("__pycache__", "static"))
    code = "from onfoot.kernels import library; print(library.folder_name())"
    with (tmp_path / "onfoot" / source).open("a") as file:
        file.write("\n# another\n")
    other = python(code, tmp_path, PYTHONPATH=str(tmp_path)).stdout.strip()
    assert other.startswith("kernels-") and other != library.folder_name()


def test_machine_code_that_nobody_uses_is_removed(tmp_path: Path, given: Path) -> None:
    home = tmp_path / "onfoot"
    ages = {"kernels-old": 31, "kernels-recent": 29, "work-left": 2, "work-now": 0, "kernels-old.lock": 31, "mine": 99}
    for name, days in ages.items():
        (home / name).mkdir(parents=True)
        (home / name / "code.o").touch()
        os.utime(home / name, (time.time() - days * 86400,) * 2)
    assert python(USE, tmp_path, given).returncode == 0
    kept = {path.name for path in home.iterdir() if library.folder_name() not in path.name}
    assert kept == {"kernels-recent", "work-now", "mine"}


def test_what_is_used_stays_young(tmp_path: Path) -> None:
    folder = in_cache(tmp_path)
    os.utime(folder, (time.time() - 29 * 86400,) * 2)
    assert python(USE, tmp_path).stderr == ""
    assert time.time() - folder.stat().st_mtime < 3600


def object_that_needs(symbol: str, defines: str) -> bytes:
    """Machine code that calls an undefined function."""
    module = binding.parse_assembly(
        f'declare void @"{symbol}"()\ndefine i32 @"{defines}"() {{ call void @"{symbol}"() ret i32 0 }}'
    )
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
    return bytes(machine.emit_object(module))


@pytest.mark.skipif(sys.platform != "linux", reason="symbols are read from ELF objects")
def test_a_symbol_that_is_nowhere_costs_one_file_and_not_the_process(tmp_path: Path) -> None:
    code = library.code()
    needs = object_that_needs("nowhere_at_all", "onfoot.swiglu.forward")
    assert symbols.undefined(needs) == ["nowhere_at_all"]
    in_cache(tmp_path, code._replace(objects={**code.objects, "swiglu.forward": needs}))
    done = python(USE + "print(ours.engine.swiglu_forward is truth.engine.swiglu_forward)", tmp_path)
    assert done.stdout.split() == ["numba", "True", "True"], done.stderr
    assert "cannot compile the kernels of 'swiglu' (undefined symbol nowhere_at_all)" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="symbols are read from ELF objects")
def test_the_kernels_need_what_every_machine_has() -> None:
    code = library.code()
    needed = {symbol for data in code.objects.values() for symbol in symbols.undefined(data)}
    assert {symbol for symbol in needed if not symbol.startswith("onfoot.")} <= {
        "memset", "memcpy", "memmove", "logf", *pool.system_functions(),
    }  # fmt: skip
    assert all(pool.system_functions().values())
    assert {symbol.removeprefix("onfoot.") for symbol in needed if symbol.startswith("onfoot.")} <= code.objects.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="symbols are read from ELF objects")
def test_a_kernel_defines_its_entry_points_and_nothing_else() -> None:
    """Two files with a function of the same name, numbered by two compilers, would share one of the two."""
    kernels = {name: data for name, data in library.code().objects.items() if name != "pool"}
    assert len(kernels) > 50
    assert {name: symbols.defined(data) for name, data in kernels.items()} == {
        name: [f"onfoot.{name}", f"onfoot.{name}.thread"] for name in kernels
    }


def ended_by(number: int) -> Callable[[str, Path], subprocess.Popen[str]]:
    """Self-tests of which the first is killed by a signal while testing "layer_norm"."""
    start, commands = compiler.start, [f"import os; print('layer_norm', flush=True); os.kill(os.getpid(), {number})"]

    def start_one(module: str, work: Path) -> subprocess.Popen[str]:
        if not commands:
            return start(module, work)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", commands.pop()], text=True, **pipes)

    return start_one


@posix
def test_a_proof_that_crashes_refuses_the_file_it_was_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one skips it, and files that import it are refused as well."""
    monkeypatch.setattr(compiler, "start", ended_by(signal.SIGSEGV))
    folder = write(tmp_path / "work")
    refused = compiler.prove(folder, manifest.read(folder)).refused
    killed = "its self-test was killed by SIGSEGV"
    assert refused == {"layer_norm": killed, "rms_norm": "layer_norm", "tangents_norm": "layer_norm"}


@posix
def test_a_proof_that_is_killed_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGKILL is not the kernels' fault."""
    monkeypatch.setattr(compiler, "start", ended_by(signal.SIGKILL))
    folder = write(tmp_path / "work")
    with pytest.raises(ImportError, match="its self-test was killed by SIGKILL"):
        compiler.prove(folder, manifest.read(folder))
    assert manifest.read(folder).refused == {}
