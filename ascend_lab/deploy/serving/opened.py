"""Models opened for a server: in batches if their rows are independent, else request by request.

    file or zoo:NAME -> Source -> rows apart?   yes -> a graph for 1, 2, 4, ... rows   (batched)
                                  closed sizes? yes -> one graph
                                  else              -> a graph for each request         (`AsRun`)

A model takes batches if the first axis of its inputs and outputs counts the rows of a batch and if
rows do not influence each other, which is tried once. Batches run in gears of 1, 2, 4, ... rows:
3 rows run in the gear of 4, the last row twice.

A model with open sizes, with inputs whose values decide on shapes, or with operators that only the
AI CPU or the host computes is imported, or placed, anew for each request, as `ascend-lab run` does.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ascend_lab.compiler import Graph, evaluate, onnx, random_inputs, run_tasks, zoo
from ascend_lab.compiler.compile import compile_graph
from ascend_lab.compiler.hosted import place_model
from ascend_lab.compiler.onnx import host, model_file
from ascend_lab.compiler.onnx.tensors import ELEMENTS, MOST_ELEMENTS, NUMPY, inputs_of, sizes_of
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
"""The chip that operators are placed on without a chip of the user's: that of `run`."""
KEPT = 16
"""Most graphs in the cache of `AsRun`, one for each set of sizes that requests have."""
TEXT_NUMBER = 8
"""The number of the type of texts in `TensorProto.DataType`."""


@dataclass(slots=True)
class Model:
    """A model to be served; `run` takes arrays with up to `max_batch` rows in the first axis."""

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
        """Return how many rows a request asks for; 1 if the model takes no batches."""
        return len(next(iter(inputs.values()))) if self.batched else 1

    def run(self, inputs: Arrays) -> Arrays:
        """Return the outputs of some rows, or of a whole input if the model takes no batches."""
        rows = self.rows_of(inputs)
        # the next power of two: 5 rows -> 4 = 0b100, three bits -> 8
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
            # rows that only filled the gear are dropped
            outputs[port.name] = array[:rows] if self.batched else array
        return outputs


class Source:
    """Where a model comes from: a file, read once, or a name of the zoo."""

    def __init__(self, path: str) -> None:
        """Read the model; one with external data is read from its files whenever it is needed."""
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
        """Return the model's graph; arguments and errors as `load_model`."""
        # read anew from the zoo, or from a file whose weights lie in files beside it
        if self.proto is None:
            return zoo.load_model(self.path, given=given, shapes=shapes, batch=batch)
        sizes = {name: array.shape for name, array in (given or {}).items()}
        sizes |= shapes or {}
        return onnx.import_pinning(self.proto, given or {}, shapes=sizes, batch=batch)

    def whole(self) -> "ModelProto":
        """Return the model as its file has it, unchecked; `UnsupportedError` for one of the zoo."""
        if self.path.startswith(zoo.ZOO_PREFIX):
            raise UnsupportedError("a model file", self.path, "export it")
        return host.whole_model(self.proto or self.path)


def open_model(
    path: str, chip: str | None = None, max_batch: int = 8, shapes: Shapes | None = None
) -> Model:
    """Return a file or zoo:NAME ready to be asked: evaluated, or computed by kernels of a chip.

    With `max_batch` 1, or with `shapes`, it runs request by request. Raises as `load_model`, and
    `UnsupportedError` for a model that `run` cannot compute either.
    """
    source = Source(path)
    name = zoo.model_name(path)
    platform = f"ascend_lab_{chip or 'reference'}"
    # shapes of the user's own fix the rows as well
    by_rows = _by_rows(source) if max_batch > 1 and not shapes else {}
    try:
        loaded = by_rows.get(1) or source.imported(shapes=shapes)
    except UnsupportedError as error:
        runner = AsRun(source, chip, error)
        inputs, outputs = runner.ports(shapes or {})
        return Model(name, platform, inputs, outputs, 0, lambda rows: runner)

    def gear_of(rows: int) -> Runner:
        return _runner((by_rows.get(rows) or source.imported(batch=rows)).graph, chip)

    def ports(types: Mapping[str, str]) -> tuple[Port, ...]:
        kinds = loaded.graph.types
        return tuple(
            Port(key, element, kinds[key].shape, bool(by_rows)) for key, element in types.items()
        )

    # compiled now, so that a model which the chip cannot run is refused at the start
    gears = {1: _runner(loaded.graph, chip)}
    return Model(
        name,
        platform,
        ports(loaded.input_types),
        ports(loaded.output_types),
        max_batch if by_rows else 0,
        gear_of,
        gears,
    )


