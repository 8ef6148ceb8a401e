"""Figures of graphs: operators beside their text, launches, what passes leave, tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from ascend_lab.compiler import Graph, GraphBuilder, Node, compile_stages, passes, zoo
from ascend_lab.compiler.switches import parse_switches
from ascend_lab.lab import graph_examples as ge, one_file
from ascend_lab.lab.figures import style as st
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators.dsl import Tensor
from ascend_lab.operators.dsl.tensor import Call, Compute, topological, unique_names

LANE = 1.0
"""Width of a lane, a column of boxes; rows are 1 apart."""
BOX = 0.92
"""Width of a box."""
ROW = 0.56
"""Height of a box."""
LANE_IN = 0.84
"""Inches of a lane."""
TEXT_IN = 6.2
"""Inches of lanes and text together."""
CHAR_IN = 0.057
"""Inches of one letter of the text."""
Place = tuple[int, int]
"""Lane and row."""


# -- a graph and its text -------------------------------------------------------------------------
def residual_block() -> Graph:
    """Return the first block of a stage of ResNet-18, without batch norms: 7 nodes, 2 branches."""
    net = GraphBuilder("block")
    x = net.input("x", (1, 16, 8, 8))
    a = net.conv2d(x, net.weight((32, 16, 3, 3), "w1"), stride=2, pad=1, name="a")
    b = net.relu(a, name="b")
    c = net.conv2d(b, net.weight((32, 32, 3, 3), "w2"), pad=1, name="c")
    d = net.conv2d(x, net.weight((32, 16, 1, 1), "w3"), stride=2, name="d")
    net.output(net.relu(net.add(c, d, name="e"), name="y"))
    return net.build()


def mish_block() -> Graph:
    """Return a convolution and y * tanh(ln(1 + e^y)) of its result y, which two nodes read."""
    net = GraphBuilder("mish")
    x, weight = net.input("x", (1, 64, 56, 56)), net.weight((64, 64, 3, 3))
    y = net.conv2d(x, weight, pad=1, name="conv")
    gate = net.tanh(net.softplus(y, name="softplus"), name="tanh")
    net.output(net.mul(y, gate, name="mul"))
    return net.build()


def fig_network(
    graph: Graph | None = None,
    *,
    known: int | None = None,
    groups: Sequence[Sequence[str]] = (),
) -> st.LabFigure:
    """Draw a graph from top to bottom, a lane a branch, each node beside its line of the text form.

    With `known`, only the types up to that node are inferred yet. Nodes of one of the `groups`, by
    name, get a letter and a colour in common. The default is `residual_block`.
    """
    shown = graph or residual_block()
    rows = len(shown.nodes) + len(shown.inputs)
    letters = {name: chr(ord("A") + i) for i, group in enumerate(groups) for name in group}
    limit = len(shown.nodes) if known is None else known
    places, passing_edges = placed(shown)
    lanes = 1 + max(lane for lane, _ in (*places.values(), *passing_edges.values()))
    fig, ax = st.new_figure(height_in=0.35 + 0.3 * rows)
    ax.set_axis_off()
    ax.set(xlim=(-0.5 * LANE, TEXT_IN / LANE_IN - 0.5 * LANE), ylim=(rows - 0.4, -0.6))
    style: dict[str, Any] = {"color": st.GREY, "linewidth": 1.3, "linestyle": "-", "zorder": 1}
    for node in shown.nodes:
        to_lane, to_row = places[node.output]
        for name in (n for n in dict.fromkeys(node.inputs) if n in places):
            lane, row = places[name]
            edge_lane = passing_edges.get((name, node.name), (max(lane, to_lane), 0))[0]
            xs = [lane * LANE, edge_lane * LANE, edge_lane * LANE, to_lane * LANE]
            ax.plot(xs, [row, row, to_row, to_row], **style)
    for name in shown.inputs:
        _box(ax, places[name], "input", st.INK)
    for i, node in enumerate(shown.nodes):
        colour = st.BLUE if i < limit else st.LIGHT
        if known is not None and i == limit - 1:
            colour = st.ORANGE  # the node whose type was inferred last
        if groups:
            member = letters.get(node.name)
            colour = st.PALETTE[ord(member) % len(st.PALETTE)] if member else st.GREY
        _box(ax, places[node.output], node.op, colour)
    _texts(ax, shown, places, lanes, limit, letters)
    lines = [line_of(shown, node, i < limit) for i, node in enumerate(shown.nodes)]
    alt = f"The graph {shown.name} of {len(lines)} nodes from top to bottom: {'; '.join(lines)}."
    if groups:
        kernels = (f"{letters[group[0]]}: {', '.join(group)}" for group in groups)
        alt += f" One kernel each: {'; '.join(kernels)}."
    return st.finish(fig, alt=alt)


def placed(graph: Graph) -> tuple[dict[str, Place], dict[tuple[str, str], Place]]:
    """Return (lane, row) of each tensor, and lane and row of the edges that pass other boxes.

    A node stands in the lane of an input that no node has continued yet, or in a free lane.
    """
    places: dict[str, Place] = {}
    passing_edges: dict[tuple[str, str], Place] = {}
    taken: list[tuple[int, int, int]] = []  # lane, from row, to row
    continued: set[str] = set()

    def free(first: int, last: int) -> int:
        """Return the first lane that no edge uses between two rows."""
        busy = {lane for lane, start, end in taken if start < last and first < end}
        return next(lane for lane in range(len(taken) + 1) if lane not in busy)

    for row, name in enumerate(graph.inputs):
        places[name] = (free(-1, row + 1), row)
        taken.append((places[name][0], -1, row))
    for row, node in enumerate(graph.nodes, len(graph.inputs)):
        reads = [n for n in dict.fromkeys(node.inputs) if n in places]
        unfollowed = [n for n in reads if n not in continued]
        main_input = min(unfollowed, key=lambda n: places[n][0]) if unfollowed else None
        if main_input:
            lane, first_row = places[main_input]
        else:
            first_row = min((places[n][1] for n in reads), default=row - 1)
            lane = free(first_row, row + 1)
        taken.append((lane, first_row, row))
        for name in reads:
            lane_from, row_from = places[name]
            if name != main_input and lane_from == lane and row - row_from > 1:
                passing_edges[name, node.name] = (free(row_from, row), row_from)
                taken.append((passing_edges[name, node.name][0], row_from, row))
            elif name != main_input:
                taken.append((max(lane, lane_from), row_from, row))
        if main_input:
            continued.add(main_input)
        for out in node.outputs:
            places[out] = (lane, row)
    return places, passing_edges


def _box(ax: Any, place: Place, word: str, colour: str) -> None:
    """Draw a box with a word in it."""
    box = st.box(ax, place[0] * LANE - BOX / 2, place[1] - ROW / 2, BOX, ROW, zorder=2)
    box.set(facecolor=st.PAPER, edgecolor=colour, linewidth=1.6)
    st.put(ax, place[0] * LANE, place[1], word, zorder=3, fontsize=6.8)


def fig_fused(network: str = "the file", rules: str = "all") -> st.LabFigure:
    """Draw a small network and its kernels on an Ascend 910A, with some of the fusion rules on."""
    switches = parse_switches(ALLOWED[rules])
    stages = compile_stages(FUSED[network](), load_chip("Ascend910A"), switches=switches)
    groups = [[node.name for node in group] for group in stages.fused.groups if len(group) > 1]
    return fig_network(stages.laid_out, groups=groups)


def _texts(
    ax: Any,
    graph: Graph,
    places: dict[str, Place],
    lanes: int,
    limit: int,
    letters: Mapping[str, str],
) -> None:
    """Write each row's line: what is written, its type or a question mark, what is read."""
    left = (lanes - 0.4) * LANE
    room = int((TEXT_IN - (lanes + 0.1) * LANE_IN) / CHAR_IN)
    style: dict[str, Any] = {"family": "DejaVu Sans Mono", "fontsize": 6.8, "va": "center"}
    style["in_layout"] = False
    for name in graph.inputs:
        ax.text(left, places[name][1], f"{name}: {graph.types[name]}", color=st.INK, **style)
    for i, node in enumerate(graph.nodes):
        colour = st.INK if i < limit else st.GREY
        line = shortened(graph, node, i < limit, room)
        if letters:
            line = f"{letters.get(node.name, ' ')} {line}"
        ax.text(left, places[node.output][1], line, color=colour, **style)


