"""Curvature: how the gradient changes along a direction, in eigenvalues, traces and ratios of the Hessian.

H is the matrix of second derivatives of the loss over batches of data, for the trainable parameters. Gauss–Newton is
its part without the second derivatives of the network, and is never negative. Neither is ever stored: everything here
is computed from products H u, one `model.hvp` per batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onfoot.arrays import Array, to_numpy
from onfoot.data.batches import Batch
from onfoot.models.inputs import count_targets
from onfoot.models.model import Model
from onfoot.models.params import names_of
from onfoot.terminal import Shown

KINDS = ("hessian", "gauss-newton")
CHUNK = 1 << 16  # elements that are raised to float64 at a time
Product = Callable[[np.ndarray], np.ndarray]  # u -> H u, (n,) each


@dataclass(frozen=True)
class Estimate:
    """A number and its error: the bound of an eigenvalue, or the standard error of a trace."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.1g}"


@dataclass(frozen=True)
class Spectrum:
    """Both ends of a spectrum, the extreme eigenvalue first, each with a bound of its error."""

    largest: list[Estimate]
    smallest: list[Estimate]
    steps: int
    converged: bool  # whether every error is within the tolerance


@dataclass(frozen=True)
class LayerCurvature:
    """The diagonal block of one layer: its trace and its largest eigenvalue."""

    name: str
    n_params: int
    trace: Estimate | None
    largest: Estimate


@dataclass(frozen=True, repr=False)
class Curvature(Shown):
    """The curvature of the loss over some batches. `along_gradient` is None where the gradient is 0."""

    kind: str
    n_params: int
    n_targets: int
    loss: float
    gradient_norm: float
    spectrum: Spectrum
    trace: Estimate | None  # None without probes
    along_gradient: float | None
    layers: list[LayerCurvature]

    def facts(self) -> dict[str, str]:
        """The figures as text, for a notebook."""
        return {
            "kind": self.kind,
            "loss": f"{self.loss:.6g}",
            "largest eigenvalue": str(self.spectrum.largest[0]),
            "largest stable learning rate": "none" if self.max_lr is None else f"{self.max_lr:.3g}",
            "trace": str(self.trace) if self.trace is not None else "not estimated",
            "parameters": f"{self.n_params:,}",
        }

    def tables(self) -> list[list[list[str]]]:
        """One row per layer, under a head, for a notebook."""
        rows = [
            [one.name, f"{one.n_params:,}", str(one.largest), "" if one.trace is None else str(one.trace)]
            for one in self.layers
        ]
        return [[["layer", "parameters", "largest eigenvalue", "trace"], *rows]] if rows else []

    @property
    def max_lr(self) -> float | None:
        """The learning rate below which plain gradient descent is stable; None if no eigenvalue is positive."""
        largest = self.spectrum.largest[0].value
        return 2 / largest if largest > 0 else None  # eq CU.9


class Operator:
    """H, or Gauss–Newton, as a linear function of vectors over some of the trainable parameters.

    With the parameters of one layer it is that layer's diagonal block: the direction is 0 elsewhere, and the rest of
    the product is dropped.
    """

    def __init__(self, model: Model, batches: Sequence[Batch], kind: str, names: Iterable[str] | None = None) -> None:
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}")
        if not batches:
            raise ValueError("need at least 1 batch, got 0")
        self.model, self.kind = model, kind
        self.batches = [Batch(*batch) for batch in batches]
        self.n_targets = count_targets(np.concatenate([np.ravel(batch.targets) for batch in self.batches]))
        chosen = model.trainable if names is None else set(names)
        self.names = [name for name in model.params if name in chosen]  # in the order of the forward pass
        sizes = [math.prod(model.params[name].shape) for name in self.names]
        self.n = sum(sizes)
        if self.n == 0:
            raise ValueError("the model has no trainable parameters; add an adapter, or load it without quantized=True")
        ends = np.cumsum(sizes).tolist()
        self.slices = {name: slice(end - size, end) for name, end, size in zip(self.names, ends, sizes, strict=True)}

    def __call__(self, u: np.ndarray) -> np.ndarray:
        """H u, (n,) in float64: the sum over the batches."""
        direction = self.unflatten(u)
        total = np.zeros(self.n)
        for batch in self.batches:
            product = self.model.hvp(
                batch.tokens, batch.targets, direction, kind=self.kind, divisor=self.n_targets, segments=batch.segments
            )
            total += self.flatten(product)  # eq CU.1
        return total

    def loss_and_gradient(self) -> tuple[float, np.ndarray]:
        """The mean loss over all targets, and its gradient, (n,) in float64."""
        loss, total = 0.0, np.zeros(self.n)
        for batch in self.batches:
            part, grads = self.model.loss_and_grads(
                batch.tokens, batch.targets, divisor=self.n_targets, segments=batch.segments
            )
            loss += part
            total += self.flatten(grads)
        return loss, total

    def flatten(self, arrays: dict[str, Array]) -> np.ndarray:
        """The arrays of these parameters as one vector, (n,)."""
        return np.concatenate([to_numpy(arrays[name]).ravel() for name in self.names])

    def unflatten(self, u: np.ndarray) -> dict[str, np.ndarray]:
        """A vector (n,) as arrays by name, in the model's dtype."""
        u = u.astype(self.model.dtype, copy=False)
        return {name: u[part].reshape(self.model.params[name].shape) for name, part in self.slices.items()}


