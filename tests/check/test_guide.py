"""docs/check.md has every layer, and its worked example ends well (tests/docs runs what it shows)."""

from __future__ import annotations

from onfoot.check import CATALOGUE, LAYERS
from pages import DOCS, page_blocks

GUIDE = (DOCS / "check.md").read_text(encoding="utf-8")


def test_the_guide_ends_in_a_passing_check() -> None:
    steps = [block for block in page_blocks("docs/check.md") if block.language == "console"]
    assert [block.mark("exit") for block in steps] == ["1", "1", None, None]
    assert "--strict" in steps[-1].text and "✓ passes" in steps[-1].text


def test_the_guide_has_every_layer_with_its_signature() -> None:
    for layer in LAYERS.values():
        assert f"| `{layer.name}` |" in GUIDE
    without = [x for x in LAYERS.values() if f"`({', '.join(x.arguments)})` → {', '.join(x.gradients)}" not in GUIDE]
    too_long = ["cross_attention", "block", "relu_block", "post_norm_block"]  # for a row of the table
    assert [layer.name for layer in without] == too_long
    assert f"[{len(LAYERS)} layers]" in GUIDE
    assert abs(len(CATALOGUE) - 250) < 10
