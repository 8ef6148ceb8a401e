"""Prepares a model for the HTTP server: decides which graph computes which request.

    Are rows independent?    yes: a graph for each of 1, 2, 4, ... rows    (requests are batched)
    Are all sizes fixed?     yes: one graph                                (one request at a time)
    otherwise                a graph for each request                      (`PerRequestModel`)

A model takes batches if the first axis of its inputs and outputs counts rows and if rows do not
influence each other, which is tested once with random inputs. The graph for a number of rows is
called a gear: 3 rows run in the gear of 4, with the last row twice.

A model is imported for each request if it has open sizes, inputs whose values determine shapes, or
operators that only the AI CPU or the host computes, as `ascend-lab run` does it.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler import Graph, evaluate, onnx, random_inputs, zoo
from ascend_lab.compiler.compile import compile_graph
from ascend_lab.compiler.hosted import place_model
from ascend_lab.compiler.onnx import host, model_file
from ascend_lab.compiler.onnx.tensors import ELEMENT_TYPES, MAX_ELEMENTS, NUMPY, inputs_of, sizes_of
from ascend_lab.compiler.values import run_tasks
from ascend_lab.deploy.media import UNITS
from ascend_lab.deploy.serving.tensors import TEXT, Arrays, Port
from ascend_lab.errors import AscendLabError, InputError, UnsupportedError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import load_chip

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

Runner = Callable[[Arrays], Arrays]
Shapes = Mapping[str, tuple[int, ...]]
PLACING_CHIP = "Ascend310"
"""The chip on which operators are placed if the user names none."""
MAX_CACHED_GRAPHS = 16
"""Largest number of graphs in the cache of a `PerRequestModel`."""
TEXT_NUMBER = 8
"""The number of the type of texts in ONNX's `TensorProto.DataType`."""


@dataclass(slots=True)
class Model:
    """A model that is ready to serve; `run` takes arrays of up to `max_batch` rows.

    `gear_of` makes the function for a power of two of rows, and `gears` caches these functions.
    """

    name: str
    platform: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    max_batch: int
    gear_of: Callable[[int], Runner]
    gears: dict[int, Runner] = field(default_factory=dict)

    @property
    def batched(self) -> bool:
        """Tell whether rows of several requests may run together."""
        return self.max_batch > 0

    def rows_of(self, inputs: Arrays) -> int:
        """Return the number of rows of a request; 1 if the model takes no batches."""
        return len(next(iter(inputs.values()))) if self.batched else 1

    def run(self, inputs: Arrays) -> Arrays:
        """Return the outputs of a batch, or of one request if the model takes no batches."""
        rows = self.rows_of(inputs)
        # The next power of two: for 5 rows, 5 - 1 = 0b100 has three bits, so 1 << 3 = 8.
        gear = 1 << (rows - 1).bit_length()
        if gear not in self.gears:
            self.gears[gear] = self.gear_of(gear)
        padded = inputs
        if gear > rows:
            missing = (gear - rows,)
            padded = {
                name: np.concatenate(
                    [array, np.broadcast_to(array[-1:], missing + array.shape[1:])]
                )
                for name, array in inputs.items()
            }
        values = self.gears[gear](padded)
        outputs = {}
        for port in self.outputs:
            array = np.asarray(values[port.name])
            if port.element in NUMPY:
                array = array.astype(NUMPY[port.element])  # numbers other than 0 become true
            # Rows of padding are dropped.
            outputs[port.name] = array[:rows] if self.batched else array
        return outputs


class Source:
    """The origin of a model: a file, which is read once, or a name of the zoo."""

    def __init__(self, path: str) -> None:
        """Read the model, unless its weights are in external files, which are read every time."""
        self.path = path
        self.proto: ModelProto | None = None
        if path.startswith(zoo.ZOO_PREFIX) or not Path(path).is_file():
            return
        proto, _ = model_file.load(path)
        initialisers = proto.graph.initializer
        if all(tensor.data_location != model_file.EXTERNAL for tensor in initialisers):
            self.proto = proto

    def imported(
        self, given: Arrays | None = None, shapes: Shapes | None = None, batch: int | None = None
    ) -> onnx.Imported:
        """Return the model's graph; arguments and errors are those of `load_model`."""
        # A model of the zoo, or a file with external weights, is read every time.
        if self.proto is None:
            return zoo.load_model(self.path, given=given, shapes=shapes, batch=batch)
        sizes = {name: array.shape for name, array in (given or {}).items()}
        sizes |= shapes or {}
        return onnx.import_pinning(self.proto, given or {}, shapes=sizes, batch=batch)

    def model_proto(self) -> "ModelProto":
        """Return the unchecked ONNX model; raises `UnsupportedError` for one of the zoo."""
        if self.path.startswith(zoo.ZOO_PREFIX):
            raise UnsupportedError("a model file", self.path, "export it")
        return host.whole_model(self.proto or self.path)


