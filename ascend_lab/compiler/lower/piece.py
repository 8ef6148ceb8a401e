"""Defines `Piece`, a part of a graph that becomes one kernel, `Lowered`, its kernel, and `Choice`.

A tensor has a new name in a piece (x0, x1, ... are read, y0, ... written, v0, ... in between), so
that equal pieces, such as the repeated blocks of a residual network, have the same text and are
lowered once.

An operand that broadcasts along an axis has one element there. A layout cuts every axis into
pieces, and all pieces of that axis then have length 1: NumPy's rule for broadcasting holds for
stored shapes as it does for logical ones.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.compiler.ir import Graph, Node, TensorType, Values, to_text
from ascend_lab.errors import UnsupportedError
from ascend_lab.machine import isa, layout, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.operators import kernels

Form = Callable[[Values], Values]
"""Turns the logical array of a constant into the flat array stored in device memory."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A small graph, which of its inputs are constants, and what its names are in the network.

    Pieces with equal keys are equal, whatever their names in a network are.
    """

    graph: Graph
    constants: frozenset[str]
    names: Mapping[str, str]

    @cached_property
    def key(self) -> str:
        """Text that is equal for equal pieces."""
        return to_text(self.graph) + " ".join(sorted(self.constants))

    def __eq__(self, other: object) -> bool:
        """Tell whether both become the same kernel."""
        return isinstance(other, Piece) and self.key == other.key

    def __hash__(self) -> int:
        """Return the hash of the key."""
        return hash(self.key)

    @property
    def output(self) -> TensorType:
        """Type of the last tensor written."""
        return self.graph.types[self.graph.outputs[-1]]

    def type(self, name: str) -> TensorType:
        """Return the type of a canonical name."""
        return self.graph.types[name]

    def part(self, nodes: Sequence[Node]) -> "Piece":
        """Return some nodes of the piece as a piece with the same names."""
        written = {name for node in nodes for name in node.outputs}
        # a dictionary keeps the order, and each name once
        reads = dict.fromkeys(n for node in nodes for n in node.inputs if n not in written)
        outs = (nodes[-1].output,)
        graph = replace(self.graph, nodes=tuple(nodes), inputs=tuple(reads), outputs=outs)
        return replace(self, graph=graph, constants=self.constants & reads.keys())


@dataclass(frozen=True, slots=True)
class Lowered:
    """The kernel of a piece; its tensors in device memory have the piece's names.

    `forms` says how constants are stored that are not in their type's layout; `extra` are small
    constants of the kernel. `tiling` is set if the tiles matter later: for products, and for tiles
    across images. `near` is set if the kernel was timed to compare it with others, on memory whose
    L2 holds what other kernels wrote (`near_memory`): its cycles, and those that a launch on cube
    and vector cores adds.
    """

    kernel: isa.Kernel
    forms: Mapping[str, Form] = field(default_factory=dict)
    extra: Mapping[str, Values] = field(default_factory=dict)
    tiling: kernels.GemmSchedule | None = None
    near: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What a tuner decides: a tiling of the cube's kernel, or the steps of a schedule in JSON."""

    tiling: kernels.GemmSchedule | None = None
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
            return Choice(tiling=kernels.GemmSchedule.of(data["tiling"]))
        return Choice(steps=json.dumps({"chip": chip_name, "steps": data["steps"]}))
    except (KeyError, TypeError, AttributeError) as error:
        raise errors.InputError(
            "a tiling or the steps of a schedule", str(data)[:80], "tune it again"
        ) from error


def read_outside(graph: Graph, nodes: Sequence[Node]) -> list[str]:
    """Return the tensors that `nodes` write and that other nodes or the graph's outputs need."""
    inside = {node.name for node in nodes}
    return [
        name
        for node in nodes
        for name in node.outputs
        if name in graph.outputs or any(r.name not in inside for r in graph.readers[name])
    ]


