"""Media: from a camera's bytes to a network's input, and what that costs.

AIPP inside a graph: an operator in front of the first layer, and its block of parameters.

    frames: uint8[n, bytes] -> aipp -> what read the input before

On the chip AIPP stands on the way into the core: it is no kernel, needs no launch, and what it
makes lies in NC1HWC0 blocks at once. The model counts the bytes of the frames, at the rate of
device memory, and lets the first layer read fp16 blocks from L2: slower than the real thing, which
hands them over inside the core.

Small channels: a first convolution fills 3 of 16 lanes of the cube's depth. AIPP may write pixels
of 4 channels instead, so that the convolution takes four taps at once (`NC1HWC0:4`).

A network with dynamic AIPP takes a block of parameters as one more input, 64 bytes for the batch,
then 96 for each image; the program writes it before every run, so cameras of other sizes or formats
can share one network. All numbers are little-endian, `min` and `var_reci` fp16.

Sources: CANN, AIPP, how_to_enable_aipp, aclmdlCreateAIPP; ATC, --insert_op_conf and
--enable_small_channel; GE, the header of AIPP's parameters.
"""

import struct
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np

# fmt: off
# isort: off
from ascend_lab.machine.chip import Chip
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.compiler import Draft, Graph, Node, TensorType, verify
from ascend_lab.compiler.ir import GRAPH_ONLY
from ascend_lab.machine.isa import SMALL_C0
from ascend_lab.deploy.media.aipp import (
    FORMATS, Aipp, AippOp, aipp, aipp_each, check, crop, normalise, pad, parse_config, read_config,
)
from ascend_lab.deploy.media.dvpp import (
    STANDARDS, UNITS, Answer, Csc, Image, Picture, Played, Station, Unit, cards_needed, convert,
    copy_station, crop_box, csc_of, jpegd_picture, network_station, play, resize, unit_station,
    vpc_crop_and_resize, vpc_picture,
)
from ascend_lab.operators.ops import REQUIRED, Operator, TypeRule, exact
from ascend_lab.operators.ops.slicing import axis_rules
# fmt: on
# isort: on

__all__ = [
    "STANDARDS",
    "UNITS",
    "Aipp",
    "AippOp",
    "Answer",
    "Csc",
    "Picture",
    "Played",
    "Station",
    "Unit",
    "aipp",
    "aipp_each",
    "block_bytes",
    "cards_needed",
    "check",
    "convert",
    "copy_station",
    "crop",
    "crop_box",
    "csc_of",
    "fitted",
    "insert_aipp",
    "jpegd_picture",
    "network_station",
    "normalise",
    "pack_block",
    "pad",
    "parse_config",
    "play",
    "read_config",
    "resize",
    "unit_station",
    "unpack_block",
    "vpc_crop_and_resize",
    "vpc_picture",
]

HEADER = struct.Struct("<5b3x2i9h6x3B3B2x16x")
"""Format, switches of CSC, R/B and A/X, batch; width, height; matrix; biases out, then in."""
IMAGE = struct.Struct("<4b4x12i4h4e4e16x")
"""Switches of crop, resize, padding, rotation; places and sizes; mean, min, 1 / variance."""
MOST_IMAGES = 127


def block_bytes(images: int) -> int:
    """Return the size of a block: 64 + 96 per image."""
    return HEADER.size + IMAGE.size * images


def pack_block(each: Sequence[Aipp]) -> bytes:
    """Return the block of a batch; raises `InputError` where images differ in what they share.

    Padding is with zeros: the block has no place for another value.
    """
    if not 1 <= len(each) <= MOST_IMAGES:
        raise InputError(f"1 to {MOST_IMAGES} images", str(len(each)), "split the batch")
    first = each[0]
    for s in map(check, each):
        if _shared(s) != _shared(first):
            needed = "one format, size, matrix and order of channels for all images of a block"
            raise InputError(needed, "images that differ", "use a block each")
        if s.padding_value and any(s.padding):
            raise InputError("padding_value 0 in a parameter block", str(s.padding_value))
    csc = first.csc or Csc(((0, 0, 0),) * 3)
    entries = (*sum(csc.matrix, ()), *csc.out_bias, *csc.in_bias)
    number = list(FORMATS).index(first.input_format) + 1
    head = HEADER.pack(
        number,
        first.csc is not None,
        first.rbuv_swap,
        first.ax_swap,
        len(each),
        first.width,
        first.height,
        *entries,
    )
    return head + b"".join(map(_packed, each))


