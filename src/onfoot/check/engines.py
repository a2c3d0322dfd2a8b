"""`onfoot check` without a function: checks every op on every installed engine against finite differences.

The backward pass of an op must agree with finite differences of its forward pass, in float64 and float32. The forward
pass on every engine must agree with the NumPy formulas, so that a wrong forward pass cannot hide a wrong backward pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import onfoot.engine
from onfoot.arrays import to_numpy
from onfoot.check.budget import ALLOWED, DTYPES, UNIT, norm
from onfoot.check.examples import Example, examples, flattened
from onfoot.check.general import gradients
from onfoot.check.numeric import derivative
from onfoot.engine import OPS, Engine
from onfoot.kernels import FUSED
from onfoot.terminal import ShownText


@dataclass(frozen=True)
class OpResult:
    """The result for one op on one engine."""

    engine: str
    op: str
    ok: bool
    error: float  # largest relative error of a directional derivative, in float64
    message: str = ""
    checked: bool = True


@dataclass(repr=False)
class InstallationReport(ShownText):
    results: list[OpResult]
    skipped: dict[str, str]  # engine -> why
    seconds: float

    @property
    def passed(self) -> bool:
        return all(r.ok for r in self.results)

    def __bool__(self) -> bool:
        return self.passed

    def facts(self) -> dict[str, str]:
        wrong = [f"{one.op} on {one.engine}" for one in self.results if not one.ok]
        return {
            "ops": str(len(self.results)),
            "wrong": ", ".join(wrong) or "none",
            "skipped": ", ".join(self.skipped) or "none",
        }

    def __str__(self) -> str:
        return "\n".join(_text(self))

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "seconds": self.seconds,
            "skipped": self.skipped,
            "results": [{**vars(r), "error": r.error if math.isfinite(r.error) else None} for r in self.results],
        }


def installation() -> InstallationReport:
    """Checks every op and some small networks on every installed engine."""
    start = time.perf_counter()
    results: list[OpResult] = []
    skipped: dict[str, str] = {}
    for name in onfoot.engine.ENGINES:  # looked up at call time, so that engines added later are checked too
        try:
            engine = onfoot.engine.get_engine(name)
        except (ValueError, ImportError) as error:
            skipped[name] = str(error)
            continue
        results += engine_results(engine)
    return InstallationReport(results, skipped, time.perf_counter() - start)


def engine_results(engine: Engine) -> Iterator[OpResult]:
    """Checks every op of an engine's table, and small networks on it."""
    known = examples()
    for op in sorted(name.removesuffix("_forward") for name in engine.table if name.endswith("_forward")):
        if op in known:
            yield _guarded(check_op, engine, op, known[op])
        elif op not in FUSED:  # fused ops are covered by the float32 networks
            yield OpResult(engine.name, op, True, 0.0, "no example inputs", checked=False)
    for name, config in networks().items():
        yield _guarded(check_network, engine, name, config)
        yield _guarded(check_float32_network, engine, f"{name}, float32", config)


def _guarded(check: Callable[..., OpResult], engine: Engine, name: str, given: Any) -> OpResult:
    """Runs one check; an exception counts as a failure, so that the others still run."""
    try:
        return check(engine, name, given)
    except Exception as error:
        return OpResult(engine.name, name, False, float("nan"), f"it raises {type(error).__name__}: {error}")


def check_op(engine: Engine, op: str, example: Example) -> OpResult:
    """Checks an op against finite differences, and its forward pass against the formula in float64."""

    def packed(inputs: tuple[Any, ...]) -> list[Any]:
        return list(inputs) if example.pack is None else example.pack(*inputs)

    def forward(*inputs: Any) -> Any:
        return engine.table[f"{op}_forward"](*packed(inputs))

    def backward(dy: Any, saved: Any) -> Any:
        return flattened(engine.table[f"{op}_backward"](dy, saved))

    def given(x: Any, dtype: str) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        return engine.floats(x, dtype) if x.dtype.kind == "f" else engine.integers(x)

    inputs = [given(x, "float64") for x in example.inputs]
    report = gradients(forward, backward, inputs, wrt=example.wrt, names=example.names, saved=True, dtypes=DTYPES)
    exact = [a for a in report.agreements if a.dtype == "float64"]
    error = max((abs(a.backward - a.forward) / max(abs(a.forward), 1e-3) for a in exact), default=float("nan"))
    if not report.passed:
        return OpResult(engine.name, op, False, error, str(report))
    right = _formula(op, packed(tuple(example.inputs)))
    for dtype in DTYPES:
        got = to_numpy(forward(*(given(x, dtype) for x in example.inputs))[0]).astype(np.float64)
        off = norm(got - right) / (norm(right) or 1.0)
        if off > 16 * ALLOWED * UNIT[dtype]:
            message = f"the forward pass in {dtype} differs from the formula by {off:.1e}"
            return OpResult(engine.name, op, False, off, message)
    return OpResult(engine.name, op, True, error)


