"""ONNX models in and out of the graph: `import_onnx` reads, limits and refusals come first."""

from ascend_lab.graph.onnx.context import Context, NeedsConstant
from ascend_lab.graph.onnx.importer import Imported, import_model, import_onnx
from ascend_lab.graph.onnx.loading import Limits
from ascend_lab.graph.onnx.registry import CONVERTERS, Converter, converter

__all__ = [
    "CONVERTERS",
    "Context",
    "Converter",
    "Imported",
    "Limits",
    "NeedsConstant",
    "converter",
    "import_model",
    "import_onnx",
]
