"""Lowers pieces for the vector unit, as one tensor expression each, and pieces that move data.

In a blocked layout the expression runs over the stored shape. That is right for elementwise work,
where the position of an element does not matter, and for reductions over axes that are not cut into
blocks. In FRACTAL_NZ (.., N1, M1, M0, N0) a row is spread over the axes N1 and N0, without padding:
a layer norm or softmax of rows reduces both.

Conversions of layouts and chains of reshapes and transposes become copies. An index consists of
digits, and an address is the sum of digits times strides. A layout splits every axis into digits, a
reshape groups all digits anew, a transpose permutes axes. So a whole chain is one list of (count,
stride in the source, stride in the target), and one strided copy computes it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ascend_lab.compiler.ir import JOINS, Graph, Node, TensorType, Values, operator_of
from ascend_lab.compiler.lower.piece import (
    Form,
    Lowered,
    Piece,
    broadcast_shape,
    maps_between,
    pack_broadcast,
)
from ascend_lab.errors import UnsupportedError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import Kernel, renamed
from ascend_lab.machine.layout import AddressMap, maps_launch
from ascend_lab.machine.layout.maps import Piece as Digits
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl.fractals import matrices
from ascend_lab.operators.kernels import transpose
from ascend_lab.operators.ops.conv_gradient import weight_gradient_in_blocks
from ascend_lab.operators.ops.expressions import in_fp32, stored_tensor
from ascend_lab.operators.ops.formats import CUBE_LAYOUTS
from ascend_lab.operators.ops.operator import Call, Template

IMAGE_FOLDS = {"global_avg_pool": "reduce_mean", "global_max_pool": "reduce_max"}


def lower_vector(piece: Piece, chip: Chip, steps: str = "") -> Lowered:
    """Return the kernel of a piece without cube operators, scheduled by `steps` or by default.

    Raises the errors of scheduling.
    """
    results, forms = vector_outputs(piece)
    schedule = te.replay(results, chip, steps) if steps else te.auto_schedule(results, chip)
    if matrices(schedule.state).keys() & {*piece.graph.inputs, *piece.graph.outputs}:
        raise UnsupportedError("operators of the vector unit", piece.graph.nodes[0].op, "expand it")
    return Lowered(te.lower(schedule), forms)


def mixed_blocks(piece: Piece) -> tuple[str, ...]:
    """Return the int8 tensors in blocks of 32 of a piece that also has tensors in blocks of 16."""
    graph = piece.graph
    in_blocks = [n for n in (*graph.inputs, *graph.outputs) if piece.type(n).layout in CUBE_LAYOUTS]
    byte_tensors = [n for n in in_blocks if DTYPE_BYTES[piece.type(n).dtype] == 1]
    # if all tensors are int8, all blocks have 32 channels: nothing is mixed
    return tuple(byte_tensors) if len(byte_tensors) < len(in_blocks) else ()


def lower_mixed(piece: Piece, chip: Chip) -> Lowered:
    """Return the kernel of a piece with `mixed_blocks`: it computes in blocks of 16 throughout.

    It first copies int8 inputs to blocks of 16, and at the end int8 outputs to blocks of 32. Raises
    as `lower_vector`.
    """
    byte_tensors = mixed_blocks(piece)
    graph = piece.graph
    # ":16" after a layout means blocks of 16 channels also for int8
    types = {
        n: replace(t, layout=f"{t.layout}:16") if t.layout in CUBE_LAYOUTS else t
        for n, t in graph.types.items()
    }
    inner = lower_vector(Piece(replace(graph, types=types), piece.constants, piece.names), chip)
    halves = {name: f"halves_{name}" for name in byte_tensors}
    loads = []
    stores = []
    for name, workspace in halves.items():
        # a first phase halves the blocks of an input, a last phase joins those of an output
        maps = (replace(graph.types[name].map, format="ND"), replace(types[name].map, format="ND"))
        if name in graph.inputs:
            launch = maps_launch(*maps, chip, "halves")
            loads.append(renamed(launch, {"x": name, "y": workspace}))
        else:
            launch = maps_launch(*maps[::-1], chip, "whole")
            stores.append(renamed(launch, {"x": workspace, "y": name}))
    phases = [renamed(phase, halves) for phase in inner.kernel.phases]
    return Lowered(Kernel(inner.kernel.name, (*loads, *phases, *stores)), inner.forms, inner.extra)


def vector_outputs(piece: Piece) -> tuple[list[te.Tensor], dict[str, Form]]:
    """Return a piece's outputs as tensor expressions, and how its constants are packed."""
    graph = piece.graph
    forms: dict[str, Form] = {}
    tensors: dict[str, te.Tensor] = {}
    in_blocks = [t for t in graph.types.values() if t.layout != "ND"]
    # all tensors get the layout of the largest one in blocks: the others broadcast to it
    main = max(in_blocks, key=lambda t: t.elements, default=piece.output)
    for name in graph.inputs:
        shape, form = operand(piece, name, main)
        tensors[name] = te.placeholder(shape, piece.type(name).dtype, name)
        if form is not None:
            forms[name] = form
    outs = expressions(graph.nodes, tensors, main)
    return [te.renamed(stored_tensor(outs[n], graph.inputs), n) for n in graph.outputs], forms


