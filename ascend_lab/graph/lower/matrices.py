"""Matrix products with what follows them lane by lane, on fractals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.dsl.handwritten import renamed
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.ir import Node, TensorType
from ascend_lab.graph.lower.chain import epilogue_of
from ascend_lab.graph.lower.images import channels, is_channel, operand_forms, operands_of
from ascend_lab.graph.lower.piece import Form, Lowered, Piece
from ascend_lab.graph.lower.stored import packed
from ascend_lab.graph.lower.vector import expressions
from ascend_lab.isa import Kernel
from ascend_lab.kernels import GemmShape, gemm_launch
from ascend_lab.kernels.epilogue import Epilogue, Operand
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR
from ascend_lab.ops.lifting import narrow


def operand_layouts(node: Node) -> tuple[str, str]:
    """Return how the cube reads the operands of a product: (rows, k) and (k, columns)."""
    return (
        "FRACTAL_ZN" if node.attr("trans_a", False) else "FRACTAL_NZ",
        "FRACTAL_NZ" if node.attr("trans_b", False) else "FRACTAL_ZN",
    )


def lower_product(piece: Piece, chip: Chip) -> Lowered:
    """Return the product at the head of a piece, the rest as its epilogue.

    The second operand of a product of a tensor with itself is called "name.b": a constant is packed
    once for each side.
    """
    node = piece.graph.nodes[0]
    (a, b), types = node.inputs, [piece.type(n) for n in node.inputs]
    names = (a, f"{b}.b") if a == b else (a, b)
    forms: dict[str, Form] = {}
    for name, kind, layout in zip(names, types, operand_layouts(node), strict=True):
        own = name.partition(".")[0]
        if own in piece.constants:
            forms[name] = partial(packed, TensorType(kind.shape, kind.dtype, layout))
        elif kind.layout != layout:
            raise UnsupportedError(f"{piece.names[own]} in {layout}", kind.layout, "convert it")
    if len(types[0].shape) == len(types[1].shape) == 2 and not node.attr("trans_a", False):
        return _plain(piece, names, chip, forms)
    return _batched(piece, names, chip, forms)


def _plain(piece: Piece, names: tuple[str, str], chip: Chip, forms: dict[str, Form]) -> Lowered:
    """Return a product of two matrices by the hand-written kernel."""
    node = piece.graph.nodes[0]
    (m, k), out = piece.type(node.inputs[0]).shape, piece.type(node.output)
    dtype = piece.type(node.inputs[0]).dtype
    epilogue, last = None, out.dtype
    more = {}
    if len(piece.graph.nodes) > 1:
        epilogue = _epilogue(piece, node, chip)
        last = epilogue.out_dtype
        more = operand_forms(epilogue, piece, _main(out))
    shape = GemmShape(m, k, out.shape[1], dtype, last)
    launch = gemm_launch(shape, chip, epilogue=epilogue)
    own = {"a": names[0], "b": names[1], "c": piece.graph.outputs[-1]}
    return Lowered(Kernel("matmul", (renamed(launch, own),)), {**forms, **more})


def _main(out: TensorType) -> TensorType:
    return TensorType(out.shape, "fp16", "FRACTAL_NZ")


def _epilogue(piece: Piece, node: Node, chip: Chip) -> Epilogue:
    """Return the epilogue of the nodes behind a product.

    On split chips a bias right behind it is added to the wide sums, as the bias table does;
    elsewhere the sums are rounded on their way to the vector unit.
    """
    out = piece.type(node.output)
    main, wide = _main(out), ACCUMULATOR[piece.type(node.inputs[0]).dtype]
    sums = te.placeholder(main.map.piece_shape, wide, "sums")
    nodes = piece.graph.nodes[1:]
    known, operands = operands_of(piece, nodes, main)
    known[node.output] = narrow(sums, out.dtype)
    bias = _bias(piece, node)
    if bias and not chip.combined:
        column = te.placeholder(channels(main), wide, bias)
        operands = {t: o for t, o in operands.items() if o.name != bias}
        operands[column] = Operand(bias, "channel", wide)
        total = te.vadd(sums, te.broadcast(column, sums.shape))
        known[nodes[0].output] = narrow(total, out.dtype)
        nodes = nodes[1:]
    found = expressions(nodes, known, main)
    return epilogue_of(found[piece.graph.outputs[-1]], sums, operands)


def _bias(piece: Piece, node: Node) -> str:
    """Return the constant per column that the node behind a product adds to it, or ""."""
    after = piece.graph.nodes[1]
    others = [n for n in after.inputs if n != node.output]
    if after.op != "add" or len(others) != 1 or others[0] not in piece.constants:
        return ""
    read_once = sum(others[0] in n.inputs for n in piece.graph.nodes) == 1
    channel = is_channel(piece.type(others[0]).shape, _main(piece.type(node.output)))
    return others[0] if read_once and channel else ""


def _batched(piece: Piece, names: tuple[str, str], chip: Chip, forms: dict[str, Form]) -> Lowered:
    """Return a batch of products by the default schedule; nothing but a ReLU may follow."""
    graph = piece.graph
    if [n.op for n in graph.nodes[1:]] not in ([], ["relu"]):
        raise UnsupportedError("a batched product alone or with relu", str(graph), "split it")
    kinds = {n: piece.type(n.partition(".")[0]) for n in names}
    tensors = {n: te.placeholder(kind.shape, kind.dtype, n) for n, kind in kinds.items()}
    nodes = (replace(graph.nodes[0], inputs=names), *graph.nodes[1:])
    found = expressions(nodes, tensors, TensorType(piece.output.shape, piece.output.dtype))
    out = te.renamed(found[graph.outputs[-1]], graph.outputs[-1])
    return Lowered(te.lower(te.auto_schedule(out, chip)), forms)
