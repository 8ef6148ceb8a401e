"""Offline models: a network compiled for a chip, in one file that needs no ONNX to run.

`compile_offline` writes one: for each gear (a batch that is compiled for) the graph as the model
states it, the graph that was compiled, kernels as programs, their times and the memory plan; the
weights once, as stated and as the kernels read them. `load_offline` maps the file, checks every
byte, and makes graphs and kernels when somebody asks for them.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab import __version__, media
from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import CapacityError, ChipError, InputError
from ascend_lab.graph import Compiled, Constant, Fill, Graph, Road, Task, evaluate, from_text
from ascend_lab.graph.compile import DEFAULT_ROAD, Front, finish_stages, front_stages
from ascend_lab.graph.ir import LONGEST, Values, to_text
from ascend_lab.graph.lower import Lowered, packed, piece_of
from ascend_lab.graph.network import PLAN, NetworkTimeline, network_events
from ascend_lab.graph.onnx import Imported
from ascend_lab.graph.placement import constant_bytes, places_of, plan_network
from ascend_lab.graph.tasks import CpuKernel, run_tasks
from ascend_lab.graph.tiled import TiledTimeline, simulate_within
from ascend_lab.isa import Kernel, Launch, Part, parse_program
from ascend_lab.isa.memory import Buffer
from ascend_lab.ops.formats import format_of, numpy_type
from ascend_lab.runtime import container as file
from ascend_lab.runtime.container import REMEDY, Kind, checksum

AI_CORE = "AI Core"
OPERATORS_OF = (media,)
"""Rooms whose operators may stand in the graphs of a file: reading one needs them."""
Told = Callable[[NetworkTimeline, Front, Graph], tuple[dict[str, Any], list[str]]]
"""What to say of a network's times: as data, and as lines."""


class _Weights:
    """Arrays one behind the other, equal ones once; `index` says where each lies."""

    def __init__(self) -> None:
        self.index: list[tuple[int, str, list[int]]] = []
        self.body: list[Values] = []
        self._known: dict[tuple[bytes, str, tuple[int, ...]], int] = {}
        self._end = 0

    def add(self, array: Values) -> int:
        """Return the number of an array."""
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        key = checksum(raw.data), format_of(array), array.shape
        if key not in self._known:
            self._known[key] = len(self.index)
            self.index.append((self._end, key[1], list(array.shape)))
            self.body += [raw, np.zeros(-len(raw) % file.ALIGN_BYTES, np.uint8)]
            self._end += len(raw) + len(self.body[-1])
        return self._known[key]


def compile_offline(
    gears: Mapping[int | None, Imported],
    chip: Chip,
    road: Road = DEFAULT_ROAD,
    *,
    options: Mapping[str, str] | None = None,
    told: Told = lambda times, front, graph: (times.summary(), []),
) -> memoryview:
    """Return the offline model of a network for a chip; `gears` are its graphs by batch.

    One graph under None has fixed sizes. `told` is what the file says of its times.
    Raises as `compile_stages`, and `CapacityError` for a network that would have to be tiled.
    """
    weights, kernels = _Weights(), dict[str, int]()
    parts, rows = [], []
    for number, (batch, found) in enumerate(gears.items()):
        front = front_stages(found.graph, chip, road)
        times, _ = simulate_within(front, chip, None, road)
        if isinstance(times, TiledTimeline):
            needed = f"{chip.name} to hold the network: {times.limit_bytes:,} bytes of memory"
            raise CapacityError(needed, f"{times.tiles} tiles", "compile it for a smaller batch")
        compiled = finish_stages(front, chip, road).compiled
        parts += [
            (Kind.GRAPH, number, _graphs(found, compiled, weights, kernels)),
            (Kind.TASKS, number, _times(times, *told(times, front, found.graph))),
            (Kind.MEMORY, number, _memory(compiled)),
        ]
        inputs = {n: found.graph.types[n].shape for n in found.graph.inputs}
        rows.append({"batch": batch, "inputs": inputs, "time_s": times.time_s})
    first = next(iter(gears.values()))
    meta = {
        "name": first.graph.name, "written_by": __version__, "dtype": road.dtype,
        "chip": chip.name, "cores": chip.core_count, "chip_checksum": chip_checksum(chip),
        "options": dict(options or {}), "gears": rows, "weights": weights.index,
    }  # fmt: skip
    shared = [
        (Kind.META, 0, _json(meta)),
        (Kind.WEIGHTS, 0, weights.body or _bytes(b"")),
        (Kind.KERNELS, 0, _bytes(zlib.compress(f"[{','.join(kernels)}]".encode()))),
    ]
    return file.pack_parts([*shared, *parts])


