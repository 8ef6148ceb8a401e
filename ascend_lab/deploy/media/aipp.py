"""AIPP (AI pre-processing) converts a camera's frames into the input of a network.

    static    channel swaps, crop, colour conversion, (x - mean - min) var_reci, padding
    dynamic   the same, with a resize after the crop; the program sends the settings of each image
              with its bytes, see `parameter_block`

A frame is flat uint8, as cameras and decoders give it. The result is (n, c, h, w) in fp16, or in
uint8 without normalisation for a network with a quantised input. In YUV420SP four pixels share
one value of chroma. Parameters are fp16, and each result is rounded once. A pixel of four bytes
gives three channels, the first three after `ax_swap`, unless the network asks for four.

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

BYTES_PER_PIXEL = {"YUV420SP_U8": 1.5, "XRGB8888_U8": 4.0, "RGB888_U8": 3.0, "YUV400_U8": 1.0}
"""Input format -> bytes of a pixel; the order gives the formats' numbers in a parameter block."""
PLANES = {"YUV420SP_U8": 3, "XRGB8888_U8": 4, "RGB888_U8": 3, "YUV400_U8": 1}
"""Input format -> channels of an image."""
MAX_WIDTH = 4096
MAX_HEIGHT = 4096
CROP_START_RANGE = Range(int, 0, 4095)
"""First row or column of a crop."""
PADDING_RANGE = Range(int, 0, 32)
"""Pixels of padding on one side."""
BYTE_RANGE = Range(int, 0, 255)
MINIMUM_RANGE = Range(float, 0, 255)
FP16_RANGE = Range(float, -65504, 65504)
"""Finite numbers of fp16."""
CHIPS_WITH_NARROW_PADDING = ("Ascend310", "Ascend310DK", "Ascend310P3", "Ascend910A")
MAX_PADDED_WIDTH = 1080
"""Largest width with padding on these chips (Atlas inference and training products)."""
CHIP_WITH_ODD_CROPS = "Ascend950"
"""Chips whose names begin so can begin a crop of YUV420SP at odd positions."""
PerChannel = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Aipp:
    """The settings of AIPP for frames of `width` x `height`.

    Each field is one or several keys of the vendor's configuration file. `crop` is (left, top,
    width, height), where a size of 0 stands for that of the network's input. `padding` are the
    pixels (top, bottom, left, right) of `padding_value`, which is not normalised. `mean`, `minimum`
    and `var_reci` (one over the standard deviation) have one number for each of four channels.
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
    minimum: PerChannel = (0.0, 0.0, 0.0, 0.0)
    var_reci: PerChannel = (1.0, 1.0, 1.0, 1.0)

    @property
    def frame_bytes(self) -> int:
        """Return the bytes of one frame."""
        return int(self.width * self.height * BYTES_PER_PIXEL[self.input_format])

    @property
    def channels(self) -> int:
        """Return the channels of the result unless the network asks for another number."""
        return min(PLANES[self.input_format], 3)

    @property
    def size(self) -> tuple[int, int]:
        """Return the width and height of the result."""
        width, height = self.scaled or (self.crop[2:] if self.crop else (self.width, self.height))
        above, below, left_of, right_of = self.padding
        return width + left_of + right_of, height + above + below


def check_aipp(settings: Aipp, chip: Chip | None = None) -> Aipp:
    """Return the settings if they are within the published limits of AIPP, or of a chip's AIPP.

    Raises `InputError` naming the key of the configuration file that is not.
    """
    is_yuv = settings.input_format == "YUV420SP_U8"
    if settings.input_format not in BYTES_PER_PIXEL:
        raise InputError(
            f"input_format: one of {', '.join(BYTES_PER_PIXEL)}", settings.input_format
        )
    _check_range("src_image_size_w", settings.width, Range(int, 2, MAX_WIDTH))
    _check_range("src_image_size_h", settings.height, Range(int, 1, MAX_HEIGHT))
    if is_yuv:
        _check_even("src_image_size_w", settings.width)
        _check_even("src_image_size_h", settings.height)
    if settings.csc and settings.input_format == "YUV400_U8":
        raise InputError("csc_switch: false for YUV400_U8", "true", "grey has no colours")
    if settings.crop:
        # Two rows and two columns share a chroma sample: most chips crop at even positions only.
        allows_odd_start = chip is not None and chip.family.startswith(CHIP_WITH_ODD_CROPS)
        _check_crop(
            settings.crop, (settings.width, settings.height), is_yuv and not allows_odd_start
        )
    if settings.scaled:
        _check_scaled(
            settings.scaled,
            settings.crop[2:] if settings.crop else (settings.width, settings.height),
        )
    _check_padding(settings, chip)
    for key, values, limits in (
        ("mean", settings.mean, BYTE_RANGE),
        ("min", settings.minimum, MINIMUM_RANGE),
        ("var_reci", settings.var_reci, FP16_RANGE),
    ):
        for i, value in enumerate(values):
            _check_range(f"{key}_chn_{i}", value, limits)
    _check_range("padding_value", settings.padding_value, FP16_RANGE)
    return settings


def _check_padding(settings: Aipp, chip: Chip | None) -> None:
    """Raise `InputError` if an edge is padded too much, or the padded frame is too wide."""
    for name, size in zip(("top", "bottom", "left", "right"), settings.padding, strict=True):
        _check_range(f"{name}_padding_size", size, PADDING_RANGE)
    # On Ascend310 a frame of 1070 pixels with 8 + 8 pixels of padding is too wide: 1086 > 1080.
    max_width = MAX_WIDTH
    if chip is not None and chip.family in CHIPS_WITH_NARROW_PADDING:
        max_width = MAX_PADDED_WIDTH
    if any(settings.padding) and settings.size[0] > max_width:
        needed = f"a padded width of at most {max_width}{f' on {chip.name}' if chip else ''}"
        raise InputError(needed, str(settings.size[0]), "pad or crop less")


def _check_range(key: str, value: float, limits: Range) -> None:
    """Raise `InputError` for a number outside its limits, whether int, float or of NumPy."""
    if not limits.low <= value <= limits.high:  # true for nan, too
        needed = f"{key} from {limits.low} to {limits.high}"
        raise InputError(needed, str(value), "correct the configuration")


def _check_even(key: str, value: int) -> None:
    """Raise `InputError` for an odd position or size: four pixels share one sample of chroma."""
    if value % 2:
        raise InputError(f"{key}: an even number for YUV420SP_U8", str(value), "chroma is halved")


def _check_crop(
    crop: tuple[int, int, int, int], source: tuple[int, int], must_be_even: bool
) -> None:
    """Raise `InputError` for a crop outside the image, or one that begins at an odd position."""
    for axis, start, size, source_size in zip("wh", crop[:2], crop[2:], source, strict=True):
        key = f"load_start_pos_{axis}"
        _check_range(key, start, CROP_START_RANGE)
        _check_even(key, start if must_be_even else 0)
        _check_range(f"crop_size_{axis}", size, Range(int, 1, MAX_WIDTH))
        if start + size > source_size:
            needed = f"{key} + crop_size_{axis} of at most {source_size}, src_image_size_{axis}"
            raise InputError(needed, f"{start} + {size}", "crop inside the image")


def _check_scaled(scaled: tuple[int, int], source: tuple[int, int]) -> None:
    """Raise `InputError` for a resize that the hardware cannot do in one step."""
    for axis, out, size, largest in zip("wh", scaled, source, (1920, 4096), strict=True):
        _check_range(f"scf output size {axis}", out, Range(int, 16, largest))
        if not size <= out * 16 or not out <= size * 16:
            needed = f"scf output size {axis} within a factor of 16 of the input"
            raise InputError(needed, f"{size} -> {out}", "resize in steps")


# -- pixels ---------------------------------------------------------------------------------------
def aipp(frames: Image, settings: Aipp, *, dtype: str = "fp16", channels: int = 0) -> Image:
    """Return the images (n, c, h, w) of uint8 frames, which are stored one after another.

    `dtype` is fp16 or uint8, `channels` the number that the network takes (0: all). Raises
    `InputError` for a number of bytes that is not a multiple of a frame, and for settings that
    `check_aipp` refuses.
    """
    check_aipp(settings)
    frames = np.asarray(frames)
    # A frame of 1920 x 1080 in YUV420SP has 3,110,400 bytes; the shape of the array is ignored.
    if dtype not in ("fp16", "uint8"):
        raise InputError("fp16 or uint8 for AIPP's result", dtype, "choose one")
    if frames.dtype != np.uint8 or frames.size == 0 or frames.size % settings.frame_bytes:
        size = f"{settings.width} x {settings.height}"
        needed = f"uint8 frames of {settings.frame_bytes:,} bytes ({settings.input_format}, {size})"
        got = f"{frames.size:,} of {frames.dtype}"
        raise InputError(needed, got, "check src_image_size and input_format")
    image = _reordered_channels(
        _planes(frames.reshape(-1, settings.frame_bytes), settings), settings
    )
    if settings.crop:
        image = crop(image, *settings.crop)
    if settings.scaled:
        image = resize(image, *settings.scaled)
    # A conversion from YUV uses the input bias only, one to YUV the output bias only.
    if settings.csc and settings.input_format == "YUV420SP_U8":
        image = convert(image, Csc(settings.csc.matrix, in_bias=settings.csc.in_bias))
    elif settings.csc:
        image = convert(image, Csc(settings.csc.matrix, out_bias=settings.csc.out_bias))
    # A network may take luma alone of the three channels of YUV, or all four channels of XRGB.
    count = channels or settings.channels
    if count > image.shape[1]:
        needed = f"at most {image.shape[1]} channels from {settings.input_format}"
        raise InputError(needed, str(count), "change the network's input")
    image = image[:, :count]
    if dtype == "fp16":
        image = normalise(
            image, settings.mean[:count], settings.minimum[:count], settings.var_reci[:count]
        )
    elif any(settings.padding):
        _check_range("padding_value of uint8", settings.padding_value, BYTE_RANGE)
    return pad(image, settings.padding, settings.padding_value)


def aipp_each(frames: Image, settings_of_frames: Sequence[Aipp], *, dtype: str = "fp16") -> Image:
    """Return the images of frames that each have their own settings, as in dynamic AIPP."""
    flat = np.asarray(frames).reshape(-1)
    total = sum(s.frame_bytes for s in settings_of_frames)
    if not settings_of_frames or flat.size != total:
        needed = f"{len(settings_of_frames)} frames of {total:,} bytes in all"
        raise InputError(needed, f"{flat.size:,}", "check src_image_size and input_format")
    # The number of bytes does not reveal exchanged height and width, but a shape (h, w, c) does.
    shape = np.shape(frames)
    source = (settings_of_frames[0].height, settings_of_frames[0].width)
    if len(shape) == 3 and shape[2] in (3, 4) and shape[:2] != source:
        needed = f"images of height x width {source[0]} x {source[1]}, as the settings say"
        raise InputError(needed, f"{shape[0]} x {shape[1]}", "correct src_image_size_h and _w")
    if len({s.size for s in settings_of_frames}) > 1:
        sizes = ", ".join(sorted({f"{s.size[0]} x {s.size[1]}" for s in settings_of_frames}))
        raise InputError("one size of result for all images of a batch", sizes, "resize or pad")
    # Frames of 6 and 9 bytes are split at byte 6.
    raw_frames = np.split(flat, np.cumsum([s.frame_bytes for s in settings_of_frames])[:-1])
    return np.concatenate(
        [
            aipp(raw_frame, s, dtype=dtype)
            for raw_frame, s in zip(raw_frames, settings_of_frames, strict=True)
        ]
    )


def _planes(frames: Image, settings: Aipp) -> Image:
    """Return frames as images (n, planes, h, w), with chroma repeated to the size of luma."""
    count = len(frames)
    pixels = settings.width * settings.height
    if settings.input_format != "YUV420SP_U8":
        packed = frames.reshape(
            count, settings.height, settings.width, PLANES[settings.input_format]
        )
        return packed.transpose(0, 3, 1, 2)
    # Luma of all pixels, then pairs of U and V, one for 2 x 2 pixels: each pair is repeated.
    luma = frames[:, :pixels].reshape(count, 1, settings.height, settings.width)
    pairs = frames[:, pixels:].reshape(count, settings.height // 2, settings.width // 2, 2)
    chroma = pairs.transpose(0, 3, 1, 2).repeat(2, axis=2).repeat(2, axis=3)
    return np.concatenate([luma, chroma], axis=1)


def _reordered_channels(image: Image, settings: Aipp) -> Image:
    """Return the image with channels swapped: first X to the end, then R with B or U with V."""
    order = list(range(image.shape[1]))
    if settings.ax_swap and settings.input_format == "XRGB8888_U8":  # XRGB becomes RGBX
        order = order[1:] + order[:1]
    if settings.rbuv_swap and len(order) > 1:
        first_place, second_place = (1, 2) if settings.input_format == "YUV420SP_U8" else (0, 2)
        order[first_place], order[second_place] = order[second_place], order[first_place]
    return image[:, order]


def crop(image: Image, x: int, y: int, width: int, height: int) -> Image:
    """Return the rectangle of an image (..., h, w) that begins at (x, y)."""
    return image[..., y : y + height, x : x + width]


def normalise(
    image: Image, mean: Sequence[float], minimum: Sequence[float], var_reci: Sequence[float]
) -> Image:
    """Return (x - mean - minimum) var_reci of an image (n, c, h, w) in fp16, rounded once.

    The parameters have one number for each channel.
    """
    # The parameters are rounded to fp16, as the hardware stores them, and computed in fp64.
    mean_column, minimum_column, scale = (
        np.array(numbers, np.float16).astype(np.float64).reshape(-1, 1, 1)
        for numbers in (mean, minimum, var_reci)
    )
    # A result beyond 65504 becomes infinite in fp16.
    with np.errstate(over="ignore"):
        normalised: Image = ((image - mean_column - minimum_column) * scale).astype(np.float16)
    return normalised


def pad(image: Image, sides: tuple[int, int, int, int], value: float = 0.0) -> Image:
    """Return an image (..., h, w) with pixels of `value` at top, bottom, left and right."""
    top, bottom, left_side, right_side = sides
    pad_widths = [(0, 0)] * (image.ndim - 2) + [(top, bottom), (left_side, right_side)]
    return np.pad(image, pad_widths, constant_values=np.float64(value).astype(image.dtype))
