"""Finds the known mistakes that explain a wrong result.

Every catalogued mistake of the layer is run on the same data. It explains a wrong gradient if the two agree up to
rounding in every case. If no single mistake does, these are tried: a factor or another change of one gradient, another
constant, the generic probes, then all pairs. The diagnosis is the smallest set of mistakes that explains all wrong
gradients and leaves the correct ones correct.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onfoot.check.candidate import Candidate, Change, Evidence
from onfoot.check.changes import find_change
from onfoot.check.layer import Array, Mistake
from onfoot.check.mistakes import mistakes_of, replaced_pieces
from onfoot.check.precision import all_lost_digits
from onfoot.check.probes import probes
from onfoot.check.reach import EXACTLY, KINDS, Reach
from onfoot.check.recording import Recordings
from onfoot.check.route_probes import route_probes
from onfoot.check.routes import ROUTES
from onfoot.check.shares import COST as SHARES
from onfoot.check.shares import share_probes
from onfoot.check.slips import slips
from onfoot.terminal import listed

MAX_SIZE = 4.5  # larger candidates are not tried
MAX_TRIED = 300  # combinations of explanations
LIKELY = 1.2  # mistakes that cost more are kept only if the probes find nothing simpler
TIERS = (0.0, 1.225, 1.265, 1.32, 9.0)  # of the costs of the probes: if a tier explains all, the next is not tried
MOST = 12  # explanations per gradient that are combined with those of others
TOP = 1.235  # the cost of probes that are tried together with other mistakes
ODD = 1.3  # changes that cost more add, subtract or multiply an array
SIMPLE = 1.1  # the cost of changes that are factors, transposes or shapes
MOST_FITTED = 4  # gradients that an unknown number is fitted to
LARGE = 8  # gradients of a layer whose search ends with a mistake that explains all wrong ones
MOST_LIKELY = 12  # places where everything is tried, also in a large layer
MOST_WORK = 250_000  # gradients computed in a search, so that it ends in half a minute for a whole block
MOST_ON_TOP = 1500  # pairs of which one is not in the catalogue


@dataclass(frozen=True)
class Finding:
    """One mistake found."""

    name: str
    explains: str
    equation: str
    fix: str
    errata: str
    gradients: list[str]
    value: str = ""  # "learning rate = 0.1"
    off: float = 0.0  # how far that number is from the right one, relative to it; 0 if there is none


@dataclass
class Diagnosis:
    """The explanation of a result; empty if there is none."""

    findings: list[Finding] = field(default_factory=list)
    residual: float = math.inf  # of the explained gradients, relative to the returned ones
    cases: int = 0  # number of cases compared
    unexplained: list[str] = field(default_factory=list)
    candidates: list[tuple[list[str], float]] = field(default_factory=list)  # (names, residual), best first
    also: list[list[str]] = field(default_factory=list)  # other mistakes that fit equally well
    plain: dict[str, str] = field(default_factory=dict)  # gradient -> its relation to the correct one, if simple

    @property
    def complete(self) -> bool:
        return bool(self.findings) and not self.unexplained


def diagnose(evidence: Evidence, wrong: Sequence[int], pairs: bool = True) -> Diagnosis:
    """Returns the smallest set of known mistakes that gives the same wrong gradients."""
    return _Search(evidence, wrong).diagnosis(pairs)


class _Search:
    def __init__(self, evidence: Evidence, wrong: Sequence[int]) -> None:
        self.evidence, self.wrong = evidence, list(wrong)
        self.right = [g for g in range(len(evidence.layer.gradients)) if g not in self.wrong]
        self.singles = [Candidate((m,)) for m in mistakes_of(evidence.layer, evidence.options)]
        self.options: dict[int, list[Candidate]] = {g: [] for g in self.wrong}
        self.recordings = Recordings(evidence.layer, evidence.options)
        self.tried: list[Mistake] = []  # the probes that were tried
        self.parallel: dict[int, list[Candidate]] = {}  # gradient -> probes that are right but for a factor
        self.same: dict[tuple[Mistake, ...], list[Candidate]] = {}  # other candidates with the same numbers

    def diagnosis(self, pairs: bool) -> Diagnosis:
        self.try_each(self.singles, self.wrong)
        for g in self.wrong:
            self.try_changes([Candidate()], g)
        found = self.cover()
        if self.evidence.layer.probed and self.is_open(found):
            layer, options = self.evidence.layer, self.evidence.options
            self.try_each(map(_alone, slips(layer, options)), self.wrong)
            found = self.cover()
        if pairs and self.is_open(found) and not self.common():
            self.try_own_pairs()
            found = self.cover()
        if pairs and self.is_open(found) and not self.common():
            found = self.with_probes()
        left = self.left()
        if pairs and (left or (not self.common() and (found is None or found.size > 2))):
            both = (a.combined(b) for a, b in itertools.combinations(self.singles, 2))
            tried = self.wrong if not left or found is None else left
            self.try_each((candidate for candidate in both if _compatible(candidate)), tried)
            for g in self.left():
                self.try_changes([*self.singles, *self.parallel.get(g, [])[:MOST]], g)
            for g in self.left():
                self.try_changes(self.singles, g, self.recordings)
            self.try_on_top()
            found = self.cover()
        if self.keep_certain():
            found = self.cover()
        return self.build_diagnosis(found)

    def try_own_pairs(self) -> None:
        """Tries pairs of mistakes between the parts of a composite layer, such as two skip connections."""
        layer = self.evidence.layer
        if layer.parts and self.left():
            own = [one for one in self.singles if one.mistakes[0].layer == layer.name]
            both = (a.combined(b) for a, b in itertools.combinations(own, 2))
            self.try_each((candidate for candidate in both if _compatible(candidate)), self.left())

    def left(self) -> list[int]:
        """The wrong gradients that nothing explains so far."""
        return [g for g in self.wrong if not self.options[g]]

    def is_open(self, found: Candidate | None) -> bool:
        """Whether a simpler or more complete explanation may be found."""
        if found is None or self.left() or found.size > 2.5:
            return True
        return max((*(m.cost for m in found.mistakes), *(c.cost for c in found.changes))) > LIKELY

    def common(self, limit: float = 1.0) -> bool:
        """Whether one catalogued mistake explains every wrong gradient, though it was not made in the correct ones."""
        first, *rest = (self.options[g] for g in self.wrong)
        return any(o.size <= limit and all(o in options for options in rest) for o in first)

    def with_probes(self) -> Candidate | None:
        """Tries the generic probes and all changes, the likeliest first, until every wrong gradient is explained."""
        evidence, case = self.evidence, self.evidence.cases[self.evidence.screen(self.wrong[0])]
        given = evidence.layer, evidence.options, case
        reached = Reach(evidence, self.recordings, self.wrong)
        likely = [place for place, kind in reached.places.items() if kind == EXACTLY][:MOST_LIKELY]
        tried = [*probes(self.recordings, case, likely=likely), *route_probes(*given)]
        for g in self.left():
            self.try_changes([Candidate()], g, self.recordings)
        found: Candidate | None = None
        for kind in KINDS:
            for low, high in itertools.pairwise(TIERS):
                if kind == KINDS[0] and low < SHARES <= high:
                    tried += share_probes(evidence, self.wrong, self.recordings)
                if kind == KINDS[0] and high == TIERS[-1]:
                    tried += [*probes(self.recordings, case, combined=True), *route_probes(*given, combined=True)]
                tier = (probe for probe in tried if low < probe.cost <= high and reached.kind(probe) == kind)
                self.try_probes(sorted(tier, key=lambda probe: probe.cost))
                self.keep_different()
                found = self.cover()
                if found is not None and not self.left() and found.size <= high:
                    return found
                if len(evidence.layer.gradients) > LARGE and self.common(high):
                    return found
        return found

    def try_each(self, candidates: Iterable[Candidate], gradients: Iterable[int]) -> None:
        gradients = list(gradients)
        for candidate in candidates:
            if self.evidence.work > MOST_WORK:
                return
            fitted: list[Candidate] = []  # with the numbers that explain other gradients
            unknown = any(m.parameter for m in candidate.mistakes)
            for n, g in enumerate(gradients):
                if unknown and n >= MOST_FITTED and not fitted:
                    break  # a constant that explains none of the first gradients
                if any(self.evidence.fits(one, g) for one in fitted):
                    self.options[g].append(candidate)
                    continue
                valued = self.evidence.with_values(candidate, [g])
                if valued is not None and self.evidence.fits(valued, g):
                    self.options[g].append(candidate)
                    fitted += [valued] if valued.values else []

    def try_probes(self, tried: Iterable[Mistake]) -> None:
        """Runs the probes on one case per gradient, and those that match there on all cases."""
        screens = {g: self.evidence.screen(g) for g in self.wrong if self.evidence.ever_informative(g)}
        left = self.left()
        for probe in tried:
            if self.evidence.work > MOST_WORK:
                return
            self.tried.append(probe)
            candidate = _alone(probe)
            for g, i in screens.items():
                if self.evidence.passes_screen(candidate, i, g):
                    if self.evidence.fits(candidate, g):
                        self.options[g].append(candidate)
                elif g in left and self.evidence.is_parallel(candidate, i, g):
                    self.parallel.setdefault(g, []).append(candidate)
            self.evidence.forget(candidate)

    def try_on_top(self) -> None:
        """Tries known mistakes and the likeliest probes together with one that explains another gradient, or is known.

        Two mistakes that meet in a gradient are found so, of which one need not be in the catalogue.
        """
        others = dict.fromkeys(o.mistakes for g in self.wrong for o in self.options[g] if o.mistakes and not o.values)
        bases = [Candidate(mistakes) for mistakes in others if not any(m.parameter for m in mistakes)][:MOST]
        bases += [one for one in self.singles if one not in bases and not any(m.parameter for m in one.mistakes)]
        tops = [*self.singles, *(_alone(probe) for probe in self.tried if probe.cost <= TOP)]
        runs = 0
        for g in self.left() if any(self.evidence.ever_informative(g) for g in self.left()) else ():
            i = self.evidence.screen(g)
            explained = [h for h in range(len(self.evidence.layer.gradients)) if h not in self.left()]
            for base, top in itertools.product(bases, tops):
                candidate = base.combined(top)
                if self.evidence.work > MOST_WORK:
                    return
                if runs >= MOST_ON_TOP or len(candidate.mistakes) < 2 or not _compatible(candidate):
                    continue
                runs += 1
                if self.evidence.passes_screen(candidate, i, g) and self.evidence.fits(candidate, g):
                    self.options[g].append(candidate)
                    if all(self.evidence.fits(candidate, h) for h in explained):
                        break
                self.evidence.forget(candidate)

    def keep_different(self) -> None:
        """Keeps one option of those that give the same numbers: the simplest."""
        i = self.evidence.screen(self.wrong[0])
        for g, options in self.options.items():
            kept: dict[tuple[float, ...], Candidate] = {}
            for one in sorted(options, key=lambda o: o.size):
                valued = self.evidence.with_values(one, [g])
                ran = None if valued is None else self.evidence.run(valued, i)
                first = kept.setdefault(tuple(_fingerprint(x) for x in ran or ()) or (float(len(kept)),), one)
                if first is not one and one not in self.same.setdefault(first.mistakes, []):
                    self.same[first.mistakes].append(one)
            self.options[g] = list(kept.values())[:MOST]

    def try_changes(self, bases: Iterable[Candidate], g: int, recordings: Recordings | None = None) -> None:
        for base in bases:
            if not any(m.parameter for m in base.mistakes):
                change = find_change(self.evidence, base, g, recordings)
                if change is not None:
                    self.options[g].append(Candidate(base.mistakes, (change,)))

    def explains(self, candidate: Candidate, gradients: Sequence[int], closest: Sequence[int]) -> bool:
        valued = self.evidence.with_values(candidate, closest)
        return valued is not None and all(self.evidence.fits(valued, g) for g in gradients)

    def cover(self) -> Candidate | None:
        """Returns the smallest candidate that fits every explainable gradient and every correct one."""
        wanted = [g for g in self.wrong if self.options[g]]
        if not wanted:
            return None
        best: Candidate | None = None
        seen: set[frozenset[Mistake | Change]] = set()

        def search(candidate: Candidate, covered: list[int]) -> None:
            nonlocal best
            key: frozenset[Mistake | Change] = frozenset((*candidate.mistakes, *candidate.changes))
            if key in seen or len(seen) > MAX_TRIED or candidate.size > (best.size - 0.05 if best else MAX_SIZE):
                return
            seen.add(key)
            valued = self.evidence.with_values(candidate, covered)
            if valued is None:
                return
            unmatched = [g for g in wanted if not self.evidence.fits(valued, g)]
            if not unmatched and all(self.evidence.fits(valued, g) for g in self.right):
                best = valued
            for g in unmatched[:1]:
                for option in self.options[g]:
                    combined = candidate.combined(option)
                    if _compatible(combined):
                        search(combined, [*covered, g])

        search(Candidate(), [])
        return best

    def keep_certain(self) -> bool:
        """Drops explanations that may be a coincidence; returns whether there were any.

        Those are pairs with an unlikely change that explains no gradient by itself, and unlikely explanations of some
        gradients while others have none: one cause may explain them all.
        """
        before = {g: list(options) for g, options in self.options.items()}
        for g, options in before.items():
            self.options[g] = [one for one in options if self.is_confirmed(one)]
        if self.left():
            for g, options in self.options.items():
                self.options[g] = [one for one in options if _is_certain(one)]
        return before != self.options

    def is_confirmed(self, candidate: Candidate) -> bool:
        """Whether every change of a combination is a simple one, or explains a gradient by itself."""
        parts = [Candidate((), (c,)) for c in candidate.changes if c.cost > ODD]
        if len(candidate.mistakes) + len(candidate.changes) == 1:
            return True
        return all(any(self.evidence.fits(part, g) for g in self.wrong) for part in parts)

    def build_diagnosis(self, found: Candidate | None) -> Diagnosis:
        evidence, names = self.evidence, self.evidence.layer.gradients
        out = Diagnosis(cases=len(evidence.cases))
        explained = [g for g in self.wrong if self.options[g]]
        if found is not None:
            out.residual = max((evidence.residual(found, g) for g in explained), default=math.inf)
            out.findings = [*self._mistakes(found, explained), *self._changes(found.changes)]
            out.candidates.append((found.names, out.residual))
            out.also = [one.names for one in self.twins(found, explained)]
        else:  # one by one: a mistake was made in one gradient but not in another
            changes: list[Change] = []
            for g, option in self.one_by_one(explained):
                best = evidence.with_values(option, [g])
                assert best is not None
                out.findings += self._mistakes(best, [g])
                changes += best.changes
                out.candidates.append((best.names, evidence.residual(best, g)))
            out.findings = [*_merged(out.findings), *self._changes(changes)]
            out.residual = max((r for _, r in out.candidates), default=math.inf)
        out.plain = {
            names[g]: option.changes[0].name
            for g in self.wrong
            for option in self.options[g]
            if option.changes and not option.mistakes
        }
        near = all_lost_digits(evidence, self.left())
        if near:
            fix = "compute and accumulate in the dtype of the inputs"
            out.findings += [Finding(words, "", "", fix, "", [names[g]]) for g, words in near.items()]
        out.unexplained = [names[g] for g in self.left() if g not in near]
        out.candidates += self.nearest(found)
        return out

    def one_by_one(self, explained: Sequence[int]) -> list[tuple[int, Candidate]]:
        """The explanation of each gradient; one that explains several gradients comes before others."""
        left, found = list(explained), []
        while left:
            options = dict.fromkeys(o for g in left for o in self.options[g])
            best = min(options, key=lambda o: o.size - 0.5 * sum(o in self.options[g] for g in left))
            found += [(g, best) for g in left if best in self.options[g]]
            left = [g for g in left if best not in self.options[g]]
        return sorted(found, key=lambda one: one[0])

    def twins(self, found: Candidate, explained: Sequence[int]) -> list[Candidate]:
        """Other single mistakes that fit the same gradients equally well; a generated one in another derivation."""
        if len(found.mistakes) != 1 or found.changes:
            return []
        if found.size > 1:
            same = [o for o in self.same.get(found.mistakes, []) if _on_route(o) != _on_route(found) and o.mistakes]
            same.sort(key=lambda o: -_step(o, self.evidence.layer.name))  # the last steps say more
            return [o for o in same if self.explains(o, [*explained, *self.right], explained)][:1]
        others = [one for one in self.options[explained[0]] if one.size == 1 and one.mistakes != found.mistakes]
        return [one for one in others if self.explains(one, [*explained, *self.right], explained)]

    def _mistakes(self, candidate: Candidate, only: Sequence[int] | None = None) -> list[Finding]:
        names, values, found = self.evidence.layer.gradients, iter(candidate.values), []
        for m in candidate.mistakes:
            value = next(values) if m.parameter else None
            alone = Candidate((m,), values=() if value is None else (value,))
            changed = [names[g] for g in only or self.wrong if not self.evidence.same_as_right(alone, g)]
            shown = "" if value is None else f"{m.parameter} = {shown_number(value, m.correct)}"
            off = 0.0 if value is None or not m.correct else abs(value / m.correct - 1)
            found.append(Finding(m.name, m.explains, m.equation, m.fix, m.errata, changed, shown, off))
        return sorted(found, key=lambda one: -len(one.gradients))  # what comes first in a pass changes most

    def _changes(self, changes: Sequence[Change]) -> list[Finding]:
        """One finding per change; the same change of several gradients is one finding."""
        names, kinds = self.evidence.layer.gradients, dict.fromkeys(c.kind or c.name for c in changes)
        found = []
        for kind in kinds:
            same = [c for c in changes if (c.kind or c.name) == kind]
            affected = [names[c.gradient] for c in same]
            name = same[0].name if len(same) == 1 else _plural(kind, affected)
            found.append(Finding(name, "", "", same[0].fix if len(same) == 1 else _fixes(same), "", affected))
        return found

    def nearest(self, found: Candidate | None) -> list[tuple[list[str], float]]:
        """Single mistakes that are closer to the result than the correct formula, the closest first."""
        measured = []
        right = self.residual(Candidate())
        for single in self.singles:
            valued = self.evidence.with_values(single, self.wrong)
            if valued is not None and (found is None or valued.names != found.names):
                measured.append((valued.names, self.residual(valued, right / 2)))
        return sorted((one for one in measured if one[1] < right / 2), key=lambda one: one[1])[:5]

    def residual(self, candidate: Candidate, limit: float = math.inf) -> float:
        largest = 0.0
        for g in self.wrong:
            largest = max(largest, self.evidence.residual(candidate, g, limit))
            if largest > limit:
                break
        return largest


def shown_number(value: float, correct: float | None) -> str:
    """The number with as many digits as it takes to tell it from the right one."""
    gap = abs(value - correct) if correct is not None else math.inf
    return next(
        (text for n in range(6, 17) if abs(float(text := f"{value:.{n}g}") - value) <= gap / 10), f"{value:.17g}"
    )


def _fingerprint(x: Array) -> float:
    """A number that is the same for the same array, up to rounding."""
    flat = np.where(np.isfinite(x), x, 0.0).ravel()
    return float(f"{flat @ np.cos(1.0 + np.arange(flat.size)):.8g}")


def _on_route(candidate: Candidate) -> bool:
    """Whether it is a step of another derivation."""
    return any("route" in m.replaces for m in candidate.mistakes)


def _step(candidate: Candidate, layer: str) -> int:
    """The place of a changed step in its route."""
    orders = [list(vars(route.pieces)) for route in ROUTES if route.layer == layer]
    pieces = [piece for m in candidate.mistakes for piece in m.replaces]
    return max((order.index(piece) for order in orders for piece in pieces if piece in order), default=-1)


def _is_certain(candidate: Candidate) -> bool:
    """Whether it is one cause, likely enough to be named where something else stays unexplained."""
    if len(candidate.mistakes) + len(candidate.changes) > 1:
        return False
    return all(m.cost <= TOP for m in candidate.mistakes) and all(c.cost <= SIMPLE for c in candidate.changes)


def _alone(mistake: Mistake) -> Candidate:
    return Candidate((mistake,))


def _plural(kind: str, names: Sequence[str]) -> str:
    """“{} is transposed” of several gradients: “dq and dk are transposed”."""
    plural = kind.replace("{} is ", "{} are ").replace("{} has ", "{} have ").replace(" its ", " their ")
    return plural.format(listed(names))


def _fixes(changes: Sequence[Change]) -> str:
    return ", ".join(dict.fromkeys(c.fix for c in changes))


def _merged(findings: list[Finding]) -> list[Finding]:
    """Each mistake once, with all gradients it was found in."""
    found: dict[str, Finding] = {}
    for one in findings:
        before = found.get(one.name)
        found[one.name] = one if before is None else replace(one, gradients=[*before.gradients, *one.gradients])
    return list(found.values())


def _compatible(candidate: Candidate) -> bool:
    """Whether the mistakes replace different pieces and the changes affect different gradients."""
    pieces = [piece for m in candidate.mistakes for piece in replaced_pieces(m)]
    gradients = [c.gradient for c in candidate.changes]
    return len(pieces) == len(set(pieces)) and len(gradients) == len(set(gradients))
