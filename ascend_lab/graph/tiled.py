"""How long a network takes whose feature maps are tiled.

    time = sum over steps of (time of the step, or sum over kinds of tiles * (copies + kernels))

A tile's inputs are copied out of the whole tensors in device memory, its outputs back into them;
a copy back is timed as the copy that reads the same piece. Every step and tile meets a cold L2.
Transfers between host and device are not counted, as for networks that are not tiled.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError
from ascend_lab.graph.compile import DEFAULT_ROAD, Front, Road, finish_stages
from ascend_lab.graph.fusion import Count, Fused
from ascend_lab.graph.ir import SMALL_PIXELS, Graph, Node
from ascend_lab.graph.memory import peak_live_bytes
from ascend_lab.graph.network import NetworkTimeline, OperatorTime, simulate_graph
from ascend_lab.graph.placement import buffers_of, constant_bytes
from ascend_lab.graph.tasks import Compiled, compile_tasks
from ascend_lab.graph.tiling import Box, Step, Tiled, tile_graph

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


def tile_for(
    front: Front, chip: Chip, limit_bytes: int | None = None, road: Road = DEFAULT_ROAD
) -> Tiled:
    """Return a graph with layouts as steps within the chip's memory, or within a limit.

    Raises `CapacityError` if tiles do not help. Without need for tiles `tile_count` is 0. Tiles end
    at any column, pixels of 4 channels at every fourth: in tiles, first layers read whole blocks.
    """
    limit = chip.device_memory.size_bytes if limit_bytes is None else limit_bytes
    tiled = tile_graph(front.laid_out, limit, most_pixels=KERNEL_PIXELS)
    if tiled.tile_count and any(t.layout == SMALL_PIXELS for t in front.laid_out.types.values()):
        plain = replace(road, small=False)
        laid_out = plain.lay_out(plain.prepare(front.rewritten, chip), chip)
        tiled = tile_graph(laid_out, limit, most_pixels=KERNEL_PIXELS)
    return tiled


def simulate_within(
    front: Front, chip: Chip, limit_bytes: int | None = None, road: Road = DEFAULT_ROAD
) -> tuple[NetworkTimeline, Fused]:
    """Time a network whole where it fits the chip's memory, or a limit, else in tiles.

    Returns the fusion report too. Raises `CapacityError` if neither fits.
    """
    limit = chip.device_memory.size_bytes if limit_bytes is None else limit_bytes
    try:
        tiled = tile_for(front, chip, limit, road)
        if tiled.tile_count:
            times = simulate_tiled(tiled, chip, road)
            return times, times.fused
        problem = None
    except CapacityError as error:
        problem = error
    stages = finish_stages(front, chip, road)
    if problem and planned_bytes(stages.compiled) > limit:  # fusion may have saved what lacked
        raise problem
    return stages.timeline(), stages.fused


def planned_bytes(compiled: Compiled) -> int:
    """Return the most bytes alive while a compiled network runs, constants included."""
    return sum(constant_bytes(compiled).values()) + peak_live_bytes(buffers_of(compiled))


def simulate_tiled(tiled: Tiled, chip: Chip, road: Road = DEFAULT_ROAD) -> TiledTimeline:
    """Time a tiled graph with layouts; raises as `compile_tasks` and `simulate_graph`."""
    work = _Timer(chip, road)
    for step in tiled.steps:
        work.add(step)
    first, others = work.operators[:1], work.operators[1:]
    return TiledTimeline(
        tiled.graph.name,
        chip,
        (*(replace(op, timeline=replace(op.timeline, start="cold")) for op in first), *others),
        work.written_back_bytes,
        tiled.tile_count,
        tiled.halo_share,
        tiled.peak_bytes,
        tiled.limit_bytes,
        Fused((), work.counts),
    )


class _Timer:
    """The kernels of the steps so far, each tile's in order."""

    def __init__(self, chip: Chip, road: Road) -> None:
        self.chip, self.road = chip, road
        self.operators: list[OperatorTime] = []
        self.written_back_bytes = 0
        self.counts: dict[str, Count] = {}
        self.copies: dict[str, NetworkTimeline] = {}

    def add(self, step: Step) -> None:
        """Append a step."""
        if not step.tiles:
            self.append(self.timed(step.graph))
            return
        kinds = [self.timed(kind, f"tile{i}/") for i, kind in enumerate(step.kinds)]
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

    def timed(self, graph: Graph, prefix: str = "") -> NetworkTimeline:
        """Return the times of a graph on its own, its operators' names behind a prefix."""
        fused = self.road.fuse(graph, self.chip)
        for name, count in fused.counts.items():
            self.counts[name] = self.counts.get(name, Count()) + count
        times = simulate_graph(compile_tasks(graph, self.chip, fused.groups), first="queued")
        renamed = tuple(replace(op, name=f"{prefix}{op.name}") for op in times.operators)
        return replace(times, operators=renamed) if prefix else times

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
            copy = compile_tasks(small, self.chip, ((node,),))
            self.copies[title] = simulate_graph(copy, first="queued")
        return self.copies[title]
