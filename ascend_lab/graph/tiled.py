"""Huge inputs: feature maps that exceed the device memory are computed tile by tile, with halos."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError
from ascend_lab.graph.compile import Front, finish_stages
from ascend_lab.graph.counts import peak_bytes
from ascend_lab.graph.evaluate import Values, checked_inputs, evaluate
from ascend_lab.graph.fusion import Fused, fuse, unfused
from ascend_lab.graph.ir import Graph, Node
from ascend_lab.graph.network import NetworkTimeline, OperatorTime, simulate_graph
from ascend_lab.graph.placement import constant_bytes, lifetimes
from ascend_lab.graph.switches import Switches
from ascend_lab.graph.tasks import Compiled, compile_tasks
from ascend_lab.graph.tiling import Box, Step, Tile, Tiled, tile_graph
from ascend_lab.ops.formats import numpy_type

# Running a tiled network in NumPy: slice, compute, paste.


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


# How long a network takes whose feature maps are tiled.
#
#     time = sum over steps of (time of the step, or sum over kinds of tiles * (copies + kernels))
#
# A tile's inputs are copied out of the whole tensors in device memory, its outputs back into
# them;
# a copy back is timed as the copy that reads the same piece. Every step and tile meets a cold L2.
# Transfers between host and device are not counted, as for networks that are not tiled.


KERNEL_PIXELS = 2**24
"""Most pixels of a feature map that one convolution computes: rows of its matrix product."""


@dataclass(frozen=True, slots=True)
class TiledTimeline(NetworkTimeline):
    """The times of a tiled network; `operators` repeats what runs for every tile."""

    tiles: int
    halo_share: float
    peak_bytes: int
    limit_bytes: int
    fused: Fused

    def repeated(self) -> list[tuple[OperatorTime, int]]:
        """Return every kernel once, and how often it runs."""
        counts = Counter(map(id, self.operators))
        return [(op, counts[i]) for i, op in {id(op): op for op in self.operators}.items()]

    def summary(self) -> dict[str, Any]:
        """Return the numbers as plain data: each kernel once, with its count and all its time."""
        rows = [
            {**op.summary(), "time_s": op.time_s * count, "count": count}
            for op, count in self.repeated()
        ]
        sizes = {"peak_bytes": self.peak_bytes, "limit_bytes": self.limit_bytes}
        tiles = {"tiles": self.tiles, "halo_share": self.halo_share}
        return {**NetworkTimeline.summary(self), "operators": rows, **tiles, **sizes}


def tile_for(front: Front, chip: Chip, limit_bytes: int | None = None) -> Tiled:
    """Return a graph with layouts as steps within the chip's memory, or within a limit.

    Raises `CapacityError` if tiles do not help. Without need for tiles `tile_count` is 0.
    """
    limit = chip.device_memory.size_bytes if limit_bytes is None else limit_bytes
    return tile_graph(front.laid_out, limit, most_pixels=KERNEL_PIXELS)


def simulate_within(
    front: Front,
    chip: Chip,
    limit_bytes: int | None = None,
    *,
    fusion: bool = True,
    switches: Switches | None = None,
) -> tuple[NetworkTimeline, Fused]:
    """Time a network whole where it fits the chip's memory, or a limit, else in tiles.

    Returns the fusion report too. Raises `CapacityError` if neither fits.
    """
    limit = chip.device_memory.size_bytes if limit_bytes is None else limit_bytes
    try:
        tiled = tile_for(front, chip, limit)
        if tiled.tile_count:
            times = simulate_tiled(tiled, chip, fusion=fusion, switches=switches)
            return times, times.fused
        problem = None
    except CapacityError as error:
        problem = error
    stages = finish_stages(front, chip, fusion=fusion, switches=switches)
    if problem and planned_bytes(stages.compiled) > limit:  # fusion may have saved what lacked
        raise problem
    return simulate_graph(stages.compiled), stages.fused


def planned_bytes(compiled: Compiled) -> int:
    """Return the most bytes alive while a compiled network runs, constants included."""
    change: Counter[int] = Counter()
    for life in lifetimes(compiled):
        change[life.first] += life.size_bytes
        change[life.last + 1] -= life.size_bytes
    live = accumulate(change[i] for i in range(len(compiled.tasks)))
    return sum(constant_bytes(compiled).values()) + max(live, default=0)


def simulate_tiled(
    tiled: Tiled, chip: Chip, *, fusion: bool = True, switches: Switches | None = None
) -> TiledTimeline:
    """Time a tiled graph with layouts; raises as `compile_tasks` and `simulate_graph`."""
    work = _Timer(chip, fusion, switches)
    for step in tiled.steps:
        work.add(step)
    return TiledTimeline(
        tiled.graph.name,
        chip,
        tuple(work.operators),
        work.written_back_bytes,
        tiled.tile_count,
        tiled.halo_share,
        tiled.peak_bytes,
        tiled.limit_bytes,
        Fused((), work.counts),
    )


class _Timer:
    """The kernels of the steps so far, each tile's in order."""

    def __init__(self, chip: Chip, fusion: bool, switches: Switches | None) -> None:
        self.chip, self.fusion, self.switches = chip, fusion, switches
        self.operators: list[OperatorTime] = []
        self.written_back_bytes = 0
        self.counts: dict[str, Any] = {}
        self.copies: dict[str, NetworkTimeline] = {}

    def add(self, step: Step) -> None:
        """Append a step."""
        if not step.tiles:
            self.append(self.timed(step.graph))
            return
        kinds = [self.timed(kind) for kind in step.kinds]
        for kind, times in enumerate(kinds):
            prefix = f"tile{kind}"
            kinds[kind] = replace(times, operators=tuple(
                replace(op, name=f"{prefix}/{op.name}") for op in times.operators
            ))  # fmt: skip
        for tile in step.tiles:
            for name, box in tile.reads.items():
                self.append(self.copied(step.graph, name, box, "slice"))
            self.append(kinds[tile.kind])
            for name, box in tile.writes.items():
                self.append(self.copied(step.graph, name, box, "paste"))

    def append(self, times: NetworkTimeline) -> None:
        """Append the kernels of a part."""
        self.operators += times.operators
        self.written_back_bytes += times.written_back_bytes

    def timed(self, graph: Graph) -> NetworkTimeline:
        """Return the times of a graph on its own."""
        fused = fuse(graph, self.chip, self.switches) if self.fusion else unfused(graph)
        for name, count in fused.counts.items():
            old = self.counts.get(name)
            self.counts[name] = count if old is None else replace(
                old,
                match_times=old.match_times + count.match_times,
                effect_times=old.effect_times + count.effect_times,
            )  # fmt: skip
        return simulate_graph(compile_tasks(graph, self.chip, fused.groups))

    def copied(self, graph: Graph, name: str, box: Box, verb: str) -> NetworkTimeline:
        """Return the time of a copy between a whole tensor and a tile's part of it."""
        kind = graph.types[name]
        (top, bottom), (left, right) = box
        title = f"{verb} {name} {bottom - top}x{right - left}"
        if title not in self.copies:
            part = replace(kind, shape=(*kind.shape[:2], bottom - top, right - left))
            attrs = {"begin": (0, 0, 0, 0), "end": part.shape}
            node = Node(title, "slice", (name,), ("part",), attrs)
            small = Graph(title, (name,), ("part",), (node,), {name: kind, "part": part})
            self.copies[title] = simulate_graph(compile_tasks(small, self.chip, ((node,),)))
        return self.copies[title]


__all__ = [
    "Step",
    "Tile",
    "Tiled",
    "TiledTimeline",
    "evaluate_tiled",
    "peak_bytes",
    "simulate_tiled",
    "simulate_within",
    "tile_for",
    "tile_graph",
]
