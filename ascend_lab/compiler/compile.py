"""Compiles a model's graph to kernels, stage by stage, and explains the time they take.

    Graph -> passes -> Graph -> layout -> Graph -> fuse -> Pieces -> lower -> Kernels -> time

    stage    what it decides                                          where
    passes   what is computed: rewrites, number format, operators     passes, canonical
    layout   how every tensor lies in memory                          layout
    fuse     which nodes become one kernel: a piece of the graph      fusion
    lower    the kernel of every piece                                lower, tasks
    time     the kernels run one by one and share the L2 cache        placement, network

A `Road` holds the choices of each stage. The command `simulate` and the tuner take the default
road; comparisons of techniques switch stages off; training has its own rewrites and its own layout
of images.

Two decisions need times before the last stage: whether a group is faster as one fused kernel, and
whether matrices are faster in fractals (blocks of 16 x 16 numbers) than in rows. `decide` makes
both: it lowers and times the candidates, and the stage `lower` finds these kernels in a cache.

The `ledger` explains a time: it splits the time into its lower bound and terms for the rest:

    time = bound + launches + cube + cube fill + memory + vector + copies
         + AI CPU + barriers + waits

Pipes of a phase work at the same time, so their cycles do not add up. The ledger goes through the
terms in order and gives each the cycles by which it exceeds all terms before it: nothing counts
twice, and no term is negative. The term that limits the bound comes first. A phase of 100 cycles
whose cube works 60 and whose vector units work 80 gives 60 to the cube, 20 to the vector units and
20 to the waits. At the end the bound's seconds are subtracted from the terms, in the same order.

`zoo.why` sums this up for a model in one line. A network of few products can still be slow: every
kernel costs a launch, a depthwise layer fills a sixteenth of the cube, and many small tensors take
longer to move than to compute.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ascend_lab.compiler import canonical, decide, ir, layout, network, tasks, values
from ascend_lab.compiler.bound import Bound
from ascend_lab.compiler.draft import in_order
from ascend_lab.compiler.fusion import Fused, fuse, unfused
from ascend_lab.compiler.overflow import Overflow
from ascend_lab.compiler.passes import DEFAULT, convert, quantise, run_passes
from ascend_lab.compiler.rules import JOINT, layout_rewrites
from ascend_lab.compiler.switches import Switches
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim import few_collections
from ascend_lab.machine.sim.timeline import Start, Timeline

DTYPES = ("fp16", "bf16", "int8")
DEFAULT_SWITCHES = Switches()


@dataclass(frozen=True, slots=True)
class Front:
    """A graph before fusion: after its rewrites, counted in `matches`, and with layouts."""

    matches: Mapping[str, int]
    rewritten: ir.Graph
    laid_out: ir.Graph


@dataclass(frozen=True, slots=True)
class Stages(Front):
    """A graph after every stage, for inspection; `compiled` is the last."""

    fused: Fused
    compiled: tasks.Compiled

    def timeline(self) -> network.NetworkTimeline:
        """Return the last stage: the time of all kernels."""
        return network.simulate_graph(self.compiled)

    def fusion_result(self) -> str:
        """Return what passes and fusion rules did, in the form of `fusion_result.json`."""
        return self.fused.result_json(self.matches)


@dataclass(frozen=True, slots=True)
class Layouts:
    """How the tensors of a prepared graph get their layouts, and which improvements are tried.

    - assign: gives every tensor a layout
    - cancels_conversions: remove conversions that cancel; if False they stay where operators put
      them, and the improvements below are not tried
    - max_moved_nodes: largest number of nodes of a graph whose rows may be moved to fractals
    - left_out: names of the rewrites of layouts (`rules.layout_rewrites`) that do not run
    """

    assign: Callable[[ir.Graph], ir.Graph] = layout.assign_layouts
    cancels_conversions: bool = True
    max_moved_nodes: float = float("inf")
    left_out: frozenset[str] = frozenset()

    def lay_out(self, graph: ir.Graph, chip: Chip, start: Start) -> ir.Graph:
        """Return a prepared graph with layouts; `start` is how its kernels will start."""
        laid_out = self.assign(graph)
        if not self.cancels_conversions:
            return laid_out
        # the order matters: conversions that cancel would count as costs in the decisions
        laid_out = layout.cancel_trans_data(laid_out)
        if len(laid_out.nodes) <= self.max_moved_nodes:
            laid_out = decide.stay_in_fractals(laid_out, chip, start)
        for rewrite in layout_rewrites():
            if rewrite.name not in self.left_out:
                laid_out = rewrite.apply(laid_out, chip, start)
        return laid_out


@dataclass(frozen=True, slots=True)
class Road:
    """The choices of each stage; the defaults are those of the compiler.

    Rewriting:

    - passes: names of the passes, in order
    - switches: turn passes (scope GraphFusion) and fusion rules (scope UBFusion) off by name
    - dtype: number format of the network; "" leaves every format as it is
    - keep: names of nodes that stay in fp32
    - ordered: sort nodes by `in_order`, so that the order in a file does not matter; a training
      step keeps its own order, in which backward frees what forward kept
    - operator_rewrites: more rewrites of operators that have no kernel, run before those of
      `canonical`

    Layouts and kernels:

    - layouts: how every tensor lies in memory
    - fusion: fuse groups of nodes into kernels
    - start: how a kernel starts, e.g. "queued": decisions about fusion and layouts count its cost
    - finish: changes the kernels at the end: `like_cann` cuts tiles as another compiler does
    """

    passes: Sequence[str] = DEFAULT
    switches: Switches = DEFAULT_SWITCHES
    dtype: str = "fp16"
    operator_rewrites: tuple[Callable[[ir.Graph], ir.Graph], ...] = ()
    layouts: Layouts = Layouts()
    fusion: bool = True
    start: Start = "queued"
    keep: frozenset[str] = frozenset()
    ordered: bool = True
    finish: Callable[[tasks.Compiled], tasks.Compiled] | None = None

    def rewrite(self, graph: ir.Graph) -> tuple[ir.Graph, Mapping[str, int]]:
        """Return the graph after passes, in its number format, and how often each pass matched."""
        # a pass that is switched off is left out; the order of the others stays
        pass_names = [name for name in self.passes if self.switches.is_on(name, "GraphFusion")]
        sorted_graph = in_order(graph) if self.ordered else graph
        rewritten, report = run_passes(sorted_graph, pass_names)
        # formats come last: passes recognise patterns in the formats of the model
        if self.dtype:
            rewritten = in_format(rewritten, self.dtype, self.keep)
        return rewritten, report.matches

    def prepare(self, graph: ir.Graph, chip: Chip) -> ir.Graph:
        """Return a rewritten graph that contains only operators with kernels."""
        prepared = graph
        for rewrite in self.operator_rewrites:
            prepared = rewrite(prepared)
        # without fusion, two convolutions that are added are two kernels
        joint = self.fusion and self.switches.is_on(JOINT)
        return canonical.canonical(prepared, chip, joint=joint)

    def lay_out(self, graph: ir.Graph, chip: Chip) -> ir.Graph:
        """Return a prepared graph with layouts."""
        return self.layouts.lay_out(graph, chip, self.start)

    def fuse(self, graph: ir.Graph, chip: Chip) -> Fused:
        """Return the groups of nodes that become one kernel each."""
        return fuse(graph, chip, self.switches, self.start) if self.fusion else unfused(graph)

    @few_collections()
    def kernels(self, graph: ir.Graph, chip: Chip) -> tasks.Compiled:
        """Return the kernels of a graph with layouts; raises as `compile_stages`."""
        return self.lower(graph, chip, self.fuse(graph, chip))

    def lower(self, graph: ir.Graph, chip: Chip, fused: Fused) -> tasks.Compiled:
        """Return the kernels of a graph with layouts, one for each group of `fused`."""
        compiled = tasks.compile_tasks(graph, chip, fused.groups, self.start)
        return self.finish(compiled) if self.finish else compiled

    def stages(self, graph: ir.Graph, chip: Chip) -> Stages:
        """Return a model's graph after every stage; raises as `compile_stages`."""
        return finish_stages(front_stages(graph, chip, self), chip, self)


