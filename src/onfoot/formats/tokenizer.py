"""Tokenizers in Hugging Face's tokenizer.json format: loaded, or built from bytes, characters or BPE."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from onfoot.formats.files import one_line, parse_json, read_json, read_text, shown
from onfoot.formats.template import TEMPLATE_BYTES
from onfoot.formats.write import write_json, write_text

EOS = "<|endoftext|>"  # between documents, and at the end of generated text
UNKNOWN = "<|unknown|>"
MAX_GROWTH = 100  # of a text's length, by replacements
MAX_VOCAB_SIZE = 2**31 - 1
TOKENIZER_BYTES = 64 << 20


class Tokenizer:
    """Encodes and decodes text; also has the special tokens and the chat template.

    Truncation, padding and BPE dropout in the file are disabled: the caller decides about them.
    """

    def __init__(
        self,
        backend: Backend,
        eos: str | None = EOS,
        bos: str | None = None,
        chat_template: str | None = None,
        name: str = "the tokenizer",
    ) -> None:
        self.name = name  # its file, for error messages
        with tokenizer_errors(name):
            backend.no_truncation()
            backend.no_padding()
            if getattr(backend.model, "dropout", None) is not None:  # BPE dropout, which encodes at random
                backend.model.dropout = None
            self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # largest id + 1
            growth = max(_growth(part) for part in (backend.normalizer, backend.decoder))
            self.eos = eos if eos is not None and backend.token_to_id(eos) is not None else None
            self.bos = bos if bos is not None and backend.token_to_id(bos) is not None else None
        if self.size > MAX_VOCAB_SIZE:
            raise ValueError(f"{name}: token id {self.size - 1} is too large; the limit is {MAX_VOCAB_SIZE - 1}")
        if growth > MAX_GROWTH:
            raise ValueError(
                f"{name}: it can make a text up to {growth:,} times as long; the limit is {MAX_GROWTH} times"
            )
        self.backend = backend
        self.chat_template = chat_template  # Jinja source

    @property
    def eos_id(self) -> int | None:
        """The id of the end-of-text token, if there is one."""
        return None if self.eos is None else self.backend.token_to_id(self.eos)

    def encode(self, text: str) -> list[int]:
        """The ids of a text; raises ValueError for an unknown character."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has an unpaired surrogate, {text[error.start]!r}, at position {error.start}"
            ) from None
        with tokenizer_errors(self.name):
            encoding = self.backend.encode(text, add_special_tokens=False)
            unknown = self.backend.token_to_id(UNKNOWN)
        if unknown is not None and unknown in encoding.ids:
            begin, end = encoding.offsets[encoding.ids.index(unknown)]
            raise ValueError(
                f"the character {text[begin:end]!r} is not in this character tokenizer's vocabulary ({self.name}); "
                f"use the byte or bpe tokenizer for arbitrary text"
            )
        return encoding.ids

    def decode(self, ids: Iterable[int]) -> str:
        with tokenizer_errors(self.name):
            return self.backend.decode(list(ids), skip_special_tokens=True)

    @classmethod
    def find(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer in a folder: tokenizer.json, or GPT-2's vocab.json with merges.txt."""
        path = Path(folder)
        if (path / "tokenizer.json").exists():
            return cls.load(path / "tokenizer.json")
        if (path / "vocab.json").exists() and (path / "merges.txt").exists():
            return cls.load(path / "vocab.json")
        return None

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Loads a tokenizer.json, a vocab.json with its merges.txt, or a folder with either."""
        path = Path(path)
        if path.is_dir():
            found = cls.find(path)
            if found is None:
                raise ValueError(f"{path} has no tokenizer.json and no vocab.json with merges.txt")
            return found
        if not path.exists():
            raise ValueError(f"tokenizer {path} does not exist; built-in tokenizers: byte, char, bpe")
        text = read_text(path, TOKENIZER_BYTES)
        if path.name == "vocab.json":
            backend = _vocab_and_merges(text, path)
        else:
            with tokenizer_errors(str(path)):
                backend = Backend.from_str(text)
        config = _config(path)
        special = [_special(config, name) for name in ("eos_token", "bos_token")]
        return cls(backend, special[0] or EOS, special[1], _chat_template(path, config), str(path))

    def save(self, folder: str | Path, model_max_length: int) -> None:
        """Saves tokenizer.json and tokenizer_config.json for AutoTokenizer."""
        folder = Path(folder)
        # not backend.save: it raises a bare Exception if the disk is full
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model_max_length}
        if self.eos is not None:
            config |= {"eos_token": self.eos, "bos_token": self.bos or self.eos}
        if self.backend.token_to_id(UNKNOWN) is not None:
            config["unk_token"] = UNKNOWN
        write_json(folder / "tokenizer_config.json", config)
        if self.chat_template is not None:
            write_text(folder / "chat_template.jinja", self.chat_template)


def byte_tokenizer() -> Tokenizer:
    """One token per byte, for any text: 256 ids and the end-of-text token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    _byte_level(backend, use_regex=True)
    return _with_eos(backend)


def char_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """One token per character of the given texts."""
    alphabet = sorted({character for text in texts for character in text})
    vocab = {c: i for i, c in enumerate([*alphabet, UNKNOWN])}
    backend = Backend(models.WordLevel(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(UNKNOWN, special=True)])
    return _with_eos(backend)


def bpe_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on the given texts; it encodes any text."""
    if vocab_size < 257:
        raise ValueError(f"vocab_size must be >= 257 for BPE (256 bytes and the end-of-text token), got {vocab_size}")
    backend = Backend(models.BPE())
    _byte_level(backend, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(texts, trainer)
    return _with_eos(backend)


def _byte_level(backend: Backend, use_regex: bool) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()


def _with_eos(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    return Tokenizer(backend)


def check_fits(tokenizer: Tokenizer, config: Any, path: str | Path) -> None:
    """Raises ValueError if the tokenizer has ids outside the model's vocabulary."""
    if tokenizer.size > config.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has ids up to {tokenizer.size - 1}, but the model has "
            f"vocab_size={config.vocab_size}; use the model's own tokenizer"
        )


