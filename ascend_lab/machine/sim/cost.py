"""Computes the cycles of an instruction, and the memory traffic of a launch, which copies need.

An instruction occupies its pipe for

    occupancy = startup + work / rate

cycles, and its result is visible `latency` cycles later. Every duration is a whole number of
cycles. Some published costs (the head of mmad and of vector instructions) apply only if the pipe
was idle before. Here they are charged every time, so that time stays linear; it is then at most a
few percent too long.

The traffic says how many bytes come from device memory rather than from L2. In a launch the first
access to a byte comes from memory; a later one hits L2 if all data accessed in between fit in L2.
For a loop nest this is decided loop by loop: if the data of one pass of a loop's body fit in L2,
the loop fetches each byte once, also bytes that several passes read; otherwise every pass fetches
its bytes again. No addresses are simulated, so that the work does not grow with trip counts.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
    """The conditions on which the time of an instruction depends: other cores, and L2's contents.

    `active_cores` share L2 and memory. `memory_share` is, by tensor, the share of the bytes read
    that comes from memory. `memory_slowdown` >= 1 stretches copies from memory if memory is the
    limit. In a mix launch `kinds` counts the cube cores and the vector cores; a core shares L2 and
    memory only with cores of its type.
    """

    active_cores: int = 1
    memory_share: Mapping[str, float] = field(default_factory=dict)
    memory_slowdown: float = 1.0
    kinds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cycles the pipe is occupied, extra cycles until the result is visible, energy in pJ."""

    occupancy_cycles: int
    latency_cycles: int = 0
    energy_pj: float = 0.0


def costs_of(
    programs: Iterable[Program], chip: Chip, surroundings: Surroundings
) -> Mapping[int, Cost]:
    """Return the cost of every instruction that is not a flag, by the instruction's identity."""
    return {
        id(instruction): instruction_cost(chip, instruction, surroundings)
        for core_program in programs
        for instruction, _ in core_program.instructions()
        if instruction.event is None and instruction.op not in program.CROSS
    }


def instruction_cost(chip: Chip, instruction: Instruction, surroundings: Surroundings) -> Cost:
    """Return the cost of one instruction on `chip`."""
    op = instruction.op
    if op in ("set_flag", "wait_flag"):
        return Cost(chip.flag_cycles)
    if op == "barrier":
        return Cost(chip.barrier_cycles)
    if op == "scalar":
        return Cost(chip.scalar_cycles * instruction.int_attr("steps", 1))
    if op == "mmad":
        return _mmad_cost(chip, instruction)
    if op == "vdeq":
        return _vdeq_cost(chip, instruction)
    if instruction.pipe == "V" and op != "data_copy":
        return _vector_cost(chip, instruction)
    return _move_cost(chip, instruction, surroundings)


