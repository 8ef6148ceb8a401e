"""Running a tiled network in NumPy: slice, compute, paste."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ascend_lab.graph.evaluate import Values, checked_inputs, evaluate
from ascend_lab.graph.tiling.grid import Box, Step
from ascend_lab.graph.tiling.plan import Tiled
from ascend_lab.ops.formats import numpy_type


def evaluate_tiled(tiled: Tiled, inputs: Mapping[str, Any]) -> dict[str, Values]:
    """Return the outputs by name, as `evaluate` does, with only one tile's tensors at a time.

    Every element is the same formula of the same numbers; where a library sums fp64 products in
    another order for another size, the last bit of fp64 may differ before rounding.
    """
    graph = tiled.graph
    live: dict[str, Values] = dict(checked_inputs(graph, inputs))
    for i, step in enumerate(tiled.steps):
        own = {name: live[name] for name in step.graph.inputs}
        live.update(_tiles(step, own) if step.tiles else evaluate(step.graph, own))
        later = {n for s in tiled.steps[i + 1 :] for n in s.graph.inputs} | set(graph.outputs)
        live = {name: value for name, value in live.items() if name in later}
    return {n: live[n] if n in live else graph.constants[n].array() for n in graph.outputs}


def _tiles(step: Step, inputs: Mapping[str, Values]) -> dict[str, Values]:
    types = step.graph.types
    found = {n: np.empty(types[n].shape, numpy_type(types[n].dtype)) for n in step.graph.outputs}
    for tile in step.tiles:
        kind = step.kinds[tile.kind]
        own = {n: x[area(tile.reads[n])] if n in tile.reads else x for n, x in inputs.items()}
        values = evaluate(kind, own)
        for name, inner in zip(step.graph.outputs, kind.outputs, strict=True):
            found[name][area(tile.writes[name])] = values[inner]
    return found


def area(box: Box) -> tuple[slice, ...]:
    """Return the index of rows and columns of (n, c, h, w)."""
    return (slice(None), slice(None), *(slice(*r) for r in box))
