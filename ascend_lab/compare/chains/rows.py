"""Measured kernels that work on rows: norms, losses, rotary embedding, routing, resizing, picking.

Names of builders are those of the measured tables. Numbers that stand in tensors and change no
time (which expert, which place) are inputs: a row says how many there are, not what they are.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.compare.programs import Programs
from ascend_lab.compare.rows import Shape, Work
from ascend_lab.compiler import Graph, GraphBuilder, Value
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
    """Raise for too few or many inputs, and for attributes whose meaning for the time is unknown.

    Those named have to be there.
    """
    if not min_inputs <= len(work.shapes) <= max_inputs:
        needed = f"{work.operator}: {min_inputs} to {max_inputs} inputs"
        raise InputError(needed, str(len(work.shapes)), "write them in the source's order")
    for word in attributes:
        if word not in work.attributes:
            raise InputError(f"{work.operator}: attribute {word}", "none", "none is guessed")
    for word, value in work.attributes.items():
        if word not in attributes:
            needed = f"{work.operator}: no attributes but {', '.join(attributes) or 'none'}"
            raise UnsupportedError(needed, f"{word}={shown(value)}", "what it changes is unknown")


def _sizes(work: Work, place: int, rank: int) -> Shape:
    """Return the shape of an input that has to have `rank` axes."""
    shape = work.shapes[place]
    if len(shape) != rank:
        needed = f"{work.operator}: input {place + 1} with {rank} axes"
        raise InputError(needed, "x".join(map(str, shape)), "correct that row")
    return shape


def _draft(work: Work) -> GraphBuilder:
    """Start a graph whose tensors have the format of the row's first input."""
    if not work.dtypes:
        raise InputError(f"{work.operator}: a dtype", "none", "correct that row")
    return GraphBuilder(work.operator, work.dtypes[0])


def _format_of(work: Work, formats: Collection[str] = FLOATS) -> str:
    """Return the format of a row's first input, one of those known."""
    dtype = ALIASES.get(work.dtypes[0], work.dtypes[0]) if work.dtypes else ""
    if dtype not in formats:
        needed = f"{work.operator}: one of {', '.join(formats)}"
        raise UnsupportedError(needed, dtype or "none", "cast it")
    return dtype


def _axis(work: Work, rank: int) -> int:
    """Return the attribute `axis`, counted from 0."""
    axis = work.attributes["axis"]
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise InputError(f"{work.operator}: axis of {rank} axes", shown(axis), "correct that row")
    return axis % rank


# -- norms and losses ------------------------------------------------------------------------------
def group_norm(work: Work) -> Programs:
    """SiLU of the norm over groups of channels: x (n, c, ...), scale (c), bias (c).

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
    """x1 + x2, its RMS norm times gamma in int8, and the scale of each row.

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
        # Cast late: the norm lies in memory in its own two bytes, and is divided in fp32.
        normal = draft.cast(normal, dtype="fp32")
        largest = draft.cast(largest, dtype="fp32")
    # a row with a largest element of 2.54 gets scale 0.02: 2.54 becomes 127
    scale = draft.muls(largest, number=1 / INT8_MOST)
    draft.output(total, scale, draft.quantise(draft.div(normal, scale)))
    return draft.build()


