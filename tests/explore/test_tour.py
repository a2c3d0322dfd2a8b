"""The tour: its numbers are the library's, it can be left, resumed and linked to, and a teacher can write another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from waiting import mark_seen, until

from onfoot.cli import app
from onfoot.explore.default_model import TEXT
from onfoot.explore.jobs import Job, StoppedError, current
from onfoot.explore.study import Study
from onfoot.explore.tour import BUILT_IN, SPOTS, filled, parse, read
from onfoot.explore.tour_numbers import OF_ARRAYS, PLAIN, TourNumbers
from onfoot.models.model import Model
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.optimizer import AdamW


@pytest.fixture
def visitor(browser: Any, port: int) -> Iterator[Any]:
    """A first visitor's page: a browser context of its own, with nothing remembered and an empty console."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_default_timeout(20_000)
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_selector("main[aria-busy=false]")
    yield page
    context.close()
    assert errors == []


def arrive(page: Any, stop: int) -> None:
    page.wait_for_selector(f'.tour[data-ready="{stop}"]')


def numbers_on(page: Any) -> dict[str, Any]:
    """The numbers in the sentences of the stop, by name: the exact value behind each."""
    found = page.locator(".tour-number").evaluate_all("all => all.map(x => [x.dataset.name, x.dataset.value])")
    return {name: json.loads(value) for name, value in found}  # also those of closed details


# --- the text file ---


def test_the_built_in_tour_has_eight_stops_and_every_number_of_it_is_filled_in(study: Study) -> None:
    stops, tour = read(BUILT_IN), filled(study)
    assert len(stops) == len(tour["stops"]) == 8 and tour["left_out"] == 0
    for stop, shown in zip(stops, tour["stops"], strict=True):
        found = [len(shown[key]) for key in ("text", "try", "more")]
        assert found == [len(stop.sentences), len(stop.tries), len(stop.details)] and found[:2] == [1, 1], stop.title
        words = json.dumps([shown["text"], shown["try"]], ensure_ascii=False)
        assert not any(brace in part for part in shown["text"][0] if isinstance(part, str) for brace in "{}"), words


def words(parts: list[list[Any]]) -> int:
    """The number of words in sentences that were filled in; a formula counts as one."""
    texts = ["".join(part if isinstance(part, str) else part.get("text", "x") for part in one) for one in parts]
    return sum(len(text.split()) for text in texts)


def test_the_tour_can_be_read_in_a_minute(study: Study) -> None:
    """At 200 to 250 words per minute; the details are behind "More"."""
    assert sum(words([[stop["title"]], *stop["text"], *stop["try"]]) for stop in filled(study)["stops"]) <= 240
    assert sum(words([*stop["text"], *stop["try"]]) for stop in filled(study)["stops"]) <= 220


@pytest.mark.parametrize(("losses", "worst"), [([9.0, 1.0, 3.0, None], 2), ([9.0, None], 0)])
def test_the_worst_token_is_not_the_first_which_has_no_context(losses: list[float | None], worst: int) -> None:
    study: Any = SimpleNamespace(document={"tokens": [{"loss": loss} for loss in losses]})
    assert TourNumbers(study).worst == worst


def test_tokens_of_a_model_without_a_tokenizer_are_apart() -> None:
    tokens = [{"text": text, "loss": 1.0} for text in ("1", "23")]
    study: Any = SimpleNamespace(document={"tokens": tokens, "model": {"has_tokenizer": False}})
    assert TourNumbers(study).context() == ("“1 23”", "1 23")


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (1, "mostly for its own prediction"),
        (2, "mostly for the prediction after token 2, “c”, whose attention looked back"),
    ],
)
def test_the_blamed_token_is_blamed_for_its_own_prediction_or_because_attention_looked_back(
    cause: int, words: str
) -> None:
    study: Any = SimpleNamespace(document={"tokens": [{"text": text} for text in "abc"]})
    numbers = TourNumbers(study)
    numbers.__dict__.update(blamed=1, causes=np.eye(3)[cause])
    assert numbers.blamed_for() == (words, cause)


