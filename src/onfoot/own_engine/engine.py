"""The engine of a user's own pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from onfoot.engine import Engine, get_engine
from onfoot.own_engine.functions import checked_pair
from onfoot.own_engine.load import find_functions, is_own
from onfoot.own_engine.pairs import GRADIENTS, PARTS, Pair, table_of

EngineLike = str | Engine | ModuleType | Mapping[str, Any] | Sequence[Any]


class OwnEngine(Engine):
    """NumPy formulas, with whole pairs replaced by the user's. Steps run op by op and are not recorded."""

    def __init__(
        self, functions: Mapping[str, Callable[..., Any]], files: Mapping[str, str] | None = None, name: str = "own"
    ) -> None:
        self.theirs = frozenset(name.rpartition("_")[0] for name in functions)
        self.functions = dict(functions)  # as they were given
        self.files = dict(files or {})  # path -> SHA-256
        self.pairs: dict[str, Pair] = {
            pair: checked_pair(pair, functions[f"{pair}_forward"], functions[f"{pair}_backward"])
            for pair in sorted(self.theirs)
            if pair in GRADIENTS
        }
        super().__init__(
            name, table_of(self.pairs), np.asarray, reason=f"your own pairs: {', '.join(sorted(self.theirs))}"
        )

    @property
    def recomputes_inputs(self) -> bool:
        return False

    @property
    def records(self) -> bool:
        return False

    def require_formulas(self, what: str) -> None:
        raise ValueError(
            f'{what} needs onfoot\'s own formulas, which know what each of their pairs saves; use engine="numpy"'
        )

    def copy_quantized(self, weight: Any) -> Any:
        raise ValueError(
            "quantised weights need one of onfoot's engines: functions of your own get plain arrays; load the model "
            "without quantized=True"
        )

    def called(self, pair: str) -> tuple[str, ...]:
        """The pairs that a network really runs when it calls this one: itself, or those that it is made of."""
        if pair in self.theirs or pair not in PARTS:
            return (pair,)
        return PARTS[pair]


def as_engine(engine: EngineLike, dtype: str = "float32") -> Engine:
    """An engine as it is, by name, or of a user's own pairs: a module, a file, a folder, a dict, or a list of these."""
    if isinstance(engine, Engine):
        return engine
    if isinstance(engine, str) and not is_own(engine):
        return get_engine(engine, dtype)
    return OwnEngine(*find_functions(engine))