def _json(data: Any) -> list[Values]:
    return _bytes(json.dumps(data).encode())


def _bytes(data: bytes) -> list[Values]:
    return [np.frombuffer(data, np.uint8)]


def chip_checksum(chip: Chip) -> str:
    """Return a checksum of a chip's numbers, not of where they are from."""
    numbers = (
        (f.name, getattr(chip, f.name))
        for f in fields(chip)
        if f.name not in ("facts", "sources", "summary")
    )
    plain = [(n, sorted(v.items()) if isinstance(v, Mapping) else v) for n, v in numbers]
    return checksum(repr(plain).encode()).hex()


def _graphs(
    found: Imported, compiled: Compiled, weights: _Weights, kernels: dict[str, int]
) -> list[Values]:
    """Return both graphs, and the tasks with what their kernels read; `kernels` numbers these."""
    tasks = []
    for task in compiled.tasks:
        row: dict[str, Any] = {"nodes": task.nodes}
        if task.lowered is not None:
            text = json.dumps(kernel_data(task.lowered.kernel))
            row["kernel"] = kernels.setdefault(text, len(kernels))
            row["extra"] = {n: weights.add(a) for n, a in task.lowered.extra.items()}
            if not isinstance(task.lowered.kernel, CpuKernel):
                row["forms"] = {
                    n: weights.add(_stored(task, compiled.graph, n)) for n in task.piece.constants
                }
        tasks.append(row)
    return _json({
        "source": _graph(found.graph, weights), "compiled": _graph(_bare(compiled), weights),
        "input_types": dict(found.input_types), "output_types": dict(found.output_types),
        "tasks": tasks,
    })  # fmt: skip


def _stored(task: Task, graph: Graph, name: str) -> Values:
    """Return a constant as the task's kernel reads it."""
    assert task.lowered is not None
    constant, form = graph.constants[task.piece.names[name]], task.lowered.forms.get(name)
    return form(constant.array()) if form else packed(constant.type, constant.array())


def _bare(compiled: Compiled) -> Graph:
    """Return the compiled graph; constants that only kernels read, in forms of their own, empty."""
    graph, kept = compiled.graph, set(compiled.graph.outputs)
    for task in compiled.tasks:
        if task.lowered is None or isinstance(task.lowered.kernel, CpuKernel):
            kept |= {n for node in task.nodes for n in graph.node(node).inputs}
    constants = {n: c if n in kept else replace(c, data=Fill(0)) for n, c in
                 graph.constants.items()}  # fmt: skip
    return replace(graph, constants=constants)


def _graph(graph: Graph, weights: _Weights) -> dict[str, Any]:
    """Return a graph as text, its long constants as numbers of weights; seeded ones are drawn."""
    drawn = {n: c if isinstance(c.data, Fill) else Constant(c.type, c.array())
             for n, c in graph.constants.items()}  # fmt: skip
    long = {n: weights.add(np.asarray(c.data)) for n, c in drawn.items()
            if not isinstance(c.data, Fill) and c.type.elements > LONGEST}  # fmt: skip
    text = to_text(replace(graph, constants=drawn))
    return {"text": text, "data": long, "narrowed": sorted(graph.narrowed)}


def _times(times: NetworkTimeline, data: Mapping[str, Any], lines: Sequence[str]) -> list[Values]:
    """Return what is said of the times, and each task's seconds on its engine."""
    return _json({"summary": data, "table": lines, "tasks": engine_rows(times),
                  "events": network_events(times)})  # fmt: skip


def engine_rows(times: NetworkTimeline) -> list[list[Any]]:
    """Return name, engine and seconds of every kernel, launch included."""
    return [
        [op.name, op.type.partition(" on the ")[2] or AI_CORE, op.time_s] for op in times.operators
    ]


