"""Packs and unpacks the parameter block of dynamic AIPP (image pre-processing) for each run.

A network with dynamic AIPP takes the block as one more input: 64 bytes for the batch, then 96 bytes
for each image. So cameras with different sizes or formats can share one network. All numbers are
little-endian, `min` and `var_reci` are fp16.

Sources: CANN, aclmdlCreateAIPP; GE, the header of AIPP's parameters.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ascend_lab.deploy.media.aipp import BYTES_PER_PIXEL, Aipp, check_aipp
from ascend_lab.deploy.media.colours import Csc
from ascend_lab.errors import InputError

HEADER = struct.Struct("<5b3x2i9h6x3B3B2x16x")
"""Format, switches of colour conversion and swaps, batch; width, height; matrix; biases."""
IMAGE = struct.Struct("<4b4x12i4h4e4e16x")
"""Switches of crop, resize, padding, rotation; positions and sizes; mean, min, var_reci."""
MAX_IMAGES = 127
"""Largest number of images, as it is stored in a signed byte."""


def block_bytes(images: int) -> int:
    """Return the size of a block: 64 + 96 per image."""
    return HEADER.size + IMAGE.size * images


# -- writing --------------------------------------------------------------------------------------
def pack_block(settings_of_images: Sequence[Aipp]) -> bytes:
    """Return the block of a batch.

    Raises `InputError` if images differ in a setting of the header, such as the input format, or
    if padding is not 0, as the block has no field for its value.
    """
    if not 1 <= len(settings_of_images) <= MAX_IMAGES:
        got = str(len(settings_of_images))
        raise InputError(f"1 to {MAX_IMAGES} images", got, "split the batch")
    first_settings = settings_of_images[0]
    for settings in map(check_aipp, settings_of_images):
        if _header_settings(settings) != _header_settings(first_settings):
            needed = "one format, size, matrix and order of channels for all images of a block"
            raise InputError(needed, "images that differ", "use a block each")
        if settings.padding_value and any(settings.padding):
            got = str(settings.padding_value)
            raise InputError("padding_value 0 in a parameter block", got)
    # Without a colour conversion the matrix is 0 and its switch is off.
    csc = first_settings.csc or Csc(((0, 0, 0),) * 3)
    # Formats are numbered from 1: YUV420SP is 1, RGB888 is 3.
    header = HEADER.pack(
        list(BYTES_PER_PIXEL).index(first_settings.input_format) + 1,
        first_settings.csc is not None,
        first_settings.rbuv_swap,
        first_settings.ax_swap,
        len(settings_of_images),
        first_settings.width,
        first_settings.height,
        *sum(csc.matrix, ()),
        *csc.out_bias,
        *csc.in_bias,
    )
    return header + b"".join(map(_pack_image, settings_of_images))


def _header_settings(settings: Aipp) -> tuple[Any, ...]:
    """Return the settings in the header, which all images share."""
    return (
        settings.input_format,
        settings.width,
        settings.height,
        settings.csc,
        settings.rbuv_swap,
        settings.ax_swap,
    )


def _pack_image(settings: Aipp) -> bytes:
    """Return the 96 bytes of one image."""
    crop = settings.crop or (0, 0, 0, 0)
    scaled = settings.scaled or (0, 0)
    # A resize also states its input size, which is that of the crop if there is one.
    source = (0, 0)
    if settings.scaled:
        source = crop[2:] if settings.crop else (settings.width, settings.height)
    no_rotation = 0
    switches = (
        settings.crop is not None,
        settings.scaled is not None,
        any(settings.padding),
        no_rotation,
    )
    return IMAGE.pack(
        *switches,
        *crop,
        *source,
        *scaled,
        *settings.padding,
        *settings.mean,
        *settings.minimum,
        *settings.var_reci,
    )


# -- reading --------------------------------------------------------------------------------------
def unpack_block(raw: bytes) -> tuple[Aipp, ...]:
    """Return the settings of each image; raises `InputError` if the bytes are not a block."""
    if len(raw) < block_bytes(1):
        raise InputError(f"a block of at least {block_bytes(1)} bytes", str(len(raw)))
    format_number, has_csc, rbuv, ax, images, width, height, *entries = HEADER.unpack_from(raw)
    if images < 1 or len(raw) != block_bytes(images):
        needed = f"{block_bytes(max(images, 1))} bytes for {images} images"
        raise InputError(needed, str(len(raw)), "64 + 96 per image")
    if not 1 <= format_number <= len(BYTES_PER_PIXEL):
        raise InputError(f"an input format from 1 to {len(BYTES_PER_PIXEL)}", str(format_number))
    # Nine entries of the matrix, three of the output bias, three of the input bias.
    rows = tuple(tuple(entries[i : i + 3]) for i in (0, 3, 6))
    out_bias = tuple(entries[9:12])
    in_bias = tuple(entries[12:15])
    csc = Csc(rows, out_bias=out_bias, in_bias=in_bias)  # type: ignore[arg-type]
    # `_unpack_image` adds the settings of each image.
    shared = Aipp(
        list(BYTES_PER_PIXEL)[format_number - 1],
        width,
        height,
        csc if has_csc else None,
        bool(rbuv),
        bool(ax),
    )
    return tuple(
        _unpack_image(shared, IMAGE.unpack_from(raw, block_bytes(i))) for i in range(images)
    )


def _unpack_image(shared: Aipp, numbers: tuple[Any, ...]) -> Aipp:
    """Return the settings of one image, from the shared ones and the image's 28 numbers.

    Their order is: 0-3 switches; 4-7 crop; 8-9 size before the resize; 10-11 size after it; 12-15
    padding; 16-19 mean; 20-23 min; 24-27 var_reci.
    """
    has_crop, has_resize, has_padding, rotation = numbers[:4]
    if rotation:
        raise InputError("rotation 0", str(rotation), "the documents reserve it")
    source = numbers[6:8] if has_crop else (shared.width, shared.height)
    if has_resize and numbers[8:10] != source:
        needed = f"a resize from {source[0]} x {source[1]}, what the crop leaves,"
        raise InputError(needed, f"{numbers[8]} x {numbers[9]}", "correct scfInputSize")
    return check_aipp(
        replace(
            shared,
            crop=numbers[4:8] if has_crop else None,
            scaled=numbers[10:12] if has_resize else None,
            padding=numbers[12:16] if has_padding else (0, 0, 0, 0),
            mean=numbers[16:20],
            minimum=numbers[20:24],
            var_reci=numbers[24:28],
        )
    )
