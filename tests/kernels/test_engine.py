"""The engine for users: when it is chosen, what it prints, and that training does not depend on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import machine_code
import numpy as np
import pytest
from machine_code import USE, in_cache

import onfoot
from onfoot.engine import get_engine
from onfoot.kernels import library, linear
from onfoot.train import finetune, pretrain
from onfoot.train.log import Log
from onfoot.train.options import FinetuneOptions, TrainOptions

pytest.importorskip("numba")
SMALL = {
    "steps": 12, "batch_size": 4, "context": 16, "n_layer": 2, "n_head": 2, "n_embd": 16, "tokenizer": "byte",
    "eval_every": 6, "sample_tokens": 0, "warmup": 2,
}  # fmt: skip


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, timeout=300
    )


def test_the_kernels_are_the_default_for_float32_and_the_formulas_for_float64() -> None:
    assert get_engine("auto").name == "numba"
    assert get_engine("auto", "float64").name == "numpy"
    config = onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=4, vocab_size=5)
    assert onfoot.create(config).engine.name == "numba"


def test_numba_is_not_loaded_by_the_import() -> None:
    done = python("import sys, onfoot; print('numba' in sys.modules, 'matplotlib' in sys.modules)")
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_a_process_that_computes_never_loads_numba() -> None:
    """Numba compiles in a separate process; here its machine code is loaded without it."""
    code = (
        "import sys, onfoot, numpy as np\n"
        "m = onfoot.create(onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=4, vocab_size=5))\n"
        "m.train_step(onfoot.AdamW(m), np.array([[1, 2, 3]])); print(m.engine.name, 'numba' in sys.modules)"
    )
    done = python(code)
    assert done.stdout.split() == ["numba", "False"], done.stderr


@pytest.mark.parametrize(
    "wrong",
    [np.zeros((4, 6)), np.zeros((4, 6), np.float32)[:, ::2], np.zeros(12, np.float32), np.zeros((4, 6), np.int32)],
    ids=["float64", "strided", "one axis", "integers"],
)
def test_a_kernel_refuses_an_array_that_is_not_what_it_takes(wrong: np.ndarray) -> None:
    right = np.zeros(3, np.float32)
    with pytest.raises(TypeError, match=r"linear.sum_rows: argument 1 must be f4\[:,::1\], aligned, not "):
        linear._sum_rows(wrong, right)
    with pytest.raises(TypeError, match="argument 2 must be"):
        linear._sum_rows(np.zeros((4, 3), np.float32), right[::-1])


HIDE = """
import importlib.metadata, sys
sys.modules[{hidden!r}] = None
real = importlib.metadata.version
def version(name):
    if name == {hidden!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)
