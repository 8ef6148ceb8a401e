"""What cross-core flags order, for the sanitizer: clocks that travel with sets and end at waits."""

from collections.abc import Iterator, Mapping

from ascend_lab.isa.cross import LIMIT, Counters, core_name
from ascend_lab.isa.program import Instruction

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
