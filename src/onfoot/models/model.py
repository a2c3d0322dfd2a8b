"""The object users hold: a configuration, parameters, an engine, and what can be asked of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.arrays import Array
from onfoot.config import Config, GPT2Config
from onfoot.engine import Engine, check_dtype, get_engine
from onfoot.models import adapters, inputs
from onfoot.models.adapters import Adapter
from onfoot.models.families import network
from onfoot.models.gradients import Take
from onfoot.models.layout import Layout, Targets
from onfoot.models.params import Drawn, default_targets, quantizable, shapes
from onfoot.models.run import Note, Policy, Run
from onfoot.models.step import Batch, choose, forward_backward
from onfoot.models.store import NOT_IN_TORCH, Params
from onfoot.models.trace import Recorder, Trace, build_trace, paper_names
from onfoot.quantized import Quantized, quantize

if TYPE_CHECKING:
    from onfoot.formats.tokenizer import Tokenizer
    from onfoot.train.optimizer import AdamW


class Model:
    """A transformer whose gradients are formulas.

    `params` is a dict from Hugging Face's tensor names to the engine's arrays, each of which keeps its shape. Tokens
    and targets are integer arrays (B, T); a target of −100 does not count, and no targets at all means each token's
    successor.

    Several Python threads may use one model at the same time, and each gets what it would have got alone: `logits`,
    `loss`, `loss_and_grads`, `trace` and `generate` only read it. What changes it is for one thread, while no other
    uses it: steps of an optimizer, adapters, `quantize`, and new values in `params`. (Kernels take turns: threads of
    Python do not make one another faster.) A process that is forked off may go on with the model; its kernels run on
    one thread.
    """

    def __init__(
        self, config: Config, params: Mapping[str, Any], dtype: str = "float32", engine: str | Engine = "auto"
    ) -> None:
        self.config: Any = config  # a Config; each family's own modules ask for its own fields
        self.dtype = check_dtype(dtype)
        self.engine = engine if isinstance(engine, Engine) else get_engine(engine, self.dtype)
        self._params = Params(self.engine, self.dtype, shapes(config))
        for name in self.params.shapes:
            if name not in params:
                raise ValueError(f"the parameter {name!r} is missing")
            self.params.own(name, params[name])  # training writes into it
        unknown = sorted(set(params) - set(self.params))
        if unknown:
            raise ValueError(
                f"unknown parameter {unknown[0]!r} (of {len(unknown)}): the configuration has no place for it"
            )
        self.trainable: set[str] = set()  # filled by activate(): all that can train, until there is an adapter
        self.tokenizer: Tokenizer | None = None  # where the model was loaded with one, or given one
        self.source: str | None = None  # the folder it was loaded from
        self.adapters: dict[str, Adapter] = {}
        self.active_adapter: str | None = None
        self.merged: str | None = None  # the adapter that is in the weights now
        self.tied_before_merge = False
        self._steps = _steps() if self.engine.records else None
        self.recompute = False  # True: a block's activations are not kept, but computed again on the way back
        adapters.activate(self, None)

    @property
    def params(self) -> Params:
        """The parameters by name."""
        return self._params

    @params.setter
    def params(self, values: Mapping[str, Any]) -> None:
        """Other arrays for all parameters; those of a copy of this model stay as they are."""
        missing = sorted(set(self._params) - set(values))
        if missing:
            raise ValueError(f"the parameter {missing[0]!r} is missing")
        made = Params(self.engine, self.dtype, self._params.shapes)
        made.update(values)
        self._params = made
        self._forget_recordings()

    def add_lora(
        self,
        r: int = 16,
        alpha: float = 16,
        targets: Sequence[str] | None = None,
        *,
        dropout: float = 0.0,
        rank_stabilised: bool = False,
        name: str = "default",
        seed: int = 0,
    ) -> None:
        """Puts low-rank companions beside the named layers and freezes the rest. The scale is PEFT's, alpha/r.

        Targets are ends of layer names; without any, every linear layer of the blocks. GPT-2 has c_attn, c_proj (of
        attention and of the MLP), c_fc, and c_attn.q, c_attn.k, c_attn.v as parts with companions of their own; LLaMA
        has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; both have lm_head.
        """
        targets = default_targets(self.config) if targets is None else targets
        adapters.new_adapter(self, r, alpha, targets, dropout, rank_stabilised, name, seed)

    def quantize(self, kind: str = "Q8_0") -> None:
        """Turns the weights of all linear layers and the token table into blocks of small codes, frozen from then on.

        Q8_0 ("int8") needs 8.5 bits a number, Q4_1 5 and Q4_0 4.5, instead of 32. Norms, biases and adapters stay.
        """
        if self.engine.name == "torch":
            raise ValueError(NOT_IN_TORCH)
        for name, out_in in quantizable(self.config).items():
            if name not in self.quantized:
                weight = self.params[name]
                codes = quantize(weight if out_in else weight.T, "Q8_0" if kind == "int8" else kind)
                self.params[name] = self.engine.own_blocks(codes if out_in else codes.T)
        adapters.activate(self, self.active_adapter)
        self._forget_recordings()

    def _forget_recordings(self) -> None:
        """Lets go of arrays that are not this model's any more."""
        if self._steps is not None:
            self._steps.clear()

    def use_adapter(self, name: str | None) -> None:
        """Makes one adapter act and train; None turns all of them off."""
        adapters.activate(self, name)

    def merge_adapter(self) -> None:
        """Adds the active adapter to the weights, so that it costs nothing more; `unmerge_adapter` takes it out."""
        adapters.merge(self)

    def unmerge_adapter(self) -> None:
        adapters.unmerge(self)

    def save_adapter(self, folder: str | Path, name: str | None = None) -> None:
        """Writes an adapter (the active one) as PEFT's `PeftModel.from_pretrained` reads it."""
        from onfoot.formats.peft import save_adapter

        save_adapter(self, folder, name)

    def load_adapter(self, folder: str | Path, name: str = "default") -> None:
        """Puts an adapter that PEFT or onfoot saved on this model, and makes it the active one."""
        from onfoot.formats.peft import load_adapter
        from onfoot.train.checkpoint import resolve

        load_adapter(self, resolve(Path(folder)), name)

    @property
    def quantized(self) -> set[str]:
        """The parameters that are quantised, and therefore frozen."""
        return {name for name, value in self.params.items() if isinstance(value, Quantized)}

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: the configuration's and the tokenizer's."""
        own = () if self.tokenizer is None or self.tokenizer.end_id is None else (self.tokenizer.end_id,)
        return tuple(dict.fromkeys((*self.config.end_ids, *own)))

    @property
    def n_params(self) -> int:
        """The number of parameters, adapters included."""
        return sum(int(np.prod(p.shape)) for p in self.params.values())

    @property
    def n_trainable(self) -> int:
        """The number of parameters that train."""
        return sum(int(np.prod(self.params[name].shape)) for name in self.trainable)

    def logits(self, tokens: Any) -> Array:
        """The scores of every possible next token, (B, T, V)."""
        checked = inputs.check_tokens(tokens, self.config.vocab_size, self.config.n_positions)
        run = self.new_run(keep_saved=False)
        a11, _ = network(self.config).features_forward(
            run, self.config, self.engine.integers(checked), self._on_engine(self._layout(checked, None)[0])
        )
        return network(self.config).head_forward(run, self.config, a11)[0]

    def loss(self, tokens: Any, targets: Any = None, *, divisor: float | None = None, segments: Any = None) -> float:
        """The cross-entropy: the mean over the targets that count, or their sum over `divisor`."""
        batch = self._checked(tokens, targets, divisor, segments)
        loss = self._steps.loss(self, batch) if self._steps is not None else None
        return self._unrecorded(self.new_run(keep_saved=False), batch, backward=False) if loss is None else loss

    def loss_and_grads(
        self,
        tokens: Any,
        targets: Any = None,
        *,
        divisor: float | None = None,
        segments: Any = None,
        dropout_seed: int | None = None,
        take: Take | None = None,
        on_loss: Callable[[float], None] | None = None,
    ) -> tuple[float, dict[str, Array]]:
        """The loss and the gradient of every trainable parameter, by name.

        `divisor`: what the summed loss is divided by; where a step is split into parts, the number of targets of the
        whole step, and the parts' gradients add up exactly. `segments` (B, T) numbers packed examples: no token sees
        another example, positions begin anew. `dropout_seed` turns the configuration's dropout on, reproducibly.
        `take(name, gradient)` gets each gradient as soon as no path adds to it any more, and it is not returned.
        `on_loss` gets the loss before that: what it raises, no gradient is made of.
        """
        batch = self._checked(tokens, targets, divisor, segments)._replace(dropout_seed=dropout_seed)
        done = self._steps.gradients(self, batch, take, on_loss) if self._steps is not None else None
        if done is not None:
            return done
        run = self.new_run(dropout_seed=dropout_seed)
        run.gradients.take = take
        run.on_loss = None if on_loss is None else lambda loss: on_loss(float(loss))
        return self._unrecorded(run, batch), run.gradients.made

    def trace(
        self,
        tokens: Any,
        targets: Any = None,
        *,
        divisor: float | None = None,
        segments: Any = None,
        input_gradient: bool = False,
    ) -> Trace:
        """Every activation and error signal, by the paper's names; with `input_gradient` Δ_0 too, (B, T, V)."""
        if not isinstance(self.config, GPT2Config):
            raise ValueError(f"a trace has the paper's names; a {self.config.model_type} model has none of its own yet")
        recorder = Recorder(self.config.n_layer)
        run = self.new_run(note=recorder)
        run.gradients.reach_the_input()
        batch = self._checked(tokens, targets, divisor, segments)
        loss = self._unrecorded(run, batch)
        ids, layout = self.engine.integers(batch.tokens), self._on_engine(batch.layout)
        grads = run.gradients.made
        return build_trace(recorder, ids, self.config, self.params, loss, grads, layout, input_gradient)

    def train_step(
        self,
        optimizer: AdamW,
        tokens: Any,
        targets: Any = None,
        *,
        segments: Any = None,
        dropout_seed: int | None = None,
        clip: float = 0.0,
    ) -> float:
        """One step of the optimizer on one batch; returns the loss before it.

        Each parameter is updated soon after its gradient is final, which is never before its old value was last used.
        So only a few gradients exist at a time. With `clip`, gradients of a larger norm are scaled down to it: all of
        them must exist before the first update. A batch that is refused and a loss that is not finite are no steps and
        change nothing; Ctrl-C acts before the first update or after the last.
        """
        from onfoot.train.step import Part, one_batch, several

        if not clip >= 0:
            raise ValueError(f"clip={clip}: a norm of at least 0 is needed; 0 clips nothing")
        optimizer.expect(self.trainable)
        part = Part(tokens, targets, segments, dropout_seed)
        if clip:
            return several(self, optimizer, [part], None, None, clip, inputs.no_step)[0]
        return one_batch(self, optimizer, part, None, None, inputs.no_step, norm=False)[0]

    def generate(
        self,
        tokens: Any,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        *,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_ids: Sequence[int] | None = None,
        stop: Sequence[str] = (),
        slide: bool = False,
    ) -> Any:
        """The prompts continued: an array (B, T) gives (B, T + new), a list of prompts of any lengths gives a list.

        A temperature of 0 always takes the likeliest token. Without `stop_ids`, the model's own end token stops a row.
        A continuation beyond n_positions is refused, unless `slide` lets it go on with the last half of the context.
        """
        from onfoot.generate.loop import generate
        from onfoot.generate.sampling import Sampling

        if stop_ids is None:
            stop_ids = self.end_ids
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        return generate(self, tokens, max_new_tokens, sampling, seed, stop_ids, stop, slide)

    def save(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder, which `transformers.AutoModelForCausalLM` loads as it is."""
        from onfoot.formats.huggingface import save_folder

        if self.active_adapter is not None:
            raise ValueError(
                f"the adapter {self.active_adapter!r} is not in the weights; merge_adapter() first, or save_adapter()"
            )
        save_folder(self, folder)

    def new_run(
        self,
        keep_saved: bool = True,
        dropout_seed: int | None = None,
        note: Note | None = None,
        engine: Engine | None = None,
        cache: Any = None,
    ) -> Run:
        """One pass over this model's parameters, with the adapter that is active."""
        policy = Policy(
            self.trainable,
            self.dtype,
            None if self.active_adapter is None else self.adapters[self.active_adapter],
            dropout_seed,
            keep_saved,
            self.recompute,
            None if note is None else paper_names(note),
        )
        return Run(engine or self.engine, self.config, self.params, policy, cache)

    def _layout(self, tokens: np.ndarray, segments: Any) -> tuple[Layout, np.ndarray | None]:
        """Where the tokens stand, and the positions within their examples where there are several."""
        limit = tokens.shape[1]
        if segments is None:
            return Layout(np.arange(limit), None, limit), None
        if not self.config.causal:
            raise ValueError(
                "segments need causal=True: without the mask a token would see the examples behind its own"
            )
        positions, start = inputs.check_segments(segments, tokens)
        return Layout(positions, start, limit), positions

    def _on_engine(self, layout: Layout) -> Layout:
        """The same with the engine's arrays."""
        integers = self.engine.integers
        return Layout(
            integers(layout.positions), None if layout.start is None else integers(layout.start), layout.limit
        )

    def _checked(self, tokens: Any, targets: Any, divisor: float | None, segments: Any) -> Batch:
        """Tokens and targets as integers, where they stand, and what the loss is divided by."""
        config = self.config
        checked = inputs.check_tokens(tokens, config.vocab_size, config.n_positions)
        layout, positions = self._layout(checked, segments)
        checked_targets = inputs.check_targets(targets, checked, config.vocab_size, positions)
        if divisor is None:
            divisor = inputs.count_targets(checked_targets)
        elif not divisor > 0:
            raise ValueError(f"divisor={divisor} must be above 0: it is the number of targets of the whole step")
        wanted = choose(checked_targets) if self.engine.has("logits_loss_forward") else Targets(checked_targets)
        return Batch(checked, wanted, layout, divisor, None)

    def _unrecorded(self, run: Run, batch: Batch, backward: bool = True) -> float:
        """A step as the model has it, call by call."""
        integers, targets = self.engine.integers, batch.targets
        wanted = Targets(*(None if x is None else integers(x) for x in targets))
        layout = self._on_engine(batch.layout)
        loss = forward_backward(run, self.config, integers(batch.tokens), wanted, layout, batch.divisor, backward)
        return float(loss)


def _steps() -> Any:
    """Where a model on kernels keeps the recordings of its steps."""
    from onfoot.models.recorded import Steps

    return Steps()


def load(path: str | Path, dtype: str = "float32", engine: str = "auto", *, quantized: bool = False) -> Model:
    """The model in a Hugging Face folder, a GGUF file, a run's best checkpoint, or of a known name ("smollm2").

    An adapter's folder brings its base along. With `quantized`, weights are frozen blocks of small codes: those of a
    GGUF file as they are, those of a folder rounded to 8 bits as they are read. For generation at a multiple of the
    speed, or as a base for adapters, in a fraction of the memory.
    """
    from onfoot.formats.files import shown
    from onfoot.formats.gguf_model import find_file, load_gguf
    from onfoot.formats.huggingface import is_model_folder, load_folder
    from onfoot.formats.peft import base_of, is_adapter_folder
    from onfoot.train.checkpoint import resolve

    file = find_file(path)
    if file is not None:
        model = load_gguf(file, check_dtype(dtype), engine, quantized)
        model.source = str(path)
        return model
    folder = resolve(Path(path))
    if not is_adapter_folder(folder) or is_model_folder(folder):  # an adapter may lie in its base's own folder
        return load_folder(folder, check_dtype(dtype), engine, quantized)
    base = base_of(folder)
    if not isinstance(base, str) or not (os.path.isdir(base) or find_file(base)):
        raise ValueError(
            f"{folder} is an adapter of {shown(base)}, which is not here; load the base, then the adapter "
            f"(onfoot generate BASE --adapter {folder})"
        )
    if is_adapter_folder(base) and not is_model_folder(base):
        raise ValueError(f"{folder} is an adapter of {shown(base)}, which is an adapter itself")
    model = load(base, dtype, engine, quantized=quantized)
    model.load_adapter(folder)
    return model


def create(config: Config, seed: int = 0, dtype: str = "float32", engine: str = "auto") -> Model:
    """A model with its family's initial values, the same for the same seed."""
    return Model(config, Drawn(config, seed, check_dtype(dtype)), dtype, engine)
