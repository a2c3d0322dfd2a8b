"""Known mistakes in splitting and merging heads, in multi-head attention and in a block."""

from __future__ import annotations

from onfoot.check.layer import Array, Mistake


def split_heads_by_reshape(x: Array, n_head: int) -> Array:
    """(B, T, H D) -> (B, H, T, D) by reshape alone: correct shape, but tokens and features are mixed."""
    b, n, width = x.shape
    return x.reshape(b, n_head, n, width // n_head)


def merge_heads_by_reshape(x: Array) -> Array:
    """(B, H, T, D) -> (B, T, H D) by reshape alone."""
    b, h, n, width = x.shape
    return x.reshape(b, n, h * width)


FIX = "reshape to (batch, tokens, heads, width), then swap the token and head axes; the reverse to merge"

MISTAKES = (
    Mistake(
        "heads split and merged without a transpose",
        "multi_head",
        "reshape(batch, heads, tokens, width) has the correct shape but mixes tokens with features.",
        "34",
        FIX,
        lambda p: {
            "split": split_heads_by_reshape,
            "split_dout": split_heads_by_reshape,
            "merge": merge_heads_by_reshape,
        },
        "E19",
    ),
    Mistake(
        "heads split without a transpose",
        "multi_head",
        "reshape(batch, heads, tokens, width) mixes tokens with features; merging does use a transpose.",
        "34",
        FIX,
        lambda p: {"split": split_heads_by_reshape, "split_dout": split_heads_by_reshape},
        "E19",
    ),
    Mistake(
        "dout split into heads without a transpose",
        "multi_head",
        "q, k and v are split correctly, but dout by reshape(batch, heads, tokens, width) alone.",
        "34",
        FIX,
        lambda p: {"split_dout": split_heads_by_reshape},
        "E19",
    ),
    Mistake(
        "heads merged without a transpose",
        "multi_head",
        "reshape(batch, tokens, heads · width) of (batch, heads, tokens, width) mixes tokens with features.",
        "34",
        FIX,
        lambda p: {"merge": merge_heads_by_reshape},
        "E19",
    ),
)
