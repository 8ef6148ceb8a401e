"""Builds measured kernels on rows: norms, losses, rotary embedding, routing, resizing, gathers.

Names of builders are those of the measured tables. Values of index tensors (which expert, which
position) do not change the time; a row gives only their number, so they become inputs.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.compare.programs import Programs
from ascend_lab.compare.rows import Shape, Work
from ascend_lab.compiler import Graph, GraphBuilder
from ascend_lab.compiler.draft import Value
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import Kernel, as_kernel, renamed
from ascend_lab.machine.layout import row_major
from ascend_lab.operators import ops
from ascend_lab.operators.dsl.tensor import ALIASES
from ascend_lab.operators.kernels.group_norm import GroupNorm, group_norm_launch
from ascend_lab.operators.kernels.rerouting import Rerouting, rerouting_kernel
from ascend_lab.operators.kernels.rotary import Rotary, rotary_launch

FLOATS = ("fp16", "bf16", "fp32")
INT8_MOST = 127
"""The largest number of int8: rows are scaled so that their largest element becomes it."""


def _check(work: Work, min_inputs: int, max_inputs: int, *attributes: str) -> None:
    """Raise for too few or many inputs, and for attributes whose effect on the time is unknown.

    The attributes named must be present.
    """
    if not min_inputs <= len(work.shapes) <= max_inputs:
        needed = f"{work.operator}: {min_inputs} to {max_inputs} inputs"
        raise InputError(needed, str(len(work.shapes)), "write them in the source's order")
    for key in attributes:
        if key not in work.attributes:
            raise InputError(f"{work.operator}: attribute {key}", "none", "none is guessed")
    for key, value in work.attributes.items():
        if key not in attributes:
            needed = f"{work.operator}: no attributes but {', '.join(attributes) or 'none'}"
            raise UnsupportedError(needed, f"{key}={shown(value)}", "what it changes is unknown")


def _shape_of(work: Work, input_number: int, rank: int) -> Shape:
    """Return the shape of an input, which must have `rank` axes."""
    shape = work.shapes[input_number]
    if len(shape) != rank:
        needed = f"{work.operator}: input {input_number + 1} with {rank} axes"
        raise InputError(needed, "x".join(map(str, shape)), "correct that row")
    return shape


def _draft(work: Work) -> GraphBuilder:
    """Start a graph whose tensors have the format of the row's first input."""
    if not work.dtypes:
        raise InputError(f"{work.operator}: a dtype", "none", "correct that row")
    return GraphBuilder(work.operator, work.dtypes[0])


def _format_of(work: Work, formats: Collection[str] = FLOATS) -> str:
    """Return the format of a row's first input, which must be one of `formats`."""
    dtype = ALIASES.get(work.dtypes[0], work.dtypes[0]) if work.dtypes else ""
    if dtype not in formats:
        needed = f"{work.operator}: one of {', '.join(formats)}"
        raise UnsupportedError(needed, dtype or "none", "cast it")
    return dtype


def _gather_axis(work: Work, rank: int) -> int:
    """Return the attribute `axis`, counted from 0."""
    axis = work.attributes["axis"]
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise InputError(f"{work.operator}: axis of {rank} axes", shown(axis), "correct that row")
    return axis % rank


# -- norms and losses ------------------------------------------------------------------------------
def group_norm(work: Work) -> Programs:
    """Return SiLU of the norm over groups of channels: x (n, c, ...), scale (c), bias (c).

    The measured kernel is GroupNormSilu; that SiLU was on is taken from its name.
    """
    _check(work, 3, 3, "groups")
    shape = work.shapes[0]
    groups = work.attributes["groups"]
    if len(shape) < 3 or not isinstance(groups, int) or groups < 1 or shape[1] % groups:
        needed = "group_norm: x (n, c, ...) and groups that divide c"
        raise InputError(needed, f"{shape}, {shown(groups)}", "correct that row")
    if work.shapes[1:] != ((shape[1],), (shape[1],)):
        needed = f"group_norm: scale and bias of {shape[1]} channels"
        raise InputError(needed, shown(work.shapes[1:]), "correct that row")
    channels = shape[1] // groups
    pixels = math.prod(shape[2:])
    norm = GroupNorm(shape[0], groups, channels, pixels, _format_of(work))
    return Programs(
        lambda chip: (as_kernel(group_norm_launch(norm, chip)),), ("x", "scale", "bias"), ("y",)
    )


