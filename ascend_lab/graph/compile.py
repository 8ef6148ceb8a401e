"""The whole road from a graph as a model states it to its time on a chip.

    Graph -> passes -> Graph -> layout -> Graph -> fuse -> Pieces -> lower -> Kernels -> time

    stage    what it decides                                          where
    passes   what is computed: rewrites, number format, operators     passes, canonical
    layout   how every tensor lies in memory                          layout
    fuse     which nodes become one kernel, a piece                   fusion
    lower    the kernel of every piece                                lower, tasks
    time     kernels one after another, on one L2                     placement, network

A `Road` says what to do at each stage. `simulate` and the tuner take the default; a ladder of
techniques switches stages off; training rewrites for itself and lays images out its own way.

Two decisions cannot wait for the end: a group is fused only if its kernel pays, and rows stay in
fractals only if that is faster (a third: pixels of 4 channels). They ask the clock in the middle of
the road, and stand in `decide`: candidates are lowered and timed alone, and remembered for the
stage that lowers all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import InputError
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.decide import Switches, small_first_layers, stay_in_fractals
from ascend_lab.graph.fusion import Fused, fuse, unfused
from ascend_lab.graph.ir import Graph, Values
from ascend_lab.graph.layout import assign_layouts, cancel_trans_data
from ascend_lab.graph.network import NetworkTimeline, simulate_graph
from ascend_lab.graph.passes import DEFAULT, convert, quantise, run_passes
from ascend_lab.graph.tasks import Compiled, compile_tasks, run_tasks
from ascend_lab.sim.timeline import Start

FORMATS = ("fp16", "bf16", "int8")
ALL_ON = Switches()


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

    def timeline(self) -> NetworkTimeline:
        """Return the last stage: the time of all kernels."""
        return simulate_graph(self.compiled)

    def fusion_result(self) -> str:
        """Return what passes and fusion rules did, in the form of `fusion_result.json`."""
        return self.fused.result_json(self.matches)


@dataclass(frozen=True, slots=True)
class Road:
    """What to do at each stage; the default is what the compiler does.

    `switches` turn passes (scope GraphFusion) and fusion rules (UBFusion) off by name; `dtype` ""
    leaves number formats alone; `apart` rewrites what has no kernel before `canonical` does;
    without `joined` conversions stay where operators put them; rows are moved to fractals in
    graphs of at most `most_moved` nodes; `small` lets first layers read pixels of 4 channels;
    `start` is what starts a kernel: fusion and layouts pay that price.
    """

    passes: Sequence[str] = DEFAULT
    switches: Switches = ALL_ON
    dtype: str = "fp16"
    apart: tuple[Callable[[Graph], Graph], ...] = ()
    layouts: Callable[[Graph], Graph] = assign_layouts
    joined: bool = True
    most_moved: float = float("inf")
    fusion: bool = True
    small: bool = True
    start: Start = "queued"

    def rewrite(self, graph: Graph) -> tuple[Graph, Mapping[str, int]]:
        """Return the graph after passes and in its number format, and what matched."""
        names = [name for name in self.passes if self.switches.is_on(name, "GraphFusion")]
        graph, report = run_passes(graph, names)
        return (in_format(graph, self.dtype) if self.dtype else graph), report.matches

    def prepare(self, graph: Graph, chip: Chip) -> Graph:
        """Return a rewritten graph in operators that have kernels."""
        for rewrite in self.apart:
            graph = rewrite(graph)
        return canonical(graph, chip)

    def lay_out(self, graph: Graph, chip: Chip) -> Graph:
        """Return a prepared graph with layouts."""
        graph = self.layouts(graph)
        if self.joined:
            graph = cancel_trans_data(graph)
            if len(graph.nodes) <= self.most_moved:
                graph = stay_in_fractals(graph, chip, self.start)
            graph = small_first_layers(graph, chip, self.start) if self.small else graph
        return graph

    def fuse(self, graph: Graph, chip: Chip) -> Fused:
        """Return which nodes of a graph with layouts are one kernel."""
        return fuse(graph, chip, self.switches, self.start) if self.fusion else unfused(graph)

    def kernels(self, graph: Graph, chip: Chip) -> Compiled:
        """Return the kernels of a graph with layouts; raises as `compile_stages`."""
        return compile_tasks(graph, chip, self.fuse(graph, chip).groups)

    def stages(self, graph: Graph, chip: Chip) -> Stages:
        """Return a model's graph after every stage; raises as `compile_stages`."""
        return finish_stages(front_stages(graph, chip, self), chip, self)


DEFAULT_ROAD = Road()


def front_stages(graph: Graph, chip: Chip, road: Road = DEFAULT_ROAD) -> Front:
    """Return the graph rewritten and with layouts: what is known before any kernel is written."""
    rewritten, matches = road.rewrite(graph)
    return Front(matches, rewritten, road.lay_out(road.prepare(rewritten, chip), chip))


def finish_stages(front: Front, chip: Chip, road: Road = DEFAULT_ROAD) -> Stages:
    """Return the kernels of a graph with layouts; raises as `compile_stages`."""
    fused = road.fuse(front.laid_out, chip)
    compiled = compile_tasks(front.laid_out, chip, fused.groups)
    return Stages(front.matches, front.rewritten, front.laid_out, fused, compiled)


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
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    return Road(passes, switches or ALL_ON, dtype, fusion=fusion).stages(graph, chip)


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
) -> dict[str, Values]:
    """Return the outputs that a graph's kernels compute on a chip: for small graphs.

    Raises as `compile_stages`, and `InputError` for inputs that do not fit.
    """
    return run_tasks(compile_graph(graph, chip, dtype=dtype), inputs, graph.outputs)
