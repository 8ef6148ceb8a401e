"""Types of a node's outputs, from the operator library; and the verifier of whole graphs.

The library says which formats a chip computes. A graph may also hold others (an fp32 convolution,
which no cube takes): they can be evaluated, and cast before the graph is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_lab.chip import DTYPE_BYTES
from ascend_lab.errors import AscendLabError, GraphError, InputError, TypeMismatchError
from ascend_lab.graph.ir import Graph, Node, TensorType
from ascend_lab.layout import FORMATS
from ascend_lab.ops.operator import REQUIRED, Operator
from ascend_lab.ops.registry import get
from ascend_lab.ops.slicing import elementwise_rules

TRANS_DATA = Operator(
    "trans_data",
    ("x",),
    lambda x, layout: x,
    summary="the same tensor in another layout",
    attrs={"layout": REQUIRED},
    shape_rule=lambda x, layout: x,
    slicing=lambda shapes, layout: elementwise_rules(shapes, shapes[0]),
    backward=lambda s: (s.g,),
    allows_empty=True,
)
"""The node between two layouts: it changes where elements lie, not what they are."""


def operator_of(op: str) -> Operator:
    """Return the operator a node names; raise `InputError` with near names for an unknown one."""
    return TRANS_DATA if op == "trans_data" else get(op)


def infer(op: str, given: Sequence[TensorType], attrs: Mapping[str, Any]) -> tuple[TensorType, ...]:
    """Return the types of the outputs, row-major unless it is a `trans_data`.

    Raises `ShapeError`, `TypeMismatchError` or `InputError` that names the operator.
    """
    operator = operator_of(op)
    settings = operator.settings(attrs)
    shapes = operator.infer(*(t.shape for t in given), **attrs)
    names = operator.names(len(given))
    rule = operator.types
    dtypes = tuple(t.dtype for t in given)
    main = rule.main(names, dtypes)
    for name, wanted, got in zip(names, rule.inputs(names, main, settings), dtypes, strict=True):
        if got != wanted:
            raise TypeMismatchError(f"{op}: input {name} in {wanted}", got, f"cast {name}")
    kinds = rule.outputs(main, settings, len(shapes))
    layout = str(settings["layout"]) if operator is TRANS_DATA else "ND"
    kinds = kinds if len(kinds) == len(shapes) else kinds[:1] * len(shapes)
    return tuple(TensorType(s, d, layout) for s, d in zip(shapes, kinds, strict=True))


def verify(graph: Graph) -> Graph:
    """Return the graph if it is sound; raise `GraphError` naming the node and what is wrong.

    Checked: names written once and before they are read, types known, shapes and formats as the
    operators infer them, outputs that exist, constants of their type.
    """
    ready = set(graph.inputs) | set(graph.constants)
    if len(graph.inputs) + len(graph.constants) != len(ready):
        twice = sorted(set(graph.inputs) & set(graph.constants)) or list(graph.inputs)
        raise GraphError(f"{graph.name}: every name once", f"{twice[0]} twice", "rename one")
    for name in ready:
        _check_type(graph, name)
    for name, constant in graph.constants.items():
        if constant.type != graph.types[name]:
            raise GraphError(f"constant {name} as {graph.types[name]}", str(constant.type), "cast")
    titles: set[str] = set()
    for node in graph.nodes:
        _check_node(graph, node, ready, titles)
        ready.update(node.outputs)
        titles.add(node.name)
    for name in graph.outputs:
        if name not in ready:
            raise GraphError(f"{graph.name}: output {name}", "nothing writes it", "check the name")
    return graph


def _check_type(graph: Graph, name: str) -> None:
    found = graph.types.get(name)
    if found is None:
        raise GraphError(f"{graph.name}: a type for {name}", "none", "state its shape and format")
    if found.dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise GraphError(f"{name}: one of {known}", found.dtype, "cast it")
    if found.layout.partition(":")[0] not in FORMATS:
        raise GraphError(f"{name}: one of {', '.join(FORMATS)}", found.layout, "name a layout")


def _check_node(graph: Graph, node: Node, ready: set[str], titles: set[str]) -> None:
    where = f"node {node.name} ({node.op})"
    if node.name in titles:
        raise GraphError(f"{graph.name}: node names once", f"{node.name} twice", "rename one")
    for name in node.inputs:
        if name not in ready:
            late = name in graph.producers
            got = "written later: a cycle, or nodes out of order" if late else "nothing writes it"
            raise GraphError(f"{where}: input {name}", got, "reorder or reconnect")
    for name in node.outputs:
        if name in ready or node.outputs.count(name) > 1:
            raise GraphError(f"{where}: a new name to write", f"{name} exists", "rename it")
        _check_type(graph, name)
    try:
        found = infer(node.op, graph.in_types(node), node.attrs)
    except AscendLabError as error:
        raise GraphError(f"{where}: {error.needed}", error.got, error.remedy) from error
    stated = graph.out_types(node)
    if len(found) != len(stated):
        raise GraphError(f"{where}: {len(found)} outputs", str(len(stated)), "name each output")
    for name, one, two in zip(node.outputs, found, stated, strict=True):
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            raise GraphError(f"{where}: {name} as {one}", str(two), "infer the types again")


def check_names(graph: Graph, given: Mapping[str, Any]) -> None:
    """Raise `InputError` unless `given` holds the graph's inputs and nothing else."""
    missing = [name for name in graph.inputs if name not in given]
    extra = [name for name in given if name not in graph.inputs]
    if missing or extra:
        raise InputError(
            f"{graph.name}: inputs {', '.join(graph.inputs)}",
            f"missing {missing}" if missing else f"unknown {extra}",
            "pass every input by name",
        )
