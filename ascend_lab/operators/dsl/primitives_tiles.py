"""Schedule primitives that decide where values are computed and kept: cache_read, inline, ...

Each is a function from a state (all stages with their loops) to a new state. For example,
`cache_read(state, "x", "UB")` lets the readers of x read a tile of it in the buffer UB. `unchain`
lets the parts of a fold (a reduction) begin before an earlier fold has finished.
"""

from dataclasses import replace
from typing import NamedTuple

from ascend_lab.errors import ScheduleError
from ascend_lab.machine.isa import Affine, c0_of, var
from ascend_lab.operators.dsl import primitives_loops, schedule
from ascend_lab.operators.dsl.stages import (
    Fixed,
    Stage,
    State,
    copied_element,
    copy_of,
    fits_in,
    identity,
    loops_of_axes,
    redirect,
)
from ascend_lab.operators.dsl.tensor import (
    Axis,
    Call,
    Expr,
    Read,
    apply_index,
    leaves,
    rewrite,
    swap,
)

ROW_BLOCK = 16
"""A number of elements that is whole 32-byte blocks in every float format: 1 in fp16, 2 in fp32."""
ON_CHIP = ("UB", "L1", "L0A", "L0B", "L0C")


@schedule.primitive
def cache_read(state: State, tensor: str, scope: str, *readers: str) -> State:
    """Read a tensor through a tile in an on-chip buffer.

    before: `y[i] = f(x[i])`   after: `x_ub[i] = x[i]`, `y[i] = f(x_ub[i])`
    """
    _check_scope(scope)
    entry = state.find(tensor)
    # Data paths of the chip: GM to L1 or UB, L1 to L0A and L0B, L0C to UB.
    origins = {"L0A": ("L1",), "L0B": ("L1",), "UB": ("GM", "L0C")}.get(scope, ("GM",))
    source_scope = entry.scope
    if source_scope not in origins or (source_scope == "GM" and entry.attach):
        needed = f"cache_read {tensor} into {scope}: a tensor in {' or '.join(origins)}"
        got = f"one in {source_scope}"
        if source_scope == "GM":
            got = "one computed inside another nest"
        raise ScheduleError(needed, got, "cache what it is made from")
    chosen = [r for r in state.readers(tensor) if not readers or r.name in readers]
    stages = [r for r in chosen if isinstance(r, Stage)]
    if not chosen or len(stages) < len(chosen):
        needed = f"cache_read {tensor}: stages with loops that read it"
        got = ", ".join(r.name for r in chosen) or "none"
        raise ScheduleError(needed, got, "name its readers")
    name = state.new_name(f"{tensor}_{scope.lower()}")
    # for i: y[i] = f(x[i])   becomes   for i: x_ub[i] = x[i]   for i: y[i] = f(x_ub[i]), to be
    # joined by compute_at.
    for reader in stages:
        state = state.put(redirect(reader, tensor, name))
    return state.insert(replace(copy_of(name, entry), scope=scope), before=stages[0].name)


def _check_scope(scope: str) -> None:
    if scope not in ON_CHIP:
        raise ScheduleError(f"a buffer: {', '.join(ON_CHIP)}", repr(scope), "choose one")


@schedule.primitive
def cache_write(state: State, stage: str, scope: str) -> State:
    """Compute into a tile in an on-chip buffer and copy it out.

    before: `y[i] = f(x[i])`   after: `y_ub[i] = f(x[i])`, `y[i] = y_ub[i]`
    """
    _check_scope(scope)
    s = state.stage(stage)
    primitives_loops.check_no_guests(state, stage, "cache_write")
    if s.loops != loops_of_axes(s.axes, s.reduce) or s.attach or s.bound or s.vector_at:
        needed = f"cache_write {stage}: a stage not yet scheduled"
        raise ScheduleError(needed, "it has splits", "call it first")
    name = state.new_name(f"{stage}_{scope.lower()}")
    # Sums of fp16 products are fp32 in L0C; the copy out converts them.
    dtype = s.expr.dtype if s.is_cube and scope == "L0C" else s.dtype
    local = replace(s, name=name, dtype=dtype, scope=scope, output=False)
    read = Read(name, dtype, identity(s.axes))
    copied = Call("vcopy" if dtype == s.dtype else "vconv", (read,), s.dtype)
    if s.relu and scope == "L0C":
        copied = Call("vrelu", (copied,), s.dtype)
    copy = replace(s, expr=copied, fold="", reduce=(), loops=loops_of_axes(s.axes))
    return state.put(copy).insert(local, before=stage)


