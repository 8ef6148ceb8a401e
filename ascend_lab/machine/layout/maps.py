"""Describes layouts as address maps, which give the address of each element of an array.

Every logical axis is cut into pieces; the pieces, permuted, are the axes of a row-major array.

    address(i) = sum over pieces p of  (i[p.axis] // p.step mod p.count) * p.stride

Padding, contiguous runs and conversions follow from the pieces. A named layout is one line of text:
in `N C1 H W C0` the channels are cut into blocks; `C1` is the number of a block and `C0` the
position in it. The axes are stored row-major; `*` joins axes to one whose size is their product.

To convert between two layouts, the array is divided into boxes. In a box both addresses are affine
in the same counters, so that one strided copy moves it. There are few boxes, because each axis is
cut only into its whole blocks and a ragged end.

Sources: Ascend C documentation (data formats, Mmad operands), MindSpore TransData.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import LayoutError
from ascend_lab.machine.chip import BLOCK_BYTES, DTYPE_BYTES

ROWS = 16
"""Rows of a fractal in every number format."""

LEADING_AXES = "..."
"""Stands for any number of leading axes, which are stored in the order of the array."""


@dataclass(frozen=True, slots=True)
class Format:
    """A layout for any shape and number format.

    `axes` are the names of the logical axes, `storage` those of the stored axes, outermost first.
    Axes in `rows` are cut into blocks of 16, those in `lanes` into blocks of C0. Two formats can
    hold the same array only if both name all its axes or both begin with `...`.
    """

    name: str
    axes: tuple[str, ...]
    storage: tuple[str, ...]
    rows: tuple[str, ...] = ()
    lanes: tuple[str, ...] = ()


FORMATS: Mapping[str, Format] = {
    # name, logical axes, stored axes, axes in blocks of 16 rows, axes in blocks of C0 lanes
    name: Format(name, *(tuple(text.split()) for text in texts))
    for name, *texts in (
        ("ND", "...", "..."),
        ("FRACTAL_NZ", "... M N", "... N1 M1 M0 N0", "M", "N"),
        ("FRACTAL_ZZ", "... M N", "... M1 N1 M0 N0", "M", "N"),
        ("FRACTAL_ZN", "... M N", "... M1 N1 N0 M0", "N", "M"),
        ("NCHW", "N C H W", "N C H W"),
        ("NHWC", "N C H W", "N H W C"),
        ("NC1HWC0", "N C H W", "N C1 H W C0", "", "C"),
        ("C1NHWC0", "N C H W", "C1 N H W C0", "", "C"),
        ("FRACTAL_Z", "N C H W", "C1*H*W N1 N0 C0", "N", "C"),
    )
}
"""Every layout, by its name in the documentation (only C1NHWC0 is our name)."""


def format_of(name: str) -> Format:
    """Return the format `name`; raise `LayoutError`, which lists all formats, for other names."""
    if name not in FORMATS:
        raise LayoutError("a known layout", repr(name), f"use one of {', '.join(FORMATS)}")
    return FORMATS[name]


# -- address maps ---------------------------------------------------------------------------------
Values = NDArray[Any]
Index = Sequence[SupportsIndex | NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """One stored axis: `count` steps of `step` indices along logical `axis`, `stride` apart.

    C = 40 in NC1HWC0 with C0 = 16: C1 has step 16 and count 3, C0 has step 1 and count 16.
    """

    axis: int
    step: int
    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class AddressMap:
    """A layout of one shape: its pieces, outermost first, and the shape they are stored in.

    `axes` names the logical axes in the order of an index. Strides count elements.
    """

    format: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    storage_shape: tuple[int, ...]

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The count of every piece: the stored shape before `*` joins axes."""
        return tuple(p.count for p in self.pieces)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The logical shape with every axis rounded up to whole blocks."""
        # C = 40 is stored as 3 blocks of 16 channels: 48
        counts = [1] * len(self.shape)
        for piece in self.pieces:
            counts[piece.axis] *= piece.count
        return tuple(counts)

    @property
    def elements(self) -> int:
        """The number of stored elements, padding included."""
        return math.prod(self.storage_shape)

    @property
    def size_bytes(self) -> int:
        """The number of stored bytes, padding included."""
        return self.elements * DTYPE_BYTES[self.dtype]

    @property
    def padding_bytes(self) -> int:
        """The number of stored bytes that hold no element of the array."""
        return self.size_bytes - math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def padded_share(self) -> float:
        """Padding bytes / stored bytes, from 0 up to but not including 1."""
        return self.padding_bytes / self.size_bytes

    def of_axis(self, axis: int) -> tuple[Piece, ...]:
        """Return the pieces of one logical axis, largest step first."""
        pieces = (p for p in self.pieces if p.axis == axis)
        return tuple(sorted(pieces, key=lambda p: -p.step))


def address_map(
    name: str, shape: Sequence[int], dtype: str = "fp16", *, c0: int | None = None
) -> AddressMap:
    """Return the address map of an array of logical `shape` in layout `name`.

    Images and weights have the logical shape (N, C, H, W) in every layout, other arrays (..., rows,
    columns). C0 is 32 bytes / element size: 16 in fp16, 32 in int8. `c0` replaces this value if the
    hardware uses another one: fractals in L0C have 16 columns for every accumulator format. Raises
    `LayoutError`.
    """
    form = format_of(name)
    if dtype not in DTYPE_BYTES:
        remedy = f"use one of {', '.join(DTYPE_BYTES)}"
        raise LayoutError("a known number format", repr(dtype), remedy)
    block_size = BLOCK_BYTES // DTYPE_BYTES[dtype] if c0 is None else c0
    if block_size < 2 or block_size & (block_size - 1):
        # a power of two shares no bit with the number below it: 16 & 15 = 0, but 12 & 11 = 8
        needed = "c0 as a power of two from 2 on"
        raise LayoutError(needed, str(c0), "leave it out for 32 bytes / size")
    sizes = _shape(form, shape)
    # In layouts with `...` the axes in front get the names B0, B1, ...; ND calls its last two M, N.
    named_axes = tuple(a for a in form.axes if a != LEADING_AXES) or ("M", "N")[-len(sizes) :]
    leading_axes = tuple(f"B{i}" for i in range(len(sizes) - len(named_axes)))
    axes = leading_axes + named_axes
    axis_number = {axis: i for i, axis in enumerate(axes)}
    blocks = {axis_number[a]: ROWS for a in form.rows}
    blocks |= {axis_number[a]: block_size for a in form.lanes}
    unnamed_axes = [a for a in axes if a not in form.axes]
    stored_axes: list[str] = []
    for text in form.storage:
        stored_axes += unnamed_axes if text == LEADING_AXES else [text]
    counters: list[tuple[int, int, int]] = []  # (axis, count, step) of every piece
    storage_shape = []
    for text in stored_axes:
        piece_names = text.split("*")
        group_counters = [
            _counter(piece_name, axis_number, sizes, blocks) for piece_name in piece_names
        ]
        counters += group_counters
        storage_shape.append(math.prod(count for _, count, _ in group_counters))
    # row-major: the stride of a piece is the product of all later counts
    # counts (1, 3, 7, 7, 16) have the strides (2352, 784, 112, 16, 1)
    pieces: list[Piece] = []
    stride = 1
    for axis_index, count, step in reversed(counters):
        pieces.append(Piece(axis_index, step, count, stride))
        stride *= count
    return AddressMap(name, axes, sizes, dtype, tuple(reversed(pieces)), tuple(storage_shape))


def _shape(form: Format, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError:
        needed = f"{form.name}: a shape of whole numbers"
        raise LayoutError(needed, repr(shape), "convert it") from None
    has_leading_axes = LEADING_AXES in form.axes
    named_count = len([a for a in form.axes if a != LEADING_AXES])
    min_rank = max(named_count, 1)
    if len(sizes) < min_rank or (not has_leading_axes and len(sizes) > named_count):
        at_least = "at least " if has_leading_axes else ""
        needed = f"{form.name}: a shape of {at_least}{min_rank} axes, {' '.join(form.axes)}"
        raise LayoutError(needed, f"{len(sizes)}: {sizes}", "reshape the array, or use ND")
    if min(sizes) < 1:
        raise LayoutError(f"{form.name}: axes of at least 1 element", str(sizes), "drop the tensor")
    return sizes


def _counter(
    text: str, axis_number: dict[str, int], sizes: tuple[int, ...], blocks: dict[int, int]
) -> tuple[int, int, int]:
    """Return (axis, count, step) of a stored axis such as `H`, `C1` or `C0`."""
    if text in axis_number:
        return axis_number[text], sizes[axis_number[text]], 1
    axis = axis_number[text[:-1]]  # `C1` and `C0` belong to `C`
    block = blocks[axis]
    # C0 counts within a block, C1 counts blocks, the last of which may hold padding.
    return (axis, block, 1) if text[-1] == "0" else (axis, -(-sizes[axis] // block), block)


def address(layout: AddressMap, index: Index) -> Any:
    """Return the address of an element, counted in elements from the start of the storage.

    `index` has one number per logical axis, or arrays that broadcast: then the result is an int64
    array. Raises `LayoutError` for an index outside the logical shape.
    """
    if len(index) != len(layout.shape):
        needed = f"{layout.format} {layout.shape}: an index of {len(layout.shape)} numbers"
        raise LayoutError(needed, f"{len(index)}", f"give {', '.join(layout.axes)}")
    arrays = [np.asarray(i) for i in index]
    for name, size, array in zip(layout.axes, layout.shape, arrays, strict=True):
        if array.dtype.kind not in "iu":
            raise LayoutError(f"index {name}: whole numbers", str(array.dtype), "convert it")
        if array.size and (array.min() < 0 or array.max() >= size):
            needed = f"index {name} in 0..{size - 1} of {layout.format} {layout.shape}"
            raise LayoutError(needed, f"{array.min()}..{array.max()}", "padding has no index")
    int64_index = [array.astype(np.int64) for array in arrays]
    # Channel 20 in NC1HWC0: C1 counts 20 // 16 % 3 = 1 block, C0 20 // 1 % 16 = 4 channels of it.
    total: Any = sum(int64_index[p.axis] // p.step % p.count * p.stride for p in layout.pieces)
    return int(total) if np.ndim(total) == 0 else total


def addresses(layout: AddressMap) -> NDArray[np.int64]:
    """Return the address of every element, as an array of the logical shape."""
    # one short array per axis: `address` broadcasts them to the whole shape
    grid = np.ogrid[tuple(slice(n) for n in layout.shape)]
    all_addresses: NDArray[np.int64] = address(layout, tuple(grid))
    return np.broadcast_to(all_addresses, layout.shape)


def element_at(layout: AddressMap, place: int) -> tuple[int, ...] | None:
    """Return the index of the element stored at address `place`, or None for padding."""
    if not 0 <= place < layout.elements:
        needed = f"an address in 0..{layout.elements - 1} of {layout.format} {layout.shape}"
        raise LayoutError(needed, str(place), "addresses count elements, not bytes")
    index = [0] * len(layout.shape)
    for piece in layout.pieces:
        # address 852 with strides 2352, 784, 112, 16, 1: block 1, row 0, column 4, channel 4
        index[piece.axis] += place // piece.stride % piece.count * piece.step
    # an index outside the logical shape is padding: channel 3 of an RGB image, for example
    return tuple(index) if all(i < n for i, n in zip(index, layout.shape, strict=True)) else None


# -- two maps composed ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Dim:
    """One counter of a box: `count` steps, which advance this many elements in each map."""

    count: int
    source_stride: int
    target_stride: int


@dataclass(frozen=True, slots=True)
class Box:
    """A set of elements to copy, from source_start + sum(i * source_stride) over the counters.

    The target of the same element is target_start + sum(i * target_stride).
    """

    dims: tuple[Dim, ...]
    source_start: int
    target_start: int

    @property
    def elements(self) -> int:
        """Number of elements of the box."""
        return math.prod(d.count for d in self.dims)

    @property
    def run(self) -> int:
        """Elements that are contiguous in source and target: the burst length of the copy."""
        run = 1
        for dim in reversed(self.dims):
            if dim.source_stride != run or dim.target_stride != run:
                break
            run *= dim.count
        return run


_Span = tuple[int, tuple[tuple[int, int], ...]]
"""A range of one logical axis: its start, and the (count, step) counters that run over it.

