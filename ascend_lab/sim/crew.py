"""Cores that work together, as one timed program: the flags between them join their pipes.

A set for another core raises a flag for every pipe of it, and a wait for other cores lets every
pipe of its own wait for that flag: a pipe passes all of them in order, so none begins what stands
behind before it has been issued. AI cores that run the same programs do so in step: each kind is
timed once, and of vector cores with one program only one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.chip import Chip
from ascend_lab.errors import SimulationError, SyncError
from ascend_lab.isa.cross import MODES, meets, senders, uses
from ascend_lab.isa.program import Event, Instruction, Launch, Loop, Part, Program
from ascend_lab.sim.compiled import SET, WAIT, WORK, Compiled, Compiler, Nest, Surroundings


@dataclass(frozen=True, slots=True)
class _Member:
    """A core that stands for its like: what it is called, its place among all, its program."""

    name: str
    place: int
    program: Program


class _Crew(Compiler):
    """Compiles programs that tell each other, `team` cores to an AI core."""

    def __init__(
        self, chip: Chip, around: Surroundings, members: Sequence[_Member], team: int
    ) -> None:
        super().__init__(chip, around)
        self.members, self.member = members, members[0]
        cores = team * (members[-1].place // team + 1)
        self.hears = {
            (m.place, mode): [s for s in members if s.place in senders(m.place, mode, cores, team)]
            for m in members
            for mode in MODES
        }
        self.sets = {m.place: set(uses(m.program)) for m in members}

    def compiled(self) -> Compiled:
        """Return all programs, a nest that runs once for each."""
        nests = list[int | Nest]()
        for member in self.members:
            self.member = member
            self.begin(member.program.pipes, f"{member.name}.")
            whole = Loop("core", 1, member.program.body)
            nests += self.tree((whole,))
        return self.finish(tuple(nests), len(nests))

    def cross(self, node: Instruction) -> list[int]:
        """Raise a flag for every pipe of every core told, or wait on every own pipe."""
        self.sources.append(node)
        flag, me = node.number("id"), self.member
        if node.op == "cross_wait":
            heard = self._heard(flag)
            waits = [(p, self._number(m, me, p, flag)) for p in self.pipes for m in heard]
            return [self.step(self.pipes[p], WAIT, number, 0, 0) for p, number in waits]
        pipe, mode = self.pipes[node.pipe], node.number("mode")
        latency = self.last_latency[pipe] + self.chip.cross_flag_cycles
        self.tail_latency[pipe] = 0
        told = (m for m in self.members if me in self.hears[m.place, mode])
        numbers = [self._number(me, m, p, flag) for m in told for p in m.program.pipes]
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
            needed, got = "deadlock: a cross_set for every cross_wait", f"{what}, never set"
            raise SyncError(needed, got, "add the missing set")
        if len(found) > 1:
            needed, got = f"{what}: sets of one mode", f"{len(found)} modes"
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


def compile_crews(launch: Launch, chip: Chip, around: Surroundings) -> tuple[Compiled, ...]:
    """Return the timed programs of a mix launch: one for each kind of AI core, or one for all.

    Raises `SyncError` for a flag that nobody sets, `SimulationError` for one set in two modes.
    """
    together = [launch.teams] if meets(launch) else [(team,) for team in launch.teams]
    crews = (_Crew(chip, around, _members(teams), launch.mix) for teams in together)
    return tuple(crew.compiled() for crew in crews)
