"""One formula in three loop nests, scheduled with the primitives of the DSL; and some formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ascend_lab import dsl as te
from ascend_lab.chip import load_chip
from ascend_lab.dsl import Schedule, Tensor
from ascend_lab.dsl.stages import Stage

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
