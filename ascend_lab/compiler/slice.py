"""Computes, for a part of a graph's outputs, the range of every tensor that it needs.

An operator's slice rule maps an axis of its result to axes of its operands, and a range of the
result to the ranges that it needs: rows 8 .. 15 after a 3 x 3 convolution need rows 7 .. 16. A walk
applies these rules from the outputs backwards. It serves tiles that fit memory and slices that fit
L2.

Ranges end at the borders of a tensor; a piece has padding only where it reaches beyond a border. A
grid of tiles is a list of walks along rows and a list along columns. `Grid` takes the fewest tiles
that fit memory, because every tile computes its halo again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from ascend_lab.compiler.draft import Draft, given_attrs
from ascend_lab.compiler.ir import Graph, Node, operator_of, pixels, rules_of, verify
from ascend_lab.compiler.lower.piece import read_outside
from ascend_lab.compiler.placement import live_bytes
from ascend_lab.errors import AscendLabError, InputError, ShapeError
from ascend_lab.operators.ops.slicing import AxisRule, Cut, Range, SliceRules, cut

Rules = Mapping[str, SliceRules]
"""Slice rules of every node of a graph, by name, at its full shapes."""


def all_rules(graph: Graph) -> Rules:
    """Return the slice rules of every node."""
    return {node.name: rules_of(graph, node) for node in graph.nodes}


def part_of(graph: Graph, nodes: Sequence[Node], name: str) -> Graph:
    """Return consecutive nodes as a graph; its outputs are the tensors read outside of it."""
    written = {n: None for node in nodes for n in node.outputs}
    read = {n: None for node in nodes for n in node.inputs if n not in written}
    constants = {n: graph.constants[n] for n in read if n in graph.constants}
    inputs = tuple(n for n in read if n not in constants)
    types = {n: graph.types[n] for n in (*read, *written)}
    outs = tuple(read_outside(graph, nodes))
    return Graph(name, inputs, outs, tuple(nodes), types, constants)


def hull(ranges: Iterable[Range]) -> Range:
    """Return the smallest range that contains all of these."""
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)


# -- ranges ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Walk:
    """One piece of the outputs, and everything it needs.

    axes            the axis along which each tensor is cut; tensors without one are read whole
    output_ranges   the ranges of the outputs
    need            the range of every tensor
    parts           how every node is cut
    """

    axes: Mapping[str, int]
    output_ranges: Mapping[str, Range]
    need: Mapping[str, Range]
    parts: Mapping[str, Cut]

    def within_piece(self, name: str, span: Range) -> Range:
        """Return a range of a tensor, counted from the first entry of the piece's range."""
        return span[0] - self.need[name][0], span[1] - self.need[name][0]

    def width(self, name: str) -> int:
        """Return how many entries of a tensor the piece needs."""
        return self.need[name][1] - self.need[name][0]


def walk(
    graph: Graph, rules: Rules, axes: Mapping[str, int], output_ranges: Mapping[str, Range]
) -> Walk:
    """Return what these ranges of the outputs need; raise `ShapeError` if it is only padding."""
    need = dict(output_ranges)
    parts = {}
    # backward: all readers of a tensor have said which range they need before its writer is cut
    for node in reversed(graph.nodes):
        span = hull(need[name] for name in node.outputs if name in need)
        need.update(dict.fromkeys(node.outputs, span))
        parts[node.name] = cut_node(graph, node, rules[node.name], axes, span)
        for name, ranges in zip(node.inputs, parts[node.name].ranges, strict=True):
            if axes.get(name) in ranges:
                # two readers of a tensor: the piece has the hull of both ranges
                need[name] = hull(r for r in (need.get(name), ranges[axes[name]]) if r)
    return Walk(axes, output_ranges, need, parts)


def cut_node(
    graph: Graph, node: Node, rules: SliceRules, axes: Mapping[str, int], span: Range
) -> Cut:
    """Return the ranges of its inputs that a range of a node's results needs."""
    axis, _ = split_rule(node, rules, axes)
    return cut(rules, [t.shape for t in graph.in_types(node)], node.attrs, axis, span)