def _shared(s: Aipp) -> tuple[Any, ...]:
    return s.input_format, s.width, s.height, s.csc, s.rbuv_swap, s.ax_swap


def _packed(s: Aipp) -> bytes:
    crop = s.crop or (0, 0, 0, 0)
    scaled = s.scaled or (0, 0)
    source = (crop[2:] if s.crop else (s.width, s.height)) if s.scaled else (0, 0)
    switches = (s.crop is not None, s.scaled is not None, any(s.padding), 0)
    return IMAGE.pack(
        *switches, *crop, *source, *scaled, *s.padding, *s.mean, *s.least, *s.var_reci
    )


def unpack_block(raw: bytes) -> tuple[Aipp, ...]:
    """Return the settings of each image; raises `InputError` for other bytes."""
    if len(raw) < block_bytes(1):
        raise InputError(f"a block of at least {block_bytes(1)} bytes", str(len(raw)))
    number, csc_on, rbuv, ax, images, *numbers = HEADER.unpack_from(raw)
    if images < 1 or len(raw) != block_bytes(images):
        wanted = f"{block_bytes(max(images, 1))} bytes for {images} images"
        raise InputError(wanted, str(len(raw)), "64 + 96 per image")
    if not 1 <= number <= len(FORMATS):
        raise InputError(f"an input format from 1 to {len(FORMATS)}", str(number))
    rows = tuple(tuple(numbers[2 + i : 5 + i]) for i in (0, 3, 6))
    csc = Csc(rows, out_bias=tuple(numbers[11:14]), in_bias=tuple(numbers[14:17]))  # type: ignore[arg-type]
    shared = Aipp(
        list(FORMATS)[number - 1],
        numbers[0],
        numbers[1],
        csc if csc_on else None,
        bool(rbuv),
        bool(ax),
    )
    return tuple(_unpacked(shared, IMAGE.unpack_from(raw, block_bytes(i))) for i in range(images))


def _unpacked(shared: Aipp, n: tuple[Any, ...]) -> Aipp:
    if n[3]:
        raise InputError("rotation 0", str(n[3]), "the documents reserve it")
    source = n[6:8] if n[0] else (shared.width, shared.height)
    if n[1] and n[8:10] != source:
        needed = f"a resize from {source[0]} x {source[1]}, what the crop leaves,"
        raise InputError(needed, f"{n[8]} x {n[9]}", "mend scfInputSize")
    return check(
        replace(
            shared,
            crop=n[4:8] if n[0] else None,
            scaled=n[10:12] if n[1] else None,
            padding=n[12:16] if n[2] else (0, 0, 0, 0),
            mean=n[16:20],
            least=n[20:24],
            var_reci=n[24:28],
        )
    )


BLOCK = "ascend_dynamic_aipp_data"
"""What the input for parameters of dynamic AIPP is called, as in the vendor's models."""


def restored(found: Sequence[Any]) -> Aipp:
    """Return the settings of which an attribute holds `astuple`; in a file tuples become lists."""
    values = [_tuples(value) for value in found]
    if values[3] is not None:
        values[3] = Csc(*values[3])
    return Aipp(*values)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