def _by_rows(source: Source) -> dict[int, onnx.Imported]:
    """Return the model for one row and for two if rows are independent, else nothing."""
    try:
        loaded = {rows: source.imported(batch=rows) for rows in (1, 2)}
        return loaded if _rows_apart(loaded[1].graph, loaded[2].graph) else {}
    # a model that cannot be imported for two rows takes no batches, but may still be served
    except AscendLabError:
        return {}


def _rows_apart(single: Graph, two: Graph) -> bool:
    """Tell whether two rows together give the outputs that each gives alone."""
    for name in (*single.inputs, *single.outputs):
        shape = single.types[name].shape
        double = two.types[name].shape
        if not shape or (shape[0], double[0]) != (1, 2) or shape[1:] != double[1:]:
            return False
    row_inputs = [random_inputs(single, seed) for seed in (0, 1)]
    alone = [evaluate(single, inputs) for inputs in row_inputs]
    pair = evaluate(
        two,
        {
            name: np.concatenate([inputs_of_row[name] for inputs_of_row in row_inputs])
            for name in single.inputs
        },
    )
    # wide tolerances: sums in another order differ in FP16, while mixed rows differ altogether
    return all(
        np.allclose(pair[name][row], alone[row][name][0], rtol=1e-2, atol=1e-3, equal_nan=True)
        for name in single.outputs
        for row in (0, 1)
    )


def _runner(graph: Graph, chip: str | None) -> Runner:
    """Return the function that computes a graph, by its kernels if a chip is named."""
    if chip is None:
        return lambda inputs: evaluate(graph, inputs)
    compiled = compile_graph(graph, chip)
    return lambda inputs: run_tasks(compiled, inputs, graph.outputs)


