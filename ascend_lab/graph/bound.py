"""Seconds that no schedule, fusion, slicing or order of operators goes below, and what lies above.

    time >= max(cube, vector, results, memory, chain) + one launch

Each holds by itself, for any number of kernels, because whoever computes the operators of a graph,
each result that is needed at least once and by its definition,

cube      multiplies on the cubes. A step of m0 x k0 x n0 adds to at most m0 n0 sums, and a sum over
          k products stands in at least ceil(k / k0) steps, whatever shares its step: rows of other
          images, columns of other weights, blocks of a diagonal. So there are at least
          sums * ceil(k / k0) / (m0 n0) steps. Only products with numbers count, none with padding.
vector    computes there what no cube and no path out of it can: for each result of `CURVES` a lane
          of the instructions that make its functions, for maxima of several numbers of any one.
          Means, sums, norms, depthwise convolutions and those in small groups may go to the cube:
          they count nothing. On chips with one core for both, results of the cube pass through the
          same pipe and are added, those of these convolutions too: made there, they take no less
          than coming from L0C.
results   takes every sum out of L0C, in the graph's narrowest format, by the quickest path; sums
          that are only added up may be added up inside and leave once.
memory    reads the weights and inputs that are needed whole: L2 starts empty, so once at least;
          and writes of the results what a cache cannot hold at the end. Spills count as none, also
          on chains: a tensor larger than L2, L1 and UB need not exist at once, as slices of it may
          go through all operators that read them, and weights between may be read again instead.
          That is a relaxation: removing a cost from every schedule leaves a bound of all of them.
chain     waits: what the longest chain of operators that cannot begin before another's result does
          at the least, on as many cores as you like: a copy in, a step, a copy out.

Only the numbers of constants are taken as arbitrary and as given: algebra (Winograd, the product of
two weights) is a pass, not a schedule, and the bound is that of the graph after passes.

A ledger says by name where the rest of a network's time goes:

    time = bound + launches + cube + cube fill + memory + vector + copies
         + AI CPU + barriers + waits

Each phase of a kernel is cut from its cycles, layer by layer: what is counted first hides what is
counted later, so that nothing counts twice and no term is negative. What limits the bound comes
first; of the layers the bound's own seconds are then taken away, its own kind first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.graph.ir import Fill, Graph, Node
from ascend_lab.graph.needs import ATTENTION, PRODUCTS, Needs, moves, slides
from ascend_lab.graph.network import NetworkTimeline
from ascend_lab.graph.tasks import CpuTimeline
from ascend_lab.sim.timeline import Timeline

CURVES = {
    **dict.fromkeys(("exp", "elu", "softmax", "log_softmax"), ("vexp",)),
    **dict.fromkeys(("sigmoid", "tanh", "gelu", "silu", "erf"), ("vexp", "vrec")),
    **dict.fromkeys(("sqrt", "rsqrt", "rec", "hard_swish"), ("",)),
    "log": ("vln",),
    "softplus": ("vexp", "vln"),
}
"""Operators with functions per result that are no sum of products, no ReLU, no scale.