DEFAULT_ROAD = Road()


@few_collections()
def front_stages(graph: ir.Graph, chip: Chip, road: Road = DEFAULT_ROAD) -> Front:
    """Return the graph rewritten and with layouts: everything before fusion and kernels."""
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
    switches: Switches | None = None,
) -> Stages:
    """Return the graph after every stage on a chip, given as a `Chip` or by name.

    Raises a typed error naming the node at fault.
    """
    loaded_chip = load_chip(chip) if isinstance(chip, str) else chip
    road = Road(passes, switches or DEFAULT_SWITCHES, dtype, fusion=fusion)
    return road.stages(graph, loaded_chip)


def compile_graph(graph: ir.Graph, chip: Chip | str, *, dtype: str = "fp16") -> tasks.Compiled:
    """Return a graph compiled with all passes and fusion rules; raises as `compile_stages`."""
    return compile_stages(graph, chip, dtype=dtype).compiled


def in_format(graph: ir.Graph, dtype: str, keep: frozenset[str] = frozenset()) -> ir.Graph:
    """Return the graph converted to a number format of the chips, except the nodes `keep`.

    These stay in fp32. Raises `InputError` for a name in `keep` that the graph, which has already
    been through the passes, does not have.
    """
    if dtype not in DTYPES:
        raise InputError(f"a dtype among {', '.join(DTYPES)}", dtype, "choose one")
    # int8 is for products and convolutions; everything around them runs in fp16
    if dtype == "int8":
        return convert(quantise(graph)[0], "fp16", keep=keep)[0]
    return convert(graph, dtype, keep=keep)[0]