@schedule.primitive
def materialise(state: State, stage: str, number: int = 0) -> State:
    """Copy an operand of a stage into the order in which the stage reads it, in GM.

    before: `y[i, j] = f(x[j, i])`   after: `x_as_y[i, j] = x[j, i]`, `y[i, j] = f(x_as_y[i, j])`
    """
    s = state.stage(stage)
    if s.loops != loops_of_axes(s.axes, s.reduce) or s.attach or s.scope != "GM" or s.is_cube:
        needed = f"materialise {stage}: a stage not yet scheduled"
        raise ScheduleError(needed, "it has splits", "call it first")
    if not 0 <= number < len(s.reads):
        needed = f"materialise {stage}: a read from 0 to {len(s.reads) - 1}"
        raise ScheduleError(needed, str(number), "count them")
    read = s.reads[number]
    entry = state.find(read.source)
    if entry.scope != "GM" or entry.attach:
        got = f"the tile {read.source}"
        raise ScheduleError(f"materialise {stage}: a tensor in GM", got, "do this step earlier")
    # for i: for j: y[i, j] = f(x[j, i])   becomes for i: for j: x_as_y[i, j] = x[j, i]   and then
    # for i: for j: y[i, j] = f(x_as_y[i, j]).
    axes = tuple(Axis(a.name, a.extent) for a in (*s.axes, *s.reduce))
    name = state.new_name(f"{read.source}_as_{stage}")
    copy = Stage(
        name, read.dtype, axes, Call("vcopy", (read,), read.dtype), loops=loops_of_axes(axes)
    )
    through_copy = Read(name, read.dtype, identity(axes))
    return state.put(replace(s, expr=swap(s.expr, read, through_copy))).insert(copy, before=stage)


@schedule.primitive
def compute_at(state: State, stage: str, consumer: str, axis: str) -> State:
    """Compute a stage inside a loop of its consumer, each time only the tile that the step needs.

    before: `for i: t[i] = ...` then `for i_o: for i_i: y[i] = t[i]`
    after: `for i_o: (for i_i: t[i_i] = ...; for i_i: y[i] = t[i_i])`
    """
    s = state.stage(stage)
    host = state.stage(consumer)
    host.loop(axis)
    inside = [r.name for r in state.readers(stage) if _is_inside(state, r, consumer)]
    outside = [r.name for r in state.readers(stage) if r.name not in inside]
    if s.name == host.name or not (s.output or inside):
        needed = f"compute_at: a stage that {consumer} needs"
        raise ScheduleError(needed, stage, "attach it to its reader")
    if _is_attached_in(state, host, stage):
        needed = f"compute_at: a nest that is not inside {stage} itself"
        raise ScheduleError(needed, f"{consumer}, computed in {stage}", "keep one of them apart")
    if _depends_on(state, consumer, stage):
        needed = f"compute_at: a consumer of {stage}"
        raise ScheduleError(needed, f"{consumer}, which {stage} needs", "swap them")
    if outside and not s.output:
        needed = f"compute_at: all readers of {stage} inside {consumer}"
        raise ScheduleError(needed, f"{', '.join(outside)} outside", "attach or inline them first")
    if s.output and not (fits_in(s, host) and host.scope == "GM"):
        needed = f"compute_at: an output in the nest of another one of shape {s.shape}"
        got = f"{consumer} of shape {host.shape} in {host.scope}"
        raise ScheduleError(needed, got, "keep them apart")
    # Inside a fold loop an output would be written once for every step of the fold.
    if s.output and host.loop(axis).reduce:
        needed = f"compute_at: an output at a data loop of {consumer}"
        raise ScheduleError(needed, f"the fold loop {axis}", "choose a loop outside it")
    if s.bound:
        raise ScheduleError(f"compute_at: {stage} not bound to cores", str(s.bound), "bind later")
    # for i in 4096: t[i] = a[i] + b[i], for i_o in 8: for i_i in 512: y[i] = exp(t[i]), with
    # compute_at(t, y, i_o): for i_o in 8: (for i_i in 512: t[i_i] = ..., for i_i in 512: y[i] =
    # exp(t[i_i])). t then needs 512 elements of UB and no GM at all.
    scope = "UB" if s.scope == "GM" and not s.output else s.scope
    changed = state.put(replace(s, attach=(consumer, axis), scope=scope))
    primitives_loops.check_nest(changed, host)
    return changed