Index = start + sum(i * step) with i in 0 .. count-1 of each counter, outermost first.
"""


def check_pair(source: AddressMap, target: AddressMap) -> None:
    """Raise `LayoutError` unless both maps hold the same array."""
    leading_in_source = LEADING_AXES in format_of(source.format).axes
    leading_in_target = LEADING_AXES in format_of(target.format).axes
    if leading_in_source != leading_in_target:
        needed = f"two layouts of the same axes, as {source.format} has {' '.join(source.axes)}"
        remedy = "name the axes of the array: NCHW for images, ND for matrices"
        raise LayoutError(needed, f"{target.format} with {' '.join(target.axes)}", remedy)
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        needed = f"a target of shape {source.shape} in {source.dtype}"
        got = f"{target.shape} in {target.dtype}"
        raise LayoutError(needed, got, "both maps describe one array; cast before or after")


def copy_boxes(source: AddressMap, target: AddressMap) -> tuple[Box, ...]:
    """Return disjoint boxes that together move every element once. Raises `LayoutError`.

    From NCHW to NC1HWC0 with 40 channels there are two: channels 0 .. 31, two whole blocks of 16,
    and channels 32 .. 39, the ragged end.
    """
    check_pair(source, target)
    steps = [
        sorted({1, *_block_sizes(source, a), *_block_sizes(target, a)})
        for a in range(len(source.shape))
    ]
    spans = [_spans(n, s) for n, s in zip(source.shape, steps, strict=True)]
    # one box for every choice of a span on each axis
    return tuple(_box(choice, source, target) for choice in itertools.product(*spans))


def zero_boxes(target: AddressMap) -> tuple[Box, ...]:
    """Return disjoint boxes that cover the padding of `target`; they have no source to copy."""
    steps = [sorted({1, *_block_sizes(target, a)}) for a in range(len(target.shape))]
    logical = [_spans(n, s) for n, s in zip(target.shape, steps, strict=True)]
    padded = [_spans(n, s) for n, s in zip(target.padded_shape, steps, strict=True)]
    boxes: list[Box] = []
    sizes = zip(target.shape, target.padded_shape, strict=True)
    for axis, (size, padded_size) in enumerate(sizes):
        # The padding of this axis, for the elements of the earlier axes: their own padding is
        # covered by other boxes, so that no two boxes overlap.
        padding = [(size, ((padded_size - size, 1),))] if size < padded_size else []
        choices = itertools.product(*logical[:axis], padding, *padded[axis + 1 :])
        boxes += (_box(choice, None, target) for choice in choices)
    return tuple(boxes)


def burst_bytes(source: AddressMap, target: AddressMap) -> int:
    """Return the longest run that is contiguous in both layouts: the burst of a strided copy."""
    return max(box.run for box in copy_boxes(source, target)) * DTYPE_BYTES[source.dtype]


def _block_sizes(layout: AddressMap, axis: int) -> list[int]:
    """Return the sizes of the blocks of an axis, at whose borders its stride changes.

    Two pieces whose strides have the same ratio as their steps have no such border.
    """
    pieces = [p for p in layout.of_axis(axis) if p.count > 1]
    # 40 channels of 7 x 7 in NC1HWC0: C1 has stride 784 and step 16, not 16 times C0's stride of 1
    return [
        outer.step
        for outer, inner in itertools.pairwise(pieces)
        if outer.stride * inner.step != inner.stride * outer.step
    ]


def _spans(size: int, steps: Sequence[int]) -> list[_Span]:
    """Cut [0, size) into whole multiples of the largest step, then of the next smaller one.

    Size 40 with steps 1 and 16: a span from 0 with counters (2, 16), (16, 1), and a span from 32
    with the counter (8, 1).
    """
    spans = list[_Span]()
    start = 0
    for level in reversed(range(len(steps))):
        count = (size - start) // steps[level]
        if count == 0:
            continue
        # the smaller steps count within a step of this level: 16 steps of 1 within a block of 16
        smaller_counters = [(steps[i + 1] // steps[i], steps[i]) for i in reversed(range(level))]
        spans.append((start, ((count, steps[level]), *smaller_counters)))
        start += count * steps[level]
    return spans


def _box(spans: Sequence[_Span], source: AddressMap | None, target: AddressMap) -> Box:
    """Return the box of one span per axis; without a source all source addresses are 0."""
    counts = [count for _, counters in spans for count, _ in counters]
    target_start, target_strides = _walk(spans, target)
    source_start = 0
    source_strides = [0] * len(counts)
    if source is not None:
        source_start, source_strides = _walk(spans, source)
    counters = zip(counts, source_strides, target_strides, strict=True)
    dims = merged([Dim(*counter) for counter in counters])
    return Box(dims, source_start, target_start)


def _walk(spans: Sequence[_Span], layout: AddressMap) -> tuple[int, list[int]]:
    """Return the address at which spans start in a layout, and the strides of their counters."""
    start = 0
    strides = []
    for axis, (first, counters) in enumerate(spans):
        pieces = layout.of_axis(axis)
        start += sum(first // p.step % p.count * p.stride for p in pieces)
        for _, step in counters:
            # the piece that this counter steps through: the largest one whose step fits
            piece = next(p for p in pieces if p.step <= step)
            strides.append(piece.stride * (step // piece.step))
    return start, strides


def merged(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return equivalent counters, largest target stride first, with as few as possible.

    Two counters become one if one step of the outer counter is as long as all steps of the inner
    one, in source and target: 4 steps of 16 and 16 steps of 1 are 64 steps of 1. Counters of a
    single step are dropped.
    """
    counters: list[Dim] = []
    for dim in sorted((d for d in dims if d.count > 1), key=lambda d: -d.target_stride):
        outer = counters[-1] if counters else None
        all_steps = (dim.source_stride * dim.count, dim.target_stride * dim.count)
        if outer and (outer.source_stride, outer.target_stride) == all_steps:
            counters[-1] = replace(dim, count=outer.count * dim.count)
        else:
            counters.append(dim)
    return tuple(counters) or (Dim(1, 1, 1),)


