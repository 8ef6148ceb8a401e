"""Runs the kernels of a compiled graph on arrays, and detects numbers that overflow their format.

int64    kernels compute in 32 bits and wrap around. A node whose results are int64 in the model is
         also computed exactly, and a number beyond 32 bits raises an error with the node's name.
fp16     a finite number that becomes infinite is reported with its node, even if later nodes hide
         it. The executor reports that a kernel has such numbers; computing each of the kernel's
         nodes exactly shows which node has them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ascend_lab.compiler import aliases, evaluate, ir, overflow
from ascend_lab.compiler.lower import packed
from ascend_lab.compiler.tasks import Compiled, CpuKernel, Task
from ascend_lab.machine import sim
from ascend_lab.machine.chip import DTYPE_BYTES
from ascend_lab.machine.layout import unpack
from ascend_lab.operators.ops import formats


def run_tasks(
    compiled: Compiled,
    inputs: Mapping[str, Any],
    names: Sequence[str] = (),
    overflows: list[overflow.Overflow] | None = None,
) -> dict[str, ir.Values]:
    """Return the outputs as the kernels compute them, in the kernels' number formats.

    Rewrites rename outputs but keep their order: `names` are the keys of the result. The nodes
    whose numbers exceed their format are appended to `overflows`, if that is given. Raises
    `GraphError` naming the node where 32 bits do not hold the model's int64 numbers.
    """
    graph = compiled.graph
    stored_values = {}
    for name, array in evaluate.checked_inputs(graph, inputs).items():
        # the layout that the kernels read: blocks or fractals, with padding
        stored_values[name] = packed(graph.types[name], array)
        if overflows is not None:
            entry = ir.Node(name, "input", (), (name,))
            array_given = np.asarray(inputs[name])
            overflowing = overflow.overflow_of(entry, (), [array_given], [graph.types[name].dtype])
            overflows += [overflowing] if overflowing else []
    for task in compiled.tasks:
        # kernels hold 32 bits and would wrap silently
        _check_int64(task, compiled, stored_values)
        overflow_signals: list[bool] = []
        # the executor calls back when a kernel makes infinity of finite numbers
        written = _run_task(task, compiled, stored_values, partial(overflow_signals.append, True))
        if overflows is not None:
            overflows += _overflows_of_task(
                task, compiled, stored_values, written, bool(overflow_signals)
            )
        stored_values.update(written)
    return {
        key: _logical_of(graph, name, stored_values)
        for key, name in zip(names or graph.outputs, graph.outputs, strict=True)
    }


def _overflows_of_task(
    task: Task,
    compiled: Compiled,
    live: Mapping[str, ir.Values],
    written: Mapping[str, ir.Values],
    has_overflow: bool,
) -> list[overflow.Overflow]:
    """Return the nodes of a task whose finite numbers exceed their format.

    `has_overflow` says that the kernel had some, but not which: each node is computed again in
    fp64.
    """
    graph = compiled.graph
    lowered = task.lowered
    if lowered is None:
        return []
    # the formats that networks are converted to: models come in fp32
    narrow_outputs = [
        name for name in written if graph.types[name].dtype in overflow.LARGEST_FINITE
    ]
    has_infinity = not all(_has_no_infinity(written[name]) for name in narrow_outputs)
    if not has_overflow and not (has_infinity and isinstance(lowered.kernel, CpuKernel)):
        return []
    nodes = [graph.producers[task.piece.names[node.output]] for node in task.piece.graph.nodes]
    unlocated = [
        overflow.Overflow(node.name, node.op, graph.types[node.output].dtype, None, None)
        for node in nodes
        if graph.types[node.output].dtype in overflow.LARGEST_FINITE
    ]
    # without constants ("bare") nodes cannot be computed again
    if not unlocated or (compiled.bare and task.piece.constants):
        return unlocated
    overflows, values = _overflows_of_nodes(graph, nodes, live)
    if not overflows and has_infinity and all(_has_no_infinity(array) for array in values.values()):
        # inside the kernel: what the nodes read and write is finite
        return unlocated[-1:]
    return overflows


def overflows_of(graph: ir.Graph, inputs: Mapping[str, Any]) -> list[overflow.Overflow]:
    """Return the nodes of a graph that overflow for these inputs, computed without kernels."""
    arrays = evaluate.checked_inputs(graph, inputs)
    live = {name: packed(graph.types[name], array) for name, array in arrays.items()}
    return _overflows_of_nodes(graph, graph.nodes, live)[0]


def _overflows_of_nodes(
    graph: ir.Graph, nodes: Sequence[ir.Node], live: Mapping[str, ir.Values]
) -> tuple[list[overflow.Overflow], dict[str, ir.Values]]:
    """Return which nodes overflow when each is computed exactly, and the values of all tensors.

    What a node writes is rounded to its format before the next reads it.
    """
    overflows: list[overflow.Overflow] = []
    values: dict[str, ir.Values] = {}
    for node in nodes:
        values |= {n: _logical_of(graph, n, live) for n in node.inputs if n not in values}
        arrays = [values[name] for name in node.inputs]
        exact = evaluate.exact_values(graph, node, arrays)
        kinds = graph.out_types(node)
        overflowing = overflow.overflow_of(node, arrays, exact, [kind.dtype for kind in kinds])
        overflows += [overflowing] if overflowing else []
        for name, value, kind in zip(node.outputs, exact, kinds, strict=True):
            # the next node reads what memory would hold
            values[name] = formats.round_to(value, kind.dtype).reshape(kind.shape)
    return overflows, values


def _has_no_infinity(array: ir.Values) -> bool:
    """Tell whether an array, padding included, has no infinities; it may have NaN."""
    return not np.isinf(array.astype(np.float64)).any()


def _logical_of(graph: ir.Graph, name: str, live: Mapping[str, ir.Values]) -> ir.Values:
    """Return the elements of a tensor that a kernel wrote, or of a constant."""
    if name in live:
        return logical(graph.types[name], live[name])
    return graph.constants[name].array()


def writes_int64(graph: ir.Graph, nodes: Sequence[ir.Node]) -> bool:
    """Tell whether nodes write numbers that are int64 in the model."""
    return any(name in graph.narrowed for node in nodes for name in node.outputs)


def _check_int64(task: Task, compiled: Compiled, live: Mapping[str, ir.Values]) -> None:
    """Raise `GraphError` naming a node of a task whose int64 numbers do not fit in 32 bits.

    A kernel would wrap them silently; so the task is first computed exactly.
    """
    graph = compiled.graph
    nodes = [graph.producers[task.piece.names[n.output]] for n in task.piece.graph.nodes]
    if task.lowered is None or not writes_int64(graph, nodes):
        return
    computed: dict[str, ir.Values] = {}
    for node in nodes:
        arrays = [
            computed[n] if n in computed else _logical_of(graph, n, live) for n in node.inputs
        ]
        # exact int64 arithmetic; numbers beyond 32 bits raise there
        computed |= zip(node.outputs, evaluate.compute(graph, node, arrays), strict=True)


def _run_task(
    task: Task, compiled: Compiled, live: Mapping[str, ir.Values], on_overflow: Callable[[], None]
) -> dict[str, ir.Values]:
    """Return what a task writes; call `on_overflow` if its kernel makes infinity of numbers."""
    graph = compiled.graph
    inputs = task.piece.graph.inputs

    def stored(value: str, name: str = "") -> ir.Values:
        """Return an input as stored in memory; constants are packed as the kernel requires."""
        if value in live:
            return live[value]
        constant = graph.constants[value]
        form = task.lowered.forms.get(name) if task.lowered else None
        return form(constant.array()) if form else packed(constant.type, constant.array())

    # a view writes nothing: its result is part of its operand
    if task.lowered is None:
        node = graph.node(task.name)
        return _view_values(graph, node, [stored(name) for name in node.inputs])
    kernel = task.lowered.kernel
    if isinstance(kernel, CpuKernel):
        node = graph.node(task.name)
        return run_cpu(graph, node, [stored(name) for name in node.inputs])
    # small constants that belong to the kernel, such as tables of indices
    tensors = dict(task.lowered.extra)
    for buffer in kernel.tensors:
        # "x.1" is the input "x" once more, stored in another form
        if buffer.name.partition(".")[0] in inputs:
            tensors[buffer.name] = stored(task.value(buffer.name), buffer.name)
    memory = sim.execute(kernel, tensors, compiled.chip, overflow=on_overflow)
    return {task.value(n): np.asarray(memory[n]).reshape(-1) for n in task.piece.graph.outputs}


def _view_values(
    graph: ir.Graph, node: ir.Node, operands: Sequence[ir.Values]
) -> dict[str, ir.Values]:
    """Return a view's outputs: its operand, pieces of it, or its operands joined end to end."""
    if node.op not in aliases.CUTTING_OPS:
        return {node.output: np.concatenate(operands) if len(operands) > 1 else operands[0]}
    views = {}
    for name, offset in zip(node.outputs, aliases.cut_offsets(graph, node) or (), strict=True):
        kind = graph.types[name]
        # an offset in bytes, from the start of the operand
        start = offset // DTYPE_BYTES[kind.dtype]
        views[name] = operands[0][start : start + math.prod(kind.stored_shape)]
    return views


def run_cpu(graph: ir.Graph, node: ir.Node, stored: Sequence[ir.Values]) -> dict[str, ir.Values]:
    """Return the outputs of a node on the AI CPU; operands and outputs are stored, flat arrays."""
    arrays = [logical(kind, flat) for kind, flat in zip(graph.in_types(node), stored, strict=True)]
    results = evaluate.compute(graph, node, arrays)
    return {
        n: packed(graph.types[n], np.asarray(v)) for n, v in zip(node.outputs, results, strict=True)
    }


def logical(kind: ir.TensorType, flat: ir.Values) -> ir.Values:
    """Return a tensor's elements in its shape, from the flat array stored in memory."""
    return (flat if kind.layout == "ND" else unpack(kind.map, flat)).reshape(kind.shape)
