"""Seconds that no schedule, fusion, slicing or order of a network's operators goes below.

    time >= max(cube, vector, results, memory, chain) + launch

Each holds by itself, for any number of kernels, because whoever computes the operators of a graph,
each result that is needed at least once and by its definition,

cube      multiplies on the cubes. A step of m0 x k0 x n0 adds to at most m0 n0 sums, and a sum over
          k products stands in at least ceil(k / k0) steps, whatever shares its step: rows of other
          images, columns of other weights, blocks of a diagonal. So there are at least
          sums * ceil(k / k0) / (m0 n0) steps, a cycle each, divided among the cores. Only products
          with numbers count, none with padding. Those of a pixel an image vector units may do.
vector    computes there what no cube and no path out of it can: for each result of `CURVES` a lane
          of the instructions of its definition, for maxima of several numbers of any one. Means,
          sums, norms, depthwise convolutions and those in small groups may go to the cube: they
          count nothing. On chips with one core for both, what leaves the cube passes through the
          same pipe and is added. So every number counts there that neither a path nor the cube
          alone makes: those of these convolutions, sums inside a function. A path may do a ReLU.
          On others small groups leave the cube or are a step per tap there, as is best.
results   takes every sum out of L0C, in two bytes, or in one if the graph has bytes, by the
          quickest path, or, to vector units apart, by the quickest path to them if a function
          reads it; sums only added up may be added up inside and leave once.
memory    reads the weights and inputs that are needed whole: L2 starts empty, so once at least;
          and writes of the results what a cache cannot hold at the end. Spills count as none, also
          on chains: a tensor larger than L2, L1 and UB need not exist at once, as slices of it may
          go through all operators that read them, and weights between may be read again instead.
          Removing a cost from every schedule leaves a bound of all of them.
chain     adds up what comes one after another, on as many cores as you like. It is the longest of
          1. waits. A result needs something of each input (of a join, of one): this goes from where
             it was made to where the next unit reads, each copy starts up, pipes tell each other
             by two flags, cores of another kind are told, L2 is late. Barriers count as none: a
             core may go on with what it has made itself.
          2. work and waits, where a product needs every number it reads for each result, as fully
             connected layers of one image do. Before its first result all work behind it is done,
             and the last of that has come: from core to core, told of it, through memory, unless
             one core did all. What reads the product begins later, so that both times add up.
             Several images do not wait for each other: no product of theirs is such a one.
          3. work and weights read late. Of a tensor through which all passes some number is the
             last, all work behind it done then; what depends on it meets weights that are still
             to be multiplied. A part may lie in L2, if that is a cache, and in the buffers of the
             core that has the number: others hear of it at a barrier, which empties theirs, or,
             apart from vector units, by flags. The rest comes from memory, or by those cores' path.
launch    starts a kernel. With cores of two kinds one launch is either of both, which starts later,
          or numbers that a product leaves to a function, or this to that, go from launch to launch.

Only the numbers of constants are taken as arbitrary and as given: algebra (Winograd, the product of
two weights) is a pass, not a schedule, and the bound is that of the graph after passes, in the
format it runs in (`compile_stages(...).rewritten`): few cubes multiply fp32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ascend_lab.compiler.ir import Graph, Node, operator_of
from ascend_lab.compiler.needs import BY_ROW, PRODUCTS, Needs, moves
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.sim import least_ways, rate_of, told_cycles

CURVES = {
    **dict.fromkeys(("exp", "elu", "softmax", "log_softmax"), ("vexp",)),
    **dict.fromkeys(("sigmoid", "tanh", "erf"), ("vexp", "passed", "over")),
    "silu": ("vexp", "passed", "share"),
    "gelu": ("vmul", "vmul", "vexp", "passed", "share"),
    **dict.fromkeys(("sqrt", "rsqrt", "rec", "abs", "leaky_relu"), ("least",)),
    "log": ("vln",),
    "softplus": ("vexp", "passed", "vln"),
    "relu": ("low",),
    **dict.fromkeys(("clip", "relu6", "hard_sigmoid"), ("low", "high")),
    "hard_swish": ("low", "high", "vmul"),
}
"""Operators with functions per result that are no sum of products, no scale: their instructions.

