"""The public trainer, as scripts of users would use it."""

from __future__ import annotations

import json
import logging
import re
import shutil
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onfoot
from onfoot.data.batches import Batch
from onfoot.formats.tokenizer import byte_tokenizer
from onfoot.train import runs
from onfoot.train.loop import CallbackError
from onfoot.train.options import TrainOptions

TEXT = "the quick brown fox jumps over the lazy dog. " * 60
EXAMPLES = [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a in range(6) for b in range(6)]


def tiny(seed: int = 0, **sizes: Any) -> onfoot.Model:
    settings = {"vocab_size": 257, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, **sizes}
    model = onfoot.create(onfoot.GPT2Config(**settings), seed, "float64", "numpy")
    model.tokenizer = byte_tokenizer()
    return model


def options(**changes: Any) -> onfoot.TrainingOptions:
    known = {"steps": 6, "batch_size": 2, "lr": 1e-2, "warmup": 2, "eval_every": 3, "sample_tokens": 0, "quiet": True}
    return onfoot.TrainingOptions(**{**known, **changes})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_a_text_file_and_three_lines(text: Path) -> None:
    model = tiny()
    before = model.loss(*batch(model))
    outcome = onfoot.Trainer(model, text, options(steps=30)).run()
    assert outcome.state.step == 30 and not outcome.interrupted and outcome.checkpoint is None
    assert model.loss(*batch(model)) < before - 0.5
    assert outcome.validation_loss == pytest.approx(outcome.state.best_loss, abs=0.5)


def batch(model: onfoot.Model) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(model.tokenizer.encode(TEXT[:33]))  # type: ignore[union-attr]
    return ids[None, :16], ids[None, 1:17]


def test_a_callback_that_stops_the_run_leaves_it_saved_and_resumable(tmp_path: Path, text: Path) -> None:
    class StopAt(onfoot.Callback):
        def on_step(self, trainer: onfoot.Trainer, step: Any) -> None:
            if step.step == 4:
                trainer.stop()

    trainer = onfoot.Trainer(tiny(), text, options(), [StopAt()], out=tmp_path / "run")
    outcome = trainer.run()
    assert outcome.interrupted and outcome.state.step == 4
    assert outcome.checkpoint is not None and (outcome.checkpoint / "model.safetensors").is_file()

    rest = onfoot.Trainer(onfoot.load(outcome.checkpoint, "float64", "numpy"), text, options(), out=tmp_path / "run")
    rest.restore(outcome.checkpoint)
    assert rest.run().state.step == 6
    whole = onfoot.Trainer(tiny(), text, options())
    whole.run()
    assert all((rest.model.params[n] == whole.model.params[n]).all() for n in whole.model.params)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("left", ["run.json", "log.jsonl", "checkpoints"])
def test_a_folder_that_has_a_run_is_refused_and_stays_as_it_is(left: str, tmp_path: Path, text: Path) -> None:
    run = tmp_path / "run"
    onfoot.Trainer(tiny(), text, options(), out=run).run()
    (run / "run.json").write_text("{}")  # as the command writes it
    for name in {"run.json", "log.jsonl"} - {left}:  # each of them alone is a run
        (run / name).unlink()
    if left != "checkpoints":
        shutil.rmtree(run / "checkpoints")
    before = files_of(run)
    other = onfoot.Trainer(tiny(seed=1), text, options(), out=run)
    said = rf"{re.escape(str(run))} already contains a run \({left}\); resume it with trainer.restore\(checkpoint\), or"
    for write in (other.run, other.evaluate, other.save):
        with pytest.raises(ValueError, match=said):
            write()
    assert files_of(run) == before and other.state.step == 0


def test_a_checkpoint_of_another_run_does_not_open_a_folder_that_has_one(tmp_path: Path, text: Path) -> None:
    ours, theirs = (onfoot.Trainer(tiny(s), text, options(), out=tmp_path / str(s)).run().checkpoint for s in (0, 1))
    assert ours is not None and theirs is not None
    before = files_of(tmp_path / "0")
    with pytest.raises(ValueError, match="0 already contains a run"):
        onfoot.Trainer(tiny(), text, options(steps=8), out=tmp_path / "0").restore(theirs)
    assert files_of(tmp_path / "0") == before
    for out in (tmp_path / "0", tmp_path / "new", None):  # its own, an empty one, none
        trainer = onfoot.Trainer(onfoot.load(ours, "float64", "numpy"), text, options(steps=8), out=out)
        trainer.restore(str(ours))
        assert [step.step for step in trainer] == [7, 8]


def test_a_trainer_whose_run_another_one_has_continued_does_not_go_on(tmp_path: Path, text: Path) -> None:
    first = onfoot.Trainer(tiny(), text, options(), out=tmp_path / "run")
    assert next(iter(first)).step == 1
    second = onfoot.Trainer(
        onfoot.load(tmp_path / "run" / "last", "float64", "numpy"), text, options(), out=tmp_path / "run"
    )
    second.restore(tmp_path / "run" / "last")
    second.run()
    before = files_of(tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"run is at step 6, and this trainer at step 1: another one has continued the"
    ):
        first.run()
    assert files_of(tmp_path / "run") == before


def test_a_run_is_not_restored_for_fewer_steps_than_it_has(tmp_path: Path, text: Path) -> None:
    done = onfoot.Trainer(tiny(), text, options(), out=tmp_path / "run").run().checkpoint
    trainer = onfoot.Trainer(tiny(), text, options(steps=3), out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"^steps=3 is less than the 6 steps of .*step-0000006; pass steps=6 or more$"):
        trainer.restore(done)
    assert trainer.optimizer.steps == 0 and not any(m.any() for m in trainer.optimizer.m.values())  # as it was


