"""Figures of schedules: a formula in three loop nests, tails of split loops, five choices."""

from collections.abc import Callable, Mapping
from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from ascend_lab import errors
from ascend_lab.lab.figures import nests as ns, style as st
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl import Schedule, Tensor, boxes, stages
from ascend_lab.operators.dsl.run import steps

# -- formulas, each in three loop nests scheduled with the primitives of the DSL -------------------
TILE_ROWS = 16
"""Rows of a tile: 16 numbers of 2 bytes are one 32-byte block, so results stay aligned."""
PIECE = 512
"""Columns of a piece; the slots of tiles of pieces leave UB room for the arithmetic."""
SHORT_ROWS = (16384, 1024)
LONG_ROWS = (512, 32768)
"""Rows and columns of the two matrices on which the three nests are compared."""
Operator = Callable[[Tensor], Tensor]
Runs = dict[str, sim.KernelTimeline | None]


def three_nests(y: Tensor, chip_name: str) -> dict[str, Callable[[], Schedule]]:
    """Return three ways to schedule `y`, a formula of elementwise steps and folds over rows.

    Name -> a function that returns the schedule: a nest for every operation; one nest that holds
    whole rows in UB; one nest that goes through every row in pieces, once per fold and once more.
    """
    return {
        "a nest per operation": lambda: per_operation(y, chip_name),
        "one nest, whole rows": lambda: whole_rows(y, chip_name),
        "one nest, rows in pieces": lambda: rows_in_pieces(y, chip_name),
    }


def _start(y: Tensor, chip_name: str, *, keep: bool) -> Schedule:
    """Inline copies and casts; unless `keep`, elementwise steps too that one other step reads."""
    s = te.create_schedule(y, load_chip(chip_name))
    for name in [x.name for x in s.state.stages if not x.output]:
        stage = s.state.stage(name)
        reader_operands = [
            r for x in s.state.readers(name) if isinstance(x, stages.Stage) for r in x.reads
        ]
        has_one_reader = len([r for r in reader_operands if r.source == name]) == 1
        only_copies = getattr(stage.expr, "op", "vcopy") in ("vcopy", "vconv")
        if not stage.fold and (only_copies or (has_one_reader and not keep)):
            s = te.inline(s, name)
    return s


