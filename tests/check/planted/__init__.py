"""Every catalogued mistake, planted in implementations that share no code with the catalogue."""

from planted import (
    attention,
    dense,
    head,
    losses,
    losses_of_heads,
    network,
    norms,
    pointwise,
    post_norm,
    projections,
    variants,
)
from planted.registry import CHANGES, NEEDS, PLANTED, spoilt

__all__ = ["CHANGES", "NEEDS", "PLANTED", "spoilt"]
__all__ += ["attention", "dense", "head", "losses", "losses_of_heads", "network", "norms", "pointwise"]
__all__ += ["post_norm", "projections", "variants"]