def _is_attached_in(state: State, stage: Stage, host: str) -> bool:
    """True if a stage is computed inside the nest of `host`, or of one inside it."""
    while stage.attach is not None:
        if stage.attach[0] == host:
            return True
        stage = state.stage(stage.attach[0])
    return False


def _depends_on(state: State, source: str, stage: str) -> bool:
    """True if `stage` reads `source`, directly or through other stages."""
    visited = set[str]()
    waiting = [stage]
    while waiting:
        read_names = state.find(waiting.pop()).sources
        # The stages form a graph without circles: each is visited once, however many paths lead to
        # it.
        if source in read_names:
            return True
        waiting += set(read_names) - visited
        visited.update(read_names)
    return False


def _is_inside(state: State, reader: Stage | Fixed, consumer: str) -> bool:
    """True if a stage runs inside the nest of `consumer`, or will once its readers are attached."""
    if reader.name == consumer:
        return True
    if not isinstance(reader, Stage):
        return False
    if reader.attach is not None:
        return _is_inside(state, state.stage(reader.attach[0]), consumer)
    next_readers = state.readers(reader.name)
    return reader.scope != "GM" and all(_is_inside(state, r, consumer) for r in next_readers)


@schedule.primitive
def inline(state: State, stage: str) -> State:
    """Compute a value where it is used and nowhere else.

    before: `t[i] = a[i] + b[i]`, `y[i] = relu(t[i])`   after: `y[i] = relu(a[i] + b[i])`
    """
    s = state.stage(stage)
    primitives_loops.check_no_guests(state, stage, "inline")
    if s.output or s.fold or s.attach or s.scope != "GM" or s.is_cube:
        why = "a placed tile"
        if s.output:
            why = "an output"
        elif s.fold or s.is_cube:
            why = "a fold"
        raise ScheduleError(f"inline {stage}: an elementwise stage", why, "use compute_at")
    # for i: t[i] = a[i] + b[i], for i: y[i] = relu(t[i])   becomes   for i: y[i] = relu(a[i] +
    # b[i]).
    body = copied_element(s.expr) or s.expr

    def value(read: Read) -> Expr:
        if read.source != stage:
            return read
        if read.view and not len(read.index) == len(s.axes) == 1:
            needed = f"inline {stage}: an index per axis of {s.shape}"
            got = f"{read} under shape {read.view}"
            raise ScheduleError(needed, got, "keep it in GM, or fuse its axes first")
        names = [a.name for a in s.axes]
        return apply_index(body, dict(zip(names, read.index, strict=True)))

    for reader in state.readers(stage):
        if isinstance(reader, Fixed):
            needed = f"inline {stage}: readers with loops"
            raise ScheduleError(needed, "a hand-written kernel", "keep it")
        expr = _without_copies(rewrite(reader.expr, value))
        state = state.put(replace(reader, expr=expr))
    return state.drop(stage)


def _without_copies(expr: Expr) -> Expr:
    """Drop copies of computed values: vcopy(vadd(...)) is vadd(...)."""
    if not isinstance(expr, Call):
        return expr
    args = tuple(_without_copies(a) for a in expr.args)
    if expr.op == "vcopy" and isinstance(args[0], Call):
        return args[0]
    args = tuple(a.args[0] if isinstance(a, Call) and a.op == "vcopy" else a for a in args)
    return replace(expr, args=args)


