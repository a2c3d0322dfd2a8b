"""Where a run's batches come from: a token stream, examples, preference pairs, or a source of the user's own."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onfoot.data import corpus
from onfoot.data.batches import ALL, FIRST, NO_EXAMPLE, Batch, Place, Share
from onfoot.data.example import Example
from onfoot.data.example_file import ExampleFile, StoredPairs
from onfoot.data.preference_source import Pairs, PreferenceSource, fit_pairs, split_pairs
from onfoot.data.preferences import PREFERENCES, read_preferences, store_preferences
from onfoot.data.records import ReadLog, first_record, has_records
from onfoot.data.sft import SftSource, source_of
from onfoot.data.sft_examples import FileReader, has_text, read_examples
from onfoot.data.windows import Windows, split
from onfoot.generate.chat import template_of
from onfoot.models.model import Model
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.given import check_text
from onfoot.train.options import FinetuneOptions, TrainingOptions

MAX_LENGTH = 1024  # tokens per row of examples, unless the model allows fewer


class Source:
    """Provides batches. A step number determines its batches, so resuming needs no other state.

    Only `microbatches` is required. With several ranks, each asks for its share of the rows only. Private training also
    needs `unit`, `n_examples` and `batches_of`, and `onfoot blame` needs `example_numbers`.
    """

    def _missing(self, name: str, needed_by: str) -> ValueError:
        return ValueError(f"the source {type(self).__name__} does not define {name}, which {needed_by} needs")

    def microbatches(self, step: int, share: Share = ALL) -> list[Batch]:
        """The batches whose gradients are summed in this step."""
        raise self._missing("microbatches", "every run")

    def validation(self, share: Share = ALL) -> Iterable[Batch]:
        """The same batches at every evaluation; without any, there are no evaluations."""
        return ()

    def prompt(self) -> np.ndarray | None:
        """The prompt of the sample at each evaluation, (T,), or None."""
        return None

    def report(self) -> str:
        """A summary of the training and validation data, in one or two lines."""
        return ""

    def example_numbers(self, step: int) -> list[np.ndarray]:
        """For each microbatch of a step (of one rank), the number of each token's example, (B, T); padding has −1."""
        raise self._missing("example_numbers", "onfoot blame")

    @property
    def unit(self) -> str:
        """What private training protects, one by one."""
        raise self._missing("unit", "private training")

    @property
    def n_examples(self) -> int:
        """The number of these units."""
        raise self._missing("n_examples", "private training")

    def batches_of(self, examples: np.ndarray) -> list[Batch]:
        """Microbatches of the training examples of these numbers; each is a row, or a segment of one."""
        raise self._missing("batches_of", "private training")


