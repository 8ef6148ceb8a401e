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
    need = _needed(state)
    loads, stores = _moved(state, chip, need, warm)
    ops = [op for _, op in _operations(state, chip, need)]
    compute = sum(op.cycles(chip) for op in ops)
    share = _fresh_share(state, warm)
    first_load = _least_copy(chip, "GM", "UB", share)
    last_store = _least_copy(chip, "UB", "GM")
    ends = [s for s in state.stages if s.output]
    # every output needs some work, whichever stages are inlined
    computed = all(isinstance(s, stages.Stage) and not s.is_copy for s in ends)
    least_op_cycles = min((op.least_cycles for op in ops), default=0) if computed else 0
    tail = min((op.cost.tail_cycles for op in ops), default=0) if least_op_cycles else 0
    reads = first_load if loads else 0.0
    load_latency = _latency(chip, share) if loads and not chip.combined else 0.0
    # The longest of four: all bytes through memory; all loads, then one operation and one store;
    # one load, then all arithmetic; one load and one operation, then all stores.
    times = (
        _memory_cycles(state, chip, need, warm),
        loads + load_latency + least_op_cycles + last_store,
        reads + compute + tail + last_store,
        reads + least_op_cycles + stores,
    )
    return math.ceil(max(times) - 1e-6) + start_cycles(chip, "cold")


# -- the bytes that have to be moved ---------------------------------------------------------------


def _needed(state: stages.State) -> dict[str, int]:
    """Return the least number of elements that are needed of every tensor."""
    need: dict[str, int] = {}
    for stage in reversed(state.stages):
        size = math.prod(stage.shape)
        if stage.output:
            need[stage.name] = size
        # A tensor that is needed in part may be computed in part; then it is not certain that its
        # sources are needed.
        if isinstance(stage, stages.Fixed) or need.get(stage.name, 0) < size:
            continue
        for read in stage.reads:
            need[read.source] = max(need.get(read.source, 0), _distinct(state, stage, read))
    return need


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


def _cold_bytes(state: stages.State, need: Mapping[str, int], warm: Collection[str]) -> int:
    """Return the bytes that have to come from memory."""
    cold = [i for i in state.inputs if i.name not in warm]
    return sum(need.get(i.name, 0) * DTYPE_BYTES[i.dtype] for i in cold)


def _memory_cycles(
    state: stages.State, chip: Chip, need: Mapping[str, int], warm: Collection[str]
) -> float:
    """Return the cycles of device memory for inputs, and for results that L2 cannot hold.

    The phase that writes a result writes all of it to memory if it touches more than L2 holds.
    """
    ends = [s for s in state.stages if s.output]
    sizes = {s.name: math.prod(s.shape) * DTYPE_BYTES[s.dtype] for s in ends}
    phase_read_bytes = _read_bytes(state, warm)
    l2 = chip.l2.size_bytes
    # A result of 20 MB and 10 MB of operands do not fit into 24 MB of L2: all of the result is
    # written to memory in that phase.
    evicted = sum(size for name, size in sizes.items() if size + phase_read_bytes[name] > l2)
    rate = chip.shared_rate_bytes_per_cycle("memory", 1)
    return (_cold_bytes(state, need, warm) + evicted) / rate


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


def _moved(
    state: stages.State, chip: Chip, need: Mapping[str, int], warm: Collection[str]
) -> tuple[float, float]:
    """Return the cycles of loads and of stores on the busiest core."""
    cores = chip.core_count * chip.vector_cores_per_core
    # On chips without padded copies the scalar unit may move single elements while copies run.
    by_hand = cores * ELEMENT_BYTES / _scalar_wait(chip) if chip.combined else 0.0
    cold_bytes = _cold_bytes(state, need, warm)
    warm_bytes = sum(
        need.get(i.name, 0) * DTYPE_BYTES[i.dtype] for i in state.inputs if i.name in warm
    )
    out = sum(math.prod(s.shape) * DTYPE_BYTES[s.dtype] for s in state.stages if s.output)
    memory, l2 = (chip.shared_rate_bytes_per_cycle(level, 1) for level in ("memory", "L2"))
    into = cores * chip.path("GM", "UB").rate_bytes_per_cycle
    back = cores * chip.path("UB", "GM").rate_bytes_per_cycle
    # The rate of a load is that of all cores' ports together or that of L2 or memory, whichever is
    # lower.
    loads = cold_bytes / (min(into, memory) + by_hand) + warm_bytes / (
        min(into, max(l2, memory)) + by_hand
    )
    stores = out / (min(back, l2) + by_hand)
    starts = 0 if chip.combined else chip.path("GM", "UB").startup_cycles
    return loads + (starts if cold_bytes + warm_bytes else 0), stores


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


