"""AIPP (the chip's image pre-processing) as an operator in front of the first layer of a graph.

    frames: uint8[n, bytes] -> aipp -> first layer

On the chip AIPP is part of the path into the core. It is not a kernel of its own, needs no launch,
and writes NC1HWC0 blocks directly. The model reads the bytes of the frames at the rate of device
memory and lets the first layer read fp16 blocks from L2. This is slower than the hardware, where
the pixels stay inside the core.

Small channels: an image with 3 channels fills 3 of the 16 lanes of the cube's depth. AIPP can write
pixels of 4 channels instead, so that the first convolution multiplies four taps at once
(`NC1HWC0:4`).

Sources: CANN, AIPP, how_to_enable_aipp; ATC, --insert_op_conf and --enable_small_channel.
"""

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, Node, TensorType
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import GRAPH_ONLY, verify
from ascend_lab.deploy.media.aipp import Aipp, aipp, aipp_each, check_aipp
from ascend_lab.deploy.media.aipp_config import AippOp
from ascend_lab.deploy.media.colours import Csc, Image
from ascend_lab.deploy.media.parameter_block import block_bytes, unpack_block
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import SMALL_C0
from ascend_lab.operators.ops import REQUIRED, Operator, TypeRule, exact
from ascend_lab.operators.ops.slicing import axis_rules

BLOCK_INPUT = "ascend_dynamic_aipp_data"
"""The name of the input for the parameters of dynamic AIPP, as in the vendor's models."""


def settings_from(stored: Sequence[Any]) -> Aipp:
    """Return the settings that `astuple` has turned into an attribute of a node.

    `astuple` also turns the colour conversion inside into a tuple, and a file turns tuples into
    lists.
    """
    input_format, width, height, csc, *remaining_fields = (
        _lists_as_tuples(value) for value in stored
    )
    return Aipp(
        input_format, width, height, Csc(*csc) if csc is not None else None, *remaining_fields
    )


def _lists_as_tuples(value: Any) -> Any:
    """Return a value in which all lists, at any depth, are tuples."""
    return tuple(map(_lists_as_tuples, value)) if isinstance(value, list | tuple) else value


# -- the operator ---------------------------------------------------------------------------------
def _evaluate_aipp(
    frames: Image, block: Image | None = None, *, shape: Any, dtype: str, settings: Any, small: bool
) -> Image:
    """Return the image (n, c, h, w) in fp16 or uint8; `small` changes its layout only."""
    raw = np.asarray(frames, np.uint8)
    dtype = "uint8" if dtype == "uint8" else "fp16"
    if block is not None:
        settings_of_frames = unpack_block(np.asarray(block, np.uint8).tobytes())
        # The input has room for the largest frames; with smaller ones its end is unused.
        used_bytes = sum(s.frame_bytes for s in settings_of_frames)
        image = aipp_each(raw.reshape(-1)[:used_bytes], settings_of_frames, dtype=dtype)
    else:
        image = aipp(raw, settings_from(settings), dtype=dtype, channels=shape[1])
    if image.shape != tuple(shape):
        raise InputError(
            f"frames that become {tuple(shape)}", str(image.shape), "correct the block"
        )
    return image


