"""AIPP inside a graph: an operator in front of the first layer.

    frames: uint8[n, bytes] -> aipp -> what read the input before

On the chip AIPP stands on the way into the core: it is no kernel, needs no launch, and what it
makes lies in NC1HWC0 blocks at once. The model counts the bytes of the frames, at the rate of
device memory, and lets the first layer read fp16 blocks from L2: slower than the real thing, which
hands them over inside the core.

Small channels: a first convolution fills 3 of 16 lanes of the cube's depth. AIPP may write pixels
of 4 channels instead, so that the convolution takes four taps at once (`NC1HWC0:4`).

Sources: CANN, AIPP, how_to_enable_aipp; ATC, --insert_op_conf and --enable_small_channel.
"""

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np

from ascend_lab.compiler import Draft, Graph, Node, TensorType, verify
from ascend_lab.compiler.ir import GRAPH_ONLY
from ascend_lab.deploy.media.aipp import Aipp, aipp, aipp_each, check
from ascend_lab.deploy.media.aipp_config import AippOp
from ascend_lab.deploy.media.colours import Csc, Image
from ascend_lab.deploy.media.parameter_block import block_bytes, unpack_block
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import SMALL_C0
from ascend_lab.operators.ops import REQUIRED, Operator, TypeRule, exact
from ascend_lab.operators.ops.slicing import axis_rules

BLOCK = "ascend_dynamic_aipp_data"
"""What the input for parameters of dynamic AIPP is called, as in the vendor's models."""


def restored(stored: Sequence[Any]) -> Aipp:
    """Return the settings that an attribute of a node holds as `astuple` made them.

    `astuple` turns the conversion inside into a tuple too, and a file turns tuples into lists.
    """
    input_format, width, height, csc, *later = (_tuples(value) for value in stored)
    return Aipp(input_format, width, height, Csc(*csc) if csc is not None else None, *later)


