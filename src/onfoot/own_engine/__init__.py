"""An engine of the user's own: forward/backward pairs from a module, a file, a folder or a dict, in place of ours.

Pairs that the user does not give are those of `ops/`. A pair that is made of others (a frozen linear layer is a linear
layer) is made of the user's, so that no network goes around them.
"""

from onfoot.own_engine.engine import EngineLike, OwnEngine, as_engine
from onfoot.own_engine.functions import NotWrittenError, PairError
from onfoot.own_engine.load import is_own

__all__ = ["EngineLike", "NotWrittenError", "OwnEngine", "PairError", "as_engine", "is_own"]
