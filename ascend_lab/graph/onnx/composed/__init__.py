"""Converters that compose many nodes or compute tables while importing; they fill `CONVERTERS`."""

from ascend_lab.graph.onnx.composed import attention as attention
from ascend_lab.graph.onnx.composed import einsum as einsum
from ascend_lab.graph.onnx.composed import functions as functions
from ascend_lab.graph.onnx.composed import index as index
from ascend_lab.graph.onnx.composed import loss as loss
from ascend_lab.graph.onnx.composed import normal as normal
from ascend_lab.graph.onnx.composed import quant as quant
from ascend_lab.graph.onnx.composed import recurrent as recurrent
from ascend_lab.graph.onnx.composed import resize as resize
from ascend_lab.graph.onnx.composed import scatter as scatter
from ascend_lab.graph.onnx.composed import signal as signal
from ascend_lab.graph.onnx.composed import state as state
from ascend_lab.graph.onnx.composed import whole as whole