Of exponentials and logarithms there is one instruction each, of a quotient the quickest counts; ""
is the quickest of all.
"""
LARGEST = ("reduce_max", "reduce_min", "global_max_pool")
"""Operators that leave the largest or smallest of numbers."""
SUMMED = ("add", "sub", "reshape", "trans_data", "transpose")
"""What lies between sums that may be added up in L0C."""


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
    cube, results, others = work.products()
    vector = work.compared()
    out = max((p for (a, _), p in chip.paths.items() if a == "L0C"), default=None,
              key=lambda p: p.rate_bytes_per_cycle)  # fmt: skip
    rate = out.rate_bytes_per_cycle * chip.core_count if out else float("inf")
    leaving = results / rate
    if out and out.pipe == "V":
        vector += leaving + others / max(rate, chip.vector_bytes_per_repeat * chip.core_count)
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
    """What of a graph is needed, and what that costs at least, in cycles of all cores."""

    def __init__(self, graph: Graph, chip: Chip) -> None:
        self.graph, self.chip = graph, chip
        self.needs = Needs(graph)
        once = {(node.op, node.inputs, str(node.attrs)): node for node in graph.nodes}
        self.nodes = [
            node for node in once.values()
            if self.needs.varies.issuperset(node.outputs) and self.needs.share(node.output)
        ]  # fmt: skip

    @property
    def computes(self) -> bool:
        """Whether some kernel has to run."""
        return not all(map(moves, self.nodes))

    # -- cube ---------------------------------------------------------------------------------
    def products(self) -> tuple[float, float, float]:
        """Return the cycles of the cubes, the bytes that leave them, and those of other sums."""
        ends: dict[str, list[Node]] = {}
        for node in self.nodes:
            if self._on_cube(node) or (slides(node) and not node.has("pooling")):
                ends.setdefault(self._end(node.output), []).append(node)
        cycles, left, others = 0.0, 0, 0
        for end, nodes in ends.items():
            cubes = [node for node in nodes if self._on_cube(node)]
            for node in cubes:
                m, k, n = self.chip.cube_shape(self.graph.types[node.inputs[0]].dtype)
                steps = self._sums(node, k)
                if len(nodes) > 1:  # several sums in one may share a step
                    steps = self._sums(node, 1) / k
                share = self.needs.count(node.output) / self.graph.types[node.output].elements
                cycles += steps * share / (m * n * self.chip.core_count)
            fewest = min(self.needs.count(name) for name in (end, *(node.output for node in nodes)))
            left, others = (left + fewest, others) if cubes else (left, others + fewest)
        width = 1 if any(kind.dtype == "int8" for kind in self.graph.types.values()) else 2
        return cycles, left * width, others * width

    def _on_cube(self, node: Node) -> bool:
        """Tell whether a node is products that the chip's cube multiplies."""
        dtype = self.graph.types[node.inputs[0]].dtype if node.inputs else ""
        return dtype in self.chip.cube and self._sums(node, 1) > 0

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
        if node.op not in ("conv2d", "conv_transpose2d"):
            return 0
        groups, weight = node.attr("groups", 1), self.graph.types[node.inputs[1]].shape
        channels = weight[1] if node.op == "conv2d" else weight[0] // groups
        if channels < 16 and groups > 1:
            return 0
        rows, columns = self.needs.windows[node.name]
        steps = sum(
            many * each * _up(channels * high * wide, depth)
            for high, many in rows.counts.items()
            for wide, each in columns.counts.items()
        )
        return out.shape[0] * out.shape[1] * steps

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
        return sum(self._lanes(node) * self._repeat_cycles(node) for node in self.nodes) / lanes

    def _repeat_cycles(self, node: Node) -> float:
        """Return the cycles of a repeat of all instructions that a node takes at least."""
        costs, most = self.chip.vector_costs, self.chip.max_repeat
        each = {n: c.slope_cycles + c.head_cycles / most for n, c in costs.items()}
        usual, least = each["default"], min(each.values())
        each |= {"vrec": min(each.get(n, usual) for n in ("vrec", "vdiv")), "": least}
        return sum(each.get(name, usual) for name in CURVES.get(node.op, ("",)))

    def _lanes(self, node: Node) -> int:
        """Return the lanes that a node takes of instructions, at least."""
        out, given = self.graph.types[node.output], self.graph.in_types(node)
        if DTYPE_BYTES[out.dtype] < 2:
            return 0
        count = self.needs.count(node.output)
        if node.op in CURVES:
            alone = node.has("reduction") and out.shape[node.attr("axis", -1)] < 2
            return 0 if alone else count
        if node.op in LARGEST:
            return count if given[0].elements >= 2 * out.elements else 0
        if node.op == "max_pool2d":
            rows, columns = self.needs.windows[node.name]
            lone = rows.counts[1] * columns.counts[1]
            return max(0, count - lone * out.shape[0] * out.shape[1])
        return 0

    # -- memory -------------------------------------------------------------------------------
    def memory_bytes(self) -> int:
        """Return the bytes that cross the memory interface."""
        graph = self.graph
        moved = sum(_bytes(graph, n) for n in graph.inputs if n in self.needs.read)
        moved += sum(_bytes(graph, n) for n in self._weights())
        computed = {n for node in self.nodes if not moves(node) for n in node.outputs}
        written = sum(_bytes(graph, n) for n in computed.intersection(graph.outputs))
        cached = self.chip.l2.size_bytes if self.chip.l2.kind == "cache" else 0
        return moved + max(0, written - cached)

    def _weights(self) -> set[str]:
        """Return the constants that products need to the last number."""
        found: set[str] = set()
        for node in self.nodes:
            source = self.graph.producers.get(node.inputs[0])
            padded = source is not None and source.op == "pad"
            if (slides(node) and not node.has("pooling") and not padded) or node.op in PRODUCTS:
                found.update(n for n in node.inputs[:2] if self.needs.is_whole(n))
        constants = self.graph.constants
        return {n for n in found if n in constants and not isinstance(constants[n].data, Fill)}

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
        if not self._on_cube(node):
            return 0.0
        into = min(p.startup_cycles for (_, b), p in chip.paths.items() if b in ("L0A", "L0B"))
        out = min(p.startup_cycles for (a, _), p in chip.paths.items() if a == "L0C")
        return into + chip.cube_head_cycles + 1 + out


# -- graphs ----------------------------------------------------------------------------------------
def _bytes(graph: Graph, name: str) -> int:
    """Return the bytes of a tensor's elements, without padding."""
    kind = graph.types[name]
    return kind.elements * DTYPE_BYTES[kind.dtype]


