"""Compilation of a single operator to a kernel, and helpers for tensor expressions.

A kernel is made in four steps: check the arguments, express the operator on placeholders, schedule,
lower. `run` then computes values on the simulated chip, and `time` its cycles. The helpers are for
computing in fp32 inside operators of narrow formats, for broadcasting, and for sliding windows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ascend_lab import errors, limits
from ascend_lab.machine import isa, layout, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.operators import dsl as te, kernels
from ascend_lab.operators.dsl import formulas, fractals
from ascend_lab.operators.ops import formats as forms
from ascend_lab.operators.ops.formats import Pairs, Shape, Shapes, Values
from ascend_lab.operators.ops.operator import Call, Operator, resolve
from ascend_lab.operators.ops.slicing import AxisRule, Range, Ranges, Source, Window

NARROW = ("fp16", "bf16")


def wide(tensor: te.Tensor) -> te.Tensor:
    """Return a tensor in fp32 if its format is a narrow float, else unchanged."""
    return te.cast_to(tensor, "fp32") if tensor.dtype in NARROW else tensor


def narrow(tensor: te.Tensor, dtype: str) -> te.Tensor:
    """Return a tensor in format `dtype`, cast only if it is not there already."""
    return tensor if tensor.dtype == dtype else te.cast_to(tensor, dtype)


def in_fp32(compute: Callable[..., Any], formats: tuple[str, ...] = NARROW) -> Callable[..., Any]:
    """Return `compute` with operands of some `formats` cast to fp32, and results cast back.

    For example, x in fp16 is cast to fp32, computed, and cast to fp16: the result is rounded once,
    like the reference.
    """

    @wraps(compute)
    def lifted(*tensors: te.Tensor, **attrs: Any) -> Any:
        main = tensors[0].dtype
        if main not in formats:
            return compute(*tensors, **attrs)
        results = compute(*(wide(t) for t in tensors), **attrs)
        if isinstance(results, tuple):
            return tuple(narrow(t, main) for t in results)
        return narrow(results, main)

    return lifted


def stretch(*tensors: te.Tensor) -> tuple[te.Tensor, ...]:
    """Return tensors broadcast to their common shape."""
    # (4, 1) and (1, 5): both become (4, 5).
    shape = forms.broadcast_shape("operands", *(t.shape for t in tensors))
    return tuple(t if t.shape == shape else te.broadcast(t, shape) for t in tensors)


def along(tensor: te.Tensor, axis: int, shape: tuple[int, ...]) -> te.Tensor:
    """Return a vector (n,) along `axis` of a shape: reshaped to (1, .., n, .., 1) and broadcast."""
    # (16,) along axis 1 of (2, 16, 3, 5): (1, 16, 1, 1).
    column = tuple(n if i == axis else 1 for i, n in enumerate(shape))
    return te.broadcast(te.reshape(tensor, column), shape)


# -- sliding windows in NumPy ----------------------------------------------------------------------
# `windows` is a view in which a pixel occurs once for each window that covers it. `add_windows` is
# its transpose: it adds all those occurrences back to the pixel.
Pair = tuple[int, int]


def reach(kernel: Pair, dilation: Pair) -> Pair:
    """Return the input rows and columns that a dilated kernel spans: (k - 1) d + 1.

    A 3 x 3 kernel with dilation 2 spans 5 x 5 pixels.
    """
    return (kernel[0] - 1) * dilation[0] + 1, (kernel[1] - 1) * dilation[1] + 1


def out_size(
    where: str, size: Pair, kernel: Pair, stride: Pair, pads: Pairs, dilation: Pair = (1, 1)
) -> Pair:
    """Return output height and width; raise `ShapeError` if no window fits."""
    spans = reach(kernel, dilation)
    rows, columns = (
        forms.window_count(where, size[i], spans[i], stride[i], pads[i]) for i in range(2)
    )
    return rows, columns


def windows(x: Values, kernel: Pair, stride: Pair, dilation: Pair = (1, 1)) -> Values:
    """Return the windows of a padded image (n, c, h, w) as a view (n, c, oh, ow, r, s)."""
    # (1, 1, 7, 7), 3 x 3, stride 2: a view (1, 1, 3, 3, 3, 3), in which no pixel is copied.
    view = sliding_window_view(x, reach(kernel, dilation), axis=(2, 3))
    result: Values = view[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
    return result


def fold_windows(x: Values, kernel: Pair, stride: Pair, combine: np.ufunc) -> Values:
    """Return the windows of a padded image, each reduced by a ufunc: (n, c, oh, ow)."""
    window_view = windows(x, kernel, stride)
    limits.refuse_above(
        "elements in all windows", window_view.size, limits.WINDOWS, "use smaller ones"
    )
    # One NumPy call per tap (r, s) of the kernel is quick as long as there are more windows than
    # taps. Global pooling has one window of many taps: there one reduction is quicker.
    if kernel[0] * kernel[1] > window_view.shape[2] * window_view.shape[3]:
        folded: Values = combine.reduce(window_view, axis=(4, 5))
        return folded
    result: Values = window_view[..., 0, 0].copy()
    for tap in range(1, kernel[0] * kernel[1]):
        combine(result, window_view[..., tap // kernel[1], tap % kernel[1]], out=result)
    return result


def add_windows(
    window_values: Values, shape: Shape, stride: Pair, dilation: Pair = (1, 1)
) -> Values:
    """Return an image (n, c, h, w) to which windows (n, c, oh, ow, r, s) are added in place."""
    image = np.zeros(shape, window_values.dtype)
    _, _, oh, ow, kernel_h, kernel_w = window_values.shape
    for r in range(kernel_h):
        for s in range(kernel_w):
            # tap (r, s) of all windows touches a grid of distinct pixels: one += is safe
            first_row = r * dilation[0]
            first_column = s * dilation[1]
            # 3 windows at stride 2, tap row 1: image rows 1, 3 and 5.
            rows = slice(first_row, first_row + (oh - 1) * stride[0] + 1, stride[0])
            columns = slice(first_column, first_column + (ow - 1) * stride[1] + 1, stride[1])
            image[:, :, rows, columns] += window_values[..., r, s]
    return image


def padded(x: Values, pads: Pairs, value: float = 0.0) -> Values:
    """Return an image with rows and columns of one value around it."""
    return np.pad(x, ((0, 0), (0, 0), *pads), constant_values=value)


def cropped(x: Values, pads: Pairs, size: Pair) -> Values:
    """Return a padded image (n, c, ...) without its padding."""
    (first_row, _), (first_column, _) = pads
    return x[:, :, first_row : first_row + size[0], first_column : first_column + size[1]]


def window_rules(
    kernel: Pair, stride: Pair, pads: Pairs, dilation: Pair = (1, 1)
) -> tuple[AxisRule, AxisRule]:
    """Return the rules of height and width: output o reads o*stride - pad ... + reach - 1."""

    def rule(i: int) -> AxisRule:
        # 3 rows, pad 1: output o reads rows o - 1 .. o + 1.
        reach_after = (kernel[i] - 1) * dilation[i] - pads[i][0]
        source = Source(0, 2 + i, Window(pads[i][0], reach_after, stride[i], dilation[i]))
        reads_one_pixel = kernel[i] == 1 and not sum(pads[i])
        return AxisRule(2 + i, "free" if reads_one_pixel else "halo", (source,), (2 + i,))

    return rule(0), rule(1)


def piece_pads(
    rules: Sequence[AxisRule], pads: Pairs, axis: int, piece: Range, ranges: Ranges
) -> dict[str, Any]:
    """Return the `pad` attribute of a piece: how far its windows reach beyond its input range.

    For example, a 3 x 3 kernel with pad 1 is cut into two halves. The upper half pads 1 row above
    and none below, where it reads a row of the lower half.
    """
    if axis < 2:
        return {}
    if pads[axis - 2][0] == 0 and rules[axis].kind == "free":
        return {"pad": pads}
    low, high = rules[axis].sources[0].window.needs(*piece)
    first_input, end_input = ranges[0][axis]
    # 8 rows, 3 x 3, pad 1: outputs 0 .. 3 want rows -1 .. 4 and have 0 .. 4, so they pad (1, 0).
    reach_beyond = (first_input - low, high - end_input)
    return {"pad": tuple(reach_beyond if i == axis - 2 else p for i, p in enumerate(pads))}


# -- from an operator to a kernel ------------------------------------------------------------------
def check(
    operator: Operator | str, shapes: Shapes, dtypes: Sequence[str], chip: Chip, **attrs: Any
) -> None:
    """Raise `ShapeError`, `TypeMismatchError` or `InputError` for wrong arguments."""
    resolve(operator).check(shapes, dtypes, attrs, chip)


def output_names(operator: Operator, inputs: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the names of the outputs in global memory, all different and not names of inputs."""
    declared = operator.outputs
    # split of 3: y0, y1, y2.
    names = declared if len(declared) == count else tuple(f"{declared[0]}{i}" for i in range(count))
    return tuple(f"{name}_out" if name in inputs else name for name in names)


