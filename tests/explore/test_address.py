"""The address says what is seen: Back and Forward return to it, and a link reopens it, in the exported page too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import numpy as np
from waiting import SHOWN, until

from onfoot.models.model import Model


def said(page: Any) -> dict[str, str]:
    """What the address says, once the last change is written."""
    until(page, "true")
    page.wait_for_timeout(260)
    return {name: values[0] for name, values in parse_qs(page.evaluate("location.hash.slice(1)")).items()}


def at_step(page: Any, step: str) -> None:
    until(page, "document.querySelector('.row[aria-selected=true]')?.dataset.step === x", step)
    until(page, SHOWN)


def reopened(watched: Any, address: str, **values: str) -> Any:
    """The page opened by a link, in a tab that knows nothing of the first."""
    watched.page.goto("about:blank")
    return watched.open(f"{address}#{urlencode(values)}")


def test_back_returns_from_a_followed_number_and_forward_goes_there_again(page: Any) -> None:
    page.locator('.row[data-step="embedding"]').click()
    at_step(page, "embedding")
    before = page.locator(".detail > .pair output.value").all_inner_texts()
    page.locator('.figure[data-tensor="Δ_1"] .answer button.factor').first.click()
    at_step(page, "0.5")
    page.locator('.row[data-step="0.7"]').click()
    at_step(page, "0.7")
    page.go_back()
    at_step(page, "0.5")
    page.go_back()
    at_step(page, "embedding")
    until(
        page, "[...document.querySelectorAll('.detail > .pair output.value')].map(y => y.innerText).join() === x",
        ",".join(before),
    )  # fmt: skip
    page.go_forward()
    at_step(page, "0.5")
    assert said(page)["step"] == "0.5"


def test_back_returns_from_a_number_of_a_parameter(page: Any) -> None:
    page.locator('.row[data-step="0.4"]').click()
    at_step(page, "0.4")
    page.locator('.figure[data-tensor="0.a_4"] .products button.factor').nth(1).click()  # a weight
    page.wait_for_selector('.parameter .figure[data-tensor="0.w_3"] .at')
    now = said(page)
    assert now["at"].startswith("0.w_3:")
    place = now["at"].rpartition(":")[2].replace(",", ", ")
    until(page, "document.querySelector('.figure[data-tensor=\"0.w_3\"] .answer .at').textContent === x", f"[{place}]")
    page.go_back()
    assert "at" not in said(page)
    at_step(page, "0.4")


def test_held_arrow_keys_leave_one_entry_and_views_one_each(page: Any) -> None:
    page.locator('.row[data-step="0.5"]').click()
    at_step(page, "0.5")
    length = page.evaluate("history.length")
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    page.locator(".figure [role=grid]").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert said(page)["step"] == "0.9"
    assert page.evaluate("history.length") == length
    for view in ("attention", "map"):
        page.locator(f"#tab-{view}").click()
        page.wait_for_selector("main[aria-busy=false]")
    page.locator("#tab-map").click()  # where one is already
    assert page.evaluate("history.length") == length + 2
    page.go_back()
    page.wait_for_selector(".view.attention")
    page.go_back()
    at_step(page, "0.9")
    page.go_back()
    at_step(page, "loss")


def test_back_scrolls_to_where_it_was(page: Any) -> None:
    page.locator('.row[data-step="1.8"]').click()
    at_step(page, "1.8")
    page.wait_for_timeout(300)
    page.evaluate("scrollTo(0, 300)")
    page.wait_for_timeout(300)
    where = page.evaluate("[scrollY, document.querySelector('.map').scrollTop]")
    assert where[0] == 300 and where[1] > 100
    page.locator("#tab-attention").click()
    page.wait_for_selector(".view.attention")
    page.go_back()
    at_step(page, "1.8")
    until(page, "Math.abs(scrollY - 300) < 2 && Math.abs(document.querySelector('.map').scrollTop - x) < 2", where[1])


def test_the_sentence_about_a_small_error_says_so_and_ids_are_apart(page: Any) -> None:
    def of_a_trained_model_without_a_tokenizer(route: Any) -> None:
        answer = route.fetch().json()
        answer["document"]["model"]["has_tokenizer"] = False
        for token in answer["document"]["tokens"]:
            token["probability"] = 0.9996
        route.fulfill(json=answer)

    page.route(re.compile(r"/api/study\?"), of_a_trained_model_without_a_tokenizer)
    page.locator("#text").fill("the v")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.chip').length === 5")
    words = page.locator("#error-line").inner_text()
    assert words.startswith("After “t h") and words.endswith(
        " 100.0 %, its largest error: it is followed back through the network."
    )


def test_the_page_opens_at_the_loss_of_the_token_that_went_wrong(page: Any, model: Model, tokens: np.ndarray) -> None:
    """Not of the first token, which has nothing before it. One sentence says so, and other steps keep the token."""
    at_step(page, "loss")
    logits = model.logits(tokens)[0]
    losses = np.log(np.exp(logits[:-1]).sum(-1)) - logits[np.arange(21), tokens[0, 1:]]
    worst = 1 + int(losses[1:].argmax())
    assert said(page) == {"view": "map", "step": "loss", "cell": f"0,{worst}"}
    assert page.locator("#prediction").get_attribute("data-token") == str(worst)
    shown = float(page.locator('.figure[data-tensor="ℓ"] output.value').get_attribute("data-value"))
    assert shown == losses.max()
    words = "After “the␣” the model gave “v” 0.7 %: this error is followed back through the network."
    assert page.locator("#error-line").inner_text() == words
    row = page.locator('.row[data-step="loss"]').bounding_box()
    assert row["y"] + row["height"] <= page.viewport_size["height"]  # the selected row is in view
    page.locator('.row[data-step="12"]').click()
    at_step(page, "12")
    assert said(page)["cell"] == f"{worst},{tokens[0, worst + 1]}"  # the score of the target
    page.locator('.chip[data-token="8"]').click()
    page.locator('.row[data-step="loss"]').click()
    at_step(page, "loss")
    assert said(page)["cell"] == "0,8"


def test_a_link_to_a_loss_opens_it(watched: Any, port: int) -> None:
    page = reopened(watched, f"http://127.0.0.1:{port}/", step="loss", cell="0,8")
    at_step(page, "loss")
    assert page.locator("#prediction").get_attribute("data-token") == "8"
    assert page.locator('.figure[data-tensor="ℓ"] .explanation').get_attribute("data-c") == "8"


def test_another_text_is_an_entry_too(page: Any, model: Model) -> None:
    losses = {
        text: str(model.loss(np.array([model.tokenizer.encode(text)]))) for text in ("the value of the value", "a name")
    }
    for text in ("a name", "the value of the value"):
        page.locator("#text").fill(text)
        page.keyboard.press("Enter")
        until(page, "document.getElementById('loss').dataset.value === x", losses[text])
    page.go_back()
    until(page, "document.getElementById('loss').dataset.value === x", losses["a name"])
    page.wait_for_selector("main[aria-busy=false]")
    assert page.locator("#text").input_value() == "a name" and said(page)["text"] == "a name"
    page.go_back()
    until(page, "document.getElementById('loss').dataset.value === x", losses["the value of the value"])
    assert "text" not in said(page)


def test_a_link_reopens_text_head_and_cell(watched: Any, port: int, model: Model) -> None:
    values = {"view": "map", "step": "1.2.causal", "cell": "4,3", "text": "a name is"}
    page = reopened(watched, f"http://127.0.0.1:{port}/", **values)
    at_step(page, "1.2.causal")
    block = model.trace(np.array([model.tokenizer.encode("a name is")])).blocks[1]
    shown = page.locator('.figure[data-tensor="1.2.Δ_causal"] output.value').get_attribute("data-value")
    assert float(shown) == float(block.delta_causal[0, 2, 4, 3])
    assert page.locator("#text").input_value() == "a name is"
    assert {**values, "head": "3"} == said(page)


def test_a_link_reopens_the_choices_of_each_view(watched: Any, port: int) -> None:
    address, name = f"http://127.0.0.1:{port}/", "transformer.h.1.mlp.c_fc.weight"
    at = f"step 2, lr 0.002: m of {name}:3,5"
    page = reopened(watched, address, view="step", lr="0.002", steps="2", parameter=name, at=at)
    assert page.locator("#lr").input_value() == "0.002" and page.locator("#parameter").input_value() == name
    until(page, "document.querySelector('.arithmetic .number')?.textContent.startsWith('[3, 5]')")
    assert said(page)["steps"] == "2" and said(page)["at"] == at
    key = "layer_norm: γ missing from dx"
    page = reopened(watched, address, view="mistakes", mistake=key)
    page.wait_for_selector(f'.mistake-result[data-key="{key}"][aria-busy=false]')
    page.locator(".mistake").first.click()
    page.go_back()
    page.wait_for_selector(f'.mistake[data-key="{key}"][aria-selected=true]')
    page = reopened(watched, address, view="attention", token="5")
    assert page.locator("#prediction").get_attribute("data-token") == "5"


def test_wrong_values_fall_back_quietly(watched: Any, port: int) -> None:
    wrong = {
        "view": "none", "step": "9.9", "cell": "7", "head": "77", "token": "x", "at": "none:1,1", "parameter": "?",
        "lr": "-3", "steps": "999", "mistake": "?", "unknown": "1", "text": "9 lives", "own": "x",
    }  # fmt: skip
    page = reopened(watched, f"http://127.0.0.1:{port}/", **wrong)
    at_step(page, "loss")
    assert page.locator("#message").is_hidden() and page.locator("#text").input_value() == "the value of the value"
    for view in ("step", "mistakes"):
        page.locator(f"#tab-{view}").click()
        page.wait_for_selector(f"#tab-{view}[aria-selected=true]")
        page.wait_for_selector("main[aria-busy=false]")
        assert page.locator("main .message").count() == 0
    beyond = {"view": "map", "step": "0.5", "cell": "900,900"}
    page = reopened(watched, f"http://127.0.0.1:{port}/", **beyond)
    at_step(page, "0.5")
    page.locator(".skip-link").focus()
    page.keyboard.press("Enter")  # its address, #main, is not ours
    at_step(page, "0.5")


def test_a_part_that_registers_itself_is_in_the_address(watched: Any, port: int) -> None:
    """Also one that does so after the page has been opened."""
    late = """
