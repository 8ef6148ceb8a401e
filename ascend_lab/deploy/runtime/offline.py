"""Runs inference with an offline model, which was compiled to a file, or compiles on demand.

`load_offline` maps a file of `compile_offline` into memory and verifies all its checksums; graphs
and kernels are decoded when they are first used. An offline model needs no ONNX file. Compiling
the model online gives the same values and times, but the first call has to compile it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, compile_graph, evaluate, simulate_graph, zoo
from ascend_lab.compiler.ir import Values
from ascend_lab.compiler.lower import Lowered, piece_of
from ascend_lab.compiler.onnx import Imported, tensors
from ascend_lab.compiler.overflow import Overflow, overflows_in
from ascend_lab.compiler.tasks import Compiled, Task
from ascend_lab.compiler.text_form import from_text
from ascend_lab.compiler.values import run_tasks
from ascend_lab.deploy import media
from ascend_lab.deploy.runtime import container as file
from ascend_lab.deploy.runtime.kernel_data import kernel_of
from ascend_lab.errors import ChipError, InputError
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.operators.ops.formats import numpy_type

BUFFER_BYTES = 2**31
"""Largest tensor of a kernel."""
OPERATOR_PACKAGES = (media,)
"""Packages with operators that the graphs of a file may have; importing them registers these."""


@dataclass(frozen=True)
class Gear:
    """A network compiled for one batch (None: fixed sizes), as stored in an offline model."""

    model: "OfflineModel"
    number: int
    batch: int | None
    inputs: Mapping[str, tuple[int, ...]]

    @cached_property
    def _graphs(self) -> dict[str, Any]:
        return self.model.json(file.Kind.GRAPH, self.number)

    @cached_property
    def times(self) -> dict[str, Any]:
        """Return simulated times: `events`, `tasks`, and `summary` and `table` as in `simulate`."""
        data = self.model.json(file.Kind.TASKS, self.number)
        with file.refuse_forged_data(self.model.where):
            # The checksum does not prove that the types are right: a forger can compute it, too.
            float(data["summary"]["time_s"])
            file.need(_is_text_list(data["table"]), "table of lines")
            file.need(isinstance(data["events"], list), "events")
            for name, engine, time_s in data["tasks"]:
                file.need(_is_text_list([name, engine]) and time_s >= 0, "seconds of tasks")
        return data

    @cached_property
    def memory(self) -> dict[str, Any]:
        """Return the memory plan: work_bytes, weight_bytes, and (address, bytes) by tensor."""
        plan = self.model.json(file.Kind.MEMORY, self.number)
        with file.refuse_forged_data(self.model.where):
            for key in ("work_bytes", "weight_bytes"):
                file.need(isinstance(plan[key], int) and plan[key] >= 0, f"{key}")
        return plan

    @cached_property
    def imported(self) -> Imported:
        """Return the original graph, with the element types of its inputs and outputs."""
        data = self._graphs
        with file.refuse_forged_data(self.model.where):
            # The file has two graphs: "source" with the original nodes and formats, and
            # "compiled" after all passes, to which the kernels belong.
            graph = self.model.graph(data["source"])
            sides = ((graph.inputs, "input_types"), (graph.outputs, "output_types"))
            element_types = [dict(data[key]) for _, key in sides]
            for (names, key), types in zip(sides, element_types, strict=True):
                file.need(set(types) <= set(names), f"{key} of the graph's own names")
                file.need(set(types.values()) <= set(tensors.NUMPY), key)
            file.need(self.inputs.keys() == set(graph.inputs), "inputs of the graph's own names")
            return Imported(graph, *element_types)

    @cached_property
    def compiled(self) -> Compiled:
        """Return the compiled graph, and its kernels in order."""
        data = self._graphs
        chip = self.model.chip
        with file.refuse_forged_data(self.model.where):
            graph = self.model.graph(data["compiled"])
            tasks = tuple(self._task(graph, row) for row in data["tasks"])
            return Compiled(graph, chip, tasks, bare=True)

    def _task(self, graph: Graph, row: Mapping[str, Any]) -> Task:
        """Return a task of the compiled graph from its row in the file."""
        nodes = [graph.node(name) for name in row["nodes"]]
        lowered = None
        array = self.model.array
        if "kernel" in row:
            # Gears share kernels and weights: a row refers to both by number.
            kernel = self.model.kernels[row["kernel"]]
            forms = {n: _stored_form(array(key)) for n, key in row.get("forms", {}).items()}
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
        """Return the outputs by name, computed by the original graph or by the kernels.

        With `kernels`, nodes whose results exceed the range of their format are added to
        `overflows`.
        """
        graph = self.imported.graph
        with file.refuse_forged_data(self.model.where):
            if not kernels:
                return evaluate(graph, inputs)
            # Kernels round to their formats after each step, so only they show overflows.
            kernel_overflows: list[Overflow] = []
            values = run_tasks(self.compiled, inputs, graph.outputs, kernel_overflows)
            if overflows is not None:
                overflows += self._with_largest_numbers(inputs, kernel_overflows, values)
            return values

    def _with_largest_numbers(
        self, inputs: Mapping[str, Any], overflows: list[Overflow], values: Mapping[str, Values]
    ) -> list[Overflow]:
        """Return overflows with their largest numbers.

        If a kernel's run did not measure the largest number, it is computed by the original graph.
        An overflow that this graph does not show happened inside a kernel, and is reported only if
        an output is not finite.
        """
        measured = [overflow for overflow in overflows if overflow.largest is not None]
        unmeasured = [overflow for overflow in overflows if overflow.largest is None]
        if not unmeasured:
            return measured
        names = {overflow.node for overflow in measured}
        from_graph = [
            overflow
            for overflow in overflows_in(self.imported.graph, inputs, unmeasured[0].dtype)
            if overflow.node not in names
            and any(packed.node.startswith(overflow.node) for packed in unmeasured)
        ]
        is_finite = all(np.isfinite(array.astype(np.float64)).all() for array in values.values())
        if from_graph or is_finite:
            return [*measured, *from_graph]
        return [*measured, *unmeasured]


def _is_text_list(values: object) -> bool:
    """Return whether a value is a list of texts."""
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _stored_form(stored: Values) -> Callable[[Values], Values]:
    """Return a conversion that ignores its argument, as the file has the converted weight."""
    return lambda logical: stored


@dataclass(frozen=True)
class OfflineModel:
    """A file of `compile_offline`; `given_chip` replaces the preset of the chip that it names."""

    where: str
    parts: file.Parts
    given_chip: Chip | None = None

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Return name, chip, number format, options, gears and index of the weights."""
        data = self.json(file.Kind.META)
        with file.refuse_forged_data(self.where):
            file.need(_is_text_list([data["name"], data["chip"], data["chip_checksum"]]), "names")
            cores = data["cores"]
            file.need(isinstance(cores, int) and cores >= 1, "number of cores")
            file.need(bool(data["gears"]) and isinstance(data["weights"], list), "gears")
        return data

    @cached_property
    def gears(self) -> tuple[Gear, ...]:
        """Return the gears of the model, one for each batch; a single one for fixed sizes."""
        with file.refuse_forged_data(self.where):
            return tuple(
                Gear(self, i, row["batch"], {n: tuple(s) for n, s in row["inputs"].items()})
                for i, row in enumerate(self.meta["gears"])
            )

    @cached_property
    def kernels(self) -> tuple[Any, ...]:
        """Return the kernels of all gears."""
        with file.refuse_forged_data(self.where):
            rows = file.json_of(file.unpacked(self.part(file.Kind.KERNELS)))
            kernels = tuple(map(kernel_of, rows))
            # A kernel allocates its buffers: a forged one could request too much memory.
            size = max((b.size_bytes for kernel in kernels for b in kernel.tensors), default=0)
            file.need(size <= BUFFER_BYTES, f"buffers of at most {BUFFER_BYTES:,} bytes")
            return kernels

    @cached_property
    def chip(self) -> Chip:
        """Return the chip with the used cores; raises `InputError` if its numbers changed."""
        try:
            return self.check_chip(self.given_chip or load_chip(self.meta["chip"]))
        except ChipError:
            needed = f"{self.where}: the chip file of {self.meta['chip']}"
            raise InputError(needed, "no chip of that name", "give the .toml") from None

    def check_chip(self, chip: Chip) -> Chip:
        """Return a chip with the model's number of cores; raises `InputError` for another chip."""
        name = self.meta["chip"]
        remedy = f"compile it for {chip.name}"
        if chip.name != name:
            raise InputError(f"{self.where}: chip {name}, which it is for", chip.name, remedy)
        # A model compiled for 8 cores runs on a chip with 32 cores, on 8 of them.
        chip = replace(chip, core_count=min(chip.core_count, self.meta["cores"]))
        if file.chip_checksum(chip) != self.meta["chip_checksum"]:
            needed = f"{self.where}: the numbers of {name} it is for"
            raise InputError(needed, f"a {name} with others", file.REMEDY)
        return chip

    def part(self, kind: file.Kind, gear: int = 0) -> memoryview:
        """Return a partition; raises `InputError` if the file lacks it."""
        if (kind, gear) not in self.parts:
            needed = f"{self.where}: a partition {kind.name} of gear {gear}"
            raise InputError(needed, "none", file.REMEDY)
        return self.parts[kind, gear]

    def json(self, kind: file.Kind, gear: int = 0) -> dict[str, Any]:
        """Return the JSON object of a partition."""
        with file.refuse_forged_data(self.where):
            data: dict[str, Any] = file.json_of(self.part(kind, gear))
            file.need(isinstance(data, dict), f"object in {kind.name}")
            return data

    def array(self, key: int) -> Values:
        """Return an array of weights by its number: a view of the file, not a copy."""
        offset, dtype, shape = self.meta["weights"][key]
        kind = numpy_type(dtype)
        size = math.prod(shape)
        return np.frombuffer(self.part(file.Kind.WEIGHTS), kind, size, offset).reshape(shape)

    def graph(self, data: Mapping[str, Any]) -> Graph:
        """Return a graph from its text and weights."""
        # Weights of a graph are views of the mapped file, not copies.
        graph = from_text(data["text"], {n: self.array(key) for n, key in data["data"].items()})
        for kind in graph.types.values():
            # A layout may pad: 3 channels are stored as 16.
            size = max(kind.elements, math.prod(kind.stored_shape))
            file.need(
                size <= tensors.MAX_ELEMENTS,
                f"tensor of at most {tensors.MAX_ELEMENTS:,} elements",
            )
        return replace(graph, narrowed=frozenset(data["narrowed"]))

    def gear(
        self, shapes: Mapping[str, Sequence[int]] | None = None, batch: int | None = None
    ) -> Gear:
        """Return the gear for some shapes of inputs, or for a batch; by default the first gear.

        Raises `InputError` that lists the gears if none fits: the caller has to pad the batch.
        """
        requested_shapes = {name: tuple(shape) for name, shape in (shapes or {}).items()}
        inputs = self.gears[0].inputs
        # Without this check, a misspelt name would be reported as a wrong shape.
        if unknown := next((name for name in requested_shapes if name not in inputs), None):
            raise InputError(
                f"an input of the model ({', '.join(inputs)})", unknown, "correct the name"
            )
        for gear in self.gears:
            # A gear with fixed sizes has no batch: the first dimension of an input counts as one.
            first_size = next((sizes[0] for sizes in gear.inputs.values() if sizes), None)
            # Without shapes and batch, the first gear fits.
            fits = all(gear.inputs[name] == shape for name, shape in requested_shapes.items())
            if fits and batch in (None, gear.batch or first_size):
                return gear
        needed = (
            f"inputs of a gear ({'; '.join(_shapes_text(gear.inputs) for gear in self.gears[:8])})"
        )
        got = f"batch {batch}" if batch is not None else _shapes_text(requested_shapes)
        remedy = "pad the inputs to a gear, or compile for this one"
        raise InputError(f"{self.where}: {needed}", got, remedy)


