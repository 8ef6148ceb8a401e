"""Writes offline models: one file with a network compiled for several batch sizes.

The network compiled for one batch is a gear. A gear has the original graph, the compiled graph, its
tasks with their times, and its memory plan. All gears share the kernels, which are programs as
text, and the weights, both in their original form and in the layouts that kernels read.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab import __version__
from ascend_lab.compiler import Graph, lower, onnx, tiled
from ascend_lab.compiler.compile import DEFAULT_ROAD, Front, Road, finish_stages, front_stages
from ascend_lab.compiler.ir import MAX_WRITTEN, Constant, Fill, Values, to_text
from ascend_lab.compiler.network import DEFAULT_PLAN_METHOD, NetworkTimeline, network_events
from ascend_lab.compiler.placement import constant_bytes, places_of, plan_network
from ascend_lab.compiler.tasks import Compiled, CpuKernel, Task
from ascend_lab.compiler.values import writes_int64
from ascend_lab.deploy.runtime.container import (
    ALIGN_BYTES,
    Kind,
    checksum,
    chip_checksum,
    pack_parts,
)
from ascend_lab.deploy.runtime.kernel_data import kernel_data
from ascend_lab.errors import CapacityError
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.ops.formats import format_of

AI_CORE = "AI Core"
DescribeTimes = Callable[[NetworkTimeline, Front, Graph], tuple[dict[str, Any], list[str]]]
"""A function that returns a network's times as data, and as lines of text for the user."""


class _Weights:
    """The weights of a file, each stored once; `index` has offset, format and shape of each."""

    def __init__(self) -> None:
        self.index: list[tuple[int, str, list[int]]] = []
        self.body: list[Values] = []
        self._numbers: dict[tuple[bytes, str, tuple[int, ...]], int] = {}
        # The end of all arrays with their padding, where the next one begins.
        self._end_bytes = 0

    def add(self, array: Values) -> int:
        """Return the number of an array, which is appended unless an equal one is stored."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # Gears have equal weights: a model for four batches stores them once.
        key = checksum(raw.data), format_of(array), array.shape
        if key not in self._numbers:
            self._numbers[key] = len(self.index)
            self.index.append((self._end_bytes, key[1], list(array.shape)))
            self.body += [raw, np.zeros(-len(raw) % ALIGN_BYTES, np.uint8)]
            self._end_bytes += len(raw) + len(self.body[-1])
        return self._numbers[key]


def compile_offline(
    gears: Mapping[int | None, onnx.Imported],
    chip: Chip,
    road: Road = DEFAULT_ROAD,
    *,
    options: Mapping[str, str] | None = None,
    describe: DescribeTimes = lambda times, front, graph: (times.summary(), []),
) -> memoryview:
    """Return the bytes of the offline model of a network for a chip.

    `gears` maps a batch to the network's graph for it; a graph with fixed sizes has the key None.
    `describe` turns times into data of the file. Raises the errors of compiling, and
    `CapacityError` if the network does not fit into device memory as a whole.
    """
    weights = _Weights()
    kernels = dict[str, int]()
    gear_parts = []
    gear_rows = []
    for number, (batch, imported) in enumerate(gears.items()):
        graph = imported.graph
        front = front_stages(graph, chip, road)
        times = _untiled_times(front, chip, road)
        compiled = finish_stages(front, chip, road).compiled
        gear_parts += [
            (Kind.GRAPH, number, _gear_graphs(imported, compiled, weights, kernels)),
            (Kind.TASKS, number, _times_data(times, *describe(times, front, graph))),
            (Kind.MEMORY, number, _memory_plan(compiled)),
        ]
        inputs = {name: graph.types[name].shape for name in graph.inputs}
        gear_rows.append({"batch": batch, "inputs": inputs, "time_s": times.time_s})
    meta = {
        "name": next(iter(gears.values())).graph.name,
        "written_by": __version__,
        "dtype": road.dtype,
        **_chip_data(chip),
        "options": dict(options or {}),
        "gears": gear_rows,
        "weights": weights.index,
    }
    return pack_parts([*_shared_parts(meta, weights, kernels), *gear_parts])


def _shared_parts(
    meta: Mapping[str, Any], weights: _Weights, kernels: Mapping[str, int]
) -> list[tuple[Kind, int, Sequence[Values]]]:
    """Return the parts of a file that all its batches use: its data, weights and kernels."""
    # The keys of `kernels` are texts of JSON, in the order of their numbers.
    kernel_texts = f"[{','.join(kernels)}]".encode()
    return [
        (Kind.META, 0, _json_body(meta)),
        (Kind.WEIGHTS, 0, weights.body or _bytes_body(b"")),
        (Kind.KERNELS, 0, _bytes_body(zlib.compress(kernel_texts))),
    ]


def _chip_data(chip: Chip) -> dict[str, Any]:
    """Return the name of the chip that a model is compiled for, and a checksum of its numbers."""
    # A chip's file may be edited later: kernels and times would not be valid for it.
    return {"chip": chip.name, "cores": chip.core_count, "chip_checksum": chip_checksum(chip)}


def _untiled_times(front: Front, chip: Chip, road: Road) -> NetworkTimeline:
    """Return a network's times; raises `CapacityError` if it does not fit into memory."""
    times, _ = tiled.simulate_within(front, chip, None, road)
    if isinstance(times, tiled.TiledTimeline):
        needed = f"{chip.name} to hold the network: {times.tiled.limit_bytes:,} bytes of memory"
        got = f"{times.tiled.tile_count} tiles"
        raise CapacityError(needed, got, "compile it for a smaller batch")
    return times


