"""What a schedule is about: stages (one loop nest each) and how they hang together."""

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
    """One loop of a nest: a step of it moves its root axis by `width` elements.

    `tail` says what happens where the parts do not divide: "cut" makes a shorter last part,
    "guard" moves the last part back inside.
    """

    name: str
    root: str
    extent: int
    width: int = 1
    reduce: bool = False
    tail: str = "cut"


@dataclass(frozen=True, slots=True)
class Stage:
    """One tensor of a schedule: its formula, its loops, where it is kept, where it is computed.

    A product for the cube has axes rounded up to fractals; `logical` is the shape without padding,
    `relu` says that negative sums become 0 on the way out of L0C. `rest`, if not 0: how much of
    its fold axis the last step of its last axis folds. The last fields are derived:
    sizes as this stage indexes them, elements read, their tensors, whether it only moves elements,
    whether it is a sum of products for the cube.

    `attach` is (stage, loop) for tiles computed inside another nest; the loops in front of
    `vector_at` are loops, it and those behind it are done by whole-tile instructions.
    """

    name: str
    dtype: str
    axes: tuple[Axis, ...]
    expr: Expr
    fold: str = ""
    reduce: tuple[Axis, ...] = ()
    loops: tuple[Leaf, ...] = ()
    scope: str = "GM"
    output: bool = False
    attach: tuple[str, str] | None = None
    vector_at: str = ""
    bound: tuple[str, ...] = ()
    depth: int = 1
    align: int = 1
    tensorized: bool = False
    relu: bool = False
    logical: Shape = ()
    rest: int = 0
    shape: Shape = field(init=False, compare=False)
    reads: tuple[Read, ...] = field(init=False, compare=False)
    sources: tuple[str, ...] = field(init=False, compare=False)
    is_copy: bool = field(init=False, compare=False)
    is_cube: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Derive what is asked for often: sizes, elements read, their tensors, the kind."""
        found = tuple([e for e in leaves(self.expr) if isinstance(e, Read)])
        derived = {
            "shape": tuple([a.extent for a in self.axes]),
            "reads": found,
            "sources": tuple(dict.fromkeys([r.source for r in found])),
            "is_copy": bare(self.expr) is not None and not self.fold,
            "is_cube": getattr(self.expr, "op", "") == "mac",
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def repeats(self) -> bool:
        """True for a tile of rows of one block, the same element throughout."""
        lane = self.axes[-1].name
        uses = any(lane == n for r in self.reads for i in r.index for n, _ in i.terms)
        return 1 < self.align == self.shape[-1] and not uses

    def loop(self, name: str) -> Leaf:
        """Return a loop by name; raise `ScheduleError` naming those there are."""
        for leaf in self.loops:
            if leaf.name == name:
                return leaf
        known = ", ".join(leaf.name for leaf in self.loops)
        raise ScheduleError(f"a loop of {self.name} ({known})", repr(name), "check the name")

    def position(self, name: str) -> int:
        """Return the place of a loop in the nest, 0 outermost."""
        return self.loops.index(self.loop(name))


def bare(expr: Expr) -> Read | None:
    """Return the element that an expression only copies, or None."""
    element = expr.args[0] if isinstance(expr, Call) and expr.op == "vcopy" else expr
    return element if isinstance(element, Read) else None


def overwrites(state: "State", stage: Stage) -> str:
    """Return the tile that an elementwise one of the same place may be computed over, or "".

    It is the last reader of it there, and reads each element where, and before, it writes it.
    """
    first = _first_call(stage.expr, stage.axes[-1].name)
    order = [s.name for s in state.stages]
    moved = any(x.tail == "guard" and x.width > 1 for x in stage.loops)
    if first is None or stage.fold or stage.is_copy or stage.scope != "UB" or moved:
        return ""
    before = order[: order.index(stage.name) + 1]
    for read in stage.reads:
        tile = state.find(read.source)
        if not isinstance(tile, Stage) or tile.is_copy or tile.scope != "UB":
            continue
        alike = (tile.dtype, tile.shape, tile.attach) == (stage.dtype, stage.shape, stage.attach)
        last = all(r.name in before and r.attach == tile.attach for r in state.readers(tile.name))
        uses = [r.index for r in stage.reads if r.source == tile.name]
        own = {identity(stage.axes)} == set(uses) and len(uses) == first.args.count(read)
        if alike and last and own:
            return tile.name
    return ""


def _first_call(expr: Expr, lane: str) -> Call | None:
    """Return the first operation on elements along the lanes, None if there may be several."""
    args = dict.fromkeys(expr.args) if isinstance(expr, Call) else ()
    long = [
        a
        for a in args
        if isinstance(a, Call)
        and any(lane in dict(i.terms) for r in leaves(a) if isinstance(r, Read) for i in r.index)
    ]
    if len(long) == 1:
        return _first_call(long[0], lane)
    return expr if isinstance(expr, Call) and not long else None


@dataclass(frozen=True, slots=True)
class Fixed:
    """A stage computed by a hand-written kernel: its formula's kind, inputs, attributes."""

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
        known = ", ".join(s.name for s in self.stages)
        hint = "use cache_read to move it" if any(i.name == name for i in self.inputs) else "check"
        raise ScheduleError(f"a stage ({known})", repr(name), hint)

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
        """Return the stages computed in the nest of another one: anywhere, or at some loops."""
        found = []
        for s in self.stages:
            at, place = s.attach or ("", "")
            if isinstance(s, Stage) and at == host and (not places or place in places):
                found.append(s)
        return tuple(found)

    def put(self, stage: Stage | Fixed) -> "State":
        """Return the state with a stage replaced by one of the same name."""
        stages = [stage if s.name == stage.name else s for s in self.stages]
        return State(self.inputs, tuple(stages))

    def insert(self, stage: Stage | Fixed, before: str) -> "State":
        """Return the state with a stage added before another one."""
        at = next(n for n, s in enumerate(self.stages) if s.name == before)
        return State(self.inputs, (*self.stages[:at], stage, *self.stages[at:]))

    def drop(self, name: str) -> "State":
        """Return the state without a stage."""
        return State(self.inputs, tuple(s for s in self.stages if s.name != name))

    def new_name(self, wanted: str) -> str:
        """Return `wanted`, with a number if it is taken."""
        taken = {e.name for e in (*self.inputs, *self.stages)}
        name = wanted
        number = 1
        while name in taken:
            number += 1
            name = f"{wanted}_{number}"
        return name