def cross_entropy_loss(work: Work) -> Graph:
    """-log softmax(x)[i, class[i]] of x (rows, classes), or the mean over rows.

    A class is one of all classes: that of row i is element i classes + class[i] of the table of
    logarithms. Labels of int64 are read as int32, the only indices that our kernels take.
    """
    _check(work, 2, 2, "reduction")
    rows, classes = _sizes(work, 0, 2)
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
    """Pairs (a, b) of q and k turned: (a cos - b sin, b cos + a sin), cos and sin (length, d / 2).

    `mode` half pairs element i with i + d / 2, interleaved 2 i with 2 i + 1. The kernels are those
    of the measured chain: each table twice in a row (ConcatD, or each number twice,
    RepeatInterleaveV2), a copy for each of several batches (BroadcastTo), q and k in the order
    BSND and back (Transpose), and the turn. Left out are two BroadcastTo of the interleaved chain:
    what they stretch, the counts of repeats, is small.
    """
    _check(work, 4, 4, "layout", "mode")
    layout = work.attributes["layout"]
    mode = work.attributes["mode"]
    if layout not in ("BSND", "BNSD") or mode not in ("half", "interleaved"):
        needed = "apply_rotary_pos_emb: layout BSND or BNSD, mode half or interleaved"
        raise UnsupportedError(needed, f"{shown(layout)}, {shown(mode)}", "no other is built")
    length, half = _sizes(work, 2, 2)
    at = layout.index("S")
    batch = work.shapes[0][0]
    for place, name in enumerate("qk"):
        shape = _sizes(work, place, 4)
        if (shape[0], shape[at], shape[3]) != (batch, length, 2 * half):
            needed = f"apply_rotary_pos_emb: {name} with {batch} times {length} places"
            needed = f"{needed} of {2 * half} elements"
            raise InputError(needed, "x".join(map(str, shape)), "correct that row")
    if work.shapes[3] != work.shapes[2]:
        needed = "apply_rotary_pos_emb: as many sines as cosines"
        raise InputError(needed, shown(work.shapes[2:]), "correct that row")
    turn = _RotaryChain(work, _format_of(work), mode == "interleaved")
    outputs = ("q", "k") if layout == "BSND" else ("q_back", "k_back")
    return Programs(turn.kernels, ("q", "k", "cos", "sin"), outputs)


@dataclass(frozen=True, slots=True)
class _RotaryChain:
    """The kernels around a rotary embedding, and itself."""

    work: Work
    dtype: str
    neighbours: bool

    def kernels(self, chip: Chip) -> list[Kernel]:
        """Return them in order."""
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
            # the turn reads each table under the name that the last kernel gave it
            names[table] = rows
            kernels_before += table_kernels
        if layout == "BNSD":
            for name, shape in zip("qk", shapes, strict=False):
                names[name] = f"{name}_rows"
                turned = (batch, length, shape[heads], size)
                swap = {"perm": (0, 2, 1, 3)}
                inward = self._kernel("transpose", (shape,), (name, names[name]), chip, swap)
                back = self._kernel(
                    "transpose", (turned,), (names[name], f"{name}_back"), chip, swap
                )
                kernels_before.append(inward)
                kernels_after.append(back)
        head_counts = (shapes[0][heads], shapes[1][heads])
        rotary = Rotary(batch * length, head_counts, size, self.dtype, self.neighbours)
        turn = as_kernel(renamed(rotary_launch(rotary, chip), names))
        return [*kernels_before, turn, *kernels_after]

    def _table(self, name: str, batch: int, chip: Chip) -> tuple[str, list[Kernel]]:
        """Return the name of a table as long as q has rows, and the kernels that make it."""
        length, half = self.work.shapes[2]
        size = 2 * half
        twice = f"{name}_twice"
        rows = f"{name}_rows"
        if self.neighbours:
            single = (length * half, 1)
            pairs = (length * half, 2)
            # c0 c0 c1 c1 ...: neighbours share an angle
            kernels = [self._kernel("expand", (single,), (name, twice), chip, {"shape": pairs})]
        else:
            two_tables = ((length, half), (length, half))
            # c0 c1 ... c0 c1 ...: element i and i + d
            # 2 share an angle
            kernels = [self._kernel("concat", two_tables, (name, name, twice), chip, {"axis": 1})]
        # one table serves the only batch
        if batch == 1:
            return twice, kernels
        stretched = {"shape": (batch, length, size)}
        kernels.append(self._kernel("expand", ((1, length, size),), (twice, rows), chip, stretched))
        return rows, kernels

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
        input_names = (
            ("x",) if len(shapes) == 1 else tuple(f"x{place}" for place in range(len(shapes)))
        )
        tensor_names = {tensor.name for tensor in kernel.tensors}
        input_names = (
            input_names
            if input_names[0] in tensor_names
            else tuple(f"x{place}" for place in range(len(shapes)))
        )
        table = dict(zip((*input_names, "y"), names, strict=True))
        return Kernel(operator, tuple(renamed(phase, table) for phase in kernel.phases))


