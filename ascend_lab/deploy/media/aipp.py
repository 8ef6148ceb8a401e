"""AIPP: what happens to a camera's bytes on their way into a network.

    static    swap > crop > colours > (x - mean - min) var_reci > padding
    dynamic   the same, with a resize behind the crop; the program sends the settings of each image
              with its bytes, see `parameter_block`

A frame is flat uint8, as cameras and decoders give it; the result is (n, c, h, w) in fp16, or in
uint8 for a network that starts quantised (nothing is normalised then). Chroma of YUV420SP is used
for four pixels as it is. Parameters are fp16; each result is rounded once. Of four bytes a pixel
the first three behind `ax_swap` count, and the fourth only where a network asks for four channels.

Source: CANN, AIPP, crop_padding_config; GE, aipp_op.cc.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.deploy.media.colours import Csc, Image, convert
from ascend_lab.deploy.media.resizing import resize
from ascend_lab.errors import InputError
from ascend_lab.limits import Range
from ascend_lab.machine.chip import Chip

FORMATS = {"YUV420SP_U8": 1.5, "XRGB8888_U8": 4.0, "RGB888_U8": 3.0, "YUV400_U8": 1.0}
"""Bytes of a pixel by input format; their numbers 1 to 4 in a parameter block count from here."""
PLANES = {"YUV420SP_U8": 3, "XRGB8888_U8": 4, "RGB888_U8": 3, "YUV400_U8": 1}
"""Channels of an image by input format."""
WIDEST = 4096
TALLEST = 4096
PLACE = Range(int, 0, 4095)
"""Where a crop begins."""
PADDING = Range(int, 0, 32)
"""Pixels at one side."""
BYTE = Range(int, 0, 255)
MINIMUM = Range(float, 0, 255)
HALF = Range(float, -65504, 65504)
"""Numbers that fp16 holds."""
NARROW_CHIPS = ("Ascend310", "Ascend310DK", "Ascend310P3", "Ascend910A")
NARROW = 1080
"""Widest padded result on these (Atlas inference and training products)."""
FREE_START = "Ascend950"
"""Chips of this name crop YUV420SP at odd places, too."""
Four = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Aipp:
    """What is done to each frame of `width` x `height`: everything but the frames.

    Each field is a key of the vendor's file, or several of one kind. `crop` is (left, top, width,
    height), its size (0, 0) where the network's input says it; `padding` (top, bottom, left, right)
    pixels of `padding_value`, in units of the result. `mean`, `minimum` and `var_reci` (one over
    the deviation) have a number for each of four channels.
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
    minimum: Four = (0.0, 0.0, 0.0, 0.0)
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
        above, below, left_of, right_of = self.padding
        return width + left_of + right_of, height + above + below


def check(settings: Aipp, chip: Chip | None = None) -> Aipp:
    """Return the settings if they keep the published limits, those of a chip if one is given.

    Raises `InputError` naming the key of the configuration file that does not.
    """
    s = settings
    is_yuv = settings.input_format == "YUV420SP_U8"
    if s.input_format not in FORMATS:
        raise InputError(f"input_format: one of {', '.join(FORMATS)}", s.input_format)
    _within("src_image_size_w", s.width, Range(int, 2, WIDEST))
    _within("src_image_size_h", s.height, Range(int, 1, TALLEST))
    if is_yuv:
        _even("src_image_size_w", s.width)
        _even("src_image_size_h", s.height)
    if s.csc and s.input_format == "YUV400_U8":
        raise InputError("csc_switch: false for YUV400_U8", "true", "grey has no colours")
    if s.crop:
        # chroma is halved: most chips can only begin a crop where a sample of it begins
        free = chip is not None and chip.name.startswith(FREE_START)
        _check_crop(s.crop, (s.width, s.height), is_yuv and not free)
    if s.scaled:
        _check_scaled(s.scaled, s.crop[2:] if s.crop else (s.width, s.height))
    for name, size in zip(("top", "bottom", "left", "right"), s.padding, strict=True):
        _within(f"{name}_padding_size", size, PADDING)
    # 1080 on Atlas inference and training products, by the documents: 1070 + 8 + 8 is too wide
    widest = NARROW if chip is not None and chip.name in NARROW_CHIPS else WIDEST
    if any(s.padding) and s.size[0] > widest:
        needed = f"a padded width of at most {widest}{f' on {chip.name}' if chip else ''}"
        raise InputError(needed, str(s.size[0]), "pad or crop less")
    for key, values, limits in (
        ("mean", s.mean, BYTE),
        ("min", s.minimum, MINIMUM),
        ("var_reci", s.var_reci, HALF),
    ):
        for i, value in enumerate(values):
            _within(f"{key}_chn_{i}", value, limits)
    _within("padding_value", s.padding_value, HALF)
    return s