def test_filling_the_tour_can_be_stopped(study: Study) -> None:
    job = Job()
    job.stop()
    before = current.set(job)
    try:
        with pytest.raises(StoppedError):
            _ = TourNumbers(study).causes
    finally:
        current.reset(before)


def test_every_number_that_a_tour_may_name_exists_in_this_run(study: Study) -> None:
    arrays = {"masked": "0.0.Δ_causal", "where": "0.∂w_3", "at target": "Δ_12", "at best": "Δ_12"}
    arrays |= dict.fromkeys(("largest", "most", "most token", "most position"), "0.∂w_3")
    names = [f"{{{name}}}" for name in PLAIN] + [f"{{{kind} {arrays.get(kind, '0.Δ_5')}}}" for kind in OF_ARRAYS]
    stops = parse("# All\n" + "\n".join(names))
    (stop,) = filled(study, [vars(stop) for stop in stops])["stops"]
    assert len(stop["text"]) == len(PLAIN) + len(OF_ARRAYS)


def test_what_a_network_does_not_have_is_left_out_and_the_rest_stays(study: Study) -> None:
    text = "# One\nThe loss is {loss}.\nIt has {norm 7.Δ_5}.\n# Two\nstep: 7.5\nNo such block.\n# Three\n{norm no}"
    tour = filled(study, [vars(stop) for stop in parse(text)])
    assert [stop["title"] for stop in tour["stops"]] == ["One"] and tour["left_out"] == 2
    assert len(tour["stops"][0]["text"]) == 1


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("The loss", 1, "begins with the title"),
        ("# One\nview: nowhere\nA.", 2, "view must be one of map, attention"),
        ("# One\n\n% a note\nveiw: map\nA.", 4, "unknown setting 'veiw'"),
        ("# One\ncell: third\nA.", 2, "a row and a column as in 3,7"),
        ("# One\nshow: nothing\nA.", 2, "show must be one of backward, forward"),
        ("# One\nThe loss is {los}.", 2, "unknown number {los}"),
        ("# One\nThe loss is {loss.", 2, "'{' without its partner"),
        ("# One\nA `formula.", 2, "'`' without its partner"),
        ("# One\nA.\n# Two\nview: map", 3, "'Two' has no sentence"),
        ("# One\nstep:\nA.", 2, "step has no value"),
        ("#\nA.", 1, "needs a title"),
        ("# One\nA.\nmore:", 3, "more has no value"),
        ("# One\nA.\nmore: It is {los}.", 3, "unknown number {los}"),
        ("# One\nA.\ndetail: B.", 3, "unknown setting 'detail'; a stop has view, step, cell, show, try and more"),
    ],
)
def test_an_error_in_a_tour_names_the_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ValueError, match=f"class.txt, line {line}: ") as error:
        parse(text, "class.txt")
    assert words in str(error.value)


def test_the_page_has_a_place_for_everything_that_a_tour_may_show() -> None:
    script = (BUILT_IN.parent / "30-tour.js").read_text(encoding="utf-8")
    table = script[script.index("TOUR_SPOTS = {") : script.index("};")]
    assert {
        line.split(":")[0].strip(' "') for line in table.splitlines() if "=> " in line and "//" not in line
    } == SPOTS


def test_the_command_reads_another_tour_and_refuses_a_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("onfoot.explore.page.export", lambda study, opening, *more: seen.update(opening) or "")
    path = tmp_path / "class.txt"
    path.write_text("# Mine\nstep: 12\nThe loss is {loss}.\n", encoding="utf-8")
    call = ["explore", "--text", TEXT, "--tour", str(path), "--export", str(tmp_path / "page.html")]
    assert CliRunner().invoke(app, call).exit_code == 0
    assert [(stop["title"], stop["step"]) for stop in seen["tour"]] == [("Mine", "12")]
    path.write_text("# Mine\nstp: 12\n", encoding="utf-8")
    result = CliRunner().invoke(app, call)
    assert result.exit_code != 0
    assert "line 2: unknown setting 'stp'" in " ".join(result.output.split())