def operand(piece: Piece, name: str, main: TensorType) -> tuple[tuple[int, ...], Form | None]:
    """Return the stored shape of an input that broadcasts to `main`, and how to pack a constant."""
    kind = piece.type(name)
    if main.layout == "ND":
        return kind.shape or (1,), None
    if name in piece.constants and kind.layout == "ND":
        return broadcast_shape(kind.shape, main), partial(pack_broadcast, main=main)
    if kind.layout != main.layout and kind.elements > 1:
        raise UnsupportedError(
            f"{piece.names[name]} in {main.layout}", kind.layout, "insert a trans_data"
        )
    return (kind.stored_shape if kind.layout != "ND" else (1,)), None


def expressions(
    nodes: Sequence[Node], tensors: Mapping[str, te.Tensor], main: TensorType
) -> dict[str, te.Tensor]:
    """Return the given tensors and the expressions that the nodes compute from them, by name."""
    by_name = dict(tensors)
    for node in nodes:
        op = node.op
        attrs = dict(node.attrs)
        if main.layout != "ND" and node.has("pooling"):
            raise UnsupportedError("no windows among what is done lane by lane", op, "cut here")
        # In (N, C1, H, W, C0) rows and columns of an image are the axes 2 and 3, as in NCHW.
        if main.layout != "ND" and op in IMAGE_FOLDS:
            op = IMAGE_FOLDS[op]
            attrs = {"axis": (2, 3), "keepdims": True}
        operands = [by_name[n] for n in node.inputs]
        # in fractals a row is spread over two axes: the operator's usual expression has one
        if main.layout == "FRACTAL_NZ" and op in ROW_WISE:
            result: Any = ROW_WISE[op](*operands, **attrs)
        else:
            result = operator_of(op).expression(*operands, **attrs)
        results = result if isinstance(result, tuple) else (result,)
        by_name.update(zip(node.outputs, results, strict=True))
    return by_name


# -- rows in fractals -----------------------------------------------------------------------------
def _row(x: te.Tensor) -> tuple[int, int]:
    """Return the two axes of a row: N1 and N0 of (.., N1, M1, M0, N0)."""
    return len(x.shape) - 4, len(x.shape) - 1


def _fold(fold: Callable[..., te.Tensor], x: te.Tensor) -> te.Tensor:
    """Return the rows of `x` reduced: over the fractals to 16 lanes a row, then over the lanes."""
    blocks, lanes = _row(x)
    return fold(fold(x, blocks, keepdims=True), lanes, keepdims=True)


