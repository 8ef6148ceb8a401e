"""How a piece is to be computed where the default is not wanted: what a tuner decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ascend_lab.errors import InputError
from ascend_lab.graph.ir import Graph, Node, TensorType, Values, to_text
from ascend_lab.isa import Kernel
from ascend_lab.kernels import GemmSchedule
from ascend_lab.layout import AddressMap, pack


@dataclass(frozen=True, slots=True)
class Choice:
    """A tiling of the cube's kernel, or the steps of a schedule (JSON of `dsl.Schedule`)."""

    tiling: GemmSchedule | None = None
    steps: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        if self.tiling is not None:
            return {"tiling": self.tiling.as_dict()}
        return {"steps": json.loads(self.steps)["steps"]}


def choice_of(data: Mapping[str, Any], chip_name: str) -> Choice:
    """Return the choice that `Choice.as_dict` wrote; raise `InputError` for anything else."""
    try:
        if "tiling" in data:
            return Choice(tiling=GemmSchedule(**data["tiling"]))
        return Choice(steps=json.dumps({"chip": chip_name, "steps": data["steps"]}))
    except (KeyError, TypeError) as error:
        raise InputError(
            "a tiling or the steps of a schedule", str(data)[:80], "tune it again"
        ) from error


# A piece of a graph that becomes one kernel: its nodes as a small graph of its own.
#
# Names inside are canonical (x0, x1, ... read; y0, ... written; v0, ... between), so that equal
# pieces, such as the repeated blocks of a residual network, print the same text and are compiled
# once.


Form = Callable[[Values], Values]
"""From the logical array of a constant to the flat array that lies in device memory."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A small graph, which of its inputs are constants, and what its names are in the network."""

    graph: Graph
    constants: frozenset[str]
    names: Mapping[str, str]

    @property
    def key(self) -> str:
        """Text that is equal for equal pieces."""
        return to_text(self.graph) + " ".join(sorted(self.constants))

    @property
    def output(self) -> TensorType:
        """Type of the last tensor written."""
        return self.graph.types[self.graph.outputs[-1]]

    def type(self, name: str) -> TensorType:
        """Return the type of a canonical name."""
        return self.graph.types[name]


@dataclass(frozen=True, slots=True)
class Lowered:
    """The kernel of a piece: GM tensors bear canonical names.

    `forms` says how constants are stored where that is not their type's layout; `extra` are small
    tensors of the kernel's own.
    """

    kernel: Kernel
    forms: Mapping[str, Form] = field(default_factory=dict)
    extra: Mapping[str, Values] = field(default_factory=dict)


def piece_of(graph: Graph, nodes: Sequence[Node]) -> Piece:
    """Return the nodes, given in order, as a piece; it writes what is read outside."""
    inside = {node.name for node in nodes}
    written = [name for node in nodes for name in node.outputs]
    leaves = [
        n
        for n in written
        if n in graph.outputs or any(r.name not in inside for r in graph.readers[n])
    ]
    reads = [n for node in nodes for n in node.inputs if n not in written]
    names = {old: f"x{i}" for i, old in enumerate(dict.fromkeys(reads))}
    constants = frozenset(new for old, new in names.items() if old in graph.constants)
    inputs = tuple(names.values())
    for old in written:
        if old in leaves:
            names[old] = f"y{leaves.index(old)}"
        else:
            names[old] = f"v{len(names)}"
    canonical = tuple(
        replace(
            node,
            name=f"n{i}",
            inputs=tuple(names[n] for n in node.inputs),
            outputs=tuple(names[n] for n in node.outputs),
        )
        for i, node in enumerate(nodes)
    )
    types = {new: graph.types[old] for old, new in names.items()}
    small = Graph("piece", inputs, tuple(names[n] for n in leaves), canonical, types)
    return Piece(small, constants, {new: old for old, new in names.items()})


# How operands lie in memory beside a tensor in some layout, and constants packed that way.
#
# In a layout every logical axis is cut into pieces. An operand that broadcasts along an axis has
# one
# element there, so all its pieces of that axis have length 1: NumPy's rule holds for the stored
# shapes as it does for the logical ones, and elementwise work needs no other.


def maps_between(one: TensorType, two: TensorType) -> tuple[AddressMap, AddressMap]:
    """Return the maps of two layouts of one tensor, as of plain arrays.

    Here an axis is known by its place: channels of an image may be a batch of matrices.
    """
    first, second = (replace(kind.map, format="ND") for kind in (one, two))
    return first, second


def packed(kind: TensorType, array: Values) -> Values:
    """Return a logical array as it lies in memory, flat."""
    if kind.layout == "ND":
        return np.ascontiguousarray(array).reshape(-1)
    return pack(kind.map, array).reshape(-1)


def beside(shape: Sequence[int], main: TensorType) -> tuple[int, ...]:
    """Return the stored shape of an operand of logical `shape` beside a tensor of type `main`."""
    sizes = _aligned(shape, main)
    return tuple(p.count if sizes[p.axis] == main.shape[p.axis] else 1 for p in main.map.pieces)


def pack_beside(array: Values, main: TensorType) -> Values:
    """Return an operand's elements in the order of `beside`; padding is zero."""
    layout = main.map
    sizes = _aligned(array.shape, main)
    array = array.reshape(sizes)
    pads, split, place = [], [], []
    for axis, size in enumerate(sizes):
        own = layout.of_axis(axis)
        counts = [p.count if size == main.shape[axis] else 1 for p in own]
        whole = int(np.prod(counts))
        pads.append((0, whole - size))
        place += [layout.pieces.index(p) for p in own]
        split += counts
    cut = np.pad(array, pads).reshape(split)
    return np.ascontiguousarray(cut.transpose(np.argsort(place)))


def _aligned(shape: Sequence[int], main: TensorType) -> tuple[int, ...]:
    return (1,) * (len(main.shape) - len(shape)) + tuple(shape)