def _memory(compiled: Compiled) -> list[Values]:
    plan = plan_network(compiled, PLAN)
    constants = sum(constant_bytes(compiled).values())
    return _json({"work_bytes": plan.height_bytes, "weight_bytes": constants,
                  "places": places_of(compiled, plan.offsets)})  # fmt: skip


# -- kernels as plain data and back: programs in their text form, all else in numbers and names ----
def kernel_data(kernel: Kernel) -> dict[str, Any]:
    """Return a kernel, or an operator of another engine, as data for JSON."""
    if isinstance(kernel, CpuKernel):
        sides = (kernel.reads, kernel.writes)
        reads, writes = ([[b.name, b.dtype, b.elements] for b in side] for side in sides)
        return {"name": kernel.name, "reads": reads, "writes": writes,
                "rest": [kernel.factor_bytes, kernel.reason, kernel.engine]}  # fmt: skip
    phases = [[p.name, [[str(part.program), part.bindings] for part in p.parts], p.mix]
              for p in kernel.phases]  # fmt: skip
    return {"name": kernel.name, "phases": phases}


def kernel_of(data: Mapping[str, Any]) -> Kernel:
    """Return the kernel that `kernel_data` wrote."""
    if "phases" not in data:
        reads, writes = (
            tuple(Buffer(name, "GM", dtype, elements) for name, dtype, elements in data[side])
            for side in ("reads", "writes")
        )
        return CpuKernel(data["name"], (), reads, writes, *data["rest"])
    phases = []
    for name, parts, *mix in data["phases"]:
        own = (Part(parse_program(text), tuple(tuple(map(tuple, core)) for core in bindings))
               for text, bindings in parts)  # fmt: skip
        phases.append(Launch(name, tuple(own), *mix))
    return Kernel(data["name"], tuple(phases))


# -- reading --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gear:
    """A network compiled for one batch (None: fixed sizes), as an offline model holds it."""

    model: "OfflineModel"
    number: int
    batch: int | None
    inputs: Mapping[str, tuple[int, ...]]

    @cached_property
    def _graphs(self) -> dict[str, Any]:
        return self.model.json(Kind.GRAPH, self.number)

    @cached_property
    def times(self) -> dict[str, Any]:
        """The times: `summary` and `table` of `ascend-lab simulate`, `events`, `tasks`."""
        return self.model.json(Kind.TASKS, self.number)

    @cached_property
    def memory(self) -> dict[str, Any]:
        """The memory plan: work_bytes, weight_bytes, (address, bytes) of every tensor."""
        return self.model.json(Kind.MEMORY, self.number)

    @cached_property
    def imported(self) -> Imported:
        """The graph as the model states it, with its element types."""
        data = self._graphs
        return Imported(self.model.graph(data["source"]), data["input_types"], data["output_types"])

    @cached_property
    def compiled(self) -> Compiled:
        """The kernels in order."""
        data, chip = self._graphs, self.model.chip
        graph = self.model.graph(data["compiled"])
        return Compiled(graph, chip, tuple(self._task(graph, row) for row in data["tasks"]))

    def _task(self, graph: Graph, row: Mapping[str, Any]) -> Task:
        nodes = [graph.node(name) for name in row["nodes"]]
        lowered, array = None, self.model.array
        if "kernel" in row:
            kernel = self.model.kernels[row["kernel"]]
            forms = {n: _form(array(key)) for n, key in row.get("forms", {}).items()}
            lowered = Lowered(kernel, forms, {n: array(key) for n, key in row["extra"].items()})
        op = "+".join(node.op for node in nodes)
        return Task(nodes[-1].name, op, tuple(row["nodes"]), piece_of(graph, nodes), lowered)

    def run(self, inputs: Mapping[str, Any], *, kernels: bool = False) -> dict[str, Values]:
        """Return the outputs by name: of the model's graph, or as the kernels compute them."""
        graph = self.imported.graph
        if kernels:
            return run_tasks(self.compiled, inputs, graph.outputs)
        return evaluate(graph, inputs)


def _form(stored: Values) -> Callable[[Values], Values]:
    return lambda logical: stored


