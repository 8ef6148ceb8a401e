"""Compiles a training step: keeps batch norms in NC1HWC0, rewrites gradients of convolutions.

A batch norm sums an image (n, c1, h, w, c0) over n, h and w, for all channels at once. The result,
(1, c, 1, 1), is stored as (1, c1, 1, 1, c0), so that it broadcasts without a layout conversion. The
forward operator becomes the computation of the vendor's two kernels, a reduction and an update,

    mean, variance          y = x a + b,  a = scale / sqrt(variance + epsilon),  b = bias - mean a

The image is read twice and written once, or, if the convolution before it also sums its result,
read once and written once. Fusion chooses the faster variant.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ascend_lab.cluster.train.step import TrainingGraph
from ascend_lab.compiler import Graph, Node, TensorType, ir
from ascend_lab.compiler.compile import Layouts, Road, Stages, front_stages
from ascend_lab.compiler.draft import Draft, pruned
from ascend_lab.compiler.ir import Constant, Fill, verify
from ascend_lab.compiler.layout import Assigner
from ascend_lab.compiler.passes import DEFAULT, rewrite
from ascend_lab.compiler.tasks import Compiled
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators.ops import convolution, formats
from ascend_lab.operators.ops.expressions import Pair, reach

FOLDED = ((0,), (2,), (3,), (0, 3), (2, 3), (0, 2, 3))
"""Axes of images (n, c, h, w) that may be summed without touching the channels."""
ALSO_LANES = ("greater", "less", "rsqrt", "select", "sign")
"""More elementwise operators; epsilon is added before rsqrt, so that padding stays finite."""
FOLDS = ("reduce_sum", "reduce_mean")
"""Reductions that may stay in the layout of images."""


def images_in_blocks(graph: Graph) -> Graph:
    """Return the graph with layouts, as `assign_layouts`; sums over images stay in NC1HWC0."""
    return _Images(graph).assign()


class _Images(Assigner):
    """Assigns layouts as usual, but keeps sums over and selections of images in their layout."""

    def inherited_layout(self, node: Node) -> str:
        """Return the layout that a node inherits, which is NC1HWC0 also for sums over images."""
        data_inputs = [n for n in node.inputs if n not in self.graph.constants]
        image = any("NC1HWC0" in self.names_by_layout[n] for n in data_inputs)
        if image and node.op in FOLDS and node.attr("keepdims", False):
            shape = self.graph.types[node.inputs[0]].shape
            if len(shape) == 4 and formats.axes_of("fold", node.attr("axis"), shape) in FOLDED:
                return "NC1HWC0"
        if image and node.op in ALSO_LANES:
            fits = self.broadcasts_in_layout(node, "NC1HWC0")
            return "NC1HWC0" if fits and self.padding_stays_finite(node, "NC1HWC0") else "ND"
        return super().inherited_layout(node)


def batch_norms_apart(graph: Graph) -> Graph:
    """Return the graph with every batch norm that uses batch statistics divided into its parts."""
    edit = Draft(graph)
    for node in edit:
        image = len(edit.types[node.inputs[0]].shape) == 4
        if node.op == "batch_norm_training" and image and node.attr("momentum", 0.9) == 0.0:
            _divide_batch_norm(edit, node)
    return edit.finish()


def _divide_batch_norm(edit: Draft, node: Node) -> None:
    """Replace a batch norm by its reduction and elementwise operators."""
    x, scale, bias = node.inputs[:3]
    x_type = edit.types[x]
    name = node.name
    channels = (x_type.shape[1],)
    epsilon = ir.operator_of(node.op).settings(node.attrs)["epsilon"]

    def insert(op: str, *inputs: str, **attrs: object) -> str:
        return edit.insert(op, inputs, attrs, f"{name}.{op}")

    mean, variance = edit.nodes[insert("bn_training_reduce", x)].outputs
    wide_x = x if x_type.dtype == "fp32" else insert("cast", x, dtype="fp32")
    # y = x a + b, with a = scale / sqrt(variance + epsilon) and b = bias - mean a
    inverse_deviation = insert("rsqrt", insert("adds", variance, number=epsilon))
    a = insert("mul", _column(edit, scale, name), inverse_deviation)
    b = insert("sub", _column(edit, bias, name), insert("mul", mean, a))
    y = insert("add", insert("mul", wide_x, a), b)
    if x_type.dtype != "fp32":
        y = insert("cast", y, dtype=x_type.dtype)
    edit.replace(node.outputs[0], y)
    for old_name, new_name in zip(node.outputs[1:], (mean, variance), strict=True):
        edit.replace(old_name, insert("reshape", new_name, shape=channels))


def _column(edit: Draft, name: str, norm: str) -> str:
    """Return numbers per channel in the shape (1, c, 1, 1); a constant stays a constant."""
    shape = (1, edit.types[name].shape[0], 1, 1)
    if name not in edit.constants:
        return edit.insert("reshape", (name,), {"shape": shape}, f"{norm}.reshape")
    column_type = replace(edit.types[name], shape=shape)
    column = rewrite.derived(
        column_type, lambda values: values.reshape(shape), edit.constants[name]
    )
    return edit.add(column, f"{name}.column")


def casts_apart(graph: Graph) -> Graph:
    """Return the graph with a separate widening cast for each reader, which is free in its kernel.

    A shared cast would be a separate kernel, which writes twice the bytes that it reads.
    """
    edit = Draft(graph)
    for node in edit:
        readers = graph.readers[node.output]
        is_shared = node.op == "cast" and node.attr("dtype") == "fp32" and len(readers) > 1
        is_image = len(graph.types[node.output].shape) == 4
        if not is_shared or not is_image or node.output in graph.outputs:
            continue
        for reader in readers[1:]:
            separate_cast = edit.insert("cast", node.inputs, node.attrs, node.name)
            current = edit.current(reader.name)
            inputs = tuple(separate_cast if n == node.output else n for n in current.inputs)
            edit.put(replace(current, inputs=inputs))
    return edit.finish()


# -- the gradient of an image as a plain convolution -----------------------------------------------
# The kernel of a transposed convolution needs weights that were packed at compile time, one part
# per phase of the stride. With computed weights it is replaced by a convolution with stride 1 of
# the gradient, with zeros between its pixels, by the weights rotated by 180 degrees, with input and
# output channels exchanged: dx = conv2d(stretched(grad), flipped(weight), pad = reach - 1 - pad)
def as_convolutions(graph: Graph) -> Graph:
    """Return the graph with transposed convolutions of one group rewritten.

    Those with constant weights stay, except 1x1 convolutions with a stride: most of their phases
    have no tap and would multiply zeros.
    """
    edit = Draft(graph)
    for node in edit:
        if node.op != "conv_transpose2d" or len(node.inputs) > 2 or node.attr("groups", 1) != 1:
            continue
        is_computed = node.inputs[1] not in edit.constants
        has_one_tap = edit.types[node.inputs[1]].shape[2:] == (1, 1)
        has_stride = formats.pair("stride", node.attr("stride", 1)) > (1, 1)
        if is_computed or (has_one_tap and has_stride):
            image_gradient = _convolution(edit, node)
            if image_gradient:
                edit.replace(node.output, image_gradient)
    return edit.finish()


def _convolution(edit: Draft, node: Node) -> str:
    """Append the convolution; return its output, or "" if the padding exceeds its kernel's."""
    attrs = ir.operator_of(node.op).settings(node.attrs)
    stride, pads, dilation = convolution.geometry(attrs["stride"], attrs["pad"], attrs["dilation"])
    grad, weight = node.inputs
    kernel = edit.types[weight].shape[2:]
    extra = formats.pair("output_padding", attrs["output_padding"], least=0)
    # A 3x3 kernel with padding 1: reach 3, so the convolution is padded by 3 - 1 - 1 = 1. With
    # padding 3 it would be -1: the image would have to be cropped.
    spans = reach((kernel[0], kernel[1]), dilation)
    sides = tuple((n - 1 - low, n - 1 - high) for n, (low, high) in zip(spans, pads, strict=True))
    if min(map(min, sides)) < 0:
        return ""
    flipped_weight = flipped(edit, weight, node.name)
    if spans == (1, 1):  # zeros stay zeros: convolve first, the image is smaller
        small_image = edit.insert("conv2d", (grad, flipped_weight), {}, node.name)
        return stretched(edit, small_image, stride, extra, node.name)
    image = stretched(edit, grad, stride, extra, node.name)
    return edit.insert(
        "conv2d", (image, flipped_weight), {"pad": sides, "dilation": dilation}, node.name
    )


