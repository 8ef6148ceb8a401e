"""Gives every tensor of a graph its layout: the cube's operators choose, elementwise ones follow.

In conv, relu, softmax, the convolution reads and writes NC1HWC0 (blocks of 16 channels), the relu
keeps that layout, and a conversion gives the softmax row-major memory.

The graph is walked forward. Each node says which layouts it reads and writes: convolutions and
pooling NC1HWC0, matrix products fractals. Elementwise operators, and joins and cuts at whole blocks
of channels, take the layout of their operands. Everything else is row-major. A `trans_data` node
converts an operand that has another layout, once for all its readers. Nothing is converted back:
the tensor from before the conversion still exists.

Blocks are padded with zeros, by conversions and by the cube. Elementwise operators turn these zeros
into other numbers: adds(x, 1) leaves ones in lanes that hold no element. In a product they meet the
zeros that pad the other operand. 1 * 0 is harmless, infinity * 0 is NaN: so the padding has to stay
finite, and one of the two operands has to be padded with zeros.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from ascend_lab.compiler.aliases import cut_spans
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import (
    BLOCKS,
    IMAGES,
    SMALL_PIXELS,
    Graph,
    Node,
    TensorType,
    operator_of,
)
from ascend_lab.compiler.lower import PRODUCTS, matmul, vector
from ascend_lab.machine.chip import DTYPE_BYTES
from ascend_lab.operators.ops import formats

BLOCK = 16
MATRIX_OPS = (*PRODUCTS, "flash_attention")
"""Operators of the cube that read matrices in fractals."""
Bounds = tuple[float, float]
"""Smallest and largest number in the padding lanes of a tensor."""


def assign_layouts(graph: Graph, *, follow: bool = True) -> Graph:
    """Return the graph with layouts and `trans_data` nodes; the values are the same.

    Without `follow` only operators of the cube leave row-major memory, and each pays for its own
    conversions.
    """
    return Assigner(graph, follow).assign()


class Assigner:
    """The graph with layouts, under construction.

    - names_by_layout: by tensor of the graph, the tensors that hold it in each layout so far
    - padding_bounds: bounds of the numbers in padding lanes, where they are not all 0
    - unknown_padding: matrices whose padding columns may hold anything
    """

    def __init__(self, graph: Graph, follow: bool = True) -> None:
        self.graph = graph
        self.follow = follow
        self.draft = Draft(graph, nodes=())
        self.names_by_layout = {
            n: {graph.types[n].layout: n} for n in (*graph.inputs, *graph.constants)
        }
        self.padding_bounds: dict[str, Bounds] = {}
        self.unknown_padding: set[str] = set()

    def assign(self, layout: str | None = "ND") -> Graph:
        """Return the graph with its outputs in `layout`; None leaves each in its own layout."""
        for node in self.graph.nodes:
            self.add(node)
        outputs = self.graph.outputs
        if layout is not None:
            outputs = tuple(self.convert(name, layout) for name in outputs)
        nodes = tuple(self.draft.nodes.values())
        return replace(self.graph, nodes=nodes, types=self.draft.types, outputs=outputs)

    def convert(self, name: str, layout: str) -> str:
        """Return the tensor in a layout; append a conversion if the graph does not have it yet."""
        forms = self.names_by_layout[name]
        if layout not in forms:
            forms[layout] = self.append_conversion(name, next(iter(forms.values())), layout)
        return forms[layout]

    def operand(self, node: Node, place: int, layout: str) -> str:
        """Return the name of an operand in the layout in which a node reads it.

        Constants that lowering packs for their kernel stay as they are: weights and broadcast
        operands. It does not pack a constant image, which a `trans_data` node converts.
        """
        name = node.inputs[place]
        is_weight = _on_cube(node) and place > 0
        packs_every_operand = node.op in MATRIX_OPS or node.has("lanes")
        is_image = len(self.graph.types[name].shape) == 4
        is_packed = is_weight or packs_every_operand or not is_image
        if is_packed and name in self.graph.constants:
            return self.names_by_layout[name].get(layout, name)
        return self.convert(name, layout)

    def append_conversion(self, name: str, source: str, layout: str) -> str:
        """Append a conversion of one form of a tensor; return the new form's name."""
        new_name = self.draft.new_name(f"{name}.{layout}")
        kind = replace(self.draft.types[name], layout=layout)
        return self.draft.put(
            Node(new_name, "trans_data", (source,), (new_name,), {"layout": layout}), kind
        )

    def add(self, node: Node) -> None:
        """Append a node, with its operands converted to the layouts that it reads."""
        reads, writes = self.choose(node)
        on_cube = node.op in MATRIX_OPS
        for name, layout in zip(node.inputs, reads, strict=True):
            # a conversion copies the matrix and fills its padding with zeros
            if on_cube and layout == "FRACTAL_NZ" and name in self.unknown_padding:
                forms = self.names_by_layout[name]
                forms[layout] = self.append_conversion(name, forms[layout], layout)
                self.unknown_padding.remove(name)
        if node.op in PRODUCTS:
            weight_layout = next(iter(self.names_by_layout[node.inputs[1]]))
            if leaves_unknown_padding(self.graph, node, weight_layout):
                self.unknown_padding.add(node.output)
        operands = tuple(self.operand(node, place, to) for place, to in enumerate(reads))
        kinds = (replace(self.graph.types[name], layout=writes) for name in node.outputs)
        self.draft.put(replace(node, inputs=operands), *kinds)
        self.names_by_layout.update((name, {writes: name}) for name in node.outputs)
        if writes == "NC1HWC0" and not (node.has("lanes") or _on_cube(node)):
            operand_bounds = [self.padding_bounds.get(n, (0.0, 0.0)) for n in node.inputs]
            low = min(lower for lower, _ in operand_bounds)
            high = max(upper for _, upper in operand_bounds)
            if node.has("channel sums") and (low, high) != (0.0, 0.0):
                # a sum over the padding, too: its bounds are unknown
                low = -math.inf
                high = math.inf
            self.padding_bounds.update(dict.fromkeys(node.outputs, (low, high)))

    def choose(self, node: Node) -> tuple[Sequence[str], str]:
        """Return the layout of each operand and of the results."""
        count = len(node.inputs)
        kinds = self.graph.in_types(node)
        if node.op in PRODUCTS:
            return matmul.operand_layouts(node, kinds), "FRACTAL_NZ"
        if node.op == "flash_attention":
            # a mask of one row for all queries is read row-major
            is_row_mask = any(len(t.shape) < 2 or t.shape[-2] == 1 for t in kinds[3:])
            mask = "ND" if is_row_mask else "FRACTAL_NZ"
            return (*("FRACTAL_NZ",) * 3, *(mask,) * (count - 3)), "FRACTAL_NZ"
        if _on_cube(node) or node.has("pooling"):
            return self.window_layouts(node)
        out_dtype = self.graph.types[node.output].dtype
        # sums over channels of two-byte numbers stay in blocks of channels, if a kernel reads them
        sums_two_byte = node.has("channel sums") and DTYPE_BYTES[kinds[0].dtype] == 2
        in_blocks = sums_two_byte and bool(operator_of(node.op).templates())
        if in_blocks or (node.has("pool gradient") and out_dtype == "fp16"):
            return ("NC1HWC0",) * count, "NC1HWC0"
        if node.has("frames"):
            return ("ND",) * count, SMALL_PIXELS if node.attr("small", False) else "NC1HWC0"
        groups = node.attr("groups", 1)
        channels = {kind.shape[1] for kind in kinds} if node.op == "conv2d_grad_weight" else set()
        if channels and groups == 1:
            # a gradient in fp32 keeps the blocks of 16 channels that the cube writes
            fractals = "FRACTAL_Z:16" if DTYPE_BYTES[out_dtype] == 4 else "FRACTAL_Z"
            return ("NC1HWC0",) * count, fractals
        # the gradient of a depthwise layer's weights
        if channels == {groups}:
            return ("NC1HWC0",) * count, "ND"
        if node.has("bytes"):
            return self.quantised_layouts(node)
        layout = self.inherited_layout(node) if self.follow else "ND"
        # a cast from fp16 to int8 keeps blocks of 16 channels: see `TensorType`
        is_int8_in_blocks = layout != "ND" and DTYPE_BYTES[out_dtype] == 1
        return (layout,) * count, f"{layout}:16" if is_int8_in_blocks else layout

    def window_layouts(self, node: Node) -> tuple[Sequence[str], str]:
        """Return the layouts that a convolution or a pooling reads and writes."""
        # FRACTAL_Z holds weights as the cube's right operand; grouped weights are packed by
        # lowering
        is_dense = node.op == "conv2d" and node.attr("groups", 1) == 1
        # weights, then a bias
        constant_layouts = ("FRACTAL_Z" if is_dense else "ND", "ND")
        reads_small_pixels = (
            SMALL_PIXELS in self.names_by_layout[node.inputs[0]] and node.op == "conv2d"
        )
        image = SMALL_PIXELS if reads_small_pixels else "NC1HWC0"
        return (image, *constant_layouts[: len(node.inputs) - 1]), "NC1HWC0"

    def quantised_layouts(self, node: Node) -> tuple[Sequence[str], str]:
        """Return the layouts that a quantise or dequantise reads and writes: its operand's layout.

        In int8, a block of that layout has 32 channels.
        """
        blocks = ("NC1HWC0", "FRACTAL_NZ")
        layout = next(
            (name for name in self.names_by_layout[node.inputs[0]] if name in blocks), "ND"
        )
        if not self.follow or node.inputs[0] in self.graph.constants:
            layout = "ND"
        reads = ("ND" if n in self.graph.constants else layout for n in node.inputs)
        if layout == "NC1HWC0" and formats.is_float(self.graph.types[node.output].dtype):
            x = self.padding_bounds.get(node.inputs[0], (0.0, 0.0))
            # quantised zeros: an 8-bit number and its zero point differ by less than 256 steps
            reach = 256 * node.attr("scale", 1.0)
            self.padding_bounds[node.output] = (x[0] - reach, x[1] + reach)
        return tuple(reads), layout

    def inherited_layout(self, node: Node) -> str:
        """Return the blocked layout that a node can take from its operands, else "ND"."""
        activations = [n for n in node.inputs if n not in self.graph.constants]
        blocks = ("NC1HWC0", "FRACTAL_NZ")
        layout = next(
            (x for n in activations for x in self.names_by_layout[n] if x in blocks), "ND"
        )
        if layout == "ND" or any(DTYPE_BYTES[t.dtype] == 1 for t in self.graph.in_types(node)):
            return "ND"
        if node.has("lanes"):
            fits = self.broadcasts_in_layout(node, layout) and self.padding_stays_finite(
                node, layout
            )
            return layout if fits else "ND"
        if node.has("image fold") and layout == "NC1HWC0":
            return layout
        return layout if self.cuts_blocks(node, activations, layout) else "ND"

    def broadcasts_in_layout(self, node: Node, layout: str) -> bool:
        """Tell whether a node can be computed on operands stored in a blocked layout.

        All operands must broadcast to the result in its stored shape. On fractals with padded
        columns only `add` may compute: 0 + 0 keeps the padding zero.
        """
        shape = self.graph.types[node.output].shape
        if layout == "FRACTAL_NZ" and shape[-1] % BLOCK and node.op != "add":
            return False
        rank = 4 if layout == "NC1HWC0" else len(shape)
        for name in node.inputs:
            operand_shape = self.graph.types[name].shape
            if name in self.graph.constants:
                if len(operand_shape) > rank:
                    return False
            elif layout == "FRACTAL_NZ":
                if operand_shape != shape:
                    return False
            elif len(operand_shape) != 4 or operand_shape[1] != shape[1]:
                return False
        return len(shape) == rank

    def padding_stays_finite(self, node: Node, layout: str) -> bool:
        """Tell whether the padding of an image's last block stays finite, and store its bounds."""
        if layout != "NC1HWC0" or self.graph.types[node.output].shape[1] % BLOCK == 0:
            return True
        bounds = self.padding_bounds[node.output] = padding_after(
            self.graph, node, self.padding_bounds
        )
        return all(map(math.isfinite, bounds))

    def cuts_blocks(self, node: Node, activations: Sequence[str], layout: str) -> bool:
        """Tell whether a concat, slice or split cuts between whole blocks of a layout."""
        if node.op not in ("concat", "slice", "split") or len(activations) < len(node.inputs):
            return False
        if any(layout not in self.names_by_layout[n] for n in activations):
            return False
        if layout == "FRACTAL_NZ":
            return self.cuts_between_fractals(node)
        types = [*self.graph.in_types(node), *self.graph.out_types(node)]
        # a slice of an image takes whole blocks of channels and skips none
        if node.op == "slice":
            begin = node.attr("begin")[1]
            end = node.attr("end")[1]
            is_forward = begin >= 0 and end > 0 and set(node.attr("step") or (1,)) == {1}
            ends_at_block = end % BLOCK == 0 or end >= types[0].shape[1]
            return is_forward and begin % BLOCK == 0 and ends_at_block
        axis = node.attr("axis", 0) % 4
        return axis != 1 or all(t.shape[1] % BLOCK == 0 for t in types)

    def cuts_between_fractals(self, node: Node) -> bool:
        """Tell whether a concat, slice or split of matrices cuts no fractal and pads none."""
        types = [*self.graph.in_types(node), *self.graph.out_types(node)]
        if any(t.shape[-1] % BLOCK for t in types):
            return False
        rank = len(types[0].shape)
        # an axis of batches is outside the fractals
        if node.op == "concat":
            return bool(node.attr("axis", 0) % rank < rank - 2)
        cuts = cut_spans(self.graph, node)
        if not cuts:
            return False
        axis = cuts[0]
        # columns of a matrix are the outermost axis in memory
        return axis < rank - 2 or (axis, rank) == (1, 2)


