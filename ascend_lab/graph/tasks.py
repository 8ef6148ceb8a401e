"""A graph as kernels in order: compiled once per kind of piece, run on arrays by the executor."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import AscendLabError, GraphError
from ascend_lab.graph.ai_cpu import CpuKernel, on_ai_cpu, run_cpu
from ascend_lab.graph.aliases import CUTTING, cut_offsets, view_nodes
from ascend_lab.graph.evaluate import checked_inputs
from ascend_lab.graph.ir import Graph, Node, operator_of
from ascend_lab.graph.lower import Choice, Lowered, Piece, lower, packed, piece_of
from ascend_lab.isa import Kernel
from ascend_lab.layout import unpack
from ascend_lab.sim import execute, simulate_kernel

Values = NDArray[Any]
_TIMED: dict[tuple[int, int], tuple[Kernel, Chip, int]] = {}
REMEMBERED = 4096
"""Kernels and times remembered: more than a large network has."""
Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept")
_LOWERED: dict[tuple[Hashable, ...], tuple[Lowered, Sequence[object]]] = {}
"""Kernels by piece and identity of chip and operators, kept so that no others take their place."""


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel of a network, or a view, whose kernel is None: new names for the same bytes.

    An operator without a kernel runs on the AI CPU: its kernel is a `CpuKernel`.
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    piece: Piece
    lowered: Lowered | None

    def value(self, name: str) -> str:
        """Return what a tensor of the kernel is called in the network; itself if it is its own."""
        base = name.partition(".")[0]
        return self.piece.names.get(base, f"{self.name}/{name}")

    @property
    def reads(self) -> tuple[str, ...]:
        """Network names read."""
        return tuple(self.piece.names[n] for n in self.piece.graph.inputs)

    @property
    def writes(self) -> tuple[str, ...]:
        """Network names written."""
        return tuple(self.piece.names[n] for n in self.piece.graph.outputs)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph with layouts, and the tasks that compute it on a chip."""

    graph: Graph
    chip: Chip
    tasks: tuple[Task, ...]


def compile_tasks(graph: Graph, chip: Chip, groups: Sequence[Sequence[Node]]) -> Compiled:
    """Compile groups of nodes, in order, to one task each; raises `GraphError` naming the node."""
    return Compiled(graph, chip, tuple(_task(graph, chip, group) for group in groups))


def _task(graph: Graph, chip: Chip, group: Sequence[Node]) -> Task:
    piece = piece_of(graph, group)
    label = "+".join(node.op for node in group)
    view = len(group) == 1 and is_view(graph, group[0])
    try:
        lowered = None if view else lowered_once(piece, chip)
    except AscendLabError as error:
        try:
            lowered = on_ai_cpu(piece, chip, error)
        except AscendLabError:
            needed = f"{group[0].name}: {error.needed}"
            raise type(error)(needed, error.got, error.remedy) from error
    return Task(group[-1].name, label, tuple(n.name for n in group), piece, lowered)


def with_choices(compiled: Compiled, choices: Mapping[str, Choice]) -> Compiled:
    """Return the network with the kernels of some pieces, by `Piece.key`, as a tuner chose."""
    chip = compiled.chip
    tasks = tuple(
        replace(task, lowered=lowered_once(task.piece, chip, choices[task.piece.key]))
        if task.lowered is not None and task.piece.key in choices
        else task
        for task in compiled.tasks
    )
    return replace(compiled, tasks=tasks)


def lowered_once(piece: Piece, chip: Chip, choice: Choice | None = None) -> Lowered:
    """Return the kernel of a piece, from memory if an equal one was lowered for the chip.

    Operators count by identity: one that was registered anew is lowered anew.
    """
    parts = (chip, *(operator_of(node.op) for node in piece.graph.nodes))
    key = (piece.key, choice, tuple(map(id, parts)))
    if key not in _LOWERED:
        found = lower(piece, chip, choice)
        _check_sizes(piece, found)
        keep(_LOWERED, key, (found, parts))
    return _LOWERED[key][0]