def open_model(
    path: str, chip: str | None = None, max_batch: int = 8, shapes: Shapes | None = None
) -> Model:
    """Return a file or zoo:NAME as a model that is evaluated, or run by the kernels of a chip.

    With `max_batch` 1, or with `shapes`, it runs request by request. Raises errors of loading the
    model, and `UnsupportedError` for a model that cannot be computed.
    """
    source = Source(path)
    name = zoo.model_name(path)
    platform = f"ascend_lab_{chip or 'reference'}"
    # Shapes of the user also fix the number of rows.
    by_rows = _by_rows(source) if max_batch > 1 and not shapes else {}
    try:
        loaded = by_rows.get(1) or source.imported(shapes=shapes)
    except UnsupportedError as error:
        runner = PerRequestModel(source, chip, error)
        inputs, outputs = runner.ports(shapes or {})
        return Model(name, platform, inputs, outputs, 0, lambda rows: runner)

    def gear_of(rows: int) -> Runner:
        return _runner((by_rows.get(rows) or source.imported(batch=rows)).graph, chip)

    def ports(types: Mapping[str, str]) -> tuple[Port, ...]:
        """Return the inputs or outputs of the model."""
        kinds = loaded.graph.types
        return tuple(
            Port(key, element, kinds[key].shape, bool(by_rows)) for key, element in types.items()
        )

    # Compiled now, so that a model that the chip cannot run raises an error at the start.
    gears = {1: _runner(loaded.graph, chip)}
    return Model(
        name=name,
        platform=platform,
        inputs=ports(loaded.input_types),
        outputs=ports(loaded.output_types),
        max_batch=max_batch if by_rows else 0,
        gear_of=gear_of,
        gears=gears,
    )


def _by_rows(source: Source) -> dict[int, onnx.Imported]:
    """Return the model for one and for two rows if rows are independent, otherwise nothing."""
    try:
        loaded = {rows: source.imported(batch=rows) for rows in (1, 2)}
        return loaded if _rows_are_independent(loaded[1].graph, loaded[2].graph) else {}
    # A model that cannot be imported for two rows takes no batches, but can be served.
    except AscendLabError:
        return {}


def _rows_are_independent(single: Graph, two: Graph) -> bool:
    """Return whether two rows together give the same outputs as each row alone."""
    for name in (*single.inputs, *single.outputs):
        shape = single.types[name].shape
        double = two.types[name].shape
        if not shape or (shape[0], double[0]) != (1, 2) or shape[1:] != double[1:]:
            return False
    row_inputs = [random_inputs(single, seed) for seed in (0, 1)]
    single_outputs = [evaluate(single, inputs) for inputs in row_inputs]
    pair_outputs = evaluate(
        two,
        {
            name: np.concatenate([inputs_of_row[name] for inputs_of_row in row_inputs])
            for name in single.inputs
        },
    )
    # Tolerances are wide, as another order of summation changes FP16 results; dependent rows
    # differ much more.
    return all(
        np.allclose(
            pair_outputs[name][row],
            single_outputs[row][name][0],
            rtol=1e-2,
            atol=1e-3,
            equal_nan=True,
        )
        for name in single.outputs
        for row in (0, 1)
    )


def _runner(graph: Graph, chip: str | None) -> Runner:
    """Return the function that computes a graph, by its kernels if a chip is named."""
    if chip is None:
        return lambda inputs: evaluate(graph, inputs)
    compiled = compile_graph(graph, chip)
    return lambda inputs: run_tasks(compiled, inputs, graph.outputs)


