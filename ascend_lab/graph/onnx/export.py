"""Writing a graph as an ONNX model.

Most operators become one ONNX node; those ONNX lacks become a few, with the same values: see
`export_rules` and `export_products`. ONNX knows no layouts: a `trans_data` becomes an Identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import helper

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph.ir import Fill, Graph, Node, TensorType, operator_of
from ascend_lab.graph.onnx import export_rules  # noqa: F401 - they fill RULES
from ascend_lab.graph.onnx.export_writer import ONNX_TYPES, RULES, Site, Writer
from ascend_lab.output import write_whole

OPSET = 22
"""Operator set written: the first in which convolutions and pooling take bf16."""
IR_VERSION = 10
MAX_BYTES = 2**31 - 2**20
"""A protobuf file holds less than 2 GiB."""


def export_onnx(graph: Graph, *, fill_nodes: bool = False) -> onnx.ModelProto:
    """Return the graph as an ONNX model of operator set 22, weights inside.

    With `fill_nodes` constants with one number everywhere become ConstantOfShape nodes, so that
    the file stays small. Raises `UnsupportedError` for operators ONNX cannot express and for
    models beyond 2 GiB.
    """
    _check_size(graph, fill_nodes)
    writer = Writer(graph.types)
    for name, constant in graph.constants.items():
        kind = constant.type
        if fill_nodes and isinstance(constant.data, Fill) and kind.elements > 1:
            writer.fill(name, kind, constant.data.value)
        else:
            writer.tensor(name, constant.array(), kind.dtype)
    for node in graph.nodes:
        _export_node(writer, graph, node)
    inner = [n for node in graph.nodes for n in node.outputs if n not in graph.outputs]
    made = helper.make_graph(
        writer.nodes,
        graph.name or "graph",
        _infos(graph, graph.inputs),
        _infos(graph, list(dict.fromkeys(graph.outputs))),
        initializer=writer.tensors,
        value_info=_infos(graph, inner),
    )
    return helper.make_model(
        made,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="ascend_lab",
    )


def save_onnx(graph: Graph, path: str | Path, *, fill_nodes: bool = False) -> Path:
    """Write the graph as an ONNX file; return its path. Raises like `export_onnx`."""
    target = Path(path)
    data = export_onnx(graph, fill_nodes=fill_nodes).SerializeToString()
    write_whole(target, data)
    return target


def _check_size(graph: Graph, fill_nodes: bool) -> None:
    total = sum(
        c.type.elements * DTYPE_BYTES[c.type.dtype]
        for c in graph.constants.values()
        if not (fill_nodes and isinstance(c.data, Fill))
    )
    if total > MAX_BYTES:
        raise UnsupportedError(
            f"{graph.name}: at most {MAX_BYTES:,} bytes of constants in an ONNX file",
            f"{total:,}",
            "use a narrower format, or fill_nodes=True",
        )


def _export_node(writer: Writer, graph: Graph, node: Node) -> None:
    rule = RULES.get(node.op)
    if rule is None:
        raise UnsupportedError(
            f"node {node.name}: an operator with an ONNX form",
            node.op,
            "add a rule to graph.onnx.export_site.RULES",
        )
    settings = operator_of(node.op).settings(node.attrs)
    types = graph.in_types(node), graph.out_types(node)
    writer.begin(node.name)
    found = rule(Site(node.op, writer, node.inputs, *types, settings))
    writer.finish((found,) if isinstance(found, str) else found, node.outputs)


def _infos(graph: Graph, names: Sequence[str]) -> list[onnx.ValueInfoProto]:
    return [_info(name, graph.types[name]) for name in names]


def _info(name: str, kind: TensorType) -> onnx.ValueInfoProto:
    found: onnx.ValueInfoProto = helper.make_tensor_value_info(
        name, ONNX_TYPES[kind.dtype], kind.shape
    )
    return found
