"""Matrix products in schedules: which operand a stage holds, its fractal layout, and conversions.

A fractal is a block of 16 x 16 numbers in fp16, so that a matrix of 100 x 60 takes 7 x 4 of them.
Inputs that only the cube reads, and outputs that only the cube writes, are kept in fractals by the
caller (`run` packs and unpacks them). A tensor that other stages use as well is row-major, and a
separate phase converts it.
"""

import math
from dataclasses import dataclass, replace

from ascend_lab.machine import isa, layout
from ascend_lab.operators.dsl.stages import Fixed, Input, Stage, State, identity, redirect
from ascend_lab.operators.dsl.tensor import Call, Expr, Read

CUBE_SCOPES = ("L1", "L0A", "L0B", "L0C")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Which dimensions of a tensor form a matrix for the cube, in the order of storage.

    `major` is the dimension along which fractal columns are counted (k, or n for C), `minor` that
    of fractal rows; `major_unit` and `minor_unit` are the sides of a fractal in elements.
    """

    major: int
    minor: int
    major_unit: int
    minor_unit: int
    batch: tuple[int, ...]

    @property
    def area(self) -> int:
        """Elements of one fractal."""
        return self.major_unit * self.minor_unit


def role_of(state: State, stage: Stage) -> str:
    """Return "A", "B" or "C" for the operand of a product that a stage holds; "" for others."""
    if stage.is_cube:
        return "C"
    if stage.scope in ("L0A", "L0B"):
        return stage.scope[-1]
    if stage.scope == "L1":
        readers = state.readers(stage.name)
        return role_of(state, readers[0]) if readers and isinstance(readers[0], Stage) else ""
    if not stage.is_copy and plain_read(stage.expr) is None:
        return ""
    source = state.find(stage.sources[0])
    if not isinstance(source, Stage) or source.scope == "GM":
        return ""
    return role_of(state, source)


def plain_read(expr: Expr) -> Read | None:
    """Return the element behind casts, copies and a ReLU on the way out of L0C."""
    while isinstance(expr, Call) and expr.op in ("vcopy", "vconv", "vrelu") and len(expr.args) == 1:
        expr = expr.args[0]
    return expr if isinstance(expr, Read) else None


def has_relu(expr: Expr) -> bool:
    """True if a ReLU is applied on the way."""
    return isinstance(expr, Call) and (expr.op == "vrelu" or any(map(has_relu, expr.args)))


def product_of(state: State, stage: Stage) -> Stage:
    """Return the cube stage a stage belongs to."""
    if stage.is_cube:
        return stage
    if stage.scope in CUBE_SCOPES:
        reader = state.readers(stage.name)[0]
        assert isinstance(reader, Stage)
        return product_of(state, reader)
    return product_of(state, state.stage(stage.sources[0]))


def matrix_of(cube: Stage, role: str) -> Matrix:
    """Return how operand "A", "B" or "C" of a cube stage is stored."""
    if role == "C":
        dims = {a.name: d for d, a in enumerate(cube.axes)}
        unit = isa.FRACTAL
    else:
        read = cube.reads["AB".index(role)]
        dims = {name: d for d, i in enumerate(read.index) for name, _ in i.terms}
        # Fractals of an operand are 16 rows of one block: 16 x 16 in fp16, 16 x 32 in int8.
        unit = isa.c0_of(read.dtype)
    major = dims["n" if role == "C" else "k"]
    minor = dims["n" if role == "B" else "m"]
    batch = tuple(d for d in dims.values() if d not in (major, minor))
    return Matrix(major, minor, unit, isa.FRACTAL, batch)


def matrix_map(shape: tuple[int, ...], matrix: Matrix, dtype: str) -> layout.AddressMap:
    """Return where every element of a row-major index lies in the fractal layout of `matrix`."""
    # The map of a matrix in FRACTAL_NZ, then its axes renamed to where they stand in the tensor: a
    # transposed operand is the same map with rows and columns exchanged.
    order = (*matrix.batch, matrix.minor, matrix.major)
    base = layout.address_map(
        "FRACTAL_NZ", tuple(shape[d] for d in order), dtype, c0=matrix.major_unit
    )
    pieces = tuple(replace(p, axis=order[p.axis]) for p in base.pieces)
    names = tuple(base.axes[order.index(d)] for d in range(len(shape)))
    return replace(base, axes=names, shape=tuple(shape), pieces=pieces)


def with_conversions(state: State) -> State:
    """Insert conversions between products and stages that use the same tensor row-major.

    A ReLU right behind a product is merged into it: it is applied on the way out of L0C.
    """
    for cube in state.cubes:
        state = _with_relu(state, cube)
    for cube in state.cubes:
        for role, read in zip("AB", cube.reads, strict=True):
            state = _operand(state, cube.name, read.source, role)
    for cube in state.cubes:
        state = _result(state, cube)
    return state


def _with_relu(state: State, cube: Stage) -> State:
    readers = state.readers(cube.name)
    if cube.output or len(readers) != 1 or not isinstance(readers[0], Stage):
        return state
    relu = readers[0]
    # A ReLU of C[m, n] at the same place can be done by the fix pipe while the sum leaves L0C; one
    # that reads C transposed cannot.
    element = relu.expr.args[0] if isinstance(relu.expr, Call) and relu.expr.op == "vrelu" else None
    if not isinstance(element, Read) or element.index != identity(relu.axes) or element.view:
        return state
    # y = relu(c), c = a @ b   becomes   y = a @ b with relu.
    merged = replace(cube, name=relu.name, output=relu.output, relu=True)
    stages = (merged if s.name == relu.name else s for s in state.stages if s.name != cube.name)
    return replace(state, stages=tuple(stages))


def _operand(state: State, cube: str, source: str, role: str) -> State:
    """Give a product a fractal copy of an operand, unless the operand is stored in fractals."""
    stage = state.stage(cube)
    matrix = matrix_of(stage, role)
    entry = state.find(source)
    # The caller packs an input for the cube if nobody else reads it, and all products want it
    # alike.
    if isinstance(entry, Input):
        matrices = [_stored_as(r, source) for r in state.readers(source)]
        if all(f and set(f) == {matrix} for f in matrices):
            return state
    # The result of one product may be the operand of the next as it lies: fractals of 16 x 16
    # numbers.
    is_float_product = isinstance(entry, Stage) and entry.is_cube and entry.dtype != "int32"
    if is_float_product and matrix_of(state.stage(source), "C") == matrix:
        return state
    name = state.new_name(f"{source}_fractal")
    shape = entry.shape
    to_fractals = Fixed(
        name,
        entry.dtype,
        shape,
        kind="to_fractal",
        sources=(source,),
        shapes=(shape,),
        attrs=(("matrix", matrix),),
    )
    return state.put(redirect(stage, source, name)).insert(to_fractals, before=cube)


def _stored_as(reader: Stage | Fixed, source: str) -> list[Matrix]:
    """Return how a product reads a tensor, once per operand; an empty list for other readers."""
    if not isinstance(reader, Stage) or not reader.is_cube:
        return []
    pairs = zip(reader.reads, "AB", strict=True)
    return [matrix_of(reader, role) for read, role in pairs if read.source == source]


def _result(state: State, stage: Stage) -> State:
    """Give a row-major copy of a product to readers that do not take it in fractals."""
    matrix = matrix_of(stage, "C")
    plain_readers = [r for r in state.readers(stage.name) if _stored_as(r, stage.name) != [matrix]]
    if not plain_readers:
        return state
    name = state.new_name(f"{stage.name}_nd")
    shape = stage.logical or stage.shape
    from_fractals = Fixed(
        name,
        stage.dtype,
        shape,
        kind="from_fractal",
        sources=(stage.name,),
        shapes=(stage.shape,),
        attrs=(("matrix", matrix),),
    )
    state = state.insert(from_fractals, before=plain_readers[0].name)
    for reader in plain_readers:
        if isinstance(reader, Stage):
            state = state.put(redirect(reader, stage.name, name))
        else:
            sources = tuple(name if x == stage.name else x for x in reader.sources)
            state = state.put(replace(reader, sources=sources))
    return state


def stored(state: State) -> dict[str, int]:
    """Return the elements every GM tensor takes; operands of the cube are stored in fractals."""
    sizes = {e.name: math.prod(e.shape) for e in (*state.inputs, *state.stages)}
    for name, matrix in matrices(state).items():
        units = {matrix.major: matrix.major_unit, matrix.minor: matrix.minor_unit}
        shape = ((n, units.get(d, 1)) for d, n in enumerate(state.find(name).shape))
        sizes[name] = math.prod(-(-n // unit) * unit for n, unit in shape)
    return sizes


def matrices(state: State) -> dict[str, Matrix]:
    """Return the GM tensors that are kept in fractal layout, and how."""
    by_tensor: dict[str, Matrix] = {}
    for cube in state.cubes:
        for read, role in zip(cube.reads, "AB", strict=True):
            origin = read.source
            # From the tile in L0A back over the one in L1 to the tensor in GM.
            while state.find(origin).scope != "GM":
                origin = state.stage(origin).sources[0]
            by_tensor[origin] = matrix_of(cube, role)
        out: Stage | Fixed = cube
        while out.scope != "GM":
            out = state.readers(out.name)[0]
        by_tensor[out.name] = matrix_of(cube, "C")
    for stage in state.stages:
        if isinstance(stage, Fixed) and stage.kind == "to_fractal":
            by_tensor[stage.name] = dict(stage.attrs)["matrix"]
    return by_tensor