def _layer_norm(
    x: te.Tensor, scale: te.Tensor, bias: te.Tensor, *, axis: int = -1, epsilon: float = 1e-5
) -> te.Tensor:
    """Return the layer norm of rows in fractals."""
    blocks, lanes = _row(x)
    # y = (x - mean) / sqrt(variance + epsilon) * scale + bias, both means over a row
    # 768 columns are 48 blocks of 16 lanes: the factor is 1 / 768
    per_column = 1.0 / (x.shape[blocks] * x.shape[lanes])
    mean = te.vmuls(_fold(te.reduce_sum, x), per_column)
    centred = te.vsub(x, te.broadcast(mean, x.shape))
    squares = _fold(te.reduce_sum, te.vmul(centred, centred))
    inverse_deviation = te.vrsqrt(te.vadds(te.vmuls(squares, per_column), epsilon))
    normal = te.vmul(centred, te.broadcast(inverse_deviation, x.shape))
    scaled = te.vmul(normal, te.broadcast(scale, x.shape))
    return te.vadd(scaled, te.broadcast(bias, x.shape))


def _softmax(x: te.Tensor, *, axis: int = -1) -> te.Tensor:
    """Return the softmax of rows in fractals."""
    # exp(x - maximum) is at most 1: exp(89) would be infinite in fp32
    maximum = _fold(te.reduce_max, x)
    power = te.vexp(te.vsub(x, te.broadcast(maximum, x.shape)))
    total = _fold(te.reduce_sum, power)
    return te.vdiv(power, te.broadcast(total, x.shape))


ROW_WISE: dict[str, Callable[..., Any]] = {
    "layer_norm": in_fp32(_layer_norm),
    "softmax": in_fp32(_softmax),
}
"""Expressions on FRACTAL_NZ of operators that work along the last axis."""


# -- moving data -----------------------------------------------------------------------------------
BLOCK = 16


def named(kernel: Kernel, names: Mapping[str, str]) -> Kernel:
    """Return a kernel with its tensors renamed; workspaces whose names clash get new names."""
    # a template's own tensor "x1" must not be taken for the x1 of the piece
    clash = {
        t.name: f"{t.name}_work"
        for t in kernel.tensors
        if t.name not in names and t.name in names.values()
    }
    table = {**names, **clash}
    return replace(kernel, phases=tuple(renamed(p, table) for p in kernel.phases))


# -- templates ------------------------------------------------------------------------------------
def lower_template(piece: Piece, chip: Chip, **more_settings: object) -> Lowered | None:
    """Return the kernel of a single operator's template on stored shapes.

    `more_settings` are passed to the template in addition to the operator's attributes.
    Returns None if the operator has no template, or if it has only one for images in blocks and the
    images are row-major.
    """
    (node,) = piece.graph.nodes
    operator = operator_of(node.op)
    types = [piece.type(n) for n in node.inputs]
    # row-major images cannot be the input of a template for images in blocks
    templates = [
        t for t in operator.templates() if t.layout != "NC1HWC0" or types[0].layout != "ND"
    ]
    if not templates:
        return None
    settings, shapes = stored_settings(node, types, operator.settings(node.attrs))
    out_shapes = tuple(operator.infer(*shapes, **settings))
    call = Call(tuple(shapes), tuple(t.dtype for t in types), settings | more_settings, out_shapes)
    template = next((t for t in templates if t.applies(call, chip)), None)
    if template is None:
        return None
    kernel = template.kernel(call, chip)
    kernel_names = {t.name for t in kernel.tensors}
    reads = template.names(len(node.inputs))
    outs = ("y",) if "y" in kernel_names else tuple(f"y{i}" for i in range(len(node.outputs)))
    names = dict(zip((*outs, *reads), (*node.outputs, *node.inputs), strict=True))
    # a template with one input, or with inputs without names, reads constants unchanged
    forms = {
        name: partial(_packed_input, template, call, node.inputs.index(name), kernel_name)
        for kernel_name, name in names.items()
        if name in piece.constants and template.reads not in ((), ("x",))
    }
    extra = {name: values.reshape(-1) for name, values in sorted(template.extra(call).items())}
    return Lowered(named(kernel, names), forms, extra)


