"""A report on whether a model can be compiled, node by node: ATC's `check_result.json`.

The codes are those of ATC's `--mode=3` (CANN documentation): 0 success, 1 the type of the operator
is not supported, 2 a parameter is invalid, 9 a name is repeated. A repeated name is reported but no
failure: here names are labels.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.compiler.onnx import CONVERTERS
from ascend_lab.compiler.onnx.model_file import attributes, find, full_name, load, opset_of, title
from ascend_lab.errors import AscendLabError

if TYPE_CHECKING:
    from onnx import NodeProto

TYPE_UNSUPPORTED = 1
INVALID = 2
REPEATED = 9


def precheck(file: str | Path, error: AscendLabError | None = None) -> dict[str, Any]:
    """Return the report on a model: name, result, total, pass, fail, and a row for each node.

    `error` is what importing the model raised: it is reported at the node that its message names,
    and raised again if it names none. Raises `InputError` for a file that is no model.
    """
    model, _ = load(file)
    opset = opset_of(model)
    rows = []
    seen = set[str]()
    for node in model.graph.node:
        causes = _causes(node, opset, error)
        # asked before the cause of a repeated name is added, which is a remark only
        is_failure = any(causes)
        if node.name and node.name in seen:
            causes.append({"code": REPEATED, "message": f"the name {node.name} is repeated"})
        seen.add(node.name)
        result = "failed" if is_failure else "success"
        rows.append({"name": title(node), "type": node.op_type, "result": result, "cause": causes})
    failed = sum(row["result"] == "failed" for row in rows)
    # an error of the whole file, such as external data that are missing, fits no row
    if error is not None and not failed:
        raise error
    return {
        "name": model.graph.name or Path(file).stem,
        "result": "failed" if failed else "success",
        "total": len(rows),
        "pass": len(rows) - failed,
        "fail": failed,
        "op": rows,
    }


def _causes(node: "NodeProto", opset: int, error: AscendLabError | None) -> list[dict[str, Any]]:
    """Return why a node cannot be compiled: no entry, or one with a code and a message."""
    try:
        find(node, opset)
        attributes(node, opset)
    except AscendLabError as cause:
        is_known = full_name(node) in CONVERTERS
        return [{"code": INVALID if is_known else TYPE_UNSUPPORTED, "message": str(cause)}]
    about = str(error).removeprefix("node ")
    if error is not None and about.startswith((f"{title(node)} ", f"{title(node)}:")):
        return [{"code": INVALID, "message": str(error)}]
    return []
