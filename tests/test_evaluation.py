"""`onfoot.evaluate`: transformers' own loss over the same windows, every target once, and the same for a GGUF file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import onfoot
from onfoot.data.sliding import Piece, sliding_windows, window_batches
from onfoot.evaluation import Evaluation
from onfoot.formats.gguf_model import gguf_name
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer
from onfoot.models.model import Model

BYTES = byte_tokenizer()
TEXT = "To be, or not to be: that is the question — whether 'tis nobler in the mind to suffer the slings and arrows …"
CONFIGS = {
    "gpt2": onfoot.GPT2Config(vocab_size=257, n_positions=40, n_embd=16, n_layer=2, n_head=2),
    "llama": onfoot.LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=40,
    ),
}  # fmt: skip


def scrambled(config: Any, tokenizer: Tokenizer | None = BYTES, seed: int = 1) -> Model:
    model = onfoot.create(config, seed)
    rng = np.random.default_rng(seed)
    for name, value in model.params.items():
        model.params[name] = value + rng.normal(0, 0.3, value.shape).astype(np.float32)
    model.tokenizer = tokenizer
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    scrambled(CONFIGS[request.param]).save(folder)
    return onfoot.load(folder), folder


def their_loss(folder: Path, documents: list[tuple[list[int], list[bool]]], context: int, stride: int) -> float:
    """transformers' own loss of each window, with labels for the targets that no earlier window has."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for ids, learn in documents:
        seen = 0
        while seen < len(ids) - 1:
            end = min(seen + stride if seen else context, len(ids) - 1)  # the last target of this window
            begin = max(0, end - context)
            places = range(begin, end + 1)
            labels = [ids[i] if i > seen and learn[i] else -100 for i in places]
            n = sum(label != -100 for label in labels)
            seen = end
            if n:
                with torch.no_grad():
                    loss = theirs(torch.tensor([ids[begin : end + 1]]), labels=torch.tensor([labels])).loss
                total, count = total + loss.item() * n, count + n
    return total / count


