"""Schedule primitives that change loops and who runs them: split, fuse, bind, vectorise, rfactor.

For example, `split(s, "y", "i", 32)` makes of a loop i of 100 steps one of 4 steps around one of
32. Each is a function from a state (all stages with their loops) to a new state, which first checks
that the change is legal; the decorator `primitive` makes it a step of schedules. A leaf is one loop
of a stage. A stage that is computed inside a loop of another one is a guest, the other is its host.
"""

from dataclasses import replace

from ascend_lab.errors import ScheduleError
from ascend_lab.machine.isa import FRACTAL, Affine, c0_of
from ascend_lab.operators.dsl.schedule import Schedule, primitive
from ascend_lab.operators.dsl.stages import Leaf, Stage, State, identity, loops_of_axes
from ascend_lab.operators.dsl.tensor import Axis, Expr, Read, apply_index, rewrite


@primitive
def split(state: State, stage: str, axis: str, factor: int, *, tail: str = "cut") -> State:
    """Split a loop into parts of `factor` steps.

    before: `for i in n: body(i)`
    after, tail="cut": `for i_o in n // f: for i_i in f: body(i_o * f + i_i)`, then the rest once
    after, tail="guard": the last part begins at n - f, so that all parts are whole
    """
    s = state.stage(stage)
    leaf = s.loop(axis)
    _check_free(state, s, leaf)
    if tail not in ("cut", "guard"):
        raise ScheduleError('split: tail "cut" or "guard"', repr(tail), "choose one")
    if not isinstance(factor, int) or not 1 <= factor <= leaf.extent:
        needed = f"split: a factor from 1 to {leaf.extent} for {stage}.{axis}"
        raise ScheduleError(needed, str(factor), "shrink it")
    if tail == "guard" and leaf.reduce:
        got = "guard would fold some elements twice"
        raise ScheduleError(f'split: tail "cut" for the fold axis {axis}', got, 'use tail="cut"')
    # i in 100, split by 32, becomes: for i_o in 4: for i_i in 32: y[32 * i_o + i_i] = ..., and only
    # 4 steps of i_i when i_o is 3.
    count = -(-leaf.extent // factor)
    width = leaf.width * factor
    outer = Leaf(f"{axis}_o", leaf.root, count, width, leaf.reduce, tail)
    inner = replace(leaf, name=f"{axis}_i", extent=factor)
    at = s.position(axis)
    changed = replace(s, loops=(*s.loops[:at], outer, inner, *s.loops[at + 1 :]))
    check_nest(state, changed)
    return state.put(changed)


@primitive
def reorder(state: State, stage: str, *axes: str) -> State:
    """Change the order of loops.

    before: `for i: for j: body`   after reorder(j, i): `for j: for i: body`
    """
    s = state.stage(stage)
    chosen = [s.loop(a) for a in axes]
    if len(set(axes)) < len(axes):
        raise ScheduleError(f"reorder {stage}: each loop once", str(tuple(axes)), "drop repeats")
    # Loops that are not named keep their places: of i, j, k, reorder(k, i) makes k, j, i.
    order = iter(chosen)
    loops = tuple(next(order) if leaf in chosen else leaf for leaf in s.loops)
    for place, leaf in enumerate(loops):
        # i_i_o may not stand outside i_o: a step of it moves less than one of i_o.
        finer = (x for x in loops[:place] if x.root == leaf.root and x.width < leaf.width)
        for wrong in finer:
            needed = f"reorder {stage}: {leaf.name} outside {wrong.name}"
            got = "the parts of one axis the other way round"
            raise ScheduleError(needed, got, "keep outer parts outside")
    changed = replace(s, loops=loops)
    check_nest(state, changed)
    return state.put(changed)


def tile(s: Schedule, stage: str, i: str, j: str, rows: int, columns: int) -> Schedule:
    """Compute a matrix in tiles: split both axes and put the tile loops inside.

    before: `for i: for j: body`   after: `for i_o: for j_o: for i_i: for j_i: body`
    """
    s = split(split(s, stage, i, rows), stage, j, columns)
    # Of a 1,024 x 1,024 matrix in tiles of 64 x 128: for i_o in 16: for j_o in 8: 64 x 128
    # elements.
    return reorder(s, stage, f"{i}_o", f"{j}_o", f"{i}_i", f"{j}_i")


@primitive
def fuse(state: State, stage: str, first: str, second: str) -> State:
    """Make one axis of two neighbours that are contiguous in every operand.

    before: `for i in m: for j in n: body(i, j)`   after: `for ij in m * n: body(ij // n, ij % n)`
    """
    s = state.stage(stage)
    a = s.loop(first)
    b = s.loop(second)
    at = s.position(first)
    if s.position(second) != at + 1 or a.reduce != b.reduce:
        needed = f"fuse: {second} right inside {first}, both data or both fold loops"
        raise ScheduleError(needed, ", ".join(x.name for x in s.loops), "reorder first")
    if a.root != first or b.root != second or a.width != 1 or b.width != 1:
        raise ScheduleError("fuse: two whole axes", f"{first}, {second}", "fuse before you split")
    _check_free(state, s, a)
    _check_free(state, s, b)
    group = s.reduce if a.reduce else s.axes
    names = [x.name for x in group]
    place = names.index(first)
    if names.index(second) != place + 1:
        needed = f"fuse: neighbours of the tensor ({', '.join(names)})"
        raise ScheduleError(needed, f"{first}, {second}", "choose")
    # for i in 64: for j in 100: y[i, j] = x[i, j]   becomes   for ij in 6400: y[ij] = x[ij].
    axis = Axis(f"{first}{second}", a.extent * b.extent, a.reduce)
    _check_alone_in_nest(state, s)
    expr = rewrite(s.expr, lambda read: _merged(state, stage, read, first, second, b.extent))
    changed = (*group[:place], axis, *group[place + 2 :])
    loops = (*s.loops[:at], *loops_of_axes((axis,)), *s.loops[at + 2 :])
    if a.reduce:
        return state.put(replace(s, expr=expr, loops=loops, reduce=changed))
    changed_state = state.put(replace(s, expr=expr, loops=loops, axes=changed))
    return _reindexed(changed_state, stage, place, b.extent)


def _check_alone_in_nest(state: State, s: Stage) -> None:
    """Raise unless the stage is alone in its nest: two outputs there must keep the same axes."""
    guests = [guest for guest in state.guests(s.name) if guest.output]
    host = s.attach[0] if s.output and s.attach else ""
    partner = host or (guests[0].name if guests else "")
    if partner:
        needed = f"fuse: {s.name} in a nest of its own"
        remedy = f"fuse the axes of both before compute_at joins {s.name} and {partner}"
        raise ScheduleError(needed, f"it shares that of {partner}, axis by axis", remedy)


def _merged(state: State, stage: str, read: Read, first: str, second: str, size: int) -> Read:
    """Return what a stage reads with first * size + second as one axis."""
    source = state.find(read.source)
    index = read.index
    view = read.view or source.shape
    a = next((d for d, i in enumerate(index) if first in dict(i.terms)), None)
    b = next((d for d, i in enumerate(index) if second in dict(i.terms)), None)
    # x[i, j] of a (64, 100) tensor is read as x[100 i + j] of the same bytes under shape (6400,).
    if a is not None and b == a + 1 and source.scope == "GM":
        index = (*index[:a], index[a] * view[b] + index[b], *index[b + 1 :])
        view = (*view[:a], view[a] * view[b], *view[b + 1 :])
    merged_index: list[Affine] = []
    for coordinate in index:
        terms = dict(coordinate.terms)
        # 100 i + j is 1 * ij: the step of i must be that of j times the size of j. In x[j, i] it is
        # not, and the two axes stay apart.
        outer = terms.pop(first, 0)
        inner = terms.pop(second, 0)
        if outer != inner * size:
            # a stride of 0 is a broadcast: the source does not have that axis
            is_broadcast = outer == 0 or inner == 0
            apart = f"leave {first} and {second} apart"
            raise ScheduleError(
                f"fuse {stage}: in {read.source} a step of {first} as far as {size} of {second}",
                f"strides {outer} and {inner}",
                apart if is_broadcast else f"fuse the same axes of {read.source} first, or {apart}",
            )
        if inner:
            terms[f"{first}{second}"] = inner
        merged_index.append(Affine(coordinate.const, tuple(sorted(terms.items()))))
    return replace(read, index=tuple(merged_index), view=() if view == source.shape else view)


def _reindexed(state: State, name: str, at: int, size: int) -> State:
    """Let the readers of a tensor use its fused axis."""
    shape = state.stage(name).shape

    def element(read: Read) -> Expr:
        if read.source != name:
            return read
        if read.view:
            return replace(read, view=()) if read.view == shape else read
        index = read.index
        one = index[at] * size + index[at + 1]
        return replace(read, index=(*index[:at], one, *index[at + 2 :]))

    for s in state.stages:
        if isinstance(s, Stage):
            state = state.put(replace(s, expr=rewrite(s.expr, element)))
    return state


@primitive
def bind(state: State, stage: str, axis: str) -> State:
    """Run the steps of a loop on different cores.

    before: `for i_o in 8: body(i_o)`   after: core c: `body(c)`
    """
    s = state.stage(stage)
    leaf = s.loop(axis)
    if leaf.reduce:
        got = f"{axis}, which is folded: every core would hold a part of the sum"
        remedy = "make the parts a tensor with rfactor, and fold it in a second step"
        raise ScheduleError(f"bind {stage}: a data loop", got, remedy)
    if axis in s.bound:
        raise ScheduleError(f"bind {stage}: a loop not bound yet", axis, "bind each loop once")
    if s.attach is not None or s.scope != "GM":
        needed = "bind: a stage with a nest of its own"
        got = f"{stage} {'is attached' if s.attach else f'is a tile in {s.scope}'}"
        raise ScheduleError(needed, got, "bind the stage that it is computed in")
    if leaf.tail == "guard" and leaf.width > 1:
        needed = f'bind {stage}.{axis}: a loop split with tail="cut"'
        got = "guard: two cores would write the elements they share"
        raise ScheduleError(needed, got, 'use tail="cut"')
    # for i_o in 8: for i_i in 512: y[512 i_o + i_i] = ...   becomes, on core c of 8: for i_i in
    # 512: y[512 c + i_i] = ...
    changed = replace(s, bound=(*s.bound, axis))
    check_nest(state, changed)
    return state.put(changed)


@primitive
def vectorise(state: State, stage: str, axis: str) -> State:
    """Replace a loop, and all inside it, by vector instructions and copies of whole tiles.

    before: `for i_i in 1024: y[i_i] = a[i_i] + b[i_i]`   after: `vadd y, a, b` with 8 repeats
    """
    s = state.stage(stage)
    s.loop(axis)
    if s.is_cube:
        raise ScheduleError(f"vectorise {stage}: a vector stage", "a cube stage", "use tensorize")
    # for i_o in 8: for i_i in 1024: y[i] = a[i] + b[i], vectorised at i_i, becomes for i_o in 8:
    # load a, load b, vadd of 1,024 elements (8 repeats of 128 in fp16), store y.
    changed = replace(s, vector_at=axis)
    check_nest(state, changed)
    return state.put(changed)


@primitive
def tensorize(state: State, stage: str, axis: str) -> State:
    """Replace a loop, and all inside it, by one cube instruction.

    before: `for m: for n: for k: c[m, n] += a[m, k] * b[k, n]`   after: `mmad c, a, b`
    """
    s = state.stage(stage)
    if not s.is_cube or s.scope != "L0C":
        kind = "a vector stage" if not s.is_cube else f"one in {s.scope}"
        needed = f"tensorize {stage}: a sum of products in L0C"
        raise ScheduleError(needed, kind, 'cache_write it to "L0C" first')
    # mmad multiplies whole fractals: m and n in 16s, k in the elements of a block (16 in fp16).
    inner = s.loops[s.position(axis) :]
    units = {a.name: FRACTAL for a in s.axes if a.name in ("m", "n")}
    units |= {a.name: c0_of(s.reads[0].dtype) for a in s.reduce}
    for name, unit in units.items():
        size = max((x.extent * x.width for x in inner if x.root == name), default=1)
        if size % unit:
            needed = f"tensorize {stage}: {name} in multiples of {unit} inside {axis}"
            raise ScheduleError(needed, str(size), f"split {name} by a multiple of {unit}")
    if any(x.root not in units for x in inner):
        needed = f"tensorize {stage}: only m, n and k inside {axis}"
        raise ScheduleError(needed, "a batch", "reorder")
    # for m in 64: for n in 64: for k in 64: c[m, n] += a[m, k] * b[k, n]   becomes   mmad c, a, b
    # of 4 x 4 x 4 fractals.
    changed = replace(s, vector_at=axis, tensorized=True)
    check_nest(state, changed)
    return state.put(changed)


@primitive
def rfactor(state: State, stage: str, axis: str, *, inner: bool = False) -> State:
    """Fold in two steps, so that the first can run on many cores.

    before: `y = sum over k_o, k_i`   after: `y_rf[p] = sum over k_i`, `y = sum over p of y_rf[p]`

    With `inner`, p is the last axis of `y_rf`, and the last part of a single fold axis may be
    shorter: p must then be bound to cores, so that the core with the shorter part has a program of
    its own.
    """
    s = state.stage(stage)
    check_no_guests(state, stage, "rfactor")
    leaf = s.loop(axis)
    fold_axis = next((a for a in s.reduce if a.name == leaf.root), None)
    if fold_axis is None or not s.fold or s.is_cube:
        raise ScheduleError(f"rfactor {stage}: a loop of a fold", axis, "split a fold axis first")
    # y[i] = sum of x[i, k] over 4,096 k, k split by 512, becomes: for p in 8: y_rf[p, i] = sum of
    # x[i, 512 p + k] over 512 k, then y[i] = sum of y_rf[p, i] over p.
    parts = [x for x in s.loops if x.root == leaf.root]
    remainder = fold_axis.extent % leaf.width
    if leaf.width == 1 or len(parts) != 2 or (remainder and not (inner and len(s.reduce) == 1)):
        needed = f"rfactor {stage}: {leaf.root} split once, by a divisor of {fold_axis.extent}"
        raise ScheduleError(needed, f"parts of {leaf.width}", "choose a factor that divides it")
    part_axis = Axis(_free_part_name(s), leaf.extent)
    short_axis = Axis(fold_axis.name, leaf.width, True)
    folds = tuple(short_axis if a is fold_axis else a for a in s.reduce)
    name = state.new_name(f"{stage}_rf")
    axes = (*s.axes, part_axis) if inner else (part_axis, *s.axes)
    # The old k is 512 p + k, with the new k counting inside a part.
    index = Affine(0, ((part_axis.name, leaf.width), (fold_axis.name, 1)))
    expr = apply_index(s.expr, {fold_axis.name: index})
    partial = Stage(
        name,
        s.dtype,
        axes,
        expr,
        fold=s.fold,
        reduce=folds,
        loops=loops_of_axes(axes, folds),
        last_fold_extent=remainder,
    )
    part_folds = (replace(part_axis, reduce=True),)
    read = Read(name, s.dtype, identity(axes))
    total = replace(s, expr=read, reduce=part_folds, loops=loops_of_axes(s.axes, part_folds))
    return state.put(total).insert(partial, before=stage)


def _free_part_name(s: Stage) -> str:
    """Return a name for the axis of the parts of a fold: p, or p2, p3, ... if p is taken."""
    taken = {a.name for a in (*s.axes, *s.reduce)}
    return next(n for n in ("p", *(f"p{d}" for d in range(2, 99))) if n not in taken)


# -- conditions -------------------------------------------------------------------------------
def _check_free(state: State, stage: Stage, leaf: Leaf) -> None:
    """Raise `ScheduleError` for a loop to which a tile, a core or an instruction is attached."""
    loop_place = (stage.name, leaf.name)
    guest = next((s.name for s in state.stages if s.attach == loop_place), None)
    if guest is not None or leaf.name in stage.bound or leaf.name == stage.vector_at:
        why = f"{guest} is computed at it" if guest else "it is bound or vectorised"
        raise ScheduleError(f"a free loop {stage.name}.{leaf.name}", why, "do this step earlier")


def check_no_guests(state: State, stage: str, primitive: str) -> None:
    """Raise `ScheduleError` if other tiles are computed in the nest of `stage`."""
    for guest in state.guests(stage):
        needed = f"{primitive} {stage}: no tile computed in it"
        raise ScheduleError(needed, guest.name, "do this step earlier")


def check_nest(state: State, s: Stage) -> None:
    """Raise unless core loops are outermost and tiles are attached outside vectorised loops.

    A guarded loop of a fold must not stand inside the fold's loops.
    """
    for place, leaf in enumerate(s.loops):
        outside = s.loops[:place]
        if leaf.name in s.bound and any(x.name not in s.bound for x in outside):
            needed = f"{s.name}: loops bound to cores outermost"
            raise ScheduleError(needed, f"{leaf.name} inside", "reorder it first")
    for place, leaf in enumerate(s.loops):
        folds = [x for x in s.loops[:place] if x.reduce]
        if s.fold and leaf.tail == "guard" and leaf.width > 1 and folds:
            needed = f"{s.name}: guarded loop {leaf.name} outside the fold loops"
            got = f"{folds[0].name} outside it: shared elements would be folded twice"
            raise ScheduleError(needed, got, 'use tail="cut", or reorder')
    if s.vector_at:
        used = {guest.attach[1] for guest in state.guests(s.name) if guest.attach}
        for leaf in s.loops[s.position(s.vector_at) :]:
            if leaf.name in used or leaf.name in s.bound:
                needed = f"{s.name}: {leaf.name} outside the vectorised loops"
                raise ScheduleError(needed, "inside", "vectorise further in")