def _fresh_share(state: stages.State, warm: Collection[str]) -> float:
    """Return a lower bound on the share of all loaded bytes that comes from memory.

    A byte is loaded once by every operation that needs it, and again if tiles overlap: a last tile
    that is moved back to be whole overlaps its neighbour by less than its size. A tensor that is
    broadcast along an axis may be loaded more often.
    """
    times: dict[str, float] = {}
    for stage in reversed(state.stages):
        loads = times.get(stage.name, 0.0) + (1.0 if stage.output else 0.0)
        if isinstance(stage, stages.Fixed):
            times |= dict.fromkeys(stage.sources, math.inf)
            continue
        size = math.prod(a.extent for a in (*stage.axes, *stage.reduce))
        loads = 1.0 if stage.fold else loads
        for read in stage.reads:
            load_count = loads if _distinct(state, stage, read) == size else math.inf
            times[read.source] = times.get(read.source, 0.0) + load_count
    if any(i.name in warm for i in state.inputs):
        return 0.0
    return min((1.0 / (2.0 * times[i.name]) for i in state.inputs if i.name in times), default=0.0)


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
    """The work of a loop nest under every layout: a load, its operations, and a store."""

    chip: Chip
    operations: tuple[_Operation, ...]
    around: float

    def cycles(self, share: float = 0.0, tiles: int = 1) -> float:
        """Return a lower bound on the cycles of a core with a share of the work in some tiles."""
        return self.around + sum(op.cycles(self.chip, share, tiles) for op in self.operations)


def nest_work(state: stages.State, chip: Chip, names: Collection[str]) -> NestWork:
    """Return the work of a nest with the stages `names`; all other tensors are read from GM."""
    ops = tuple(op for name, op in _operations(state, chip, _needed(state)) if name in names)
    loads = all(state.stage(name).reads for name in names)
    load_cycles = _least_copy(chip, "GM", "UB") if loads else 0.0
    store_cycles = _least_copy(chip, "UB", "GM")
    return NestWork(chip, ops, load_cycles + store_cycles if ops else 0.0)


def _operations(
    state: stages.State, chip: Chip, need: Mapping[str, int]
) -> Iterator[tuple[str, _Operation]]:
    """Yield (stage, operation) for the operations that every schedule does, without copies."""
    used: dict[str, list[bool]] = {i.name: [True] * len(i.shape) for i in state.inputs}
    for stage in state.stages:
        if isinstance(stage, stages.Fixed):
            used[stage.name] = [True] * len(stage.shape)
            continue
        is_needed_whole = need.get(stage.name, 0) == math.prod(stage.shape)
        axes = _depends(stage.expr, used)
        used[stage.name] = [a.name in axes for a in stage.axes]
        if is_needed_whole:
            yield from ((stage.name, op) for op in _calls(stage, stage.expr, used, chip))
        if is_needed_whole and stage.fold:
            yield stage.name, _folding(stage, axes, chip)


def _depends(expr: Expr, used: Mapping[str, Sequence[bool]]) -> set[str]:
    """Return the axes on which a value depends, without axes along which it is broadcast."""
    names: set[str] = set()
    for read in leaves(expr):
        assert isinstance(read, Read)
        flags = used[read.source]
        if read.view:
            flags = [all(flags)] * len(read.index)
        names |= {n for i, f in zip(read.index, flags, strict=True) if f for n, _ in i.terms}
    return names


def _calls(
    stage: stages.Stage, expr: Expr, used: Mapping[str, Sequence[bool]], chip: Chip
) -> Iterator[_Operation]:
    if not isinstance(expr, Call):
        return
    for arg in dict.fromkeys(expr.args):  # equal arguments are computed once
        yield from _calls(stage, arg, used, chip)
    if expr.op == "vcopy":
        return
    axes = _depends(expr, used)
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
    names = [
        table[stage.fold]
        for table in (emit_folds.COMBINE, emit_folds.REPEAT_FOLDS, emit_folds.BLOCK_FOLDS)
        if stage.fold in table
    ]
    costs = [chip.vector_costs.get(n, chip.vector_costs["default"]) for n in names]
    parts = ([getattr(c, f"{f}_cycles") for c in costs] for f in ("head", "slope", "tail"))
    head, slope, tail = map(min, parts)
    return _Operation(VectorCost(head if folded > 1 else 0, slope, tail), repeats)
