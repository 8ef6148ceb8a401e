"""Fewer weights: of four neighbours two are kept, or a convolution becomes two thin ones.

Structured sparsity 4:2: of four neighbouring input channels two weights are kept.

    X Y stand for kept weights      0 X 0 Y   ->   X Y  and indexes 01, 10

Index 0 is the place of the first weight that is not 0 among elements 0..2, index 1 that of the last
among elements 1..3, counted from element 1; 0 where there is none. Where both name one element, the
second kept weight is 0. Sources: github hicann/amct, graph_based (the rule of the mask); hicann/ge,
docs, atc_tools, CLI_options/--sparsity.md (indexes, packed sizes, chips).

Low rank: k1 x k2 becomes k1 x 1 and 1 x k2 with few channels between. The weights, unfolded into a
matrix (min C min k, max C max k), are cut to the rank that an analytic variational Bayes estimate
(EVBMF) finds above the noise, held between two shares of the rows and rounded to 16. Sources:
Nakajima et al., JMLR 14 (2013) 1-37; github hicann/amct,
amct_tensor_decompose/src/tensor_decomposition.cpp."""

import math
from dataclasses import dataclass

import numpy as np

from ascend_lab.compiler import Constant, Draft, Graph, Node, TensorType, ir
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators.ops.convolution import geometry

GROUP = 4
KEPT = 2
LEAST_CHANNELS = 3
"""Layers of fewer input channels are left alone."""
LAYERS = {"conv2d": 1, "matmul": 0, "gemm": 0}
"""Operators that can be sparse, and the axis of their weights along which input channels lie."""
CHIPS = ("Ascend910B1", "Ascend910B2", "Ascend910B3", "Ascend910B4", "Ascend910C")
"""Chips whose cube reads packed weights (A2, A3, 200I/500 A2 by the source)."""
INDEX_BITS = 2
"""Bits of an index; a group's first index lies in the lower bits, the first group of a byte too."""


# -- masks ----------------------------------------------------------------------------------------
def mask_of(weights: ir.Values, axis: int = 1) -> ir.Values:
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

    kept: ir.Values
    indexes: ir.Values

    @property
    def size_bytes(self) -> int:
        """Bytes of both: two weights and four bits for every four weights."""
        return self.kept.size + self.index_bytes().size

    def index_bytes(self) -> ir.Values:
        """Return the indexes as they are stored: four a byte."""
        flat = self.indexes.reshape(-1)
        fours = np.pad(flat, (0, -flat.size % GROUP)).reshape(-1, GROUP).astype(np.uint8)
        found: ir.Values = (fours << (INDEX_BITS * np.arange(GROUP, dtype=np.uint8))).sum(1)
        return found.astype(np.uint8)


def pack(rows: ir.Values) -> Packed:
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
    head = used[..., :3]
    tail = used[..., 1:]
    first = np.where(head.any(-1), head.argmax(-1), 0)
    last = np.where(tail.any(-1), 2 - tail[..., ::-1].argmax(-1), 0)
    indexes = np.stack([first, last], -1)
    kept = np.take_along_axis(groups, indexes + np.array([0, 1]), -1)
    kept[..., 1] = np.where(first == last + 1, 0, kept[..., 1])
    return Packed(kept, indexes.astype(np.uint8))


