"""Attention as one ONNX node, and the rotary embedding that turns its queries and keys.

Without a cap, a mask that may drop whole rows, or the scores as an output, a node becomes the
library's `attention`, which passes can rewrite; else its pieces one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import chosen, part, reshaped_to, table
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import FLOATS, Shape, Values

_INPUTS = (FLOATS, FLOATS, FLOATS, (*FLOATS, "bool"), FLOATS, FLOATS, ("int64",))


@dataclass(frozen=True, slots=True)
class _Bias:
    """What is added to the scores: a part known now, and a mask that is not."""

    known: Values | None
    mask: Value | None

    @property
    def may_drop_rows(self) -> bool:
        """Tell whether a query may be left without a key."""
        if self.mask is not None:
            return True
        return self.known is not None and bool((self.known.max(axis=-1) == -np.inf).any())


@converter("Attention", types=_INPUTS, since=23)
def _attention(ctx: Context) -> Sequence[Value]:
    """Attend; softmax is at least as precise as any `softmax_precision` asks."""
    queries, keys = (ctx.attr(f"{kind}_num_heads") or 0 for kind in ("q", "kv"))
    heads = (queries, keys, keys)
    q, k, v = (_heads(ctx, ctx.input(i), heads[i]) for i in range(3))
    flat, past = len(ctx.shape(0)) == 3, 0
    if ctx.has(4) != ctx.has(5):
        ctx.unsupported("past_key and past_value", "one of them")
    if ctx.has(4):
        past = ctx.shape(4)[2]
        k, v = (ctx.emit("concat", ctx.input(i), x, axis=2) for i, x in ((4, k), (5, v)))
    present = [k, v]
    if q.shape[1] != k.shape[1]:
        if q.shape[1] % k.shape[1]:
            ctx.unsupported(f"query heads in groups of {k.shape[1]}", str(q.shape[1]))
        k, v = (_repeated(ctx, x, q.shape[1] // k.shape[1]) for x in (k, v))
    bias = _bias(ctx, q.shape, k.shape[2], past)
    out, scores = _attended(ctx, q, k, v, bias)
    if flat:
        n, h, s, d = out.shape
        out = ctx.emit("transpose", out, perm=(0, 2, 1, 3))
        out = reshaped_to(ctx, out, (n, s, h * d))
    return (out, *present) if scores is None else (out, *present, scores)


def _heads(ctx: Context, x: Value, heads: int) -> Value:
    """Return (n, s, heads * d) as (n, heads, s, d)."""
    if len(x.shape) == 4:
        return x
    if len(x.shape) != 3 or heads < 1 or x.shape[2] % heads:
        ctx.unsupported("q_num_heads and kv_num_heads that divide the width", f"{heads}, {x.shape}")
    n, s, width = x.shape
    return ctx.emit(
        "transpose", reshaped_to(ctx, x, (n, s, heads, width // heads)), perm=(0, 2, 1, 3)
    )


def _repeated(ctx: Context, x: Value, times: int) -> Value:
    """Return each head `times` times in a row."""
    n, h, s, d = x.shape
    wide = ctx.emit("expand", reshaped_to(ctx, x, (n, h, 1, s, d)), shape=(n, h, times, s, d))
    return reshaped_to(ctx, wide, (n, h * times, s, d))


def _allowed(ctx: Context, q: Shape, keys: int, past: int) -> Values | None:
    """Return which keys each query may see, (n or 1, 1, s, keys); None if all."""
    lengths = np.array(ctx.ints(6)) if ctx.has(6) else None
    if lengths is not None and (past or lengths.shape != (q[0],)):
        ctx.unsupported("one length for each of the batch, no past", str(lengths.shape))
    offset = past if lengths is None else (lengths - q[2]).reshape(-1, 1, 1, 1)
    at, key = np.arange(q[2]).reshape(-1, 1) + offset, np.arange(keys)
    seen = np.ones(np.broadcast_shapes(at.shape, key.shape), bool)
    left, right = (ctx.attr(f"{side}_window_size") for side in ("left", "right"))
    if ctx.attr("is_causal"):
        seen &= key <= at
    if left is not None and left >= 0:
        seen &= key >= at - left
    if right is not None and right >= 0:
        seen &= key <= at + right
    if lengths is not None:
        seen &= key < lengths.reshape(-1, 1, 1, 1)
    return None if seen.all() else seen


def _bias(ctx: Context, q: Shape, keys: int, past: int) -> _Bias:
    seen = _allowed(ctx, q, keys, past)
    known = None if seen is None else np.where(seen, 0.0, -np.inf)
    if not ctx.has(3):
        return _Bias(known, None)
    mask, dtype = ctx.input(3), ctx.input(0).type.dtype
    if not mask.shape or mask.shape[-1] > keys:
        ctx.unsupported(f"a mask over at most {keys} keys", str(mask.shape))
    if ctx.elem(3) == "bool":
        zero, drop = table(ctx, 0, dtype, "zero"), table(ctx, -math.inf, dtype, "drop")
        mask = chosen(ctx, mask, zero, drop)
    if mask.shape[-1] < keys:
        pads = (*((0, 0) for _ in mask.shape[:-1]), (0, keys - mask.shape[-1]))
        mask = ctx.emit("pad", mask, pads=pads, value=-math.inf)
    return _Bias(known, mask)


def _attended(
    ctx: Context, q: Value, k: Value, v: Value, bias: _Bias
) -> tuple[Value, Value | None]:
    """Return the context, and the scores if they are an output."""
    dtype, cap, scale = q.type.dtype, ctx.attr("softcap"), ctx.attr("scale")
    wanted = ctx.out_count > 3
    mode = ctx.attr("qk_matmul_output_mode")
    added = None if bias.known is None else table(ctx, bias.known, dtype, "allowed")
    if not (cap or wanted or bias.may_drop_rows):
        given = (q, k, v) if added is None else (q, k, v, added)
        return ctx.emit("attention", *given, scale=scale), None
    stages = [ctx.emit("attention_scores", q, k, scale=scale)]
    capped = stages[0]
    if cap:
        shrunk = ctx.emit("tanh", ctx.emit("muls", capped, number=1.0 / cap))
        capped = ctx.emit("muls", shrunk, number=cap)
    stages.append(capped)
    if bias.mask is not None:
        added = bias.mask if added is None else ctx.emit("add", added, bias.mask)
    biased = capped if added is None else ctx.emit("add", capped, added)
    stages.append(biased)
    shares = ctx.emit("softmax", biased, axis=-1)
    if added is not None and bias.may_drop_rows:
        most = ctx.emit("reduce_max", added, axis=-1, keepdims=True)
        none = ctx.emit("equal", most, table(ctx, -math.inf, dtype, "none"))
        shares = ctx.emit("select", none, table(ctx, 0, dtype, "zero"), shares)
    stages.append(shares)
    if not 0 <= mode < len(stages):
        ctx.unsupported("qk_matmul_output_mode 0 to 3", str(mode))
    return ctx.emit("attention_context", shares, v), stages[mode] if wanted else None


@converter("RotaryEmbedding", types=(FLOATS, FLOATS, FLOATS, ("int64",)), since=23)
def _rotary(ctx: Context) -> Value:
    """Turn pairs (a, b) by the position's angle: (a cos - b sin, a sin + b cos)."""
    x, shape = _heads(ctx, ctx.input(0), ctx.attr("num_heads") or 0), ctx.shape(0)
    n, h, s, d = x.shape
    turned = ctx.attr("rotary_embedding_dim") or d
    if turned % 2 or turned > d:
        ctx.unsupported(f"an even rotary_embedding_dim up to {d}", str(turned))
    cos, sin = (_angles(ctx, i, (n, s, turned // 2)) for i in (1, 2))
    front = part(ctx, x, -1, 0, turned)
    if ctx.attr("interleaved"):
        pairs = reshaped_to(ctx, front, (n, h, s, turned // 2, 2))
        a, b = (
            reshaped_to(ctx, part(ctx, pairs, -1, i, i + 1), (n, h, s, turned // 2)) for i in (0, 1)
        )
    else:
        a, b = part(ctx, front, -1, 0, turned // 2), part(ctx, front, -1, turned // 2, turned)
    real = ctx.emit("sub", ctx.emit("mul", a, cos), ctx.emit("mul", b, sin))
    imaginary = ctx.emit("add", ctx.emit("mul", a, sin), ctx.emit("mul", b, cos))
    if ctx.attr("interleaved"):
        parts = [reshaped_to(ctx, p, (n, h, s, turned // 2, 1)) for p in (real, imaginary)]
        out = reshaped_to(ctx, ctx.emit("concat", *parts, axis=-1), (n, h, s, turned))
    else:
        out = ctx.emit("concat", real, imaginary, axis=-1)
    if turned < d:
        out = ctx.emit("concat", out, part(ctx, x, -1, turned, d), axis=-1)
    if len(shape) == 3:
        out = reshaped_to(ctx, ctx.emit("transpose", out, perm=(0, 2, 1, 3)), shape)
    return out


def _angles(ctx: Context, i: int, wanted: Shape) -> Value:
    """Return the cosines or sines (n, 1, s, half): rows of a cache, or given for each step."""
    given = ctx.input(i)
    if ctx.has(3):
        given = ctx.emit("gather", given, ctx.input(3, "int32"), axis=0)
    if given.shape != wanted:
        ctx.unsupported(f"cosines and sines {wanted}", str(given.shape))
    n, s, half = wanted
    return reshaped_to(ctx, given, (n, 1, s, half))
