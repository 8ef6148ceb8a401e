"""Structured sparsity 4:2: keeps two of the weights of each four neighbouring input channels.

The two of largest size stay. Packed, four weights take two bytes and two indexes of two bits:

    X Y stand for kept weights      0 X 0 Y   ->   X Y  and indexes 01, 10

Index 0 is the position of the first nonzero weight among elements 0..2, index 1 that of the last
nonzero weight among elements 1..3, counted from element 1; an index is 0 if there is no such
weight. If both name one element, the second kept weight is 0: 0 X 0 0 is packed as X 0 with
indexes 01, 00.

Sources: github hicann/amct, graph_based (the rule of the mask); hicann/ge, docs, atc_tools,
CLI_options/--sparsity.md (indexes, packed sizes, chips).
"""

from dataclasses import dataclass

import numpy as np

from ascend_lab.compiler import Graph, Node, ir
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import Constant
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip, load_chip

GROUP = 4
"""Number of weights in a group."""
KEPT = 2
"""Number of weights in a group that are kept."""
LEAST_CHANNELS = 3
"""Layers of fewer input channels are not made sparse."""
LAYERS = {"conv2d": 1, "matmul": 0, "gemm": 0}
"""Operators that can be sparse, and the axis of their weights along which input channels lie."""
CHIPS = ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4", "Ascend910C")
"""Chips whose cube reads packed weights (A2, A3, 200I/500 A2 by the source)."""
INDEX_BITS = 2
"""Bits of an index; the first index of a group and the first group of a byte use the lower bits."""


# -- masks ----------------------------------------------------------------------------------------
def mask_of(weights: ir.Values, axis: int = 1) -> ir.Values:
    """Return 1 for the two weights of largest |w| in each group of 4 along an axis, else 0.

    A last group of fewer is padded with zeros; of equal weights the later is kept. With fewer than
    3 channels all weights are kept. Raises `InputError` for numbers that are not finite.
    """
    size = np.abs(np.asarray(weights, np.float64))
    if size.ndim == 0 or not np.isfinite(size).all():
        raise InputError("an array of finite weights", str(weights)[:40], "correct them")
    rows = np.moveaxis(size, axis, -1)
    if rows.shape[-1] < LEAST_CHANNELS:
        return np.ones(size.shape, np.uint8)
    filled = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % GROUP)])
    groups = filled.reshape((*rows.shape[:-1], -1, GROUP))
    # Sorting the order gives ranks: sizes 5 9 1 7 have the order 2 0 3 1 and the ranks 1 3 0 2; the
    # weights of rank 2 and 3 stay.
    rank = np.argsort(np.argsort(groups, axis=-1, kind="stable"), axis=-1, kind="stable")
    stays = (rank >= GROUP - KEPT).reshape(filled.shape)[..., : rows.shape[-1]]
    return np.ascontiguousarray(np.moveaxis(stays, -1, axis)).astype(np.uint8)


# -- packed weights -------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Packed:
    """Sparse weights: `kept` (rows, groups, 2) in int8, `indexes` of the same shape, 0 to 2."""

    kept: ir.Values
    indexes: ir.Values

    @property
    def size_bytes(self) -> int:
        """Return the bytes of both: two weights and four bits of indexes for every four weights."""
        return self.kept.size + self.index_bytes().size

    def index_bytes(self) -> ir.Values:
        """Return the indexes as they are stored: four a byte."""
        indexes = self.indexes.reshape(-1)
        fours = np.pad(indexes, (0, -indexes.size % GROUP)).reshape(-1, GROUP).astype(np.uint8)
        # shifted by 0, 2, 4 and 6 bits they do not overlap: 1, 2, 0, 2 make 0b10_00_10_01
        shifts = INDEX_BITS * np.arange(GROUP, dtype=np.uint8)
        stored: ir.Values = (fours << shifts).sum(1)
        return stored.astype(np.uint8)


