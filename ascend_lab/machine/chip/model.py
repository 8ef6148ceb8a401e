"""The data classes of a chip and its parts (`Chip`, `Path`, `Memory`), and how they are printed.

For example, the path GM->UB of a chip says which pipe copies from device memory to the vector
unit's buffer, at how many bytes per cycle, and how many cycles a copy takes to start.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from ascend_lab.errors import PathError

Trust = Literal["published", "derived", "borrowed", "assumed"]
"""How far to trust a number, the most reliable first.

A published number is printed in its source. A derived one was computed from published ones, a
borrowed one is published or derived for another chip, and an assumed one is our estimate.
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
    result is visible `latency_cycles` later. `unit` is the type of core that owns the path.
    """

    pipe: str
    unit: str
    rate_bytes_per_cycle: float
    startup_cycles: int
    latency_cycles: int
    energy_pj_per_byte: float


@dataclass(frozen=True, slots=True)
class VectorCost:
    """The cost of a vector instruction: `head_cycles` + `slope_cycles` * repeats.

    Its result is visible `tail_cycles` later.
    """

    head_cycles: int
    slope_cycles: int
    tail_cycles: int


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory shared by all cores: its size, and its total rate for reading or writing.

    The `kind` of an L2 is "cache", or "buffer" if the compiler decides which tensors it holds.
    """

    size_bytes: int
    rate_bytes_per_s: float
    latency_cycles: int
    energy_pj_per_byte: float
    kind: str = "cache"


@dataclass(frozen=True, slots=True)
class Link:
    """One type of link between devices: rate per direction, startup time, and number of links."""

    rate_bytes_per_s: float
    latency_s: float
    count: int


@dataclass(frozen=True, slots=True)
class Chip:
    """An NPU as data: cores, clock, cube, vector unit, buffers, paths, memories, links.

    `facts` repeats every number with its source and trust level, under its key in the file
    ("clock.hz", "path.GM->L1.rate_bytes_per_cycle"); `sources` explains the names of the sources.
    If the file describes no AI CPU, its rate is 0. The rate of `device_memory` is the one that
    kernels reach; `memory_peak_bytes_per_s` is the peak rate of the interface.

    How long a kernel takes to start:

    - `queued_launch_s`: a start on the device, which a profiler counts as a part of the task;
    - `launch_overhead_s`: a start by the host, in all;
    - `barrier_s`: the start of a kernel that follows another inside the same launch;
    - `mix_start_s`: added if cube and vector cores work together;
    - `library_fetch_s`: added for each core of a large kernel of the vendor's library, whose code
      is fetched (0 if the file has no number); ours take none.

    A flag between a cube core and a vector core arrives after `cross_flag_cycles` (0 if a core has
    both units).

    `family` is the preset that the chip is made from: Ascend910B2 for your own file with that base.
    It decides what the numbers do not state, such as which kernels the vendor's library has.
    """

    # The fields are in the order of a chip file's sections.
    name: str
    family: str
    summary: str
    combined: bool  # one core has cube and vector unit (910A); on the 910B they are separate cores
    core_count: int
    vector_cores_per_core: int
    clock_hz: float
    cube: Mapping[str, tuple[int, int, int]]  # (m, k, n) of a cycle: fp16 16 x 16 x 16
    cube_head_cycles: int
    vector_bytes_per_repeat: int
    vector_costs: Mapping[str, VectorCost]
    scalar_cycles: int  # of a step of a scalar instruction
    flag_cycles: int  # for a pipe to set or to wait for a flag, once the flag is set
    barrier_cycles: int  # of a barrier within a core
    all_cores_cycles: int  # of a barrier between phases, at which all cores wait
    max_repeat: int  # repeats of one vector instruction: 255, as the count is a byte
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
        """Pickle read-only mappings as dictionaries: worker processes receive a chip this way."""
        values = (getattr(self, f.name) for f in fields(self))
        return Chip, tuple(dict(v) if isinstance(v, Mapping) else v for v in values)

    def path(self, src: str, dst: str) -> Path:
        """Return the path src -> dst; raise `PathError`, which names the possible paths."""
        path = self.paths.get((src, dst))
        if path is None:
            # paths that begin at the source or end at the target: a detour uses one of these
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
        """Return the multiply-accumulates of one core per cycle: m * k * n, 16^3 = 4096 in fp16."""
        return math.prod(self.cube_shape(dtype))

    def peak_ops_per_s(self, dtype: str) -> float:
        """Return the cube peak of the chip in ops/s: 2 * cores * MACs per cycle * clock."""
        # 910A: 2 * 32 cores * 4096 * 1e9 Hz = 262e12
        return 2.0 * self.core_count * self.macs_per_cycle(dtype) * self.clock_hz

    def vector_peak_ops_per_s(self, dtype: str) -> float:
        """Return the vector peak of the chip in ops/s: vector cores * lanes * clock."""
        # a repeat of 256 bytes has 128 lanes in fp16
        lanes = self.vector_bytes_per_repeat // DTYPE_BYTES[dtype]
        return float(self.core_count * self.vector_cores_per_core * lanes) * self.clock_hz

    def cores_of(self, unit: str) -> int:
        """Return the number of cores that run programs of `unit` ("core", "cube" or "vector")."""
        # 910B2: 24 AI cores with 2 vector cores each are 48 vector cores
        return self.core_count * (self.vector_cores_per_core if unit == "vector" else 1)

    def shared_rate_bytes_per_cycle(self, level: str, active_cores: int) -> float:
        """Return the bytes per cycle that each active core gets from "L2" or "memory"."""
        memory = self.l2 if level == "L2" else self.device_memory
        # 32 cores at 1 GHz share 1.2e12 bytes/s: 37.5 bytes a cycle each
        return memory.rate_bytes_per_s / active_cores / self.clock_hz


# -- a chip as text --------------------------------------------------------------------------------
def chip_dict(chip: Chip) -> dict[str, Any]:
    """Return a chip as a dictionary for JSON; `facts` holds {value, source, trust} by key."""
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
    """Return every number of a chip, one per line: key, value, trust, source."""
    lines = [f"{chip.name}: {chip.summary}"]
    lines += [
        f"  {key:<44} {fact.value:<16.9g} {fact.trust:<10} {fact.source}"
        for key, fact in chip.facts.items()
    ]
    lines.append("sources:")
    used = {fact.source for fact in chip.facts.values()}
    lines += [f"  {key:<9} {text}" for key, text in chip.sources.items() if key in used]
    return lines
