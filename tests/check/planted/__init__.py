"""Every catalogued mistake, planted in implementations that share no code with the catalogue."""

from planted import attention, dense, head, losses, network, norms, pointwise
from planted.registry import NEEDS, PLANTED

__all__ = ["NEEDS", "PLANTED", "attention", "dense", "head", "losses", "network", "norms", "pointwise"]