def line_of(graph: Graph, node: Node, known: bool = True) -> str:
    """Return the line of the text form of a node, its own name left out."""
    outs = ", ".join(f"{n}: {graph.types[n] if known else '?'}" for n in node.outputs)
    attrs = ", ".join(f"{key} = {value!r}" for key, value in sorted(node.attrs.items()))
    return f"{outs} = {node.op}({', '.join(node.inputs)})" + (f" {{{attrs}}}" if attrs else "")


def shortened(graph: Graph, node: Node, known: bool, room: int) -> str:
    """Return the line in at most `room` letters: without its constants, then cut off."""
    line = line_of(graph, node, known)
    if len(line) > room:
        variable_inputs = [n for n in node.inputs if n not in graph.constants]
        inputs = (*variable_inputs, "…") if len(variable_inputs) < len(node.inputs) else node.inputs
        line = line_of(graph, replace(node, inputs=inputs), known)
    return line if len(line) <= room else f"{line[: room - 1]}…"


FUSED: Mapping[str, Callable[[], Graph]] = {
    "the file": one_file.graph,
    "mish": mish_block,
    "residual block": residual_block,
}
ALLOWED = {
    "all": "",
    "no automatic one": "AutomaticUbFusion:off",
    "only the automatic one": """
        {"Switch": {"UBFusion": {"ALL": "off", "AutomaticUbFusion": "on"}}}
    """,
}
"""Which fusion rules are on, as a switch file."""


