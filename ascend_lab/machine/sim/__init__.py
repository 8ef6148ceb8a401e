"""Programs executed for values (`execute`) and for time (`simulate`).

How long a program takes: `simulate(program, chip)` returns a `Timeline`.

A kernel is its phases one after another, and the host launches it once. Without a `DeviceMemory`
every phase starts with nothing of its input in L2: a kernel whose phases pass small tensors on is
timed too slow. With one, phases find what earlier ones left, those of kernels timed before on the
same memory too: a network is a loop over its kernels.

Cores that work together are one timed program: the flags between them join their pipes. A set for
another core raises a flag for every pipe of it, and a wait for other cores lets every pipe of its
own wait for that flag: a pipe passes all of them in order, so none begins what stands behind before
it has been issued. AI cores that run the same programs do so in step: each kind is timed once, and
of vector cores with one program only one.
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
    MODES, Runnable, as_launch, check_launch, meets, senders, uses,
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
    "least_ways",
    "numba_available",
    "rate_of",
    "run_batch",
    "run_fast",
    "run_reference",
    "simulate",
    "simulate_kernel",
    "told_cycles",
    "trace_events",
    "write_trace",
]


@dataclass(frozen=True, slots=True)
class _Member:
    """A core that stands for its like: what it is called, its place among all, its program."""

    name: str
    place: int
    program: Program


class _Crew(Compiler):
    """Compiles programs that tell each other, `team` cores to an AI core."""

    def __init__(
        self, chip: Chip, costs: Mapping[int, Cost], members: Sequence[_Member], team: int
    ) -> None:
        super().__init__(chip, costs)
        self.members, self.member = members, members[0]
        cores = team * (members[-1].place // team + 1)
        self.hears = {
            (m.place, mode): [s for s in members if s.place in senders(m.place, mode, cores, team)]
            for m in members
            for mode in MODES
        }
        self.sets = {m.place: set(uses(m.program)) for m in members}
        self.own = {m.place: m.program.pipes for m in members}

    def compiled(self) -> Compiled:
        """Return all programs, a nest that runs once for each."""
        nests = list[int | Nest]()
        for member in self.members:
            self.member = member
            self.begin(self.own[member.place], f"{member.name}.")
            whole = Loop("core", 1, member.program.body)
            nests += self.tree((whole,))
        return self.finish(tuple(nests), len(nests))

    def cross(self, node: Instruction) -> list[int]:
        """Raise a flag for every pipe of every core told, or wait on every own pipe."""
        self.sources.append(node)
        flag = node.number("id")
        me = self.member
        if node.op == "cross_wait":
            heard = self._heard(flag)
            waits = [(p, self._number(m, me, p, flag)) for p in self.pipes for m in heard]
            return [self.step(self.pipes[p], WAIT, number, 0, 0) for p, number in waits]
        pipe = self.pipes[node.pipe]
        mode = node.number("mode")
        latency = self.last_latency[pipe] + self.chip.cross_flag_cycles
        self.tail_latency[pipe] = 0
        told = (m for m in self.members if me in self.hears[m.place, mode])
        numbers = [self._number(me, m, p, flag) for m in told for p in self.own[m.place]]
        return [
            self.step(pipe, WORK, -1, self.chip.flag_cycles, 0),
            *(self.step(pipe, SET, number, 0, latency) for number in numbers),
        ]

    def _heard(self, flag: int) -> list[_Member]:
        """Return whose sets this core waits for; of two modes the order would be unknown."""
        hears = [self.hears[self.member.place, mode] for mode in MODES]
        found = [
            who
            for mode, who in zip(MODES, hears, strict=True)
            if any((mode, flag) in self.sets[m.place] for m in who)
        ]
        what = f"{self.member.name} waits for cross-core flag {flag}"
        if not found:
            needed = "deadlock: a cross_set for every cross_wait"
            got = f"{what}, never set"
            raise SyncError(needed, got, "add the missing set")
        if len(found) > 1:
            needed = f"{what}: sets of one mode"
            got = f"{len(found)} modes"
            raise SimulationError(needed, got, "use a flag for each mode")
        return found[0]

    def _number(self, sender: _Member, receiver: _Member, pipe: str, flag: int) -> int:
        event = Event(sender.name, f"{receiver.name}.{pipe}", flag)
        return self.events.setdefault(event, len(self.events))


def _members(teams: Sequence[tuple[Part, ...]]) -> list[_Member]:
    """Name the cores of some AI cores; equal vector cores of one stand for each other."""
    found = []
    for number, team in enumerate(teams):
        suffix = f"@{number}" if len(teams) > 1 else ""
        alone = len({part.program for part in team[1:]}) == 1
        for place, part in enumerate(team[:2] if alone else team):
            kind = ("AIV" if alone else f"AIV{place - 1}") if place else "AIC"
            found.append(_Member(kind + suffix, number * len(team) + place, part.program))
    return found


def compile_crews(launch: Launch, chip: Chip, costs: Mapping[int, Cost]) -> tuple[Compiled, ...]:
    """Return the timed programs of a mix launch: one for each kind of AI core, or one for all.

    Raises `SyncError` for a flag that nobody sets, `SimulationError` for one set in two modes.
    """
    together = [launch.teams] if meets(launch) else [(team,) for team in launch.teams]
    crews = (_Crew(chip, costs, _members(teams), launch.mix) for teams in together)
    return tuple(crew.compiled() for crew in crews)


OBJECTS = 500_000
"""Made before Python looks for garbage in cycles, where it makes programs by the hundred."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Let Python look for garbage in cycles seldom inside: each look takes longer than the last."""
    most, *others = gc.get_threshold()
    gc.set_threshold(max(most, OBJECTS) if most else 0, *others)
    try:
        yield
    finally:
        gc.set_threshold(most, *others)


