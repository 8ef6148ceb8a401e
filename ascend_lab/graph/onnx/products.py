"""Matrix products, sums of products named by letters, and attention."""

import math
from collections.abc import Sequence

import numpy as np

from ascend_lab.graph.draft import Value
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.converter import converter
from ascend_lab.graph.onnx.tensors import FLOATS, Shape, Values


@converter("Gemm", types=(FLOATS,), since=6)
def _gemm(ctx: Context) -> Value:
    trans = {"trans_a": bool(ctx.attr("transA")), "trans_b": bool(ctx.attr("transB"))}
    a, b, alpha = ctx.input(0), ctx.input(1), ctx.attr("alpha")
    if ctx.has(2):
        return ctx.emit("gemm", a, b, ctx.input(2), **trans, alpha=alpha, beta=ctx.attr("beta"))
    out = ctx.emit("matmul", a, b, **trans)
    return out if alpha == 1 else ctx.emit("muls", out, number=alpha)


@converter("MatMul", types=((*FLOATS, "int32"),))
def _matmul(ctx: Context) -> Value:
    """Multiply as NumPy does: a vector is a row on the left and a column on the right."""
    a, b = ctx.input(0), ctx.input(1)
    if not a.shape or not b.shape:
        ctx.unsupported("operands of at least 1 axis", f"{a.shape} and {b.shape}")
    left = a if len(a.shape) > 1 else ctx.reshape(a, (1, *a.shape))
    right = b if len(b.shape) > 1 else ctx.reshape(b, (*b.shape, 1))
    flat = len(left.shape) == len(right.shape) == 2
    out = ctx.emit("matmul" if flat else "batch_matmul", left, right)
    rows = out.shape[-2:-1] if len(a.shape) > 1 else ()
    columns = out.shape[-1:] if len(b.shape) > 1 else ()
    return ctx.reshape(out, (*out.shape[:-2], *rows, *columns))


# -- Einsum ---------------------------------------------------------------------------------------
# Operands are taken from the left, two at a time. A letter of both that is still needed is a batch
# axis, one that is not is summed in the product; letters of one side are its rows or columns.
Named = tuple[Value, str]
"""A tensor and a letter for each of its axes."""
_DOTS = "0123456789"
"""Names of the axes that an ellipsis stands for, counted from the last."""


@converter("Einsum", types=(FLOATS,), since=12)
def _einsum(ctx: Context) -> Value:
    terms, result = _parsed(ctx)
    x: Named = (ctx.input(0), terms[0])
    for i in range(1, len(terms)):
        x = _joined(ctx, x, (ctx.input(i), terms[i]), set(result).union(*terms[i + 1 :]))
    value, names = _summed(ctx, *x, set(result))
    return ctx.transpose(value, [names.index(name) for name in result])


def _parsed(ctx: Context) -> tuple[list[str], str]:
    """Return the letters of each operand and of the result, ellipses written out."""
    equation = str(ctx.attr("equation")).replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ctx.inputs):
        ctx.unsupported(f"a term for each of {len(ctx.inputs)} inputs", equation)
    full = [_written(ctx, term, len(ctx.shape(i))) for i, term in enumerate(terms)]
    dots = _DOTS[: max(sum(c in _DOTS for c in term) for term in full)][::-1]
    if arrow:
        result = result.replace("...", dots)
    else:
        letters = sorted("".join(full))
        result = dots + "".join(c for c in letters if letters.count(c) == 1 and c not in _DOTS)
    if any(len(set(term)) < len(term) for term in (*full, result)):
        ctx.unsupported("each letter once in a term", equation)
    if set(result) - set("".join(full)):
        ctx.unsupported("letters of the operands in the result", equation)
    return full, result


def _written(ctx: Context, term: str, rank: int) -> str:
    hidden = rank - len(term.replace("...", ""))
    if (hidden and "..." not in term) or not 0 <= hidden <= len(_DOTS):
        ctx.unsupported(f"a letter for each of {rank} axes", term)
    return term.replace("...", _DOTS[:hidden][::-1])


