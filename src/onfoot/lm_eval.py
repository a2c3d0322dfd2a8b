"""A model for EleutherAI's lm-eval, registered as "onfoot"; needs `pip install "onfoot[lm-eval]"`.

import lm_eval, onfoot.lm_eval
lm_eval.simple_evaluate(model="onfoot", model_args={"pretrained": "runs/mine"}, tasks=["lambada_openai"])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from onfoot.arrays import to_numpy
from onfoot.data.sliding import Piece, Window, padded_batch, sliding_windows, start_id
from onfoot.generate.chat import template_of
from onfoot.models.families import network
from onfoot.models.inputs import check_tokens
from onfoot.models.load import load
from onfoot.models.model import Model
from onfoot.models.step import features
from onfoot.ops.cross_entropy import IGNORE

ROWS = 256  # rows of logits at a time
MAX_NEW_TOKENS = 256  # unless the task says otherwise, as in lm-eval's own models
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


@register_model("onfoot")
class OnfootLM(TemplateLM):
    """A loaded model, or one to be loaded from a folder, file or name, that lm-eval can ask."""

    def __init__(
        self,
        pretrained: Model | str | Path,
        adapter: str | Path | None = None,
        *,
        dtype: str = "float32",
        engine: str = "auto",
        quantized: bool = False,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_batch_size: int | None = None,  # these two come from lm-eval's own command line
        device: str | None = None,
    ) -> None:
        super().__init__()
        self.model = (
            pretrained if isinstance(pretrained, Model) else load(pretrained, dtype, engine, quantized=quantized)
        )
        if adapter is not None:
            self.model.load_adapter(adapter)
        if self.model.tokenizer is None:
            raise ValueError(f"{self.model.source or 'this model'} has no tokenizer, which lm-eval's tasks need")
        self.tokenizer = self.model.tokenizer
        n_positions = self.model.config.n_positions
        if max_length is not None and not 1 < max_length <= n_positions:
            raise ValueError(f"max_length must be in 2 ... {n_positions}, the model's n_positions, got {max_length}")
        self.max_length = max_length or n_positions
        self.batch_size = 8 if batch_size == "auto" else int(batch_size)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {batch_size}")

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        if self.tokenizer.eos_id is None:
            raise ValueError(f"{self.tokenizer.name} has no EOS token, which lm-eval needs")
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before the first of a text."""
        start = start_id(self.tokenizer)
        return self.eot_token_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        """A name for lm-eval's cache of requests."""
        return self.tokenizer.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer itself adds, unless the text has them."""
        if add_special_tokens is None:
            add_special_tokens = not (self.tokenizer.bos and string.startswith(self.tokenizer.bos))
        return self.tokenizer.backend.encode(string, add_special_tokens=add_special_tokens).ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation; without a generation prompt, the last message may be continued."""
        text = template_of(self.model).render(chat_history, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        return text[: text.rindex(last) + len(last)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """For each context and continuation: the log-likelihood of the continuation, and whether it is greedy."""
        windows = []
        for _request, context, continuation in requests:
            ids = np.asarray([*context, *continuation][-(self.max_length + 1) :], np.int64)
            targets = np.full(len(ids) - 1, IGNORE, np.int64)
            targets[-len(continuation) :] = ids[-len(continuation) :]
            windows.append((ids[:-1], targets))
        scored = self._score(windows, disable_tqdm)
        for (request, _context, _continuation), answer in zip(requests, scored, strict=True):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, answer)
        return scored

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in windows that overlap only at its end."""
        windows: list[Window] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = np.asarray([self.prefix_token_id, *self.tok_encode(request.args[0])], np.int64)
            piece = Piece(ids, np.ones(len(ids), bool), 0)
            found = list(sliding_windows([piece], self.max_length, self.max_length))
            windows += found
            owners += [number] * len(found)
        totals = [0.0] * len(requests)
        for number, (score, _) in zip(owners, self._score(windows, disable_tqdm), strict=True):
            totals[number] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that continues each context, up to a stop string or the end of the text."""
        texts: list[str] = [""] * len(requests)
        for batch in tqdm(list(self._same_settings(requests)), desc="onfoot: texts", disable=disable_tqdm):
            settings: dict[str, Any] = dict(normalize_gen_kwargs(requests[batch[0]].args[1], MAX_NEW_TOKENS))
            until, n_new = [s for s in settings["until"] if s], int(settings["max_gen_toks"])
            room = self.max_length - n_new
            if room < 1:
                raise ValueError(
                    f"a task asks for {n_new} new tokens, but the model has {self.max_length} positions; choose a "
                    f"smaller max_gen_toks"
                )
            contexts = [self.tok_encode(requests[i].args[0]) or [self.prefix_token_id] for i in batch]
            prompts = [np.asarray(ids[-room:], np.int64) for ids in contexts]
            sampling = {name: settings[name] for name in SAMPLING if settings.get(name) is not None}
            outs = self.model.generate(prompts, n_new, settings.get("temperature", 0.0), **sampling, stop=until)
            for i, prompt, out in zip(batch, prompts, outs, strict=True):
                text = self.tokenizer.decode(out[len(prompt) :].tolist())
                texts[i] = text[: min((at for s in until if (at := text.find(s)) >= 0), default=None)]
                self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def _same_settings(self, requests: list[Instance]) -> Iterator[list[int]]:
        """Numbers of requests in batches that have the same settings."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for group in groups.values():
            group.sort(key=lambda i: -len(requests[i].args[0]))  # of similar length: little padding
            yield from (group[begin : begin + self.batch_size] for begin in range(0, len(group), self.batch_size))

    def _score(self, windows: list[Window], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """For each window: the sum of its targets' log-probabilities, and whether all are the most likely tokens."""
        order = sorted(range(len(windows)), key=lambda i: -len(windows[i][0]))
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(windows)
        for begin in tqdm(range(0, len(order), self.batch_size), desc="onfoot: windows", disable=disable_tqdm):
            group = order[begin : begin + self.batch_size]
            tokens, targets = padded_batch([windows[i] for i in group], self.max_length)
            log_p, greedy = target_scores(self.model, tokens, targets)
            owner = np.nonzero(targets != IGNORE)[0]
            for row, i in enumerate(group):
                scores[i] = float(log_p[owner == row].sum()), bool(greedy[owner == row].all())
        return scores


def target_scores(model: Model, tokens: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The log-probability of each target (M,), and whether it is the most likely token; few logits exist at a time."""
    checked = check_tokens(tokens, model.config.vocab_size, model.config.n_positions)
    net, run, engine = network(model.config), model.new_run(keep_saved=False), model.engine
    a11 = features(run, model.config, checked)  # (B, T, C)
    flat = targets.reshape(-1)
    rows = np.flatnonzero(flat != IGNORE)
    log_p, greedy = np.zeros(len(rows)), np.zeros(len(rows), bool)
    for begin in range(0, len(rows), ROWS):
        some = rows[begin : begin + ROWS]
        chosen = a11.reshape(-1, a11.shape[-1])[engine.integers(some)]
        logits = to_numpy(net.head_forward(run, model.config, chosen[None])[0])[0]  # (m, V)
        wanted = logits[np.arange(len(some)), flat[some]]
        largest = logits.max(axis=1)
        total = np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
        log_p[begin : begin + ROWS] = wanted.astype(np.float64) - largest - np.log(total)
        greedy[begin : begin + ROWS] = logits.argmax(axis=1) == flat[some]
    return log_p, greedy


def run_tasks(
    model: Model,
    tasks: Sequence[str],
    *,
    context: int | None = None,
    batch_size: int = 8,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """lm-eval's metrics of a model by task: {"acc": 0.5, "acc_stderr": 0.01}."""
    lm = OnfootLM(model, batch_size=batch_size, max_length=context)
    try:
        found = lm_eval.simple_evaluate(lm, tasks=list(tasks), limit=limit, log_samples=False)
    except KeyError as error:
        raise ValueError(f"--tasks: {error.args[0]}; `lm-eval ls tasks` lists all tasks") from None
    return {task: _plain(metrics) for task, metrics in found["results"].items()}


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are numbers; of the names "acc,none" and "match,strict", the filter is kept unless none."""
    out = {}
    for name, value in metrics.items():
        metric, _, kind = name.partition(",")
        if not kind or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        suffix = "_stderr" if metric.endswith("_stderr") else ""
        label = metric.removesuffix("_stderr") + ("" if kind == "none" else f" ({kind})")
        out[label + suffix] = float(value)
    return out
