"""Pieces that only move data: conversions between layouts, and templates on stored shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.ir import Node, TensorType, Values, operator_of
from ascend_lab.graph.lower.piece import Lowered, Piece, maps_between
from ascend_lab.isa import Kernel, as_kernel
from ascend_lab.isa.program import renamed
from ascend_lab.layout import AddressMap
from ascend_lab.layout.maps import Piece as Digits
from ascend_lab.layout.moves import maps_launch
from ascend_lab.ops.conv_gradient import in_blocks
from ascend_lab.ops.operator import Call, Template

ALONG_CHANNELS = ("concat", "split", "slice")
"""Operators that also work on NC1HWC0, where they cut channels at whole blocks."""
BLOCK = 16


def lower_trans_data(piece: Piece, chip: Chip) -> Lowered:
    """Return the program that copies a tensor from one layout to another."""
    (x,), (y,) = piece.graph.inputs, piece.graph.outputs
    maps = maps_between(piece.type(x), piece.type(y))
    launch = maps_launch(*maps, chip, "trans_data")
    return Lowered(Kernel("trans_data", (renamed(launch, {"x": x, "y": y}),)))


def lower_template(piece: Piece, chip: Chip) -> Lowered | None:
    """Return the kernel of a single operator's template on stored shapes; None if it has none."""
    (node,) = piece.graph.nodes
    operator = operator_of(node.op)
    types = [piece.type(n) for n in node.inputs]
    if operator.template is None:
        return None
    settings, shapes = blocked(node, types, operator.settings(node.attrs))
    out_shapes = tuple(operator.infer(*shapes, **settings))
    call = Call(tuple(shapes), tuple(t.dtype for t in types), settings, out_shapes)
    if not operator.template.applies(call, chip):
        return None
    kernel = as_kernel(operator.template.build(call, chip))
    names = template_names(node, kernel)
    forms = {
        new: partial(_fed, operator.template, call, node.inputs.index(new), old)
        for old, new in names.items()
        if new in piece.constants and node.op in FEEDS
    }
    return Lowered(named(kernel, names), forms, extras(operator, call, kernel))


def lower_weight_gradient(piece: Piece, chip: Chip) -> Lowered:
    """Return a convolution's weight gradient: on the cube, or where that has no room on vectors."""
    found = lower_template(piece, chip)
    if found is not None:
        return found
    (node,), types = piece.graph.nodes, piece.graph.types
    x, grad = (te.placeholder(types[n].stored_shape, types[n].dtype, n) for n in node.inputs)
    settings = operator_of(node.op).settings(node.attrs)
    settings["out_dtype"] = piece.output.dtype
    y = te.renamed(in_blocks(x, grad, **settings), node.output)
    return Lowered(te.lower(te.auto_schedule(y, chip)))


def _fed(template: Template, call: Call, place: int, name: str, array: Values) -> Values:
    """Return a constant as the template feeds it; the other inputs do not matter."""
    arrays = [np.zeros(s, array.dtype) for s in call.shapes]
    arrays[place] = array.reshape(call.shapes[place])
    return template.feed(call, arrays)[name].reshape(-1)


