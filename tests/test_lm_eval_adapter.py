"""lm-eval's requests get the answers of lm-eval's own Hugging Face model, and its tasks run without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import onfoot
from onfoot.cli import app
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.optional("lm-eval is a large package that nothing else needs")]

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
PAIRS = [
    ("the quick brown", " fox"),
    ("", "the dog"),
    ("the lazy ", "dog sleeps"),
    (TEXT, " and more"),  # longer than the context
    ("fox", " jumps over the lazy dog"),
]
CONFIGS: dict[str, Any] = {
    "gpt2": lambda size: onfoot.GPT2Config(vocab_size=size, n_positions=24, n_embd=16, n_layer=2, n_head=2),
    "llama": lambda size: onfoot.LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = bpe_tokenizer([TEXT], 290)
    model = onfoot.create(CONFIGS[request.param](tokenizer.size))
    rng = np.random.default_rng(0)
    for name, value in model.params.items():
        model.params[name] = value + rng.normal(0, 0.3, value.shape).astype(np.float32)
    model.tokenizer = Tokenizer(tokenizer.backend, tokenizer.eos, None, TEMPLATE)
    path = tmp_path_factory.mktemp("lm_eval") / request.param
    model.save(path)
    return path


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[Any, Any]:
    """Our model and lm-eval's own, of the same folder."""
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from onfoot.lm_eval import OnfootLM

    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=2)
    return OnfootLM(folder, batch_size=2), theirs


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]  # type: ignore[arg-type]


def test_loglikelihoods_are_theirs(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    greedy = ours.generate_until(requests("generate_until", [("the quick", {"until": [], "max_gen_toks": 2})]))[0]
    asked = requests("loglikelihood", [*PAIRS, ("the quick", greedy)])
    mine, expected = ours.loglikelihood(asked), theirs.loglikelihood(asked)
    assert np.allclose([x for x, _ in mine], [x for x, _ in expected], rtol=0, atol=2e-5)
    assert [is_greedy for _, is_greedy in mine] == [is_greedy for _, is_greedy in expected]
    assert mine[-1][1] and not all(is_greedy for _, is_greedy in mine)


def test_rolling_loglikelihoods_are_theirs(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    asked = requests("loglikelihood_rolling", [(TEXT,), ("the",), (TEXT[:70],), ("dog fox",)])
    assert np.allclose(ours.loglikelihood_rolling(asked), theirs.loglikelihood_rolling(asked), rtol=0, atol=1e-4)


def test_generated_texts_are_theirs(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    asked = [
        (context, {"until": until, "max_gen_toks": n, "do_sample": False})
        for context in ("the quick brown", "dog", TEXT)
        for until, n in ((["zzz"], 9), (["e", "o"], 9), (["zzz"], 4))
    ]
    mine = ours.generate_until(requests("generate_until", asked))
    assert mine == theirs.generate_until(requests("generate_until", asked))
    assert len(set(mine)) > 3 and all("e" not in text for text in mine[1::3])


def test_the_token_that_begins_a_text_and_the_chat_template_are_theirs(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    assert (ours.prefix_token_id, ours.eot_token_id) == (theirs.prefix_token_id, theirs.eot_token_id)
    chat = [{"role": "user", "content": "the dog"}, {"role": "assistant", "content": "jumps"}]
    for generation_prompt in (True, False):
        assert ours.apply_chat_template(chat, generation_prompt) == theirs.apply_chat_template(chat, generation_prompt)
    assert ours.tok_encode(TEXT) == theirs.tok_encode(TEXT)


def write_task(folder: Path) -> Path:
    """A task of multiple choice whose data is on disk."""
    lines = [
        {"q": f"the {a}", "choices": [" fox", " dog", " lazy cat"], "label": i % 3} for i, a in enumerate("abcdef")
    ]
    (folder / "task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {
        "task": "animals", "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "task.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    (folder / "animals.yaml").write_text(json.dumps(task))
    return folder / "animals.yaml"


def test_a_task_from_disk_runs_on_the_command_line_and_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    import onfoot.lm_eval  # noqa: F401 (registers it)

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    task = write_task(tmp_path)
    settings: dict[str, Any] = {"tasks": [str(task)], "bootstrap_iters": 0}
    theirs = lm_eval.simple_evaluate("hf", {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}, **settings)
    ours = lm_eval.simple_evaluate("onfoot", {"pretrained": str(folder)}, **settings)
    expected = {name: theirs["results"]["animals"][f"{name},none"] for name in ("acc", "acc_norm")}
    assert {name: ours["results"]["animals"][f"{name},none"] for name in expected} == expected
    result = CliRunner().invoke(app, ["eval", str(folder), "--tasks", str(task), "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text())[str(folder)]["animals"]
    assert {name: written[name] for name in expected} == expected
    assert f"{written['acc']:.4f} ± {written['acc_stderr']:.4f}" in result.stdout
    result = CliRunner().invoke(app, ["eval", str(folder), "--tasks", "no_such_task_at_all"])
    assert result.exit_code == 2 and "no_such_task_at_all" in result.stderr


def test_models_and_settings_that_cannot_be_used_are_named(folder: Path) -> None:
    pytest.importorskip("lm_eval")
    from onfoot.lm_eval import OnfootLM

    with pytest.raises(ValueError, match=r"max_length must be in 2 ... 24, the model's n_positions, got 25"):
        OnfootLM(folder, max_length=25)
    with pytest.raises(ValueError, match=r"batch_size must be >= 1, got 0"):
        OnfootLM(folder, batch_size=0)
    with pytest.raises(ValueError, match=r"asks for 24 new tokens, but the model has 24 positions"):
        OnfootLM(folder).generate_until(requests("generate_until", [("a", {"until": [], "max_gen_toks": 24})]))
    model = onfoot.load(folder)
    model.tokenizer = None
    with pytest.raises(ValueError, match=r"has no tokenizer, which lm-eval's tasks need"):
        OnfootLM(model)