def _on_cores(s: Schedule, name: str) -> Schedule:
    """Share the rows of a stage over all cores and walk them in tiles of TILE_ROWS."""
    stage = s.state.stage(name)
    rows = stage.axes[0]
    tiles = -(-rows.extent // (TILE_ROWS * s.chip.core_count))
    s = te.split(s, name, rows.name, tiles * TILE_ROWS)
    s = te.split(s, name, f"{rows.name}_i", TILE_ROWS)
    return te.bind(s, name, f"{rows.name}_o")


def _tile(s: Schedule, name: str) -> str:
    """Return the loop over tiles of rows that `_on_cores` made."""
    return f"{s.state.stage(name).axes[0].name}_i_o"


def per_operation(y: Tensor, chip_name: str) -> Schedule:
    """Return the schedule in which every operation loads from GM and stores to GM.

    before: the stages as written   after: for each stage `cores: for tiles: load, compute, store`
    """
    s = _start(y, chip_name, keep=True)
    for stage in s.state.stages:
        if isinstance(stage, stages.Stage):
            s = _in_pieces(_on_cores(s, stage.name), stage.name, 2 * PIECE)
            s = te.double_buffer(s, stage.name)
    return s


def whole_rows(y: Tensor, chip_name: str) -> Schedule:
    """Return the schedule that loads a tile of whole rows once and does everything with it in UB.

    before: the stages as written   after: `cores: for tiles: load, all operations, store`
    """
    s = _start(y, chip_name, keep=False)
    name = s.outputs[0].label
    s = _on_cores(s, name)
    s = te.vectorise(s, name, f"{_tile(s, name)[:-2]}_i")
    for stage in reversed(s.state.stages[:-1]):
        s = te.compute_at(s, stage.name, name, _tile(s, name))
    first = s.state.stages[0].name
    return te.double_buffer(te.double_buffer(s, first), name)


def rows_in_pieces(y: Tensor, chip_name: str) -> Schedule:
    """Return the schedule that walks a tile of rows piece by piece, once for each fold and result.

    Elementwise steps are computed wherever they are read, again each time.
    before: the stages as written
    after: `cores: for tiles: (for pieces: load, fold), ..., for pieces: load, compute, store`
    """
    s = _start(y, chip_name, keep=False)
    for stage in s.state.stages:
        if isinstance(stage, stages.Stage) and not stage.fold and not stage.output:
            s = te.inline(s, stage.name)
    name = s.outputs[0].label
    s = _in_pieces(_on_cores(s, name), name, PIECE)
    folds = [x.name for x in s.state.stages[:-1]]
    for fold in reversed(folds):
        s = te.compute_at(_in_pieces(s, fold, PIECE), fold, name, _tile(s, name))
    return te.double_buffer(s, folds[-1]) if folds else s


def _in_pieces(s: Schedule, name: str, piece: int) -> Schedule:
    """Put a loop over pieces of the columns around the last loop over rows; both are one tile."""
    stage = s.state.stage(name)
    column = (*stage.axes, *stage.reduce)[-1]
    *outer, row = (x.name for x in stage.loops if x.root == stage.axes[0].name)
    if column.extent > piece:
        s = te.split(s, name, column.name, piece)
        s = te.reorder(s, name, *outer, f"{column.name}_o", row, f"{column.name}_i")
    return te.vectorise(s, name, row)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of every row: y_ij = exp(x_ij - max_k x_ik) / sum_k exp(x_ik - max)."""
    top = te.broadcast(te.reduce_max(x, -1, keepdims=True), x.shape)
    e = te.renamed(te.vexp(te.renamed(te.vsub(x, top), "d")), "e")
    total = te.broadcast(te.reduce_sum(e, -1, keepdims=True), x.shape)
    return te.renamed(te.vdiv(e, total), "y")


def rms_norm(x: Tensor) -> Tensor:
    """Return every row over the root of its mean square: y = x / sqrt(mean(x^2) + 1e-5)."""
    wide = te.cast_to(x, "fp32")
    mean = te.vmuls(te.reduce_sum(te.vmul(wide, wide), -1, keepdims=True), 1 / x.shape[-1])
    scale = te.broadcast(te.vrsqrt(te.vadds(mean, 1e-5)), x.shape)
    return te.renamed(te.cast_to(te.vmul(wide, scale), x.dtype), "y")


EXPRESSIONS: Mapping[str, Operator] = {
    "softmax": softmax,
    "rms norm": rms_norm,
    "sigmoid": lambda x: te.renamed(te.vrec(te.vadds(te.vexp(te.vmuls(x, -1.0)), 1.0)), "y"),
    "sum of rows": lambda x: te.renamed(te.reduce_sum(x, -1), "y"),
    "sum of columns": lambda x: te.renamed(te.reduce_sum(x, 0), "y"),
}


def fig_three_nests(operator: Operator, title: str = "") -> st.LabFigure:
    """Draw the three nests of an operator over 16,384 rows of 1,024 numbers."""
    chip = "Ascend910A"
    y = operator(te.placeholder(SHORT_ROWS, name="x"))
    nests = {name: ns.nest_of(make()) for name, make in three_nests(y, chip).items()}
    heights = [ns.height_of(nest) for nest in nests.values()]
    # the long nest stands on the left, the two short ones above each other on the right
    ratios = [max(height, 4.0) for height in heights[1:]]
    fig, axes = st.new_figure(2, 2, 0.8 + 0.21 * sum(ratios), height_ratios=ratios)
    grid = axes[0, 0].get_gridspec()
    axes[0, 0].remove()
    axes[1, 0].remove()
    places = [fig.add_subplot(grid[:, 0]), axes[0, 1], axes[1, 1]]
    rows = [sum(ratios), *ratios]
    for letter, ax, (name, nest), height in zip("abc", places, nests.items(), rows, strict=True):
        ns.draw_nest(ax, nest, rows=height)
        ax.set_title(f"({letter}) {name}", loc="left", pad=3, fontsize=8.5)
    st.pipe_legend(fig, ["MTE2", "V", "MTE3"], loc="outside lower center", ncols=3)
    if title:
        fig.suptitle(title, fontsize=10.5)
    summary = "; ".join(
        f"({letter}) {name}: {len(nest)} nests" if len(nest) > 1 else f"({letter}) {name}"
        for letter, (name, nest) in zip("abc", nests.items(), strict=True)
    )
    return st.finish(fig, alt=f"Three loop nests of one formula on the {chip}: {summary}.")


def fig_nest_costs(operator: Operator) -> st.LabFigure:
    """Draw bytes per element and cycles of the three nests, for short rows and for long ones."""
    chip = "Ascend910A"
    shapes = (SHORT_ROWS, LONG_ROWS)
    runs = [_runs(operator, chip, shape) for shape in shapes]
    fig, (bytes_ax, cycles_ax) = st.new_figure(ncols=2, height_in=1.9)
    elements = shapes[0][0] * shapes[0][1]
    values = [ns.gm_bytes(r) / elements if r else 0.0 for r in runs[0].values()]
    for row, value in enumerate(values):
        bytes_ax.barh(row, value, height=0.45, facecolor=st.BLUE, edgecolor=st.INK, linewidth=0.6)
        bytes_ax.text(value + 0.02 * max(values), row, f"{value:.0f}", va="center", fontsize=8)
    bytes_ax.set_title("bytes per element", loc="left", pad=3, fontsize=8.5)
    _letters(bytes_ax, len(values), 1.15 * max(values))
    _bars_of_cycles(cycles_ax, runs, shapes)
    parts = []
    for by_nest, (rows, columns) in zip(runs, shapes, strict=True):
        costs = []
        for name, run in by_nest.items():
            moved = ns.gm_bytes(run) / rows / columns if run else 0.0
            cost = f"{moved:.0f} bytes per element, {run.cycles} cycles" if run else "does not fit"
            costs.append(f"{name} {cost}")
        parts.append(f"{rows} rows of {columns}: {'; '.join(costs)}")
    alt = f"Bytes and cycles of the three nests on the {chip}. " + ". ".join(parts) + "."
    return st.finish(fig, alt=alt)


def _runs(operator: Operator, chip: str, shape: tuple[int, int]) -> Runs:
    """Time the three nests; None for one whose tiles do not fit."""
    timelines: Runs = {}
    for name, make in three_nests(operator(te.placeholder(shape, name="x")), chip).items():
        try:
            timelines[name] = sim.simulate_kernel(te.lower(make()), load_chip(chip))
        except errors.CapacityError:
            timelines[name] = None
    return timelines


def _bars_of_cycles(ax: Any, runs: list[Runs], shapes: tuple[tuple[int, int], ...]) -> None:
    """Draw the cycles of each nest, one bar for each shape."""
    looks = ((st.ORANGE, ""), (st.SKY, "///"))
    top = max(r.cycles for runs_of_shape in runs for r in runs_of_shape.values() if r)
    height = 0.68 / len(runs)
    for number, (runs_of_shape, shape) in enumerate(zip(runs, shapes, strict=True)):
        (colour, hatch) = looks[number % len(looks)]
        label = f"rows of {shape[1]:,}"
        for row, run in enumerate(runs_of_shape.values()):
            position = row + (number - (len(runs) - 1) / 2) * height
            if run is None:
                ax.text(0.01 * top, position, "whole rows do not fit", va="center", fontsize=7.5)
                continue
            look = {"facecolor": colour, "hatch": hatch, "edgecolor": st.INK, "linewidth": 0.6}
            ax.barh(position, run.cycles, height=height, label=label, **look)
            text = f"{run.cycles / 1000:,.0f}"
            ax.text(run.cycles + 0.02 * top, position, text, va="center", fontsize=8)
            label = ""
    ax.set_title("thousand cycles", loc="left", pad=3, fontsize=8.5)
    ax.legend(loc="upper left", bbox_to_anchor=(-0.02, 0.0), fontsize=7.5, borderpad=0.2)
    _letters(ax, len(runs[0]), 1.22 * top)


def _letters(ax: Any, count: int, x_end: float) -> None:
    """Name the rows (a), (b), (c) and hide the x axis."""
    ax.set_yticks(range(count), [f"({letter})" for letter in "abc"[:count]])
    ax.set(ylim=(count - 0.45, -0.55), xlim=(0, x_end), xticks=[])
    ax.spines["bottom"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def fig_expression(
    expression: str = "softmax", chip: str = "Ascend910A", rows: int = 4096, columns: int = 1024
) -> st.LabFigure:
    """Draw the default nest of a named expression and the share of its time each pipe is busy."""
    y = EXPRESSIONS[expression](te.placeholder((rows, columns), name="x"))
    schedule = te.auto_schedule(y, load_chip(chip))
    nest = ns.nest_of(schedule)
    run = sim.simulate_kernel(te.lower(schedule), load_chip(chip))
    per_element = ns.gm_bytes(run) / (rows * columns)
    rows_drawn = max(14.0, ns.height_of(nest))
    fig, (nest_ax, pipes_ax) = st.new_figure(ncols=2, height_in=0.2 + 0.24 * rows_drawn)
    ns.draw_nest(nest_ax, nest, rows=rows_drawn)
    nest_ax.set_title(f"{expression} on {chip}", loc="left", pad=3)
    pipes = [p for p in st.PIPE_STYLE if p in {*ns.pipes_in(nest), *run.busy_cycles}]
    shares = [100 * run.busy_cycles.get(p, 0) / run.cycles for p in pipes]
    for row, (pipe, share) in enumerate(zip(pipes, shares, strict=True)):
        pipes_ax.barh(row, share, height=0.62, **st.PIPE_STYLE[pipe].patch_args())
        pipes_ax.text(share + 1.5, row, f"{share:.0f}%", va="center", fontsize=8)
    pipes_ax.set_yticks(range(len(pipes)), pipes)
    pipes_ax.set(ylim=(len(pipes) - 0.4, -0.6), xlim=(0, 112))
    pipes_ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
    pipes_ax.set_xlabel("busy share of the kernel's cycles")
    title = f"{run.cycles:,} cycles, {per_element:.1f} bytes per element"
    pipes_ax.set_title(title, loc="left", pad=3)
    summary = ", ".join(f"{p} {s:.0f}%" for p, s in zip(pipes, shares, strict=True))
    alt = (
        f"Default nest of {expression} on {rows} x {columns} on the {chip}: {len(run.phases)} "
        f"phases, {run.cycles} cycles, {per_element:.1f} bytes per element. Busy: {summary}."
    )
    return st.finish(fig, alt=alt)


# -- tails of split loops, and a schedule put together from five choices ---------------------------
def fig_tails(n: int = 22, factor: int = 8) -> st.LabFigure:
    """Draw the parts of a loop of n steps split by `factor`, with tails "cut" and "guard"."""
    fig, ax = st.new_figure(height_in=1.7)
    alt_parts = []
    x = te.placeholder((n,), name="x")
    y = te.compute((n,), lambda i: x[i] * 2.0, name="y")
    for line, tail in enumerate(("cut", "guard")):
        s = te.split(te.create_schedule(y, load_chip("Toy")), "y", "i", factor, tail=tail)
        parts = list(steps(s.state.stage("y").loops[0], boxes.Range(isa.Affine(), n)))
        ranges = [(part.start.const, part.count) for part in parts]
        repeated = sum(count for _, count in ranges) - n
        for number, (start, count) in enumerate(ranges):
            face, ink = (st.SKY, st.INK) if number % 2 else (st.BLUE, "#FFFFFF")
            bar_y = 2.4 * line
            repeated_here = 0
            if repeated and number == len(ranges) - 1:  # the last part, moved back
                face, ink = (st.ORANGE, st.INK)
                bar_y += 1.0
                repeated_here = repeated
            ax.barh(bar_y, count, 0.8, start, facecolor=face, edgecolor=st.INK, linewidth=0.8)
            # the middle of what is not hatched
            middle = start + repeated_here + (count - repeated_here) / 2
            st.put(ax, middle, bar_y, f"{count} from {start}", color=ink)
        if repeated:
            shared = {"facecolor": "none", "edgecolor": st.INK, "hatch": "////", "linewidth": 0}
            ax.barh(2.4 * line + 0.5, repeated, 1.8, n - factor, **shared)
        counts = ", ".join(str(count) for _, count in ranges)
        alt_parts.append(f"{tail}: parts of {counts}, {repeated} elements computed twice")
    ax.set_yticks([0, 2.9], ["cut", "guard"])
    ax.set(ylim=(4.1, -0.7), xlim=(-0.05, n + 0.05))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel(f"element of y, n = {n}, split by {factor} (hatched: computed twice)")
    return st.finish(fig, alt=f"A loop of {n} steps split by {factor}. " + "; ".join(alt_parts))


# -- choices -------------------------------------------------------------------------------------
def add_relu(n: int) -> te.Tensor:
    """Return y = relu(a + b) for vectors of n half-precision numbers."""
    a = te.placeholder((n,), name="a")
    b = te.placeholder((n,), name="b")
    return te.renamed(te.vrelu(te.vadd(a, b)), "y")


def chosen(
    chip: Chip, n: int, *, inline: bool, tile: int, tail: str, slots: int, cores: int
) -> Schedule:
    """Return the schedule of relu(a + b) that five choices make; the share of a core is cut."""
    s = te.create_schedule(add_relu(n), chip)
    if inline:
        s = te.inline(s, "vadd")
    for name in [stage.name for stage in s.state.stages]:
        loop = "i"
        if cores > 1:
            s = te.split(s, name, loop, -(-n // (128 * cores)) * 128)
            s = te.bind(s, name, "i_o")
            loop = "i_i"
        s = te.split(s, name, loop, tile, tail=tail)
        s = te.double_buffer(s, name, slots)
    return s


def fig_choices(
    inline: bool = False, tile: int = 1024, tail: str = "cut", slots: int = 1, cores: int = 1
) -> st.LabFigure:
    """Draw the nest of relu(a + b) under five choices, and its cycles beside the default's."""
    n = 1_000_000
    chip = "Ascend910B2"
    machine = load_chip(chip)
    schedule = chosen(machine, n, inline=inline, tile=tile, tail=tail, slots=slots, cores=cores)
    run = sim.simulate_kernel(te.lower(schedule), machine)
    default_run = sim.simulate_kernel(te.lower(te.auto_schedule(add_relu(n), machine)), machine)
    fig, (nest_ax, cycles_ax) = st.new_figure(1, 2, 2.9, width_ratios=(3, 2))
    nest = ns.compact(schedule)
    ns.draw_nest(nest_ax, nest, rows=max(ns.height_of(nest), 11.0), size=8)
    nest_ax.set_xlim(-0.01, 1.01)
    bars = {"yours": (run.cycles, st.BLUE), "default": (default_run.cycles, st.GREY)}
    for place, (name, (cycles, colour)) in enumerate(bars.items()):
        cycles_ax.plot([cycles], [place], "o", color=colour, markersize=9, markeredgecolor=st.INK)
        cycles_ax.text(1200, place - 0.3, f"{name}: {cycles:,} cycles", fontsize=8, va="center")
    cycles_ax.set(xscale="log", xlim=(1000, 1e7), ylim=(1.5, -0.7), yticks=[])
    cycles_ax.grid(axis="x")
    cycles_ax.set_xlabel(f"cycles; {ns.gm_bytes(run) / 1e6:.2f} MB cross the GM interface")
    text = (
        f"relu(a + b) on {n:,} elements of {chip}, inline {inline}, tile {tile}, tail {tail}, "
        f"{slots} slots, {cores} cores: {run.cycles:,} cycles and {ns.gm_bytes(run):,} bytes "
        f"to and from GM; the default schedule takes {default_run.cycles:,} cycles"
    )
    return st.finish(fig, alt=text)
