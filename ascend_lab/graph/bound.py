"""Seconds that no schedule, fusion, slicing or order of a network's operators goes below.

    time >= max(cube, vector, results, memory, chain) + one launch

Each holds by itself, for any number of kernels, because whoever computes the operators of a graph,
each result that is needed at least once and by its definition,

cube      multiplies on the cubes. A step of m0 x k0 x n0 adds to at most m0 n0 sums, and a sum over
          k products stands in at least ceil(k / k0) steps, whatever shares its step: rows of other
          images, columns of other weights, blocks of a diagonal. So there are at least
          sums * ceil(k / k0) / (m0 n0) steps. Only products with numbers count, none with padding.
vector    computes there what no cube and no path out of it can: one lane of one instruction for
          each result of `CURVES` and of maxima of several numbers. Depthwise and grouped
          convolutions, means, sums and norms may go to the cube: they count nothing. On chips with
          one core for both, `results` pass through the same pipe and are added.
results   takes every sum out of L0C, in the graph's narrowest format, by the quickest path; sums
          that are only added up may be added up inside and leave once.
memory    reads the weights and inputs that are needed whole: L2 starts empty, so once at least;
          and writes of the results what L2 cannot hold at the end. Spills count as none, also on
          chains: a tensor larger than L2, L1 and UB need not exist at once, as slices of it may go
          through all operators that read them, and weights between may be read again instead. That
          is a relaxation: removing a cost from every schedule leaves a bound of all of them.
chain     waits: what the longest chain of operators that cannot begin before another's result does
          at the least, on as many cores as you like: a copy in, a step, a copy out.

Only the numbers of constants are taken as arbitrary and as given: algebra (Winograd, the product of
two weights) is a pass, not a schedule, and the bound is that of the graph after passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.graph.ir import Fill, Graph, Node
from ascend_lab.ops.shapes import pad_pairs, pair

CURVES = (
    "exp", "log", "sqrt", "rsqrt", "rec", "sigmoid", "tanh", "gelu", "silu", "softplus", "elu",
    "erf", "hard_swish", "softmax", "log_softmax",
)  # fmt: skip
"""Operators with a function per result that is no sum of products, no ReLU, no scale."""
LARGEST = ("reduce_max", "reduce_min", "global_max_pool")
"""Operators that leave the largest or smallest of numbers."""
PRODUCTS = ("matmul", "batch_matmul", "gemm", "attention_scores", "attention_context")
ATTENTION = ("attention", "flash_attention")
SUMMED = ("add", "sub", "reshape", "trans_data", "transpose")
"""What lies between sums that may be added up in L0C."""
WHOLE = (*PRODUCTS, *ATTENTION, "batch_norm", "rms_norm", "masked_softmax", "lrn", "trans_data")
"""Operators without a telling trait that need every element of what they read."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Least seconds by what limits them; `time_s` is the bound."""

    cube: float
    vector: float
    results: float
    memory: float
    chain: float
    launch: float

    @property
    def limit(self) -> str:
        """What the bound is: "cube", "vector", "results", "memory" or "chain"."""
        parts = asdict(self)
        del parts["launch"]
        return max(parts, key=lambda name: parts[name])

    @property
    def work_s(self) -> float:
        """Seconds without the launch."""
        return float(getattr(self, self.limit))

    @property
    def time_s(self) -> float:
        """Seconds in all."""
        return self.work_s + self.launch


