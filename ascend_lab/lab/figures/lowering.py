"""What a compiler decides: addresses of tiles, flags, layouts, and where activations lie."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ascend_lab import errors
from ascend_lab.compiler import compile_graph, layout, zoo
from ascend_lab.compiler.buffers import Buffer
from ascend_lab.compiler.compile import DEFAULT_ROAD
from ascend_lab.compiler.memory import Plan
from ascend_lab.compiler.placement import buffers_of, plan_network
from ascend_lab.compiler.tasks import Compiled
from ascend_lab.lab import graph_examples as choices
from ascend_lab.lab.figures import nests, style as st
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators import dsl, dsl as te

KIB = 1024
LOOKS: Sequence[dict[str, Any]] = (
    {"facecolor": st.SKY, "hatch": ""},
    {"facecolor": st.ORANGE, "hatch": "//"},
    {"facecolor": st.GREEN, "hatch": "\\\\"},
    {"facecolor": st.YELLOW, "hatch": ".."},
    {"facecolor": st.PURPLE, "hatch": "xx"},
)


# -- programs -------------------------------------------------------------------------------------
def residual_sum(n: int, tile: int, slots: int, chip: str, inputs: int = 2) -> isa.Program:
    """Return relu of a sum of vectors as the program of one core: one loop over tiles."""
    total, *rest = (te.placeholder((n,), name=name) for name in "abcde"[:inputs])
    for other in rest:
        total = te.vadd(total, other)
    s = te.create_schedule(te.renamed(te.vrelu(total), "y"), load_chip(chip))
    for stage in s.state.stages[:-1]:
        s = te.inline(s, stage.name)
    return _only(te.double_buffer(te.split(s, "y", "i", tile), "y", slots))


def _only(s: dsl.Schedule) -> isa.Program:
    """Return the program of the first part in the last phase; the callers have only one."""
    return te.lower(s).phases[-1].parts[0].program


def five_programs() -> dict[str, tuple[isa.Program, Chip]]:
    """Return a sum, a sum with a table held in UB, a block's last step, a softmax, a product."""
    chip = load_chip("Ascend910B2")
    toy = load_chip("Toy")
    a, b = (te.placeholder((65536,), name=name) for name in "ab")
    plain = te.split(te.create_schedule(te.renamed(te.vadd(a, b), "y"), chip), "y", "i", 8192)
    r = te.placeholder((2048, 512), name="r")
    powers = te.vexp(te.vsub(r, te.broadcast(te.reduce_max(r, -1, True), r.shape)))
    softmax = te.vdiv(powers, te.broadcast(te.reduce_sum(powers, -1, True), r.shape))
    c = te.matmul(te.placeholder((64, 256), name="c"), te.placeholder((256, 64), name="d"))
    return {
        "sum": (_only(te.double_buffer(plain, "y")), chip),
        "table": (_table_sum(chip), chip),
        "block": (residual_sum(64 * 56 * 56, 2 * 56 * 56, 2, chip.name), chip),
        "softmax": (_only(te.auto_schedule(softmax, chip)), chip),
        "product": (_only(te.auto_schedule(c, toy)), toy),
    }


def _table_sum(chip: Chip) -> isa.Program:
    """Return z[i, j] = x[i, j] + p[j], where each piece of the table p is loaded once for all i."""
    x = te.placeholder((32, 65536), name="x")
    p = te.placeholder((65536,), name="p")
    z = te.compute(x.shape, lambda i, j: x[i, j] + p[j], name="z")
    s = te.create_schedule(z, chip)
    s = te.vectorise(te.split(s, "z", "j", 8192), "z", "j_i")
    s = te.cache_read(te.reorder(s, "z", "j_o", "i"), "p", "UB")
    s = te.compute_at(s, "p_ub", "z", "j_o")
    return _only(te.double_buffer(s, "z"))


# -- programs as text -----------------------------------------------------------------------------
def rewritten(program: isa.Program, *edits: tuple[str, str]) -> isa.Program:
    """Return the program with (old, new) replaced in its text form, in this order."""
    text = str(program)
    for old, new in edits:
        if old not in text:
            raise errors.InputError("text of the program", repr(old), "print the program")
        text = text.replace(old, new)
    return isa.parse_program(text)