# -- who starts the kernels -----------------------------------------------------------------------
TITLES = {
    "waits": "operator by operator, the host waits",
    "ahead": "operator by operator, the host runs ahead",
    "sink": "the whole graph at once",
}


def fig_dispatch(
    times_s: Sequence[float], launch_s: float, task_s: float, *, name: str = "The network"
) -> st.LabFigure:
    """Draw when host and device work, for the three ways to start the kernels of a network."""
    runs = {way: ge.dispatch(times_s, way, launch_s, task_s) for way in ge.WAYS}
    longest_us = max(run.time_s for run in runs.values()) * 1e6
    fig, axes = st.new_figure(nrows=len(ge.WAYS), height_in=3.3, sharex=True)
    for ax, (way, run) in zip(axes, runs.items(), strict=True):
        summary = f"{run.time_s * 1e6:,.0f} µs, the device works {run.busy_share:.0%} of the time"
        ax.set_title(f"{TITLES[way]}: {summary}", loc="left", fontsize=8)
        lanes = ((run.host, st.ORANGE, "//"), (run.device, st.VERMILLION, ""))
        for row, (spans, colour, hatch) in enumerate(lanes):
            bars = [(start * 1e6, (end - start) * 1e6) for start, end in spans]
            look = {"facecolor": colour, "edgecolor": st.PAPER, "linewidth": 0.3, "hatch": hatch}
            ax.broken_barh(bars, (row - 0.36, 0.72), **look)
        ax.set_yticks([0, 1], ["host", "device"])
        ax.set(ylim=(1.5, -0.5), xlim=(0, longest_us * 1.01))
    axes[-1].set_xlabel("time in µs")
    fig.suptitle(name)
    parts = (f"{TITLES[w]} {r.time_s * 1e6:,.0f} µs, {r.busy_share:.0%}" for w, r in runs.items())
    alt = f"{name} of {len(times_s)} kernels; time and share in which the device works"
    return st.finish(fig, alt=f"{alt}: {'; '.join(parts)}.")


