"""The catalogue itself: right where it should be, different everywhere else, and in step with the pages."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from onfoot.check import CATALOGUE, LAYERS, gradients
from onfoot.check.candidate import Candidate, Evidence
from onfoot.check.equations import EQUATIONS
from onfoot.check.layer import Layer, Mistake
from onfoot.check.mistakes import mistakes_of, shows

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMS = [(layer, {}) for layer in LAYERS] + [
    ("attention", {"causal": False}),
    ("multi_head", {"causal": False}),
    ("gelu", {"form": "erf"}),
    ("softmax_cross_entropy", {"reduction": "sum"}),
]


def results(layer: Layer, options: dict, mistake: Mistake | None, seed: int) -> list:
    """A mistake's gradients in every case; None where it cannot be run."""
    cases = layer.cases(np.random.default_rng(seed), **options)
    evidence = Evidence(layer, options, cases, [], [], "float64")
    values = (0.01,) if mistake is not None and mistake.parameter else ()
    candidate = Candidate(() if mistake is None else (mistake,), values=values)
    return [evidence.run(candidate, i) for i in range(len(cases))]


def same(a: list, b: list) -> bool:
    def equal(x, y) -> bool:
        if x is None or y is None:
            return x is y
        return all(
            g.shape == h.shape and np.allclose(g, h, rtol=1e-9, atol=1e-12, equal_nan=True)
            for g, h in zip(x, y, strict=True)
        )

    return all(equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_the_steps_of_a_layer_are_its_exact_gradients(name: str, options: dict) -> None:
    layer = LAYERS[name]
    options = layer.with_options(options)
    for seed in range(3):
        for case, ran in zip(
            layer.cases(np.random.default_rng(seed), **options), results(layer, options, None, seed), strict=True
        ):
            for got, right in zip(ran, layer.reference(*case.inputs, **options), strict=True):
                assert got.shape == right.shape
                assert np.abs(got - right).max(initial=0) <= 1e-11 * max(1, np.abs(right).max(initial=0))


FORWARD = {
    "rope": lambda x, positions: _rope(x, positions),
    "tied_embedding": lambda ids, weight: weight[ids] @ weight.T,
    "multi_head": lambda *a: _multi_head(*a),
}


def _rope(x, positions):
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.outer(positions, 10000.0 ** (-np.arange(half) / half)))
    return np.concatenate([z.real, z.imag], axis=-1)


def _multi_head(query, key, value, w_q, w_k, w_v):
    out = []
    for h in range(2):
        part = slice(h * w_q.shape[1] // 2, (h + 1) * w_q.shape[1] // 2)
        q, k, v = query @ w_q[:, part], key @ w_k[:, part], value @ w_v[:, part]
        s = np.tril(np.exp(q @ np.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1])))
        out.append(s / s.sum(-1, keepdims=True) @ v)
    return np.concatenate(out, axis=-1)


@pytest.mark.parametrize("name", FORWARD)
def test_references_that_no_op_has_agree_with_differences(name: str) -> None:
    layer = LAYERS[name]
    case = layer.cases(np.random.default_rng(8), **layer.options)[0]
    *inputs, _ = case.inputs
    report = gradients(FORWARD[name], lambda *a: layer.reference(*a, **layer.options), inputs)
    assert report.passed, str(report)


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_no_two_mistakes_of_a_layer_are_the_same(name: str, options: dict) -> None:
    layer = LAYERS[name]
    options = layer.with_options(options)
    found = {m.name: results(layer, options, m, 2) for m in mistakes_of(layer, options)}
    names = list(found)
    twins = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if same(found[a], found[b])]
    assert twins == []


@pytest.mark.parametrize("mistake", CATALOGUE, ids=lambda m: f"{m.layer}-{m.name}")
def test_a_mistake_is_wrong_and_says_what_it_is(mistake: Mistake) -> None:
    layer = LAYERS[mistake.layer]
    assert shows(mistake, layer, layer.with_options(mistake.needs))
    for text in (mistake.name, mistake.explains, mistake.fix):
        assert text and text == text.strip()
    assert mistake.explains.endswith(".") and not mistake.fix.endswith(".")
    assert mistake.equation in EQUATIONS


def test_names_are_unique_within_a_layer() -> None:
    names = [(m.layer, m.name) for m in CATALOGUE]
    assert len(names) == len(set(names))


def test_every_equation_is_on_a_page_and_every_erratum_too() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "equations").glob("*.md"))
    errata = (DOCS / "errata.md").read_text(encoding="utf-8")
    for equation in EQUATIONS:
        assert f"**({equation})**" in pages, f"({equation}) is on no page"
    for mistake in CATALOGUE:
        for erratum in re.findall(r"E\d+", mistake.errata):
            assert f'<a id="{erratum.lower()}"></a>' in errata


def test_every_erratum_that_is_a_wrong_gradient_is_in_the_catalogue() -> None:
    known = {erratum for m in CATALOGUE for erratum in re.findall(r"E\d+", m.errata)}
    gradients = {1, 2, 3, 4, 6, 7, 14, 16, 19, 20, 21, 22, 23, 24, 26, 27, 28, 29, 30, 32, 34, 35, 37, 38, 39, 40, 41}
    assert known >= {f"E{n}" for n in gradients | {42, 43}}
