"""A program reduced to what time needs: pipes, flags, loops, and what each instruction costs.

    occupancy = startup + work / rate,   result visible `latency` cycles later

Every duration is a whole number of cycles. A published cost that depends on whether the pipe was
idle (the head of mmad and of vector instructions) is charged every time: that keeps time linear,
and is at most a few percent high.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.errors import SimulationError
from ascend_lab.isa.instructions import mmad_shape
from ascend_lab.isa.memory import Region
from ascend_lab.isa.program import CROSS, WHOLE_BLOCKS, Event, Instruction, Loop, Node, Program


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
    op, main = instruction.op, instruction.out
    if op.startswith("vc") and instruction.srcs:
        main = instruction.srcs[0]
    cost = chip.vector_costs.get(op, chip.vector_costs["default"])
    whole_blocks = -(-main.size_bytes // chip.vector_bytes_per_repeat)
    repeats = whole_blocks if op in WHOLE_BLOCKS else main.sizes[0]
    energy = main.size_bytes * chip.vector_energy_pj_per_byte
    return Cost(cost.head_cycles + cost.slope_cycles * repeats, cost.tail_cycles, energy)


def _vdeq_cost(chip: Chip, instruction: Instruction) -> Cost:
    """The way out of L0C, two bytes an element at least, and that of a bias into it."""
    src, dst = instruction.srcs[0], instruction.out
    ways = [("L0C", "UB", dst.elements * max(dst.buffer.itemsize, 2))]
    if len(instruction.srcs) > 2:
        ways.append(("UB", "L0C", src.size_bytes))
    cycles, energy = 0, 0.0
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
    src, dst = instruction.srcs[0], instruction.out
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


class NotComposableError(SimulationError):
    """The program has waits before their sets or unbalanced loops; use the reference."""


# -- a program with its costs ----------------------------------------------------------------------
WORK, SET, WAIT = 2, 3, 4
"""Kinds of timed step; 0 and 1 are loop begin and end in the reference engine's code."""


class Step(NamedTuple):
    """One static step: its pipe, kind, event number (-1 for work) and source instruction."""

    pipe: int
    kind: int
    event: int
    source: int