def _mmad_cost(chip: Chip, instruction: Instruction) -> Cost:
    """cycles = head + ceil(m/m0) * ceil(k/k0) * ceil(n/n0)   (PTO cost model)."""
    dtype = instruction.srcs[0].buffer.dtype
    shape = mmad_shape(instruction)
    # The cube multiplies 16 x 16 by 16 x 16 a cycle in fp16: 64 x 128 x 32 takes 4 * 8 * 2 = 64.
    cube_steps = math.prod(
        -(-size // side) for size, side in zip(shape, chip.cube_shape(dtype), strict=True)
    )
    energy = math.prod(shape) * chip.mac_energy_pj[dtype]
    return Cost(chip.cube_head_cycles + cube_steps, 0, energy)


def _vector_cost(chip: Chip, instruction: Instruction) -> Cost:
    """cycles = head + slope * repeats, visible tail later   (PTO cost model).

    vbrcb writes a block per element, and vtranspose 16 blocks. Their repeats are counted by the
    bytes they write: 256 bytes, 8 blocks, a repeat.
    """
    op = instruction.op
    counted = instruction.out
    if op.startswith("vc") and instruction.srcs:
        # A reduction writes less than it reads, and a conversion may: the source sets the time.
        counted = instruction.srcs[0]
    cost = chip.vector_costs.get(op, chip.vector_costs["default"])
    repeats_by_bytes = -(-counted.size_bytes // chip.vector_bytes_per_repeat)
    repeats = repeats_by_bytes if op in program.WHOLE_BLOCKS else counted.sizes[0]
    energy = counted.size_bytes * chip.vector_energy_pj_per_byte
    return Cost(cost.head_cycles + cost.slope_cycles * repeats, cost.tail_cycles, energy)


def _vdeq_cost(chip: Chip, instruction: Instruction) -> Cost:
    """cycles = startup + bytes / rate of L0C -> UB; with a bias, those of UB -> L0C as well."""
    src = instruction.srcs[0]
    dst = instruction.out
    # An element counts as at least 2 bytes: int8 takes as long as fp16.
    transfers = [("L0C", "UB", dst.elements * max(dst.buffer.itemsize, 2))]
    if len(instruction.srcs) > 2:
        # On the chip the bias is copied to L0C before the first product; its time is counted here.
        transfers.append(("UB", "L0C", src.size_bytes))
    cycles = 0
    energy = 0.0
    for src_space, dst_space, size in transfers:
        path = chip.path(src_space, dst_space)
        cycles += path.startup_cycles + math.ceil(size / path.rate_bytes_per_cycle - 1e-9)
        energy += size * path.energy_pj_per_byte
    return Cost(cycles, chip.path("L0C", "UB").latency_cycles, energy)


def _moved_bytes(region: Region) -> int:
    """Return the bytes that are transferred: every contiguous run fills whole 32-byte blocks."""
    # 10 rows of 20 fp16 numbers with gaps between: 10 runs of 40 bytes move 10 * 64 bytes.
    run = region.run_bytes
    blocks = -(-run // BLOCK_BYTES)
    return region.size_bytes // run * blocks * BLOCK_BYTES


def _move_cost(chip: Chip, instruction: Instruction, surroundings: Surroundings) -> Cost:
    """Return the cost of a copy: each byte takes the time of the slowest of path, L2 and memory.

    cycles = startup + bytes * (f * memory cycles per byte + (1 - f) * L2 cycles per byte)

    where f is the share of the bytes that comes from memory.
    """
    src = instruction.srcs[0]
    dst = instruction.out
    path = chip.path(src.space, dst.space)
    size = _moved_bytes(dst)
    if instruction.op == "data_copy":
        size = max(size, _moved_bytes(src))
    if src.space == "L0C":  # a copy out of L0C may convert: the bytes that it writes count
        size = dst.size_bytes
    cycles_per_byte = 1.0 / path.rate_bytes_per_cycle
    energy = path.energy_pj_per_byte
    latency = float(path.latency_cycles)
    sharing_cores = surroundings.kinds.get(path.unit, surroundings.active_cores)
    if "GM" in (src.space, dst.space):
        l2_rate = chip.shared_rate_bytes_per_cycle("L2", sharing_cores)
        cycles_per_byte = max(cycles_per_byte, 1.0 / l2_rate)
        energy += chip.l2.energy_pj_per_byte
        latency += chip.l2.latency_cycles
    if src.space == "GM":
        memory_share = surroundings.memory_share.get(src.buffer.name, 1.0)
        memory_cycles_per_byte = max(
            1.0 / path.rate_bytes_per_cycle,
            surroundings.memory_slowdown
            / chip.shared_rate_bytes_per_cycle("memory", sharing_cores),
        )
        cycles_per_byte = (
            memory_share * memory_cycles_per_byte + (1.0 - memory_share) * cycles_per_byte
        )
        energy += memory_share * chip.device_memory.energy_pj_per_byte
        latency += memory_share * (chip.device_memory.latency_cycles - chip.l2.latency_cycles)
    # 1e-9: a product that is 64.0000000001 by rounding errors takes 64 cycles, not 65.
    occupancy = path.startup_cycles + math.ceil(size * cycles_per_byte - 1e-9)
    return Cost(occupancy, round(latency), size * energy)


# -- traffic ---------------------------------------------------------------------------------------
Footprint = dict[str, int]
"""Bytes per tensor name."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that all cores of a launch move.

    - path_bytes: by (source, destination) space
    - memory_share: by tensor, the share of the bytes read that comes from device memory
    - fetched: by tensor, the number of bytes that come from device memory
    - read_once, write_once: by tensor, the number of different bytes that are read and written
    """

    path_bytes: Mapping[tuple[str, str], int]
    memory_share: Mapping[str, float]
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
        """Tell whether every byte of a tensor is read only once."""
        fetched = self.fetched.get(name, 0)
        memory_share = self.memory_share.get(name, 0.0)
        return fetched > 0 and fetched <= memory_share * self.read_once[name]

    def warmed(self, warm: Mapping[str, float], write_back_bytes: int | None = None) -> "Traffic":
        """Return the traffic of the same launch if L2 holds the share `warm[name]` of a tensor.

        That share of the first accesses hits. L2 writes `write_back_bytes` to memory during the
        launch, by default as many bytes as in this traffic.
        Raises `SimulationError` for shares outside 0..1 and negative bytes.
        """
        bad_shares = [f"{n}: {w}" for n, w in warm.items() if not 0.0 <= w <= 1.0]
        if bad_shares or (write_back_bytes or 0) < 0:
            needed = "shares of tensors in L2 from 0 to 1, and 0 or more bytes written back"
            got = ", ".join(bad_shares) or str(write_back_bytes)
            raise SimulationError(needed, got, "pass what L2.touch returns")
        fetched = {
            name: size - int(warm.get(name, 0.0) * min(size, self.read_once[name]))
            for name, size in self.fetched.items()
        }
        # Two passes over 50 bytes fetch 100. If 40 % of the 50 are in L2 at the start, 80 bytes are
        # fetched, a share of 0.8.
        still_fetched = {name: fetched[name] / size for name, size in self.fetched.items() if size}
        return replace(
            self,
            memory_share={
                name: share * still_fetched.get(name, 1.0)
                for name, share in self.memory_share.items()
            },
            memory_read_bytes=sum(fetched.values()),
            memory_write_bytes=(
                self.memory_write_bytes if write_back_bytes is None else write_back_bytes
            ),
            fetched=fetched,
        )


def unique_elements(dims: list[tuple[int, int]]) -> int:
    """Return the number of different addresses sum(i_d * stride_d) for 0 <= i_d < count_d.

    `dims` are (count, stride) pairs in any order. A stride that is at most as long as the span
    covered so far extends it; a longer one repeats it as separate pieces. The result is exact, or,
    if pieces overlap in part, an upper bound.
    """
    # (8, 1), (4, 6): runs of 8 that begin every 6 elements cover 8 + 3 * 6 = 26, one span.
    # (8, 1), (4, 10): 4 separate pieces of 8, that is 32.
    span = 1
    pieces = 1
    for count, stride in sorted(((c, abs(s)) for c, s in dims if c > 1 and s), key=lambda d: d[1]):
        if stride <= span:
            span += (count - 1) * stride
        else:
            pieces *= count
    return span * pieces


def _touched_bytes(instruction: Instruction, region: Region, inside: Mapping[str, int]) -> int:
    """Return the number of different bytes of GM that an instruction touches in all loop passes.

    `inside` gives the trip counts of the loops. Rows that an index picks at run time are assumed to
    be different, up to the number of rows.
    """
    dims = [*zip(region.sizes, region.strides, strict=True)]
    if any(v in inside for v, _ in region.slot.terms):  # a ring of tiles: the loop uses every slot
        dims.append((region.buffer.slots, region.buffer.elements))
    loops = [(inside[v], c) for v, c in region.offset.terms if v in inside]
    if program.index_of(instruction) is None:
        return unique_elements([*dims, *loops]) * region.buffer.itemsize
    rows = (instruction.int_attr("bound"), instruction.int_attr("pitch"))
    picked_elements = unique_elements(dims) * math.prod(inside.values())
    return min(unique_elements([*dims, *loops, rows]), picked_elements) * region.buffer.itemsize


def _gm_regions(instruction: Instruction) -> list[tuple[Region, bool]]:
    """Return the regions of GM that an instruction touches, each with whether it is written."""
    regions = [(r, False) for r in instruction.srcs if r.space == "GM"]
    if instruction.dst is not None and instruction.dst.space == "GM":
        regions.append((instruction.dst, True))
    return regions


def _footprint(
    nodes: tuple[Node, ...], inside: Mapping[str, int], sizes: Footprint | None = None
) -> tuple[Footprint, Footprint]:
    """Return the number of different bytes, by tensor, that `nodes` read and that they write.

    `inside` gives the trip counts of the loops around them. `sizes` collects the tensors' sizes.
    """
    sizes = {} if sizes is None else sizes
    reads: Footprint = {}
    writes: Footprint = {}
    for node in nodes:
        if isinstance(node, Loop):
            if node.count:
                inner = _footprint(node.body, {**inside, node.var: node.count}, sizes)
                _add_footprint(reads, inner[0], sizes)
                _add_footprint(writes, inner[1], sizes)
            continue
        if not node.dst:
            continue
        for region, is_write in _gm_regions(node):
            sizes.setdefault(region.buffer.name, region.buffer.size_bytes)
            touched = {region.buffer.name: _touched_bytes(node, region, inside)}
            _add_footprint(writes if is_write else reads, touched, sizes)
    return reads, writes


def _add_footprint(total: Footprint, touched: Footprint, sizes: Footprint) -> None:
    """Add bytes by tensor; the sum of several instructions is at most the size of the tensor."""
    for name, size in touched.items():
        total[name] = min(total.get(name, 0) + size, sizes[name])


def _footprint_bytes(footprint: tuple[Footprint, Footprint]) -> int:
    """Return the bytes that a footprint takes in L2; a tensor both read and written counts once."""
    reads, writes = footprint
    only_written = sum(size for name, size in writes.items() if name not in reads)
    return sum(reads.values()) + only_written


def _misses(
    nodes: tuple[Node, ...],
    params: Mapping[str, int],
    capacity: int,
    footprint: tuple[Footprint, Footprint],
) -> Footprint:
    """Return the bytes, by tensor, that one run of `nodes` on all cores reads from memory.

    `footprint` holds the bytes that this run touches, `capacity` is the size of L2.
    """
    if _footprint_bytes(footprint) <= capacity:
        return footprint[0]
    total = Counter[str]()
    fetching_once = list[Node]()
    for node in nodes:
        one_pass = _footprint(node.body, params) if isinstance(node, Loop) else ({}, {})
        # A loop whose pass fits fetches its bytes once; one whose pass does not, in every pass.
        if not isinstance(node, Loop) or _footprint_bytes(one_pass) <= capacity:
            fetching_once.append(node)
            continue
        inner = _misses(node.body, params, capacity, one_pass)
        total.update({name: size * node.count for name, size in inner.items()})
    total.update(_footprint(tuple(fetching_once), params)[0])
    return total


def analyse(launch: Launch, chip: Chip) -> Traffic:
    """Return the traffic of a launch, from its loops and regions, without simulating addresses."""
    path_bytes, read = _bytes_by_path(launch)
    capacity = chip.l2.size_bytes
    fetched_by_all = Counter[str]()
    written = Counter[str]()
    read_by_all = Counter[str]()
    # how often a byte of a tensor is fetched, in the part of the launch that fetches it most often
    passes: dict[str, float] = {}
    for reads, writes, fetched in _part_footprints(launch, capacity):
        for name, size in fetched.items():
            passes[name] = max(passes.get(name, 0.0), size / reads[name])
        fetched_by_all.update(fetched)
        written.update(writes)
        read_by_all.update(reads)
    if launch.mix:  # a tensor both written and read passes data between cores, through L2
        read_by_all = Counter(
            {name: size for name, size in read_by_all.items() if name not in written}
        )
        fetched_by_all = Counter({n: m for n, m in fetched_by_all.items() if n in read_by_all})
    sizes = {b.name: b.size_bytes for b in launch.tensors}
    touched = sum(min(read_by_all[n] + written[n], s) for n, s in sizes.items())
    # Parts run at the same time and share what they fetch: if each of 8 parts fetches a tensor of
    # 1 MB twice, it is fetched twice (2 MB), not 16 times.
    missed = {n: min(m, math.ceil(sizes[n] * passes[n])) for n, m in fetched_by_all.items()}
    fetched = {n: min(m, read[n]) for n, m in missed.items() if read.get(n)}
    write_once = {n: min(w, sizes[n]) for n, w in written.items()}
    return Traffic(
        path_bytes=path_bytes,
        memory_share={n: min(1.0, missed.get(n, 0) / r) for n, r in read.items() if r},
        memory_read_bytes=sum(fetched.values()),
        # If all data that are touched fit in L2, the results stay there after the launch.
        memory_write_bytes=sum(write_once.values()) if touched > capacity else 0,
        fetched=fetched,
        read_once={n: min(r, sizes[n]) for n, r in read_by_all.items()},
        write_once=write_once,
    )


def _part_footprints(
    launch: Launch, capacity: int
) -> Iterator[tuple[Footprint, Footprint, Footprint]]:
    """Yield, for each part, the bytes by tensor that it reads, writes, and fetches from memory."""
    # The vector cores of an AI core run one program under equal parameters: it is analysed once.
    by_program: dict[
        tuple[int, frozenset[tuple[str, int]]], tuple[Footprint, Footprint, Footprint]
    ] = {}
    for part in launch.parts:
        params = _value_counts(part.bindings)
        body = part.program.body
        key = id(part.program), frozenset(params.items())
        if key not in by_program:
            footprint = _footprint(body, params)
            by_program[key] = *footprint, _misses(body, params, capacity, footprint)
        yield by_program[key]


@lru_cache(4096)
def lowest_bytes(launch: Launch) -> Mapping[tuple[str, bool], int]:
    """Return the first byte that is touched in each GM tensor, by (name, whether written)."""
    lowest: dict[tuple[str, bool], int] = {}
    for core_program in launch.programs:
        for instruction, ranges in core_program.scoped():
            for region, is_write in _gm_regions(instruction):
                low = (
                    program.reach_of(instruction, region).extent(ranges)[0] * region.buffer.itemsize
                )
                key = (region.buffer.name, is_write)
                lowest[key] = min(low, lowest.get(key, low))
    return lowest


def _bytes_by_path(launch: Launch) -> tuple[dict[tuple[str, str], int], Footprint]:
    """Return bytes per path, and bytes read per GM tensor, of all cores."""
    path_bytes = Counter[tuple[str, str]]()
    read = Counter[str]()
    cores = Counter[int]()
    for part in launch.parts:
        cores[id(part.program)] += part.core_count
    for core_program in launch.programs:
        for instruction, times in core_program.instructions():
            if instruction.dst is None or not instruction.srcs or instruction.op == "mmad":
                continue
            src = instruction.srcs[0]
            dst = instruction.dst
            if src.space == dst.space:
                continue
            # A copy out of L0C may convert, and load3d repeats pixels: the bytes written count.
            counts_written = src.space == "L0C" or instruction.op == "load3d"
            moved = dst.size_bytes if counts_written else min(src.size_bytes, dst.size_bytes)
            moved *= times * cores[id(core_program)]
            path_bytes[src.space, dst.space] += moved
            if src.space == "GM":
                read[src.buffer.name] += moved
    return dict(path_bytes), dict(read)


def _value_counts(bindings: tuple[tuple[tuple[str, int], ...], ...]) -> dict[str, int]:
    """Return how many values each parameter takes on the cores; for traffic it is like a loop."""
    values: dict[str, set[int]] = {}
    for binding in bindings:
        for name, value in binding:
            values.setdefault(name, set()).add(value)
    return {name: len(distinct) for name, distinct in values.items()}
