"""The state that a schedule transforms: its stages, each a tensor with the loops that compute it.

The matrix y[i, j] = exp(x[i, j]) of 64 x 100 numbers is a stage with the loops i of 64 steps and j
of 100. A stage that is computed inside a loop of another one is a guest, and the other its host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ascend_lab.errors import ScheduleError, ShapeError
from ascend_lab.machine.isa import FRACTAL, Affine, c0_of
from ascend_lab.operators.dsl import tensor as exprs
from ascend_lab.operators.dsl.tensor import (
    Axis,
    Call,
    Compute,
    Expr,
    Read,
    Shape,
    Tensor,
    leaves,
    rewrite,
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One loop of a nest: a step of it moves along its root axis by `width` elements.

    The root is an axis of the tensor: an axis of 100 elements that is split by 32 is the root of
    two loops, of widths 32 and 1, the leaves of the split. `extent` is the number of steps. `tail`
    says what happens where `width` does not divide the axis, as with 100 elements in steps of 32:
    "cut" makes the last step shorter (96..99), "guard" moves it back until it is inside (68..99),
    so that it computes some elements twice.
    """

    name: str
    root: str
    extent: int
    width: int = 1
    reduce: bool = False
    tail: str = "cut"


@dataclass(frozen=True, slots=True)
class Formula:
    """The contents of a tensor: out[axes] = expr, or the `fold` of expr over the axes `reduce`.

    The row sums of a (100, 64) matrix, y[i] = sum over k of x[i, k], have the axes (i: 100,), the
    expression x[i, k], the fold "sum", and reduce (k: 64,).

    Other fields are derived: sizes of the axes, elements that the formula reads, the names of their
    tensors, whether it only moves elements, whether it is a sum of products for the cube unit.
    """

    name: str
    dtype: str
    axes: tuple[Axis, ...]
    expr: Expr
    fold: str = ""
    reduce: tuple[Axis, ...] = ()
    shape: Shape = field(init=False, compare=False)
    reads: tuple[Read, ...] = field(init=False, compare=False)
    sources: tuple[str, ...] = field(init=False, compare=False)
    is_copy: bool = field(init=False, compare=False)
    is_cube: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Derive once the fields that are used often: sizes, elements read, sources, flags."""
        reads = tuple([e for e in leaves(self.expr) if isinstance(e, Read)])
        derived = {
            "shape": tuple([a.extent for a in self.axes]),
            "reads": reads,
            "sources": tuple(dict.fromkeys([r.source for r in reads])),
            "is_copy": copied_element(self.expr) is not None and not self.fold,
            "is_cube": getattr(self.expr, "op", "") == "mac",
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class Placed(Formula):
    """A formula with its loops, where its tensor is kept, and where it is computed.

    `scope` is the buffer, `depth` its number of slots, `align` the elements to which rows in UB are
    rounded up. `attach` is (stage, loop) if this tile is computed inside that loop of that stage,
    ("y", "") if in front of its loops; `bound` are the loops shared over the cores. Loops in front
    of `vector_at` become loops of the program. The loop `vector_at` and those behind it are done by
    instructions on whole tiles: of the cube if the stage is `tensorized`, else of the vector unit.
    """

    loops: tuple[Leaf, ...] = ()
    scope: str = "GM"
    attach: tuple[str, str] | None = None
    vector_at: str = ""
    bound: tuple[str, ...] = ()
    depth: int = 1
    align: int = 1
    tensorized: bool = False


@dataclass(frozen=True, slots=True)
class Stage(Placed):
    """One tensor of a schedule: a placed formula, with fields that only some formulas need.

    For a matrix product on the cube unit the axes are rounded up to fractals (m = 100 becomes 112);
    `logical` is then the shape without padding, and `relu` says that negative sums become 0 on the
    way out of L0C. `last_fold_extent` belongs to the partial folds of `rfactor`, whose last axis
    counts the parts of a row: if not 0, it is the number of elements of the shorter last part.
    """

    output: bool = False
    relu: bool = False
    logical: Shape = ()
    last_fold_extent: int = 0

    @property
    def repeats(self) -> bool:
        """True for a tile whose rows are one block each and hold the same element throughout.

        The scale of a row, repeated 16 times in fp16, can multiply the row block by block.
        """
        # A formula that reads nothing along the innermost axis gives each row one number.
        lane = self.axes[-1].name
        reads_lane = any(lane in read.axis_names for read in self.reads)
        return 1 < self.align == self.shape[-1] and not reads_lane

    def loop(self, name: str) -> Leaf:
        """Return a loop by name; raise `ScheduleError` with the names of the existing loops."""
        for leaf in self.loops:
            if leaf.name == name:
                return leaf
        names = ", ".join(leaf.name for leaf in self.loops)
        raise ScheduleError(f"a loop of {self.name} ({names})", repr(name), "check the name")

    def position(self, name: str) -> int:
        """Return the place of a loop in the nest, 0 outermost."""
        return self.loops.index(self.loop(name))


def copied_element(expr: Expr) -> Read | None:
    """Return the element that an expression only copies, or None."""
    element = expr.args[0] if isinstance(expr, Call) and expr.op == "vcopy" else expr
    return element if isinstance(element, Read) else None


def overwrites(state: "State", stage: Stage) -> str:
    """Return the tile whose memory an elementwise stage in the same loop may overwrite, or "".

    With b = exp(a) and no later reader of a, b takes the memory of a. The stage must be the last
    reader of the tile in that loop, and must read each element at the place where it writes its
    result, before it writes there.
    """
    first_call = _first_call(stage.expr, stage.axes[-1].name)
    names = [s.name for s in state.stages]
    # A guarded last step computes some elements again, from inputs that are overwritten by then.
    recomputes = any(x.tail == "guard" and x.width > 1 for x in stage.loops)
    # A fold reads elements again that it has written; a copy between memories is not in place, and
    # neither is a stage outside UB.
    if first_call is None or stage.fold or stage.is_copy or stage.scope != "UB" or recomputes:
        return ""
    names_so_far = names[: names.index(stage.name) + 1]
    for read in stage.reads:
        tile = state.find(read.source)
        if not isinstance(tile, Stage) or tile.is_copy or tile.scope != "UB":
            continue
        layout = (stage.dtype, stage.shape, stage.attach)
        has_same_layout = (tile.dtype, tile.shape, tile.attach) == layout
        readers = state.readers(tile.name)
        is_last_reader = all(r.name in names_so_far and r.attach == tile.attach for r in readers)
        indices = [r.index for r in stage.reads if r.source == tile.name]
        # The first operation is the only one that reads the tile, at the stage's own indices.
        own_indices = {identity(stage.axes)} == set(indices)
        in_place = own_indices and len(indices) == first_call.args.count(read)
        if has_same_layout and is_last_reader and in_place:
            return tile.name
    return ""


def _first_call(expr: Expr, lane: str) -> Call | None:
    """Return the operation that is evaluated first, or None if several may be.

    If one operand alone is computed along the axis `lane`, its first operation is the first of all.
    In mul(exp(a[i, j]), b[i]) that is exp.
    """
    # Equal operands are computed once: exp(a) * exp(a) has one.
    args = dict.fromkeys(expr.args) if isinstance(expr, Call) else ()
    # mul(exp(a[i, j]), exp(b[i])): b has no j, so that exp(a) is the only candidate
    calls_along_lane = [a for a in args if isinstance(a, Call) and _reads_along(a, lane)]
    if len(calls_along_lane) == 1:
        return _first_call(calls_along_lane[0], lane)
    return expr if isinstance(expr, Call) and not calls_along_lane else None


def _reads_along(expr: Call, lane: str) -> bool:
    """True if an element that an expression reads has the axis `lane` in its index."""
    reads = [element for element in leaves(expr) if isinstance(element, Read)]
    return any(lane in read.axis_names for read in reads)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A stage that a hand-written kernel computes.

    `kind` is the name of the kernel, such as "transpose", `sources` and `shapes` are its inputs,
    and `attrs` its settings.
    """

    name: str
    dtype: str
    shape: Shape
    kind: str
    sources: tuple[str, ...]
    shapes: tuple[Shape, ...]
    attrs: tuple[tuple[str, Any], ...]
    output: bool = False
    scope: ClassVar[str] = "GM"
    attach: ClassVar[tuple[str, str] | None] = None


