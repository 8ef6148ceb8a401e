"""Loop nests drawn as boxes in boxes, read off a completed schedule."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from ascend_lab import dsl as te
from ascend_lab.chip import load_chip
from ascend_lab.dsl import Schedule, Tensor
from ascend_lab.dsl.schedule import complete, loop_count, roots
from ascend_lab.dsl.stages import Fixed, Leaf, Stage, State
from ascend_lab.dsl.tensor import Call, Expr, Read
from ascend_lab.lab.figures.style import GREY, INK, PIPE_STYLE

SHADES = ("#F1F1EC", "#E4E4DD", "#D6D6CE", "#C8C8BF")
INFIX = {"vadd": "+", "vadds": "+", "vsub": "−", "vmul": "×", "vmuls": "×", "vdiv": "/"}


@dataclass(frozen=True, slots=True)
class Work:
    """One statement of a nest: the pipe that does it and what it does; `note` stands at its end."""

    pipe: str
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Box:
    """A loop of a nest, or the cores that share one: its heading and what is inside."""

    heading: str
    inside: "tuple[Box | Work, ...]"
    note: str = ""


Items = tuple[Box | Work, ...]


def nest_of(schedule: Schedule) -> Items:
    """Return the nests of a schedule, one box per phase if there are several."""
    found: list[Box | Work] = []
    for root in roots(schedule.state):
        if isinstance(root, Fixed):
            found.append(Work("MTE2", f"{root.kind} (by hand)"))
        else:
            state = complete(schedule.state, root.name)
            ways = partial(_statement, state), partial(_loop, state)
            found += walked(state, state.stage(root.name), *ways)
    return tuple(found)


def walked(
    state: State,
    stage: Stage,
    say: Callable[[Stage], Work],
    around: Callable[[Stage, Leaf, Items], Items],
) -> Items:
    """Return a stage from the inside out: statement, loops with the tiles attached, cores."""

    def tiles(*places: str) -> Items:
        wanted = {(stage.name, place) for place in places}
        found = [s for s in state.stages if isinstance(s, Stage) and s.attach in wanted]
        return tuple(item for guest in found for item in walked(state, guest, say, around))

    front = stage.loops[: loop_count(state, stage)]
    items: Items = (say(stage),)
    for leaf in reversed([x for x in front if x.name not in stage.bound]):
        items = around(stage, leaf, (*tiles(leaf.name), *items))
    items = (*tiles("", *stage.bound), *items)
    for leaf in reversed([x for x in front if x.name in stage.bound]):
        items = around(stage, leaf, items)
    return items


def _loop(state: State, stage: Stage, leaf: Leaf, inside: Items) -> Items:
    """Return a loop as a box; all that the cores share is one box."""
    bound = [x for x in stage.loops if x.name in stage.bound]
    if leaf in bound[1:] or (leaf.extent == 1 and leaf not in bound):
        return inside
    if leaf in bound:
        cores = math.prod(x.extent for x in bound)
        return (Box(f"{cores} cores" if cores > 1 else "1 core", inside),)
    stages = [s for s in state.stages if isinstance(s, Stage)]
    flat = all(len(s.axes) + len(s.reduce) == 1 for s in stages)
    what = "elements" if flat else "rows" if leaf.root == stage.axes[0].name else "columns"
    return (Box(f"{leaf.extent} × {leaf.width:,} {what}", inside),)


def _statement(state: State, stage: Stage) -> Work:
    """Return what a stage does: a load, a store, or a formula on the vector unit."""
    source = stage.sources[0] if stage.is_copy else ""
    if stage.scope == "GM":
        return Work("MTE3", f"store {_name(stage.name)}")
    if source and getattr(state.find(source), "scope", "GM") == "GM":
        return Work("MTE2", f"load {_name(source)}")
    text = formula(stage.expr)
    return Work("V", f"{stage.fold}({text})" if stage.fold else f"{_name(stage.name)} = {text}")


def _name(name: str) -> str:
    return re.sub(r"_ub(_\d+)?$", "", name).removeprefix("reduce_")


def formula(expr: Expr, inside: bool = False) -> str:
    """Return an expression as a short formula without indices and casts: exp(x − max)."""
    if isinstance(expr, Read):
        return _name(expr.source)
    assert isinstance(expr, Call)
    if expr.op in ("vconv", "vcopy"):
        return formula(expr.args[0], inside)
    args = [formula(a, expr.op in INFIX) for a in expr.args]
    if expr.number is not None:
        args.append(f"{expr.number:.3g}".replace("-", "−"))
    if expr.op in INFIX:
        text = f" {INFIX[expr.op]} ".join(args)
        return f"({text})" if inside else text
    return f"{expr.op.removeprefix('v')}({', '.join(args)})"


def pipes_in(items: Sequence[Box | Work]) -> Iterator[str]:
    """Yield the pipe of every statement, top to bottom."""
    for item in items:
        if isinstance(item, Work):
            yield item.pipe
        else:
            yield from pipes_in(item.inside)


def height_of(items: Sequence[Box | Work]) -> float:
    """Return the rows a drawn nest takes: one per statement, heading and a margin per box."""
    return sum(1.0 if isinstance(i, Work) else 1.35 + height_of(i.inside) for i in items)


def draw_nest(
    ax: Any,
    items: Sequence[Box | Work],
    *,
    rows: float = 0.0,
    size: float = 7.5,
    swatch: float = 0.075,
) -> None:
    """Draw a nest into empty axes, top to bottom; `rows` keeps several of them at one scale."""
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=(max(rows, height_of(items)), 0))
    _draw(ax, items, 0.0, (0.0, 1.0), 0, size, swatch)


def _draw(
    ax: Any,
    items: Sequence[Box | Work],
    top: float,
    sides: tuple[float, float],
    level: int,
    size: float,
    swatch: float,
) -> float:
    """Draw items from `top` down between two sides; return where they end."""
    left, right = sides
    for item in items:
        if isinstance(item, Work):
            _draw_work(ax, item, top, sides, size, swatch)
            top += 1.0
            continue
        end = top + 1.15 + height_of(item.inside)
        shade = SHADES[min(level, len(SHADES) - 1)]
        place = (left, top + 0.06), right - left, end - top
        ax.add_patch(Rectangle(*place, facecolor=shade, edgecolor=GREY, linewidth=0.7))
        ax.text(left + swatch / 4, top + 0.6, item.heading, va="center", fontsize=size, color=INK)
        _draw_note(ax, item.note, right, top + 0.6, size)
        inner = (left + swatch * 0.47, right - swatch * 0.27)
        _draw(ax, item.inside, top + 1.05, inner, level + 1, size, swatch)
        top = end + 0.2
    return top


def _draw_work(
    ax: Any, item: Work, top: float, sides: tuple[float, float], size: float, swatch: float
) -> None:
    """Draw one statement: a swatch of its pipe, and its text on a tint of the same colour."""
    left, right = sides
    style = PIPE_STYLE[item.pipe]
    low, height = top + 0.07, 0.86
    tint = [1 - 0.22 * (1 - c) for c in to_rgb(style.colour)]
    whole = Rectangle(
        (left, low), right - left, height, facecolor=tint, edgecolor=INK, linewidth=0.6
    )
    ax.add_patch(whole)
    ax.add_patch(Rectangle((left, low), swatch, height, **style.patch_args()))
    ax.text(left + swatch * 4 / 3, top + 0.52, item.text, va="center", fontsize=size, color=INK)
    _draw_note(ax, item.note, right, top + 0.52, size)


def _draw_note(ax: Any, note: str, right: float, middle: float, size: float) -> None:
    """Write a note in smaller type at the right end of a box."""
    if note:
        style = {"va": "center", "ha": "right", "fontsize": size - 1, "color": "#555555"}
        ax.text(right - 0.012, middle, note, **style)


# -- one formula in three loop nests, scheduled with the primitives of the DSL; and some formulas --
TILE_ROWS = 16
"""Rows of a tile: 16 numbers of 2 bytes are one 32-byte block, so results stay aligned."""

PIECE = 512
"""Columns of a piece; the slots of tiles of pieces leave UB room for the arithmetic."""

Operator = Callable[[Tensor], Tensor]


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
        reads = [r for x in s.state.readers(name) if isinstance(x, Stage) for r in x.reads]
        once = len([r for r in reads if r.source == name]) == 1
        moves = getattr(stage.expr, "op", "vcopy") in ("vcopy", "vconv")
        if not stage.fold and (moves or (once and not keep)):
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
        if isinstance(stage, Stage):
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
        if isinstance(stage, Stage) and not stage.fold and not stage.output:
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


def _sigmoid(x: Tensor) -> Tensor:
    return te.renamed(te.vrec(te.vadds(te.vexp(te.vmuls(x, -1.0)), 1.0)), "y")


EXPRESSIONS: Mapping[str, Operator] = {
    "softmax": softmax,
    "rms norm": rms_norm,
    "sigmoid": _sigmoid,
    "sum of rows": lambda x: te.renamed(te.reduce_sum(x, -1), "y"),
    "sum of columns": lambda x: te.renamed(te.reduce_sum(x, 0), "y"),
}
