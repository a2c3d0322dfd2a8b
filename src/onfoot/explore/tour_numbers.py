"""The numbers that the sentences of a tour name, such as {loss} or {norm Δ_12}, taken from a study."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from onfoot.explore import one_step, texts
from onfoot.explore.jobs import tracked
from onfoot.explore.study_context import OVER_TOKENS
from onfoot.explore.training import share
from onfoot.ops.cross_entropy import IGNORE
from onfoot.train.optimizer import AdamW

if TYPE_CHECKING:
    from onfoot.explore.study import Study
    from onfoot.explore.tensors import Tensor

Number = tuple[str, Any]  # as the page shows it, and the exact value
OF_STEP = "gradient of "
MAX_CONTEXT = 24  # characters of {context}


class MissingNumberError(Exception):
    """This network, or this run, has no such number."""


def brief(x: float) -> str:
    """A number with three digits and a true minus sign."""
    if x == 0:
        return "0"
    text = f"{x:.2e}" if not 1e-3 <= abs(x) < 1e5 else f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}"
    return text.replace("-", "−")


def percent(x: float) -> str:
    """A share in per cent; below 1 % with two digits, so that its logarithm is right to three."""
    return (f"{100 * x:.2g} %" if 0 < x < 0.01 else f"{100 * x:.1f} %").replace("-", "−")


def quoted(text: str) -> str:
    return f"“{text}”"


class TourNumbers:
    """Looks up the numbers of one study by name; `MissingNumberError` if it does not have one."""

    def __init__(self, study: Study) -> None:
        self.study, self.doc = study, study.document
        self.tokens: list[dict[str, Any]] = self.doc["tokens"]

    @staticmethod
    def knows(name: str) -> bool:
        """Whether a tour may ask for that number, of this or another network."""
        return name in PLAIN or any(name.startswith(f"{kind} ") for kind in OF_ARRAYS)

    def number(self, name: str) -> Number:
        if name in PLAIN:
            return PLAIN[name](self)
        kind = max((kind for kind in OF_ARRAYS if name.startswith(f"{kind} ")), key=len)
        return OF_ARRAYS[kind](self, self.array(name.removeprefix(f"{kind} ").strip()))

    def step(self, id: str) -> str:
        """The step of that id, where `last` stands for the last block."""
        found = self._resolved(id)
        if found and all(step.id != found for step in self.study.steps):
            raise MissingNumberError(id)
        return found

    def array(self, id: str) -> Tensor:
        """The array of that id; "gradient of STEP" is that of the step's first parameter."""
        if id.startswith(OF_STEP):
            step_id = self.step(id.removeprefix(OF_STEP))
            parameters = next(step.parameters for step in self.study.steps if step.id == step_id)
            if not parameters:
                raise MissingNumberError(id)
            return self.study.tensors[parameters[0][1]]
        found = self._resolved(id)
        if found not in self.study.tensors:
            raise MissingNumberError(id)
        return self.study.tensors[found]

    def _resolved(self, id: str) -> str:
        blocks = self.study.model.config.n_layer
        return f"{blocks - 1}.{id.removeprefix('last.')}" if id.startswith("last.") else id

    def cell(self, step_id: str, wanted: str) -> list[int] | None:
        """The row and column of the cell that a stop selects in the arrays of its step."""
        if not step_id or not wanted:
            return None
        step = next(step for step in self.study.steps if step.id == step_id)
        tensor = self.study.tensors[step.backward or step.forward]
        value = np.nan_to_num(np.atleast_2d(np.abs(tensor.value)), posinf=0.0)
        row = {"worst": self.worst, "blamed": self.blamed, "masked": self.worst}.get(wanted)
        if row is not None and tensor.value.ndim < 2:
            return [0, min(row, value.shape[1] - 1)]
        if wanted == "masked":
            return [self.worst, min(self.worst + 1, value.shape[1] - 1)]
        if row is not None:
            of_target = _column(tensor, self.target) if tensor.axes[-1] == "vocabulary" else None
            return [row, int(value[row].argmax()) if of_target is None else of_target]
        if wanted == "largest":
            return [int(i) for i in np.unravel_index(int(value.argmax()), value.shape)]
        r, c = (int(x) for x in wanted.split(","))
        return [min(r, value.shape[0] - 1), min(c, value.shape[1] - 1)]

    def token_of(self, wanted: str) -> int | None:
        """The token whose prediction a stop shows; for the blamed token, the one that it is blamed for."""
        if wanted != "blamed":
            return self.worst if wanted in ("worst", "masked") else None
        try:
            return self.cause
        except MissingNumberError:
            return self.blamed

    # --- the token with the worst prediction ---

    @cached_property
    def worst(self) -> int:
        """The position with the largest loss; not the first, which has no context, unless no other has a target."""
        losses = [-2.0 if token["loss"] is None else token["loss"] for token in self.tokens]
        return int(np.argmax([-1.0, *losses[1:]]))

    @property
    def target(self) -> int:
        return int(self.tokens[self.worst]["target"])

    def word(self, id: int) -> Number:
        return quoted(texts.shown(self.study.model, id)), id

    def token(self, t: int) -> Number:
        return quoted(self.tokens[t]["text"]), t

    @property
    def best(self) -> dict[str, Any]:
        """The model's top prediction at the worst position that is not the target."""
        return next(one for one in self.tokens[self.worst]["best"] if one["id"] != self.target)

    def context(self) -> Number:
        between = "" if self.doc["model"]["has_tokenizer"] else " "  # ids
        text = between.join(token["text"] for token in self.tokens[: self.worst + 1])
        return quoted(text if len(text) <= MAX_CONTEXT else "… " + text[-MAX_CONTEXT:]), text

    # --- the token that is blamed most: where the error signal is largest at the embedding ---

    @cached_property
    def blame(self) -> np.ndarray:
        return np.linalg.norm(self.study.tensors.value("Δ_1"), axis=1)  # (T,)

    @cached_property
    def blamed(self) -> int:
        return int(self.blame.argmax())

    @cached_property
    def causes(self) -> np.ndarray:
        """The share of each target's loss in the blamed token's error signal (T,); one backward pass per target."""
        study = self.study
        if study.is_large:
            raise MissingNumberError("one backward pass per target")
        total = study.tensors.value("Δ_1")[self.blamed]
        shares = np.zeros(len(self.tokens))
        for t in tracked(np.flatnonzero(study.targets[0] != IGNORE).tolist(), "targets of the tour"):
            only = np.full_like(study.targets, IGNORE)
            only[0, t] = study.targets[0, t]
            trace = study.model.trace(study.tokens, only, divisor=study.divisor)
            shares[t] = share(trace["Δ_1", 0][0][self.blamed], total)
        return shares

    @property
    def cause(self) -> int:
        return int(self.causes.argmax())

    def blamed_for(self) -> Number:
        """The prediction with the largest share in the blamed token's error signal, and how it reaches it, in words."""
        try:
            cause = self.cause
        except MissingNumberError:
            return "for its own prediction and those after later tokens, whose attention looked back", None
        if cause == self.blamed:
            return "mostly for its own prediction", cause
        after = f"token {cause}, {self.token(cause)[0]}"
        return f"mostly for the prediction after {after}, whose attention looked back", cause

    # --- one step of training ---

    @cached_property
    def update(self) -> dict[str, Any]:
        if self.study.is_large or self.study.frozen:
            raise MissingNumberError("an optimizer step needs a copy of the model")
        return self.study.optimizer(*one_step.FIRST)

    @cached_property
    def after(self) -> np.ndarray:
        """The probabilities after that step (T, V)."""
        study, trained = self.study, one_step.copy_of(self.study.model)
        optimizer = AdamW(trained, lr=self.update["lr"])
        optimizer.step(trained.loss_and_grads(study.tokens, study.targets, divisor=study.divisor)[1])
        probabilities: np.ndarray = trained.trace(study.tokens, study.targets, divisor=study.divisor)["y_pred"][0]
        return probabilities


