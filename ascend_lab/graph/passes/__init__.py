"""Passes: rewritings of a graph that keep what it computes, each in a file of its own.

`run_passes(graph)` runs the default ones until nothing changes; `PASSES` holds all by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ascend_lab.errors import InputError
from ascend_lab.graph.counts import MODES, moved_bytes, peak_live_bytes, topological_order
from ascend_lab.graph.draft import Draft as Rewriter
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.passes import (
    clean as common,
)
from ascend_lab.graph.passes import (
    clean as constant_folding,
)
from ascend_lab.graph.passes import (
    clean as dead_code,
)
from ascend_lab.graph.passes import (
    formats as int8,
)
from ascend_lab.graph.passes import (
    formats as precision,
)
from ascend_lab.graph.passes import (
    images as affine,
)
from ascend_lab.graph.passes import (
    images as convolutions,
)
from ascend_lab.graph.passes import (
    images as pooling,
)
from ascend_lab.graph.passes import (
    recognise as activations,
)
from ascend_lab.graph.passes import (
    recognise as attention,
)
from ascend_lab.graph.passes import (
    recognise as products,
)
from ascend_lab.graph.passes import (
    simplify as algebra,
)
from ascend_lab.graph.passes import (
    simplify as casts,
)
from ascend_lab.graph.passes import (
    simplify as identity,
)
from ascend_lab.graph.passes import (
    simplify as movement,
)
from ascend_lab.graph.passes import (
    simplify as scalars,
)
from ascend_lab.graph.passes.formats import convert, measured_scales, quantise
from ascend_lab.graph.passes.rewrite import Pass, derived, match, settings, sweep

# All passes by name, and the order in which they run unless told otherwise.


PASSES: dict[str, Pass] = {
    one.name: one
    for one in (
        dead_code.DEAD_CODE,
        constant_folding.FOLDING,
        common.COMMON,
        identity.IDENTITY,
        scalars.SCALARS,
        algebra.ALGEBRA,
        algebra.REASSOCIATION,
        movement.PERMUTE,
        movement.RESHAPES,
        casts.CASTS,
        convolutions.PAD_CONV,
        affine.BATCH_NORM_SCALE,
        affine.CONV_BATCH_NORM,
        affine.CONV_SCALE,
        affine.CONV_BIAS,
        convolutions.FULLY_CONNECTED,
        pooling.MEAN,
        pooling.GLOBAL_POOL,
        activations.LAYER_NORM_PASS,
        activations.GELU_PASS,
        activations.ACTIVATION_PASS,
        attention.ATTENTION,
        products.BATCHES,
        products.NO_BIAS,
        products.BIAS,
        pooling.POOL_TO_CONV,
        activations.GELU_ERF_PASS,
        precision.FP16,
        precision.BF16,
        int8.INT8,
    )
}
"""Every pass by name; `register_pass` adds one."""

DEFAULT: tuple[str, ...] = tuple(
    one.name for one in PASSES.values() if one.stage in ("prepare", "fuse")
)
"""Passes that keep values (up to rounding), in the order they run."""


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


# Running passes: by name, in rounds until nothing changes, with a report of what they did.


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


__all__ = [
    "DEFAULT",
    "MODES",
    "PASSES",
    "Pass",
    "Report",
    "Rewriter",
    "Step",
    "convert",
    "derived",
    "get_pass",
    "match",
    "measured_scales",
    "moved_bytes",
    "peak_live_bytes",
    "quantise",
    "register_pass",
    "run_passes",
    "settings",
    "sweep",
    "topological_order",
]
