"""Imports ONNX's Resize and DFT: each axis becomes a gather or a product with a fixed matrix."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.onnx.context import Context, Result, converter
from ascend_lab.compiler.onnx.model_file import NEWEST_OPSET, signature
from ascend_lab.compiler.onnx.tensors import FLOATS, GRAPH_TYPES, INTEGERS, Values, check_size

CROP = "tf_crop_and_resize"
MAX_MATRIX_ROWS = 2**16
MAX_MATRIX_ELEMENTS = 2**26
"""Most rows and most elements of the matrix that resizes an axis."""


def _multiplied_axis(ctx: Context, x: Value, axis: int, weights: Values) -> Value:
    """Return x with one axis multiplied by a matrix (out, size)."""
    # (n, c, h, w), axis 2: transpose to (n, c, w, h), multiply n c w rows of h, transpose back
    order = [*(i for i in range(len(x.shape)) if i != axis), axis]
    axis_last = ctx.transpose(x, order)
    leading_shape = axis_last.shape[:-1]
    flat = ctx.reshape(axis_last, (math.prod(leading_shape), axis_last.shape[-1]))
    products = ctx.emit("matmul", flat, ctx.constant_array(weights.T, x.type.dtype, "weights"))
    return ctx.transpose(
        ctx.reshape(products, (*leading_shape, len(weights))), np.argsort(order).tolist()
    )


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one axis is resized: its old and new size, the model's scale, and the range to crop."""

    length: int
    out: int
    scale: float
    start: float = 0.0
    end: float = 1.0

    def coordinates(self, mode: str, float_type: type[np.floating[Any]]) -> Values:
        """Return each output element's coordinate on the input axis, by the standard's formulas.

        `mode` is the attribute coordinate_transformation_mode. `float_type` is the type of the
        computation: fp32 for the nearest pixel, as ONNX Runtime and PyTorch find it, fp64 for the
        weights of neighbours.
        """
        # 2 pixels to 4: half_pixel gives -0.25, 0.25, 0.75, 1.25, align_corners 0, 1/3, 2/3, 1,
        # asymmetric 0, 0.5, 1, 1.5
        index = np.arange(self.out).astype(float_type)
        scale = float_type(self.scale)
        half = float_type(0.5)
        centred: Values = (index + half) / scale - half
        last_index = self.length - 1
        if mode == "half_pixel_symmetric":
            share = float_type(self.out) / (scale * float_type(self.length))
            offset = float(float_type(self.length / 2) * (1 - share))
            exact = (index.astype(np.float64) + 0.5) / float(scale) - 0.5
            return np.asarray(offset + exact, float_type)
        if mode == "align_corners":
            return (
                index * float_type(last_index) / float_type(self.out - 1)
                if self.out > 1
                else index * 0
            )
        if mode == "asymmetric":
            return np.asarray(index / scale)
        if mode == "tf_half_pixel_for_nn":
            return np.asarray((index + half) / scale)
        if mode == CROP:
            span = self.end - self.start
            if self.out == 1:
                return np.array([0.5 * (self.start + self.end) * last_index])
            return self.start * last_index + index * span * last_index / (self.out - 1)
        return centred if mode == "half_pixel" or self.out > 1 else index * 0


_COORDINATE_MODES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
)
"""Values of coordinate_transformation_mode; the last exists in opsets 11 and 12 only."""


_TIE = 1e-6
"""Coordinates closer than this to half a pixel count as halfway, as in ONNX Runtime."""


def _with_ties(x: Values) -> Values:
    """Return coordinates in fp64; those within `_TIE` of half a pixel are moved onto it."""
    wide = np.asarray(x, np.float64)
    half = np.floor(wide) + 0.5
    return np.where(np.abs(wide - half) <= _TIE, half, wide)