class OwnSource(Source):
    """A source of the user's own that is not derived from `Source`, with its defaults for what it does not define."""

    def __init__(self, own: Any) -> None:
        self.own = own
        for name in ("microbatches", "validation", "prompt", "report", "example_numbers", "batches_of"):
            if hasattr(own, name):
                setattr(self, name, getattr(own, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def _missing(self, name: str, needed_by: str) -> ValueError:
        return Source._missing(self.own, name, needed_by)

    @property
    def unit(self) -> str:
        return str(self.own.unit) if hasattr(self.own, "unit") else super().unit

    @property
    def n_examples(self) -> int:
        return int(self.own.n_examples) if hasattr(self.own, "n_examples") else super().n_examples


@dataclass(frozen=True)
class TextSource(Source):
    """Batches of shuffled windows for training, and of windows in order for validation."""

    train: Windows
    held_out: Windows
    batch_size: int
    accumulate: int
    eval_windows: int
    begin: Place = FIRST
    about: str = ""  # what was read

    def microbatches(self, step: int, share: Share = ALL) -> list[Batch]:
        n = self.batch_size * self.accumulate
        first = self.begin.of(step, n)
        return [Batch(*self.train.sample(first + p.start, len(p))) for p in share.pieces(n, self.batch_size)]

    @property
    def unit(self) -> str:
        """What private training protects, one by one."""
        return f"window of {self.train.context} tokens"

    @property
    def n_examples(self) -> int:
        """The number of windows."""
        return len(self.train)

    def batches_of(self, examples: np.ndarray) -> list[Batch]:
        """The windows of these numbers."""
        parts = [examples[p.start : p.stop] for p in ALL.pieces(len(examples), self.batch_size)]
        return [Batch(*self.train.batch(part)) for part in parts]

    def example_numbers(self, step: int) -> list[np.ndarray]:
        """For each microbatch of a step, the window of each token, (B, T); padding has −1."""
        n = self.batch_size * self.accumulate
        pieces = [(self.begin.of(step, n) + p.start, len(p)) for p in ALL.pieces(n, self.batch_size)]
        return [
            np.where(self.train.sample(*piece)[1] == IGNORE, NO_EXAMPLE, np.array(self.train.indices(*piece))[:, None])
            for piece in pieces
        ]

    def validation(self, share: Share = ALL) -> Iterable[Batch]:
        rows = share.of(min(len(self.held_out), self.eval_windows))
        for begin in range(0, len(rows), self.batch_size):
            yield Batch(*self.held_out.batch(rows[begin : begin + self.batch_size]))

    @property
    def rows(self) -> int:
        """Windows per epoch."""
        return len(self.train)

    def steps_for(self, epochs: float) -> int:
        """The number of steps of `epochs` passes over the windows."""
        return max(1, math.ceil(round(epochs * len(self.train) / (self.batch_size * self.accumulate), 9)))

    def report(self) -> str:
        epoch = -(-len(self.train) // (self.batch_size * self.accumulate))
        counts = (
            f"{len(self.train.tokens):,} training tokens, {len(self.held_out.tokens):,} validation tokens; "
            f"one epoch is {epoch:,} steps of {self.batch_size * self.accumulate * self.train.context:,} tokens"
        )
        return f"{self.about}\n{counts}" if self.about else counts

    def prompt(self) -> np.ndarray:
        return np.asarray(self.held_out.tokens[: max(1, self.held_out.context // 8)], dtype=np.int64)


def as_source(data: Any, model: Model, options: TrainingOptions) -> Any:
    """A source of batches from a source, from files, from examples, or from token ids.

    Files are named by a string, a path, or a list of them, as for `onfoot train` and `onfoot finetune`: texts, and
    files of {"text"} records, are cut into windows of the model's context; files of other records, and lists of dicts,
    are fine-tuning examples, or preference pairs if the options say dpo; an array (n,) is a token stream. The last
    tenth of a stream, or a random tenth of the examples, is held out for validation.
    """
    if hasattr(data, "microbatches"):
        return data if isinstance(data, Source | SftSource | PreferenceSource) else OwnSource(data)
    items: list[Any] = [data] if isinstance(data, str | Path) else list(data) if isinstance(data, Sequence) else []
    if isinstance(options, FinetuneOptions) and options.dpo:
        return _pairs(items, model, options, type(data).__name__)
    if isinstance(data, np.ndarray):
        return _stream(data, model, options)
    if items and all(isinstance(item, dict) for item in items):
        return _examples(items, model, options)
    if items and all(isinstance(item, str | Path) for item in items):
        if "" in items:
            raise ValueError("data is an empty name; pass the name of a file or folder")
        try:
            return _files([Path(item) for item in items], model, options)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise ValueError(
                "data is the name of a file, and a file's name cannot be this long; write a text into a file, or pass "
                "np.array(model.tokenizer.encode(text))"
            ) from None
    raise ValueError(
        f"data must be a source with microbatches(step), files, a list of examples, or an array of token ids, got "
        f"{type(data).__name__}"
    )


def _files(paths: list[Path], model: Model, options: TrainingOptions) -> Any:
    texts, tokenizer, log = corpus.find_texts(paths), _tokenizer(model), ReadLog(options.skip_bad)
    files = [text.path for text in texts if text.path is not None]
    examples = [path for path in files if has_records(path) and not has_text(first_record(path))]
    if examples:
        if len(examples) < len(files):
            raise ValueError(
                f"{examples[0]} has fine-tuning examples, and other files have text; pass one kind of data"
            )
        template, templated = template_of(model), _templated(model, options)
        return _rows(read_examples(files, tokenizer, template, log, templated), model, options, log)
    return _stream(corpus.mapped_tokens(texts, tokenizer, log), model, options)


def _tokenizer(model: Model) -> Any:
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer: set model.tokenizer, or pass an array of token ids")
    return model.tokenizer


def _examples(values: list[dict[str, Any]], model: Model, options: TrainingOptions) -> SftSource:
    log = ReadLog(options.skip_bad)
    reader = FileReader(template_of(model), _tokenizer(model), log, _templated(model, options))
    found = ((f"example {number}", value) for number, value in enumerate(values, start=1))
    with ExampleFile() as file:
        for example in log.read(found, reader.example):
            file.append(example)
        return _rows(file.examples(), model, options, log)


def _pairs(items: list[Any], model: Model, options: FinetuneOptions, given: str) -> PreferenceSource:
    """The pairs of files or dicts, without their reference log-probabilities."""
    log, tokenizer, template = ReadLog(options.skip_bad), _tokenizer(model), template_of(model)
    if items and all(isinstance(item, dict) for item in items):
        found = ((f"pair {number}", value) for number, value in enumerate(items, start=1))
        pairs = store_preferences(found, tokenizer, template, log, f"the list of {len(items):,} dicts")
    elif items and all(isinstance(item, str | Path) for item in items):
        pairs = read_preferences([Path(item) for item in items], tokenizer, template, log)
    else:
        raise ValueError(f"dpo=True needs files or a list of {PREFERENCES}, got {given}")
    kept, about = fit_pairs(pairs, row_length(model, options), options.on_long)
    about = "\n".join(line for line in (about, log.bad_report()) if line)
    if options.validation_data:
        paths, log = [Path(name) for name in options.validation_data], ReadLog(options.skip_bad)
        others = read_preferences(paths, tokenizer, template, log)
        held_out, more = fit_pairs(others, row_length(model, options), options.on_long)
        return preference_source(kept, held_out, options, f"{about}\nvalidation: {more}")
    train, held_out = split_pairs(kept, options.validation, options.seed)
    return preference_source(train, held_out, options, about)


def preference_source(
    train: StoredPairs, held_out: StoredPairs, options: FinetuneOptions, about: str, begin: Place = FIRST
) -> PreferenceSource:
    """The source of these pairs, with the batches and the loss of the options."""
    return PreferenceSource(
        Pairs(train, options.seed),
        Pairs(held_out, options.seed),
        options.batch_size,
        options.accumulate,
        options.eval_windows,
        about,
        begin,
        options.dpo_beta,
        options.dpo_smoothing,
    )


def _finetune(options: TrainingOptions) -> FinetuneOptions:
    """The options that say how examples are read: those given, or the defaults of `onfoot finetune`."""
    return options if isinstance(options, FinetuneOptions) else FinetuneOptions()


def _templated(model: Model, options: TrainingOptions) -> bool:
    """Whether prompts and completions are put into the model's chat template."""
    return _finetune(options).template and not template_of(model).is_fallback


def row_length(model: Model, options: FinetuneOptions) -> int:
    """The maximum tokens per row: options.max_length, by default what the model allows, up to 1024."""
    limit = model.config.n_positions
    if options.max_length > limit:
        what = f" of {options.model}" if options.model else ""
        raise ValueError(f"max_length={options.max_length} exceeds n_positions={limit}{what}")
    return options.max_length or min(limit, MAX_LENGTH)


def _rows(examples: Sequence[Example], model: Model, options: TrainingOptions, log: ReadLog) -> SftSource:
    finetune = _finetune(options)
    length = row_length(model, finetune)
    separate = None
    if finetune.validation_data:
        more, paths = ReadLog(options.skip_bad), [Path(name) for name in finetune.validation_data]
        others = read_examples(paths, _tokenizer(model), template_of(model), more, _templated(model, options))
        separate = others, more
    batches = options.batch_size, options.accumulate, options.eval_windows
    return source_of(
        examples, log, separate, length, *batches, finetune.on_long, finetune.pack, finetune.validation, options.seed
    )


def _stream(tokens: np.ndarray, model: Model, options: TrainingOptions) -> TextSource:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers in one dimension, got {tokens.dtype} {tokens.shape}")
    check_text(options)
    context, held_out_part = model.config.n_positions, _finetune(options).validation
    train, held_out = (Windows(part, context, options.seed) for part in split(tokens, held_out_part, context))
    return TextSource(train, held_out, options.batch_size, options.accumulate, options.eval_windows)
