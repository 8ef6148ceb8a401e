"""One node being exported to ONNX, and the table of rules that do it.

A rule emits nodes and returns the names they write. Operators that compute wider than they store
(sums of fp16 products into fp32, scaling by a number that fp16 cannot hold) cast around the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ascend_lab.graph.ir import TensorType
from ascend_lab.graph.onnx.writer import ONNX_TYPES, Writer

NARROW = ("fp16", "bf16")
Result = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """One node being exported: where to write, what it reads and writes, its attributes."""

    op: str
    writer: Writer
    inputs: tuple[str, ...]
    given: tuple[TensorType, ...]
    wanted: tuple[TensorType, ...]
    attrs: dict[str, Any]

    def one(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Append a node of one output; return its name."""
        return self.writer.emit(op, *inputs, **attrs)[0]

    @property
    def dtype(self) -> str:
        """Format of the first input."""
        return self.given[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first input."""
        return self.given[0].shape

    def cast(self, name: str, dtype: str) -> str:
        """Append a Cast."""
        return self.one("Cast", name, to=ONNX_TYPES[dtype])

    def wide(self) -> list[str]:
        """Return the inputs, those in fp16 or bf16 cast to fp32."""
        return [
            self.cast(name, "fp32") if kind.dtype in NARROW else name
            for name, kind in zip(self.inputs, self.given, strict=True)
        ]

    def back(self, name: str) -> str:
        """Return an fp32 value in the node's output format."""
        wanted = self.wanted[0].dtype
        return name if wanted == "fp32" else self.cast(name, wanted)


Rule = Callable[[Site], Result]
RULES: dict[str, Rule] = {}
"""The rule of each operator; add your own for operators you register."""


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a rule under the names of operators."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return add


def one(op: str, **attrs: Any) -> Rule:
    """Return the rule of an operator that ONNX has under the name `op`."""
    return lambda site: site.one(op, *site.inputs, **attrs)