# --- on the page ---


def test_the_numbers_of_the_tour_are_the_librarys(visitor: Any, model: Model, tokens: np.ndarray) -> None:
    """Read off the page, stop by stop, and compared with the trace, the gradients and an optimizer step."""
    trace = model.trace(tokens)
    _, grads = model.loss_and_grads(tokens)
    predicted, targets = trace["y_pred"][0], [*tokens[0, 1:].tolist(), IGNORE]
    given = np.array([predicted[t, targets[t]] for t in range(len(targets) - 1)])
    worst, blame = int(given.argmin()), np.linalg.norm(trace["Δ_1", 0][0], axis=1)
    visitor.get_by_role("button", name="Take the tour, one minute").click()
    shown: list[dict[str, Any]] = []
    for stop in range(1, 9):
        arrive(visitor, stop)
        shown.append(numbers_on(visitor))
        visitor.locator("[data-tour=next]").click()
    assert visitor.locator("#tour").count() == 0  # the last button is Finish
    first, scores, climb, skip, weight, mask, blamed, step = shown

    assert first["loss"] == trace.loss and first["targets"] == 21
    assert first["target"] == targets[worst] and first["probability"] == pytest.approx(given[worst], rel=1e-12)
    assert scores["targets"] == 21  # by which the difference is divided
    assert first["token loss"] == pytest.approx(-np.log(given[worst]), rel=1e-12)
    assert first["best"] == int(np.argmax(predicted[worst])) != targets[worst]
    assert scores["at target Δ_12"] == pytest.approx((given[worst] - 1) / 21, rel=1e-12)
    assert climb["norm Δ_12"] == pytest.approx(np.linalg.norm(trace["Δ_12"]), rel=1e-12)
    assert climb["made by Δ_11"] == ["12"]  # FC logits, the only reader of a_11
    through = trace["Δ_5", 1] - trace["Δ_10", 1]
    assert climb["norm Δ_11"] == pytest.approx(np.linalg.norm(trace["Δ_11"]), rel=1e-12)
    assert skip["skip norm last.Δ_5"] == pytest.approx(np.linalg.norm(trace["Δ_10", 1]), rel=1e-12)
    assert skip["branch norm last.Δ_5"] == pytest.approx(np.linalg.norm(through), rel=1e-12)

    gradient = grads["transformer.h.1.mlp.c_proj.weight"]
    row, column = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
    assert (
        weight["where gradient of last.9"] == [row, column]
        and weight["largest gradient of last.9"] == gradient[row, column]
    )
    adds = trace["a_8", 1][0][:, row] * trace["Δ_10", 1][0][:, column]  # eq FC.3, token by token
    assert adds.sum() == pytest.approx(gradient[row, column], rel=1e-12)
    assert weight["most position gradient of last.9"] == (np.sign(gradient[row, column]) * adds).argmax()

    assert mask["masked last.0.Δ_causal"] == 22 * 21 / 2
    assert blamed["blamed position"] == blame.argmax() and blamed["blamed norm"] == pytest.approx(blame.max())
    only = np.full_like(tokens, IGNORE)
    only[0, blamed["cause position"]] = targets[blamed["cause position"]]
    part = model.trace(tokens, only, divisor=21)["Δ_1", 0][0][blame.argmax()]
    assert blamed["cause share"] == pytest.approx(part @ trace["Δ_1", 0][0][blame.argmax()] / blame.max() ** 2)
    only = np.full_like(tokens, IGNORE)
    only[0, blame.argmax()] = targets[blame.argmax()]
    own = model.trace(tokens, only, divisor=21)["Δ_1", 0][0][blame.argmax()]
    read_out = trace["Δ_12"][0].T @ trace["a_11"][0]
    assert blamed["norm ∂w_tok, as logits"] == pytest.approx(np.linalg.norm(read_out), rel=1e-9)
    looked_up = grads["transformer.wte.weight"] - read_out
    assert blamed["norm ∂w_tok, as embedding"] == pytest.approx(np.linalg.norm(looked_up), rel=1e-9)
    later = 1 - own @ trace["Δ_1", 0][0][blame.argmax()] / blame.max() ** 2
    assert blamed["blamed later share"] == pytest.approx(later)

    trained = Model(model.config, model.params, model.dtype, model.engine)
    AdamW(trained, lr=step["learning rate"]).step(grads)
    assert step["loss after"] == pytest.approx(trained.loss(tokens), rel=1e-12) and step["loss"] == trace.loss
    after = trained.trace(tokens)["y_pred"][0, worst, targets[worst]]
    assert step["probability after"] == pytest.approx(after, rel=1e-9) and after > given[worst]