def add_rms_norm_dynamic_quant(work: Work) -> Graph:
    """Return x1 + x2, its RMS norm times gamma in int8, and the scale of each row.

    x1, x2 (rows, n), gamma (n); scale = max |norm| / 127, q = round(norm / scale).
    """
    _check(work, 3, 3)
    shape = work.shapes[0]
    draft = _draft(work)
    x1 = draft.input("x1", shape)
    x2 = draft.input("x2", work.shapes[1])
    gamma = draft.input("gamma", work.shapes[2])
    total = draft.add(x1, x2)
    normal = draft.rms_norm(total, gamma)
    largest = draft.reduce_max(draft.abs(normal), axis=-1, keepdims=True)
    if work.dtypes[0] != "fp32":
        # Cast late: the norm is stored in its own 16-bit format, and divided in fp32.
        normal = draft.cast(normal, dtype="fp32")
        largest = draft.cast(largest, dtype="fp32")
    # a row with a largest element of 2.54 gets scale 0.02: 2.54 becomes 127
    scale = draft.muls(largest, number=1 / INT8_MOST)
    draft.output(total, scale, draft.quantise(draft.div(normal, scale)))
    return draft.build()


def cross_entropy_loss(work: Work) -> Graph:
    """Return -log softmax(x)[i, class[i]] of x (rows, classes), or the mean over rows.

    The logarithm of row i's class is element i * classes + class[i] of the flattened log-softmax.
    Labels of int64 are read as int32, the only indices that our kernels take.
    """
    _check(work, 2, 2, "reduction")
    rows, classes = _shape_of(work, 0, 2)
    reduction = work.attributes["reduction"]
    if reduction not in ("mean", "none"):
        needed = "cross_entropy_loss: reduction mean or none"
        raise UnsupportedError(needed, shown(reduction), "sums are not built")
    draft = _draft(work)
    x = draft.input("x", (rows, classes))
    labels = draft.input("labels", work.shapes[1], "int32")
    logs = draft.reshape(draft.log_softmax(x), shape=(rows * classes, 1))
    # row 2 of 1000 classes begins at element 2000 of the flat table
    starts = draft.constant(np.arange(rows, dtype=np.int32) * np.int32(classes))
    picked = draft.gather(logs, draft.add(labels, starts))
    loss = draft.muls(picked, number=-1.0)
    draft.output(draft.reduce_mean(loss) if reduction == "mean" else loss)
    return draft.build()


# -- rotary embedding ------------------------------------------------------------------------------
def apply_rotary_pos_emb(work: Work) -> Programs:
    """Rotate the pairs (a, b) of q and k: (a cos - b sin, b cos + a sin).

    cos and sin are (length, d/2). `mode` half pairs element i with i + d/2, interleaved 2 * i with
    2 * i + 1. The kernels are those of the measured chain: each table twice in a row (ConcatD, or
    each number twice, RepeatInterleaveV2), a copy for each of several batches (BroadcastTo), q and
    k in the order BSND and back (Transpose), and the rotation. Two BroadcastTo of the interleaved
    chain are left out; they only expand the small tensor of repeat counts.
    """
    _check(work, 4, 4, "layout", "mode")
    layout = work.attributes["layout"]
    mode = work.attributes["mode"]
    if layout not in ("BSND", "BNSD") or mode not in ("half", "interleaved"):
        needed = "apply_rotary_pos_emb: layout BSND or BNSD, mode half or interleaved"
        raise UnsupportedError(needed, f"{shown(layout)}, {shown(mode)}", "no other is built")
    length, half = _shape_of(work, 2, 2)
    length_axis = layout.index("S")
    batch = work.shapes[0][0]
    for input_number, name in enumerate("qk"):
        shape = _shape_of(work, input_number, 4)
        if (shape[0], shape[length_axis], shape[3]) != (batch, length, 2 * half):
            needed = f"apply_rotary_pos_emb: {name} with {batch} times {length} places"
            needed = f"{needed} of {2 * half} elements"
            raise InputError(needed, "x".join(map(str, shape)), "correct that row")
    if work.shapes[3] != work.shapes[2]:
        needed = "apply_rotary_pos_emb: as many sines as cosines"
        raise InputError(needed, shown(work.shapes[2:]), "correct that row")
    chain = _RotaryChain(work, _format_of(work), mode == "interleaved")
    outputs = ("q", "k") if layout == "BSND" else ("q_back", "k_back")
    return Programs(chain.kernels, ("q", "k", "cos", "sin"), outputs)