def _packed_input(template: Template, call: Call, place: int, name: str, array: Values) -> Values:
    """Return a constant as the template stores it; the other inputs do not matter."""
    arrays = [np.zeros(s, array.dtype) for s in call.shapes]
    arrays[place] = array.reshape(call.shapes[place])
    return template.tensors(call, arrays)[name].reshape(-1)


def stored_settings(
    node: Node, types: Sequence[TensorType], settings: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Return attributes and shapes that refer to the stored axes, for operators such as split.

    Operators whose templates take images in NC1HWC0 keep logical attributes and shapes.
    """
    attrs = dict(settings)
    kind = types[0] if types else None
    if node.op == "cast":
        return attrs, [t.stored_shape or (1,) for t in types]
    if node.op not in JOINS or kind is None or kind.layout == "ND":
        return attrs, [t.shape or (1,) for t in types]
    if kind.layout not in CUBE_LAYOUTS:
        raise UnsupportedError(f"{node.op} on ND or blocks", kind.layout, "convert it")
    shapes = [t.stored_shape for t in types]
    # 96 channels split in 32 and 64 are 6 blocks split in 2 and 4
    if attrs.get("axis") is not None:
        attrs["axis"] %= len(kind.shape)
    if kind.layout != "FRACTAL_NZ" and node.op == "split" and attrs["axis"] == 1:
        attrs["sizes"] = tuple(n // BLOCK for n in attrs["sizes"])
    if node.op == "slice":
        attrs.update(_blocked_slice(attrs, kind, shapes[0]))
    if kind.layout == "C1NHWC0":  # the first two axes change places
        if node.op == "slice":
            ends = ((key, attrs[key]) for key in ("begin", "end"))
            attrs.update((key, (at[1], at[0], *at[2:])) for key, at in ends)
        elif attrs["axis"] < 2:
            attrs["axis"] = 1 - attrs["axis"]
    return attrs, shapes


def _blocked_slice(
    attrs: Mapping[str, Any], kind: TensorType, stored: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the bounds of a slice on stored axes: of images, or of batches of matrices."""
    begin = list(attrs["begin"])
    end = list(attrs["end"])
    if kind.layout == "FRACTAL_NZ":
        inner = len(kind.shape) - 2
        return {"begin": (*begin[:inner], 0, 0, 0, 0), "end": (*end[:inner], *stored[inner:])}
    # of 40 channels, those from 16 on are blocks 1 and 2; block 2 is padded with zeros
    end_block = end[1] // BLOCK if end[1] < kind.shape[1] else -(-kind.shape[1] // BLOCK)
    low = (begin[0], begin[1] // BLOCK)
    high = (end[0], end_block)
    return {"begin": (*low, *begin[2:], 0), "end": (*high, *end[2:], stored[-1])}


def lower_weight_gradient(piece: Piece, chip: Chip) -> Lowered:
    """Return the kernel of a convolution's weight gradient.

    It runs on the cube, or on the vector unit if the cube's buffers are too small.
    """
    by_cube = lower_template(piece, chip)
    if by_cube is not None:
        return by_cube
    (node,) = piece.graph.nodes
    types = piece.graph.types
    x, grad = (te.placeholder(types[n].stored_shape, types[n].dtype, n) for n in node.inputs)
    settings = {**operator_of(node.op).settings(node.attrs), "out_dtype": piece.output.dtype}
    y = te.renamed(weight_gradient_in_blocks(x, grad, **settings), node.output)
    return Lowered(te.lower(te.auto_schedule(y, chip)))


# -- moves ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Digit:
    """`count` values of an index, `stride` elements apart in the source."""

    count: int
    stride: int


Axes = list[list[Digit]]


def _copied(piece: Piece, chip: Chip, maps: tuple[AddressMap, AddressMap], name: str) -> Lowered:
    """Return the kernel that copies between two maps."""
    (x,) = piece.graph.inputs
    (y,) = piece.graph.outputs
    phases = transpose.maps_phases(*maps, chip, name)
    return Lowered(Kernel(name, tuple(renamed(phase, {"x": x, "y": y}) for phase in phases)))


def lower_trans_data(piece: Piece, chip: Chip) -> Lowered:
    """Return the program that copies a tensor from one layout to another."""
    kind = piece.type(piece.graph.inputs[0])
    return _copied(piece, chip, maps_between(kind, piece.output), "trans_data")


def lower_moves(piece: Piece, chip: Chip) -> Lowered:
    """Return the program of a chain of moves.

    Raises `UnsupportedError` where a layout pads, or a reshape cuts through a digit.
    """
    source = piece.type(piece.graph.inputs[0])
    reads, writes = digits_moved(piece.graph, piece.graph.nodes)
    maps = _map(reads, source), _map(writes, piece.output)
    return _copied(piece, chip, maps, "rearrange")


def digits_moved(
    graph: Graph, chain: Sequence[Node]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the digits of a chain of moves as (count, stride): in its source, in its result.

    Raises `UnsupportedError` as `lower_moves`.
    """
    source = graph.types[chain[0].inputs[0]]
    ends = _of_axes(graph.types[chain[-1].output])
    axes = [[Digit(p.count, p.stride) for p in pieces] for pieces in _of_axes(source)]
    # (6, 4) read as (2, 3, 4): the digit 6 of stride 4 becomes 2 of stride 12 and 3 of stride 4
    for move in chain:
        if move.op == "transpose":
            axes = [axes[i] for i in move.attr("perm") or range(len(axes))[::-1]]
        else:  # a reshape, or a conversion, which leaves the axes as they are
            axes = grouped([d for axis in axes for d in axis], graph.types[move.output].shape)
    reads: list[tuple[int, int]] = []
    writes: list[tuple[int, int]] = []
    for axis, pieces in zip(axes, ends, strict=True):
        for digits, target in zip(grouped(axis, [p.count for p in pieces]), pieces, strict=True):
            reads += [(d.count, d.stride) for d in digits]
            counts = [math.prod(d.count for d in digits[i + 1 :]) for i in range(len(digits))]
            writes += [(d.count, target.stride * n) for d, n in zip(digits, counts, strict=True)]
    return reads, writes


def _of_axes(kind: TensorType) -> list[tuple[Digits, ...]]:
    """Return the pieces of each axis, largest step first; raise an error if the layout pads."""
    layout = kind.map
    if layout.padding_bytes:
        raise UnsupportedError("whole blocks", str(kind), "convert it on its own")
    return [layout.of_axis(i) for i in range(len(layout.shape))]


def grouped(digits: Sequence[Digit], sizes: Sequence[int]) -> Axes:
    """Return digits, in order, cut into groups of the given sizes.

    Raises `UnsupportedError` where a boundary falls inside a digit that it does not divide.
    """
    waiting = [d for d in digits if d.count > 1]
    axes: Axes = []
    for size in sizes:
        axis: list[Digit] = []
        missing = size
        while missing > 1:
            digit = waiting.pop(0)
            count = math.gcd(missing, digit.count)
            # a digit of 6 cannot fill an axis of 4: a part of 2 fits, but 6 / 2 = 3 does not
            if count == 1 or (count < digit.count and count < missing):
                raise UnsupportedError("digits that divide the axes", str(sizes), "move apart")
            # the outer part of the digit belongs to this axis, the inner part to the next
            if count < digit.count:
                waiting.insert(0, Digit(digit.count // count, digit.stride))
                digit = Digit(count, digit.stride * (digit.count // count))
            axis.append(digit)
            missing //= digit.count
        axes.append(axis)
    return axes


def _map(digits: Sequence[tuple[int, int]], kind: TensorType) -> AddressMap:
    """Return the map of an array whose axes are the digits."""
    # pieces are stored outermost first: the largest stride leads
    order = sorted(range(len(digits)), key=lambda i: -digits[i][1])
    pieces = tuple(Digits(i, 1, *digits[i]) for i in order)
    shape = tuple(count for count, _ in digits)
    names = tuple(f"D{i}" for i in range(len(digits)))
    return AddressMap("ND", names, shape, kind.dtype, pieces, tuple(p.count for p in pieces))