def _json_body(data: Any) -> list[Values]:
    """Return data as the body of a partition, in JSON."""
    return _bytes_body(json.dumps(data).encode())


def _bytes_body(data: bytes) -> list[Values]:
    """Return bytes as the body of a partition."""
    return [np.frombuffer(data, np.uint8)]


def _gear_graphs(
    imported: onnx.Imported, compiled: Compiled, weights: _Weights, kernels: dict[str, int]
) -> list[Values]:
    """Return original and compiled graph and the tasks; adds new weights and new kernels."""
    tasks = []
    for task in compiled.tasks:
        row: dict[str, Any] = {"nodes": task.nodes}
        if task.lowered is not None:
            # Equal kernels have equal texts: the repeated blocks of a ResNet share one.
            text = json.dumps(kernel_data(task.lowered.kernel))
            row["kernel"] = kernels.setdefault(text, len(kernels))
            row["extra"] = {n: weights.add(a) for n, a in task.lowered.extra.items()}
            # The AI CPU reads a constant in its original form, an AI core's kernel in a layout.
            if not isinstance(task.lowered.kernel, CpuKernel):
                row["forms"] = {
                    b.name: weights.add(_kernel_constant(task, compiled.graph, b.name))
                    for b in task.lowered.kernel.tensors
                    if b.name.partition(".")[0] in task.piece.constants
                }
        tasks.append(row)
    return _json_body(
        {
            "source": _graph_data(imported.graph, weights),
            "compiled": _graph_data(_without_kernel_constants(compiled), weights),
            "input_types": dict(imported.input_types),
            "output_types": dict(imported.output_types),
            "tasks": tasks,
        }
    )


def _kernel_constant(task: Task, graph: Graph, name: str) -> Values:
    """Return a constant in the form in which the task's kernel reads it."""
    assert task.lowered is not None
    # A kernel without its own form of a constant reads it as its layout stores it, with padding.
    constant = graph.constants[task.value(name)]
    form = task.lowered.forms.get(name)
    return form(constant.array()) if form else lower.packed(constant.type, constant.array())


def _without_kernel_constants(compiled: Compiled) -> Graph:
    """Return the compiled graph without the values of constants that only kernels read.

    The file has these constants in the forms of the kernels. The constants of nodes with int64
    results keep their values, as the graph computes these results too, to check their range.
    """
    graph = compiled.graph
    read_by_graph = set(compiled.graph.outputs)
    for task in compiled.tasks:
        nodes = [graph.node(name) for name in task.nodes]
        is_evaluated = task.lowered is None or isinstance(task.lowered.kernel, CpuKernel)
        if is_evaluated or writes_int64(graph, nodes):
            read_by_graph |= {name for node in nodes for name in node.inputs}
    constants = {
        name: constant if name in read_by_graph else replace(constant, data=Fill(0))
        for name, constant in graph.constants.items()
    }
    return replace(graph, constants=constants)


def _graph_data(graph: Graph, weights: _Weights) -> dict[str, Any]:
    """Return a graph as text, in which large constants are numbers of weights."""
    # A random constant is a seed: its values are drawn now, as the file stores values.
    constants = {
        n: c if isinstance(c.data, Fill) else Constant(c.type, c.array())
        for n, c in graph.constants.items()
    }
    large_constants = {
        n: weights.add(np.asarray(c.data))
        for n, c in constants.items()
        if not isinstance(c.data, Fill) and c.type.elements > MAX_WRITTEN
    }
    text = to_text(replace(graph, constants=constants))
    return {"text": text, "data": large_constants, "narrowed": sorted(graph.narrowed)}


def _times_data(
    times: NetworkTimeline, data: Mapping[str, Any], lines: Sequence[str]
) -> list[Values]:
    """Return the times of a network as the body of a partition."""
    return _json_body(
        {
            "summary": data,
            "table": lines,
            "tasks": engine_rows(times),
            "events": network_events(times),
        }
    )


def engine_rows(times: NetworkTimeline) -> list[list[Any]]:
    """Return name, engine and seconds of every kernel, including its launch."""
    # A type is "conv2d", or "nonzero on the AI CPU" for an operator of another engine.
    return [
        [op.name, op.type.partition(" on the ")[2] or AI_CORE, op.time_s] for op in times.operators
    ]


def _memory_plan(compiled: Compiled) -> list[Values]:
    """Return the plan of the device memory as the body of a partition."""
    plan = plan_network(compiled, DEFAULT_PLAN_METHOD)
    # Constants stay in memory; all other tensors share `work_bytes` as the plan places them.
    constants = sum(constant_bytes(compiled).values())
    return _json_body(
        {
            "work_bytes": plan.height_bytes,
            "weight_bytes": constants,
            "places": places_of(compiled, plan.offsets),
        }
    )