let registered = "";
addEventListener("register", () => remember("late", () => registered, (value) => {
  registered = value;
  document.body.dataset.late = value;
}));
start();
"""
    watched.page.route("**/app.js", lambda route: _with(route, late))
    page = reopened(watched, f"http://127.0.0.1:{port}/", view="map", late="seven")
    page.wait_for_timeout(300)
    page.evaluate("dispatchEvent(new Event('register'))")
    until(page, "document.body.dataset.late === 'seven'")
    page.locator('.row[data-step="0.5"]').click()
    assert said(page)["late"] == "seven"
    page.evaluate("location.hash = 'view=map&step=0.6&late=eight'")
    until(page, "document.body.dataset.late === 'eight'")
    page.go_back()
    until(page, "document.body.dataset.late === 'seven'")


def _with(route: Any, code: str) -> None:
    answer = route.fetch()
    head, _, tail = answer.text().rpartition("\nstart();\n")
    route.fulfill(response=answer, body=head + code + tail)


def test_the_exported_page_has_links_too_and_names_the_text_that_it_lacks(watched: Any, exported: Path) -> None:
    page = reopened(watched, exported.as_uri(), view="map", step="0.6", cell="2,3", text="a name")
    at_step(page, "0.6")
    message = page.locator("#message").inner_text()
    assert "contains “the value of the value” only; the link names “a name”" in message
    page.locator("#tab-training").click()
    page.wait_for_selector(".view.training")
    page.go_back()
    at_step(page, "0.6")
    page = reopened(watched, exported.as_uri(), view="mistakes", step="0.6", lr="0.5")
    page.wait_for_selector(".mistake-result[aria-busy=false]")
    assert page.locator("#message").is_hidden()