def _column(tensor: Tensor, id: int) -> int | None:
    """The column of a token of the vocabulary, if it is shown."""
    if tensor.columns is None:
        return id
    at = np.flatnonzero(tensor.columns == id)
    return int(at[0]) if len(at) else None


def _largest(value: np.ndarray) -> tuple[int, ...]:
    """The index of the largest number of an array."""
    finite = np.nan_to_num(np.abs(value), posinf=0.0)
    return tuple(int(i) for i in np.unravel_index(int(finite.argmax()), finite.shape))


def _skip_part(n: TourNumbers, tensor: Tensor) -> np.ndarray:
    """The term of an error signal that the skip passes on unchanged: a single other error signal."""
    for term in tensor.terms:
        if len(term.factors) == 1 and not term.over and len(tensor.terms) > 1:
            return n.study.tensors.value(term.factors[0].tensor)
    raise MissingNumberError(f"a skip into {tensor.id}")


def _branch(n: TourNumbers, tensor: Tensor) -> Number:
    value = float(np.linalg.norm(tensor.value - _skip_part(n, tensor)))
    return brief(value), value


def _per_token(n: TourNumbers, tensor: Tensor) -> np.ndarray:
    """What each token adds to the largest number of a parameter's gradient (T,)."""
    term = next((term for term in tensor.terms if term.over == OVER_TOKENS), None)
    if term is None:
        raise MissingNumberError(f"a sum over tokens in {tensor.id}")
    index = dict(zip("rc"[2 - tensor.value.ndim :], _largest(tensor.value), strict=True))
    lines = []
    for factor in term.factors:
        value = n.study.tensors.value(factor.tensor)
        lines.append(value[tuple(slice(None) if axis == "j" else index[axis] for axis in factor.at)])
    product: np.ndarray = np.prod(np.stack(lines), axis=0)
    return product