def without(program: isa.Program, event: str) -> isa.Program:
    """Return the program without the sets and waits of one kind of flag, such as V>MTE2:0x2."""
    other_lines = (line for line in str(program).splitlines() if f"_flag {event}" not in line)
    return isa.parse_program("\n".join(other_lines))


def same_order(one: isa.Program, two: isa.Program) -> bool:
    """Tell whether every pipe runs the same instructions in the same order in both."""
    start = {name: 0 for name, _ in one.params}
    return one.pipes == two.pipes and all(
        list(isa.pipe_stream(one, pipe, start)) == list(isa.pipe_stream(two, pipe, start))
        for pipe in one.pipes
    )


# -- addresses ------------------------------------------------------------------------------------
def fig_addresses(
    tile: int = 6272, slots: int = 2, inputs: int = 2, chip: str = "Ascend910B2"
) -> st.LabFigure:
    """Draw where the tiles of relu(a + b + ...) lie in UB, slot by slot."""
    program = residual_sum(4 * tile, tile, slots, chip, inputs)
    size = load_chip(chip).buffers["UB"]
    fig, ax = st.new_figure(height_in=1.5)
    alt_parts = []
    used_bytes = 0
    for number, buffer in enumerate(b for b in program.buffers if b.space == "UB"):
        for slot in range(buffer.slots):
            start = buffer.address + slot * buffer.slot_bytes
            look = LOOKS[number % len(LOOKS)] | {"edgecolor": st.INK}
            st.box(ax, start / KIB, 0, buffer.slot_bytes / KIB, 1, **look)
            paper = {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 1.0}
            middle = (start + buffer.slot_bytes / 2) / KIB
            st.put(ax, middle, 0.5, f"{buffer.name}\nslot {slot}", bbox=paper)
            used_bytes = max(used_bytes, start + buffer.slot_bytes)
        alt_parts.append(
            f"{buffer.name} at {buffer.address:,}, {buffer.slots} x {buffer.slot_bytes:,}"
        )
    ax.set(xlim=(0, size / KIB), ylim=(0, 1), yticks=[], xlabel=f"address in UB of {chip} (KiB)")
    ax.set(title=f"tiles of {tile:,}: {used_bytes:,} of {size:,} bytes, {used_bytes / size:.0%}")
    return st.finish(
        fig, alt=f"UB of {chip}, {size:,} bytes: {'; '.join(alt_parts)}; {used_bytes:,} in use."
    )


# -- flags ----------------------------------------------------------------------------------------
def turn_of(program: isa.Program) -> list[isa.Instruction]:
    """Return the instructions of one turn of the first loop; of the whole if there is none."""
    loops = (node.body for node in program.body if isinstance(node, isa.Loop))
    return [node for node in next(loops, program.body) if isinstance(node, isa.Instruction)]


def fig_flags(program: isa.Program) -> st.LabFigure:
    """Draw one turn of a program's loop: pipes side by side, an arrow from each set to its wait."""
    turn = turn_of(program)
    pipes: list[str] = [p for p in nests.PIPES if p in {i.pipe for i in turn}]
    fig, ax = st.new_figure(height_in=0.7 + 0.27 * len(turn))
    places: dict[tuple[str, Any], st.Point] = {}
    for row, i in enumerate(turn):
        x = float(pipes.index(i.pipe))
        y = float(row)
        if i.event is not None:
            places[i.op, i.event] = x, y
            st.put(ax, x, y, f"{i.op.removesuffix('_flag')} {i.event}", fontsize=8)
            continue
        look = st.PIPE_STYLE[i.pipe]
        st.box(ax, x - 0.33, y - 0.4, 0.66, 0.8, **look.patch_args())
        name = "" if i.dst is None else i.dst.buffer.name
        st.put(ax, x, y, f"{i.op.removeprefix('data_')} {name}", **look.text_args())
    alt_parts = []
    bottom = len(turn) - 0.3
    for (op, event), (x, y) in places.items():
        if op != "set_flag" or ("wait_flag", event) not in places:
            continue
        to_x, to_y = places["wait_flag", event]
        side = 0.34 if to_x > x else -0.34
        if to_y > y:
            _arrow(ax, (x + side, y), (to_x - side, to_y), "-", st.BLUE)
        else:
            _arrow(ax, (x + side, y), (x + side * 1.3, bottom), "--", st.VERMILLION)
            _arrow(ax, (to_x - side * 1.3, -0.7), (to_x - side, to_y), "--", st.VERMILLION)
        alt_parts.append(f"{event} {'in the same turn' if to_y > y else 'in a later turn'}")
    ax.set(xlim=(-0.6, len(pipes) - 0.4), ylim=(bottom, -0.8), yticks=[])
    ax.set_xticks(range(len(pipes)), pipes)
    ax.xaxis.tick_top()
    st.bare(ax)
    events = "; ".join(alt_parts)
    alt = f"One turn of {program.name} on {', '.join(pipes)}. From set to wait: {events}."
    return st.finish(fig, alt=alt)


