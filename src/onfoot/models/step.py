"""One step: a batch, its forward pass and its backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onfoot.arrays import Array
from onfoot.engine import Engine
from onfoot.models import inputs
from onfoot.models.families import network
from onfoot.models.layout import Layout, Targets, layout_of
from onfoot.models.run import Run
from onfoot.ops.cross_entropy import IGNORE

if TYPE_CHECKING:
    from onfoot.models.model import Model

PAD = 64  # rows with a target are padded to a multiple of this, or of 1/PARTS of all tokens if that is more,
PARTS = 8  # so that few recordings cover all batches
MANY = 0.9  # from this fraction of tokens with a target on, all tokens are computed
MANY_UNRECORDED = 0.75  # the same where steps are not recorded: fewer logits must be worth the copies of their rows


class Batch(NamedTuple):
    """The input of a step, as NumPy arrays until `on_engine`."""

    tokens: Array  # (B, T)
    targets: Targets
    layout: Layout
    divisor: float
    dropout_seed: int | None

    def rows(self, a: int, e: int) -> Batch:
        """The sequences a to e (exclusive)."""
        layout = self.layout.map(lambda _, x: x if x.ndim == 1 else x[a:e])
        chosen = self.targets.rows is not None
        targets = choose(self.targets.ids[a:e], chosen)
        return self._replace(tokens=self.tokens[a:e], targets=targets, layout=layout)

    def padded(self, rows: int) -> Batch:
        """The same with so many rows that have a target, where these are chosen: those beyond have none."""
        if self.targets.rows is None or self.targets.chosen is None:
            return self
        more = (0, rows - self.targets.rows.size)
        chosen = np.pad(self.targets.chosen, more, constant_values=IGNORE)
        return self._replace(targets=Targets(self.targets.ids, np.pad(self.targets.rows, more), chosen))

    def on_engine(self, engine: Engine) -> Batch:
        """The same with the engine's arrays."""
        targets = Targets(*(None if x is None else engine.integers(x) for x in self.targets))
        layout = self.layout.map(lambda _, x: engine.integers(x))
        return self._replace(tokens=engine.integers(self.tokens), targets=targets, layout=layout)

    @property
    def example_begins(self) -> np.ndarray:
        """The first token of each example, among all B T: of each sequence, or of each packed example."""
        (b, t), positions = self.tokens.shape, self.layout.positions
        return np.arange(b) * t if positions.ndim == 1 else np.flatnonzero(positions.reshape(-1) == 0)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Everything about the batch that a recording depends on."""
        rows = None if self.targets.rows is None else self.targets.rows.size
        layout = self.layout
        packed = layout.positions.ndim, layout.start is None, layout.limit, layout.window_start is None
        return *self.tokens.shape, rows, packed, self.dropout_seed is None


def checked_batch(
    model: Model, tokens: Any, targets: Any = None, divisor: float | None = None, segments: Any = None
) -> Batch:
    """The batch that a user gave for a model, or a ValueError.

    Tokens and targets are integers (B, T); without a divisor, it is the number of targets. No dropout seed is set.
    """
    config = model.config
    checked = inputs.check_tokens(tokens, config.vocab_size, config.n_positions)
    layout = layout_of(config, checked, segments)
    positions = None if segments is None else layout.positions
    ids = inputs.check_targets(targets, checked, config.vocab_size, positions)
    if divisor is None:
        divisor = inputs.count_targets(ids)
    elif not divisor > 0:
        raise ValueError(f"divisor must be > 0 (the number of targets in the step), got {divisor}")
    return Batch(checked, choose(ids, padded=model.engine.has("logits_loss_forward")), layout, divisor, None)


def choose(ids: np.ndarray, some: bool | None = None, padded: bool = True) -> Targets:
    """The targets (B, T), with the rows that have one unless nearly all do; `some` decides if given.

    `padded` rounds the number of rows up, for recordings.
    """
    flat = ids.reshape(-1)
    rows = np.flatnonzero(flat != IGNORE)
    if not (rows.size < (MANY if padded else MANY_UNRECORDED) * flat.size if some is None else some):
        return Targets(ids)
    grid = max(PAD, flat.size // PARTS) if padded else 1
    chosen = np.full(max(1, -(-rows.size // grid)) * grid, IGNORE)
    chosen[: rows.size] = flat[rows]
    indices = np.zeros(chosen.size, np.int64)
    indices[: rows.size] = rows
    return Targets(ids, indices, chosen)


def forward_backward(
    run: Run, config: Any, tokens: Array, targets: Targets, layout: Layout, divisor: Any, backward: bool = True
) -> Any:
    """The loss; with `backward`, the gradients are added to the run's."""
    net = network(config)
    a11, s_features = net.features_forward(run, config, tokens, layout)
    loss, s_loss = net.loss_forward(run, config, a11, targets, divisor)
    run.report_loss(loss)
    if backward:
        d11 = net.loss_backward(run, config, s_loss)
        del a11, s_loss  # frees them
        net.features_backward(run, config, d11, s_features)
    return loss


def unrecorded_loss(run: Run, config: Any, batch: Batch, backward: bool = True) -> float:
    """The loss of a checked batch, computed op by op; with `backward`, the gradients are added to the run's."""
    given = batch.on_engine(run.engine)
    loss = forward_backward(run, config, given.tokens, given.targets, given.layout, given.divisor, backward)
    return float(loss)


def features(run: Run, config: Any, tokens: np.ndarray) -> Array:
    """The features of checked tokens, (B, T, C), from which the head computes logits."""
    ids, layout = run.engine.integers(tokens), layout_of(config, tokens).map(lambda _, x: run.engine.integers(x))
    return network(config).features_forward(run, config, ids, layout)[0]