MAX_ROUNDS = 16
"""Most times that `nodes_to_keep` computes the model; each round takes as long as `evaluate`.

Each round finds the overflows that the infinities of the last round hid. A network that needs more
than 16 is badly scaled as a whole.
"""


def nodes_to_keep(
    graph: ir.Graph,
    inputs: Mapping[str, Any],
    overflows: Sequence[Overflow],
    already_kept: frozenset[str] = frozenset(),
) -> list[str]:
    """Return the names for `Road.keep` that avoid overflows: the nodes that write or read them.

    `graph` is the model as imported, `already_kept` names nodes that are in fp32 already. An
    infinity hides the overflows of the nodes after it; so the graph is computed again with more and
    more nodes in fp32, at most `MAX_ROUNDS` times.
    """
    # passes rename nodes; `Road.keep` refers to names after them
    prepared = Road(dtype="").rewrite(graph)[0]
    keep = dict.fromkeys(sorted(already_kept))
    current_overflows = list(overflows)
    for _ in range(MAX_ROUNDS):
        names = dict.fromkeys(_makers_and_readers(prepared, current_overflows))
        # nothing new: either no overflow is left, or fp32 does not help
        if names.keys() <= keep.keys():
            break
        keep |= names
        road = Road(dtype=current_overflows[0].dtype, keep=frozenset(keep))
        current_overflows = values.overflows_of(road.rewrite(graph)[0], inputs)
    return list(keep)


def _makers_and_readers(graph: ir.Graph, overflows: Sequence[Overflow]) -> list[str]:
    """Return the names of the nodes that write or read a tensor that overflows.

    Later rewrites name a node after the one it replaces: `attn_fp16` comes from `attn`. So the node
    with the longest name with which the overflowing node's name begins is taken.
    """
    nodes = {node.name: node for node in graph.nodes}
    names_to_keep: dict[str, None] = {}
    for overflow in overflows:
        # a cast to fp16 of tensor x is named x_fp16: the maker of x is meant
        tensor = overflow.node.removesuffix(f"_{overflow.dtype}")
        prefixes = [name for name in nodes if overflow.node.startswith(name)]
        if overflow.node in nodes:
            makers = [nodes[overflow.node]]
        elif tensor in graph.types and overflow.op in ("cast", "input"):
            makers = []
        else:
            makers = [nodes[max(prefixes, key=len)]] if prefixes else []
        outs = [name for node in makers for name in node.outputs] or [tensor]
        readers = [reader for name in outs for reader in graph.readers.get(name, ())]
        names_to_keep |= dict.fromkeys(node.name for node in (*makers, *readers))
    return list(names_to_keep)


def run_compiled(
    graph: ir.Graph, inputs: Mapping[str, Any], chip: Chip | str, *, dtype: str = "fp16"
) -> dict[str, ir.Values]:
    """Return the outputs that a graph's kernels compute on a chip; slow for large graphs.

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
"""The terms in the order of the table, and what each is."""
TERMS_OF_LIMIT = {"cube": ("cube", "cube fill"), "memory": ("memory",), "vector": ("vector",)}
"""By the unit that limits the bound, the terms that come first.

