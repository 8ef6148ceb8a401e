"""AIPP inside a graph: the operator in front of the first convolution, fed with raw frames."""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.errors import InputError
from ascend_lab.media.aipp import Aipp


def fitted(settings: Aipp, width: int, height: int) -> Aipp:
    """Return settings whose sizes left open are those of a network's input.

    Raises `InputError` where the result has another size than the network takes.
    """
    s = settings
    padded = any(s.padding)
    if not s.crop and not padded:
        s = replace(s, width=s.width or width, height=s.height or height)
    elif s.crop and not padded:
        left, top, *size = s.crop
        s = replace(s, crop=(left, top, size[0] or width, size[1] or height))
    if s.size != (width, height):
        needed = f"{width} x {height} pixels, as the network takes them,"
        raise InputError(needed, f"{s.size[0]} x {s.size[1]}", "crop or pad to that size")
    return s
