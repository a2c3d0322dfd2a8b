"""`onfoot learn train --compare`: a wrong solution is trained beside the right gradients, and both curves are drawn.

A wrong pair takes the place of ours. The block, self-attention and the whole pass (exercises 8, 9 and 11) are no pairs
of an engine: they are trained in a pass through the whole network that is otherwise the solutions'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from onfoot.learn.course import SOLUTIONS, find_exercise
from onfoot.learn.curves import draw_curves, sketch
from onfoot.learn.folder import exercise_files
from onfoot.learn.own_pairs import (
    FAILING,
    NETWORK,
    UNWRITTEN,
    WRONG,
    YOURS,
    Functions,
    Network,
    Solved,
    Status,
    functions_of,
    judged_network,
    solved_in,
)
from onfoot.learn.train import JUDGING, OUT, Result, Text, next_folder, run
from onfoot.own_engine import NotWrittenError, PairError
from onfoot.own_engine.functions import called
from onfoot.own_engine.load import import_folder
from onfoot.train.options import TrainOptions

# What is no pair of an engine, from the smallest to the largest, and the exercise that has it.
PARTS = {"self_attention": "multi_head", "block": "block", NETWORK: "gpt2"}


@dataclass
class Mistaken:
    """What is wrong and can be trained: pairs, or a pass through the whole network with a wrong part."""

    names: list[str]
    functions: Functions = field(default_factory=dict)
    network: Network | None = None


def compare(
    folder: Path,
    options: TrainOptions,
    say: Callable[[str], None],
    wrong_file: Path | None = None,
    out: Path | None = None,
) -> tuple[Result, Result]:
    """Trains right and wrong gradients from the same initial values on the same batches, and draws both curves."""
    where = out or folder / OUT
    text = Text(where, options)
    say(JUDGING)
    solved = solved_in(folder, text)
    mistaken = mistaken_in(folder, solved, text) if wrong_file is None else mistaken_of(wrong_file, text)
    names = ", ".join(mistaken.names)
    place = next_folder(where)
    say(f"training with the right gradients, then once more with yours for {names}")
    right = run(text.model(solved.right, solved.files), text, place / "right")
    wrong = run(text.model({**solved.right, **mistaken.functions}, {}, mistaken.network), text, place / "wrong")
    curves = {"right": right.losses, f"with your {names}": wrong.losses}
    draw_curves(curves, place / "compare.png")
    say(f"\n{sketch(curves)}\n")
    say(difference(right, wrong, len(right.losses)))
    say(f"curves: {place / 'compare.png'}")
    return right, wrong


def mistaken_in(folder: Path, solved: Solved, text: Text) -> Mistaken:
    """What is wrong in a folder of exercises; a ValueError if nothing of it can be trained, which says why."""
    files = [folder / find_exercise(name).file for name in PARTS.values()]
    parts = judged_parts([file for file in files if file.is_file()], text)
    found = _trainable(solved, parts)
    if found is not None:
        return found
    cannot = [*_cannot(solved, parts), *(f"{name} cannot be imported: {why}" for name, why in solved.broken.items())]
    if cannot:
        raise ValueError(f"{'; '.join(cannot)}; mend that first, or give the file of another solution with --wrong")
    raise ValueError(
        f"nothing is wrong that can be trained: give the file of a wrong solution with --wrong FILE (a backward that "
        f"returns None does not train; {_parts(solved)})"
    )


def mistaken_of(file: Path, text: Text) -> Mistaken:
    """What is wrong in a file; a ValueError if nothing of it can be trained, which says why."""
    solved, parts = solved_in(file.parent, text, [file]), judged_parts([file], text)
    if solved.broken:
        raise ValueError(f"{file} cannot be imported: {solved.broken[file.name]}")
    found = _trainable(solved, parts)
    if found is not None:
        return found
    cannot = _cannot(solved, parts)
    if cannot:
        raise ValueError(f"--wrong {file}: {'; '.join(cannot)}")
    statuses = [*(one for one in solved.statuses if one.pair != NETWORK), *(status for status, _ in parts)]
    unwritten = [one.words for one in statuses if one.verdict == UNWRITTEN]
    if unwritten:
        raise ValueError(f"--wrong {file}: {'; '.join(unwritten)}")
    right = [one.pair for one in statuses if one.verdict == YOURS]
    if right:
        raise ValueError(f"--wrong {file}: nothing in it is wrong; right as onfoot's: {', '.join(right)}")
    raise ValueError(f"--wrong {file} defines nothing that can be trained: {_parts(solved)}")


def _trainable(solved: Solved, parts: Sequence[tuple[Status, Network]]) -> Mistaken | None:
    """The wrong pairs; or, if none can be trained, the smallest part of the network that is wrong."""
    if solved.wrong:
        return Mistaken(sorted({name.rpartition("_")[0] for name in solved.wrong}), solved.wrong)
    wrong = [(status.pair, network) for status, network in parts if status.verdict == WRONG]
    return Mistaken([wrong[0][0]], network=wrong[0][1]) if wrong else None


def _cannot(solved: Solved, parts: Sequence[tuple[Status, Network]]) -> list[str]:
    """What is wrong but cannot be trained, and why."""
    failing = [one for one, _ in parts if one.verdict == FAILING]
    return [f"your {one.pair} is wrong, but cannot be trained: {one.words}" for one in [*solved.mistaken, *failing]]


def _parts(solved: Solved) -> str:
    names = ", ".join([*(one.pair for one in solved.statuses if one.pair != NETWORK), *PARTS])
    return f"this GPT-2 consists of {names}; the other exercises are not a part of it"


def judged_parts(files: Sequence[Path], text: Text) -> list[tuple[Status, Network]]:
    """The parts that these files define, judged in a pass through the whole network that is otherwise right."""
    imported = {file: _beside_solutions(file) for file in files}
    modules = {file: module for file, module in imported.items() if module is not None}
    found = []
    for part in PARTS:
        for file, module in modules.items():
            functions = functions_of(module, part)
            if functions is not None:
                network = whole_pass(part, functions)
                found.append((judged_network(network, text, file.name, part), network))
    return found


def _beside_solutions(file: Path) -> ModuleType | None:
    """A file whose imports of other exercises find their solutions, so that only its own mistakes are in it.

    It is imported beside the learner's other files if it needs what only those have, and is None if that fails too.
    """
    for folder in (SOLUTIONS, file.parent):
        modules, _ = import_folder(folder, [file])
        if modules:
            return modules[file]
    return None


def whole_pass(part: str, functions: Functions) -> Network:
    """gpt2_forward and gpt2_backward of the solutions, with these functions of a part in place of theirs."""
    if part != NETWORK:
        modules, _ = import_folder(SOLUTIONS, exercise_files(SOLUTIONS))
        checked = checked_part(part, functions)
        for module in modules.values():  # each file has its own names for what it imports
            vars(module).update({name: function for name, function in checked.items() if hasattr(module, name)})
        network = modules[SOLUTIONS / find_exercise(NETWORK).file]
        functions = {name: getattr(network, name) for name in (f"{NETWORK}_forward", f"{NETWORK}_backward")}
    return functions[f"{NETWORK}_forward"], functions[f"{NETWORK}_backward"]


def checked_part(part: str, functions: Functions) -> Functions:
    """The functions of a part, with errors that name them: the pass that calls them is not the user's."""
    forward, backward = f"{part}_forward", f"{part}_backward"

    def checked_backward(*args: Any) -> Any:
        found = called(backward, functions[backward], *args)
        gradients = _gradients(found)
        if all(gradient is None for gradient in gradients):
            raise NotWrittenError(f"your {backward} returns None")
        if any(gradient is None for gradient in gradients):
            raise PairError(f"your {backward} returns None for some of its gradients")
        return found

    return {forward: lambda *args: called(forward, functions[forward], *args), backward: checked_backward}


def _gradients(found: Any) -> list[Any]:
    """What a backward function returned, without its tuples, lists and dicts."""
    if isinstance(found, dict):
        found = list(found.values())
    return [one for inner in found for one in _gradients(inner)] if isinstance(found, (tuple, list)) else [found]


def difference(right: Result, wrong: Result, steps: int) -> str:
    """How much worse the wrong run is, in one sentence."""
    by = round(wrong.validation_loss - right.validation_loss, 4)
    words = f"{abs(by):.4f} nats per token {'worse' if by > 0 else 'better'}" if by else "no difference"
    return (
        f"after {steps} steps the validation loss is {right.validation_loss:.4f} with the right gradients and "
        f"{wrong.validation_loss:.4f} with yours: {words}"
    )