def fig_batches(
    model: str = "resnet18", batch: int = 1, chip: str = "Ascend910A", *, fusion: bool = False
) -> st.LabFigure:
    """Draw `fig_dispatch` of a model of the zoo, compiled for a chip as it stands or fused."""
    device = load_chip(chip)
    stages = compile_stages(
        zoo.build(model, batch), device, fusion=fusion, passes=passes.DEFAULT if fusion else ()
    )
    times = list(ge.kernel_times(stages.compiled).values())
    name = f"{model}, batch {batch}, {'' if fusion else 'not '}fused, on the {chip}"
    return fig_dispatch(times, device.launch_overhead_s, device.queued_launch_s, name=name)


# -- rewriting graphs: a model as an exporter writes it, and what each pass leaves of it -----------
EXPORTED = "exported block"
MODELS = (EXPORTED, "resnet50", "mobilenet_v2", "densenet121", "bert_base", "mobilevit_block")
ORDERS = {"default": passes.DEFAULT, "backwards": passes.DEFAULT[::-1]}


def history(report: passes.Report) -> list[tuple[str, int, int]]:
    """Return (pass, nodes, bytes moved) after the start and each pass that matched."""
    graphs = [("as imported", report.start), *((step.name, step.after) for step in report.steps)]
    return [(name, len(graph.nodes), ge.moved_bytes(graph)) for name, graph in graphs]


def fig_passes(
    name: str = EXPORTED, order: str = "default", rounds: int = 4, leave_out: str = "nothing"
) -> st.LabFigure:
    """Draw nodes and bytes moved after each pass that matched, from top to bottom."""
    names = [name for name in ORDERS[order] if name != leave_out]
    graph = ge.exported_block() if name == EXPORTED else zoo.build(name)
    _, report = passes.run_passes(graph, names, rounds=rounds)
    rows = history(report)
    fig, axes = st.new_figure(ncols=2, height_in=1.0 + 0.24 * len(rows), sharey=True)
    _bars(axes[0], [row[1] for row in rows], st.BLUE, "operators", "{:,.0f}")
    _bars(axes[1], [row[2] / 2**20 for row in rows], st.ORANGE, "MiB read and written", "{:.1f}")
    st.name_rows(axes[0], [row[0] for row in rows])
    rounds_text = f"{report.rounds} {'rounds' if report.rounds > 1 else 'round'}"
    fig.suptitle(f"{name}, {order} order, {rounds_text} (grey: as before)")
    summary = "; ".join(f"{n} {nodes}" for n, nodes, _ in rows)
    ends = f"{rows[0][2] / 2**20:.1f} to {rows[-1][2] / 2**20:.1f} MiB"
    alt = f"Operators of {name} after each pass, {order} order: {summary}. Bytes moved fall from "
    return st.finish(fig, alt=f"{alt}{ends}.")


def _bars(ax: Axes, values: Sequence[float], colour: str, label: str, form: str) -> None:
    """Draw a bar for each value; it is grey if its label is that of the one before."""
    labels = [form.format(value) for value in values]
    fills = [
        st.GREY if i > 0 and labels[i - 1] == text else colour for i, text in enumerate(labels)
    ]
    ax.barh(range(len(values)), values, color=fills, edgecolor=st.INK)
    for row, value in enumerate(values):
        ax.text(value, row, f" {labels[row]}", va="center", fontsize=8)
    ax.set(xlim=(0, max(values) * 1.18), xlabel=label)


# -- the graph of an expression: tensors as boxes, full ones above, reduced ones below -------------
FORMAT_EDGE = {"fp16": (st.BLUE, "-"), "bf16": (st.BLUE, ":"), "fp32": (st.ORANGE, "-")}
HALF_WIDTH = 0.43
HALF_HEIGHT = 0.22


def operation_of(tensor: Tensor) -> str:
    """Return what computes a tensor in one word: input, max, sum, vexp, broadcast, ..."""
    body = tensor.body
    if not isinstance(body, Compute):
        return "input" if body is None else body.kind
    operator = body.expr.op if isinstance(body.expr, Call) else "copy"
    return body.fold or tensor.hint or operator