def _summed(ctx: Context, x: Value, names: str, needed: set[str]) -> Named:
    """Sum over the axes nobody needs."""
    axes = tuple(i for i, name in enumerate(names) if name not in needed)
    kept = "".join(name for name in names if name in needed)
    return (ctx.emit("reduce_sum", x, axis=axes), kept) if axes else (x, names)


def _joined(ctx: Context, left: Named, right: Named, needed: set[str]) -> Named:
    """Return the product of two operands, summed over what only they have."""
    x, a = _summed(ctx, *left, needed | set(right[1]))
    y, b = _summed(ctx, *right, needed | set(a))
    sizes: dict[str, int] = {}
    for name, size in (*zip(a, x.shape, strict=True), *zip(b, y.shape, strict=True)):
        if size != 1 and sizes.get(name, 1) not in (1, size):
            ctx.unsupported(f"one size for {name}", f"{sizes[name]} and {size}")
        sizes[name] = max(size, sizes.get(name, 1))
    batch = "".join(name for name in a if name in b and name in needed)
    inner = "".join(name for name in a if name in b and name not in needed)
    rows, columns = ("".join(n for n in one if n not in two) for one, two in ((a, b), (b, a)))

    def matrices(x: Value, names: str, *groups: str) -> Value:
        """Return an operand as a batch of matrices, its axes grouped; sizes of 1 stretch."""
        wide = tuple(sizes[name] for name in names)
        x = x if wide == x.shape else ctx.emit("expand", x, shape=wide)
        x = ctx.transpose(x, [names.index(name) for name in "".join(groups)])
        return ctx.reshape(x, tuple(math.prod(sizes[n] for n in group) for group in groups))

    sides = matrices(x, a, batch, rows, inner), matrices(y, b, batch, inner, columns)
    names = batch + rows + columns
    return ctx.reshape(ctx.emit("batch_matmul", *sides), tuple(sizes[n] for n in names)), names


# -- Attention ------------------------------------------------------------------------------------
# Without a cap, a mask that may drop whole rows, or the scores as an output, a node becomes the
# library's `attention`, which passes can rewrite; else its pieces one by one.
_INPUTS = (FLOATS, FLOATS, FLOATS, (*FLOATS, "bool"), FLOATS, FLOATS, ("int64",))