def split_rule(node: Node, rules: SliceRules, axes: Mapping[str, int]) -> tuple[int, AxisRule]:
    """Return the axis of a node's first output that is cut, and its rule.

    Raises `InputError` where the operator does not split along it.
    """
    place, name = next((i, n) for i, n in enumerate(node.outputs) if n in axes)
    for axis, rule in enumerate(rules.axes):
        if rule.joins[place] == axes[name] and rule.splits:
            return axis, rule
    reasons = {r.reason for r in rules.axes if r.joins[place] == axes[name]}
    got = f"{node.name} ({node.op}): {' '.join(reasons) or 'no such axis'}"
    raise InputError(f"axis {axes[name]} of {name} in slices", got, "end the region before it")


# -- tiles: one walk for rows, one for columns ----------------------------------------------------
ROWS = 2
COLUMNS = 3
"""Axes of (n, c, h, w)."""


def tile_key(graph: Graph, walked: Walk, axis: int) -> object:
    """Return a key along one axis: tiles with equal keys have the same graph."""
    nodes = []
    for node in graph.nodes:
        node_cut = walked.parts[node.name]
        reads = zip(node.inputs, node_cut.ranges, strict=True)
        reads_inside = tuple(walked.within_piece(n, r[axis]) for n, r in reads if axis in r)
        nodes.append((repr(sorted(node_cut.attrs.items())), reads_inside))
    widths = tuple(map(walked.width, walked.need))
    return (
        tuple(nodes),
        widths,
        tuple(walked.within_piece(n, r) for n, r in walked.output_ranges.items()),
    )


def tile_graph_of(graph: Graph, rows: Walk, cols: Walk, name: str) -> Graph:
    """Return the graph of a tile, with its outputs in the order of the whole graph's.

    Rows and columns are independent: a walk for each of them describes the tile. If readers need
    different ranges of a tensor, a `slice` cuts out what each needs.
    """
    draft = Draft(graph, nodes=())

    def part(tensor: str, row_range: Range, column_range: Range) -> str:
        tile_rows = rows.within_piece(tensor, row_range)
        tile_columns = cols.within_piece(tensor, column_range)
        return _part(draft, tensor, tile_rows, tile_columns)

    for tensor in rows.need:
        kind = graph.types[tensor]
        sizes = (*kind.shape[:2], rows.width(tensor), cols.width(tensor))
        draft.types[tensor] = replace(kind, shape=sizes)
    for node in graph.nodes:
        by_rows = rows.parts[node.name]
        shapes = [
            (*t.shape[:2], r[ROWS][1] - r[ROWS][0], *t.shape[3:]) if ROWS in r else t.shape
            for t, r in zip(graph.in_types(node), by_rows.ranges, strict=True)
        ]
        # the node's rules for columns, after its rows have been cut
        rules = operator_of(node.op).slice_rules(shapes, by_rows.attrs)
        by_columns = cut(rules, shapes, by_rows.attrs, COLUMNS, cols.need[node.output])
        reads = list[str]()
        for tensor, r, c in zip(node.inputs, by_rows.ranges, by_columns.ranges, strict=True):
            is_cut = ROWS in r
            reads.append(part(tensor, r[ROWS], c[COLUMNS]) if is_cut else tensor)
        attrs = given_attrs(node.op, dict(by_columns.attrs))
        tile_node = replace(node, inputs=tuple(reads), attrs=attrs)
        draft.put(tile_node, *(draft.types[n] for n in node.outputs))
    outs = tuple(part(n, rows.output_ranges[n], cols.output_ranges[n]) for n in graph.outputs)
    read = {n for node in draft.nodes.values() for n in node.inputs} | set(outs)
    constants = {n: c for n, c in graph.constants.items() if n in read}
    nodes = tuple(draft.nodes.values())
    return Graph(name, graph.inputs, outs, nodes, draft.types, constants)


def _part(draft: Draft, tensor: str, rows: Range, columns: Range) -> str:
    """Return the tensor with these rows and columns of an image; equal ranges share a tensor."""
    (top, bottom) = rows
    (left, right) = columns
    kind = draft.types[tensor]
    begin = (0, 0, top, left)
    end = (*kind.shape[:2], bottom, right)
    if (begin, end) == ((0, 0, 0, 0), kind.shape):
        return tensor
    cut_name = f"{tensor}.{top}_{bottom}_{left}_{right}"
    if cut_name not in draft.types:
        shape = (*kind.shape[:2], bottom - top, right - left)
        node = Node(cut_name, "slice", (tensor,), (cut_name,), {"begin": begin, "end": end})
        draft.put(node, replace(kind, shape=shape))
    return cut_name