@dataclass(frozen=True, slots=True)
class _RotaryChain:
    """A rotary embedding and the kernels before and after it."""

    work: Work
    dtype: str
    interleaved: bool

    def kernels(self, chip: Chip) -> list[Kernel]:
        """Return the kernels in order."""
        layout = self.work.attributes["layout"]
        shapes = self.work.shapes
        heads = 3 - layout.index("S")
        batch = shapes[0][0]
        length = shapes[2][0]
        size = shapes[0][3]
        names = {"q": "q", "k": "k"}
        kernels_before = []
        kernels_after = []
        for table in ("cos", "sin"):
            rows, table_kernels = self._table(table, batch, chip)
            # the rotation reads each table under the name that the last kernel gave it
            names[table] = rows
            kernels_before += table_kernels
        if layout == "BNSD":
            for name, shape in zip("qk", shapes, strict=False):
                names[name] = f"{name}_rows"
                shape_by_head = (batch, length, shape[heads], size)
                swapped_axes = {"perm": (0, 2, 1, 3)}
                to_rows = self._kernel(
                    "transpose", (shape,), (name, names[name]), chip, swapped_axes
                )
                from_rows = self._kernel(
                    "transpose", (shape_by_head,), (names[name], f"{name}_back"), chip, swapped_axes
                )
                kernels_before.append(to_rows)
                kernels_after.append(from_rows)
        head_counts = (shapes[0][heads], shapes[1][heads])
        rotary = Rotary(batch * length, head_counts, size, self.dtype, self.interleaved)
        rotation = as_kernel(renamed(rotary_launch(rotary, chip), names))
        return [*kernels_before, rotation, *kernels_after]

    def _table(self, name: str, batch: int, chip: Chip) -> tuple[str, list[Kernel]]:
        """Return the name of a table with as many rows as q, and the kernels that write it."""
        length, half = self.work.shapes[2]
        size = 2 * half
        twice_name = f"{name}_twice"
        rows_name = f"{name}_rows"
        if self.interleaved:
            single = (length * half, 1)
            pairs = (length * half, 2)
            # c0 c0 c1 c1 ...: neighbours share an angle
            kernels = [
                self._kernel("expand", (single,), (name, twice_name), chip, {"shape": pairs})
            ]
        else:
            two_tables = ((length, half), (length, half))
            # c0 c1 ... c0 c1 ...: elements i and i + d/2 share an angle
            kernels = [
                self._kernel("concat", two_tables, (name, name, twice_name), chip, {"axis": 1})
            ]
        # one table serves the only batch
        if batch == 1:
            return twice_name, kernels
        batch_shape = {"shape": (batch, length, size)}
        kernels.append(
            self._kernel("expand", ((1, length, size),), (twice_name, rows_name), chip, batch_shape)
        )
        return rows_name, kernels

    def _kernel(
        self,
        operator: str,
        shapes: tuple[Shape, ...],
        names: tuple[str, ...],
        chip: Chip,
        attributes: Mapping[str, Any],
    ) -> Kernel:
        """Return the kernel of an operator, its inputs and its result under their names."""
        kernel = ops.compile(operator, shapes, (self.dtype,) * len(shapes), chip, **attributes)
        has_single_input = "x" in {tensor.name for tensor in kernel.tensors}
        input_names = ("x",) if has_single_input else tuple(f"x{i}" for i in range(len(shapes)))
        table = dict(zip((*input_names, "y"), names, strict=True))
        return Kernel(operator, tuple(renamed(phase, table) for phase in kernel.phases))


# -- mixtures of experts ---------------------------------------------------------------------------
def moe_re_routing(work: Work) -> Programs:
    """Return tokens (and a scale of each) that are grouped by rank, in the order of experts.

    Tokens (count, hidden); counts (ranks, experts), of int64 read as int32; scales (count) in fp32.
    Counts are assumed to be equal, because a row does not state them.
    """
    _check(work, 2, 3)
    count, hidden = _shape_of(work, 0, 2)
    ranks, experts = _shape_of(work, 1, 2)
    has_scales = len(work.shapes) == 3
    if has_scales and work.shapes[2] != (count,):
        needed = f"moe_re_routing: a scale for each of {count} tokens"
        raise InputError(needed, "x".join(map(str, work.shapes[2])), "correct that row")
    shape = Rerouting(count, hidden, ranks, experts, _format_of(work, DTYPE_BYTES), has_scales)
    inputs = ("x", "scale")
    outputs = ("y", "scale_out")
    return Programs(
        lambda chip: (rerouting_kernel(shape, chip),),
        inputs[: 1 + has_scales],
        outputs[: 1 + has_scales],
    )


