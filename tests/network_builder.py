"""A random ONNX network while it grows: every node is run as it is added, so its values are known.

The values steer what comes next (shapes that fit, numbers that stay in the range of fp16). The
nodes are kept ready to run again with rounding errors added behind each of them, which tells how
far two right computations of a network may lie apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Values = np.ndarray
LARGEST_ELEMENTS = 10_000
"""Most elements of a tensor: a network has to run in a fraction of a second."""
LOUDEST = 24.0
"""Largest magnitude behind a step; louder tensors are scaled down, so that fp16 holds sums."""
FAINTEST = 0.05
"""Smallest largest magnitude; below, fp16 loses digits."""
SUBNORMAL = 2.0**-24
"""Smallest number of fp16: the error of those that are smaller than its normal ones."""
FLOATS = (np.float32, np.float16)


LOST = 2.0**-10
"""Smallest largest magnitude that is scaled: below, fp16 has lost most digits."""


class UnfitError(Exception):
    """A step that does not fit here; the network goes on without it."""


@dataclass(frozen=True)
class Step:
    """A node, and what runs it alone: a session of ONNX Runtime, or the reference evaluator."""

    node: onnx.NodeProto
    model: onnx.ModelProto
    runner: onnxruntime.InferenceSession | ReferenceEvaluator

    def run(self, values: Mapping[str, Values]) -> dict[str, Values]:
        """Return what the node writes."""
        names = [name for name in self.node.output if name]
        reads = {name: values[name] for name in self.node.input if name}
        return dict(zip(names, map(np.asarray, self.runner.run(names, reads)), strict=True))

    def by_reference(self) -> Step:
        """Return the node as the reference evaluator runs it."""
        return replace(self, runner=reference(self.model))


def reference(model: onnx.ModelProto) -> ReferenceEvaluator:
    """Return the reference evaluator of a model; its batch norms before opset 14 learn nothing."""
    still = onnx.ModelProto()
    still.CopyFrom(model)
    for node in still.graph.node:
        if node.op_type == "BatchNormalization" and model.opset_import[0].version < 14:
            node.attribute.add(name="momentum", type=onnx.AttributeProto.FLOAT).f = 1.0
    return ReferenceEvaluator(still)


def onnxruntime_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Return a session of ONNX Runtime: one thread, silent, the graph as it stands."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = model.SerializeToString()
    return onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])


@dataclass(frozen=True)
class Network:
    """A finished network: the model, numbers for its inputs, and its nodes one by one."""

    seed: int
    model: onnx.ModelProto
    feed: dict[str, Values]
    steps: tuple[Step, ...]
    constants: dict[str, Values]

    @property
    def outputs(self) -> list[str]:
        """The outputs by name."""
        return [entry.name for entry in self.model.graph.output]

    def rounded_run(self, unit: float, rng: np.random.Generator) -> dict[str, Values]:
        """Return the outputs of a run in which every float tensor is moved by up to `unit`.

        Numbers that fp16 holds stay: sums of small whole numbers have no rounding error.
        """
        values = {n: moved(a, unit, rng) for n, a in {**self.constants, **self.feed}.items()}
        for step in self.steps:
            written = step.run(values)
            values |= {name: moved(array, unit, rng) for name, array in written.items()}
        return {name: values[name] for name in self.outputs}


def moved(array: Values, unit: float, rng: np.random.Generator) -> Values:
    """Return numbers moved at random by up to `unit` of themselves, unless fp16 holds them."""
    if array.dtype not in FLOATS:
        return array
    unit = max(unit, 2.0**-11) if array.dtype == np.float16 else unit
    with np.errstate(all="ignore"):
        exact = array.astype(np.float16) == array
    if array.dtype == np.float16:  # what was rounded already: nobody knows which are exact
        exact = array == np.rint(array)
    noisy = array * (1 + unit * rng.uniform(-1, 1, array.shape))
    noisy += (SUBNORMAL if unit > 2.0**-12 else 0) * rng.uniform(-1, 1, array.shape)
    return np.where(exact, array, noisy).astype(array.dtype)


class Grower:
    """A network under construction, its random choices, and the tensors that may be read next."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.opset = int(self.rng.integers(9, 22))
        self.mixed = self.chance(0.2)
        self.values: dict[str, Values] = {}
        self.feed: dict[str, Values] = {}
        self.constants: dict[str, Values] = {}
        self.constant_nodes: dict[str, onnx.NodeProto] = {}
        self.steps: list[Step] = []
        self.open: list[str] = []
        self.symbolic = self.chance(0.3)

    # -- choices ----------------------------------------------------------------------------------
    def chance(self, share: float) -> bool:
        """Return True in so many cases."""
        return bool(self.rng.random() < share)

    def whole(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def pick(self, choices: Sequence[Any]) -> Any:
        """Return one of some choices."""
        return choices[self.whole(0, len(choices) - 1)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.values[name].shape

    def is_float(self, name: str) -> bool:
        """Tell whether a tensor holds floats."""
        return self.values[name].dtype in FLOATS

    def like(self, dtype: Any, shape: Sequence[int], scale: float = 1.0) -> Values:
        """Return random numbers: whole ones, halves, or normal ones."""
        if self.chance(0.3):
            drawn = self.rng.integers(-2, 3, shape) * scale
        else:
            drawn = self.rng.normal(0, scale, shape)
        return np.asarray(drawn).astype(dtype)

    # -- growing ----------------------------------------------------------------------------------
    def fresh(self, stem: str) -> str:
        """Return a name that is not taken."""
        return f"{stem}_{len(self.values)}"

    def input(self, array: Values) -> str:
        """Add an input of the network; return its name."""
        name = f"in{len(self.feed)}"
        self.feed[name] = self.values[name] = array
        return name

    def constant(self, array: Any, dtype: Any = None) -> str:
        """Return the name of a constant: an initialiser, or what a Constant node writes."""
        stored = np.asarray(array, dtype)
        name = self.fresh("const")
        self.constants[name] = self.values[name] = stored
        if self.chance(0.3):
            value = numpy_helper.from_array(stored, name)
            self.constant_nodes[name] = helper.make_node("Constant", [], [name], value=value)
        return name

    def weight(self, shape: Sequence[int], dtype: Any, fan_in: int = 0) -> str:
        """Return the name of random weights; of `fan_in` products each sum has.

        Now and then they are those of an earlier layer, or an input of the network.
        """
        numbers = self.like(dtype, shape, (fan_in or 1) ** -0.5)
        alike = [n for n, a in self.constants.items() if (a.shape, a.dtype) == (shape, dtype)]
        if alike and self.chance(0.2):
            return self.pick(alike)
        return self.input(numbers) if self.chance(0.03) else self.constant(numbers)

    def ints(self, *numbers: int) -> str:
        """Return the name of a constant list of int64 numbers."""
        return self.constant(np.array(numbers, np.int64))

    def add(self, op: str, *reads: str, outputs: int = 1, **attrs: Any) -> Any:
        """Add a node and run it; return the name of what it writes, or the names.

        Raises `UnfitError` where ONNX Runtime refuses it, and for results of no use: not finite,
        empty, or too large.
        """
        names = [self.fresh(op.lower())]
        names += [f"{names[0]}_{i}" for i in range(1, outputs)]
        node = helper.make_node(op, list(reads), names, names[0].replace("_", "/"), **attrs)
        model = self._alone(node)
        try:
            step = Step(node, model, onnxruntime_session(model))
            written = step.run(self.values)
        except Exception as error:  # whatever ONNX Runtime raises
            raise UnfitError(f"{op}: {error}") from error
        for array in written.values():
            numbers = array.astype(np.float64)
            fits = 0 < array.size <= LARGEST_ELEMENTS and np.isfinite(numbers).all()
            if not fits or np.abs(numbers).max() > 30_000:
                raise UnfitError(f"{op}: {array.shape}")
        self.values |= written
        self.steps.append(step)
        return names if outputs > 1 else names[0]

    def _alone(self, node: onnx.NodeProto) -> onnx.ModelProto:
        """Return a model of one node, for any sizes: witnesses may differ in them."""
        reads = dict.fromkeys(name for name in node.input if name)
        elements = {name: _element(self.values[name]) for name in reads}
        entries = [helper.make_tensor_value_info(n, e, None) for n, e in elements.items()]
        ends = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        return _model([node], entries, ends, [], self.opset)

    def keep(self, name: str) -> str:
        """Let a tensor be read by what comes next, scaled if it is too loud or too faint."""
        if self.is_float(name):
            largest = float(np.abs(self.values[name].astype(np.float64)).max())
            if 0 < largest < LOST:
                raise UnfitError(f"{name}: at most {largest}")
            if largest > LOUDEST or 0 < largest < FAINTEST:
                scale = self.constant(np.float32(2.0 ** -np.round(np.log2(largest))))
                scale_array = self.values[scale].astype(self.values[name].dtype)
                name = self.add("Mul", name, self.constant(scale_array))
        self.open.append(name)
        return name

    def try_step(self, step: Callable[[Grower, str], Any], x: str) -> bool:
        """Take a step behind a tensor, or take back what it did; tell whether it was taken."""
        counts = len(self.steps), len(self.open)
        try:
            found = step(self, x)
            for name in (found,) if isinstance(found, str) else found or ():
                self.keep(name)
        except UnfitError:
            del self.steps[counts[0] :]
            del self.open[counts[1] :]
            return False
        return len(self.open) > counts[1]

    # -- the end ----------------------------------------------------------------------------------
    def finish(self) -> Network:
        """Return the network: its newest tensor and some others are outputs."""
        outputs = [self.open[-1]]
        written = [name for step in self.steps for name in step.node.output]
        others = [n for n in written if n != outputs[0] and self.chance(0.12)]
        outputs += others[:3]
        if self.chance(0.1):
            outputs = outputs[::-1]
        read = {name for step in self.steps for name in step.node.input}
        stored = [n for n in self.constants if n in read]
        nodes = [self.constant_nodes[n] for n in stored if n in self.constant_nodes]
        nodes += [step.node for step in self.steps]
        tensors = [
            numpy_helper.from_array(self.constants[n], n)
            for n in stored
            if n not in self.constant_nodes
        ]
        entries = [_entry(n, a, self.symbolic) for n, a in self.feed.items()]
        if self.chance(0.15):  # old files list initialisers as inputs
            entries += [_entry(t.name, self.constants[t.name]) for t in tensors]
        ends = [_entry(n, self.values[n], self.symbolic) for n in outputs]
        model = _model(nodes, entries, ends, tensors, self.opset)
        constants = {n: self.constants[n] for n in stored}
        return Network(self.seed, model, dict(self.feed), tuple(self.steps), constants)


def _element(array: Values) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))


def _entry(name: str, array: Values, symbolic: bool = False) -> onnx.ValueInfoProto:
    """Return the type of an input or output; `symbolic` leaves its first size open."""
    sizes: list[Any] = list(array.shape)
    if symbolic and sizes:
        sizes[0] = f"{name}_first"
    return helper.make_tensor_value_info(name, _element(array), sizes)


def _model(
    nodes: Sequence[onnx.NodeProto],
    entries: Sequence[onnx.ValueInfoProto],
    ends: Sequence[onnx.ValueInfoProto],
    tensors: Sequence[onnx.TensorProto],
    opset: int,
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "random", list(entries), list(ends), list(tensors))
    version = 8 if opset < 19 else 10
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=version
    )