# -- grids of tiles -------------------------------------------------------------------------------
Box = tuple[Range, Range]
"""Rows and columns."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile: the rows and columns that it reads and writes of each image.

    `kind` is the index of its graph in `Step.kinds`.
    """

    kind: int
    reads: Mapping[str, Box]
    writes: Mapping[str, Box]


@dataclass(frozen=True, slots=True)
class Step:
    """Consecutive nodes that run whole, or once for every tile; equal tiles share a graph."""

    graph: Graph
    kinds: tuple[Graph, ...] = ()
    tiles: tuple[Tile, ...] = ()


def obstacle(graph: Graph, node: Node) -> str:
    """Return why a node cannot be computed tile by tile, or "" if it can."""
    if any(len(t.shape) != 4 or t.shape[2] * t.shape[3] == 1 for t in graph.out_types(node)):
        return "its result is no image (n, c, h, w)"
    try:
        rules = rules_of(graph, node)
    except AscendLabError as error:
        return str(error)
    # an operand that broadcasts along only one of rows and columns would be cut along the other
    cut_inputs = []
    for axis in (ROWS, COLUMNS):
        rule = rules.axes[axis]
        if not rule.splits or set(rule.joins) != {axis}:
            return f"axis {axis}: {rule.reason or 'pieces cannot be joined'}"
        if rule.grain != 1 or any(s.axis != axis or s.grain != 1 for s in rule.sources):
            return f"axis {axis} comes from another axis"
        cut_inputs.append({node.inputs[s.input] for s in rule.sources})
    if cut_inputs[0] != cut_inputs[1] or any(name in graph.constants for name in cut_inputs[0]):
        return "an operand is repeated along one axis only, or a constant image"
    return ""


def whole_inputs(graph: Graph, node: Node) -> set[str]:
    """Return the activations that every tile of a node reads whole."""
    cut_up = {node.inputs[s.input] for s in rules_of(graph, node).axes[ROWS].sources}
    return {n for n in node.inputs if n not in cut_up and n not in graph.constants}