@schedule.primitive
def hoist(state: State, stage: str) -> State:
    """Compute values that are the same for a whole row once, in a new tensor of a block per row.

    before: `y[i, j] = a[i, j] * f(t[i])`
    after: `y_row[i, b] = f(t[i])`, `y[i, j] = a[i, j] * y_row[i, 0]`
    """
    s = state.stage(stage)
    row_stages = dict[Expr, Stage]()
    # y[i, j] = x[i, j] * (1 / s[i]) divides 64 times for rows of 64; with y_row[i, b] = 1 / s[i] it
    # divides 16 numbers of a block once a row, and multiplies by the block.
    row_axes, lanes = (s.axes, s.reduce) if s.fold else (s.axes[:-1], s.axes[-1:])
    axes = (*row_axes, Axis(f"{lanes[0].name}_b", ROW_BLOCK))
    first_of_row = (*identity(row_axes), Affine())

    def hoisted(expr: Expr) -> Expr:
        """Return an expression that reads the new tensors; add these to `row_stages`."""
        reads = [element for element in leaves(expr) if isinstance(element, Read)]
        used_axes = set[str]().union(*(read.axis_names for read in reads))
        # An expression that reads nothing along the lanes is the same for the whole row.
        if used_axes and not used_axes & {a.name for a in lanes}:
            name = state.new_name(f"{stage}_row{len(row_stages) or ''}")
            value = expr if isinstance(expr, Call) else Call("vcopy", (expr,), expr.dtype)
            row_stage = Stage(
                name, expr.dtype, axes, value, loops=loops_of_axes(axes), align=ROW_BLOCK
            )
            return Read(row_stages.setdefault(expr, row_stage).name, expr.dtype, first_of_row)
        if not isinstance(expr, Call):
            return expr
        return replace(expr, args=tuple(map(hoisted, expr.args)))

    state = state.put(replace(s, expr=hoisted(s.expr)))
    for computed_once in row_stages.values():
        state = state.insert(computed_once, before=stage)
    return state


@schedule.primitive
def duplicate(state: State, stage: str, reader: str) -> State:
    """Give one reader of a stage its own copy of the stage, which is computed separately.

    before: `t = f(x)`, `y = g(t)`, `z = h(t)`   after: `t_2 = f(x)`, `t = f(x)`, `y = g(t_2)`, ...
    """
    s = state.stage(stage)
    r = state.stage(reader)
    if s.output or s.attach or s.bound or s.is_cube or stage not in r.sources:
        needed = f"duplicate: a stage not yet scheduled that {reader} reads"
        raise ScheduleError(needed, stage, "do this step earlier")
    copy = replace(s, name=state.new_name(stage))
    return state.put(redirect(r, stage, copy.name)).insert(copy, before=stage)


@schedule.primitive
def double_buffer(state: State, stage: str, depth: int = 2) -> State:
    """Give a tile several slots (ping-pong): load the next while the last is used.

    before: `load x; use x; load x; ...`   after: `load x[0]; load x[1] | use x[0]; ...`
    """
    s = state.stage(stage)
    if not isinstance(depth, int) or not 1 <= depth <= 4:
        raise ScheduleError(f"double_buffer {stage}: 1 to 4 slots", repr(depth), "2 is usual")
    # With two slots, MTE2 loads step n + 1 while the vector unit computes step n.
    return state.put(replace(s, depth=depth))


@schedule.primitive
def storage_align(state: State, stage: str, factor: int) -> State:
    """Let every row of a tile in UB begin at a multiple of `factor` elements.

    before: row r of 100 elements at 112 * r   after storage_align(128): at 128 * r
    """
    s = state.stage(stage)
    if s.scope != "UB":
        raise ScheduleError(f"storage_align {stage}: a tile in UB", s.scope, "cache it first")
    if not isinstance(factor, int) or factor < 1 or factor % c0_of(s.dtype):
        needed = f"storage_align {stage}: a multiple of {c0_of(s.dtype)} elements of {s.dtype}"
        raise ScheduleError(needed, str(factor), "rows begin at 32-byte blocks")
    # Rows at multiples of a whole repeat let one instruction start at any row.
    return state.put(replace(s, align=factor))