importlib.metadata.version = version
"""  # as if a package were not installed


def test_without_numba_numpy_takes_over_with_one_line() -> None:
    code = HIDE.format(hidden="numba") + (
        "import onfoot, numpy as np\n"
        "m = onfoot.create(onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=4, n_positions=4, vocab_size=5))\n"
        "n = onfoot.create(m.config); print(m.engine.name, m.loss(np.array([[1, 2, 3]])) > 0)"
    )
    done = python(code)
    assert done.stdout.split() == ["numpy", "True"], done.stderr
    assert done.stderr.count("falling back to the slower NumPy engine") == 1 and len(done.stderr.splitlines()) == 1


def test_a_kernel_that_does_not_compile_is_left_to_numpy_with_one_line() -> None:
    code = (
        "import onfoot, numpy as np\n"
        "from onfoot.kernels import layer_norm\n"
        "def broken(): raise RuntimeError('no such instruction')\n"
        "layer_norm.KERNELS[0].prepare = broken\n"
        "c = onfoot.GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=4, vocab_size=5)\n"
        "m, n = onfoot.create(c), onfoot.create(c, engine='numpy'); t = np.array([[1, 2, 3]])\n"
        "same = m.engine.layer_norm_forward is n.engine.layer_norm_forward\n"
        "print(m.engine.name, same, abs(m.loss(t) - n.loss(t)) < 1e-6)"
    )
    done = python(code)
    assert done.stdout.split() == ["numba", "True", "True"], done.stderr
    assert (
        len([line for line in done.stderr.splitlines() if "layer_norm" in line and "falling back to NumPy" in line])
        == 1
    )


def test_a_kernel_without_machine_code_takes_only_its_own_file_with_it(tmp_path: Path) -> None:
    code = library.code()
    objects = {name: data for name, data in code.objects.items() if name != "attention.backward"}
    error = {"attention.backward": "NotImplementedError: it needs something"}
    in_cache(tmp_path, code._replace(objects=objects, errors=error))
    own = "[getattr(ours.engine, n) is not getattr(truth.engine, n) for n in ('attention_forward', 'rope_forward')]"
    done = machine_code.python(USE + f"print(*{own}, ours.engine.has('cached_attention'))", tmp_path)
    assert done.stdout.split() == ["numba", "True", "False", "True", "True"], done.stderr  # one token: no backward
    assert "cannot compile the kernels of 'attention' (NotImplementedError: it needs something)" in done.stderr


@pytest.mark.parametrize("hidden", ["numba", "llvmlite"])
def test_an_engine_asked_for_by_name_is_that_engine_or_an_error(hidden: str) -> None:
    """Only "auto" may be another engine, and it prints a line."""
    code = HIDE.format(hidden=hidden) + (
        "from onfoot.engine import get_engine\n"
        "try: get_engine('numba')\n"
        "except ValueError as error: print(error)\n"
        "print(get_engine('auto').reason); get_engine('auto')"
    )
    done = python(code)
    error, reason = done.stdout.splitlines()
    assert error.startswith('the engine "numba" has no kernels here (') and "pip install numba" in error
    assert error.endswith('; engine="auto" falls back to NumPy') and hidden in error
    assert reason.startswith("auto: no kernels available (") and hidden in reason
    assert done.stderr.count("falling back to the slower NumPy engine") == 1 == len(done.stderr.splitlines())


def test_an_engine_says_why_it_is_the_one_it_is() -> None:
    assert get_engine("auto").reason == "auto: kernels for this CPU"
    assert get_engine("auto", "float64").reason == "auto: NumPy formulas for float64"
    assert {get_engine(name).reason for name in ("numba", "numpy", "torch")} == {"chosen by name"}
    assert [get_engine(name).name for name in ("numba", "numpy", "torch")] == ["numba", "numpy", "torch"]


@pytest.mark.parametrize(("slower", "chosen"), [(2.345, "numpy"), (0.9, "numba"), (0.0, "numba")])
def test_auto_takes_numpy_where_kernels_are_slower(tmp_path: Path, slower: float, chosen: str) -> None:
    in_cache(tmp_path, library.code()._replace(slower=slower))
    code = (
        "from onfoot.engine import get_engine; print(get_engine('numba').name, get_engine('auto').name); "
        "print(get_engine('auto').reason)"
    )
    names, reason = machine_code.python(code, tmp_path).stdout.splitlines()
    assert names.split() == ["numba", chosen]
    slow = "auto: kernels take 2.3 times as long as NumPy on this CPU"
    assert reason == (slow if chosen == "numpy" else "auto: kernels for this CPU")


def losses(run: Path) -> np.ndarray:
    return np.array([r["loss"] for r in Log(run / "log.jsonl").read() if "loss" in r])


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_training_has_the_same_loss_curve_on_all_engines(tmp_path: Path, clip: float) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    curves = {}
    for engine in ("numpy", "torch", "numba"):
        options = TrainOptions(texts=[str(text)], engine=engine, clip=clip, **SMALL)
        pretrain.start(tmp_path / engine, options).run()
        curves[engine] = losses(tmp_path / engine)
    assert len(curves["numpy"]) == 12 and curves["numpy"][-1] < curves["numpy"][0]
    for engine in ("torch", "numba"):
        assert np.abs(curves[engine] / curves["numpy"] - 1).max() < 1e-5, engine


def test_fine_tuning_has_the_same_loss_curve_on_all_engines(tmp_path: Path) -> None:
    text, data = tmp_path / "text.txt", tmp_path / "chats.jsonl"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    data.write_text("".join(f'{{"prompt": "q{i} ", "completion": "a{i}{i}"}}\n' for i in range(24)))
    pretrain.start(tmp_path / "base", TrainOptions(texts=[str(text)], **SMALL)).run()
    curves = {}
    for engine in ("numpy", "torch", "numba"):
        options = FinetuneOptions(
            model=str(tmp_path / "base"),
            data=[str(data)],
            steps=8,
            r=3,
            lr=1e-2,
            warmup=1,
            sample_tokens=0,
            engine=engine,
        )
        finetune.start(tmp_path / engine, options).run()
        curves[engine] = losses(tmp_path / engine)
    assert len(curves["numpy"]) == 8 and curves["numpy"][-1] < curves["numpy"][0]
    for engine in ("torch", "numba"):
        assert np.abs(curves[engine] / curves["numpy"] - 1).max() < 1e-5, engine


def test_a_run_that_recomputes_blocks_ends_with_the_same_bits(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    for recompute in ("none", "block"):
        options = TrainOptions(texts=[str(text)], recompute=recompute, dropout=0.1, **SMALL)
        pretrain.start(tmp_path / recompute, options).run()
    weights = [(tmp_path / name / "last" / "model.safetensors").read_bytes() for name in ("none", "block")]
    assert weights[0] == weights[1]
    with pytest.raises(ValueError, match="unknown recompute 'blocks'; choose from none, block"):
        TrainOptions(texts=[str(text)], recompute="blocks")


def test_eight_bits_leave_the_perplexity_within_one_percent(tmp_path: Path) -> None:
    """Of a model trained here, loaded from its folder with its weights rounded as they are read."""
    text = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    words = ["walk", "on", "foot", "through", "every", "gradient", "by", "hand", "and", "see"]
    text.write_text(" ".join(words[i] for i in rng.integers(0, len(words), 4000)))
    options = TrainOptions(texts=[str(text)], **{**SMALL, "steps": 120, "n_embd": 32, "lr": 3e-3})
    pretrain.start(tmp_path / "run", options).run()
    floats, small = (onfoot.load(tmp_path / "run", quantized=q) for q in (False, True))
    assert floats.tokenizer is not None
    tokens = np.array(floats.tokenizer.encode(text.read_text())[:3200]).reshape(-1, 16)
    before, after = floats.loss(tokens), small.loss(tokens)
    assert small.quantized and before < 2.2  # nats per byte, from 5.5: it has learned something
    assert abs(np.exp(after - before) - 1) < 0.01
    assert after != before  # something was rounded


def test_generation_in_eight_bits_goes_through_the_same_kernel_as_its_floats(tmp_path: Path) -> None:
    config = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=32, vocab_size=40)
    model = onfoot.create(config, seed=3)
    model.save(tmp_path)
    small = onfoot.load(tmp_path, quantized=True)
    same = onfoot.create(config, seed=3, engine="numpy")
    same.quantize("int8")
    tokens = np.arange(5)[None]
    assert (small.generate(tokens, 20, temperature=0) == same.generate(tokens, 20, temperature=0)).all()
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 40


@pytest.mark.optional("only Linux has /proc")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's peak from /proc")
def test_a_folder_never_lies_in_memory_beside_its_model(tmp_path: Path) -> None:
    config = onfoot.GPT2Config(n_layer=8, n_head=8, n_embd=512, n_positions=32, vocab_size=20_000)
    onfoot.create(config, seed=1).save(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    code = (
        "import onfoot, re, sys\n"
        "from onfoot.engine import get_engine\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        "get_engine('auto'); before = peak()\n"
        "model = onfoot.load(sys.argv[1], quantized=sys.argv[2] == '8')\n"
        "print(peak() - before)"
    )
    for bits, most in (("32", 1.5), ("8", 0.8)):  # of the file; the largest tensor is a third of it
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path), bits], capture_output=True, text=True)
        assert int(done.stdout) < most * size, (bits, done.stderr)


@pytest.mark.optional("only Linux has /proc")
@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="the memory of a library is read from /proc")
def test_the_compilers_memory_is_released_once_the_kernels_are_loaded() -> None:
    code = """
import re, llvmlite.binding as llvm
from onfoot import kernels
def megabytes():
    maps = re.split(r"^(?=[0-9a-f]+-)", open("/proc/self/smaps").read(), flags=re.MULTILINE)
    return sum(int(re.search(r"Rss: +(\\d+)", m)[1]) for m in maps if "libllvmlite" in m) / 1024
before = megabytes()
assert kernels.table()
after = megabytes()
assert before > 15 and after < 5, (before, after)
llvm.parse_assembly("define i32 @f() { ret i32 7 }").verify()  # it can still be called
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
