"""The records of a chip: numbers, each with its source and trust level, and their text form."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ascend_lab.errors import PathError

Trust = Literal["published", "derived", "borrowed", "assumed"]
"""How far to trust a number, strongest first.

A source prints a published number. A derived one is arithmetic on published ones, a borrowed one is
published or derived for another chip, and an assumed one is a judgement of ours.
"""

DTYPE_BYTES: Mapping[str, int] = {
    "fp16": 2,
    "bf16": 2,
    "fp32": 4,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
}

BLOCK_BYTES = 32
"""A block of UB or L1, 16 fp16 numbers: the unit of addresses and of axis C0 (Ascend C docs)."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One number of a chip file: its value, the key of its source, and its trust level."""

    value: float
    source: str
    trust: Trust


@dataclass(frozen=True, slots=True)
class Path:
    """A legal data path: the pipe that drives it, its rate, and what an instruction on it costs.

    A copy of n bytes occupies the pipe for `startup_cycles + n / rate_bytes_per_cycle` and its
    result is visible `latency_cycles` later. `unit` is the kind of core that owns the path.
    """

    pipe: str
    unit: str
    rate_bytes_per_cycle: float
    startup_cycles: int
    latency_cycles: int
    energy_pj_per_byte: float


@dataclass(frozen=True, slots=True)
class VectorCost:
    """Cycles of a vector instruction: head + slope * repeats, result visible tail cycles later."""

    head_cycles: int
    slope_cycles: int
    tail_cycles: int


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory shared by all cores: size and total rate for reading or writing.

    The `kind` of an L2 is "cache", or "buffer" if the compiler decides which tensors it holds.
    """

    size_bytes: int
    rate_bytes_per_s: float
    latency_cycles: int
    energy_pj_per_byte: float
    kind: str = "cache"


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link between devices: rate per direction and start-up time."""

    rate_bytes_per_s: float
    latency_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Chip:
    """An NPU as data: cores, clock, cube, vector unit, buffers, paths, memories, links.

    `facts` keeps every number once more with source and trust, keyed like the file
    ("clock.hz", "path.GM->L1.rate_bytes_per_cycle"); `sources` spells the source keys out. A chip
    whose file has no AI CPU has a rate of 0 for it. `device_memory` has the rate that kernels
    reach, `memory_peak_bytes_per_s` is the rate of the interface at best.

    Starting a task takes `queued_launch_s` on the device, which a profiler counts as the task's own
    time. A start by the host takes `launch_overhead_s` in all, and one that follows another kernel
    inside the same launch `barrier_s`. If cube and vector cores work together, the start takes
    `mix_start_s` more, and a flag between them arrives after `cross_flag_cycles` (0 where a core is
    both). A large kernel of the vendor's library takes `library_fetch_s` more for each of its cores
    (0 if the file has no number); our kernels do not.
    """

    # The fields stand in the order of a chip file's sections: more than twelve, as a chip is the
    # record of everything that hardware states.
    name: str
    summary: str
    combined: bool  # a core has both cube and vector unit (910A); else they are cores apart (910B)
    core_count: int
    vector_cores_per_core: int
    clock_hz: float
    cube: Mapping[str, tuple[int, int, int]]  # (m, k, n) of a cycle: fp16 16 x 16 x 16
    cube_head_cycles: int
    vector_bytes_per_repeat: int
    vector_costs: Mapping[str, VectorCost]
    scalar_cycles: int
    flag_cycles: int
    barrier_cycles: int
    all_cores_cycles: int
    max_repeat: int
    event_ids: int
    launch_overhead_s: float
    queued_launch_s: float
    barrier_s: float
    mix_start_s: float
    library_fetch_s: float
    cross_flag_cycles: int
    ai_cpu_overhead_s: float
    ai_cpu_rate_bytes_per_s: float
    buffers: Mapping[str, int]  # bytes by name: L1, L0A, L0B, L0C, UB, BT
    alignment: Mapping[str, int]
    paths: Mapping[tuple[str, str], Path]  # by source and target: ("GM", "UB")
    l2: Memory
    device_memory: Memory
    memory_peak_bytes_per_s: float
    mac_energy_pj: Mapping[str, float]
    vector_energy_pj_per_byte: float
    power_w: float | None
    links: Mapping[str, Link]
    facts: Mapping[str, Fact]
    sources: Mapping[str, str]

    def __hash__(self) -> int:
        """Hash the numbers that nearly always differ between chips; equality compares all."""
        return hash((self.name, self.clock_hz, self.core_count, self.device_memory, self.l2))

    def __repr__(self) -> str:
        """Return the name; `ascend-lab chips NAME` prints the numbers."""
        return f"Chip({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle read-only views as dictionaries: a chip travels to worker processes."""
        values = (getattr(self, f.name) for f in fields(self))
        return Chip, tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    def path(self, src: str, dst: str) -> Path:
        """Return the path src -> dst; raise `PathError` naming the paths that do exist."""
        path = self.paths.get((src, dst))
        if path is None:
            # All paths that begin at the source or end at the target: a detour uses one of them.
            legal = ", ".join(f"{a}->{b}" for a, b in self.paths if a == src or b == dst)
            remedy = f"go through one of: {legal or 'no path touches them'}"
            raise PathError(f"a data path {src}->{dst} on {self.name}", "none", remedy)
        return path

    def cube_shape(self, dtype: str) -> tuple[int, int, int]:
        """Return (m, k, n) multiplied per cycle for inputs of `dtype`."""
        if dtype not in self.cube:
            raise PathError(
                f"a cube number format on {self.name}", dtype, f"use one of {', '.join(self.cube)}"
            )
        return self.cube[dtype]

    def macs_per_cycle(self, dtype: str) -> int:
        """Multiply-accumulates of one core in one cycle: m * k * n, 16^3 = 4096 in fp16."""
        return math.prod(self.cube_shape(dtype))

    def peak_ops_per_s(self, dtype: str) -> float:
        """Cube peak of the chip, ops/s = 2 * cores * macs/cycle * clock (1 MAC = 2 ops)."""
        return 2.0 * self.core_count * self.macs_per_cycle(dtype) * self.clock_hz

    def vector_peak_ops_per_s(self, dtype: str) -> float:
        """Vector peak of the chip, ops/s = vector cores * lanes * clock, one op a lane a cycle."""
        lanes = self.vector_bytes_per_repeat // DTYPE_BYTES[dtype]
        return float(self.core_count * self.vector_cores_per_core * lanes) * self.clock_hz

    def cores_of(self, unit: str) -> int:
        """Number of cores that run programs of `unit` ("core", "cube" or "vector")."""
        return self.core_count * (self.vector_cores_per_core if unit == "vector" else 1)

    def shared_rate_bytes_per_cycle(self, level: str, active_cores: int) -> float:
        """Rate that each of n active cores gets from "L2" or "memory": total / n, bytes/cycle."""
        memory = self.l2 if level == "L2" else self.device_memory
        # 32 cores at 1 GHz share 1.2e12 bytes/s: 37.5 bytes a cycle each
        return memory.rate_bytes_per_s / active_cores / self.clock_hz


