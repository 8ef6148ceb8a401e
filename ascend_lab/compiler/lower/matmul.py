"""Lowers matrix products on fractals to kernels; elementwise operators after them are fused.

relu(x w + b) becomes one kernel: the bias and the relu are its epilogue, which is computed on the
sums on their way to memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ascend_lab.compiler.ir import Node, TensorType, Values
from ascend_lab.compiler.lower import epilogue as ep, vector
from ascend_lab.compiler.lower.piece import Form, Lowered, Piece, packed
from ascend_lab.errors import UnsupportedError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.sim.timeline import Start
from ascend_lab.operators import dsl as te, kernels
from ascend_lab.operators.kernels.epilogue import PAIR, Epilogue, Operand
from ascend_lab.operators.kernels.weight_gradient import ZEROS
from ascend_lab.operators.ops import conv_gradient, formats, matmul
from ascend_lab.operators.ops.expressions import narrow


def operand_layouts(node: Node, kinds: Sequence[TensorType]) -> tuple[str, str]:
    """Return how the cube reads the operands of a product: (rows, k) and (k, columns)."""
    # the kernel of weight gradients reads both operands without a transposition
    if is_weight_gradient(node, kinds):
        return "FRACTAL_NZ", "FRACTAL_NZ"
    # ZN of a matrix is NZ of its transpose: reading an operand transposed costs nothing more
    return (
        "FRACTAL_ZN" if node.attr("trans_a", False) else "FRACTAL_NZ",
        "FRACTAL_NZ" if node.attr("trans_b", False) else "FRACTAL_ZN",
    )


def is_weight_gradient(node: Node, kinds: Sequence[TensorType]) -> bool:
    """Tell whether a product is a^T b of two matrices: the gradient of a dense layer's weights.

    It sums over rows as a convolution's weight gradient sums over pixels: the kernel of the latter
    computes it without transposing an operand. The number of rows must need no padding.
    """
    a, b = kinds[:2]
    only_a_transposed = bool(node.attr("trans_a", False)) and not node.attr("trans_b", False)
    is_matrix_product = (
        node.op == "matmul" and a.dtype in conv_gradient.GRADIENT_INPUTS and len(b.shape) == 2
    )
    return only_a_transposed and is_matrix_product and a.shape[0] % isa.FRACTAL == 0


def is_plain(piece: Piece) -> bool:
    """Tell whether the hand-written kernel computes a product: no batch, first not transposed."""
    node = piece.graph.nodes[0]
    ranks = [len(piece.type(n).shape) for n in node.inputs]
    return ranks == [2, 2] and not node.attr("trans_a", False)


def lower_product(
    piece: Piece, chip: Chip, tiling: kernels.GemmSchedule | None = None, start: Start = "queued"
) -> Lowered:
    """Return the kernel of a piece that begins with a product; the rest is its epilogue.

    Without a `tiling` a default is chosen. In a product of a tensor x0 with itself the second
    operand is called "x0.b": a constant is packed once for each side.
    """
    node = piece.graph.nodes[0]
    (a, b) = node.inputs
    types = [piece.type(n) for n in node.inputs]
    names = (a, f"{b}.b") if a == b else (a, b)
    forms = _matrix_forms(piece, names, types)
    if is_weight_gradient(node, types):
        if tiling is not None:
            raise UnsupportedError("a product that takes a tiling", "a^T b", "drop the tiling")
        return _as_weight_gradient(piece, names, chip, forms)
    if not is_plain(piece):  # a batch, by a schedule of primitives
        out = batched_output(piece, names)
        return Lowered(te.lower(te.auto_schedule(out, chip, tiling)), forms)
    shape, epilogue = product_job(piece, chip)
    finish = _finish(piece, node, shape)
    main = _tile_type(piece.type(node.output))
    chosen_tiling = tiling
    if chosen_tiling is None:
        # activations were just written and mostly hit L2; weights come from memory
        warm = frozenset(
            side
            for side, name in zip("ab", node.inputs, strict=True)
            if _likely_in_l2(piece, name, chip)
        )
        chosen_tiling = matmul.default_product(shape, chip, epilogue, finish, warm, start)
    operands: Iterable[Operand] = epilogue.operands if epilogue else ()
    # with K divided among cores a second phase adds up the parts, then computes the epilogue
    if chosen_tiling.split_k > 1:
        operands = ep.operands_of(piece, piece.graph.nodes[1:], main)[1].values()
    elif epilogue and epilogue.width == PAIR:
        main = replace(main, dtype="int8")
    forms |= ep.operand_forms(operands, piece, main)
    kernel = matmul.product_kernel(shape, chip, chosen_tiling, epilogue, finish)
    tensors = {"a": names[0], "b": names[1], "c": piece.graph.outputs[-1]}
    phases = tuple(isa.renamed(phase, tensors) for phase in kernel.phases)
    return Lowered(isa.Kernel("matmul", phases), forms, tiling=chosen_tiling)


def _matrix_forms(
    piece: Piece, names: tuple[str, str], types: Sequence[TensorType]
) -> dict[str, Form]:
    """Return how constant operands are packed.

    Raises `UnsupportedError` for another operand that is not in the layout that the cube reads.
    """
    forms: dict[str, Form] = {}
    layouts = operand_layouts(piece.graph.nodes[0], types)
    for name, kind, layout in zip(names, types, layouts, strict=True):
        tensor = name.partition(".")[0]  # "x0.b" is the second operand of x0 @ x0
        if tensor in piece.constants:
            padded_kind = kind
            if name == names[1] and piece.output.dtype == "int8":  # whole blocks of 32 columns
                padded_kind = in_pairs(kind, bool(piece.graph.nodes[0].attr("trans_b", False)))
            forms[name] = partial(packed_with_zeros, replace(padded_kind, layout=layout))
        elif kind.layout != layout:
            raise UnsupportedError(f"{piece.names[tensor]} in {layout}", kind.layout, "convert it")
    return forms


def _likely_in_l2(piece: Piece, name: str, chip: Chip) -> bool:
    """Tell whether L2 likely holds an operand: just written, and at most half as large as L2."""
    kind = piece.type(name)
    size_bytes = kind.elements * DTYPE_BYTES[kind.dtype]
    return name not in piece.constants and 2 * size_bytes <= chip.l2.size_bytes


def product_job(piece: Piece, chip: Chip) -> tuple[kernels.GemmShape, Epilogue | None]:
    """Return the product of a piece for which `is_plain` holds, and its epilogue."""
    node = piece.graph.nodes[0]
    (m, k) = piece.type(node.inputs[0]).shape
    out = piece.type(node.output)
    epilogue = _epilogue(piece, node, chip) if len(piece.graph.nodes) > 1 else None
    out_dtype = epilogue.out_dtype if epilogue else out.dtype
    n = out.shape[1]
    # 40 columns of bytes are computed as 64, the weights of 24 of them being zeros
    if epilogue and epilogue.width == PAIR and node.inputs[1] in piece.constants:
        n = isa.ceil_div(n, PAIR) * PAIR
    return kernels.GemmShape(m, k, n, piece.type(node.inputs[0]).dtype, out_dtype), epilogue


def in_pairs(kind: TensorType, is_transposed: bool) -> TensorType:
    """Return the type of a second operand, its columns padded to blocks of 32."""
    sizes = list(kind.shape)
    # (64, 40) becomes (64, 64); stored transposed, (40, 64) becomes (64, 64) as well
    sizes[0 if is_transposed else -1] = isa.ceil_div(sizes[0 if is_transposed else -1], PAIR) * PAIR
    return replace(kind, shape=tuple(sizes))


def packed_with_zeros(kind: TensorType, array: Values) -> Values:
    """Return a constant as stored in memory, padded with zeros to the type's shape."""
    pads = [(0, size - length) for size, length in zip(kind.shape, array.shape, strict=True)]
    return packed(kind, np.pad(array, pads) if any(zeros for _, zeros in pads) else array)