@dataclass(frozen=True, slots=True)
class Nest:
    """A loop of the compiled tree: number of its trip count, its body, and what that touches."""

    loop: int
    body: "tuple[int | Nest, ...]"
    pipes: tuple[int, ...]
    events: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Structure (shared by all candidates of one template) plus durations and trip counts.

    `cores` counts the cores whose programs stand here, a nest each at the top of the tree; 0: one
    program. `cycles[s]` is how long step s takes its pipe, and what that takes in energy is
    `energy_pj[s]`; `latency[s]` delays the flag a SET raises;
    `tail_latency[p]` is the latency of the last work of pipe p, paid at the end unless a flag after
    it tells someone that the result is there.
    """

    pipes: tuple[str, ...]
    events: tuple[Event, ...]
    steps: tuple[Step, ...]
    tree: tuple[int | Nest, ...]
    sources: tuple[Instruction, ...]
    cycles: tuple[int, ...]
    latency: tuple[int, ...]
    tail_latency: tuple[int, ...]
    counts: tuple[int, ...]
    energy_pj: tuple[float, ...]
    cores: int = 0

    def runs(self) -> list[int]:
        """Return how often each step runs."""
        out = [0] * len(self.steps)
        self._count(self.tree, 1, out)
        return out

    def _count(self, nodes: Sequence[int | Nest], times: int, out: list[int]) -> None:
        for node in nodes:
            if isinstance(node, Nest):
                self._count(node.body, times * self.counts[node.loop], out)
            else:
                out[node] += times


class Compiler:
    """Collects the steps of one program, or of several that run together."""

    def __init__(self, chip: Chip, around: Surroundings) -> None:
        """Start empty."""
        self.chip, self.around = chip, around
        self.names: list[str] = []
        self.pipes: dict[str, int] = {}
        self.prefix = ""
        self.events: dict[Event, int] = {}
        self.known: dict[int, int] = {}
        self.steps: list[Step] = []
        self.sources: list[Instruction] = []
        self.cycles: list[int] = []
        self.latency: list[int] = []
        self.energy: list[float] = []
        self.counts: list[int] = []
        self.last_latency: list[int] = []
        self.tail_latency: list[int] = []

    def begin(self, pipes: Sequence[str], prefix: str = "") -> None:
        """Begin the program of a core, whose pipes are called `prefix` and their own name."""
        self.prefix, start = prefix, len(self.names)
        self.pipes = {pipe: start + number for number, pipe in enumerate(pipes)}
        self.names += [prefix + pipe for pipe in pipes]
        self.last_latency += [0] * len(pipes)
        self.tail_latency += [0] * len(pipes)
        self.known = {}

    def tree(self, nodes: tuple[Node, ...]) -> tuple[int | Nest, ...]:
        """Add the steps of a nest and return it with their numbers."""
        out: list[int | Nest] = []
        for node in nodes:
            if isinstance(node, Loop):
                number, first = len(self.counts), len(self.steps)
                self.counts.append(node.count)
                body, inside = self.tree(node.body), self.steps[first:]
                pipes, events = {s.pipe for s in inside}, {s.event for s in inside} - {-1}
                out.append(Nest(number, body, tuple(sorted(pipes)), tuple(sorted(events))))
            elif node.op in CROSS:
                out += self.cross(node)
            elif node.pipe == "ALL":
                out += self.barrier(node)
            else:
                out.append(self.instruction(node))
        return tuple(out)

    def number_of(self, event: Event) -> int:
        """Return the number of a flag between pipes of the core."""
        # The flags of a queue share one event object: its identity is found faster than its value.
        number = self.known.get(id(event))
        if number is None:
            named = replace(event, src=self.prefix + event.src, dst=self.prefix + event.dst)
            number = self.events.setdefault(named if self.prefix else event, len(self.events))
            self.known[id(event)] = number
        return number

    def step(
        self, pipe: int, kind: int, event: int, cycles: int, latency: int, energy: float = 0.0
    ) -> int:
        """Add a step and return its number."""
        self.steps.append(Step(pipe, kind, event, len(self.sources) - 1))
        self.cycles.append(cycles)
        self.latency.append(latency)
        self.energy.append(energy)
        return len(self.steps) - 1

    def instruction(self, node: Instruction) -> int:
        """Add work, or a flag between pipes."""
        self.sources.append(node)
        pipe = self.pipes[node.pipe]
        if node.event is None:
            cost = instruction_cost(self.chip, node, self.around)
            # A flag tells that all before it can be seen, also a slow copy before a fast one.
            before = self.last_latency[pipe] - cost.occupancy_cycles
            self.last_latency[pipe] = max(cost.latency_cycles, before)
            before = self.tail_latency[pipe] - cost.occupancy_cycles
            self.tail_latency[pipe] = max(cost.latency_cycles, before)
            return self.step(pipe, WORK, -1, cost.occupancy_cycles, 0, cost.energy_pj)
        event, cycles = self.number_of(node.event), self.chip.flag_cycles
        if node.op == "set_flag":
            self.tail_latency[pipe] = 0
            return self.step(pipe, SET, event, cycles, self.last_latency[pipe])
        return self.step(pipe, WAIT, event, cycles, 0)

    def cross(self, node: Instruction) -> list[int]:
        """What a flag for other cores costs a core by itself: its pipe a slot."""
        self.sources.append(node)
        if node.op == "cross_wait":
            return []
        return [self.step(self.pipes[node.pipe], WORK, -1, self.chip.flag_cycles, 0)]

    def barrier(self, node: Instruction) -> list[int]:
        """A barrier on all pipes: everyone tells everyone, then everyone waits for everyone.

        It waits for results to be visible too, so flags after it add no latency again.
        """
        self.sources.append(node)
        names, pipes = self.names, self.pipes.values()
        pairs = [(p, q) for p in pipes for q in pipes if p != q]
        number = {
            pair: self.events.setdefault(
                Event(names[pair[0]], names[pair[1]], 1000), len(self.events)
            )
            for pair in pairs
        }
        out = [self.step(p, SET, number[p, q], 0, self.last_latency[p]) for p, q in pairs]
        out += [self.step(q, WAIT, number[p, q], 0, 0) for p, q in pairs]
        cycles = self.chip.barrier_cycles
        for p in pipes:
            self.last_latency[p] = self.tail_latency[p] = 0
        return out + [self.step(p, WORK, -1, cycles, 0) for p in pipes]

    def finish(self, tree: tuple[int | Nest, ...], cores: int = 0) -> Compiled:
        """Return what was collected."""
        return Compiled(
            tuple(self.names),
            tuple(self.events),
            tuple(self.steps),
            tree,
            tuple(self.sources),
            tuple(self.cycles),
            tuple(self.latency),
            tuple(self.tail_latency),
            tuple(self.counts),
            tuple(self.energy),
            cores,
        )


def compile_program(program: Program, chip: Chip, around: Surroundings) -> Compiled:
    """Return the timed form of `program`; the durations are those of `cost.instruction_cost`."""
    compiler = Compiler(chip, around)
    compiler.begin(program.pipes)
    return compiler.finish(compiler.tree(program.body))
