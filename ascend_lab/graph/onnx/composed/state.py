"""Layers that carry a state from call to call: causal convolutions and linear attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import part, reshaped_to, table, typed
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import Result, converter
from ascend_lab.graph.onnx.tensors import FLOATS

_MOST_STEPS = 256
_RULES = ("linear", "gated", "delta", "gated_delta")


@converter("CausalConvWithState", types=(FLOATS,), since=27)
def _causal_conv(ctx: Context) -> Sequence[Result]:
    """Convolve each channel with its past; return the outputs and the last k - 1 inputs."""
    x, weight = ctx.input(0), ctx.input(1)
    (n, c, length), k = x.shape, weight.shape[2]
    activation = ctx.attr("activation")
    if activation not in ("none", "silu", "swish") or weight.shape != (c, 1, k):
        ctx.unsupported("kernels (channels, 1, k), silu or none", f"{weight.shape}")
    if k == 1:
        whole = x
    elif ctx.has(3):
        whole = ctx.emit("concat", ctx.input(3), x, axis=2)
    else:
        whole = ctx.emit("pad", x, pads=((0, 0), (0, 0), (k - 1, 0)))
    image = reshaped_to(ctx, whole, (n, c, 1, length + k - 1))
    kernel = reshaped_to(ctx, weight, (c, 1, 1, k))
    bias = (ctx.input(2),) if ctx.has(2) else ()
    out = reshaped_to(ctx, ctx.emit("conv2d", image, kernel, *bias, groups=c), (n, c, length))
    out = out if activation == "none" else ctx.emit("silu", out)
    if k == 1:
        return out, ctx.known(np.zeros((n, c, 0)), ctx.elem(0))
    return out, part(ctx, whole, 2, length, length + k - 1)


@converter("LinearAttention", types=(FLOATS,), since=27)
def _linear_attention(ctx: Context) -> Sequence[Result]:
    """Step by step: the state forgets, learns k v^T and is read by q; in fp32."""
    rule, heads, readers = (ctx.attr(k) for k in ("update_rule", "kv_num_heads", "q_num_heads"))
    n, steps, width = ctx.shape(0)
    if rule not in _RULES or heads < 1 or readers % heads or not 0 < steps <= _MOST_STEPS:
        ctx.unsupported(f"a known rule over 1 to {_MOST_STEPS} steps", f"{rule}, {steps} steps")
    if ("gated" in rule) != ctx.has(4) or ("delta" in rule) != ctx.has(5):
        ctx.unsupported("decay for gated rules, beta for delta rules", rule)
    q, k, v = (_steps(ctx, i, h) for i, h in ((0, readers), (1, heads), (2, heads)))
    scale = ctx.attr("scale") or 1 / math.sqrt(width // readers)
    state = ctx.optional(3, "fp32")
    if state is None:
        zero = table(ctx, 0, "fp32", "zero")
        state = ctx.emit("expand", zero, shape=(n, heads, k.shape[-1], v.shape[-1]))
    gates = {name: _steps(ctx, i, 0) for name, i in (("decay", 4), ("beta", 5)) if ctx.has(i)}
    outs = []
    for step in range(steps):
        key, value = (_row(ctx, x, step) for x in (k, v))
        state = _updated(ctx, state, key, value, {g: _row(ctx, x, step) for g, x in gates.items()})
        query = reshaped_to(ctx, _row(ctx, q, step), (n, heads, readers // heads, k.shape[-1]))
        read = ctx.emit("muls", ctx.emit("batch_matmul", query, state), number=scale)
        outs.append(reshaped_to(ctx, read, (n, 1, readers * v.shape[-1])))
    every = outs[0] if steps == 1 else ctx.emit("concat", *outs, axis=1)
    kind = ctx.elem(3) if ctx.has(3) else ctx.elem(0)
    last = ctx.cast(state, ctx.input(3 if ctx.has(3) else 0).type.dtype)
    return ctx.cast(every, ctx.input(0).type.dtype), typed(ctx, last, kind)


def _steps(ctx: Context, i: int, heads: int) -> Value:
    """Return an input (n, t, heads * d) as (n, t, heads, d) in fp32; of gates d follows."""
    x = ctx.input(i, "fp32")
    n, t, width = x.shape
    own = heads or min(width, ctx.attr("kv_num_heads"))
    if width % own:
        ctx.unsupported(f"a width of {own} heads", str(x.shape))
    return reshaped_to(ctx, x, (n, t, own, width // own))


def _row(ctx: Context, x: Value, step: int) -> Value:
    """Return one step (n, heads, 1, d)."""
    n, _, heads, d = x.shape
    return reshaped_to(ctx, part(ctx, x, 1, step, step + 1), (n, heads, 1, d))


def _updated(ctx: Context, state: Value, k: Value, v: Value, gates: dict[str, Any]) -> Value:
    """Return the state after one step: e^g S + k^T (beta (v - k e^g S)), or + k^T v."""
    if "decay" in gates:
        n, heads, _, d = gates["decay"].shape
        kept = reshaped_to(ctx, ctx.emit("exp", gates["decay"]), (n, heads, d, 1))
        state = ctx.emit("mul", state, kept)
    if "beta" in gates:
        known = ctx.emit("batch_matmul", k, state)
        v = ctx.emit("mul", ctx.emit("sub", v, known), gates["beta"])
    return ctx.emit("add", state, ctx.emit("batch_matmul", k, v, trans_a=True))