def _arrow(ax: Any, start: st.Point, end: st.Point, style: str, colour: str) -> None:
    """Draw an arrow from one point to another."""
    look = {"arrowstyle": "-|>", "linestyle": style, "color": colour, "linewidth": 1.1}
    ax.annotate("", end, start, arrowprops=look)


# -- layouts --------------------------------------------------------------------------------------
COLOURS: dict[str, dict[str, Any]] = {
    "ND": {"facecolor": st.LIGHT, "hatch": ""},
    "NC1HWC0": {"facecolor": st.SKY, "hatch": "//"},
    "FRACTAL_NZ": {"facecolor": st.ORANGE, "hatch": "\\\\"},
    "trans_data": {"facecolor": st.VERMILLION, "hatch": "xx"},
}


def fig_layouts(name: str = "heads", count: int = 3, channels: int = 64) -> st.LabFigure:
    """Draw the operators of a small graph by layout: as the package assigns them, and at best.

    `count` and `channels` are those of the graph heads, and mean nothing to the others.
    """
    unprepared = (
        choices.heads_graph(channels, count=count) if name == "heads" else choices.BUILDERS[name]()
    )
    graph = DEFAULT_ROAD.prepare(DEFAULT_ROAD.rewrite(unprepared)[0], load_chip(choices.CHIP))
    laid_out_graphs = {
        "the rule": layout.assign_layouts(graph),
        "the fewest bytes": choices.cheapest(graph),
    }
    rows = max(len(laid_out.nodes) for laid_out in laid_out_graphs.values())
    fig, axes = st.new_figure(ncols=2, height_in=0.9 + 0.26 * rows)
    alt_parts = []
    for ax, (title, side) in zip(st.panels(axes), laid_out_graphs.items(), strict=True):
        for y, node in enumerate(side.nodes):
            kind = side.types[node.output]
            look = COLOURS["trans_data" if node.op == "trans_data" else kind.layout]
            st.box(ax, 0, y - 0.4, 1, 0.8, edgecolor=st.INK, **look)
            words = f"{node.op}  {kind.size_bytes / KIB:,.0f} KiB"
            st.put(ax, 0.5, y, words, bbox={"facecolor": st.PAPER, "edgecolor": "none", "pad": 1})
        moved_bytes = choices.converted_bytes(side)
        conversions = sum(node.op == "trans_data" for node in side.nodes)
        ax.set(xlim=(0, 1), ylim=(rows - 0.4, -0.6), xticks=[], yticks=[])
        ax.set_title(f"{title}: {moved_bytes / KIB:,.0f} KiB converted")
        alt_parts.append(f"{title}: {conversions} conversions that move {moved_bytes:,} bytes")
    used = {"trans_data"}
    for side in laid_out_graphs.values():
        used |= {kind.layout for kind in side.types.values()}
    looks = {k: v for k, v in COLOURS.items() if k in used}
    st.key(fig, looks, loc="outside lower center", ncols=4)
    return st.finish(fig, alt=f"Operators of {name} from first to last. {'; '.join(alt_parts)}.")


