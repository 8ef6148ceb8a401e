"""The layouts by name: which logical axes they have, and in which order their pieces are stored.

A layout is one line of text. `N C1 H W C0` reads: channels are cut into blocks, `C1` numbers the
blocks, `C0` counts inside one, and the five axes are stored row-major in this order. Axes joined
by `*` are stored as one axis of their product.

Sources: Ascend C documentation (data formats, Mmad operands), MindSpore TransData.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ascend_lab.chip import BLOCK_BYTES, DTYPE_BYTES
from ascend_lab.errors import LayoutError

ROWS = 16
"""Rows of a fractal in every number format."""

REST = "..."
"""Stands for any number of leading axes, which are stored as they are."""


@dataclass(frozen=True, slots=True)
class Format:
    """A layout before shape and number format are known.

    `axes` name a logical index, `storage` the stored axes, outermost first; `rows` are the axes cut
    by 16, `lanes` those cut by C0. Only formats with the same axes up to `...` hold the same data.
    """

    name: str
    axes: tuple[str, ...]
    storage: tuple[str, ...]
    rows: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """ "array" for a stack of matrices, "image" for what has named N, C, H, W axes."""
        return "array" if REST in self.axes else "image"


def _format(name: str, axes: str, storage: str, rows: str = "", lanes: str = "") -> Format:
    parts = [tuple(text.split()) for text in (axes, storage, rows, lanes)]
    return Format(name, *parts)


FORMATS: Mapping[str, Format] = {
    f.name: f
    for f in (
        _format("ND", "...", "..."),
        _format("FRACTAL_NZ", "... M N", "... N1 M1 M0 N0", rows="M", lanes="N"),
        _format("FRACTAL_ZZ", "... M N", "... M1 N1 M0 N0", rows="M", lanes="N"),
        _format("FRACTAL_ZN", "... M N", "... M1 N1 N0 M0", rows="N", lanes="M"),
        _format("NCHW", "N C H W", "N C H W"),
        _format("NHWC", "N C H W", "N H W C"),
        _format("NC1HWC0", "N C H W", "N C1 H W C0", lanes="C"),
        _format("FRACTAL_Z", "N C H W", "C1*H*W N1 N0 C0", rows="N", lanes="C"),
    )
}
"""Every layout, by its name in the documentation; adding one is adding a line."""


def format_of(name: str) -> Format:
    """Return the format `name`; raise `LayoutError` that lists the known ones."""
    if name not in FORMATS:
        raise LayoutError("a known layout", repr(name), f"use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def c0_of(dtype: str) -> int:
    """C0 = 32 bytes / size of one number: 16 in fp16, 32 in int8, 8 in fp32."""
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise LayoutError("a known number format", repr(dtype), f"use one of {known}")
    return BLOCK_BYTES // DTYPE_BYTES[dtype]