def test_a_learning_rate_that_is_no_function_is_named(text: Path) -> None:
    trainer = onfoot.Trainer(tiny(), text, options())
    trainer.learning_rate = 0.1  # type: ignore[assignment]
    with pytest.raises(
        CallbackError, match=r"trainer\.learning_rate failed after step 0: .* function of the step number, got 0\.1"
    ):
        trainer.run()


def test_a_run_that_was_stopped_before_its_first_step_draws_an_empty_curve(
    tmp_path: Path, text: Path, recwarn: pytest.WarningsRecorder
) -> None:
    class Never(onfoot.Callback):
        def on_begin(self, trainer: Any) -> None:
            trainer.stop()

    onfoot.Trainer(tiny(), text, options(), [Never()], out=tmp_path / "run").run()
    assert (tmp_path / "run" / "loss.png").is_file() and not [w for w in recwarn if "legend" in str(w.message)]


def test_iterating_by_hand_gives_every_step_and_leaving_the_loop_stops(tmp_path: Path, text: Path) -> None:
    trainer = onfoot.Trainer(tiny(), text, options(), out=tmp_path / "run")
    seen = []
    for step in trainer:
        seen.append((step.step, step.loss, step.lr))
        if step.step == 3:
            break
    assert [s[0] for s in seen] == [1, 2, 3] and trainer.outcome.interrupted
    assert (tmp_path / "run" / "checkpoints" / "step-0000003").is_dir()
    seen += [(step.step, step.loss, step.lr) for step in trainer]  # it goes on where it was left
    whole = [(s.step, s.loss, s.lr) for s in onfoot.Trainer(tiny(), text, options())]
    assert seen == whole and len(whole) == 6


def test_the_learning_rate_can_be_replaced_and_changed_while_it_runs(text: Path) -> None:
    class Halve(onfoot.Callback):
        def on_step(self, trainer: onfoot.Trainer, step: Any) -> None:
            if step.step == 2:
                trainer.learning_rate = lambda n: 1e-3 / 2 ** (n - 2)

    rates = [step.lr for step in onfoot.Trainer(tiny(), text, options(schedule="constant"), [Halve()])]
    assert rates == [5e-3, 1e-2, 1e-3, 5e-4, 2.5e-4, 1.25e-4]


def test_a_source_of_ones_own_needs_one_method() -> None:
    class Mine(onfoot.Source):
        def microbatches(self, step: int, share: Any = None) -> list[Any]:
            rng = np.random.default_rng(step)
            ids = rng.integers(0, 257, (2, 9))
            return [(ids[:, :-1], ids[:, 1:])]

    model = tiny()
    trainer = onfoot.Trainer(model, Mine(), options(clip=0.3))
    losses = [step.loss for step in trainer]
    assert trainer.validation_loss is None and len(losses) == 6

    twin = tiny()
    leaves = {n: torch.tensor(p, requires_grad=True) for n, p in twin.params.items()}
    plain = [p for n, p in leaves.items() if p.ndim < 2]
    decayed = [p for n, p in leaves.items() if p.ndim == 2]
    settings = options(clip=0.3)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    for step in range(6):  # the same run with PyTorch's AdamW on clipped gradients
        twin.params.update({n: p.detach().numpy().copy() for n, p in leaves.items()})
        ((tokens, targets),) = Mine().microbatches(step)
        loss, grads = twin.loss_and_grads(tokens, targets)
        assert loss == pytest.approx(losses[step], rel=1e-12)
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        for n, p in leaves.items():
            p.grad = torch.tensor(grads[n] * min(1.0, 0.3 / norm))
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        optimizer.step()
    for n, p in leaves.items():
        np.testing.assert_allclose(model.params[n], p.detach().numpy(), rtol=1e-7, atol=1e-9, err_msg=n)


def test_a_source_that_lacks_what_a_run_needs_is_named() -> None:
    class Bare(onfoot.Source):
        pass

    with pytest.raises(ValueError, match="the source Bare does not define microbatches, which every run needs"):
        onfoot.Trainer(tiny(), Bare(), options()).run()
    private = options(dp_clip=1.0, dp_noise=0.0)
    with pytest.raises(ValueError, match="Bare does not define n_examples, which private training needs"):
        onfoot.Trainer(tiny(), Bare(), private)


def test_a_source_need_not_be_derived_and_may_use_segments() -> None:
    class Packed:
        def microbatches(self, step: int) -> list[Batch]:
            ids = np.random.default_rng(step).integers(0, 257, (1, 13))
            return [Batch(ids[:, :-1], ids[:, 1:], np.repeat([0, 1, 2], 4)[None])]

        def validation(self) -> list[Batch]:
            return self.microbatches(99)

        def prompt(self) -> None:
            return None

    trainer = onfoot.Trainer(tiny(), Packed(), options())
    trainer.run()
    one = Packed().validation()[0]
    assert trainer.validation_loss == pytest.approx(
        trainer.model.loss(one.tokens, one.targets, segments=one.segments), rel=1e-12
    )


def test_a_source_of_any_class_needs_one_method(text: Path) -> None:
    class Bare:
        mine = 7

        def microbatches(self, step: int) -> list[Any]:
            return [(np.full((2, 8), step), np.full((2, 8), step))]

    trainer = onfoot.Trainer(tiny(), Bare(), options(sample_tokens=4))
    assert trainer.run().state.step == 6 and trainer.validation_loss is None and trainer.source.mine == 7
    with pytest.raises(ValueError, match="the source Bare does not define n_examples, which private training needs"):
        onfoot.Trainer(tiny(), Bare(), options(dp_clip=1.0, dp_noise=0.0))


