"""Implements ONNX's backend interface, so that test suites written for it test this package.

    from ascend_lab import onnx_backend
    outputs = onnx_backend.run_model(model, [x, w])

Models are imported and evaluated in NumPy. Inputs that decide shapes (axes, a target shape) are
not part of a graph: the model is imported again for each value they take, and cached.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

from ascend_lab.compiler.evaluate import evaluate
from ascend_lab.compiler.onnx import Imported, NeedsConstant, import_model, import_pinning, tensors
from ascend_lab.errors import AscendLabError, GraphError, InputError, UnsupportedError

Values = np.ndarray
MAX_CACHED_IMPORTS = 8
"""Imports cached for one model, one for each set of shapes and values that decide shapes."""


class PreparedModel(BackendRep):
    """A model ready to run; `run` takes the inputs in the model's order, or by name."""

    def __init__(self, model: onnx.ModelProto) -> None:
        """Import the model now, unless sizes or values that decide shapes come with the inputs."""
        self.model = model
        entries = tensors.inputs_of(model.graph)
        self.inputs = tuple(entry.name for entry in entries)
        self.outputs = tuple(entry.name for entry in model.graph.output)
        sizes = {e.name: tensors.sizes_of(e) for e in entries if e.type.HasField("tensor_type")}
        self._open_inputs = tuple(
            name
            for name, sizes_of_input in sizes.items()
            if sizes_of_input is None or any(isinstance(size, str) for size in sizes_of_input)
        )
        self._shape_inputs: set[str] = set()
        self._imports: dict[Any, Imported] = {}
        if not self._open_inputs:
            try:
                self._imports[()] = import_model(model)
            except NeedsConstant as error:
                self._shape_inputs.update(error.names)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the outputs in the model's order and types, also accessible by name.

        Raises `UnsupportedError` for nodes that cannot be imported, and `InputError` for inputs
        that do not fit.
        """
        feed = self._named(inputs)
        imported = self._imported(feed)
        graph_inputs = {name: feed[name] for name in imported.graph.inputs}
        for name, array in graph_inputs.items():
            if beyond := tensors.beyond_32_bits(array):
                needed = f"input {name}: whole numbers that fit in 32 bits"
                raise UnsupportedError(needed, beyond, "scale them")
        try:
            results = evaluate(imported.graph, graph_inputs)
        except GraphError as error:  # the graph is valid, but e.g. an index is outside its tensor
            raise UnsupportedError(error.needed, error.got, error.remedy) from error
        types = {name: tensors.NUMPY[imported.output_types[name]] for name in self.outputs}
        values = [results[name].astype(kind, copy=False) for name, kind in types.items()]
        outputs: tuple[Any, ...] = namedtupledict("Outputs", self.outputs)(*values)
        return outputs

    def _named(self, inputs: Any) -> dict[str, Values]:
        """Return the inputs by name, as arrays; raise an error for sequences and optionals."""
        needed = f"inputs {', '.join(self.inputs)}"
        by_name = inputs
        # one array, or a list of arrays in the model's order
        if not isinstance(inputs, Mapping):
            arrays = list(inputs) if isinstance(inputs, Sequence) else [inputs]
            if len(arrays) != len(self.inputs):
                raise InputError(needed, f"{len(arrays)} values", "one each")
            by_name = dict(zip(self.inputs, arrays, strict=True))
        if set(by_name) != set(self.inputs):
            raise InputError(needed, ", ".join(by_name), "check the names")
        feed = {}
        for name, value in by_name.items():
            if isinstance(value, onnx.TensorProto):
                value = numpy_helper.to_array(value)  # noqa: PLW2901
            if not isinstance(value, np.ndarray | np.generic | int | float):
                got = type(value).__name__
                raise UnsupportedError(f"input {name}: a tensor", got, "pass an array")
            feed[name] = np.asarray(value)
        return feed

    def _imported(self, feed: Mapping[str, Values]) -> Imported:
        """Return the graph for these inputs, from an earlier run if there is one."""
        # fixed sizes are in the model already
        shapes = {name: feed[name].shape for name in self._open_inputs}
        if (imported := self._imports.get(self._key(feed))) is None:
            imported = import_pinning(self.model, feed, shapes=shapes)
            # inputs that the graph no longer has were fixed: their values are in it
            self._shape_inputs |= feed.keys() - imported.input_types.keys()
            # dictionaries keep their order: the first key is the oldest import
            while len(self._imports) >= MAX_CACHED_IMPORTS:
                self._imports.pop(next(iter(self._imports)))
            self._imports[self._key(feed)] = imported
        return imported

    def _key(self, feed: Mapping[str, Values]) -> tuple[Any, ...]:
        """Return what an import depends on: symbolic sizes, and values that decide shapes."""
        # an input that Reshape reads decides shapes: another value of it gives another graph
        steering = ((name, feed[name]) for name in sorted(self._shape_inputs))
        sizes = ((name, feed[name].shape) for name in self._open_inputs)
        return (*sizes, *((name, a.shape, a.tobytes()) for name, a in steering))


class AscendLabBackend(Backend):
    """The package as an ONNX backend: evaluation in NumPy, called device "CPU"."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Tell whether models run on a device: only on "CPU", as the chips here are simulated."""
        # "CPU:0" is a device of the type CPU
        return device.partition(":")[0] == "CPU"

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Tell whether `prepare` would succeed."""
        try:
            cls.prepare(model, device, **kwargs)
        except AscendLabError:
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> PreparedModel:
        """Return a model ready to run; raise as `import_onnx`."""
        if not cls.supports_device(device):
            raise UnsupportedError("device CPU", device, "chips are simulated on the CPU")
        return PreparedModel(model)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Any = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Return the outputs of one node of the newest operator set, or of `opset_version`."""
        # Add(x, x) has one input; a missing input has the name ""
        names = list(dict.fromkeys(name for name in node.input if name))
        arrays = [np.asarray(value) for value in inputs]
        if len(names) != len(arrays):
            raise InputError(f"inputs {', '.join(names)}", f"{len(arrays)} values", "one each")
        entries = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for name, a in zip(names, arrays, strict=True)
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = helper.make_graph([node], "node", entries, outputs)
        version = kwargs.get("opset_version", onnx.defs.onnx_opset_version())
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)])
        return cls.run_model(model, arrays, device)


prepare = AscendLabBackend.prepare
run_model = AscendLabBackend.run_model
run_node = AscendLabBackend.run_node
supports_device = AscendLabBackend.supports_device
is_compatible = AscendLabBackend.is_compatible
