"""Passes: rewritings of a graph that keep what it computes, run in rounds until nothing changes.

`run_passes(graph)` runs the default ones; `PASSES` holds all by name.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.errors import GraphError, InputError
from ascend_lab.graph.draft import Draft
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.passes import formats, images, quantised, recognise, simplify
from ascend_lab.graph.passes.formats import convert, measured_scales, quantise
from ascend_lab.graph.passes.rewrite import Pass, match, rewrites, sweep

__all__ = [
    "DEFAULT", "PASSES", "Draft", "Pass", "Report", "convert", "get_pass", "match",
    "measured_scales", "quantise", "register_pass", "rewrites", "run_passes", "sweep",
]  # fmt: skip

PASSES: dict[str, Pass] = {
    one.name: one
    for one in (
        quantised.REQUANT,
        simplify.DEAD_CODE,
        simplify.FOLDING,
        simplify.COMMON,
        simplify.identity,
        simplify.scalar_operand,
        simplify.algebra,
        simplify.reassociation,
        simplify.permute,
        simplify.reshapes,
        simplify.casts,
        images.pad_conv,
        images.batch_norm_scale,
        images.CONV_BATCH_NORM,
        images.CONV_SCALE,
        images.CONV_BIAS,
        images.fully_connected,
        images.mean_of_image,
        images.pool_of_image,
        recognise.layer_norm,
        recognise.gelu,
        recognise.activation,
        recognise.attention,
        recognise.flat_product,
        recognise.gemm_to_matmul,
        recognise.product_bias,
        images.pool_to_conv,
        recognise.gelu_erf,
        formats.FP16,
        formats.BF16,
        formats.INT8,
    )
}
"""Every pass by name; `register_pass` adds one."""

DEFAULT: tuple[str, ...] = tuple(
    one.name for one in PASSES.values() if one.stage in ("prepare", "fuse")
)
"""Passes that keep values (up to rounding), in the order they run."""
MOST_ROUNDS = 100
"""Rounds after which passes count as undoing each other; networks settle in a handful."""


def get_pass(name: str) -> Pass:
    """Return a pass by name; raise `InputError` with the nearest name for an unknown one."""
    if name not in PASSES:
        near = difflib.get_close_matches(name, PASSES, 1, 0.3)
        remedy = f"did you mean {near[0]}?" if near else "see PASSES"
        raise InputError("the name of a pass", repr(name), remedy)
    return PASSES[name]


def register_pass(one: Pass) -> Pass:
    """Add a pass of your own under its name; raise `InputError` if the name is taken."""
    if one.name in PASSES:
        raise InputError("a new name for a pass", one.name, "choose another")
    PASSES[one.name] = one
    return one


@dataclass(frozen=True, slots=True)
class Step:
    """One pass that matched: how often, and the graph before and after."""

    name: str
    matches: int
    before: Graph
    after: Graph


@dataclass(frozen=True, slots=True)
class Report:
    """What a run of passes did, pass by pass in order; those that found nothing are left out.

    `settled`: no pass matches the last graph; a run that `rounds` ended cannot know.
    """

    start: Graph
    steps: tuple[Step, ...] = ()
    rounds: int = 0
    settled: bool = True

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
        nodes = f"{len(self.start.nodes)} -> {len(end.nodes)} nodes"
        lines.append(f"{self.rounds} rounds: {nodes}{'' if self.settled else ', not settled'}")
        return "\n".join(lines)


def run_passes(
    graph: Graph, names: Sequence[str] = DEFAULT, *, rounds: int | None = None
) -> tuple[Graph, Report]:
    """Return the graph after the passes, repeated until none matches, and the report.

    `rounds`: stop after so many, settled or not. Passes verify the graphs they return. Raises
    `InputError` for an unknown name, `GraphError` for passes that never settle.
    """
    passes = [get_pass(name) for name in names]
    if rounds is not None and rounds < 1:
        raise InputError("at least 1 round", str(rounds), "leave it out: until none matches")
    steps: list[Step] = []
    current, done, quiet = graph, 0, 0
    while passes and done < (rounds or MOST_ROUNDS):
        done += 1
        for one in passes:
            after, matches = one.apply(current)
            quiet = quiet + 1 if after is current else 0
            if after is not current:
                steps.append(Step(one.name, matches, current, after))
                current = after
            if quiet == len(passes):
                return current, Report(graph, tuple(steps), done)
    if passes and rounds is None:
        needed = f"{graph.name}: passes that settle"
        found = f"{steps[-1].name} still matches after {MOST_ROUNDS} rounds"
        raise GraphError(needed, found, "leave out one of those that undo each other")
    return current, Report(graph, tuple(steps), done, settled=not passes)
