"""Other derivations of the same gradients, as people write them: a mistake in one of their steps is found there.

The layers' own steps are the shortest formulas. Somebody who differentiates layer norm through its variance makes
mistakes that those do not have. Each route has fine steps of its own, which the generic probes change one by one.
"""

from __future__ import annotations

from onfoot.check.routes import losses, norms, pointwise, updates
from onfoot.check.routes.route import Route

ROUTES: tuple[Route, ...] = (
    norms.LAYER_NORM,
    norms.RMS_NORM,
    *losses.ROUTES,
    pointwise.TANH,
    pointwise.ERF,
    *pointwise.SWIGLU,
    updates.ADAMW,
    updates.ROPE,
    updates.LORA,
    updates.MERGED,
)
WORDS = {(route.layer, piece): words for route in ROUTES for piece, words in route.words.items()}

__all__ = ["ROUTES", "WORDS", "Route"]