def test_a_trainer_that_is_refused_leaves_no_folder(tmp_path: Path, text: Path) -> None:
    given: Any = ["tensorboard"]
    for bad in (
        lambda out: onfoot.Trainer(tiny(), text, options(), given, out=out),
        lambda out: onfoot.Trainer(tiny(), text, options(freeze="nosuch"), out=out),
        lambda out: onfoot.Trainer(tiny(), "missing.txt", options(), out=out),
    ):
        with pytest.raises(ValueError):
            bad(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match=r"fox.txt' is a file; choose a folder"):
        onfoot.Trainer(tiny(), text, options(), out=text)


def test_saving_without_a_folder_and_a_text_for_a_file_are_named_with_the_way_out(text: Path) -> None:
    with pytest.raises(ValueError, match=r"no folder to save a run in; pass Trainer\(…, out=FOLDER\), or model.save"):
        onfoot.Trainer(tiny(), text, options()).save()
    with pytest.raises(
        ValueError, match=r"a file's name cannot be this long; write a text into a file, or pass np.arr"
    ):
        onfoot.Trainer(tiny(), TEXT, options())


def test_evaluation_in_the_loop(text: Path) -> None:
    trainer, found = onfoot.Trainer(tiny(), text, options(eval_every=1000)), list[Any]()
    for step in trainer:
        if step.step in (2, 5):
            found.append(trainer.evaluate())
    assert [one.step for one in found] == [2, 5] and found[1].loss < found[0].loss


def test_gradients_can_be_watched_and_changed_before_the_update(text: Path) -> None:
    class OnlyBiases(onfoot.Callback):
        def __init__(self) -> None:
            self.norms: list[float] = []

        def on_gradient(self, trainer: onfoot.Trainer, grads: dict[str, Any]) -> None:
            self.norms.append(float(sum((g**2).sum() for g in grads.values())) ** 0.5)
            for name, grad in grads.items():
                grad *= name.endswith("bias")

    model, watch = tiny(), OnlyBiases()
    before = {n: p.copy() for n, p in model.params.items()}
    trainer = onfoot.Trainer(model, text, options(weight_decay=0.0, clip=0.0), [watch])
    norms = [step.grad_norm for step in trainer]
    assert len(watch.norms) == 6 and all(a > b > 0 for a, b in zip(watch.norms, norms, strict=True))
    for name, value in model.params.items():
        assert (value == before[name]).all() != name.endswith("bias"), name


def test_examples_in_a_list_train_a_lora_adapter_that_can_be_saved(tmp_path: Path) -> None:
    model = tiny(n_positions=16)
    model.add_lora(r=4)
    trainer = onfoot.Trainer(model, EXAMPLES, options(steps=40), out=tmp_path / "run")
    first = trainer.evaluate()
    assert first is not None
    assert trainer.run().state.best_loss < first.loss - 0.1
    saved = sorted((tmp_path / "run" / "checkpoints").rglob("adapter_config.json"))
    assert saved[-1].parent.name == "step-0000040"


def test_token_ids_in_an_array_and_bad_data(text: Path) -> None:
    ids = np.array(byte_tokenizer().encode(TEXT))
    by_array = [s.loss for s in onfoot.Trainer(tiny(), ids, options())]
    assert len(by_array) == 6
    for data, said in (
        (ids.astype(float), "token ids must be integers"),
        (ids[None], "in one dimension"),
        (7, "data must be a source"),
        ([], "data must be a source"),
        ([{"prompt": "x"}], "example 1"),
        ("missing.txt", "does not exist"),
    ):
        with pytest.raises(ValueError, match=said):
            onfoot.Trainer(tiny(), data, options())


def test_a_callback_that_raises_ends_the_run_saved_and_named(tmp_path: Path, text: Path) -> None:
    class Broken(onfoot.Callback):
        def __init__(self) -> None:
            self.heard: list[BaseException] = []

        def on_step(self, trainer: onfoot.Trainer, step: Any) -> None:
            if step.step == 5:
                raise RuntimeError("no such metric")

        def on_error(self, trainer: onfoot.Trainer, error: BaseException) -> None:
            self.heard.append(error)

    broken = Broken()
    trainer = onfoot.Trainer(tiny(), text, options(save_every=100, eval_every=100), [broken], out=tmp_path / "run")
    with pytest.raises(
        CallbackError, match=r"Broken.on_step failed after step 5: RuntimeError: no such metric; .*saved"
    ):
        trainer.run()
    assert (tmp_path / "run" / "checkpoints" / "step-0000005" / "model.safetensors").is_file()
    assert len(broken.heard) == 1 and isinstance(broken.heard[0], CallbackError)


