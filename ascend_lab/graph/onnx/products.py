"""Convolutions, matrix products and normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab.graph.draft import Value
from ascend_lab.graph.onnx.converter import Context, Result, converter
from ascend_lab.graph.onnx.tensors import FLOATS, FORMATS, Shape, Values
from ascend_lab.graph.onnx.windows import as_image, as_row, plain, window_of


@converter("Conv", types=(FLOATS,))
def _conv(ctx: Context) -> Value:
    shape, weight = ctx.shape(0), ctx.shape(1)
    window = window_of(ctx, weight[2:], shape[2:])
    given = [as_image(ctx, ctx.input(i)) for i in range(2)]
    if ctx.has(2):
        given.append(ctx.input(2))
    how = {"stride": window.stride, "pad": window.pads, "dilation": window.dilation}
    settings = {key: plain(value) for key, value in how.items()}
    out = ctx.emit("conv2d", *given, groups=ctx.attr("group"), **settings)
    return as_row(ctx, out, len(shape))


@converter("Gemm", types=(FLOATS,), since=6)
def _gemm(ctx: Context) -> Value:
    trans = {"trans_a": bool(ctx.attr("transA")), "trans_b": bool(ctx.attr("transB"))}
    a, b, alpha = ctx.input(0), ctx.input(1), ctx.attr("alpha")
    if ctx.has(2):
        scale = {"alpha": alpha, "beta": ctx.attr("beta")}
        return ctx.emit("gemm", a, b, ctx.input(2), **trans, **scale)
    out = ctx.emit("matmul", a, b, **trans)
    return out if alpha == 1 else ctx.emit("muls", out, number=alpha)


@converter("MatMul", types=((*FLOATS, "int32"),))
def _matmul(ctx: Context) -> Value:
    """Multiply as NumPy does: a vector is a row on the left and a column on the right."""
    a, b = ctx.input(0), ctx.input(1)
    if not a.shape or not b.shape:
        ctx.unsupported("operands of at least 1 axis", f"{a.shape} and {b.shape}")
    left = a if len(a.shape) > 1 else ctx.emit("reshape", a, shape=(1, *a.shape))
    right = b if len(b.shape) > 1 else ctx.emit("reshape", b, shape=(*b.shape, 1))
    ranks = (len(left.shape), len(right.shape))
    out = ctx.emit("matmul" if ranks == (2, 2) else "batch_matmul", left, right)
    shape = list(out.shape)
    if len(b.shape) == 1:
        del shape[-1]
    if len(a.shape) == 1:
        del shape[-1 if len(b.shape) == 1 else -2]
    return out if len(shape) == len(out.shape) else ctx.emit("reshape", out, shape=tuple(shape))


@converter("BatchNormalization", types=(FLOATS,), since=6)
def _batch_norm(ctx: Context) -> Sequence[Result]:
    """Normalise by the statistics given or, in training, by the batch's, averaged with them."""
    if ctx.attr("spatial") == 0:
        ctx.unsupported("one number per channel", "spatial = 0")
    if ctx.opset < 7 and not ctx.attr("is_test"):
        ctx.unsupported("inference in opset 6", "is_test = 0")
    given = (ctx.input(0), *(ctx.input(i, "fp32") for i in range(1, 5)))
    epsilon = ctx.attr("epsilon")
    if not ctx.attr("training_mode"):
        return (ctx.emit("batch_norm", *given, epsilon=epsilon),)
    momentum = ctx.attr("momentum")
    out, *averages = ctx.emit_all("batch_norm_training", *given, epsilon=epsilon, momentum=momentum)
    elem = ctx.elem(3)
    return out, *(ctx.typed(ctx.cast(value, FORMATS[elem]), elem) for value in averages)