@pytest.mark.parametrize(("context", "stride"), [(39, 39), (39, None), (17, 5), (8, 1), (3, 2), (39, 38)])
def test_the_loss_is_transformers_own_over_the_same_windows(
    saved: tuple[Model, Path], tmp_path: Path, context: int, stride: int | None
) -> None:
    model, folder = saved
    (tmp_path / "text.md").write_text(TEXT, encoding="utf-8")
    result = onfoot.evaluate(model, tmp_path / "text.md", context=context, stride=stride, batch_size=3)
    ids = [256, *BYTES.encode(TEXT)]
    expected = their_loss(folder, [(ids, [True] * len(ids))], context, stride or context // 2)
    assert abs(result.loss - expected) < 1e-5
    assert (result.n_tokens, result.n_bytes) == (len(ids) - 1, len(TEXT.encode()))
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(expected / math.log(2), rel=1e-5)  # one token per byte
    assert (result.context, result.stride) == (context, stride or context // 2)


def test_only_the_completions_of_examples_count_and_lines_are_separate(
    saved: tuple[Model, Path], tmp_path: Path
) -> None:
    model, folder = saved
    lines: list[dict[str, Any]] = [
        {"prompt": "What is one plus one? ", "completion": "It is two, said the sage."},
        {"text": "é plain text, of more than one window: forty tokens are not enough for it"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {"text": "x"},
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = onfoot.evaluate(model, tmp_path / "data.jsonl", context=20, stride=9)

    def parts(*texts: str) -> tuple[list[int], list[bool]]:
        """A prompt and an answer in turns; the EOS token ends the last."""
        ids = [BYTES.encode(text) for text in texts]
        learn = [i % 2 == 1 for i, part in enumerate(ids) for _ in part]
        return [i for part in ids for i in part] + [256], [*learn, True]

    chat = ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "ho<|im_end|>\n")
    texts = [[256, *BYTES.encode(line["text"])] for line in lines if "text" in line]
    documents = [
        parts(lines[0]["prompt"], lines[0]["completion"]),
        (texts[0], [True] * len(texts[0])),
        parts(*chat),
        (texts[1], [True] * len(texts[1])),
    ]
    assert abs(result.loss - their_loss(folder, documents, 20, 9)) < 1e-5
    assert result.n_tokens == (25 + 1) + len(texts[0]) - 1 + (len(chat[1]) + 1) + 1
    assert result.n_bytes == 25 + len(lines[1]["text"].encode()) + len(chat[1]) + 1


@given(st.integers(1, 9), st.integers(1, 9), st.lists(st.integers(0, 14), max_size=5), st.integers(1, 4))
def test_every_target_is_in_exactly_one_window_with_enough_context(
    context: int, stride: int, sizes: list[int], batch_size: int
) -> None:
    stride = min(stride, context)
    ids = np.arange(sum(sizes))  # each token is its own place
    learn = np.random.default_rng(len(sizes)).random(len(ids)) < 0.8
    learn[:1] = False
    cuts = np.cumsum([0, *sizes])
    pieces = [Piece(ids[a:e], learn[a:e], 0) for a, e in pairwise(cuts)]
    found: list[int] = []
    for tokens, targets in window_batches(sliding_windows(pieces, context, stride), batch_size, context):
        assert tokens.shape == targets.shape and tokens.shape[1] <= context and len(tokens) <= batch_size
        for row, wanted in zip(tokens, targets, strict=True):
            for place in np.flatnonzero(wanted != -100):
                assert row[place] == wanted[place] - 1  # the token before it
                assert (row[: place + 1] == np.arange(row[0], row[0] + place + 1)).all()
                assert place + 1 >= min(wanted[place], context - stride + 1)  # tokens of context
                found.append(int(wanted[place]))
    assert sorted(found) == np.flatnonzero(learn).tolist()


def test_batch_size_and_pieces_do_not_change_the_loss(
    saved: tuple[Model, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = saved
    path = tmp_path / "text.txt"
    path.write_text(TEXT.replace(" ", "\n"), encoding="utf-8")
    whole = onfoot.evaluate(model, path, context=16)
    assert onfoot.evaluate(model, path, context=16, batch_size=1).loss == pytest.approx(whole.loss, abs=1e-6)
    monkeypatch.setattr("onfoot.data.corpus.PIECE", 7)
    parts = onfoot.evaluate(model, path, context=16)
    assert (parts.loss, parts.n_bytes, parts.n_tokens) == (whole.loss, whole.n_bytes, whole.n_tokens)


def test_a_limit_keeps_the_first_bytes_and_progress_reaches_all(saved: tuple[Model, Path], tmp_path: Path) -> None:
    model, _ = saved
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    place = TEXT.index("—")  # three bytes, of which a limit may keep none or all
    size = len(TEXT[:place].encode())
    seen: list[tuple[int, int, float]] = []

    def on_progress(done: int, of: int, loss: float) -> None:
        seen.append((done, of, loss))

    settings: dict[str, Any] = {"context": 8, "stride": 3, "batch_size": 2}
    for limit, end in ((size, place), (size + 2, place), (size + 3, place + 1), (999, len(TEXT))):
        (tmp_path / "first.txt").write_text(TEXT[:end], encoding="utf-8")
        cut = onfoot.evaluate(model, tmp_path / "text.txt", limit=limit, on_progress=on_progress, **settings)
        assert cut == onfoot.evaluate(model, tmp_path / "first.txt", **settings)
        assert cut.n_tokens == cut.n_bytes == len(TEXT[:end].encode())
        assert seen[-1] == (cut.n_tokens, cut.n_tokens, cut.loss)
    assert all(a < b for (a, _, _), (b, _, _) in pairwise(seen[-3:]))
    examples = "".join(json.dumps({"prompt": "a", "completion": f"{n}" * 4}) + "\n" for n in range(3))
    texts = "".join(json.dumps({"text": f"{n}" * 4}) + "\n" for n in range(3))
    (tmp_path / "examples.jsonl").write_text(examples)
    (tmp_path / "texts.jsonl").write_text(texts)
    for limit, n_examples, n_text in ((1, 1, 1), (4, 1, 4), (5, 2, 5), (99, 3, 12)):
        assert onfoot.evaluate(model, tmp_path / "examples.jsonl", limit=limit).n_bytes == 4 * n_examples
        assert onfoot.evaluate(model, tmp_path / "texts.jsonl", limit=limit).n_bytes == n_text


def test_a_limit_cuts_pieces_where_it_cuts_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = scrambled(CONFIGS["gpt2"]), tmp_path / "text.txt"
    path.write_text(TEXT.replace(" ", "\n"), encoding="utf-8")
    whole = onfoot.evaluate(model, path, limit=50)
    monkeypatch.setattr("onfoot.data.corpus.PIECE", 7)
    assert onfoot.evaluate(model, path, limit=50) == whole and whole.n_bytes == 50


def test_a_tokenizer_without_special_tokens_leaves_out_the_first_token(tmp_path: Path) -> None:
    backend = char_tokenizer(["é", "abcdef"]).backend
    tokenizer = Tokenizer(backend, eos=None)
    model = scrambled(
        onfoot.GPT2Config(vocab_size=backend.get_vocab_size(), n_positions=8, n_embd=8, n_layer=1, n_head=1)
    )
    model.tokenizer = tokenizer
    (tmp_path / "text.txt").write_text("éabc", encoding="utf-8")
    result = onfoot.evaluate(model, tmp_path / "text.txt")
    ids = np.asarray(tokenizer.encode("éabc"))
    assert result.loss == pytest.approx(model.loss(ids[None]), abs=1e-6)
    assert (result.n_tokens, result.n_bytes) == (3, 3)
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "", "completion": "éabc"}))
    assert onfoot.evaluate(model, tmp_path / "data.jsonl") == result
    (tmp_path / "text.txt").write_text("é", encoding="utf-8")
    with pytest.raises(ValueError, match=r"text.txt is too short: .*at least 2 tokens are needed"):
        onfoot.evaluate(model, tmp_path / "text.txt")


def with_tokenizer(path: Path, model: Model, tokenizer: Tokenizer) -> None:
    """Writes the model and its tokenizer as a GGUF file in float32."""
    config, state = model.config, json.loads(tokenizer.backend.to_str())["model"]
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.inner_width)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(m) if isinstance(m, list) else m for m in state["merges"]])
    writer.add_token_types([3 if i == tokenizer.eos_id else 1 for i in range(len(tokens))])
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_bos_token_id(tokenizer.eos_id)
    for name, value in model.params.items():
        array = np.asarray(value, np.float32)
        if ".q_proj." in name or ".k_proj." in name:  # rows in pairs, as llama.cpp rotates them
            heads = config.n_head if ".q_proj." in name else config.n_kv_head
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_and_the_folder_it_came_from_have_the_same_perplexity(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer([TEXT * 4], 300)
    config = onfoot.LlamaConfig.from_dict({**CONFIGS["llama"].to_dict(), "vocab_size": tokenizer.size})
    model = scrambled(config, tokenizer)
    model.save(tmp_path / "folder")
    with_tokenizer(tmp_path / "model.gguf", model, tokenizer)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    results = [
        onfoot.evaluate(onfoot.load(tmp_path / name), tmp_path / "text.txt", context=13)
        for name in ("folder", "model.gguf")
    ]
    assert results[0] == results[1]  # every figure, to the bit
    assert results[0].perplexity > 1 and results[0].n_tokens < len(TEXT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"context": 41}, r"context=41 exceeds n_positions=40 of the model; choose a shorter one"),
        ({"context": 0}, r"context must be >= 1, got 0"),
        ({"stride": 41}, r"stride must be in 1 ... 40, the context, got 41: every token must be in a window"),
        ({"context": 8, "stride": 9}, r"stride must be in 1 ... 8, the context, got 9"),
        ({"stride": 0}, r"stride must be in 1 ... 40, the context, got 0"),
        ({"batch_size": 0}, r"batch_size must be >= 1, got 0"),
        ({"limit": 0}, r"limit must be >= 1, got 0"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(tmp_path: Path, settings: dict[str, int], message: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        onfoot.evaluate(scrambled(CONFIGS["gpt2"]), tmp_path / "text.txt", **settings)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a.txt is empty"),
        ("a.json", b"{}", r"a.json, line 1: found the fields \(none\); expected {"),
        ("a.jsonl", b"\n\n", r"a.jsonl is too short"),
        ("a.jsonl", b'{"text": ""}', r"a.jsonl is too short"),
        ("a.jsonl", b'{"text": 5}', r'a.jsonl, line 1: "text" must be a string, got 5'),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"x": 1}',
            r'a.jsonl, line 2: found the fields x; expected {"prompt", "completion"}',
        ),
        ("a.jsonl", b"[1]", r'a.jsonl, line 1: not a JSON object; expected {"prompt"'),
        ("a.jsonl", b'{"prompt": "a"}', r'a.jsonl, line 1: found "prompt" but no "completion"'),
        ("a.jsonl", b'{"text": "\\ud800"}', r'a.jsonl, line 1: "text" has an unpaired surrogate'),
        ("a.txt", b"a\xff", r"a.txt is not valid UTF-8: byte 0xff at position 1"),
    ],
    ids=str,
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        onfoot.evaluate(scrambled(CONFIGS["gpt2"]), tmp_path / name)


