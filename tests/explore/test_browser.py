"""The page in a browser: its numbers are the library's, and every step is reachable by keyboard.

Each test runs on a page that must leave the console empty and send requests to its own server only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from waiting import SHOWN, until

import onfoot
from onfoot.attribution import attribute
from onfoot.explore.study import Study
from onfoot.models.model import Model


def number(text: str) -> float:
    """A number as the page writes it."""
    return float(text.replace("−", "-").replace("∞", "inf"))


def go(page: Any, step: str, r: int = 0, c: int = 0) -> None:
    """Opens a step with a cell selected, by URL hash, and waits for its numbers."""
    page.evaluate("address => { location.hash = address; }", f"view=map&step={step}&cell={r},{c}")
    until(page, "document.querySelector('.row[aria-selected=true]').dataset.step === x", step)
    page.wait_for_selector(f'.detail > .pair .explanation[data-r="{r}"][data-c="{c}"]')
    until(page, SHOWN)


def answer(page: Any, tensor: str) -> Any:
    return page.locator(f'.figure[data-tensor="{tensor}"] .answer').first


def value_of(page: Any, tensor: str) -> float:
    """The number that the page shows for the selected cell of an array."""
    return number(answer(page, tensor).locator("output.value").inner_text())


def terms_of(page: Any, tensor: str) -> list[float]:
    return [
        float(x) for x in answer(page, tensor).locator(".term").evaluate_all("all => all.map(x => x.dataset.value)")
    ]


def open_view(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()
    page.wait_for_selector("main[aria-busy=false]")


# --- numbers ---

CELLS = [
    ("embedding", "a_1", "Δ_1", ("a_1", 0), ("Δ_1", 0), 3, 7),
    ("0.5", "0.a_5", "0.Δ_5", ("a_5", 0), ("Δ_5", 0), 11, 21),
    ("0.8", "0.a_8", "0.Δ_8", ("a_8", 0), ("Δ_8", 0), 20, 127),
    ("1.2", "1.a_2", "1.Δ_2", ("a_2", 1), ("Δ_2", 1), 0, 31),
    ("1.10", "1.a_10", "1.Δ_10", ("a_10", 1), ("Δ_10", 1), 9, 0),
    ("12", "a_12", "Δ_12", "a_12", "Δ_12", 4, 17),
]


def test_the_numbers_on_the_page_are_the_librarys(page: Any, model: Model, tokens: np.ndarray) -> None:
    trace = model.trace(tokens)
    assert page.locator("#loss").get_attribute("data-value") == str(trace.loss)
    for step, forward, backward, key_a, key_d, r, c in CELLS:
        go(page, step, r, c)
        assert value_of(page, forward) == float(trace[key_a][0][r, c]), step  # to the last digit
        assert value_of(page, backward) == float(trace[key_d][0][r, c]), step


def test_inside_a_head_the_numbers_are_the_librarys(page: Any, model: Model, tokens: np.ndarray) -> None:
    block = model.trace(tokens).blocks[1]
    go(page, "1.2.causal", 14, 9)
    q, k = block.q[0, 2], block.k[0, 2]
    assert value_of(page, "1.2.ρ_causal") == pytest.approx(float(q[14] @ k[9]) / math.sqrt(8), rel=1e-13)
    assert value_of(page, "1.2.Δ_causal") == float(block.delta_causal[0, 2, 14, 9])
    go(page, "1.2.rho", 14, 9)
    assert value_of(page, "1.2.ρ") == float(block.rho[0, 2, 14, 9])
    go(page, "1.2.causal", 3, 9)
    assert value_of(page, "1.2.ρ_causal") == -math.inf and value_of(page, "1.2.Δ_causal") == 0
    assert "Masked: this token comes later" in answer(page, "1.2.ρ_causal").inner_text()


def test_parameter_gradients_are_the_librarys(page: Any, model: Model, tokens: np.ndarray) -> None:
    _, grads = model.loss_and_grads(tokens)
    go(page, "0.4")
    grid = page.locator('.parameter .figure[data-tensor="0.∂w_3"] [role=grid]')
    grid.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("PageDown")
    page.wait_for_selector('.figure[data-tensor="0.∂w_3"] .explanation[data-r="10"][data-c="5"]')
    assert value_of(page, "0.∂w_3") == float(grads["transformer.h.0.attn.c_proj.weight"][10, 5])
    assert value_of(page, "0.w_3") == float(model.params["transformer.h.0.attn.c_proj.weight"][10, 5])


# --- keyboard and selection ---


def test_every_step_can_be_walked_by_keyboard(page: Any, study: Study) -> None:
    page.locator(".row[data-step=input]").click()
    visited = []
    for _ in range(len(study.steps) + 1):
        step = page.evaluate("document.activeElement.dataset.step")
        if visited and step == visited[-1]:
            break
        visited.append(step)
        name = next(s.name for s in study.steps if s.id == step)
        until(page, f"document.getElementById('step-name').textContent.startsWith(x) && {SHOWN}", name)
        assert page.locator(".row[aria-selected=true]").count() == 1
        assert page.locator('.sum[data-right="false"]').count() == 0
        page.keyboard.press("ArrowDown")
    assert visited == [step.id for step in study.steps if step.head in (None, 0)]
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.dataset.step") == "input"


def test_heads_are_chosen_and_left_by_keyboard(page: Any) -> None:
    page.locator('.row[data-step="0.3"]').click()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.step") == "0.0.a_2"
    page.keyboard.press("3")
    assert page.evaluate("document.activeElement.dataset.step") == "0.2.a_2"
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.step") == "0.3"
    page.keyboard.press("ArrowLeft")
    assert page.locator('.row[data-step="0.2.a_2"]').is_hidden()


def test_enter_goes_from_the_map_to_the_numbers_also_when_they_are_not_there_yet(page: Any, study: Study) -> None:
    page.locator('.row[data-step="0.6"]').click()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    until(page, "document.activeElement.closest('.figure')?.dataset.tensor === '0.a_7'")
    page.keyboard.press("Control+Home")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector('.figure[data-tensor="0.Δ_7"] .explanation[data-r="0"][data-c="1"]')
    assert value_of(page, "0.Δ_7") == float(study.tensors.value("0.Δ_7")[0, 1])


def test_one_cell_is_selected_in_activation_and_error_signal(page: Any, study: Study) -> None:
    go(page, "0.5", 2, 3)
    page.locator('.figure[data-tensor="0.a_5"] [role=grid]').focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    for tensor in ("0.a_5", "0.Δ_5"):
        page.wait_for_selector(f'.figure[data-tensor="{tensor}"] .explanation[data-r="3"][data-c="5"]')
    for tensor in ("0.a_5", "0.Δ_5"):
        right = float(study.tensors.value(tensor)[3, 5])
        assert value_of(page, tensor) == right
        read_aloud = page.locator(f'.figure[data-tensor="{tensor}"] [role=gridcell]').first.inner_text()
        assert read_aloud.startswith("3 “␣”, 5: ") and number(read_aloud.split(": ")[1]) == right
    page.keyboard.press("Control+End")
    page.wait_for_selector('.detail > .pair .explanation[data-r="21"][data-c="31"]')


def test_the_exact_number_is_under_the_pointer(page: Any, study: Study) -> None:
    go(page, "0.5", 0, 0)
    canvas = page.locator('.figure[data-tensor="0.Δ_5"] canvas')
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.4)
    place, shown = page.locator(".tooltip span").inner_text(), page.locator(".tooltip b").inner_text()
    r, c = int(place.split("[")[1].split()[0]), int(place.split(", ")[1].rstrip("]"))
    assert number(shown) == float(study.tensors.value("0.Δ_5")[r, c]) and r > 3 and c > 10


def test_a_number_can_be_followed_to_where_it_comes_from(page: Any, study: Study) -> None:
    go(page, "embedding", 11, 21)
    value = terms_of(page, "Δ_1")[0]
    answer(page, "Δ_1").locator("button.factor").first.click()
    until(page, "document.getElementById('step-name').textContent.startsWith('Skip 1')")
    page.wait_for_selector('.figure[data-tensor="0.Δ_5"] .explanation[data-r="11"][data-c="21"]')
    assert value_of(page, "0.Δ_5") == value == float(study.tensors.value("0.Δ_5")[11, 21])
    assert page.evaluate("document.activeElement.id") == "step-name"


# --- terms ---


def test_a_layer_norms_signal_opens_into_skip_and_three_terms(page: Any, model: Model, tokens: np.ndarray) -> None:
    trace, r, c = model.trace(tokens), 11, 21
    block, w = trace.blocks[0], model.params["transformer.h.0.ln_2.weight"]
    a, x = block.a[5][0, r], block.delta[6][0, r] * w
    sigma = np.sqrt(a.var() + 1e-5)
    normed = (a - a.mean()) / sigma
    right = [block.delta[10][0, r, c], x[c] / sigma, -x.mean() / sigma, -normed[c] * (normed * x).mean() / sigma]
    go(page, "0.5", r, c)
    assert terms_of(page, "0.Δ_5") == pytest.approx([float(v) for v in right], rel=1e-10)
    total = answer(page, "0.Δ_5").locator(".sum")
    assert total.get_attribute("data-right") == "true"
    assert float(total.get_attribute("data-sum")) == pytest.approx(float(block.delta[5][0, r, c]), rel=1e-12)


def test_softmaxs_gradient_opens_into_its_two_terms(page: Any, model: Model, tokens: np.ndarray) -> None:
    block, h, r, c = model.trace(tokens).blocks[0], 1, 14, 12
    d3 = block.delta[3][0][:, 8:16]
    rho, drho = block.rho[0, h], d3 @ block.v[0, h].T
    go(page, f"0.{h}.causal", r, c)
    right = [rho[r, c] * drho[r, c], -rho[r, c] * (rho[r] * drho[r]).sum()]
    assert terms_of(page, f"0.{h}.Δ_causal") == pytest.approx([float(v) for v in right], rel=1e-10)


def test_the_fork_before_attention_has_three_branches_per_head(page: Any, study: Study) -> None:
    go(page, "1.2", 5, 6)
    terms = terms_of(page, "1.Δ_2")
    names = [f"1.{h}.Δ_{x}" for h in range(4) for x in "vqk"]
    assert terms == pytest.approx([float(study.tensors.value(name)[5, 6]) for name in names], rel=1e-12)
    assert answer(page, "1.Δ_2").locator(".sum").get_attribute("data-right") == "true"


# --- the other views ---


def test_badges_show_the_error_against_a_finite_difference(page: Any, study: Study) -> None:
    """Autograd's badges come after all finite differences; the exported page has them from the start."""
    for step in ("0.3", "1.6", "11"):
        page.locator(f'.row[data-step="{step}"]').click()
        until(page, "document.querySelector('.badge') && !document.querySelector('.badge.waiting')")
        shown = page.locator(".badge").evaluate_all("all => all.map(x => [x.dataset.proof, x.dataset.error])")
        right = study.differences(step)
        assert {id: float(error) for id, error in shown} == {id: one["error"] for id, one in right.items()}
        assert page.locator(".badge.proven").count() == len(shown) >= 1
        assert page.locator(f'.row[data-step="{step}"] .proven-mark').inner_text() == "✓"


