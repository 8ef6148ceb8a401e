"""Convert the image that enters a network to the layout that the first convolution reads.

An RGB image lies plane by plane, and the cube reads pixels with their channels side by side:

    otherwise      planes -> copy, number by number -> pixels of 16 channels, 13 of them 0
    here           planes -> vector unit transposes -> pixels of 16 channels, or of 4 (1 of them 0)
    saved          a slow copy; with pixels of 4 channels also three quarters of the image's bytes
                   and of the cube's work: 4 taps x 4 channels fill the 16 numbers of a fractal row,
                   while one tap of 3 channels leaves 13 of them zero

If the network begins with a quantisation to int8, the same kernel does that, too. This file finds
the nodes; `first_image_kernels` writes the kernels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from ascend_lab.compiler.decide import Clock, is_quicker
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import (
    IMAGES,
    SMALL_PIXELS,
    Graph,
    Node,
    TensorType,
    only_reader,
    operator_of,
)
from ascend_lab.compiler.lower import vector
from ascend_lab.compiler.lower.piece import Lowered, Piece, maps_between
from ascend_lab.compiler.rules import SMALL_FIRST_LAYERS, Fusion, Group, LayoutRewrite, Rule
from ascend_lab.errors import UnsupportedError
from ascend_lab.fused.first_image_kernels import (
    ByteImage,
    FewChannels,
    SmallImage,
    byte_image_launch,
    few_channels_launch,
    small_image_launch,
)
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import SMALL_C0, Kernel, Launch, as_kernel, renamed
from ascend_lab.machine.layout import maps_launch
from ascend_lab.machine.sim.timeline import Start
from ascend_lab.operators.ops.quantised import fits_fp16


# -- conversions of planes -------------------------------------------------------------------------
def conversion(piece: Piece, chip: Chip, _: Callable[[Piece], Lowered]) -> Lowered | None:
    """Return the kernel of a conversion of images of few channels; None for other pieces."""
    # only a single conversion: a fused group has another kernel
    (node, *followers) = piece.graph.nodes
    if followers or node.op != "trans_data":
        return None
    # with many channels or few pixels the usual copy is the only kernel
    with suppress(UnsupportedError):
        launch = _conversion_launch(piece.type(node.inputs[0]), piece.output.layout, chip)
        if launch is not None:
            names = {"x": node.inputs[0], "y": node.output}
            return Lowered(Kernel("trans_data", (renamed(launch, names),)))
    return None


def _conversion_launch(kind: TensorType, target: str, chip: Chip) -> Launch | None:
    """Return the launch that converts planes of images to a layout; None for other layouts."""
    if kind.layout != "ND" or target not in (SMALL_PIXELS, IMAGES):
        return None
    n, c, h, w = kind.shape
    if target == SMALL_PIXELS:
        return small_image_launch(SmallImage(n, c, h * w, kind.dtype), chip)
    return few_channels_launch(FewChannels(n, c, h * w, kind.dtype), chip)


# -- pixels of 4 channels --------------------------------------------------------------------------
def small_first_layers(graph: Graph, chip: Chip, start: Start = "queued") -> Graph:
    """Return the graph whose first convolutions read pixels of 4 channels where that is faster.

    A 7 x 7 convolution of 3 channels sums over 49 fractal rows of 16 numbers, 3 of them not zero;
    with pixels of 4 channels four taps share a row: 13 rows. In int8 a row has 32 numbers and eight
    taps share it. Conversion and convolution are timed together.
    """
    clock = Clock(chip, start)
    best = graph
    for node in graph.nodes:
        maker = _small_conversion(best, node)
        if maker is None:
            continue
        # the same graph with the conversion's target changed; the convolution follows its operand
        draft = Draft(best)
        kind = replace(draft.type(maker.output), layout=SMALL_PIXELS)
        draft.put(replace(maker, attrs={**maker.attrs, "layout": SMALL_PIXELS}), kind)
        small = draft.finish()
        if is_quicker(clock, (small, node.name), (best, node.name)):
            best = small
    return best


def _small_conversion(graph: Graph, node: Node) -> Node | None:
    """Return the conversion before a convolution that might read pixels of 4 channels."""
    maker = graph.producers.get(node.inputs[0]) if node.op == "conv2d" else None
    if maker is None or maker.op != "trans_data" or len(graph.readers[maker.output]) > 1:
        return None
    channels = graph.types[node.inputs[0]].shape[1]
    kernel_size = graph.types[node.inputs[1]].shape[2:]
    # a single tap, groups or 4-byte numbers gain nothing from more taps in a fractal
    is_wide = DTYPE_BYTES[graph.types[maker.output].dtype] > 2
    if kernel_size == (1, 1) or node.attr("groups", 1) > 1 or is_wide:
        return None
    # computed weights cannot be packed at compile time
    has_constant_weights = node.inputs[1] in graph.constants
    return maker if channels <= SMALL_C0 and has_constant_weights else None


# -- quantisation and conversion in one kernel -----------------------------------------------------
def propose(graph: Graph, node: Node) -> Group | None:
    """Propose a quantisation and the conversion of its int8 result, which one kernel does."""
    reader = only_reader(graph, node) if node.op == "quantise" else None
    # a result read twice would have to be stored in both layouts
    return [node, reader] if reader is not None and reader.op == "trans_data" else None


def parts_of(graph: Graph, nodes: Group) -> Sequence[Group]:
    """Return (quantisation,), (conversion,); () if the group is not of this form."""
    fits = [node.op for node in nodes] == ["quantise", "trans_data"]
    return (nodes[:1], nodes[1:]) if fits else ()


def lower(piece: Piece, chip: Chip, parts: Sequence[Group]) -> Lowered:
    """Return a kernel that quantises a tensor and stores its int8 values in a layout of blocks.

    An image takes one phase; any other tensor takes two, which quantise it in its own layout and
    then move it. Raises `UnsupportedError` unless fp16 in ND becomes int8.
    """
    ((node,), (move_node,)) = parts
    (x,) = piece.graph.inputs
    kind = piece.type(x)
    settings = operator_of(node.op).settings(node.attrs)
    if (kind.dtype, kind.layout, piece.output.dtype) != ("fp16", "ND", "int8"):
        raise UnsupportedError("halves row by row, and bytes", str(kind), "convert it apart")
    # The kernels of images multiply in fp16, so 1 / scale must be an fp16 number: 1 / 0.0625 = 16
    # is one, 1 / 0.07 = 14.2857... is not.
    factor = 1 / settings["scale"]
    if fits_fp16(factor):
        launch = _quantising_launch(kind, piece.output.layout, chip, factor, settings["offset"])
        if launch is not None:
            names = {"x": x, "y": move_node.output}
            return Lowered(vector.named(as_kernel(launch), names))
    return _two_phases(piece, chip, node, move_node)


def _quantising_launch(
    kind: TensorType, target: str, chip: Chip, factor: float, offset: int
) -> Launch | None:
    """Return the launch that quantises images and stores them in a layout; None for other layouts.

    It multiplies by `factor`, which is 1 / scale, instead of dividing by the scale.
    """
    if target == IMAGES:
        n, c, h, w = kind.shape
        return byte_image_launch(ByteImage(n, c, h * w, factor, offset), chip)
    if target == SMALL_PIXELS:
        n, c, h, w = kind.shape
        image = SmallImage(
            images=n,
            channels=c,
            pixels=h * w,
            dtype="fp16",
            out_dtype="int8",
            scale=factor,
            offset=offset,
        )
        # fewer than 256 pixels have no such kernel
        with suppress(UnsupportedError):
            return small_image_launch(image, chip)
    return None


def _two_phases(piece: Piece, chip: Chip, node: Node, move_node: Node) -> Lowered:
    """Return a kernel that first quantises a tensor in its layout, then moves its bytes."""
    (x,) = piece.graph.inputs
    types = {name: piece.type(name) for name in (x, node.output)}
    quantise_graph = replace(piece.graph, outputs=node.outputs, nodes=(node,), types=types)
    quantised = vector.lower_vector(Piece(quantise_graph, piece.constants, piece.names), chip)
    # the address of each number in the source and in the target
    maps = maps_between(piece.type(node.output), piece.output)
    workspace_name = {node.output: "bytes"}
    move = renamed(maps_launch(*maps, chip, "move"), {"x": "bytes", "y": move_node.output})
    phases = (*(renamed(phase, workspace_name) for phase in quantised.kernel.phases), move)
    return Lowered(Kernel("quantise", phases), quantised.forms, quantised.extra)


def unfused(parts: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yield the two kernels against which the fused one is timed."""
    yield parts


PIECE_KERNELS = [conversion]
LAYOUT_REWRITES = [LayoutRewrite(SMALL_FIRST_LAYERS, small_first_layers)]
FUSIONS = [
    Fusion(
        Rule("TbeEltwiseQuantFusionPass", propose),
        parts_of,
        lower,
        unfused,
        "bytes that change blocks have hand-written kernels without parameters",
    )
]