def _on_cube(node: Node) -> bool:
    """Tell whether a node is a convolution, which the cube computes on an image."""
    return node.has("convolution") or node.op == "conv_transpose2d"


# -- numbers in the padding -----------------------------------------------------------------------
def padding_after(graph: Graph, node: Node, known: Mapping[str, Bounds]) -> Bounds:
    """Return the bounds of the padding after an elementwise node; infinite or NaN on overflow.

    The formula is evaluated at all combinations of the operands' extremes. This is right for every
    operator whose extreme results belong to extreme operands, as those of a square do. Padding
    whose bounds are not in `known` holds zeros.
    """
    result_type = graph.types[node.output]
    operator = operator_of(node.op)
    operand_bounds = [_bounds(graph, name, result_type, known) for name in node.inputs]
    settings = operator.settings(node.attrs)
    with np.errstate(all="ignore"):
        results = [
            operator.formula(*map(np.float64, extremes), **settings)
            for extremes in product(*operand_bounds)
        ]
        rounded = formats.round_to(np.array(results, np.float64), result_type.dtype).astype(
            np.float64
        )
    return float(rounded.min()), float(rounded.max())


def _bounds(graph: Graph, name: str, out: TensorType, known: Mapping[str, Bounds]) -> Bounds:
    """Return the bounds of an operand in the padding of `out`.

    A constant of one number per image is repeated there; one with a number for each channel is
    padded with zeros.
    """
    constant = graph.constants.get(name)
    if constant is None:
        return known.get(name, (0.0, 0.0))
    shape = (1, 1, 1, *constant.type.shape)
    if shape[-3] == out.shape[1]:
        return 0.0, 0.0
    values = constant.array().astype(np.float64)
    return float(values.min()), float(values.max())


