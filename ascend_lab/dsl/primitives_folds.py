"""A primitive for folds of folds: softmax and norms of rows whose parts lie on several cores."""

from dataclasses import replace

from ascend_lab.dsl.schedule import primitive
from ascend_lab.dsl.stages import Stage, State, fresh, identity
from ascend_lab.dsl.tensor import Axis, Call, Expr, Read, apply_index, rewrite
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Affine, var

HEAD = 128
"""Elements of a row whose mean stands in for that of all of them."""
LEAST = {"fp16": -65504.0, "fp32": -3.4028234663852886e38}
"""What stands in for the largest of a part of a row that is -inf throughout."""


@primitive
def unchain(state: State, stage: str, parts: str, first: str, first_parts: str) -> State:
    """Let the parts of a fold begin without the result of the fold `first`, its parts beside them.

    before: `m = max of m_rf[p]`, `s_rf[p] = sum of exp(x - m)`, `s = sum of s_rf[p]`
    after: `s_rf[p] = sum of exp(x - m_rf[p])`, `s = sum of s_rf[p] * exp(m_rf[p] - m)`

    Squares off the mean are taken off c, the mean of each row's first elements, instead:
    `s_rf[p] = sum of (x - c)^2`, `s = sum of s_rf[p] - (c - mean)^2 * n / parts`, at least 0
    """
    own, base, last = state.stage(parts), state.stage(first_parts), state.stage(stage)
    size = (own.shape[-1] - 1) * own.reduce[0].extent + (own.rest or own.reduce[0].extent)
    value = _in_terms(base.expr, base, own)
    result = Read(first, base.dtype, identity(own.axes[:-1]))
    mean, made = result * (1.0 / size), Read(parts, own.dtype, identity(own.axes))
    power, square = Call("vexp", (value - result,), value.dtype), (value - mean) * (value - mean)
    if base.fold == "max" and power in (own.expr, *getattr(own.expr, "args", ())):
        best = Read(first_parts, base.dtype, identity(own.axes))
        near, middle = Call("vmaxs", (best,), base.dtype, LEAST[base.dtype]), result
        total = made * _with(own.expr, value - middle, near - middle)
    elif base.fold == "sum" and own.expr == square:
        state, near, middle = *_head(state, own, value, first), mean
        total = made + (near - mean) * (near - mean) * (-size / own.shape[-1])
        state = _not_negative(state, stage)
    else:
        needed = f"unchain {stage}: a sum of exp(x - max) or (x - mean)^2"
        raise ScheduleError(needed, str(own.expr), "keep the folds one after another")
    own = replace(own, expr=_with(own.expr, value - middle, value - near))
    if not isinstance(value, Read):
        state, base, own = _in_common(state, base, own, value)
    last = replace(last, expr=_in_terms(total, own, last))
    for changed in (replace(base, output=True), own, last):
        state = state.put(changed)
    return state


def _in_terms(expr: Expr, of: Stage, other: Stage) -> Expr:
    """Return what a stage computes with the names of another's axes, in the same order."""
    names = zip((*of.axes, *of.reduce), (*other.axes, *other.reduce), strict=False)
    return apply_index(expr, {mine.name: var(theirs.name) for mine, theirs in names})


def _with(expr: Expr, old: Expr, new: Expr) -> Expr:
    """Return an expression with a part of it replaced."""
    if expr == old or not isinstance(expr, Call):
        return new if expr == old else expr
    return replace(expr, args=tuple(_with(arg, old, new) for arg in expr.args))


def _head(state: State, own: Stage, value: Expr, first: str) -> tuple[State, Expr]:
    """Add the sum of the first elements of each row; return their mean too."""
    name, axes = state.new_name(f"{first}_head"), own.axes[:-1]
    folded = (Axis(own.reduce[0].name, min(HEAD, own.reduce[0].extent), True),)
    expr = apply_index(value, {own.axes[-1].name: Affine()})
    head = Stage(name, own.dtype, axes, expr, "sum", folded, fresh(axes, folded))
    mean = Read(name, own.dtype, identity(axes)) * (1.0 / folded[0].extent)
    return state.insert(head, before=state.stages[0].name), mean


def _not_negative(state: State, name: str) -> State:
    """Let readers of a fold take 0 where it is less."""

    def element(read: Read) -> Expr:
        return Call("vmaxs", (read,), read.dtype, 0.0) if read.source == name else read

    for reader in state.readers(name):
        if isinstance(reader, Stage):
            state = state.put(replace(reader, expr=rewrite(reader.expr, element)))
    return state


def _in_common(state: State, base: Stage, own: Stage, value: Expr) -> tuple[State, Stage, Stage]:
    """Compute what both folds begin with in a stage of its own."""
    axes = (*own.axes, replace(own.reduce[0], reduce=False))
    name = state.new_name(f"{base.name}_of")
    made = Stage(name, value.dtype, axes, value, loops=fresh(axes))
    read = Read(name, value.dtype, identity(axes))
    base = replace(base, expr=_in_terms(read, own, base))
    own = replace(own, expr=_with(own.expr, value, read))
    return state.insert(made, before=base.name), base, own