def test_a_stop_goes_to_its_place_and_marks_what_it_talks_about(visitor: Any) -> None:
    visitor.get_by_role("button", name="Take the tour, one minute").click()
    arrive(visitor, 1)
    assert visitor.locator(".chips.tour-spot").count() == 1 and visitor.locator("#tour-offer").count() == 0
    visitor.locator("[data-tour=next]").click()
    arrive(visitor, 2)
    assert visitor.locator("#step-name").inner_text() == "FC logits"
    box = visitor.locator(".figure.tour-spot .explanation")
    assert box.get_attribute("data-tensor") == "Δ_12" and box.get_attribute("data-r") == "3"
    value = float(visitor.locator(".figure.tour-spot output.value").get_attribute("data-value"))
    assert numbers_on(visitor)["at target Δ_12"] == value  # the selected cell is the one in the sentence


def test_the_prediction_in_view_is_the_one_that_the_stop_talks_about(visitor: Any) -> None:
    """At the seventh what the token is blamed for; at the eighth the error of the tour, before and after the step."""
    visitor.set_viewport_size({"width": 1280, "height": 720})
    visitor.get_by_role("button", name="Take the tour, one minute").click()
    for stop in range(1, 9):
        arrive(visitor, stop)
        token = visitor.locator("#prediction").get_attribute("data-token")
        numbers = numbers_on(visitor)
        assert token == str(numbers["cause position"] if stop == 7 else 3), stop
        assert visitor.locator(".after-step").count() == (stop == 8)
        mark_seen(visitor)
        if stop < 8:
            visitor.locator("[data-tour=next]").click()
    shown = visitor.locator(".predicted-target").inner_text()
    assert shown == "target “v” 0.7 % → 10.6 % after the step"
    assert float(visitor.locator(".after-step").get_attribute("data-probability")) == numbers["probability after"]
    visitor.locator("[data-tour=leave]").click()
    assert visitor.locator(".after-step").count() == 0


def test_details_are_one_click_away_and_closed_at_first(visitor: Any) -> None:
    visitor.get_by_role("button", name="Take the tour, one minute").click()
    arrive(visitor, 1)
    assert not visitor.locator(".tour-more p").first.is_visible()
    visitor.locator(".tour-more summary").click()
    assert "That costs −log" in visitor.locator(".tour-more").inner_text()
    assert visitor.locator(".tour-more p").first.is_visible()


