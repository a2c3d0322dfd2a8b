"""Tokenizers in Hugging Face's tokenizer.json format: loaded, or built from bytes, characters or BPE."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Regex, decoders, models, pre_tokenizers, processors, trainers
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

    `Tokenizer.load(folder)` reads one; `byte`, `char` and `bpe` make one, as the option `--tokenizer` does.
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

    @classmethod
    def byte(cls) -> Tokenizer:
        """One token per byte, for any text: 256 ids and the end-of-text token."""
        return byte_tokenizer()

    @classmethod
    def char(cls, texts: str | Iterable[str]) -> Tokenizer:
        """One token per character of a text, or of several."""
        return char_tokenizer([texts] if isinstance(texts, str) else texts)

    @classmethod
    def bpe(cls, texts: str | Iterable[str], vocab_size: int) -> Tokenizer:
        """A byte-level BPE tokenizer of so many tokens, trained on a text, or on several; it encodes any text."""
        return bpe_tokenizer([texts] if isinstance(texts, str) else texts, vocab_size)

    @property
    def eos_id(self) -> int | None:
        """The id of the end-of-text token, if there is one."""
        return None if self.eos is None else self.backend.token_to_id(self.eos)

    @cached_property
    def bos_ids(self) -> list[int]:
        """The ids that the tokenizer itself puts before a text, such as LLaMA's BOS token; mostly one or none."""
        with tokenizer_errors(self.name):
            whole, text = (self.backend.encode("a", add_special_tokens=flag).ids for flag in (True, False))
        return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(text)] == text), [])

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of all special tokens: EOS, the markers of a chat, ..."""
        return tuple(t.content for t in self.backend.get_added_tokens_decoder().values() if t.special)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of a text; raises ValueError for an unknown character.

        With `add_special_tokens`, as for a prompt, BOS and EOS are added where the model's own tokenizer adds them.
        """
        return self.encoding(text, add_special_tokens).ids

    def encode_after(self, before: str, text: str) -> list[int]:
        """The ids of a text that continues another one, whose ids are those of `encode`.

        They are the rest of the ids of both together, unless a token would span both: then the text is encoded alone.
        """
        first, both = self.encode(before), self.encode(before + text)
        if both[: len(first)] == first:
            return both[len(first) :]
        line, after = self.encode("\n"), self.encode("\n" + text)
        if self._adds_space and after[: len(line)] == line:
            return after[len(line) :]
        return self.encode(text)

    @cached_property
    def _adds_space(self) -> bool:
        """Whether a text is encoded with a space before it, as by SentencePiece."""
        try:
            return self.encode("\na") != [*self.encode("\n"), *self.encode("a")]
        except ValueError:  # a tokenizer of other characters
            return False

    def encoding(self, text: str, add_special_tokens: bool = False) -> Encoding:
        """The ids of a text with their offsets in it."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has an unpaired surrogate, {text[error.start]!r}, at position {error.start}"
            ) from None
        with tokenizer_errors(self.name):
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
            unknown = self.backend.token_to_id(UNKNOWN)
        if unknown is not None and unknown in encoding.ids:
            begin, end = encoding.offsets[encoding.ids.index(unknown)]
            raise ValueError(
                f"the character {text[begin:end]!r} is not in this character tokenizer's vocabulary ({self.name}); "
                f"use the byte or bpe tokenizer for arbitrary text"
            )
        return encoding

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens."""
        with tokenizer_errors(self.name):
            return self.backend.decode(list(ids), skip_special_tokens=True)

    def decode_each(self, ids: Iterable[int]) -> list[str]:
        """The text of each token id by itself."""
        with tokenizer_errors(self.name):
            return self.backend.decode_batch([[id] for id in ids], skip_special_tokens=True)

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
        eos, bos = _special(config, "eos_token") or EOS, _special(config, "bos_token")
        with tokenizer_errors(str(path)):
            added = {token.content for token in backend.get_added_tokens_decoder().values()}
            for token in (eos, bos, _special(config, "unk_token"), _special(config, "pad_token")):
                if token is not None and token not in added and backend.token_to_id(token) is not None:
                    backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])  # found in texts
            if config.get("add_bos_token") is True and backend.post_processor is None:
                add_bos(backend, bos)
        return cls(backend, eos, bos, _chat_template(path, config), str(path))

    def to_json(self) -> str:
        """The text of tokenizer.json."""
        return self.backend.to_str(pretty=True)

    def save(self, folder: str | Path, model_max_length: int) -> None:
        """Saves tokenizer.json and tokenizer_config.json for AutoTokenizer."""
        folder = Path(folder)
        # not backend.save: it raises a bare Exception if the disk is full
        write_text(folder / "tokenizer.json", self.to_json())
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


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
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


def add_bos(backend: Backend, bos: str | None) -> None:
    """Makes a tokenizer put the BOS token before each text, if it has that token."""
    i = None if bos is None else backend.token_to_id(bos)
    if i is not None:
        backend.post_processor = processors.TemplateProcessing(single=[f"{bos}:0", "$A:0"], special_tokens=[(bos, i)])


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