def express(
    operator: Operator | str, shapes: Shapes, dtypes: Sequence[str], **attrs: Any
) -> tuple[te.Tensor, ...]:
    """Return the named output tensors of the operator's expression on placeholders.

    Tensors without axes become (1,), as in device memory.
    """
    op = resolve(operator)
    names = op.names(len(shapes))
    tensors = [
        te.placeholder(tuple(shape) or (1,), dtype, name)
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
    ]
    expressed = op.expression(*tensors, **attrs)
    outputs = expressed if isinstance(expressed, tuple) else (expressed,)
    titles = output_names(op, names, len(outputs))
    return tuple(
        te.renamed(stored_tensor(t, names), title) for t, title in zip(outputs, titles, strict=True)
    )


def stored_tensor(tensor: te.Tensor, inputs: Sequence[str]) -> te.Tensor:
    """Return the tensor whose values are stored as the output.

    A reshape at the end is dropped, because row-major memory has no shape. If the output is an
    input itself, it is copied, because outputs have memory of their own.
    """
    while tensor.hint == "reshape" and tensor.inputs[0].body is not None:
        tensor = tensor.inputs[0]
    if tensor.name not in inputs:
        return tensor
    names = formulas.axis_names(len(tensor.shape))
    return formulas.copied(tensor[tuple(isa.var(n) for n in names)], tensor.shape, names, "copy")


