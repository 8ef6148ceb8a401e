"""What an instruction costs where it runs, and the bytes a launch moves, which decide a part of it.

    occupancy = startup + work / rate,   result visible `latency` cycles later

Every duration is a whole number of cycles. A published cost that depends on whether the pipe was
idle (the head of mmad and of vector instructions) is charged every time: that keeps time linear,
and is at most a few percent high.

How many bytes come from device memory rather than from L2 follows one rule: inside one launch the
first touch of a byte comes from memory; a later touch hits L2 if the data touched in between, by
all cores, fits. For a loop nest that is decided loop by loop: if one pass of a loop's body fits in
L2, the whole loop fetches each byte once (neighbouring passes share what they share); otherwise
every pass fetches again. Nothing is simulated per address, so deciding does not depend on trip
counts.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ascend_lab.errors import SimulationError
from ascend_lab.machine.chip import BLOCK_BYTES, Chip
from ascend_lab.machine.isa import (
    Instruction,
    Launch,
    Loop,
    Node,
    Program,
    Region,
    mmad_shape,
    program,
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an instruction's time depends on beyond itself.

    `active_cores` share L2 and memory; `fresh` is the share of a tensor's bytes that comes from
    memory; `memory_slowdown` >= 1 stretches memory time where memory is the limit. In a mix launch
    `kinds` tells how many cores there are of each; they share with their like.
    """

    active_cores: int = 1
    fresh: Mapping[str, float] = field(default_factory=dict)
    memory_slowdown: float = 1.0
    kinds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cycles the pipe is taken, extra cycles until the result is visible, energy in pJ."""

    occupancy_cycles: int
    latency_cycles: int = 0
    energy_pj: float = 0.0


def costs_of(programs: Iterable[Program], chip: Chip, around: Surroundings) -> Mapping[int, Cost]:
    """Return, by identity, what instructions cost that are no flags."""
    return {
        id(instruction): instruction_cost(chip, instruction, around)
        for one in programs
        for instruction, _ in one.instructions()
        if instruction.event is None and instruction.op not in program.CROSS
    }


def instruction_cost(chip: Chip, instruction: Instruction, around: Surroundings) -> Cost:
    """Return the cost of one instruction on `chip`."""
    op = instruction.op
    if op in ("set_flag", "wait_flag"):
        return Cost(chip.flag_cycles)
    if op == "barrier":
        return Cost(chip.barrier_cycles)
    if op == "scalar":
        return Cost(chip.scalar_cycles * instruction.number("steps", 1))
    if op == "mmad":
        return _mmad_cost(chip, instruction)
    if op == "vdeq":
        return _vdeq_cost(chip, instruction)
    if instruction.pipe == "V" and op != "data_copy":
        return _vector_cost(chip, instruction)
    return _move_cost(chip, instruction, around)


def _mmad_cost(chip: Chip, instruction: Instruction) -> Cost:
    """cycles = head + ceil(m/m0) * ceil(k/k0) * ceil(n/n0)   (PTO cost model)."""
    dtype = instruction.srcs[0].buffer.dtype
    shape = mmad_shape(instruction)
    steps = math.prod(
        -(-size // side) for size, side in zip(shape, chip.cube_shape(dtype), strict=True)
    )
    return Cost(chip.cube_head_cycles + steps, 0, math.prod(shape) * chip.mac_energy_pj[dtype])


def _vector_cost(chip: Chip, instruction: Instruction) -> Cost:
    """cycles = head + slope * repeats, visible tail later   (PTO cost model).

    Of vbrcb, which writes a block an element, and vtranspose, which writes 16, a repeat is 8 blocks
    written.
    """
    op = instruction.op
    main = instruction.out
    if op.startswith("vc") and instruction.srcs:
        main = instruction.srcs[0]
    cost = chip.vector_costs.get(op, chip.vector_costs["default"])
    whole_blocks = -(-main.size_bytes // chip.vector_bytes_per_repeat)
    repeats = whole_blocks if op in program.WHOLE_BLOCKS else main.sizes[0]
    energy = main.size_bytes * chip.vector_energy_pj_per_byte
    return Cost(cost.head_cycles + cost.slope_cycles * repeats, cost.tail_cycles, energy)


def _vdeq_cost(chip: Chip, instruction: Instruction) -> Cost:
    """The way out of L0C, two bytes an element at least, and that of a bias into it."""
    src = instruction.srcs[0]
    dst = instruction.out
    ways = [("L0C", "UB", dst.elements * max(dst.buffer.itemsize, 2))]
    if len(instruction.srcs) > 2:
        ways.append(("UB", "L0C", src.size_bytes))
    cycles = 0
    energy = 0.0
    for start, end, size in ways:
        path = chip.path(start, end)
        cycles += path.startup_cycles + math.ceil(size / path.rate_bytes_per_cycle - 1e-9)
        energy += size * path.energy_pj_per_byte
    return Cost(cycles, chip.path("L0C", "UB").latency_cycles, energy)


def _moved_bytes(region: Region) -> int:
    """Bytes on the wires: every run is rounded up to whole 32-byte blocks."""
    run = region.run_bytes
    blocks = -(-run // BLOCK_BYTES)
    return region.size_bytes // run * blocks * BLOCK_BYTES


def _move_cost(chip: Chip, instruction: Instruction, around: Surroundings) -> Cost:
    src = instruction.srcs[0]
    dst = instruction.out
    path = chip.path(src.space, dst.space)
    size = _moved_bytes(dst)
    if instruction.op == "data_copy":
        size = max(size, _moved_bytes(src))
    if src.space == "L0C":
        size = dst.size_bytes
    cycles_per_byte = 1.0 / path.rate_bytes_per_cycle
    energy = path.energy_pj_per_byte
    latency = float(path.latency_cycles)
    n = around.kinds.get(path.unit, around.active_cores)
    if "GM" in (src.space, dst.space):
        shared = chip.shared_rate_bytes_per_cycle("L2", n)
        cycles_per_byte = max(cycles_per_byte, 1.0 / shared)
        energy += chip.l2.energy_pj_per_byte
        latency += chip.l2.latency_cycles
    if src.space == "GM":
        fresh = around.fresh.get(src.buffer.name, 1.0)
        memory = max(
            1.0 / path.rate_bytes_per_cycle,
            around.memory_slowdown / chip.shared_rate_bytes_per_cycle("memory", n),
        )
        cycles_per_byte = fresh * memory + (1.0 - fresh) * cycles_per_byte
        energy += fresh * chip.device_memory.energy_pj_per_byte
        latency += fresh * (chip.device_memory.latency_cycles - chip.l2.latency_cycles)
    occupancy = path.startup_cycles + math.ceil(size * cycles_per_byte - 1e-9)
    return Cost(occupancy, round(latency), size * energy)


# -- traffic ---------------------------------------------------------------------------------------
Footprint = dict[str, int]
"""Bytes per tensor name."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a whole launch, all cores.

    `path_bytes` per (src, dst); `fresh` is the share of each tensor's read bytes that comes from
    memory; `memory_bytes` is everything that crosses the memory interface. Per tensor: `fetched`
    counts the bytes from memory, `read_once` and `write_once` the different bytes touched.
    """

    path_bytes: Mapping[tuple[str, str], int]
    fresh: Mapping[str, float]
    memory_read_bytes: int
    memory_write_bytes: int
    fetched: Mapping[str, int] = field(default_factory=dict)
    read_once: Mapping[str, int] = field(default_factory=dict)
    write_once: Mapping[str, int] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """Bytes read from and written to device memory."""
        return self.memory_read_bytes + self.memory_write_bytes

    def reads_once(self, name: str) -> bool:
        """Tell whether no byte of a tensor is read a second time."""
        fetched = self.fetched.get(name, 0)
        fresh = self.fresh.get(name, 0.0)
        return fetched > 0 and fetched <= fresh * self.read_once[name]

    def warmed(self, warm: Mapping[str, float], write_back_bytes: int | None = None) -> "Traffic":
        """Return the traffic if `warm[name]` of a tensor's first touches hit L2.

        `write_back_bytes` is what L2 writes to memory during the launch, default as it stands.
        Raises `SimulationError` for shares outside 0..1 and negative bytes.
        """
        wrong = [f"{n}: {w}" for n, w in warm.items() if not 0.0 <= w <= 1.0]
        if wrong or (write_back_bytes or 0) < 0:
            needed = "shares of tensors in L2 from 0 to 1, and 0 or more bytes written back"
            got = ", ".join(wrong) or str(write_back_bytes)
            raise SimulationError(needed, got, "pass what L2.touch returns")
        fetched = {
            name: size - int(warm.get(name, 0.0) * min(size, self.read_once[name]))
            for name, size in self.fetched.items()
        }
        left = {name: fetched[name] / size for name, size in self.fetched.items() if size}
        return replace(
            self,
            fresh={name: share * left.get(name, 1.0) for name, share in self.fresh.items()},
            memory_read_bytes=sum(fetched.values()),
            memory_write_bytes=(
                self.memory_write_bytes if write_back_bytes is None else write_back_bytes
            ),
            fetched=fetched,
        )


def unique_elements(dims: list[tuple[int, int]]) -> int:
    """Count distinct addresses of {sum(i_d * stride_d)}: (count, stride) pairs, any order.

    Strides that step inside what is already covered extend it, larger ones multiply it; exact
    when the pieces do not half-overlap, an upper bound otherwise.
    """
    span = 1
    pieces = 1
    for count, stride in sorted(((c, abs(s)) for c, s in dims if c > 1 and s), key=lambda d: d[1]):
        if stride <= span:
            span += (count - 1) * stride
        else:
            pieces *= count
    return span * pieces


def _touched_bytes(instruction: Instruction, region: Region, inside: Mapping[str, int]) -> int:
    """Bytes of GM touched; rows picked at run time all differ, until none is left."""
    dims = [*zip(region.sizes, region.strides, strict=True)]
    if any(v in inside for v, _ in region.slot.terms):  # a ring of tiles
        dims.append((region.buffer.slots, region.buffer.elements))
    loops = [(inside[v], c) for v, c in region.offset.terms if v in inside]
    if program.index_of(instruction) is None:
        return unique_elements([*dims, *loops]) * region.buffer.itemsize
    rows = (instruction.number("bound"), instruction.number("pitch"))
    picked = unique_elements(dims) * math.prod(inside.values())
    return min(unique_elements([*dims, *loops, rows]), picked) * region.buffer.itemsize


def _gm_regions(instruction: Instruction) -> list[tuple[Region, bool]]:
    found = [(r, False) for r in instruction.srcs if r.space == "GM"]
    if instruction.dst is not None and instruction.dst.space == "GM":
        found.append((instruction.dst, True))
    return found


def _footprint(
    nodes: tuple[Node, ...], inside: Mapping[str, int], sizes: Footprint | None = None
) -> tuple[Footprint, Footprint]:
    """Return bytes touched per tensor (read, written) with the loops of `inside` unrolled."""
    sizes = {} if sizes is None else sizes
    reads: Footprint = {}
    writes: Footprint = {}
    for node in nodes:
        if isinstance(node, Loop):
            if node.count:
                inner = _footprint(node.body, {**inside, node.var: node.count}, sizes)
                _add(reads, inner[0], sizes)
                _add(writes, inner[1], sizes)
            continue
        for region, is_write in _gm_regions(node) if node.dst else ():
            sizes.setdefault(region.buffer.name, region.buffer.size_bytes)
            part = {region.buffer.name: _touched_bytes(node, region, inside)}
            _add(writes if is_write else reads, part, sizes)
    return reads, writes


def _add(total: Footprint, part: Footprint, sizes: Footprint) -> None:
    """Add bytes per tensor; overlapping pieces can never exceed the tensor."""
    for name, size in part.items():
        total[name] = min(total.get(name, 0) + size, sizes[name])


def _size(footprint: tuple[Footprint, Footprint]) -> int:
    reads, writes = footprint
    return sum(reads.values()) + sum(v for k, v in writes.items() if k not in reads)


def _misses(
    nodes: tuple[Node, ...],
    params: Mapping[str, int],
    capacity: int,
    whole: tuple[Footprint, Footprint],
) -> Footprint:
    """Return bytes per tensor read from memory by one run of `nodes` on all cores.

    `whole` is the footprint of `nodes`.
    """
    if _size(whole) <= capacity:
        return whole[0]
    total = Counter[str]()
    streamed = list[Node]()
    for node in nodes:
        one_pass = _footprint(node.body, params) if isinstance(node, Loop) else ({}, {})
        if not isinstance(node, Loop) or _size(one_pass) <= capacity:
            streamed.append(node)
            continue
        inner = _misses(node.body, params, capacity, one_pass)
        total.update({name: size * node.count for name, size in inner.items()})
    total.update(_footprint(tuple(streamed), params)[0])
    return total


def analyse(launch: Launch, chip: Chip) -> Traffic:
    """Return the traffic of a launch, from its loops alone."""
    path_bytes, read = _moved(launch)
    capacity = chip.l2.size_bytes
    fetched_by_all = Counter[str]()
    written = Counter[str]()
    held = Counter[str]()
    passes: dict[str, float] = {}
    known: dict[tuple[int, frozenset[tuple[str, int]]], tuple[Footprint, Footprint, Footprint]] = {}
    for part in launch.parts:
        params = _distinct(part.bindings)
        body = part.program.body
        key = id(part.program), frozenset(params.items())  # vector cores of one AI core are alike
        if key not in known:
            whole = _footprint(body, params)
            known[key] = *whole, _misses(body, params, capacity, whole)
        reads, writes, fetched = known[key]
        for name, size in fetched.items():
            passes[name] = max(passes.get(name, 0.0), size / reads[name])
        fetched_by_all.update(fetched)
        written.update(writes)
        held.update(reads)
    if launch.mix:  # a workspace: what one core reads, another has just written
        held = Counter({name: size for name, size in held.items() if name not in written})
        fetched_by_all = Counter({n: m for n, m in fetched_by_all.items() if n in held})
    sizes = {b.name: b.size_bytes for b in launch.tensors}
    touched = sum(min(held[n] + written[n], s) for n, s in sizes.items())
    # Parts run side by side and share what they fetch: no tensor is read more often than by one.
    missed = {n: min(m, math.ceil(sizes[n] * passes[n])) for n, m in fetched_by_all.items()}
    fetched = {n: min(m, read[n]) for n, m in missed.items() if read.get(n)}
    write_once = {n: min(w, sizes[n]) for n, w in written.items()}
    return Traffic(
        path_bytes,
        {n: min(1.0, missed.get(n, 0) / r) for n, r in read.items() if r},
        sum(fetched.values()),
        sum(write_once.values()) if touched > capacity else 0,
        fetched,
        {n: min(r, sizes[n]) for n, r in held.items()},
        write_once,
    )


@lru_cache(4096)
def lowest_bytes(launch: Launch) -> Mapping[tuple[str, bool], int]:
    """Return the first byte of each GM tensor that is touched, by (name, written)."""
    found: dict[tuple[str, bool], int] = {}
    for one in launch.programs:
        for instruction, ranges in one.scoped():
            for region, is_write in _gm_regions(instruction):
                low = (
                    program.reach_of(instruction, region).extent(ranges)[0] * region.buffer.itemsize
                )
                key = (region.buffer.name, is_write)
                found[key] = min(low, found.get(key, low))
    return found


def _moved(launch: Launch) -> tuple[dict[tuple[str, str], int], Footprint]:
    """Return bytes per path, and bytes read per GM tensor, of all cores."""
    path_bytes = Counter[tuple[str, str]]()
    read = Counter[str]()
    cores = Counter[int]()
    for part in launch.parts:
        cores[id(part.program)] += part.core_count
    for one in launch.programs:
        for instruction, times in one.instructions():
            if instruction.dst is None or not instruction.srcs or instruction.op == "mmad":
                continue
            src = instruction.srcs[0]
            dst = instruction.dst
            if src.space == dst.space:
                continue
            one_way = src.space == "L0C" or instruction.op == "load3d"
            moved = dst.size_bytes if one_way else min(src.size_bytes, dst.size_bytes)
            moved *= times * cores[id(one)]
            path_bytes[src.space, dst.space] += moved
            if src.space == "GM":
                read[src.buffer.name] += moved
    return dict(path_bytes), dict(read)


def _distinct(bindings: tuple[tuple[tuple[str, int], ...], ...]) -> dict[str, int]:
    values: dict[str, set[int]] = {}
    for binding in bindings:
        for name, value in binding:
            values.setdefault(name, set()).add(value)
    return {name: len(found) for name, found in values.items()}