def moe_finalize_routing(work: Work) -> Graph:
    """Return y[i] = skips + sum over k of scale[i, k] * (x[place[k, i]] + bias[expert[i, k]]).

    Inputs: x (.., hidden), places (k * tokens), one or two skips (tokens, hidden), then optionally
    bias (experts, hidden), scales (tokens, k), experts (tokens, k). If there is a bias and only one
    tensor of k columns, that tensor holds the experts.
    """
    optional = ("drop_pad_mode",) if "drop_pad_mode" in work.attributes else ()
    _check(work, 4, 7, *optional)
    hidden = work.shapes[0][-1]
    tokens, experts_per_token = _shape_of(work, len(work.shapes) - 1, 2)
    hidden_shapes = [shape for shape in work.shapes[2:] if shape[-1] == hidden]
    pick_shapes = [shape for shape in work.shapes[2:] if shape == (tokens, experts_per_token)]
    if experts_per_token == hidden or len(hidden_shapes) + len(pick_shapes) != len(work.shapes) - 2:
        needed = "moe_finalize_routing: skips and bias of one width, then scales and experts"
        raise InputError(needed, shown(work.shapes), "write them in the source's order")
    # a bias needs the experts of its rows, a tensor of k columns
    has_bias = len(pick_shapes) == 2 or (bool(hidden_shapes) and hidden_shapes[-1][0] != tokens)
    draft = _draft(work)
    x = draft.input("x", work.shapes[0])
    table = draft.reshape(x, shape=(math.prod(work.shapes[0][:-1]), hidden))
    places = draft.input("places", (experts_per_token * tokens,), "int32")
    sums = draft.reshape(draft.gather(table, places), shape=(experts_per_token, tokens, hidden))
    if has_bias:
        bias = draft.input("bias", hidden_shapes.pop())
        experts = draft.input("experts", (tokens, experts_per_token), "int32")
        sums = draft.add(sums, draft.gather(bias, draft.transpose(experts, perm=(1, 0))))
    if len(pick_shapes) == 2 or not has_bias:
        scales = draft.transpose(draft.input("scales", (tokens, experts_per_token)), perm=(1, 0))
        sums = draft.mul(sums, draft.reshape(scales, shape=(experts_per_token, tokens, 1)))
    # the k experts of each token
    y = draft.reduce_sum(sums, axis=0)
    for number, shape in enumerate(hidden_shapes):
        y = draft.add(y, draft.input(f"skip{number}", shape))
    draft.output(y)
    return draft.build()


# -- resizing and picking --------------------------------------------------------------------------
def resize_bilinear(work: Work) -> Graph:
    """Interpolate every new pixel of x (n, c, h, w) from its four nearest ones.

    Rows first, which is less work when the picture shrinks; columns are the rows of the transposed
    picture.
    """
    _check(work, 1, 1, "output_size", "align_corners")
    n, c, h, w = _shape_of(work, 0, 4)
    out = work.attributes["output_size"]
    if not isinstance(out, tuple) or len(out) != 2 or min(out) < 1:
        raise InputError("resize_bilinear: output_size (height, width)", shown(out), "correct it")
    aligned = bool(work.attributes["align_corners"])
    images = n * c
    draft = _draft(work)
    x = draft.reshape(draft.input("x", (n, c, h, w)), shape=(images * h, w))
    starts = np.arange(images)[:, None] * h
    rows = _interpolated(draft, x, starts, _source_positions(h, out[0], aligned))
    columns = draft.transpose(rows, perm=(1, 0))
    resized = _interpolated(
        draft, columns, np.zeros((1, 1), np.int64), _source_positions(w, out[1], aligned)
    )
    y = draft.transpose(resized, perm=(1, 0))
    draft.output(draft.reshape(y, shape=(n, c, *out)))
    return draft.build()


FloatArray = NDArray[np.floating[Any]]


def _source_positions(size: int, out: int, aligned: bool) -> FloatArray:
    """Return the positions of the centres of `out` new pixels among `size` source pixels.

    Positions are limited to those from 0 to size - 1. With `aligned` the outermost centres
    coincide, otherwise the edges do.
    """
    if aligned:
        # 4 pixels from 7: at 0, 2, 4, 6
        return np.arange(out) * ((size - 1) / max(out - 1, 1))
    # 4 pixels from 8: centres at 0.5, 2.5, 4.5, 6.5
    centres: FloatArray = (np.arange(out) + 0.5) * (size / out) - 0.5
    return np.clip(centres, 0.0, size - 1.0)


