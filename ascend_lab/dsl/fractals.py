"""Tensors of the cube: their fractal layout in GM, and conversions where one is missing.

Inputs that only the cube reads, and outputs that only the cube writes, are kept in fractals by the
caller (`run` packs and unpacks them). A tensor that other stages touch as well is row-major; a
conversion phase stands between.
"""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.dsl.expr import Call, Read
from ascend_lab.dsl.matrices import Matrix, matrix_of
from ascend_lab.dsl.stages import Fixed, Input, Stage, State, identity, redirect
from ascend_lab.layout import AddressMap, address_map

ROLES = "AB"


def matrix_map(shape: tuple[int, ...], matrix: Matrix, dtype: str) -> AddressMap:
    """Return where every element of a row-major index lies in the fractal layout of `matrix`."""
    order = (*matrix.batch, matrix.minor, matrix.major)
    base = address_map("FRACTAL_NZ", tuple(shape[d] for d in order), dtype, c0=matrix.major_unit)
    pieces = tuple(replace(p, axis=order[p.axis]) for p in base.pieces)
    names = tuple(base.axes[order.index(d)] for d in range(len(shape)))
    return replace(base, axes=names, shape=tuple(shape), pieces=pieces)


def with_conversions(state: State) -> State:
    """Insert a conversion wherever a tensor of a matrix product is row-major on its other side.

    A ReLU right behind a product belongs to it: it is applied on the way out of L0C.
    """
    for stage in state.stages:
        if isinstance(stage, Stage) and stage.is_cube:
            state = _with_relu(state, stage)
    for stage in state.stages:
        if isinstance(stage, Stage) and stage.is_cube:
            for role, read in zip(ROLES, stage.reads, strict=True):
                state = _operand(state, stage.name, read.source, role)
    for stage in state.stages:
        if isinstance(stage, Stage) and stage.is_cube:
            state = _result(state, stage)
    return state


def _with_relu(state: State, cube: Stage) -> State:
    readers = state.readers(cube.name)
    if cube.output or len(readers) != 1 or not isinstance(readers[0], Stage):
        return state
    relu = readers[0]
    element = relu.expr.args[0] if isinstance(relu.expr, Call) and relu.expr.op == "vrelu" else None
    if not isinstance(element, Read) or element.index != identity(relu.axes) or element.view:
        return state
    merged = replace(cube, name=relu.name, output=relu.output, relu=True)
    stages = (merged if s.name == relu.name else s for s in state.stages if s.name != cube.name)
    return replace(state, stages=tuple(stages))


def _operand(state: State, cube: str, source: str, role: str) -> State:
    stage = state.stage(cube)
    matrix, entry = matrix_of(stage, role), state.find(source)
    if isinstance(entry, Input) and _all_agree(state, source, matrix):
        return state
    if isinstance(entry, Stage) and entry.is_cube and _same(entry, matrix):
        return state
    name = state.new_name(f"{source}_fractal")
    shape, attrs = entry.shape, (("matrix", matrix),)
    made = Fixed(name, entry.dtype, shape, "to_fractal", (source,), (shape,), attrs)
    return state.put(redirect(stage, source, name)).insert(made, before=cube)


def _all_agree(state: State, source: str, matrix: Matrix) -> bool:
    """True if all readers of an input are matrix products that store it the same way."""
    found = [_stored_as(r, source) for r in state.readers(source)]
    return all(f == [matrix] * len(f) and f for f in found)


def _stored_as(reader: Stage | Fixed, source: str) -> list[Matrix]:
    if not isinstance(reader, Stage) or not reader.is_cube:
        return []
    pairs = zip(reader.reads, ROLES, strict=True)
    return [matrix_of(reader, role) for read, role in pairs if read.source == source]


def _same(producer: Stage, matrix: Matrix) -> bool:
    """True if what a product writes is already what another one reads."""
    return producer.dtype != "int32" and matrix_of(producer, "C") == matrix


def _result(state: State, stage: Stage) -> State:
    """Give readers that are no matrix products of that layout a row-major copy of a result."""
    matrix = matrix_of(stage, "C")
    others = [r for r in state.readers(stage.name) if _stored_as(r, stage.name) != [matrix]]
    if not others:
        return state
    name = state.new_name(f"{stage.name}_nd")
    shape, attrs = stage.logical or stage.shape, (("matrix", matrix),)
    source, sizes = (stage.name,), (stage.shape,)
    made = Fixed(name, stage.dtype, shape, "from_fractal", source, sizes, attrs)
    state = state.insert(made, before=others[0].name)
    for reader in others:
        if isinstance(reader, Stage):
            state = state.put(redirect(reader, stage.name, name))
        else:
            sources = tuple(name if x == stage.name else x for x in reader.sources)
            state = state.put(replace(reader, sources=sources))
    return state