# -- as `run` does it -----------------------------------------------------------------------------
class AsRun:
    """A model that is imported, or placed on core, AI CPU and host, for each request.

    Graphs are cached by the sizes of all inputs and the values of those that decide on shapes. A
    placement depends on all values, and is made anew each time.
    """

    def __init__(self, source: Source, chip: str | None, error: UnsupportedError) -> None:
        """Take a model for which no single graph exists; `error` says why."""
        self.source = source
        self.chip = chip
        self.error = error
        self.steering: dict[Any, tuple[str, ...]] = {}
        self.cached: OrderedDict[Any, Runner] = OrderedDict()
        # instances are threads, and all of them use this cache
        self.lock = Lock()
        try:
            self.proto = source.whole()
        except UnsupportedError as other:
            raise error from other

    def __call__(self, inputs: Arrays) -> Arrays:
        """Return the outputs; raises as importing, placing and evaluating do."""
        runner = self._cached_for(inputs)
        if runner is not None:
            return runner(inputs)
        try:
            loaded = self.source.imported(given=inputs)
        except UnsupportedError as error:
            # too large a tensor: the host would try, and take all memory there is
            if str(MOST_ELEMENTS) in error.needed:
                raise
            return self._placed(inputs)
        graph = loaded.graph
        compute = _runner(graph, self.chip)

        def run(given: Arrays) -> Arrays:
            return compute({name: given[name] for name in graph.inputs})

        # inputs that are no inputs of the graph were used up by it: their values decided on shapes
        self._cache(inputs, tuple(name for name in inputs if name not in graph.inputs), run)
        return run(inputs)

    def _placed(self, inputs: Arrays) -> Arrays:
        """Return the outputs of a model that is no single graph; raises as `place_model`."""
        for name, array in inputs.items():
            # some operators of ONNX Runtime end the process on an empty tensor
            if not array.size:
                needed = f"input {shown(name)}: values for operators of the host"
                raise InputError(needed, f"none, shape {list(array.shape)}")
        chip = load_chip(self.chip or PLACING_CHIP)
        unit = UNITS.get(chip.name, {}).get("VPC")
        rate = unit.pixels_per_s if unit else 0.0
        return place_model(self.proto, chip, inputs=inputs, media_pixels_per_s=rate).run()

    def _cached_for(self, inputs: Arrays) -> Runner | None:
        """Return the cached function for some inputs, None if there is none."""
        sizes = _sizes(inputs)
        with self.lock:
            if sizes not in self.steering:
                return None
            key = _key(inputs, self.steering[sizes])
            if key in self.cached:
                self.cached.move_to_end(key)
            return self.cached.get(key)

    def _cache(self, inputs: Arrays, steering: tuple[str, ...], runner: Runner) -> None:
        """Cache a function, with the names of the inputs whose values it was made for."""
        sizes = _sizes(inputs)
        with self.lock:
            self.steering[sizes] = steering
            self.cached[_key(inputs, steering)] = runner
            if len(self.cached) > KEPT:
                self.cached.popitem(last=False)
                # sizes without a graph left are forgotten, too, or they would grow without end
                used = {key[0] for key in self.cached}
                self.steering = {k: names for k, names in self.steering.items() if k in used}

    def ports(self, shapes: Shapes) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
        """Return the inputs and outputs as the file states them, -1 for sizes that are open.

        Raises `UnsupportedError` for inputs that are no tensors, and for a model that fails on
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
                # whole numbers or flags may be indices, for which random values are not good enough
                if all(NUMPY[port.element].kind not in "biu" for port in inputs):
                    raise self._neither(other) from other
        outputs = tuple(
            _port("output", entry, None, values.get(entry.name)) for entry in _typed(self.proto)
        )
        return inputs, outputs

    def _neither(self, other: AscendLabError) -> UnsupportedError:
        """Return the error that names why neither a graph nor a placement computes the model."""
        why = "; ".join(
            sentence for sentence in (self.error.remedy, f"off the core: {other}") if sentence
        )
        return UnsupportedError(self.error.needed, self.error.got, why)


def _sizes(inputs: Arrays) -> tuple[Any, ...]:
    """Return the names and shapes of some inputs, whatever their order."""
    return tuple((name, inputs[name].shape) for name in sorted(inputs))


def _key(inputs: Arrays, steering: Sequence[str]) -> tuple[Any, ...]:
    """Return the key of a graph: all sizes, and the values of inputs that decide on shapes."""
    return _sizes(inputs), tuple((name, inputs[name].tobytes()) for name in steering)


def _typed(proto: "ModelProto") -> list["ValueInfoProto"]:
    """Return a model's outputs, types filled in where the file leaves them out."""
    import onnx as library

    if all(entry.type.WhichOneof("value") for entry in proto.graph.output):
        return list(proto.graph.output)
    return list(library.shape_inference.infer_shapes(proto).graph.output)


def _port(
    what: str, entry: "ValueInfoProto", shape: Sequence[int] | None, value: Any = None
) -> Port:
    """Return a port as the file describes a tensor; for an output a value may fill the gaps."""
    kind = entry.type.WhichOneof("value")
    if kind not in (None, "tensor_type"):
        raise UnsupportedError(f"{what} {entry.name}: a tensor", str(kind), "leave it out")
    number = entry.type.tensor_type.elem_type
    element = TEXT if number == TEXT_NUMBER else ELEMENTS.get(number, ("", None))[0]
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
