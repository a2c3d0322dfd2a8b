"""Reports say in one line what was found, and in a notebook show a table; text of a user stays text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import onfoot
from onfoot.attribution import attribute
from onfoot.blame.report import Report
from onfoot.blame.scores import Scores
from onfoot.check.engines import InstallationReport, OpResult
from onfoot.curvature import Curvature, Estimate, LayerCurvature, Spectrum
from onfoot.evaluation import Evaluation
from onfoot.models.compare_pairs import Compared, Comparison
from onfoot.terminal import html_table

CONFIG = onfoot.GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=16, vocab_size=11)


def gelu_backward(x: Any, dout: Any) -> Any:
    """Wrong: the derivative is missing."""
    return dout


def reports() -> dict[str, Any]:
    scores = Scores.zeros(3)
    scores.totals[:] = [0.5, -0.25, 0.0]
    largest = Estimate(4.0, 0.01)
    spectrum = Spectrum([largest], [Estimate(-1.0, 0.01)], 5, True)
    layer = LayerCurvature("h.0.<mlp>", 10, Estimate(3.0, 0.5), Estimate(2.0, 0.1))
    wrong = Compared("linear", "backward", "dx", "h.0", 0.5)
    return {
        "LayerReport": onfoot.check.gelu(gelu_backward, dtypes=("float64",)),
        "GradientReport": onfoot.check.gradients(lambda x: x * x, lambda x, dout: dout * x, [np.arange(3.0) + 1]),
        "InstallationReport": InstallationReport([OpResult("numpy", "linear", False, 0.5)], {"torch": "none"}, 1.0),
        "Attribution": attribute(onfoot.create(CONFIG, dtype="float64"), np.array([1, 2, 3, 4]), n_swaps=2),
        "Evaluation": Evaluation(2.0, 100, 300, 16, 8, "0" * 64),
        "Curvature": Curvature("hessian", 10, 5, 1.5, 0.2, spectrum, None, None, [layer]),
        "Report": Report([], 1.25, scores),
        "Comparison": Comparison({"linear": True, "gelu": False}, [wrong]),
    }


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return reports()


SAYS = {
    "LayerReport": r"gelu.* wrong: ",
    "GradientReport": r"wrong: argument 0|wrong: x",
    "InstallationReport": r"ops 1, wrong linear on numpy, skipped torch",
    "Attribution": r"loss [\d.]+, tokens 4, best swap token \d to \d+, loss [-+][\d.e-]+",
    "Evaluation": r"loss 2 nats per token, perplexity 7.38906, bits per byte 0.9618, targets 100",
    "Curvature": r"kind hessian, loss 1.5, largest eigenvalue 4 ± 0.01, largest stable learning rate 0.5",
    "Report": r"loss 1.25 nats over 0 tokens, .* helped most example 0 \(\+0.5\), hurt most example 1 \(-0.25\)",
    "Comparison": r"pairs 1 of 2 yours, result h.0: dx of your linear_backward is wrong",
}


@pytest.mark.parametrize("name", SAYS)
def test_the_repr_is_one_line_that_says_what_was_found(made: dict[str, Any], name: str) -> None:
    text = repr(made[name])
    assert text.startswith(f"{name}(") and "\n" not in text and len(text) < 300
    assert re.search(SAYS[name], text), text


@pytest.mark.parametrize("name", SAYS)
def test_in_a_notebook_it_is_a_table_or_the_readable_text(made: dict[str, Any], name: str) -> None:
    html = made[name]._repr_html_()
    assert html.startswith(("<table>", "<pre>")) and html.endswith(("</table>", "</pre>"))
    assert html.count("<table>") == html.count("</table>") and "<mlp>" not in html


def test_the_tables_have_every_token_swap_example_and_layer(made: dict[str, Any]) -> None:
    rows = made["Attribution"].tables()
    assert len(rows[0]) == 1 + 4 and len(rows[1]) == 1 + 2
    shares = [float(row[2]) for row in rows[0][1:]]
    np.testing.assert_allclose(shares, made["Attribution"].contributions, rtol=1e-3)
    assert made["Report"].tables() == [
        [["helped: example", "score"], ["0", "+0.5"]],
        [["hurt: example", "score"], ["1", "-0.25"]],
    ]
    assert made["Curvature"].tables()[0][1] == ["h.0.<mlp>", "10", "2 ± 0.1", "3 ± 0.5"]


def test_markup_in_a_cell_stays_text() -> None:
    html = html_table([["<b>", "&"], ["1", "2"]], header=True)
    assert html == "<table><tr><th>&lt;b&gt;</th><th>&amp;</th></tr><tr><td>1</td><td>2</td></tr></table>"