def pack(rows: ir.Values) -> Packed:
    """Pack int8 rows (rows, channels); raise `InputError` if a group has over two nonzero weights.

    Channels are padded to a multiple of 4.
    """
    rows_array = np.asarray(rows)
    if rows_array.ndim != 2 or rows_array.dtype != np.int8:
        raise InputError(
            "rows of int8 weights", f"{rows_array.dtype} {rows_array.shape}", "quantise them"
        )
    groups = np.pad(rows_array, ((0, 0), (0, -rows_array.shape[1] % GROUP))).reshape(
        len(rows_array), -1, GROUP
    )
    largest_count = int((groups != 0).sum(-1).max(initial=0))
    if largest_count > KEPT:
        raise InputError(
            "at most 2 weights in a group of 4", str(largest_count), "apply mask_of first"
        )
    used = groups != 0
    first_three = used[..., :3]
    last_three = used[..., 1:]
    # argmax of truth values is the place of the first True; of the reversed ones, of the last
    first_index = np.where(first_three.any(-1), first_three.argmax(-1), 0)
    last_index = np.where(last_three.any(-1), 2 - last_three[..., ::-1].argmax(-1), 0)
    indexes = np.stack([first_index, last_index], -1)
    # index 1 counts from element 1, so 1 is added to it
    kept = np.take_along_axis(groups, indexes + np.array([0, 1]), -1)
    # where both name one element, its weight is stored once
    kept[..., 1] = np.where(first_index == last_index + 1, 0, kept[..., 1])
    return Packed(kept, indexes.astype(np.uint8))


def unpack(packed: Packed, channels: int) -> ir.Values:
    """Return the rows (rows, channels) that were packed, without the padding of channels."""
    groups = np.zeros((*packed.kept.shape[:2], GROUP), np.int8)
    for number in (0, 1):
        weights = packed.kept[..., number : number + 1]
        elements = packed.indexes[..., number : number + 1].astype(np.int64) + number
        # added, not written: a second weight of 0 must not erase the first at the same element
        sums = np.take_along_axis(groups, elements, -1) + weights
        np.put_along_axis(groups, elements, sums, -1)
    return groups.reshape(len(groups), -1)[:, :channels]


# -- graphs ---------------------------------------------------------------------------------------
def _axis(node: Node) -> int:
    """Return the axis of a layer's weights along which its input channels lie."""
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
        constant = graph.constants[node.inputs[1]]
        values = constant.array()
        masked = Constant(constant.type, values * mask_of(values, _axis(node)).astype(values.dtype))
        sparse = draft.add(masked, f"{node.inputs[1]}_sparse")
        draft.become(node, node.op, (node.inputs[0], sparse, *node.inputs[2:]), node.attrs)
    return draft.finish()


@dataclass(frozen=True, slots=True)
class SparseCost:
    """Bytes of a network's int8 weights, dense and packed, and the seconds that packing saves.

    `saved_s` counts the bytes that need not cross the memory interface; the rate of the cube on
    packed weights is not published, and none is assumed.
    """

    dense_bytes: int
    packed_bytes: int
    saved_s: float


def sparse_cost(graph: Graph, chip: Chip | str) -> SparseCost:
    """Return the savings by 4:2 on a chip; raise `UnsupportedError` if its cube cannot read it."""
    chip = load_chip(chip) if isinstance(chip, str) else chip
    if chip.family not in CHIPS:
        raise UnsupportedError(
            f"a chip that reads 4:2 weights ({', '.join(CHIPS)})", chip.name, "keep them dense"
        )
    dense_bytes = 0
    packed_bytes = 0
    for node in sparse_layers(graph):
        shape = graph.types[node.inputs[1]].shape
        channels = shape[_axis(node)]
        rows = int(np.prod(shape)) // channels
        groups = -(-channels // GROUP)
        dense_bytes += rows * channels
        # each kept weight takes a byte and an index, and four indexes take a byte
        kept = rows * groups * KEPT
        packed_bytes += kept + -(-kept // GROUP)
    saved_bytes = max(dense_bytes - packed_bytes, 0)
    return SparseCost(dense_bytes, packed_bytes, saved_bytes / chip.device_memory.rate_bytes_per_s)