def blocked(
    node: Node, types: Sequence[TensorType], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Return attributes and shapes on stored tensors for operators that cut along axes.

    Operators that take images in NC1HWC0 by themselves keep the logical ones.
    """
    shapes = [t.shape or (1,) for t in types]
    attrs = dict(settings)
    if node.op == "cast":
        shapes = [t.stored_shape or (1,) for t in types]
    if node.op not in ALONG_CHANNELS or types[0].layout == "ND":
        return attrs, shapes
    if types[0].layout not in ("NC1HWC0", "FRACTAL_NZ"):
        raise UnsupportedError(f"{node.op} on ND or blocks", types[0].layout, "convert it")
    image, shapes = types[0].layout == "NC1HWC0", [t.stored_shape for t in types]
    axis = attrs.get("axis")
    if axis is not None:
        attrs["axis"] = axis % len(types[0].shape)
    if image and node.op == "split" and attrs["axis"] == 1:
        attrs["sizes"] = tuple(n // BLOCK for n in attrs["sizes"])
    if node.op == "slice":
        attrs.update(_blocked_slice(attrs, types[0], shapes[0]))
    return attrs, shapes


def _blocked_slice(
    attrs: Mapping[str, Any], kind: TensorType, stored: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the bounds of a slice on stored axes: of images, or of batches of matrices."""
    begin, end = list(attrs["begin"]), list(attrs["end"])
    if kind.layout == "FRACTAL_NZ":
        inner = len(kind.shape) - 2
        return {"begin": (*begin[:inner], 0, 0, 0, 0), "end": (*end[:inner], *stored[inner:])}
    last = end[1] // BLOCK if end[1] < kind.shape[1] else stored[1]
    low, high = (begin[0], begin[1] // BLOCK), (end[0], last)
    return {"begin": (*low, *begin[2:], 0), "end": (*high, *end[2:], stored[-1])}


def extras(operator: Any, call: Call, kernel: Kernel) -> dict[str, Values]:
    """Return the small tensors of a template's own, such as the reciprocals of pooling counts."""
    own = {"rate", "zeros", "eye"} & {t.name for t in kernel.tensors}
    if not own:
        return {}
    empty = [np.zeros(s, np.float16) for s in call.shapes]
    fed = operator.template.feed(call, empty)
    return {name: fed[name].reshape(-1) for name in sorted(own)}


def template_names(node: Node, kernel: Kernel) -> dict[str, str]:
    """Return canonical names for a template's tensors: inputs by its feed, outputs y or y0, y1."""
    known = {t.name for t in kernel.tensors}
    outs = ("y",) if "y" in known else tuple(f"y{i}" for i in range(len(node.outputs)))
    many = tuple(f"x{i}" for i in range(len(node.inputs)))
    reads = (
        many
        if node.op == "concat" and "x0" in known
        else FEEDS.get(node.op, ("x",))[: len(node.inputs)]
    )
    names = dict(zip(outs, node.outputs, strict=True))
    return {**names, **dict(zip(reads, node.inputs, strict=True))}


FEEDS = {
    "conv2d_grad_weight": ("x", "grad"),
    "bn_training_update_grad": ("grad", "x", "mean", "variance"),
    "max_pool2d_grad": ("x", "top", "grad"),
    "avg_pool2d_grad": ("grad",),
    "gather": ("x", "index"),
    "embedding": ("x", "index"),
    "one_hot": ("index",),
    "flash_attention": ("q", "k", "v", "mask"),
    "scatter_add": ("x", "index", "u"),
    "scatter_update": ("x", "index", "u"),
}
"""Kernel tensors in the order of the operator's inputs, where there is more than one."""


def named(kernel: Kernel, names: Mapping[str, str]) -> Kernel:
    """Return a kernel with its tensors renamed, workspaces out of the way."""
    clash = {t.name: f"{t.name}_work" for t in kernel.tensors
             if t.name not in names and t.name in names.values()}  # fmt: skip
    table = {**names, **clash}
    return replace(kernel, phases=tuple(renamed(p, table) for p in kernel.phases))


# Chains of moves as one: conversions, reshapes and transposes are digits changing places.
#
# An address is a sum of digits times strides. A layout gives every axis its digits, a reshape
# reads
# all digits in a row and groups them anew, a transpose permutes axes. So a whole chain is one
# list of
# (count, stride in the source, stride in the target), and one strided copy does it.


MOVES = ("trans_data", "reshape", "transpose")


@dataclass(frozen=True, slots=True)
class Digit:
    """`count` values of an index, `stride` elements apart in the source."""

    count: int
    stride: int


Axes = list[list[Digit]]


def lower_moves(piece: Piece, chip: Chip) -> Lowered:
    """Return the program of a chain of moves.

    Raises `UnsupportedError` where a layout pads, or a reshape cuts through a digit.
    """
    graph, (x,), (y,) = piece.graph, piece.graph.inputs, piece.graph.outputs
    axes = [[Digit(p.count, p.stride) for p in own] for own in _of_axes(piece.type(x))]
    for node in graph.nodes:
        shape = piece.type(node.output).shape
        if node.op == "transpose":
            perm = node.attr("perm") or tuple(reversed(range(len(axes))))
            axes = [axes[i] for i in perm]
        elif node.op == "reshape":
            axes = grouped([d for axis in axes for d in axis], shape)
    sources: list[Digit] = []
    targets: list[int] = []
    for axis, own in zip(axes, _of_axes(piece.type(y)), strict=True):
        counts = [p.count for p in own]
        for digits, target in zip(grouped(axis, counts), own, strict=True):
            sources += digits
            targets += _strides(digits, target.stride)
    maps = (
        _map([(d.count, d.stride) for d in sources], piece.type(x)),
        _map([(d.count, t) for d, t in zip(sources, targets, strict=True)], piece.type(y)),
    )
    launch = maps_launch(*maps, chip, "rearrange")
    return Lowered(Kernel("rearrange", (renamed(launch, {"x": x, "y": y}),)))


def _of_axes(kind: TensorType) -> list[tuple[Digits, ...]]:
    """Return the pieces of each axis, largest step first; refuse layouts that pad."""
    layout = kind.map
    if layout.padding_bytes:
        raise UnsupportedError("whole blocks", str(kind), "convert it on its own")
    return [layout.of_axis(i) for i in range(len(layout.shape))]


def grouped(digits: Sequence[Digit], sizes: Sequence[int]) -> Axes:
    """Return digits, in order, cut into groups of the given sizes.

    Raises `UnsupportedError` where a boundary falls inside a digit that it does not divide.
    """
    left = [d for d in digits if d.count > 1]
    axes: Axes = []
    for size in sizes:
        own: list[Digit] = []
        need = size
        while need > 1:
            digit = left.pop(0)
            take = math.gcd(need, digit.count)
            if take == 1 or (take < digit.count and take < need):
                raise UnsupportedError("digits that divide the axes", str(sizes), "move apart")
            if take < digit.count:
                left.insert(0, Digit(digit.count // take, digit.stride))
                digit = Digit(take, digit.stride * (digit.count // take))
            own.append(digit)
            need //= digit.count
        axes.append(own)
    return axes


def _strides(digits: Sequence[Digit], last: int) -> list[int]:
    """Return the target strides of digits that together count steps of `last`."""
    found: list[int] = []
    for digit in reversed(digits):
        found.append(last)
        last *= digit.count
    return found[::-1]


def _map(digits: Sequence[tuple[int, int]], kind: TensorType) -> AddressMap:
    """Return the map of an array whose axes are the digits."""
    order = sorted(range(len(digits)), key=lambda i: -digits[i][1])
    pieces = tuple(Digits(i, 1, *digits[i]) for i in order)
    shape = tuple(count for count, _ in digits)
    names = tuple(f"D{i}" for i in range(len(digits)))
    return AddressMap("ND", names, shape, kind.dtype, pieces, tuple(p.count for p in pieces))