class Grid:
    """The possible grids of tiles for a graph, and which of them fit into `limit_bytes`.

    `max_pixels` limits the pixels of a feature map that one convolution writes; None: any number.
    `max_counts` are the rows and columns of tiles of the finest grid.
    """

    def __init__(self, graph: Graph, limit_bytes: int, max_pixels: int | None) -> None:
        self.graph = graph
        self.limit_bytes = limit_bytes
        self.max_pixels = max_pixels
        self.rules = all_rules(graph)
        shapes = [graph.types[n].shape for n in graph.outputs]
        axes = (ROWS, COLUMNS)
        self.max_counts = [len(self.bounds(a, max(s[a] for s in shapes))) for a in axes]
        self.cache: dict[tuple[int, int], Walk | None] = {}

    def bounds(self, axis: int, count: int) -> list[dict[str, Range]]:
        """Return what each of about `count` tiles along an axis writes of every output.

        Borders between tiles are at multiples of one entry of the coarsest tensor: with a stride
        of 2, at even rows. So most tiles are equal. The last tile takes the remainder.
        """
        types = self.graph.types
        names = self.graph.outputs
        # entries of the coarsest tensor; each corresponds to one or more entries of an output
        coarse = min(types[n].shape[axis] for node in self.graph.nodes for n in node.outputs)
        size = {n: types[n].shape[axis] for n in names}
        grain = {n: -(-size[n] // coarse) for n in names}
        units = max(-(-size[n] // grain[n]) for n in names)
        step = -(-units // count)
        inner = [u for u in range(step, units, step) if all(u * grain[n] < size[n] for n in names)]
        cuts = [0, *inner, units]
        return [
            {n: (low * grain[n], min(high * grain[n], size[n])) for n in names}
            for low, high in pairwise(cuts)
        ]

    def walk(self, axis: int, output_ranges: Mapping[str, Range]) -> Walk:
        """Return the walk of a tile along an axis."""
        return walk(self.graph, self.rules, dict.fromkeys(self.graph.types, axis), output_ranges)

    def largest(self, axis: int, count: int) -> Walk | None:
        """Return the largest of about `count` tiles along an axis; None if they cannot be cut."""
        if (axis, count) not in self.cache:
            bounds = self.bounds(axis, count)
            # tiles differ at borders only: first, second, middle and last include the largest
            samples = {0, min(1, len(bounds) - 1), len(bounds) // 2, len(bounds) - 1}
            try:
                walks = [self.walk(axis, bounds[i]) for i in samples]
                largest = max(walks, key=lambda w: sum(map(w.width, w.need)))
            except ShapeError:  # a tile would read padding only
                largest = None
            self.cache[axis, count] = largest
        return self.cache[axis, count]

    def tile(self, rows: int, cols: int) -> Graph | None:
        """Return the largest tile of a grid; None if the grid cannot be cut."""
        row = self.largest(ROWS, rows)
        col = self.largest(COLUMNS, cols)
        return tile_graph_of(self.graph, row, col, "tile") if row and col else None

    def smallest(self) -> int:
        """Return the bytes of a tile of the finest grid, or more than fit if there is none."""
        tile = self.tile(*self.max_counts)
        return max(live_bytes(tile)) if tile else self.limit_bytes + 1

    def fits(self, rows: int, cols: int) -> bool:
        """Tell whether the tiles of a grid fit into memory, and their results into kernels."""
        tile = self.tile(rows, cols)
        if tile is None or max(live_bytes(tile)) > self.limit_bytes:
            return False
        return not self.max_pixels or max(pixels(tile, n) for n in tile.nodes) <= self.max_pixels

    def least(self) -> Step | None:
        """Return the grid with the fewest tiles that fit; of several, that with the least halo."""
        best = self.max_counts[0] * self.max_counts[1] + 1
        grids = list[tuple[int, int]]()
        rows = 1 if self.fits(*self.max_counts) else best
        while rows <= min(self.max_counts[0], best):
            # more columns than this would make more tiles than the best grid so far
            cols = self.columns(rows, min(self.max_counts[1], best // rows))
            if cols and rows * cols <= best:
                grids = [g for g in grids if g[0] * g[1] == rows * cols] + [(rows, cols)]
                best = rows * cols
            # beyond 8 rows the steps grow by an eighth, to try fewer grids
            rows = max(rows + 1, rows * 9 // 8)
        if not grids:
            return None
        max_rows, max_columns = self.max_counts

        def halo(grid: tuple[int, int]) -> tuple[int, int]:
            # the length of all borders, in units of the finest grid: 2 x 3 tiles have less halo
            # than 1 x 6; of equal grids the one with most rows, as its tiles have longer rows
            return grid[0] * max_columns + grid[1] * max_rows, -grid[0]

        return self.step(*min(grids, key=halo))

    def columns(self, rows: int, max_columns: int) -> int:
        """Return the fewest columns that fit with `rows` rows of tiles; 0 beyond `max_columns`."""
        low = 1
        high = max_columns
        # more columns are smaller tiles, which fit if larger ones do: bisection is right
        if max_columns < 1 or not self.fits(rows, max_columns):
            return 0
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.fits(rows, middle) else (middle + 1, high)
        return high

    def step(self, rows: int, cols: int) -> Step:
        """Return a grid as a step; tiles with equal keys share a graph."""
        graph = self.graph
        kinds = list[Graph]()
        tiles = list[Tile]()
        kind_of: dict[object, int] = {}
        keyed_walks = []
        for axis, count in ((ROWS, rows), (COLUMNS, cols)):
            walks = [self.walk(axis, output_ranges) for output_ranges in self.bounds(axis, count)]
            keyed_walks.append([(w, tile_key(graph, w, axis)) for w in walks])
        for (row, row_key), (col, col_key) in product(*keyed_walks):
            key = (row_key, col_key)
            if key not in kind_of:
                kind_of[key] = len(kinds)
                name = f"{graph.name}.tile{len(kinds)}"
                kinds.append(verify(tile_graph_of(graph, row, col, name)))
            reads = {n: (row.need[n], col.need[n]) for n in graph.inputs if n in row.need}
            writes = {n: (row.output_ranges[n], col.output_ranges[n]) for n in graph.outputs}
            tiles.append(Tile(kind_of[key], reads, writes))
        return Step(graph, tuple(kinds), tuple(tiles))