@pytest.mark.parametrize(
    ("event", "saved_at"),
    [("on_begin", 0), ("on_gradient", 0), ("on_step", 1), ("on_evaluation", 3), ("on_checkpoint", 3), ("on_end", 6)],
)
def test_whichever_event_a_callback_fails_at_the_run_is_saved_and_goes_on_as_it_would_have(
    event: str, saved_at: int, tmp_path: Path, text: Path
) -> None:
    def fail(self: Any, trainer: onfoot.Trainer, *_: Any) -> None:
        raise KeyError("metric")

    def also(self: Any, trainer: onfoot.Trainer, error: BaseException) -> None:
        raise OSError("no disk")

    broken = type("Broken", (onfoot.Callback,), {event: fail, "on_error": also})()
    trainer = onfoot.Trainer(tiny(), text, options(), [broken], out=tmp_path / "run")
    with pytest.raises(
        CallbackError, match=rf"Broken.{event} failed after step {saved_at}: KeyError: 'metric'; .*saved"
    ):
        trainer.run()  # and not the error of on_error
    checkpoint = tmp_path / "run" / "checkpoints" / f"step-{saved_at:07d}"
    rest = onfoot.Trainer(onfoot.load(checkpoint, "float64", "numpy"), text, options(), out=tmp_path / "run")
    rest.restore(checkpoint)
    assert rest.run().state.step == 6
    whole = onfoot.Trainer(tiny(), text, options())
    whole.run()
    assert all((rest.model.params[n] == whole.model.params[n]).all() for n in whole.model.params)
    best = onfoot.load(tmp_path / "run", "float64", "numpy")  # the folder of the run
    assert all((best.params[n] == whole.model.params[n]).all() for n in whole.model.params)


def test_figures_of_numpy_in_the_records_are_logged_and_others_end_the_run_saved(tmp_path: Path, text: Path) -> None:
    class Adds(onfoot.Callback):
        def __init__(self, value: Any) -> None:
            self.value = value

        def on_step(self, trainer: onfoot.Trainer, step: Any) -> None:
            step.more["mine"] = np.int64(step.step)

        def on_evaluation(self, trainer: onfoot.Trainer, evaluation: Any) -> None:
            evaluation.record |= {"mine": self.value, "torch": torch.tensor(2.5), "nested": [np.bool_(True)]}
            evaluation.lines.clear()

    onfoot.Trainer(tiny(), text, options(quiet=False, watch=True), [Adds(np.float32(0.5))], out=tmp_path / "run").run()
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [r["mine"] for r in log if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [(r["mine"], r["torch"], r["nested"]) for r in log if "val_loss" in r] == [(0.5, 2.5, [True])] * 2
    trainer = onfoot.Trainer(tiny(), text, options(), [Adds(np.zeros(2))], out=tmp_path / "other")
    with pytest.raises(
        CallbackError,
        match=r"Adds.on_evaluation failed after step 3: TypeError: mine has .* ndarray, .*saved at step 3",
    ):
        trainer.run()
    assert (tmp_path / "other" / "checkpoints" / "step-0000003" / "model.safetensors").is_file()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, "fast"])
def test_a_rate_that_is_not_one_is_refused_before_the_update_and_the_run_is_saved(
    bad: Any, tmp_path: Path, text: Path
) -> None:
    trainer = onfoot.Trainer(tiny(), text, options(save_every=2, eval_every=100), out=tmp_path / "run")
    trainer.learning_rate = lambda step: bad if step == 1 else 1e-3
    with pytest.raises(
        CallbackError, match=r"trainer.learning_rate failed after step 1: ValueError: .*saved at step 1"
    ):
        trainer.run()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-0000001"]
    assert all(np.isfinite(p).all() for p in onfoot.load(tmp_path / "run").params.values())


def test_events_come_in_their_order_and_evaluations_can_be_added_to(tmp_path: Path, text: Path) -> None:
    class Watch(onfoot.Callback):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def on_begin(self, trainer: onfoot.Trainer) -> None:
            self.heard.append("begin")

        def on_step(self, trainer: onfoot.Trainer, step: Any) -> None:
            self.heard.append(f"step {step.step}")

        def on_evaluation(self, trainer: onfoot.Trainer, evaluation: Any) -> None:
            self.heard.append(f"evaluation {evaluation.step}")
            evaluation.record["mine"] = 7

        def on_checkpoint(self, trainer: onfoot.Trainer, folder: Path) -> None:
            assert (folder / "trainer" / "manifest.json").is_file()
            self.heard.append(f"checkpoint {folder.name}")

        def on_end(self, trainer: onfoot.Trainer, outcome: Any) -> None:
            self.heard.append(f"end {outcome.state.step}")

    watch = Watch()
    onfoot.Trainer(tiny(), text, options(steps=4, eval_every=2, save_every=3), [watch], out=tmp_path / "run").run()
    assert watch.heard == [
        "begin", "step 1", "step 2", "evaluation 2", "checkpoint step-0000002", "step 3", "checkpoint step-0000003",
        "step 4", "evaluation 4", "checkpoint step-0000004", "end 4",
    ]  # fmt: skip
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [r["mine"] for r in log if "val_loss" in r] == [7, 7]
    assert (tmp_path / "run" / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_a_callback_needs_only_the_events_that_it_hears(text: Path) -> None:
    class OnlySteps:  # not derived from onfoot.Callback
        def __init__(self) -> None:
            self.heard: list[int] = []

        def on_step(self, trainer: onfoot.Trainer, step: Any) -> None:
            self.heard.append(step.step)

    class OnlyGradients:
        def on_gradient(self, trainer: onfoot.Trainer, grads: dict[str, Any]) -> None:
            grads["transformer.ln_f.bias"] *= 0
            raise RuntimeError("enough")

    mine = OnlySteps()
    trainer = onfoot.Trainer(tiny(), text, options(), [mine])
    trainer.run()
    assert mine.heard == [1, 2, 3, 4, 5, 6]
    with pytest.raises(CallbackError, match=r"OnlyGradients.on_gradient failed after step 0: RuntimeError: enough"):
        onfoot.Trainer(tiny(), text, options(), [OnlyGradients(), mine]).run()  # the error is told to both


def test_what_is_not_a_callback_is_named_with_the_way_out(text: Path) -> None:
    class Mine(onfoot.Callback):
        pass

    class Other:
        def on_step_end(self) -> None:
            pass

    given: Any
    for given, said in (
        ([Mine()], None),
        ((Mine(), Mine()), None),
        (Mine(), r"callbacks must be a list, got an object of the class Mine; put it into a list"),
        (Mine, r"callbacks must be a list, got the class Mine"),
        ([Mine(), Mine], r"callbacks\[1\] is the class Mine; pass an instance, Mine\(\)"),
        (
            [Other()],
            r"callbacks\[0\] is an object of the class Other, which has no method of an event: on_begin, .*on_error",
        ),
        (["tensorboard"], r"callbacks\[0\] is an object of the class str, which has no method"),
    ):
        with nullcontext() if said is None else pytest.raises(ValueError, match=said):
            onfoot.Trainer(tiny(), text, options(), given)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_step_end", "did you mean on_step?"),  # transformers
        ("on_validation_end", "did you mean on_evaluation?"),  # Lightning
        ("on_evalution", "did you mean on_evaluation?"),
        ("on_gradients", "did you mean on_gradient?"),
        ("on_train_batch_end", "did you mean on_step?"),  # Keras
        ("on_my_birthday", "choose from on_begin, on_gradient, "),
        ("on_epoch_end", "choose from"),  # these have no equal
        ("on_step_begin", "choose from"),
        ("on_init_end", "choose from"),
        ("on_load_checkpoint", "choose from"),
    ],
)
def test_a_method_that_no_event_would_call_is_an_error(name: str, meant: str, text: Path) -> None:
    mine = type("Mine", (onfoot.Callback,), {name: lambda self, trainer: None})
    said = rf"Mine\.{name} would never be called: there is no such event; {re.escape(meant)}"
    with pytest.raises(ValueError, match=said + r"(.*\.)? A method of your own needs a name"):
        onfoot.Trainer(tiny(), text, options(), [mine()])
    heard: list[str] = []
    both = {name: heard.append, "on_begin": lambda self, trainer: heard.append("begin"), "on_call": 5}
    onfoot.Trainer(tiny(), text, options(), [type("ForTwoTrainers", (), both)()]).run()  # not derived from Callback
    theirs = type("TheirCallback", (), {name: heard.append})
    ours = type("Ours", (onfoot.Callback,), {"on_begin": lambda self, trainer: heard.append("again")})
    onfoot.Trainer(tiny(), text, options(), [type("Both", (ours, theirs), {})()]).run()  # the method of another base
    assert heard == ["begin", "again"]


