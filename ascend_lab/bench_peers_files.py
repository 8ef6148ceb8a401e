"""A network as the files other simulators read, and timed by ours: part of `lab.py bench --peers`.

A process each: `python -m ascend_lab.bench_peers_files write NETWORK FOLDER`, or `time FOLDER`.
SCALE-Sim reads a table with a row a layer; its loader drops what follows the last comma of a row.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from ascend_lab.chip import Chip, load_chip
from ascend_lab.graph import Graph, Node, compile_stages, simulate_graph, zoo
from ascend_lab.graph.infer import operator_of
from ascend_lab.graph.onnx import import_onnx
from ascend_lab.graph.onnx.export import export_onnx
from ascend_lab.graph.passes import run_passes
from ascend_lab.graph.zoo.counts import node_macs
from ascend_lab.ops.shapes import pair

HEADER = (
    "Layer name, IFMAP Height, IFMAP Width, Filter Height, Filter Width, Channels, "
    "Num Filter, Strides,"
)
CONFIG = """\
[general]
run_name = scalesim
[run_presets]
InterfaceBandwidth = CALC
UseRamulatorTrace = False
[architecture_presets]
ArrayHeight = 64
ArrayWidth = 64
IfmapSramSzkB = 64
FilterSramSzkB = 64
OfmapSramSzkB = 256
IfmapOffset = 0
FilterOffset = 10000000
OfmapOffset = 20000000
Dataflow = os
ReadRequestBuffer = 32
WriteRequestBuffer = 32
[layout]
IfmapCustomLayout = False
FilterCustomLayout = False
IfmapSRAMBankBandwidth = 10
IfmapSRAMBankNum = 10
IfmapSRAMBankPort = 2
FilterSRAMBankBandwidth = 10
FilterSRAMBankNum = 10
FilterSRAMBankPort = 2
[sparsity]
SparsitySupport = false
"""
"""SCALE-Sim's settings: one cube's multipliers; it names offsets and layouts even if unused."""


def layer_row(graph: Graph, node: Node) -> str:
    """Return a convolution or matrix product as a row of SCALE-Sim's, or "" if it has no form.

    The format has neither batches, groups, dilation nor padding, and one stride. SCALE-Sim rounds
    the windows up: the input is given as the (outputs - 1) * stride + filter lines they read.
    """
    out = graph.types[node.output].shape
    if node.op in ("matmul", "gemm") and len(out) == 2:
        inner = node_macs(graph, node) // (out[0] * out[1])
        return f"{out[0]}, {inner}, 1, {inner}, 1, {out[1]}, 1,"
    if node.op != "conv2d":
        return ""
    options = operator_of(node.op).settings(node.attrs)
    strides, spread = (pair(name, options[name]) for name in ("stride", "dilation"))
    filters, channels, *window = graph.types[node.inputs[1]].shape
    plain = out[0] == 1 and options["groups"] == 1 and spread == (1, 1)
    if not plain or strides[0] != strides[1]:
        return ""
    lines, columns = ((n - 1) * strides[0] + k for n, k in zip(out[2:], window, strict=True))
    sizes: list[Any] = [lines, columns, *window, channels, filters, strides[0]]
    return ", ".join(map(str, sizes)) + ","


def topology(graph: Graph) -> str:
    """Return SCALE-Sim's table of a graph's layers; layers that have no form are left out."""
    rows = [row for node in graph.nodes if (row := layer_row(graph, node))]
    # names are numbers: SCALE-Sim reads one with DP in it as depthwise
    return "\n".join([HEADER, *(f"{k}, {row}" for k, row in enumerate(rows)), ""])


def folded(graph: Graph) -> Graph:
    """Return the graph with its batch norms folded into convolutions, else as it is."""
    return run_passes(graph, ["ConvBatchnormFusionPass"])[0]


def write_files(network: str, folder: Path) -> None:
    """Write a model of the zoo for every tool, and `about.json`: its nodes and macs."""
    graph = folded(zoo.build(network))
    (folder / "model.onnx").write_bytes(export_onnx(graph).SerializeToString())
    texts = {
        "scalesim.topology": topology(graph),
        "scalesim.layout": "Layer name,\n",
        "scalesim.config": CONFIG,
        "about.json": json.dumps({"nodes": len(graph.nodes), "macs": zoo.macs(graph)}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")


def one_core() -> Chip:
    """Return Ascend310 with one of its two cores: 4096 multiply-accumulates a cycle."""
    return dataclasses.replace(load_chip("Ascend310"), core_count=1)


def time_model(file: Path) -> dict[str, int]:
    """Return the cycles (without and of launches) of a model file on one core, and its nodes.

    Every node is timed, alone or fused: what cannot be raises a typed error.
    """
    graph = import_onnx(file)
    times = simulate_graph(compile_stages(graph, one_core()).compiled).operators
    launches = sum(op.timeline.launch_cycles for op in times)
    cycles = sum(op.timeline.cycles for op in times)
    return {"cycles": cycles, "launch_cycles": launches, "covered": len(graph.nodes)}


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_files(sys.argv[2], Path(sys.argv[3]))
    else:
        print(json.dumps(time_model(Path(sys.argv[2]) / "model.onnx")))
