"""Whether a model can be compiled, node by node, and running it online or from a file.

Values and times are equal to the last bit; what differs is who pays for compiling, and when. The
report on nodes has the form of ATC's `check_result.json` and its codes: 0 fine, 1 the type of the
operator is not supported, 2 a parameter is invalid, 9 a name is repeated, which is only told: here
names are labels (CANN documentation, `--mode=3`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.chip import Chip, load_chip
from ascend_lab.errors import AscendLabError
from ascend_lab.graph import Compiled, compile_graph, evaluate, run_tasks, simulate_graph
from ascend_lab.graph.ir import Values
from ascend_lab.graph.onnx import CONVERTERS, Imported, Limits
from ascend_lab.graph.onnx.model_file import attributes, find, load, opset_of, title
from ascend_lab.graph.onnx.tensors import in_type
from ascend_lab.graph.zoo import load_model
from ascend_lab.runtime.container import is_offline
from ascend_lab.runtime.offline import load_offline

if TYPE_CHECKING:
    from onnx import NodeProto

TYPE_UNSUPPORTED, INVALID, REPEATED = 1, 2, 9


def precheck(file: str | Path, error: AscendLabError | None = None) -> dict[str, Any]:
    """Return the report on a model: name, result, total, pass, fail, and a row per node.

    `error` is what importing it raised: it is told at the node it names, and raised if it names
    none. Raises `InputError` for a file that is no model.
    """
    model, _ = load(file, Limits())
    opset = opset_of(model)
    rows, seen = [], set[str]()
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
        "name": model.graph.name or Path(file).stem, "result": "failed" if failed else "success",
        "total": len(rows), "pass": len(rows) - failed, "fail": failed, "op": rows,
    }  # fmt: skip


def _causes(node: NodeProto, opset: int, error: AscendLabError | None) -> list[dict[str, Any]]:
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