def test_tensorboard_reads_its_files(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = onfoot.Trainer(tiny(), text, options(log="tensorboard"), out=tmp_path / "run")
    steps = list(trainer)
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    losses = found.Scalars("train/loss")
    assert [e.step for e in losses] == [1, 2, 3, 4, 5, 6]
    assert [e.value for e in losses] == pytest.approx([s.loss for s in steps], rel=1e-6)
    assert [e.value for e in found.Scalars("train/lr")] == pytest.approx([s.lr for s in steps], rel=1e-6)
    assert [e.step for e in found.Scalars("validation/loss")] == [3, 6]
    assert found.Scalars("validation/loss")[-1].value == pytest.approx(trainer.validation_loss, rel=1e-6)


def test_tensorboard_has_each_step_of_a_run_that_was_killed_and_resumed_once(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = options(log="tensorboard", save_every=4, eval_every=4)
    onfoot.Trainer(tiny(), text, settings, out=tmp_path / "run").run()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-0000004"
    rest = onfoot.Trainer(onfoot.load(checkpoint, "float64", "numpy"), text, settings, out=tmp_path / "run")
    rest.restore(checkpoint)
    rest.run()
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    assert [e.step for e in found.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_logging_and_quiet(text: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, "onfoot.train"):
        onfoot.Trainer(tiny(), text, options()).run()
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "step 0 of 6, no run folder" and said[-1] == "done at step 6"
    assert sum(line.startswith("step 3: validation loss") for line in said) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == ""


def test_a_notebook_has_one_progress_bar_that_is_updated_in_place(tmp_path: Path, text: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")

    bars = list[tuple[str, str]]()  # the kind and the content of each message about a bar

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            html = msg["content"].get("data", {}).get("text/html", "")
            if "<progress" in html:
                bars.append((msg["msg_type"], html))
            return super().process_message(msg, cell, cell_index)

    code = f"""
import onfoot
from onfoot.train import progress
progress.NOTEBOOK_EVERY = 0.0  # every step
config = onfoot.GPT2Config(vocab_size=257, n_positions=16, n_embd=16, n_layer=1, n_head=2)
model = onfoot.create(config, dtype="float64")
model.tokenizer = onfoot.Tokenizer.byte()
trainer = onfoot.Trainer(model, {str(text)!r}, onfoot.TrainingOptions(steps=4, batch_size=2, warmup=1, sample_tokens=0))
losses = [step.loss for step in trainer]
print(len(losses), trainer.outcome.interrupted)
"""
    plot = f"""
onfoot.Trainer(model, {str(text)!r}, onfoot.TrainingOptions(steps=1, quiet=True), out="run").run()
from matplotlib import pyplot
pyplot.plot([1, 2])
pyplot.show()
"""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (code, plot)])
    Client(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = book.cells[0].outputs
    assert "4 False" in "".join(o.get("text", "") for o in outputs)
    assert not any(o.output_type == "error" for o in outputs)
    assert [kind for kind, _ in bars] == ["display_data", *["update_display_data"] * 3]
    assert [f'<progress value="{step}" max="4"' in html for step, (_, html) in enumerate(bars, 1)] == [True] * 4
    (bar,) = (html for o in outputs if "<progress" in (html := o.get("data", {}).get("text/html", "")))
    assert bar == bars[-1][1] and "step 4/4  loss " in bar
    assert (tmp_path / "run" / "loss.png").is_file()
    assert any("image/png" in o.get("data", {}) for o in book.cells[1].outputs)  # a user's plot after the run's own


def test_the_run_folder_of_a_trainer_is_not_a_commands_run(tmp_path: Path, text: Path) -> None:
    onfoot.Trainer(tiny(), text, options(), out=tmp_path / "run").run()
    with pytest.raises(ValueError, match=r"no run\.json"):
        runs.resume(tmp_path / "run", onfoot.TrainingOptions, lambda *_: None)  # type: ignore[arg-type, return-value]


def trained_names(model: onfoot.Model, settings: onfoot.TrainingOptions, data: Any) -> set[str]:
    before = {name: value.copy() for name, value in model.params.items()}
    onfoot.Trainer(model, data, settings).run()
    return {name for name in before if (model.params[name] != before[name]).any()}


def test_freeze_and_dropout_of_the_options_act(text: Path) -> None:
    model, settings = tiny(), options(steps=2, freeze="transformer.wte,*.bias")
    for _ in range(2):  # a second run on the same model, too
        names = trained_names(model, settings, text)
        assert names == {n for n in model.params if not n.endswith("bias") and "wte" not in n}
    onfoot.find_lr(other := tiny(), text, settings, steps=12)
    assert other.trainable == set(other.params)  # the range test leaves the model as it was
    with pytest.raises(ValueError, match="freeze: no parameter matches 'nosuch'"):
        onfoot.Trainer(tiny(), text, options(freeze="nosuch"))

    def losses(model: onfoot.Model, p: float) -> list[float]:
        return [step.loss for step in onfoot.Trainer(model, text, options(dropout=p))]

    of_config = losses(tiny(embd_pdrop=0.5, attn_pdrop=0.5, resid_pdrop=0.5), 0.0)
    assert losses(tiny(), 0.5) == of_config != losses(tiny(), 0.0)


def test_the_validation_data_of_the_options_is_what_the_loss_is_measured_on(tmp_path: Path) -> None:
    held_out = [{"prompt": f"{a}-1=", "completion": f"{a - 1}"} for a in range(3)]
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in held_out))
    given = {"steps": 2, "quiet": True, "sample_tokens": 0, "validation_data": [str(path)]}
    trainer = onfoot.Trainer(tiny(), EXAMPLES, onfoot.FinetuneOptions(**given))
    assert (len(trainer.source.train.examples), len(trainer.source.held_out.examples)) == (len(EXAMPLES), 3)
    pairs = [{"prompt": f"{a}+1=", "chosen": f"{a + 1}", "rejected": "no"} for a in range(9)]
    path.write_text("".join(json.dumps(one) + "\n" for one in pairs[:2]))
    preferences = onfoot.Trainer(tiny(), pairs, onfoot.FinetuneOptions(dpo=True, **given))
    assert (len(preferences.source.train), len(preferences.source.held_out)) == (9, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data": ["nosuch.jsonl"]}, r"data=\['nosuch.jsonl'\] is for the command onfoot finetune; a Trainer is given"),
        ({"model": "nosuch"}, "model='nosuch' is for the command"),
        ({"validation_data": ["nosuch.jsonl"]}, "nosuch.jsonl does not exist"),
        ({"dtype": "float32"}, "dtype='float32', but this model has dtype='float64'; .*onfoot.load"),
        ({"engine": "numba"}, "engine='numba', but this model has engine='numpy'"),
        ({"quantized": True}, "quantized=True, but this model has quantized=False"),
        ({"r": 3}, r"r=3, but this model has r=2; .*model.add_lora\(…\) makes another"),
        ({"full": True}, r"full=True, but this model has full=False; .*model.use_adapter\(None\)"),
        ({"use_rslora": True}, "use_rslora=True, but this model has use_rslora=False"),
        ({"targets": "nosuch"}, "no layer matches 'nosuch'"),
        ({"targets": "c_attn"}, "targets='c_attn', but this model has targets='transformer.h.0.attn.c_proj'"),
        ({"r": 2, "targets": "attn.c_proj", "dtype": "float64", "engine": "numpy"}, None),
    ],
)
def test_options_that_differ_from_the_model_or_the_data_are_refused(given: dict[str, Any], said: str | None) -> None:
    model = tiny()
    model.add_lora(r=2, targets=["attn.c_proj"])
    with nullcontext() if said is None else pytest.raises(ValueError, match=said):
        onfoot.Trainer(model, EXAMPLES, onfoot.FinetuneOptions(steps=1, quiet=True, **given))


