"""The picture of `onfoot curvature`: eigenvalues with their error bounds, and every layer's largest eigenvalue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onfoot.plots import new_figure, png

if TYPE_CHECKING:
    from onfoot.curvature import Curvature

COLOURS = {"hessian": "#c2410c", "gauss-newton": "#2f5d8a"}
LABELS = {"hessian": "Hessian", "gauss-newton": "Gauss–Newton"}


def picture(results: list[Curvature]) -> bytes:
    """The plot as PNG bytes: on the left the eigenvalues by rank, on the right the layers, if they were measured."""
    layers = results[0].layers
    height = max(4.0, 1.2 + 0.3 * len(layers))
    figure = new_figure(10 if layers else 6, height)
    axes = figure.subplots(1, 2 if layers else 1, squeeze=False)
    _draw_eigenvalues(axes[0][0], results)
    if layers:
        _draw_layers(axes[0][1], results)
    return png(figure)


def _draw_eigenvalues(axes: Any, results: list[Curvature]) -> None:
    top = len(results[0].spectrum.largest)
    for result in results:
        spectrum, colour = result.spectrum, COLOURS[result.kind]
        ends = [(range(1, top + 1), spectrum.largest), (range(2 * top + 1, top + 1, -1), spectrum.smallest)]
        for i, (at, found) in enumerate(ends):
            axes.errorbar(
                list(at)[: len(found)], [e.value for e in found], yerr=[e.error for e in found], fmt="o",
                markersize=4, capsize=3, color=colour, label=None if i else LABELS[result.kind],
            )  # fmt: skip
    negative = any(result.spectrum.smallest for result in results)
    ranks = [*range(1, top + 1), *(range(-top, 0) if negative else ())]
    places = [rank if rank > 0 else 2 * top + 2 + rank for rank in ranks]
    axes.axhline(0, color="#4b5563", linewidth=0.8)
    axes.set_xticks(places, [str(rank) for rank in ranks])
    axes.set_xlabel("rank: 1 is the largest, -1 the smallest" if negative else "rank: 1 is the largest")
    axes.set_ylabel("eigenvalue, with its error bound")
    axes.set_title(f"loss {results[0].loss:.4f}, {results[0].n_params:,} trainable parameters", fontsize="medium")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _draw_layers(axes: Any, results: list[Curvature]) -> None:
    names = [layer.name for layer in results[0].layers]
    thickness = 0.8 / len(results)
    for k, result in enumerate(results):
        places = [i + (k - (len(results) - 1) / 2) * thickness for i in range(len(names))]
        largest = [layer.largest for layer in result.layers]
        axes.barh(
            places, [e.value for e in largest], thickness, xerr=[e.error for e in largest], capsize=2,
            color=COLOURS[result.kind], alpha=0.85, label=LABELS[result.kind],
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()  # in the order of the forward pass, from the top
    axes.set_xlabel("largest eigenvalue of the layer's own block")
    axes.set_title("layers, from the first to the last", fontsize="medium")
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25, axis="x")
    axes.legend(frameon=False)