@converter("Attention", types=_INPUTS, since=23)
def _attention(ctx: Context) -> Sequence[Value]:
    """Attend; softmax is at least as precise as any `softmax_precision` asks."""
    queries, keys = (ctx.attr(f"{kind}_num_heads") or 0 for kind in ("q", "kv"))
    q, k, v = (_heads(ctx, ctx.input(i), n) for i, n in enumerate((queries, keys, keys)))
    if ctx.has(4) != ctx.has(5):
        ctx.unsupported("past_key and past_value", "one of them")
    if ctx.has(4):
        k, v = (ctx.emit("concat", ctx.input(i), x, axis=2) for i, x in ((4, k), (5, v)))
    present = [k, v]
    if q.shape[1] != k.shape[1]:
        if q.shape[1] % k.shape[1]:
            ctx.unsupported(f"query heads in groups of {k.shape[1]}", str(q.shape[1]))
        k, v = (_repeated(ctx, x, q.shape[1] // k.shape[1]) for x in (k, v))
    known = _known_bias(ctx, q.shape, k.shape[2], ctx.shape(4)[2] if ctx.has(4) else 0)
    mask = _mask(ctx, k.shape[2], q.type.dtype) if ctx.has(3) else None
    out, scores = _attended(ctx, (q, k, v), known, mask)
    if len(ctx.shape(0)) == 3:
        n, h, s, d = out.shape
        out = ctx.reshape(ctx.transpose(out, (0, 2, 1, 3)), (n, s, h * d))
    return (out, *present) if scores is None else (out, *present, scores)


def _heads(ctx: Context, x: Value, heads: int) -> Value:
    """Return (n, s, heads * d) as (n, heads, s, d)."""
    if len(x.shape) == 4:
        return x
    if len(x.shape) != 3 or heads < 1 or x.shape[2] % heads:
        ctx.unsupported("q_num_heads and kv_num_heads that divide the width", f"{heads}, {x.shape}")
    n, s, width = x.shape
    return ctx.transpose(ctx.reshape(x, (n, s, heads, width // heads)), (0, 2, 1, 3))


def _repeated(ctx: Context, x: Value, times: int) -> Value:
    """Return each head `times` times in a row."""
    n, h, s, d = x.shape
    wide = ctx.emit("expand", ctx.reshape(x, (n, h, 1, s, d)), shape=(n, h, times, s, d))
    return ctx.reshape(wide, (n, h * times, s, d))


def _known_bias(ctx: Context, q: Shape, keys: int, past: int) -> Values | None:
    """Return 0 for the keys a query may see, -inf for others (n or 1, 1, s, keys); None if all."""
    lengths = np.array(ctx.ints(6)) if ctx.has(6) else None
    if lengths is not None and (past or lengths.shape != (q[0],)):
        ctx.unsupported("one length for each of the batch, no past", str(lengths.shape))
    offset = past if lengths is None else (lengths - q[2]).reshape(-1, 1, 1, 1)
    at, key = np.arange(q[2]).reshape(-1, 1) + offset, np.arange(keys)
    left, right = (ctx.attr(f"{side}_window_size") for side in ("left", "right"))
    seen = np.ones(np.broadcast_shapes(at.shape, key.shape), bool)
    if ctx.attr("is_causal"):
        seen &= key <= at
    if left is not None and left >= 0:
        seen &= key >= at - left
    if right is not None and right >= 0:
        seen &= key <= at + right
    if lengths is not None:
        seen &= key < lengths.reshape(-1, 1, 1, 1)
    return None if seen.all() else np.where(seen, 0.0, -np.inf)


def _mask(ctx: Context, keys: int, dtype: str) -> Value:
    """Return what the mask adds to the scores; it may be shorter than the keys."""
    mask = ctx.input(3)
    if not mask.shape or mask.shape[-1] > keys:
        ctx.unsupported(f"a mask over at most {keys} keys", str(mask.shape))
    if ctx.elem(3) == "bool":
        zero, drop = ctx.table(0, dtype, "zero"), ctx.table(-math.inf, dtype, "drop")
        mask = ctx.choose(mask, zero, drop)
    if mask.shape[-1] < keys:
        pads = (*((0, 0) for _ in mask.shape[:-1]), (0, keys - mask.shape[-1]))
        mask = ctx.emit("pad", mask, pads=pads, value=-math.inf)
    return mask


def _attended(
    ctx: Context, qkv: tuple[Value, Value, Value], known: Values | None, mask: Value | None
) -> tuple[Value, Value | None]:
    """Return the context, and the scores if they are an output."""
    (q, k, v), dtype = qkv, qkv[0].type.dtype
    cap, scale, mode = (ctx.attr(n) for n in ("softcap", "scale", "qk_matmul_output_mode"))
    wanted = ctx.out_count > 3
    may_drop = mask is not None or (known is not None and bool((known.max(-1) == -np.inf).any()))
    added = None if known is None else ctx.table(known, dtype, "allowed")
    if not (cap or wanted or may_drop):
        return ctx.emit("attention", *qkv, *((added,) if added else ()), scale=scale), None
    stages = [ctx.emit("attention_scores", q, k, scale=scale)]
    capped = stages[0]
    if cap:
        shrunk = ctx.emit("tanh", ctx.emit("muls", capped, number=1.0 / cap))
        capped = ctx.emit("muls", shrunk, number=cap)
    if mask is not None:
        added = mask if added is None else ctx.emit("add", added, mask)
    biased = capped if added is None else ctx.emit("add", capped, added)
    shares = ctx.emit("softmax", biased, axis=-1)
    if added is not None and may_drop:
        most = ctx.emit("reduce_max", added, axis=-1, keepdims=True)
        none = ctx.emit("equal", most, ctx.table(-math.inf, dtype, "none"))
        shares = ctx.emit("select", none, ctx.table(0, dtype, "zero"), shares)
    stages += [capped, biased, shares]
    if not 0 <= mode < len(stages):
        ctx.unsupported("qk_matmul_output_mode 0 to 3", str(mode))
    return ctx.emit("attention_context", shares, v), stages[mode] if wanted else None