GRAPH_ONLY["aipp"] = Operator(
    "aipp",
    ("frames", "block"),
    _evaluate_aipp,
    summary="raw frames as an image, on the way into the core",
    attrs={"shape": REQUIRED, "dtype": "fp16", "settings": None, "small": False},
    optional=1,
    shape_rule=lambda *shapes, shape, **attrs: tuple(shape),
    types=TypeRule(("uint8",), result=lambda main, attrs: str(attrs["dtype"])),
    slicing=lambda shapes, *, shape, **attrs: axis_rules("Transpose", ["frames are whole"] * 4),
    traits=("frames",),
    tolerances=exact(),
    index_bounds={"frames": lambda *shapes, **attrs: 256},  # random frames have bytes below 256
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
    `small_channel` the convolution that follows a static operation reads pixels of 4 channels.
    Raises `InputError` for an input that is missing, is not an image or has another size, and for
    settings that `check_aipp` refuses.
    """
    ranks = [(op, _image_at(graph, op.rank)) for op in operations]
    for op, name in ranks:
        graph = _with_aipp(graph, op, name, chip)
        if small_channel:
            if op.settings is None:
                raise InputError("static AIPP with small channels", "dynamic", "leave one out")
            graph = _with_small_channels(graph, name)
    return graph


def _image_at(graph: Graph, rank: int) -> str:
    """Return the name of input number `rank`; raise `InputError` unless it is an image."""
    if rank >= len(graph.inputs):
        needed = f"related_input_rank below {len(graph.inputs)}, the inputs of {graph.name}"
        raise InputError(needed, str(rank), "number inputs from 0")
    name = graph.inputs[rank]
    tensor_type = graph.types[name]
    if len(tensor_type.shape) != 4 or tensor_type.dtype not in ("fp32", "fp16", "bf16", "uint8"):
        raise InputError(
            f"input {name} as an image (n, c, h, w)", str(tensor_type), "name another rank"
        )
    return name


def _with_aipp(graph: Graph, op: AippOp, name: str, chip: Chip | None) -> Graph:
    """Return the graph with an AIPP operator between an input and all its readers."""
    image_type = graph.types[name]
    types = dict(graph.types)
    block_inputs: tuple[str, ...] = ()
    n, channels, height, width = image_type.shape
    attrs: dict[str, Any] = {"shape": image_type.shape, "dtype": image_type.dtype}
    if op.settings is not None:
        settings = check_aipp(with_network_size(op.settings, width, height), chip)
        channel_counts = _possible_channels(settings)
        if channels not in channel_counts:
            counts = " or ".join(map(str, channel_counts))
            needed = f"{counts} channels from {settings.input_format}"
            raise InputError(needed, f"{channels} of input {name}", "choose another format")
        attrs["settings"] = astuple(settings)
        types[name] = TensorType((n, settings.frame_bytes), "uint8")
    else:
        # The first block has the vendor's name; the names of further ones end in a number.
        block = next(
            b for b in (BLOCK_INPUT, *(f"{BLOCK_INPUT}_{i}" for i in range(99))) if b not in types
        )
        block_inputs = (block,)
        types[name] = TensorType((op.max_bytes,), "uint8")
        types[block] = TensorType((block_bytes(n),), "uint8")
    image = Draft(graph).new_name(f"{name}_aipp")
    types[image] = image_type
    aipp_node = Node(image, "aipp", (name, *block_inputs), (image,), attrs)

    def redirected(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(image if read == name else read for read in names)

    nodes = (aipp_node, *(replace(node, inputs=redirected(node.inputs)) for node in graph.nodes))
    outputs = redirected(graph.outputs)
    inputs = (*graph.inputs, *block_inputs)
    return verify(replace(graph, inputs=inputs, outputs=outputs, nodes=nodes, types=types))


def _possible_channels(settings: Aipp) -> list[int]:
    """Return the numbers of channels that AIPP can write: three or one, or four from XRGB.

    After a colour conversion the network may take the first channel alone, the luma of YUV.
    """
    if settings.csc:
        return sorted({1, settings.channels})
    if settings.input_format.startswith("X"):
        return sorted({4, settings.channels})
    return [settings.channels]


def with_network_size(settings: Aipp, width: int, height: int) -> Aipp:
    """Return settings in which sizes of 0 are replaced by the size of a network's input.

    Raises `InputError` if AIPP's result would have another size than the network takes.
    """
    fitted_settings = settings
    has_padding = any(settings.padding)
    # Without a crop the frame has the network's size, otherwise the crop has it. With padding the
    # size before padding is not known, so nothing is replaced.
    if not fitted_settings.crop and not has_padding:
        fitted_settings = replace(
            fitted_settings,
            width=fitted_settings.width or width,
            height=fitted_settings.height or height,
        )
    elif fitted_settings.crop and not has_padding:
        x, y, *crop_size = fitted_settings.crop
        fitted_settings = replace(
            fitted_settings, crop=(x, y, crop_size[0] or width, crop_size[1] or height)
        )
    if fitted_settings.size != (width, height):
        needed = f"frames that become {width} x {height} pixels, as the network takes them"
        raise InputError(
            needed,
            f"{fitted_settings.size[0]} x {fitted_settings.size[1]}",
            "crop or pad to that size",
        )
    return fitted_settings


# -- small channels -------------------------------------------------------------------------------
def _with_small_channels(graph: Graph, name: str) -> Graph:
    """Return the graph in which the convolution of an input reads pixels of four channels.

    The image keeps blocks of 16 channels if its rows are not a multiple of 32 bytes.
    """
    # Four fp16 channels are 8 bytes a pixel: four pixels fill 32 bytes.
    (aipp_node,) = graph.readers[name]
    readers = graph.readers[aipp_node.output]
    conv = readers[0] if len(readers) == 1 and readers[0].op == "conv2d" else None
    if conv is None or conv.inputs[1] not in graph.constants:
        needed = f"one convolution of constant weights behind {name}"
        raise UnsupportedError(
            needed, ", ".join(r.op for r in readers) or "none", _SMALL_CHANNEL_HINT
        )
    (_, channels, _, width) = graph.types[aipp_node.output].shape
    groups = conv.attr("groups", 1)
    if channels > SMALL_C0 or groups != 1:
        needed = f"{conv.name}: up to {SMALL_C0} channels in one group"
        raise UnsupportedError(needed, f"{channels} channels, {groups} groups", _SMALL_CHANNEL_HINT)
    # 30 pixels a row are not a multiple of 4: AIPP writes 16 channels then.
    small_node = replace(aipp_node, attrs={**aipp_node.attrs, "small": width % SMALL_C0 == 0})
    return replace(graph, nodes=tuple(small_node if n is aipp_node else n for n in graph.nodes))


_SMALL_CHANNEL_HINT = "leave small channels off"
