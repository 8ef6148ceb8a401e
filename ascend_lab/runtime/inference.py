"""Online and offline inference behind one switch: compiled at the first call, or read from a file.

Values and times are equal to the last bit; what differs is who pays for compiling, and when.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ascend_lab.chip import Chip, load_chip
from ascend_lab.graph import Compiled, compile_graph, evaluate, run_tasks, simulate_graph
from ascend_lab.graph.ir import Values
from ascend_lab.graph.models import load_model
from ascend_lab.graph.onnx import Imported
from ascend_lab.graph.onnx.tensors import in_type
from ascend_lab.runtime.container import is_offline
from ascend_lab.runtime.offline import load_offline


class Inference:
    """A model to call with inputs by name; `compile_s` are the seconds its calls spent compiling.

    `time_s` is the simulated time of the last call. With `kernels` the outputs are what the kernels
    compute, else what the graph means.
    """

    def __init__(self, model: str | Path, chip: Chip | str, *, kernels: bool = True) -> None:
        """Take an ONNX file or `zoo:NAME` (online), or an offline model of this chip."""
        self.chip = load_chip(chip) if isinstance(chip, str) else chip
        self.online, self.kernels = not is_offline(model), kernels
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
            found, values = gear.imported, gear.run(inputs, kernels=self.kernels)
        else:
            found, values = self._run_online(shapes, inputs)
        return {name: in_type(values[name], kind) for name, kind in found.output_types.items()}

    def _run_online(
        self, shapes: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> tuple[Imported, dict[str, Values]]:
        """Return the model and its outputs; it is compiled when shapes are new."""
        key = tuple(sorted(shapes.items()))
        if key not in self._known:
            start = time.perf_counter()
            found = load_model(self._model, given=inputs)
            compiled = compile_graph(found.graph, self.chip)
            self._known[key] = found, compiled, simulate_graph(compiled).time_s
            self.compile_s += time.perf_counter() - start
        found, compiled, self.time_s = self._known[key]
        graph = found.graph
        if not self.kernels:
            return found, evaluate(graph, inputs)
        return found, run_tasks(compiled, inputs, graph.outputs)