Of exponentials, logarithms and products of two computed numbers there is one each; "over", one over
a number, is the quickest of two, "share", a quotient, that and a product, or vdiv; "least" is the
quickest of all. So is what a number costs that has "passed" through the vector unit or the cube,
and a limit, "low" or "high".
"""
LARGEST = ("reduce_max", "reduce_min", "global_max_pool")
"""Operators that leave the largest or smallest of numbers."""
CUBE_SIDE = ("L1", "L0A", "L0B", "L0C")
"""Buffers of the cube."""
SUMMED = ("add", "sub", "reshape", "trans_data", "transpose")
"""What lies between sums that may be added up in L0C."""
Times = tuple[float, ...]
"""Cycles until numbers lie where the cube reads, where the vector unit does, and in memory."""
NOW: Times = (0.0, 0.0, 0.0)
"""Of constants."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Least seconds by what limits them; `time_s` is the bound: 0 of what takes no kernel."""

    cube: float = 0.0
    vector: float = 0.0
    results: float = 0.0
    memory: float = 0.0
    chain: float = 0.0
    launch: float = 0.0

    @property
    def limit(self) -> str:
        """What the bound is: "cube", "vector", "results", "memory" or "chain"."""
        return max(self.__slots__[:-1], key=self.__getattribute__)

    @property
    def unit(self) -> str:
        """The limit, or the unit that works longest if that is the chain."""
        units = ("cube", "vector", "results", "memory")
        return max(units, key=self.__getattribute__) if self.limit == "chain" else self.limit

    @property
    def work_s(self) -> float:
        """Seconds without the launch."""
        return float(getattr(self, self.limit))

    @property
    def time_s(self) -> float:
        """Seconds in all."""
        return self.work_s + self.launch


def bound_of(graph: Graph, chip: Chip) -> Bound:
    """Return what a graph takes on a chip at least, however it is compiled: 0 without a kernel."""
    work = _Work(graph, chip)
    if all(map(moves, work.nodes)):
        return Bound()
    either = work.products()
    work.compared()
    cube, vector, leaving = (sum(load.cycles[unit] for load in work.loads) for unit in range(3))
    if not chip.combined:
        ways = [(count * taps * work.least / work.lanes, there) for taps, count, there in either]
        ways.sort(key=lambda way: way[0] / way[1])
        vector, leaving = _balanced(vector, leaving, ways)
    clock = chip.clock_hz
    on_cpu = chip.ai_cpu_overhead_s
    starts = (chip.launch_overhead_s, chip.queued_launch_s)
    cold, next_s = (min(s, on_cpu or s) for s in starts)
    apart = work.more_launches() * round(next_s * clock)
    return Bound(
        cube / clock,
        vector / clock,
        leaving / clock,
        work.memory_bytes() / chip.device_memory.rate_bytes_per_s,
        work.chain() / clock,
        (round(cold * clock) + min(apart, round(chip.mix_start_s * clock))) / clock,
    )