def dots(rows: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The dot product of each row with u, (m, n) and (n,) to (m,), in float64 whatever the dtype."""
    total = np.zeros(len(rows))
    for begin in range(0, len(u), CHUNK):
        part = slice(begin, begin + CHUNK)
        total += rows[:, part].astype(np.float64, copy=False) @ u[part].astype(np.float64, copy=False)
    return total


def combine(coefficients: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The sum of the rows times their coefficients, (m,) and (m, n) to (n,), in float64."""
    total = np.empty(rows.shape[1])
    for begin in range(0, len(total), CHUNK):
        part = slice(begin, begin + CHUNK)
        total[part] = coefficients @ rows[:, part].astype(np.float64, copy=False)
    return total


def lanczos(
    product: Product,
    n: int,
    top: int = 1,
    *,
    both_ends: bool = True,
    steps: int = 100,
    tolerance: float = 1e-3,
    dtype: str = "float64",
    seed: int = 0,
) -> Spectrum:
    """The `top` largest eigenvalues of a symmetric matrix (n, n), and the `top` smallest with `both_ends`.

    Lanczos with full reorthogonalisation: the basis q_1, q_2, ... is kept, in `dtype`. It ends when the error bound of
    every wanted eigenvalue is within `tolerance` times the largest magnitude, or after `steps` products. If the basis
    spans an invariant subspace, it goes on with a new start vector, as long as that finds wanted eigenvalues: these
    are repeated ones, of which one start vector finds one copy each.
    """
    if not 1 <= top <= n:
        raise ValueError(f"top must be in 1 ... {n:,} (the number of parameters), got {top}")
    if steps < top:
        raise ValueError(f"steps must be >= top={top} (each step finds at most one more eigenvalue), got {steps}")
    steps = min(steps, n)
    rng = np.random.default_rng([seed, 0])
    basis = _empty_basis(steps, n, dtype)  # q_1, q_2, ..., one per row
    alpha, beta = np.zeros(steps), np.zeros(steps)
    stray = 0.0  # squares of the components that are 0 but for rounding
    start = 0  # the first step of this invariant subspace
    for j in range(steps):
        if j == start:
            w, _ = _orthogonalise(rng.standard_normal(n), basis[:j])
        basis[j] = w / _norm(w)  # eq CU.3
        w, components = _orthogonalise(product(basis[j]), basis[: j + 1])
        alpha[j], beta[j] = components[j], _norm(w)  # eq CU.2
        stray += 2 * float((components[: max(j - 1, 0)] ** 2).sum())
        if j + 1 == n or beta[j] <= 10 * np.finfo(dtype).eps * max(np.abs(alpha).max(), beta.max()):
            beta[j] = 0  # only rounding is left: the subspace is invariant
        values, errors = _ritz(alpha[: j + 1], beta[: j + 1])
        newest, newest_errors = _ritz(alpha[start : j + 1], beta[start : j + 1])
        wanted = [*range(j, j - top, -1), *(range(top) if both_ends else ())] if j + 1 >= top else []
        ends = [-1, 0] if both_ends else [-1]
        within = tolerance * np.abs(values).max()
        converged = bool(wanted) and errors[wanted].max() <= within and newest_errors[ends].max() <= within
        if beta[j] == 0:
            start = j + 1
            found_more = wanted and (
                newest[-1] > values[-top] + within or (both_ends and newest[0] < values[top - 1] - within)
            )
            converged = converged and not found_more
        if converged:
            break
    errors = errors + math.sqrt(stray)  # eq CU.5
    found = [Estimate(float(value), float(error)) for value, error in zip(values, errors, strict=True)]
    return Spectrum(found[::-1][:top], found[:top] if both_ends else [], j + 1, bool(converged) or j + 1 == n)


def _empty_basis(steps: int, n: int, dtype: str) -> np.ndarray:
    """An array (steps, n); the system provides its memory as the steps fill it."""
    try:
        return np.empty((steps, n), dtype)
    except MemoryError:
        needed = steps * n * np.dtype(dtype).itemsize / 1e9
        raise MemoryError(
            f"{steps} Lanczos steps keep {steps} vectors of {n:,} parameters, {needed:,.1f} GB; allow fewer --steps"
        ) from None


def _orthogonalise(w: np.ndarray, basis: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w without its components along the rows of an orthonormal basis, and these components.

    The second pass removes what rounding has left over from the first.
    """
    components = dots(basis, w)
    w = w - combine(components, basis)
    return w - combine(dots(basis, w), basis), components


def _ritz(alpha: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eigenvalues of the tridiagonal matrix, ascending, and the norm of each one's residual."""
    values, vectors = np.linalg.eigh(np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1))  # eq CU.4
    return values, beta[-1] * np.abs(vectors[-1])


def _norm(u: np.ndarray) -> float:
    return float(np.sqrt(dots(u[None], u)[0]))


def hutchinson(product: Product, slices: Sequence[slice], probes: int, seed: int = 0) -> np.ndarray:
    """Estimates of the traces of diagonal blocks of H, (probes, blocks): their mean is unbiased.

    A probe is a vector of random signs over all blocks; it estimates every block at once.
    """
    rng = np.random.default_rng([seed, 1])
    n = max(part.stop for part in slices)
    estimates = np.empty((probes, len(slices)))
    for i in range(probes):
        z = rng.choice(np.array([-1.0, 1.0]), n)
        hz = product(z)
        estimates[i] = [z[part] @ hz[part] for part in slices]  # eq CU.6
    return estimates


def mean_and_error(samples: np.ndarray) -> Estimate:
    """The mean of independent samples, (N,), and its standard error."""
    return Estimate(float(samples.mean()), float(samples.std(ddof=1) / math.sqrt(len(samples))))  # eq CU.7


def layers_of(model: Model, names: Iterable[str]) -> dict[str, list[str]]:
    """The parameters of each layer: block by block, the others by the name of their module."""
    blocks = names_of(model.config).BLOCKS  # "transformer.h." or "model.layers."
    layers: dict[str, list[str]] = {}
    for name in names:
        inside = name.startswith(blocks)
        layer = f"block {name.removeprefix(blocks).split('.')[0]}" if inside else _module(name)
        layers.setdefault(layer, []).append(name)
    return layers


def _module(name: str) -> str:
    """The module of a parameter outside the blocks: wte of transformer.wte.weight."""
    return name.split(".lora_")[0].removesuffix(".weight").removesuffix(".bias").rsplit(".", 1)[-1]


def measure(
    model: Model,
    batches: Sequence[Batch],
    kind: str = "hessian",
    *,
    top: int = 5,
    probes: int = 10,
    per_layer: bool = True,
    steps: int = 100,
    tolerance: float = 1e-3,
    seed: int = 0,
    on_product: Callable[[str], None] | None = None,
) -> Curvature:
    """The curvature of the mean loss over the batches, with respect to the trainable parameters.

    Gives the `top` largest eigenvalues, and for the Hessian the `top` smallest; the trace from `probes` random vectors
    (0: none); the curvature along the gradient; and the same of every layer's diagonal block. `on_product(what)` is
    called after each product with H over all batches, of which there are up to `steps` per set of eigenvalues.
    """
    if probes < 0 or probes == 1:
        raise ValueError(f"probes must be 0, or >= 2 for a standard error, got {probes}")
    h = Operator(model, batches, kind)

    def reporting(operator: Operator, what: str) -> Product:
        def product(u: np.ndarray) -> np.ndarray:
            result = operator(u)
            if not np.isfinite(result).all():
                raise ValueError(f"{what}: the {kind} times a vector is not finite; is the model's loss finite?")
            if on_product is not None:
                on_product(what)
            return result

        return product

    def spectrum(operator: Operator, what: str, top: int, both_ends: bool) -> Spectrum:
        return lanczos(
            reporting(operator, what), operator.n, top, both_ends=both_ends, steps=steps, tolerance=tolerance,
            dtype=model.dtype, seed=seed,
        )  # fmt: skip

    loss, gradient = h.loss_and_gradient()
    squared = float(gradient @ gradient)
    along = None
    if squared > 0:
        along = float(gradient @ reporting(h, "along the gradient")(gradient)) / squared  # eq CU.8
    whole = spectrum(h, "eigenvalues", top, both_ends=kind == "hessian")
    estimates = hutchinson(reporting(h, "trace"), list(h.slices.values()), probes, seed)  # (probes, names)
    layers = []
    for layer, names in layers_of(model, h.names).items() if per_layer else ():
        block = Operator(model, batches, kind, names)
        own = estimates[:, [h.names.index(name) for name in names]].sum(axis=1)
        largest = spectrum(block, layer, 1, both_ends=False).largest[0]
        layers.append(LayerCurvature(layer, block.n, mean_and_error(own) if probes else None, largest))
    trace = mean_and_error(estimates.sum(axis=1)) if probes else None
    norm = math.sqrt(squared)
    return Curvature(kind, h.n, h.n_targets, loss, norm, whole, trace, along, layers)
