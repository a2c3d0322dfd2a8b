"""The valid files that fuzzing begins with, and what is done with each: every reader of onfoot has a case."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

import onfoot
from onfoot.formats.chat import CHATML, ChatTemplate, chat_prompt_ids
from onfoot.formats.gguf_export import export_model
from onfoot.formats.gguf_model import gguf_name
from onfoot.formats.gguf_sentencepiece import BYTE_TOKENS
from onfoot.formats.gguf_tokenizer import read_tokenizer
from onfoot.formats.peft import TENSORS
from onfoot.formats.tensors import write_tensors
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer
from onfoot.models.model import Model
from onfoot.train.options import FinetuneOptions, TrainOptions

TEXT = "the quick brown fox at hand, isn't it? 2024\n" * 3
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because."},
    {"role": "user", "content": "Oh.\n"},
]
TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<s>{% endif %}<|{{ m.role|upper }}|>"
    "{{ m['content'].strip() | trim }}{{ eos_token }}\n{% endfor %}"
    "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}"
    "{% if add_generation_prompt and ns.n == 1 %}<|ASSISTANT|>{% endif %}"
)
LINES = [
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"instruction": "Add.", "input": "2, 2", "output": "4"},
    {"prompt": "a", "completion": "b", "other": [1, {"x": None}]},
]
CHATS = [
    {"messages": MESSAGES},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
]
NOT_READ = ("generation_config.json", "loss.png", ".lock")  # onfoot writes them for others
GPT2 = onfoot.GPT2Config(vocab_size=300, n_positions=64, n_embd=8, n_layer=1, n_head=2)
LLAMA = onfoot.LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
    rope_scaling=onfoot.config.RopeScaling("llama3", 8.0),
)  # fmt: skip


@dataclass
class Case:
    """Files that belong together, their reader, and those of them that are mutated (by path)."""

    name: str
    folder: Path
    read: Callable[[Path], None]
    files: list[str] = field(default_factory=list)
    weight: int = 1
    info: str | None = None  # what `onfoot info` shows of it: a path within the folder

    def __post_init__(self) -> None:
        if not self.files:
            found = sorted(p for p in self.folder.rglob("*") if p.is_file() and p.name not in NOT_READ)
            self.files = [str(p.relative_to(self.folder)) for p in found]


def build(root: Path) -> list[Case]:
    """Writes the corpus below `root`."""
    bpe = bpe_tokenizer(iter([TEXT * 10]), 280)
    bpe.chat_template = TEMPLATE
    gpt2, llama = onfoot.create(GPT2, engine="numpy"), onfoot.create(LLAMA, engine="numpy")
    cases = []
    for name, model, tokenizer in (
        ("gpt2", gpt2, bpe),
        ("llama", llama, byte_tokenizer()),
        ("char", gpt2, char_tokenizer([TEXT, TEMPLATE, json.dumps(MESSAGES), CHATML])),
        ("sharded", gpt2, bpe),
    ):
        model.tokenizer = tokenizer
        model.save(root / name)
        if name == "sharded":
            _shard(root / name)
        cases.append(Case(name, root / name, use_folder, weight=6, info="."))
    _pair_of_files(bpe, root / "vocab")
    cases.append(Case("vocab", root / "vocab", use_tokenizer, weight=2))
    for type_ in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
        path = root / f"gguf-{type_}"
        path.mkdir()
        write_gguf(llama, path / "model.gguf", type_, bpe if type_ == "Q8_0" else None)
        reader = use_blocks if type_ in ("Q8_0", "Q4_1") else use_gguf
        cases.append(Case(f"gguf-{type_}", path, reader, weight=4, info="model.gguf"))
    for name, model, tokenizer in (("gpt2", gpt2, bpe), ("sentencepiece", llama, sentencepiece_tokenizer())):
        path, model.tokenizer = root / f"gguf-{name}", tokenizer
        path.mkdir()
        export_model(model, path / "model.gguf", "f16")
        cases.append(Case(f"gguf-{name}", path, use_gguf, weight=4, info="model.gguf"))
    cases.append(Case("adapter", _adapter(gpt2, root), use_folder, ["adapter_config.json", TENSORS], 6, "."))
    cases.append(Case("run", _run(root), use_run, weight=10, info="."))
    lines = root / "lines"
    lines.mkdir()
    (lines / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    (lines / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in CHATS), encoding="utf-8")
    (lines / "list.json").write_text(json.dumps(CHATS, indent=1), encoding="utf-8")
    (lines / "table.csv").write_text('prompt,completion\n"2, 2",4\n\na,"b ""c""\n"\n', encoding="utf-8")
    cases.append(Case("jsonl", lines, use_lines, weight=4))
    cases.append(Case("tables", _tables(root), use_tables, weight=3))
    texts = root / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text(TEXT, encoding="utf-8")
    (texts / "b.jsonl").write_text(json.dumps({"text": TEXT}) + "\n\n" + json.dumps({"text": "b"}), encoding="utf-8")
    cases.append(Case("texts", texts, use_texts, weight=2))
    template = root / "template"
    template.mkdir()
    (template / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    cases.append(Case("template", template, use_template, weight=8))
    return cases


def sentencepiece_tokenizer() -> Tokenizer:
    """A small tokenizer as LLaMA's: special tokens, all bytes, a few characters, and words made of them."""
    pieces = ["▁t", "he", "▁the", "qu", "in", "ck", "▁", "t", "h", "e", "q", "u", "i", "n", "c", "k"]
    tokens = ["<unk>", "<s>", "</s>", *BYTE_TOKENS, *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    return read_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
            "tokenizer.ggml.token_type": np.array(types, np.int32),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": TEMPLATE,
        },
        Path("corpus.gguf"),
    )