def _interpolated(
    draft: GraphBuilder, x: Value, starts: NDArray[np.int64], positions: FloatArray
) -> Value:
    """Interpolate between neighbouring rows of x at the fractional rows `positions`.

    Rows are counted from each of `starts`: the first row of each image.
    """
    low = np.floor(positions).astype(np.int64)
    # the last pixel has no neighbour after it and is used as its own neighbour
    high = np.minimum(low + 1, int(np.ceil(np.max(positions))))
    share = np.broadcast_to(positions - low, (len(starts), len(positions))).reshape(-1, 1)
    lower_rows = draft.gather(x, draft.constant((starts + low).reshape(-1).astype(np.int32)))
    upper_rows = draft.gather(x, draft.constant((starts + high).reshape(-1).astype(np.int32)))
    weight = draft.constant(share.astype(np.float32))
    if draft.dtype != "fp32":
        weight = draft.cast(weight, dtype=draft.dtype)
    interpolated: Value = draft.add(
        lower_rows, draft.mul(draft.sub(upper_rows, lower_rows), weight)
    )
    return interpolated


def unsorted_segment_sum(work: Work) -> Graph:
    """Return y[s] = sum of all rows u[i] with index[i] = s; inputs as in scatter_add: y, index, u.

    y starts from zeros: u[0] - u[0] (0 for finite u), padded to all segments.
    """
    _check(work, 3, 3, "segments")
    shape, index_shape, updates = work.shapes
    if work.attributes["segments"] != shape[0]:
        needed = f"unsorted_segment_sum: segments equal to the first size, {shape[0]}"
        raise InputError(needed, shown(work.attributes["segments"]), "correct that row")
    count = math.prod(index_shape)
    width = math.prod(shape[1:])
    if updates != (*index_shape, *shape[1:]):
        needed = f"unsorted_segment_sum: one row of {width} elements per index"
        raise InputError(needed, "x".join(map(str, updates)), "correct that row")
    draft = _draft(work)
    values = draft.input("u", (count, width))
    index = draft.input("index", (count,), "int32")
    # u - u is a row of zeros without a constant of the size of y
    row = draft.slice(values, begin=(0, 0), end=(1, width))
    zeros = draft.pad(draft.sub(row, row), pads=((0, shape[0] - 1), (0, 0)))
    draft.output(draft.scatter_add(zeros, index, values))
    return draft.build()


def gather_elements(work: Work) -> Graph:
    """Return y[i, j] = x[index[i, j], j] along axis 0, and correspondingly along the others.

    x is read as a table of single elements. With the row-major strides of x, the number of the
    element is index * stride[axis] + the sum of position * stride over all other axes.
    """
    _check(work, 2, 2, "axis")
    shape = work.shapes[0]
    index_shape = _shape_of(work, 1, len(shape))
    axis = _gather_axis(work, len(shape))
    if any(index_shape[d] > shape[d] for d in range(len(shape)) if d != axis):
        needed = f"gather_elements: an index no longer than x but along axis {axis}"
        raise InputError(needed, f"{index_shape} for {shape}", "correct that row")
    draft = _draft(work)
    x = draft.reshape(draft.input("x", shape), shape=(math.prod(shape), 1))
    index = draft.input("index", index_shape, "int32")
    strides = row_major(shape)
    rank = len(shape)
    # x of (3, 4) has strides (4, 1): along axis 0 element (i, j) is number 4 * index + j
    flat = draft.mul(index, draft.constant(np.full((1,) * rank, strides[axis], np.int32)))
    for other_axis in range(rank):
        # along the axis the index itself decides; an axis of 1 adds 0
        if other_axis == axis or index_shape[other_axis] == 1:
            continue
        broadcast_shape = [index_shape[other_axis] if i == other_axis else 1 for i in range(rank)]
        offsets = np.arange(index_shape[other_axis], dtype=np.int32) * np.int32(strides[other_axis])
        flat = draft.add(flat, draft.constant(offsets.reshape(broadcast_shape)))
    picked = draft.gather(x, draft.reshape(flat, shape=(math.prod(index_shape),)))
    draft.output(draft.reshape(picked, shape=index_shape))
    return draft.build()


BUILDERS: Mapping[str, Callable[[Work], Graph | Programs]] = {
    build.__name__: build
    for build in (
        group_norm,
        add_rms_norm_dynamic_quant,
        cross_entropy_loss,
        apply_rotary_pos_emb,
        moe_re_routing,
        moe_finalize_routing,
        resize_bilinear,
        unsorted_segment_sum,
        gather_elements,
    )
}
"""The table's name for a kernel -> what builds its graph, or writes its programs."""