def unpack(packed: Packed, channels: int) -> ir.Values:
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
        rows = int(np.prod(shape)) // channels
        groups = -(-channels // GROUP)
        dense += rows * channels
        small += rows * groups * KEPT + -(-rows * groups * KEPT // GROUP)
    return SparseCost(dense, small, max(dense - small, 0) / chip.device_memory.rate_bytes_per_s)


# -- low rank -------------------------------------------------------------------------------------
UNIT = 16
THRESHOLD = 2.5129
"""tau = 2.5129 sqrt(alpha): where a component begins to be worth more than noise."""
DIVISORS = (6, 4)
"""Rows to one of rank at most: of few channels, and where both sides have 256 or more."""
WIDE = 256


@dataclass(frozen=True, slots=True)
class Thin:
    """A convolution to be split: which side of the channels and of the kernel is the smaller."""

    features: int
    channels: int
    kernel: tuple[int, int]

    @property
    def kind(self) -> str:
        """FC or SC: features fewer than channels or not; FK or SK: rows no more than columns."""
        first = "FC" if self.features < self.channels else "SC"
        return first + ("FK" if self.kernel[0] <= self.kernel[1] else "SK")

    @property
    def rows_first(self) -> bool:
        """Tell whether the kernel's rows come first: k1 x 1, then 1 x k2."""
        return self.kind in ("SCFK", "FCSK")

    @property
    def matrix(self) -> tuple[int, int]:
        """Sizes of the unfolded weights: (min C min k, max C max k)."""
        sides = sorted((self.features, self.channels))
        taps = sorted(self.kernel)
        return sides[0] * taps[0], sides[1] * taps[1]

    def parameters(self, rank: int) -> int:
        """Return the weights of both parts together."""
        low, high = self.kernel if self.rows_first else self.kernel[::-1]
        return rank * (self.channels * low + self.features * high)


def thin_of(graph: Graph, node: Node) -> Thin | None:
    """Return a convolution that is to be split; None where that is not done."""
    if node.op != "conv2d" or node.inputs[1] not in graph.constants:
        return None
    settings = ir.operator_of(node.op).settings(node.attrs)
    step, _, spread = geometry(settings["stride"], settings["pad"], settings["dilation"])
    k, c, *kernel = graph.types[node.inputs[1]].shape
    least = min(kernel)
    narrow = min(k, c)
    refused = max(spread) > 1 or settings["groups"] > 1 or least < 3 or max(step) > 2
    small = least * narrow < UNIT or (least < 7 and narrow < 64)
    return None if refused or small else Thin(k, c, (kernel[0], kernel[1]))


# -- the rank -------------------------------------------------------------------------------------
def evbmf_rank(matrix: ir.Values) -> int:
    """Return how many components of a matrix stand out of noise, its variance estimated.

    Raises `InputError` for anything but a matrix of finite numbers.
    """
    given = np.asarray(matrix, np.float64)
    if given.ndim != 2 or not given.size or not np.isfinite(given).all():
        raise InputError("a matrix of finite numbers", str(given.shape), "reshape it")
    rows, columns = sorted(given.shape)
    squares = np.linalg.svd(given, compute_uv=False) ** 2
    if not squares[0] > 0:
        return 0
    alpha = rows / columns
    tau = THRESHOLD * math.sqrt(alpha)
    limit = (1 + tau) * (1 + alpha / tau)
    noise = _noise(squares, rows, columns, limit)
    return int((squares > columns * noise * limit).sum())


def _noise(squares: ir.Values, rows: int, columns: int, limit: float) -> float:
    """Return the variance of the noise that makes the singular values most likely."""
    try:
        from scipy.optimize import minimize_scalar
    except ImportError as error:
        needed = "scipy, to estimate noise"
        raise InputError(needed, "not installed", "pip install 'ascend-lab[exact]'") from error
    alpha = rows / columns
    most = min(math.ceil(rows / (1 + alpha)) - 1, rows) - 1
    tail = squares[min(max(most, 0) + 1, rows - 1) :]
    low = max(tail[0] / (columns * limit), float(tail.mean()) / columns)
    high = float(squares.sum()) / (rows * columns)
    if not low < high:
        return high

    def energy(noise: float) -> float:
        x = np.maximum(squares / (columns * noise), np.finfo(float).tiny)
        above = x[x > limit]
        below = x[x <= limit]
        part = above - (1 + alpha)
        tau = 0.5 * (part + np.sqrt(np.maximum(part**2 - 4 * alpha, 0)))
        sums = (below - np.log(below)).sum() + (above - tau).sum()
        sums += np.log((tau + 1) / above).sum() + alpha * np.log(tau / alpha + 1).sum()
        return float(sums)

    return float(minimize_scalar(energy, bounds=(low, high), method="bounded").x)


def rank_of(thin: Thin, found: int) -> int:
    """Return the rank to cut to, from the one found: in bounds, a multiple of 16."""
    rows = thin.matrix[0]
    divisor = DIVISORS[min(thin.features, thin.channels) >= WIDE]
    wanted = min(max(found, rows // (divisor + 1)), rows // divisor)
    near = max(math.floor(wanted / UNIT + 0.5) * UNIT, UNIT)
    return near + UNIT if near < 0.9 * wanted else near


# -- the split ------------------------------------------------------------------------------------
def _unfolded(thin: Thin, weights: ir.Values) -> ir.Values:
    """Return (channels and taps read first, features and taps behind) as a matrix."""
    first, behind = (2, 3) if thin.rows_first else (3, 2)
    order = weights.astype(np.float64).transpose(1, first, 0, behind)
    return order.reshape(order.shape[0] * order.shape[1], -1)


def split_weights(thin: Thin, weights: ir.Values, rank: int) -> tuple[ir.Values, ir.Values]:
    """Return the weights of both convolutions by a truncated SVD, its values shared evenly."""
    u, s, vt = np.linalg.svd(_unfolded(thin, weights), full_matrices=False)
    root = np.sqrt(s[:rank])
    low, high = thin.kernel if thin.rows_first else thin.kernel[::-1]
    left = (u[:, :rank] * root).reshape(thin.channels, low, rank).transpose(2, 0, 1)
    right = (root[:, None] * vt[:rank]).reshape(rank, thin.features, high).transpose(1, 0, 2)
    if thin.rows_first:
        return left[..., None], right[:, :, None, :]
    return left[:, :, None, :], right[..., None]


def decomposed(graph: Graph, ranks: dict[str, int] | None = None) -> tuple[Graph, dict[str, int]]:
    """Return the graph with its wide convolutions split, and the rank of each that was.

    `ranks` replays what was found before. Convolutions that would not become smaller stay. Raises
    `InputError` for a rank that no such convolution has.
    """
    draft = Draft(graph)
    used = dict[str, int]()
    for node in graph.nodes:
        thin = thin_of(graph, node)
        if thin is None or (ranks is not None and node.name not in ranks):
            continue
        weights = graph.constants[node.inputs[1]].array()
        rank = ranks[node.name] if ranks else rank_of(thin, evbmf_rank(_unfolded(thin, weights)))
        if not 1 <= rank <= min(thin.matrix):
            needed = f"{node.name}: a rank from 1 to {min(thin.matrix)}"
            raise InputError(needed, str(rank), "decompose it again")
        if thin.parameters(rank) < weights.size:
            _split(draft, node, thin, split_weights(thin, weights, rank))
            used[node.name] = rank
    if ranks and set(ranks) - set(used):
        raise InputError(f"{graph.name}: convolutions to split", str(set(ranks) - set(used)))
    return draft.finish(), used


def _split(draft: Draft, node: Node, thin: Thin, parts: tuple[ir.Values, ir.Values]) -> None:
    settings = ir.operator_of(node.op).settings(node.attrs)
    step, pads, _ = geometry(settings["stride"], settings["pad"], 1)
    kind = draft.types[node.inputs[1]].dtype
    names = [
        draft.add(Constant(TensorType(w.shape, kind), w.astype(np.float32)), f"{node.name}_{i}")
        for i, w in enumerate(parts)
    ]
    ways: list[dict[str, object]] = [
        {"stride": (step[0], 1), "pad": (pads[0], (0, 0))},
        {"stride": (1, step[1]), "pad": ((0, 0), pads[1])},
    ]
    first, second = ways if thin.rows_first else ways[::-1]
    x = draft.insert("conv2d", (node.inputs[0], names[0]), first, f"{node.name}_low")
    draft.become(node, "conv2d", (x, names[1], *node.inputs[2:]), second)