def test_options_of_an_adapter_need_one_and_options_of_examples_need_examples(text: Path) -> None:
    with pytest.raises(ValueError, match="r=3, but this model has no adapter"):
        onfoot.Trainer(tiny(), EXAMPLES, onfoot.FinetuneOptions(steps=1, r=3))
    with pytest.raises(ValueError, match="max_length=8 is for examples, and this data is text"):
        onfoot.Trainer(tiny(), text, onfoot.FinetuneOptions(steps=1, lr=1e-3, max_length=8))
    with pytest.raises(ValueError, match="TrainOptions are those of the command onfoot train"):
        onfoot.Trainer(tiny(), text, TrainOptions(steps=1))
    given: Any
    for given in ([onfoot.Callback()], {"steps": 3}):
        with pytest.raises(ValueError, match=f"options must be onfoot.TrainingOptions .* got {type(given).__name__}"):
            onfoot.Trainer(tiny(), text, given)


class FailsLater:
    """A source of the user's own that does what it is told at step 3."""

    def __init__(self, then: Any) -> None:
        self.then = then

    def microbatches(self, step: int) -> Any:
        tokens = np.arange(32).reshape(2, 16) + step
        if step < 3:
            return [(tokens, tokens + 1)]
        return self.then(tokens) if callable(self.then) else self.then