@contextmanager
def tokenizer_errors(name: str) -> Iterator[None]:
    """Turns every error of the tokenizers library, Rust panics included, into a ValueError that names the file."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{name} is not a valid tokenizer: {one_line(error)}") from None


def _growth(part: Any) -> int:
    """The largest factor by which a normalizer or decoder can lengthen a text with its replacements."""
    growth, stack = 1, [] if part is None else [json.loads(part.__getstate__())]
    while stack:
        state = stack.pop()
        for children in (state.get("normalizers"), state.get("decoders")):
            stack += children or []
        growth = min(growth * max(1, len(state.get("content") or state.get("prepend") or "")), 10**9)
    return growth


def _vocab_and_merges(text: str, path: Path) -> Backend:
    """The tokenizer in GPT-2's vocab.json and merges.txt."""
    merges = path.with_name("merges.txt")
    if not merges.exists():
        raise ValueError(f"{path} needs merges.txt in the same folder")
    vocab = parse_json(text, f"{path} is")
    if not isinstance(vocab, dict) or not all(type(i) is int and 0 <= i < MAX_VOCAB_SIZE for i in vocab.values()):
        raise ValueError(f"{path} must map tokens to integer ids")
    pairs: list[tuple[str, str]] = []
    for line in read_text(merges, TOKENIZER_BYTES).split("\n"):
        left, _, right = line.rstrip("\r").partition(" ")
        if not line.strip() or line.startswith("#version"):
            continue
        if not left or not right or " " in right:
            raise ValueError(f"{merges}: {shown(line)} is not a pair of tokens")
        pairs.append((left, right))
    with tokenizer_errors(str(path.parent)):
        backend = Backend(models.BPE(vocab=vocab, merges=pairs))
    _byte_level(backend, use_regex=True)
    return backend


def _config(path: Path) -> dict[str, Any]:
    """The tokenizer_config.json in the tokenizer's folder; empty if there is none."""
    config = path.with_name("tokenizer_config.json")
    return read_json(config) if config.exists() else {}


def _special(config: dict[str, Any], name: str) -> str | None:
    """A special token from tokenizer_config.json."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path.with_name("chat_template.jinja")
    template = read_text(file, TEMPLATE_BYTES) if file.exists() else config.get("chat_template")
    return template if isinstance(template, str) else None  # a list of templates is ignored
