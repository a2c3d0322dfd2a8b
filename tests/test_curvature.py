"""Curvature: eigenvalues, traces and layers against the full matrices that PyTorch's autograd gives in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import onfoot
from llama_oracle import in_float64, in_transformers, scrambled_llama
from onfoot.curvature import Estimate, Operator, hutchinson, lanczos, layers_of, mean_and_error, measure
from onfoot.data.batches import Batch
from onfoot.models.model import Model
from oracles import assert_close, gpt2_logits, scrambled

Logits = Callable[[dict[str, torch.Tensor], torch.Tensor], torch.Tensor]


# Linear algebra alone.


def matrix_of(eigenvalues: object, seed: int = 0) -> np.ndarray:
    """A symmetric matrix with these eigenvalues, and random eigenvectors."""
    values = np.asarray(eigenvalues, dtype=np.float64)
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(values.size, values.size)))
    return (q * values) @ q.T


def values_of(estimates: list[Estimate]) -> list[float]:
    return [estimate.value for estimate in estimates]


SPECTRA = {
    "random": (np.random.default_rng(1).normal(size=61), 4),
    "one large": ([1000.0, *np.linspace(-1, 1, 40)], 3),
    "all positive": (np.linspace(1, 2, 33), 5),
    "degenerate": ([5.0] * 3 + [2.0] * 2 + [-1.0] * 5 + [0.0] * 30, 5),
    "the identity": ([1.0] * 9, 4),
    "zero": ([0.0] * 7, 3),
    "rank one": ([3.0] + [0.0] * 20, 2),
    "two parameters": ([-4.0, 3.0], 2),
    "one parameter": ([-4.0], 1),
}


@pytest.mark.parametrize("name", SPECTRA)
def test_lanczos_finds_both_ends_of_a_known_spectrum(name: str) -> None:
    eigenvalues, top = SPECTRA[name]
    a, expected = matrix_of(eigenvalues), np.sort(eigenvalues)
    found = lanczos(lambda u: a @ u, len(a), top, tolerance=1e-9)
    assert found.converged
    np.testing.assert_allclose(values_of(found.largest), expected[::-1][:top], atol=1e-10 * max(1, abs(expected).max()))
    np.testing.assert_allclose(values_of(found.smallest), expected[:top], atol=1e-10 * max(1, abs(expected).max()))


def test_repeated_eigenvalues_come_from_new_start_vectors() -> None:
    """One start vector breaks down after 4 steps, one per distinct eigenvalue, and finds each of them once."""
    eigenvalues, top = SPECTRA["degenerate"]
    a = matrix_of(eigenvalues)
    assert lanczos(lambda u: a @ u, len(a), 1, both_ends=False, tolerance=1e-9).steps == 4
    found = lanczos(lambda u: a @ u, len(a), top, both_ends=False, tolerance=1e-9)
    np.testing.assert_allclose(values_of(found.largest), [5, 5, 5, 2, 2], atol=1e-12)
    assert 4 < found.steps < len(a) and found.smallest == []


def test_it_stops_as_soon_as_the_bounds_are_within_the_tolerance() -> None:
    a = matrix_of([50.0, *np.linspace(-1, 1, 199)])
    loose, tight = (lanczos(lambda u: a @ u, 200, 1, both_ends=False, tolerance=t) for t in (1e-2, 1e-8))
    assert loose.steps < tight.steps < 20
    assert loose.converged and tight.converged
    assert loose.largest[0].error <= 1e-2 * 50 + 1e-9 and tight.largest[0].error <= 1e-8 * 50 + 1e-9


@pytest.mark.parametrize("steps", [3, 7, 20])
def test_before_convergence_every_bound_holds_an_eigenvalue(steps: int) -> None:
    eigenvalues = np.random.default_rng(2).normal(size=80)
    a = matrix_of(eigenvalues)
    found = lanczos(lambda u: a @ u, 80, 3, steps=steps, tolerance=1e-12)
    assert found.steps == steps and not found.converged
    for estimate in (*found.largest, *found.smallest):
        distance = np.abs(eigenvalues - estimate.value).min()
        assert distance <= estimate.error < 3
    assert found.largest[0].error > 1e-7


def test_the_bound_is_the_norm_of_the_residual() -> None:
    """After one step from q = (1, 1, 1)/√3, diag(2, −1, −1) has α = 0 and β = |(2, −1, −1)|/√3 = √2."""
    start = np.random.default_rng([0, 0]).standard_normal(3)  # what lanczos draws
    v = start / np.linalg.norm(start) - 3**-0.5
    reflection = np.eye(3) - 2 * np.outer(v, v) / (v @ v)  # maps it to q
    a = reflection @ np.diag([2.0, -1.0, -1.0]) @ reflection
    found = lanczos(lambda u: a @ u, 3, 1, steps=1)
    assert found.largest[0].value == pytest.approx(0, abs=1e-12)
    assert found.largest[0].error == pytest.approx(2**0.5, rel=1e-12)


def test_float32_vectors_have_float64_dot_products() -> None:
    """Sums of 20,000 products in float32 would lose four digits, and with them the orthogonality of the basis."""
    n = 20_000
    diagonal = np.linspace(0, 1, n) ** 8
    diagonal[:3] = [9.0, -7.0, 5.0]
    found = lanczos(lambda u: diagonal * u, n, 2, dtype="float32", tolerance=1e-5)
    np.testing.assert_allclose(values_of(found.largest), [9, 5], atol=1e-5)
    np.testing.assert_allclose(values_of(found.smallest)[0], -7, atol=1e-5)
    assert 1e-9 < found.largest[0].error < 1e-3


def test_a_product_that_is_not_symmetric_shows_in_every_error() -> None:
    a = matrix_of(np.random.default_rng(3).normal(size=30))
    wrong = a + 0.1 * np.random.default_rng(4).normal(size=a.shape)
    right, found = (lanczos(lambda u, m=m: m @ u, 30, 1) for m in (a, wrong))
    assert right.largest[0].error < 5e-3 < 0.1 < found.largest[0].error


def test_bad_numbers_are_rejected() -> None:
    for top in (0, 4):
        with pytest.raises(ValueError, match=rf"top must be in 1 ... 3 \(the number of parameters\), got {top}"):
            lanczos(lambda u: u, 3, top)
    with pytest.raises(ValueError, match="steps must be >= top=3"):
        lanczos(lambda u: u, 3, 3, steps=2)


def test_a_basis_that_does_not_fit_into_memory_is_an_error_with_the_way_out() -> None:
    with pytest.raises(MemoryError, match=r"100 vectors of 10,000,000,000,000 parameters, 8,000,000.0 GB; allow fewer"):
        lanczos(lambda u: u, 10**13, 1)


def test_one_probe_gives_the_trace_of_a_diagonal_matrix_exactly() -> None:
    diagonal = np.random.default_rng(5).normal(size=12)
    estimates = hutchinson(lambda z: diagonal * z, [slice(0, 5), slice(5, 12)], 3, seed=9)
    assert estimates.shape == (3, 2)
    np.testing.assert_allclose(estimates, [[diagonal[:5].sum(), diagonal[5:].sum()]] * 3, rtol=1e-13)


def test_traces_of_a_matrix_and_of_its_blocks_are_within_their_standard_errors() -> None:
    a = matrix_of(np.random.default_rng(6).normal(1, 2, 40))
    blocks = [slice(0, 11), slice(11, 40)]
    estimates = hutchinson(lambda z: a @ z, blocks, 2000, seed=7)
    off = a - np.diag(np.diag(a))
    for samples, block, variance in [
        *((estimates[:, i], a[b, b], 2 * (off[b, b] ** 2).sum() + _across(off, b)) for i, b in enumerate(blocks)),
        (estimates.sum(axis=1), a, 2 * (off**2).sum()),
    ]:
        estimate = mean_and_error(samples)
        assert abs(estimate.value - np.trace(block)) < 4 * estimate.error
        assert estimate.error == pytest.approx((variance / 2000) ** 0.5, rel=0.15)  # of random signs, in closed form


def _across(off: np.ndarray, block: slice) -> float:
    """The squares of a block's entries with the other blocks."""
    return float((off[block] ** 2).sum() - (off[block, block] ** 2).sum())


