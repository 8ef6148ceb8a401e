"""Elementwise operators behind a cube operator as the epilogue of its kernel.

The operators' tensor expressions are walked in order: every vector operation becomes a step, every
broadcast or copy another name of its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ascend_lab import dsl as te
from ascend_lab.dsl.expr import Call, Expr, Load
from ascend_lab.dsl.tensor import Compute, topological
from ascend_lab.errors import UnsupportedError
from ascend_lab.kernels.epilogue import SUMS, Epilogue, Operand, Step

Source = str | int


class _Chain:
    """Steps written so far and what each tensor is called."""

    def __init__(self, operands: Sequence[Operand]) -> None:
        self.operands = {o.name: o for o in operands}
        self.steps: list[Step] = []
        self.names: dict[te.Tensor, Source] = {}
        self.found: dict[Step, int] = {}

    def kind(self, source: Source) -> str:
        return self.operands[source].kind if source in self.operands else "tile"

    def source(self, expr: Expr) -> Source:
        if isinstance(expr, Load):
            return self.names[expr.tensor]
        assert isinstance(expr, Call)
        sources = tuple(self.source(arg) for arg in expr.args)
        if expr.op == "vcopy":
            return sources[0]
        if expr.op == "vconv" and expr.mode in ("", "rint") and self.kind(sources[0]) == "channel":
            return self.converted(str(sources[0]), expr.format)
        if expr.mode and (expr.op, expr.mode) != ("vconv", "rint"):
            raise UnsupportedError("an operation lane by lane", str(expr), "run it on its own")
        dtype = expr.format if expr.op == "vconv" else ""
        step = Step(expr.op, sources, expr.number, dtype)
        if step not in self.found:
            self.steps.append(step)
            self.found[step] = len(self.steps) - 1
        return self.found[step]

    def converted(self, name: str, dtype: str) -> str:
        """Return the operand with its numbers converted before the launch."""
        new = f"{name.partition('.')[0]}.{dtype}"
        self.operands[new] = replace(self.operands[name], name=new, dtype=dtype)
        return new


def epilogue_of(
    output: te.Tensor, sums: te.Tensor, operands: Mapping[te.Tensor, Operand]
) -> Epilogue:
    """Return the epilogue that computes `output` from the sums and operands.

    A channel operand whose format changes is called "name.dtype"; the caller packs it so. Raises
    `UnsupportedError` for what is not lane by lane, `InputError` for what epilogues do not do.
    """
    chain = _Chain(list(operands.values()))
    chain.names = {sums: SUMS, **{tensor: o.name for tensor, o in operands.items()}}
    for tensor in topological((output,)):
        if tensor in chain.names:
            continue
        body = tensor.body
        if not isinstance(body, Compute) or body.fold:
            raise UnsupportedError("elementwise operators", tensor.label, "end the group before it")
        chain.names[tensor] = chain.source(body.expr)
    read = {s for step in chain.steps for s in step.sources}
    used = tuple(o for o in chain.operands.values() if o.name in read)
    return Epilogue(used, tuple(chain.steps), output.dtype)
