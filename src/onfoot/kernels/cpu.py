"""The CPU that kernels are compiled for: its name, its features, and the vectors it has."""

from __future__ import annotations

import os

from llvmlite import binding


def target() -> tuple[str, str]:
    """Name and features, as LLVM has them; Numba's variables NUMBA_CPU_NAME and NUMBA_CPU_FEATURES choose others."""
    name, features = os.environ.get("NUMBA_CPU_NAME"), os.environ.get("NUMBA_CPU_FEATURES")
    if name or features:
        return name or binding.get_host_cpu_name(), features or ""
    found = binding.get_host_cpu_features()
    # LLVM avoids 512-bit vectors on CPUs that once slowed down with them.
    wide = ",-prefer-256-bit" if found.get("avx512f") else ""
    return binding.get_host_cpu_name(), found.flatten() + wide


def _vector(features: str) -> tuple[int, int, int]:
    if "+avx512f" in features and "-prefer-256-bit" in features:
        return 16, 8, 3  # 24 of 32 registers hold the tile
    if "+avx2" in features and "+fma" in features:
        return 8, 6, 2  # 12 of 16
    if "+neon" in features:
        return 4, 8, 3  # 24 of 32
    return 4, 6, 2


NAME, FEATURES = target()
HALF_FLOATS = any(feature in FEATURES for feature in ("+f16c", "+fullfp16", "+fp16"))  # widens 16-bit floats by itself
# Floats in a vector, and the register tile of a product: rows, and columns in vectors.
WIDTH, TILE_ROWS, TILE_VECTORS = _vector(FEATURES)
