"""Forward passes of exercises that are not an op of their own, composed of ours: what a given forward must return."""

from __future__ import annotations

from onfoot.ops.attention import softmax

__all__ = ["softmax"]