_NEAREST: dict[str, Callable[[Values], Values]] = {
    "round_prefer_floor": lambda x: np.ceil(_with_ties(x) - 0.5),
    "round_prefer_ceil": lambda x: np.floor(_with_ties(x) + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}
_SHRINKING_IN_VERSION_10 = "ceil"
"""The rounding of Resize version 10 if it makes an axis smaller; otherwise it rounds down."""


@converter("Resize", types=(GRAPH_TYPES, FLOATS, FLOATS, ("int64",)), since=10)
@converter("Upsample", types=(GRAPH_TYPES, FLOATS), since=7)
def _resize(ctx: Context) -> Result:
    """Resize by scales or to sizes; before opset 11 a coordinate is the index / scale."""
    newest = signature("Resize", NEWEST_OPSET)
    attrs = {**(newest.defaults if newest else {}), **ctx.attrs}
    if ctx.op == "Resize" and ctx.opset >= 11:
        return _resized(ctx, _axes(ctx, attrs), attrs)
    shape = ctx.shape(0)
    scales = ctx.const(1).tolist() if ctx.has(1) else ctx.attr("scales")
    first_scale = 1 if ctx.op == "Upsample" else 0
    if len(scales) != len(shape) or min(scales, default=1) < first_scale or 0 in scales:
        ctx.unsupported(f"a scale above 0, at least {first_scale}, for each axis", str(scales))
    changes = {i: _scaled(n, s) for i, (n, s) in enumerate(zip(shape, scales, strict=True))}
    attrs |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return _resized(ctx, changes, attrs)


def _scaled(size: int, scale: float, **more: float) -> _Axis:
    return _Axis(size, math.floor(np.float32(size) * np.float32(scale)), float(scale), **more)


def _axes(ctx: Context, attrs: dict[str, Any]) -> dict[int, _Axis]:
    """Return the axes to change, from `scales` or `sizes`."""
    shape = ctx.shape(0)
    rank = len(ctx.shape(0))
    axes = [ctx.axis(a, rank) for a in attrs["axes"] or range(rank)]
    crops = attrs["coordinate_transformation_mode"] == CROP
    roi = ctx.const(1).astype(float).tolist() if crops and ctx.has(1) else []
    if crops and len(roi) != 2 * len(axes):
        ctx.unsupported(f"{2 * len(axes)} numbers in roi", str(len(roi)))
    ends = [{"start": roi[i], "end": roi[i + len(axes)]} if crops else {} for i in range(len(axes))]
    scales = [float(s) for s in ctx.const(2)] if ctx.has(2) else []
    if scales:
        if len(scales) != len(axes) or min(scales) <= 0:
            ctx.unsupported("a positive scale for each axis", str(scales))
        return {a: _scaled(shape[a], s, **e) for a, s, e in zip(axes, scales, ends, strict=True)}
    outs, numbers = _from_sizes(ctx, [shape[a] for a in axes], attrs["keep_aspect_ratio_policy"])
    parts = zip(axes, outs, numbers, ends, strict=True)
    return {a: _Axis(shape[a], n, s, **e) for a, n, s, e in parts}


def _from_sizes(ctx: Context, shape: list[int], policy: str) -> tuple[list[int], list[float]]:
    """Return sizes and scales: those stated, or with one scale that keeps the aspect ratio."""
    sizes = list(ctx.ints(3))
    if len(sizes) != len(shape) or min(*sizes, *shape) < 1:
        ctx.unsupported("a size of at least 1 for each axis", f"{sizes} for {shape}")
    scales = [n / size for n, size in zip(sizes, shape, strict=True)]
    if policy == "stretch":
        return sizes, scales
    if policy not in ("not_larger", "not_smaller"):
        ctx.unsupported("a policy stretch, not_larger or not_smaller", str(policy))
    # (4, 8) to at most (2, 2): scales 1/2 and 1/4, so 1/4 for both, (1, 2)
    common_scale = min(scales) if policy == "not_larger" else max(scales)
    return [math.floor(common_scale * n + 0.5) for n in shape], [common_scale] * len(shape)


def _resized(ctx: Context, changes: dict[int, _Axis], attrs: dict[str, Any]) -> Result:
    """Return x with every axis resized; elements outside a crop get the extrapolation value.

    If no size changes, nothing is interpolated, whatever the scales are, as in ONNX Runtime and
    PyTorch.
    """
    x = ctx.input(0)
    coordinate_mode = attrs["coordinate_transformation_mode"]
    mode = attrs["mode"]
    _check_modes(ctx, attrs)
    mixes = mode in ("linear", "cubic")
    if any(change.out < 1 for change in changes.values()):
        ctx.unsupported("sizes of at least 1", str([c.out for c in changes.values()]))
    _check_sizes(ctx, changes, mixes)
    keeps_size = all(change.out == change.length for change in changes.values())
    if keeps_size and coordinate_mode not in (CROP, "half_pixel_symmetric"):
        return ctx.tensor(0)
    rank = len(x.shape)
    outside = np.zeros((1,) * rank, bool)
    for axis, change in changes.items():
        if coordinate_mode != CROP and change.out == change.length and change.scale == 1:
            continue
        coordinates = change.coordinates(coordinate_mode, np.float64 if mixes else np.float32)
        _check_crop(ctx, change, coordinates, coordinate_mode, mixes)
        if coordinate_mode == CROP:
            beyond = (coordinates < 0) | (coordinates > change.length - 1)
            outside = outside | beyond.reshape([-1 if i == axis else 1 for i in range(rank)])
        if mixes:
            x = _multiplied_axis(ctx, x, axis, _weights(coordinates, change, attrs))
        else:
            shrinks = ctx.opset == 10 and change.scale < 1
            nearest = _SHRINKING_IN_VERSION_10 if shrinks else attrs["nearest_mode"]
            rows = np.clip(_NEAREST[nearest](coordinates), 0, change.length - 1)
            x = ctx.emit("gather", x, ctx.constant_array(rows, "int32", "rows"), axis=axis)
    if not outside.any():
        return x
    fill = ctx.constant_array(attrs["extrapolation_value"], x.type.dtype, "fill")
    return ctx.emit("select", ctx.constant_array(outside, x.type.dtype, "outside"), fill, x)


def _check_modes(ctx: Context, attrs: dict[str, Any]) -> None:
    """Raise an error for modes that the standard does not have in the node's version."""
    coordinate_mode, nearest, mode = (
        attrs[key] for key in ("coordinate_transformation_mode", "nearest_mode", "mode")
    )
    known_modes = tuple(
        h for h in (*_COORDINATE_MODES, CROP) if h != "tf_half_pixel_for_nn" or ctx.opset < 13
    )
    if coordinate_mode not in known_modes:
        ctx.unsupported(
            f"coordinates {', '.join(known_modes)}", str(coordinate_mode), "export another mode"
        )
    if nearest not in _NEAREST:
        ctx.unsupported(f"nearest_mode {', '.join(_NEAREST)}", str(nearest), "export another mode")
    mixes = mode in ("linear", "cubic") and ctx.elem(0) in FLOATS
    if not mixes and mode != "nearest":
        ctx.unsupported("mode nearest, for floats linear or cubic", f"{mode} of {ctx.elem(0)}")


def _check_sizes(ctx: Context, changes: dict[int, _Axis], mixes: bool) -> None:
    """Raise an error for too many elements, or weights whose computation would take too long."""
    shape = [changes[i].out if i in changes else n for i, n in enumerate(ctx.input(0).shape)]
    check_size(ctx.where, tuple(shape))
    if mixes and any(
        c.out > MAX_MATRIX_ROWS or c.out * c.length > MAX_MATRIX_ELEMENTS for c in changes.values()
    ):
        got = ", ".join(f"{c.length} to {c.out}" for c in changes.values())
        ctx.unsupported(
            f"sizes of at most {MAX_MATRIX_ROWS}, old times new at most {MAX_MATRIX_ELEMENTS}", got
        )


def _check_crop(ctx: Context, change: _Axis, coordinates: Values, mode: str, mixes: bool) -> None:
    """Raise an error for crops whose edges select different elements in fp32 and in fp64."""
    ends = np.minimum(np.abs(coordinates), np.abs(coordinates - (change.length - 1)))
    is_at_edge = bool(((ends > 0) & (ends < 2.0**-16)).any())
    keeps_scale = change.scale == 1 and (change.start, change.end) != (0, 1)
    is_exact = abs(change.scale * change.length - change.out) <= 2.0**-12
    if mode == CROP and (not mixes or keeps_scale or is_at_edge or not is_exact):
        ctx.unsupported("a crop that interpolates to another size", f"roi {change.start} ...")


def _weights(coordinates: Values, change: _Axis, attrs: dict[str, Any]) -> Values:
    """Return the matrix (out, size) of an interpolation; the border pixel repeats outside."""
    is_cubic = attrs["mode"] == "cubic"
    # scale 1/2 with antialias: each pixel mixes neighbours up to 2 pixels away, not 1
    squeeze = min(change.scale, 1.0) if attrs["antialias"] else 1.0
    reach = math.ceil((2 if is_cubic else 1) / squeeze) + 1
    result = np.zeros((len(coordinates), change.length))
    for row, x in enumerate(coordinates):
        pixels = math.floor(x) + np.arange(-reach, reach + 2)
        # at 0.25 between pixels 0 and 1 linear weights are 0.75 and 0.25
        distance = np.abs(pixels - x) * squeeze
        weight = (
            _cubic(distance, attrs["cubic_coeff_a"]) if is_cubic else np.maximum(0, 1 - distance)
        )
        if attrs["exclude_outside"]:
            weight = np.where((pixels >= 0) & (pixels < change.length), weight, 0.0)
        np.add.at(result[row], np.clip(pixels, 0, change.length - 1), weight / weight.sum())
    return result


def _cubic(distance: Values, a: float) -> Values:
    """Return the weights of cubic convolution at distances t >= 0 (Keys 1981)."""
    # a = -0.75: weights 1, 0.594, 0, -0.094 and 0 at distances 0, 0.5, 1, 1.5 and 2
    inner_weight = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    outer_weight = ((distance - 5) * distance + 8) * distance * a - 4 * a
    result: Values = np.where(
        distance <= 1, inner_weight, np.where(distance < 2, outer_weight, 0.0)
    )
    return result


_MAX_DFT_LENGTH = 2048


@converter("DFT", types=(FLOATS, INTEGERS, ("int64",)), since=17)
def _dft(ctx: Context) -> Value:
    """Multiply (real, imaginary) pairs along an axis by e^(-2 pi i k n / N), or its inverse."""
    x = ctx.input(0)
    rank = len(ctx.shape(0))
    axis_input = int(ctx.scalar(2)) if ctx.has(2) else -2
    axis = ctx.axis(axis_input if ctx.opset >= 20 else ctx.attr("axis"), rank)
    parts = x.shape[-1]
    n = x.shape[axis]
    is_half_spectrum = bool(ctx.attr("onesided") and ctx.attr("inverse"))
    # a one-sided spectrum of 9 pairs belongs to a signal of 2 * (9 - 1) = 16 numbers
    length = 2 * (n - 1) if is_half_spectrum else n
    if ctx.has(1):
        length = int(ctx.scalar(1))
    if (
        axis == rank - 1
        or parts not in (1, 2)
        or not 0 < length <= _MAX_DFT_LENGTH
        or (is_half_spectrum and parts == 1)
    ):
        ctx.unsupported(f"a signal axis of up to {_MAX_DFT_LENGTH} numbers or pairs", f"{x.shape}")
    if ctx.attr("onesided") and not ctx.attr("inverse") and parts == 2:
        ctx.unsupported("a real signal, of which one side is enough", "a complex one")
    matrix = _fourier(ctx, n, length, parts)
    order = (*(i for i in range(rank) if i not in (axis, rank - 1)), axis, rank - 1)
    axis_last = ctx.transpose(x, order)
    leading_shape = axis_last.shape[:-2]
    # 16 pairs (re, im) are a row of 32 numbers, which a matrix of 32 x 32 multiplies
    products = _multiplied_axis(
        ctx, ctx.reshape(axis_last, (*leading_shape, n * parts)), len(leading_shape), matrix
    )
    result_parts = 1 if is_half_spectrum else 2
    out = ctx.reshape(products, (*leading_shape, len(matrix) // result_parts, result_parts))
    return ctx.transpose(out, np.argsort(order).tolist())


def _fourier(ctx: Context, n: int, length: int, parts: int) -> Values:
    """Return the matrix from n pairs (or real numbers) to the transform's pairs."""
    inverse = bool(ctx.attr("inverse"))
    onesided = bool(ctx.attr("onesided"))
    # 16 real numbers: 9 pairs, as the others are their conjugates
    outs = length // 2 + 1 if onesided and not inverse else length
    k, position = np.ogrid[:outs, : min(n, length)]
    factors = np.exp((2j if inverse else -2j) * np.pi * k * position / length)
    if inverse:
        factors = factors / length
    if inverse and onesided:  # the other half of the spectrum holds the conjugates
        factors = factors * np.where((position > 0) & (2 * position < length), 2, 1)
    # (a + bi) (c + si) = (a c - b s) + (a s + b c) i: the matrix [[c, -s], [s, c]] times (a, b)
    entries = [factors.real, -factors.imag, factors.imag, factors.real]
    rotations = np.stack(entries, -1).reshape(*factors.shape, 2, 2)
    result_parts = 1 if inverse and onesided else 2  # a real result has no imaginary part
    pairs = rotations.swapaxes(1, 2)[:, :result_parts]
    padded = np.zeros((outs, result_parts, n, parts))
    padded[:, :, : position.shape[1]] = pairs[..., :parts]
    return padded.reshape(outs * result_parts, n * parts)
