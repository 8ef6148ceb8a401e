"""The whole road from a graph as a model states it to its time on a chip, and where that time goes.

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

The ledger of the time is its bound, and by name all that lies above it:

    time = bound + launches + cube + cube fill + memory + vector + copies
         + AI CPU + barriers + waits

Each phase of a kernel is cut from its cycles, layer by layer: what is counted first hides what is
counted later, so that nothing counts twice and no term is negative. What limits the bound comes
first; of the layers the bound's own seconds are then taken away, its own kind first.

`graph.zoo.why` says it of a model in a line. A network of few products can still be slow: every
kernel is a launch, a depthwise layer fills a sixteenth of the cube, and many small tensors move
more bytes than they compute."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ascend_lab.compiler import canonical, channels, decide, ir, layout, network, tasks, values
from ascend_lab.compiler.bound import Bound
from ascend_lab.compiler.draft import in_order
from ascend_lab.compiler.evaluate import Overflow
from ascend_lab.compiler.fusion import JOINT, Fused, fuse, unfused
from ascend_lab.compiler.passes import DEFAULT, convert, quantise, run_passes
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim import few_collections
from ascend_lab.machine.sim.timeline import Start, Timeline

FORMATS = ("fp16", "bf16", "int8")
ALL_ON = decide.Switches()


@dataclass(frozen=True, slots=True)
class Front:
    """A graph rewritten and with layouts, before fusion; `matches` counts rewrites."""

    matches: Mapping[str, int]
    rewritten: ir.Graph
    laid_out: ir.Graph


@dataclass(frozen=True, slots=True)
class Stages(Front):
    """A graph after every stage, to look at; `compiled` is the end."""

    fused: Fused
    compiled: tasks.Compiled

    def timeline(self) -> network.NetworkTimeline:
        """Return the last stage: the time of all kernels."""
        return network.simulate_graph(self.compiled)

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
    `start` is what starts a kernel: fusion and layouts pay that price; nodes that `keep` names stay
    in fp32. `ordered` brings nodes into the one order that a file's order does not decide; a
    training step keeps its own, in which backward frees what forward kept. `finish` changes the
    kernels that were lowered: other compilers cut other tiles (`like_cann`).
    """

    passes: Sequence[str] = DEFAULT
    switches: decide.Switches = ALL_ON
    dtype: str = "fp16"
    apart: tuple[Callable[[ir.Graph], ir.Graph], ...] = ()
    layouts: Callable[[ir.Graph], ir.Graph] = layout.assign_layouts
    joined: bool = True
    most_moved: float = float("inf")
    fusion: bool = True
    small: bool = True
    start: Start = "queued"
    keep: frozenset[str] = frozenset()
    ordered: bool = True
    finish: Callable[[tasks.Compiled], tasks.Compiled] | None = None

    def rewrite(self, graph: ir.Graph) -> tuple[ir.Graph, Mapping[str, int]]:
        """Return the graph after passes and in its number format, and what matched."""
        names = [name for name in self.passes if self.switches.is_on(name, "GraphFusion")]
        graph = in_order(graph) if self.ordered else graph
        graph, report = run_passes(graph, names)
        if self.dtype:
            graph = in_format(graph, self.dtype, self.keep)
        return graph, report.matches

    def prepare(self, graph: ir.Graph, chip: Chip) -> ir.Graph:
        """Return a rewritten graph in operators that have kernels."""
        for rewrite in self.apart:
            graph = rewrite(graph)
        joint = self.fusion and self.switches.is_on(JOINT)
        return canonical.canonical(graph, chip, joint=joint)

    def lay_out(self, graph: ir.Graph, chip: Chip) -> ir.Graph:
        """Return a prepared graph with layouts."""
        graph = self.layouts(graph)
        if self.joined:
            graph = layout.cancel_trans_data(graph)
            if len(graph.nodes) <= self.most_moved:
                graph = decide.stay_in_fractals(graph, chip, self.start)
            graph = decide.small_first_layers(graph, chip, self.start) if self.small else graph
            graph = channels.blocks_outermost(graph, chip)
        return graph

    def fuse(self, graph: ir.Graph, chip: Chip) -> Fused:
        """Return which nodes of a graph with layouts are one kernel."""
        return fuse(graph, chip, self.switches, self.start) if self.fusion else unfused(graph)

    @few_collections()
    def kernels(self, graph: ir.Graph, chip: Chip) -> tasks.Compiled:
        """Return the kernels of a graph with layouts; raises as `compile_stages`."""
        return self.lower(graph, chip, self.fuse(graph, chip))

    def lower(self, graph: ir.Graph, chip: Chip, fused: Fused) -> tasks.Compiled:
        """Return the kernels of a graph with layouts whose nodes are in groups."""
        compiled = tasks.compile_tasks(graph, chip, fused.groups, self.start)
        return self.finish(compiled) if self.finish else compiled

    def stages(self, graph: ir.Graph, chip: Chip) -> Stages:
        """Return a model's graph after every stage; raises as `compile_stages`."""
        return finish_stages(front_stages(graph, chip, self), chip, self)


