"""Layouts as address maps: where each element of an array lies, as frozen data.

Every logical axis is cut into pieces; the pieces, permuted, are the axes of a row-major array.

    address(i) = sum over pieces p of  (i[p.axis] // p.step mod p.count) * p.stride

So the address is a sum of one term per logical axis, and everything else (bytes of padding, runs,
conversions) follows from the pieces. A named layout is one line of text. `N C1 H W C0` reads:
channels are cut into blocks, `C1` numbers the blocks, `C0` counts inside one, and the five axes are
stored row-major in this order. Axes joined by `*` are stored as one axis of their product.

Sources: Ascend C documentation (data formats, Mmad operands), MindSpore TransData.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

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


# -- address maps ---------------------------------------------------------------------------------
Index = Sequence[SupportsIndex | NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """One physical axis: `count` steps of `step` logical indices of `axis`, `stride` apart."""

    axis: int
    step: int
    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class AddressMap:
    """A layout of one shape: pieces outermost first, and the shape they are stored in.

    `axes` names the logical axes, in the order of an index; strides count elements.
    """

    format: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    storage_shape: tuple[int, ...]

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Pieces along every axis, which is the stored shape with no axes joined."""
        return tuple(p.count for p in self.pieces)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Logical shape with every axis filled up to whole blocks."""
        counts = [1] * len(self.shape)
        for piece in self.pieces:
            counts[piece.axis] *= piece.count
        return tuple(counts)

    @property
    def elements(self) -> int:
        """Stored elements, padding included."""
        return math.prod(self.storage_shape)

    @property
    def size_bytes(self) -> int:
        """Stored bytes, padding included."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def padding_bytes(self) -> int:
        """Stored bytes that hold no element of the array."""
        return self.size_bytes - math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def padded_share(self) -> float:
        """Padding bytes / stored bytes, from 0 up to but not including 1."""
        return self.padding_bytes / self.size_bytes

    def of_axis(self, axis: int) -> tuple[Piece, ...]:
        """Return the pieces of one logical axis, largest step first."""
        found = (p for p in self.pieces if p.axis == axis)
        return tuple(sorted(found, key=lambda p: -p.step))


def address_map(
    name: str, shape: Sequence[int], dtype: str = "fp16", *, c0: int | None = None
) -> AddressMap:
    """Lay an array of logical `shape` out in layout `name`.

    Images and weights have the logical shape (N, C, H, W) in every layout, arrays (..., rows,
    columns). `c0` replaces 32 bytes / size where the hardware does: L0C keeps 16 columns whatever
    the accumulator. Raises `LayoutError`.
    """
    form = format_of(name)
    lane = c0_of(dtype) if c0 is None else c0
    if lane < 2 or lane & (lane - 1):
        wanted = "c0 as a power of two from 2 on"
        raise LayoutError(wanted, str(c0), "leave it out for 32 bytes / size")
    sizes = _shape(form, shape)
    # the last two axes of plain arrays are M and N, those before B0, B1, ...
    named = tuple(a for a in form.axes if a != REST) or ("M", "N")[-len(sizes) :]
    axes = tuple(f"B{i}" for i in range(len(sizes) - len(named))) + named
    free = [a for a in axes if a not in form.axes]
    place = {axis: i for i, axis in enumerate(axes)}
    blocks = {place[a]: ROWS for a in form.rows} | {place[a]: lane for a in form.lanes}
    counts: list[tuple[int, int, int]] = []
    stored = []
    for group in (text for g in form.storage for text in (free if g == REST else [g])):
        group_pieces = [_piece(text, place, sizes, blocks) for text in group.split("*")]
        counts += group_pieces
        stored.append(math.prod(count for _, _, count in group_pieces))
    strides = [math.prod(n for _, _, n in counts[i + 1 :]) for i in range(len(counts))]
    pieces = tuple(Piece(*c, s) for c, s in zip(counts, strides, strict=True))
    return AddressMap(name, axes, sizes, dtype, pieces, tuple(stored))


def _shape(form: Format, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError:
        needed = f"{form.name}: a shape of whole numbers"
        raise LayoutError(needed, repr(shape), "convert it") from None
    free, fixed = REST in form.axes, len([a for a in form.axes if a != REST])
    if len(sizes) < max(fixed, 1) or (not free and len(sizes) > fixed):
        exactly = "at least " if free else ""
        wanted = f"{form.name}: a shape of {exactly}{max(fixed, 1)} axes, {' '.join(form.axes)}"
        raise LayoutError(wanted, f"{len(sizes)}: {sizes}", "reshape the array, or use ND")
    if min(sizes) < 1:
        raise LayoutError(f"{form.name}: axes of at least 1 element", str(sizes), "drop the tensor")
    return sizes


def _piece(
    text: str, place: dict[str, int], sizes: tuple[int, ...], blocks: dict[int, int]
) -> tuple[int, int, int]:
    """Return (axis, step, count) of a stored axis such as `H`, `C1` or `C0`."""
    if text in place:
        return place[text], 1, sizes[place[text]]
    axis = place[text[:-1]]
    block = blocks[axis]
    return (axis, 1, block) if text[-1] == "0" else (axis, block, -(-sizes[axis] // block))


def check_index(layout: AddressMap, index: Index) -> list[NDArray[np.int64]]:
    """Return the index as integer arrays; raise `LayoutError` where it leaves the logical shape."""
    if len(index) != len(layout.shape):
        wanted = f"{layout.format} {layout.shape}: an index of {len(layout.shape)} numbers"
        raise LayoutError(wanted, f"{len(index)}", f"give {', '.join(layout.axes)}")
    arrays = [np.asarray(i) for i in index]
    for name, size, array in zip(layout.axes, layout.shape, arrays, strict=True):
        if array.dtype.kind not in "iu":
            raise LayoutError(f"index {name}: whole numbers", str(array.dtype), "convert it")
        if array.size and (array.min() < 0 or array.max() >= size):
            wanted = f"index {name} in 0..{size - 1} of {layout.format} {layout.shape}"
            raise LayoutError(wanted, f"{array.min()}..{array.max()}", "padding has no index")
    return [array.astype(np.int64) for array in arrays]


def address(layout: AddressMap, index: Index) -> Any:
    """Return where an element lies, counted in elements from the start of the storage.

    `index` has one number per logical axis, or arrays that broadcast: then the result is an int64
    array. Raises `LayoutError` for an index outside the logical shape.
    """
    arrays = check_index(layout, index)
    total: Any = sum(arrays[p.axis] // p.step % p.count * p.stride for p in layout.pieces)
    return int(total) if np.ndim(total) == 0 else total


def addresses(layout: AddressMap) -> NDArray[np.int64]:
    """Return the address of every element, an array of the logical shape."""
    grid = np.ogrid[tuple(slice(n) for n in layout.shape)]
    found: NDArray[np.int64] = address(layout, tuple(grid))
    return np.broadcast_to(found, layout.shape)


def element_at(layout: AddressMap, place: int) -> tuple[int, ...] | None:
    """Return the index of the element stored at address `place`, or None for padding."""
    if not 0 <= place < layout.elements:
        wanted = f"an address in 0..{layout.elements - 1} of {layout.format} {layout.shape}"
        raise LayoutError(wanted, str(place), "addresses count elements, not bytes")
    index = [0] * len(layout.shape)
    for piece in layout.pieces:
        index[piece.axis] += place // piece.stride % piece.count * piece.step
    inside = all(i < n for i, n in zip(index, layout.shape, strict=True))
    return tuple(index) if inside else None
