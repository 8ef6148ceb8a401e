"""Which layout every tensor has: operators of the cube choose, what is elementwise follows.

Walking forward, each node says which layouts it reads and writes. Convolutions and pooling take
NC1HWC0, matrix products fractals; elementwise operators, joins and cuts along whole channel blocks
take the layout their operands have; everything else is row-major. Where an operand is in another
layout a `trans_data` node converts it, once for all its readers, and what was converted before is
never converted back: the tensor it came from is still there.

A conversion pads with zeros, and so does the cube. Elementwise work makes other numbers of them:
adds(x, 1) leaves ones in lanes that hold no element. A cube multiplies these by the zeros that pad
the other operand, which harms nobody as long as they are finite, and as one operand has zeros.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from ascend_lab.compiler.aliases import cut_spans
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import SMALL_PIXELS, Graph, Node, TensorType, operator_of
from ascend_lab.compiler.lower import PRODUCTS, matmul, vector
from ascend_lab.machine.chip import DTYPE_BYTES
from ascend_lab.operators.ops import casts, formats

BLOCK = 16
MATRIX_OPS = (*PRODUCTS, "flash_attention")
"""Operators of the cube that read matrices in fractals."""
Bounds = tuple[float, float]
"""Least and largest number in the padding lanes of a tensor."""


def assign_layouts(graph: Graph, *, follow: bool = True) -> Graph:
    """Return the graph with layouts and `trans_data` nodes; the values are the same.

    Without `follow` only the cube's operators leave row-major memory: what each pays alone.
    """
    return Assigner(graph, follow).assigned()


class Assigner:
    """The graph with layouts as far as it is built: every tensor in every layout there is."""

    def __init__(self, graph: Graph, follow: bool = True) -> None:
        self.graph = graph
        self.follow = follow
        self.draft = Draft(graph, nodes=())
        self.forms = {n: {graph.types[n].layout: n} for n in (*graph.inputs, *graph.constants)}
        self.padding: dict[str, Bounds] = {}
        self.dirty: set[str] = set()

    def assigned(self, layout: str | None = "ND") -> Graph:
        """Return the graph, its outputs in a layout, row-major by default; None: as made."""
        for node in self.graph.nodes:
            self.add(node)
        outs = self.graph.outputs
        if layout is not None:
            outs = tuple(self.convert(name, layout) for name in outs)
        nodes = tuple(self.draft.nodes.values())
        return replace(self.graph, nodes=nodes, types=self.draft.types, outputs=outs)

    def convert(self, name: str, layout: str) -> str:
        """Return the tensor in a layout."""
        forms = self.forms[name]
        if layout not in forms:
            forms[layout] = self.converted(name, next(iter(forms.values())), layout)
        return forms[layout]

    def operand(self, node: Node, place: int, layout: str) -> str:
        """Return an operand as a node reads it.

        Constants that a kernel packs for itself stay as they are: weights, and what is broadcast.
        A constant image is none of these: somebody else has to lay it out.
        """
        name = node.inputs[place]
        weights = _on_cube(node) and place > 0
        packs_all = node.op in (*MATRIX_OPS, *casts.QUANTISED) or node.has("lanes")
        is_image = len(self.graph.types[name].shape) == 4
        packed = weights or packs_all or not is_image
        if packed and name in self.graph.constants:
            return self.forms[name].get(layout, name)
        return self.convert(name, layout)

    def converted(self, name: str, source: str, layout: str) -> str:
        """Append a conversion of one form of a tensor; return the new form's name."""
        new = self.draft.new_name(f"{name}.{layout}")
        kind = replace(self.draft.types[name], layout=layout)
        return self.draft.put(Node(new, "trans_data", (source,), (new,), {"layout": layout}), kind)

    def add(self, node: Node) -> None:
        """Append a node, operands converted to what it reads."""
        reads, writes = self.choose(node)
        cube = node.op in MATRIX_OPS
        for name, layout in zip(node.inputs, reads, strict=True):
            if cube and layout == "FRACTAL_NZ" and name in self.dirty:  # copy, with zeros around
                forms = self.forms[name]
                forms[layout] = self.converted(name, forms[layout], layout)
                self.dirty.remove(name)
        if node.op in PRODUCTS:
            written = next(iter(self.forms[node.inputs[1]]))
            if dirties_columns(self.graph, node, written):
                self.dirty.add(node.output)
        given = tuple(self.operand(node, place, to) for place, to in enumerate(reads))
        kinds = (replace(self.graph.types[name], layout=writes) for name in node.outputs)
        self.draft.put(replace(node, inputs=given), *kinds)
        self.forms.update((name, {writes: name}) for name in node.outputs)
        if writes == "NC1HWC0" and not (node.has("lanes") or _on_cube(node)):
            ends = [self.padding.get(n, (0.0, 0.0)) for n in node.inputs]
            low = min(a for a, _ in ends)
            high = max(b for _, b in ends)
            if node.has("channel sums") and (low, high) != (0.0, 0.0):
                # sums of what pads, however much that is
                low = -math.inf
                high = math.inf
            self.padding.update(dict.fromkeys(node.outputs, (low, high)))

    def choose(self, node: Node) -> tuple[Sequence[str], str]:
        """Return the layout of each operand and of the results."""
        count = len(node.inputs)
        kinds = self.graph.in_types(node)
        if node.op in PRODUCTS:
            return matmul.operand_layouts(node, kinds), "FRACTAL_NZ"
        if node.op == "flash_attention":
            rows = any(len(t.shape) < 2 or t.shape[-2] == 1 for t in kinds[3:])
            mask = "ND" if rows else "FRACTAL_NZ"
            return (*("FRACTAL_NZ",) * 3, *(mask,) * (count - 3)), "FRACTAL_NZ"
        if _on_cube(node) or node.has("pooling"):
            dense = node.op == "conv2d" and node.attr("groups", 1) == 1
            rest = ("FRACTAL_Z" if dense else "ND", "ND")  # constants are packed when lowered
            small = SMALL_PIXELS in self.forms[node.inputs[0]] and node.op == "conv2d"
            image = SMALL_PIXELS if small else "NC1HWC0"
            return (image, *rest[: count - 1]), "NC1HWC0"
        out = self.graph.types[node.output].dtype
        narrow = node.has("channel sums") and DTYPE_BYTES[kinds[0].dtype] == 2
        if narrow or (node.has("pool gradient") and out == "fp16"):
            return ("NC1HWC0",) * count, "NC1HWC0"
        if node.has("frames"):
            return ("ND",) * count, SMALL_PIXELS if node.attr("small", False) else "NC1HWC0"
        if node.op == "conv2d_grad_weight":
            groups = node.attr("groups", 1)
            if groups == 1 or groups == kinds[0].shape[1] == kinds[1].shape[1]:
                wide = "FRACTAL_Z:16" if DTYPE_BYTES[out] == 4 else "FRACTAL_Z"
                return ("NC1HWC0",) * count, wide if groups == 1 else "ND"
        if node.op in casts.QUANTISED:
            return self.whole(node)
        layout = self.followed(node) if self.follow else "ND"
        small = layout != "ND" and DTYPE_BYTES[out] == 1
        return (layout,) * count, f"{layout}:16" if small else layout

    def whole(self, node: Node) -> tuple[Sequence[str], str]:
        """Return the layouts of a quantising operator: those of its operand; bytes fill blocks."""
        blocks = ("NC1HWC0", "FRACTAL_NZ")
        layout = next((x for x in self.forms[node.inputs[0]] if x in blocks), "ND")
        if not self.follow or node.inputs[0] in self.graph.constants:
            layout = "ND"
        reads = ("ND" if n in self.graph.constants else layout for n in node.inputs)
        if layout == "NC1HWC0" and formats.is_float(self.graph.types[node.output].dtype):
            x = self.padding.get(node.inputs[0], (0.0, 0.0))
            reach = 256 * node.attr("scale", 1.0)
            self.padding[node.output] = (x[0] - reach, x[1] + reach)
        return tuple(reads), layout

    def followed(self, node: Node) -> str:
        """Return the blocked layout that a node can take over from its operands, or ND."""
        given = [n for n in node.inputs if n not in self.graph.constants]
        blocks = ("NC1HWC0", "FRACTAL_NZ")
        layout = next((x for n in given for x in self.forms[n] if x in blocks), "ND")
        if layout == "ND" or any(DTYPE_BYTES[t.dtype] == 1 for t in self.graph.in_types(node)):
            return "ND"
        if node.has("lanes"):
            fits = self.fits(node, layout) and self.stays_finite(node, layout)
            return layout if fits else "ND"
        if node.has("image fold") and layout == "NC1HWC0":
            return layout
        return layout if self.cuts_blocks(node, given, layout) else "ND"

    def fits(self, node: Node, layout: str) -> bool:
        """Tell whether all operands broadcast to the result in its stored shape.

        Zeros that fill up the columns of a product stay zeros in sums; nothing else is asked to.
        """
        shape = self.graph.types[node.output].shape
        if layout == "FRACTAL_NZ" and shape[-1] % BLOCK and node.op != "add":
            return False
        rank = 4 if layout == "NC1HWC0" else len(shape)
        for name in node.inputs:
            own = self.graph.types[name].shape
            if name in self.graph.constants:
                if len(own) > rank:
                    return False
            elif layout == "FRACTAL_NZ":
                if own != shape:
                    return False
            elif len(own) != 4 or own[1] != shape[1]:
                return False
        return len(shape) == rank

    def stays_finite(self, node: Node, layout: str) -> bool:
        """Tell whether the channels that pad an image's last block stay finite; note bounds."""
        if layout != "NC1HWC0" or self.graph.types[node.output].shape[1] % BLOCK == 0:
            return True
        bounds = self.padding[node.output] = padding_after(self.graph, node, self.padding)
        return all(map(math.isfinite, bounds))

    def cuts_blocks(self, node: Node, given: Sequence[str], layout: str) -> bool:
        """Tell whether a join or cut works on whole blocks of a layout."""
        if node.op not in ("concat", "slice", "split") or len(given) < len(node.inputs):
            return False
        if any(layout not in self.forms[n] for n in given):
            return False
        sides = [*self.graph.in_types(node), *self.graph.out_types(node)]
        if layout == "FRACTAL_NZ":
            rank = len(sides[0].shape)
            cuts = None if node.op == "concat" else cut_spans(self.graph, node)
            axis = cuts[0] if cuts else node.attr("axis", 0) % rank
            batched = axis < rank - 2 and bool(cuts or node.op == "concat")
            columns = bool(cuts) and (axis, rank) == (1, 2)  # the outermost axis in memory
            return (batched or columns) and all(t.shape[-1] % BLOCK == 0 for t in sides)
        if node.op == "slice":  # whole blocks of channels, nothing skipped
            begin, end = (node.attr(key)[1] for key in ("begin", "end"))
            ends = begin % BLOCK == 0 and (end % BLOCK == 0 or end >= sides[0].shape[1])
            return ends and begin >= 0 and end > 0 and set(node.attr("step") or (1,)) == {1}
        axis = node.attr("axis", 0) % 4
        return axis != 1 or all(t.shape[1] % BLOCK == 0 for t in sides)