# -- folds of folds: softmax and norms of rows whose parts lie on several cores -------------------
HEAD_ELEMENTS = 128
"""The first elements of a row, whose mean c stands in for the mean of all n.

(c - mean)^2 is at most variance * n / 128.
"""
LOWEST = {"fp16": -65504.0, "fp32": -3.4028234663852886e38}
"""The lowest finite numbers: they stand in for the maximum of a part that is -inf throughout."""


@schedule.primitive
def unchain(state: State, stage: str, parts: str, first: str, first_parts: str) -> State:
    """Let the parts of a fold begin without the result of an earlier fold, `first`.

    before: `m = max of m_rf[p]`, `s_rf[p] = sum of exp(x - m)`, `s = sum of s_rf[p]`
    after: `s_rf[p] = sum of exp(x - m_rf[p])`, `s = sum of s_rf[p] * exp(m_rf[p] - m)`

    In a sum of squared distances from the mean, the mean is replaced by c, the mean of each row's
    first elements, and the sum is corrected:
    `s_rf[p] = sum of (x - c)^2`, `s = sum of s_rf[p] - (c - mean)^2 * n / parts`, at least 0
    """
    partial = state.stage(parts)
    base = state.stage(first_parts)
    total_stage = state.stage(stage)
    # Softmax over a row on 8 cores waits twice for all cores, for the maximum and for the sum. Sums
    # of exp(x - own maximum) need no waiting: each is corrected by exp(own maximum - maximum) at
    # the end.
    value = _in_terms(base.expr, base, partial)
    result = Read(first, base.dtype, identity(partial.axes)[:-1])
    powers = _without_maximum(partial, base, value, result)
    if powers is not None:
        unchained = powers
    elif _sums_squares(partial, base, value, result):
        state, unchained = _without_mean(state, partial, value, result)
        state = _at_least_zero(state, stage)
    else:
        needed = f"unchain {stage}: a sum of exp(x - max) or, in fp32, (x - mean)^2"
        raise ScheduleError(needed, str(partial.expr), "keep the folds one after another")
    centred_by_part = value - unchained.reference
    partial = replace(partial, expr=_with(partial.expr, unchained.centred, centred_by_part))
    if not isinstance(value, Read):
        state, partial, base = _separate_value(state, partial, base, value)
    state = state.put(replace(total_stage, expr=_in_terms(unchained.total, partial, total_stage)))
    return state.put(partial).put(replace(base, output=True))


class Unchained(NamedTuple):
    """The changes by which the parts of a fold can begin without the result of the earlier fold.

    In the parts `centred`, which is value - result, is replaced by value - `reference`. `total` is
    the expression that the whole fold adds up: each part, corrected by the result.
    """

    centred: Expr
    reference: Expr
    total: Expr


def _without_maximum(partial: Stage, base: Stage, value: Expr, result: Read) -> Unchained | None:
    """Return the change for parts that sum exp(value - maximum), None for other parts."""
    centred = value - result
    power = Call("vexp", (centred,), value.dtype)
    powers = (power, Call("vconv", (power,), partial.dtype, None, "rint"))
    is_sum = partial.fold == "sum" and len(partial.reduce) == 1 and value.dtype in LOWEST
    if base.fold != "max" or partial.expr not in powers or not is_sum:
        return None
    place = identity(partial.axes)
    maximum_of_part = Read(base.name, base.dtype, place)
    # A part that is -inf throughout has the maximum -inf: -inf - -inf would be nan.
    reference = Call("vmaxs", (maximum_of_part,), base.dtype, LOWEST[base.dtype])
    # exp(x - own maximum) * exp(own maximum - maximum) = exp(x - maximum)
    correction = _with(partial.expr, centred, reference - result)
    return Unchained(centred, reference, Read(partial.name, partial.dtype, place) * correction)


