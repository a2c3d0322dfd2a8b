"""The CPU that kernels are compiled for: its name, its features and its vector width."""

from __future__ import annotations

import os

from llvmlite import binding


def target() -> tuple[str, str]:
    """LLVM's name and features of the CPU; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES override them."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if name or features:
        return name or binding.get_host_cpu_name(), features or ""
    found = binding.get_host_cpu_features()
    # LLVM avoids 512-bit vectors by default, because older CPUs slow down with them.
    wide = ",-prefer-256-bit" if found.get("avx512f") else ""
    return binding.get_host_cpu_name(), found.flatten() + wide


def _vector(features: str) -> tuple[int, int, int]:
    if "+avx512f" in features and "-prefer-256-bit" in features:
        return 16, 8, 3  # 24 of 32 registers hold the tile
    if "+avx2" in features and "+fma" in features:
        return 8, 6, 2  # 12 of 16
    if ARM64:
        return 4, 8, 3  # 24 of 32
    return 4, 6, 2


ARM64 = binding.get_process_triple().startswith(("aarch64", "arm64"))  # all have NEON, whether or not they report it
NAME, FEATURES = target()
HALF_FLOATS = ARM64 or "+f16c" in FEATURES  # whether the CPU converts float16 in hardware
MULTIPLIES_AND_ADDS = ARM64 or "+fma" in FEATURES  # whether it has FMA; without, NumPy may be faster
# Floats per vector, and the register tile of a matrix product: rows, and columns in vectors.
WIDTH, TILE_ROWS, TILE_VECTORS = _vector(FEATURES)
