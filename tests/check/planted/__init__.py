"""Every catalogued mistake, planted in implementations that share no code with the catalogue."""

from planted import attention, dense, head, losses, network, norms, pointwise
from planted.registry import CHANGES, NEEDS, PLANTED, spoilt

__all__ = ["CHANGES", "NEEDS", "PLANTED", "spoilt"]
__all__ += ["attention", "dense", "head", "losses", "network", "norms", "pointwise"]