def leaves_unknown_padding(graph: Graph, node: Node, weight_layout: str) -> bool:
    """Tell whether a product may leave numbers, not zeros, in the columns that pad its result.

    If b is read transposed, the result's columns are b's rows. Rows that pad a matrix which a node
    wrote in fractals may hold anything, and row-wise operators may later be moved to fractals, too.
    """
    b = node.inputs[1]
    maker = graph.producers.get(b)
    may_be_fractal = weight_layout == "FRACTAL_NZ" or (
        maker is not None and maker.op in vector.ROW_WISE
    )
    has_padding = graph.types[b].shape[-2] % BLOCK != 0
    return bool(node.attr("trans_b", False)) and has_padding and may_be_fractal


# -- conversions that are not needed --------------------------------------------------------------
def cancel_trans_data(graph: Graph) -> Graph:
    """Return the graph with chains of conversions shortened, and equal ones merged.

    x -> A -> B becomes x -> B. If B is the layout of x, it becomes x itself, unless x has padding:
    the two conversions would fill that with zeros.
    """
    draft = Draft(graph)
    conversions: dict[tuple[str, str], str] = {}
    origin: dict[str, str] = {}
    for node in draft:
        if node.op != "trans_data":
            continue
        operand = node.inputs[0]
        layout = str(node.attr("layout"))
        source = origin.get(operand, operand)
        kind = draft.types[source]
        converted = node.output
        if kind.layout == layout and not kind.map.padding_bytes:
            draft.replace(converted, source)
            continue
        if (source, layout) in conversions:
            converted = conversions[source, layout]
        elif source != operand:
            converted = draft.insert("trans_data", (source,), {"layout": layout}, node.name)
        draft.replace(node.output, converted)
        conversions[source, layout] = converted
        origin[converted] = source
    return draft.finish()


# -- two layouts of images ------------------------------------------------------------------------
def images_outermost(graph: Graph) -> Graph:
    """Return the graph with all images in NC1HWC0, none in C1NHWC0."""
    types = {
        name: replace(kind, layout=IMAGES) if kind.layout == BLOCKS else kind
        for name, kind in graph.types.items()
    }
    nodes = tuple(
        replace(node, attrs={"layout": IMAGES}) if node.attr("layout") == BLOCKS else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes, types=types)


def image_and_scale(graph: Graph, node: Node) -> tuple[str, str] | None:
    """Return the names (image, scale) if a node scales an image by a number for each channel."""
    if node.op != "mul" or len(node.inputs) != 2:
        return None
    larger_name, smaller_name = sorted(node.inputs, key=lambda name: -graph.types[name].elements)
    image = graph.types[larger_name]
    scale = graph.types[smaller_name]
    image_layouts = IMAGES, BLOCKS
    are_images = all(t.dtype == "fp16" and t.layout in image_layouts for t in (image, scale))
    fits = are_images and scale.shape == (*image.shape[:2], 1, 1) and scale.shape != image.shape
    return (larger_name, smaller_name) if fits else None
