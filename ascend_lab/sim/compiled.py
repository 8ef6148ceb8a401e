"""A program reduced to what time needs: pipes, flags, loops, and a duration per instruction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ascend_lab.chip import Chip
from ascend_lab.isa.program import Event, Instruction, Loop, Node, Program
from ascend_lab.sim.cost import Surroundings, instruction_cost

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
    body: tuple[int | Nest, ...]
    pipes: tuple[int, ...]
    events: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Structure (shared by all candidates of one template) plus durations and trip counts.

    `cycles[s]` is how long step s takes its pipe, and what that takes in energy is
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


class _Compiler:
    def __init__(self, program: Program, chip: Chip, around: Surroundings) -> None:
        self.chip, self.around = chip, around
        self.pipes = {pipe: number for number, pipe in enumerate(program.pipes)}
        self.events: dict[Event, int] = {}
        self.known: dict[int, int] = {}
        self.steps: list[Step] = []
        self.sources: list[Instruction] = []
        self.cycles: list[int] = []
        self.latency: list[int] = []
        self.energy: list[float] = []
        self.counts: list[int] = []
        self.last_latency = [0] * len(self.pipes)
        self.tail_latency = [0] * len(self.pipes)

    def tree(self, nodes: tuple[Node, ...]) -> tuple[int | Nest, ...]:
        out: list[int | Nest] = []
        for node in nodes:
            if isinstance(node, Loop):
                number, first = len(self.counts), len(self.steps)
                self.counts.append(node.count)
                body, inside = self.tree(node.body), self.steps[first:]
                pipes, events = {s.pipe for s in inside}, {s.event for s in inside} - {-1}
                out.append(Nest(number, body, tuple(sorted(pipes)), tuple(sorted(events))))
            elif node.pipe == "ALL":
                out += self.barrier(node)
            else:
                out.append(self.instruction(node))
        return tuple(out)

    def number_of(self, event: Event) -> int:
        # The flags of a queue share one event object: its identity is found faster than its value.
        number = self.known.get(id(event))
        if number is None:
            number = self.events.setdefault(event, len(self.events))
            self.known[id(event)] = number
        return number

    def step(
        self, pipe: int, kind: int, event: int, cycles: int, latency: int, energy: float = 0.0
    ) -> int:
        self.steps.append(Step(pipe, kind, event, len(self.sources) - 1))
        self.cycles.append(cycles)
        self.latency.append(latency)
        self.energy.append(energy)
        return len(self.steps) - 1

    def instruction(self, node: Instruction) -> int:
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

    def barrier(self, node: Instruction) -> list[int]:
        """A barrier on all pipes: everyone tells everyone, then everyone waits for everyone.

        It waits for results to be visible too, so flags after it add no latency again.
        """
        self.sources.append(node)
        count, names = len(self.pipes), tuple(self.pipes)
        pairs = [(p, q) for p in range(count) for q in range(count) if p != q]
        number = {
            pair: self.events.setdefault(
                Event(names[pair[0]], names[pair[1]], 1000), len(self.events)
            )
            for pair in pairs
        }
        out = [self.step(p, SET, number[p, q], 0, self.last_latency[p]) for p, q in pairs]
        out += [self.step(q, WAIT, number[p, q], 0, 0) for p, q in pairs]
        cycles = self.chip.barrier_cycles
        self.last_latency, self.tail_latency = [0] * count, [0] * count
        return out + [self.step(p, WORK, -1, cycles, 0) for p in range(count)]


def compile_program(program: Program, chip: Chip, around: Surroundings) -> Compiled:
    """Return the timed form of `program`; the durations are those of `cost.instruction_cost`."""
    compiler = _Compiler(program, chip, around)
    tree = compiler.tree(program.body)
    return Compiled(
        tuple(compiler.pipes),
        tuple(compiler.events),
        tuple(compiler.steps),
        tree,
        tuple(compiler.sources),
        tuple(compiler.cycles),
        tuple(compiler.latency),
        tuple(compiler.tail_latency),
        tuple(compiler.counts),
        tuple(compiler.energy),
    )