def _balanced(
    vector: float, path: float, either: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Return the cycles of two units at once, after a share of what is left for either of them.

    `either` are cycles there and there, those first that suit the vector unit best.
    """
    path += sum(there for _, there in either)
    for here, there in either:
        share = min(max((path - vector) / (here + there), 0.0), 1.0)
        vector = vector + share * here
        path = path - share * there
    return vector, path


class _Load(NamedTuple):
    """Cycles of cubes, vector units and ways out of L0C for a tensor, once `node` has begun."""

    node: str
    tensor: str
    cycles: Times


class _Work:
    """What of a graph is needed, and what that costs at least, in cycles of all cores."""

    def __init__(self, graph: Graph, chip: Chip) -> None:
        self.graph = graph
        self.chip = chip
        self.lanes = chip.vector_bytes_per_repeat // 2 * chip.core_count
        self.lanes *= chip.vector_cores_per_core
        costs = chip.vector_costs.items()
        self.costs = {n: c.slope_cycles + c.head_cycles / chip.max_repeat for n, c in costs}
        self.lone = {name: float(c.slope_cycles + c.head_cycles) for name, c in costs}
        self.least = min(self.costs.values())
        self.bytes = any(kind.dtype == "int8" for kind in graph.types.values())
        self.width = 1 if self.bytes else 2
        self.needs = Needs(graph)
        out = rate_of(chip, ("L0C",))
        to_vector = rate_of(chip, CUBE_SIDE, ("GM", "UB"))
        self.any_way = out * chip.core_count
        self.to_vector = to_vector * chip.core_count
        once = {(node.op, node.inputs, str(node.attrs)): node for node in graph.nodes}
        self.nodes = [
            node
            for node in once.values()
            if self.needs.varies.issuperset(node.outputs) and self.needs.share(node.output)
        ]
        self.needed = {node.name for node in self.nodes}
        self.weights = self.needs.weights(self.nodes)
        self.loads, self.begun = list[_Load](), dict[str, float]()

    # -- cube ---------------------------------------------------------------------------------
    def products(self) -> list[tuple[int, float, float]]:
        """Note the cycles of products and of the sums that leave; return what else is summed up.

        That is, apart from the vector units, (products, results of so many each, cycles to leave).
        """
        ends: dict[str, list[Node]] = {}
        for node in self.nodes:
            taps = node.name in self.needs.windows and not node.has("pooling")
            if self._on_cube(node) or (taps and not self._on_cube(node, either=True)):
                ends.setdefault(self._end(node.output), []).append(node)
        others = list[tuple[int, float, float]]()
        rate = max(self.any_way, self.chip.vector_bytes_per_repeat * self.chip.core_count)
        for end, nodes in ends.items():
            cubes = [node for node in nodes if self._on_cube(node)]
            for node in cubes:
                m, k, n = self.chip.cube_shape(self.graph.types[node.inputs[0]].dtype)
                steps = self.needs.sums(node, k)
                if len(nodes) > 1:  # several sums in one may share a step
                    steps = self.needs.sums(node, 1) / k
                share = self.needs.count(node.output) / self.graph.types[node.output].elements
                cycles = steps * share / (m * n * self.chip.core_count)
                self.loads.append(_Load(node.output, node.output, (cycles, 0.0, 0.0)))
            fewest = min(self.needs.count(name) for name in (end, *(node.output for node in nodes)))
            leave = self._leave(end, fewest)
            tapped = [] if cubes else self.needs.tapped(nodes, fewest)
            passed = leave if cubes else sum(count for _, count in tapped) * self.width / rate
            out = (0.0, passed * self.chip.combined, leave if cubes else 0.0)
            self.loads.append(_Load(nodes[-1].output, end, out))
            others += [(taps, count, leave * count / fewest) for taps, count in tapped]
        return others

    def _leave(self, end: str, count: int) -> float:
        """Return the cycles in which `count` sums leave the cubes.

        Apart from the vector units, those that a function reads leave them altogether.
        """
        readers = (n for n in self.graph.readers[end] if n.name in self.needed)
        lanes = (self._lanes(n) for n in readers if self._repeat_cycles(n, self.costs))
        read = max(lanes, default=0)
        far = 0 if self.chip.combined else min(read, count)
        return self.width * (far / self.to_vector + (count - far) / self.any_way)

    def _on_cube(self, node: Node, *, either: bool = False) -> bool:
        """Tell whether the cube multiplies what a node is: it alone, or `either` unit may."""
        dtype = self.graph.types[node.inputs[0]].dtype if node.inputs else ""
        pixel = node.op == "conv2d" and self.graph.types[node.inputs[0]].shape[2:] == (1, 1)
        return dtype in self.chip.cube and self.needs.sums(node, 1) > 0 and (either or not pixel)

    def _end(self, name: str) -> str:
        """Return the tensor in which sums leave the cube at the latest."""
        while name not in self.graph.outputs:
            readers = self.graph.readers[name]
            if len(readers) != 1 or readers[0].op not in SUMMED:
                break
            name = readers[0].output
        return name

    # -- vector units -------------------------------------------------------------------------
    def compared(self) -> None:
        """Note the cycles of the vector units, results of the cubes left out."""
        for node in self.nodes:
            if cycles := self._lanes(node) * self._repeat_cycles(node, self.costs) / self.lanes:
                self.loads.append(_Load(node.output, node.output, (0.0, cycles, 0.0)))

    def _repeat_cycles(self, node: Node, costs: Mapping[str, float]) -> float:
        """Return the cycles of all instructions that a node takes at least, at `costs` each."""
        usual = costs["default"]
        least = min(costs.values())
        each = {**costs, "least": least, "passed": least if self.chip.combined else 0.0}
        each["over"] = min(costs.get(n, usual) for n in ("vrec", "vdiv"))
        each["share"] = min(each["over"] + costs.get("vmul", usual), costs.get("vdiv", usual))
        settings = operator_of(node.op).settings(node.attrs)
        low = settings.get("low", 0.0)
        high = settings.get("high", 6.0)
        each["low"] = 0.0 if low in (-inf, 0.0) or self.bytes else least  # a path's ReLU
        each["high"] = 0.0 if high == inf or self.bytes else least  # bytes are limited
        return sum(each.get(name, usual) for name in CURVES.get(node.op, ("least",)))

    def _lanes(self, node: Node) -> int:
        """Return the lanes that a node takes of instructions, at least."""
        out = self.graph.types[node.output]
        given = self.graph.in_types(node)
        if DTYPE_BYTES[out.dtype] < 2:
            return 0
        count = self._fewest(node.output)
        if node.op in CURVES:
            alone = node.has("reduction") and out.shape[node.attr("axis", -1)] < 2
            return 0 if alone else count
        if node.op in LARGEST:
            return count if given[0].elements >= 2 * out.elements else 0
        if node.has("largest"):
            rows, columns = self.needs.windows[node.name]
            lone = rows.counts[1] * columns.counts[1]
            return max(0, count - lone * out.shape[0] * out.shape[1])
        return 0

    def _fewest(self, name: str) -> int:
        """Return how many numbers of a tensor functions are done to: to the largest, if pooled."""
        count = self.needs.count(name)
        readers = self.graph.readers
        while name not in self.graph.outputs and len(readers[name]) == 1:
            (reader,) = readers[name]
            name = reader.output
            if reader.has("largest"):
                return min(count, self.needs.count(name))
            if not reader.has("lanes"):
                break
        return count

    # -- memory -------------------------------------------------------------------------------
    def memory_bytes(self) -> int:
        """Return the bytes that cross the memory interface."""
        graph = self.graph
        moved = sum(graph.types[n].data_bytes for n in graph.inputs if n in self.needs.read)
        moved += sum(graph.types[n].data_bytes for n in self.weights)
        computed = {n for node in self.nodes if not moves(node) for n in node.outputs}
        written = sum(graph.types[n].data_bytes for n in computed.intersection(graph.outputs))
        cached = self.chip.l2.size_bytes if self.chip.l2.kind == "cache" else 0
        return moved + max(0, written - cached)

    # -- chain --------------------------------------------------------------------------------
    def chain(self) -> float:
        """Return the cycles of what comes one after another; what `loads` notes has to be there."""
        away = least_ways(self.chip)
        since = 0
        ready: dict[str, Times] = dict.fromkeys(self.graph.inputs, away["GM"])
        for at, node in enumerate(self.graph.nodes):
            if not self.needs.varies.issuperset(node.outputs):
                continue
            into = self._into(node, ready)
            ways = list[Times]()
            met = since
            for own, place in self._wait(node):
                end = into[unit := place == "UB"] + own
                if self.needs.meets(node):
                    end = max(end, self._done(own, node, since, at, unit))
                    met = at + 1
                ways.append(tuple(end + far for far in away[place]))
            since = met
            found = tuple(map(min, zip(*ways or [into], strict=True)))
            begun = [into[place == "UB"] for _, place in self._wait(node)]
            self.begun[node.output] = min(begun or into)
            ready.update(dict.fromkeys(node.outputs, found))
        ends = (ready.get(name, NOW)[2] for name in self.graph.outputs)
        return max(self._done() if since else 0.0, self._read(), *ends)

    def more_launches(self) -> int:
        """Return how many kernels come after the first, at least, if none has cores of two kinds.

        `ready` counts kernels before those where cube, vector unit and memory have a tensor.
        """
        ready = dict[str, Times]()
        for node in self.graph.nodes:
            cube, vector, memory = self._into(node, ready)
            ends = {"L0C": (cube, cube + 1, cube), "UB": (vector + 1, vector, vector)}
            ways = [ends[place] for _, place in self._wait(node)] or [(cube, vector, memory)]
            end = tuple(map(min, zip(*ways, strict=True)))
            ready.update(dict.fromkeys(node.outputs, end))
        both = all(any(load.cycles[unit] for load in self.loads) for unit in (0, 1))
        return int(max(both, *(ready.get(name, NOW)[2] for name in self.graph.outputs)))

    def _read(self) -> float:
        """Return when the weights can be read that are used after a tensor's last number.

        A cache may hold a part of them then, so may buffers: of one core, if no flag tells others.
        """
        chip = self.chip
        at = {n: at for at, o in enumerate(self.graph.nodes) for n in o.outputs}
        cores = 1 if chip.combined else chip.core_count
        cached = chip.l2.size_bytes if chip.l2.kind == "cache" else 0
        held = cached + sum(chip.buffers.values()) * cores
        if sum(self.graph.types[name].data_bytes for name in self.weights) <= held:
            return 0.0
        rate = rate_of(chip, ("GM",)) * cores
        rate = max(rate, chip.device_memory.rate_bytes_per_s / chip.clock_hz)
        found = 0.0
        total = NOW
        loads = sorted((at[x.tensor], x.cycles) for x in self.loads)
        for name, size in reversed(self.needs.later(self.weights).items()):
            while loads and loads[0][0] < at[name]:
                total = tuple(map(sum, zip(total, loads.pop(0)[1], strict=True)))
            found = max(found, max(total) + (size - held) / rate)
        return found

    def _into(self, node: Node, ready: Mapping[str, Times]) -> Times:
        """Return when a node may begin: each result needs something of all inputs, or of one."""
        windows = self.needs.windows.get(node.name, ())
        alone = node.op in BY_ROW and self.graph.types[node.output].shape[node.attr("axis", -1)] < 2
        each = windows or node.op in PRODUCTS
        each = each or node.has("lanes", "pointwise", "broadcasts", "reduction")
        if alone or node.op == "masked_softmax" or any(w.counts[0] for w in windows):
            return NOW  # some results are the same whatever is read
        given = [ready.get(name, NOW) for name in node.inputs]
        return tuple(map(max if each else min, zip(*given, strict=True))) if given else NOW

    def _wait(self, node: Node) -> list[tuple[float, str]]:
        """Return the cycles of a node's first result and where it lies, by either unit, or none."""
        if node.name in self.needed and self._on_cube(node, either=True):
            ways = [(self.chip.cube_head_cycles + 1.0, "L0C"), (min(self.lone.values()), "UB")]
            return ways[: 1 + (not self._on_cube(node))]
        all_there = node.name in self.needed and self._lanes(node) == self.needs.count(node.output)
        own = self._repeat_cycles(node, self.lone) if all_there else 0.0
        return [(own, "UB")] if own else []

    def _done(
        self, own: float = 0.0, node: Node | None = None, since: int = 0, stop: int = 0, to: int = 0
    ) -> float:
        """Return when all may be done, or what a result of `node` needs, and that result.

        `node` needs all of its input on unit `to`, `since` is where to begin: work of all cores,
        the way of its last, `own` cycles; unless one core does all, some goes through memory.
        """
        behind = set(node.inputs[:1]) if node else set[str]()
        left = behind.copy()
        cores = self.chip.core_count
        for other in reversed(self.graph.nodes[since:stop]):
            if behind.issuperset(other.outputs):
                behind.update(self.needs.whole(other))
                left.update(() if other.op in SUMMED else other.inputs)
        found = 0.0
        total = NOW
        away = least_ways(self.chip)
        ends = away["L0C"], away["UB"], (away["L1"][0], 0.0, 0.0)
        near = [far[to] + own if node else far[2] for far in ends]
        back = told_cycles(self.chip) + away["GM"][to] + own
        loads = [
            (self.begun[load.node], load.cycles)
            for load in self.loads
            if node is None or (load.tensor in behind and (load.cycles[0] or load.tensor in left))
        ]
        for begin, cycles in sorted(loads, reverse=True):
            total = tuple(map(sum, zip(total, cycles, strict=True)))
            for work, way, far in zip(total, near, ends, strict=True):
                if work:
                    apart = work + (1 - 1 / cores) * (far[2] + back) if node else 0.0
                    found = max(found, begin + work + way, begin + min(work * cores + way, apart))
        return found
