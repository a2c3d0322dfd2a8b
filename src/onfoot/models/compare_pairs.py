"""A user's pairs beside ours: one pass through a network that runs both on the same arrays, and compares them.

The pass is in float64, so that rounding is far below any mistake. A second pass has its parameters moved at random: at
their initial values (norm weights 1, biases 0) some mistakes do not show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from onfoot.arrays import Array, to_numpy
from onfoot.engine import OPS, Engine
from onfoot.models.layout import Targets
from onfoot.models.run import Run
from onfoot.models.step import Batch, checked_batch, forward_backward, unrecorded_loss
from onfoot.own_engine import NotWrittenError, OwnEngine, PairError
from onfoot.own_engine.functions import OwnSaved
from onfoot.own_engine.pairs import GRADIENTS, Pair, ours, table_of
from onfoot.terminal import ShownText

if TYPE_CHECKING:
    from onfoot.models.model import Model

TOLERANCE = 1e-5  # relative; formulas that round to float32 somewhere differ by less
SMALLEST = 1e-9  # of the norm of dy: the denominator for smaller gradients, which may be 0
MOVE = 0.1  # of each parameter's root mean square, or of 1 if that is less than MOVE
MOVED_ROWS = 2  # sequences of the second pass


@dataclass(frozen=True)
class Compared:
    """One result of a user's function beside ours, at one place in the network."""

    pair: str
    half: str  # "forward" or "backward"
    what: str  # "y", "dx", "dweight", ...
    place: str  # "transformer.h.1.mlp.c_fc"
    error: float  # relative; infinite with a problem
    problem: str = ""  # what it raises, or a result that is not an array of the right shape
    moved: bool = False  # with parameters moved at random
    unwritten: bool = False  # it returns None

    @property
    def wrong(self) -> bool:
        return not self.error <= TOLERANCE

    def __str__(self) -> str:
        moved = " (with the weights moved at random, away from their initial values)" if self.moved else ""
        if self.problem:
            return f"{self.place}: {self.problem}{moved}"
        what = f"{self.what} of your {self.pair}_{self.half}"
        return f"{self.place}: {what} is wrong: relative error {self.error:.2g}{moved}"


@dataclass(repr=False)
class Comparison(ShownText):
    """Every result of the user's pairs in a pass, in the order in which they were computed."""

    used: dict[str, bool]  # the pairs that the network calls, and whether each is the user's
    results: list[Compared] = field(default_factory=list)

    @property
    def wrong(self) -> list[Compared]:
        return [one for one in self.results if one.wrong]

    @property
    def first(self) -> Compared | None:
        """The first wrong result in the order of the pass, forward and then backward."""
        return next(iter(self.wrong), None)

    @property
    def right(self) -> bool:
        return not self.wrong

    @property
    def largest(self) -> float:
        """The largest relative error."""
        return max((one.error for one in self.results), default=0.0)

    def of(self, pair: str) -> list[Compared]:
        return [one for one in self.results if one.pair == pair]

    def facts(self) -> dict[str, str]:
        return {"pairs": f"{sum(self.used.values())} of {len(self.used)} yours", "result": str(self)}

    @property
    def counted(self) -> str:
        """How many of the network's pairs are the user's: "3 of 6 pairs of this model are yours (…)"."""
        mine = [pair for pair, is_theirs in self.used.items() if is_theirs]
        names = f" ({', '.join(mine)})" if mine else ""
        return f"{len(mine)} of {len(self.used)} pairs used by this model are yours{names}"

    def __str__(self) -> str:
        first = self.first
        if first is None:
            return f"{self.counted}; each agrees with onfoot's on this batch: relative error at most {self.largest:.1e}"
        pairs = dict.fromkeys(f"{one.pair}_{one.half}" for one in self.wrong)
        others = [name for name in pairs if name != f"{first.pair}_{first.half}"]
        more = f"; also wrong: {', '.join(others)}" if others else ""
        return f"{first}{more}"


def pairs_used(model: Model) -> dict[str, bool]:
    """The pairs that a training step of a network calls, and whether each is a user's own."""
    called: dict[str, None] = {}

    def noted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called[name.rpartition("_")[0]] = None
            return OPS[name](*args, **kwargs)

        return call

    counting = Engine("numpy", {name: noted(name) for name in OPS}, model.engine._asarray)
    t = min(2, model.config.n_positions)
    batch = checked_batch(model, np.zeros((1, t), np.int64), np.zeros((1, t), np.int64))
    run = model.new_run(dropout_seed=0, engine=counting)
    unrecorded_loss(run, model.config, batch)
    own = model.engine if isinstance(model.engine, OwnEngine) else OwnEngine({})
    names = sorted({part for pair in called for part in own.called(pair)})
    return {name: name in own.theirs for name in names}


def compare_pairs(
    model: Model, tokens: Any, targets: Any = None, *, segments: Any = None, dropout_seed: int | None = None
) -> Comparison:
    """Compares each of the user's pairs with ours on the arrays of this batch, at every place in the network."""
    out = Comparison(pairs_used(model))
    if not isinstance(model.engine, OwnEngine):
        return out
    params = {name: np.array(to_numpy(p), np.float64) for name, p in model.params.items()}
    batch = checked_batch(model, tokens, targets, None, segments)._replace(dropout_seed=dropout_seed)
    out.results += _one_pass(model, model.engine, params, batch, moved=False)
    if out.right:
        rng = np.random.default_rng(0)
        for value in params.values():
            scale = np.sqrt(np.mean(value * value))
            value += MOVE * (scale if scale > MOVE else 1.0) * rng.standard_normal(value.shape)
        out.results += _one_pass(model, model.engine, params, batch.rows(0, MOVED_ROWS), moved=True)
    return out