# -- programs and kernels --------------------------------------------------------------------------
Engine = Literal["fast", "reference"]
REMEMBERED = 4096
"""Launches whose traffic and time are remembered: more than a large network has."""


def simulate(
    program: Program | Launch,
    chip: Chip,
    *,
    engine: Engine = "fast",
    warm: Mapping[str, float] | None = None,
    write_back_bytes: int | None = None,
) -> Timeline:
    """Time a program or a launch on `chip`; both engines give the same cycles.

    All active cores share L2 and memory evenly; those of a mix launch with their like, and it does
    not end before L2 has moved all its bytes either. No launch ends before device memory has moved
    all its bytes; where that is the limit, the time is memory's, and the copies from memory are
    stretched (`memory_slowdown`) until the pipes fill it. L2 is empty at the start, or holds the
    share `warm[name]` of a GM tensor; `write_back_bytes` go to memory meanwhile, by default all
    written bytes if what is touched exceeds L2, else none. Raises `SimulationError` (too many
    cores, unknown engine, bad shares) and `SyncError` (deadlock).
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
    shared = [(traffic.memory_bytes, chip.device_memory)]
    around = Surroundings(launch.core_count, traffic.fresh)
    if launch.mix:
        cores = {"cube": launch.core_count, "vector": launch.core_count * (launch.mix - 1)}
        around = replace(around, kinds=cores)
        shared.append((sum(n for p, n in traffic.path_bytes.items() if "GM" in p), chip.l2))
    memory_cycles = max(
        math.ceil(size / memory.rate_bytes_per_s * chip.clock_hz - 1e-9) for size, memory in shared
    )
    costs = costs_of(launch.programs, chip, around)
    if launch.mix:
        parts = compile_crews(launch, chip, costs)
    else:
        parts = tuple(Compiler(chip, costs).alone(part.program) for part in launch.parts)
    slow = engine == "reference"
    times = tuple(run_reference(part)[0] if slow else run_quickest(part) for part in parts)
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
        around=around,
        parts=parts,
        pipe_cycles=times,
        mix_cycles=round(chip.mix_start_s * chip.clock_hz) if launch.mix else 0,
    )


def _work(launch: Launch, costs: Mapping[int, Cost]) -> tuple[int, str, float]:
    """Multiply-accumulates of all cores, their number format, and the energy in pJ."""
    macs = 0
    dtype = "fp16"
    energy_pj = 0.0
    for part in launch.parts:
        for source, times in part.program.instructions():
            if cost := costs.get(id(source)):
                runs = times * part.core_count
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
    whole = as_kernel(kernel)
    mix = round(chip.mix_start_s * chip.clock_hz) if len(units_of(whole, chip)) > 1 else 0
    if memory is None:
        phases = tuple(simulate(phase, chip, engine=engine) for phase in whole.phases)
        return KernelTimeline(whole.name, chip, phases, mix_cycles=mix)
    addresses = memory.addresses(whole.tensors)
    timed = list[Timeline]()
    found = dict[str, float]()
    for i, phase in enumerate(whole.phases, 1):
        last = memory.last if i == len(whole.phases) else frozenset[str]()
        accesses = accesses_of(phase, traffic_of(phase, chip), addresses, last)
        outcome = memory.l2.touch(accesses)
        hits = tuple(outcome.hits.items())
        found = dict(hits) | found
        timed.append(_warm(phase, chip, hits, outcome.write_back_bytes, engine))
    return KernelTimeline(whole.name, chip, tuple(timed), mix_cycles=mix, hits=found)


def units_of(kernel: Kernel, chip: Chip) -> frozenset[str]:
    """Return the kinds of cores that a kernel needs: with two it is started as a mix kernel."""
    parts = (part for phase in kernel.phases for part in phase.parts)
    return frozenset(program_unit(chip, part.program) for part in parts)


traffic_of = lru_cache(REMEMBERED)(analyse)
"""The traffic of a launch, from memory if an equal one was analysed before."""


@lru_cache(REMEMBERED)
def _warm(
    launch: Launch,
    chip: Chip,
    hits: tuple[tuple[str, float], ...],
    write_back_bytes: int,
    engine: Engine,
) -> Timeline:
    """Equal blocks of a network are one launch, and meet L2 in the same state again and again."""
    warmed = traffic_of(launch, chip).warmed(dict(hits), write_back_bytes)
    return time_launch(launch, chip, warmed, engine)


def told_cycles(chip: Chip) -> float:
    """Return the least cycles until a core hears that another one, of any kind, has written.

    At a barrier, of which loads of weights may hide a part, from a flag where there are some
    between cores (then weights go the way of what is waited for, and hide nothing), or at a launch.
    """
    barrier, launch = (s * chip.clock_hz for s in (chip.barrier_s, chip.queued_launch_s))
    apart = barrier / 2 if chip.combined else min(barrier, chip.cross_flag_cycles)
    return min(launch, chip.all_cores_cycles, apart)


def rate_of(chip: Chip, sources: Collection[str], targets: Collection[str] = ()) -> float:
    """Return the bytes a cycle out of buffers of a core, on the quickest path of each pipe."""
    pipes: dict[str, float] = {}
    for (source, target), path in chip.paths.items():
        if source in sources and (not targets or target in targets):
            pipes[path.pipe] = max(pipes.get(path.pipe, 0.0), path.rate_bytes_per_cycle)
    return sum(pipes.values()) or math.inf


@lru_cache(64)
def least_ways(chip: Chip) -> Mapping[str, tuple[float, float, float]]:
    """Return the least cycles from a buffer to where the cube and the vector unit read, and to GM.

    A copy starts up, takes a cycle, and L2 some more; from pipe to pipe two flags tell. The vector
    unit itself copies out of L0C; cores that are not both have to be told.
    """
    told = 0.0 if chip.combined else told_cycles(chip)
    flags = 2 * chip.flag_cycles
    places = sorted({name for pair in chip.paths for name in pair})
    far = {(a, b): 0.0 if a == b else math.inf for a in places for b in places}
    for (a, b), path in chip.paths.items():
        late = path.latency_cycles + (chip.l2.latency_cycles if "GM" in (a, b) else 0)
        far[a, b] = path.startup_cycles + 1 + late + (flags if a != "GM" else 0)
    for via, a, b in product(places, repeat=3):
        far[a, b] = min(far[a, b], far[a, via] + far[via, b])
    fed = {a: min(far[a, "L0A"], far[a, "L0B"]) + flags + told * (a == "UB") for a in places}
    read = {a: far[a, "UB"] + (flags if a != "UB" else 0) for a in places}
    read["L0C"] = far["L0C", "UB"] + (0.0 if chip.combined else flags + told)
    return {a: (fed[a], read[a], far[a, "GM"]) for a in places}