The unit "results" has no entry: results leave L0C on a pipe that counts as "copies".
"""
PHASE_TERMS = ("cube", "cube fill", "memory", "vector", "copies", "waits")


def ledger(times: network.NetworkTimeline, bound: Bound) -> dict[str, float]:
    """Return seconds by term, in the order of `TERMS`; they add up to the time of the network.

    Raises `InputError` for a bound more than one cycle above the time: it belongs to another graph
    or chip.
    """
    if bound.time_s > times.time_s + 1 / times.chip.clock_hz:
        got = f"{bound.time_s * 1e6:.3f} us, the time is {times.time_s * 1e6:.3f} us"
        raise InputError("a bound of these times", got, "bound_of the graph and chip timed")
    # a network bound by memory pays its bytes first: the cube then gets only what exceeds them
    limiting = TERMS_OF_LIMIT.get(bound.unit, ())
    order = (*limiting, *(name for name in PHASE_TERMS if name not in limiting))
    cycles_of = Counter[str]()
    launches = 0
    for op in times.operators:
        if isinstance(op.timeline, tasks.CpuTimeline):
            cycles_of["AI CPU"] += op.timeline.total_cycles
            continue
        # inside a super kernel the start is a barrier
        if op.timeline.start in ("cold", "queued"):
            launches += op.timeline.launch_cycles
        else:
            cycles_of["barriers"] += op.timeline.launch_cycles
        cycles_of["barriers"] += op.timeline.sync_cycles
        for phase in op.timeline.phases:
            _split_phase_time(phase, order, cycles_of)
    clock_hz = times.chip.clock_hz
    time_s_of = {name: cycles_of[name] / clock_hz for name in (*order, "barriers", "AI CPU")}
    time_s_of["launches"] = launches / clock_hz
    # the bound takes one launch from the launches, then its work from the term that limits it
    time_s_of["bound"] = _subtract(time_s_of, bound.launch, ("launches",))
    time_s_of["bound"] += _subtract(
        time_s_of, bound.work_s, (*order, "barriers", "AI CPU", "launches")
    )
    return {name: time_s_of[name] for name in TERMS}


def _subtract(terms: dict[str, float], seconds: float, order: tuple[str, ...]) -> float:
    """Subtract seconds from the terms, in order, none below 0; return the seconds subtracted."""
    remaining_s = seconds
    for name in order:
        subtracted_s = min(terms[name], remaining_s)
        terms[name] -= subtracted_s
        remaining_s -= subtracted_s
    return seconds - remaining_s


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
    """Return a line for each term: microseconds and share in each ledger, and its meaning."""
    totals = [sum(ledger.values()) or 1.0 for ledger in ledgers]
    heads = f"{'before':>7}{'after':>18}" if len(ledgers) == 2 else f"{'share':>7}"
    lines = [f"where the time goes: us{heads}"]
    for name, meaning in TERMS.items():
        values = [ledger[name] for ledger in ledgers]
        # 0.005 us and more; less would be printed as 0.00
        if max(values) >= 5e-9:
            pairs = zip(values, totals, strict=True)
            columns = (f"{s * 1e6:10.2f} {s / total:6.1%}" for s, total in pairs)
            lines.append(f"  {name:10} {' '.join(columns)}  {meaning}")
    return lines


def _split_phase_time(phase: Timeline, order: tuple[str, ...], cycles_of: Counter[str]) -> None:
    """Add a phase's cycles to the terms in order; each gets what exceeds all terms before it.

    If the cube works 60 cycles, the vector unit 80, and the phase takes 100, then the cube gets 60,
    the vector unit 20 and the waits 20 cycles.
    """
    chip = phase.chip
    attributed = 0.0
    busy = Counter[str]()
    for pipe, busy_cycles in phase.busy_cycles.items():
        kind = pipe.rpartition(".")[2]  # "AIC.M" of a mix launch is pipe "M"
        busy[kind] = max(busy[kind], busy_cycles)
    # the cube's work if it were spread evenly over all cores, and as it is on the busiest one
    even_share_cycles = (
        phase.macs / (chip.macs_per_cycle(phase.dtype) * chip.core_count) if phase.macs else 0.0
    )
    # cycles to move the bytes at the full rate of device memory
    memory_cycles = phase.memory_bytes / chip.device_memory.rate_bytes_per_s * chip.clock_hz
    end_of = {
        "cube": even_share_cycles,
        "cube fill": busy["M"],
        "memory": memory_cycles,
        "vector": busy["V"],
        "copies": max((c for pipe, c in busy.items() if pipe not in ("M", "V")), default=0),
        "waits": phase.cycles,
    }
    for name in order:
        end_cycles = min(max(end_of[name], attributed), phase.cycles)
        cycles_of[name] += end_cycles - attributed  # type: ignore[assignment]
        attributed = end_cycles
