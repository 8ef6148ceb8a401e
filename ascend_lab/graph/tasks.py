"""A graph as kernels in order: lowered once per kind of piece, run on arrays by the executor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import AscendLabError, GraphError
from ascend_lab.graph.ai_cpu import CpuKernel, on_ai_cpu, run_cpu
from ascend_lab.graph.aliases import CUTTING, cut_offsets, view_nodes
from ascend_lab.graph.evaluate import checked_inputs
from ascend_lab.graph.ir import Graph, Node, Values, operator_of
from ascend_lab.graph.lower import Choice, Lowered, Piece, lower, packed, piece_of
from ascend_lab.graph.lower.piece import near_memory
from ascend_lab.layout import unpack
from ascend_lab.ops.operator import Operator
from ascend_lab.sim import execute, simulate_kernel

REMEMBERED = 4096
"""Kernels and times remembered: more than a large network has."""


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
        return self.piece.names.get(name.partition(".")[0], f"{self.name}/{name}")

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
    """A graph with layouts, and the tasks that compute it on a chip.

    Tasks first .. stop-1 of a scope are one super kernel: one launch, barriers between; an operator
    on the AI CPU ends the launch. `prefetch`: weights come into a cache before their kernel runs.
    `spilled` tensors are never put into a buffer.
    """

    graph: Graph
    chip: Chip
    tasks: tuple[Task, ...]
    scopes: tuple[tuple[int, int], ...] = ()
    prefetch: bool = False
    spilled: frozenset[str] = frozenset()


def compile_tasks(graph: Graph, chip: Chip, groups: Sequence[Sequence[Node]]) -> Compiled:
    """Compile groups of nodes, in order, to one task each; raises `GraphError` naming the node."""
    return Compiled(graph, chip, tuple(_task(graph, chip, group) for group in groups))


def _task(graph: Graph, chip: Chip, group: Sequence[Node]) -> Task:
    piece, lowered = piece_of(graph, group), None
    if not (len(group) == 1 and group[0].name in view_nodes(graph)):
        try:
            lowered = lowered_once(piece, chip)
        except AscendLabError as error:
            try:
                lowered = on_ai_cpu(piece, chip, error)
            except AscendLabError:
                needed = f"{group[0].name}: {error.needed}"
                raise type(error)(needed, error.got, error.remedy) from error
    names = tuple(node.name for node in group)
    return Task(names[-1], "+".join(node.op for node in group), names, piece, lowered)


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


# -- remembered -----------------------------------------------------------------------------------
def lowered_once(piece: Piece, chip: Chip, choice: Choice | None = None) -> Lowered:
    """Return the kernel of a piece, from memory if an equal one was lowered for the chip."""
    return _lowered(piece, chip, choice, _operators(piece))


def cycles_queued(piece: Piece, chip: Chip, *, warm: bool = False) -> int:
    """Return the cycles of a piece's kernel, queued launch included; remembered.

    L2 is cold, or holds the tensors that other kernels have written, unless one fills half of it.
    """
    return _cycles(piece, chip, _operators(piece), warm)


def _operators(piece: Piece) -> tuple[Operator, ...]:
    """Return what the nodes name: an operator that was registered anew is lowered anew."""
    return tuple(operator_of(node.op) for node in piece.graph.nodes)


@lru_cache(REMEMBERED)
def _lowered(
    piece: Piece, chip: Chip, choice: Choice | None, operators: tuple[Operator, ...]
) -> Lowered:
    found = lower(piece, chip, choice)
    own = {*piece.graph.inputs, *piece.graph.outputs} - piece.constants
    for buffer in found.kernel.tensors:
        if buffer.name in own:
            stored = math.prod(piece.type(buffer.name).stored_shape)
            if stored != buffer.elements:
                what = f"{buffer.elements} elements of {piece.names[buffer.name]}"
                raise GraphError(what, str(stored), "lower it for the tensor's layout")
    return found


@lru_cache(REMEMBERED)
def _cycles(piece: Piece, chip: Chip, operators: tuple[Operator, ...], warm: bool) -> int:
    kernel, memory = _lowered(piece, chip, None, operators).kernel, None
    if warm:
        memory = near_memory(kernel, piece, chip)
    timeline = simulate_kernel(kernel, chip, memory)
    return replace(timeline, start="queued").total_cycles


# -- values ---------------------------------------------------------------------------------------
def run_tasks(
    compiled: Compiled, inputs: Mapping[str, Any], names: Sequence[str] = ()
) -> dict[str, Values]:
    """Return the outputs as the kernels compute them, on poisoned memory and in their formats.

    Rewrites give outputs other names, in the same order: `names` are those to return them under.
    """
    graph, live = compiled.graph, {}
    for name, array in checked_inputs(graph, inputs).items():
        live[name] = packed(graph.types[name], array)
    for task in compiled.tasks:
        live.update(_run(task, compiled, live))
    found = {}
    for key, name in zip(names or graph.outputs, graph.outputs, strict=True):
        kind = graph.types[name]
        flat = live[name] if name in live else packed(kind, graph.constants[name].array())
        found[key] = (flat if kind.layout == "ND" else unpack(kind.map, flat)).reshape(kind.shape)
    return found


def _run(task: Task, compiled: Compiled, live: Mapping[str, Values]) -> dict[str, Values]:
    graph, inputs = compiled.graph, task.piece.graph.inputs

    def stored(value: str, name: str = "") -> Values:
        """Return an input as it lies in memory; constants are packed as the kernel asks."""
        if value in live:
            return live[value]
        constant = graph.constants[value]
        form = task.lowered.forms.get(name) if task.lowered else None
        return form(constant.array()) if form else packed(constant.type, constant.array())

    if task.lowered is None:
        node = graph.node(task.name)
        return _named_anew(graph, node, [stored(name) for name in node.inputs])
    kernel = task.lowered.kernel
    if isinstance(kernel, CpuKernel):
        node = graph.node(task.name)
        return run_cpu(graph, node, [stored(name) for name in node.inputs])
    tensors = dict(task.lowered.extra)
    for buffer in kernel.tensors:
        if buffer.name.partition(".")[0] in inputs:
            tensors[buffer.name] = stored(task.value(buffer.name), buffer.name)
    memory = execute(kernel, tensors, compiled.chip)
    return {task.value(n): np.asarray(memory[n]).reshape(-1) for n in task.piece.graph.outputs}


def _named_anew(graph: Graph, node: Node, given: Sequence[Values]) -> dict[str, Values]:
    """Return what a view writes: its operand, parts of it, or its operands one behind the other."""
    if node.op not in CUTTING:
        return {node.output: np.concatenate(given) if len(given) > 1 else given[0]}
    found = {}
    for name, offset in zip(node.outputs, cut_offsets(graph, node) or (), strict=True):
        kind = graph.types[name]
        first = offset // DTYPE_BYTES[kind.dtype]
        found[name] = given[0][first : first + math.prod(kind.stored_shape)]
    return found
