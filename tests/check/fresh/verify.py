"""Verifies sets of the corpus against oracles: forward passes in torch, differentiated by autograd in float64.

    python tests/check/fresh/verify.py [SET …] [-v]      all sets unless some are named

Every wrong case must have exactly the results wrong that it declares (off by more than 1e-6, relative to
the largest entry of the oracle's, in at least one of the draws), and all its other results right to 1e-9 in
every draw; every right case must be right to 1e-9 in every draw.
"""

import argparse
import importlib
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from measure import SETS

from oracles import ORACLES, T, normal

RIGHT, WRONG = 1e-9, 1e-6

# (seed, batch, tokens, scale of the inputs): the first two are ordinary, the third has small inputs
DRAWS = [(0, 2, 5, 1.0), (1, 3, 6, 1.0), (2, 3, 4, 1e-2)]


def setup(layer, draw, options):
    """The function's arguments, the names of its results, and what they should be."""
    seed, b, t, scale = draw
    rng = np.random.default_rng(seed)
    oracle = ORACLES[layer]
    args = oracle.draw(rng, b, t, scale, options)
    if hasattr(oracle, "results"):
        return args, oracle.returned, oracle.results(*args, **options)
    leaves = [T(a) if isinstance(a, np.ndarray) else a for a in args]
    returned = getattr(oracle, "returned", oracle.names)
    wanted = [leaves[oracle.names.index(n)].requires_grad_() for n in returned]
    out = oracle.forward(*leaves, **options)
    dout = 0.5 + 0.1 * b if getattr(oracle, "scalar", False) else normal(rng, *out.shape)
    refs = torch.autograd.grad(out, wanted, T(np.asarray(dout)))
    return [*args, dout], tuple("d" + n for n in returned), [r.numpy() for r in refs]


def error(got, ref):
    """The largest error relative to the largest entry; infinite where the shape differs or a value is no number."""
    got = np.asarray(got.detach() if isinstance(got, torch.Tensor) else got, dtype=np.float64)
    if got.shape != ref.shape or not np.isfinite(got).all():
        return np.inf
    return np.abs(got - ref).max() / max(np.abs(ref).max(), 1e-3)


def errors(case, draw):
    args, names, refs = setup(case.layer, draw, case.options)
    copies = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
    got = case.function(*copies)
    changed = [i for i, (a, c) in enumerate(zip(args, copies, strict=True)) if not np.array_equal(a, c)]
    assert not changed, (case.function.__name__, "changes its arguments", changed)
    got = [got] if len(refs) == 1 and not isinstance(got, tuple | list) else list(got)
    assert len(got) == len(refs), (case.function.__name__, len(got))
    return dict(zip(names, (error(g, r) for g, r in zip(got, refs, strict=True)), strict=True))


def problems(case):
    """What is not as the case declares, and whether its mistake shows in the ordinary draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = [errors(case, draw) for draw in DRAWS]
    worst = {n: max(e[n] for e in every) for n in every[0]}
    ordinary = {n for n in worst if max(e[n] for e in every[:2]) > WRONG}
    found = {n for n, e in worst.items() if e > WRONG}
    text = []
    if found != set(case.wrong):
        text.append(f"wrong are {','.join(n for n in worst if n in found) or '-'}, declared {','.join(case.wrong)}")
    text += [f"{n} off by {e:.1e}" for n, e in worst.items() if RIGHT < e <= WRONG]
    if (case.mistake is None) != (not case.wrong):
        text.append("a wrong case needs a mistake, a right one has none")
    return text, ordinary, worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"one of {', '.join(SETS)}; all unless given")
    parser.add_argument("-v", "--verbose", action="store_true", help="the errors of every case")
    given = parser.parse_args()
    bad = 0
    names = set()
    for module in map(importlib.import_module, given.sets or SETS):
        counts = {}
        for case in module.CASES:
            text, ordinary, worst = problems(case)
            where = f"{module.__name__}.{case.function.__name__} ({case.layer})"
            assert where not in names, where
            names.add(where)
            row = counts.setdefault(case.layer, [0, 0])
            row[not case.wrong] += 1
            if text:
                bad += 1
                print(f"{where}: {'; '.join(text)}  [{case.mistake}]")
            elif case.wrong and not ordinary:
                print(f"{where}: shows with small inputs only  [{case.mistake}]")
            if given.verbose:
                print(where, {n: f"{e:.1e}" for n, e in worst.items()})
        print(
            f"{module.__name__}: {sum(c[0] for c in counts.values())} wrong, {sum(c[1] for c in counts.values())} right"
        )
        for layer, (wrong, right) in counts.items():
            print(f"  {layer:22} {wrong:3} wrong {right:3} right")
    print("all as declared" if not bad else f"{bad} not as declared")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