# -- memory plans as rectangles, time across and address up ----------------------------------------
CHIP = "Ascend910A"
NETWORKS = {"resnet50": 8, "bert_base": 8, "unet": 1}
"""Networks of the figures, and the batch each is drawn for."""
RULES = ("greedy-by-start", "greedy-by-size")
SHORT_TASKS = 2
"""A result that only the next task reads lives this long."""
TIME_LIMIT_S = 60.0
READ_NEXT: dict[str, Any] = {"facecolor": st.SKY, "edgecolor": st.INK, "hatch": ""}
READ_LATER: dict[str, Any] = {"facecolor": st.ORANGE, "edgecolor": st.INK, "hatch": "//"}


@cache
def network(name: str, batch: int) -> Compiled:
    """Return a network of the zoo as kernels of the Ascend910A, compiled once."""
    return compile_graph(zoo.build(name, batch=batch), load_chip(CHIP))


# -- plans as rectangles --------------------------------------------------------------------------
def fig_plans(buffers: Sequence[Buffer], plans: Mapping[str, Plan]) -> st.LabFigure:
    """Draw small plans of the same buffers side by side, every buffer with its id."""
    fig, axes = st.new_figure(ncols=len(plans), height_in=2.6, sharey=True)
    for ax, (name, plan) in zip(st.panels(axes), plans.items(), strict=True):
        _draw(ax, buffers, plan, labels=True)
        ax.set(title=f"{name}: {plan.height_bytes}", xlabel="task")
    top = max(plan.height_bytes for plan in plans.values())
    st.panels(axes)[0].set(ylabel="address (bytes)", ylim=(0, top * 1.03))
    bound = next(iter(plans.values())).lower_bound_bytes
    alt_parts = []
    for name, plan in plans.items():
        places = ", ".join(f"{b.id} at {plan.offsets[b.id]}" for b in buffers)
        alt_parts.append(f"{name} needs {plan.height_bytes}: {places}")
    alt = f"{len(buffers)} buffers, time by address; {bound} bytes live at the peak. "
    return st.finish(fig, alt=f"{alt}{'; '.join(alt_parts)}.")


def fig_arenas() -> st.LabFigure:
    """Draw the plans of `NETWORKS` in rows, one column each of `RULES`, to one scale."""
    fig, axes = st.new_figure(len(NETWORKS), len(RULES), 0.7 + 1.55 * len(NETWORKS))
    grid = np.reshape(axes, (len(NETWORKS), -1))
    alt_parts = []
    for row, (name, batch) in enumerate(NETWORKS.items()):
        compiled = network(name, batch)
        buffers = buffers_of(compiled)
        plans = [_planned(compiled, method, in_place=False) for method in RULES]
        top = max(plan.height_bytes for plan in plans) / 2**20
        for column, (method, plan) in enumerate(zip(RULES, plans, strict=True)):
            ax = grid[row, column]
            _draw(ax, buffers, plan, unit=2**20)
            ax.set_ylim(0, top * 1.22)
            ax.set_title(f"{name}, {method}" if row == 0 or not column else method, fontsize=8)
            ax.text(0.98, 0.97, _verdict(plan), transform=ax.transAxes, ha="right", va="top")
            alt_parts.append(f"{name} of batch {batch} by {method} {_verdict(plan)}")
        grid[row, 0].set_ylabel("address (MiB)")
    for ax in grid[-1]:
        ax.set_xlabel("task")
    _legend(fig)
    summary = "; ".join(alt_parts)
    return st.finish(
        fig, alt=f"Heights of plans, and how far above the most live bytes: {summary}."
    )


