"""`onfoot train`: trains a new or an existing model on plain text."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.config import GPT2Config, LlamaConfig
from onfoot.data import corpus
from onfoot.data.batches import place
from onfoot.data.bigram import bigram_loss
from onfoot.data.compression import BEFORE, as_bytes, xz_loss
from onfoot.data.count import Count
from onfoot.data.records import ReadLog
from onfoot.data.windows import Windows, split
from onfoot.formats.files import read_json
from onfoot.formats.run_folder import differs, manifest_of
from onfoot.formats.tokenizer import Tokenizer, bpe_tokenizer, byte_tokenizer, char_tokenizer
from onfoot.formats.write import flush, write_json
from onfoot.models.load import create, load
from onfoot.models.model import Model
from onfoot.train import runs
from onfoot.train.fingerprint import fingerprint, record_or_verify
from onfoot.train.loop import Trainer, set_dropout
from onfoot.train.options import TrainOptions
from onfoot.train.parallel import World, world
from onfoot.train.sources import TextSource
from onfoot.train.start import announce

STDIN_FILE = "stdin.txt"
SHORT = 100_000  # characters: with fewer, BPE finds few words that repeat
LONG, SMALL_VOCABULARY, LARGE_VOCABULARY = 2_000_000, 1024, 4096  # a small text is soon memorised with a large one
MANIFEST = "manifest.json"  # hashes of the other files in data/; tokens.json has the hash of tokens.bin


def make_tokenizer(options: TrainOptions, texts: list[corpus.Text]) -> Tokenizer:
    """The tokenizer of a new model. BPE sees the training text only, so that the validation loss is honest."""
    log, kind, vocab_size = ReadLog(options.skip_bad), options.tokenizer, options.vocab_size
    length = corpus.characters(texts, ReadLog(True)) if kind in ("auto", "bpe") else 0
    if kind == "auto":
        private = options.dp_clip is not None  # the guarantee does not cover a tokenizer made from the text
        kind = "byte" if private or length < SHORT else "bpe"
    if kind == "byte":
        return byte_tokenizer()
    if kind == "char":
        return char_tokenizer(corpus.all_pieces(texts, log))
    if kind == "bpe":
        vocab_size = vocab_size or (LARGE_VOCABULARY if length >= LONG else SMALL_VOCABULARY)
        announce(f"training a BPE tokenizer of {vocab_size} tokens")
        train = math.ceil(length * (1 - options.validation))
        return bpe_tokenizer(corpus.first_pieces(texts, train, log), vocab_size)
    return Tokenizer.load(kind)


def prepare_data(run: Path, options: TrainOptions, has_checkpoint: bool) -> tuple[Tokenizer, np.ndarray]:
    """The tokenizer and the token stream of a run: created once, reused when it is resumed.

    The manifest is written last and marks them as complete. Runs with a checkpoint may predate the manifest.
    """
    folder = run / "data"
    if (folder / "tokens.bin").is_file() and ((folder / MANIFEST).is_file() or has_checkpoint):
        _check_manifest(folder)
        tokens = corpus.open_tokens(folder)
        corpus.check_tokens(folder)
        return Tokenizer.load(folder), tokens
    texts = find_texts(options, run)
    if options.init is not None:
        tokenizer = load(options.init).tokenizer
        if tokenizer is None:
            raise ValueError(f"{options.init} has no tokenizer; put tokenizer.json next to its config.json")
    else:
        tokenizer = make_tokenizer(options, texts)
    shutil.rmtree(folder, ignore_errors=True)  # incomplete, from an interrupted run
    folder.mkdir(parents=True)
    tokenizer.save(folder, options.context)
    log = ReadLog(options.skip_bad, Count("bytes", corpus.n_bytes(texts)))
    announce("tokenizing the text", log.count)
    tokens = corpus.write_tokens(texts, tokenizer, folder, log)
    write_json(folder / MANIFEST, manifest_of(folder, leave_out=("tokens.bin",)))
    for path in [*folder.iterdir(), folder]:
        flush(path)
    return tokenizer, tokens


def find_texts(options: TrainOptions, run: Path | None = None) -> list[corpus.Text]:
    """The texts of a run; standard input is kept in its folder, so that a run that is resumed finds it again."""
    if not options.texts:
        return [corpus.builtin_text()]
    texts: list[corpus.Text] = []
    for name in options.texts:
        if name != corpus.STDIN:
            texts += corpus.find_texts([Path(name)])
        elif run is not None:
            texts.append(corpus.save_stdin(run / STDIN_FILE))
    return texts


def _check_manifest(folder: Path) -> None:
    """Raises ValueError if the tokenizer or tokens.json has changed since the text was tokenized."""
    wrong = differs(folder, read_json(folder / MANIFEST)) if (folder / MANIFEST).is_file() else None
    if wrong:
        raise ValueError(f"{folder}: {wrong}, according to {MANIFEST}; restore the original, or start a new run")


def find_data(run: Path, ranks: World) -> tuple[Tokenizer, np.ndarray]:
    """The tokenizer and the token stream that rank 0 has prepared."""
    ranks.wait_for_path(run / "data" / "tokens.bin")
    return Tokenizer.load(run / "data"), corpus.open_tokens(run / "data")


def first_model(options: TrainOptions, tokenizer: Tokenizer) -> Model:
    """The model before the first step."""
    if options.init is not None:
        model = load(options.init, options.dtype, options.engine)
        if options.context > model.config.n_positions:
            raise ValueError(
                f"context={options.context} exceeds n_positions={model.config.n_positions} of {options.init}; "
                f"pass --context {model.config.n_positions} or less"
            )
        if model.active_adapter is not None:
            raise ValueError(f"{options.init} is an adapter; merge it into its base model first with: onfoot merge")
        set_dropout(model, options.dropout)
        return model
    model = create(new_config(options, tokenizer), options.seed, options.dtype, options.engine)
    model.tokenizer = tokenizer
    return model


def new_config(options: TrainOptions, tokenizer: Tokenizer) -> GPT2Config | LlamaConfig:
    """The configuration of a new model."""
    eos: dict[str, Any] = {"bos_token_id": tokenizer.eos_id, "eos_token_id": tokenizer.eos_id}
    if not options.head_dim and options.n_embd % options.n_head:
        raise ValueError(
            f"n_embd={options.n_embd} is not divisible by n_head={options.n_head}; change one, or pass --head-dim"
        )
    if options.arch == "llama":
        return LlamaConfig(
            vocab_size=tokenizer.size,
            max_position_embeddings=options.context,
            hidden_size=options.n_embd,
            intermediate_size=options.n_inner or swiglu_size(options.n_embd),
            num_hidden_layers=options.n_layer,
            num_attention_heads=options.n_head,
            num_key_value_heads=options.n_kv_head or None,
            head_dim=options.head_dim or None,
            attention_dropout=options.dropout,
            tie_word_embeddings=True,
            **eos,
        )
    return GPT2Config(
        vocab_size=tokenizer.size,
        n_positions=options.context,
        n_embd=options.n_embd,
        n_layer=options.n_layer,
        n_head=options.n_head,
        n_inner=options.n_inner or None,
        head_dim=options.head_dim or None,
        embd_pdrop=options.dropout,
        attn_pdrop=options.dropout,
        resid_pdrop=options.dropout,
        **eos,
    )


def swiglu_size(n_embd: int) -> int:
    """8/3 of the hidden size, rounded up to a multiple of 32: as many weights as an MLP of 4 times the hidden size."""
    return -(-8 * n_embd // (3 * 32)) * 32


def start(run: Path, options: TrainOptions) -> Trainer:
    """Starts a run in a new folder, after checking the options."""
    world().run_all_or_raise(lambda: check(options))
    return runs.create(run, options, build)


def check(options: TrainOptions) -> None:
    """Raises ValueError for options that can be checked before any work is done."""
    find_texts(options)
    if options.texts.count(corpus.STDIN) > 1:
        raise ValueError("standard input (-) is given more than once")
    if options.init is None:
        new_config(options, byte_tokenizer())


def resume(run: Path, **changes: Any) -> tuple[Trainer, list[str]]:
    """The trainer of a run at its newest valid checkpoint, with changed options, and warnings."""
    return runs.resume(run, TrainOptions, build, changes)


def build(run: Path, options: TrainOptions, checkpoint: Path | None) -> Trainer:
    """The trainer of a run, restored from a checkpoint, or at step 0."""
    trainer = make_trainer(run, options, checkpoint)
    trainer.restore(checkpoint)
    return trainer


def make_trainer(run: Path, options: TrainOptions, checkpoint: Path | None) -> Trainer:
    """The trainer of a run with the weights of a checkpoint, or of step 0; its state and log are not restored."""
    ranks = world()
    tokenizer, tokens = ranks.rank0_first(
        lambda: prepare_data(run, options, checkpoint is not None), lambda: find_data(run, ranks)
    )
    record_or_verify(run / "data.json", read_json(run / "data" / "tokens.json").get("sha256", ""), f"the text of {run}")
    train, held_out = split(tokens, options.validation, options.context)
    announce("creating the model" if checkpoint is None and options.init is None else "loading the model")
    model = load(checkpoint, options.dtype, options.engine) if checkpoint else first_model(options, tokenizer)
    if checkpoint is None and options.init is not None:
        record_or_verify(run / "base.json", fingerprint(model), f"the model {options.init}")
    source = TextSource(
        Windows(train, options.context, options.seed),
        Windows(held_out, options.context, options.seed),
        options.batch_size,
        options.accumulate,
        options.eval_windows,
        place([(step, o.batch_size * o.accumulate) for step, o in options.phases()]),
        str(read_json(run / "data" / "tokens.json").get("about", "")),
    )
    if options.steps == 0:
        options = replace(options, steps=source.steps_for(options.epochs))
    announce("fitting a bigram model")
    measured = held_out[: options.eval_windows * options.context + 1]  # the tokens of the validation loss
    bigram = bigram_loss(train, measured, model.config.vocab_size) if ranks.writes else None
    trainer = Trainer(model, source, options, out=run)
    trainer.bigram = bigram
    return trainer


def bits_per_byte(trainer: Trainer, loss: float) -> list[tuple[str, float]]:
    """The bits per byte of the held-out text that the model, a bigram model and `xz -9` need, each with its name."""
    source, tokenizer = trainer.source, trainer.model.tokenizer
    if not isinstance(source, TextSource) or tokenizer is None:
        return []
    measured = source.held_out.tokens[: source.eval_windows * source.held_out.context + 1]
    text = as_bytes(tokenizer, measured[1:])
    if not text:
        return []
    per_token = (len(measured) - 1) / len(text) / math.log(2)  # bits per byte, for a nat per token
    out = [("the model", loss * per_token)]
    if trainer.bigram is not None:
        out.append(("the bigram model", trainer.bigram * per_token))
    announce("compressing the text with xz -9, to compare")
    before = as_bytes(tokenizer, source.train.tokens[-BEFORE:])
    return [*out, ("xz -9 after the training text", xz_loss(before, text) / math.log(2))]
