"""The generic probes of other derivations of a layer's gradients, the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from onfoot.check.layer import Case, Layer, Mistake, Piece, Pieces
from onfoot.check.probes import combined_arguments, of_piece
from onfoot.check.recording import Recordings
from onfoot.check.routes import ROUTES, Route

LATER = 0.004  # the layer's own steps are tried first


def routes_of(layer: Layer, options: Mapping[str, Any]) -> list[Route]:
    """The routes of a layer with these options."""
    given = {**layer.assumes, **options}
    return [
        route
        for route in ROUTES
        if route.layer == layer.name and all(given[name] == value for name, value in route.needs.items())
    ]


def on_route(layer: Layer, route: Route) -> Layer:
    """The layer with the route's steps in place of its own."""
    return replace(layer, pieces=layer.pieces.with_changes({**vars(route.pieces), "route": route.steps}))


def route_probes(layer: Layer, options: Mapping[str, Any], case: Case, combined: bool = False) -> Iterator[Mistake]:
    """Every generic probe of every step that a route has of its own; `combined` as in probes()."""
    for route in routes_of(layer, options):
        recordings = Recordings(on_route(layer, route), options)
        for name in reversed(vars(route.pieces)):  # the last steps first: they say more
            if name in recordings.of(case).calls:
                if combined:
                    made = combined_arguments(recordings, case, name)
                else:
                    made = of_piece(recordings, case, name, None, False)
                yield from (_moved(probe, route) for probe in made)


def _moved(probe: Mistake, route: Route) -> Mistake:
    """The probe, applied on the route."""
    inner: Callable[..., dict[str, Piece]] = probe.apply

    def apply(p: Pieces, case: Case) -> dict[str, Piece]:
        own = {**vars(route.pieces), "route": route.steps}
        return {**own, **inner(p.with_changes(own), case)}

    return replace(probe, apply=apply, cost=probe.cost + LATER, replaces=probe.replaces | {"route"})
