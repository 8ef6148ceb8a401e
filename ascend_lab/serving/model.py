"""A model that can be asked: its tensors in the words of KServe v2, and its values.

A model takes batches if its first sizes follow the batch and rows do not touch each other, which is
tried once. Batches run in gears of 1, 2, 4, ... rows: what is missing repeats the last row.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.graph.compile import compile_graph
from ascend_lab.graph.evaluate import evaluate, random_inputs
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.onnx import Imported
from ascend_lab.graph.onnx.tensors import NUMPY
from ascend_lab.graph.tasks import run_tasks
from ascend_lab.graph.zoo import load_model, model_name
from ascend_lab.limits import shown

Arrays = dict[str, NDArray[Any]]
DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64",
    "int8": "INT8", "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16",
    "float32": "FP32", "double": "FP64", "bfloat16": "BF16",
}  # fmt: skip
"""KServe's name of each ONNX element type."""
KINDS = {"BOOL": "b", "INT": "iu", "UINT": "iu"}
WORDS = {"b": "true and false", "iu": "whole numbers", "iuf": "numbers"}
FOUND = {"b": "true and false", "i": "whole numbers", "u": "whole numbers", "f": "fractions",
         "U": "values, text among them"}  # fmt: skip
"""What a list holds, by numpy's kind."""


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that goes in or out; the shape is that of one row, or whole without a batch."""

    name: str
    element: str
    shape: tuple[int, ...]
    batched: bool

    @property
    def datatype(self) -> str:
        """KServe's name of the element type."""
        return DATATYPES[self.element]

    def described(self) -> dict[str, Any]:
        """Return what the metadata says."""
        shape = [-1, *self.shape[1:]] if self.batched else list(self.shape)
        return {"name": self.name, "datatype": self.datatype, "shape": shape}

    def read(self, tensor: Mapping[str, Any], most: int) -> NDArray[Any]:
        """Return the array of a request's tensor; raise `InputError` unless it fits."""
        name, shape, rest = shown(self.name), tensor.get("shape"), slice(int(self.batched), None)
        if tensor.get("datatype") != self.datatype:
            got = shown(tensor.get("datatype"))
            raise InputError(f"input {name}: datatype {self.datatype}", got)
        whole = isinstance(shape, list) and all(type(n) is int for n in shape)
        sizes: tuple[int, ...] = tuple(shape or ()) if whole else (0,)
        fits = len(sizes) == len(self.shape) and sizes[rest] == self.shape[rest]
        if not fits or (self.batched and not 1 <= sizes[0] <= most):
            limit = f" (at most {most} in the first)" if self.batched else ""
            wanted = self.described()["shape"]
            raise InputError(f"input {name}: shape {wanted}{limit}", shown(shape))
        return self._array(tensor.get("data"), sizes)

    def _array(self, data: object, shape: tuple[int, ...]) -> NDArray[Any]:
        name, number = shown(self.name), math.prod(shape)
        try:
            found = np.array(data if isinstance(data, list) else None)
        except (ValueError, OverflowError):
            found = np.array(None)
        kinds = KINDS.get(self.datatype.rstrip("0123456789"), "iuf")
        if found.size != number or (found.dtype.kind not in kinds and number):
            word = FOUND.get(found.dtype.kind)
            got = f"{found.size} {word}" if isinstance(data, list) and word else shown(data)
            raise InputError(f"input {name}: data, a list of {number} {WORDS[kinds]}", got)
        with np.errstate(all="ignore"):
            cast = found.astype(NUMPY[self.element])
            wide = cast.astype(np.float64) if kinds == "iuf" else cast
        if not (np.isfinite(wide).all() if kinds == "iuf" else (cast == found).all()):
            raise InputError(f"input {name}: values that {self.datatype} holds", "others")
        return cast.reshape(shape)


@dataclass(slots=True)
class Model:
    """A version being served; `run` takes arrays with up to `max_batch` rows in the first axis."""

    name: str
    platform: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    max_batch: int
    gear_of: Callable[[int], Callable[[Arrays], Arrays]]
    gears: dict[int, Callable[[Arrays], Arrays]] = field(default_factory=dict)

    @property
    def batched(self) -> bool:
        """Tell whether rows of several requests may run together."""
        return self.max_batch > 0

    def run(self, inputs: Arrays) -> Arrays:
        """Return the outputs of some rows, or of the whole if the model takes no batches."""
        rows = len(next(iter(inputs.values()))) if self.batched else 1
        gear = 1 << (rows - 1).bit_length()
        if gear not in self.gears:
            self.gears[gear] = self.gear_of(gear)
        padded = inputs
        if gear > rows:
            more = (gear - rows,)
            padded = {
                n: np.concatenate([a, np.broadcast_to(a[-1:], more + a.shape[1:])])
                for n, a in inputs.items()
            }
        found = self.gears[gear](padded)
        cut = slice(rows) if self.batched else ...
        # numbers become bool by being other than 0
        return {
            p.name: np.asarray(found[p.name]).astype(NUMPY[p.element])[cut] for p in self.outputs
        }


def open_model(
    path: str,
    chip: str | None = None,
    max_batch: int = 8,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Model:
    """Return a file or zoo:NAME ready to be asked: evaluated, or as its kernels compute on a chip.

    With `max_batch` 1, or `shapes` of its own, it is taken as it is. Raises as `load_model`.
    """
    loaded: dict[int, Imported] = {}
    batched = False
    if max_batch > 1 and not shapes:
        try:
            loaded = {rows: load_model(path, batch=rows) for rows in (1, 2)}
            batched = _rows_apart(loaded[1].graph, loaded[2].graph)
        except AscendLabError:
            batched = False
    if not batched:
        loaded = {1: load_model(path, shapes=shapes)}

    def gear_of(rows: int) -> Callable[[Arrays], Arrays]:
        return _runner((loaded.get(rows) or load_model(path, batch=rows)).graph, chip)

    graph = loaded[1].graph

    def ports(types: Mapping[str, str]) -> tuple[Port, ...]:
        return tuple(
            Port(name, element, graph.types[name].shape, batched) for name, element in types.items()
        )

    first = {1: gear_of(1)}  # a chip that cannot run it says so now
    return Model(
        model_name(path), f"ascend_lab_{chip or 'reference'}", ports(loaded[1].input_types),
        ports(loaded[1].output_types), max_batch if batched else 0, gear_of, first,
    )  # fmt: skip


def _runner(graph: Graph, chip: str | None) -> Callable[[Arrays], Arrays]:
    if chip is None:
        return lambda inputs: evaluate(graph, inputs)
    compiled = compile_graph(graph, chip)
    return lambda inputs: run_tasks(compiled, inputs, graph.outputs)


def _rows_apart(one: Graph, two: Graph) -> bool:
    """Tell whether two rows together give what each gives alone; this warms the model up too."""
    for name in (*one.inputs, *one.outputs):
        shape, other = one.types[name].shape, two.types[name].shape
        if not shape or (shape[0], other[0]) != (1, 2) or shape[1:] != other[1:]:
            return False
    given = [random_inputs(one, seed) for seed in (0, 1)]
    alone = [evaluate(one, inputs) for inputs in given]
    pair = evaluate(two, {n: np.concatenate([g[n] for g in given]) for n in one.inputs})
    return all(
        np.allclose(pair[n][k], alone[k][n][0], rtol=1e-2, atol=1e-3, equal_nan=True)
        for n in one.outputs
        for k in (0, 1)
    )