def _within(key: str, value: float, limits: Range) -> None:
    """Raise `InputError` for a number outside its limits; its kind is free, as NumPy has many."""
    if not limits.low <= value <= limits.high:  # also for nan
        needed = f"{key} from {limits.low} to {limits.high}"
        raise InputError(needed, str(value), "mend the configuration")


def _even(key: str, value: int) -> None:
    """Raise `InputError` for an odd place or size: four pixels share one sample of chroma."""
    if value % 2:
        raise InputError(f"{key}: an even number for YUV420SP_U8", str(value), "chroma is halved")


def _check_crop(
    crop: tuple[int, int, int, int], source: tuple[int, int], must_be_even: bool
) -> None:
    """Raise `InputError` for a crop that leaves the image, or begins at an odd place."""
    for axis, start, size, source_size in zip("wh", crop[:2], crop[2:], source, strict=True):
        key = f"load_start_pos_{axis}"
        _within(key, start, PLACE)
        _even(key, start if must_be_even else 0)
        _within(f"crop_size_{axis}", size, Range(int, 1, WIDEST))
        if start + size > source_size:
            needed = f"{key} + crop_size_{axis} of at most {source_size}, src_image_size_{axis}"
            raise InputError(needed, f"{start} + {size}", "crop inside the image")


def _check_scaled(scaled: tuple[int, int], source: tuple[int, int]) -> None:
    """Raise `InputError` for a resize that the hardware cannot do in one step."""
    for axis, out, size, largest in zip("wh", scaled, source, (1920, 4096), strict=True):
        _within(f"scf output size {axis}", out, Range(int, 16, largest))
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
    # a frame of 1920 x 1080 in YUV420SP is 3,110,400 bytes, whatever the shape of the array
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
    if s.csc and s.input_format == "YUV420SP_U8":  # each direction uses one of the biases only
        image = convert(image, Csc(s.csc.matrix, in_bias=s.csc.in_bias))
    elif s.csc:
        image = convert(image, Csc(s.csc.matrix, out_bias=s.csc.out_bias))
    # of the three channels of YUV a network may take luma alone, of XRGB the fourth as well
    count = channels or s.channels
    if count > image.shape[1]:
        needed = f"at most {image.shape[1]} channels from {s.input_format}"
        raise InputError(needed, str(count), "change the network's input")
    image = image[:, :count]
    if dtype == "fp16":
        image = normalise(image, s.mean[:count], s.minimum[:count], s.var_reci[:count])
    elif any(s.padding):
        _within("padding_value of uint8", s.padding_value, BYTE)
    return pad(image, s.padding, s.padding_value)


