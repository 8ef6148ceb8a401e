"""Attention and its parts: scaled scores, masked softmax, weighted sum, and flash attention.

q is (..., s, d), k (..., t, d), v (..., t, e). A mask is added to the scores: 0 keeps a position,
and a large negative number such as -10000 removes it.

`flash_attention` also takes grouped heads, q (b, h, s, d) with k (b, g, t, d) and v (b, g, t, e):
h / g consecutive heads of q share a head of k and v. With `causal`, query i attends to the keys up
to number i + t - s. The queries are thus the last s positions of the sequence, and the last query
attends to every key.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ascend_lab import errors
from ascend_lab.errors import ShapeError
from ascend_lab.machine import isa, layout
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim import DeviceMemory, simulate_kernel
from ascend_lab.operators import dsl as te
from ascend_lab.operators.kernels import flash, flash_split
from ascend_lab.operators.kernels.flash_shape import (
    SCALES,
    FlashShape,
    FlashTiling,
    default_scale,
    fits,
)
from ascend_lab.operators.ops import formats, gradients, reduction, slicing
from ascend_lab.operators.ops.expressions import in_fp32, narrow, stretch, wide
from ascend_lab.operators.ops.formats import (
    FINITE,
    Shape,
    TypeRule,
    Values,
    broadcast_shape,
    rounded,
)
from ascend_lab.operators.ops.matmul import (
    SUMS,
    batched_product,
    matmul_rules,
    product_gradients,
    product_shape,
)
from ascend_lab.operators.ops.operator import (
    Call,
    Domain,
    Example,
    Grads,
    Template,
    define,
    get,
    register,
)

TYPES = TypeRule(("fp16", "bf16"), unit="cube")
# probabilities are rounded to fp16 before the second product
ATTENTION_TOLERANCE = rounded(ulps=2.0, fp32_ulps=64, atol=2.0**-8)


def _scale(scale: float | None, width: int) -> float:
    """Return the given scale, by default 1 / sqrt(d)."""
    return default_scale(width) if scale is None else float(scale)


def _check_pair(where: str, a: Shape, b: Shape) -> None:
    if len(a) != len(b) or len(a) < 2:
        needed = f"{where} with equal numbers of axes, at least 2"
        raise errors.ShapeError(needed, f"{a} and {b}", "reshape")


def _site_scale(s: gradients.Site) -> float:
    return _scale(s.attrs["scale"], s.shape()[-1])


# -- scores ---------------------------------------------------------------------------------------
def _scores_shape(q: Shape, k: Shape, *, scale: float | None) -> Shape:
    _check_pair("q (..., s, d) and k (..., t, d)", q, k)
    return product_shape(q, k, False, True)


def _scores(q: te.Tensor, k: te.Tensor, scale: float | None) -> te.Tensor:
    """Return scale q k^T in fp32."""
    return te.vmuls(batched_product(q, k, False, True, "fp32"), _scale(scale, q.shape[-1]))


def _scores_values(q: Values, k: Values, *, scale: float | None) -> Values:
    # q and k of four ones: the scale is 1 / sqrt(4), so the score is 4 / 2 = 2.
    result: Values = q @ np.swapaxes(k, -1, -2) * _scale(scale, q.shape[-1])
    return result


define(
    "attention_scores",
    ("q", "k"),
    _scores_values,
    lambda q, k, *, scale: narrow(_scores(q, k, scale), q.dtype),
    "scale * q k^T, scale 1 / sqrt(d) unless given",
    outputs=("scores",),
    attrs={"scale": None},
    ranges={"scale": FINITE},
    shape_rule=_scores_shape,
    types=TYPES,
    slicing=lambda shapes, *, scale: replace(
        matmul_rules(shapes[0], shapes[1], False, True), reductions=()
    ),
    backward=lambda s: product_gradients(
        s, "batch_matmul", s.net.scaled(s.g, _site_scale(s)), False, True
    ),
    tolerances=SUMS,
    examples=(
        Example(((1, 1), (1, 1))),
        Example(((2, 17, 16), (2, 33, 16))),
        Example(((2, 3, 7, 32), (2, 3, 16, 32)), {"scale": 0.25}),
    ),
)


# -- masked softmax -------------------------------------------------------------------------------
def _masked_shape(x: Shape, mask: Shape) -> Shape:
    if broadcast_shape("scores and mask", x, mask) != x:
        needed = f"a mask that broadcasts to the scores {x}"
        raise errors.ShapeError(needed, str(mask), "reshape the mask")
    return x


def _masked_softmax_gradients(s: gradients.Site) -> Grads:
    scores_gradient = reduction.softmax_grad(s, s.g, s.y(), len(s.shape()) - 1)
    return scores_gradient, s.net.summed_to(scores_gradient, s.shape(1)) if s.needs_gradient[
        1
    ] else None


define(
    "masked_softmax",
    ("scores", "mask"),
    lambda scores, mask: reduction.softmax_values(scores + mask, axis=-1),
    in_fp32(lambda scores, mask: reduction.softmax(te.vadd(*stretch(scores, mask)), axis=-1)),
    "softmax of scores + mask along the last axis",
    shape_rule=_masked_shape,
    slicing=lambda shapes: slicing.elementwise_rules(
        shapes, shapes[0], whole={len(shapes[0]) - 1: "softmax needs the whole axis"}
    ),
    backward=_masked_softmax_gradients,
    wide=True,
    traits=("reduction",),
    tolerances=rounded(fp32_ulps=64, atol=2.0**-16),
    examples=(
        Example(((1, 1), (1, 1))),
        Example(((2, 3, 17), (3, 17))),
        Example(((2, 1, 5, 33), (2, 1, 1, 33))),
    ),
)


# -- weighted sum ---------------------------------------------------------------------------------
def _context_shape(p: Shape, v: Shape) -> Shape:
    _check_pair("probabilities (..., s, t) and v (..., t, e)", p, v)
    return product_shape(p, v, False, False)


define(
    "attention_context",
    ("probabilities", "v"),
    lambda probabilities, v: probabilities @ v,
    lambda p, v: batched_product(p, v, False, False, None),
    "probabilities v: the weighted sum of the values",
    outputs=("context",),
    shape_rule=_context_shape,
    types=TYPES,
    slicing=lambda shapes: matmul_rules(shapes[0], shapes[1], False, False),
    backward=lambda s: product_gradients(s, "batch_matmul", s.g, False, False),
    domains={"probabilities": Domain(0.0, 1.0)},
    tolerances=SUMS,
    examples=(
        Example(((1, 1), (1, 1))),
        Example(((2, 17, 33), (2, 33, 16))),
        Example(((2, 3, 7, 16), (2, 3, 16, 32))),
    ),
)


# -- attention ------------------------------------------------------------------------------------
def grouped_heads(q: Shape, k: Shape, v: Shape) -> int:
    """Return the number of consecutive heads of q that share a head of k and v."""
    if len(q) < 4 or not len(k) == len(v) == len(q) or k[-3] != v[-3]:
        return 1
    return q[-3] // k[-3] if q[-3] % k[-3] == 0 else 1


def has_groups(q: Shape, k: Shape, v: Shape) -> bool:
    """Return whether heads of k are shared in groups, which broadcasting cannot express."""
    return grouped_heads(q, k, v) > 1 and k[-3] > 1


def _stacked_heads_shape(q: Shape, heads: int) -> Shape:
    """Return the shape of q with the heads of a group as rows: (..., h / heads, s * heads, d)."""
    if heads == 1:
        return q
    # 8 heads of q on 2 heads of k, 5 queries: (2, 8, 5, 64) becomes (2, 2, 20, 64), 20 rows against
    # each head of k.
    return (*q[:-3], q[-3] // heads, q[-2] * heads, q[-1])


def _attention_shape(q: Shape, k: Shape, v: Shape, *mask: Shape, scale: float | None) -> Shape:
    scores = _scores_shape(q, k, scale=scale)
    if mask:
        _masked_shape(scores, mask[0])
    return _context_shape(scores, v)


def _flash_shape(
    q: Shape, k: Shape, v: Shape, *mask: Shape, scale: float | None, causal: bool
) -> Shape:
    _check_pair("q (..., s, d) and k (..., t, d)", q, k)
    if causal and q[-2] > k[-2]:
        needed = "causal: at most as many queries as keys"
        raise ShapeError(needed, f"{q[-2]} and {k[-2]}", "leave out queries that see no key")
    if len(q) == len(k) >= 4 and 1 not in (q[-3], k[-3]) and q[-3] % k[-3]:
        needed = "heads of q: a multiple of those of k and v, which groups of them share"
        raise ShapeError(needed, f"{q[-3]} and {k[-3]}", "leave out or add heads")
    if not has_groups(q, k, v):
        return _attention_shape(q, k, v, *mask, scale=scale)
    heads = q[-3]
    queries = q[-2]
    stacked = _stacked_heads_shape(q, grouped_heads(q, k, v))
    scores = _scores_shape(stacked, k, scale=scale)
    if mask:
        _masked_shape((*scores[:-3], heads, queries, scores[-1]), mask[0])
    # 8 heads on 2: computed as (.., 2, s * 4, e), returned as (.., 8, s, e).
    context = _context_shape(scores, v)
    return (*context[:-3], heads, queries, context[-1])


def _values(
    q: Values,
    k: Values,
    v: Values,
    *mask: Values,
    scale: float | None,
    causal: bool = False,
) -> Values:
    heads = grouped_heads(q.shape, k.shape, v.shape)
    if heads > 1:
        k = np.repeat(k, heads, axis=-3)
        v = np.repeat(v, heads, axis=-3)
    scores = _scores_values(q, k, scale=scale)
    if mask:
        scores = scores + mask[0]
    if causal:
        scores = np.where(causal_mask(q.shape[-2], k.shape[-2]), scores, -np.inf)
    result: Values = reduction.softmax_values(scores, axis=-1) @ v
    return result


def causal_mask(queries: int, keys: int) -> Values:
    """Return the mask of causal attention, true if key j <= query i + keys - queries."""
    # 2 queries and 5 keys: query 0 sees keys 0..3, query 1 sees keys 0..4
    last_key = np.arange(queries)[:, None] + (keys - queries)
    mask: Values = np.arange(keys)[None] <= last_key
    return mask


def _attention(
    q: te.Tensor, k: te.Tensor, v: te.Tensor, *mask: te.Tensor, scale: float | None
) -> te.Tensor:
    """Return attention with scores and softmax in fp32, probabilities rounded for the cube."""
    scores = _scores(q, k, scale)
    if mask:
        scores = te.vadd(scores, te.broadcast(wide(mask[0]), scores.shape))
    return batched_product(
        narrow(reduction.softmax(scores, axis=-1), q.dtype), v, False, False, None
    )


def _flash_expression(
    q: te.Tensor,
    k: te.Tensor,
    v: te.Tensor,
    *mask: te.Tensor,
    scale: float | None,
    causal: bool,
) -> te.Tensor:
    """Return the expression that is scheduled if the hand-written kernel does not apply."""
    if causal or has_groups(q.shape, k.shape, v.shape):
        needed = "a kernel of flash_attention for causal or grouped heads, on separate cores"
        got = f"q {q.shape}, k {k.shape} in {q.dtype}"
        remedy = "pass a mask, and k and v with a head for each of q; or build a graph of it"
        raise errors.UnsupportedError(needed, got, remedy)
    return _attention(q, k, v, *mask, scale=scale)


def _attention_gradients(s: gradients.Site) -> Grads:
    """Return the gradients of q, k, v and the mask; the probabilities are recomputed, not kept.

    With P = softmax(S), S = scale Q K^T + mask, and the gradient G of the output:
    dV = P^T G, dP = G V^T, dS = P (dP - rowsum(dP P)), dQ = scale dS K, dK = scale dS^T Q.
    """
    if s.attrs.get("causal") or has_groups(s.shape(0), s.shape(1), s.shape(2)):
        needed = "attention with a gradient: a mask, and a head of k for each of q"
        got = f"causal={s.attrs.get('causal')}, q {s.shape(0)}, k {s.shape(1)}"
        raise errors.UnsupportedError(needed, got, "write the mask, expand k and v")
    net = s.net
    scale = _site_scale(s)
    dtype = s.kind().dtype
    q = s.x(0)
    k = s.x(1)
    v = s.x(2)
    scores = net.scaled(net.batch_matmul(q, k, trans_b=True), scale)
    has_mask = len(s.inputs) > 3
    scores = net.add(scores, s.x(3)) if has_mask else scores
    probabilities = net.wide(net.softmax(scores, axis=-1))
    # (t, s) (s, e) = (t, e), the shape of v.
    dv = net.batch_matmul(net.in_format(probabilities, dtype), s.g, trans_a=True)
    dprobabilities = net.wide(net.batch_matmul(s.g, v, trans_b=True))
    dscores = net.in_format(
        reduction.softmax_grad(s, dprobabilities, probabilities, len(probabilities.shape) - 1),
        dtype,
    )
    dmask = net.summed_to(dscores, s.shape(3)) if has_mask and s.needs_gradient[3] else None
    # S = scale Q K^T: the scale goes into dQ and dK alike, so it is applied once, to dS.
    dproduct = net.scaled(dscores, scale)
    dq = net.batch_matmul(dproduct, k)
    dk = net.batch_matmul(dproduct, q, trans_a=True)
    input_grads = [net.summed_to(d, s.shape(i)) for i, d in enumerate((dq, dk, dv))]
    return [*input_grads, dmask] if has_mask else input_grads


def _attention_slices(
    shapes: tuple[Shape, ...], *, scale: float | None, causal: bool = False
) -> slicing.SliceRules:
    q, k, v = shapes[:3]
    if causal or has_groups(q, k, v):
        return _causal_slices(shapes, causal=causal)
    scores = product_shape(q, k, False, True)
    out_shape = product_shape(scores, v, False, False)
    # Output axes: those of the batch, then s (a row of q), then e (a column of v).
    batch = slicing.following((q[:-2], k[:-2], v[:-2]), out_shape[:-2])
    axis_sources = [*batch, (slicing.Source(0, len(q) - 2),), (slicing.Source(2, len(v) - 1),)]
    for mask in shapes[3:]:
        mask_sources = slicing.following((mask,), scores)[:-1]
        for axis, sources in enumerate(mask_sources):
            axis_sources[axis] = (
                *axis_sources[axis],
                *(slicing.Source(3, s.axis) for s in sources),
            )
    return slicing.axis_rules("CubeMatmul", axis_sources)


def _causal_slices(shapes: tuple[Shape, ...], *, causal: bool) -> slicing.SliceRules:
    """Return rules for grouped heads or `causal`: only batch axes of all tensors are free.

    Heads cannot be split, because they share keys; nor can causal rows, because each sees another
    number of keys.
    """
    out_shape = _flash_shape(*shapes, scale=None, causal=causal)
    axis_sources: list[tuple[slicing.Source, ...] | str] = []
    for axis in range(len(out_shape)):
        sources = tuple(slicing.Source(number, axis) for number in range(len(shapes)))
        all_have_axis = all(len(s) == len(out_shape) and s[axis] == out_shape[axis] for s in shapes)
        is_batch = axis < len(out_shape) - 3
        axis_sources.append(
            sources if is_batch and all_have_axis else "queries share or count keys"
        )
    return slicing.axis_rules("CubeMatmul", axis_sources)


define(
    "attention",
    ("q", "k", "v", "mask"),
    _values,
    _attention,
    "softmax(scale q k^T + mask) v",
    outputs=("context",),
    attrs={"scale": None},
    ranges={"scale": FINITE},
    optional=1,
    shape_rule=_attention_shape,
    types=TYPES,
    slicing=_attention_slices,
    backward=_attention_gradients,
    tolerances=ATTENTION_TOLERANCE,
    examples=(
        Example(((1, 1), (1, 1), (1, 1))),
        Example(((2, 17, 16), (2, 33, 16), (2, 33, 8))),
        Example(((2, 2, 7, 16), (2, 2, 16, 16), (2, 2, 16, 16), (7, 16))),
    ),
)


# -- FlashAttention: a kernel that never stores the scores in device memory ------------------------
# Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-
# Awareness".
def flash_shape(call: Call) -> FlashShape:
    """Return a call in the form that the kernel takes, with all batch axes joined into one.

    A call may have an attribute `views` with the positions of its matrices in larger tensors; in
    this case the number of heads is needed, too.
    """
    q, k, v = call.shapes[:3]
    group_heads = grouped_heads(q, k, v)  # heads whose rows are one matrix, query by query
    mask_kind = ""
    shared_tensors = [n for n, s in zip("qkv", (q, k, v), strict=True) if _is_single_matrix(s)]
    if len(call.shapes) > 3:
        mask = call.shapes[3]
        # (b, 1, 1, t) drops the same keys for each query: "rows"; (s, t) is "full".
        one_row = len(mask) < 2 or mask[-2] == 1
        one_head = group_heads == 1 or len(mask) < 3 or mask[-3] == 1
        mask_kind = "rows" if one_row and one_head else "full"
        shared_tensors += ["mask"] * _is_single_matrix(mask)
    views = call.attrs.get("views", ())
    heads = call.outputs[0][-3] if views and len(call.outputs[0]) > 2 else 1
    return FlashShape(
        math.prod(call.outputs[0][:-2]) // group_heads,
        q[-2] * group_heads,
        k[-2],
        q[-1],
        v[-1],
        _scale(call.attrs["scale"], q[-1]),
        mask_kind,
        tuple(shared_tensors),
        heads,
        views,
        call.dtypes[0],
        group_heads if call.attrs.get("causal") else 0,
    )


def _is_single_matrix(shape: Shape) -> bool:
    """Return whether there is one matrix for the whole batch."""
    return math.prod(shape[:-2]) == 1


def applies(call: Call, chip: Chip) -> bool:
    """Return whether the kernel can run: the smallest blocks fit, and the scale is in range.

    bf16 and `causal` need separate vector cores. Otherwise the expression of `attention` is
    scheduled.
    """
    shape = flash_shape(call)
    if chip.combined:
        if shape.dtype != "fp16" or shape.causal:
            return False
        smallest = FlashTiling(isa.FRACTAL, isa.FRACTAL)
        return SCALES[0] <= shape.scale <= SCALES[1] and fits(shape, smallest, chip)
    return bool(flash_split.split_tilings(shape, chip))


def flash_kernel(shape: FlashShape, chip: Chip, tiling: FlashTiling | None = None) -> isa.Kernel:
    """Return the kernel for combined cores, or the pipeline for separate cube and vector cores.

    `tiling` applies to combined cores only. Raises `CapacityError` if blocks do not fit.
    """
    if chip.combined:
        return isa.as_kernel(flash.flash_launch(shape, chip, tiling))
    tiling_of_wide_heads = (
        None if max(shape.fractals[2:]) <= NARROW_HEAD_FRACTALS else quickest_tiling(shape, chip)
    )
    return isa.as_kernel(flash_split.flash_pipeline_launch(shape, chip, tiling_of_wide_heads))


NARROW_HEAD_FRACTALS = 8
"""Heads of up to 8 x 16 = 128 elements use the tiling of the published kernel."""


@lru_cache(64)
def quickest_tiling(shape: FlashShape, chip: Chip) -> flash_split.SplitTiling:
    """Return the fastest tiling for wide heads, simulated on the same matrices without a mask.

    Blocks with many rows do more multiplications for each loaded element. Blocks with few rows
    leave room for more keys in a tile, so that fewer partial sums go to the vector cores.
    """
    unmasked = replace(shape, heads=1, views=(), causal=0, mask="", shared=())
    best_tiling: flash_split.SplitTiling | None = None
    fewest_cycles = math.inf
    for tiling in flash_split.split_tilings(shape, chip):
        if _key_cycles(unmasked, tiling, chip) >= fewest_cycles:
            continue  # loading k and v alone would take longer than the best kernel
        kernel = isa.as_kernel(flash_split.flash_pipeline_launch(unmasked, chip, tiling))
        cycles = simulate_kernel(kernel, chip, DeviceMemory.of(chip)).cycles
        if cycles < fewest_cycles:
            best_tiling = tiling
            fewest_cycles = cycles
    if best_tiling is None:
        return flash_split.split_tiling(shape, chip)  # raises: none fits
    return best_tiling


def _key_cycles(shape: FlashShape, tiling: flash_split.SplitTiling, chip: Chip) -> float:
    """Return a lower bound: the cycles of loading k and v to L1 once for each block of rows.

    blocks * keys * (depth + width) * 2 bytes / (cores * rate), evenly divided over the cores.
    """
    rows, keys, depth, width = shape.fractals
    # Counted in fractals of 16: 1024 rows are 64, and with 128 rows a block there are 8 blocks.
    blocks = shape.batch * isa.ceil_div(rows, tiling.rows // isa.FRACTAL)
    size_bytes = blocks * keys * (depth + width) * isa.FRACTAL**2 * 2
    return size_bytes / (chip.core_count * chip.path("GM", "L1").rate_bytes_per_cycle)


def _feed(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
    shape = flash_shape(call)
    # with grouped heads, the rows of a group's heads form one taller matrix against one k and v
    group_heads = grouped_heads(*call.shapes[:3])
    batch = call.outputs[0][:-2]
    if group_heads > 1:
        batch = (*batch[:-1], batch[-1] // group_heads)
    q, k, v = arrays[:3]
    matrices = {"q": _by_query(q, group_heads), "k": k, "v": v}
    feed = {
        name: _in_fractals(_as_matrices(x, batch, x.shape[-2:])) for name, x in matrices.items()
    }
    if len(arrays) > 3:
        mask = arrays[3]
        if group_heads > 1:
            mask = _grouped_mask(mask, call, group_heads, one_row=shape.mask == "rows")
        rows = 1 if shape.mask == "rows" else shape.rows
        mask = _as_matrices(mask, batch, (rows, shape.keys))
        feed["mask"] = _padded(mask) if shape.mask == "rows" else _in_fractals(mask)
    return feed


def _by_query(x: Values, heads: int) -> Values:
    """Return (..., h, s, d) as (..., h / heads, s heads, d), the heads of a query side by side."""
    if heads == 1:
        return x
    *lead, count, rows, columns = x.shape
    # 8 heads in groups of 4: the rows are query 0 of heads 0, 1, 2, 3, then query 1 of heads 0 to
    # 3.
    heads_last = x.reshape(*lead, count // heads, heads, rows, columns).swapaxes(-3, -2)
    return heads_last.reshape(*lead, count // heads, rows * heads, columns)


def _by_head(x: Values, heads: int) -> Values:
    """Return the inverse of `_by_query`: (..., h / heads, s * heads, d) as (..., h, s, d)."""
    if heads == 1:
        return x
    *lead, count, rows, columns = x.shape
    # (2, 20, 64) with 4 heads a group: (2, 5, 4, 64), (2, 4, 5, 64), (8, 5, 64).
    heads_first = x.reshape(*lead, count, rows // heads, heads, columns).swapaxes(-3, -2)
    return heads_first.reshape(*lead, count * heads, rows // heads, columns)


def _grouped_mask(mask: Values, call: Call, heads: int, *, one_row: bool) -> Values:
    """Return a mask of grouped heads: one row for all queries, or a row for each row of q."""
    *batch, count, rows, _ = call.outputs[0]
    if one_row:
        return mask
    if _is_single_matrix(mask.shape):
        for_every_head = np.broadcast_to(
            mask.reshape(mask.shape[-2:]), (heads, rows, mask.shape[-1])
        )
        return _by_query(for_every_head, heads)
    return _by_query(np.broadcast_to(mask, (*batch, count, rows, mask.shape[-1])), heads)


def _as_matrices(x: Values, batch: Shape, matrix: Shape) -> Values:
    """Return x as (count, rows, columns): one matrix for the whole batch, or one for each entry."""
    count = 1 if _is_single_matrix(x.shape) else math.prod(batch)
    full_shape = matrix if count == 1 else (*batch, *matrix)
    return np.broadcast_to(x.reshape(x.shape[-2:]) if count == 1 else x, full_shape).reshape(
        (count, *matrix)
    )


def _padded(mask: Values) -> Values:
    """Return the rows of a mask padded with zeros to whole fractals."""
    # 33 keys are padded to 48.
    padded = np.zeros(
        (mask.shape[0], isa.ceil_div(mask.shape[-1], isa.FRACTAL) * isa.FRACTAL), mask.dtype
    )
    padded[:, : mask.shape[-1]] = mask[:, 0]
    return padded


def _in_fractals(x: Values) -> Values:
    return layout.pack(layout.address_map("FRACTAL_NZ", x.shape, formats.format_of(x)), x)


def _fetch(call: Call, memory: Mapping[str, Values]) -> tuple[Values, ...]:
    (out_shape,) = call.outputs
    shape = flash_shape(call)
    matrices = (shape.batch, shape.rows, shape.width)
    fractal_map = layout.address_map("FRACTAL_NZ", matrices, shape.dtype)
    values = layout.unpack(fractal_map, memory["y"].reshape(-1))
    group_heads = grouped_heads(*call.shapes[:3])
    return (_by_head(values, group_heads).reshape(out_shape),)


register(
    replace(
        get("attention"),
        name="flash_attention",
        summary="softmax(scale q k^T + mask) v, block by block: scores stay on the core",
        compute=_flash_expression,
        shape_rule=_flash_shape,
        attrs={"scale": None, "causal": False},
        template=Template(
            lambda call, chip: flash_kernel(flash_shape(call), chip),
            ("q", "k", "v", "mask"),
            applies=applies,
            feed=_feed,
            fetch=_fetch,
        ),
        examples=(
            *get("attention").examples,
            Example(((2, 2, 40, 16), (1, 1, 72, 16), (1, 1, 72, 16), (2, 1, 1, 72))),
            Example(((1, 64, 32), (1, 100, 32), (1, 100, 48)), {"scale": 0.25}),
        ),
    )
)
