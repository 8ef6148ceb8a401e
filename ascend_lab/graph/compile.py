"""From a graph as a model states it to kernels on a chip: every stage in order.

rewrite (passes) -> number format -> canonical operators -> layouts -> fusion -> kernels
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import InputError
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.decide import stay_in_fractals
from ascend_lab.graph.fusion import Fused, fuse, unfused
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.layout import assign_layouts, cancel_trans_data
from ascend_lab.graph.passes import DEFAULT, convert, quantise, run_passes
from ascend_lab.graph.switches import Switches
from ascend_lab.graph.tasks import Compiled, compile_tasks, run_tasks

FORMATS = ("fp16", "bf16", "int8")


@dataclass(frozen=True, slots=True)
class Front:
    """A graph rewritten and with layouts, before fusion; `matches` counts rewrites."""

    matches: Mapping[str, int]
    rewritten: Graph
    laid_out: Graph


@dataclass(frozen=True, slots=True)
class Stages:
    """A graph after every stage, to look at; `compiled` is the end, `matches` counts rewrites."""

    matches: Mapping[str, int]
    rewritten: Graph
    laid_out: Graph
    fused: Fused
    compiled: Compiled

    def fusion_result(self) -> str:
        """Return what passes and fusion rules did, in the form of `fusion_result.json`."""
        return self.fused.result_json(self.matches)


def compile_stages(
    graph: Graph,
    chip: Chip | str,
    *,
    dtype: str = "fp16",
    passes: Sequence[str] = DEFAULT,
    fusion: bool = True,
    switches: Switches | None = None,
) -> Stages:
    """Return the graph after every stage on a chip, given as a `Chip` or by name.

    Raises a typed error naming the node at fault.

    `switches` turn passes (scope GraphFusion) and fusion rules (UBFusion) off by name.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    front = front_stages(graph, chip, dtype=dtype, passes=passes, switches=switches)
    return finish_stages(front, chip, fusion=fusion, switches=switches)


def front_stages(
    graph: Graph,
    chip: Chip,
    *,
    dtype: str = "fp16",
    passes: Sequence[str] = DEFAULT,
    switches: Switches | None = None,
) -> Front:
    """Return the graph rewritten and with layouts: what is known before any kernel is written."""
    on = switches or Switches()
    names = [name for name in passes if on.is_on(name, "GraphFusion")]
    rewritten, report = run_passes(graph, names)
    typed = in_format(rewritten, dtype)
    assigned = cancel_trans_data(assign_layouts(canonical(typed, chip)))
    return Front(report.matches, typed, stay_in_fractals(assigned, chip))


def finish_stages(
    front: Front, chip: Chip, *, fusion: bool = True, switches: Switches | None = None
) -> Stages:
    """Return the kernels of a graph with layouts; raises as `compile_stages`."""
    graph = front.laid_out
    fused = fuse(graph, chip, switches) if fusion else unfused(graph)
    compiled = compile_tasks(graph, chip, fused.groups)
    return Stages(front.matches, front.rewritten, graph, fused, compiled)


def compile_graph(graph: Graph, chip: Chip | str, *, dtype: str = "fp16") -> Compiled:
    """Return a graph compiled with all passes and fusion rules; raises as `compile_stages`."""
    return compile_stages(graph, chip, dtype=dtype).compiled


def in_format(graph: Graph, dtype: str) -> Graph:
    """Return the graph computing in a number format that the chips have."""
    if dtype not in FORMATS:
        raise InputError(f"a dtype among {', '.join(FORMATS)}", dtype, "choose one")
    if dtype == "int8":
        graph = quantise(graph)[0]
    return convert(graph, "fp16" if dtype == "int8" else dtype)[0]


def run_compiled(
    graph: Graph, inputs: Mapping[str, Any], chip: Chip | str, *, dtype: str = "fp16"
) -> dict[str, NDArray[Any]]:
    """Return the outputs that a graph's kernels compute on a chip: for small graphs.

    Raises as `compile_stages`, and `InputError` for inputs that do not fit.
    """
    compiled = compile_graph(graph, chip, dtype=dtype)
    found = run_tasks(compiled, inputs)
    # rewrites and conversions give outputs other names, in the same order
    names = zip(graph.outputs, compiled.graph.outputs, strict=True)
    return {name: found[own] for name, own in names}