# -- mixtures of experts ---------------------------------------------------------------------------
def moe_re_routing(work: Work) -> Programs:
    """Tokens (and a scale of each), grouped by rank, put in the order of experts.

    Tokens (count, hidden); counts (ranks, experts), of int64 read as int32; scales (count) in fp32.
    Counts are taken as equal: a row does not say what they are.
    """
    _check(work, 2, 3)
    count, hidden = _sizes(work, 0, 2)
    ranks, experts = _sizes(work, 1, 2)
    scaled = len(work.shapes) == 3
    if scaled and work.shapes[2] != (count,):
        needed = f"moe_re_routing: a scale for each of {count} tokens"
        raise InputError(needed, "x".join(map(str, work.shapes[2])), "correct that row")
    shape = Rerouting(count, hidden, ranks, experts, _format_of(work, DTYPE_BYTES), scaled)
    inputs = ("x", "scale")
    outputs = ("y", "scale_out")
    return Programs(
        lambda chip: (rerouting_kernel(shape, chip),), inputs[: 1 + scaled], outputs[: 1 + scaled]
    )


def moe_finalize_routing(work: Work) -> Graph:
    """y[i] = skips + sum over k of scale[i, k] (x[place[k, i]] + bias[expert[i, k]]).

    Expanded rows x (.., hidden), places (k tokens), one or two skips (tokens, hidden), and where
    they are given bias (experts, hidden), scales (tokens, k), numbers of experts (tokens, k).
    A bias needs its experts: of a bias and one tensor of k columns, that is those.
    """
    _check(work, 4, 7, *(("drop_pad_mode",) if "drop_pad_mode" in work.attributes else ()))
    hidden = work.shapes[0][-1]
    tokens, picks = _sizes(work, len(work.shapes) - 1, 2)
    wide = [shape for shape in work.shapes[2:] if shape[-1] == hidden]
    narrow = [shape for shape in work.shapes[2:] if shape == (tokens, picks)]
    if picks == hidden or len(wide) + len(narrow) != len(work.shapes) - 2:
        needed = "moe_finalize_routing: skips and bias of one width, then scales and experts"
        raise InputError(needed, shown(work.shapes), "write them in the source's order")
    # a bias needs the experts of its rows, a tensor of k columns
    has_bias = len(narrow) == 2 or (bool(wide) and wide[-1][0] != tokens)
    draft = _draft(work)
    x = draft.input("x", work.shapes[0])
    table = draft.reshape(x, shape=(math.prod(work.shapes[0][:-1]), hidden))
    places = draft.input("places", (picks * tokens,), "int32")
    sums = draft.reshape(draft.gather(table, places), shape=(picks, tokens, hidden))
    if has_bias:
        bias = draft.input("bias", wide.pop())
        experts = draft.input("experts", (tokens, picks), "int32")
        sums = draft.add(sums, draft.gather(bias, draft.transpose(experts, perm=(1, 0))))
    if len(narrow) == 2 or not has_bias:
        scales = draft.transpose(draft.input("scales", (tokens, picks)), perm=(1, 0))
        sums = draft.mul(sums, draft.reshape(scales, shape=(picks, tokens, 1)))
    # the k experts of each token
    y = draft.reduce_sum(sums, axis=0)
    for number, shape in enumerate(wide):
        y = draft.add(y, draft.input(f"skip{number}", shape))
    draft.output(y)
    return draft.build()


# -- resizing and picking --------------------------------------------------------------------------
def resize_bilinear(work: Work) -> Graph:
    """x (n, c, h, w) mixed from the four nearest pixels of every new one.

    Rows first, which leaves less to do where pictures get smaller; columns as rows of the
    transposed picture.
    """
    _check(work, 1, 1, "output_size", "align_corners")
    n, c, h, w = _sizes(work, 0, 4)
    out = work.attributes["output_size"]
    if not isinstance(out, tuple) or len(out) != 2 or min(out) < 1:
        raise InputError("resize_bilinear: output_size (height, width)", shown(out), "correct it")
    aligned = bool(work.attributes["align_corners"])
    images = n * c
    draft = _draft(work)
    x = draft.reshape(draft.input("x", (n, c, h, w)), shape=(images * h, w))
    starts = np.arange(images)[:, None] * h
    rows = _mixed(draft, x, starts, _between(h, out[0], aligned))
    columns = draft.transpose(rows, perm=(1, 0))
    mixed = _mixed(draft, columns, np.zeros((1, 1), np.int64), _between(w, out[1], aligned))
    y = draft.transpose(mixed, perm=(1, 0))
    draft.output(draft.reshape(y, shape=(n, c, *out)))
    return draft.build()