def piece_of(graph: Graph, nodes: Sequence[Node]) -> Piece:
    """Return the nodes, given in order, as a piece; its outputs are the tensors read outside."""
    written = [name for node in nodes for name in node.outputs]
    results = read_outside(graph, nodes)
    reads = [n for node in nodes for n in node.inputs if n not in written]
    # relu(conv(image, layer1.weight)) reads x0 and x1, makes v2 and leaves y0
    names = {name: f"x{i}" for i, name in enumerate(dict.fromkeys(reads))}
    constants = frozenset(names[name] for name in names if name in graph.constants)
    inputs = tuple(names.values())
    for name in written:
        names[name] = f"y{results.index(name)}" if name in results else f"v{len(names)}"
    canonical = tuple(
        replace(
            node,
            name=f"n{i}",
            inputs=tuple(names[n] for n in node.inputs),
            outputs=tuple(names[n] for n in node.outputs),
        )
        for i, node in enumerate(nodes)
    )
    types = {inside: graph.types[name] for name, inside in names.items()}
    small = Graph("piece", inputs, tuple(names[n] for n in results), canonical, types)
    # error messages use the network's names: there v2 is called `conv1`
    return Piece(small, constants, {inside: name for name, inside in names.items()})


def near_memory(kernel: isa.Kernel, piece: Piece, chip: Chip) -> sim.DeviceMemory:
    """Return a memory whose L2 holds this kernel's activations of at most half its size each."""
    # weights were last read in the previous run of the network: they have left L2
    activations = {*piece.graph.inputs} - piece.constants
    small = [b for b in kernel.tensors if 2 * b.size_bytes <= chip.l2.size_bytes]
    return sim.DeviceMemory.holding(chip, small, activations)


def maps_between(one: TensorType, two: TensorType) -> tuple[layout.AddressMap, layout.AddressMap]:
    """Return the address maps of two layouts of one tensor, both with the format "ND".

    So axes are matched by position: the channels of an image may be the batch of matrices.
    """
    return replace(one.map, format="ND"), replace(two.map, format="ND")


def packed(kind: TensorType, array: Values) -> Values:
    """Return a logical array as the flat array stored in memory."""
    stored = np.ascontiguousarray(array) if kind.layout == "ND" else layout.pack(kind.map, array)
    return stored.reshape(-1)


def broadcast_shape(shape: Sequence[int], main: TensorType) -> tuple[int, ...]:
    """Return the stored shape of an operand of logical `shape` that broadcasts to type `main`."""
    # a scale (1, 40, 1, 1) of an image in NC1HWC0 is stored as (1, 3, 1, 1, 16)
    sizes = _aligned(shape, main)
    return tuple(p.count if sizes[p.axis] == main.shape[p.axis] else 1 for p in main.map.pieces)


def pack_broadcast(array: Values, main: TensorType) -> Values:
    """Return an operand's elements as `broadcast_shape` stores them, flat; padding is zero."""
    sizes = _aligned(array.shape, main)
    pads = []
    piece_counts = []
    stored_places = []
    # each axis is padded to whole blocks and cut into pieces, 40 channels as 48 = 3 x 16; then the
    # pieces of all axes are put in the order in which they are stored
    for axis, size in enumerate(sizes):
        pieces = main.map.of_axis(axis)
        counts = [p.count if size == main.shape[axis] else 1 for p in pieces]
        pads.append((0, int(np.prod(counts)) - size))
        stored_places += [main.map.pieces.index(p) for p in pieces]
        piece_counts += counts
    cut = np.pad(array.reshape(sizes), pads).reshape(piece_counts)
    return np.ascontiguousarray(cut.transpose(np.argsort(stored_places))).reshape(-1)


def _aligned(shape: Sequence[int], main: TensorType) -> tuple[int, ...]:
    """Return a shape with leading axes of 1, as NumPy adds them: (40, 1, 1) -> (1, 40, 1, 1)."""
    return (1,) * (len(main.shape) - len(shape)) + tuple(shape)


def refuse_packed_twice(piece: Piece) -> None:
    """Raise `UnsupportedError` if a node after the cube operator reads the latter's constant."""
    nodes = piece.graph.nodes
    read_later = {name for node in nodes[1:] for name in node.inputs}
    # (x @ w) * w: the cube reads w in fractals, the epilogue in the layout of the result
    read_twice = sorted(piece.constants.intersection(nodes[0].inputs) & read_later)
    if read_twice:
        constant = piece.names[read_twice[0]]
        raise UnsupportedError("a constant packed in one way", constant, "cut here")