def test_attention_points_out_row_sums_and_causal_zeros(page: Any, study: Study) -> None:
    open_view(page, "Attention")
    until(page, "document.querySelectorAll('[data-fact=first-row]').length === 8")
    facts = page.locator("[data-fact]").evaluate_all("all => all.map(x => [x.dataset.fact, x.dataset.value])")
    for fact, value in facts:
        if fact in ("rho-sum", "delta-sum"):
            assert float(value) < 1e-14
        else:
            assert value == {"causal-zeros": "231", "first-row": "true"}[fact]
    assert len(facts) == 32
    page.get_by_role("button", name="open in the map").nth(5).click()
    until(page, "document.getElementById('step-name').textContent.includes('block 2, head 2')")


def test_the_training_view_shows_the_librarys_numbers(page: Any, model: Model, tokens: np.ndarray) -> None:
    open_view(page, "Training")
    trace = model.trace(tokens)
    forks = page.locator(".forks tbody tr").evaluate_all(
        "all => all.map(x => [x.dataset.block, x.dataset.at, x.dataset.skip])"
    )
    for block, at, skip in forks:
        d = trace.blocks[int(block)].delta
        part, whole = (d[10], d[5]) if at == "Δ_5" else (d[5], d[1])
        assert float(skip) == pytest.approx(float((part * whole).sum() / (whole**2).sum()), rel=1e-12)
    assert len(forks) == 4
    norms = page.locator("[data-parameter]").evaluate_all("all => all.map(x => [x.dataset.parameter, x.dataset.norm])")
    assert {name: float(norm) for name, norm in norms} == pytest.approx(
        {name: float(np.linalg.norm(grad)) for name, grad in trace.grads.items()}, rel=1e-12
    )
    shown = [float(x) for x in page.locator("[data-attribution]").evaluate_all("all => all.map(x => x.dataset.value)")]
    assert shown == attribute(model, tokens[0], n_swaps=0).contributions.tolist()


