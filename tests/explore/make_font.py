"""Remakes the page's mathematics font: `python tests/explore/make_font.py`, with fonttools, brotli and npm installed.

STIX Two Math (SIL Open Font License 1.1) has 4,605 characters and 400 kB. What the formulas of the page and of the site
need is less than a tenth of it, with the sizes for scripts and the stretched forms. The result has a name of its own,
because it is not the published font.
"""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from pathlib import Path

STATIC = Path(__file__).resolve().parents[2] / "src" / "onfoot" / "explore" / "static"
SOURCE = "@fontsource/stix-two-math@5.3.0"  # the npm package
FAMILY = "Onfoot Math"  # in 01-ground.css too
LETTERS = (
    (0x20, 0x7E),  # ASCII
    (0x391, 0x3C9),  # Greek
    (0x1D434, 0x1D467),  # italic letters: what a browser shows for <mi>a</mi>
    (0x1D6E2, 0x1D71B),  # italic Greek
)
SIGNS = (
    "\u00a0¬¯°±²³´·×÷āˆ˙˜"
    "\u0302\u0303\u0304\u0305\u0307"  # accents
    "ϕϵϑϱ–—‖…′″‴₀₁₂⁰¹⁺⁻ℎℓℝ←↑→↓↔↦⇐⇒⇔"
    "∀∂∃∅∆∇∈∉∋∏∑−∓∗∘√∝∞∠∣∥∧∨∩∪∫∼≅≈≠≡≤≥≪≫⊂⊃⊆⊖⊕⊗⊙⊤⊥⋅⋆⋮⋯⋱⌈⌉⌊⌋⟨⟩✓"
)


def characters() -> set[str]:
    """All characters of the font."""
    return {chr(code) for first, last in LETTERS for code in range(first, last + 1)} | set(SIGNS)


def main() -> None:
    from fontTools import subset
    from fontTools.ttLib import TTFont

    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["npm", "pack", "--silent", SOURCE], cwd=folder, check=True, capture_output=True, text=True
        )
        with tarfile.open(Path(folder) / packed.stdout.strip()) as archive:
            archive.extractall(folder, filter="data")
        package = Path(folder) / "package"
        font = TTFont(package / "files" / "stix-two-math-latin-400-normal.woff2", recalcTimestamp=False)
        license_text = (package / "LICENSE").read_text(encoding="utf-8")
    options = subset.Options(
        layout_features=["ssty", "dtls", "flac"],  # primes and letters of scripts, dotless letters and flat accents
        hinting=False, glyph_names=False, notdef_outline=True, name_IDs=[0, 1, 2, 3, 4, 5, 6, 13, 14],
    )  # fmt: skip
    made = subset.Subsetter(options)
    made.populate(unicodes=[ord(character) for character in characters()])
    made.subset(font)
    names = {1: FAMILY, 3: f"{FAMILY}, a subset of STIX Two Math", 4: FAMILY, 6: FAMILY.replace(" ", "")}
    for record in font["name"].names:
        if record.nameID in names:
            record.string = names[record.nameID]
    font.flavor = "woff2"
    path = STATIC / "onfoot-math.woff2"
    font.save(path)
    said = f"onfoot-math.woff2 is a subset of STIX Two Math, made by tests/explore/make_font.py from {SOURCE}.\n\n"
    (STATIC / "onfoot-math-license.txt").write_text(said + license_text, encoding="utf-8")
    missing = sorted(characters() - {chr(code) for code in font.getBestCmap()})
    print(f"{path.name}: {path.stat().st_size:,} bytes; not in the source: {''.join(missing) or 'nothing'}")


if __name__ == "__main__":
    main()