# -- models that need a graph for each request, as in `ascend-lab run` ----------------------------
class PerRequestModel:
    """A model that is imported for each request, or placed on AI core, AI CPU and host.

    Graphs are cached by the sizes of all inputs and the values of those that determine shapes. A
    placement depends on all values and is not cached.
    """

    def __init__(self, source: Source, chip: str | None, error: UnsupportedError) -> None:
        """Keep `error`, the reason why no single graph exists for the model."""
        self.source = source
        self.chip = chip
        self.error = error
        self.shape_inputs: dict[Any, tuple[str, ...]] = {}
        self.cached: OrderedDict[Any, Runner] = OrderedDict()
        # All instances, which are threads, use this cache.
        self.lock = Lock()
        try:
            self.proto = source.model_proto()
        except UnsupportedError as other:
            raise error from other

    def __call__(self, inputs: Arrays) -> Arrays:
        """Return the outputs; raises errors of importing, placing and evaluating."""
        runner = self._cached_for(inputs)
        if runner is not None:
            return runner(inputs)
        try:
            loaded = self.source.imported(given=inputs)
        except UnsupportedError as error:
            # The tensor is too large: the host would use all memory for it.
            if str(MAX_ELEMENTS) in error.needed:
                raise
            return self._placed(inputs)
        graph = loaded.graph
        compute = _runner(graph, self.chip)

        def run(given: Arrays) -> Arrays:
            return compute({name: given[name] for name in graph.inputs})

        # Inputs that the graph lacks have determined shapes: their values are constants in it.
        self._cache(inputs, tuple(name for name in inputs if name not in graph.inputs), run)
        return run(inputs)

    def _placed(self, inputs: Arrays) -> Arrays:
        """Return the outputs of a model that is not a single graph."""
        for name, array in inputs.items():
            # Some operators of ONNX Runtime end the process if a tensor is empty.
            if not array.size:
                needed = f"input {shown(name)}: values for operators of the host"
                raise InputError(needed, f"none, shape {list(array.shape)}")
        chip = load_chip(self.chip or PLACING_CHIP)
        unit = UNITS.get(chip.family, {}).get("VPC")
        rate = unit.pixels_per_s if unit else 0.0
        return place_model(self.proto, chip, inputs=inputs, media_pixels_per_s=rate).run()

    def _cached_for(self, inputs: Arrays) -> Runner | None:
        """Return the cached function for some inputs, None if there is none."""
        sizes = _sizes(inputs)
        with self.lock:
            if sizes not in self.shape_inputs:
                return None
            key = _key(inputs, self.shape_inputs[sizes])
            if key in self.cached:
                self.cached.move_to_end(key)
            return self.cached.get(key)

    def _cache(self, inputs: Arrays, shape_input_names: tuple[str, ...], runner: Runner) -> None:
        """Cache a function, with the names of the inputs whose values determine shapes."""
        sizes = _sizes(inputs)
        with self.lock:
            self.shape_inputs[sizes] = shape_input_names
            self.cached[_key(inputs, shape_input_names)] = runner
            if len(self.cached) > MAX_CACHED_GRAPHS:
                self.cached.popitem(last=False)
                # Sizes without a cached graph are deleted, too, so that the table stays small.
                used = {key[0] for key in self.cached}
                self.shape_inputs = {
                    k: names for k, names in self.shape_inputs.items() if k in used
                }

    def ports(self, shapes: Shapes) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
        """Return the inputs and outputs as the file states them, with -1 for open sizes.

        Raises `UnsupportedError` for inputs that are not tensors, and for a model that fails on
        random inputs.
        """
        entries = inputs_of(self.proto.graph)
        inputs = tuple(_port("input", entry, shapes.get(entry.name)) for entry in entries)
        open_sizes = any(-1 in port.shape for port in inputs)
        values: Mapping[str, Any] = {}
        if not open_sizes and all(port.element != TEXT for port in inputs):
            fixed = {port.name: port.shape for port in inputs}
            try:
                values = self(host.random_feed(self.proto, fixed, None, 0))
            except AscendLabError as other:
                # Integers or flags may be indices, for which random values may be invalid.
                if all(NUMPY[port.element].kind not in "biu" for port in inputs):
                    raise self._combined_error(other) from other
        outputs = tuple(
            _port("output", entry, None, values.get(entry.name))
            for entry in _typed_outputs(self.proto)
        )
        return inputs, outputs

    def _combined_error(self, other: AscendLabError) -> UnsupportedError:
        """Return the error with the reasons why neither a graph nor a placement works."""
        why = "; ".join(
            sentence for sentence in (self.error.remedy, f"off the core: {other}") if sentence
        )
        return UnsupportedError(self.error.needed, self.error.got, why)


def _sizes(inputs: Arrays) -> tuple[Any, ...]:
    """Return the names and shapes of some inputs, whatever their order."""
    return tuple((name, inputs[name].shape) for name in sorted(inputs))


def _key(inputs: Arrays, shape_input_names: Sequence[str]) -> tuple[Any, ...]:
    """Return the key of a graph: all sizes, and the values of inputs that determine shapes."""
    return _sizes(inputs), tuple((name, inputs[name].tobytes()) for name in shape_input_names)


def _typed_outputs(proto: "ModelProto") -> list["ValueInfoProto"]:
    """Return a model's outputs, with types inferred if the file does not state them."""
    import onnx as library

    if all(entry.type.WhichOneof("value") for entry in proto.graph.output):
        return list(proto.graph.output)
    return list(library.shape_inference.infer_shapes(proto).graph.output)


def _port(
    what: str, entry: "ValueInfoProto", shape: Sequence[int] | None, value: Any = None
) -> Port:
    """Return the port of a tensor of the file; `value` gives what the file does not state."""
    kind = entry.type.WhichOneof("value")
    if kind not in (None, "tensor_type"):
        raise UnsupportedError(f"{what} {entry.name}: a tensor", str(kind), "leave it out")
    number = entry.type.tensor_type.elem_type
    element = TEXT if number == TEXT_NUMBER else ELEMENT_TYPES.get(number, ("", None))[0]
    if not element and value is not None:
        element = next(
            (name for name, numpy_type in NUMPY.items() if numpy_type == np.asarray(value).dtype),
            "",
        )
    if not element:
        needed = f"{what} {entry.name}: a tensor of numbers"
        raise UnsupportedError(needed, f"type {number} of ONNX", "export it in one")
    if shape is not None:
        sizes = tuple(shape)
    elif (stated := sizes_of(entry)) is None:
        sizes = (-1,) if value is None else (-1,) * np.ndim(value)
    else:
        sizes = tuple(size if isinstance(size, int) else -1 for size in stated)
    return Port(entry.name, element, sizes, batched=False)
