"""The graph of an expression: tensors as boxes, full ones above, reduced ones below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.patches import FancyArrowPatch, Rectangle

from ascend_lab.dsl import Tensor
from ascend_lab.dsl.expr import Call
from ascend_lab.dsl.tensor import Compute, topological, unique_names
from ascend_lab.figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    LabFigure,
    finish,
    new_figure,
    styled,
)

FORMAT_EDGE = {"fp16": (BLUE, "-"), "bf16": (BLUE, ":"), "fp32": (ORANGE, "-")}
HALF_WIDTH, HALF_HEIGHT = 0.43, 0.22


def operation_of(tensor: Tensor) -> str:
    """Return what computes a tensor in one word: input, max, sum, vexp, broadcast, ..."""
    body = tensor.body
    if body is None:
        return "input"
    if not isinstance(body, Compute):
        return body.kind
    if body.fold:
        return body.fold
    return tensor.hint or (body.expr.op if isinstance(body.expr, Call) else "copy")


def sources_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors a tensor reads; through reshapes, which change no element."""
    found: list[Tensor] = []
    for source in tensor.inputs:
        found += sources_of(source) if source.hint == "reshape" else [source]
    return tuple(found)


@styled
def fig_graph(outputs: Tensor | Sequence[Tensor]) -> LabFigure:
    """Draw the tensors an expression consists of, left to right in the order they are needed.

    One line of boxes per size, the largest on top; the edge of a box is coloured by number format.
    Reshapes are left out.
    """
    wanted = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    tensors = [t for t in topological(wanted) if t.hint != "reshape" or t in wanted]
    names = unique_names(topological(wanted))
    place, sizes = _places(tensors)
    fig, ax = new_figure(height_in=0.45 + 0.75 * (1 - min(y for _, y in place.values())))
    ax.set_axis_off()
    ax.set_xlim(-0.55, max(x for x, _ in place.values()) + 0.55)
    ax.set_ylim(min(y for _, y in place.values()) - 0.3, 0.95)
    _edges(ax, tensors, place)
    for tensor in tensors:
        _box(ax, tensor, place[tensor])
    for lane, elements in enumerate(sizes):
        first = next(t for t in tensors if t.elements == elements)
        text: dict[str, Any] = {"fontsize": 7.5, "color": INK, "va": "bottom"}
        ax.text(place[first][0] - HALF_WIDTH, HALF_HEIGHT + 0.06 - lane, _shape(first), **text)
    return finish(fig, alt=_graph_alt(tensors, names))


def _places(tensors: Sequence[Tensor]) -> tuple[dict[Tensor, tuple[float, float]], list[int]]:
    """Return where the boxes stand, and the sizes of the lines from top to bottom."""
    depth: dict[Tensor, int] = {}
    for tensor in tensors:
        depth[tensor] = max((depth[t] + 1 for t in sources_of(tensor)), default=0)
    sizes = sorted({t.elements for t in tensors}, reverse=True)
    place: dict[Tensor, tuple[float, float]] = {}
    for tensor in tensors:
        x, y = float(depth[tensor]), -float(sizes.index(tensor.elements))
        while (x, y) in place.values():
            y -= 0.5
        place[tensor] = x, y
    return place, sizes


def _shape(tensor: Tensor) -> str:
    return " × ".join(f"{n:,}" for n in tensor.shape)


def _edges(ax: Any, tensors: Sequence[Tensor], place: dict[Tensor, tuple[float, float]]) -> None:
    look: dict[str, Any] = {"mutation_scale": 8, "color": GREY, "linewidth": 1.1}
    for tensor in tensors:
        x1, y1 = place[tensor]
        for source in sources_of(tensor):
            x0, y0 = place[source]
            far = y0 == y1 and x1 - x0 > 1
            start = (x0 + 0.3, y0 + HALF_HEIGHT) if far else (x0 + HALF_WIDTH, y0)
            end = (x1 - 0.1, y1 + HALF_HEIGHT) if far else (x1 - HALF_WIDTH, y1)
            bend = f"arc3,rad={-0.42 / math.sqrt(x1 - x0) if far else 0.0:.2f}"
            way = (start, end)
            ax.add_patch(FancyArrowPatch(*way, arrowstyle="-|>", connectionstyle=bend, **look))


def _box(ax: Any, tensor: Tensor, at: tuple[float, float]) -> None:
    colour, line = FORMAT_EDGE.get(tensor.dtype, (GREEN, "-"))
    corner = at[0] - HALF_WIDTH, at[1] - HALF_HEIGHT
    look: dict[str, Any] = {"edgecolor": colour, "linewidth": 1.6, "linestyle": line}
    box = Rectangle(corner, 2 * HALF_WIDTH, 2 * HALF_HEIGHT, zorder=2, facecolor=PAPER, **look)
    ax.add_patch(box)
    word = tensor.label if tensor.body is None else operation_of(tensor)
    text: dict[str, Any] = {"ha": "center", "va": "center", "color": INK, "zorder": 3}
    ax.text(at[0], at[1] + 0.07, word, fontsize=7, **text)
    ax.text(at[0], at[1] - 0.1, tensor.dtype, fontsize=6.5, **text)


def _graph_alt(tensors: Sequence[Tensor], names: dict[Tensor, str]) -> str:
    parts = []
    for tensor in tensors:
        sources = ", ".join(names[t] for t in sources_of(tensor))
        after = f" of {sources}" if sources else ""
        parts.append(
            f"{names[tensor]} ({_shape(tensor)} {tensor.dtype}) is {operation_of(tensor)}{after}"
        )
    return f"A graph of {len(tensors)} tensors: {'; '.join(parts)}."
