"""ReLU as the checker knows it, with the exercise's own words for its mistakes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onfoot.check.layers import LAYERS
from onfoot.learn.layers.own import mistake

MISTAKES = (
    mistake(
        "learn_relu",
        "",
        "ReLU applied to the gradient",
        "dout is cut off where dout is negative; what counts is where x is negative.",
        "choose by the sign of x, not by that of dout",
        relu_dx=lambda dy, slope, x: np.maximum(dy, 0),
    ),
    mistake(
        "learn_relu",
        "",
        "the output in place of the slope",
        "dout is multiplied by max(x, 0), the value of ReLU, where its derivative belongs.",
        "multiply by the derivative, which is 1 or 0",
        relu_dx=lambda dy, slope, x: dy * np.maximum(x, 0),
    ),
    mistake(
        "learn_relu",
        "",
        "the gradient passes where x is negative",
        "The gradient is kept where x is negative and dropped where it is positive.",
        "keep dout where x > 0",
        relu_slope=lambda x: np.where(x > 0, 0.0, 1.0),
    ),
    mistake(
        "learn_relu",
        "",
        "dx is dout unchanged",
        "The gradient passes everywhere, as if the layer were y = x.",
        "drop dout where x is negative",
        relu_slope=lambda x: np.ones_like(x),
    ),
)

RELU = replace(LAYERS["relu"], name="learn_relu", mistakes=MISTAKES)
