"""Offline models, loaded; and running a model, online or from such a file.

`load_offline` maps what `compile_offline` wrote, a file that needs no ONNX to run, checks every
byte, and makes graphs and kernels when somebody asks for them. Online, values and times are equal
to the last bit; what differs is who pays for compiling, and when.

Whether a model can be compiled, node by node, is told in the form of ATC's `check_result.json` and
its codes: 0 fine, 1 the type of the operator is not supported, 2 a parameter is invalid, 9 a name
is repeated, which is only told: here names are labels (CANN documentation, `--mode=3`).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler import Graph, compile_graph, evaluate, from_text, simulate_graph, zoo
from ascend_lab.compiler.ir import Values
from ascend_lab.compiler.lower import Lowered, piece_of
from ascend_lab.compiler.onnx import CONVERTERS, Imported, tensors
from ascend_lab.compiler.onnx.model_file import attributes, find, load, opset_of, title
from ascend_lab.compiler.overflow import Overflow, overflows_in
from ascend_lab.compiler.tasks import Compiled, Task
from ascend_lab.compiler.values import run_tasks
from ascend_lab.deploy import media
from ascend_lab.deploy.runtime import container as file
from ascend_lab.errors import AscendLabError, ChipError, InputError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators.ops.formats import numpy_type

if TYPE_CHECKING:
    from onnx import NodeProto

BUFFER_BYTES = 2**31
"""Of one tensor of a kernel."""
OPERATORS_OF = (media,)
"""Rooms whose operators may stand in the graphs of a file: reading one needs them."""


@dataclass(frozen=True)
class Gear:
    """A network compiled for one batch (None: fixed sizes), as an offline model holds it."""

    model: "OfflineModel"
    number: int
    batch: int | None
    inputs: Mapping[str, tuple[int, ...]]

    @cached_property
    def _graphs(self) -> dict[str, Any]:
        return self.model.json(file.Kind.GRAPH, self.number)

    @cached_property
    def times(self) -> dict[str, Any]:
        """The times: `summary` and `table` of `ascend-lab simulate`, `events`, `tasks`."""
        found = self.model.json(file.Kind.TASKS, self.number)
        with file.as_written(self.model.where):
            float(found["summary"]["time_s"])
            file.need(_strings(found["table"]), "table of lines")
            file.need(isinstance(found["events"], list), "events")
            for name, engine, seconds in found["tasks"]:
                file.need(_strings([name, engine]) and seconds >= 0, "seconds of tasks")
        return found

    @cached_property
    def memory(self) -> dict[str, Any]:
        """The memory plan: work_bytes, weight_bytes, (address, bytes) of every tensor."""
        found = self.model.json(file.Kind.MEMORY, self.number)
        with file.as_written(self.model.where):
            for key in ("work_bytes", "weight_bytes"):
                file.need(isinstance(found[key], int) and found[key] >= 0, f"{key}")
        return found

    @cached_property
    def imported(self) -> Imported:
        """The graph as the model states it, with its element types."""
        data = self._graphs
        with file.as_written(self.model.where):
            graph = self.model.graph(data["source"])
            sides = ((graph.inputs, "input_types"), (graph.outputs, "output_types"))
            kinds = [dict(data[key]) for _, key in sides]
            for (names, key), types in zip(sides, kinds, strict=True):
                file.need(set(types) <= set(names), f"{key} of the graph's own names")
                file.need(set(types.values()) <= set(tensors.NUMPY), key)
            file.need(self.inputs.keys() == set(graph.inputs), "inputs of the graph's own names")
            return Imported(graph, *kinds)

    @cached_property
    def compiled(self) -> Compiled:
        """The kernels in order."""
        data = self._graphs
        chip = self.model.chip
        with file.as_written(self.model.where):
            graph = self.model.graph(data["compiled"])
            tasks = tuple(self._task(graph, row) for row in data["tasks"])
            return Compiled(graph, chip, tasks, bare=True)

    def _task(self, graph: Graph, row: Mapping[str, Any]) -> Task:
        nodes = [graph.node(name) for name in row["nodes"]]
        lowered = None
        array = self.model.array
        if "kernel" in row:
            kernel = self.model.kernels[row["kernel"]]
            forms = {n: _form(array(key)) for n, key in row.get("forms", {}).items()}
            lowered = Lowered(kernel, forms, {n: array(key) for n, key in row["extra"].items()})
        op = "+".join(node.op for node in nodes)
        return Task(nodes[-1].name, op, tuple(row["nodes"]), piece_of(graph, nodes), lowered)

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        kernels: bool = False,
        overflows: list[Overflow] | None = None,
    ) -> dict[str, Values]:
        """Return the outputs by name: of the model's graph, or as the kernels compute them.

        `overflows` gets the nodes whose numbers leave their format in the kernels.
        """
        graph = self.imported.graph
        with file.as_written(self.model.where):
            if not kernels:
                return evaluate(graph, inputs)
            found: list[Overflow] = []
            values = run_tasks(self.compiled, inputs, graph.outputs, found)
            if overflows is not None:
                overflows += self._explained(inputs, found, values)
            return values

    def _explained(
        self, inputs: Mapping[str, Any], found: list[Overflow], values: Mapping[str, Values]
    ) -> list[Overflow]:
        """Return overflows with their numbers: where weights lie packed, the model's graph tells.

        What it does not know either is inside a kernel, and told if an output shows it.
        """
        known = [one for one in found if one.largest is not None]
        hidden = [one for one in found if one.largest is None]
        if not hidden:
            return known
        names = {one.node for one in known}
        told = [
            one
            for one in overflows_in(self.imported.graph, inputs, hidden[0].dtype)
            if one.node not in names and any(h.node.startswith(one.node) for h in hidden)
        ]
        finite = all(np.isfinite(array.astype(np.float64)).all() for array in values.values())
        return [*known, *(told or ([] if finite else hidden))]


def _strings(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


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
        found = self.json(file.Kind.META)
        with file.as_written(self.where):
            file.need(_strings([found["name"], found["chip"], found["chip_checksum"]]), "names")
            cores = found["cores"]
            file.need(isinstance(cores, int) and cores >= 1, "number of cores")
            file.need(bool(found["gears"]) and isinstance(found["weights"], list), "gears")
        return found

    @cached_property
    def gears(self) -> tuple[Gear, ...]:
        """What the model is compiled for, one entry unless it has several batches."""
        with file.as_written(self.where):
            return tuple(
                Gear(self, i, row["batch"], {n: tuple(s) for n, s in row["inputs"].items()})
                for i, row in enumerate(self.meta["gears"])
            )

    @cached_property
    def kernels(self) -> tuple[Any, ...]:
        """All kernels, each once."""
        with file.as_written(self.where):
            rows = file.json_of(file.unpacked(self.part(file.Kind.KERNELS)))
            found = tuple(map(file.kernel_of, rows))
            size = max((b.size_bytes for kernel in found for b in kernel.tensors), default=0)
            file.need(size <= BUFFER_BYTES, f"buffers of at most {BUFFER_BYTES:,} bytes")
            return found

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
        name = self.meta["chip"]
        remedy = f"compile it for {chip.name}"
        if chip.name != name:
            raise InputError(f"{self.where}: chip {name}, which it is for", chip.name, remedy)
        chip = replace(chip, core_count=min(chip.core_count, self.meta["cores"]))
        if file.chip_checksum(chip) != self.meta["chip_checksum"]:
            needed = f"{self.where}: the numbers of {name} it is for"
            raise InputError(needed, f"a {name} with others", file.REMEDY)
        return chip

    def part(self, kind: file.Kind, gear: int = 0) -> memoryview:
        """Return a partition; raise `InputError` where the file has none."""
        if (kind, gear) not in self.parts:
            needed = f"{self.where}: a partition {kind.name} of gear {gear}"
            raise InputError(needed, "none", file.REMEDY)
        return self.parts[kind, gear]

    def json(self, kind: file.Kind, gear: int = 0) -> dict[str, Any]:
        """Return a partition of plain data."""
        with file.as_written(self.where):
            found: dict[str, Any] = file.json_of(self.part(kind, gear))
            file.need(isinstance(found, dict), f"object in {kind.name}")
            return found

    def array(self, key: int) -> Values:
        """Return weights by number: a view of the file."""
        offset, dtype, shape = self.meta["weights"][key]
        kind = numpy_type(dtype)
        size = math.prod(shape)
        return np.frombuffer(self.part(file.Kind.WEIGHTS), kind, size, offset).reshape(shape)

    def graph(self, data: Mapping[str, Any]) -> Graph:
        """Return a graph from its text and weights."""
        graph = from_text(data["text"], {n: self.array(key) for n, key in data["data"].items()})
        for kind in graph.types.values():
            size = max(kind.elements, math.prod(kind.stored_shape))
            file.need(size <= tensors.LARGEST, f"tensor of at most {tensors.LARGEST:,} elements")
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


# -- online or offline ----------------------------------------------------------------------------
class Inference:
    """A model to call with inputs by name; `compile_s` are the seconds its calls spent compiling.

    `time_s` is the simulated time of the last call. With `kernels` the outputs are what the kernels
    compute, else what the graph means.
    """

    def __init__(self, model: str | Path, chip: Chip | str, *, kernels: bool = True) -> None:
        """Take an ONNX file or `zoo:NAME` (online), or an offline model of this chip."""
        self.chip = load_chip(chip) if isinstance(chip, str) else chip
        self.online = not file.is_offline(model)
        self.kernels = kernels
        self._model = str(model)
        self._offline = None if self.online else load_offline(model, self.chip)
        self._known: dict[Any, tuple[Imported, Compiled, float]] = {}
        self.compile_s = self.time_s = 0.0

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Values]:
        """Return the outputs in the model's types; raises as importing and compiling do."""
        shapes = {name: array.shape for name, array in inputs.items()}
        if self._offline is not None:
            gear = self._offline.gear(shapes)
            self.time_s = float(gear.times["summary"]["time_s"])
            found = gear.imported
            values = gear.run(inputs, kernels=self.kernels)
        else:
            found, values = self._run_online(shapes, inputs)
        return {
            name: tensors.in_type(values[name], kind) for name, kind in found.output_types.items()
        }

    def _run_online(
        self, shapes: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> tuple[Imported, dict[str, Values]]:
        """Return the model and its outputs; it is compiled when shapes are new."""
        key = tuple(sorted(shapes.items()))
        if key not in self._known:
            start = time.perf_counter()
            found = zoo.load_model(self._model, given=inputs)
            compiled = compile_graph(found.graph, self.chip)
            self._known[key] = found, compiled, simulate_graph(compiled).time_s
            self.compile_s += time.perf_counter() - start
        found, compiled, self.time_s = self._known[key]
        graph = found.graph
        if not self.kernels:
            return found, evaluate(graph, inputs)
        return found, run_tasks(compiled, inputs, graph.outputs)


# -- before compiling -----------------------------------------------------------------------------
TYPE_UNSUPPORTED = 1
INVALID = 2
REPEATED = 9


def precheck(file: str | Path, error: AscendLabError | None = None) -> dict[str, Any]:
    """Return the report on a model: name, result, total, pass, fail, and a row per node.

    `error` is what importing it raised: it is told at the node it names, and raised if it names
    none. Raises `InputError` for a file that is no model.
    """
    model, _ = load(file)
    opset = opset_of(model)
    rows = []
    seen = set[str]()
    for node in model.graph.node:
        causes = _causes(node, opset, error)
        bad = any(causes)
        if node.name and node.name in seen:
            causes.append({"code": REPEATED, "message": f"the name {node.name} is repeated"})
        seen.add(node.name)
        result = "failed" if bad else "success"
        rows.append({"name": title(node), "type": node.op_type, "result": result, "cause": causes})
    failed = sum(row["result"] == "failed" for row in rows)
    if error is not None and not failed:
        raise error
    return {
        "name": model.graph.name or Path(file).stem,
        "result": "failed" if failed else "success",
        "total": len(rows),
        "pass": len(rows) - failed,
        "fail": failed,
        "op": rows,
    }


def _causes(node: "NodeProto", opset: int, error: AscendLabError | None) -> list[dict[str, Any]]:
    """Return what keeps a node from being compiled."""
    try:
        find(node, opset)
        attributes(node, opset)
    except AscendLabError as found:
        known = node.op_type in CONVERTERS and node.domain in ("", "ai.onnx")
        return [{"code": INVALID if known else TYPE_UNSUPPORTED, "message": str(found)}]
    about = str(error).removeprefix("node ")
    if error is not None and about.startswith((f"{title(node)} ", f"{title(node)}:")):
        return [{"code": INVALID, "message": str(error)}]
    return []
