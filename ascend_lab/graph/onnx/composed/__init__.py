"""Converters that compose many nodes or compute tables while importing; they fill `CONVERTERS`."""

from ascend_lab.graph.onnx.composed import (
    attention,
    einsum,
    functions,
    index,
    loss,
    normal,
    quant,
    recurrent,
    resize,
    scatter,
    signal,
    state,
    whole,
)

MODULES = (
    attention,
    einsum,
    functions,
    index,
    loss,
    normal,
    quant,
    recurrent,
    resize,
    scatter,
    signal,
    state,
    whole,
)
"""Modules whose import registers converters."""