UNBOUND = Bound(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Of what may be done without a kernel."""


def bound_of(graph: Graph, chip: Chip) -> Bound:
    """Return what a graph takes on a chip at least, however it is compiled; see the module.

    All is 0 for a graph that may be done without a kernel.
    """
    work = _Work(graph, chip)
    if not work.computes:
        return UNBOUND
    cube, results = work.products()
    vector = work.compared()
    out = max((p for (a, _), p in chip.paths.items() if a == "L0C"), default=None,
              key=lambda p: p.rate_bytes_per_cycle)  # fmt: skip
    leaving = results / (out.rate_bytes_per_cycle * chip.core_count) if out else 0.0
    if out and out.pipe == "V":
        vector += leaving
    clock = chip.clock_hz
    overhead = min(chip.launch_overhead_s, chip.ai_cpu_overhead_s or chip.launch_overhead_s)
    return Bound(
        cube / clock,
        vector / clock,
        leaving / clock,
        work.memory_bytes() / chip.device_memory.rate_bytes_per_s,
        work.chain() / clock,
        round(overhead * clock) / clock,
    )


class _Work:
    """What of a graph is needed whole, and what that costs at least, in cycles of all cores."""

    def __init__(self, graph: Graph, chip: Chip) -> None:
        self.graph, self.chip = graph, chip
        sliding = (n for n in graph.nodes if n.has("convolution", "pooling"))
        self.windows = {node.name: _windows(graph, node) for node in sliding}
        self.varies = _varying(graph)
        self.whole, self.read = self._needed()
        once = {(node.op, node.inputs, str(node.attrs)): node for node in graph.nodes}
        self.nodes = [
            node for node in once.values()
            if self.varies.issuperset(node.outputs) and self.whole.issuperset(node.outputs)
        ]  # fmt: skip
        self.distinct: dict[str, int] = {}
        for node in graph.nodes:
            self.distinct.update(dict.fromkeys(node.outputs, 0))
            for name in node.outputs:
                self.distinct[name] = self._different(node, graph.types[name].elements)

    @property
    def computes(self) -> bool:
        """Whether some kernel has to run."""
        return not all(map(_moves, self.nodes))

    def _different(self, node: Node, size: int) -> int:
        """Return how many results of a node may differ: what is repeated is computed once."""
        known = [self.distinct.get(n, self.graph.types[n].elements) for n in node.inputs]
        if node.op in ("expand", "gather", "embedding", "one_hot", "pad", "select"):
            return 0
        if node.op == "concat":
            return min(size, sum(known)) if len(set(node.inputs)) == len(known) else 0
        if node.has("pointwise", "broadcasts") or node.op in CURVES:
            return min(size, max(known, default=0))
        full = all(k >= self.graph.types[n].elements
                   for n, k in zip(node.inputs, known, strict=True))  # fmt: skip
        return size if full else 0

    # -- what is needed -----------------------------------------------------------------------
    def _needed(self) -> tuple[set[str], set[str]]:
        """Return the tensors that are needed whole, and those that some kernel has to read."""
        whole, read = set(self.graph.outputs), set[str]()
        for node in reversed(self.graph.nodes):
            if not whole.issuperset(node.outputs):
                continue
            names = self._wanted(node)
            whole.update(names)
            if read.issuperset(node.outputs) or not _moves(node):
                read.update(names)
        return whole, read

    def _wanted(self, node: Node) -> Iterable[str]:
        """Return the inputs whose every element a node needs, to give all its results."""
        if node.has("convolution", "pooling"):
            windows = self.windows[node.name]
            kept = (all(w.all_read for w in windows), all(w.all_taps for w in windows), True)
            return [name for name, is_whole in zip(node.inputs, kept, strict=False) if is_whole]
        if node.op in ("slice", "gather", "embedding", "pad"):
            return node.inputs[1:]
        traits = ("pointwise", "broadcasts", "reduction", "moves", "lanes", "image fold")
        return node.inputs if node.has(*traits) or node.op in WHOLE or node.op in CURVES else ()

    # -- cube ---------------------------------------------------------------------------------
    def products(self) -> tuple[float, float]:
        """Return the cycles of the cubes, and the bytes that leave them."""
        ends: dict[str, list[Node]] = {}
        for node in self.nodes:
            full = self.distinct[node.output] == self.graph.types[node.output].elements
            dtype = self.graph.types[node.inputs[0]].dtype if node.inputs else ""
            if full and dtype in self.chip.cube and self._sums(node, 1):
                ends.setdefault(self._end(node.output), []).append(node)
        cycles, left = 0.0, 0
        for end, nodes in ends.items():
            for node in nodes:
                m, k, n = self.chip.cube_shape(self.graph.types[node.inputs[0]].dtype)
                steps = self._sums(node, k)
                if len(nodes) > 1:  # several sums in one may share a step
                    steps = self._sums(node, 1) / k
                cycles += steps / (m * n * self.chip.core_count)
            left += min(
                self.graph.types[name].elements for name in (end, *(n.output for n in nodes))
            )
        narrow = any(kind.dtype == "int8" for kind in self.graph.types.values())
        return cycles, left * (1 if narrow else 2)

    def _sums(self, node: Node, depth: int) -> float:
        """Return the sums of a node's products, each as often as steps of `depth` products fill it.

        0 for what the vector unit may do as well, and for attention under a mask, which may be left
        out.
        """
        out = self.graph.types[node.output]
        if node.op in PRODUCTS:
            first = self.graph.types[node.inputs[0]].shape
            return out.elements * _up(first[-2 if node.attr("trans_a", False) else -1], depth)
        if node.op in ATTENTION and len(node.inputs) == 3 and not node.attr("causal", False):
            (*many, s, d), (*_, t, _), (*_, e) = (self.graph.types[n].shape for n in node.inputs)
            return prod(many) * s * (t * _up(d, depth) + e * _up(t, depth))
        if node.op != "conv2d":
            return 0
        features, channels = self.graph.types[node.inputs[1]].shape[:2]
        if channels < 16 and node.attr("groups", 1) > 1:
            return 0
        rows, columns = self.windows[node.name]
        steps = sum(
            many * each * _up(channels * high * wide, depth)
            for high, many in rows.counts.items()
            for wide, each in columns.counts.items()
        )
        return out.shape[0] * features * steps

    def _end(self, name: str) -> str:
        """Return the tensor in which sums leave the cube at the latest."""
        while name not in self.graph.outputs:
            readers = self.graph.readers[name]
            if len(readers) != 1 or readers[0].op not in SUMMED:
                break
            name = readers[0].output
        return name

    # -- vector units -------------------------------------------------------------------------
    def compared(self) -> float:
        """Return the cycles of the vector units, results of the cubes left out."""
        chip = self.chip
        lanes = chip.vector_bytes_per_repeat // 2 * chip.core_count * chip.vector_cores_per_core
        return sum(map(self._lanes, self.nodes)) / lanes * self._repeat_cycles()

    def _repeat_cycles(self) -> float:
        costs = self.chip.vector_costs.values()
        return min(c.slope_cycles + c.head_cycles / self.chip.max_repeat for c in costs)

    def _lanes(self, node: Node) -> int:
        """Return the lanes that a node takes of instructions, at least."""
        out, given = self.graph.types[node.output], self.graph.in_types(node)
        if DTYPE_BYTES[out.dtype] < 2:
            return 0
        different = self.distinct[node.output]
        if node.op in CURVES:
            alone = node.has("reduction") and out.shape[node.attr("axis", -1)] < 2
            return 0 if alone else different
        if different < out.elements:
            return 0
        if node.op in LARGEST:
            return out.elements if given[0].elements >= 2 * out.elements else 0
        if node.op == "max_pool2d":
            rows, columns = self.windows[node.name]
            lone = rows.counts[1] * columns.counts[1]
            return out.elements - lone * out.shape[0] * out.shape[1]
        return 0

    # -- memory -------------------------------------------------------------------------------
    def memory_bytes(self) -> int:
        """Return the bytes that cross the memory interface."""
        graph = self.graph
        moved = sum(_bytes(graph, n) for n in graph.inputs if n in self.read)
        moved += sum(_bytes(graph, n) for n in self._weights())
        computed = {n for node in self.nodes if not _moves(node) for n in node.outputs}
        written = sum(_bytes(graph, n) for n in computed.intersection(graph.outputs))
        return moved + max(0, written - self.chip.l2.size_bytes)

    def _weights(self) -> set[str]:
        """Return the constants that products need to the last number."""
        found: set[str] = set()
        for node in self.nodes:
            windows = self.windows.get(node.name, ())
            source = self.graph.producers.get(node.inputs[0])
            if not all(w.all_taps for w in windows) or (source and source.op == "pad"):
                continue
            if node.has("convolution") or node.op in PRODUCTS:
                found.update(n for n in node.inputs[:2] if n in self.graph.constants)
        constants = self.graph.constants
        return {name for name in found if not isinstance(constants[name].data, Fill)}

    # -- chain --------------------------------------------------------------------------------
    def chain(self) -> float:
        """Return the cycles of the longest chain."""
        needed, until = {node.name for node in self.nodes}, dict[str, float]()
        for node in self.graph.nodes:
            begin = max((until.get(name, 0.0) for name in node.inputs), default=0.0)
            own = self._latency(node) if node.name in needed else 0.0
            until.update(dict.fromkeys(node.outputs, begin + own))
        return max((until.get(name, 0.0) for name in self.graph.outputs), default=0.0)

    def _latency(self, node: Node) -> float:
        chip = self.chip
        if self._lanes(node):
            return min(c.head_cycles + c.slope_cycles for c in chip.vector_costs.values())
        dtype = self.graph.types[node.inputs[0]].dtype if node.inputs else ""
        if dtype not in chip.cube or not self._sums(node, 1):
            return 0.0
        into = min(p.startup_cycles for (_, b), p in chip.paths.items() if b in ("L0A", "L0B"))
        out = min(p.startup_cycles for (a, _), p in chip.paths.items() if a == "L0C")
        return into + chip.cube_head_cycles + 1 + out


# -- what is needed --------------------------------------------------------------------------------
def _bytes(graph: Graph, name: str) -> int:
    """Return the bytes of a tensor's elements, without padding."""
    kind = graph.types[name]
    return kind.elements * DTYPE_BYTES[kind.dtype]


def _varying(graph: Graph) -> set[str]:
    """Return the tensors that depend on an input."""
    found = set(graph.inputs)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def _moves(node: Node) -> bool:
    """Tell whether a node computes nothing: some day it may be a view."""
    return node.op in ("trans_data", "pad", "embedding") or node.has("moves")


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows along an axis: how many hold a number of elements, and what none leaves out."""

    counts: Counter[int]
    all_read: bool
    all_taps: bool


@lru_cache(1024)
def _along(size: int, kernel: int, stride: int, pads: tuple[int, int], dilation: int) -> _Windows:
    """Return the windows along an axis of `size` elements; padding holds none."""
    reach, counts = (kernel - 1) * dilation, Counter[int]()
    read, taps = set[int](), set[int]()
    for start in range(-pads[0], size + pads[1] - reach, stride):
        held = [t for t in range(kernel) if 0 <= start + t * dilation < size]
        counts[len(held)] += 1
        taps.update(held)
        read.update(start + t * dilation for t in held)
    return _Windows(counts, len(read) == size, len(taps) == kernel)


def _windows(graph: Graph, node: Node) -> tuple[_Windows, _Windows]:
    """Return the windows of a convolution or pooling along rows and along columns."""
    size = graph.types[node.inputs[0]].shape[2:]
    shape = graph.types[node.inputs[1]].shape[2:] if node.has("convolution") else ()
    kernel = shape or pair("kernel", node.attr("kernel"))
    stride = pair("stride", node.attr("stride") or (1 if shape else kernel))
    pads = pad_pairs("window", node.attr("pad", 0))
    dilation = pair("dilation", node.attr("dilation", 1))
    rows, columns = (
        _along(size[i], kernel[i], stride[i], (pads[i][0], pads[i][1]), dilation[i])
        for i in range(2)
    )
    return rows, columns


def _up(size: int, unit: int) -> int:
    return -(-size // unit)
