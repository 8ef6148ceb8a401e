"""Checks nodes before an evaluator written in C++ computes them.

Such evaluators crash or hang on some nodes that the standard does not allow, e.g. with a required
input missing, or with more outputs than pieces. So these nodes are found first, in Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascend_lab.compiler.onnx.model_file import title
from ascend_lab.errors import GraphError, InputError

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

STANDARD = ("", "ai.onnx")
"""Names of the domain of the standard's operators."""
ANY_NUMBER = 2**31 - 1
"""Largest number of inputs or outputs in the schema of an operator that takes any number."""
LARGEST_INDEX = 2**24
"""Largest index in a tensor that an attribute may state."""


def version_of(model: ModelProto) -> int:
    """Return the version of the standard's operators that a model states, 1 if it states none."""
    return next((int(o.version) for o in model.opset_import if o.domain in STANDARD), 1)


def check_sound(model: ModelProto, nodes: Sequence[NodeProto]) -> None:
    """Raise `GraphError` for the first node that the standard does not allow.

    Nodes of branches and bodies are checked as well; unknown operators are not. Attributes that are
    out of range raise `InputError`.
    """
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    opset = version_of(model)
    for node in nodes:
        _check(node, opset, sizes)


def _check(node: NodeProto, opset: int, sizes: Mapping[str, int]) -> None:
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                _check(inner, opset, sizes)
    if node.domain in STANDARD:
        _check_operands(node, opset)
        if node.op_type == "Split":
            _check_split(node, sizes)
        _check_indices(node)


def _check_operands(node: NodeProto, opset: int) -> None:
    """Raise an error for wrong numbers of inputs or outputs, and for missing required inputs."""
    from onnx import defs

    try:
        schema: Any = defs.get_schema(node.op_type, opset)
    except defs.SchemaError:
        return
    where = f"node {title(node)} ({node.op_type})"
    for side, names, least_count, most_count in (
        ("input", node.input, schema.min_input, schema.max_input),
        ("output", node.output, schema.min_output, schema.max_output),
    ):
        if not least_count <= len(names) <= most_count:
            text = (
                f"{least_count} to {most_count}"
                if most_count < ANY_NUMBER
                else f"at least {least_count}"
            )
            count = f"{most_count}" if least_count == most_count else text
            plural = "s" if most_count > 1 else ""
            raise GraphError(
                f"{where}: {count} {side}{plural}", str(len(names)), "correct the node"
            )
    option = defs.OpSchema.FormalParameterOption
    for place, name in enumerate(node.input):
        # Concat declares a single parameter for all its inputs: it describes input 5, too
        parameter = schema.inputs[min(place, len(schema.inputs) - 1)]
        if not name and parameter.option != option.Optional:
            raise GraphError(
                f"{where}: input {place}, {parameter.name}", "none", "correct the node"
            )


def _check_split(node: NodeProto, sizes: Mapping[str, int]) -> None:
    """Raise an error if a split has not as many outputs as pieces."""
    # split = [2, 3, 5] means 3 pieces, num_outputs = 4 means 4
    stated = {a.name: a.i if a.name == "num_outputs" else len(a.ints) for a in node.attribute}
    pieces = stated.get("num_outputs", stated.get("split"))
    if len(node.input) > 1 and node.input[1] in sizes:
        pieces = sizes[node.input[1]]
    if pieces is not None and pieces != len(node.output):
        needed = f"node {title(node)} (Split): {pieces} outputs, one for each piece"
        raise GraphError(needed, str(len(node.output)), "correct the node")


def _check_indices(node: NodeProto) -> None:
    """Raise an error for attributes with indices beyond the limits below."""
    limits = {("GatherND", "batch_dims"): 16, ("TfIdfVectorizer", "ngram_indexes"): LARGEST_INDEX}
    for attribute in node.attribute:
        limit = limits.get((node.op_type, attribute.name))
        numbers = list(attribute.ints) or [attribute.i]
        if limit is not None and not all(0 <= number <= limit for number in numbers):
            needed = f"node {title(node)} ({node.op_type}): {attribute.name} from 0 to {limit}"
            raise InputError(needed, str(numbers)[:40], "correct the node")
