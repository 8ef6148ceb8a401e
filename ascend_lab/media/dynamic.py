"""The parameter block of dynamic AIPP: 64 bytes for the batch, then 96 for each image.

A network with dynamic AIPP takes this block as one more input; the program writes it before every
run, so cameras of other sizes or formats can share one network. All numbers are little-endian,
`min` and `var_reci` fp16. Source: GE, the header of AIPP's parameters; CANN, aclmdlCreateAIPP.
"""

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.media.aipp import FORMATS, Aipp, check
from ascend_lab.media.colour import Csc

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
        number, first.csc is not None, first.rbuv_swap, first.ax_swap, len(each),
        first.width, first.height, *entries,
    )  # fmt: skip
    return head + b"".join(map(_packed, each))


def _shared(s: Aipp) -> tuple[Any, ...]:
    return s.input_format, s.width, s.height, s.csc, s.rbuv_swap, s.ax_swap


def _packed(s: Aipp) -> bytes:
    crop, scaled = s.crop or (0, 0, 0, 0), s.scaled or (0, 0)
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
        list(FORMATS)[number - 1], numbers[0], numbers[1], csc if csc_on else None,
        bool(rbuv), bool(ax),
    )  # fmt: skip
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
            shared, crop=n[4:8] if n[0] else None, scaled=n[10:12] if n[1] else None,
            padding=n[12:16] if n[2] else (0, 0, 0, 0),
            mean=n[16:20], least=n[20:24], var_reci=n[24:28],
        )
    )  # fmt: skip
