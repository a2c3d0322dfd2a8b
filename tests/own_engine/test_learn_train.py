"""`onfoot learn train`: the learner's pairs where they are right, ours for the rest, and curves of right and wrong."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from own_course import NETWORK, replaced, write_course
from typer.testing import CliRunner

import onfoot
from onfoot.cli.learn_train import train as command
from onfoot.learn import own_pairs
from onfoot.learn import train as learn
from onfoot.learn.compare import compare, difference
from onfoot.learn.curves import columns, draw_curves, sketch
from onfoot.learn.folder import FILE, make_folder
from onfoot.learn.own_pairs import solved_in
from onfoot.models.own_network import OwnNetwork, compare_network
from onfoot.own_engine import PairError
from onfoot.own_engine.load import import_folder

SOLUTIONS = Path(onfoot.__file__).parent / "learn" / "course" / "solutions"
COURSE_FILES = SOLUTIONS.parent
COURSE = [SOLUTIONS] if SOLUTIONS.is_dir() else []
LAYER_NORM = ("dx = (dnormed - mean - normed * along) * rstd", "dx = dnormed * rstd")


def options(steps: int, **changes: Any) -> Any:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "context": 16, "batch_size": 4, "eval_windows": 4}
    return learn.options_for(steps, quiet=True, eval_every=steps, sample_tokens=8, **{**sizes, **changes})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> learn.Text:
    return learn.Text(tmp_path_factory.mktemp("text"), options(6))


def said(work: Any) -> str:
    lines: list[str] = []
    work(lines.append)
    return "\n".join(lines)


def verdicts(folder: Path, text: learn.Text) -> dict[str, str]:
    return {one.pair: one.verdict for one in solved_in(folder, text).statuses}


def test_with_every_exercise_solved_every_gradient_is_the_learners(tmp_path: Path) -> None:
    folder = write_course(tmp_path / "all")
    out = said(lambda say: learn.train(folder, options(4), say))
    assert out.endswith("Every gradient of this model is yours.")
    for line in (
        "linear         yours, e01_linear.py",
        "attention      yours, e07_attention.py",
        "gpt2           yours, e11",
    ):
        assert line in out
    assert (folder / "train" / "001" / "loss.png").is_file()


@pytest.mark.parametrize("folder", [None, *COURSE], ids=str)
def test_solved_exercises_are_recognised_as_such(folder: Path | None, text: learn.Text, tmp_path: Path) -> None:
    solved = solved_in(folder or write_course(tmp_path / "all"), text)
    assert solved.everything, solved.table()
    assert not solved.wrong and {one.verdict for one in solved.statuses} == {"yours"}


def test_without_the_whole_pass_all_pairs_are_the_learners_and_it_says_so(tmp_path: Path, text: learn.Text) -> None:
    solved = solved_in(write_course(tmp_path / "pairs", network=False), text)
    assert solved.all_pairs and not solved.everything
    assert solved.summary() == (
        "All 6 pairs are yours; the pass that calls them (gpt2_forward, gpt2_backward) is onfoot's."
    )


def test_unsolved_and_wrong_exercises_are_ours_and_named(tmp_path: Path, text: learn.Text) -> None:
    folder = write_course(tmp_path / "some", without=("linear",), layer_norm=LAYER_NORM)
    solved = solved_in(folder, text)
    assert verdicts(folder, text) == {
        "attention": "yours", "cross_entropy": "yours", "embedding": "yours", "gelu_tanh": "yours",
        "layer_norm": "wrong", "linear": "not written yet", "gpt2": "does not run",
    }  # fmt: skip
    assert set(solved.wrong) == {"layer_norm_forward", "layer_norm_backward"}
    assert "layer_norm     onfoot's: transformer.ln_f: dx of your layer_norm_backward is wrong" in solved.table()
    assert solved.summary() == "4 of 6 pairs are yours; the rest is onfoot's."


def test_a_file_that_cannot_be_imported_is_named_and_the_rest_is_trained(tmp_path: Path, text: learn.Text) -> None:
    folder = write_course(tmp_path / "broken", network=False)
    (folder / "e01_linear.py").write_text("def f(:\n", encoding="utf-8")
    (folder / "e12_lora.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    solved = solved_in(folder, text)
    assert "  linear         onfoot's: e01_linear.py cannot be imported\n" in solved.table()
    assert "e12_lora.py cannot be imported: ModuleNotFoundError: No module named 'nothing_of" in solved.table()
    assert solved.summary() == "5 of 6 pairs are yours; the rest is onfoot's."


def test_of_two_files_with_the_same_pair_the_last_right_one_counts(tmp_path: Path, text: learn.Text) -> None:
    """As with a head without a mask, followed by one with it: only the later is right in a causal model."""
    folder = write_course(tmp_path / "two")
    mask = (folder / "e07_attention.py").read_text(encoding="utf-8")
    (folder / "e06_one_head.py").write_text(
        mask.replace("seen, scores, -np.inf", "seen, scores, scores"), encoding="utf-8"
    )
    (status,) = [one for one in solved_in(folder, text).statuses if one.pair == "attention"]
    assert (status.verdict, status.file) == ("yours", "e07_attention.py")
    (folder / "e08_multi_head.py").write_text(mask.replace("return rho @ v", "return rho @ v * 2"), encoding="utf-8")
    (status,) = [one for one in solved_in(folder, text).statuses if one.pair == "attention"]
    assert (status.verdict, status.file) == ("yours", "e07_attention.py")


def test_only_the_files_of_the_course_are_imported(tmp_path: Path, text: learn.Text) -> None:
    """An experiment in the folder is the learner's own; a module that an exercise imports is imported by it."""
    folder = write_course(tmp_path / "scratch")
    (folder / "scratch.py").write_text("from pathlib import Path\nPath('ran').write_text('')\n", encoding="utf-8")
    (folder / "helpers.py").write_text("import scratch_is_not_there\n", encoding="utf-8")
    solved = solved_in(folder, text)
    assert solved.everything and solved.broken == {} and not Path("ran").exists()
    linear = (folder / "e01_linear.py").read_text(encoding="utf-8")
    (folder / "e01_linear.py").write_text(f"import helpers\n{linear}", encoding="utf-8")
    assert "scratch_is_not_there" in solved_in(folder, text).broken["e01_linear.py"]


