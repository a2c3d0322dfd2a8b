"""Random right backward passes: every choice of an author is drawn, and the gradients stay the same.

`author.py` has what all authors choose (NumPy or PyTorch, the precision inside, orders of products and sums), one file
per topic the formulas, `holding.py` how the function and its results are held, `oracle.py` the exact gradients by
PyTorch.
"""

from __future__ import annotations

from campaigns.right_functions.attention import ATTENTION
from campaigns.right_functions.author import Author, Function, Maker
from campaigns.right_functions.block import BLOCK
from campaigns.right_functions.dense import DENSE
from campaigns.right_functions.losses import LOSSES
from campaigns.right_functions.norms import NORMS
from campaigns.right_functions.pointwise import POINTWISE
from campaigns.right_functions.update import UPDATE
from campaigns.right_functions.variants import VARIANTS

MAKERS: dict[str, Maker] = {**ATTENTION, **DENSE, **NORMS, **LOSSES, **POINTWISE, **BLOCK, **VARIANTS, **UPDATE}

__all__ = ["MAKERS", "Author", "Function", "Maker"]