def fig_arena(
    name: str = "resnet50", method: str = "greedy-by-size", batch: int = 8, in_place: bool = False
) -> st.LabFigure:
    """Draw one network's plan large; raises `InputError` for an unknown method, and as `build`."""
    compiled = network(name, batch)
    plan = _planned(compiled, method, in_place=in_place)
    fig, ax = st.new_figure(height_in=3.6)
    _draw(ax, buffers_of(compiled), plan, unit=2**20)
    ax.set(ylim=(0, plan.height_bytes / 2**20 * 1.05), xlabel="task", ylabel="address (MiB)")
    sharing = "in place where allowed" if in_place else "nothing in place"
    ax.set_title(f"{name}, batch {batch}, {method}, {sharing}: {_verdict(plan)}")
    _legend(fig)
    bound = plan.lower_bound_bytes / 2**20
    alt = (
        f"{len(plan.offsets)} activations of {name}, batch {batch}, placed by {method}, {sharing}: "
        f"{_verdict(plan)}. At the peak {bound:.1f} MiB are alive."
    )
    return st.finish(fig, alt=alt)


def _planned(compiled: Compiled, method: str, in_place: bool) -> Plan:
    """Return the plan of a network's activations by a method."""
    return plan_network(compiled, method, in_place=in_place, time_limit_s=TIME_LIMIT_S)


def _verdict(plan: Plan) -> str:
    """Return a plan's height, and how far it is above the lower bound."""
    above_bound = f"+{plan.gap:.0%}" if plan.height_bytes > plan.lower_bound_bytes else "the bound"
    return f"{plan.height_bytes / 2**20:.1f} MiB, {above_bound}"


def _legend(fig: st.LabFigure) -> None:
    """Explain the two kinds of rectangles and the line."""
    line = Line2D([], [], color=st.VERMILLION, linestyle="--", linewidth=1.4)
    line.set_label("most live bytes")
    looks = {"read by the next task only": READ_NEXT, "waits longer": READ_LATER}
    st.key(fig, looks, line, loc="outside lower center", ncols=3)


def _draw(
    ax: Axes, buffers: Sequence[Buffer], plan: Plan, unit: int = 1, labels: bool = False
) -> None:
    """Put the rectangles of a plan on the axes, and the lower bound as a dashed line."""
    for b in buffers:
        low = plan.offsets[b.id] / unit
        size = b.size_bytes / unit
        look = READ_LATER if b.upper - b.lower > SHORT_TASKS else READ_NEXT
        line = 0.9 if labels else 0.4
        st.box(ax, b.lower, low, b.upper - b.lower, size, linewidth=line, **look)
        if labels:
            paper = {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 1.0}
            x = (b.lower + b.upper) / 2
            y = low + size / 2
            st.put(ax, x, y, str(b.id), fontsize=9, bbox=paper)
    ax.axhline(plan.lower_bound_bytes / unit, color=st.VERMILLION, linestyle="--", linewidth=1.4)
    ax.set_xlim(min(b.lower for b in buffers), max(b.upper for b in buffers))


# -- what L2 makes of it --------------------------------------------------------------------------
def fig_arena_traffic(
    sizes: Sequence[float], moved: Mapping[str, Sequence[float]], heights: Mapping[str, float]
) -> st.LabFigure:
    """Draw MiB through the memory interface per plan, over the MiB of L2.

    A dotted line stands where L2 is as large as the plan is high; `heights` may miss plans.
    """
    fig, ax = st.new_figure(height_in=3.3)
    for i, (name, values) in enumerate(moved.items()):
        colour = st.PALETTE[i % len(st.PALETTE)]
        ax.plot(sizes, values, color=colour, marker="osD^v"[i % 5], label=name)
        if name in heights:
            ax.axvline(heights[name], color=colour, linestyle=":", linewidth=1.2)
            top = ax.get_xaxis_transform()
            ax.text(heights[name], 1.0, f"{heights[name]:.0f}", transform=top, ha="center")
    ax.set(xticks=sizes, xlabel="size of L2 (MiB)", ylabel="to and from memory (MiB)")
    ax.set_ylim(0)
    ax.legend(loc="lower left")
    high = {name: f", {size:.1f} MiB high" for name, size in heights.items()}
    series = {name: ", ".join(f"{value:.0f}" for value in values) for name, values in moved.items()}
    summary = "; ".join(f"{name} {values}{high.get(name, '')}" for name, values in series.items())
    steps = ", ".join(f"{size:g}" for size in sizes)
    return st.finish(fig, alt=f"MiB to and from memory for an L2 of {steps} MiB: {summary}.")
