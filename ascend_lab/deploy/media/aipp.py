"""AIPP: what happens to a camera's bytes on their way into a network, and the file that says so.

    static    swap > crop > colours > (x - mean - min) var_reci > padding
    dynamic   the same, with a resize behind the crop; parameters per image, see `insert`

A frame is flat uint8, as cameras and decoders give it; the result is (n, c, h, w) in fp16, or in
uint8 for a network that starts quantised (nothing is normalised then). Chroma of YUV420SP is used
for four pixels as it is. Parameters are fp16; each result is rounded once. Of four bytes a pixel
the first three behind `ax_swap` count, and the fourth only where a network asks for four channels.

The configuration file is protobuf text, read with one table of keys.

    aipp_op { aipp_mode: static  input_format: YUV420SP_U8  crop: true  crop_size_w: 224 ... }

A key left out has the default of the published template: a matrix of which half is given is
completed from it in silence, and its rows end in blue, green, red. Without `crop: true` or
`padding: true` their sizes count for nothing. Keys that the documents reserve may be given with
their default only.

Source: CANN, AIPP, config_file_template and crop_padding_config; GE, insert_op.proto, aipp_op.cc.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.deploy.compress.protobuf_text import read_text
from ascend_lab.deploy.media.dvpp import Csc, Image, convert, csc_of, resize
from ascend_lab.errors import InputError
from ascend_lab.limits import TOML_BYTES, naming, read_file
from ascend_lab.machine.chip import Chip

FORMATS = {"YUV420SP_U8": 1.5, "XRGB8888_U8": 4.0, "RGB888_U8": 3.0, "YUV400_U8": 1.0}
"""Bytes of a pixel by input format; their numbers 1 to 4 in a parameter block count from here."""
PLANES = {"YUV420SP_U8": 3, "XRGB8888_U8": 4, "RGB888_U8": 3, "YUV400_U8": 1}
WIDEST = 4096
TALLEST = 4096
MOST_PADDING = 32
LARGEST = 65504
NARROW_CHIPS = ("Ascend310", "Ascend310DK", "Ascend310P3", "Ascend910A")
NARROW = 1080
"""Widest padded result on these (Atlas inference and training products)."""
FREE_START = "Ascend950"
"""Chips of this name crop YUV420SP at odd places, too."""
Four = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Aipp:
    """What is done to each frame of `width` x `height`: everything but the frames.

    `crop` is (left, top, width, height), its size (0, 0) where the network's input says it;
    `padding` (top, bottom, left, right) pixels of `padding_value`, in units of the result.
    """

    input_format: str
    width: int
    height: int
    csc: Csc | None = None
    rbuv_swap: bool = False
    ax_swap: bool = False
    crop: tuple[int, int, int, int] | None = None
    scaled: tuple[int, int] | None = None
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    padding_value: float = 0.0
    mean: tuple[int, int, int, int] = (0, 0, 0, 0)
    least: Four = (0.0, 0.0, 0.0, 0.0)
    var_reci: Four = (1.0, 1.0, 1.0, 1.0)

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame."""
        return int(self.width * self.height * FORMATS[self.input_format])

    @property
    def channels(self) -> int:
        """Channels of the result unless a network asks for less (or for the fourth)."""
        return min(PLANES[self.input_format], 3)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the result."""
        width, height = self.scaled or (self.crop[2:] if self.crop else (self.width, self.height))
        top, bottom, left, right = self.padding
        return width + left + right, height + top + bottom


def check(settings: Aipp, chip: Chip | None = None) -> Aipp:
    """Return the settings if they keep the published limits, those of a chip if one is given.

    Raises `InputError` naming the key of the configuration file that does not.
    """
    s = settings
    yuv = settings.input_format == "YUV420SP_U8"
    if s.input_format not in FORMATS:
        raise InputError(f"input_format: one of {', '.join(FORMATS)}", s.input_format)
    for axis, size, least, most in (("w", s.width, 2, WIDEST), ("h", s.height, 1, TALLEST)):
        _within(f"src_image_size_{axis}", size, least, most)
        _even(f"src_image_size_{axis}", size if yuv else 0)
    if s.csc and s.input_format == "YUV400_U8":
        raise InputError("csc_switch: false for YUV400_U8", "true", "grey has no colours")
    if s.crop:
        free = chip is not None and chip.name.startswith(FREE_START)
        _check_crop(s.crop, (s.width, s.height), yuv and not free)
    if s.scaled:
        _check_scaled(s.scaled, s.crop[2:] if s.crop else (s.width, s.height))
    for name, size in zip(("top", "bottom", "left", "right"), s.padding, strict=True):
        _within(f"{name}_padding_size", size, 0, MOST_PADDING)
    most = NARROW if chip is not None and chip.name in NARROW_CHIPS else WIDEST
    if any(s.padding) and s.size[0] > most:
        needed = f"a padded width of at most {most}{f' on {chip.name}' if chip else ''}"
        raise InputError(needed, str(s.size[0]), "pad or crop less")
    for key, values, low, high in (
        ("mean", s.mean, 0, 255),
        ("min", s.least, 0, 255),
        ("var_reci", s.var_reci, -LARGEST, LARGEST),
    ):
        for i, value in enumerate(values):
            _within(f"{key}_chn_{i}", value, low, high)
    _within("padding_value", s.padding_value, -LARGEST, LARGEST)
    return s


def _within(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also for nan
        raise InputError(f"{key} from {low} to {high}", str(value), "mend the configuration")


def _even(key: str, value: int) -> None:
    if value % 2:
        raise InputError(f"{key}: an even number for YUV420SP_U8", str(value), "chroma is halved")


def _check_crop(crop: tuple[int, int, int, int], source: tuple[int, int], even: bool) -> None:
    for axis, start, size, whole in zip("wh", crop[:2], crop[2:], source, strict=True):
        key = f"load_start_pos_{axis}"
        _within(key, start, 0, 4095)
        _even(key, start if even else 0)
        _within(f"crop_size_{axis}", size, 1, WIDEST)
        if start + size > whole:
            needed = f"{key} + crop_size_{axis} of at most {whole}, src_image_size_{axis}"
            raise InputError(needed, f"{start} + {size}", "crop inside the image")


def _check_scaled(scaled: tuple[int, int], source: tuple[int, int]) -> None:
    for axis, out, size, most in zip("wh", scaled, source, (1920, 4096), strict=True):
        _within(f"scf output size {axis}", out, 16, most)
        if not size <= out * 16 or not out <= size * 16:
            needed = f"scf output size {axis} within a factor of 16 of the input"
            raise InputError(needed, f"{size} -> {out}", "resize in steps")


# -- pixels ---------------------------------------------------------------------------------------
def aipp(frames: Image, settings: Aipp, *, dtype: str = "fp16", channels: int = 0) -> Image:
    """Return what AIPP makes of uint8 frames, one after another in any shape: (n, c, h, w).

    `dtype` is fp16 or uint8, `channels` those a network takes (0: all there are). Raises
    `InputError` for bytes that are no whole frames, and as `check`.
    """
    s = check(settings)
    frames = np.asarray(frames)
    if dtype not in ("fp16", "uint8"):
        raise InputError("fp16 or uint8 for AIPP's result", dtype, "choose one")
    if frames.dtype != np.uint8 or frames.size == 0 or frames.size % s.frame_bytes:
        needed = f"uint8 frames of {s.frame_bytes:,} bytes ({s.input_format}, {s.width} x "
        got = f"{frames.size:,} of {frames.dtype}"
        raise InputError(f"{needed}{s.height})", got, "check src_image_size and input_format")
    image = _swapped(_planes(frames.reshape(-1, s.frame_bytes), s), s)
    if s.crop:
        image = crop(image, *s.crop)
    if s.scaled:
        image = resize(image, *s.scaled)
    if s.csc:  # without the bias its direction does not use
        biases = {"in_bias": s.csc.in_bias, "out_bias": s.csc.out_bias}
        biases.pop("out_bias" if s.input_format == "YUV420SP_U8" else "in_bias")
        image = convert(image, Csc(s.csc.matrix, **biases))
    wanted = channels or s.channels
    if wanted > image.shape[1]:
        what = f"at most {image.shape[1]} channels from {s.input_format}"
        raise InputError(what, str(wanted), "change the network's input")
    image = image[:, :wanted]
    if dtype == "fp16":
        image = normalise(image, *(part[:wanted] for part in (s.mean, s.least, s.var_reci)))
    elif any(s.padding):
        _within("padding_value of uint8", s.padding_value, 0, 255)
    return pad(image, s.padding, s.padding_value)


def aipp_each(frames: Image, each: Sequence[Aipp], *, dtype: str = "fp16") -> Image:
    """Return the same for frames with settings of their own, as dynamic AIPP has them."""
    flat = np.asarray(frames).reshape(-1)
    total = sum(s.frame_bytes for s in each)
    if not each or flat.size != total:
        needed = f"{len(each)} frames of {total:,} bytes in all"
        raise InputError(needed, f"{flat.size:,}", "check src_image_size and input_format")
    shape = np.shape(frames)
    source = (each[0].height, each[0].width)
    if len(shape) == 3 and shape[2] in (3, 4) and shape[:2] != source:
        needed = f"images of height x width {source[0]} x {source[1]}, as the settings say"
        raise InputError(needed, f"{shape[0]} x {shape[1]}", "mend src_image_size_h and _w")
    if len({s.size for s in each}) > 1:
        sizes = ", ".join(sorted({f"{s.size[0]} x {s.size[1]}" for s in each}))
        raise InputError("one size of result for all images of a batch", sizes, "resize or pad")
    parts = np.split(flat, np.cumsum([s.frame_bytes for s in each])[:-1])
    return np.concatenate([aipp(part, s, dtype=dtype) for part, s in zip(parts, each, strict=True)])


def _planes(frames: Image, s: Aipp) -> Image:
    """Return frames as images (n, planes, h, w), chroma as large as luma."""
    count = len(frames)
    pixels = s.width * s.height
    if s.input_format != "YUV420SP_U8":
        packed = frames.reshape(count, s.height, s.width, PLANES[s.input_format])
        return packed.transpose(0, 3, 1, 2)
    luma = frames[:, :pixels].reshape(count, 1, s.height, s.width)
    pairs = frames[:, pixels:].reshape(count, s.height // 2, s.width // 2, 2)
    chroma = pairs.transpose(0, 3, 1, 2).repeat(2, axis=2).repeat(2, axis=3)
    return np.concatenate([luma, chroma], axis=1)


def _swapped(image: Image, s: Aipp) -> Image:
    """Return the channels in the order the settings ask for: X to the end, then R/B or U/V."""
    order = list(range(image.shape[1]))
    if s.ax_swap and s.input_format == "XRGB8888_U8":
        order = order[1:] + order[:1]
    if s.rbuv_swap and len(order) > 1:
        one, two = (1, 2) if s.input_format == "YUV420SP_U8" else (0, 2)
        order[one], order[two] = order[two], order[one]
    return image[:, order]


def crop(image: Image, left: int, top: int, width: int, height: int) -> Image:
    """Return a part of an image (..., h, w)."""
    return image[..., top : top + height, left : left + width]


def normalise(
    image: Image, mean: Sequence[float], least: Sequence[float], var_reci: Sequence[float]
) -> Image:
    """Return (x - mean - least) var_reci of an image (n, c, h, w) in fp16, rounded once.

    The numbers, one a channel, are fp16 themselves.
    """
    m, low, scale = (
        np.array(part, np.float16).astype(np.float64).reshape(-1, 1, 1)
        for part in (mean, least, var_reci)
    )
    with np.errstate(over="ignore"):
        found: Image = ((image - m - low) * scale).astype(np.float16)
    return found


def pad(image: Image, sides: tuple[int, int, int, int], value: float = 0.0) -> Image:
    """Return an image (..., h, w) with pixels of `value` at top, bottom, left and right."""
    top, bottom, left, right = sides
    around = [(0, 0)] * (image.ndim - 2) + [(top, bottom), (left, right)]
    return np.pad(image, around, constant_values=np.float64(value).astype(image.dtype))


_AXES = ("w", "h")
_SIDES = ("top", "bottom", "left", "right")
_MATRIX = [[f"matrix_r{row}c{column}" for column in range(3)] for row in range(3)]


@dataclass(frozen=True, slots=True)
class Key:
    """A key: what its value is, its default, least and largest, the mode it is for."""

    kind: type | tuple[str, ...]
    default: Any
    low: float = 0
    high: float = 0
    mode: str = "static"


def _keys() -> dict[str, Key]:
    switches = ("csc_switch", "rbuv_swap_switch", "ax_swap_switch", "crop", "padding")
    found = {name: Key(bool, False) for name in switches}
    reserved = ("resize", "single_line_mode", "support_rotation")
    found |= {name: Key(bool, False, mode="reserved") for name in reserved}
    found |= {
        "aipp_mode": Key(("static", "dynamic"), None, mode=""),
        "related_input_rank": Key(int, 0, 0, 2**16, ""),
        "related_input_name": Key(str, "", mode="reserved"),
        "max_src_image_size": Key(int, 0, 0, 2**32 - 1, "dynamic"),
        "input_format": Key(tuple(FORMATS), None),
        "cpadding_value": Key(float, 0.0, -65504, 65504, "reserved"),
        "rotation_angle": Key(int, 0, 0, 3, "reserved"),
        "raw_rgbir_to_f16_n": Key(int, 8, 0, 31, "reserved"),
        "padding_value": Key(float, 0.0, -65504, 65504),
    }
    for axis in _AXES:
        found[f"src_image_size_{axis}"] = Key(int, 0, 0, 4096)
        found[f"load_start_pos_{axis}"] = Key(int, 0, 0, 4095)
        found[f"crop_size_{axis}"] = Key(int, 0, 0, 4096)
        found[f"resize_output_{axis}"] = Key(int, 0, 0, 4096, "reserved")
    found |= {f"{side}_padding_size": Key(int, 0, 0, 32) for side in _SIDES}
    found |= {key: Key(int, None, -(2**15), 2**15 - 1) for row in _MATRIX for key in row}
    for i, bias in enumerate((16, 128, 128)):
        found |= {f"{side}_bias_{i}": Key(int, bias, 0, 255) for side in ("input", "output")}
    for i in range(4):
        found[f"mean_chn_{i}"] = Key(int, 0, 0, 255)
        found[f"min_chn_{i}"] = Key(float, 0.0, 0, 255)
        found[f"var_reci_chn_{i}"] = Key(float, 1.0, -65504, 65504)
    return found


KEYS = _keys()
"""Every key of an `aipp_op`; defaults of the matrix depend on the input format."""


@dataclass(frozen=True, slots=True)
class AippOp:
    """One `aipp_op`: for which input of the network, and its settings (None: dynamic ones).

    Sizes that the file leaves to the network are 0 in the settings: see `fitted`. A dynamic one
    says only the `max_bytes` of all frames of a batch.
    """

    rank: int
    settings: Aipp | None
    max_bytes: int = 0


def read_config(path: str | Path) -> tuple[AippOp, ...]:
    """Return the operations of a file; raises `InputError` naming the key at fault."""
    data = read_file(path, "an AIPP configuration", TOML_BYTES)
    try:
        return parse_config(data.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise InputError("an AIPP configuration in UTF-8", f"{path}: {error}") from None


def parse_config(text: str, where: str = "AIPP") -> tuple[AippOp, ...]:
    """Return the operations of a text, in order; raises `InputError` naming the key at fault."""
    table = {"aipp_op": [{name: key.kind for name, key in KEYS.items()}]}
    given = read_text(text, table, where).get("aipp_op", ())
    with naming(where):
        return _operations(given)


def _operations(given: Iterable[dict[str, Any]]) -> tuple[AippOp, ...]:
    found = [_operation(one) for one in given]
    ranks = [op.rank for op in found]
    if not found:
        raise InputError("an aipp_op { ... }", "none", "write one for each input")
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise InputError("one aipp_op for each related_input_rank", f"{twice} twice", "number them")
    return tuple(found)


def _operation(given: dict[str, Any]) -> AippOp:
    mode = given.get("aipp_mode")
    if mode is None:
        raise InputError("aipp_mode: static or dynamic", "none", "every aipp_op says it")
    for name, value in given.items():
        key = KEYS[name]
        if key.kind in (int, float) and not key.low <= value <= key.high:
            needed = f"{name}: a number from {key.low:g} to {key.high:g}"
            raise InputError(needed, f"{value:g}", "mend the configuration")
        if key.mode == "reserved" and value != key.default:
            raise InputError(f"{name}: {key.default}", str(value), "the documents reserve it")
        if key.mode in ("static", "dynamic") and key.mode != mode and value != key.default:
            remedy = "frames bring theirs" if mode == "dynamic" else "drop it"
            raise InputError(f"{name} only with aipp_mode: {key.mode}", mode, remedy)
    v = {name: given.get(name, key.default) for name, key in KEYS.items()}
    if mode == "static":
        return AippOp(v["related_input_rank"], _static(v))
    if not v["max_src_image_size"]:
        raise InputError("max_src_image_size above 0 with aipp_mode: dynamic", "none", "add it")
    return AippOp(v["related_input_rank"], None, v["max_src_image_size"])


def _static(v: dict[str, Any]) -> Aipp:
    if v["input_format"] is None:
        raise InputError(f"input_format: one of {', '.join(FORMATS)}", "none", "add it")
    sizes = [v[f"src_image_size_{axis}"] for axis in _AXES]
    names = [f"{key}_{axis}" for key in ("load_start_pos", "crop_size") for axis in _AXES]
    padding = tuple(v[f"{side}_padding_size"] for side in _SIDES)
    per_channel = [
        tuple(v[f"{key}_chn_{i}"] for i in range(4)) for key in ("mean", "min", "var_reci")
    ]
    return Aipp(
        v["input_format"],
        sizes[0],
        sizes[1],
        csc=_conversion(v) if v["csc_switch"] else None,
        rbuv_swap=v["rbuv_swap_switch"],
        ax_swap=v["ax_swap_switch"],
        crop=tuple(v[name] for name in names) if v["crop"] else None,
        padding=padding if v["padding"] else (0, 0, 0, 0),
        padding_value=v["padding_value"],
        mean=per_channel[0],
        least=per_channel[1],
        var_reci=per_channel[2],
    )


def _conversion(v: dict[str, Any]) -> Csc:
    """Return the conversion given, what it leaves out from BT.601 narrow."""
    to = "BGR" if v["input_format"] == "YUV420SP_U8" else "YUV"
    usual = csc_of("601 narrow", to).matrix
    rows = tuple(
        tuple(n if v[key] is None else v[key] for n, key in zip(*pair, strict=True))
        for pair in zip(usual, _MATRIX, strict=True)
    )
    biases = (tuple(v[f"{side}_bias_{i}"] for i in range(3)) for side in ("input", "output"))
    return Csc(rows, *biases)  # type: ignore[arg-type]
