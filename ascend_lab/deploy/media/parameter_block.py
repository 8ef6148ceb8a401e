"""The parameter block of dynamic AIPP: settings as bytes, written by the program before each run.

A network with dynamic AIPP takes the block as one more input, 64 bytes for the batch, then 96 for
each image: so cameras of other sizes or formats can share one network. All numbers are
little-endian, `min` and `var_reci` fp16.

Sources: CANN, aclmdlCreateAIPP; GE, the header of AIPP's parameters.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ascend_lab.deploy.media.aipp import FORMATS, Aipp, check
from ascend_lab.deploy.media.colours import Csc
from ascend_lab.errors import InputError

HEADER = struct.Struct("<5b3x2i9h6x3B3B2x16x")
"""Format, switches of CSC, R/B and A/X, batch; width, height; matrix; biases out, then in."""
IMAGE = struct.Struct("<4b4x12i4h4e4e16x")
"""Switches of crop, resize, padding, rotation; places and sizes; mean, min, 1 / variance."""
MOST_IMAGES = 127
"""The number of images is a signed byte."""


def block_bytes(images: int) -> int:
    """Return the size of a block: 64 + 96 per image."""
    return HEADER.size + IMAGE.size * images


# -- writing --------------------------------------------------------------------------------------
def pack_block(settings_of_images: Sequence[Aipp]) -> bytes:
    """Return the block of a batch; raises `InputError` where images differ in what they share.

    Padding is with zeros: the block has no place for another value.
    """
    if not 1 <= len(settings_of_images) <= MOST_IMAGES:
        got = str(len(settings_of_images))
        raise InputError(f"1 to {MOST_IMAGES} images", got, "split the batch")
    common = settings_of_images[0]
    for settings in map(check, settings_of_images):
        if _shared(settings) != _shared(common):
            needed = "one format, size, matrix and order of channels for all images of a block"
            raise InputError(needed, "images that differ", "use a block each")
        if settings.padding_value and any(settings.padding):
            got = str(settings.padding_value)
            raise InputError("padding_value 0 in a parameter block", got)
    # without a conversion its place holds zeros, and its switch is off
    csc = common.csc or Csc(((0, 0, 0),) * 3)
    # formats count from 1: YUV420SP is 1, RGB888 3
    header = HEADER.pack(
        list(FORMATS).index(common.input_format) + 1,
        common.csc is not None,
        common.rbuv_swap,
        common.ax_swap,
        len(settings_of_images),
        common.width,
        common.height,
        *sum(csc.matrix, ()),
        *csc.out_bias,
        *csc.in_bias,
    )
    return header + b"".join(map(_packed, settings_of_images))


def _shared(s: Aipp) -> tuple[Any, ...]:
    """Return the settings that stand in the header, for all images."""
    return s.input_format, s.width, s.height, s.csc, s.rbuv_swap, s.ax_swap


def _packed(s: Aipp) -> bytes:
    """Return the 96 bytes of one image."""
    crop = s.crop or (0, 0, 0, 0)
    scaled = s.scaled or (0, 0)
    # a resize also states the size that it starts from: that of the crop, if there is one
    source = (crop[2:] if s.crop else (s.width, s.height)) if s.scaled else (0, 0)
    no_rotation = 0
    switches = (s.crop is not None, s.scaled is not None, any(s.padding), no_rotation)
    return IMAGE.pack(
        *switches, *crop, *source, *scaled, *s.padding, *s.mean, *s.minimum, *s.var_reci
    )


# -- reading --------------------------------------------------------------------------------------
def unpack_block(raw: bytes) -> tuple[Aipp, ...]:
    """Return the settings of each image; raises `InputError` for other bytes."""
    if len(raw) < block_bytes(1):
        raise InputError(f"a block of at least {block_bytes(1)} bytes", str(len(raw)))
    number, csc_on, rbuv, ax, images, width, height, *entries = HEADER.unpack_from(raw)
    if images < 1 or len(raw) != block_bytes(images):
        needed = f"{block_bytes(max(images, 1))} bytes for {images} images"
        raise InputError(needed, str(len(raw)), "64 + 96 per image")
    if not 1 <= number <= len(FORMATS):
        raise InputError(f"an input format from 1 to {len(FORMATS)}", str(number))
    # nine entries of the matrix, then three of each bias
    rows = tuple(tuple(entries[i : i + 3]) for i in (0, 3, 6))
    out_bias = tuple(entries[9:12])
    in_bias = tuple(entries[12:15])
    csc = Csc(rows, out_bias=out_bias, in_bias=in_bias)  # type: ignore[arg-type]
    # `replace` below adds what each image has for itself
    shared = Aipp(
        list(FORMATS)[number - 1],
        width,
        height,
        csc if csc_on else None,
        bool(rbuv),
        bool(ax),
    )
    return tuple(_unpacked(shared, IMAGE.unpack_from(raw, block_bytes(i))) for i in range(images))


def _unpacked(shared: Aipp, n: tuple[Any, ...]) -> Aipp:
    """Return the settings of one image, from those of the header and its 28 numbers.

    0-3 switches; 4-7 crop; 8-9 size before and 10-11 behind the resize; 12-15 padding; 16-19 mean;
    20-23 min; 24-27 var_reci.
    """
    crop_on, resize_on, padding_on, rotation = n[:4]
    if rotation:
        raise InputError("rotation 0", str(rotation), "the documents reserve it")
    source = n[6:8] if crop_on else (shared.width, shared.height)
    if resize_on and n[8:10] != source:
        needed = f"a resize from {source[0]} x {source[1]}, what the crop leaves,"
        raise InputError(needed, f"{n[8]} x {n[9]}", "mend scfInputSize")
    return check(
        replace(
            shared,
            crop=n[4:8] if crop_on else None,
            scaled=n[10:12] if resize_on else None,
            padding=n[12:16] if padding_on else (0, 0, 0, 0),
            mean=n[16:20],
            minimum=n[20:24],
            var_reci=n[24:28],
        )
    )
