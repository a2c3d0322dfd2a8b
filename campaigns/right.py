"""Random right backward passes of every layer that `onfoot check` knows: it must not call one of them wrong.

What is drawn: the layer, its options and sizes, the formula out of several equal ones, tiles, orders of products and
sums, NumPy or PyTorch, the precision inside, how the results lie in memory and what holds them, the dtypes and seed of
the check. PyTorch's autograd in float64 first proves the drawn function right, to 1e-9 on inputs of the campaign's own.
Only then does the verdict of the check count. Not drawn: other layouts of the arguments (rows, single sequences, tokens
before heads, weights (out, in)), classes, modules, autograd.Functions, JAX and 16-bit dtypes.
`python -m campaigns.right SEED INDEX` repeats one.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from campaigns import Outcome
from campaigns.right_functions import MAKERS, Author, Function
from campaigns.right_functions.holding import held
from campaigns.right_functions.oracle import exact, random_inputs
from onfoot.check.known import check_layer
from onfoot.check.layers import LAYERS
from onfoot.check.report import LayerReport

COUNT = 10_000
PROOF = 1e-9  # relative error of a function that is right, in float64
CANCELS = 1e-3  # of the largest gradient: one that is smaller is the rest of terms that cancel, and is measured by them
RARE = (  # slow to check, and made of the parts of the others
    "block", "relu_block", "post_norm_block", "head", "head_dropout", "multi_head", "self_attention",
    "self_attention_separate", "cross_attention",
)  # fmt: skip
DEFAULT_SIZES = 0.05  # how often the check chooses its own sizes, which include large ones
PIECE = 1_000  # draws per process
Rng = np.random.Generator


@dataclass
class Draw:
    """A drawn function, and how it is checked."""

    layer: str
    author: Author
    function: Function  # on the author's arrays, before anything holds it
    held: Any  # what is given to the check
    options: dict[str, Any]
    settings: dict[str, Any]
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.layer}: {self.author.description}"


def random_options(layer: str, rng: Rng) -> dict[str, Any]:
    """Options other than the defaults, for half of the draws."""

    def one_of(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    drawn = {
        "causal": one_of(True, False),
        "rotary": one_of(True, False),
        "n_head": int(rng.integers(1, 6)),
        "form": one_of("tanh", "erf"),
        "reduction": one_of("mean", "sum"),
        "theta": one_of(10000.0, 500.0, 1e6, float(np.exp(rng.uniform(3, 14)))),
        "eps": one_of(1e-5, 1e-6, 1e-8, 1e-3, float(10 ** rng.uniform(-9, -2))),
        "lr": float(10 ** rng.uniform(-4, 0)),
        "beta1": one_of(0.9, 0.8, 0.95, 0.5),
        "beta2": one_of(0.95, 0.999, 0.99, 0.9),
        "weight_decay": one_of(0.1, 0.0, 0.01),
        "beta": float(10 ** rng.uniform(-2, 0)),
        "max_norm": float(10 ** rng.uniform(-2, 2)),
    }
    defaults = LAYERS[layer].options
    return {name: drawn[name] if rng.random() < 0.5 else default for name, default in defaults.items()}


def random_sizes(layer: str, rng: Rng, options: Mapping[str, Any]) -> dict[str, Any]:
    """Two values of each size that can be chosen, small ones mostly; or none, and the check chooses."""
    if rng.random() < DEFAULT_SIZES:
        return {}
    limits = {"batch": 4, "tokens": 30, "width": 40, "heads": 3, "head_dim": 20, "vocabulary": 40}
    n_head = options.get("n_head")
    chosen: dict[str, Any] = {}
    for size in LAYERS[layer].sizes:
        if (n_head and size in ("heads", "width")) or rng.random() < 0.3:
            continue
        values = {int(n) for n in rng.integers(1, limits[size] + 1, 2)}
        if size == "tokens" and layer == "next_token_loss":
            values = {n + 1 for n in values}
        if size == "head_dim" and (layer in ("rope", "rope_attention") or options.get("rotary")):
            values = {2 * n for n in values}
        chosen[size] = sorted(values)
    return chosen


def draw(seed: int, index: int, layer: str = "") -> Draw:
    """The function with this number; the same seed gives the same one."""
    rng = np.random.default_rng([seed, index])
    drawn = str(rng.choice([name for name in MAKERS for _ in range(1 if name in RARE else 4)]))
    layer = layer or drawn
    options = random_options(layer, rng)
    author = Author(rng)
    function = MAKERS[layer](author)
    kept = held(author, function, LAYERS[layer], options)
    sizes = random_sizes(layer, rng, options)
    settings: dict[str, Any] = {
        "arrays": str(rng.choice(["auto", "auto", "numpy", "torch"])),
        "dtypes": [("float64", "float32"), ("float64",), ("float32",)][int(rng.integers(3))],
        "seed": int(rng.integers(2**31)),
        "strict": bool(rng.random() < 0.25),
    }
    if sizes and rng.random() < 0.2 and not hasattr(kept, "__self__"):
        kept.sizes = dict(sizes)  # declared by the function
        return Draw(layer, author, function, kept, options, settings, {})
    return Draw(layer, author, function, kept, options, settings, sizes)


def error(got: list[Any], right: list[np.ndarray]) -> float:
    """The largest relative error of a gradient; infinite if there are others, or of other shapes."""
    arrays = [np.asarray(g.detach() if isinstance(g, torch.Tensor) else g, np.float64) for g in got]
    if [x.shape for x in arrays] != [x.shape for x in right]:
        return float("inf")
    largest = max(float(np.linalg.norm(r)) for r in right) or 1.0
    sizes = [max(float(np.linalg.norm(r)), CANCELS * largest) for r in right]
    return max(float(np.linalg.norm(g - r)) / size for g, r, size in zip(arrays, right, sizes, strict=True))


def proof(one: Draw, inputs: list[Any]) -> float:
    """The error of the function in float64 on these inputs, against autograd; a precision inside is left out."""
    right = exact(one.layer, inputs, one.options)
    inside, one.author.inside = one.author.inside, ""
    try:
        with np.errstate(all="ignore"):
            got = one.function(*(one.author.array(np.copy(x) if np.ndim(x) else x) for x in inputs), **one.options)
    finally:
        one.author.inside = inside
    return error(list(got), right)


def proven(one: Draw, rng: Rng) -> float:
    """The largest error on two sets of inputs: a few tokens, and more than a tile."""
    found = []
    for tokens in (int(rng.integers(1, 8)), int(rng.integers(25, 45))):
        batch, width, heads, head_dim, vocabulary = (int(n) for n in rng.integers([1, 2, 1, 1, 2], [4, 32, 4, 12, 30]))
        sizes = {"batch": batch, "tokens": tokens, "width": width, "heads": heads, "head_dim": head_dim}
        if one.options.get("rotary"):
            sizes["head_dim"] *= 2
        inputs = random_inputs(one.layer, rng, one.options, {**sizes, "vocabulary": vocabulary})
        found.append(proof(one, inputs))
    return max(found)


def worst(report: LayerReport) -> float:
    """The largest error over its tolerance, of what was measured in float64 and judged as float64."""
    counted = [o for o in report.outcomes if o.dtype == "float64" and not o.single_precision and report.counts(o)]
    return max((m.error / m.allowed for o in counted for m in o.measured if m.allowed), default=0.0)


def attempt(seed: int, index: int, layer: str = "") -> tuple[Draw, str, LayerReport | None]:
    """One draw: what it is, what is wrong ("" if nothing), and the report of the check."""
    one = draw(seed, index, layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        off = proven(one, np.random.default_rng([seed, index, 1]))
        if not off <= PROOF:
            return one, f"the drawn function is not right: off by {off:.1e}", None
        report = check_layer(LAYERS[one.layer], one.held, **one.settings, **one.options, **one.sizes)
        if report.passed:
            return one, "", report
        cases = {o.case.name: list(o.case.inputs) for o in report.failed}
        still = max(proof(one, inputs) for inputs in cases.values())
    lines = " | ".join(line.strip() for line in str(report).splitlines() if line.strip().startswith("✗"))
    return one, f"called wrong in {', '.join(cases)}: {lines}; by autograd it is right to {still:.1e}", report


def piece(seed: int, first: int, last: int) -> dict[str, Any]:
    """The draws from `first` to before `last`, counted."""
    torch.set_num_threads(1)
    layers: Counter[str] = Counter()
    names: set[str] = set()
    failures: list[str] = []
    notes, most = 0, 0.0
    for index in range(first, last):
        try:
            one, wrong, report = attempt(seed, index)
        except Exception as raised:  # by the check itself
            one, wrong, report = draw(seed, index), f"the check raised {type(raised).__name__}: {raised}", None
        layers[one.layer] += 1
        names.add(hashlib.sha256(one.name.encode()).hexdigest()[:12])
        if wrong:
            failures.append(f"seed {seed} index {index}, {wrong}; {one.name}; {one.options} {one.settings} {one.sizes}")
        if report is not None and report.passed:
            notes += bool(report.warnings)
            most = max(most, worst(report))
    counts = {"draws": last - first, "layers": layers, "notes": notes}
    return {**counts, "names": sorted(names), "most": most, "failures": failures}


def joined(pieces: list[dict[str, Any]]) -> Outcome:
    """The figures of all pieces together."""
    layers = sum((Counter(one["layers"]) for one in pieces), Counter[str]())
    failures = [line for one in pieces for line in one["failures"]]
    figures = {
        "layers": len(layers),
        "different functions": len({name for one in pieces for name in one["names"]}),
        "passed": sum(one["draws"] for one in pieces) - len(failures),
        "passed with a note": sum(one["notes"] for one in pieces),
        "largest float64 error over its limit": round(max(one["most"] for one in pieces), 3),
    }
    return Outcome({**figures, "per layer": dict(sorted(layers.items()))}, failures)


def run(count: int, seed: int) -> Outcome:
    """Pieces in processes of their own; one that crashes is a failure, and the next one goes on."""
    pieces = []
    for first in range(0, count, PIECE):
        last = min(first + PIECE, count)
        command = [sys.executable, "-m", "campaigns.right", *map(str, (seed, first, last))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [""])[-1]
            line = f"seed {seed} from {first} to {last}: the process ended with {done.returncode} {reason}"
            found = {"draws": last - first, "layers": {}, "notes": 0, "names": [], "most": 0.0, "failures": [line]}
        else:
            found = json.loads(done.stdout.splitlines()[-1])
        pieces.append(found)
        failures = sum(len(one["failures"]) for one in pieces)
        print(f"  {last:,} of {count:,}: {failures} failures", *found["failures"], sep="\n    ", flush=True)
    return joined(pieces)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        print(json.dumps(piece(*map(int, sys.argv[1:]))))
    else:
        found = attempt(int(sys.argv[1]), int(sys.argv[2]))
        print(found[0].name, found[0].options, found[0].settings, found[0].sizes, found[1] or "right", sep="\n")
        print(found[2])
