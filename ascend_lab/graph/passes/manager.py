"""Running passes: by name, in rounds until nothing changes, with a report of what they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ascend_lab.errors import InputError
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.passes.registry import DEFAULT, get_pass

ROUNDS = 8
"""Most rounds: each shortens chains of equal nodes to half, so that few are needed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One pass that matched: how often, and the graph before and after."""

    name: str
    matches: int
    before: Graph
    after: Graph


@dataclass(frozen=True, slots=True)
class Report:
    """What a run of passes did, pass by pass in order; those that found nothing are left out."""

    start: Graph
    steps: tuple[Step, ...] = field(default_factory=tuple)
    rounds: int = 0

    @property
    def matches(self) -> dict[str, int]:
        """Matches of each pass over all rounds."""
        found: dict[str, int] = {}
        for step in self.steps:
            found[step.name] = found.get(step.name, 0) + step.matches
        return found

    def __str__(self) -> str:
        """Return a table: pass, matches, nodes before and after."""
        lines = [f"{'pass':36} matches  nodes"]
        for step in self.steps:
            sizes = f"{len(step.before.nodes)} -> {len(step.after.nodes)}"
            lines.append(f"{step.name:36} {step.matches:7}  {sizes}")
        end = self.steps[-1].after if self.steps else self.start
        lines.append(f"{self.rounds} rounds: {len(self.start.nodes)} -> {len(end.nodes)} nodes")
        return "\n".join(lines)


def run_passes(
    graph: Graph, names: Sequence[str] = DEFAULT, *, rounds: int = ROUNDS
) -> tuple[Graph, Report]:
    """Return the graph after the passes, repeated until none matches, and the report.

    Passes verify the graphs they return. Raises `InputError` for an unknown name.
    """
    passes = [get_pass(name) for name in names]
    if rounds < 1:
        raise InputError("at least 1 round", str(rounds), f"leave it at {ROUNDS}")
    steps: list[Step] = []
    current, done, quiet = graph, 0, 0
    for done in range(1, rounds + 1):
        for one in passes:
            after, matches = one.apply(current)
            quiet = quiet + 1 if after is current else 0
            if after is not current:
                steps.append(Step(one.name, matches, current, after))
                current = after
            if quiet == len(passes):
                return current, Report(graph, tuple(steps), done)
    return current, Report(graph, tuple(steps), done)