def _most(n: TourNumbers, tensor: Tensor) -> tuple[int, float]:
    """The token that adds most to the largest number of a parameter's gradient, and how much."""
    parts = _per_token(n, tensor)
    sign = np.sign(tensor.value[_largest(tensor.value)])
    t = int((sign * parts).argmax())
    return t, float(parts[t])


def _where(tensor: Tensor) -> Number:
    index = _largest(tensor.whole)
    names = ("row", "column") if len(index) == 2 else ("position",)
    return ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True)), list(index)


def _masked(tensor: Tensor) -> Number:
    """The number of cells above the diagonal, if all of them are exactly 0."""
    if tensor.value.ndim != 2 or tensor.value.shape[0] != tensor.value.shape[1]:
        raise MissingNumberError(f"a mask in {tensor.id}")
    above = tensor.value[np.triu_indices(len(tensor.value), 1)]
    if above.any():
        raise MissingNumberError(f"zeros above the diagonal of {tensor.id}")
    return f"{above.size:,}", int(above.size)


def _number(x: float) -> Number:
    return brief(x), float(x)


def _share(x: float) -> Number:
    return percent(x), float(x)


def _count(x: int) -> Number:
    return f"{x:,}", int(x)


def _at_worst(n: TourNumbers, tensor: Tensor, column: int) -> Number:
    """The number of the worst token's row at a column of the vocabulary."""
    if tensor.axes[-1] != "vocabulary":
        raise MissingNumberError(f"columns of the vocabulary in {tensor.id}")
    return _number(float(tensor.whole[n.worst, column]))


def _made_by(n: TourNumbers, tensor: Tensor) -> Number:
    """The steps whose backward pass made an error signal: those that read the activation of its step."""
    step = next((step for step in n.study.steps if step.backward == tensor.id), None)
    if step is None:
        raise MissingNumberError(f"a step with the error signal {tensor.id}")
    to = [reader for source, reader in n.doc["motion"]["edges"] if source == step.id]
    names = [one.name for one in n.study.steps if one.id in to and one.head in (None, step.head)]
    return " and ".join(names), to