@dataclass(frozen=True, slots=True)
class Input:
    """An input tensor."""

    name: str
    dtype: str
    shape: Shape
    scope: ClassVar[str] = "GM"
    attach: ClassVar[tuple[str, str] | None] = None
    sources: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class State:
    """All stages in the order they are computed, and the inputs."""

    inputs: tuple[Input, ...]
    stages: tuple[Stage | Fixed, ...]

    def stage(self, name: str) -> Stage:
        """Return a stage by name; raise `ScheduleError` for unknown or hand-written ones."""
        for stage in self.stages:
            if stage.name == name:
                if isinstance(stage, Fixed):
                    needed = f"{name}: a stage with loops"
                    got = f"the hand-written kernel {stage.kind}"
                    raise ScheduleError(needed, got, "schedule the stages around it")
                return stage
        names = ", ".join(s.name for s in self.stages)
        hint = "use cache_read to move it" if any(i.name == name for i in self.inputs) else "check"
        raise ScheduleError(f"a stage ({names})", repr(name), hint)

    def find(self, name: str) -> Stage | Fixed | Input:
        """Return a stage or an input by name."""
        for entry in (*self.inputs, *self.stages):
            if entry.name == name:
                return entry
        return self.stage(name)

    @property
    def cubes(self) -> tuple[Stage, ...]:
        """The sums of products for the cube."""
        return tuple(s for s in self.stages if isinstance(s, Stage) and s.is_cube)

    def readers(self, name: str) -> tuple[Stage | Fixed, ...]:
        """Return the stages that read a tensor."""
        return tuple(s for s in self.stages if name in s.sources)

    def guests(self, host: str, *places: str) -> tuple[Stage, ...]:
        """Return the stages computed inside the nest of `host`: anywhere, or in the given loops."""
        guests = []
        for s in self.stages:
            # A tile attached to ("y", "i_o") is computed in the loop i_o of the nest of y.
            host_name, place = s.attach or ("", "")
            if isinstance(s, Stage) and host_name == host and (not places or place in places):
                guests.append(s)
        return tuple(guests)

    def put(self, stage: Stage | Fixed) -> "State":
        """Return the state with a stage replaced by one of the same name."""
        stages = [stage if s.name == stage.name else s for s in self.stages]
        return State(self.inputs, tuple(stages))

    def insert(self, stage: Stage | Fixed, before: str) -> "State":
        """Return the state with a stage added before another one."""
        # The order of stages is the order of execution: a producer stands in front of its readers.
        position = next(n for n, s in enumerate(self.stages) if s.name == before)
        return State(self.inputs, (*self.stages[:position], stage, *self.stages[position:]))

    def drop(self, name: str) -> "State":
        """Return the state without a stage."""
        return State(self.inputs, tuple(s for s in self.stages if s.name != name))

    def new_name(self, stem: str) -> str:
        """Return `stem`, with a number if it is taken."""
        taken = {e.name for e in (*self.inputs, *self.stages)}
        name = stem
        number = 1
        while name in taken:
            # "a" is taken: a_2, then a_3
            number += 1
            name = f"{stem}_{number}"
        return name