def test_an_optimizer_step_is_adamws(page: Any, model: Model, tokens: np.ndarray) -> None:
    open_view(page, "One step")
    page.locator("#lr").fill("0.002")
    page.locator("#first-step").click()
    until(page, "document.querySelector('[data-figure=loss-after]').previousSibling.textContent.includes('step 1')")
    page.wait_for_selector("main[aria-busy=false]")
    own = Model(model.config, model.params, "float64", "numpy")
    optimizer = onfoot.AdamW(own, lr=0.002)
    name = "transformer.h.0.attn.c_proj.weight"
    before = float(own.params[name][0, 0])
    losses = [own.train_step(optimizer, tokens), own.loss(tokens)]

    def figure(key: str) -> float:
        return float(page.locator(f"[data-figure={key}]").get_attribute("data-value"))

    until(page, "document.querySelector('[data-figure=loss-after]').dataset.value === x", str(losses[1]))
    assert [figure("loss-before"), figure("loss-after")] == losses
    page.wait_for_selector(".arithmetic .sum")
    old, new = (number(page.locator(".arithmetic output").nth(i).inner_text()) for i in (0, 1))
    assert (old, new) == (before, float(own.params[name][0, 0]))
    update = page.locator(".update .figure output.value").last
    assert number(update.inner_text()) == new - old
    assert page.locator(".arithmetic .sum").get_attribute("data-right") == "true"
    page.locator("#next-step").click()
    own.train_step(optimizer, tokens)
    until(page, "document.querySelector('[data-figure=loss-after]').dataset.value === x", str(own.loss(tokens)))
    page.wait_for_selector(".arithmetic .sum")
    assert page.locator(".arithmetic .sum").get_attribute("data-right") == "true"
    at_start = page.locator('.lora-table td[data-cell="0 ∂d"]').evaluate_all("all => all.map(x => x.dataset.value)")
    assert at_start == ["0"] * 8
    later = page.locator('.lora-table td[data-cell="1 ∂d"]').evaluate_all("all => all.map(x => +x.dataset.value)")
    assert min(later) > 0


