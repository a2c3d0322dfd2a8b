"""Whose each gradient of a network is: which pairs of a folder of exercises are right, and whether the whole pass is.

The folder's files are read in order. A pair is the learner's if it agrees with ours on the first batch of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from onfoot.learn.course import EXERCISES
from onfoot.learn.folder import exercise_files
from onfoot.models.compare_pairs import TOLERANCE, Compared, compare_pairs
from onfoot.models.own_network import compare_network
from onfoot.own_engine import NotWrittenError, PairError
from onfoot.own_engine.load import HALVES, hashes, import_folder
from onfoot.own_engine.pairs import GRADIENTS

if TYPE_CHECKING:
    from onfoot.learn.train import Text

YOURS, OURS, UNWRITTEN, FAILING, WRONG = "yours", "onfoot's", "not written yet", "does not run", "wrong"
NOT_YET = "your {}_backward is not written yet"
NETWORK = "gpt2"  # the pass through the whole network

Functions = dict[str, Callable[..., Any]]
Network = tuple[Callable[..., Any], Callable[..., Any]]  # gpt2_forward and gpt2_backward


@dataclass(frozen=True)
class Status:
    """Whose a pair is in this run, and why."""

    pair: str
    verdict: str  # YOURS, OURS, UNWRITTEN, FAILING or WRONG
    file: str = ""
    words: str = ""  # what is wrong


@dataclass
class Solved:
    """What a folder of exercises provides for one network."""

    statuses: list[Status]
    right: Functions  # the pairs that agree with ours
    wrong: Functions  # those that do not, but can be trained
    network: Network | None = None  # gpt2_forward and gpt2_backward, if right
    files: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # file -> why it cannot be imported

    @property
    def all_pairs(self) -> bool:
        return all(one.verdict == YOURS for one in self.statuses if one.pair != NETWORK)

    @property
    def mistaken(self) -> list[Status]:
        """The pairs that are wrong."""
        return [one for one in self.statuses if one.verdict == WRONG and one.pair != NETWORK]

    @property
    def everything(self) -> bool:
        return self.all_pairs and self.network is not None

    def table(self) -> str:
        """Each pair of the network, and whose it is."""
        width = max(len(one.pair) for one in self.statuses)
        lines = [f"  {one.pair:<{width}}  {_whose(one)}" for one in self.statuses]
        lines += [f"{file} cannot be imported: {why}" for file, why in self.broken.items()]
        return "\n".join(["The gradients of this model:", *lines])

    def summary(self) -> str:
        """The sentence at the end of a run."""
        if self.everything:
            return "Every gradient of this model is yours."
        mine = sum(one.verdict == YOURS for one in self.statuses if one.pair != NETWORK)
        pairs = sum(one.pair != NETWORK for one in self.statuses)
        if self.all_pairs:
            return f"All {pairs} pairs are yours; the pass that calls them (gpt2_forward, gpt2_backward) is onfoot's."
        return f"{mine} of {pairs} pairs are yours; the rest is onfoot's."


def _whose(one: Status) -> str:
    if one.verdict == YOURS:
        return f"yours, {one.file}"
    return f"onfoot's: {one.words}" if one.words else "onfoot's"


def solved_in(folder: Path, text: Text, files: Sequence[Path] | None = None) -> Solved:
    """Judges the pairs of a folder of exercises, or of these files of it, on the first batch of a run."""
    modules, broken = import_folder(folder, exercise_files(folder) if files is None else files)
    solved = judged(modules, text)
    solved.broken = {path.name: why.removeprefix(f"cannot import {path}: ") for path, why in broken.items()}
    of_pair = {pair: one.file for one in EXERCISES for pair in (*one.pairs, one.name) if one.file in solved.broken}
    solved.statuses = [
        replace(one, words=f"{of_pair[one.pair]} cannot be imported")
        if one.verdict == OURS and one.pair in of_pair
        else one
        for one in solved.statuses
    ]
    return solved


def judged(modules: Mapping[Path, ModuleType], text: Text) -> Solved:
    """Which pairs of these files agree with ours on the first batch; of several, the last that does."""
    given: dict[str, list[tuple[str, Functions, dict[str, str]]]] = {}
    for path, module in modules.items():
        for pair in GRADIENTS:
            functions = functions_of(module, pair)
            if functions is not None:
                given.setdefault(pair, []).append((path.name, functions, hashes([module])))
    used = text.model({}, {}).pairs_used()
    out = Solved([], {}, {})
    for pair in used:
        out.statuses.append(_judge(pair, given.get(pair, []), text, out))
    out.statuses.append(_judge_network(modules, text, out))
    return out


def functions_of(module: ModuleType, name: str) -> Functions | None:
    """The two functions of a pair, or of a larger part, if a file defines one of them itself and has the other."""
    found = {f"{name}_{half}": getattr(module, f"{name}_{half}", None) for half in HALVES}
    if not all(callable(function) for function in found.values()):
        return None
    own = any(getattr(function, "__module__", "") == module.__name__ for function in found.values())
    return cast(Functions, found) if own else None


def _judge(pair: str, candidates: Sequence[tuple[str, Functions, dict[str, str]]], text: Text, out: Solved) -> Status:
    status = Status(pair, OURS, words="no exercise has it yet" if not candidates else "")
    batch = text.source.microbatches(0)[0]
    for file, functions, files in reversed(candidates):
        try:
            found = compare_pairs(text.model(functions, {}), batch.tokens, batch.targets)
        except PairError as error:
            status = Status(pair, WRONG, file, str(error))
            continue
        first = found.first
        if first is None:
            out.right |= functions
            out.files |= files
            return Status(pair, YOURS, file)
        if status.verdict != WRONG:
            status = Status(pair, UNWRITTEN if first.unwritten else WRONG, file, _words(first))
        if not first.unwritten and not first.problem:
            out.wrong |= {name: f for name, f in functions.items() if name not in out.wrong}
    return status


def _words(first: Compared) -> str:
    return NOT_YET.format(first.pair) if first.unwritten else str(first)


def _judge_network(modules: Mapping[Path, ModuleType], text: Text, out: Solved) -> Status:
    """Whether the last of the files with a pass through the whole network has a right one."""
    given = [(path, found) for path, module in modules.items() if (found := functions_of(module, NETWORK)) is not None]
    if not given:
        return Status(NETWORK, OURS, words="no exercise has gpt2_forward and gpt2_backward yet")
    path, functions = given[-1]
    network = functions[f"{NETWORK}_forward"], functions[f"{NETWORK}_backward"]
    status = judged_network(network, text, path.name)
    if status.verdict == YOURS:
        out.network = network
    return status


def judged_network(network: Network, text: Text, file: str, part: str = NETWORK) -> Status:
    """Whether a pass through the whole network is right, and what is wrong with it; `part` is what the user wrote."""
    batch = text.source.microbatches(0)[0]
    try:
        name, error = compare_network(text.model({}, {}), *network, batch.tokens[:2], batch.targets[:2])
    except NotWrittenError:
        return Status(part, UNWRITTEN, file, NOT_YET.format(part))
    except PairError as failure:
        return Status(part, FAILING, file, f"it does not run yet: {failure}")
    if not error <= TOLERANCE:
        what = "the loss" if name == "loss" else f"the gradient of {name}"
        return Status(part, WRONG, file, f"{what} is wrong: relative error {error:.2g}")
    return Status(part, YOURS, file)
