"""What lies in the padding of blocked layouts, where work runs over whole blocks.

A conversion pads with zeros, and so does the cube. Elementwise work makes other numbers of them:
adds(x, 1) leaves ones in lanes that hold no element. A cube multiplies these by the zeros that pad
the other operand, which harms nobody as long as they are finite, and as one operand has zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.graph.aliases import cut_spans, moves_nothing
from ascend_lab.graph.draft import Draft
from ascend_lab.graph.ir import Graph, Node, TensorType, operator_of
from ascend_lab.graph.lower import CONVOLUTIONS, PRODUCTS
from ascend_lab.graph.lower.matmul import operand_layouts
from ascend_lab.graph.lower.vector import ROW_WISE
from ascend_lab.ops.formats import round_to

BLOCK = 16
Bounds = tuple[float, float]
"""Least and largest number in the padding lanes of a tensor."""


def padding_after(graph: Graph, node: Node, known: Mapping[str, Bounds]) -> Bounds:
    """Return the bounds behind an elementwise node on images; infinite or NaN if it overflows.

    The extremes of the operands are tried: right for every operator whose largest results, as
    those of a square, belong to them. What is not `known` holds zeros.
    """
    out = graph.types[node.output]
    sides = [_bounds(graph, name, out, known) for name in node.inputs]
    settings = operator_of(node.op).settings(node.attrs)
    with np.errstate(all="ignore"):
        found = [
            operator_of(node.op).formula(*map(np.float64, numbers), **settings)
            for numbers in product(*sides)
        ]
        narrow = round_to(np.array(found, np.float64), out.dtype).astype(np.float64)
    return float(narrow.min()), float(narrow.max())


def _bounds(graph: Graph, name: str, out: TensorType, known: Mapping[str, Bounds]) -> Bounds:
    """Return the bounds of an operand beside `out`; a constant is repeated where it is shorter."""
    constant = graph.constants.get(name)
    if constant is None:
        return known.get(name, (0.0, 0.0))
    shape = (1, 1, 1, *constant.type.shape)
    if shape[-3] == out.shape[1]:
        return 0.0, 0.0
    values = constant.array().astype(np.float64)
    return float(values.min()), float(values.max())


def dirties_columns(graph: Graph, node: Node, written: str) -> bool:
    """Tell whether a product may leave numbers, not zeros, in the columns that pad its result.

    Its columns are the rows of b when b is read transposed. What was `written` in fractals holds
    anything in rows that pad it; row-wise operators may yet be moved there.
    """
    b = node.inputs[1]
    maker = graph.producers.get(b)
    fractal = written == "FRACTAL_NZ" or (maker is not None and maker.op in ROW_WISE)
    ragged = graph.types[b].shape[-2] % BLOCK != 0
    return bool(node.attr("trans_b", False)) and ragged and fractal


# Which layout every tensor has: operators of the cube choose, what is elementwise follows.
#
# Walking forward, each node says which layouts it reads and writes. Convolutions and pooling take
# NC1HWC0, matrix products fractals; elementwise operators, joins and cuts along whole channel
# blocks
# take the layout their operands have; everything else is row-major. Where an operand is in
# another
# layout a `trans_data` node converts it, once for all its readers, and what was converted before
# is
# never converted back: the tensor it came from is still there.


CUBE_IMAGES = (*CONVOLUTIONS, "conv_transpose2d")
IMAGES = (*CUBE_IMAGES, "max_pool2d", "avg_pool2d")
POOL_GRADIENTS = ("max_pool2d_grad", "avg_pool2d_grad")
CHANNEL_SUMS = ("bn_training_reduce", "bn_training_update_grad")
FOLLOWING_IMAGES = ("global_avg_pool", "global_max_pool")
ELEMENTWISE = frozenset((
    "abs", "add", "adds", "cast", "clip", "elu", "exp", "gelu", "hard_sigmoid", "hard_swish",
    "leaky_relu", "max", "min", "mul", "muls", "neg", "relu", "relu6", "sigmoid", "silu",
    "softplus", "square", "sub", "tanh",
))  # fmt: skip
"""Operators that work lane by lane, and make a finite number of a zero."""


def assign_layouts(graph: Graph, *, follow: bool = True) -> Graph:
    """Return the graph with layouts and `trans_data` nodes; the values are the same.

    Without `follow` only the cube's operators leave row-major memory: what each pays alone.
    """
    work = _Assigner(graph, follow)
    for node in graph.nodes:
        work.add(node)
    return work.finish()


def weights_in_blocks(graph: Graph, node: Node) -> bool:
    """Tell whether a weight gradient reads images in blocks: one group, or one per channel."""
    x, grad = graph.in_types(node)
    groups = node.attr("groups", 1)
    return bool(groups == 1 or groups == x.shape[1] == grad.shape[1])


class _Assigner:
    """The graph with layouts as far as it is built: every tensor in every layout there is."""

    def __init__(self, graph: Graph, follow: bool) -> None:
        self.graph, self.follow = graph, follow
        self.nodes: list[Node] = []
        self.types = dict(graph.types)
        self.forms: dict[str, dict[str, str]] = {}
        self.padding: dict[str, Bounds] = {}
        self.dirty: set[str] = set()
        for name in (*graph.inputs, *graph.constants):
            self.forms[name] = {graph.types[name].layout: name}

    def layouts(self, name: str) -> list[str]:
        """Return the layouts a tensor exists in, the first being the one it was written in."""
        return list(self.forms[name])

    def is_constant(self, name: str) -> bool:
        return name in self.graph.constants

    def convert(self, name: str, layout: str) -> str:
        """Return the tensor in a layout; constants are packed when a kernel is lowered."""
        forms = self.forms[name]
        if self.is_constant(name) or layout in forms:
            return forms.get(layout, name)
        forms[layout] = self.converted(name, next(iter(forms.values())), layout)
        return forms[layout]

    def converted(self, name: str, source: str, layout: str) -> str:
        """Append a conversion of one form of a tensor; return the new form's name."""
        new = f"{name}.{layout}"
        while new in self.types:
            new = f"{new}_"
        self.types[new] = replace(self.types[name], layout=layout)
        self.nodes.append(Node(new, "trans_data", (source,), (new,), {"layout": layout}))
        return new

    def clean(self, name: str) -> None:
        """Replace the fractals of a tensor by a copy with zeros in the padding."""
        forms = self.forms[name]
        forms["FRACTAL_NZ"] = self.converted(name, forms["FRACTAL_NZ"], "FRACTAL_NZ")
        self.dirty.remove(name)

    def add(self, node: Node) -> None:
        """Append a node, operands converted to what it reads."""
        reads, writes = self.choose(node)
        cube = node.op in (*PRODUCTS, "flash_attention")
        for name, layout in zip(node.inputs, reads, strict=True):
            if cube and layout == "FRACTAL_NZ" and name in self.dirty:
                self.clean(name)
        if node.op in PRODUCTS:
            written = self.layouts(node.inputs[1])[0]
            if dirties_columns(self.graph, node, written):
                self.dirty.add(node.output)
        given = tuple(self.convert(n, to) for n, to in zip(node.inputs, reads, strict=True))
        self.nodes.append(replace(node, inputs=given))
        for name in node.outputs:
            self.types[name] = replace(self.types[name], layout=writes)
            self.forms[name] = {writes: name}
        if writes == "NC1HWC0" and node.op not in (*ELEMENTWISE, *CUBE_IMAGES):
            ends = [self.padding.get(n, (0.0, 0.0)) for n in node.inputs]
            low, high = min(a for a, _ in ends), max(b for _, b in ends)
            if node.op in CHANNEL_SUMS and (low, high) != (0.0, 0.0):
                low, high = -math.inf, math.inf  # sums of what pads, however much that is
            self.padding.update(dict.fromkeys(node.outputs, (low, high)))

    def choose(self, node: Node) -> tuple[Sequence[str], str]:
        """Return the layout of each operand and of the results."""
        count = len(node.inputs)
        if node.op in PRODUCTS:
            return operand_layouts(node, self.graph.in_types(node)), "FRACTAL_NZ"
        if node.op == "flash_attention":
            rows = any(len(t.shape) < 2 or t.shape[-2] == 1 for t in self.graph.in_types(node)[3:])
            mask = "ND" if rows else "FRACTAL_NZ"
            return (*("FRACTAL_NZ",) * 3, *(mask,) * (count - 3)), "FRACTAL_NZ"
        if node.op in IMAGES:
            dense = node.op == "conv2d" and node.attr("groups", 1) == 1
            rest = ("FRACTAL_Z" if dense else "ND", "ND")  # constants are packed when lowered
            return ("NC1HWC0", *rest[: count - 1]), "NC1HWC0"
        if node.op in POOL_GRADIENTS and self.types[node.output].dtype == "fp16":
            return ("NC1HWC0",) * count, "NC1HWC0"
        if node.op in CHANNEL_SUMS and DTYPE_BYTES[self.types[node.inputs[0]].dtype] == 2:
            return ("NC1HWC0",) * count, "NC1HWC0"
        if node.op == "conv2d_grad_weight" and weights_in_blocks(self.graph, node):
            wide = DTYPE_BYTES[self.types[node.output].dtype] == 4
            dense = "FRACTAL_Z:16" if wide else "FRACTAL_Z"
            return ("NC1HWC0",) * count, dense if node.attr("groups", 1) == 1 else "ND"
        if self.follow:
            layout = self.followed(node)
            if layout != "ND":
                narrow = DTYPE_BYTES[self.types[node.output].dtype] == 1
                return (layout,) * count, f"{layout}:16" if narrow else layout
        return ("ND",) * count, "ND"

    def followed(self, node: Node) -> str:
        """Return the blocked layout that a node can take over from its operands, or ND."""
        given = [n for n in node.inputs if not self.is_constant(n)]
        found = [x for n in given for x in self.layouts(n) if x in ("NC1HWC0", "FRACTAL_NZ")]
        if not found:
            return "ND"
        layout, types = found[0], [self.graph.types[n] for n in node.inputs]
        outs = self.graph.out_types(node)
        if any(DTYPE_BYTES[t.dtype] == 1 for t in types):
            return "ND"
        if node.op in ELEMENTWISE:
            fits = self.fits(node, layout, outs[0]) and self.stays_finite(node, layout)
            return layout if fits else "ND"
        if node.op in FOLLOWING_IMAGES and layout == "NC1HWC0":
            return layout
        return layout if self.cuts_blocks(node, given, layout) else "ND"

    def fits(self, node: Node, layout: str, out: TensorType) -> bool:
        """Tell whether all operands broadcast to the result in its stored shape."""
        if layout == "FRACTAL_NZ" and out.shape[-1] % 16:
            return False
        rank = 4 if layout == "NC1HWC0" else len(out.shape)
        for name in node.inputs:
            kind = self.graph.types[name]
            if self.is_constant(name):
                if len(kind.shape) > rank:
                    return False
            elif layout == "FRACTAL_NZ":
                if kind.shape != out.shape:
                    return False
            elif len(kind.shape) != 4 or (kind.shape[1] != out.shape[1]):
                return False
        return len(out.shape) == rank

    def stays_finite(self, node: Node, layout: str) -> bool:
        """Tell whether the channels that pad an image's last block stay finite; note bounds."""
        if layout != "NC1HWC0" or self.graph.types[node.output].shape[1] % BLOCK == 0:
            return True
        low, high = padding_after(self.graph, node, self.padding)
        self.padding[node.output] = low, high
        return math.isfinite(low) and math.isfinite(high)

    def cuts_blocks(self, node: Node, given: Sequence[str], layout: str) -> bool:
        """Tell whether a join or cut works on whole blocks of a layout."""
        if node.op not in ("concat", "slice", "split") or len(given) < len(node.inputs):
            return False
        if any(layout not in self.layouts(n) for n in given):
            return False
        sides = [*self.graph.in_types(node), *self.graph.out_types(node)]
        cuts = cut_spans(self.graph, node) if node.op != "concat" else None
        if layout == "FRACTAL_NZ":
            axis = cuts[0] if cuts else node.attr("axis", 0) % len(sides[0].shape)
            batched = axis < len(sides[0].shape) - 2 and (cuts or node.op == "concat")
            return bool(batched) and all(t.shape[-1] % BLOCK == 0 for t in sides)
        if node.op == "slice":
            return self.slices_image(node)
        axis = node.attr("axis", 0) % 4
        return axis != 1 or all(t.shape[1] % BLOCK == 0 for t in sides)

    def slices_image(self, node: Node) -> bool:
        """Tell whether a slice takes whole blocks of channels, and skips nothing."""
        begin, end = (node.attr(key)[1] for key in ("begin", "end"))
        whole = self.graph.types[node.inputs[0]].shape[1]
        steps = node.attr("step") or (1,)
        ends = begin % BLOCK == 0 and (end % BLOCK == 0 or end >= whole)
        return ends and begin >= 0 and end > 0 and all(n == 1 for n in steps)

    def finish(self) -> Graph:
        """Return the graph, its outputs row-major."""
        outs = tuple(self.convert(name, "ND") for name in self.graph.outputs)
        return replace(self.graph, nodes=tuple(self.nodes), types=self.types, outputs=outs)


# Conversions that are not needed: there and back, twice the same, or of bytes that stay put.


def cancel_trans_data(graph: Graph) -> Graph:
    """Return the graph with chains of conversions shortened, and equal ones merged.

    x -> A -> B becomes x -> B, and x itself where B is the layout of x and has no padding, which
    there and back fills with zeros.
    """
    edit = Draft(graph)
    seen: dict[tuple[str, str], str] = {}
    origin: dict[str, str] = {}
    for node in edit:
        if node.op != "trans_data":
            continue
        first, layout = node.inputs[0], str(node.attr("layout"))
        source = origin.get(first, first)
        kind, made = edit.types[source], node.output
        if kind.layout == layout and not kind.map.padding_bytes:
            edit.replace(node.output, source)
            continue
        if (source, layout) in seen:
            made = seen[source, layout]
            edit.replace(node.output, made)
        elif source != first:
            made = edit.insert("trans_data", (source,), {"layout": layout}, node.name)
            edit.replace(node.output, made)
        seen[source, layout] = made
        origin[made] = source
    return edit.finish()


# Layouts of a graph's tensors: who chooses, who follows, where conversions stand.


__all__ = ["assign_layouts", "cancel_trans_data", "moves_nothing"]