def _tuples(value: Any) -> Any:
    """Return a value with all lists in it, at any depth, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


# -- the operator ---------------------------------------------------------------------------------
def _result(
    frames: Image, block: Image | None = None, *, shape: Any, dtype: str, settings: Any, small: bool
) -> Image:
    """Return the image (n, c, h, w) in fp16 or uint8; `small` is about memory only."""
    raw = np.asarray(frames, np.uint8)
    dtype = "uint8" if dtype == "uint8" else "fp16"
    if block is not None:
        settings_of_frames = unpack_block(np.asarray(block, np.uint8).tobytes())
        # the input has room for the largest frames; smaller ones leave its end unused
        used_bytes = sum(s.frame_bytes for s in settings_of_frames)
        image = aipp_each(raw.reshape(-1)[:used_bytes], settings_of_frames, dtype=dtype)
    else:
        image = aipp(raw, restored(settings), dtype=dtype, channels=shape[1])
    if image.shape != tuple(shape):
        raise InputError(f"frames that become {tuple(shape)}", str(image.shape), "mend the block")
    return image


GRAPH_ONLY["aipp"] = Operator(
    "aipp",
    ("frames", "block"),
    _result,
    summary="raw frames as an image, on the way into the core",
    attrs={"shape": REQUIRED, "dtype": "fp16", "settings": None, "small": False},
    optional=1,
    shape_rule=lambda *shapes, shape, **attrs: tuple(shape),
    types=TypeRule(("uint8",), result=lambda main, attrs: str(attrs["dtype"])),
    slicing=lambda shapes, *, shape, **attrs: axis_rules("Transpose", ["frames are whole"] * 4),
    traits=("frames",),
    tolerances=exact(),
    index_bounds={"frames": lambda *shapes, **attrs: 256},  # what random frames are drawn from
)


# -- insertion ------------------------------------------------------------------------------------
def insert_aipp(
    graph: Graph,
    operations: Sequence[AippOp],
    chip: Chip | None = None,
    *,
    small_channel: bool = False,
) -> Graph:
    """Return the graph with AIPP in front of some inputs, which become uint8[n, frame bytes].

    A dynamic operation takes uint8[max_bytes] and one more input, its parameter block. With
    `small_channel` the first convolution behind each static one reads pixels of 4 channels. Raises
    `InputError` for an input that is missing, no image or of another size, and as `check`.
    """
    # all names first: inserting a block adds an input, but behind those that ranks count
    ranks = [(op, _image_at(graph, op.rank)) for op in operations]
    for op, name in ranks:
        graph = _inserted(graph, op, name, chip)
        if small_channel:
            if op.settings is None:
                raise InputError("static AIPP with small channels", "dynamic", "leave one out")
            graph = _in_small_channels(graph, name)
    return graph


def _image_at(graph: Graph, rank: int) -> str:
    """Return the name of an input by its number; raise `InputError` unless it is an image."""
    if rank >= len(graph.inputs):
        needed = f"related_input_rank below {len(graph.inputs)}, the inputs of {graph.name}"
        raise InputError(needed, str(rank), "number inputs from 0")
    name = graph.inputs[rank]
    kind = graph.types[name]
    if len(kind.shape) != 4 or kind.dtype not in ("fp32", "fp16", "bf16", "uint8"):
        raise InputError(f"input {name} as an image (n, c, h, w)", str(kind), "name another rank")
    return name


def _inserted(graph: Graph, op: AippOp, name: str, chip: Chip | None) -> Graph:
    """Return the graph with one operator of AIPP between an input and all that read it."""
    kind = graph.types[name]
    types = dict(graph.types)
    extra: tuple[str, ...] = ()
    n, channels, height, width = kind.shape
    attrs: dict[str, Any] = {"shape": kind.shape, "dtype": kind.dtype}
    if op.settings is not None:
        settings = check(fitted(op.settings, width, height), chip)
        possible = _possible_channels(settings)
        if channels not in possible:
            counts = " or ".join(map(str, possible))
            needed = f"{counts} channels from {settings.input_format}"
            raise InputError(needed, f"{channels} of input {name}", "choose another format")
        attrs["settings"] = astuple(settings)
        types[name] = TensorType((n, settings.frame_bytes), "uint8")
    else:
        # the vendor's name for the first block, numbered for further ones
        block = next(b for b in (BLOCK, *(f"{BLOCK}_{i}" for i in range(99))) if b not in types)
        extra = (block,)
        types[name] = TensorType((op.max_bytes,), "uint8")
        types[block] = TensorType((block_bytes(n),), "uint8")
    image = Draft(graph).new_name(f"{name}_aipp")
    types[image] = kind
    head = Node(image, "aipp", (name, *extra), (image,), attrs)

    def after(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(image if read == name else read for read in names)

    nodes = (head, *(replace(node, inputs=after(node.inputs)) for node in graph.nodes))
    ends = after(graph.outputs)
    inputs = (*graph.inputs, *extra)
    return verify(replace(graph, inputs=inputs, outputs=ends, nodes=nodes, types=types))


def _possible_channels(settings: Aipp) -> list[int]:
    """Return the numbers of channels that AIPP can make: three or one, and a fourth of XRGB.

    A colour conversion may also give one alone: the luma of YUV.
    """
    if settings.csc:
        return sorted({1, settings.channels})
    if settings.input_format.startswith("X"):
        return sorted({4, settings.channels})
    return [settings.channels]


def fitted(settings: Aipp, width: int, height: int) -> Aipp:
    """Return settings whose sizes left open are those of a network's input.

    Raises `InputError` where the result has another size than the network takes.
    """
    s = settings
    padded = any(settings.padding)
    # Sizes of 0 are those of the network: of the frame if nothing is cut, of the crop otherwise.
    # With padding both could be meant, so nothing is filled in.
    if not s.crop and not padded:
        s = replace(s, width=s.width or width, height=s.height or height)
    elif s.crop and not padded:
        x, y, *crop_size = s.crop
        s = replace(s, crop=(x, y, crop_size[0] or width, crop_size[1] or height))
    if s.size != (width, height):
        needed = f"frames that become {width} x {height} pixels, as the network takes them"
        raise InputError(needed, f"{s.size[0]} x {s.size[1]}", "crop or pad to that size")
    return s


# -- small channels -------------------------------------------------------------------------------
def _in_small_channels(graph: Graph, name: str) -> Graph:
    """Return the graph whose first convolution behind an input reads pixels of four channels.

    Rows that are no whole blocks of 32 bytes stay in blocks of 16 channels.
    """
    # blocks of four fp16 channels are 8 bytes a pixel: four pixels fill 32 bytes
    (head,) = graph.readers[name]
    readers = graph.readers[head.output]
    conv = readers[0] if len(readers) == 1 and readers[0].op == "conv2d" else None
    if conv is None or conv.inputs[1] not in graph.constants:
        needed = f"one convolution of constant weights behind {name}"
        raise UnsupportedError(needed, ", ".join(r.op for r in readers) or "none", _PLAIN)
    (_, c, _, width) = graph.types[head.output].shape
    groups = conv.attr("groups", 1)
    if c > SMALL_C0 or groups != 1:
        needed = f"{conv.name}: up to {SMALL_C0} channels in one group"
        raise UnsupportedError(needed, f"{c} channels, {groups} groups", _PLAIN)
    # a width of 30 pixels is no whole number of blocks: AIPP then writes 16 channels
    small = replace(head, attrs={**head.attrs, "small": width % SMALL_C0 == 0})
    return replace(graph, nodes=tuple(small if n is head else n for n in graph.nodes))


_PLAIN = "leave small channels off"
