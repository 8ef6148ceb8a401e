"""Builds the strategy problem of a graph: how to cut every operator over 2^k devices.

A way halves the work of an operator, along a free axis of its output or along a reduction, which
leaves partial sums; the ways follow from the operator's slice rules. A sharding says how many times
each way is used. The remaining ones of the k halvings replicate the operator. The axes of the
device matrix (2, ..., 2) are assigned to the ways in order, from left to right.

The cost of a strategy, in nanoseconds of one training step, is the operator's own time divided by
the parts it is cut into, plus the all-reduces among its devices: forward of the partial sums of a
cut reduction, backward of the gradient of every input that is not divided by the cut (a weight if
the batch is cut, an activation if the output channels are cut). The cost of an edge is the
redistribution of its tensor, forward and backward. Compute and communication do not overlap. Usage
is bytes per device: weights with their gradients and Adam's moments, and the output, which is kept
for the backward pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ascend_lab import errors
from ascend_lab.cluster import Topology, collective_time
from ascend_lab.cluster.parallel.redistribution import Cost, Layout, cheapest, price
from ascend_lab.cluster.parallel.strategy.problem import Edge, Node, Problem
from ascend_lab.compiler import Graph, Node as GraphNode
from ascend_lab.compiler.counts import STATISTICS_OPERANDS, node_macs
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.operators import ops

Shape = tuple[int, ...]
Counts = tuple[int, ...]
"""How often each way of an operator is used."""
WITHOUT_BIAS = {"gemm": "matmul", "conv2d": "conv2d"}
"""Operators that add a bias to a sum, and the operator that only sums."""
IMAGE_OPS = ("conv2d", "depthwise_conv2d")
TRAINING = 3
"""Work of forward and backward / work of forward: backward does about twice the work."""
FLOATS = ("fp16", "bf16", "fp32")
STATE_BYTES = 16
"""Bytes of state per trained number: value, gradient, two moments.

Value and gradient are in fp32, or in fp16 with an fp32 copy of the value.

