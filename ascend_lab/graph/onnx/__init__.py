"""ONNX models in and out of the graph: `import_onnx` reads, limits and refusals come first."""

from typing import Any

from ascend_lab.graph.onnx.context import Context, NeedsConstant
from ascend_lab.graph.onnx.converter import CONVERTERS, Converter, converter
from ascend_lab.graph.onnx.importer import Imported, import_model, import_onnx
from ascend_lab.graph.onnx.tensors import Limits

__all__ = [
    "CONVERTERS", "Context", "Converter", "Imported", "Limits", "NeedsConstant", "converter",
    "export_onnx", "import_model", "import_onnx", "save_onnx",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load the exporter when it is asked for: it imports onnx."""
    if name not in ("export_onnx", "save_onnx"):
        raise AttributeError(name)
    from ascend_lab.graph.onnx import export

    return getattr(export, name)