def _shapes_text(shapes: Mapping[str, Sequence[int]]) -> str:
    """Return shapes as text, such as `x:1,3,224,224`."""
    return ", ".join(f"{n}:{','.join(map(str, s))}" for n, s in shapes.items())[:200]


def load_offline(path: str | Path, chip: Chip | None = None) -> OfflineModel:
    """Return the offline model in a file, checked against a chip if one is given.

    Raises `InputError` for a damaged file, another version or another chip.
    """
    model = OfflineModel(str(path), file.read_parts(path), chip)
    if chip is not None:
        model.check_chip(chip)
    return model


# -- online or offline ----------------------------------------------------------------------------
class Inference:
    """A model that is called with inputs by name; it is offline, or compiled at its first call.

    `compile_s` is the time that calls spent on compiling, `time_s` the simulated time of the last
    call. With `kernels` the outputs are computed by the kernels, otherwise by the graph.
    """

    def __init__(self, model: str | Path, chip: Chip | str, *, kernels: bool = True) -> None:
        """Take an ONNX file or `zoo:NAME`, to be compiled at a call, or an offline model's file."""
        self.chip = load_chip(chip) if isinstance(chip, str) else chip
        self.online = not file.is_offline(model)
        self.kernels = kernels
        self._model = str(model)
        # An offline model is read now, so that a damaged file raises an error before any call.
        self._offline = None if self.online else load_offline(model, self.chip)
        self._compiled: dict[Any, tuple[Imported, Compiled, float]] = {}
        self.compile_s = 0.0
        self.time_s = 0.0

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Values]:
        """Return the outputs in the model's types; may raise errors of importing or compiling."""
        shapes = {name: array.shape for name, array in inputs.items()}
        if self._offline is not None:
            gear = self._offline.gear(shapes)
            self.time_s = float(gear.times["summary"]["time_s"])
            imported = gear.imported
            values = gear.run(inputs, kernels=self.kernels)
        else:
            imported, values = self._run_online(shapes, inputs)
        return {
            name: tensors.in_type(values[name], kind)
            for name, kind in imported.output_types.items()
        }

    def _run_online(
        self, shapes: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> tuple[Imported, dict[str, Values]]:
        """Return the imported model and its outputs; new shapes are compiled first."""
        # Sorted, as the order in which a caller lists the inputs does not matter.
        key = tuple(sorted(shapes.items()))
        if key not in self._compiled:
            start_s = time.perf_counter()
            imported = zoo.load_model(self._model, given=inputs)
            compiled = compile_graph(imported.graph, self.chip)
            # The simulated time depends on shapes only, so it is computed once.
            self._compiled[key] = imported, compiled, simulate_graph(compiled).time_s
            self.compile_s += time.perf_counter() - start_s
        imported, compiled, self.time_s = self._compiled[key]
        graph = imported.graph
        if not self.kernels:
            return imported, evaluate(graph, inputs)
        return imported, run_tasks(compiled, inputs, graph.outputs)
