"""Structured sparsity 4:2: of four neighbouring input channels two weights are kept.

    X Y stand for kept weights      0 X 0 Y   ->   X Y  and indexes 01, 10

Index 0 is the place of the first weight that is not 0 among elements 0..2, index 1 that of the last
among elements 1..3, counted from element 1; 0 where there is none. Where both name one element, the
second kept weight is 0. Sources: github hicann/amct, graph_based (the rule of the mask); hicann/ge,
docs, atc_tools, CLI_options/--sparsity.md (indexes, packed sizes, chips).
"""

from dataclasses import dataclass

import numpy as np

from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.graph import Constant, Draft, Graph, Node
from ascend_lab.graph.ir import Values

GROUP, KEPT = 4, 2
LEAST_CHANNELS = 3
"""Layers of fewer input channels are left alone."""
LAYERS = {"conv2d": 1, "matmul": 0, "gemm": 0}
"""Operators that can be sparse, and the axis of their weights along which input channels lie."""
CHIPS = ("Ascend910B2",)
"""Chips whose cube reads packed weights (A2, A3, 200I/500 A2 by the source)."""
INDEX_BITS = 2
"""Bits of an index; a group's first index lies in the lower bits, the first group of a byte too."""


# -- masks ----------------------------------------------------------------------------------------
def mask_of(weights: Values, axis: int = 1) -> Values:
    """Return 1 for the two weights of largest |w| in each group of 4 along an axis, else 0.

    A ragged last group is filled with zeros; of equal weights the later is kept. Fewer than 3
    channels keep all. Raises `InputError` for numbers that are not finite.
    """
    size = np.abs(np.asarray(weights, np.float64))
    if size.ndim == 0 or not np.isfinite(size).all():
        raise InputError("an array of finite weights", str(weights)[:40], "mend them")
    rows = np.moveaxis(size, axis, -1)
    if rows.shape[-1] < LEAST_CHANNELS:
        return np.ones(size.shape, np.uint8)
    filled = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % GROUP)])
    groups = filled.reshape((*rows.shape[:-1], -1, GROUP))
    rank = np.argsort(np.argsort(groups, axis=-1, kind="stable"), axis=-1, kind="stable")
    kept = (rank >= GROUP - KEPT).reshape(filled.shape)[..., : rows.shape[-1]]
    return np.ascontiguousarray(np.moveaxis(kept, -1, axis)).astype(np.uint8)


# -- packed weights -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Packed:
    """Sparse weights: `kept` (rows, groups, 2) in int8, `indexes` of the same shape, 0 to 2."""

    kept: Values
    indexes: Values

    @property
    def size_bytes(self) -> int:
        """Bytes of both: two weights and four bits for every four weights."""
        return self.kept.size + self.index_bytes().size

    def index_bytes(self) -> Values:
        """Return the indexes as they are stored: four a byte."""
        flat = self.indexes.reshape(-1)
        fours = np.pad(flat, (0, -flat.size % GROUP)).reshape(-1, GROUP).astype(np.uint8)
        found: Values = (fours << (INDEX_BITS * np.arange(GROUP, dtype=np.uint8))).sum(1)
        return found.astype(np.uint8)


def pack(rows: Values) -> Packed:
    """Pack int8 rows (rows, channels); raise `InputError` where a group has more than two weights.

    Channels are filled up to a multiple of 4.
    """
    given = np.asarray(rows)
    if given.ndim != 2 or given.dtype != np.int8:
        raise InputError("rows of int8 weights", f"{given.dtype} {given.shape}", "quantise them")
    groups = np.pad(given, ((0, 0), (0, -given.shape[1] % GROUP))).reshape(len(given), -1, GROUP)
    most = int((groups != 0).sum(-1).max(initial=0))
    if most > KEPT:
        raise InputError("at most 2 weights in a group of 4", str(most), "apply mask_of first")
    used = groups != 0
    head, tail = used[..., :3], used[..., 1:]
    first = np.where(head.any(-1), head.argmax(-1), 0)
    last = np.where(tail.any(-1), 2 - tail[..., ::-1].argmax(-1), 0)
    indexes = np.stack([first, last], -1)
    kept = np.take_along_axis(groups, indexes + np.array([0, 1]), -1)
    kept[..., 1] = np.where(first == last + 1, 0, kept[..., 1])
    return Packed(kept, indexes.astype(np.uint8))


def unpack(packed: Packed, channels: int) -> Values:
    """Return the rows (rows, channels) that were packed."""
    groups = np.zeros((*packed.kept.shape[:2], GROUP), np.int8)
    for place in (0, 1):
        at = packed.indexes[..., place : place + 1].astype(np.int64) + place
        old = np.take_along_axis(groups, at, -1)
        np.put_along_axis(groups, at, old + packed.kept[..., place : place + 1], -1)
    return groups.reshape(len(groups), -1)[:, :channels]


# -- graphs ---------------------------------------------------------------------------------------
def _axis(node: Node) -> int:
    return 1 - LAYERS[node.op] if node.attr("trans_b", False) else LAYERS[node.op]


def sparse_layers(graph: Graph) -> tuple[Node, ...]:
    """Return the convolutions in one group and the products of matrices with constant weights."""
    return tuple(
        node
        for node in graph.nodes
        if node.op in LAYERS
        and node.attr("groups", 1) == 1
        and node.inputs[1] in graph.constants
        and graph.types[node.inputs[1]].shape[_axis(node)] >= LEAST_CHANNELS
    )


def sparsified(graph: Graph) -> Graph:
    """Return the graph with the smaller two of four weights of its layers set to 0."""
    draft = Draft(graph)
    for node in sparse_layers(graph):
        old = graph.constants[node.inputs[1]]
        values = old.array()
        made = Constant(old.type, values * mask_of(values, _axis(node)).astype(values.dtype))
        sparse = draft.add(made, f"{node.inputs[1]}_sparse")
        draft.become(node, node.op, (node.inputs[0], sparse, *node.inputs[2:]), node.attrs)
    return draft.finish()


@dataclass(frozen=True, slots=True)
class SparseCost:
    """Bytes of a network's int8 weights, dense and packed, and what the smaller traffic saves.

    `saved_s` counts the bytes that need not cross the memory interface; the rate of the cube on
    packed weights is not published, and none is assumed.
    """

    dense_bytes: int
    packed_bytes: int
    saved_s: float


def sparse_cost(graph: Graph, chip: Chip | str) -> SparseCost:
    """Return what 4:2 saves on a chip; raise `UnsupportedError` where the cube cannot read it."""
    chip = load_chip(chip) if isinstance(chip, str) else chip
    if chip.name not in CHIPS:
        raise UnsupportedError(
            f"a chip that reads 4:2 weights ({', '.join(CHIPS)})", chip.name, "keep them dense"
        )
    dense = small = 0
    for node in sparse_layers(graph):
        shape = graph.types[node.inputs[1]].shape
        channels = shape[_axis(node)]
        rows, groups = int(np.prod(shape)) // channels, -(-channels // GROUP)
        dense += rows * channels
        small += rows * groups * KEPT + -(-rows * groups * KEPT // GROUP)
    return SparseCost(dense, small, max(dense - small, 0) / chip.device_memory.rate_bytes_per_s)
