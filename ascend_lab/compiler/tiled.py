"""Chooses which part of a network to compute in tiles if memory is too small, and times it.

    bytes(tile) = weights + tensors resident while tiles are computed + peak of one tile
    time = sum over steps of (time of the step, or of all its tiles: copies + kernels)

The resident tensors are those that the tiled part reads and writes, whole, and those that later
nodes still need. A tile's inputs are copied out of the whole tensors in device memory, its outputs
back into them; a copy back is timed as the copy that reads the same piece. L2 is empty at the start
of every step and tile. Transfers between host and device are not counted, as elsewhere.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ascend_lab.compiler import draft, fusion, placement, tasks
from ascend_lab.compiler.compile import DEFAULT_ROAD, Front, Road, finish_stages
from ascend_lab.compiler.counts import macs
from ascend_lab.compiler.ir import SMALL_PIXELS, Graph, Node
from ascend_lab.compiler.layout import images_outermost
from ascend_lab.compiler.network import NetworkTimeline, OperatorTime, simulate_graph
from ascend_lab.compiler.placement import KERNEL_PIXELS, live_bytes, too_large, weight_bytes
from ascend_lab.compiler.rules import SMALL_FIRST_LAYERS
from ascend_lab.compiler.slice import Box, Grid, Step, obstacle, part_of, whole_inputs
from ascend_lab.errors import CapacityError
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.ops.slicing import Range

BALANCE = 256
"""Multiply-accumulates in the time in which device memory moves an element, roughly.

`work` adds them for each element that a graph writes.
"""
INNER_ENDS = 4
"""Most places between the first and the last at which a tiled part is tried to end."""


# -- what tiles cost -----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tiled:
    """A network as a list of steps; `peak_bytes` is the memory they need, weights included."""

    graph: Graph
    steps: tuple[Step, ...]
    limit_bytes: int
    peak_bytes: int

    @property
    def tile_count(self) -> int:
        """Number of tiles; 0 if everything runs whole."""
        return sum(len(step.tiles) for step in self.steps)

    @property
    def halo_share(self) -> float:
        """Share of multiply-accumulates that tiles compute again: tiled / whole - 1.

        For a network without multiply-accumulates it is the share of `work`.
        """
        # a network of poolings has no multiply-accumulates: `work` counts its elements
        count = macs if macs(self.graph) else work
        return sum(_sum(step, count) for step in self.steps) / max(1, count(self.graph)) - 1.0


def work(graph: Graph) -> int:
    """Return a graph's multiply-accumulates, plus `BALANCE` for each element that it writes."""
    written = sum(graph.types[n].elements for node in graph.nodes for n in node.outputs)
    return macs(graph) + BALANCE * written


def _sum(step: Step, count: Callable[[Graph], int]) -> int:
    counts = [count(kind) for kind in step.kinds]
    return sum(counts[tile.kind] for tile in step.tiles) if step.tiles else count(step.graph)


def _extra(step: Step) -> int:
    """Return the cost of tiles: what they compute again and the copies in and out."""
    # every tile copies its inputs in and its outputs out
    copied = _sum(step, lambda g: sum(g.types[n].elements for n in (*g.inputs, *g.outputs)))
    return _sum(step, work) - work(step.graph) + BALANCE * copied


# -- which part -----------------------------------------------------------------------------------
def tile_graph(graph: Graph, limit_bytes: int, *, most_pixels: int | None = None) -> Tiled:
    """Return the graph as steps whose peak is within a limit; only large nodes are tiled.

    `most_pixels` bounds the pixels, of all images together, that one convolution writes.
    Raises `CapacityError` that says which node does not fit and why it cannot be tiled.
    """
    graph = draft.pruned(graph)
    live = live_bytes(graph)
    large = too_large(graph, limit_bytes, most_pixels)
    chosen: list[_Part] = []
    # a network that fits has no large node: nothing is tiled
    for start, end in _runs(graph, large) if large else ():
        large_in_run = [i for i in large if start <= i < end]
        if large_in_run:
            chosen += _parts(graph, start, end, large_in_run, limit_bytes, most_pixels)
    steps = list[Step]()
    done = 0
    for part in chosen:
        steps += [*_whole(graph, done, part.start), part.step]
        done = part.stop
    steps += _whole(graph, done, len(graph.nodes))
    # inside a tiled part, what a node needs whole does not count: its tiles do
    inside = {i for part in chosen for i in range(part.start, part.stop)}
    peaks = [live_at for i, live_at in enumerate(live) if i not in inside]
    peaks += [part.peak_bytes for part in chosen]
    return Tiled(graph, tuple(steps), limit_bytes, weight_bytes(graph) + max(peaks))


def _whole(graph: Graph, start: int, end: int) -> list[Step]:
    nodes = graph.nodes[start:end]
    if nodes == graph.nodes:
        return [Step(graph)]
    return [Step(part_of(graph, nodes, f"{graph.name}.{start}"))] if nodes else []