def use_folder(folder: Path) -> None:
    exercise(onfoot.load(folder, engine="numpy"))


def use_gguf(folder: Path) -> None:
    exercise(onfoot.load(folder / "model.gguf", engine="numpy"))


def use_blocks(folder: Path) -> None:
    exercise(onfoot.load(folder / "model.gguf", engine="numpy", quantized=True))


def use_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    tokenizer.decode(tokenizer.encode(TEXT))


def use_template(folder: Path) -> None:
    template = ChatTemplate.find(folder)
    template.end_of_turn()
    chat_prompt_ids(byte_tokenizer(), template, MESSAGES)


def use_lines(folder: Path) -> None:
    from onfoot.data.sft import load_source

    source = load_source([folder], byte_tokenizer(), ChatTemplate(), max_length=200, batch_size=2, on_long="truncate")
    source.microbatches(0)
    source.report()
    source.fingerprint()


def use_tables(folder: Path) -> None:
    from onfoot.data.sft_examples import read_examples

    read_examples([folder], byte_tokenizer(), ChatTemplate())


def use_texts(folder: Path) -> None:
    from onfoot.data import corpus
    from onfoot.data.bigram import bigram_loss

    texts = corpus.find_texts([folder])
    tokens = corpus.write_tokens(texts, byte_tokenizer(), folder.parent / "out")
    if len(tokens) > 1:
        bigram_loss(tokens, tokens, 257)


def use_run(folder: Path) -> None:
    """A run is read in parts, by several commands: each must refuse by itself what it cannot read."""
    from onfoot.data import corpus
    from onfoot.data.bigram import bigram_loss
    from onfoot.formats.run_folder import model_folder
    from onfoot.train.log import Log

    faults = []
    readers: list[Callable[[], Any]] = [
        lambda: TrainOptions.load(folder / "run.json"),
        lambda: _other_command(folder / "run.json"),
        lambda: Log(folder / "log.jsonl").read(),
        lambda: corpus.check_tokens(folder / "data"),
        lambda: bigram_loss(*[corpus.open_tokens(folder / "data")] * 2, 257),
        lambda: Tokenizer.load(folder / "data"),
        lambda: _resume_state(folder / "checkpoints" / "step-0000002"),
        lambda: model_folder(folder),
    ]
    for reader in readers:
        try:
            reader()
        except ValueError as error:
            faults.append(error)
    if faults:
        raise faults[0]


def _other_command(path: Path) -> None:
    try:
        FinetuneOptions.load(path)
    except ValueError as error:
        if "is a run of onfoot train" not in str(error):
            raise


def _resume_state(folder: Path) -> None:
    from onfoot.train import checkpoint

    model = onfoot.load(folder, engine="numpy")
    checkpoint.restore_optimizer(folder, onfoot.AdamW(model))