Numbers = NDArray[np.floating[Any]]


def _between(size: int, out: int, aligned: bool) -> Numbers:
    """Return where the centres of `out` pixels lie among `size`, within the first and the last.

    With `aligned` the outermost centres meet, otherwise the edges do.
    """
    if aligned:
        # 4 pixels from 7: at 0, 2, 4, 6
        return np.arange(out) * ((size - 1) / max(out - 1, 1))
    # 4 pixels from 8: centres at 0.5, 2.5, 4.5, 6.5
    centres: Numbers = (np.arange(out) + 0.5) * (size / out) - 0.5
    return np.clip(centres, 0.0, size - 1.0)


def _mixed(draft: GraphBuilder, x: Value, starts: NDArray[np.int64], at: Numbers) -> Value:
    """Return rows of x mixed at the places `at` behind each of `starts`: the two beside it."""
    low = np.minimum(np.floor(at), np.max(at)).astype(np.int64)
    # the last pixel has no neighbour behind it: it is its own
    high = np.minimum(low + 1, int(np.ceil(np.max(at))))
    share = np.broadcast_to(at - low, (len(starts), len(at))).reshape(-1, 1)
    lower_rows = draft.gather(x, draft.constant((starts + low).reshape(-1).astype(np.int32)))
    upper_rows = draft.gather(x, draft.constant((starts + high).reshape(-1).astype(np.int32)))
    weight = draft.constant(share.astype(np.float32))
    if draft.dtype != "fp32":
        weight = draft.cast(weight, dtype=draft.dtype)
    mixed: Value = draft.add(lower_rows, draft.mul(draft.sub(upper_rows, lower_rows), weight))
    return mixed


def unsorted_segment_sum(work: Work) -> Graph:
    """y[s] = sum of all rows u[i] with index[i] = s; inputs as of scatter_add: y, index, u.

    The zeros are a row u - u and padding below it, of finite u.
    """
    _check(work, 3, 3, "segments")
    shape, picks, updates = work.shapes
    if work.attributes["segments"] != shape[0]:
        needed = f"unsorted_segment_sum: segments equal to the first size, {shape[0]}"
        raise InputError(needed, shown(work.attributes["segments"]), "correct that row")
    count = math.prod(picks)
    width = math.prod(shape[1:])
    if updates != (*picks, *shape[1:]):
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
    """y[i, j] = x[index[i, j], j] along axis 0: one index per element; other axes alike.

    As a table of single elements. With row-major strides of x, the element is number
    index stride(axis) + the sum of place stride over all other axes.
    """
    _check(work, 2, 2, "axis")
    shape = work.shapes[0]
    picks = _sizes(work, 1, len(shape))
    axis = _axis(work, len(shape))
    if any(picks[d] > shape[d] for d in range(len(shape)) if d != axis):
        needed = f"gather_elements: an index no longer than x but along axis {axis}"
        raise InputError(needed, f"{picks} for {shape}", "correct that row")
    draft = _draft(work)
    x = draft.reshape(draft.input("x", shape), shape=(math.prod(shape), 1))
    index = draft.input("index", picks, "int32")
    strides = row_major(shape)
    rank = len(shape)
    # x of (3, 4) has strides (4, 1): along axis 0 element (i, j) is number 4 index + j
    flat = draft.mul(index, draft.constant(np.full((1,) * rank, strides[axis], np.int32)))
    for d in range(rank):
        # along the axis the index itself decides; an axis of 1 adds 0
        if d == axis or picks[d] == 1:
            continue
        ends = [picks[d] if d == axis_at else 1 for axis_at in range(rank)]
        places = np.arange(picks[d], dtype=np.int32) * np.int32(strides[d])
        flat = draft.add(flat, draft.constant(places.reshape(ends)))
    picked = draft.gather(x, draft.reshape(flat, shape=(math.prod(picks),)))
    draft.output(draft.reshape(picked, shape=picks))
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
