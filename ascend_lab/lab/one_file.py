"""One file that goes through the compiler: a residual block with a head, chapter by chapter.

Each chapter of Part IV switches one more stage of the compiler on, and adds a line to the table
that `journey` prints: nodes, kernels, bytes moved, microseconds.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.compiler.compile import Layouts, Road, Stages
from ascend_lab.compiler.ir import Graph
from ascend_lab.compiler.layout import assign_layouts
from ascend_lab.compiler.placement import buffers_of, plan_network
from ascend_lab.lab.text_table import table
from ascend_lab.machine.chip import Chip, load_chip

KIB = 2**10
CHIP = "Ascend910A"

ALONE = Layouts(assign=partial(assign_layouts, follow=False), cancels_conversions=False)
"""Only operators of the cube leave row-major memory, and each pays for its own conversions."""
STAGES: Mapping[str, Road] = {
    "as the file says": Road(passes=(), layouts=ALONE, fusion=False),
    "rewritten": Road(layouts=ALONE, fusion=False),
    "layouts placed": Road(fusion=False),
    "fused": Road(),
    "memory planned": Road(),
}
"""The stages of the compiler, each with all stages before it switched on."""


# -- the file -------------------------------------------------------------------------------------
class _File:
    """Nodes and numbers of an ONNX file under construction."""

    def __init__(self, seed: int = 13) -> None:
        self.nodes = list[Any]()
        self.numbers = list[Any]()
        self.rng = np.random.default_rng(seed)

    def constant(self, name: str, values: Any) -> str:
        """Add a constant and return its name."""
        from onnx import numpy_helper

        self.numbers.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        """Add a constant of small random numbers and return its name."""
        return self.constant(name, self.rng.normal(0, 0.05, shape).astype(np.float32))

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        from onnx import helper

        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def convolution(self, x: str, name: str, weight: tuple[int, ...], stride: int) -> str:
        """Append a convolution and its batch norm, as a file of a trained network has them."""
        channels, _, side, _ = weight
        pads = [side // 2] * 4
        inputs = [x, self.weight(f"{name}.weight", *weight)]
        y = self.node("Conv", inputs, name, strides=[stride, stride], pads=pads)
        scale, variance = self.rng.uniform(0.5, 1.5, (2, channels)).astype(np.float32)
        bias, mean = self.rng.normal(0, 0.1, (2, channels)).astype(np.float32)
        norm = {"scale": scale, "bias": bias, "mean": mean, "var": variance}
        names = [self.constant(f"{name}.{part}", values) for part, values in norm.items()]
        return self.node("BatchNormalization", [y, *names], f"{name}_norm")


def model() -> Any:
    """Return the file as an ONNX model: 18 nodes, 56 x 56 pixels of 64 channels, ten classes."""
    from onnx import TensorProto, helper

    file = _File()
    first = file.convolution("x", "conv1", (128, 64, 3, 3), 2)
    activated = file.node("Relu", [first], "relu1")
    second = file.convolution(activated, "conv2", (128, 128, 3, 3), 1)
    shortcut = file.convolution("x", "short", (128, 64, 1, 1), 2)
    total = file.node("Add", [second, shortcut], "sum")
    block_output = file.node("Relu", [total], "relu2")
    pooled = file.node("GlobalAveragePool", [block_output], "pool")
    # The batch is read from the tensor's shape, as exporters write it: one row an image.
    shape = file.node("Shape", [pooled], "shape")
    batch = file.node("Gather", [shape, file.constant("zero", np.int64(0))], "batch", axis=0)
    rows = file.node("Unsqueeze", [batch, file.constant("axes", np.array([0]))], "rows")
    sizes = file.node("Concat", [rows, file.constant("rest", np.array([-1]))], "sizes", axis=0)
    flat = file.node("Reshape", [pooled, sizes], "flat")
    dropout = file.node("Dropout", [flat], "dropout")
    head_inputs = [dropout, file.weight("head.weight", 10, 128), file.weight("head.bias", 10)]
    logits = file.node("Gemm", head_inputs, "head", transB=1)
    file.node("Softmax", [logits], "y", axis=1)
    graph = helper.make_graph(
        file.nodes,
        "block_with_head",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 64, 56, 56])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        file.numbers,
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8)


def write(path: str | Path) -> Path:
    """Write the file, about a megabyte, and return where it lies."""
    from onnx import save

    save(model(), str(path))
    return Path(path)


def graph() -> Graph:
    """Return the file as the importer reads it."""
    from ascend_lab.compiler.onnx import import_onnx

    return import_onnx(model())


# -- its way through the compiler -----------------------------------------------------------------
def stage(graph: Graph, name: str, chip: Chip | str = CHIP) -> Stages:
    """Return the graph after the named stage of `STAGES` and all before it."""
    chip = load_chip(chip) if isinstance(chip, str) else chip
    return STAGES[name].stages(graph, chip)


def journey(graph: Graph, last: str, chip: Chip | str = CHIP) -> None:
    """Print the table of the journey up to a stage, a line a stage.

    Bytes moved are those that cross between the cores and memory; times are those of kernels that
    wait in the device's queue. Buffers hold the results that other kernels read: each has memory
    of its own until the last stage plans one piece of memory for all of them.
    """
    rows = list[tuple[object, ...]]()
    for name in STAGES:
        stages = stage(graph, name, chip)
        run = stages.timeline()
        moved_bytes = 0
        for operator in run.operators:
            for path, size_bytes in operator.timeline.path_bytes.items():
                if "GM" in path:
                    moved_bytes += size_bytes
        if name == "memory planned":
            buffer_bytes = plan_network(stages.compiled).height_bytes
        else:
            buffer_bytes = sum(buffer.size_bytes for buffer in buffers_of(stages.compiled))
        nodes = len(stages.laid_out.nodes)
        kernels = len(run.operators)
        time_us = run.time_s * 1e6
        rows.append((name, nodes, kernels, moved_bytes / KIB, buffer_bytes / KIB, time_us))
        if name == last:
            break
    table(["the file", "nodes", "kernels", "KiB moved", "KiB of buffers", "us"], rows)