def batched_output(piece: Piece, names: tuple[str, str] | None = None) -> te.Tensor:
    """Return the tensor expression of a batch of products whose operands are called `names`."""
    product, *followers = piece.graph.nodes
    a, b = names or product.inputs
    if [n.op for n in followers] not in ([], ["relu"]):
        got = str(piece.graph)
        raise UnsupportedError("a batched product alone or with relu", got, "split it")
    kinds = {n: piece.type(n.partition(".")[0]) for n in (a, b)}
    tensors = {n: te.placeholder(kind.shape, kind.dtype, n) for n, kind in kinds.items()}
    plain = TensorType(piece.output.shape, piece.output.dtype)
    outputs = vector.expressions((replace(product, inputs=(a, b)), *followers), tensors, plain)
    return te.renamed(outputs[piece.graph.outputs[-1]], piece.graph.outputs[-1])


def _as_weight_gradient(
    piece: Piece, names: tuple[str, str], chip: Chip, forms: dict[str, Form]
) -> Lowered:
    """Return a^T b, computed as the weight gradient of a 1 x 1 convolution.

    a is the gradient and b the image; their rows are its pixels, 16 in a line. The result
    (N1, K1, 16, 16) is FRACTAL_NZ.
    """
    if len(piece.graph.nodes) > 1:
        raise UnsupportedError("a product a^T b alone", str(piece.graph), "split it")
    (rows, k) = piece.type(names[0]).shape
    columns = piece.output.shape[1]
    dtype = piece.type(names[0]).dtype
    out_dtype = piece.output.dtype
    height = rows // isa.FRACTAL  # 512 rows are an image of 32 x 16 pixels
    shape = kernels.ConvShape(
        n=1,
        c=columns,
        h=height,
        w=isa.FRACTAL,
        k=k,
        r=1,
        s=1,
        dtype=dtype,
        out_dtype=out_dtype,
    )
    tensors = {"grad": names[0], "x": names[1], "y": piece.graph.outputs[-1]}
    zeros = {"zeros": np.zeros(ZEROS, formats.numpy_type(dtype))}
    return Lowered(vector.named(conv_gradient.weight_kernel(shape, chip), tensors), forms, zeros)


