"""Writing an offline model: a network compiled for each of its batches ("gears"), in one file.

Each gear has the graph as the model states it, the graph that was compiled, its tasks with their
times, and its memory plan. Gears share weights, as the model states them and as kernels read them,
and the kernels, which are programs as text.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab import __version__
from ascend_lab.compiler import Compiled, Constant, Fill, Graph, Road, Task, lower, onnx, tiled
from ascend_lab.compiler.compile import DEFAULT_ROAD, Front, finish_stages, front_stages
from ascend_lab.compiler.ir import MAX_WRITTEN, Values, to_text
from ascend_lab.compiler.network import DEFAULT_PLAN_METHOD, NetworkTimeline, network_events
from ascend_lab.compiler.placement import constant_bytes, places_of, plan_network
from ascend_lab.compiler.tasks import CpuKernel
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
Told = Callable[[NetworkTimeline, Front, Graph], tuple[dict[str, Any], list[str]]]
"""A function that describes a network's times: as data, and as lines of text."""


class _Weights:
    """Arrays one behind the other, equal ones once; `index`: offset, format and shape of each."""

    def __init__(self) -> None:
        self.index: list[tuple[int, str, list[int]]] = []
        self.body: list[Values] = []
        self._known: dict[tuple[bytes, str, tuple[int, ...]], int] = {}
        # bytes of all arrays with their padding, where the next one will begin
        self._end = 0

    def add(self, array: Values) -> int:
        """Return the number of an array, which is appended if no equal one is there."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        # gears have equal weights: a model of four batches holds them once
        key = checksum(raw.data), format_of(array), array.shape
        if key not in self._known:
            self._known[key] = len(self.index)
            self.index.append((self._end, key[1], list(array.shape)))
            self.body += [raw, np.zeros(-len(raw) % ALIGN_BYTES, np.uint8)]
            self._end += len(raw) + len(self.body[-1])
        return self._known[key]


def compile_offline(
    gears: Mapping[int | None, onnx.Imported],
    chip: Chip,
    road: Road = DEFAULT_ROAD,
    *,
    options: Mapping[str, str] | None = None,
    told: Told = lambda times, front, graph: (times.summary(), []),
) -> memoryview:
    """Return the offline model of a network for a chip; `gears` are its graphs by batch.

    One graph under None has fixed sizes. `told` describes its times for the file.
    Raises as `compile_stages`, and `CapacityError` for a network that would have to be tiled.
    """
    weights = _Weights()
    kernels = dict[str, int]()
    parts = []
    rows = []
    for number, (batch, imported) in enumerate(gears.items()):
        graph = imported.graph
        front = front_stages(graph, chip, road)
        times = _untiled_times(front, chip, road)
        compiled = finish_stages(front, chip, road).compiled
        parts += [
            (Kind.GRAPH, number, _graphs(imported, compiled, weights, kernels)),
            (Kind.TASKS, number, _times(times, *told(times, front, graph))),
            (Kind.MEMORY, number, _memory(compiled)),
        ]
        inputs = {name: graph.types[name].shape for name in graph.inputs}
        rows.append({"batch": batch, "inputs": inputs, "time_s": times.time_s})
    meta = {
        "name": next(iter(gears.values())).graph.name,
        "written_by": __version__,
        "dtype": road.dtype,
        **_chip_data(chip),
        "options": dict(options or {}),
        "gears": rows,
        "weights": weights.index,
    }
    # the keys of `kernels` are JSON already, numbered in their order
    shared = [
        (Kind.META, 0, _json(meta)),
        (Kind.WEIGHTS, 0, weights.body or _bytes(b"")),
        (Kind.KERNELS, 0, _bytes(zlib.compress(f"[{','.join(kernels)}]".encode()))),
    ]
    return pack_parts([*shared, *parts])


def _chip_data(chip: Chip) -> dict[str, Any]:
    """Return the chip a model is compiled for: by its name, and by its numbers at this time."""
    # the file of a chip may be edited later: kernels and times would not fit its new numbers
    return {"chip": chip.name, "cores": chip.core_count, "chip_checksum": chip_checksum(chip)}


def _untiled_times(front: Front, chip: Chip, road: Road) -> NetworkTimeline:
    """Return a network's times; `CapacityError` if the chip cannot hold it at once."""
    times, _ = tiled.simulate_within(front, chip, None, road)
    if isinstance(times, tiled.TiledTimeline):
        needed = f"{chip.name} to hold the network: {times.tiled.limit_bytes:,} bytes of memory"
        got = f"{times.tiled.tile_count} tiles"
        raise CapacityError(needed, got, "compile it for a smaller batch")
    return times


