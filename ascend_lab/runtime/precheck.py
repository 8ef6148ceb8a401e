"""Which nodes of an ONNX model can be compiled, in the form of ATC's `check_result.json`.

Codes: 0 fine, 1 the type of the operator is not supported, 2 a parameter is invalid, 9 a name is
repeated (CANN documentation, `--mode=3`). A repeated name is only told: here names are labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_lab.errors import AscendLabError
from ascend_lab.graph.onnx import CONVERTERS, Limits
from ascend_lab.graph.onnx.converter import attributes, find, title
from ascend_lab.graph.onnx.model_file import load, opset_of

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