# -- the operator ---------------------------------------------------------------------------------
def _result(
    frames: Image, block: Image | None = None, *, shape: Any, dtype: str, settings: Any, small: bool
) -> Image:
    """Return the image (n, c, h, w) in fp16 or uint8; `small` is about memory only."""
    raw = np.asarray(frames, np.uint8)
    dtype = "uint8" if dtype == "uint8" else "fp16"
    if block is not None:
        each = unpack_block(np.asarray(block, np.uint8).tobytes())
        image = aipp_each(raw.reshape(-1)[: sum(s.frame_bytes for s in each)], each, dtype=dtype)
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
    shape_rule=lambda *given, shape, **rest: tuple(shape),
    types=TypeRule(("uint8",), result=lambda main, attrs: str(attrs["dtype"])),
    slicing=lambda shapes, *, shape, **rest: axis_rules("Transpose", ["frames are whole"] * 4),
    traits=("frames",),
    tolerances=exact(),
    index_bounds={"frames": lambda *given, **rest: 256},  # what random frames are drawn from
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
    ranks = [(op, _image_at(graph, op.rank)) for op in operations]
    for op, name in ranks:
        graph = _inserted(graph, op, name, chip)
        if small_channel:
            if op.settings is None:
                raise InputError("static AIPP with small channels", "dynamic", "leave one out")
            graph = _in_small_channels(graph, name)
    return graph


def _image_at(graph: Graph, rank: int) -> str:
    if rank >= len(graph.inputs):
        needed = f"related_input_rank below {len(graph.inputs)}, the inputs of {graph.name}"
        raise InputError(needed, str(rank), "number inputs from 0")
    name = graph.inputs[rank]
    kind = graph.types[name]
    if len(kind.shape) != 4 or kind.dtype not in ("fp32", "fp16", "bf16", "uint8"):
        raise InputError(f"input {name} as an image (n, c, h, w)", str(kind), "name another rank")
    return name


def _inserted(graph: Graph, op: AippOp, name: str, chip: Chip | None) -> Graph:
    kind = graph.types[name]
    types = dict(graph.types)
    extra: tuple[str, ...] = ()
    n, channels, height, width = kind.shape
    attrs: dict[str, Any] = {"shape": kind.shape, "dtype": kind.dtype}
    if op.settings is not None:
        settings = check(fitted(op.settings, width, height), chip)
        fourth = settings.input_format.startswith("X") and not settings.csc
        able = {settings.channels, 1 if settings.csc else 4 if fourth else settings.channels}
        if channels not in able:
            needed = f"{' or '.join(map(str, sorted(able)))} channels from {settings.input_format}"
            raise InputError(needed, f"{channels} of input {name}", "choose another format")
        attrs["settings"] = astuple(settings)
        types[name] = TensorType((n, settings.frame_bytes), "uint8")
    else:
        block = next(b for b in (BLOCK, *(f"{BLOCK}_{i}" for i in range(99))) if b not in types)
        extra = (block,)
        types[name] = TensorType((op.max_bytes,), "uint8")
        types[block] = TensorType((block_bytes(n),), "uint8")
    made = Draft(graph).new_name(f"{name}_aipp")
    types[made] = kind
    head = Node(made, "aipp", (name, *extra), (made,), attrs)

    def after(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(made if given == name else given for given in names)

    nodes = (head, *(replace(node, inputs=after(node.inputs)) for node in graph.nodes))
    ends = after(graph.outputs)
    inputs = (*graph.inputs, *extra)
    return verify(replace(graph, inputs=inputs, outputs=ends, nodes=nodes, types=types))


def fitted(settings: Aipp, width: int, height: int) -> Aipp:
    """Return settings whose sizes left open are those of a network's input.

    Raises `InputError` where the result has another size than the network takes.
    """
    s = settings
    padded = any(settings.padding)
    if not s.crop and not padded:
        s = replace(s, width=s.width or width, height=s.height or height)
    elif s.crop and not padded:
        left, top, *size = s.crop
        s = replace(s, crop=(left, top, size[0] or width, size[1] or height))
    if s.size != (width, height):
        needed = f"frames that become {width} x {height} pixels, as the network takes them"
        raise InputError(needed, f"{s.size[0]} x {s.size[1]}", "crop or pad to that size")
    return s


# -- small channels -------------------------------------------------------------------------------
def _in_small_channels(graph: Graph, name: str) -> Graph:
    """Return the graph whose first convolution behind an input reads pixels of four channels.

    Rows that are no whole blocks of 32 bytes stay in blocks of 16 channels.
    """
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
    small = replace(head, attrs={**head.attrs, "small": width % SMALL_C0 == 0})
    return replace(graph, nodes=tuple(small if n is head else n for n in graph.nodes))


_PLAIN = "leave small channels off"
