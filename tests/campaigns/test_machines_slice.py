"""A slice of the campaign `machines`: a few kernels' code for any x86-64 CPU, compared with their formulas."""

from __future__ import annotations

import pytest

from campaigns import machines

pytest.importorskip("numba")


@pytest.mark.parametrize("target", ["x86-64", "x86-64 with AVX2"])
def test_code_for_other_cpus_agrees_with_the_formulas(target: str) -> None:
    if reason := machines.unavailable(target):
        pytest.skip(reason)
    said = machines.prove_some(target, ["cross_entropy", "layer_norm", "rope", "swiglu"])
    assert said.startswith("kernels 8 ") and said.splitlines()[1] == "refused {}", said


def test_every_target_is_one_that_can_run_or_says_why_not() -> None:
    for name in machines.TARGETS:
        if name != "aarch64":  # which asks the network
            assert (
                machines.unavailable(name) == ""
                or "CPU lacks" in machines.unavailable(name)
                or "not an x86-64" in (machines.unavailable(name))
            )
