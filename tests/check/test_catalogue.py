"""The catalogue itself: every mistake changes a gradient, no two are equal, and all match the docs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from onfoot.check import CATALOGUE, LAYERS, gradients
from onfoot.check.candidate import Candidate, Evidence
from onfoot.check.equations import EQUATIONS
from onfoot.check.layer import Layer, Mistake
from onfoot.check.mistakes import has_effect, mistakes_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
FORMS = [(layer, {}) for layer in LAYERS] + [
    ("attention", {"causal": False}),
    ("head", {"rotary": True}),
    ("head", {"causal": False}),
    ("head_dropout", {"causal": False}),
    ("multi_head", {"causal": False}),
    ("attention_dropout", {"causal": False}),
    ("rope_attention", {"causal": False, "theta": 500.0}),
    ("grouped_query_attention", {"causal": False}),
    ("self_attention", {"causal": False, "n_head": 3}),
    ("self_attention_separate", {"causal": False, "n_head": 3}),
    ("cross_attention", {"n_head": 3}),
    ("post_norm_block", {"causal": False, "n_head": 3}),
    ("relu_block", {"causal": False}),
    ("dpo", {"beta": 0.5}),
    ("gelu", {"form": "erf"}),
    ("softmax_cross_entropy", {"reduction": "sum"}),
]


def results(layer: Layer, options: dict, mistake: Mistake | None, seed: int) -> list:
    """A mistake's gradients in every case; None if it raises."""
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
    "rope": ({}, lambda x, positions: _rope(x, positions)),
    "tied_embedding": ({}, lambda ids, weight: weight[ids] @ weight.T),
    "multi_head": ({}, lambda *a: _multi_head(*a)),
    "head": ({"rotary": True}, lambda *a: _head(*a, turn=lambda x: _rope(x, np.arange(x.shape[1])))),
    "head_dropout": ({}, lambda *a: _head(*a[:-1], keep=a[-1])),
}


def _head(a, w_q, b_q, w_k, b_k, w_v, b_v, turn=lambda x: x, keep=1.0):
    q, k = turn(a @ w_q + b_q), turn(a @ w_k + b_k)
    s = np.tril(np.exp(q @ np.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1])))
    return s / s.sum(-1, keepdims=True) * keep @ (a @ w_v + b_v)


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
    options, forward = {**layer.options, **FORWARD[name][0]}, FORWARD[name][1]
    case = layer.cases(np.random.default_rng(8), **options)[0]
    *inputs, _ = case.inputs
    floats = [i for i, x in enumerate(inputs) if x.dtype.kind == "f"][: len(layer.gradients)]
    report = gradients(forward, lambda *a: layer.reference(*a, **options), inputs, wrt=floats)
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
def test_a_mistake_changes_a_gradient_and_is_described(mistake: Mistake) -> None:
    layer = LAYERS[mistake.layer]
    assert has_effect(mistake, layer, layer.with_options(mistake.needs))
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


NO_GRADIENT = {
    "E8": "a shape that raises",
    "E9": "the forward pass of two layers, written out",
    "E10": "a statement about relations between tokens",
    "E13": "noise no larger than rounding",
    "E15": "a shape of the forward pass",
    "E18": "a statement about symmetry",
    "E31": "a count of parameters",
    "E33": "listings that do not run; made to run they are in test_listings.py",
}


def test_every_erratum_that_is_a_wrong_gradient_is_in_the_catalogue() -> None:
    known = {erratum for m in CATALOGUE for erratum in re.findall(r"E\d+", m.errata)}
    printed = re.findall(r"^\| \[(E\d+)\]", (DOCS / "errata.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(printed) > 40
    assert set(printed) - known == set(NO_GRADIENT)


FROM_REAL_PROJECTS = {
    ("layer_norm", "γ outside the means"),
    ("softmax_cross_entropy", "a mean loss whose gradient is not divided"),
    ("softmax_cross_entropy", "a mean loss whose gradient is divided by the batch size only"),
    ("adamw", "1 − β₁ in the second moment"),
    ("attention", "the mask multiplied into the scores"),
    ("attention", "the mask after softmax"),
    ("multi_head", "heads split without a transpose"),
    ("attention", "row sums broadcast along the wrong axis"),
    ("linear", "dx without the transpose of the weight"),
    ("attention", "dv without the transpose of ρ"),
    ("linear", "dbias summed over features"),
    ("layer_norm", "the means in dx over tokens"),
    ("tied_embedding", "only the gradient through the embedding"),
    ("tied_embedding", "only the gradient through the logits"),
    ("lora", "the frozen path missing from dx"),
    ("lora", "α in place of α/r"),
    ("linear", "update before propagation"),
    ("layer_norm", "unbiased variance"),
    ("layer_norm", "eps outside the root"),
    ("embedding", "repeated ids lost"),
    ("gelu", "tanh-GELU with erf's derivative"),
    ("attention", "the mean in place of the weighted sum"),
}


def test_what_real_projects_got_wrong_is_in_the_catalogue() -> None:
    assert {(m.layer, m.name) for m in CATALOGUE} >= FROM_REAL_PROJECTS
