"""A primitive for folds of folds: softmax and norms of rows whose parts lie on several cores."""

from dataclasses import replace

from ascend_lab.dsl.schedule import primitive
from ascend_lab.dsl.stages import Stage, State, fresh, identity
from ascend_lab.dsl.tensor import Axis, Call, Expr, Read, apply_index
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import Affine, var

HEAD = 128
"""Elements of a row whose mean stands in for that of all: (c - mean)^2 <= variance * n / HEAD."""
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
    value, place, part = _in_terms(base.expr, base, own), identity(own.axes), own.reduce[0].extent
    wanted = f"unchain {stage}: a sum of exp(x - max) or, in fp32, (x - mean)^2"
    wrong = ScheduleError(wanted, str(own.expr), "keep the folds one after another")
    if value.dtype not in LEAST or own.fold != "sum" or len(own.reduce) > 1:
        raise wrong
    size = (own.shape[-1] - 1) * part + (own.rest or part)
    middle, made = Read(first, base.dtype, place[:-1]), Read(parts, own.dtype, place)
    mean, power = middle * (1.0 / size), Call("vexp", (value - middle,), value.dtype)
    if base.fold == "max" and own.expr in (power, Call("vconv", (power,), own.dtype, None, "rint")):
        best = Read(first_parts, base.dtype, place)
        near = Call("vmaxs", (best,), base.dtype, LEAST[base.dtype])
        old, total = value - middle, made * _with(own.expr, value - middle, near - middle)
    elif (base.fold, own.dtype, own.expr) == ("sum", "fp32", (value - mean) * (value - mean)):
        state, near = _head(state, own, value, first)
        old, total = value - mean, made + (near - mean) * (near - mean) * (-size / own.shape[-1])
        for reader in map(state.stage, [r.name for r in state.readers(stage)]):
            for read in {r for r in reader.reads if r.source == stage}:
                least = _with(reader.expr, read, Call("vmaxs", (read,), read.dtype, 0.0))
                state = state.put(replace(reader, expr=least))
    else:
        raise wrong
    own = replace(own, expr=_with(own.expr, old, value - near))
    if not isinstance(value, Read):  # what both begin with becomes a stage of its own
        axes, name = (
            (*own.axes, Axis(own.reduce[0].name, part)),
            state.new_name(f"{first_parts}_of"),
        )
        state = state.insert(Stage(name, value.dtype, axes, value, loops=fresh(axes)), first_parts)
        read = Read(name, value.dtype, identity(axes))
        base = replace(base, expr=_in_terms(read, own, base))
        own = replace(own, expr=_with(own.expr, value, read))
    state = state.put(replace(last, expr=_in_terms(total, own, last)))
    return state.put(own).put(replace(base, output=True))


def _in_terms(expr: Expr, of: Stage, other: Stage) -> Expr:
    """Return what a stage computes with the names of another's axes, in the same order."""
    names = zip((*of.axes, *of.reduce), (*other.axes, *other.reduce), strict=False)
    return apply_index(expr, {mine.name: var(theirs.name) for mine, theirs in names})


def _with(expr: Expr, old: Expr, new: Expr) -> Expr:
    """Return an expression with a part of it replaced."""
    if expr == old or not isinstance(expr, Call):
        return new if expr == old else expr
    return replace(expr, args=tuple(_with(arg, old, new) for arg in expr.args))


def _head(state: State, own: Stage, value: Expr, first: str) -> tuple[State, Call]:
    """Add the sum of the first elements of each row; return their mean too."""
    name, axes = state.new_name(f"{first}_head"), own.axes[:-1]
    folded = (Axis(own.reduce[0].name, min(HEAD, own.reduce[0].extent), True),)
    expr = apply_index(value, {own.axes[-1].name: Affine()})
    head = Stage(name, own.dtype, axes, expr, "sum", folded, fresh(axes, folded))
    mean = Read(name, own.dtype, identity(axes)) * (1.0 / folded[0].extent)
    return state.insert(head, before=state.stages[0].name), mean