EXIT = "    import sys; sys.exit()\n"


def test_a_function_that_exits_is_said_to_and_does_not_end_the_command(tmp_path: Path, text: learn.Text) -> None:
    folder = write_course(tmp_path / "exits", linear=("    dx = (drows", f"{EXIT}    dx = (drows"))
    said_of = {one.pair: one.words for one in solved_in(folder, text).statuses}
    assert re.search(r"your linear_backward raises SystemExit \(.*e01_linear.py, line \d+\), called", said_of["linear"])
    exits = r"it does not run yet: your gpt2_backward raises SystemExit \(.*e01_linear.py, line \d+\)"
    assert re.fullmatch(exits, said_of["gpt2"])
    with pytest.raises(ValueError, match=r"your linear is wrong, but cannot be trained: .* raises SystemExit"):
        compare(folder, options(2), print)


def test_what_takes_long_is_said_before_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop without an end is then known to be the learner's."""

    def endless(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(own_pairs, "import_folder", endless)
    lines: list[str] = []
    for work in (learn.train, compare):
        with pytest.raises(KeyboardInterrupt):
            work(write_course(tmp_path / "endless"), options(2), lines.append)
    assert lines == ["judging your gradients; Ctrl-C ends a loop that does not end"] * 2


def test_a_wrong_whole_pass_is_not_used(tmp_path: Path, text: learn.Text) -> None:
    folder = write_course(tmp_path / "network")
    wrong = NETWORK.replace("dhead.T + embedding_backward(d, s_tok)", "embedding_backward(d, s_tok)")
    (folder / "e11_gpt2.py").write_text(wrong, encoding="utf-8")
    (status,) = [one for one in solved_in(folder, text).statuses if one.pair == "gpt2"]
    assert status.verdict == "wrong" and status.words.startswith("the gradient of transformer.wte.weight is wrong")


def test_training_on_the_learners_whole_pass_has_the_bits_of_the_engine_numpy(tmp_path: Path, text: learn.Text) -> None:
    """The same operations in the same order, except that a gradient that is always 0 is rounding there."""
    network = solved_in(write_course(tmp_path / "bits"), text).network
    assert network is not None
    batch = text.source.microbatches(0)[0]
    mine, ours = text.model({}, {}, network), text.model({}, {})
    assert isinstance(mine, OwnNetwork)
    (loss, grads), (expected, right) = (m.loss_and_grads(batch.tokens, batch.targets) for m in (mine, ours))
    assert loss == expected
    for name, grad in right.items():
        rows = slice(None) if "c_attn.bias" not in name else [*range(16), *range(32, 48)]  # eq 29: b_k has no effect
        assert np.array_equal(grads[name][rows], grad[rows]), name
    assert grads["transformer.h.0.attn.c_attn.bias"][16:32] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_run_on_the_solutions_whole_pass_has_the_bits_of_a_run_on_the_engine_numpy(
    tmp_path: Path, dtype: str
) -> None:
    text = learn.Text(tmp_path, options(6, dtype=dtype))
    solved = solved_in(SOLUTIONS, text)
    assert solved.everything
    mine, ours = text.model(solved.right, solved.files, solved.network), text.model({}, {})
    assert isinstance(mine, OwnNetwork)
    runs = [learn.run(model, text, tmp_path / str(i)) for i, model in enumerate((mine, ours))]
    assert runs[0].losses == runs[1].losses and len(runs[0].losses) == 6
    assert [name for name in ours.params if not np.array_equal(mine.params[name], ours.params[name])] == []


def test_the_whole_pass_scales_with_the_divisor_and_reports_what_is_missing(tmp_path: Path, text: learn.Text) -> None:
    network = solved_in(write_course(tmp_path / "scale"), text).network
    model, tokens = text.model({}, {}, network), np.arange(12).reshape(2, 6)
    loss, grads = model.loss_and_grads(tokens)
    half, half_grads = model.loss_and_grads(tokens, divisor=20.0)  # of 10 targets
    assert half == pytest.approx(loss / 2)
    np.testing.assert_allclose(half_grads["transformer.wpe.weight"], grads["transformer.wpe.weight"] / 2, rtol=1e-6)
    with pytest.raises(ValueError, match="neither packed examples nor adapters"):
        model.loss_and_grads(tokens, segments=np.zeros((2, 6), int))
    assert isinstance(model, OwnNetwork)
    for grads_given, message in (
        (None, "must return a dict of gradients by name, got None"),
        ({}, r"returns no gradient of transformer.h.0.attn.c_attn.bias and \d+ others"),
        ({**grads, "transformer.wpe.weight": np.zeros(3)}, r"of transformer.wpe.weight of shape \(3,\); it has shape"),
    ):
        with pytest.raises(PairError, match=message):
            model.checked(grads_given)


def test_whatever_a_whole_pass_returns_is_a_line_of_the_table(tmp_path: Path, text: learn.Text) -> None:
    """A PairError of the two functions, and no error that would end the command."""
    for change, message in (
        (("return loss, (", "return loss # ("), "must return the loss and what its backward needs, got a float64"),
        (("return loss, (", "return None, ("), "the loss of your gpt2_forward must be an array of numbers, got None"),
        (("return loss, (", "return [loss] * 2, ("), r"must be one number, got the shape \(2,\)"),
        (("    return grads", '    return {**grads, TOKENS: "x"}'), "of transformer.wte.weight from .* got a str"),
        (("    return grads", "    return {**grads, TOKENS: [[1.0], [1.0, 2.0]]}"), "array of numbers, got 2 values"),
        (("    return grads", "    return {**grads, TOKENS: grads[TOKENS] * np.nan}"), "wte.weight is wrong: .* nan"),
        (("    return grads", "    return None"), "your gpt2_backward is not written yet"),
    ):
        folder = solutions(tmp_path / str(abs(hash(change))), ("e11_gpt2", *change))
        (status,) = [one for one in solved_in(folder, text).statuses if one.pair == "gpt2"]
        assert status.verdict != "yours" and re.search(message, status.words), status


def test_a_difference_in_the_loss_is_found(tmp_path: Path, text: learn.Text) -> None:
    modules, _ = import_folder(write_course(tmp_path / "loss"))
    network = next(m for path, m in modules.items() if path.stem == "e11_gpt2")
    tokens = np.arange(12).reshape(2, 6)
    targets = np.roll(tokens, -1, axis=1)

    def forward(*args: Any) -> Any:
        loss, saved = network.gpt2_forward(*args)
        return 2 * loss, saved

    model = text.model({}, {})
    assert compare_network(model, network.gpt2_forward, network.gpt2_backward, tokens, targets)[1] < 1e-9
    assert compare_network(model, forward, network.gpt2_backward, tokens, targets) == ("loss", pytest.approx(1))


def test_compare_trains_right_and_wrong_and_draws_both(tmp_path: Path) -> None:
    folder = write_course(tmp_path / "compare", linear=("dx = (drows", "dx = -(drows"))
    out = said(lambda say: compare(folder, options(60), say))
    assert "then once more with yours for linear" in out and "o right   x with your linear" in out
    assert "nats per token worse" in out
    place = folder / "train" / "001"
    assert (place / "compare.png").read_bytes().startswith(b"\x89PNG")
    logs = [(place / name / "log.jsonl").read_text(encoding="utf-8").splitlines() for name in ("right", "wrong")]
    assert '"step": 1, ' in logs[0][0] and logs[0][0].split('"lr"')[0] == logs[1][0].split('"lr"')[0]  # the same start


def test_a_wrong_file_can_be_compared_and_nothing_wrong_is_said(tmp_path: Path) -> None:
    folder = write_course(tmp_path / "right", network=False)
    with pytest.raises(ValueError, match=r"nothing is wrong that can be trained: give .* --wrong FILE"):
        compare(folder, options(2), print)
    other = write_course(tmp_path / "other", linear=("dx = (drows", "dx = -(drows"))
    right, wrong = compare(folder, options(40), print, other / "e01_linear.py")
    assert right.losses[0] == wrong.losses[0]
    assert np.mean(wrong.losses[-10:]) > np.mean(right.losses[-10:]) + 0.2


WRONG_PARTS = {  # (file, right, wrong)
    "self_attention": ("e08_multi_head", "merge_heads(dq), merge_heads(dk)", "merge_heads(dk), merge_heads(dq)"),
    "block": ("e09_block", "return d5 + branch, grads", "return d10 + branch, grads"),
    "gpt2": ("e11_gpt2", "dhead.T + embedding_backward(d, s_tok)", "embedding_backward(d, s_tok)"),
}


def solutions(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """The solutions of the course, with text replaced in some files."""
    shutil.copytree(SOLUTIONS, folder)
    for stem, right, wrong in changes:
        path = folder / f"{stem}.py"
        path.write_text(replaced(path.read_text(encoding="utf-8"), right, wrong), encoding="utf-8")
    return folder


@pytest.mark.parametrize("part", WRONG_PARTS)
def test_a_wrong_part_of_the_network_is_trained_in_a_pass_that_is_right_otherwise(part: str, tmp_path: Path) -> None:
    folder = solutions(tmp_path / "wrong", WRONG_PARTS[part])
    file = folder / f"{WRONG_PARTS[part][0]}.py"  # it imports pairs that are right
    for where, wrong_file in ((folder, None), (solutions(tmp_path / "right"), file)):
        lines: list[str] = []
        right, wrong = compare(where, options(3), lines.append, wrong_file)
        out = "\n".join(lines)
        assert f"once more with yours for {part}\n" in out and f"x with your {part} " in out
        assert right.losses[0] == wrong.losses[0] and right.losses[2] != wrong.losses[2]


def test_what_is_right_or_not_of_this_network_is_not_trained_as_wrong(tmp_path: Path) -> None:
    """Exercise 1 is wrong, and the block imports it; but the block itself is right."""
    folder = solutions(tmp_path / "all", ("e01_linear", "dx = (rows(dy)", "dx = -(rows(dy)"))
    for stem, message in (
        ("e09_block", "e09_block.py: nothing in it is wrong; right as onfoot's: block$"),
        ("e02_activation", "e02_activation.py: nothing in it is wrong; right as onfoot's: gelu_tanh$"),
        ("e10_tied", r"e10_tied.py defines nothing that can be trained: this GPT-2 consists of attention, .*, block"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(folder, options(2), print, folder / f"{stem}.py")
    for stem, function in (("e01_linear", "linear"), ("e08_multi_head", "self_attention"), ("e09_block", "block")):
        unwritten = tmp_path / f"{stem}.py"
        unwritten.write_text(f"# mine\n{(COURSE_FILES / unwritten.name).read_text(encoding='utf-8')}", encoding="utf-8")
        with pytest.raises(ValueError, match=rf"{stem}.py: your {function}_backward is not written yet$"):
            compare(folder, options(2), print, unwritten)


def test_what_raises_cannot_be_trained_and_the_reason_is_said(tmp_path: Path) -> None:
    linear = ("e01_linear", "dx = (rows(dy)", "1 / 0; dx = (rows(dy)")
    block = ("e09_block", "return d5 + branch, grads", "return d5[0] + branch, {}")
    some = ("e09_block", "return d5 + branch, grads", "return None, grads")
    for change, message in (
        (
            linear,
            r"your linear is wrong, but cannot be trained: .* raises ZeroDivisionError.*; mend that first, or give",
        ),
        (
            ("e09_block", "return d5", "return d5]"),
            r"e09_block.py cannot be imported: .*, line \d+: .*; mend that first",
        ),
        (some, r"your block is wrong, .*: it does not run yet: your block_backward returns None for some of its grad"),
        (block, r"your block is wrong, but cannot be trained: it does not run yet: your gpt2_backward .*; mend that"),
    ):
        folder = solutions(tmp_path / str(hash(change)), change)
        with pytest.raises(ValueError, match=message) as caught:
            compare(folder, options(2), print)
        assert "shapes" not in str(caught.value)


def test_the_difference_of_equal_runs_is_none() -> None:
    def result(loss: float) -> learn.Result:
        return learn.Result(loss, [], "", Path())

    said_of = [difference(result(2.5), result(wrong), 9).rpartition(": ")[2] for wrong in (2.5 - 1e-6, 2.75, 2.25)]
    assert said_of == ["no difference", "0.2500 nats per token worse", "0.2500 nats per token better"]


def test_a_wrong_pair_whose_shapes_cannot_be_trained_is_said_to_be_wrong(tmp_path: Path) -> None:
    folder = write_course(tmp_path / "shape", network=False, linear=("dx = (drows", "dx = np.zeros(3) # (drows"))
    with pytest.raises(ValueError, match=r"your linear is wrong, but cannot be trained: .*dx"):
        compare(folder, options(2), print)


def test_the_command_finds_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(command)
    monkeypatch.chdir(tmp_path)
    nothing = CliRunner().invoke(app, ["--steps", "1"])
    assert isinstance(nothing.exception, ValueError) and "make them with: onfoot learn" in str(nothing.exception)
    monkeypatch.setattr(learn, "SIZES", {**learn.SIZES, "n_layer": 1, "n_embd": 8, "context": 8, "eval_windows": 2})
    make_folder(tmp_path / "made")
    course = write_course(tmp_path / "onfoot-learn", network=False)
    (tmp_path / "made" / FILE).rename(course / FILE)  # by this file a folder of exercises is known
    monkeypatch.setattr("socket.socket", None)  # no network is needed
    result = CliRunner().invoke(app, ["--steps", "2", "--quiet", "--out", "runs"])
    assert result.exit_code == 0, result.output
    assert "All 6 pairs are yours" in " ".join(result.output.split())
    assert onfoot.load(tmp_path / "runs" / "001" / "best").config.n_embd == 8


def test_the_sketch_has_a_mark_per_curve_and_the_range_of_the_losses() -> None:
    drawn = sketch({"right": [4, 3, 2, 1], "wrong": [4, 4, 4, 4]}, width=4, height=4).splitlines()
    assert [line[6:] for line in drawn[:4]] == [" |#xxx", " | o", " |  o", " |   o"]
    assert drawn[0].startswith("  4.00") and drawn[3].startswith("  1.00") and "o right   x wrong" in drawn[-1]
    assert columns([1, 3, 5, 7], 2) == [2, 6] and columns([1, 2], 60) == [1, 2]
    assert "step 3" in sketch({"one": [2.0, 2.0, 2.0]})  # a flat line


def test_the_curves_are_drawn_as_a_picture(tmp_path: Path) -> None:
    draw_curves({"right": [3, 2, 1], "wrong": [3, 3, 3]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
