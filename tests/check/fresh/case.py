"""One entry of the corpus."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A backward pass as somebody would write it, and what is wrong with it.

    `options` are those of the layer's contract that differ from its defaults; the function knows
    them by itself, and is called with the arguments of the contract alone. `wrong` names the
    results that are wrong (their shape or values), in the contract's words; all the others are right.
    """

    layer: str
    function: Callable
    options: dict = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    mistake: str | None = None