DEFAULT_ROAD = Road()


@few_collections()
def front_stages(graph: ir.Graph, chip: Chip, road: Road = DEFAULT_ROAD) -> Front:
    """Return the graph rewritten and with layouts: what is known before any kernel is written."""
    rewritten, matches = road.rewrite(graph)
    return Front(matches, rewritten, road.lay_out(road.prepare(rewritten, chip), chip))


@few_collections()
def finish_stages(front: Front, chip: Chip, road: Road = DEFAULT_ROAD) -> Stages:
    """Return the kernels of a graph with layouts; raises as `compile_stages`."""
    fused = road.fuse(front.laid_out, chip)
    compiled = road.lower(front.laid_out, chip, fused)
    return Stages(front.matches, front.rewritten, front.laid_out, fused, compiled)


def compile_stages(
    graph: ir.Graph,
    chip: Chip | str,
    *,
    dtype: str = "fp16",
    passes: Sequence[str] = DEFAULT,
    fusion: bool = True,
    switches: decide.Switches | None = None,
) -> Stages:
    """Return the graph after every stage on a chip, given as a `Chip` or by name.

    Raises a typed error naming the node at fault.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    return Road(passes, switches or ALL_ON, dtype, fusion=fusion).stages(graph, chip)


def compile_graph(graph: ir.Graph, chip: Chip | str, *, dtype: str = "fp16") -> tasks.Compiled:
    """Return a graph compiled with all passes and fusion rules; raises as `compile_stages`."""
    return compile_stages(graph, chip, dtype=dtype).compiled


def in_format(graph: ir.Graph, dtype: str, keep: frozenset[str] = frozenset()) -> ir.Graph:
    """Return the graph computing in a number format that the chips have, `keep` in fp32.

    Raises `InputError` for nodes to keep that the graph lacks, after its passes.
    """
    if dtype not in FORMATS:
        raise InputError(f"a dtype among {', '.join(FORMATS)}", dtype, "choose one")
    if dtype == "int8":
        graph = quantise(graph)[0]
    return convert(graph, "fp16" if dtype == "int8" else dtype, keep=keep)[0]


MOST_ROUNDS = 16
"""Times that a model is computed to find the nodes to keep: each takes what `evaluate` does.