@dataclass(frozen=True)
class OfflineModel:
    """A file that `compile_offline` wrote, every byte of it checked; `own` is the chip given."""

    where: str
    parts: file.Parts
    own: Chip | None = None

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Name, chip, number format, options, gears, where the weights lie."""
        return self.json(Kind.META)

    @cached_property
    def gears(self) -> tuple[Gear, ...]:
        """What the model is compiled for, one entry unless it has several batches."""
        rows = enumerate(self.meta["gears"])
        return tuple(
            Gear(self, i, r["batch"], {n: tuple(s) for n, s in r["inputs"].items()})
            for i, r in rows
        )

    @cached_property
    def kernels(self) -> tuple[Any, ...]:
        """All kernels, each once."""
        return tuple(map(kernel_of, json.loads(zlib.decompress(self.parts[Kind.KERNELS, 0]))))

    @cached_property
    def chip(self) -> Chip:
        """The chip, with as many cores as are used; `InputError` if its numbers are others now."""
        try:
            return self.check_chip(self.own or load_chip(self.meta["chip"]))
        except ChipError:
            needed = f"{self.where}: the chip file of {self.meta['chip']}"
            raise InputError(needed, "no chip of that name", "give the .toml") from None

    def check_chip(self, chip: Chip) -> Chip:
        """Return the chip, with the cores the model was compiled for; `InputError` for another."""
        name, remedy = self.meta["chip"], f"compile it for {chip.name}"
        if chip.name != name:
            raise InputError(f"{self.where}: chip {name}, which it is for", chip.name, remedy)
        chip = replace(chip, core_count=min(chip.core_count, self.meta["cores"]))
        if chip_checksum(chip) != self.meta["chip_checksum"]:
            needed = f"{self.where}: the numbers of {name} it is for"
            raise InputError(needed, f"a {name} with others", REMEDY)
        return chip

    def json(self, kind: Kind, gear: int = 0) -> dict[str, Any]:
        """Return a partition of plain data."""
        found: dict[str, Any] = json.loads(bytes(self.parts[kind, gear]))
        return found

    def array(self, key: int) -> Values:
        """Return weights by number: a view of the file."""
        offset, dtype, shape = self.meta["weights"][key]
        kind, size = numpy_type(dtype), int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self.parts[Kind.WEIGHTS, 0], kind, size, offset).reshape(shape)

    def graph(self, data: Mapping[str, Any]) -> Graph:
        """Return a graph from its text and weights."""
        graph = from_text(data["text"], {n: self.array(key) for n, key in data["data"].items()})
        return replace(graph, narrowed=frozenset(data["narrowed"]))

    def gear(
        self, shapes: Mapping[str, Sequence[int]] | None = None, batch: int | None = None
    ) -> Gear:
        """Return the gear for inputs of some shapes, or for a batch; else the first.

        Raises `InputError` naming the gears: a batch between two of them is padded by the caller.
        """
        wanted = {name: tuple(shape) for name, shape in (shapes or {}).items()}
        known = self.gears[0].inputs
        if unknown := next((name for name in wanted if name not in known), None):
            raise InputError(
                f"an input of the model ({', '.join(known)})", unknown, "mend the name"
            )
        for gear in self.gears:
            first = next((s[0] for s in gear.inputs.values() if s), None)
            fits = all(gear.inputs[name] == shape for name, shape in wanted.items())
            if fits and batch in (None, gear.batch or first):
                return gear
        needed = f"inputs of a gear ({'; '.join(_shown(gear.inputs) for gear in self.gears[:8])})"
        got = f"batch {batch}" if batch is not None else _shown(wanted)
        remedy = "pad the inputs to a gear, or compile for this one"
        raise InputError(f"{self.where}: {needed}", got, remedy)


def _shown(shapes: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{n}:{','.join(map(str, s))}" for n, s in shapes.items())[:200]


def load_offline(path: str | Path, chip: Chip | None = None) -> OfflineModel:
    """Return an offline model, for a chip if one is given.

    Raises `InputError` for another version, another chip, and any damage.
    """
    found = OfflineModel(str(path), file.read_parts(path), chip)
    if chip is not None:
        found.check_chip(chip)
    return found