def stretched(edit: Draft, x: str, step: Pair, extra: Pair, name: str) -> str:
    """Append zeros between pixels: the gradient of reading every stride-th one."""
    high, wide = edit.types[x].shape[2:]
    # 3 pixels with stride 2 become 5: pixel, 0, pixel, 0, pixel.
    size = ((high - 1) * step[0] + 1 + extra[0], (wide - 1) * step[1] + 1 + extra[1])
    if size == (high, wide):
        return x
    # the stride is at most the size, so that each pixel is read once along both axes
    attrs = {"kernel": 1, "stride": step, "size": size}
    return edit.insert("avg_pool2d_grad", (x,), attrs, f"{name}.stretched")


def flipped(edit: Draft, weight: str, name: str) -> str:
    """Append weights (k, c, r, s) as (c, k, r, s), with the last two axes reversed."""
    weight_type = edit.types[weight]
    k, c, r, s = weight_type.shape
    if weight in edit.constants and (r, s) == (1, 1):
        new_type = replace(weight_type, shape=(c, k, 1, 1))
        constant = edit.constants[weight]
        flipped_weight = rewrite.derived(new_type, lambda v: v.swapaxes(0, 1), constant)
        return edit.add(flipped_weight, f"{name}.turned")
    if (r, s) == (1, 1):
        return edit.insert("transpose", (weight,), {"perm": (1, 0, 2, 3)}, f"{name}.turned")
    title = f"{name}.flipped"
    # Rows 8, 7, ..., 0 of a 3x3 kernel's 9 taps: the kernel turned by 180 degrees.
    taps = np.arange(r * s, dtype=np.int32)[::-1].copy()
    indices = edit.add(Constant(TensorType((r * s,), "int32"), taps), f"{title}.taps")
    taps_first = edit.insert("transpose", (weight,), {"perm": (2, 3, 1, 0)}, title)
    rows = edit.insert("reshape", (taps_first,), {"shape": (r * s, c * k)}, title)
    back = edit.insert("gather", (rows, indices), {"axis": 0}, title)
    shaped = edit.insert("reshape", (back,), {"shape": (r, s, c, k)}, title)
    return edit.insert("transpose", (shaped,), {"perm": (2, 3, 0, 1)}, title)