def fits_in(stage: Stage, host: Stage) -> bool:
    """True if `stage` can be computed in the nest of `host`: same shape, or a last axis of size 1.

    The scale of each row, (rows, 1), is stored where the row is, (rows, columns).
    """
    same_rows = len(stage.shape) == len(host.shape) and stage.shape[:-1] == host.shape[:-1]
    # (100, 1) fits in the nest of (100, 64); (100, 32) does not
    return same_rows and (stage.shape[-1] in (1, host.shape[-1]))


def initial_state(outputs: Sequence[Tensor]) -> State:
    """Return the unscheduled state of a tensor program: every stage in GM, axes in order."""
    names = exprs.unique_names(exprs.topological(outputs))
    inputs: list[Input] = []
    stages: list[Stage | Fixed] = []
    for tensor, name in names.items():
        body = tensor.body
        is_output = tensor in outputs
        if body is None:
            if is_output:
                raise ShapeError("an output that is computed", f"the input {name}", "copy it")
            inputs.append(Input(name, tensor.dtype, tensor.shape))
        elif isinstance(body, exprs.Template):
            sources = tuple(names[t] for t in body.inputs)
            shapes = tuple(t.shape for t in body.inputs)
            stages.append(
                Fixed(
                    name,
                    tensor.dtype,
                    tensor.shape,
                    kind=body.kind,
                    sources=sources,
                    shapes=shapes,
                    attrs=body.attrs,
                    output=is_output,
                )
            )
        else:
            stages.append(_stage(tensor, body, names, is_output))
    return State(tuple(inputs), tuple(stages))