def keep(memory: dict[Key, Kept], key: Key, value: Kept) -> None:
    """Remember a value; of more than `REMEMBERED` the oldest is forgotten."""
    if len(memory) >= REMEMBERED:
        del memory[next(iter(memory))]
    memory[key] = value


def _check_sizes(piece: Piece, lowered: Lowered) -> None:
    """Raise `GraphError` if a kernel reads or writes more or less than a tensor's layout stores."""
    own = {*piece.graph.inputs, *piece.graph.outputs} - piece.constants
    for buffer in lowered.kernel.tensors:
        if buffer.name in own:
            stored = math.prod(piece.type(buffer.name).stored_shape)
            if stored != buffer.elements:
                what = f"{buffer.elements} elements of {piece.names[buffer.name]}"
                raise GraphError(what, str(stored), "lower it for the tensor's layout")


def timed_once(kernel: Kernel, chip: Chip) -> int:
    """Return the cycles of a kernel on cold L2, launch included, from memory if timed before."""
    key = (id(kernel), id(chip))
    if key not in _TIMED:
        keep(_TIMED, key, (kernel, chip, simulate_kernel(kernel, chip).total_cycles))
    return _TIMED[key][2]


def is_view(graph: Graph, node: Node) -> bool:
    """Tell whether a node only names bytes anew and needs no kernel; see `graph.aliases`."""
    return node.name in view_nodes(graph)


def run_tasks(compiled: Compiled, inputs: Mapping[str, Any]) -> dict[str, Values]:
    """Return the outputs as the kernels compute them, on poisoned memory and in their formats."""
    graph, live = compiled.graph, {}
    for name, array in checked_inputs(graph, inputs).items():
        live[name] = packed(graph.types[name], array)
    for task in compiled.tasks:
        live.update(_run(task, compiled, live))
    found = {}
    for name in graph.outputs:
        kind = graph.types[name]
        flat = live[name] if name in live else packed(kind, graph.constants[name].array())
        found[name] = (flat if kind.layout == "ND" else unpack(kind.map, flat)).reshape(kind.shape)
    return found


def _run(task: Task, compiled: Compiled, live: Mapping[str, Values]) -> dict[str, Values]:
    if task.lowered is None:
        return _named_anew(task, compiled, live)
    if isinstance(task.lowered.kernel, CpuKernel):
        node = compiled.graph.node(task.name)
        stored = [_stored(task, compiled, "", name, live) for name in node.inputs]
        return run_cpu(compiled.graph, node, stored)
    tensors = dict(task.lowered.extra)
    for buffer in task.lowered.kernel.tensors:
        base = buffer.name.partition(".")[0]
        if base in task.piece.graph.inputs:
            tensors[buffer.name] = _stored(
                task, compiled, buffer.name, task.value(buffer.name), live
            )
    memory = execute(task.lowered.kernel, tensors, compiled.chip)
    return {task.value(n): np.asarray(memory[n]).reshape(-1) for n in task.piece.graph.outputs}


def _named_anew(task: Task, compiled: Compiled, live: Mapping[str, Values]) -> dict[str, Values]:
    """Return what a view writes: its operand, parts of it, or its operands one behind the other."""
    node = compiled.graph.node(task.name)
    given = [live[n] if n in live else _stored(task, compiled, "", n, live) for n in node.inputs]
    if node.op not in CUTTING:
        return {node.output: np.concatenate(given) if len(given) > 1 else given[0]}
    found = {}
    for name, offset in zip(node.outputs, cut_offsets(compiled.graph, node) or (), strict=True):
        kind = compiled.graph.types[name]
        first = offset // DTYPE_BYTES[kind.dtype]
        found[name] = given[0][first : first + math.prod(kind.stored_shape)]
    return found


def _stored(
    task: Task, compiled: Compiled, name: str, value: str, live: Mapping[str, Values]
) -> Values:
    """Return an input of a task as it lies in memory; constants are packed as the kernel asks."""
    if value in live:
        return live[value]
    constant = compiled.graph.constants[value]
    form = task.lowered.forms.get(name) if task.lowered else None
    return form(constant.array()) if form else packed(constant.type, constant.array())
