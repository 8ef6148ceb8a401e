"""The values of a compiled graph: its kernels run on arrays, and what they lose on the way.

int64    kernels hold 32 bits and wrap: what makes int64 numbers of the model is computed beside
         its kernel, and numbers beyond are refused by the node's name
fp16     a finite number that becomes infinite is told with its node, though what follows hides
         it: the executor tells that a kernel has some, and computing each of its nodes exactly
         tells which
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
    """Return the outputs as the kernels compute them, on poisoned memory and in their formats.

    Rewrites give outputs other names, in the same order: `names` are those to return them under.
    `overflows` gets the nodes whose numbers leave their format, hidden from the outputs or not.
    Raises `GraphError` naming the node where 32 bits do not hold the model's int64 numbers.
    """
    graph = compiled.graph
    live = {}
    for name, array in evaluate.checked_inputs(graph, inputs).items():
        # stored as the kernels read it: in blocks, in fractals, padded
        live[name] = packed(graph.types[name], array)
        if overflows is not None:
            entry = ir.Node(name, "input", (), (name,))
            array_given = np.asarray(inputs[name])
            lost = overflow.overflow_of(entry, (), [array_given], [graph.types[name].dtype])
            overflows += [lost] if lost else []
    for task in compiled.tasks:
        # kernels hold 32 bits and would wrap silently
        _check_int64(task, compiled, live)
        beyond: list[bool] = []
        # the executor calls back when a kernel makes infinity of finite numbers
        written = _run(task, compiled, live, partial(beyond.append, True))
        if overflows is not None:
            overflows += _overflows(task, compiled, live, written, bool(beyond))
        live.update(written)
    return {
        key: _logical_of(graph, name, live)
        for key, name in zip(names or graph.outputs, graph.outputs, strict=True)
    }


def _overflows(
    task: Task,
    compiled: Compiled,
    live: Mapping[str, ir.Values],
    written: Mapping[str, ir.Values],
    beyond: bool,
) -> list[overflow.Overflow]:
    """Return the nodes of a task whose finite numbers left their format.

    A kernel tells that some did (`beyond`), but not which: each node is computed again in fp64.
    """
    graph = compiled.graph
    lowered = task.lowered
    if lowered is None:
        return []
    # the formats that networks are converted to: models come in fp32
    halves = [name for name in written if graph.types[name].dtype in overflow.LARGEST_FINITE]
    lost = not all(_finite(written[name]) for name in halves)
    if not beyond and not (lost and isinstance(lowered.kernel, CpuKernel)):
        return []
    nodes = [graph.producers[task.piece.names[node.output]] for node in task.piece.graph.nodes]
    unknown = [
        overflow.Overflow(node.name, node.op, graph.types[node.output].dtype, None, None)
        for node in nodes
        if graph.types[node.output].dtype in overflow.LARGEST_FINITE
    ]
    # without constants ("bare") nodes cannot be computed again
    if not unknown or (compiled.bare and task.piece.constants):
        return unknown
    overflows, values = _computed_again(graph, nodes, live)
    if not overflows and lost and all(_finite(array) for array in values.values()):
        # inside the kernel: what the nodes read and write is finite
        return unknown[-1:]
    return overflows


def overflows_of(graph: ir.Graph, inputs: Mapping[str, Any]) -> list[overflow.Overflow]:
    """Return which nodes of a graph in its formats overflow for some inputs, without kernels."""
    arrays = evaluate.checked_inputs(graph, inputs)
    live = {name: packed(graph.types[name], array) for name, array in arrays.items()}
    return _computed_again(graph, graph.nodes, live)[0]


def _computed_again(
    graph: ir.Graph, nodes: Sequence[ir.Node], live: Mapping[str, ir.Values]
) -> tuple[list[overflow.Overflow], dict[str, ir.Values]]:
    """Return which nodes overflow when each is computed exactly, and all that they read or write.

    What a node writes is rounded to its format before the next reads it.
    """
    overflows: list[overflow.Overflow] = []
    values: dict[str, ir.Values] = {}
    for node in nodes:
        values |= {n: _logical_of(graph, n, live) for n in node.inputs if n not in values}
        arrays = [values[name] for name in node.inputs]
        exact = evaluate.exact_values(graph, node, arrays)
        kinds = graph.out_types(node)
        lost = overflow.overflow_of(node, arrays, exact, [kind.dtype for kind in kinds])
        overflows += [lost] if lost else []
        for name, value, kind in zip(node.outputs, exact, kinds, strict=True):
            # the next node reads what memory would hold
            values[name] = formats.round_to(value, kind.dtype).reshape(kind.shape)
    return overflows, values


def _finite(array: ir.Values) -> bool:
    """Tell whether an array in any format, padding included, has no infinities: NaN may be."""
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

    Kernels wrap them silently: what a task computes is computed exactly first.
    """
    graph = compiled.graph
    nodes = [graph.producers[task.piece.names[n.output]] for n in task.piece.graph.nodes]
    if task.lowered is None or not writes_int64(graph, nodes):
        return
    inner: dict[str, ir.Values] = {}
    for node in nodes:
        arrays = [inner[n] if n in inner else _logical_of(graph, n, live) for n in node.inputs]
        # exact int64 arithmetic; numbers beyond 32 bits raise there
        inner |= zip(node.outputs, evaluate.compute(graph, node, arrays), strict=True)