def test_mistake_mode_shows_what_goes_wrong_and_how_it_is_found(page: Any, study: Study) -> None:
    open_view(page, "Mistakes")
    key = "layer_norm: γ outside the means"
    page.wait_for_selector(f'.mistake-result[data-key="{key}"][aria-busy=false]')
    right = study.mistake(key)
    wrong = [row for row in right["rows"] if row["wrong"]]
    assert page.locator(".verdict [data-wrong]").get_attribute("data-wrong") == str(len(wrong))
    assert page.locator(".errors tr.wrong").count() == len(wrong) > 40
    assert page.locator(".errors tr.first").get_attribute("data-gradient") == "1.Δ_10"
    shown = page.locator('.errors tr[data-gradient="transformer.wte.weight"]').get_attribute("data-error")
    assert float(shown) == pytest.approx(wrong[-2]["error"], rel=1e-9)
    assert page.locator("[data-finding]").get_attribute("data-finding") == "γ outside the means"
    page.locator(".mistake[aria-selected=true]").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_selector('.mistake-result[data-key="layer_norm: γ missing from dx"][aria-busy=false]')
    assert page.locator("[data-finding]").get_attribute("data-finding") == "γ missing from dx"
    page.locator(".diagnosis summary").click()
    assert "γ missing from dx" in page.locator(".diagnosis pre").inner_text()