def _one_pass(
    model: Model, own: OwnEngine, params: Mapping[str, np.ndarray], batch: Batch, moved: bool
) -> list[Compared]:
    engine = _ComparingEngine(own, moved)
    policy = replace(model.new_run(dropout_seed=batch.dropout_seed).policy, dtype="float64", recompute=False)
    run = PlacedRun(engine, model.config, dict(params), policy)
    targets = Targets(*batch.targets)
    forward_backward(run, model.config, batch.tokens, targets, batch.layout, batch.divisor)
    return engine.results


class _Saved(NamedTuple):
    theirs: OwnSaved | None  # None: their forward function failed
    ours: Any


class _ComparingEngine(Engine):
    """The user's pairs and ours, run side by side; the network goes on with the user's result where it is right."""

    def __init__(self, own: OwnEngine, moved: bool) -> None:
        self.results: list[Compared] = []
        self.place, self.block, self.moved = "", "", moved
        pairs = {name: self._compared(name, pair) for name, pair in own.pairs.items()}
        super().__init__(own.name, table_of(pairs), np.asarray)

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """While it is open, pairs are called by this layer."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def _add(self, pair: str, half: str, what: str, error: float, problem: str | PairError = "") -> bool:
        where = self.place or ("the loss" if pair == "cross_entropy" else self.block or "the network")
        unwritten = isinstance(problem, NotWrittenError)
        one = Compared(pair, half, what, where, error, str(problem), self.moved, unwritten)
        self.results.append(one)
        return not one.wrong

    def _compared(self, name: str, theirs: Pair) -> Pair:
        right = ours(name)

        def forward(*args: Any) -> tuple[Any, _Saved]:
            y, saved = right.forward(*args)
            kept = [x.copy() if isinstance(x, np.ndarray) else x for x in args]
            try:
                their_y, their_saved = theirs.forward(*args)
            except PairError as error:
                self._add(name, "forward", "y", np.inf, error)
                return y, _Saved(None, saved)
            if self._changed(name, "forward", args, kept):
                return y, _Saved(their_saved, saved)
            same = self._add(name, "forward", "y", relative_error(their_y, y, 0.0))
            return their_y if same else y, _Saved(their_saved, saved)

        def backward(dy: Any, saved: _Saved) -> Any:
            grads = right.backward(dy, saved.ours)
            if saved.theirs is None:
                return grads
            before = np.copy(dy)
            try:
                their_grads = theirs.backward(dy, saved.theirs)
            except PairError as error:
                self._add(name, "backward", "gradients", np.inf, error)
                return grads
            if self._changed(name, "backward", [dy], [before]):
                return grads
            floor = SMALLEST * float(np.linalg.norm(dy))
            pairs = [(grads, their_grads)] if len(GRADIENTS[name]) == 1 else list(zip(grads, their_grads, strict=True))
            same = [
                self._add(name, "backward", f"d{argument}", relative_error(their, our, floor))
                for argument, (our, their) in zip(GRADIENTS[name], pairs, strict=True)
                if our is not None
            ]
            return their_grads if all(same) else grads

        return Pair(forward, backward)

    def _changed(self, name: str, half: str, now: Any, before: Any) -> bool:
        """Whether a function has changed one of its arguments in place; puts the numbers back."""
        arguments = list(_parameters(f"{name}_{half}"))
        for argument, x, kept in zip(arguments, now, before, strict=False):
            if isinstance(x, np.ndarray) and not np.array_equal(x, kept, equal_nan=True):
                x[...] = kept
                problem = f"your {name}_{half} changes its argument {argument} in place; other layers still need it"
                self._add(name, half, argument, np.inf, problem)
                return True
        return False


def _parameters(name: str) -> tuple[str, ...]:
    return OPS[name].__code__.co_varnames[: OPS[name].__code__.co_argcount]


def relative_error(value: Array, reference: Array, smallest: float) -> float:
    """‖value − reference‖ / max(‖reference‖, smallest)."""
    size = max(float(np.linalg.norm(reference)), smallest, 1e-300)
    return float(np.linalg.norm(np.subtract(value, reference))) / size


def _placed(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: PlacedRun, layer: str, *args: Any, **kwargs: Any) -> Any:
        with self.engine.at(layer):
            return method(self, layer, *args, **kwargs)

    return call


class PlacedRun(Run):
    """A pass that tells its engine which layer calls a pair."""

    engine: _ComparingEngine

    embedding = _placed(Run.embedding)
    embedding_backward = _placed(Run.embedding_backward)
    linear = _placed(Run.linear)
    linear_backward = _placed(Run.linear_backward)
    linear_skip = _placed(Run.linear_skip)
    linear_skip_backward = _placed(Run.linear_skip_backward)
    layer_norm = _placed(Run.layer_norm)
    layer_norm_backward = _placed(Run.layer_norm_backward)
    rms_norm = _placed(Run.rms_norm)
    rms_norm_backward = _placed(Run.rms_norm_backward)
    activation = _placed(Run.activation)
    activation_backward = _placed(Run.activation_backward)
    attention = _placed(Run.attention)
    attention_backward = _placed(Run.attention_backward)
    dropout = _placed(Run.dropout)

    def _forward(self, forward: Any, config: Any, b: int, x: Array, *where: Any) -> tuple[Array, Any]:
        self.engine.block = f"block {b}"
        return super()._forward(forward, config, b, x, *where)

    def block_backward(self, backward: Any, config: Any, b: int, dy: Array, saved: Any) -> Array:
        self.engine.block = f"block {b}"
        return super().block_backward(backward, config, b, dy, saved)