def test_models_that_cannot_be_evaluated_are_named(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    with pytest.raises(ValueError, match="this model has no tokenizer to encode the data"):
        onfoot.evaluate(scrambled(CONFIGS["gpt2"], None), path)
    with pytest.raises(ValueError, match=r"cannot evaluate with causal=False"):
        onfoot.evaluate(scrambled(onfoot.GPT2Config(257, 8, 8, 1, 1, causal=False)), path)
    with pytest.raises(ValueError, match="is a folder; give one file"):
        onfoot.evaluate(scrambled(CONFIGS["gpt2"]), tmp_path)
    with pytest.raises(ValueError, match=r"none.txt does not exist"):
        onfoot.evaluate(scrambled(CONFIGS["gpt2"]), tmp_path / "none.txt")
    damaged = scrambled(CONFIGS["gpt2"])
    damaged.params["transformer.wpe.weight"][3] = np.nan
    with pytest.raises(ValueError, match="the loss is nan: the weights are damaged, or training diverged"):
        onfoot.evaluate(damaged, path)


def test_a_file_that_changes_meanwhile_is_noticed(
    saved: tuple[Model, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = saved
    reads = iter(["abc", "abcd"])

    def changing(path: Path) -> Iterator[str]:
        yield next(reads)

    monkeypatch.setattr("onfoot.data.corpus.file_pieces", changing)
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ValueError, match="changed while it was read: 3 targets at first, then 4"):
        onfoot.evaluate(model, tmp_path / "a.txt")


def test_figures_that_do_not_exist_are_not_made_up() -> None:
    assert Evaluation(800.0, 1, 1, 1, 1, "").perplexity == math.inf
    assert Evaluation(2.0, 1, 0, 1, 1, "").bits_per_byte is None
