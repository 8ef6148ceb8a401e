"""The gradient of an image as a plain convolution, for weights that change from step to step.

A transposed convolution's kernel has weights packed when it was compiled, one part per phase of the
stride. With weights that are computed, it is a convolution with stride 1 of the gradient, zeros
between its pixels, with the weights turned upside down and inputs and outputs exchanged:

    dx = conv2d(stretched(grad), flipped(weight), pad = reach - 1 - pad)
"""

from __future__ import annotations

import numpy as np

from ascend_lab.graph import Constant, Editor, Graph, Node, TensorType
from ascend_lab.graph.infer import operator_of
from ascend_lab.ops.convolution import geometry
from ascend_lab.ops.shapes import Shape, pair
from ascend_lab.ops.windowing import Pair, reach


def as_convolutions(graph: Graph) -> Graph:
    """Return the graph with transposed convolutions of one group and computed weights rewritten."""
    edit = Editor(graph)
    for node in edit:
        if node.op != "conv_transpose2d" or len(node.inputs) > 2 or node.attr("groups", 1) != 1:
            continue
        if node.inputs[1] not in edit.constants:
            made = _convolution(edit, node)
            if made:
                edit.replace(node.output, made)
    return edit.finish()


def _convolution(edit: Editor, node: Node) -> str:
    """Append the convolution; return its output, "" where the padding exceeds the kernel's."""
    attrs = operator_of(node.op).settings(node.attrs)
    step, pads, spread = geometry(attrs["stride"], attrs["pad"], attrs["dilation"])
    grad, weight = node.inputs
    kernel = edit.types[weight].shape[2:]
    extra = pair("output_padding", attrs["output_padding"], least=0)
    spans = reach((kernel[0], kernel[1]), spread)
    sides = tuple((n - 1 - low, n - 1 - high) for n, (low, high) in zip(spans, pads, strict=True))
    if min(map(min, sides)) < 0:
        return ""
    turned = flipped(edit, weight, node.name)
    if spans == (1, 1):  # zeros stay zeros: convolve first, the image is smaller
        small = edit.insert("conv2d", (grad, turned), {}, node.name)
        return stretched(edit, small, step, extra, node.name)
    image = stretched(edit, grad, step, extra, node.name)
    return edit.insert("conv2d", (image, turned), {"pad": sides, "dilation": spread}, node.name)


def stretched(edit: Editor, x: str, step: Pair, extra: Pair, name: str) -> str:
    """Append zeros between pixels: the gradient of reading every stride-th one."""
    high, wide = edit.types[x].shape[2:]
    size = ((high - 1) * step[0] + 1 + extra[0], (wide - 1) * step[1] + 1 + extra[1])
    if size == (high, wide):
        return x
    # a stride is at most the size: both axes then read each pixel once
    attrs = {"kernel": 1, "stride": step, "size": size}
    return edit.insert("avg_pool2d_grad", (x,), attrs, f"{name}.stretched")


def flipped(edit: Editor, weight: str, name: str) -> str:
    """Append weights (k, c, r, s) as (c, k, r, s), the last two axes turned around."""
    kind = edit.types[weight]
    k, c, r, s = kind.shape
    if (r, s) == (1, 1):
        return edit.insert("transpose", (weight,), {"perm": (1, 0, 2, 3)}, f"{name}.turned")
    title, taps = f"{name}.flipped", np.arange(r * s, dtype=np.int32)[::-1].copy()
    indices = edit.constant(Constant(TensorType((r * s,), "int32"), taps), f"{title}.taps")
    rows = _reshaped(edit, edit.insert("transpose", (weight,), {"perm": (2, 3, 1, 0)}, title),
                     (r * s, c * k), title)  # fmt: skip
    back = edit.insert("gather", (rows, indices), {"axis": 0}, title)
    shaped = _reshaped(edit, back, (r, s, c, k), title)
    return edit.insert("transpose", (shaped,), {"perm": (2, 3, 0, 1)}, title)


def _reshaped(edit: Editor, x: str, shape: Shape, name: str) -> str:
    return edit.insert("reshape", (x,), {"shape": shape}, name)