def fits_in(one: Stage, host: Stage) -> bool:
    """True if an output can be computed beside another: of its shape, or with a last axis of 1.

    The scale of each row, (rows, 1), is stored where the row is, (rows, columns).
    """
    same = len(one.shape) == len(host.shape) and one.shape[:-1] == host.shape[:-1]
    return same and (one.shape[-1] in (1, host.shape[-1]))


def initial_state(outputs: Sequence[Tensor]) -> State:
    """Return the unscheduled state of a tensor program: every stage in GM, axes in order."""
    names = exprs.unique_names(exprs.topological(outputs))
    inputs: list[Input] = []
    stages: list[Stage | Fixed] = []
    for tensor, name in names.items():
        body = tensor.body
        wanted = tensor in outputs
        if body is None:
            if wanted:
                raise ShapeError("an output that is computed", f"the input {name}", "copy it")
            inputs.append(Input(name, tensor.dtype, tensor.shape))
        elif isinstance(body, exprs.Template):
            sources = tuple(names[t] for t in body.inputs)
            shapes = tuple(t.shape for t in body.inputs)
            made = (name, tensor.dtype, tensor.shape, body.kind, sources, shapes, body.attrs)
            stages.append(Fixed(*made, wanted))
        else:
            stages.append(_stage(tensor, body, names, wanted))
    return State(tuple(inputs), tuple(stages))


def _stage(tensor: Tensor, body: Compute, names: dict[Tensor, str], output: bool) -> Stage:
    """Return the stage of a formula; a product's axes are rounded up to whole fractals."""

    def named(element: exprs.Load) -> Expr:
        view = element.view if element.view != element.tensor.shape else ()
        return Read(names[element.tensor], element.tensor.dtype, element.index, view)

    def padded(axes: tuple[Axis, ...], unit: int) -> tuple[Axis, ...]:
        sizes = [
            -(-a.extent // unit) * unit if a.name in ("m", "n", "k") else a.extent for a in axes
        ]
        return tuple(replace(a, extent=size) for a, size in zip(axes, sizes, strict=True))

    expr = rewrite(body.expr, named)
    axes = body.axes
    reduce = body.reduce
    logical: Shape = ()
    if isinstance(expr, Call) and expr.op == "mac":
        axes = padded(axes, FRACTAL)
        reduce = padded(reduce, c0_of(expr.args[0].dtype))
        logical = tensor.shape
    given = names[tensor], tensor.dtype, axes, expr, body.fold, reduce, fresh(axes, reduce)
    return Stage(*given, output=output, logical=logical)


def fresh(axes: tuple[Axis, ...], reduce: tuple[Axis, ...] = ()) -> tuple[Leaf, ...]:
    """Return one loop per axis."""
    return tuple(Leaf(a.name, a.name, a.extent, 1, a.reduce) for a in (*axes, *reduce))


def copy_of(name: str, source: Stage | Fixed | Input, view: Shape = ()) -> Stage:
    """Return a tile in UB that copies a tensor, under the shape `view` if one is given."""
    axes = tuple(Axis(f"c{d}", n) for d, n in enumerate(view or source.shape))
    copy = Call("vcopy", (Read(source.name, source.dtype, identity(axes), view),), source.dtype)
    return Stage(name, source.dtype, axes, copy, loops=fresh(axes), scope="UB")


def redirect(stage: Stage, old: str, new: str) -> Stage:
    """Return a stage that reads `new` where it read `old`."""

    def leaf(element: Read) -> Expr:
        return replace(element, source=new) if element.source == old else element

    return replace(stage, expr=rewrite(stage.expr, leaf))


def identity(axes: tuple[Axis, ...]) -> tuple[Affine, ...]:
    """Return the index that names each axis once."""
    return tuple(Affine(0, ((a.name, 1),)) for a in axes)