# Networks.


class Case(NamedTuple):
    """A model, its batches, and its full matrices by autograd, in the order of `names`."""

    model: Model
    batches: list[Batch]
    names: list[str]
    gradient: np.ndarray  # (n,)
    matrices: dict[str, np.ndarray]  # (n, n) by kind


def matrices(
    logits: Logits, model: Model, names: list[str], batches: list[Batch]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Gradient, Hessian and Gauss–Newton matrix of the mean loss over all targets, by double backward in float64."""
    fixed = {k: torch.tensor(np.asarray(v), dtype=torch.float64) for k, v in model.params.items()}
    sizes = [fixed[name].numel() for name in names]
    start = torch.cat([fixed[name].flatten() for name in names])

    def wanted_logits(flat: torch.Tensor) -> torch.Tensor:  # (targets, V)
        parts = flat.split(sizes)
        moved = {name: part.view(fixed[name].shape) for name, part in zip(names, parts, strict=True)}
        rows = [logits({**fixed, **moved}, torch.tensor(b.tokens))[torch.tensor(b.targets) != -100] for b in batches]
        return torch.cat(rows)

    labels = torch.cat([torch.tensor(b.targets[b.targets != -100]) for b in batches])

    def loss(flat: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(wanted_logits(flat), labels)

    with sdpa_kernel(SDPBackend.MATH):
        gradient = torch.autograd.functional.jacobian(loss, start)
        hessian = torch.autograd.functional.hessian(loss, start, vectorize=True)
        jacobian = torch.autograd.functional.jacobian(wanted_logits, start, vectorize=True)  # (targets, V, n)
        p = wanted_logits(start).softmax(-1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]  # of the loss in its logits, (targets, V, V)
    gauss_newton = torch.einsum("tvn,tvw,twm->nm", jacobian, curvature, jacobian) / len(labels)
    return gradient.numpy(), {"hessian": hessian.numpy(), "gauss-newton": gauss_newton.numpy()}


def two_batches(vocab_size: int, seed: int) -> list[Batch]:
    """Two batches with different numbers of rows, tokens and targets; some targets are −100."""
    rng = np.random.default_rng(seed)
    out = []
    for shape in ((2, 5), (1, 3)):
        tokens, targets = rng.integers(0, vocab_size, (2, *shape))
        targets[rng.random(shape) < 0.3] = -100
        targets[0, 0] = 1
        out.append(Batch(tokens, targets))
    return out


def with_lora(params: dict[str, torch.Tensor], model: Model) -> dict[str, torch.Tensor]:
    """GPT-2's weights (in, out) plus scale · (B A)ᵗ of the active adapter."""
    merged = dict(params)
    adapter = model.adapters["default"]
    for name, layer in adapter.layers.items():
        low = params[f"{name}.lora_B.default.weight"] @ params[f"{name}.lora_A.default.weight"]
        merged[f"{name}.weight"] = params[f"{name}.weight"] + layer.alpha / layer.r * low.T
    return merged


@lru_cache
def gpt2(tied: bool, lora: bool) -> Case:
    config = onfoot.GPT2Config(5, 5, 4, 2, 2, n_inner=3, tie_word_embeddings=tied)
    model = Model(config, scrambled(onfoot.create(config).params, 3), "float64", "numpy")
    if lora:
        model.add_lora(r=2, alpha=3, targets=["c_attn", "mlp.c_proj"], seed=1)
        rng = np.random.default_rng(8)
        for name in model.trainable:
            model.params[name] = rng.normal(0, 0.4, model.params[name].shape)
    names = [name for name in model.params if name in model.trainable]
    batches = two_batches(5, 4)

    def logits(params: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        return gpt2_logits(with_lora(params, model) if lora else params, config, tokens)

    return Case(model, batches, names, *matrices(logits, model, names, batches))


@lru_cache
def llama(folder: Path) -> Case:
    config = onfoot.LlamaConfig(
        vocab_size=5, hidden_size=4, intermediate_size=5, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8, tie_word_embeddings=False,
    )  # fmt: skip
    model = scrambled_llama(config, 5, engine="numpy")
    names, batches = list(model.params), two_batches(5, 6)
    with in_float64():
        theirs = in_transformers(model, folder)

        def logits(params: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(theirs, params, (tokens,)).logits

        return Case(model, batches, names, *matrices(logits, model, names, batches))


CASES = ["gpt2", "untied gpt2", "lora", "llama"]
FAST = [("lora", "hessian"), ("lora", "gauss-newton"), ("llama", "hessian"), ("gpt2", "gauss-newton")]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    makers = {
        "gpt2": partial(gpt2, True, False),
        "untied gpt2": partial(gpt2, False, False),
        "lora": partial(gpt2, True, True),
        "llama": partial(llama, tmp_path_factory.getbasetemp()),
    }
    return makers[request.param]()


@pytest.mark.parametrize("kind", ["hessian", "gauss-newton"])
def test_products_over_batches_are_those_of_the_full_matrix(case: Case, kind: str) -> None:
    operator = Operator(case.model, case.batches, kind)
    assert operator.names == case.names
    vectors = np.random.default_rng(1).normal(size=(8, operator.n))
    assert_close(np.stack([operator(u) for u in vectors]), vectors @ case.matrices[kind], 1e-9, kind)


IN_FULL = [  # a model with every kind of parameter per matrix in each run, the others in the slow ones
    pytest.param(case, kind, marks=[] if (case, kind) in FAST else pytest.mark.slow)
    for case in CASES
    for kind in ("hessian", "gauss-newton")
]


@pytest.mark.parametrize(("case", "kind"), IN_FULL, indirect=["case"])
def test_eigenvalues_trace_and_gradient_equal_those_of_the_full_matrix(case: Case, kind: str) -> None:
    full = case.matrices[kind]
    eigenvalues = np.linalg.eigvalsh(full)
    found = measure(
        case.model, case.batches, kind, top=4, probes=60, per_layer=False, steps=300, tolerance=1e-10, seed=2
    )
    largest = abs(eigenvalues).max()
    assert found.spectrum.converged
    np.testing.assert_allclose(values_of(found.spectrum.largest), eigenvalues[::-1][:4], rtol=1e-7, atol=1e-9 * largest)
    negative = eigenvalues[:4] if kind == "hessian" else []
    np.testing.assert_allclose(values_of(found.spectrum.smallest), negative, rtol=1e-7, atol=1e-9 * largest)
    assert max(e.error for e in found.spectrum.largest) < 1e-8 * largest
    assert found.trace is not None
    assert abs(found.trace.value - np.trace(full)) < 4 * found.trace.error
    g = case.gradient
    assert found.along_gradient == pytest.approx(g @ full @ g / (g @ g), rel=1e-9)
    assert found.gradient_norm == pytest.approx(np.linalg.norm(g), rel=1e-9)
    assert found.max_lr == pytest.approx(2 / eigenvalues[-1], rel=1e-7)
    assert found.n_params == len(full) and found.n_targets == sum((b.targets != -100).sum() for b in case.batches)


@pytest.mark.parametrize(("case", "kind"), IN_FULL, indirect=["case"])
def test_every_layer_is_a_diagonal_block_of_the_full_matrix(case: Case, kind: str) -> None:
    full = case.matrices[kind]
    found = measure(case.model, case.batches, kind, top=1, probes=100, steps=300, tolerance=1e-10, seed=3)
    slices, layers = Operator(case.model, case.batches, kind).slices, layers_of(case.model, case.names)
    assert [layer.name for layer in found.layers] == list(layers)
    assert sum(layer.n_params for layer in found.layers) == len(full)
    for layer in found.layers:
        of_layer = np.concatenate([np.arange(len(full))[slices[name]] for name in layers[layer.name]])
        block = full[np.ix_(of_layer, of_layer)]
        expected = np.linalg.eigvalsh(block)[-1]
        assert layer.n_params == len(block) and layer.trace is not None
        assert layer.largest.value == pytest.approx(expected, rel=1e-7, abs=1e-9 * abs(full).max())
        assert abs(layer.trace.value - np.trace(block)) <= 4 * layer.trace.error + 1e-12
    assert found.trace is not None
    assert sum(layer.trace.value for layer in found.layers if layer.trace) == pytest.approx(
        found.trace.value, rel=1e-12
    )


def test_gauss_newton_has_no_negative_eigenvalue_and_the_hessian_has(case: Case) -> None:
    smallest = {}
    for kind in ("hessian", "gauss-newton"):
        operator = Operator(case.model, case.batches, kind)
        smallest[kind] = lanczos(operator, operator.n, 2, steps=400, tolerance=1e-11).smallest[0].value
    assert smallest["gauss-newton"] > -1e-9
    assert smallest["hessian"] < -1e-2


def test_layers_are_blocks_and_modules(tmp_path_factory: pytest.TempPathFactory) -> None:
    names = [list(layers_of(c.model, c.names)) for c in (gpt2(True, False), gpt2(False, False), gpt2(True, True))]
    assert names == [
        ["wte", "wpe", "block 0", "block 1", "ln_f"],
        ["wte", "wpe", "block 0", "block 1", "ln_f", "lm_head"],
        ["block 0", "block 1"],
    ]
    of_llama = llama(tmp_path_factory.getbasetemp())
    assert list(layers_of(of_llama.model, of_llama.names)) == ["embed_tokens", "block 0", "block 1", "norm", "lm_head"]


def test_a_lora_layer_of_the_head_has_its_own_name() -> None:
    model = onfoot.create(onfoot.GPT2Config(5, 6, 4, 1, 2), dtype="float64")
    model.add_lora(r=2, alpha=2, targets=["c_attn.q", "lm_head"])
    assert list(layers_of(model, model.params)) == ["wte", "wpe", "block 0", "ln_f", "lm_head"]


@pytest.mark.parametrize("engine", ["numba", "torch"])
def test_other_engines_agree_in_float32(engine: str) -> None:
    case = gpt2(True, False)
    model = Model(case.model.config, dict(case.model.params), "float32", engine)
    found = measure(model, case.batches, top=2, probes=0, steps=60, tolerance=1e-4, seed=2)
    eigenvalues = np.linalg.eigvalsh(case.matrices["hessian"])
    np.testing.assert_allclose(values_of(found.spectrum.largest), eigenvalues[::-1][:2], rtol=1e-4)
    np.testing.assert_allclose(values_of(found.spectrum.smallest), eigenvalues[:2], rtol=1e-4)
    assert found.trace is None and all(layer.trace is None for layer in found.layers)


def test_packed_examples_do_not_see_each_other() -> None:
    """Two examples in one row of 5 tokens have the curvature of the same examples in two rows."""
    model = gpt2(True, False).model
    tokens, targets = np.array([[1, 3, 0, 2, 4]]), np.array([[3, 0, 1, 4, 2]])
    packed = [Batch(tokens, targets, np.array([[0, 0, 0, 1, 1]]))]
    apart = [Batch(tokens[:, :3], targets[:, :3]), Batch(tokens[:, 3:], targets[:, 3:])]
    a, b = (measure(model, batches, top=2, probes=3, per_layer=False) for batches in (packed, apart))
    np.testing.assert_allclose(values_of(a.spectrum.largest), values_of(b.spectrum.largest), rtol=1e-9)
    assert a.along_gradient == pytest.approx(b.along_gradient, rel=1e-9)
    unpacked = measure(model, [Batch(tokens, targets)], top=2, probes=3, per_layer=False)
    assert unpacked.along_gradient != pytest.approx(b.along_gradient, rel=1e-3)


def test_the_seed_decides_every_random_number() -> None:
    case = gpt2(True, False)
    runs = [measure(case.model, case.batches, top=1, probes=3, steps=4, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].trace != runs[2].trace and runs[0].spectrum != runs[2].spectrum


def test_every_product_is_reported() -> None:
    case, said = gpt2(True, False), []
    found = measure(case.model, case.batches, top=1, probes=3, steps=5, tolerance=1e-12, on_product=said.append)
    assert said[0] == "along the gradient"
    assert said.count("eigenvalues") == found.spectrum.steps == 5
    assert said.count("trace") == 3 and said.count("block 1") == 5


def test_a_gradient_of_zero_has_no_curvature_along_it() -> None:
    """A fresh adapter has B = 0; with A = 0 too, no gradient is left, and the Hessian is not 0 all the same."""
    model = onfoot.create(onfoot.GPT2Config(5, 6, 4, 1, 2), dtype="float64")
    model.add_lora(r=2, alpha=2, targets=["c_attn"])
    for name in model.trainable:
        model.params[name] = np.zeros(model.params[name].shape)
    found = measure(model, two_batches(5, 4), top=1, probes=2)
    assert found.along_gradient is None and found.gradient_norm == 0
    largest, smallest = found.spectrum.largest[0].value, found.spectrum.smallest[0].value
    assert largest > 0 and largest == pytest.approx(-smallest, rel=1e-6)  # of A and B only together: ± pairs


def test_no_positive_eigenvalue_means_no_largest_learning_rate() -> None:
    case = gpt2(True, False)
    found = measure(case.model, case.batches, top=1, probes=0, per_layer=False)
    assert found.max_lr is not None
    flat = found.spectrum.__class__([Estimate(0.0, 0.0)], [], 1, True)
    assert found.__class__(**{**found.__dict__, "spectrum": flat}).max_lr is None


def test_gradient_descent_is_stable_below_two_over_the_largest_eigenvalue() -> None:
    """On the quadratic with this Gauss–Newton matrix, from a random point, 200 steps at 0.98 and 1.02 of the limit."""
    case = gpt2(True, False)
    found = measure(case.model, case.batches, "gauss-newton", top=1, probes=0, per_layer=False, tolerance=1e-9)
    assert found.max_lr is not None
    x = np.random.default_rng(0).normal(size=found.n_params)
    sizes = []
    for factor in (0.98, 1.02):
        step = np.eye(len(x)) - factor * found.max_lr * case.matrices["gauss-newton"]
        sizes.append(np.linalg.norm(np.linalg.matrix_power(step, 400) @ x))
    assert sizes[0] <= np.linalg.norm(x) < 100 * np.linalg.norm(x) < sizes[1]


def test_measurements_that_cannot_be_made_are_rejected() -> None:
    case = gpt2(True, False)
    with pytest.raises(ValueError, match="probes must be 0, or >= 2 for a standard error, got 1"):
        measure(case.model, case.batches, probes=1)
    with pytest.raises(ValueError, match="unknown kind 'fisher'; choose from hessian, gauss-newton"):
        measure(case.model, case.batches, "fisher")
    with pytest.raises(ValueError, match="need at least 1 batch, got 0"):
        measure(case.model, [])
    with pytest.raises(ValueError, match="targets are -100"):
        measure(case.model, [Batch(np.ones((1, 3), int), np.full((1, 3), -100))])
    n = case.model.n_trainable
    with pytest.raises(ValueError, match=rf"top must be in 1 ... {n} "):
        measure(case.model, case.batches, top=n + 1, steps=n + 1)
    broken = Model(case.model.config, dict(case.model.params), "float64", "numpy")
    broken.params["transformer.ln_f.weight"] = np.full(4, np.inf)
    with pytest.raises(ValueError, match="not finite"), np.errstate(all="ignore"):
        measure(broken, case.batches)