Each round finds what one infinity hid; a network that needs more is scaled wrongly as a whole.
"""


def nodes_to_keep(
    graph: ir.Graph,
    inputs: Mapping[str, Any],
    overflows: Sequence[Overflow],
    kept: frozenset[str] = frozenset(),
) -> list[str]:
    """Return the nodes that `Road.keep` may name so that overflows are none: makers and readers.

    `graph` is the model's, `kept` what is in fp32 already. An infinity hides that what follows
    overflows too: the graph is computed again with more and more nodes in fp32, at most
    `MOST_ROUNDS` times.
    """
    plain = Road(dtype="").rewrite(graph)[0]
    keep = dict.fromkeys(sorted(kept))
    told = list(overflows)
    for _ in range(MOST_ROUNDS):
        more = dict.fromkeys(_makers_and_readers(plain, told))
        if more.keys() <= keep.keys():
            break
        keep |= more
        road = Road(dtype=told[0].dtype, keep=frozenset(keep))
        told = values.overflows_of(road.rewrite(graph)[0], inputs)
    return list(keep)


def _makers_and_readers(graph: ir.Graph, overflows: Sequence[Overflow]) -> list[str]:
    """Return the nodes that write or read what overflows.

    Names of nodes that only later rewrites make are those of what they are made from.
    """
    titles = {node.name: node for node in graph.nodes}
    found: dict[str, None] = {}
    for one in overflows:
        tensor = one.node.removesuffix(f"_{one.dtype}")
        names = [name for name in titles if one.node.startswith(name)]
        if one.node in titles:
            made = [titles[one.node]]
        elif tensor in graph.types and one.op in ("cast", "input"):
            made = []
        else:
            made = [titles[max(names, key=len)]] if names else []
        outs = [name for node in made for name in node.outputs] or [tensor]
        readers = [reader for name in outs for reader in graph.readers.get(name, ())]
        found |= dict.fromkeys(node.name for node in (*made, *readers))
    return list(found)


def run_compiled(
    graph: ir.Graph, inputs: Mapping[str, Any], chip: Chip | str, *, dtype: str = "fp16"
) -> dict[str, ir.Values]:
    """Return the outputs that a graph's kernels compute on a chip: for small graphs.

    Raises as `compile_stages`, and `InputError` for inputs that do not fit.
    """
    return values.run_tasks(compile_graph(graph, chip, dtype=dtype), inputs, graph.outputs)


# -- where the time goes --------------------------------------------------------------------------
TERMS: Mapping[str, str] = {
    "bound": "no schedule goes below; has one launch",
    "launches": "kernels started after the first",
    "cube": "products: padding, halos, not hidden",
    "cube fill": "over an even share: heads, idle cores",
    "memory": "bytes over the bound: spills, rereads",
    "vector": "hidden by neither cube nor memory",
    "copies": "between buffers, hidden by none above",
    "AI CPU": "operators without a kernel; launches",
    "barriers": "all cores wait for each other",
    "waits": "the rest: latencies, flags, turns",
}
"""The terms in order, and what each is."""
FIRST = {"cube": ("cube", "cube fill"), "memory": ("memory",), "vector": ("vector",)}
"""Layers that are cut first, by what limits the bound; results leave on a pipe that copies."""
LAYERS = ("cube", "cube fill", "memory", "vector", "copies", "waits")


def ledger(times: network.NetworkTimeline, bound: Bound) -> dict[str, float]:
    """Return seconds by term, in the order of `TERMS`; they add up to the time of the network.

    Raises `InputError` for a bound more than a cycle above the time, one of another graph or chip.
    """
    if bound.time_s > times.time_s + 1 / times.chip.clock_hz:
        got = f"{bound.time_s * 1e6:.3f} us, the time is {times.time_s * 1e6:.3f} us"
        raise InputError("a bound of these times", got, "bound_of the graph and chip timed")
    first = FIRST.get(bound.unit, ())
    order = (*first, *(name for name in LAYERS if name not in first))
    cycles = Counter[str]()
    launches = 0
    for op in times.operators:
        if isinstance(op.timeline, tasks.CpuTimeline):
            cycles["AI CPU"] += op.timeline.total_cycles
            continue
        if op.timeline.start in ("cold", "queued"):
            launches += op.timeline.launch_cycles
        else:
            cycles["barriers"] += op.timeline.launch_cycles
        cycles["barriers"] += op.timeline.sync_cycles
        for phase in op.timeline.phases:
            _cut(phase, order, cycles)
    clock = times.chip.clock_hz
    found = {name: cycles[name] / clock for name in (*order, "barriers", "AI CPU")}
    found["launches"] = launches / clock
    found["bound"] = _taken(found, bound.launch, ("launches",))
    found["bound"] += _taken(found, bound.work_s, (*order, "barriers", "AI CPU", "launches"))
    return {name: found[name] for name in TERMS}


def _taken(found: dict[str, float], seconds: float, order: tuple[str, ...]) -> float:
    """Take seconds from terms in order, as far as they go; return how many."""
    left = seconds
    for name in order:
        part = min(found[name], left)
        found[name] -= part
        left -= part
    return seconds - left


def account(times: network.NetworkTimeline, bound: Bound) -> dict[str, Any]:
    """Return bound, ledger, bytes and counts of a network as plain data, ready for JSON."""
    return {
        "bound_s": bound.time_s,
        "ledger": ledger(times, bound),
        "memory_bytes": times.memory_bytes,
        "kernels": times.kernels,
        "launches": times.launches,
    }


def ledger_table(*ledgers: Mapping[str, float]) -> list[str]:
    """Return the terms as lines: of each ledger microseconds and share, and what the term is."""
    totals = [sum(found.values()) or 1.0 for found in ledgers]
    heads = f"{'before':>7}{'after':>18}" if len(ledgers) == 2 else f"{'share':>7}"
    lines = [f"where the time goes: us{heads}"]
    for name, meaning in TERMS.items():
        parts = [found[name] for found in ledgers]
        if max(parts) >= 5e-9:
            pairs = zip(parts, totals, strict=True)
            columns = (f"{s * 1e6:10.2f} {s / total:6.1%}" for s, total in pairs)
            lines.append(f"  {name:10} {' '.join(columns)}  {meaning}")
    return lines


def _cut(phase: Timeline, order: tuple[str, ...], cycles: Counter[str]) -> None:
    """Add what each layer of a phase is longer than those before it."""
    chip = phase.chip
    height = 0.0
    busy = Counter[str]()
    for pipe, worked in phase.busy_cycles.items():
        kind = pipe.rpartition(".")[2]  # of AIC.M in a mix launch
        busy[kind] = max(busy[kind], worked)
    share = phase.macs / (chip.macs_per_cycle(phase.dtype) * chip.core_count) if phase.macs else 0.0
    memory = phase.memory_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz
    reach = {
        "cube": share,
        "cube fill": busy["M"],
        "memory": memory,
        "vector": busy["V"],
        "copies": max((c for pipe, c in busy.items() if pipe not in ("M", "V")), default=0),
        "waits": phase.cycles,
    }
    for name in order:
        top = min(max(reach[name], height), phase.cycles)
        cycles[name] += top - height  # type: ignore[assignment]
        height = top
