"""First layers: pixels of 4 channels, and conversions of images of few channels.

An image that comes from outside has few channels and lies plane by plane. Kernels here make blocks
of pixels of it at once, in halves or in bytes (`first_image_kernels`); without them a copy from one
layout to the other does that. Where it is quicker a first convolution reads pixels of 4 channels.
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
from ascend_lab.operators.ops.casts import is_half


# -- conversions of planes -------------------------------------------------------------------------
def conversion(piece: Piece, chip: Chip, _: Callable[[Piece], Lowered]) -> Lowered | None:
    """Return the kernel of a conversion of images of few channels; None: leave it to the maps."""
    (node, *others) = piece.graph.nodes
    if others or node.op != "trans_data":
        return None
    with suppress(UnsupportedError):  # many channels, or few pixels
        launch = _conversion_launch(piece.type(node.inputs[0]), piece.output.layout, chip)
        if launch is not None:
            names = {"x": node.inputs[0], "y": node.output}
            return Lowered(Kernel("trans_data", (renamed(launch, names),)))
    return None


def _conversion_launch(kind: TensorType, target: str, chip: Chip) -> Launch | None:
    """Return what brings planes of images to a layout; None for other layouts."""
    if kind.layout != "ND" or target not in (SMALL_PIXELS, IMAGES):
        return None
    n, c, h, w = kind.shape
    if target == SMALL_PIXELS:
        return small_image_launch(SmallImage(n, c, h * w, kind.dtype), chip)
    return few_channels_launch(FewChannels(n, c, h * w, kind.dtype), chip)


# -- pixels of 4 channels --------------------------------------------------------------------------
def small_first_layers(graph: Graph, chip: Chip, start: Start = "queued") -> Graph:
    """Return the graph whose first convolutions read pixels of 4 channels where that is faster.

    An image of 3 channels fills 3 of 16 lanes of memory, and of the depth of the cube, in bytes 3
    of 32. With 4 lanes a pixel four taps fill 16, or eight 32. Conversion and convolution are
    timed, together.
    """
    clock = Clock(chip, start)
    for node in graph.nodes:
        maker = graph.producers.get(node.inputs[0]) if node.op == "conv2d" else None
        if maker is None or maker.op != "trans_data" or len(graph.readers[maker.output]) > 1:
            continue
        (_, channels, *_), (*_, height, width) = (graph.types[n].shape for n in node.inputs[:2])
        # a single tap, groups or 4-byte numbers gain nothing from more taps in a fractal
        is_pointwise = (height, width) == (1, 1)
        is_wide = DTYPE_BYTES[graph.types[maker.output].dtype] > 2
        if is_pointwise or node.attr("groups", 1) > 1 or is_wide:
            continue
        if channels > SMALL_C0 or node.inputs[1] not in graph.constants:
            continue
        draft = Draft(graph)
        kind = replace(draft.type(maker.output), layout=SMALL_PIXELS)
        draft.put(replace(maker, attrs={**maker.attrs, "layout": SMALL_PIXELS}), kind)
        small = draft.finish()
        if is_quicker(clock, (small, node.name), (graph, node.name)):
            graph = small
    return graph


# -- bytes made and moved at once ------------------------------------------------------------------
def propose(graph: Graph, node: Node) -> Group | None:
    """Propose a quantisation and the conversion of its bytes, which a kernel does in one go."""
    after = only_reader(graph, node) if node.op == "quantise" else None
    return [node, after] if after is not None and after.op == "trans_data" else None


def parts_of(graph: Graph, nodes: Group) -> Sequence[Group]:
    """Return a quantisation and the conversion of its bytes; () for other groups."""
    fits = [node.op for node in nodes] == ["quantise", "trans_data"]
    return (nodes[:1], nodes[1:]) if fits else ()


def lower(piece: Piece, chip: Chip, parts: Sequence[Group]) -> Lowered:
    """Return a kernel that quantises a tensor and puts its bytes in a layout of blocks.

    For an image that is one program, else two phases: quantised as it lies, then moved. Raises
    `UnsupportedError` for other formats, and as `byte_image_launch` and `vector.lower_vector`.
    """
    ((node,), (last,)) = parts
    (x,) = piece.graph.inputs
    kind = piece.type(x)
    settings = operator_of(node.op).settings(node.attrs)
    if (kind.dtype, kind.layout, piece.output.dtype) != ("fp16", "ND", "int8"):
        raise UnsupportedError("halves row by row, and bytes", str(kind), "convert it apart")
    in_halves = is_half(1 / settings["scale"])  # these kernels multiply in fp16
    if in_halves and piece.output.layout == "NC1HWC0":
        n, c, h, w = kind.shape
        image = ByteImage(n, c, h * w, 1 / settings["scale"], settings["offset"])
        kernel = as_kernel(byte_image_launch(image, chip))
        return Lowered(vector.named(kernel, {"x": x, "y": last.output}))
    if in_halves and piece.output.layout == SMALL_PIXELS:
        n, c, h, w = kind.shape
        few = SmallImage(n, c, h * w, "fp16", "int8", 1 / settings["scale"], settings["offset"])
        with suppress(UnsupportedError):  # few pixels: in two phases
            kernel = as_kernel(small_image_launch(few, chip))
            return Lowered(vector.named(kernel, {"x": x, "y": last.output}))
    types = {name: piece.type(name) for name in (x, node.output)}
    own = replace(piece.graph, outputs=node.outputs, nodes=(node,), types=types)
    inner = vector.lower_vector(Piece(own, piece.constants, piece.names), chip)
    maps = maps_between(piece.type(node.output), piece.output)
    between = {node.output: "bytes"}
    move = renamed(maps_launch(*maps, chip, "move"), {"x": "bytes", "y": last.output})
    phases = (*(renamed(phase, between) for phase in inner.kernel.phases), move)
    return Lowered(Kernel("quantise", phases), inner.forms, inner.extra)


def apart(parts: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yield the two nodes as two kernels."""
    yield parts


PIECE_KERNELS = [conversion]
LAYOUT_REWRITES = [LayoutRewrite(SMALL_FIRST_LAYERS, small_first_layers)]
FUSIONS = [
    Fusion(
        Rule("TbeEltwiseQuantFusionPass", propose),
        parts_of,
        lower,
        apart,
        "bytes that change blocks have hand-written kernels without parameters",
    )
]