def _up(size: int, unit: int) -> int:
    return -(-size // unit)


# -- where the rest of the time goes -------------------------------------------------------------
TERMS: Mapping[str, str] = {
    "bound": "what no schedule or slicing goes below, one launch of it",
    "launches": "kernels started, but for the first",
    "cube": "products with zeros that pad, or in halos, or hidden by the bound",
    "cube fill": "the slowest cube beyond an even share: heads, idle cores",
    "memory": "device memory beyond the bound's bytes: spills, second reads",
    "vector": "vector work that neither cube nor memory hides",
    "copies": "copies between buffers that nothing above hides",
    "AI CPU": "operators without a kernel, and their launches",
    "barriers": "all cores wait for each other, inside a kernel or between two of one launch",
    "waits": "all that is left: latencies, flags, turns",
}
"""The terms in order, and what each is."""
FIRST = {"cube": ("cube", "cube fill"), "memory": ("memory",), "vector": ("vector",)}
"""Layers that are cut first, by what limits the bound; results leave on a pipe that copies."""
LAYERS = ("cube", "cube fill", "memory", "vector", "copies", "waits")


def ledger(times: NetworkTimeline, bound: Bound) -> dict[str, float]:
    """Return seconds by term, in the order of `TERMS`; they add up to the time of the network."""
    first = FIRST.get(bound.limit, ())
    order = (*first, *(name for name in LAYERS if name not in first))
    cycles, launches = Counter[str](), 0
    for op in times.operators:
        if isinstance(op.timeline, CpuTimeline):
            cycles["AI CPU"] += op.timeline.total_cycles
            continue
        if op.timeline.start in ("cold", "queued"):
            launches += op.timeline.launch_cycles
        else:
            cycles["barriers"] += op.timeline.launch_cycles
        cycles["barriers"] += op.timeline.sync_cycles
        for phase in op.timeline.phases:
            _cut(phase, order, cycles)
    clock = times.chip.clock_hz
    found = {name: cycles[name] / clock for name in (*order, "barriers", "AI CPU")}
    found["launches"] = launches / clock
    found["bound"] = _taken(found, bound.launch, ("launches",))
    found["bound"] += _taken(found, bound.work_s, (*order, "barriers", "AI CPU", "launches"))
    return {name: found[name] for name in TERMS}


def _taken(found: dict[str, float], seconds: float, order: tuple[str, ...]) -> float:
    """Take seconds from terms in order, as far as they go; return how many."""
    left = seconds
    for name in order:
        part = min(found[name], left)
        found[name] -= part
        left -= part
    return seconds - left


def account(times: NetworkTimeline, bound: Bound) -> dict[str, Any]:
    """Return bound, ledger, bytes and counts of a network as plain data, ready for JSON."""
    return {
        "bound_s": bound.time_s,
        "ledger": ledger(times, bound),
        "memory_bytes": times.memory_bytes,
        "kernels": times.kernels,
        "launches": times.launches,
    }


def ledger_table(*ledgers: Mapping[str, float]) -> list[str]:
    """Return the terms as lines: of each ledger microseconds and share, and what the term is."""
    totals = [sum(found.values()) or 1.0 for found in ledgers]
    heads = ("before", "after") if len(ledgers) == 2 else ()
    lines = [f"where the time goes:{''.join(f'{head:>20}' for head in heads)}".rstrip()]
    for name, meaning in TERMS.items():
        parts = [found[name] for found in ledgers]
        if max(parts) >= 5e-9:
            pairs = zip(parts, totals, strict=True)
            columns = (f"{s * 1e6:10.2f} us {s / total:6.1%}" for s, total in pairs)
            lines.append(f"  {name:9} {' '.join(columns)}  {meaning}")
    return lines


def _cut(phase: Timeline, order: tuple[str, ...], cycles: Counter[str]) -> None:
    """Add what each layer of a phase is longer than those before it."""
    chip, height, busy = phase.chip, 0.0, Counter[str]()
    for pipe, worked in phase.busy_cycles.items():
        kind = pipe.rpartition(".")[2]  # of AIC.M in a mix launch
        busy[kind] = max(busy[kind], worked)
    share = phase.macs / (chip.macs_per_cycle(phase.dtype) * chip.core_count) if phase.macs else 0.0
    memory = phase.memory_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz
    reach = {
        "cube": share,
        "cube fill": busy["M"],
        "memory": memory,
        "vector": busy["V"],
        "copies": max((c for pipe, c in busy.items() if pipe not in ("M", "V")), default=0),
        "waits": phase.cycles,
    }
    for name in order:
        top = min(max(reach[name], height), phase.cycles)
        cycles[name] += top - height  # type: ignore[assignment]
        height = top
