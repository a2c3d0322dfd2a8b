"""`Model`: a configuration, its parameters and an engine, with training, generation and tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.arrays import Array
from onfoot.config import Config, GPT2Config, LlamaConfig
from onfoot.engine import Engine, check_dtype
from onfoot.models import adapters, examples, inputs
from onfoot.models.adapters import Adapter
from onfoot.models.families import network
from onfoot.models.gradients import OnGradient
from onfoot.models.params import default_targets, quantizable, shapes
from onfoot.models.run import OnActivation, Policy, Run
from onfoot.models.show import model_html, model_text
from onfoot.models.step import checked_batch, features, unrecorded_loss
from onfoot.models.store import NOT_IN_TORCH, Params
from onfoot.models.trace import Recorder, Trace, build_trace, paper_names
from onfoot.own_engine import EngineLike, as_engine
from onfoot.quantized import Quantized, QuantizedWeight, frozen_weight, quantize

if TYPE_CHECKING:
    from onfoot.formats.tokenizer import Tokenizer
    from onfoot.train.optimizer import AdamW


class Model:
    """A transformer whose gradients are formulas.

    `params` is a dict from Hugging Face's tensor names to the engine's arrays, each of fixed shape. Tokens and targets
    are integer arrays (B, T); a target of −100 is ignored, and without targets each token's target is the next token.

    Several Python threads may call `logits`, `loss`, `loss_and_grads`, `trace` and `generate` on one model at the same
    time: these only read it, and results do not depend on the other threads. Optimizer steps, adapters, `quantize` and
    new values in `params` change the model, and need it for themselves. (Kernels take turns: more Python threads are
    not faster.) A forked process may keep using the model; its kernels run on one thread.
    """

    def __init__(
        self, config: Config, params: Mapping[str, Any], dtype: str = "float32", engine: EngineLike = "auto"
    ) -> None:
        self.config: Any = config  # a Config; each family's modules read its own fields
        self.dtype = check_dtype(dtype)
        self.engine = as_engine(engine, self.dtype)
        self._params = Params(self.engine, self.dtype, shapes(config))
        for name in self.params.shapes:
            if name not in params:
                raise ValueError(f"missing parameter {name!r}")
            self.params.copy_in(name, params[name])  # training writes into it
        unknown = sorted(set(params) - set(self.params))
        if unknown:
            raise ValueError(
                f"unexpected parameter {unknown[0]!r} (of {len(unknown)}): the configuration does not have it"
            )
        self.trainable: set[str] = set()  # set by activate(): all that can train, until there is an adapter
        self.tokenizer: Tokenizer | None = None  # if it was loaded with one, or given one
        self.source: str | None = None  # the folder or file it was loaded from
        self.file_dtypes: dict[str, str] = {}  # of a model loaded with dtype="auto", which `save` keeps
        self.adapters: dict[str, Adapter] = {}
        self.active_adapter: str | None = None
        self.merged: str | None = None  # the adapter that is merged into the weights
        self.tied_before_merge = False
        self._steps = _steps() if self.engine.records else None
        self.recompute = False  # True: activation checkpointing per block
        adapters.activate(self, None)

    def __repr__(self) -> str:
        return model_text(self)

    def _repr_html_(self) -> str:
        return model_html(self)

    @property
    def params(self) -> Params:
        """The parameters by name."""
        return self._params

    @params.setter
    def params(self, values: Mapping[str, Any]) -> None:
        """Replaces the arrays of all parameters; copies of this model keep theirs."""
        missing = sorted(set(self._params) - set(values))
        if missing:
            raise ValueError(f"missing parameter {missing[0]!r}")
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
        use_rslora: bool = False,
        name: str = "default",
        seed: int = 0,
    ) -> None:
        """Adds LoRA layers to the target layers and freezes the rest. The scale is PEFT's, alpha/r.

        Targets are suffixes of layer names; by default, every linear layer of the blocks. GPT-2 has c_attn, c_proj (of
        attention and of the MLP) and c_fc, and the parts c_attn.q, c_attn.k and c_attn.v; LLaMA has q_proj, k_proj,
        v_proj, o_proj, gate_proj, up_proj and down_proj; both have lm_head.
        """
        targets = default_targets(self.config) if targets is None else targets
        adapters.new_adapter(self, r, alpha, targets, dropout, use_rslora, name, seed)

    def quantize(self, kind: str = "Q8_0") -> None:
        """Quantizes the weights of all linear layers and the token table, and freezes them.

        Q8_0 ("int8") needs 8.5 bits per weight, Q4_1 5 and Q4_0 4.5, instead of 32. Norms, biases and adapters stay.
        """
        if self.engine.name == "torch":
            raise ValueError(NOT_IN_TORCH)
        for name, out_in in quantizable(self.config).items():
            if not isinstance(frozen_weight(self.params[name]), QuantizedWeight):
                weight = np.asarray(self.params[name])
                codes = quantize(weight if out_in else weight.T, "Q8_0" if kind == "int8" else kind)
                self.params[name] = self.engine.copy_quantized(codes if out_in else codes.T)
        adapters.activate(self, self.active_adapter)
        self._forget_recordings()

    def _forget_recordings(self) -> None:
        """Lets go of arrays that are not this model's any more."""
        if self._steps is not None:
            self._steps.clear()

    def use_adapter(self, name: str | None) -> None:
        """Activates one adapter, which then trains; None deactivates all."""
        adapters.activate(self, name)

    def merge_adapter(self) -> None:
        """Merges the active adapter into the weights, so that it has no cost; `unmerge_adapter` undoes it."""
        adapters.merge(self)

    def unmerge_adapter(self) -> None:
        """Subtracts the merged adapter from the weights again, up to rounding, and makes it active."""
        adapters.unmerge(self)

    def save_adapter(self, folder: str | Path, name: str | None = None) -> None:
        """Writes an adapter (by default the active one) in the format of PEFT's `PeftModel.from_pretrained`."""
        from onfoot.formats.peft import save_adapter

        save_adapter(self, folder, name)

    def load_adapter(self, folder: str | Path, name: str = "default") -> None:
        """Loads an adapter saved by PEFT or onfoot, and makes it the active one."""
        from onfoot.formats.peft import load_adapter
        from onfoot.formats.run_folder import model_folder

        load_adapter(self, model_folder(Path(folder)), name)

    @property
    def quantized(self) -> set[str]:
        """The parameters in 16 bits or in quantised blocks, which are therefore frozen."""
        return {name for name, value in self.params.items() if isinstance(value, Quantized)}

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: the configuration's and the tokenizer's."""
        own = () if self.tokenizer is None or self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        return tuple(dict.fromkeys((*self.config.eos_ids, *own)))

    @property
    def n_params(self) -> int:
        """The number of parameters, adapters included."""
        return sum(int(np.prod(p.shape)) for p in self.params.values())

    @property
    def n_trainable(self) -> int:
        """The number of parameters that train."""
        return sum(int(np.prod(self.params[name].shape)) for name in self.trainable)

    def logits(self, tokens: Any) -> Array:
        """The logits of the next token at each position, (B, T, V)."""
        checked = inputs.check_tokens(tokens, self.config.vocab_size, self.config.n_positions)
        run = self.new_run(keep_saved=False)
        return network(self.config).head_forward(run, self.config, features(run, self.config, checked))[0]

    def loss(self, tokens: Any, targets: Any = None, *, divisor: float | None = None, segments: Any = None) -> float:
        """The cross-entropy: the mean over targets that are not −100, or their sum divided by `divisor`.

        `tokens` may also be a text, or a list of texts, if the model has a tokenizer.
        """
        if inputs.is_text(tokens):
            if targets is not None or segments is not None:
                raise ValueError("a text has its own next tokens as targets; pass token ids with targets or segments")
            tokens, targets = inputs.encode_batch(self.tokenizer, tokens)
            if not self.config.causal and len(tokens) > 1:
                raise ValueError("several texts need causal=True: tokens would attend to the padding; pass one text")
        batch = checked_batch(self, tokens, targets, divisor, segments)
        loss = self._steps.loss(self, batch) if self._steps is not None else None
        if loss is None:
            loss = unrecorded_loss(self.new_run(keep_saved=False), self.config, batch, backward=False)
        return loss

    def loss_and_grads(
        self,
        tokens: Any,
        targets: Any = None,
        *,
        divisor: float | None = None,
        segments: Any = None,
        dropout_seed: int | None = None,
        on_gradient: OnGradient | None = None,
        on_loss: Callable[[float], None] | None = None,
    ) -> tuple[float, dict[str, Array]]:
        """The loss and the gradient of every trainable parameter, by name.

        `divisor` divides the summed loss; if a step is split into microbatches, pass the number of targets of the whole
        step, and the gradients add up exactly. `segments` (B, T) numbers packed examples: no token attends to another
        example, and positions restart at 0. `dropout_seed` turns on the configuration's dropout, reproducibly.
        `on_gradient(name, gradient)` is called with each gradient as soon as it is final; it is then not returned.
        `on_loss` is called with the loss before any gradient; an exception from it stops the step.
        """
        batch = checked_batch(self, tokens, targets, divisor, segments)._replace(dropout_seed=dropout_seed)
        done = self._steps.gradients(self, batch, on_gradient, on_loss) if self._steps is not None else None
        if done is not None:
            return done
        run = self.new_run(dropout_seed=dropout_seed)
        run.gradients.on_gradient = on_gradient
        run.on_loss = None if on_loss is None else lambda loss: on_loss(float(loss))
        return unrecorded_loss(run, self.config, batch), run.gradients.made

    def pairs_used(self) -> dict[str, bool]:
        """The pairs that a training step of this network calls, and whether each is one of the engine's `theirs`."""
        from onfoot.models.compare_pairs import pairs_used

        return pairs_used(self)

    def hvp(
        self,
        tokens: Any,
        targets: Any = None,
        direction: Mapping[str, Any] | None = None,
        *,
        kind: str = "hessian",
        divisor: float | None = None,
        segments: Any = None,
        dropout_seed: int | None = None,
    ) -> dict[str, Array]:
        """H u: the derivative of every gradient of `loss_and_grads` along a direction, by name.

        `direction` has an array per trainable parameter; those it leaves out do not move. With the kind "gauss-newton",
        only the curvature of the loss counts, not that of the network; the matrix is then positive semi-definite.
        """
        from onfoot.models.second_order import tangent_pass

        settings = {"divisor": divisor, "segments": segments, "dropout_seed": dropout_seed}
        return tangent_pass(self, tokens, targets, direction or {}, kind=kind, gradients=False, **settings).hvp

    def example_dots(
        self,
        tokens: Any,
        targets: Any = None,
        direction: Mapping[str, Any] | None = None,
        *,
        divisor: float | None = None,
        segments: Any = None,
        dropout_seed: int | None = None,
    ) -> np.ndarray:
        """The dot product of each example's gradient with a direction, (B,); they add up to that of the batch.

        An example is a sequence of the batch, or with `segments` each packed example, in order; its loss is its part of
        the batch's loss. No gradient is formed: the dots are the derivatives of the losses along the direction.
        """
        from onfoot.models.second_order import tangent_pass

        settings = {"divisor": divisor, "segments": segments, "dropout_seed": dropout_seed}
        done = tangent_pass(self, tokens, targets, direction or {}, backward=False, **settings)
        begins = checked_batch(self, tokens, targets, divisor, segments).example_begins
        return np.add.reduceat(done.token_dots.reshape(-1), begins)

    def example_norms(
        self, tokens: Any, targets: Any = None, *, divisor: float | None = None, segments: Any = None
    ) -> np.ndarray:
        """The norm of each example's gradient over all trainable parameters, (E,), in one pass.

        An example is a row of the batch; with `segments`, each segment of a row, row by row (padding that has a number
        of its own counts, with norm 0). Its loss is the sum of its tokens' losses over `divisor`, by default the number
        of targets of the batch, so that the gradients of the examples sum to the gradient of `loss_and_grads`.
        """
        return examples.example_norms(self, checked_batch(self, tokens, targets, divisor, segments))

    def example_grads(
        self,
        tokens: Any,
        targets: Any = None,
        names: Sequence[str] | None = None,
        *,
        divisor: float | None = None,
        segments: Any = None,
    ) -> dict[str, Array]:
        """Each example's gradient of the named parameters, (E, *shape) by name; by default, of all that train.

        Examples and their losses are those of `example_norms`, which needs less memory if only norms are wanted.
        """
        return examples.example_grads(self, checked_batch(self, tokens, targets, divisor, segments), names)

    def trace(
        self,
        tokens: Any,
        targets: Any = None,
        *,
        divisor: float | None = None,
        segments: Any = None,
        input_gradient: bool = False,
    ) -> Trace:
        """Every activation and its gradient, by the paper's names; with `input_gradient` also Δ_0, (B, T, V)."""
        if not isinstance(self.config, GPT2Config | LlamaConfig):
            raise ValueError(f"trace() knows GPT2Config and LlamaConfig, got a {type(self.config).__name__}")
        recorder = Recorder(self.config.n_layer)
        run = self.new_run(on_activation=recorder)
        run.gradients.backprop_to_input()
        batch = checked_batch(self, tokens, targets, divisor, segments)
        loss = unrecorded_loss(run, self.config, batch)
        ids, targets, layout, *_ = batch.on_engine(self.engine)
        grads, adapted = run.gradients.made, self.active_adapter is not None
        return build_trace(
            recorder, ids, self.config, self.params, loss, grads, layout, targets.ids, input_gradient, adapted
        )

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

        Each parameter is updated soon after its gradient is final, which is never before the last use of its old value.
        So only a few gradients exist at a time. With `clip`, gradients of a larger norm are scaled down to it, and all
        of them must exist before the first update. An invalid batch or a loss that is not finite raises an error and
        changes nothing; Ctrl-C takes effect before the first update or after the last.
        """
        return optimizer.train_batch(self, tokens, targets, segments, dropout_seed, clip)

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
        stop: str | Sequence[str] = (),
        slide: bool = False,
    ) -> Any:
        """Continues the prompts: an array (B, T) gives (B, T + new), a list of prompts of any lengths gives a list.

        A text gives a text, prompt included, and a list of texts a list, if the model has a tokenizer.
        A temperature of 0 is greedy decoding. By default, a sequence stops at the model's end-of-sequence tokens.
        Generating beyond n_positions raises an error, unless `slide` continues with the last half of the context.
        """
        from onfoot.generate.loop import generate, generate_texts
        from onfoot.generate.sampling import Sampling

        if stop_ids is None:
            stop_ids = self.eos_ids
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        rest = max_new_tokens, sampling, seed, stop_ids, inputs.as_list(stop), slide
        if inputs.is_text(tokens):
            texts = generate_texts(self, inputs.as_list(tokens), *rest)
            return texts[0] if isinstance(tokens, str) else texts
        return generate(self, tokens, *rest)

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 200,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        *,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop: str | Sequence[str] = (),
        slide: bool = False,
    ) -> Iterator[str]:
        """The text that continues a prompt, piece by piece: `for text in model.stream("Once"): print(text, end="")`."""
        from onfoot.generate.loop import stream_text
        from onfoot.generate.sampling import Sampling

        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        return stream_text(self, prompt, max_new_tokens, sampling, seed, inputs.as_list(stop), slide)

    def save(self, folder: str | Path, dtype: str | None = None) -> None:
        """Writes a Hugging Face folder, which `transformers.AutoModelForCausalLM` can load.

        `dtype` is float32, float64, float16 or bfloat16; 16-bit numbers are rounded to the nearest. By default it is
        the model's own, and for a model loaded with dtype="auto" that of each tensor in its file.
        """
        from onfoot.formats.huggingface import save_folder

        if self.active_adapter is not None:
            raise ValueError(
                f"the adapter {self.active_adapter!r} is not in the weights; call merge_adapter() or save_adapter()"
            )
        save_folder(self, folder, dtype)

    def new_run(
        self,
        keep_saved: bool = True,
        dropout_seed: int | None = None,
        on_activation: OnActivation | None = None,
        engine: Engine | None = None,
        cache: Any = None,
    ) -> Run:
        """A new pass over this model's parameters, with the active adapter."""
        policy = Policy(
            self.trainable,
            self.dtype,
            None if self.active_adapter is None else self.adapters[self.active_adapter],
            dropout_seed,
            keep_saved,
            self.recompute,
            None if on_activation is None else paper_names(on_activation),
        )
        return Run(engine or self.engine, self.config, self.params, policy, cache)


def _steps() -> Any:
    """The recordings of a model that runs on kernels."""
    from onfoot.models.recorded import Steps

    return Steps()