def _finish(piece: Piece, node: Node, shape: kernels.GemmShape) -> matmul.Finish | None:
    """Return the nodes after a product as a function of its complete sums, used if K is divided.

    Returns None for int8 products with followers: their K is not divided.
    """
    out = piece.type(node.output)
    nodes = piece.graph.nodes[1:]
    if shape.dtype == "int8" and nodes:
        return None

    def finish(sums: te.Tensor) -> te.Tensor:
        main = _tile_type(out)
        tensors, _ = ep.operands_of(piece, nodes, main)
        tensors[node.output] = narrow(sums, out.dtype)
        return vector.expressions(nodes, tensors, main)[piece.graph.outputs[-1]]

    return finish


def _tile_type(out: TensorType) -> TensorType:
    """Return the type of a product's tiles: blocks of 16 columns for every number format."""
    return TensorType(out.shape, "fp16", "FRACTAL_NZ")


def _epilogue(piece: Piece, node: Node, chip: Chip) -> Epilogue:
    """Return the epilogue of the nodes after a product.

    On chips with vector cores a bias that follows at once is added to the fp32 sums, as the bias
    table does; elsewhere the sums are rounded on their way to the vector unit.
    """
    out = piece.type(node.output)
    nodes = piece.graph.nodes[1:]
    if nodes[0].op in ep.DEQUANTISING:
        return ep.int8_epilogue(piece, "FRACTAL_NZ")[0]
    main = _tile_type(out)
    wide = isa.ACCUMULATOR[piece.type(node.inputs[0]).dtype]
    sums = te.placeholder(main.map.piece_shape, wide, "sums")
    tensors, operands = ep.operands_of(piece, nodes, main)
    tensors[node.output] = narrow(sums, out.dtype)
    bias = _bias(piece, node)
    if bias and not chip.combined:
        # the bias becomes fp32 like the sums, so that the result is rounded once, not twice
        column = te.placeholder(ep.channels(main), wide, bias)
        operands = {t: o for t, o in operands.items() if o.name != bias}
        operands[column] = Operand(bias, "channel", wide)
        total = te.vadd(sums, te.broadcast(column, sums.shape))
        tensors[nodes[0].output] = narrow(total, out.dtype)
        nodes = nodes[1:]
    outputs = vector.expressions(nodes, tensors, main)
    return ep.epilogue_of(outputs[piece.graph.outputs[-1]], sums, operands)


def _bias(piece: Piece, node: Node) -> str:
    """Return the constant per column that the node after a product adds to it, or ""."""
    follower = piece.graph.nodes[1]
    summands = [n for n in follower.inputs if n != node.output]
    if follower.op != "add" or len(summands) != 1 or summands[0] not in piece.constants:
        return ""
    bias = summands[0]
    # the bias is packed in fp32, the format of the sums: a second reader could not use it in fp16
    read_once = sum(bias in n.inputs for n in piece.graph.nodes) == 1
    per_column = ep.is_channel(piece.type(bias).shape, _tile_type(piece.type(node.output)))
    return bias if read_once and per_column else ""