# -- as text ---------------------------------------------------------------------------------------
def chip_dict(chip: Chip) -> dict[str, Any]:
    """Return a chip as plain data for JSON; `facts` holds {value, source, trust} by key."""
    return {
        "name": chip.name,
        "summary": chip.summary,
        "combined": chip.combined,
        "cores": chip.core_count,
        "clock_hz": chip.clock_hz,
        "peak_ops_per_s": {dtype: chip.peak_ops_per_s(dtype) for dtype in chip.cube},
        "buffers_bytes": dict(chip.buffers),
        "l2_bytes": chip.l2.size_bytes,
        "memory_bytes": chip.device_memory.size_bytes,
        "memory_rate_bytes_per_s": chip.device_memory.rate_bytes_per_s,
        "memory_peak_bytes_per_s": chip.memory_peak_bytes_per_s,
        "paths": {
            f"{src}->{dst}": {n: v for n, v in asdict(path).items() if n != "energy_pj_per_byte"}
            for (src, dst), path in chip.paths.items()
        },
        "facts": {key: asdict(fact) for key, fact in chip.facts.items()},
        "sources": dict(chip.sources),
    }


def chip_table(chips: Iterable[Chip]) -> list[str]:
    """Return one line per chip: cores, clock, fp16 peak, memory."""
    lines = [f"{'chip':<12} {'cores':>5} {'MHz':>6} {'fp16 TFLOPS':>12} {'memory GB/s':>12}  about"]
    lines += [
        f"{chip.name:<12} {chip.core_count:>5} {chip.clock_hz / 1e6:>6.0f} "
        f"{chip.peak_ops_per_s('fp16') / 1e12:>12.1f} "
        f"{chip.device_memory.rate_bytes_per_s / 1e9:>12.1f}  {chip.summary}"
        for chip in chips
    ]
    return lines


def chip_lines(chip: Chip) -> list[str]:
    """Return every number of a chip, one a line: key, value, trust, source."""
    lines = [f"{chip.name}: {chip.summary}"]
    lines += [
        f"  {key:<44} {fact.value:<16.9g} {fact.trust:<10} {fact.source}"
        for key, fact in chip.facts.items()
    ]
    lines.append("sources:")
    used = {fact.source for fact in chip.facts.values()}
    lines += [f"  {key:<9} {text}" for key, text in chip.sources.items() if key in used]
    return lines