@converter("LRN", types=(FLOATS,))
def _lrn(ctx: Context) -> Value:
    """Divide by (bias + alpha mean of x^2 over `size` channels)^beta, zeros beyond the last."""
    x, size = ctx.input(0), ctx.attr("size")
    if len(x.shape) < 2 or not 1 <= size <= 2 * x.shape[1] + 1:
        ctx.unsupported("a size from 1 to about twice the channels", f"{size} on {x.shape}")
    names = ("alpha", "beta", "bias")
    return ctx.emit("lrn", x, size=size, **{name: ctx.attr(name) for name in names})


@converter("Softmax", "LogSoftmax", types=(FLOATS,))
def _softmax(ctx: Context) -> Value:
    """From opset 13 along one axis; before, over all axes from `axis` on as one."""
    op = "softmax" if ctx.op == "Softmax" else "log_softmax"
    x, at = ctx.input(0), ctx.attr("axis")
    if ctx.opset >= 13:
        return ctx.emit(op, x, axis=at)
    if not -len(x.shape) <= at <= len(x.shape):
        ctx.unsupported(f"an axis of {x.shape}", str(at))
    at += len(x.shape) if at < 0 else 0
    if at == len(x.shape) - 1:
        return ctx.emit(op, x, axis=-1)
    flat = ctx.emit("reshape", x, shape=(math.prod(x.shape[:at]), math.prod(x.shape[at:])))
    return ctx.emit("reshape", ctx.emit(op, flat, axis=-1), shape=x.shape)


# Einsum: sums of products named by letters, as transposes and batched matrix products.
#
# Operands are taken from the left, two at a time. A letter of both that is still needed is a
# batch
# axis, one that is not is summed in the product; letters of one side are its rows or columns.


_DOTS = "0123456789"
"""Names of the axes that an ellipsis stands for, counted from the last."""


@converter("Einsum", types=(FLOATS,), since=12)
def _einsum(ctx: Context) -> Value:
    terms, result = _parsed(ctx)
    values = [ctx.input(i) for i in range(len(terms))]
    x, names = values[0], terms[0]
    for i in range(1, len(terms)):
        needed = set(result).union(*terms[i + 1 :])
        x, names = _joined(ctx, (x, names), (values[i], terms[i]), needed)
    x, names = _summed(ctx, x, names, set(result))
    return _turned(ctx, x, names, result)


