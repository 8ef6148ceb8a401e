"""Attention and its parts: scaled scores, masked softmax, weighted sum, and flash attention.

q is (..., s, d), k (..., t, d), v (..., t, e). A mask is added to the scores: 0 keeps a position,
and a large negative number such as -10000 removes it.

`flash_attention` also takes grouped heads, q (b, h, s, d) with k (b, g, t, d) and v (b, g, t, e):
h / g consecutive heads of q share a head of k and v. With `causal`, query i attends to the keys up
to number i + t - s. The queries are thus the last s positions of the sequence, and the last query
attends to every key.
"""

import math
from dataclasses import replace

import numpy as np

from ascend_lab import errors
from ascend_lab.errors import ShapeError
from ascend_lab.operators import dsl as te
from ascend_lab.operators.ops import gradients, reduction, slicing
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
from ascend_lab.operators.ops.operator import Domain, Example, Grads, define, get, register

TYPES = TypeRule(("fp16", "bf16"), unit="cube")
# probabilities are rounded to fp16 before the second product
ATTENTION_TOLERANCE = rounded(ulps=2.0, fp32_ulps=64, atol=2.0**-8)


def scale_of(scale: float | None, width: int) -> float:
    """Return the given scale, by default 1 / sqrt(d)."""
    return 1.0 / math.sqrt(width) if scale is None else float(scale)


def _check_pair(where: str, a: Shape, b: Shape) -> None:
    if len(a) != len(b) or len(a) < 2:
        needed = f"{where} with equal numbers of axes, at least 2"
        raise errors.ShapeError(needed, f"{a} and {b}", "reshape")


def _site_scale(s: gradients.Site) -> float:
    return scale_of(s.attrs["scale"], s.shape()[-1])


# -- scores ---------------------------------------------------------------------------------------
def _scores_shape(q: Shape, k: Shape, *, scale: float | None) -> Shape:
    _check_pair("q (..., s, d) and k (..., t, d)", q, k)
    return product_shape(q, k, False, True)


def _scores(q: te.Tensor, k: te.Tensor, scale: float | None) -> te.Tensor:
    """Return scale q k^T in fp32."""
    return te.vmuls(batched_product(q, k, False, True, "fp32"), scale_of(scale, q.shape[-1]))


def _scores_values(q: Values, k: Values, *, scale: float | None) -> Values:
    # q and k of four ones: the scale is 1 / sqrt(4), so the score is 4 / 2 = 2.
    result: Values = q @ np.swapaxes(k, -1, -2) * scale_of(scale, q.shape[-1])
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
    mask_gradient = None
    if s.needs_gradient[1]:
        mask_gradient = s.net.summed_to(scores_gradient, s.shape(1))
    return scores_gradient, mask_gradient


define(
    "masked_softmax",
    ("scores", "mask"),
    lambda scores, mask: reduction.softmax_values(scores + mask, axis=-1),
    in_fp32(lambda scores, mask: reduction.softmax(te.vadd(*stretch(scores, mask)), axis=-1)),
    "softmax of scores + mask along the last axis",
    shape_rule=_masked_shape,
    slicing=lambda shapes: slicing.elementwise_rules(
        shapes, shapes[0], reduced={len(shapes[0]) - 1: "softmax needs the whole axis"}
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
    probabilities = narrow(reduction.softmax(scores, axis=-1), q.dtype)
    return batched_product(probabilities, v, False, False, None)


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
    if has_mask:
        scores = net.add(scores, s.x(3))
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
            sources_in_mask = (slicing.Source(3, source.axis) for source in sources)
            axis_sources[axis] = (*axis_sources[axis], *sources_in_mask)
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
        is_free = is_batch and all_have_axis
        axis_sources.append(sources if is_free else "queries share or count keys")
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


# -- attention block by block ----------------------------------------------------------------------
register(
    replace(
        get("attention"),
        name="flash_attention",
        summary="softmax(scale q k^T + mask) v, block by block: scores stay on the core",
        compute=_flash_expression,
        shape_rule=_flash_shape,
        attrs={"scale": None, "causal": False},
        examples=(
            *get("attention").examples,
            Example(((2, 2, 40, 16), (1, 1, 72, 16), (1, 1, 72, 16), (2, 1, 1, 72))),
            Example(((1, 64, 32), (1, 100, 32), (1, 100, 48)), {"scale": 0.25}),
        ),
    )
)
