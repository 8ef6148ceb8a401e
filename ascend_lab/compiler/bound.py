"""A lower bound of a network's time: it holds for every schedule, fusion, slicing and order.

    time >= max(cube, vector, results, memory, chain) + launch

Each term is a lower bound by itself, for any number of kernels. All of them rest on one assumption:
whoever computes the graph computes each result that is needed at least once, by the definition of
its operator. The proof of each term is in the docstring of the method that computes it:

    term      lower bound of                                        proof
    cube      steps of the cubes                                    `_Work.products`
    vector    instructions of the vector units                      `_Work.functions`
    results   bytes that leave L0C                                  `_Work.products`
    memory    bytes that cross the interface of device memory       `_Work.memory_bytes`
    chain     the longest chain of dependent steps, any cores       `_Work.chain`
    launch    start of the first kernel and of those that follow    `_Work.more_launches`

Values of constants count as arbitrary: algebra (Winograd, the product of two weights) is a pass and
not a schedule. So the bound is that of the graph after passes, in the number format in which it
runs (`compile_stages(...).rewritten`): few cubes multiply fp32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ascend_lab.compiler.ir import Graph, Node, operator_of
from ascend_lab.compiler.needs import BY_ROW, PRODUCTS, Needs, moves
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.sim import least_signal_cycles, outgoing_rate, shortest_latencies

VECTOR_FUNCTIONS = {
    **dict.fromkeys(("exp", "elu", "softmax", "log_softmax"), ("vexp",)),
    **dict.fromkeys(("sigmoid", "tanh", "erf"), ("vexp", "pass through", "reciprocal")),
    "silu": ("vexp", "pass through", "quotient"),
    "gelu": ("vmul", "vmul", "vexp", "pass through", "quotient"),
    **dict.fromkeys(("sqrt", "rsqrt", "rec", "abs", "leaky_relu"), ("quickest",)),
    "log": ("vln",),
    "softplus": ("vexp", "pass through", "vln"),
    "relu": ("lower limit",),
    **dict.fromkeys(("clip", "relu6", "hard_sigmoid"), ("lower limit", "upper limit")),
    "hard_swish": ("lower limit", "upper limit", "vmul"),
}
"""Operators that only a vector unit computes, with the fewest instructions for a result.

A cube computes sums of products and a path out of L0C scales; neither computes these functions.

    vexp, vln, vmul            an exponential, a logarithm, a product of two computed numbers
    reciprocal                 the faster of vrec and vdiv
    quotient                   a reciprocal and vmul, or vdiv, whichever is faster
    quickest                   the fastest instruction that the chip has
    pass through               one more instruction, the quickest, on chips where the cube shares
                               the vector pipe: the cube may have computed the argument, but its
                               result passes through that pipe
    lower limit, upper limit   the quickest instruction, or none where a path out of L0C clips
"""
LARGEST = ("reduce_max", "reduce_min", "global_max_pool")
"""Operators whose result is the largest or smallest of several numbers."""
CUBE_SIDE = ("L1", "L0A", "L0B", "L0C")
"""Buffers on the side of the cube."""
SUMMED = ("add", "sub", "reshape", "trans_data", "transpose")
"""Operators between products whose sums may be added up in L0C before they leave it."""
Times = tuple[float, ...]
"""Three cycles: until a number is where the cube reads, where the vector unit reads, and in memory.

For work: cycles of the cubes, of the vector units, and of the paths out of L0C.
"""
NOW: Times = (0.0, 0.0, 0.0)
"""The times of constants: they may be in every buffer from the start."""
UNIT_OF_BUFFER = {"L0C": 0, "UB": 1}
"""Index in `Times` of the unit that writes a buffer: 0 is the cube, 1 the vector unit."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bounds in seconds, by term; `time_s` is the bound, 0 for a graph without kernels."""

    cube: float = 0.0
    vector: float = 0.0
    results: float = 0.0
    memory: float = 0.0
    chain: float = 0.0
    launch: float = 0.0

    @property
    def limit(self) -> str:
        """The largest term: "cube", "vector", "results", "memory" or "chain"."""
        return max(self.__slots__[:-1], key=self.__getattribute__)

    @property
    def unit(self) -> str:
        """The largest term among units: if the chain is the limit, the unit that works longest."""
        units = ("cube", "vector", "results", "memory")
        return max(units, key=self.__getattribute__) if self.limit == "chain" else self.limit

    @property
    def work_s(self) -> float:
        """Seconds without the launch."""
        return float(getattr(self, self.limit))

    @property
    def time_s(self) -> float:
        """Seconds of work and launch."""
        return self.work_s + self.launch