def _parsed(ctx: Context) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, ellipses written out."""
    equation = str(ctx.attr("equation")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ctx.inputs):
        ctx.unsupported(f"a term for each of {len(ctx.inputs)} inputs", equation)
    full = [_written(ctx, term, len(ctx.shape(i))) for i, term in enumerate(terms)]
    dots = max((sum(c in _DOTS for c in term) for term in full), default=0)
    if arrow:
        result = right.replace("...", _DOTS[:dots][::-1])
    else:
        letters = sorted("".join(full).replace(".", ""))
        once = [c for c in letters if letters.count(c) == 1 and c not in _DOTS]
        result = _DOTS[:dots][::-1] + "".join(once)
    for term in (*full, result):
        if len(set(term)) < len(term):
            ctx.unsupported("each letter once in a term", equation)
    if set(result) - set("".join(full)):
        ctx.unsupported("letters of the operands in the result", equation)
    return full, result


def _written(ctx: Context, term: str, rank: int) -> str:
    hidden = rank - len(term.replace("...", ""))
    if (hidden and "..." not in term) or not 0 <= hidden <= len(_DOTS):
        ctx.unsupported(f"a letter for each of {rank} axes", term)
    return term.replace("...", _DOTS[:hidden][::-1])


def _summed(ctx: Context, x: Value, names: str, needed: set[str]) -> tuple[Value, str]:
    """Sum over the axes nobody needs."""
    axes = tuple(i for i, name in enumerate(names) if name not in needed)
    if not axes:
        return x, names
    kept = "".join(name for name in names if name in needed)
    return ctx.emit("reduce_sum", x, axis=axes), kept


def _turned(ctx: Context, x: Value, names: str, order: str) -> Value:
    """Return x with its axes in the order of letters."""
    perm = tuple(names.index(name) for name in order)
    return x if perm == tuple(range(len(names))) else ctx.emit("transpose", x, perm=perm)


def _joined(
    ctx: Context, left: tuple[Value, str], right: tuple[Value, str], needed: set[str]
) -> tuple[Value, str]:
    """Return the product of two operands, summed over what only they have."""
    x, a = _summed(ctx, *left, needed | set(right[1]))
    y, b = _summed(ctx, *right, needed | set(a))
    sizes: dict[str, int] = {}
    for value, names in ((x, a), (y, b)):
        for name, size in zip(names, value.shape, strict=True):
            if size != 1 and sizes.get(name, 1) not in (1, size):
                ctx.unsupported(f"one size for {name}", f"{sizes[name]} and {size}")
            sizes[name] = max(size, sizes.get(name, 1))
    both = [name for name in a if name in b]
    batch = "".join(name for name in both if name in needed)
    inner = "".join(name for name in both if name not in needed)
    rows = "".join(name for name in a if name not in both)
    columns = "".join(name for name in b if name not in both)
    x = _matrices(ctx, x, a, (batch, rows, inner), sizes)
    y = _matrices(ctx, y, b, (batch, inner, columns), sizes)
    out = ctx.emit("batch_matmul", x, y)
    names = batch + rows + columns
    return ctx.reshape(out, tuple(sizes[name] for name in names)), names


def _matrices(
    ctx: Context, x: Value, names: str, groups: tuple[str, str, str], sizes: dict[str, int]
) -> Value:
    """Return an operand as a batch of matrices, its axes grouped; sizes of 1 stretch."""
    wide = tuple(sizes[name] for name in names)
    x = x if wide == x.shape else ctx.emit("expand", x, shape=wide)
    x = _turned(ctx, x, names, "".join(groups))
    return ctx.reshape(x, tuple(math.prod(sizes[n] for n in group) for group in groups))


# Attention as one ONNX node, and the rotary embedding that turns its queries and keys.
#
# Without a cap, a mask that may drop whole rows, or the scores as an output, a node becomes the
# library's `attention`, which passes can rewrite; else its pieces one by one.


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
        out = ctx.reshape(out, (n, s, h * d))
    return (out, *present) if scores is None else (out, *present, scores)


def _heads(ctx: Context, x: Value, heads: int) -> Value:
    """Return (n, s, heads * d) as (n, heads, s, d)."""
    if len(x.shape) == 4:
        return x
    if len(x.shape) != 3 or heads < 1 or x.shape[2] % heads:
        ctx.unsupported("q_num_heads and kv_num_heads that divide the width", f"{heads}, {x.shape}")
    n, s, width = x.shape
    return ctx.emit("transpose", ctx.reshape(x, (n, s, heads, width // heads)), perm=(0, 2, 1, 3))


def _repeated(ctx: Context, x: Value, times: int) -> Value:
    """Return each head `times` times in a row."""
    n, h, s, d = x.shape
    wide = ctx.emit("expand", ctx.reshape(x, (n, h, 1, s, d)), shape=(n, h, times, s, d))
    return ctx.reshape(wide, (n, h * times, s, d))


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
        zero, drop = ctx.table(0, dtype, "zero"), ctx.table(-math.inf, dtype, "drop")
        mask = ctx.choose(mask, zero, drop)
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
    added = None if bias.known is None else ctx.table(bias.known, dtype, "allowed")
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
        none = ctx.emit("equal", most, ctx.table(-math.inf, dtype, "none"))
        shares = ctx.emit("select", none, ctx.table(0, dtype, "zero"), shares)
    stages.append(shares)
    if not 0 <= mode < len(stages):
        ctx.unsupported("qk_matmul_output_mode 0 to 3", str(mode))
    return ctx.emit("attention_context", shares, v), stages[mode] if wanted else None