def aipp_each(frames: Image, settings_of_frames: Sequence[Aipp], *, dtype: str = "fp16") -> Image:
    """Return what AIPP makes of frames that each have settings of their own, as in dynamic AIPP."""
    flat = np.asarray(frames).reshape(-1)
    total = sum(s.frame_bytes for s in settings_of_frames)
    if not settings_of_frames or flat.size != total:
        needed = f"{len(settings_of_frames)} frames of {total:,} bytes in all"
        raise InputError(needed, f"{flat.size:,}", "check src_image_size and input_format")
    # an image given as (h, w, c) shows its size: exchanging height and width keeps the bytes
    shape = np.shape(frames)
    source = (settings_of_frames[0].height, settings_of_frames[0].width)
    if len(shape) == 3 and shape[2] in (3, 4) and shape[:2] != source:
        needed = f"images of height x width {source[0]} x {source[1]}, as the settings say"
        raise InputError(needed, f"{shape[0]} x {shape[1]}", "mend src_image_size_h and _w")
    if len({s.size for s in settings_of_frames}) > 1:
        sizes = ", ".join(sorted({f"{s.size[0]} x {s.size[1]}" for s in settings_of_frames}))
        raise InputError("one size of result for all images of a batch", sizes, "resize or pad")
    # frames of 6 and 9 bytes are cut at 6
    raw_frames = np.split(flat, np.cumsum([s.frame_bytes for s in settings_of_frames])[:-1])
    return np.concatenate(
        [
            aipp(raw_frame, s, dtype=dtype)
            for raw_frame, s in zip(raw_frames, settings_of_frames, strict=True)
        ]
    )


def _planes(frames: Image, s: Aipp) -> Image:
    """Return frames as images (n, planes, h, w), chroma as large as luma."""
    count = len(frames)
    pixels = s.width * s.height
    if s.input_format != "YUV420SP_U8":
        packed = frames.reshape(count, s.height, s.width, PLANES[s.input_format])
        return packed.transpose(0, 3, 1, 2)
    # luma of all pixels, then U and V in turns, one pair for 2 x 2 pixels: each is repeated
    luma = frames[:, :pixels].reshape(count, 1, s.height, s.width)
    pairs = frames[:, pixels:].reshape(count, s.height // 2, s.width // 2, 2)
    chroma = pairs.transpose(0, 3, 1, 2).repeat(2, axis=2).repeat(2, axis=3)
    return np.concatenate([luma, chroma], axis=1)


def _swapped(image: Image, s: Aipp) -> Image:
    """Return the channels in the order of the settings: X to the end, then R/B or U/V exchanged."""
    order = list(range(image.shape[1]))
    if s.ax_swap and s.input_format == "XRGB8888_U8":  # XRGB becomes RGBX
        order = order[1:] + order[:1]
    if s.rbuv_swap and len(order) > 1:
        first_place, second_place = (1, 2) if s.input_format == "YUV420SP_U8" else (0, 2)
        order[first_place], order[second_place] = order[second_place], order[first_place]
    return image[:, order]


def crop(image: Image, x: int, y: int, width: int, height: int) -> Image:
    """Return the part of an image (..., h, w) that begins at (x, y)."""
    return image[..., y : y + height, x : x + width]


def normalise(
    image: Image, mean: Sequence[float], minimum: Sequence[float], var_reci: Sequence[float]
) -> Image:
    """Return (x - mean - minimum) var_reci of an image (n, c, h, w) in fp16, rounded once.

    The numbers, one a channel, are fp16 themselves.
    """
    # through fp16 to fp64: rounded as the hardware stores them, then computed exactly
    m, low, scale = (
        np.array(numbers, np.float16).astype(np.float64).reshape(-1, 1, 1)
        for numbers in (mean, minimum, var_reci)
    )
    # a result beyond 65504 is infinite in fp16, as on the hardware
    with np.errstate(over="ignore"):
        normalised: Image = ((image - m - low) * scale).astype(np.float16)
    return normalised


def pad(image: Image, sides: tuple[int, int, int, int], value: float = 0.0) -> Image:
    """Return an image (..., h, w) with pixels of `value` at top, bottom, left and right."""
    top, bottom, left_side, right_side = sides
    around = [(0, 0)] * (image.ndim - 2) + [(top, bottom), (left_side, right_side)]
    return np.pad(image, around, constant_values=np.float64(value).astype(image.dtype))
