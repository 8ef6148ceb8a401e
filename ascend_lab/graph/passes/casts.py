"""Cast removal: a pair of casts whose first step loses nothing is one cast, or none."""

from __future__ import annotations

from ascend_lab.graph.ir import Node
from ascend_lab.graph.passes.rewrite import Pass, Rewriter, settings, sweep

HOLDS = {
    "fp32": ("fp16", "bf16", "int8", "uint8"),
    "fp16": ("int8", "uint8"),
    "bf16": ("int8", "uint8"),
    "int32": ("int8", "uint8"),
}
"""Formats all of whose numbers another format holds exactly."""


def remove_cast(rw: Rewriter, node: Node) -> bool:
    """Let a cast read what a lossless cast before it read."""
    if rw.type(node.inputs[0]) == rw.type(node.output):
        return rw.forward(node, node.inputs[0])
    source = rw.maker(node.inputs[0])
    if source is None or source.op != "cast":
        return False
    start = source.inputs[0]
    if rw.type(start).dtype not in HOLDS.get(rw.type(source.output).dtype, ()):
        return False
    if rw.type(start) == rw.type(node.output):
        return rw.forward(node, start)
    return rw.become(node, "cast", source.inputs, settings(node))


CASTS = Pass(
    "CastRemovePass",
    "prepare",
    sweep(remove_cast, "cast"),
    "removes casts to the same format and pairs of casts that lose nothing",
)