def compile(  # noqa: A001 - what it does
    operator: Operator | str, shapes: Shapes, dtypes: Sequence[str], chip: Chip, **attrs: Any
) -> isa.Kernel:
    """Return the kernel of the operator's template, or of its default schedule.

    Raises the errors of `check`, and `ShapeError` for empty tensors, which need no kernel.
    """
    op = resolve(operator)
    op.check(shapes, dtypes, attrs, chip)
    for shape in (*shapes, *op.infer(*shapes, **attrs)):
        if forms.elements(tuple(shape)) == 0:
            needed = f"{op.name}: elements to compute"
            remedy = "nothing is launched: give sizes of at least 1"
            raise errors.ShapeError(needed, str(shape), remedy)
    call = op.call(shapes, dtypes, attrs)
    template = op.template_for(call, chip)
    return template.kernel(call, chip) if template else te.lower(_schedule(op, call, chip))


def _schedule(op: Operator, call: Call, chip: Chip) -> te.Schedule:
    return te.auto_schedule(express(op, call.shapes, call.dtypes, **call.attrs), chip)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A kernel, the values of its input tensors, and a function that reads its outputs."""

    kernel: isa.Kernel
    tensors: dict[str, Values]
    fetch: Callable[[Mapping[str, Values]], tuple[Values, ...]]


def prepare(operator: Operator | str, *arrays: Values, chip: Chip, **attrs: Any) -> Prepared:
    """Return the kernel for some input arrays, and its input tensors.

    Raises the errors of `compile`, and `InputError` for indices outside their tensors.
    """
    op = resolve(operator)
    shapes = [a.shape for a in arrays]
    dtypes = [forms.format_of(a) for a in arrays]
    op.check(shapes, dtypes, attrs, chip)
    op.check_indices(arrays, op.settings(attrs))
    call = op.call(shapes, dtypes, attrs)
    template = op.template_for(call, chip)
    if template:
        fetch = partial(template.outputs, call)
        return Prepared(template.kernel(call, chip), template.tensors(call, arrays), fetch)
    return _scheduled(op, _schedule(op, call, chip), arrays, call)


def _scheduled(
    op: Operator, schedule: te.Schedule, arrays: Sequence[Values], call: Call
) -> Prepared:
    """Return the prepared kernel of a schedule; matrices for the cube are packed into fractals."""
    kernel = te.lower(schedule)
    fractal_kinds = fractals.matrices(schedule.state)
    names = op.names(len(arrays))
    kernel_tensors = {t.name for t in kernel.tensors}
    feed = {n: a for n, a in zip(names, arrays, strict=True) if n in kernel_tensors}
    for name in feed.keys() & fractal_kinds.keys():
        fractal_map = fractals.matrix_map(
            feed[name].shape, fractal_kinds[name], forms.format_of(feed[name])
        )
        feed[name] = layout.pack(fractal_map, feed[name])
    titles = output_names(op, names, len(call.outputs))

    def fetch(memory: Mapping[str, Values]) -> tuple[Values, ...]:
        outputs = []
        for title, shape in zip(titles, call.outputs, strict=True):
            values = memory[title]
            if title in fractal_kinds:
                values = layout.unpack(
                    fractals.matrix_map(shape, fractal_kinds[title], forms.format_of(values)),
                    values,
                )
            outputs.append(values.reshape(shape))
        return tuple(outputs)

    return Prepared(kernel, feed, fetch)


def run(operator: Operator | str, *arrays: Values, chip: Chip, **attrs: Any) -> Any:
    """Return the output array (a tuple of several) that the kernel computes on the chip.

    Empty tensors need no kernel: the result is that of the reference, which is empty or the
    identity of a reduction (0 for a sum). Raises the errors of `prepare`.
    """
    op = resolve(operator)
    input_arrays = [np.asarray(a) for a in arrays]
    shapes = [a.shape for a in input_arrays]
    op.check(shapes, [forms.format_of(a) for a in input_arrays], attrs, chip)
    if any(forms.elements(shape) == 0 for shape in (*shapes, *op.infer(*shapes, **attrs))):
        return op.reference(*input_arrays, **attrs)
    prepared = prepare(op, *input_arrays, chip=chip, **attrs)
    results = prepared.fetch(sim.execute(prepared.kernel, prepared.tensors, chip))
    return results if len(results) > 1 else results[0]


def time(
    operator: Operator | str,
    shapes: Shapes,
    dtypes: Sequence[str],
    chip: Chip,
    *,
    warm_l2: bool = False,
    tiling: kernels.GemmSchedule | None = None,
    **attrs: Any,
) -> sim.KernelTimeline:
    """Return the timeline of the operator's kernel, phase by phase; raises errors of `compile`.

    `tiling` is the schedule of a matrix product, by default the best one. With `warm_l2` the
    operands are in L2 as far as they fit, each phase finds the results of earlier phases there, and
    the kernel starts from the device's queue, after the one that computed the operands.
    """
    kernel = compile(operator, shapes, dtypes, chip, **attrs)
    if tiling:
        tensors = express(operator, shapes, dtypes, **attrs)
        kernel = te.lower(te.auto_schedule(tensors, chip, tiling))
    if not warm_l2:
        return sim.simulate_kernel(kernel, chip)
    traffic = [sim.analyse(phase, chip) for phase in kernel.phases]
    # a tensor that one phase writes and the next reads is no operand: it is not warm at the start
    written = {name for t in traffic for name in t.write_once}
    operands = {name for t in traffic for name in t.read_once} - written
    memory = sim.DeviceMemory.holding(chip, kernel.tensors, operands)
    return replace(sim.simulate_kernel(kernel, chip, memory), start="queued")