def _on_cube(node: Node) -> bool:
    """Tell whether the cube computes an image."""
    return node.has("convolution") or node.op == "conv_transpose2d"


# -- what lies in the padding ---------------------------------------------------------------------
def padding_after(graph: Graph, node: Node, known: Mapping[str, Bounds]) -> Bounds:
    """Return the bounds behind an elementwise node on images; infinite or NaN if it overflows.

    The extremes of the operands are tried: right for every operator whose largest results, as
    those of a square, belong to them. What is not `known` holds zeros.
    """
    out = graph.types[node.output]
    operator = operator_of(node.op)
    sides = [_bounds(graph, name, out, known) for name in node.inputs]
    settings = operator.settings(node.attrs)
    with np.errstate(all="ignore"):
        found = [operator.formula(*map(np.float64, ends), **settings) for ends in product(*sides)]
        narrow = formats.round_to(np.array(found, np.float64), out.dtype).astype(np.float64)
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
    fractal = written == "FRACTAL_NZ" or (maker is not None and maker.op in vector.ROW_WISE)
    ragged = graph.types[b].shape[-2] % BLOCK != 0
    return bool(node.attr("trans_b", False)) and ragged and fractal


# -- conversions that are not needed --------------------------------------------------------------
def cancel_trans_data(graph: Graph) -> Graph:
    """Return the graph with chains of conversions shortened, and equal ones merged.

    x -> A -> B becomes x -> B, and x itself where B is the layout of x and has no padding, which
    there and back fills with zeros.
    """
    draft = Draft(graph)
    seen: dict[tuple[str, str], str] = {}
    origin: dict[str, str] = {}
    for node in draft:
        if node.op != "trans_data":
            continue
        first = node.inputs[0]
        layout = str(node.attr("layout"))
        source = origin.get(first, first)
        kind = draft.types[source]
        made = node.output
        if kind.layout == layout and not kind.map.padding_bytes:
            draft.replace(made, source)
            continue
        if (source, layout) in seen:
            made = seen[source, layout]
        elif source != first:
            made = draft.insert("trans_data", (source,), {"layout": layout}, node.name)
        draft.replace(node.output, made)
        seen[source, layout] = made
        origin[made] = source
    return draft.finish()