def _raise(tokens: np.ndarray) -> Any:
    raise OSError("disk gone")


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (_raise, "OSError: disk gone"),
        (None, "ValueError: it must return a list of batches (tokens, targets), got None"),
        ([], "ValueError: it must return a list of batches (tokens, targets), got []"),
        ([5], "ValueError: a batch must be (tokens, targets) or (tokens, targets, segments), got 5"),
        (lambda x: [(x, x / 2)], "ValueError: the targets of a batch must be integers (B, T), got float64 (2, 16)"),
        (lambda x: [(x[0], x[0])], "ValueError: the tokens of a batch must be integers (B, T), got int64 (16,)"),
        (lambda x: [(x, None)], "ValueError: the targets of a batch must be integers (B, T), got nothing"),
        (lambda x: [(x + 300, x)], "ValueError: token id 334 is outside 0 ... 256 (*"),
        (lambda x: [(x, x[:, :4])], "ValueError: targets have shape (2, 4), but tokens have shape (2, 16)*"),
        (lambda x: [(np.tile(x, 5),) * 2], "ValueError: a sequence of 80 tokens exceeds n_positions=16; *"),
        (lambda x: [(x, 0 * x - 100)], "ValueError: step 4: all 32 targets are ignored (-100)"),
    ],
)
def test_an_own_source_that_fails_is_named_and_the_run_is_saved(then: Any, said: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = onfoot.Trainer(tiny(), FailsLater(then), options(), out=run)
    message = f"FailsLater.microbatches failed after step 3: {said}; the run is saved at step 3, in {run}"
    with pytest.raises(ValueError, match=f"^{re.escape(message).replace(chr(92) + '*', '.*')}$"):
        trainer.run()
    model = onfoot.load(run / "last", dtype="float64", engine="numpy")
    for name, value in model.params.items():
        assert (value == trainer.model.params[name]).all()


@pytest.mark.parametrize(
    ("method", "returned", "said"),
    [
        ("validation", 7, "TypeError: 'int' object is not iterable"),
        ("validation", [5], "ValueError: a batch must be (tokens, targets) or (tokens, targets, segments), got 5"),
        ("validation", [([[300]], [[0]])], "ValueError: token id 300 is outside 0 ... 256"),
        ("prompt", 3.5, "ValueError: "),
        ("prompt", OSError("disk gone"), "OSError: disk gone"),
        ("validation", OSError("disk gone"), "OSError: disk gone"),
    ],
)
def test_the_validation_and_the_prompt_of_an_own_source_are_named_when_they_fail(
    method: str, returned: Any, said: str, tmp_path: Path
) -> None:
    def answer(self: Any, *_: Any) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    tokens = np.arange(32).reshape(2, 16)
    good = {"microbatches": lambda self, step: [(tokens, tokens)], "validation": lambda self: [(tokens, tokens)]}
    mine = type("Mine", (), {**good, method: answer})()
    trainer = onfoot.Trainer(tiny(), mine, options(sample_tokens=2), out=tmp_path / "run")
    with pytest.raises(ValueError, match=rf"^Mine\.{method} failed after step 3: {re.escape(said)}.* saved at step 3"):
        trainer.run()
    assert (tmp_path / "run" / "last" / "model.safetensors").is_file()


def test_the_batches_of_private_examples_of_an_own_source_are_checked(tmp_path: Path) -> None:
    class Mine(onfoot.Source):
        unit, n_examples = "row", 8

        def batches_of(self, examples: np.ndarray) -> Any:
            return [(np.full((2, 4), 300), np.zeros((2, 4), int))]

    trainer = onfoot.Trainer(tiny(), Mine(), options(dp_clip=1.0, dp_noise=0.0), out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"^Mine\.batches_of failed after step 0: ValueError: token id 300 is outside"):
        trainer.run()


def test_an_own_source_may_return_tensors_and_lists() -> None:
    torch = pytest.importorskip("torch")
    losses = []
    for make in (np.asarray, torch.tensor, np.ndarray.tolist):
        trainer = onfoot.Trainer(tiny(), FailsLater(lambda x, make=make: [(make(x), make(x + 1))]), options())
        losses.append([step.loss for step in trainer])
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 6


STAYS = (
    "ValueError: evaluation.{0} and evaluation.record['{1}'] must stay as they were measured; choose another name in "
    "evaluation.record for what you add"
)


@pytest.mark.parametrize(
    ("event", "add", "said"),
    [
        ("on_step", lambda step: step.more.update(loss=1.0), "ValueError: loss is in the log of every step; choose"),
        ("on_step", lambda step: step.more.update(step=1), "ValueError: step is in the log of every step; choose"),
        ("on_evaluation", lambda one: one.record.update({1: 2}), "TypeError: names in the log must be strings, got 1"),
        ("on_evaluation", lambda one: one.record.update(step=9), STAYS.format("step", "step")),
        ("on_evaluation", lambda one: one.record.update(val_loss=0.5), STAYS.format("loss", "val_loss")),
        ("on_evaluation", lambda one: one.record.clear(), STAYS.format("step", "step")),
        ("on_evaluation", lambda one: setattr(one, "loss", 0.5), STAYS.format("loss", "val_loss")),
        ("on_evaluation", lambda one: setattr(one, "loss", np.float32(one.loss)), STAYS.format("loss", "val_loss")),
        ("on_evaluation", lambda one: one.means.update(f1=0.5), STAYS.format("means", "val_f1")),
        ("on_evaluation", lambda one: setattr(one, "loss", "x"), "TypeError: loss must stay a number, got 'x'"),
        ("on_step", lambda one: setattr(one, "loss", "x"), "TypeError: loss must stay a number, got 'x'"),
        ("on_step", lambda one: setattr(one, "lr", None), "TypeError: lr must stay a number, got None"),
    ],
)
def test_what_the_log_cannot_hold_is_an_error_of_the_callback_and_the_run_is_saved(
    event: str, add: Callable[[Any], None], said: str, text: Path, tmp_path: Path
) -> None:
    mine = type("Mine", (onfoot.Callback,), {event: lambda self, trainer, one: add(one)})()
    with pytest.raises(ValueError, match=rf"^Mine\.{event} failed after step \d: {re.escape(said)}.* the run is saved"):
        onfoot.Trainer(tiny(), text, options(), [mine], out=tmp_path / "run").run()
    assert (tmp_path / "run" / "last" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("event", "again", "events"),
    [
        ("on_evaluation", "evaluate", "on_evaluation → on_evaluation"),
        ("on_checkpoint", "save", "on_checkpoint → on_checkpoint"),
        ("on_checkpoint", "evaluate", "on_evaluation → on_checkpoint → on_evaluation"),
    ],
)
def test_a_callback_that_causes_its_own_event_is_named_in_a_short_error(
    event: str, again: str, events: str, text: Path, tmp_path: Path
) -> None:
    mine = type("Mine", (onfoot.Callback,), {event: lambda self, trainer, _: getattr(trainer, again)()})()
    trainer = onfoot.Trainer(tiny(), text, options(), [mine], out=tmp_path / "run")
    way_out = "call evaluate() and save() at another event, such as on_step; the run is saved"
    said = f"Mine.{event} failed after step 3: ValueError: {events} would never end; {way_out}"
    with pytest.raises(CallbackError, match=f"^{re.escape(said)}") as raised:
        trainer.run()
    assert len(str(raised.value)) < 400 + len(str(tmp_path))


def test_an_error_in_an_evaluation_that_a_callback_asks_for_names_the_callback_that_failed(text: Path) -> None:
    class Asks(onfoot.Callback):
        def on_step(self, trainer: Any, step: Any) -> None:
            trainer.evaluate()

    class Fails(onfoot.Callback):
        def on_evaluation(self, trainer: Any, evaluation: Any) -> None:
            raise KeyError("metric")

    with pytest.raises(CallbackError, match=r"^Fails\.on_evaluation failed after step 1: KeyError: 'metric'$"):
        onfoot.Trainer(tiny(), text, options(), [Asks(), Fails()]).run()


def test_a_method_that_is_an_attribute_of_an_object_hears_its_event(text: Path) -> None:
    heard = list[str]()
    one = types.SimpleNamespace(
        on_gradient=lambda trainer, grads: heard.append("gradient"),
        on_step=lambda trainer, step: heard.append("step"),
        on_evaluation=None,
    )
    onfoot.Trainer(tiny(), text, options(steps=2), [one]).run()
    assert heard == ["gradient", "step"] * 2


def test_numbers_that_json_does_not_have_are_logged_as_null(text: Path, tmp_path: Path) -> None:
    class Odd(onfoot.Callback):
        def on_step(self, trainer: Any, step: Any) -> None:
            step.more |= {"a": float("nan"), "b": [np.inf, 1.0], "self": 2}

    onfoot.Trainer(tiny(), text, options(), [Odd()], out=tmp_path / "run").run()
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(name)

    steps = [record for record in (json.loads(line, parse_constant=refuse) for line in lines) if "loss" in record]
    assert [(one["a"], one["b"], one["self"]) for one in steps] == [(None, [None, 1.0], 2)] * 6


def test_what_is_not_a_model_or_a_folder_is_named(text: Path) -> None:
    with pytest.raises(ValueError, match=r"^model must be a model, got str; onfoot\.load\(path\) loads one$"):
        onfoot.Trainer("base", text, options())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^out must be the name of a folder, got int$"):
        onfoot.Trainer(tiny(), text, options(), out=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^data is an empty name; pass the name of a file or folder$"):
        onfoot.Trainer(tiny(), "", options())


def test_numpy_numbers_and_a_list_of_betas_are_options(text: Path) -> None:
    given = onfoot.TrainingOptions(steps=np.int64(3), lr=np.float32(0.5), betas=[0.9, 0.95])  # type: ignore[arg-type]
    assert given == onfoot.TrainingOptions(steps=3, lr=0.5, betas=(0.9, 0.95))
    assert (type(given.steps), type(given.lr)) == (int, float)


def test_muon_is_refused_for_lora_layers(text: Path) -> None:
    model = tiny()
    model.add_lora(r=2)
    with pytest.raises(ValueError, match=r"optimizer='muon' is for the matrices of the blocks, .* leave frozen"):
        onfoot.Trainer(model, text, options(optimizer="muon"))


def test_a_long_warmup_is_warned_of_once_in_python_too(
    text: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "onfoot.train"):
        onfoot.Trainer(tiny(), text, options(warmup=5, quiet=False)).run()
    said = "the warmup of 5 steps takes more than half of the 6 steps of the run; pass --warmup 1, or more --steps"
    assert " ".join(capsys.readouterr().out.split()).count(f"warning: {said}") == 1
    assert [record.getMessage() for record in caplog.records] == [said]
