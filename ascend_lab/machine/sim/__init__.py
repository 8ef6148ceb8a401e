"""The simulator: executes a program for its values (`execute`), or for its time (`simulate`).

`simulate(program, chip)` returns the time of a program or a launch as a `Timeline`.

`simulate_kernel` times a kernel, whose phases run one after another after a single launch by the
host. Without a `DeviceMemory` every phase starts with an empty L2, so that data which one phase
leaves in L2 for the next are read from memory again. With one, a phase finds in L2 what earlier
phases left, also those of kernels that were timed before on the same memory: a network is timed as
a loop over its kernels.

Cores that signal each other are timed as one program, in which their flags connect their pipes. A
cross_set raises one flag for each pipe of the core that it signals. At a cross_wait every pipe of
the waiting core waits for its flag, so that none begins a later instruction before the wait is
over. Cores with equal programs take the same time: of AI cores with equal programs only one is
timed, and in it only one of vector cores with equal programs.
"""

import gc
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Literal

# fmt: off
# isort: off
from ascend_lab.machine.chip import Chip
from ascend_lab.errors import NotComposableError, SimulationError, SyncError
from ascend_lab.machine.isa import (
    Event, Instruction, Kernel, Launch, Loop, Part, Program, as_kernel,
)
from ascend_lab.machine.isa.instructions import mmad_shape, program_unit
from ascend_lab.machine.isa.launch import (
    MODES, Runnable, ai_cores_wait_for_each_other, as_launch, check_launch, pipes_by_cross_flag,
    senders,
)
from ascend_lab.machine.sim.compiled import (
    SET, WAIT, WORK, Compiled, Compiler, Nest, compile_program, numba_available, run_reference,
)
from ascend_lab.machine.sim.cost import (
    Cost, Surroundings, Traffic, analyse, costs_of, instruction_cost,
)
from ascend_lab.machine.sim.fast import run_batch, run_fast, run_quickest
from ascend_lab.machine.sim.l2 import L2, Access, DeviceMemory, Outcome, accesses_of
from ascend_lab.machine.sim.timeline import (
    KernelTimeline, Span, Timeline, trace_events, write_trace,
)
from ascend_lab.machine.sim.values import execute
# fmt: on
# isort: on

__all__ = [
    "L2",
    "Access",
    "Compiled",
    "Cost",
    "DeviceMemory",
    "KernelTimeline",
    "NotComposableError",
    "Outcome",
    "Span",
    "Surroundings",
    "Timeline",
    "Traffic",
    "analyse",
    "compile_program",
    "execute",
    "few_collections",
    "instruction_cost",
    "least_signal_cycles",
    "numba_available",
    "outgoing_rate",
    "run_batch",
    "run_fast",
    "run_reference",
    "shortest_latencies",
    "simulate",
    "simulate_kernel",
    "trace_events",
    "write_trace",
]


@dataclass(frozen=True, slots=True)
class _Member:
    """A core that is timed, in place of all equal ones: its name, number and program."""

    name: str
    place: int
    program: Program


