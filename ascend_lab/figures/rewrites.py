"""Rewriting graphs: a model as an exporter spells it, and what each pass leaves of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from ascend_lab.errors import InputError
from ascend_lab.figures.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    LabFigure,
    finish,
    new_figure,
    styled,
)
from ascend_lab.graph.builder import GraphBuilder, Value
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.passes import DEFAULT, Report, moved_bytes, run_passes
from ascend_lab.graph.zoo import build

EXPORTED = "exported block"
MODELS = (EXPORTED, "resnet50", "mobilenet_v2", "densenet121", "bert_base", "mobilevit_block")
ORDERS = {"default": DEFAULT, "backwards": DEFAULT[::-1]}


# -- a model to rewrite ---------------------------------------------------------------------------
class _Exported(GraphBuilder):
    """Layers spelled out in small operators, constants as tensors, as exporters write them."""

    def scalar(self, number: float) -> Value:
        return self.constant(np.array([number], np.float32), name="number")

    def spelled_norm(self, x: Value, name: str) -> Value:
        """Append a layer norm in nine nodes."""
        mean = self.reduce_mean(x, axis=-1, keepdims=True, name=f"{name}.mean")
        away = self.sub(x, mean, name=f"{name}.away")
        squares = self.pow(away, self.scalar(2.0), name=f"{name}.squares")
        spread = self.reduce_mean(squares, axis=-1, keepdims=True, name=f"{name}.variance")
        root = self.sqrt(
            self.add(spread, self.scalar(1e-5), name=f"{name}.eps"), name=f"{name}.root"
        )
        normal = self.div(away, root, name=f"{name}.normal")
        scaled = self.mul(normal, self.weight(x.shape[-1:], f"{name}.scale"), name=f"{name}.scaled")
        out: Value = self.add(scaled, self.weight(x.shape[-1:], f"{name}.bias"), name=name)
        return out

    def spelled_gelu(self, x: Value, name: str) -> Value:
        """Append the tanh form of GELU in eight nodes."""
        cube = self.mul(self.pow(x, self.scalar(3.0), name=f"{name}.cube"), self.scalar(0.044715))
        inner = self.mul(self.add(x, cube, name=f"{name}.sum"), self.scalar(math.sqrt(2 / math.pi)))
        one = self.add(self.tanh(inner, name=f"{name}.tanh"), self.scalar(1.0), name=f"{name}.one")
        half = self.mul(x, self.scalar(0.5), name=f"{name}.half")
        out: Value = self.mul(half, one, name=name)
        return out

    def spelled_linear(self, x: Value, features: int, name: str) -> Value:
        """Append a product by weights stored transposed, and a bias."""
        stored = self.weight((features, x.shape[-1]), f"{name}.weight")
        weight = self.transpose(stored, perm=(1, 0), name=f"{name}.turned")
        made = self.batch_matmul(x, weight, name=f"{name}.product")
        out: Value = self.add(self.weight((features,), f"{name}.bias"), made, name=name)
        return out

    def split_heads(self, x: Value, heads: int, name: str) -> Value:
        """Append (rows, width) -> (heads, rows, depth)."""
        batch, rows, width = x.shape
        parts = self.reshape(x, shape=(batch, rows, heads, width // heads), name=f"{name}.heads")
        out: Value = self.transpose(parts, perm=(0, 2, 1, 3), name=f"{name}.first")
        return out


def exported_block(length: int = 128, width: int = 256, heads: int = 4) -> Graph:
    """Return one block of a transformer in 61 nodes, as an exporter of models writes it."""
    net = _Exported("exported block")
    x = net.input("x", (1, length, width))
    mask = net.input("mask", (length, length))
    before = net.spelled_norm(x, "norm1")
    q, k, v = (
        net.split_heads(net.spelled_linear(before, width, part), heads, part) for part in "qkv"
    )
    scores = net.batch_matmul(q, net.transpose(k, perm=(0, 1, 3, 2), name="keys"), name="scores")
    scaled = net.div(scores, net.scalar(math.sqrt(width // heads)), name="scaled")
    shares = net.softmax(net.add(scaled, mask, name="masked"), name="shares")
    kept = net.mul(shares, net.scalar(1.0), name="dropout")
    context = net.batch_matmul(kept, v, name="context")
    rows = net.transpose(context, perm=(0, 2, 1, 3), name="back")
    joined = net.reshape(rows, shape=(1, length, width), name="joined")
    x = net.add(x, net.spelled_linear(joined, width, "out"), name="add1")
    inner = net.spelled_linear(net.spelled_norm(x, "norm2"), 4 * width, "up")
    net.output(
        net.add(x, net.spelled_linear(net.spelled_gelu(inner, "gelu"), width, "down"), name="y")
    )
    return net.build()


def model(name: str) -> Graph:
    """Return one of `MODELS`; raise `InputError` for another name."""
    if name not in MODELS:
        raise InputError(f"a model: {', '.join(MODELS)}", repr(name), "choose one")
    return exported_block() if name == EXPORTED else build(name)


# -- what passes leave ----------------------------------------------------------------------------
def history(report: Report) -> list[tuple[str, int, int]]:
    """Return (pass, nodes, bytes moved) after the start and each pass that matched."""
    graphs = [("as imported", report.start), *((step.name, step.after) for step in report.steps)]
    return [(name, len(graph.nodes), moved_bytes(graph)) for name, graph in graphs]


@styled
def fig_passes(
    name: str = EXPORTED, order: str = "default", rounds: int = 4, leave_out: str = "nothing"
) -> LabFigure:
    """Draw nodes and bytes moved after each pass that matched, from top to bottom.

    Raises `InputError` for an unknown model or order.
    """
    if order not in ORDERS:
        raise InputError(f"an order: {', '.join(ORDERS)}", repr(order), "choose one")
    names = [one for one in ORDERS[order] if one != leave_out]
    graph = model(name)
    _, report = run_passes(graph, names, rounds=rounds)
    rows = history(report)
    fig, axes = new_figure(ncols=2, height_in=1.0 + 0.24 * len(rows), sharey=True)
    _bars(axes[0], [row[1] for row in rows], BLUE, "operators", "{:,.0f}")
    _bars(axes[1], [row[2] / 2**20 for row in rows], ORANGE, "MiB read and written", "{:.1f}")
    axes[0].set_yticks(range(len(rows)), [row[0] for row in rows])
    axes[0].invert_yaxis()
    often = f"{report.rounds} round{'s' * (report.rounds > 1)}"
    fig.suptitle(f"{name}, {order} order, {often} (grey: as before)")
    last = rows[-1]
    told = "; ".join(f"{n} {nodes}" for n, nodes, _ in rows)
    alt = (
        f"Operators of {name} after each pass, {order} order: {told}. "
        f"Bytes moved fall from {rows[0][2] / 2**20:.1f} to {last[2] / 2**20:.1f} MiB."
    )
    return finish(fig, alt=alt)


def _bars(ax: Axes, values: Sequence[float], colour: str, label: str, form: str) -> None:
    shrinks = [i == 0 or value != values[i - 1] for i, value in enumerate(values)]
    fills = [colour if shrunk else GREY for shrunk in shrinks]
    ax.barh(range(len(values)), values, color=fills, edgecolor=INK)
    for row, value in enumerate(values):
        ax.text(value, row, " " + form.format(value), va="center", fontsize=8)
    ax.set_xlim(0, max(values) * 1.18)
    ax.set_xlabel(label)