def _elements_of(partial: Stage) -> int:
    """Return the elements of a row: 3 parts of 4,096 and a last one of 100 are 12,388."""
    part_extent = partial.reduce[0].extent
    return (partial.shape[-1] - 1) * part_extent + (partial.last_fold_extent or part_extent)


def _sums_squares(partial: Stage, base: Stage, value: Expr, result: Read) -> bool:
    """Tell whether parts sum (value - mean)^2 in fp32, where `result` is the sum of the values."""
    if partial.fold != "sum" or len(partial.reduce) != 1 or value.dtype not in LOWEST:
        return False
    centred = value - result * (1.0 / _elements_of(partial))
    return (base.fold, partial.dtype, partial.expr) == ("sum", "fp32", centred * centred)


def _without_mean(
    state: State, partial: Stage, value: Expr, result: Read
) -> tuple[State, Unchained]:
    """Return the state with c added, and the change for parts that sum (value - mean)^2."""
    size = _elements_of(partial)
    mean = result * (1.0 / size)
    state, reference = _head(state, partial, value, result.source)
    shift = reference - mean
    # sum (x - mean)^2 = sum (x - c)^2 - n (c - mean)^2; each part takes its share of the last term
    share = shift * shift * (-size / partial.shape[-1])
    partial_sum = Read(partial.name, partial.dtype, identity(partial.axes))
    return state, Unchained(value - mean, reference, partial_sum + share)


def _at_least_zero(state: State, stage: str) -> State:
    """Let all readers of a sum of squares take 0 if rounding has left it below 0."""
    for reader in map(state.stage, [r.name for r in state.readers(stage)]):
        for read in {r for r in reader.reads if r.source == stage}:
            positive = _with(reader.expr, read, Call("vmaxs", (read,), read.dtype, 0.0))
            state = state.put(replace(reader, expr=positive))
    return state


def _separate_value(
    state: State, partial: Stage, base: Stage, value: Expr
) -> tuple[State, Stage, Stage]:
    """Compute the value that both folds use in a separate stage, which both read."""
    axes = (*partial.axes, Axis(partial.reduce[0].name, partial.reduce[0].extent))
    name = state.new_name(f"{base.name}_of")
    value_stage = Stage(name, value.dtype, axes, value, loops=loops_of_axes(axes))
    read = Read(name, value.dtype, identity(axes))
    state = state.insert(value_stage, base.name)
    base = replace(base, expr=_in_terms(read, partial, base))
    return state, replace(partial, expr=_with(partial.expr, value, read)), base


def _in_terms(expr: Expr, stage: Stage, target: Stage) -> Expr:
    """Return `expr` of `stage` with its axes renamed to those of `target`, in the same order."""
    names = zip((*stage.axes, *stage.reduce), (*target.axes, *target.reduce), strict=False)
    return apply_index(expr, {mine.name: var(theirs.name) for mine, theirs in names})


def _with(expr: Expr, replaced: Expr, replacement: Expr) -> Expr:
    """Return an expression with a part of it replaced."""
    if expr == replaced or not isinstance(expr, Call):
        return replacement if expr == replaced else expr
    return replace(expr, args=tuple(_with(arg, replaced, replacement) for arg in expr.args))


def _head(state: State, partial: Stage, value: Expr, first: str) -> tuple[State, Call]:
    """Return the state with a sum of each row's first elements, and the mean of these elements."""
    name = state.new_name(f"{first}_head")
    axes = partial.axes[:-1]
    folded = (Axis(partial.reduce[0].name, min(HEAD_ELEMENTS, partial.reduce[0].extent), True),)
    expr = apply_index(value, {partial.axes[-1].name: Affine()})
    loops = loops_of_axes(axes, folded)
    head = Stage(name, partial.dtype, axes, expr, fold="sum", reduce=folded, loops=loops)
    mean = Read(name, partial.dtype, identity(axes)) * (1.0 / folded[0].extent)
    return state.insert(head, before=state.stages[0].name), mean
