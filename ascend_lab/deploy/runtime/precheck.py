"""Reports which nodes of an ONNX model can be compiled, like ATC's `check_result.json`.

The codes are those of ATC's `--mode=3` (CANN documentation): 0 success, 1 the type of the operator
is not supported, 2 a parameter is invalid, 9 a name is repeated. A repeated name is reported, but
is not a failure here, as nodes are not identified by their names.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.compiler.onnx import CONVERTERS
from ascend_lab.compiler.onnx.model_file import attributes, find, full_name, load, opset_of, title
from ascend_lab.errors import AscendLabError

if TYPE_CHECKING:
    from onnx import NodeProto

TYPE_UNSUPPORTED = 1
INVALID_PARAMETER = 2
REPEATED_NAME = 9


def precheck(file: str | Path, error: AscendLabError | None = None) -> dict[str, Any]:
    """Return the report on a model: name, result, total, pass, fail, and a row for each node.

    `error` is the error that importing the model raised. It is reported at the node that its
    message names, and raised again if no node failed. Raises `InputError` for a file that is not an
    ONNX model.
    """
    model, _ = load(file)
    opset = opset_of(model)
    rows = []
    previous_names = set[str]()
    for node in model.graph.node:
        causes = _causes(node, opset, error)
        # A repeated name, which is added below, does not make the node a failure.
        is_failure = any(causes)
        if node.name and node.name in previous_names:
            causes.append({"code": REPEATED_NAME, "message": f"the name {node.name} is repeated"})
        previous_names.add(node.name)
        result = "failed" if is_failure else "success"
        rows.append({"name": title(node), "type": node.op_type, "result": result, "cause": causes})
    failure_count = sum(row["result"] == "failed" for row in rows)
    # An error of the whole file, such as missing external data, belongs to no node.
    if error is not None and not failure_count:
        raise error
    return {
        "name": model.graph.name or Path(file).stem,
        "result": "failed" if failure_count else "success",
        "total": len(rows),
        "pass": len(rows) - failure_count,
        "fail": failure_count,
        "op": rows,
    }


def _causes(node: "NodeProto", opset: int, error: AscendLabError | None) -> list[dict[str, Any]]:
    """Return the reason why a node cannot be compiled, as a list of at most one entry."""
    try:
        find(node, opset)
        attributes(node, opset)
    except AscendLabError as cause:
        is_known = full_name(node) in CONVERTERS
        return [
            {"code": INVALID_PARAMETER if is_known else TYPE_UNSUPPORTED, "message": str(cause)}
        ]
    message = str(error).removeprefix("node ")
    if error is not None and message.startswith((f"{title(node)} ", f"{title(node)}:")):
        return [{"code": INVALID_PARAMETER, "message": str(error)}]
    return []