def exercise(model: Model) -> None:
    """What users do with a model that they loaded: score, encode, decode, talk."""
    from onfoot.generate.chat import ends, prompt_ids

    n = min(3, model.config.n_positions)
    model.logits(np.arange(n)[None] % model.config.vocab_size)
    if model.tokenizer is not None:
        ids = model.tokenizer.encode(TEXT)
        model.tokenizer.decode(ids)
        model.tokenizer.decode(range(min(model.config.vocab_size, 300)))
        prompt_ids(model, MESSAGES)
        ends(model)


@cache
def _command() -> Any:
    from typer.main import get_command

    from onfoot.cli import app

    return get_command(app)


def show_info(path: Path) -> None:
    """`onfoot info`, with what it prints."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = _command()(["info", str(path), "--tensors"], standalone_mode=False)
    text = out.getvalue()
    if code == 2:
        if not text.startswith("error: ") or text.count("\n") != 1:
            raise AssertionError(f"onfoot info printed {text[:200]!r}")
        raise ValueError(text)
    if any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in text):
        raise AssertionError(f"onfoot info printed a control character: {text[:200]!r}")


def write_gguf(model: Model, path: Path, type_: str, tokenizer: Tokenizer | None) -> None:
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, value in {
        "context_length": config.n_positions, "embedding_length": config.n_embd, "block_count": config.n_layer,
        "feed_forward_length": config.inner_width, "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_kv_head, "vocab_size": config.vocab_size,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_array("some.names", ["a", "bc"])
    if tokenizer is not None:
        state = json.loads(tokenizer.backend.to_str())["model"]
        tokens = sorted(state["vocab"], key=state["vocab"].get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_merges([" ".join(m) for m in state["merges"]])
        writer.add_token_types([1] * (len(tokens) - 1) + [3])
        writer.add_eos_token_id(len(tokens) - 1)
        writer.add_chat_template(TEMPLATE)
    for name, value in model.params.items():
        kind = gguf.GGMLQuantizationType[type_ if value.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(np.asarray(value, np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shard(folder: Path) -> None:
    from onfoot.formats.tensors import TensorFile

    whole = folder / "model.safetensors"
    tensors = {name: np.array(value) for name, value in TensorFile(whole).items()}
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for part, inside in parts.items():
        write_tensors(folder / part, {name: tensors[name] for name in inside})
    where = {name: part for part, inside in parts.items() for name in inside}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    whole.unlink()


def _pair_of_files(tokenizer: Tokenizer, folder: Path) -> None:
    """GPT-2's vocab.json and merges.txt."""
    folder.mkdir()
    state = json.loads(tokenizer.backend.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(state["vocab"]), encoding="utf-8")
    merges = "".join(" ".join(m) + "\n" for m in state["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")


def _adapter(model: Model, root: Path) -> Path:
    model.tokenizer = byte_tokenizer()
    model.save(root / "adapter" / "base")
    model = onfoot.load(root / "adapter" / "base", engine="numpy")
    model.add_lora(r=2, alpha=4, targets=["c_attn", "c_fc"])
    model.source = "base"
    model.save_adapter(root / "adapter")
    return root / "adapter"


def _tables(root: Path) -> Path:
    """A .parquet file, and a folder as `Dataset.save_to_disk` writes it."""
    import pyarrow
    import pyarrow.parquet

    folder = root / "tables"
    (folder / "saved").mkdir(parents=True)
    table = pyarrow.Table.from_pylist([CHATS[0]] * 3)
    pyarrow.parquet.write_table(table, folder / "a.parquet")
    with pyarrow.ipc.new_stream(folder / "saved" / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (folder / "saved" / "dataset_info.json").write_text("{}")
    return folder


def _run(root: Path) -> Path:
    from onfoot.train import pretrain

    text = root / "run.txt"
    text.write_text(TEXT * 10, encoding="utf-8")
    options = TrainOptions(
        texts=[str(text)], steps=2, batch_size=2, n_layer=1, n_head=2, n_embd=8, context=16, eval_every=1, save_every=1,
        sample_tokens=0, eval_windows=2, engine="numpy",
    )  # fmt: skip
    folder = root / "run"
    out = io.StringIO()
    with redirect_stdout(out):
        pretrain.start(folder, options).run()
    text.unlink()
    for link in ("best", "last"):
        (folder / link).unlink(missing_ok=True)
    return folder