S. Rajbhandari et al., ZeRO, SC 2020, section 3.1.
"""
NS = 1e9
MAX_DEVICES = 32
"""Largest number of devices: the layouts grow faster than the factorial of the halvings."""


# -- costs of communication and work ---------------------------------------------------------------
def on_topology(topology: Topology) -> Cost:
    """Return a cost function: seconds of a collective on the first devices of a topology.

    The quickest algorithm counts. Groups that run at the same time are assumed to share no links.
    """

    @lru_cache(None)
    def cost(operation: str, devices: int, size_bytes: float) -> float:
        if devices > topology.size:
            raise errors.ClusterError(f"at most {topology.size} devices", str(devices))
        return collective_time(operation, topology, size_bytes, placement=range(devices)).time_s

    return cost


def roofline(chip: Chip) -> Callable[[Graph, GraphNode], float]:
    """Return a function that gives the seconds of an operator's training step by the roofline.

    It is the larger of the times for arithmetic and for memory traffic at the chip's peak rates,
    and so a lower bound.
    """
    peak = chip.peak_ops_per_s("fp16")
    memory_bytes_per_s = chip.device_memory.rate_bytes_per_s

    def work_s(graph: Graph, node: GraphNode) -> float:
        kinds = (*graph.in_types(node), *graph.out_types(node))
        moved = sum(kind.elements * DTYPE_BYTES[kind.dtype] for kind in kinds)
        # A multiply-accumulate is two operations, as in the chip's peak.
        return TRAINING * max(2 * node_macs(graph, node) / peak, moved / memory_bytes_per_s)

    return work_s


# -- ways to cut an operator ----------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Way:
    """One way to cut an operator: the axis that it divides of each output and input (-1: none).

    `summed` says that the outputs are partial sums. Parts are multiples of `grain` along the axis
    of output 0.
    """

    name: str
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    summed: bool = False
    grain: int = 1


@dataclass(frozen=True, slots=True)
class Cuttable:
    """A node of a graph with the ways to cut it, and the shapes of its inputs and outputs.

    Its tensors are identified by a side, "inputs" or "outputs", and an index.
    """

    node: GraphNode
    ways: tuple[Way, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]

    def axes(self, counts: Counts, side: str, index: int) -> list[tuple[int, int]]:
        """Return, for each way, the axis of a tensor that it divides (-1: none) and how often."""
        pairs = zip(self.ways, counts, strict=True)
        return [(getattr(way, side)[index], count) for way, count in pairs]

    def fits(self, counts: Counts) -> bool:
        """Tell whether every tensor divides evenly if each way is used `counts` times."""
        for side in ("outputs", "inputs"):
            for index, shape in enumerate(getattr(self, side)):
                axes = self.axes(counts, side, index)
                for way, (axis, count) in zip(self.ways, axes, strict=True):
                    unit = way.grain if side == "outputs" else 1
                    # cut twice, an axis must be a multiple of 4 units
                    if axis >= 0 and shape[axis] % (unit << count):
                        return False
        return True

    def shardings(self, halvings: int) -> Iterator[Counts]:
        """Yield the counts of all shardings that fit, with at most `halvings` halvings in total."""
        # Two ways on 4 devices: (0, 0), (0, 1), (0, 2), (1, 0), (1, 1) and (2, 0).
        for counts in product(range(halvings + 1), repeat=len(self.ways)):
            if sum(counts) <= halvings and self.fits(counts):
                yield counts

    def layout(self, counts: Counts, halvings: int, side: str, index: int) -> Layout:
        """Return the layout of a tensor under a sharding."""
        shape = getattr(self, side)[index]
        maps: list[list[int]] = [[] for _ in shape]
        # 8 devices are the matrix (2, 2, 2), axis 2 outermost. A matmul with its rows cut twice and
        # its sum once: rows on axes 2 and 1, the sum on axis 0, where devices hold partial sums.
        first_axis = halvings - 1
        for axis, count in self.axes(counts, side, index):
            if axis >= 0:
                maps[axis] += range(first_axis, first_axis - count, -1)
            first_axis -= count
        return Layout((2,) * halvings, tuple(map(tuple, maps)), shape)

    def parts(self, counts: Counts, side: str, index: int) -> int:
        """Return the number of parts of a tensor; further devices hold copies or partial sums."""
        # Rows cut twice and the sum once, on 8 devices: the output is in 4 parts, each on 2
        # devices.
        return 1 << sum(count for axis, count in self.axes(counts, side, index) if axis >= 0)

    def held_elements(self, counts: Counts, side: str, index: int) -> float:
        """Return the number of elements of a tensor that one device holds."""
        shape: Shape = getattr(self, side)[index]
        return math.prod(shape) / self.parts(counts, side, index)


def cuttable(graph: Graph, node: GraphNode) -> Cuttable:
    """Return a node with its ways: free output axes in order, then reductions by a sum.

    In networks with convolutions the height and width of images are not cut, because devices would
    have to exchange borders of images, which redistribution cannot do. MindSpore's search leaves
    them out as well.
    """
    inputs = tuple(kind.shape for kind in graph.in_types(node))
    outputs = tuple(kind.shape for kind in graph.out_types(node))
    rules = ops.OPERATORS[node.op].slice_rules(inputs, dict(node.attrs))
    images = len(outputs[0]) == 4 and any(n.op in IMAGE_OPS for n in graph.nodes)
    ways = []
    for rule in rules.axes:
        if rule.kind == "free" and outputs[0][rule.axis] > 1 and not (images and rule.axis > 1):
            axis_of_input = {source.input: source.axis for source in rule.sources}
            read = tuple(axis_of_input.get(i, -1) for i in range(len(inputs)))
            ways.append(Way(f"axis {rule.axis}", rule.joins, read, grain=rule.grain))
    for reduction in rules.reductions or _sums(node, inputs):
        if reduction.combine == "sum":
            axis_of_input = dict(reduction.sources)
            read = tuple(axis_of_input.get(i, -1) for i in range(len(inputs)))
            ways.append(Way("sum", (-1,) * len(outputs), read, summed=True))
    return Cuttable(node, tuple(ways), inputs, outputs)


def _sums(node: GraphNode, inputs: tuple[Shape, ...]) -> tuple[ops.Reduction, ...]:
    """Return the reductions of an operator; if it adds a bias, those of the sum before that."""
    plain = WITHOUT_BIAS.get(node.op)
    if plain is None or len(inputs) != 3:
        return ()
    attributes = ops.OPERATORS[plain].attrs
    attrs = {key: value for key, value in node.attrs.items() if key in attributes}
    return ops.OPERATORS[plain].slice_rules(inputs[:2], attrs).reductions


class Joint(NamedTuple):
    """A tensor from output `port` of operator `source` to input `slot` of operator `target`.

    Both operators are given by their numbers.
    """

    source: int
    target: int
    port: int
    slot: int


def joints(operators: Sequence[Cuttable]) -> Iterator[Joint]:
    """Yield every tensor that one operator writes and another one reads, in order of readers."""
    place = {out: (v, i) for v, op in enumerate(operators) for i, out in enumerate(op.node.outputs)}
    for target, op in enumerate(operators):
        for slot, name in enumerate(op.node.inputs):
            if name in place:
                source, port = place[name]
                yield Joint(source, target, port, slot)


# -- the problem ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class GraphProblem:
    """A strategy problem made from a graph: node v is operator v, strategy s its sharding s."""

    problem: Problem
    operators: tuple[Cuttable, ...]
    shardings: tuple[tuple[Counts, ...], ...]
    halvings: int

    def chosen(self, strategies: tuple[int, ...]) -> dict[str, dict[str, int]]:
        """Return, by operator name, the number of parts along each way that is used."""
        degrees = {}
        for op, options, strategy in zip(self.operators, self.shardings, strategies, strict=True):
            pairs = zip(op.ways, options[strategy], strict=True)
            degrees[op.node.name] = {way.name: 1 << count for way, count in pairs if count}
        return degrees


def problem_of(
    graph: Graph,
    devices: int,
    cost: Cost,
    work_s: Callable[[Graph, GraphNode], float],
    usage_limit_bytes: int | None = None,
) -> GraphProblem:
    """Return the strategy problem of training a graph on 2^k devices, at most 32.

    `cost(operation, devices, bytes)` gives seconds of all_reduce, all_gather and all_to_all,
    `work_s(graph, node)` seconds of an operator, forward and backward, on one device.
    """
    if not 1 <= devices <= MAX_DEVICES or devices & (devices - 1):
        needed = f"a power of two of at most {MAX_DEVICES} devices"
        raise errors.ClusterError(needed, str(devices), "search one server, copy it to the others")
    # 8 devices are 3 halvings.
    halvings = devices.bit_length() - 1
    operators = tuple(cuttable(graph, node) for node in graph.nodes)
    shardings = tuple(tuple(op.shardings(halvings)) for op in operators)
    nodes = []
    for op, options in zip(operators, shardings, strict=True):
        op_s = work_s(graph, op.node)
        costs_ns = []
        for counts in options:
            # 3 halvings divide the work by 8; the cost of their communication is added.
            time_s = op_s / (1 << sum(counts)) + inner_s(graph, op, counts, cost)
            costs_ns.append(round(time_s * NS))
        usages = [usage_bytes(graph, op, counts) for counts in options]
        nodes.append(Node(0, 1, tuple(costs_ns), tuple(usages)))
    edges = _edges(graph, operators, shardings, halvings, cost)
    problem = Problem(graph.name, tuple(nodes), edges, usage_limit_bytes)
    return GraphProblem(problem, operators, shardings, halvings)


def data_parallel(problem: GraphProblem) -> tuple[int, ...]:
    """Return the strategies that cut the first axis of every output as often as possible."""

    def batch_cuts(op: Cuttable, counts: Counts) -> int:
        """Return how often the first axis is cut; -1 if another axis or a sum is cut as well."""
        for way, count in zip(op.ways, counts, strict=True):
            if count and way.outputs[0] != 0:
                return -1
        return sum(counts)

    choices = []
    for op, options in zip(problem.operators, problem.shardings, strict=True):
        cuts = [batch_cuts(op, counts) for counts in options]
        choices.append(cuts.index(max(cuts)))
    return tuple(choices)


def inner_s(graph: Graph, op: Cuttable, counts: Counts, cost: Cost) -> float:
    """Return the seconds of communication inside an operator, forward and backward."""
    total = 0.0
    devices = 1 << sum(counts)
    summing = 1 << sum(c for way, c in zip(op.ways, counts, strict=True) if way.summed)
    if summing > 1:
        result = graph.out_types(op.node)[0]
        shard_bytes = result.elements * DTYPE_BYTES[result.dtype] / op.parts(counts, "outputs", 0)
        total += cost("all_reduce", summing, shard_bytes)
    weight_bytes: dict[int, float] = {}  # by the size of the group that adds up the gradients
    for index, name in enumerate(op.node.inputs):
        parts = op.parts(counts, "inputs", index)
        # A batch cut into 8 divides the activation (8 parts, groups of 1: nothing to add up) but
        # not the weight (1 part, a group of 8, which all-reduces its gradient).
        group = devices // parts
        if group == 1 or not has_gradient(graph, op.node, index):
            continue
        tensor_type = graph.types[name]
        shard_bytes = tensor_type.elements * DTYPE_BYTES[tensor_type.dtype] / parts
        if name in graph.constants:  # an operator's weights share one all-reduce
            weight_bytes[group] = weight_bytes.get(group, 0.0) + shard_bytes
        else:
            total += cost("all_reduce", group, shard_bytes)
    return total + sum(cost("all_reduce", group, size) for group, size in weight_bytes.items())


def has_gradient(graph: Graph, node: GraphNode, index: int) -> bool:
    """Tell whether training needs the gradient of an input: weights and activations, not data."""
    name = node.inputs[index]
    averaged = node.op == "batch_norm" and index in STATISTICS_OPERANDS
    return graph.types[name].dtype in FLOATS and name not in graph.inputs and not averaged


def usage_bytes(graph: Graph, op: Cuttable, counts: Counts) -> int:
    """Return the bytes per device for an operator: weights, gradients, moments and output."""
    total = 0
    for index, name in enumerate(op.node.inputs):
        if name in graph.constants:
            kind = graph.types[name]
            trained = has_gradient(graph, op.node, index)
            element_bytes = STATE_BYTES if trained else DTYPE_BYTES[kind.dtype]
            total += kind.elements * element_bytes // op.parts(counts, "inputs", index)
    for index, kind in enumerate(graph.out_types(op.node)):
        size_bytes = kind.elements * DTYPE_BYTES[kind.dtype]
        total += size_bytes // op.parts(counts, "outputs", index)
    return total


# -- edges: redistribution of tensors -------------------------------------------------------------
def _edges(
    graph: Graph,
    operators: tuple[Cuttable, ...],
    shardings: tuple[tuple[Counts, ...], ...],
    halvings: int,
    cost: Cost,
) -> tuple[Edge, ...]:
    """Return an edge for each tensor and reader whose table of costs is not all zero."""
    table = _tables(cost)
    edges = []
    for u, v, port, slot in joints(operators):
        node = operators[v].node
        source_layouts = [operators[u].layout(c, halvings, "outputs", port) for c in shardings[u]]
        target_layouts = [operators[v].layout(c, halvings, "inputs", slot) for c in shardings[v]]
        cut_dims, uncut_elements = _cut_dimensions([*source_layouts, *target_layouts])
        # (32, 128, 768) in fp16, of which only axis 0 is ever cut: 32 items of 128 * 768 * 2 bytes.
        item_bytes = DTYPE_BYTES[graph.types[node.inputs[slot]].dtype] * uncut_elements
        sources = tuple(_with_dimensions(layout, cut_dims) for layout in source_layouts)
        targets = tuple(_with_dimensions(layout, cut_dims) for layout in target_layouts)
        costs = table(sources, targets, item_bytes, has_gradient(graph, node, slot))
        if any(costs):
            edges.append(Edge(u, v, costs))
    return tuple(edges)


Table = Callable[[tuple[Layout, ...], tuple[Layout, ...], int, bool], tuple[int, ...]]
"""(left, right, item bytes, back) -> nanoseconds from every left layout to every right one."""


def _tables(cost: Cost) -> Table:
    """Return a function that computes the cost table of an edge; `back` adds the backward pass."""

    @lru_cache(None)
    def times_s(source: Layout, item_bytes: int) -> dict[object, float]:
        paths = cheapest(source, price(item_bytes, cost))
        return {map_: path.total for map_, path in paths.items()}

    @lru_cache(None)
    def table(
        left: tuple[Layout, ...], right: tuple[Layout, ...], item_bytes: int, back: bool
    ) -> tuple[int, ...]:
        def both_ways_s(a: Layout, b: Layout) -> float:
            forward_s = times_s(a, item_bytes)[b.tensor_map]
            return forward_s + (times_s(b, item_bytes)[a.tensor_map] if back else 0.0)

        return tuple(round(NS * both_ways_s(a, b)) for a in left for b in right)

    return table


def _cut_dimensions(layouts: Sequence[Layout]) -> tuple[list[int], int]:
    """Return the dimensions that some layout cuts, and the product of all other sizes."""
    shape = layouts[0].shape
    dims = range(len(shape))
    cut_dims = [dim for dim in dims if any(layout.tensor_map[dim] for layout in layouts)]
    return cut_dims, math.prod(shape[dim] for dim in dims if dim not in cut_dims)


def _with_dimensions(layout: Layout, dims: list[int]) -> Layout:
    """Return a layout with only the dimensions `dims`; the others count as parts of an item."""
    maps = tuple(layout.tensor_map[dim] for dim in dims)
    return Layout(layout.device_matrix, maps, tuple(layout.shape[dim] for dim in dims))
