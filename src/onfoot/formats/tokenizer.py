"""Tokenizers, in Hugging Face's tokenizer.json: read, or made on the spot from bytes, characters or by BPE."""

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

EOS = "<|endoftext|>"  # between documents, and at the end of a generated one
UNKNOWN = "<|unknown|>"
MOST_GROWTH = 100  # by replacements, of a text's length
LARGEST_ID = 2**31 - 1
TOKENIZER_BYTES = 64 << 20


class Tokenizer:
    """Text to ids and back; beside it, what Hugging Face keeps with a tokenizer: special tokens, a chat template.

    A text is never cut, padded or encoded at random, whatever the file says: that is decided where it is used.
    """

    def __init__(
        self,
        backend: Backend,
        eos: str | None = EOS,
        bos: str | None = None,
        chat_template: str | None = None,
        name: str = "the tokenizer",
    ) -> None:
        self.name = name  # the file it is from, for errors
        with sound(name):
            backend.no_truncation()
            backend.no_padding()
            if getattr(backend.model, "dropout", None) is not None:  # BPE's, which is for training tokenizers' models
                backend.model.dropout = None
            self.size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # ids are below it
            growth = max(_growth(part) for part in (backend.normalizer, backend.decoder))
            self.eos = eos if eos is not None and backend.token_to_id(eos) is not None else None
            self.bos = bos if bos is not None and backend.token_to_id(bos) is not None else None
        if self.size > LARGEST_ID:
            raise ValueError(f"{name}: it has the id {self.size - 1}, and the largest can be {LARGEST_ID - 1}")
        if growth > MOST_GROWTH:
            raise ValueError(
                f"{name}: it makes a text up to {growth:,} times as long, and {MOST_GROWTH} times is allowed"
            )
        self.backend = backend
        self.chat_template = chat_template  # Jinja source

    @property
    def eos_id(self) -> int | None:
        """The id of the token that ends a document, if there is one."""
        return None if self.eos is None else self.backend.token_to_id(self.eos)

    def encode(self, text: str) -> list[int]:
        """Ids of a text. A character that the tokenizer does not know is refused by name."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has half a character, {text[error.start]!r}, at position {error.start}"
            ) from None
        with sound(self.name):
            encoding = self.backend.encode(text, add_special_tokens=False)
            unknown = self.backend.token_to_id(UNKNOWN)
        if unknown is not None and unknown in encoding.ids:
            begin, end = encoding.offsets[encoding.ids.index(unknown)]
            raise ValueError(
                f"the character {text[begin:end]!r} is not in this character tokenizer's alphabet ({self.name}); "
                f"use the byte or bpe tokenizer for text of any kind"
            )
        return encoding.ids

    def decode(self, ids: Iterable[int]) -> str:
        with sound(self.name):
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
        """From a tokenizer.json, a vocab.json with merges.txt beside it, or a folder that holds either."""
        path = Path(path)
        if path.is_dir():
            found = cls.find(path)
            if found is None:
                raise ValueError(f"{path} holds no tokenizer.json and no vocab.json with merges.txt")
            return found
        if not path.exists():
            raise ValueError(f"the tokenizer {path} does not exist; known names are byte, char, bpe")
        text = read_text(path, TOKENIZER_BYTES)
        if path.name == "vocab.json":
            backend = _vocab_and_merges(text, path)
        else:
            with sound(str(path)):
                backend = Backend.from_str(text)
        config = _config(path)
        special = [_special(config, name) for name in ("eos_token", "bos_token")]
        return cls(backend, special[0] or EOS, special[1], _chat_template(path, config), str(path))

    def save(self, folder: str | Path, model_max_length: int) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which AutoTokenizer loads."""
        folder = Path(folder)
        # as text: the library's own writing says "Exception" where a disk is full
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model_max_length}
        if self.eos is not None:
            config |= {"eos_token": self.eos, "bos_token": self.bos or self.eos}
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
    backend.add_special_tokens([AddedToken(EOS, special=True)])
    return Tokenizer(backend)


def check_fits(tokenizer: Tokenizer, config: Any, path: str | Path) -> None:
    """Refuses a tokenizer with ids that a model of this configuration has no rows for."""
    if tokenizer.size > config.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has ids up to {tokenizer.size - 1}, the model vocab_size={config.vocab_size}; "
            f"they do not belong together"
        )


@contextmanager
def sound(name: str) -> Iterator[None]:
    """Whatever the tokenizer's own code raises is a ValueError that names its file; a panic there is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{name} is not a tokenizer that works: {one_line(error)}") from None


def _growth(part: Any) -> int:
    """How many times as long a normalizer or a decoder can make a text by its replacements, one after the other."""
    growth, waiting = 1, [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        one = waiting.pop()
        for inside in (one.get("normalizers"), one.get("decoders")):
            waiting += inside or []
        growth = min(growth * max(1, len(one.get("content") or one.get("prepend") or "")), 10**9)
    return growth


def _vocab_and_merges(text: str, path: Path) -> Backend:
    """GPT-2's pair of files."""
    merges = path.with_name("merges.txt")
    if not merges.exists():
        raise ValueError(f"{path} needs merges.txt beside it")
    vocab = parse_json(text, f"{path} is")
    if not isinstance(vocab, dict) or not all(type(i) is int and 0 <= i < LARGEST_ID for i in vocab.values()):
        raise ValueError(f"{path} does not map tokens to ids")
    pairs: list[tuple[str, str]] = []
    for line in read_text(merges, TOKENIZER_BYTES).split("\n"):
        left, _, right = line.rstrip("\r").partition(" ")
        if not line.strip() or line.startswith("#version"):
            continue
        if not left or not right or " " in right:
            raise ValueError(f"{merges}: {shown(line)} is not a pair of tokens")
        pairs.append((left, right))
    with sound(str(path.parent)):
        backend = Backend(models.BPE(vocab=vocab, merges=pairs))
    _byte_level(backend, use_regex=True)
    return backend


def _config(path: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside a tokenizer, where there is one."""
    config = path.with_name("tokenizer_config.json")
    return read_json(config) if config.exists() else {}


def _special(config: dict[str, Any], name: str) -> str | None:
    """A special token that the tokenizer_config.json names."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path.with_name("chat_template.jinja")
    template = read_text(file, TEMPLATE_BYTES) if file.exists() else config.get("chat_template")
    return template if isinstance(template, str) else None  # a list of several is not taken over
