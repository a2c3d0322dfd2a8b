"""Every catalogued mistake, planted in implementations that share no code with the catalogue."""

from planted import attention, dense, losses, network, norms, pointwise
from planted.registry import NEEDS, PLANTED

__all__ = ["NEEDS", "PLANTED", "attention", "dense", "losses", "network", "norms", "pointwise"]