def bound_of(graph: Graph, chip: Chip) -> Bound:
    """Return the least time of a graph on a chip, however it is compiled: 0 without a kernel."""
    work = _Work(graph, chip)
    if all(map(moves, work.nodes)):
        return Bound()
    small_groups = work.products()
    work.functions()
    cube, vector, leaving = (sum(load.cycles[unit] for load in work.loads) for unit in range(3))
    if not chip.combined:
        # chips with vector cores: a small group costs a vector step for each tap, or, on the
        # cube, cycles to leave L0C
        candidates = [
            (group.results * group.products * work.cheapest_cycles / work.lanes, group.leave_cycles)
            for group in small_groups
        ]
        candidates.sort(key=lambda candidate: candidate[0] / candidate[1])
        vector, leaving = _balanced(vector, leaving, candidates)
    clock = chip.clock_hz
    on_cpu = chip.ai_cpu_overhead_s
    starts = (chip.launch_overhead_s, chip.queued_launch_s)
    # an operator on the AI CPU may start sooner than a kernel
    cold_s, queued_s = (min(start_s, on_cpu or start_s) for start_s in starts)
    more_launch_cycles = work.more_launches() * round(queued_s * clock)
    mix_start_cycles = round(chip.mix_start_s * clock)
    launch_cycles = round(cold_s * clock) + min(more_launch_cycles, mix_start_cycles)
    return Bound(
        cube=cube / clock,
        vector=vector / clock,
        results=leaving / clock,
        memory=work.memory_bytes() / chip.device_memory.rate_bytes_per_s,
        chain=work.chain() / clock,
        launch=launch_cycles / clock,
    )


