"""Flags between the cores of a mix launch: who tells whom, what a launch must keep, what it orders.

A core has 16 counters of 4 bits. A set of mode 2 by a cube core adds 1 in each of its vector cores;
one by a vector core waits for those of its brothers, and all of them add 1 in the cube core. Mode 1
is among the vector cores of an AI core, mode 0 among all cores of a kind. Source: Ascend C,
CrossCoreSetFlag and CrossCoreWaitFlag (developer documentation).

For the sanitizer, clocks travel with sets and end at waits.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError, PathError, ProgramError, SyncError
from ascend_lab.isa.program import CROSS, Instruction, Launch, Program

FLAGS, LIMIT, MODES = 16, 15, (0, 1, 2)
"""Flag ids of a core, what the counter of each holds, and the modes."""
PIPES = ("V", "M", "MTE1", "MTE2", "MTE3", "FIX")
"""Pipes that can tell other cores."""


def check_cross(chip: Chip, instruction: Instruction) -> Instruction:
    """Return a cross-core flag instruction if the chip can run it; see `check_instruction`."""
    op, flag, sets = instruction.op, instruction.number("id", -1), instruction.op == "cross_set"
    if chip.combined:
        needed = f"{op}: a chip whose cube and vector cores are separate"
        raise PathError(needed, chip.name, "use flags between pipes")
    if not 0 <= flag < FLAGS:
        needed, remedy = f"{op}: a flag id of 0..{FLAGS - 1}", "use an id again once it is drained"
        raise CapacityError(needed, str(flag), remedy)
    if sets and instruction.number("mode", -1) not in MODES:
        raise ProgramError(f"{op}: mode 0, 1 or 2", str(instruction.attr("mode")), "choose one")
    if instruction.pipe not in (PIPES if sets else ("ALL",)):
        needed = f"{op}: pipe {' or '.join(PIPES) if sets else 'ALL'}"
        raise ProgramError(needed, instruction.pipe, "mend it")
    return instruction


def cross_set(chip: Chip, mode: int, pipe: str, flag: int) -> Instruction:
    """Tell other cores, when all before it on `pipe` has finished: counter `flag` of each + 1.

    Mode 2: a cube core tells its vector cores, or they it once all have set; mode 1: the vector
    cores of an AI core each other; mode 0: all cores of a kind each other.
    """
    attrs = (("mode", mode), ("id", flag))
    return check_cross(chip, Instruction("cross_set", pipe, attrs=attrs))


def cross_wait(chip: Chip, flag: int) -> Instruction:
    """Begin nothing behind it, on any pipe of this core, until counter `flag` is above 0; take 1.

    What stands before it runs on.
    """
    return check_cross(chip, Instruction("cross_wait", "ALL", attrs=(("id", flag),)))


def senders(core: int, mode: int, cores: int, team: int) -> list[int]:
    """Return whose sets of `mode` a core waits for, of `cores` that stand AI core by AI core.

    `team` cores make an AI core, the cube core first.
    """
    home, cube = core - core % team, core % team == 0
    if mode == 0:
        return [c for c in range(cores) if (c % team == 0) == cube]
    if mode == 1:
        return [] if cube else list(range(home + 1, home + team))
    return list(range(home + 1, home + team)) if cube else [home]


def uses(program: Program) -> dict[tuple[int, int], set[str]]:
    """Return the pipes that set each (mode, flag)."""
    found: dict[tuple[int, int], set[str]] = {}
    for i, _ in program.instructions():
        if i.op == "cross_set":
            found.setdefault((i.number("mode"), i.number("id")), set()).add(i.pipe)
    return found


def meets(launch: Launch) -> bool:
    """Tell whether all cores of a kind wait for each other somewhere."""
    programs = [part.program for part in launch.parts if launch.mix]
    return any(mode == 0 for program in programs for mode, _ in uses(program))


def crews(launch: Launch) -> list[tuple[tuple[Program, dict[str, int]], ...]]:
    """Return the cores that work together, each with its binding: those of an AI core, or all."""
    found = [
        tuple((part.program, dict(at)) for part, at in zip(team, places, strict=True))
        for team in launch.teams
        for places in zip(*(part.bindings for part in team), strict=True)
    ]
    return [tuple(chain(*found))] if meets(launch) else found


def check_launch(chip: Chip, launch: Launch) -> None:
    """Raise `PathError` or `ProgramError` for flags that a launch, or its cores, cannot have."""
    for place, part in enumerate(launch.parts):
        if not any(i.op in CROSS for i, _ in part.program.instructions()):
            continue
        found, name = uses(part.program), part.program.name
        if not launch.mix:
            needed, got = f"{name}: a mix launch for cross-core flags", "cores of one kind alone"
            raise PathError(needed, got, "launch cube and vector programs together")
        if place % launch.mix == 0 and any(mode == 1 for mode, _ in found):
            needed = f"{name}: mode 0 or 2 on a cube core"
            raise ProgramError(needed, "mode 1", "it is of vector cores")
        for (_, flag), pipes in found.items():
            if len(pipes) > 1:
                needed = f"{name}: one pipe that sets cross-core flag {flag}"
                raise ProgramError(needed, ", ".join(sorted(pipes)), "use a flag for each")
    if launch.mix and launch.mix - 1 > chip.vector_cores_per_core:
        needed = f"{launch.name}: at most {chip.vector_cores_per_core} vector cores to a cube core"
        raise PathError(needed, str(launch.mix - 1), f"{chip.name} has no more")
    if launch.mix and launch.core_count > chip.core_count:
        needed = f"{launch.name}: at most {chip.core_count} AI cores, which start together"
        raise PathError(needed, str(launch.core_count), "launch fewer blocks")


class Counters:
    """The counters of cores that stand AI core by AI core, `team` to each, the cube core first."""

    def __init__(self, cores: int, team: int) -> None:
        """Start with all counters at 0."""
        modes = [(r, m, senders(r, m, cores, team)) for r in range(cores) for m in MODES]
        self.hears = {(r, m): who for r, m, who in modes}
        self.tells = {(c, m): [r for r, n, who in modes if n == m and c in who]
                      for c in range(cores) for m in MODES}  # fmt: skip
        self.sent, self.taken = Counter[tuple[int, int, int, int]](), Counter[tuple[int, int]]()

    def ready(self, core: int, flag: int) -> int:
        """Return what counter `flag` of a core holds."""
        arrived = sum(
            min((self.sent[core, mode, flag, s] for s in self.hears[core, mode]), default=0)
            for mode in MODES
        )
        return arrived - self.taken[core, flag]

    def set(self, core: int, mode: int, flag: int) -> None:
        """Count a set of one core; raise `SyncError` for the 16th that nobody has waited for."""
        for r in self.tells[core, mode]:
            self.sent[r, mode, flag, core] += 1
            if self.sent[r, mode, flag, core] - self.taken[r, flag] > LIMIT:
                needed = f"at most {LIMIT} sets of cross-core flag {flag} that wait to be consumed"
                raise SyncError(needed, str(LIMIT + 1), "let the other side tell that it is ready")


def core_name(core: int, team: int) -> str:
    """Return what messages call a core: `AIV1`, or of the third AI core `AIC of core 2`."""
    member = core % team
    kind = f"AIV{member - 1}" if member else "AIC"
    return kind if core < team else f"{kind} of core {core // team}"


# -- what they order -------------------------------------------------------------------------------
Clock = dict[str, int]
"""Per pipe, the number of its last step that is known to have finished."""
Place = tuple[int, int]
"""A core and one of its flags."""


def join(clock: Clock, other: Mapping[str, int]) -> None:
    """Let a clock know what another one knows."""
    for pipe, step in other.items():
        if step > clock.get(pipe, 0):
            clock[pipe] = step


class CrossOrder:
    """The cross-core flags of one crew: what each wait learns, and what may go wrong with a set."""

    def __init__(self, cores: int, team: int) -> None:
        """Start with all counters at 0."""
        self.counters, self.team = Counters(cores, team), team
        self.pending: dict[tuple[int, int, int, int], list[Clock]] = {}
        self.arrived: dict[Place, list[tuple[int, Clock]]] = {}
        self.waits: dict[Place, list[int]] = {}
        self.issued: list[list[Clock]] = [[{}] for _ in range(cores)]
        self.passed: dict[str, int] = {}
        self.last: dict[Place, dict[tuple[int, int], int]] = {}

    def set(self, core: int, instruction: Instruction, clock: Clock) -> Iterator[str]:
        """Take a set along with what its pipe knows; yield what may go wrong."""
        mode, flag = instruction.number("mode"), instruction.number("id")
        mine = self.last.setdefault((core, flag), {})
        for r in self.counters.tells[core, mode]:
            arrived = self.arrived.setdefault((r, flag), [])
            mine[mode, r] = number = mine.get((mode, r), -1) + 1
            if number >= LIMIT and not self._over(r, flag, number - LIMIT, clock):
                yield f"cross-core flag {flag} of {core_name(r, self.team)} may exceed {LIMIT}"
            self.pending.setdefault((r, mode, flag, core), []).append(dict(clock))
            heard = [self.pending.get((r, mode, flag, s), []) for s in self.counters.hears[r, mode]]
            if all(heard):
                known: Clock = {}
                for clocks in heard:
                    join(known, clocks.pop(0))
                others = [(r, i) for i, (m, _) in enumerate(arrived) if m != mode][-1:]
                others += [(who, last) for (m, who), last in mine.items() if m != mode]
                if any(not self._over(who, flag, last, known) for who, last in others):
                    yield f"cross-core flag {flag} is set in mode {mode} before it was drained"
                arrived.append((mode, known))

    def _over(self, core: int, flag: int, number: int, clock: Clock) -> bool:
        """Tell whether a clock knows that wait `number` for a flag is over."""
        waits = self.waits.get((core, flag), [])
        return number < len(waits) and waits[number] <= clock.get(f"{core}.ISSUE", 0)

    def wait(self, core: int, flag: int, step: int) -> None:
        """Let the issue of a core learn what the next arrival for its flag knows."""
        waits, known = self.waits.setdefault((core, flag), []), dict(self.issued[core][-1])
        join(known, self.arrived[core, flag][len(waits)][1])
        known[f"{core}.ISSUE"] = step
        waits.append(step)
        self.issued[core].append(known)

    def passing(self, core: int, pipe: str, clock: Clock) -> None:
        """Let a pipe learn what its core knew when it issued the wait that the pipe passes."""
        self.passed[pipe] = self.passed.get(pipe, 0) + 1
        join(clock, self.issued[core][self.passed[pipe]])

    def left(self) -> Iterator[str]:
        """Yield the flags that are set more often than waited for."""
        for (core, flag), arrived in self.arrived.items():
            sets = [len(self.pending.get((core, m, flag, s), []))
                    for (r, m), who in self.counters.hears.items() if r == core
                    for s in who]  # fmt: skip
            more = len(arrived) - len(self.waits.get((core, flag), [])) + max(sets, default=0)
            if more:
                name = core_name(core, self.team)
                yield f"cross-core flag {flag} of {name} is set {more} times more than waited for"
