"""Computes a certified lower bound on the cycles of every schedule of a vector operator.

Under every schedule, the cores together load every needed input byte, do every operation and store
every output byte. Summed over the phases, each pipe takes at least

    loads  >= bytes from memory / memory rate + bytes in L2 / L2 rate, or at the rate of all ports
    vector >= sum over operations of head + slope * repeats / cores
    stores >= bytes / L2 rate, or at the rate of all ports

Some core must load before it computes and compute before it stores, so that the times of the first
load, operation and store add up.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES, Chip, VectorCost
from ascend_lab.machine.sim.timeline import start_cycles
from ascend_lab.operators.dsl import emit_folds, schedule, stages
from ascend_lab.operators.dsl.tensor import Call, Expr, Read, Tensor, leaves

ELEMENT_BYTES = 4
"""Bytes of the largest element that the scalar unit moves at a time."""


def vector_bound(outputs: Tensor | Sequence[Tensor], chip: Chip, warm: Collection[str] = ()) -> int:
    """Return a lower bound on the cycles, launch included, if L2 holds the `warm` tensors."""
    state = schedule.create_schedule(outputs, chip).state
    needed = _needed_elements(state)
    load_cycles, store_cycles = _copy_cycles(state, chip, needed, warm)
    operations = [operation for _, operation in _operations(state, chip, needed)]
    compute_cycles = sum(operation.cycles(chip) for operation in operations)
    memory_share = _memory_share(state, warm)
    last_store = _least_copy(chip, "UB", "GM")
    output_stages = [stage for stage in state.stages if stage.output]
    # every output needs some work, whichever stages are inlined
    all_computed = all(isinstance(s, stages.Stage) and not s.is_copy for s in output_stages)
    first_operation = 0
    tail = 0
    if all_computed and operations:
        first_operation = min(operation.least_cycles for operation in operations)
        tail = min(operation.cost.tail_cycles for operation in operations)
    first_load = _least_copy(chip, "GM", "UB", memory_share) if load_cycles else 0.0
    latency = _latency(chip, memory_share) if load_cycles and not chip.combined else 0.0
    # The longest of four: all bytes through memory; all loads, then one operation and one store;
    # one load, then all arithmetic; one load and one operation, then all stores.
    times = (
        _memory_cycles(state, chip, needed, warm),
        load_cycles + latency + first_operation + last_store,
        first_load + compute_cycles + tail + last_store,
        first_load + first_operation + store_cycles,
    )
    return math.ceil(max(times) - 1e-6) + start_cycles(chip, "cold")


# -- the bytes that have to be moved ---------------------------------------------------------------


def _needed_elements(state: stages.State) -> dict[str, int]:
    """Return the least number of elements that are needed of every tensor."""
    needed: dict[str, int] = {}
    for stage in reversed(state.stages):
        size = math.prod(stage.shape)
        if stage.output:
            needed[stage.name] = size
        # A tensor that is needed in part may be computed in part; then it is not certain that its
        # sources are needed.
        if isinstance(stage, stages.Fixed) or needed.get(stage.name, 0) < size:
            continue
        for read in stage.reads:
            needed[read.source] = max(needed.get(read.source, 0), _distinct(state, stage, read))
    return needed


def _distinct(state: stages.State, stage: stages.Stage, read: Read) -> int:
    """Return the least number of different elements of its source that a read reaches."""
    extents = {a.name: a.extent for a in (*stage.axes, *stage.reduce)}
    names = [n for i in read.index for n, _ in i.terms]
    counts = [max((extents[n] for n, _ in i.terms), default=1) for i in read.index]
    # If an axis occurs twice, as in x[i, i], the read reaches only the diagonal: the length of the
    # longest axis is a lower bound.
    if len(set(names)) < len(names):
        return max(counts, default=1)
    shape = read.view or state.find(read.source).shape
    return math.prod(min(c, s) for c, s in zip(counts, shape, strict=True))


def _cold_bytes(state: stages.State, needed: Mapping[str, int], warm: Collection[str]) -> int:
    """Return the bytes that have to come from memory."""
    cold = [i for i in state.inputs if i.name not in warm]
    return sum(needed.get(i.name, 0) * DTYPE_BYTES[i.dtype] for i in cold)


def _memory_cycles(
    state: stages.State, chip: Chip, needed: Mapping[str, int], warm: Collection[str]
) -> float:
    """Return the cycles of device memory for inputs, and for results that L2 cannot hold.

    The phase that writes a result writes all of it to memory if it touches more than L2 holds.
    """
    output_stages = [stage for stage in state.stages if stage.output]
    sizes = {s.name: math.prod(s.shape) * DTYPE_BYTES[s.dtype] for s in output_stages}
    phase_read_bytes = _read_bytes(state, warm)
    l2_bytes = chip.l2.size_bytes
    # A result of 20 MB and 10 MB of operands do not fit into 24 MB of L2: all of the result is
    # written to memory in that phase.
    written_bytes = 0
    for name, size in sizes.items():
        if size + phase_read_bytes[name] > l2_bytes:
            written_bytes += size
    rate = chip.shared_rate_bytes_per_cycle("memory", 1)
    return (_cold_bytes(state, needed, warm) + written_bytes) / rate


def _read_bytes(state: stages.State, warm: Collection[str]) -> dict[str, int]:
    """Return, by tensor, the least bytes from GM read by the phase that computes all of it.

    The phase reads each operand from GM or computes it itself; if the whole operand is needed, all
    its bytes count. If L2 holds `warm` tensors, nothing is certain and the bytes are 0.
    """
    least_bytes = dict.fromkeys((i.name for i in state.inputs), 0)
    for stage in state.stages:
        least_bytes[stage.name] = 0
        if warm or isinstance(stage, stages.Fixed):
            continue
        for read in stage.reads:
            source = state.find(read.source)
            distinct = _distinct(state, stage, read)
            size = distinct * DTYPE_BYTES[source.dtype]
            if isinstance(source, stages.Stage | stages.Fixed):
                source_bytes = (
                    least_bytes[source.name] if distinct == math.prod(source.shape) else 0
                )
                size = min(size, source_bytes)
            least_bytes[stage.name] = max(least_bytes[stage.name], size)
    return least_bytes


def _copy_cycles(
    state: stages.State, chip: Chip, needed: Mapping[str, int], warm: Collection[str]
) -> tuple[float, float]:
    """Return the cycles of loads and of stores on the busiest core."""
    cores = chip.core_count * chip.vector_cores_per_core
    # On chips without padded copies the scalar unit may move single elements while copies run.
    scalar_rate = cores * ELEMENT_BYTES / _scalar_wait(chip) if chip.combined else 0.0
    cold_bytes = _cold_bytes(state, needed, warm)
    warm_bytes = 0
    for tensor in state.inputs:
        if tensor.name in warm:
            warm_bytes += needed.get(tensor.name, 0) * DTYPE_BYTES[tensor.dtype]
    output_stages = [stage for stage in state.stages if stage.output]
    stored_bytes = sum(math.prod(s.shape) * DTYPE_BYTES[s.dtype] for s in output_stages)
    memory_rate = chip.shared_rate_bytes_per_cycle("memory", 1)
    l2_rate = chip.shared_rate_bytes_per_cycle("L2", 1)
    load_ports = cores * chip.path("GM", "UB").rate_bytes_per_cycle
    store_ports = cores * chip.path("UB", "GM").rate_bytes_per_cycle
    # The rate of a load is that of all cores' ports together or that of L2 or memory, whichever is
    # lower.
    cold_rate = min(load_ports, memory_rate) + scalar_rate
    warm_rate = min(load_ports, max(l2_rate, memory_rate)) + scalar_rate
    load_cycles = cold_bytes / cold_rate + warm_bytes / warm_rate
    # some copy has to be started, unless the scalar unit may have moved all elements
    if not chip.combined and cold_bytes + warm_bytes:
        load_cycles += chip.path("GM", "UB").startup_cycles
    return load_cycles, stored_bytes / (min(store_ports, l2_rate) + scalar_rate)


def _scalar_wait(chip: Chip) -> int:
    """Return the cycles that the scalar unit takes for an element of GM."""
    return max(chip.l2.latency_cycles // max(chip.scalar_cycles, 1), 1) * chip.scalar_cycles


def _latency(chip: Chip, share: float) -> float:
    """Return the cycles until a load is visible, of whose bytes a `share` comes from memory."""
    extra = chip.device_memory.latency_cycles - chip.l2.latency_cycles
    path = chip.path("GM", "UB").latency_cycles
    return path + chip.l2.latency_cycles + math.floor(share * max(extra, 0))


def _least_copy(chip: Chip, src: str, dst: str, share: float = 0.0) -> float:
    """Return the cycles of the shortest copy, including those until a load is visible."""
    path = chip.path(src, dst)
    latency = _latency(chip, share) if src == "GM" else 0
    copy = path.startup_cycles + math.ceil(BLOCK_BYTES / path.rate_bytes_per_cycle) + latency
    return min(copy, _scalar_wait(chip)) if chip.combined else copy


def _memory_share(state: stages.State, warm: Collection[str]) -> float:
    """Return a lower bound on the share of all loaded bytes that comes from memory.

    A byte is loaded once by every operation that needs it, and again if tiles overlap: a last tile
    that is moved back to be whole overlaps its neighbour by less than its size. A tensor that is
    broadcast along an axis may be loaded more often.
    """
    if any(tensor.name in warm for tensor in state.inputs):
        return 0.0
    # how often a byte of each tensor is loaded at most, without overlapping tiles
    load_counts: dict[str, float] = {}
    for stage in reversed(state.stages):
        if isinstance(stage, stages.Fixed):
            load_counts |= dict.fromkeys(stage.sources, math.inf)
            continue
        computed_count = load_counts.get(stage.name, 0.0) + (1.0 if stage.output else 0.0)
        if stage.fold:
            computed_count = 1.0
        size = math.prod(a.extent for a in (*stage.axes, *stage.reduce))
        for read in stage.reads:
            is_broadcast = _distinct(state, stage, read) != size
            load_count = math.inf if is_broadcast else computed_count
            load_counts[read.source] = load_counts.get(read.source, 0.0) + load_count
    counts = [load_counts[i.name] for i in state.inputs if i.name in load_counts]
    # overlap at most doubles the loads; the first load of a byte is the one from memory
    return 1.0 / (2.0 * max(counts)) if counts else 0.0


# -- the operations that have to be done -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Operation:
    """An operation on `repeats` blocks of 256 bytes, divided among all cores."""

    cost: VectorCost
    repeats: float

    def cycles(self, chip: Chip, share: float = 0.0, tiles: int = 1) -> float:
        """Return the cycles on a core with a `share` of the work, by default an equal share.

        It pays the head of an instruction once per tile, and again after every 255 repeats.
        """
        repeats_here = self.repeats * max(share, 1 / (chip.core_count * chip.vector_cores_per_core))
        # One instruction does at most 255 repeats: 1,000 repeats in 2 tiles are at least 4
        # instructions.
        heads = max(tiles, repeats_here / chip.max_repeat)
        return self.cost.head_cycles * heads + self.cost.slope_cycles * repeats_here

    @property
    def least_cycles(self) -> int:
        """The cycles until the result of one repeat is visible."""
        return self.cost.head_cycles + self.cost.slope_cycles + self.cost.tail_cycles


@dataclass(frozen=True, slots=True)
class NestWork:
    """The work of a loop nest under every layout: a load, its operations, and a store.

    `copy_cycles` are those of the shortest load and the shortest store.
    """

    chip: Chip
    operations: tuple[_Operation, ...]
    copy_cycles: float

    def cycles(self, share: float = 0.0, tiles: int = 1) -> float:
        """Return a lower bound on the cycles of a core with a share of the work in some tiles."""
        return self.copy_cycles + sum(op.cycles(self.chip, share, tiles) for op in self.operations)


def nest_work(state: stages.State, chip: Chip, names: Collection[str]) -> NestWork:
    """Return the work of a nest with the stages `names`; all other tensors are read from GM."""
    all_operations = _operations(state, chip, _needed_elements(state))
    operations = tuple(operation for name, operation in all_operations if name in names)
    has_loads = all(state.stage(name).reads for name in names)
    load_cycles = _least_copy(chip, "GM", "UB") if has_loads else 0.0
    store_cycles = _least_copy(chip, "UB", "GM")
    return NestWork(chip, operations, load_cycles + store_cycles if operations else 0.0)


def _operations(
    state: stages.State, chip: Chip, needed: Mapping[str, int]
) -> Iterator[tuple[str, _Operation]]:
    """Yield (stage, operation) for the operations that every schedule does, without copies."""
    # for each axis of a tensor, whether the values differ along it: a broadcast axis repeats them
    varies: dict[str, list[bool]] = {i.name: [True] * len(i.shape) for i in state.inputs}
    for stage in state.stages:
        if isinstance(stage, stages.Fixed):
            varies[stage.name] = [True] * len(stage.shape)
            continue
        is_needed_whole = needed.get(stage.name, 0) == math.prod(stage.shape)
        axes = _axes_of_value(stage.expr, varies)
        varies[stage.name] = [a.name in axes for a in stage.axes]
        if is_needed_whole:
            yield from ((stage.name, op) for op in _calls(stage, stage.expr, varies, chip))
        if is_needed_whole and stage.fold:
            yield stage.name, _folding(stage, axes, chip)


def _axes_of_value(expr: Expr, varies: Mapping[str, Sequence[bool]]) -> set[str]:
    """Return the axes on which a value depends, without axes along which it is broadcast."""
    names: set[str] = set()
    for read in leaves(expr):
        assert isinstance(read, Read)
        flags = varies[read.source]
        if read.view:
            flags = [all(flags)] * len(read.index)
        for index, varies_along in zip(read.index, flags, strict=True):
            if varies_along:
                names |= {name for name, _ in index.terms}
    return names


def _calls(
    stage: stages.Stage, expr: Expr, varies: Mapping[str, Sequence[bool]], chip: Chip
) -> Iterator[_Operation]:
    """Yield the elementwise operations of an expression, arguments first."""
    if not isinstance(expr, Call):
        return
    for arg in dict.fromkeys(expr.args):  # equal arguments are computed once
        yield from _calls(stage, arg, varies, chip)
    if expr.op == "vcopy":
        return
    axes = _axes_of_value(expr, varies)
    sizes = [a.extent for a in (*stage.axes, *stage.reduce) if a.name in axes]
    widest = max(DTYPE_BYTES[d] for d in (expr.dtype, *(a.dtype for a in expr.args)))
    repeats = math.prod(sizes) * widest / chip.vector_bytes_per_repeat
    yield _Operation(chip.vector_costs.get(expr.op, chip.vector_costs["default"]), repeats)


def _folding(stage: stages.Stage, axes: Collection[str], chip: Chip) -> _Operation:
    """Return the cheapest fold (reduction): a repeat removes at most one element per lane.

    `vadd` removes one element per lane, `vcgadd` all but one of each block, `vcadd` all but one.
    """
    kept = math.prod(a.extent for a in stage.axes if a.name in axes)
    folded = math.prod(a.extent for a in stage.reduce if a.name in axes)
    # Of 512 numbers 511 must be removed: 511 lanes of fp16 are 4 repeats.
    size = kept * (folded - 1) * DTYPE_BYTES[stage.expr.dtype]
    repeats = size / chip.vector_bytes_per_repeat
    costs = []
    for instructions in (emit_folds.COMBINE, emit_folds.REPEAT_FOLDS, emit_folds.BLOCK_FOLDS):
        if stage.fold in instructions:
            name = instructions[stage.fold]
            costs.append(chip.vector_costs.get(name, chip.vector_costs["default"]))
    # the least of each cost: no instruction is cheaper in any of the three
    head = min(cost.head_cycles for cost in costs) if folded > 1 else 0
    slope = min(cost.slope_cycles for cost in costs)
    tail = min(cost.tail_cycles for cost in costs)
    return _Operation(VectorCost(head, slope, tail), repeats)