# -- arrays in NumPy: undo one map, apply the other ------------------------------------------------
def pack(layout: AddressMap, array: Values) -> Values:
    """Store an array of the logical shape: pad with zeros, cut the axes, permute the pieces.

    Returns an array of `layout.storage_shape`; raises `LayoutError` for another shape or size.
    """
    _check_item(layout, array)
    if array.shape != layout.shape:
        needed = f"{layout.format}: an array of the logical shape {layout.shape}"
        remedy = f"bring its axes into the order {' '.join(layout.axes)}"
        raise LayoutError(needed, str(array.shape), remedy)
    if layout.padded_shape != layout.shape:
        padded = np.zeros(layout.padded_shape, array.dtype)
        padded[tuple(slice(n) for n in layout.shape)] = array
        array = padded
    # (1, 48, 7, 7) becomes (1, 3, 16, 7, 7), then (1, 3, 7, 7, 16) as NC1HWC0
    cut = array.reshape([p.count for a in range(len(layout.shape)) for p in layout.of_axis(a)])
    return np.ascontiguousarray(cut.transpose(_order(layout))).reshape(layout.storage_shape)


def unpack(layout: AddressMap, stored: Values) -> Values:
    """Return the array of the logical shape from its storage: undo `pack`, drop the padding.

    `stored` may have the storage shape, one axis per piece, or be flat. Raises `LayoutError`.
    """
    _check_item(layout, stored)
    if stored.shape not in (layout.storage_shape, layout.piece_shape, (layout.elements,)):
        array_name = f"{layout.format} {layout.shape} in {layout.dtype}"
        needed = f"{array_name}: stored as {layout.storage_shape}"
        raise LayoutError(needed, str(stored.shape), "reshape it, or correct the layout")
    # argsort inverts a permutation: that of (2, 0, 1) is (1, 2, 0)
    cut = stored.reshape(layout.piece_shape).transpose(np.argsort(_order(layout)))
    array = cut.reshape(layout.padded_shape)[tuple(slice(n) for n in layout.shape)]
    return np.ascontiguousarray(array)


def convert(stored: Values, source: AddressMap, target: AddressMap) -> Values:
    """Convert an array stored in layout `source` to layout `target`; raises as `pack` does."""
    check_pair(source, target)
    return pack(target, unpack(source, stored))


def _order(layout: AddressMap) -> list[int]:
    """Return for every stored piece its position in the order of the logical axes."""
    by_axis = [p for a in range(len(layout.shape)) for p in layout.of_axis(a)]
    return [by_axis.index(piece) for piece in layout.pieces]


def _check_item(layout: AddressMap, array: Values) -> None:
    if array.dtype.itemsize != DTYPE_BYTES[layout.dtype]:
        needed = f"{layout.format}: elements of {DTYPE_BYTES[layout.dtype]} bytes ({layout.dtype})"
        remedy = "C0 depends on the size: cast the array or change the layout's dtype"
        raise LayoutError(needed, f"{array.dtype.itemsize} ({array.dtype})", remedy)
