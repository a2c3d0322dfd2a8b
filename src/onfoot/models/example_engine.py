"""The engine of a pass that keeps the gradients of each example apart.

It has the pairs of another engine, except that the backward functions of layers with parameters return the factors of
their gradients (`examples`). The model, which adds and passes on what these functions return, is unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from onfoot.arrays import Array, namespace, rows
from onfoot.engine import Engine
from onfoot.models.examples import Formed, PerExample, Product, Rows, Spans, Tied, matmul, sums
from onfoot.models.gradients import Gradients

if TYPE_CHECKING:
    from onfoot.models.model import Model
    from onfoot.models.run import Run


class LinearExamplesSaved(NamedTuple):
    x: Array
    frozen: Any  # what the pair without gradients of weights saved
    has_bias: bool


class LoRAExamplesSaved(NamedTuple):
    x: Array
    frozen: Any  # None: the LoRA layer alone
    down: Array
    up: Array
    scale: float
    keep: Array | None


class NormExamplesSaved(NamedTuple):
    x: Array
    eps: float
    saved: Any


class LogitsExamplesSaved(NamedTuple):
    x: Array  # (N, C)
    dx: Array
    dlogits: Array  # (N, V)
    has_bias: bool


class ExampleEngine(Engine):
    """`base`, with factors instead of gradients. `spans` are the rows of each example, `of_head` those of the head."""

    def __init__(self, base: Engine, spans: Spans, of_head: Spans) -> None:
        base.require_formulas("the gradient of each example")
        super().__init__(base.name, base.table, base._asarray, base._copy, base.reason)
        self.base, self.spans, self.of_head = base, spans, of_head
        self.table.pop("embedding_add_backward", None)
        optional = ["linear_skip", "lora_linear_skip", "logits_loss_forward", "logits_loss_backward"]
        optional += ["layer_norm_skip_backward", "rms_norm_skip_backward"]
        pairs = ("linear", "lora", "lora_linear", "layer_norm", "rms_norm")
        names = [f"{pair}_{half}" for pair in pairs for half in ("forward", "backward")]
        names += [name for name in optional if base.has(name)]
        self.table |= {name: getattr(self, f"_{name}") for name in names}
        self.table |= {"add": self._add, "sum_first": lambda x: x}  # every sequence keeps its own rows

    def _add(self, x: Any, y: Any) -> Any:
        """x + y of arrays, or of the two paths to a tied table."""
        return Tied(x, y) if isinstance(y, Rows) else self.base.add(x, y)

    def _spans(self, x: Array) -> Spans:
        """The rows of each example in a layer's input: without a batch axis, they are the head's rows with a target."""
        return self.of_head if x.ndim == 2 else self.spans

    def _product(self, x: Array, dy: Array) -> Product:
        return Product(self.base, self._spans(x), rows(x), rows(dy))

    # Linear layers

    def _linear_forward(self, x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, LinearExamplesSaved]:
        y, frozen = self.base.frozen_linear_forward(x, weight, bias)
        return y, LinearExamplesSaved(x, frozen, bias is not None)

    def _linear_skip(self, x: Array, weight: Array, bias: Array | None, skip: Array) -> tuple[Array, Any]:
        y, frozen = self.base.frozen_linear_skip(x, weight, bias, skip)
        return y, LinearExamplesSaved(x, frozen, bias is not None)

    def _linear_backward(self, dy: Array, saved: LinearExamplesSaved) -> tuple[Array, Product, Formed | None]:
        x, frozen, has_bias = saved
        dx = self.base.frozen_linear_backward(dy, frozen)  # eq FC.2
        dbias = sums(self.base, self._spans(dy), rows(dy)) if has_bias else None
        return dx, self._product(x, dy), dbias

    # The head with its loss

    def _logits_loss_forward(self, x: Array, weight: Array, bias: Array | None, targets: Array, divisor: Any) -> Any:
        loss, dx, dlogits = self.base.logits_loss_gradients(x, weight, bias, targets, divisor)
        return loss, LogitsExamplesSaved(rows(x), dx, dlogits, bias is not None)

    def _logits_loss_backward(self, dloss: float, saved: LogitsExamplesSaved) -> tuple[Array, Product, Formed | None]:
        x, dx, dlogits, has_bias = saved
        assert dloss == 1
        dbias = sums(self.base, self.of_head, dlogits) if has_bias else None
        return dx, Product(self.base, self.of_head, dlogits, x), dbias

    # LoRA

    def _lora_forward(self, x: Array, down: Array, up: Array, scale: float) -> tuple[Array, LoRAExamplesSaved]:
        y = matmul(self.base, scale * matmul(self.base, x, down), up)  # eq 43
        return y, LoRAExamplesSaved(x, None, down, up, scale, None)

    def _lora_linear_forward(
        self, x: Array, weight: Array, bias: Any, down: Array, up: Array, scale: float, keep: Array | None = None
    ) -> tuple[Array, LoRAExamplesSaved]:
        y, frozen = self.base.frozen_linear_forward(x, weight, bias)
        low_rank, saved = self._lora_forward(x if keep is None else x * keep, down, up, scale)
        return self.base.add(y, low_rank), saved._replace(x=x, frozen=frozen, keep=keep)  # eq LORA.1

    def _lora_linear_skip(
        self, x: Array, weight: Array, bias: Any, skip: Array, *low_rank: Any
    ) -> tuple[Array, LoRAExamplesSaved]:
        y, saved = self._lora_linear_forward(x, weight, bias, *low_rank)
        return self.base.add(skip, y), saved

    def _lora_backward(self, dy: Array, saved: LoRAExamplesSaved) -> tuple[Array, Product, Product]:
        x, _, down, up, scale, keep = saved
        x = x if keep is None else x * keep
        low = scale * matmul(self.base, x, down)  # (..., r)
        dlow = scale * matmul(self.base, dy, up.T)  # (..., r)
        dx = matmul(self.base, dlow, down.T)  # eq 44
        return dx, self._product(x, dlow), self._product(low, dy)  # eq 45, 46

    def _lora_linear_backward(self, dy: Array, saved: LoRAExamplesSaved) -> tuple[Array, Product, Product]:
        dx_lora, ddown, dup = self._lora_backward(dy, saved)
        if saved.keep is not None:
            dx_lora = dx_lora * saved.keep
        dx = self.base.add(self.base.frozen_linear_backward(dy, saved.frozen), dx_lora)  # eq LORA.2
        return dx, ddown, dup

    # Norms: with a weight of 1 and a bias of 0, their output is ā

    def _layer_norm_forward(self, x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, NormExamplesSaved]:
        y, saved = self.base.layer_norm_forward(x, weight, bias, eps)
        return y, NormExamplesSaved(x, eps, saved)

    def _layer_norm_backward(self, dy: Array, saved: NormExamplesSaved) -> tuple[Array, Formed, Formed]:
        return self.base.layer_norm_backward(dy, saved.saved)[0], *self._of_layer_norm(dy, saved)

    def _layer_norm_skip_backward(self, dy: Array, saved: NormExamplesSaved, skip: Array) -> Any:
        return self.base.layer_norm_skip_backward(dy, saved.saved, skip)[0], *self._of_layer_norm(dy, saved)

    def _of_layer_norm(self, dy: Array, saved: NormExamplesSaved) -> tuple[Formed, Formed]:
        one, zero = _constants(saved.x)
        normed = self.base.layer_norm_forward(saved.x, one, zero, saved.eps)[0]
        return sums(self.base, self.spans, rows(normed * dy)), sums(self.base, self.spans, rows(dy))  # eq 41, 42

    def _rms_norm_forward(self, x: Array, weight: Array, eps: float) -> tuple[Array, NormExamplesSaved]:
        y, saved = self.base.rms_norm_forward(x, weight, eps)
        return y, NormExamplesSaved(x, eps, saved)

    def _rms_norm_backward(self, dy: Array, saved: NormExamplesSaved) -> tuple[Array, Formed]:
        return self.base.rms_norm_backward(dy, saved.saved)[0], self._of_rms_norm(dy, saved)

    def _rms_norm_skip_backward(self, dy: Array, saved: NormExamplesSaved, skip: Array) -> tuple[Array, Formed]:
        return self.base.rms_norm_skip_backward(dy, saved.saved, skip)[0], self._of_rms_norm(dy, saved)

    def _of_rms_norm(self, dy: Array, saved: NormExamplesSaved) -> Formed:
        normed = self.base.rms_norm_forward(saved.x, _constants(saved.x)[0], saved.eps)[0]
        terms = normed * dy
        if terms.ndim == 4:  # a norm per head, (B, T, H, D): its weight is shared by the heads
            terms = terms.sum(axis=2)
        return sums(self.base, self.spans, rows(terms))  # eq RMS.4


def _constants(x: Array) -> tuple[Array, Array]:
    """Ones and zeros, (C,)."""
    first = rows(x)[0]
    return namespace(x).ones_like(first), namespace(x).zeros_like(first)


class ExampleGradients(Gradients):
    """The factors of each parameter's gradients, by name."""

    engine: ExampleEngine

    def add_rows(self, table: str, dy: Array, saved: Any) -> None:
        if table not in self.trainable:
            return
        flat = rows(dy)  # (N, C)
        ids = saved.ids.reshape(-1)  # positions are those of one sequence, the same for all
        if ids.shape[0] < flat.shape[0]:
            ids = namespace(ids).tile(ids, (flat.shape[0] // ids.shape[0],))
        self.add(table, Rows(self.engine.base, self.engine.spans, ids, flat, saved.n_rows))


def example_run(model: Model, dropout_seed: int | None, spans: Spans, of_head: Spans) -> tuple[Run, dict[str, Any]]:
    """A new pass over the model that keeps examples apart, and the dict that it will put the factors into."""
    engine = ExampleEngine(model.engine, spans, of_head)
    run = model.new_run(dropout_seed=dropout_seed, engine=engine)
    factors: dict[str, PerExample] = {}

    def on_gradient(name: str, factor: Any) -> None:
        factors[name] = factor if isinstance(factor, Formed) else factor.compact()

    run.gradients = ExampleGradients(engine, model.config, run.policy.trainable, run.policy.adapter)
    run.gradients.on_gradient = on_gradient
    return run, factors
