"""A slice of the campaign `machines`: a few kernels' code for any x86-64 CPU, compared with their formulas."""

from __future__ import annotations

import pytest

from campaigns import machines

pytest.importorskip("numba")
FEW = {"x86-64": ["layer_norm", "rope", "swiglu"], "x86-64 with AVX2": ["attention", "linear"]}


@pytest.mark.parametrize("target", ["x86-64", pytest.param("x86-64 with AVX2", marks=pytest.mark.slow)])
def test_code_for_other_cpus_agrees_with_the_formulas(target: str) -> None:
    if reason := machines.unavailable(target):
        pytest.skip(reason)
    said = machines.prove_some(target, FEW[target])
    assert said.endswith(" kernels, refused {}") and int(said.split()[0]) >= 6, said