# --- texts ---


def test_another_text_is_run(page: Any, model: Model) -> None:
    page.locator("#text").fill("A name is an object")
    page.keyboard.press("Enter")
    right = model.loss(np.array([model.tokenizer.encode("a name is an object")]))
    until(page, "document.getElementById('loss').dataset.value === x", str(right))
    page.wait_for_selector("main[aria-busy=false]")
    assert page.locator(".chip").count() == 19
    page.locator("#kind").select_option("ids")
    page.locator("#text").fill("3 1 4 1 5")
    page.get_by_role("button", name="Run").click()
    right = model.loss(np.array([[3, 1, 4, 1, 5]]))
    until(page, "document.getElementById('loss').dataset.value === x", str(right))


BAD_TEXTS = [
    ("text", "", "the text is empty"),
    ("text", "x", "at least two tokens are needed, an input and its target, got 1"),
    ("text", "the" * 40, "120 tokens exceed the limit of 64"),
    ("text", "naïve", "the character 'ï' is not in"),
    ("ids", "1 2 99", "token id must be between 0 and 36, got 99"),
    ("ids", "one", "'one' is not an integer"),
    ("text", "<img src=x onerror=alert(1)>", "the character '<' is not in"),
]


def test_a_bad_text_gives_a_message_on_the_page(page: Any) -> None:
    loss = page.locator("#loss").get_attribute("data-value")
    for kind, text, message in BAD_TEXTS:
        page.locator("#kind").select_option(kind)
        page.locator("#text").fill(text)
        page.get_by_role("button", name="Run").click()
        until(page, "document.getElementById('message').textContent.includes(x)", message)
        assert page.locator("#message").is_visible()
        assert page.locator("#message").get_attribute("role") == "alert"
        assert page.locator("#message img").count() == 0
        assert page.locator("#loss").get_attribute("data-value") == loss  # the previous run stays
    page.locator("#kind").select_option("text")
    page.locator("#text").fill("the value of the value")
    page.keyboard.press("Enter")
    page.wait_for_selector("#message", state="hidden")


def test_a_text_that_is_too_long_to_send_gives_a_message_on_the_page(page: Any) -> None:
    page.locator("#text").fill("a" * 70_000)
    page.keyboard.press("Enter")
    page.wait_for_selector("#message:not([hidden])")
    assert page.locator("#message").inner_text() == "the text has 70,000 characters, the limit is 4,000; shorten it"
    page.locator("#text").fill("a" * 4001)
    page.keyboard.press("Enter")
    until(page, "document.getElementById('message').textContent.startsWith('the text has 4,001 characters')")


# --- loading ---


def test_the_first_numbers_need_no_request_to_the_server(watched: Any, port: int) -> None:
    """The page loads quickly because it fetches little and needs no second request."""
    page, held = watched.page, []
    page.route("**/api/**", lambda route: held.append(route))  # no request is answered
    watched.open(f"http://127.0.0.1:{port}/")
    page.wait_for_selector(".detail .sum[data-right=true]")
    assert page.locator(".detail > .pair output.value").count() == 1  # the loss
    files = {url.removeprefix(f"http://127.0.0.1:{port}/") for url in watched.asked if "/api/" not in url}
    assert files <= {"", "app.js", "style.css", "icon.svg", "onfoot-math.woff2"}
    sizes = page.evaluate("performance.getEntries().map(x => x.decodedBodySize || 0)")
    assert 50_000 < sum(sizes) < 1_500_000  # bytes