def _runs(graph: Graph, large: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive nodes that may share tiles.

    Raises `CapacityError` for a large node that is in no such range.
    """
    start = 0
    written = set[str]()
    for i, node in enumerate(graph.nodes):
        reason = obstacle(graph, node)
        # an operator that reads a tensor whole cannot share tiles with the tensor's writer
        if reason or whole_inputs(graph, node) & written:
            if start < i:
                yield start, i
            start = i + bool(reason)
            written = set()
        if reason and i in large:
            live = live_bytes(graph)[i]
            raise CapacityError(
                f"device memory for {live} B of activations while {node.name} ({node.op}) runs",
                f"an operator that cannot be computed in tiles: {reason}",
                "use a chip with more memory or a smaller input",
            )
        written |= set() if reason else set(node.outputs)
    if start < len(graph.nodes):
        yield start, len(graph.nodes)


@dataclass(frozen=True, slots=True)
class _Part:
    """Nodes start .. stop-1 in tiles, and the peak of activations while they run."""

    start: int
    stop: int
    step: Step
    peak_bytes: int


def _parts(
    graph: Graph, start: int, end: int, large: Sequence[int], limit: int, pixels: int | None
) -> list[_Part]:
    """Return the tiled parts of a run: one for all large nodes, or one for each group of them."""
    # groups of adjacent large nodes: 3, 4, 9 are (3, 4) and (9)
    firsts = [i for i in large if i - 1 not in large]
    lasts = [i for i in large if i + 1 not in large]
    as_one_part = [(start, large[-1], end)]
    part_per_group = list(zip(firsts, lasts, [*firsts[1:], end], strict=True))
    candidates = list[list[_Part]]()
    problem = None
    divisions = [as_one_part]
    if part_per_group != as_one_part:
        divisions.append(part_per_group)
    for ends_of_parts in divisions:
        try:
            candidates.append([_part(graph, *ends, limit, pixels) for ends in ends_of_parts])
        except CapacityError as error:
            # the first error is about the whole run: that one is reported
            problem = problem or error
    if not candidates:
        raise problem or AssertionError
    return min(candidates, key=lambda parts: sum(_extra(part.step) for part in parts))


def _part(graph: Graph, start: int, last: int, end: int, limit: int, pixels: int | None) -> _Part:
    """Return the part from node `start` to a node after `last` that computes least again.

    It ends at `end` at the latest: right after the last large node or where the tensors alive are
    small, but never before an elementwise node, which is fused with the node before it.
    """
    weights = weight_bytes(graph)
    alive = placement.node_spans(graph)
    candidates = list[_Part]()
    least_bytes = list[int]()
    # an elementwise node is fused with the node before it if both are in the same part
    stops = [s for s in range(last + 1, end) if not graph.nodes[s].has("lanes")]
    for stop in _ends(graph, alive, start, [*stops, end]):
        sub = part_of(graph, graph.nodes[start:stop], f"{graph.name}.{start}")
        live_outside = {
            n for n, (a, b) in alive.items() if b >= start and (a < start or n in graph.inputs)
        }
        resident = sum(
            graph.types[n].size_bytes for n in {*sub.inputs, *sub.outputs, *live_outside}
        )
        grid = Grid(sub, limit - weights - resident, pixels)
        step = grid.least()
        if step:
            peak = resident + max(max(live_bytes(kind)) for kind in step.kinds)
            candidates.append(_Part(start, stop, step, peak))
        least_bytes.append(weights + resident + grid.smallest())
    if not candidates:
        needed_bytes = min(*least_bytes, placement.peak_bytes(graph))
        raise CapacityError(
            f"{graph.name}: about {needed_bytes} B of device memory "
            f"for {graph.nodes[start].name} .. {graph.nodes[last].name} whole or in the smallest "
            f"tiles, {weights} B of it weights",
            f"{limit} B",
            "use a chip with more memory or a smaller input",
        )
    # of equally good parts the shortest: more of the network runs without tiles
    return min(candidates, key=lambda part: (_extra(part.step), part.stop))


def _ends(graph: Graph, alive: Mapping[str, Range], start: int, stops: Sequence[int]) -> list[int]:
    """Return the first and the last stop, and some at which the bytes that cross have a minimum.

    Bytes cross a stop if nodes from `start` on write them and nodes at or after the stop read them.
    """

    def crossing(stop: int) -> int:
        written = (n for n, (a, b) in alive.items() if start <= a < stop)
        needed = (n for n in written if alive[n][1] >= stop or n in graph.outputs)
        return sum(graph.types[n].size_bytes for n in needed if n not in graph.inputs)

    cost = [crossing(stop) for stop in stops]
    # local minima, such as after a pooling; only every n-th of them if there are many
    minima = [stops[i] for i in range(1, len(cost) - 1) if cost[i - 1] > cost[i] <= cost[i + 1]]
    inner = minima[:: -(-len(minima) // INNER_ENDS)] if minima else []
    return sorted({stops[0], *inner, stops[-1]})


# -- how long -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TiledTimeline(NetworkTimeline):
    """The times of a tiled network; `operators` lists each kernel of a tile once for each tile."""

    tiled: Tiled
    fused: fusion.Fused

    def repeated(self) -> list[tuple[OperatorTime, int]]:
        """Return every kernel once, and how often it runs."""
        # equal tiles share their `OperatorTime` objects: the id tells which kernels are equal
        counts = Counter(map(id, self.operators))
        return [(op, counts[i]) for i, op in {id(op): op for op in self.operators}.items()]

    def summary(self) -> dict[str, object]:
        """Return the numbers as plain data: each kernel once, with its count and total time."""
        rows = [
            {**op.summary(), "time_s": op.time_s * count, "count": count}
            for op, count in self.repeated()
        ]
        tiled = self.tiled
        tiles = {"tiles": tiled.tile_count, "halo_share": tiled.halo_share}
        sizes = {"peak_bytes": tiled.peak_bytes, "limit_bytes": tiled.limit_bytes}
        return {**NetworkTimeline.summary(self), "operators": rows, **tiles, **sizes}


def tile_for(
    front: Front, chip: Chip, limit_bytes: int | None = None, road: Road = DEFAULT_ROAD
) -> Tiled:
    """Return a graph with layouts as steps within the chip's memory, or within a limit.

    Raises `CapacityError` if tiles do not help. If no tiles are needed, `tile_count` is 0.
    Tiles may end at any column, but in images stored with 4 channels only at every fourth one;
    so first layers in tiles read images in blocks of 16 channels.
    """
    limit = chip.device_memory.size_bytes if limit_bytes is None else limit_bytes
    laid_out = images_outermost(front.laid_out)
    tiled = tile_graph(laid_out, limit, most_pixels=KERNEL_PIXELS)
    if tiled.tile_count and any(t.layout == SMALL_PIXELS for t in front.laid_out.types.values()):
        left_out = road.layouts.left_out | {SMALL_FIRST_LAYERS}
        plain = replace(road, layouts=replace(road.layouts, left_out=left_out))
        laid_out = images_outermost(plain.lay_out(plain.prepare(front.rewritten, chip), chip))
        tiled = tile_graph(laid_out, limit, most_pixels=KERNEL_PIXELS)
    return tiled


def simulate_within(
    front: Front, chip: Chip, limit_bytes: int | None = None, road: Road = DEFAULT_ROAD
) -> tuple[NetworkTimeline, fusion.Fused]:
    """Return the time of a network, in tiles if it exceeds the chip's memory or the limit.

    Also returns the report on fusion. Raises `CapacityError` if it does not fit in tiles either.
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
    # a fused group writes no tensor between its nodes, so that the network may fit after all
    if problem and placement.planned_bytes(stages.compiled) > limit:
        raise problem
    return stages.timeline(), stages.fused


def simulate_tiled(tiled: Tiled, chip: Chip, road: Road = DEFAULT_ROAD) -> TiledTimeline:
    """Return the time of a tiled graph with layouts.

    Raises as `compile_tasks` and `simulate_graph`.
    """
    work = _Timer(chip, road)
    for step in tiled.steps:
        work.add(step)
    first_operator = work.operators[:1]
    later_operators = work.operators[1:]
    return TiledTimeline(
        tiled.graph.name,
        chip,
        (
            *(replace(op, timeline=replace(op.timeline, start="cold")) for op in first_operator),
            *later_operators,
        ),
        work.written_back_bytes,
        tiled,
        fusion.Fused((), work.counts),
    )


class _Timer:
    """Collects the times of the kernels of all steps and tiles, in order."""

    def __init__(self, chip: Chip, road: Road) -> None:
        self.chip = chip
        self.road = road
        self.operators: list[OperatorTime] = []
        self.written_back_bytes = 0
        self.counts: dict[str, fusion.Count] = {}
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
        """Return the times of a graph on its own, with a prefix before the operators' names."""
        fused = self.road.fuse(graph, self.chip)
        for name, count in fused.counts.items():
            self.counts[name] = self.counts.get(name, fusion.Count()) + count
        times = simulate_graph(tasks.compile_tasks(graph, self.chip, fused.groups), first="queued")
        renamed = tuple(replace(op, name=f"{prefix}{op.name}") for op in times.operators)
        return replace(times, operators=renamed) if prefix else times

    def copied(self, graph: Graph, name: str, box: Box, verb: str) -> NetworkTimeline:
        """Return the time of a copy between a whole tensor and a tile's part of it."""
        kind = graph.types[name]
        (top, bottom), (left, right) = box
        title = f"{verb} {name} {bottom - top}x{right - left}"
        if title not in self.copies:
            tile_type = replace(kind, shape=(*kind.shape[:2], bottom - top, right - left))
            attrs = {"begin": (0, 0, 0, 0), "end": tile_type.shape}
            node = Node(title, "slice", (name,), ("part",), attrs)
            small = Graph(title, (name,), ("part",), (node,), {name: kind, "part": tile_type})
            copy = tasks.compile_tasks(small, self.chip, ((node,),))
            self.copies[title] = simulate_graph(copy, first="queued")
        return self.copies[title]