def _run(
    task: Task, compiled: Compiled, live: Mapping[str, ir.Values], overflow: Callable[[], None]
) -> dict[str, ir.Values]:
    graph = compiled.graph
    inputs = task.piece.graph.inputs

    def stored(value: str, name: str = "") -> ir.Values:
        """Return an input as it lies in memory; constants are packed as the kernel asks."""
        if value in live:
            return live[value]
        constant = graph.constants[value]
        form = task.lowered.forms.get(name) if task.lowered else None
        return form(constant.array()) if form else packed(constant.type, constant.array())

    # a view: it writes nothing, its result is part of its operand
    if task.lowered is None:
        node = graph.node(task.name)
        return _named_anew(graph, node, [stored(name) for name in node.inputs])
    kernel = task.lowered.kernel
    if isinstance(kernel, CpuKernel):
        node = graph.node(task.name)
        return run_cpu(graph, node, [stored(name) for name in node.inputs])
    # small tensors of the kernel's own, such as tables of indices
    tensors = dict(task.lowered.extra)
    for buffer in kernel.tensors:
        # "x.1" is a second tensor of the input "x", of another form
        if buffer.name.partition(".")[0] in inputs:
            tensors[buffer.name] = stored(task.value(buffer.name), buffer.name)
    memory = sim.execute(kernel, tensors, compiled.chip, overflow=overflow)
    return {task.value(n): np.asarray(memory[n]).reshape(-1) for n in task.piece.graph.outputs}


def _named_anew(graph: ir.Graph, node: ir.Node, given: Sequence[ir.Values]) -> dict[str, ir.Values]:
    """Return what a view writes: its operand, parts of it, or its operands one behind the other."""
    if node.op not in aliases.CUTTING:
        return {node.output: np.concatenate(given) if len(given) > 1 else given[0]}
    views = {}
    for name, offset in zip(node.outputs, aliases.cut_offsets(graph, node) or (), strict=True):
        kind = graph.types[name]
        # an offset in bytes, from the start of the operand
        start = offset // DTYPE_BYTES[kind.dtype]
        views[name] = given[0][start : start + math.prod(kind.stored_shape)]
    return views


def run_cpu(graph: ir.Graph, node: ir.Node, stored: Sequence[ir.Values]) -> dict[str, ir.Values]:
    """Return what a node writes, from and to flat arrays as they lie in memory."""
    arrays = [logical(kind, flat) for kind, flat in zip(graph.in_types(node), stored, strict=True)]
    results = evaluate.compute(graph, node, arrays)
    return {
        n: packed(graph.types[n], np.asarray(v)) for n, v in zip(node.outputs, results, strict=True)
    }


def logical(kind: ir.TensorType, flat: ir.Values) -> ir.Values:
    """Return a tensor's elements in its shape, from the flat array that lies in memory."""
    return (flat if kind.layout == "ND" else unpack(kind.map, flat)).reshape(kind.shape)
