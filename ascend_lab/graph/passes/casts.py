"""Cast removal: a pair of casts whose first step loses nothing is one cast, or none.

ONNX rounds the number of x * number to x's format; a model that must not writes fp16 -> fp32,
times the number, -> fp16. Ours keeps the number in fp32 anyway, so that no cast is needed.
"""

from __future__ import annotations

from ascend_lab.graph.edit import Draft
from ascend_lab.graph.ir import Node
from ascend_lab.graph.passes.rewrite import Pass, settings, sweep

HOLDS = {
    "fp32": ("fp16", "bf16", "int8", "uint8"),
    "fp16": ("int8", "uint8"),
    "bf16": ("int8", "uint8"),
    "int32": ("int8", "uint8"),
}
"""Formats all of whose numbers another format holds exactly."""


def remove_cast(rw: Draft, node: Node) -> bool:
    """Let a cast read what a lossless cast before it read."""
    if rw.type(node.inputs[0]) == rw.type(node.output):
        return rw.forward(node, node.inputs[0])
    source = rw.maker(node.inputs[0])
    if source is None or source.op != "cast":
        return _around_number(rw, node)
    start = source.inputs[0]
    if rw.type(start).dtype not in HOLDS.get(rw.type(source.output).dtype, ()):
        return False
    if rw.type(start) == rw.type(node.output):
        return rw.forward(node, start)
    return rw.become(node, "cast", source.inputs, settings(node))


def _around_number(rw: Draft, node: Node) -> bool:
    """Turn fp16 -> fp32, muls or adds, -> fp16 into muls or adds, which round once as well."""
    middle = rw.only(node.inputs[0], "muls", "adds")
    wide = None if middle is None else rw.maker(middle.inputs[0])
    if middle is None or wide is None or wide.op != "cast":
        return False
    start = wide.inputs[0]
    narrow = rw.type(start).dtype in ("fp16", "bf16") and rw.type(wide.output).dtype == "fp32"
    if not narrow or rw.type(start) != rw.type(node.output):
        return False
    return rw.become(node, middle.op, [start], middle.attrs)


CASTS = Pass(
    "CastRemovePass",
    "prepare",
    sweep(remove_cast, "cast"),
    "removes casts to the same format, pairs that lose nothing, and those around x * number",
)