def test_what_a_stop_talks_about_stays_in_view_when_checks_arrive_and_after_the_map_was_played(visitor: Any) -> None:
    visitor.get_by_role("button", name="Take the tour, one minute").click()
    for stop in range(1, 4):
        arrive(visitor, stop)
        if stop < 3:
            visitor.locator("[data-tour=next]").click()
    assert visitor.locator('.now-backward[data-step="11"]').count() == 1  # where the error signal of this stop is
    visitor.locator(".motion .on").click()
    assert visitor.locator('.now-backward[data-step="1.10"]').count() == 1  # it climbs at once
    while visitor.locator('.now-backward[data-step="0.5"]').count() == 0:
        visitor.locator(".motion .on").click()
    for stop in (4, 5):
        visitor.locator("[data-tour=next]").click()
        arrive(visitor, stop)
        until(visitor, "document.body.dataset.proven", seconds=120)
        assert visitor.locator(".in-motion").count() == 0
        limit = visitor.locator(".tour").bounding_box()["y"]
        spot = visitor.locator(".tour-spot").bounding_box()
        row = visitor.locator(".map .row[aria-selected=true]").bounding_box()
        assert spot["y"] + spot["height"] <= limit and row["y"] + row["height"] <= limit
        assert min(spot["y"], row["y"]) >= visitor.locator(".tabs").bounding_box()["y"]


def test_the_tour_can_be_left_by_escape_resumed_and_linked_to(visitor: Any, port: int) -> None:
    visitor.get_by_role("button", name="Take the tour, one minute").click()
    arrive(visitor, 1)
    assert visitor.evaluate("document.activeElement.dataset.tour") == "next"
    for stop in (2, 3):
        visitor.keyboard.press("Enter")
        arrive(visitor, stop)
    visitor.keyboard.press("Escape")
    until(visitor, "!document.getElementById('tour') && !document.querySelector('.tour-spot')")
    visitor.reload()
    visitor.wait_for_selector("main[aria-busy=false]")
    assert visitor.locator("#tour-offer").count() == 0
    visitor.get_by_role("button", name="Resume tour (3)").click()
    arrive(visitor, 3)
    visitor.keyboard.press("Escape")
    visitor.goto("about:blank")
    visitor.goto(f"http://127.0.0.1:{port}/#tour=7")
    arrive(visitor, 7)
    assert visitor.locator("#tour h2").inner_text() == "Which token is blamed most, and why"


def test_the_offer_is_declined_once(visitor: Any) -> None:
    visitor.get_by_role("button", name="Not now").click()
    visitor.reload()
    visitor.wait_for_selector("main[aria-busy=false]")
    assert visitor.locator("#tour-offer").count() == 0
    visitor.get_by_role("button", name="Tour", exact=True).click()
    arrive(visitor, 1)


def test_another_text_has_its_own_numbers(visitor: Any, model: Model) -> None:
    visitor.get_by_role("button", name="Take the tour, one minute").click()
    arrive(visitor, 1)
    before = numbers_on(visitor)["loss"]
    visitor.locator("#text").fill("an object")
    visitor.keyboard.press("Enter")
    until(visitor, "JSON.parse(document.querySelector('[data-name=loss]').dataset.value) !== x", before)
    from onfoot.explore.texts import read_text

    assert numbers_on(visitor)["loss"] == model.loss(read_text(model, "an object"))


def test_the_exported_page_has_the_tour(watched: Any, exported: Path, study: Study) -> None:
    page = watched.open(exported.as_uri() + "#tour=4")
    arrive(page, 4)
    expected = float(np.linalg.norm(study.tensors.value("1.Δ_5")))
    assert numbers_on(page)["norm last.Δ_5"] == pytest.approx(expected, rel=1e-12)
    page.locator("[data-tour=back]").click()
    arrive(page, 3)
    page.evaluate("location.hash = '#tour=8'")
    arrive(page, 8)
    assert page.locator(".tour-try, .tour-spot").count() == 0  # another step cannot be taken there


def test_the_documentation_lists_every_number_and_its_example_is_a_tour(study: Study) -> None:
    text = (Path(__file__).parents[2] / "docs" / "tours.md").read_text(encoding="utf-8")
    for name in [*PLAIN, *(f"{kind} ARRAY" for kind in OF_ARRAYS), *SPOTS]:
        assert f"`{name}`" in text, name
    example = text.split("```text\n")[1].split("```")[0]
    tour = filled(study, [vars(stop) for stop in parse(example)])
    assert len(tour["stops"]) == 2 and tour["left_out"] == 0