class _Crew(Compiler):
    """Compiles the programs of cores that signal each other; each `team` cores form an AI core.

    On the 910B a team is one cube core and two vector cores: numbers 3, 4, 5 are AI core 1.
    """

    def __init__(
        self, chip: Chip, costs: Mapping[int, Cost], members: Sequence[_Member], team: int
    ) -> None:
        super().__init__(chip, costs)
        self.members = members
        self.member = members[0]
        cores = team * (members[-1].place // team + 1)
        # for each core and mode of cross_set, the timed cores whose sets it receives
        self.senders_to: dict[tuple[int, int], list[_Member]] = {}
        for receiver in members:
            for mode in MODES:
                places = senders(receiver.place, mode, cores, team)
                timed_senders = [m for m in members if m.place in places]
                self.senders_to[receiver.place, mode] = timed_senders
        self.sets = {m.place: set(pipes_by_cross_flag(m.program)) for m in members}
        self.pipe_names = {m.place: m.program.pipes for m in members}

    def compiled(self) -> Compiled:
        """Return all programs as one, in which each is a nest that runs once."""
        nests = list[int | Nest]()
        for member in self.members:
            self.member = member
            self.begin(self.pipe_names[member.place], f"{member.name}.")
            core_nest = Loop("core", 1, member.program.body)
            nests += self.tree((core_nest,))
        return self.finish(tuple(nests), len(nests))

    def cross(self, node: Instruction) -> list[int]:
        """Add a cross_set, a flag for every pipe of every core it signals, or a cross_wait."""
        self.sources.append(node)
        flag = node.int_attr("id")
        core = self.member
        if node.op == "cross_wait":
            flag_senders = self._senders_of(flag)
            waits = [(p, self._number(m, core, p, flag)) for p in self.pipes for m in flag_senders]
            return [self.step(self.pipes[p], WAIT, number, 0, 0) for p, number in waits]
        pipe = self.pipes[node.pipe]
        mode = node.int_attr("mode")
        latency = self.last_latency[pipe] + self.chip.cross_flag_cycles
        self.tail_latency[pipe] = 0
        numbers: list[int] = []
        for receiver in self.members:
            if core in self.senders_to[receiver.place, mode]:
                receiving_pipes = self.pipe_names[receiver.place]
                numbers += [self._number(core, receiver, p, flag) for p in receiving_pipes]
        return [
            self.step(pipe, WORK, -1, self.chip.flag_cycles, 0),
            *(self.step(pipe, SET, number, 0, latency) for number in numbers),
        ]

    def _senders_of(self, flag: int) -> list[_Member]:
        """Return the cores whose sets of a flag this core waits for.

        All must set it in the same mode: which of two modes comes first would be unknown.
        """
        senders_by_mode = []
        for mode in MODES:
            cores = self.senders_to[self.member.place, mode]
            if any((mode, flag) in self.sets[m.place] for m in cores):
                senders_by_mode.append(cores)
        wait = f"{self.member.name} waits for cross-core flag {flag}"
        if not senders_by_mode:
            needed = "deadlock: a cross_set for every cross_wait"
            got = f"{wait}, never set"
            raise SyncError(needed, got, "add the missing set")
        if len(senders_by_mode) > 1:
            needed = f"{wait}: sets of one mode"
            got = f"{len(senders_by_mode)} modes"
            raise SimulationError(needed, got, "use a flag for each mode")
        return senders_by_mode[0]

    def _number(self, sender: _Member, receiver: _Member, pipe: str, flag: int) -> int:
        """Return the number of the event by which a core signals one pipe of another."""
        event = Event(sender.name, f"{receiver.name}.{pipe}", flag)
        return self.events.setdefault(event, len(self.events))


def _members(teams: Sequence[tuple[Part, ...]]) -> list[_Member]:
    """Return the cores to time: of each AI core the cube core, and one of equal vector cores."""
    members = []
    for number, team in enumerate(teams):
        suffix = f"@{number}" if len(teams) > 1 else ""
        has_equal_vectors = len({part.program for part in team[1:]}) == 1
        for place, part in enumerate(team[:2] if has_equal_vectors else team):
            # Core 0 of a team is the cube core (AIC). The vector cores are AIV0 and AIV1, or AIV
            # for both if they run the same program.
            kind = "AIC"
            if place:
                kind = "AIV" if has_equal_vectors else f"AIV{place - 1}"
            members.append(_Member(kind + suffix, number * len(team) + place, part.program))
    return members


def compile_crews(launch: Launch, chip: Chip, costs: Mapping[int, Cost]) -> tuple[Compiled, ...]:
    """Compile a mix launch: one program for each group of equal AI cores, or one for all AI cores.

    There is one for all if AI cores wait for each other. Raises `SyncError` for a flag that nobody
    sets, `SimulationError` for one that is set in two modes.
    """
    if ai_cores_wait_for_each_other(launch):
        teams_of_crews = [launch.teams]
    else:
        teams_of_crews = [(team,) for team in launch.teams]
    crews = (_Crew(chip, costs, _members(teams), launch.mix) for teams in teams_of_crews)
    return tuple(crew.compiled() for crew in crews)


MIN_NEW_OBJECTS = 500_000
"""Number of new objects after which Python's garbage collector runs (700 in Python 3.11)."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Let Python's garbage collector run rarely in a `with` block that builds many programs.

    The collector visits all living objects, so that it takes longer the more programs there are.
    """
    threshold, *others = gc.get_threshold()  # a threshold of 0: the user has switched it off
    gc.set_threshold(max(threshold, MIN_NEW_OBJECTS) if threshold else 0, *others)
    try:
        yield
    finally:
        gc.set_threshold(threshold, *others)


# -- programs and kernels --------------------------------------------------------------------------
Engine = Literal["fast", "reference"]
CACHED_LAUNCHES = 4096
"""Number of launches whose traffic and time are cached: more than a large network has."""


def simulate(
    program: Program | Launch,
    chip: Chip,
    *,
    engine: Engine = "fast",
    warm: Mapping[str, float] | None = None,
    write_back_bytes: int | None = None,
) -> Timeline:
    """Time a program or a launch on `chip`; both engines give the same cycles.

    All active cores share L2 and memory evenly, in a mix launch the cube cores among themselves and
    the vector cores among themselves. No launch ends before device memory has moved all its bytes,
    and no mix launch before L2 has. Where memory is the limit, the time is memory's, and the copies
    from memory are stretched (`memory_slowdown`) until the pipes take as long.

    L2 is empty at the start, or holds the share `warm[name]` of a GM tensor. `write_back_bytes` go
    to memory during the launch, by default all written bytes if the bytes touched exceed L2, else
    none. Raises `SimulationError` (too many cores, unknown engine, bad shares) and `SyncError`
    (deadlock).
    """
    if isinstance(program, Kernel):
        needed = "a program or a launch"
        raise SimulationError(needed, f"the kernel {program.name}", "call simulate_kernel")
    launch = as_launch(program)
    traffic = analyse(launch, chip)
    if warm or write_back_bytes is not None:
        traffic = traffic.warmed(warm or {}, write_back_bytes)
    return time_launch(launch, chip, traffic, engine)


def _check(launch: Launch, chip: Chip, engine: str) -> None:
    """Raise `SimulationError` for an unknown engine, or for no cores or more than the chip has."""
    if engine not in ("fast", "reference"):
        raise SimulationError("engine 'fast' or 'reference'", repr(engine), "choose one")
    if not launch.parts:
        raise SimulationError("a launch of at least one core", "none", "add a part")
    unit = program_unit(chip, launch.parts[0].program)
    if launch.core_count > chip.cores_of(unit):
        needed = f"at most {chip.cores_of(unit)} {unit} cores on {chip.name}"
        raise SimulationError(needed, str(launch.core_count), "launch fewer blocks")
    check_launch(chip, launch)


def time_launch(launch: Launch, chip: Chip, traffic: Traffic, engine: Engine = "fast") -> Timeline:
    """Time a launch whose traffic is known; raises as `simulate`."""
    _check(launch, chip, engine)
    # The launch takes at least bytes / rate of each memory that its cores share. The costs of its
    # copies alone may give less: they leave out what L2 writes back, and in a mix launch each kind
    # of core copies as if it had L2 to itself.
    shared = [(traffic.memory_bytes, chip.device_memory)]
    surroundings = Surroundings(launch.core_count, traffic.memory_share)
    if launch.mix:
        # mix counts the cores of an AI core: 3 is a cube core and two vector cores
        cores = {"cube": launch.core_count, "vector": launch.core_count * (launch.mix - 1)}
        surroundings = replace(surroundings, kinds=cores)
        shared.append((sum(n for p, n in traffic.path_bytes.items() if "GM" in p), chip.l2))
    memory_cycles = max(
        math.ceil(size / memory.rate_bytes_per_s * chip.clock_hz - 1e-9) for size, memory in shared
    )
    costs = costs_of(launch.programs, chip, surroundings)
    if launch.mix:
        parts = compile_crews(launch, chip, costs)
    else:
        parts = tuple(Compiler(chip, costs).alone(part.program) for part in launch.parts)
    by_events = engine == "reference"
    times = tuple(run_reference(part)[0] if by_events else run_quickest(part) for part in parts)
    macs, dtype, energy_pj = _work(launch, costs)
    reads = sum(n for (src, _), n in traffic.path_bytes.items() if src == "GM")
    return Timeline(
        name=launch.name,
        chip=chip,
        cycles=max(*times, memory_cycles) if max(times) else 0,
        core_count=launch.core_count,
        path_bytes=traffic.path_bytes,
        memory_bytes=traffic.memory_bytes,
        l2_bytes=max(reads - traffic.memory_read_bytes, 0),
        macs=macs,
        dtype=dtype,
        energy_pj=energy_pj + traffic.memory_write_bytes * chip.device_memory.energy_pj_per_byte,
        surroundings=surroundings,
        parts=parts,
        pipe_cycles=times,
        mix_cycles=round(chip.mix_start_s * chip.clock_hz) if launch.mix else 0,
    )


def _work(launch: Launch, costs: Mapping[int, Cost]) -> tuple[int, str, float]:
    """Return the multiply-accumulates of all cores, their number format, and the energy in pJ."""
    macs = 0
    dtype = "fp16"
    energy_pj = 0.0
    for part in launch.parts:
        for source, runs_per_core in part.program.instructions():
            if cost := costs.get(id(source)):
                runs = runs_per_core * part.core_count
                energy_pj += cost.energy_pj * runs
                if source.op == "mmad":
                    macs += math.prod(mmad_shape(source)) * runs
                    dtype = source.srcs[0].buffer.dtype
    return macs, dtype, energy_pj


def simulate_kernel(
    kernel: Runnable, chip: Chip, memory: DeviceMemory | None = None, *, engine: Engine = "fast"
) -> KernelTimeline:
    """Time a kernel phase by phase; raises what `simulate` raises for one of its phases.

    With `memory`, L2 is as earlier kernels left it, keeps what this one leaves, and writes to
    memory what it evicts. Raises `SimulationError` if a tensor has no room at its address.
    """
    phased = as_kernel(kernel)
    mix = round(chip.mix_start_s * chip.clock_hz) if len(units_of(phased, chip)) > 1 else 0
    if memory is None:
        phases = tuple(simulate(phase, chip, engine=engine) for phase in phased.phases)
        return KernelTimeline(phased.name, chip, phases, mix_cycles=mix)
    addresses = memory.addresses(phased.tensors)
    timelines = list[Timeline]()
    first_hits = dict[str, float]()
    for i, phase in enumerate(phased.phases, 1):
        # Only the last phase may drop a tensor as it reads it: until then a later one may need it.
        is_last_phase = i == len(phased.phases)
        last_read = memory.last if is_last_phase else frozenset[str]()
        accesses = accesses_of(phase, traffic_of(phase, chip), addresses, last_read)
        outcome = memory.l2.touch(accesses)
        hits = tuple(outcome.hits.items())
        first_hits = dict(hits) | first_hits  # of a tensor that two phases read, the first counts
        timelines.append(_time_warm(phase, chip, hits, outcome.write_back_bytes, engine))
    return KernelTimeline(phased.name, chip, tuple(timelines), mix_cycles=mix, hits=first_hits)


def units_of(kernel: Kernel, chip: Chip) -> frozenset[str]:
    """Return the types of cores that a kernel needs; with two types it starts as a mix kernel."""
    parts = (part for phase in kernel.phases for part in phase.parts)
    return frozenset(program_unit(chip, part.program) for part in parts)


traffic_of = lru_cache(CACHED_LAUNCHES)(analyse)
"""The traffic of a launch, from a cache if an equal one was analysed before."""


@lru_cache(CACHED_LAUNCHES)
def _time_warm(
    launch: Launch,
    chip: Chip,
    hits: tuple[tuple[str, float], ...],
    write_back_bytes: int,
    engine: Engine,
) -> Timeline:
    """Time a launch that finds shares of its tensors in L2.

    Equal blocks of a network are equal launches and find L2 in the same state: hence the cache.
    """
    warmed = traffic_of(launch, chip).warmed(dict(hits), write_back_bytes)
    return time_launch(launch, chip, warmed, engine)


def least_signal_cycles(chip: Chip) -> float:
    """Return the least cycles until a core knows that another core, of any type, has written data.

    A core can know it from a launch, from a barrier over all cores, from the barrier inside a super
    kernel, or, if the chip has them, from a flag between cores.
    """
    barrier, launch = (s * chip.clock_hz for s in (chip.barrier_s, chip.queued_launch_s))
    # Loads of weights before a barrier hide up to half of it. Before a flag they hide nothing:
    # there the weights take the same path as the data that is waited for.
    signal = barrier / 2 if chip.combined else min(barrier, chip.cross_flag_cycles)
    return min(launch, chip.all_cores_cycles, signal)


def outgoing_rate(chip: Chip, sources: Collection[str], targets: Collection[str] = ()) -> float:
    """Return the most bytes per cycle that a core can move out of the buffers `sources`.

    The pipes work in parallel, so that their rates add up. The rate of a pipe is that of its
    fastest path from one of the `sources` to one of the `targets` (empty: to any buffer).
    """
    pipes: dict[str, float] = {}
    for (source, target), path in chip.paths.items():
        if source in sources and (not targets or target in targets):
            pipes[path.pipe] = max(pipes.get(path.pipe, 0.0), path.rate_bytes_per_cycle)
    return sum(pipes.values()) or math.inf


@lru_cache(64)
def shortest_latencies(chip: Chip) -> Mapping[str, tuple[float, float, float]]:
    """Return, for each buffer, the least cycles to the cube's inputs, to the vector unit, to GM.

    A copy takes its startup, one cycle for its bytes, its latency, and L2's latency if it is from
    or to GM. Between two pipes a flag is set and waited for. On combined cores the vector unit
    itself copies out of L0C; on separate ones the other core must be told that the data is there.
    """
    signal_cycles = 0.0 if chip.combined else least_signal_cycles(chip)
    flags = 2 * chip.flag_cycles
    buffers = sorted({name for pair in chip.paths for name in pair})
    cycles = {(a, b): 0.0 if a == b else math.inf for a in buffers for b in buffers}
    for (a, b), path in chip.paths.items():
        latency = path.latency_cycles + (chip.l2.latency_cycles if "GM" in (a, b) else 0)
        cycles[a, b] = path.startup_cycles + 1 + latency + (flags if a != "GM" else 0)
    # Shortest paths between all pairs (Floyd and Warshall): `via` must be the outermost loop.
    for via, a, b in product(buffers, repeat=3):
        cycles[a, b] = min(cycles[a, b], cycles[a, via] + cycles[via, b])
    to_cube = {a: min(cycles[a, "L0A"], cycles[a, "L0B"]) + flags for a in buffers}
    if "UB" in to_cube:
        to_cube["UB"] += signal_cycles
    to_vector = {a: cycles[a, "UB"] + (flags if a != "UB" else 0) for a in buffers}
    to_vector["L0C"] = cycles["L0C", "UB"] + (0.0 if chip.combined else flags + signal_cycles)
    return {a: (to_cube[a], to_vector[a], cycles[a, "GM"]) for a in buffers}
