"""Tokenizers, in Hugging Face's tokenizer.json: read, or made on the spot from bytes, characters or by BPE."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

END = "<|endoftext|>"  # between documents, and at the end of a generated one
UNKNOWN = "<|unknown|>"


class Tokenizer:
    """Text to ids and back; beside it, what Hugging Face keeps with a tokenizer: special tokens, a chat template."""

    def __init__(
        self, backend: Backend, end: str | None = END, begin: str | None = None, chat_template: str | None = None
    ) -> None:
        self.backend = backend
        self.end = end if end is not None and backend.token_to_id(end) is not None else None
        self.begin = begin if begin is not None and backend.token_to_id(begin) is not None else None
        self.chat_template = chat_template  # Jinja source

    @property
    def size(self) -> int:
        """The number of tokens, special ones included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def end_id(self) -> int | None:
        """The id of the token that ends a document, if there is one."""
        return None if self.end is None else self.backend.token_to_id(self.end)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. A character that the tokenizer does not know is refused by name."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has half a character, {text[error.start]!r}, at position {error.start}"
            ) from None
        encoding = self.backend.encode(text, add_special_tokens=False)
        unknown = self.backend.token_to_id(UNKNOWN)
        if unknown is not None and unknown in encoding.ids:
            begin, end = encoding.offsets[encoding.ids.index(unknown)]
            raise ValueError(
                f"the character {text[begin:end]!r} is not in this character tokenizer's alphabet; "
                f"use the byte or bpe tokenizer for text of any kind"
            )
        return encoding.ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=True)

    @classmethod
    def find(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer in a folder: tokenizer.json, or GPT-2's vocab.json with merges.txt."""
        path = Path(folder)
        if (path / "tokenizer.json").is_file():
            return cls.load(path / "tokenizer.json")
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return cls.load(path / "vocab.json")
        return None

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a tokenizer.json, a vocab.json with merges.txt beside it, or a folder that holds either."""
        path = Path(path)
        if path.is_dir():
            found = cls.find(path)
            if found is None:
                raise ValueError(f"{path} holds no tokenizer.json and no vocab.json with merges.txt")
            return found
        if not path.is_file():
            raise ValueError(f"the tokenizer {path} does not exist; known names are byte, char, bpe")
        try:
            if path.name == "vocab.json":
                merges = path.with_name("merges.txt")
                if not merges.is_file():
                    raise ValueError(f"{path} needs merges.txt beside it")
                backend = Backend(models.BPE.from_file(str(path), str(merges)))
                _byte_level(backend, use_regex=True)
            else:
                backend = Backend.from_file(str(path))
        except ValueError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from None
        return cls(backend, _special(path, "eos_token") or END, _special(path, "bos_token"), _chat_template(path))

    def save(self, folder: str | Path, model_max_length: int) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which AutoTokenizer loads."""
        folder = Path(folder)
        # as text: the library's own writing says "Exception" where a disk is full
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model_max_length}
        if self.end is not None:
            config |= {"eos_token": self.end, "bos_token": self.begin or self.end}
        if self.backend.token_to_id(UNKNOWN) is not None:
            config["unk_token"] = UNKNOWN
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")


def byte_tokenizer() -> Tokenizer:
    """One token a byte, so that any text has ids: 256 of them and the end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    _byte_level(backend, use_regex=True)
    return _with_end(backend)


def char_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """One token a character of the given texts."""
    alphabet = sorted({character for text in texts for character in text})
    vocab = {c: i for i, c in enumerate([*alphabet, UNKNOWN])}
    backend = Backend(models.WordLevel(vocab, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(UNKNOWN, special=True)])
    return _with_end(backend)


def bpe_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE, trained on the given texts: any text has ids, frequent pieces have one."""
    if vocab_size < 257:
        raise ValueError(f"a BPE vocabulary of {vocab_size} is too small: 256 bytes and the end token need 257")
    backend = Backend(models.BPE())
    _byte_level(backend, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(texts, trainer)
    return _with_end(backend)


def _byte_level(backend: Backend, use_regex: bool) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()


def _with_end(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken(END, special=True)])
    return Tokenizer(backend)


def _config(path: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside a tokenizer, where there is one."""
    config = path.with_name("tokenizer_config.json")
    return json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}


def _special(path: Path, name: str) -> str | None:
    """A special token that the tokenizer_config.json names."""
    token = _config(path).get(name)
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(path: Path) -> str | None:
    file = path.with_name("chat_template.jinja")
    template = file.read_text(encoding="utf-8") if file.is_file() else _config(path).get("chat_template")
    return template if isinstance(template, str) else None  # a list of several is not taken over
