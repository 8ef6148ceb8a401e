"""Batch norm beside convolutions: sums of channels and numbers per channel stay in NC1HWC0.

An image (n, c1, h, w, c0) is folded over n, h and w whatever its channels do, and what is left,
(1, c, 1, 1), lies there as (1, c1, 1, 1, c0): it broadcasts without moving. The forward operator
becomes what the vendor's two kernels compute, a reduction and an update,

    mean, variance          y = x a + b,  a = scale / sqrt(variance + epsilon),  b = bias - mean a

so that the image is read twice and written once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ascend_lab.graph import Editor, Graph, Node
from ascend_lab.graph.infer import operator_of
from ascend_lab.graph.layouts.assign import ELEMENTWISE, _Assigner
from ascend_lab.graph.passes.rewrite import derived
from ascend_lab.ops.shapes import axes_of

FOLDED = ((0,), (2,), (3,), (0, 3), (2, 3), (0, 2, 3))
"""Axes of images that blocks of channels do not cut."""
ALSO_ELEMENTWISE = frozenset(("greater", "less", "rsqrt", "select", "sign"))
"""Lane by lane too; rsqrt follows an addition of epsilon, so that padding stays finite."""
FOLDS = ("reduce_sum", "reduce_mean")


def images_in_blocks(graph: Graph) -> Graph:
    """Return the graph with layouts, as `assign_layouts`; folds over images stay in NC1HWC0."""
    work = _Images(graph, True)
    for node in graph.nodes:
        work.add(node)
    return work.finish()


class _Images(_Assigner):
    """Layouts as for any graph, and folds and selections of images in the layout they have."""

    def followed(self, node: Node) -> str:
        """Return the layout that a node takes over, NC1HWC0 also for folds over images."""
        given = [n for n in node.inputs if not self.is_constant(n)]
        image = any("NC1HWC0" in self.layouts(n) for n in given)
        if image and node.op in FOLDS and folds_image(self.graph, node):
            return "NC1HWC0"
        if image and node.op in ALSO_ELEMENTWISE - ELEMENTWISE:
            out = self.graph.types[node.output]
            fits = self.fits(node, "NC1HWC0", out)
            return "NC1HWC0" if fits and self.stays_finite(node, "NC1HWC0") else "ND"
        return super().followed(node)


def folds_image(graph: Graph, node: Node) -> bool:
    """Tell whether a node sums each channel of images and keeps the axes."""
    shape = graph.types[node.inputs[0]].shape
    if len(shape) != 4 or not node.attr("keepdims", False):
        return False
    return axes_of("fold", node.attr("axis"), shape) in FOLDED


def batch_norms_apart(graph: Graph) -> Graph:
    """Return the graph with every batch norm of images by batch statistics in its parts."""
    edit = Editor(graph)
    for node in edit:
        image = len(edit.types[node.inputs[0]].shape) == 4
        if node.op == "batch_norm_training" and image and node.attr("momentum", 0.9) == 0.0:
            _apart(edit, node)
    return edit.finish()


def _apart(edit: Editor, node: Node) -> None:
    x, scale, bias = node.inputs[:3]
    kind, name = edit.types[x], node.name
    channels = (kind.shape[1],)
    epsilon = operator_of(node.op).settings(node.attrs)["epsilon"]

    def put(op: str, *inputs: str, **attrs: Any) -> str:
        return edit.insert(op, inputs, attrs, f"{name}.{op}")

    wide = x if kind.dtype == "fp32" else put("cast", x, dtype="fp32")
    mean, spread = edit.nodes[put("bn_training_reduce", x)].outputs
    rate = put("rsqrt", put("adds", spread, number=epsilon))
    slope = put("mul", _column(edit, scale, name), rate)
    offset = put("sub", _column(edit, bias, name), put("mul", mean, slope))
    y = put("add", put("mul", wide, slope), offset)
    edit.replace(node.outputs[0], y if kind.dtype == "fp32" else put("cast", y, dtype=kind.dtype))
    for old, new in zip(node.outputs[1:], (mean, spread), strict=True):
        edit.replace(old, put("reshape", new, shape=channels))


def _column(edit: Editor, name: str, norm: str) -> str:
    """Return numbers per channel as (1, c, 1, 1); a constant stays one."""
    shape = (1, edit.types[name].shape[0], 1, 1)
    if name not in edit.constants:
        return edit.insert("reshape", (name,), {"shape": shape}, f"{norm}.reshape")
    kind = replace(edit.types[name], shape=shape)
    made = derived(kind, lambda values: values.reshape(shape), edit.constants[name])
    return edit.constant(made, f"{name}.column")


def casts_apart(graph: Graph) -> Graph:
    """Return the graph with a widening cast for each of its readers: inside a kernel it is free.

    Shared, it would be a kernel of its own that writes twice the bytes it reads.
    """
    edit = Editor(graph)
    for node in edit:
        readers = graph.readers[node.output]
        wide = node.op == "cast" and node.attr("dtype") == "fp32" and len(readers) > 1
        if not wide or node.output in graph.outputs or len(graph.types[node.output].shape) != 4:
            continue
        for reader in readers[1:]:
            own = edit.insert("cast", node.inputs, node.attrs, node.name)
            now = edit.current(reader.name)
            edit.put(replace(now, inputs=tuple(own if n == node.output else n for n in now.inputs)))
    return edit.finish()