def _formula(op: str, inputs: list[Any]) -> np.ndarray:
    return np.asarray(OPS[f"{op}_forward"](*inputs)[0], dtype=np.float64)


def networks() -> dict[str, Any]:
    """Small networks of every family, by display name."""
    import onfoot

    gpt2 = onfoot.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=8, vocab_size=11)
    llama = onfoot.LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=8,
        intermediate_size=12,
        max_position_embeddings=8,
        vocab_size=11,
    )
    return {"GPT-2, two blocks": gpt2, "LLaMA, two blocks": llama}


def check_float32_network(engine: Engine, name: str, config: Any) -> OpResult:
    """Checks all gradients of a network in float32 against the formulas in float64."""
    import onfoot

    ours = onfoot.create(config, seed=0, engine=engine.name)
    reference = onfoot.create(config, seed=0, dtype="float64", engine="numpy")
    rng = np.random.default_rng(1)
    for key, p in reference.params.items():
        value = (p + 0.2 * rng.standard_normal(p.shape)).astype(np.float32)
        ours.params[key] = engine.floats(value.copy(), "float32")
        reference.params[key] = value.astype(np.float64)
    tokens = rng.integers(0, config.vocab_size, (2, 6))
    loss, grads = ours.loss_and_grads(tokens)
    right, exact = reference.loss_and_grads(tokens)
    total = math.sqrt(sum(norm(g) ** 2 for g in exact.values()))
    off = math.sqrt(sum(norm(to_numpy(g).astype(np.float64) - exact[key]) ** 2 for key, g in grads.items())) / total
    ok = off < 1e-5 and abs(loss - right) < 1e-5 * right
    return OpResult(engine.name, name, ok, off, "" if ok else f"gradients differ from the formulas by {off:.1e}")


def check_network(engine: Engine, name: str, config: Any) -> OpResult:
    """Checks all gradients of a network at once, along a random direction."""
    import onfoot

    model = onfoot.create(config, seed=0, dtype="float64", engine=engine.name)
    rng = np.random.default_rng(0)
    start = {key: to_numpy(p) + 0.3 * rng.standard_normal(p.shape) for key, p in model.params.items()}
    direction = {key: rng.standard_normal(p.shape) for key, p in start.items()}
    tokens = rng.integers(0, config.vocab_size, (2, 6))

    def move(t: float) -> None:
        for key, p in start.items():
            model.params[key] = engine.floats(p + t * direction[key], "float64")

    def loss(t: float) -> float:
        move(t)
        return float(model.loss(tokens))

    numeric = derivative(loss, noise=1e-15, start=0.01)
    move(0)
    _, grads = model.loss_and_grads(tokens)
    analytic = sum(float(np.sum(direction[key] * to_numpy(grad))) for key, grad in grads.items())
    ok = abs(analytic - numeric.value) <= 10 * numeric.error + 1e-12
    message = (
        "" if ok else f"⟨v, gradient⟩ = {analytic:.10g}, but finite differences of the loss give {numeric.value:.10g}"
    )
    return OpResult(engine.name, name, ok, abs(analytic / numeric.value - 1), message)


def _text(report: InstallationReport) -> Iterator[str]:
    engines = list(dict.fromkeys(r.engine for r in report.results))
    by_engine_and_op = {(r.engine, r.op): r for r in report.results}
    yield "every op on every installed engine, against finite differences in float64 and float32"
    yield ""
    yield f"  {'':<28}" + "".join(f"{engine:>14}" for engine in engines)
    for op in dict.fromkeys(r.op for r in report.results):
        yield f"  {op:<28}" + "".join(f"{_cell(by_engine_and_op.get((engine, op))):>14}" for engine in engines)
    yield ""
    for r in report.results:
        if not r.ok:
            yield f"✗ {r.op} on {r.engine}:"
            yield from (f"  {line}" for line in r.message.splitlines())
            yield ""
    for r in report.results:
        if not r.checked:
            yield f"  {r.op} on {r.engine}: not checked; {r.message}"
    for engine, why in report.skipped.items():
        yield f"  {engine}: not checked; {why}"
    n = len([r for r in report.results if r.checked])
    bad = len([r for r in report.results if not r.ok])
    if bad:
        yield f"✗ {bad} of {n} checks failed ({report.seconds:.1f} s)"
    else:
        yield f"✓ all {n} checks passed ({report.seconds:.1f} s); the numbers are relative errors of derivatives"


def _cell(result: OpResult | None) -> str:
    if result is None or not result.checked:
        return "–  "
    return f"{result.error:.0e} {'✓' if result.ok else '✗'}"