def _stage(tensor: Tensor, body: Compute, names: dict[Tensor, str], output: bool) -> Stage:
    """Return the stage of a formula; a product's axes are rounded up to whole fractals."""

    def read_by_name(element: exprs.Load) -> Expr:
        view = element.view if element.view != element.tensor.shape else ()
        return Read(names[element.tensor], element.tensor.dtype, element.index, view)

    def padded(axes: tuple[Axis, ...], unit: int) -> tuple[Axis, ...]:
        """Return the axes with m, n and k rounded up to whole units."""
        sizes = [
            -(-a.extent // unit) * unit if a.name in ("m", "n", "k") else a.extent for a in axes
        ]
        return tuple(replace(a, extent=size) for a, size in zip(axes, sizes, strict=True))

    expr = rewrite(body.expr, read_by_name)
    axes = body.axes
    reduce = body.reduce
    logical: Shape = ()
    if isinstance(expr, Call) and expr.op == "mac":
        # Fractals are 16 x 16 elements in fp16 and 16 x 32 in int8: k is rounded up to 16 or 32.
        # A product of 100 x 60 by 60 x 30 is computed as 112 x 64 by 64 x 32, with zeros in the
        # padding.
        axes = padded(axes, FRACTAL)
        reduce = padded(reduce, c0_of(expr.args[0].dtype))
        logical = tensor.shape
    return Stage(
        names[tensor],
        tensor.dtype,
        axes,
        expr,
        fold=body.fold,
        reduce=reduce,
        loops=loops_of_axes(axes, reduce),
        output=output,
        logical=logical,
    )


def loops_of_axes(axes: tuple[Axis, ...], reduce: tuple[Axis, ...] = ()) -> tuple[Leaf, ...]:
    """Return one loop per axis."""
    return tuple(Leaf(a.name, a.name, a.extent, 1, a.reduce) for a in (*axes, *reduce))


def copy_of(name: str, source: Stage | Fixed | Input, view: Shape = ()) -> Stage:
    """Return a tile in UB that copies a tensor, under the shape `view` if one is given."""
    axes = tuple(Axis(f"c{d}", n) for d, n in enumerate(view or source.shape))
    copy = Call("vcopy", (Read(source.name, source.dtype, identity(axes), view),), source.dtype)
    return Stage(name, source.dtype, axes, copy, loops=loops_of_axes(axes), scope="UB")


def redirect(stage: Stage, old_source: str, new_source: str) -> Stage:
    """Return a stage that reads `new_source` where it read `old_source`."""

    def leaf(element: Read) -> Expr:
        return replace(element, source=new_source) if element.source == old_source else element

    return replace(stage, expr=rewrite(stage.expr, leaf))


def identity(axes: tuple[Axis, ...]) -> tuple[Affine, ...]:
    """Return the index [i, j, ...] that names each axis once, in order."""
    # axes i and j: [0 + 1 i, 0 + 1 j]
    return tuple(Affine(0, ((a.name, 1),)) for a in axes)