def _balanced(
    vector: float, path: float, shiftable: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Divide work that may go to either between vector unit and path; return the cycles of both.

    `shiftable` holds (cycles on the vector unit, cycles on the path) of that work, sorted by their
    ratio: the work that suits the vector unit best comes first. All of it starts on the path. Each
    entry moves as far as the path still takes longer than the vector unit; at the end both take
    equally long. This is the optimum of a fractional knapsack; a schedule, which has to give out
    whole results, ends no earlier.
    """
    vector_total = vector
    path_total = path + sum(path_cycles for _, path_cycles in shiftable)
    for vector_cycles, path_cycles in shiftable:
        excess = (path_total - vector_total) / (vector_cycles + path_cycles)
        fraction = min(max(excess, 0.0), 1.0)
        vector_total = vector_total + fraction * vector_cycles
        path_total = path_total - fraction * path_cycles
    return vector_total, path_total


class _Load(NamedTuple):
    """Cycles that a tensor takes on cubes, vector units and the paths out of L0C.

    None of this work begins before the node whose output is called `node`.
    """

    node: str
    tensor: str
    cycles: Times


class _SmallGroup(NamedTuple):
    """Results of a convolution in groups of few channels, which either unit may compute.

    Each result is a sum of `products` products; `leave_cycles` is the time in which all of these
    results leave L0C if the cube computes them.
    """

    products: int
    results: int
    leave_cycles: float


class _Work:
    """The work that a graph needs and its least cost, in cycles with all cores working."""

    def __init__(self, graph: Graph, chip: Chip) -> None:
        self.graph = graph
        self.chip = chip
        # lanes of fp16: 256 bytes a repeat are 128 lanes on each vector core
        self.lanes = chip.vector_bytes_per_repeat // 2 * chip.core_count
        self.lanes *= chip.vector_cores_per_core
        costs = chip.vector_costs.items()
        # cycles of a repeat in the longest instruction, which spreads its head over all repeats
        self.repeat_costs = {n: c.slope_cycles + c.head_cycles / chip.max_repeat for n, c in costs}
        # cycles of an instruction with one repeat
        self.single_repeat_cycles = {
            name: float(c.slope_cycles + c.head_cycles) for name, c in costs
        }
        self.cheapest_cycles = min(self.repeat_costs.values())
        self.has_int8 = any(kind.dtype == "int8" for kind in graph.types.values())
        self.result_bytes = 1 if self.has_int8 else 2
        self.needs = Needs(graph)
        core_l0c_rate = outgoing_rate(chip, ("L0C",))
        core_to_vector_rate = outgoing_rate(chip, CUBE_SIDE, ("GM", "UB"))
        self.l0c_rate = core_l0c_rate * chip.core_count
        self.l0c_to_vector_rate = core_to_vector_rate * chip.core_count
        # equal nodes need to be computed once
        distinct_nodes = {(node.op, node.inputs, str(node.attrs)): node for node in graph.nodes}
        self.nodes = [
            node
            for node in distinct_nodes.values()
            if self.needs.varies.issuperset(node.outputs) and self.needs.share(node.output)
        ]
        self.needed_nodes = {node.name for node in self.nodes}
        self.weights = self.needs.weights(self.nodes)
        self.loads = list[_Load]()
        self.starts = dict[str, float]()

    # -- cube ---------------------------------------------------------------------------------
    def products(self) -> list[_SmallGroup]:
        """Add the cycles of products and of sums that leave L0C; return work for either unit.

        Cube. (1) A step of m0 x k0 x n0 adds to at most m0 n0 sums. (2) A sum of k products needs
        at least ceil(k / k0) steps, whatever else shares them: rows of other images, columns of
        other weights, blocks of a diagonal. (3) So there are at least sums * ceil(k / k0) / (m0 n0)
        steps of a cycle each, and no better than an even share of them on every core. Products
        with padding do not count, nor do convolutions of single pixels, which vector units may do.

        Results. (1) Every sum leaves L0C once, in two bytes, or in one if the graph has int8. (2)
        Sums that are only added to others may be added inside L0C: one of them leaves. (3) All
        paths out of L0C together have the rate `l0c_rate`. Where a separate vector core reads the
        sum for a function, the sum takes the paths to that core: `l0c_to_vector_rate`.

        On chips with one core for cube and vector work, sums leave on the vector pipe: their cycles
        count there, too. Small groups are computed by the cube, or by a vector step for each tap.
        """
        small_groups = list[_SmallGroup]()
        for group_end, nodes in self._summed_groups().items():
            cube_nodes = [node for node in nodes if self._on_cube(node)]
            for node in cube_nodes:
                cycles = self._cube_cycles(node, shares_steps=len(nodes) > 1)
                self.loads.append(_Load(node.output, node.output, (cycles, 0.0, 0.0)))
            names = (group_end, *(node.output for node in nodes))
            fewest = min(self.needs.count(name) for name in names)
            leave_cycles = self._cycles_out_of_l0c(group_end, fewest)
            if cube_nodes:
                vector_pipe_cycles = leave_cycles
                path_cycles = leave_cycles
            else:
                of_group = self.needs.fewest_products(nodes, fewest)
                vector_pipe_cycles = self._least_cycles_of_either(of_group)
                path_cycles = 0.0  # counted by `bound_of`, which chooses the unit
                small_groups += [
                    _SmallGroup(taps, count, leave_cycles * count / fewest)
                    for taps, count in of_group
                ]
            on_vector_pipe = vector_pipe_cycles if self.chip.combined else 0.0
            leaving = (0.0, on_vector_pipe, path_cycles)
            self.loads.append(_Load(nodes[-1].output, group_end, leaving))
        return small_groups

    def _summed_groups(self) -> dict[str, list[Node]]:
        """Return the nodes whose sums are added up in L0C, by the last tensor of each group.

        Two convolutions that are added are one group; a product that nothing is added to is a group
        alone.
        """
        groups: dict[str, list[Node]] = {}
        for node in self.nodes:
            has_windows = node.name in self.needs.windows and not node.has("pooling")
            is_small_group = has_windows and not self._on_cube(node, either=True)
            if self._on_cube(node) or is_small_group:
                groups.setdefault(self._last_in_l0c(node.output), []).append(node)
        return groups

    def _cube_cycles(self, node: Node, *, shares_steps: bool) -> float:
        """Return the least cycles of a node's products, spread evenly over all cores.

        With `shares_steps`, sums of two nodes may share a step that neither fills.
        """
        m0, k0, n0 = self.chip.cube_shape(self.graph.types[node.inputs[0]].dtype)
        steps = self.needs.sums(node, 1) / k0 if shares_steps else self.needs.sums(node, k0)
        # only needed and different results are computed
        needed_share = self.needs.count(node.output) / self.graph.types[node.output].elements
        return steps * needed_share / (m0 * n0 * self.chip.core_count)

    def _least_cycles_of_either(self, small_groups: Sequence[tuple[int, int]]) -> float:
        """Return the least cycles on the vector pipe of results that either unit may compute.

        They leave L0C on that pipe, or the vector unit computes them, a step for each tap.
        """
        rate = max(self.l0c_rate, self.chip.vector_bytes_per_repeat * self.chip.core_count)
        return sum(count for _, count in small_groups) * self.result_bytes / rate

    def _cycles_out_of_l0c(self, tensor: str, count: int) -> float:
        """Return the cycles in which `count` sums leave L0C.

        On chips with vector cores, sums that a function reads have to go to these cores.
        """
        readers = (n for n in self.graph.readers[tensor] if n.name in self.needed_nodes)
        counts = (
            self._vector_results(n) for n in readers if self._repeat_cycles(n, self.repeat_costs)
        )
        read_by_functions = max(counts, default=0)
        # only so many sums as a function reads must take the paths to the vector cores
        to_vector_count = 0 if self.chip.combined else min(read_by_functions, count)
        return self.result_bytes * (
            to_vector_count / self.l0c_to_vector_rate + (count - to_vector_count) / self.l0c_rate
        )

    def _on_cube(self, node: Node, *, either: bool = False) -> bool:
        """Tell whether the cube alone computes a node; with `either`, whether it can at all."""
        dtype = self.graph.types[node.inputs[0]].dtype if node.inputs else ""
        # on images of 1 x 1 pixel a convolution multiplies a vector: vector units may do it
        is_pixel = node.op == "conv2d" and self.graph.types[node.inputs[0]].shape[2:] == (1, 1)
        return dtype in self.chip.cube and self.needs.sums(node, 1) > 0 and (either or not is_pixel)

    def _last_in_l0c(self, name: str) -> str:
        """Return the last tensor whose sums may still be added up in L0C."""
        while name not in self.graph.outputs:
            readers = self.graph.readers[name]
            if len(readers) != 1 or readers[0].op not in SUMMED:
                break
            name = readers[0].output
        return name

    # -- vector units -------------------------------------------------------------------------
    def functions(self) -> None:
        """Add the cycles of functions on the vector units to `loads`.

        (1) No cube and no path out of it computes the functions of `VECTOR_FUNCTIONS` or the
        maximum of several numbers. (2) So each needed result takes one lane of every instruction of
        its definition; a maximum takes one lane of the quickest. (3) A repeat has `lanes` lanes on
        all cores together. Means, sums, norms and convolutions in small groups may go to the cube
        as products with ones: they count nothing here. A path out of L0C may do a ReLU.
        """
        for node in self.nodes:
            repeat_cycles = self._repeat_cycles(node, self.repeat_costs)
            cycles = self._vector_results(node) * repeat_cycles / self.lanes
            if cycles:
                self.loads.append(_Load(node.output, node.output, (0.0, cycles, 0.0)))

    def _repeat_cycles(self, node: Node, costs: Mapping[str, float]) -> float:
        """Return the least cycles of all instructions of a node, at `costs` for each."""
        # instructions that the chip file does not list
        default_cycles = costs["default"]
        quickest = min(costs.values())
        product = costs.get("vmul", default_cycles)
        division = costs.get("vdiv", default_cycles)
        reciprocal = min(costs.get("vrec", default_cycles), division)
        settings = operator_of(node.op).settings(node.attrs)
        # a path out of L0C does a ReLU; bytes are limited anyway
        has_free_lower = settings.get("low", 0.0) in (-inf, 0.0) or self.has_int8
        has_free_upper = settings.get("high", 6.0) == inf or self.has_int8
        cycles_of = {
            **costs,
            "quickest": quickest,
            "pass through": quickest if self.chip.combined else 0.0,
            "reciprocal": reciprocal,
            "quotient": min(reciprocal + product, division),
            "lower limit": 0.0 if has_free_lower else quickest,
            "upper limit": 0.0 if has_free_upper else quickest,
        }
        instructions = VECTOR_FUNCTIONS.get(node.op, ("quickest",))
        return sum(cycles_of.get(name, default_cycles) for name in instructions)

    def _vector_results(self, node: Node) -> int:
        """Return how many results of a node a vector unit has to compute, at least."""
        out = self.graph.types[node.output]
        kinds = self.graph.in_types(node)
        if DTYPE_BYTES[out.dtype] < 2:
            return 0
        count = self._function_results(node.output)
        if node.op in VECTOR_FUNCTIONS:
            # softmax of one number is 1
            is_constant = node.has("reduction") and out.shape[node.attr("axis", -1)] < 2
            return 0 if is_constant else count
        if node.op in LARGEST:
            return count if kinds[0].elements >= 2 * out.elements else 0
        if node.has("largest"):
            rows, columns = self.needs.windows[node.name]
            # a window that holds one number, at the border, needs no maximum
            single_windows = rows.counts[1] * columns.counts[1]
            return max(0, count - single_windows * out.shape[0] * out.shape[1])
        return 0

    def _function_results(self, name: str) -> int:
        """Return to how many numbers of a tensor a function has to be applied.

        Behind a monotonic function max(f(a), f(b)) = f(max(a, b)): if the maximum of a window is
        all that is read, the function is needed for one number a window.
        """
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
        """Return the least bytes that cross the memory interface.

        (1) L2 starts empty: weights and inputs that are needed whole are read at least once. (2)
        Outputs are written, except what a cache may still hold at the end. (3) Intermediate tensors
        count nothing, even those larger than all buffers: slices of them may go through all
        operators that read them. Weights would then be read again, which the bound leaves out;
        a cost that is removed from every schedule leaves a lower bound.
        """
        graph = self.graph
        read_bytes = sum(graph.types[n].data_bytes for n in graph.inputs if n in self.needs.read)
        read_bytes += sum(graph.types[n].data_bytes for n in self.weights)
        # a view of an input is not written
        computed = {n for node in self.nodes if not moves(node) for n in node.outputs}
        written_bytes = sum(graph.types[n].data_bytes for n in computed.intersection(graph.outputs))
        cache_bytes = self.chip.l2.size_bytes if self.chip.l2.kind == "cache" else 0
        return read_bytes + max(0, written_bytes - cache_bytes)

    # -- chain --------------------------------------------------------------------------------
    def chain(self) -> float:
        """Return the cycles of the longest chain of dependent steps, on any number of cores.

        `products` and `functions` must have filled `loads` before. The longest of three:

        1. Waits. A result needs some number of each of its inputs (of a join: of one). The number
           goes from where it was made to where the next unit reads it: each copy starts up, pipes
           signal each other with two flags, a cube core signals vector cores or they signal it, and
           L2 adds its latency. Barriers count nothing: a core may go on with its own results.
        2. Work and waits, at products whose every result needs every number that the product
           reads, such as the fully connected layer of one image. Before its first result all work
           on its input is done, and the last number of the input has come: from another core,
           through memory, unless one core did all the work. Readers of the product start later, so
           several such times add up. In a batch of several images no product counts here: the
           images do not wait for each other.
        3. Work and weights that are read late: see `_late_weights`.
        """
        distances = shortest_latencies(self.chip)
        # nodes from `since` on come after the last product that needed all of its input
        since = 0
        ready: dict[str, Times] = dict.fromkeys(self.graph.inputs, distances["GM"])
        for position, node in enumerate(self.graph.nodes):
            if not self.needs.varies.issuperset(node.outputs):
                continue
            inputs_ready = self._inputs_ready(node, ready)
            first_results = self._first_results(node)
            nodes_before = self.graph.nodes[since:position]
            arrivals = list[Times]()
            for cycles, place in first_results:
                unit = UNIT_OF_BUFFER[place]
                end = inputs_ready[unit] + cycles
                if self.needs.needs_all_products(node):
                    end = max(end, self._end_after_all_inputs(node, cycles, nodes_before, unit))
                    since = position + 1
                arrivals.append(tuple(end + distance for distance in distances[place]))
            earliest = tuple(map(min, zip(*arrivals or [inputs_ready], strict=True)))
            # the earliest start of the node, on whichever unit
            starts = [inputs_ready[UNIT_OF_BUFFER[place]] for _, place in first_results]
            self.starts[node.output] = min(starts or inputs_ready)
            ready.update(dict.fromkeys(node.outputs, earliest))
        ends = (ready.get(name, NOW)[2] for name in self.graph.outputs)
        return max(self._end_of_all_work() if since else 0.0, self._late_weights(), *ends)

    def more_launches(self) -> int:
        """Return how many kernels must follow the first one if no kernel uses both types of cores.

        A tensor that the cube makes and a vector unit reads, or the other way round, crosses into a
        later kernel. `ready` holds, for each tensor, the index of the first kernel that has it on
        cube cores, on vector cores, and in memory. The other choice is one mix kernel, which takes
        `mix_start_s` longer to start: `bound_of` takes the smaller of both.
        """
        ready = dict[str, Times]()
        for node in self.graph.nodes:
            cube, vector, memory = self._inputs_ready(node, ready)
            # a result in L0C is read by a vector core one kernel later, and the other way round
            ends = {"L0C": (cube, cube + 1, cube), "UB": (vector + 1, vector, vector)}
            choices = [ends[place] for _, place in self._first_results(node)]
            # a node that may cost nothing starts no kernel
            choices = choices or [(cube, vector, memory)]
            earliest = tuple(map(min, zip(*choices, strict=True)))
            ready.update(dict.fromkeys(node.outputs, earliest))
        uses_both = all(any(load.cycles[unit] for load in self.loads) for unit in (0, 1))
        return int(max(uses_both, *(ready.get(name, NOW)[2] for name in self.graph.outputs)))

    def _late_weights(self) -> float:
        """Return the cycles until all weights used after a tensor's last number have been read.

        (1) Take a tensor through which everything passes. One of its numbers comes last, when all
        work before it is done. (2) What depends on this number is still multiplied with the weights
        of later layers. (3) Some of these weights may be in L2, if that is a cache, and in buffers.
        On chips with one core for cube and vector work only the core that has the number may hold
        some: the others learn of it at a barrier, which empties their buffers. On other chips cores
        signal by flags, and all may hold some. (4) The other weights are read from memory.
        """
        chip = self.chip
        positions = {n: i for i, node in enumerate(self.graph.nodes) for n in node.outputs}
        cores = 1 if chip.combined else chip.core_count
        cache_bytes = chip.l2.size_bytes if chip.l2.kind == "cache" else 0
        on_chip_bytes = cache_bytes + sum(chip.buffers.values()) * cores
        if sum(self.graph.types[name].data_bytes for name in self.weights) <= on_chip_bytes:
            return 0.0
        # the faster of the cores' paths and of device memory: a bound may assume either
        memory_rate = chip.device_memory.rate_bytes_per_s / chip.clock_hz
        rate = max(outgoing_rate(chip, ("GM",)) * cores, memory_rate)
        latest = 0.0
        total = NOW
        loads = sorted((positions[x.tensor], x.cycles) for x in self.loads)
        for name, later_bytes in reversed(self.needs.later(self.weights).items()):
            # work on tensors before this one, in the order of the graph
            while loads and loads[0][0] < positions[name]:
                total = tuple(map(sum, zip(total, loads.pop(0)[1], strict=True)))
            latest = max(latest, max(total) + (later_bytes - on_chip_bytes) / rate)
        return latest

    def _inputs_ready(self, node: Node, ready: Mapping[str, Times]) -> Times:
        """Return when a node may begin: once each input has a number; for a join, once one has."""
        windows = self.needs.windows.get(node.name, ())
        is_constant = (
            node.op in BY_ROW and self.graph.types[node.output].shape[node.attr("axis", -1)] < 2
        )
        needs_all = windows or node.op in PRODUCTS
        needs_all = needs_all or node.has("lanes", "pointwise", "broadcasts", "reduction")
        # a row that is masked, a window in the padding: such results wait for nothing
        if is_constant or node.op == "masked_softmax" or any(w.counts[0] for w in windows):
            return NOW  # some results are the same whatever is read
        times = [ready.get(name, NOW) for name in node.inputs]
        return tuple(map(max if needs_all else min, zip(*times, strict=True))) if times else NOW

    def _first_results(self, node: Node) -> list[tuple[float, str]]:
        """Return (cycles until the first result, its buffer) for each unit that may compute a node.

        The list is empty if the node may cost nothing.
        """
        if node.name in self.needed_nodes and self._on_cube(node, either=True):
            choices = [(self.chip.cube_head_cycles + 1.0, "L0C")]
            if not self._on_cube(node):
                choices.append((min(self.single_repeat_cycles.values()), "UB"))
            return choices
        all_on_vector = node.name in self.needed_nodes and self._vector_results(
            node
        ) == self.needs.count(node.output)
        cycles = self._repeat_cycles(node, self.single_repeat_cycles) if all_on_vector else 0.0
        return [(cycles, "UB")] if cycles else []

    def _end_of_all_work(self) -> float:
        """Return when all work is done and its last number is in memory.

        Work that begins at b and takes w cycles on all cores together, at their even share, ends at
        least at b + w, and its last number then takes its way to memory.
        """
        latest = 0.0
        for begin, total in self._work_from(self.loads):
            for work, distance in zip(total, self._last_distances(), strict=True):
                if work:
                    latest = max(latest, begin + work + distance[2])
        return latest

    def _end_after_all_inputs(
        self, node: Node, own_cycles: float, nodes_before: Sequence[Node], unit: int
    ) -> float:
        """Return when a node's first result is done if each result needs every number of its input.

        The node runs on `unit` (0 cube, 1 vector unit) and takes `own_cycles`; of the work before
        it, only that of `nodes_before` counts. Work that begins at b and takes w cycles on all
        cores together, at their even share, ends at least at

            b + w + way                            its last number goes to the node
            b + min(w cores + way,                 one core does all the work, or
                    w + (1 - 1 / cores) * trip)    some numbers come from other cores

        where trip is the way from the writer to memory and from memory to the node.
        """
        needed_whole = set(node.inputs[:1])
        outside_l0c = needed_whole.copy()
        for producer in reversed(nodes_before):
            # a product that needs all of its input needs, in turn, all that its makers need whole
            if needed_whole.issuperset(producer.outputs):
                needed_whole.update(self.needs.whole(producer))
                # sums that are read by more than sums have left L0C
                outside_l0c.update(() if producer.op in SUMMED else producer.inputs)
        loads = [
            load
            for load in self.loads
            if load.tensor in needed_whole and (load.cycles[0] or load.tensor in outside_l0c)
        ]
        from_memory = shortest_latencies(self.chip)["GM"][unit]
        back = least_signal_cycles(self.chip) + from_memory + own_cycles
        cores = self.chip.core_count
        latest = 0.0
        for begin, total in self._work_from(loads):
            for work, distance in zip(total, self._last_distances(), strict=True):
                if not work:
                    continue
                way = distance[unit] + own_cycles
                one_core = work * cores + way
                several_cores = work + (1 - 1 / cores) * (distance[2] + back)
                latest = max(latest, begin + work + way, begin + min(one_core, several_cores))
        return latest

    def _work_from(self, loads: Sequence[_Load]) -> Iterator[tuple[float, Times]]:
        """Yield each start b of work, the latest first, and the cycles of all work from b on."""
        total = NOW
        starts = [(self.starts[load.node], load.cycles) for load in loads]
        for begin, cycles in sorted(starts, reverse=True):
            total = tuple(map(sum, zip(total, cycles, strict=True)))
            yield begin, total

    def _last_distances(self) -> tuple[Times, Times, Times]:
        """Return the ways of the last number: from L0C, from UB, or just leaving L0C towards L1."""
        distances = shortest_latencies(self.chip)
        return distances["L0C"], distances["UB"], (distances["L1"][0], 0.0, 0.0)