def _formula(tensor: Tensor) -> Number:
    if not tensor.formula.text:
        raise MissingNumberError(f"a formula of {tensor.id}")
    return tensor.formula.text, None


PLAIN: dict[str, Callable[[TourNumbers], Number]] = {
    "tokens": lambda n: _count(len(n.tokens)),
    "targets": lambda n: _count(n.doc["targets"]),
    "vocabulary": lambda n: _count(n.doc["model"]["vocabulary"]),
    "blocks": lambda n: _count(n.doc["model"]["blocks"]),
    "heads": lambda n: _count(n.doc["model"]["heads"]),
    "parameters": lambda n: _count(n.doc["model"]["parameters"]),
    "loss": lambda n: _number(n.doc["loss"]),
    "context": lambda n: n.context(),
    "token": lambda n: n.token(n.worst),
    "position": lambda n: _count(n.worst),
    "target": lambda n: n.word(n.target),
    "probability": lambda n: _share(n.tokens[n.worst]["probability"]),
    "token loss": lambda n: _number(n.tokens[n.worst]["loss"]),
    "best": lambda n: n.word(n.best["id"]),
    "best probability": lambda n: _share(n.best["probability"]),
    "blamed token": lambda n: n.token(n.blamed),
    "blamed position": lambda n: _count(n.blamed),
    "blamed norm": lambda n: _number(float(n.blame[n.blamed])),
    "blamed own share": lambda n: _share(float(n.causes[n.blamed])),
    "blamed later share": lambda n: _share(1 - float(n.causes[n.blamed])),
    "blamed for": lambda n: n.blamed_for(),
    "cause token": lambda n: n.token(n.cause),
    "cause position": lambda n: _count(n.cause),
    "cause share": lambda n: _share(float(n.causes[n.cause])),
    "cause target": lambda n: n.word(int(n.tokens[n.cause]["target"])),
    "cause probability": lambda n: _share(n.tokens[n.cause]["probability"]),
    "learning rate": lambda n: (f"{n.update['lr']:g}", n.update["lr"]),
    "loss after": lambda n: _number(n.update["losses"][-1]),
    "probability after": lambda n: _share(float(n.after[n.worst, n.target])),
    "promised change": lambda n: _number(n.update["predicted"]),
    "actual change": lambda n: _number(n.update["actual"]),
}
OF_ARRAYS: dict[str, Callable[[TourNumbers, Tensor], Number]] = {
    "formula": lambda n, tensor: _formula(tensor),
    "made by": _made_by,
    "norm": lambda n, tensor: _number(tensor.norm),
    "row norm": lambda n, tensor: _number(float(np.linalg.norm(tensor.whole[n.worst]))),
    "at target": lambda n, tensor: _at_worst(n, tensor, n.target),
    "at best": lambda n, tensor: _at_worst(n, tensor, n.best["id"]),
    "skip norm": lambda n, tensor: _number(float(np.linalg.norm(_skip_part(n, tensor)))),
    "skip share": lambda n, tensor: _share(share(_skip_part(n, tensor), tensor.value)),
    "branch norm": _branch,
    "largest": lambda n, tensor: _number(float((whole := tensor.whole)[_largest(whole)])),
    "where": lambda n, tensor: _where(tensor),
    "most token": lambda n, tensor: n.token(_most(n, tensor)[0]),
    "most position": lambda n, tensor: _count(_most(n, tensor)[0]),
    "most": lambda n, tensor: _number(_most(n, tensor)[1]),
    "masked": lambda n, tensor: _masked(tensor),
}


def known_numbers() -> str:
    """All names, for an error message."""
    return ", ".join([*PLAIN, *(f"{kind} ARRAY" for kind in OF_ARRAYS)])