# -- the compiler passes of a training graph -------------------------------------------------------
# The step already has its number formats, so the conversion pass is left out: it would also convert
# the fp32 master weights to fp16. Merging equal expressions would merge recomputed activations with
# the first ones and keep them in memory after all, so it is left out where something is recomputed.
MERGING = "CommonSubexpressionEliminationPass"
TRAINING = Road(
    dtype="",
    operator_rewrites=(batch_norms_apart, as_convolutions, casts_apart),
    layouts=Layouts(images_in_blocks),
    ordered=False,
)
"""The compiler options of a training step: number formats and the order of nodes are kept, and
sums over images stay in the layout of the images."""


def compile_training(
    step: TrainingGraph, chip: Chip | str, *, passes: Sequence[str] = DEFAULT, fusion: bool = True
) -> Stages:
    """Return a training graph after every stage on a chip, given as a `Chip` or by name.

    Raises as `compiler.compile_stages`; a step in fp32 raises an error, because no cube computes
    fp32 products.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    recomputes = "recompute" in step.phases.values()
    names = [name for name in passes if not (recomputes and name == MERGING)]
    road = replace(TRAINING, passes=names, fusion=fusion)
    return road.stages(step.graph, chip)


# -- forward and backward alone, as the profile times them -----------------------------------------
LONGEST_STAY = 2500
"""Largest number of nodes for which tensors are kept in fractal layouts to save conversions."""


def compile_step(step: TrainingGraph, chip: Chip) -> Compiled:
    """Return the kernels of forward and backward; number formats stay as the step states them."""
    road = replace(TRAINING, layouts=replace(TRAINING.layouts, max_moved_nodes=LONGEST_STAY))
    front = front_stages(weights_in_place(step), chip, road)
    return road.kernels(with_early_conversions(front.laid_out), chip)


def weights_in_place(step: TrainingGraph) -> Graph:
    """Return forward and backward with the parameters' fp16 copies as constants, without casts."""
    graph = step.graph
    constants = dict(step.graph.constants)
    nodes = []
    parameters = set(step.parameters)
    for node in graph.nodes:
        if node.op == "cast" and node.inputs[0] in parameters:
            constants[node.output] = Constant(graph.types[node.output], Fill(0.0))
        elif step.phases.get(node.name) != "update":
            nodes.append(node)
    read = {name for node in nodes for name in node.inputs}
    for name in sorted(parameters & read):
        constants[name] = Constant(graph.types[name], Fill(0.0))
    inputs = tuple(name for name in graph.inputs if name in read and name not in constants)
    outputs = tuple(own_outputs(step))
    updated_graph = replace(
        graph, nodes=tuple(nodes), inputs=inputs, outputs=outputs, constants=constants
    )
    return verify(pruned(updated_graph))


def averages(step: TrainingGraph) -> Mapping[str, int]:
    """Return the new running averages of a step, each with its number of elements."""
    nodes = [node for node in step.graph.nodes if step.phases.get(node.name) == "update"]
    names = {name for node in nodes for name in node.outputs}
    return {n: step.graph.types[n].elements for n in step.graph.outputs if n in names}


def own_outputs(step: TrainingGraph) -> list[str]:
    """Return the outputs of a step other than running averages."""
    apart = averages(step)
    return [name for name in step.graph.outputs if name not in apart]


def with_early_conversions(graph: Graph) -> Graph:
    """Return the graph in which each output's layout conversion directly follows its producer."""
    outs = set(graph.outputs)
    # the conversions of outputs, by the tensor that they convert
    conversions: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "trans_data" and node.output in outs and not graph.readers[node.output]:
            conversions.setdefault(node.inputs[0], []).append(node)
    moved = {node.name for nodes in conversions.values() for node in nodes}
    order: list[Node] = []
    for name in (*graph.inputs, *graph.constants):
        order += conversions.get(name, ())
    for node in graph.nodes:
        if node.name not in moved:
            order.append(node)
            for name in node.outputs:
                order += conversions.get(name, ())
    return replace(graph, nodes=tuple(order))
