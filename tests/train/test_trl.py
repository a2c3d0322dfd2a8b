"""Data as it comes, beside TRL: the ids and labels that its own trainers make of the same records.

ShareGPT's names of the roles and Alpaca's form are not TRL's; TRL gets the messages that they mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from onfoot.data.preferences import read_preferences
from onfoot.data.sft_examples import read_examples
from onfoot.formats.chat import ChatTemplate
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer
from tests.train.test_data_formats import CALLS, MARKED, TOOLS, TURNS, WORDS

QUESTION, ANSWER = TURNS[1]["content"], TURNS[2]["content"]
NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
SHAREGPT = [{"from": NAMES[turn["role"]], "value": turn["content"]} for turn in TURNS]
LONG = [TURNS[0], *(turn for _ in range(4) for turn in TURNS[1:])]
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # ours, and TRL's of the same meaning
    "text": ({"text": "the cat sat"}, {"text": "the cat sat"}),
    "prompt and completion": (two := {"prompt": "How many?\n", "completion": "Three, grüße 🤗"}, two),
    "prompt and completion of messages": (asked := {"prompt": TURNS[:4], "completion": TURNS[4:]}, asked),
    "messages, one turn": (one := {"messages": TURNS[1:3]}, one),
    "messages, several turns": (several := {"messages": TURNS}, several),
    "messages, eight answers": (eight := {"messages": LONG}, eight),
    "ShareGPT": ({"conversations": SHAREGPT}, several),
    "Alpaca": (
        {"instruction": "Add one.", "input": "7", "output": "8"},
        {
            "prompt": "Instruction:\nAdd one.\n\nInput:\n7\n\nAnswer:\n",
            "completion": "8",
        },
    ),
    "Alpaca, in the template": (
        {"instruction": "Add one.", "input": "7", "output": "8"},
        {"messages": [{"role": "user", "content": "Add one.\n\n7"}, {"role": "assistant", "content": "8"}]},
    ),
    "prompt and completion, in the template": (
        two,
        {
            "messages": [
                {"role": "user", "content": "How many?"},
                {"role": "assistant", "content": two["completion"]},
            ]
        },
    ),
    "tools": ({"messages": CALLS, "tools": TOOLS}, {"messages": CALLS, "tools": json.dumps(TOOLS)}),
}


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make: Callable[[], Tokenizer] = {
        "bytes": byte_tokenizer, "bpe": lambda: bpe_tokenizer(iter(WORDS), 400),
    }[request.param]  # fmt: skip
    tokenizer = make()
    tokenizer.save(path, 4096)
    ChatTemplate(MARKED, bos="", eos=tokenizer.eos or "").save(path)
    return path


def their_tokenizer(folder: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tiny(tokenizer: Any) -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_positions=4096, n_embd=8, n_layer=1, n_head=1))


def settings(tmp_path: Path) -> dict[str, Any]:
    return {"output_dir": str(tmp_path / "out"), "report_to": [], "use_cpu": True, "bf16": False, "max_length": None}


@pytest.mark.parametrize("form", FORMS)
def test_examples_have_the_ids_and_labels_of_trls_trainer(form: str, folder: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    mine, theirs = FORMS[form]
    conversation = "messages" in theirs
    config = trl.SFTConfig(**settings(tmp_path), assistant_only_loss=conversation)
    tokenizer = their_tokenizer(folder)
    trainer = trl.SFTTrainer(
        tiny(tokenizer), args=config, train_dataset=Dataset.from_list([theirs] * 2), processing_class=tokenizer
    )
    batch = trainer.data_collator([trainer.train_dataset[0]])
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(mine) + "\n", encoding="utf-8")
    templated = form.endswith("in the template")
    (made,) = read_examples([path], Tokenizer.load(folder), ChatTemplate.find(folder), templated=templated)
    assert made.ids.tolist() == ids
    assert [i if learn else -100 for i, learn in zip(ids, made.learn, strict=True)] == labels
    assert any(label != -100 for label in labels)


@pytest.mark.parametrize(
    "pair",
    [
        {"prompt": "How many?\n", "chosen": "Three.", "rejected": "Four!"},
        {"prompt": TURNS[:4], "chosen": TURNS[4:], "rejected": [{"role": "assistant", "content": "Four!"}]},
    ],
    ids=["texts", "messages"],
)
def test_preference_pairs_have_the_ids_and_masks_of_trls_trainer(
    pair: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    tokenizer = their_tokenizer(folder)
    trainer = trl.DPOTrainer(
        tiny(tokenizer),
        tiny(tokenizer),  # the reference
        args=trl.DPOConfig(**settings(tmp_path)),
        train_dataset=Dataset.from_list([pair] * 2),
        processing_class=tokenizer,
    )
    batch = trainer.data_collator([trainer.train_dataset[0]])
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(pair) + "\n", encoding="utf-8")
    (made,) = read_preferences([path], Tokenizer.load(folder), ChatTemplate.find(folder))
    for row, mine in enumerate(made):  # TRL stacks the chosen over the rejected answers
        n = int(batch["attention_mask"][row].sum())
        assert mine.ids.tolist() == batch["input_ids"][row][:n].tolist()
        assert mine.learn.astype(int).tolist() == batch["completion_mask"][row][:n].tolist()