def sources_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors a tensor reads; through reshapes, which change no element."""
    through = (sources_of(t) if t.hint == "reshape" else (t,) for t in tensor.inputs)
    return tuple(t for sources in through for t in sources)


def fig_graph(outputs: Tensor | Sequence[Tensor]) -> st.LabFigure:
    """Draw the tensors an expression consists of, left to right in the order they are needed."""
    results = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    tensors = [t for t in topological(results) if t.hint != "reshape" or t in results]
    names = unique_names(topological(results))
    place, sizes = _places(tensors)
    fig, ax = st.new_figure(height_in=0.45 + 0.75 * (1 - min(y for _, y in place.values())))
    ax.set_axis_off()
    ax.set_xlim(-0.55, max(x for x, _ in place.values()) + 0.55)
    ax.set_ylim(min(y for _, y in place.values()) - 0.3, 0.95)
    _arrows(ax, tensors, place)
    for tensor in tensors:
        (x, y) = place[tensor]
        size = (2 * HALF_WIDTH, 2 * HALF_HEIGHT)
        colour, line = FORMAT_EDGE.get(tensor.dtype, (st.GREEN, "-"))
        box = st.box(ax, x - HALF_WIDTH, y - HALF_HEIGHT, *size, zorder=2, facecolor=st.PAPER)
        box.set(edgecolor=colour, linewidth=1.6, linestyle=line)
        word = tensor.label if tensor.body is None else operation_of(tensor)
        st.put(ax, x, y + 0.07, word, fontsize=7 if len(word) < 9 else 6, zorder=3)
        st.put(ax, x, y - 0.1, tensor.dtype, fontsize=6.5, zorder=3)
    for lane, elements in enumerate(sizes):
        first = next(t for t in tensors if t.elements == elements)
        at = place[first][0] - HALF_WIDTH, HALF_HEIGHT + 0.06 - lane
        # on two lines it stays left of the arcs that leave the box
        ax.text(*at, _shape(first).replace(" × ", "\n× "), fontsize=7, va="bottom")
    parts = []
    for tensor in tensors:
        sources = ", ".join(names[t] for t in sources_of(tensor))
        made = operation_of(tensor) + (f" of {sources}" if sources else "")
        parts.append(f"{names[tensor]} ({_shape(tensor)} {tensor.dtype}) is {made}")
    return st.finish(fig, alt=f"A graph of {len(tensors)} tensors: {'; '.join(parts)}.")


def _places(tensors: Sequence[Tensor]) -> tuple[dict[Tensor, tuple[float, float]], list[int]]:
    """Return where the boxes stand, and the sizes of the lines from top to bottom."""
    depth: dict[Tensor, int] = {}
    for tensor in tensors:
        depth[tensor] = max((depth[t] + 1 for t in sources_of(tensor)), default=0)
    sizes = sorted({t.elements for t in tensors}, reverse=True)
    place: dict[Tensor, tuple[float, float]] = {}
    for tensor in tensors:
        x = float(depth[tensor])
        y = -float(sizes.index(tensor.elements))
        while (x, y) in place.values():
            y -= 0.5
        place[tensor] = x, y
    return place, sizes


def _shape(tensor: Tensor) -> str:
    """Return a shape such as 32 × 1,024."""
    return " × ".join(f"{n:,}" for n in tensor.shape)


def _arrows(ax: Any, tensors: Sequence[Tensor], place: dict[Tensor, tuple[float, float]]) -> None:
    """Draw an arrow from each tensor to those that read it, in an arc over boxes between them."""
    look: dict[str, Any] = {"mutation_scale": 8, "color": st.GREY, "linewidth": 1.1}
    for tensor in tensors:
        x1, y1 = place[tensor]
        for source in sources_of(tensor):
            x0, y0 = place[source]
            passes_boxes = y0 == y1 and x1 - x0 > 1
            start = (x0 + 0.36, y0 + HALF_HEIGHT) if passes_boxes else (x0 + HALF_WIDTH, y0)
            end = (x1 - 0.1, y1 + HALF_HEIGHT) if passes_boxes else (x1 - HALF_WIDTH, y1)
            bend = f"arc3,rad={-0.42 / math.sqrt(x1 - x0) if passes_boxes else 0.0:.2f}"
            arrow = FancyArrowPatch(start, end, arrowstyle="-|>", connectionstyle=bend, **look)
            ax.add_patch(arrow)
