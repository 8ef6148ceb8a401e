"""Convolutions that absorb padding, or that are matrix products."""

from __future__ import annotations

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Node, TensorType
from ascend_lab.graph.passes.rewrite import Pass, derived, settings, sweep
from ascend_lab.ops.shapes import pad_pairs, pair


def absorb_padding(rw: Draft, node: Node) -> bool:
    """Let a convolution pad with zeros itself."""
    source = rw.only(node.inputs[0], "pad")
    if source is None or settings(source)["value"] != 0:
        return False
    outer = settings(source)["pads"]
    if any(any(p) for p in outer[:2]):
        return False
    own = pad_pairs("conv2d", settings(node)["pad"])
    pads = tuple((a[0] + b[0], a[1] + b[1]) for a, b in zip(outer[2:], own, strict=True))
    return rw.become(node, node.op, (*source.inputs, *node.inputs[1:]), {**node.attrs, "pad": pads})


def to_matmul(rw: Draft, node: Node) -> bool:
    """Turn a convolution whose window is the whole image into a matrix product (n, c h w).

    One node becomes three: of use where matrix products are what is tuned, not to save nodes.
    """
    x, weight = (rw.type(name) for name in node.inputs[:2])
    options = settings(node)
    whole = x.shape[2:] == weight.shape[2:] and rw.type(node.output).shape[2:] == (1, 1)
    padded = any(map(any, pad_pairs("conv2d", options["pad"])))
    spread = pair("dilation", options["dilation"])
    constant = rw.constant(node.inputs[1])
    bias = rw.constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if not whole or padded or options["groups"] != 1 or constant is None:
        return False
    if spread != (1, 1) and weight.shape[2:] != (1, 1):
        return False
    if options["out_dtype"] or x.dtype == "int8" or (bias is None and len(node.inputs) > 2):
        return False
    k, n = weight.shape[0], x.shape[0]
    inner = weight.elements // k
    flat = derived(TensorType((k, inner), weight.dtype), lambda w: w.reshape(k, inner), constant)
    rows = rw.insert("reshape", node.inputs[:1], {"shape": (n, inner)}, f"{node.name}_rows")
    table = rw.add(flat, f"{node.inputs[1]}_matrix")
    op = "gemm" if bias is not None else "matmul"
    made = rw.insert(op, (rows, table, *node.inputs[2:]), {"trans_b": True}, f"{node.name}_product")
    return rw.become(node, "reshape", [made], {"shape": rw.type(node.output).shape})


PAD_CONV = Pass(
    "PadConv2dFusionPass",
    "fuse",
    sweep(absorb_padding, "conv2d", "depthwise_conv2d"),
    "lets a convolution pad with zeros itself",
)
FULLY_CONNECTED = Pass(
    "ConvToFullyConnectionFusionPass",
    "opt-in",
    sweep(to_matmul, "conv2d"),
    "turns a convolution over a window as large as the image into a matrix product",
    "rounded",
)
