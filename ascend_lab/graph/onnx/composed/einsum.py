"""Einsum: sums of products named by letters, as transposes and batched matrix products.

Operands are taken from the left, two at a time. A letter of both that is still needed is a batch
axis, one that is not is summed in the product; letters of one side are its rows or columns.
"""

from __future__ import annotations

import math

from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.composed.parts import reshaped_to
from ascend_lab.graph.onnx.context import Context
from ascend_lab.graph.onnx.registry import converter
from ascend_lab.graph.onnx.tensors import FLOATS

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
    return reshaped_to(ctx, out, tuple(sizes[name] for name in names)), names


def _matrices(
    ctx: Context, x: Value, names: str, groups: tuple[str, str, str], sizes: dict[str, int]
) -> Value:
    """Return an operand as a batch of matrices, its axes grouped; sizes of 1 stretch."""
    wide = tuple(sizes[name] for name in names)
    x = x if wide == x.shape else ctx.emit("expand", x, shape=wide)
    x = _turned(ctx, x, names, "".join(groups))
    return reshaped_to(ctx, x, tuple(math.prod(sizes[n] for n in group) for group in groups))
