"""A study: one text run through one model, and everything that the page can request about it."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.config import GPT2Config, LlamaConfig
from onfoot.explore import mistakes, one_step, own, texts, training
from onfoot.explore.autograd import Autograd
from onfoot.explore.describe import PAGE_FORMULAS, describe, encoded, formulas_of, strings_in
from onfoot.explore.exercises import EXPORTED, KINDS, exercise
from onfoot.explore.factors import norm_of
from onfoot.explore.jobs import tracked
from onfoot.explore.knockouts import knockouts
from onfoot.explore.live import Training
from onfoot.explore.live_checkpoints import Checkpoints, run_checkpoints
from onfoot.explore.mathml import tree
from onfoot.explore.motion import motion
from onfoot.explore.network import build_steps
from onfoot.explore.one_step_large import LargeSteps
from onfoot.explore.proof import ScoresProbe, differentiated, measured
from onfoot.explore.study_context import StudyContext
from onfoot.explore.whatif import choices, what_if
from onfoot.explore.wide import SampledProbe
from onfoot.models.inputs import count_targets, next_token_targets
from onfoot.ops.cross_entropy import IGNORE

if TYPE_CHECKING:
    from onfoot.explore.step import Step
    from onfoot.models.model import Model
    from onfoot.own_engine import OwnEngine

MAX_PARAMS = 500_000_000  # in float32 they take 2 GB; gradients of frozen weights are computed one by one
LARGE = 3_000_000  # parameters; above it, weights stay as the file has them, and gradients are checked on request
MAX_AUTOGRAD = 30_000_000  # parameters
PREDICTIONS = 5
FIRST_STEP = "loss"  # the page follows the error from here


Track = Callable[[list[str], str], Iterable[str]]  # iterates over a list with a progress bar


def untracked(items: list[str], what: str) -> Iterable[str]:
    return items


class Study:
    """The trace of one text and its arrays. Everything else is computed on first use and cached."""

    def __init__(self, model: Model, tokens: np.ndarray, own_engine: OwnEngine | None = None) -> None:
        check_model(model)
        self.model, self.tokens, self.own_engine = model, tokens, own_engine
        self.targets = next_token_targets(tokens)
        self.divisor = count_targets(self.targets)
        self.frozen = bool(model.quantized)  # no gradient of a weight is kept
        trace = model.trace(tokens, self.targets, divisor=self.divisor, input_gradient=not self.frozen)
        self.context = StudyContext(model, trace, tokens, self.targets, self.divisor)
        self.steps: list[Step] = build_steps(self.context)
        self.loss = trace.loss
        self.tensors = self.context.tensors
        self.key = study_key(tokens)
        self._differences: dict[str, dict[str, Any]] = {}
        self._mistakes: dict[str, dict[str, Any]] = {}
        self._optimizer: dict[tuple[float, int], dict[str, Any]] = {}
        self._knockouts: dict[int, dict[str, Any]] = {}
        self._large_steps: LargeSteps | None = None  # at the learning rate that was asked for last

    @property
    def is_large(self) -> bool:
        return self.model.n_params > LARGE

    @cached_property
    def document(self) -> dict[str, Any]:
        """The map, and everything else that the page needs before it loads numbers."""
        tensors = {tensor.id: describe(tensor) for tensor in self.tensors}
        return {
            "key": self.key,
            "model": self._model(),
            "loss": self.loss,
            "targets": self.divisor,
            "tokens": self._tokens(),
            "vocabulary": texts.vocabulary(self.model),
            "steps": [step.to_json() for step in self.steps],
            "motion": motion(self.steps, self.tensors),
            "tensors": tensors,
            "math": {**formulas_of(self.tensors), **{text: tree(text) for text in PAGE_FORMULAS}},
        }

    def first_arrays(self) -> dict[str, str]:
        """The arrays of the step that the page opens with, as base64, so that it need not request them."""
        step = next(step for step in self.steps if step.id == FIRST_STEP)
        shown = [id for id in (step.forward, step.backward) if id is not None]
        factors = [f.tensor for id in shown for term in self.tensors[id].terms for f in term.factors]
        return {id: encoded(self.tensors.value(id)) for id in dict.fromkeys([*shown, *factors])}

    def _model(self) -> dict[str, Any]:
        model, config = self.model, self.model.config
        return {
            "parameters": model.n_params,
            "large": self.is_large,
            "frozen": self.frozen,
            "first_lr": self.context.first_lr,
            "weights": sum(value.nbytes for value in model.params.values()),
            "family": self.context.family,
            "key_heads": config.n_kv_head,
            "blocks": config.n_layer,
            "heads": config.n_head,
            "width": config.n_embd,
            "key_width": config.key_width,
            "value_width": config.value_width,
            "inner_width": config.inner_width,
            "vocabulary": config.vocab_size,
            "positions": config.n_positions,
            "tied": config.tie_word_embeddings,
            "causal": config.causal,
            "activation": config.activation_function,
            "has_tokenizer": model.tokenizer is not None,
            "most_characters": texts.MAX_CHARACTERS,
            "autograd": self.autograd_installed,
        }

    def _tokens(self) -> list[dict[str, Any]]:
        """Each token with its target, its loss and the model's top predictions."""
        predicted, losses = self.context.trace.a["pred"][0], self.tensors.value("ℓ")
        out = []
        for t, (id, target) in enumerate(zip(self.tokens[0].tolist(), self.targets[0].tolist(), strict=True)):
            best = np.argsort(-predicted[t], kind="stable")[:PREDICTIONS]
            counts = target != IGNORE
            out.append(
                {
                    "id": id,
                    "text": texts.shown(self.model, id),
                    "target": target if counts else None,
                    "loss": float(losses[t]) if counts else None,
                    "probability": float(predicted[t, target]) if counts else None,
                    "best": [{"id": int(i), "probability": float(predicted[t, i])} for i in best],
                }
            )
        return out

    def gradients_of(self, step_id: str) -> list[str]:
        """The gradients that a row of the map shows."""
        found = [step for step in self.steps if step.id == step_id]
        if not found:
            raise KeyError(f"unknown step {step_id!r}")
        ids = [found[0].backward, *(gradient for _, gradient in found[0].parameters), *found[0].inside]
        return [id for id in ids if id is not None and self.tensors[id].is_gradient]

    def differences(self, step_id: str) -> dict[str, dict[str, Any]]:
        """The gradients of a step checked by finite differences, each along its own random direction."""
        return {id: self._difference(id) for id in tracked(self.gradients_of(step_id), "checks of gradients")}

    def _difference(self, id: str) -> dict[str, Any]:
        if id not in self._differences:
            seed = int.from_bytes(hashlib.sha256(id.encode()).digest()[:4], "big")
            kind = SampledProbe if self.frozen else ScoresProbe
            probe = kind(self._perturbed_model, self.tokens, self.targets, self.divisor, seed)
            self._differences[id] = measured(self.tensors[id], probe)
            if probe.sampled:
                self._differences[id]["sampled"] = probe.sampled
        return self._differences[id]

    def autograds(self, step_id: str) -> dict[str, dict[str, Any]]:
        """The gradients of a step checked against PyTorch's autograd; empty if PyTorch is not installed."""
        if self.autograd is None:
            return {}
        norm = math.hypot(*(norm_of(self.context.grads, name) for name in self.context.grads))
        return {id: differentiated(self.tensors[id], self.autograd, norm) for id in self.gradients_of(step_id)}

    @cached_property
    def _perturbed_model(self) -> Model:
        """The model that probes perturb. Its dict of parameters is its own, so no one else sees a perturbed one."""
        clone = copy.copy(self.model)
        clone.params = dict(self.model.params)
        return clone

    @cached_property
    def autograd_installed(self) -> bool:
        """Whether gradients can be compared with autograd's, which needs a copy of all weights in float64."""
        return self.model.n_params <= MAX_AUTOGRAD and importlib.util.find_spec("torch") is not None

    @cached_property
    def autograd(self) -> Autograd | None:
        """Autograd's pass over the same text, or None if PyTorch is not installed."""
        if not self.autograd_installed:
            return None
        return Autograd(self.model, self.tokens, self.targets, self.divisor)

    @cached_property
    def training(self) -> dict[str, Any]:
        return self._with_arrays(training.explain_training(self.context))

    def optimizer(self, lr: float, steps: int) -> dict[str, Any]:
        if self.frozen:
            if self._large_steps is None or self._large_steps.lr != lr:
                if self._large_steps is not None:
                    self._large_steps.forget()
                self._large_steps = LargeSteps(self.context, lr)
            return self._with_arrays(self._large_steps.answer(steps))
        if (lr, steps) not in self._optimizer:
            while len(self._optimizer) >= one_step.MAX_STEPS:
                self._evict(next(iter(self._optimizer)))
            self._optimizer[lr, steps] = self._with_arrays(one_step.optimizer_steps(self.context, lr, steps))
        return self._optimizer[lr, steps]

    def _evict(self, key: tuple[float, int]) -> None:
        for row in self._optimizer.pop(key)["parameters"]:
            for id in row["arrays"].values():
                self.tensors.remove(id)

    @cached_property
    def lora(self) -> dict[str, Any]:
        return self._with_arrays(one_step.lora_steps(self.context))

    @cached_property
    def own(self) -> dict[str, Any]:
        """The gradients of the user's own pairs beside the right ones."""
        if self.own_engine is None:
            raise ValueError("there are no pairs of your own; open the page with onfoot explore --engine my_ops.py")
        self._require_small_model("your gradients are a second copy of all gradients")
        return self._with_arrays(own.show_own(self.context, self.own_engine))

    def mistakes(self) -> dict[str, Any]:
        return mistakes.catalogue(self.context)

    def mistake(self, key: str) -> dict[str, Any]:
        if key not in self._mistakes:
            self._mistakes[key] = mistakes.apply_mistake(self.context, key)
        return self._mistakes[key]

    @cached_property
    def live(self) -> Training:
        """AdamW steps on the text, from this model on."""
        return Training(self.context)

    @cached_property
    def run_steps(self) -> list[int]:
        """The steps of the run's checkpoints; empty if there are fewer than two."""
        return self.checkpoints.steps() if len(self.checkpoints.folders) > 1 else []

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run that the model was loaded from."""
        return Checkpoints(self.context, run_checkpoints(self.model))

    @cached_property
    def what_if_choices(self) -> dict[str, Any]:
        """What can be changed in the What if view, and what happens to the loss without a head, a skip or the scale.

        Of a large model, the page asks for the knock-outs of one block.
        """
        found: dict[str, Any] = {"choices": choices(self.context)}
        if not self.is_large:
            found["knockouts"] = knockouts(self.context, range(self.model.config.n_layer))
        return found

    def knockouts(self, block: int) -> dict[str, Any]:
        """What happens to the loss without a part of one block."""
        if not 0 <= block < self.model.config.n_layer:
            raise ValueError(f"block must be between 0 and {self.model.config.n_layer - 1}, got {block}")
        if block not in self._knockouts:
            self._knockouts[block] = knockouts(self.context, [block])
        return self._knockouts[block]

    def what_if(self, kind: str, name: str, row: int, column: int, change: float) -> dict[str, Any]:
        """What a gradient promises for a change of one value, and what the change does to the loss."""
        return what_if(self.context, kind, name, row, column, change)

    def exercise(self, kind: str, number: int) -> dict[str, Any]:
        return exercise(self.context, kind, number)

    def _exercises(self) -> dict[str, Any]:
        """The exercises of an exported page."""
        parts = {}
        for kind in KINDS:
            for number in range(EXPORTED):
                try:
                    parts[f"exercise {kind} {number}"] = self.exercise(kind, number)
                except ValueError:  # blocks that differ from GPT-2's, or no clear sign
                    break
        return parts

    def all_parts(self, track: Track = untracked) -> dict[str, Any]:
        """Every view and every proof, by the key that the page requests it with."""
        if self.model.n_params > MAX_AUTOGRAD:  # a check takes many passes of a large model
            return {}
        ids = [step.id for step in self.steps]
        parts: dict[str, Any] = {f"proof {id}": {"proofs": self.differences(id)} for id in track(ids, "differences")}
        parts |= {f"autograd {id}": {"proofs": self.autograds(id)} for id in track(ids, "autograd")}
        if self.is_large:
            return parts
        lr, steps = one_step.FIRST
        if self.own_engine is not None:
            parts["own"] = self.own
        parts |= {"training": self.training, f"optimizer {lr:g} {steps}": self.optimizer(lr, steps), "lora": self.lora}
        parts["live"] = {**self.live.exported(), "run": []}
        parts |= {"whatif": self.what_if_choices, **self._exercises()}
        return parts | self._featured_mistakes(track)

    def _featured_mistakes(self, track: Track) -> dict[str, Any]:
        try:
            listed = mistakes.catalogue(self.context, featured=True)
        except ValueError:  # blocks that differ from GPT-2's
            return {}
        keys = [one["key"] for group in listed["groups"] for one in group["mistakes"]]
        return {"mistakes": listed, **{f"mistake {key}": self.mistake(key) for key in track(keys, "mistakes")}}

    def _require_small_model(self, why: str) -> None:
        if self.is_large:
            raise ValueError(
                f"the model has {self.model.n_params:,} parameters; this view supports up to {LARGE:,}, because {why}"
            )

    def _with_arrays(self, part: dict[str, Any]) -> dict[str, Any]:
        """A part of the page, with descriptions of the arrays that it names."""
        arrays = [self.tensors[id] for id in dict.fromkeys(strings_in(part)) if id in self.tensors]
        return {**part, "tensors": {array.id: describe(array) for array in arrays}, "math": formulas_of(arrays)}


def study_key(tokens: np.ndarray) -> str:
    """A hash of the tokens, which identifies a study."""
    return hashlib.sha256(tokens.tobytes()).hexdigest()[:16]


def check_model(model: Model) -> None:
    """Raises ValueError for a model that the page cannot show."""
    if not isinstance(model.config, GPT2Config | LlamaConfig):
        raise ValueError(f"explore shows GPT-2 and the LLaMA family, got a {type(model.config).__name__}")
    if model.n_params > MAX_PARAMS:
        raise ValueError(f"the model has {model.n_params:,} parameters; explore supports up to {MAX_PARAMS:,}")
