"""Which code a CPU gets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import reload
from pathlib import Path

import pytest
from llvmlite import binding

from onfoot.kernels import compiler, cpu, library, symbols
from onfoot.recording import native_loop

pytest.importorskip("numba")


@pytest.fixture
def same_cpu_after() -> Iterator[None]:
    yield
    reload(cpu)


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "arm64-apple-darwin23.5.0"])
def test_any_arm64_cpu_gets_its_tile_whatever_it_reports(
    triple: str, monkeypatch: pytest.MonkeyPatch, same_cpu_after: None
) -> None:
    """Apple's report no features at all."""
    with monkeypatch.context() as patched:
        patched.setattr(binding, "get_process_triple", lambda: triple)
        patched.setattr(binding, "get_host_cpu_features", lambda: binding.FeatureMap())
        patched.setattr(binding, "get_host_cpu_name", lambda: "generic")
        reload(cpu)
        assert (cpu.WIDTH, cpu.TILE_ROWS, cpu.TILE_VECTORS) == (4, 8, 3)
        assert cpu.HALF_FLOATS and cpu.MULTIPLIES_AND_ADDS


@pytest.mark.parametrize(
    ("features", "tile"),
    [("", (4, 6, 2)), ("+avx2,+fma", (8, 6, 2)), ("+avx2,+fma,+avx512f,-prefer-256-bit", (16, 8, 3))],
)
def test_an_x86_cpu_gets_the_tile_of_its_vectors(
    features: str, tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, same_cpu_after: None
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(binding, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
        patched.setenv("NUMBA_CPU_NAME", "x86-64")
        patched.setenv("NUMBA_CPU_FEATURES", features)
        reload(cpu)
        assert tile == (cpu.WIDTH, cpu.TILE_ROWS, cpu.TILE_VECTORS)
        assert ("+fma" in features) == cpu.MULTIPLIES_AND_ADDS


@pytest.mark.skipif(sys.platform != "linux", reason="symbols are read from ELF objects")
@pytest.mark.slow
def test_without_fused_multiply_add_a_product_calls_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`llvm.fma` would be one call of fmaf per number there."""
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    names = {"product.product", "quantized.dots8", "few_rows.f16_dots"}
    for name in library.code().objects.keys() - names:
        (tmp_path / f"{name}.taken").touch()  # as if another process had these
    process = compiler.start("build", tmp_path)
    error = process.communicate()[1]
    assert process.returncode == 0, error
    for name in names:
        needed = {*symbols.undefined((tmp_path / f"{name}.o").read_bytes())}
        assert needed <= {"memset", "memcpy", "memmove", native_loop.SYMBOL}