def _json(data: Any) -> list[Values]:
    """Return the body of a partition of plain data."""
    return _bytes(json.dumps(data).encode())


def _bytes(data: bytes) -> list[Values]:
    """Return the body of a partition of some bytes."""
    return [np.frombuffer(data, np.uint8)]


def _graphs(
    imported: onnx.Imported, compiled: Compiled, weights: _Weights, kernels: dict[str, int]
) -> list[Values]:
    """Return both graphs, and the tasks with their weights; new kernels are added to `kernels`."""
    tasks = []
    for task in compiled.tasks:
        row: dict[str, Any] = {"nodes": task.nodes}
        if task.lowered is not None:
            # equal kernels have equal texts: ResNet's repeated blocks share theirs
            text = json.dumps(kernel_data(task.lowered.kernel))
            row["kernel"] = kernels.setdefault(text, len(kernels))
            row["extra"] = {n: weights.add(a) for n, a in task.lowered.extra.items()}
            # the AI CPU reads constants as the graph states them, a core's kernel in its own form
            if not isinstance(task.lowered.kernel, CpuKernel):
                row["forms"] = {
                    b.name: weights.add(_stored(task, compiled.graph, b.name))
                    for b in task.lowered.kernel.tensors
                    if b.name.partition(".")[0] in task.piece.constants
                }
        tasks.append(row)
    return _json(
        {
            "source": _graph(imported.graph, weights),
            "compiled": _graph(_bare(compiled), weights),
            "input_types": dict(imported.input_types),
            "output_types": dict(imported.output_types),
            "tasks": tasks,
        }
    )


def _stored(task: Task, graph: Graph, name: str) -> Values:
    """Return a constant as the task's kernel reads it."""
    assert task.lowered is not None
    # kernels without a form of their own read a constant as its layout stores it, padding included
    constant = graph.constants[task.value(name)]
    form = task.lowered.forms.get(name)
    return form(constant.array()) if form else lower.packed(constant.type, constant.array())


def _bare(compiled: Compiled) -> Graph:
    """Return the compiled graph without the constants that only kernels read.

    The file has these in the forms of the kernels already. Constants of int64 results stay: such
    results are computed beside the kernel, too, to check that they fit.
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


def _graph(graph: Graph, weights: _Weights) -> dict[str, Any]:
    """Return a graph as text, its long constants as numbers of weights."""
    # a constant that a seed describes is drawn now: the file holds values, not generators
    drawn = {
        n: c if isinstance(c.data, Fill) else Constant(c.type, c.array())
        for n, c in graph.constants.items()
    }
    long = {
        n: weights.add(np.asarray(c.data))
        for n, c in drawn.items()
        if not isinstance(c.data, Fill) and c.type.elements > MAX_WRITTEN
    }
    text = to_text(replace(graph, constants=drawn))
    return {"text": text, "data": long, "narrowed": sorted(graph.narrowed)}


def _times(times: NetworkTimeline, data: Mapping[str, Any], lines: Sequence[str]) -> list[Values]:
    """Return the description of the times, and each task's seconds on its engine."""
    return _json(
        {
            "summary": data,
            "table": lines,
            "tasks": engine_rows(times),
            "events": network_events(times),
        }
    )


def engine_rows(times: NetworkTimeline) -> list[list[Any]]:
    """Return name, engine and seconds of every kernel, launch included."""
    # a type is "conv2d", or "nonzero on the AI CPU" for an operator of another engine
    return [
        [op.name, op.type.partition(" on the ")[2] or AI_CORE, op.time_s] for op in times.operators
    ]


def _memory(compiled: Compiled) -> list[Values]:
    """Return the plan of the device memory: where each tensor lies, and the bytes of both parts."""
    plan = plan_network(compiled, DEFAULT_PLAN_METHOD)
    # constants stay in memory; all other tensors share work_bytes as the plan places them
    constants = sum(constant_bytes(compiled).values())
    return _json(
        {
            "work_bytes": plan.height_bytes,
            "weight_bytes": constants,
            "places": places_of(compiled, plan.offsets),
        }
    )
