"""How nodes of one ONNX operator enter a graph, and the table of all that can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ascend_lab.errors import InputError
from ascend_lab.graph.builder import Value
from ascend_lab.graph.onnx.tensors import EVERY, Tensor

if TYPE_CHECKING:
    from ascend_lab.graph.onnx.context import Context

Result = Value | Tensor
Convert = Callable[["Context"], Result | Sequence[Result]]
NEWEST_OPSET = 28
"""The newest version of the standard's operators these converters were written for."""


@dataclass(frozen=True, slots=True)
class Converter:
    """How nodes of one ONNX operator enter a graph; inputs and attributes are the standard's.

    `types` are the element types of each input, the last for all that follow; `result` the element
    type of the outputs (None: that of the first input); `since` the first opset.
    """

    op: str
    convert: Convert
    types: tuple[tuple[str, ...], ...] = (EVERY,)
    result: str | None = None
    since: int = 1


CONVERTERS: dict[str, Converter] = {}
"""Every ONNX operator that can be imported."""


def converter(
    *names: str,
    types: tuple[tuple[str, ...], ...] = (EVERY,),
    result: str | None = None,
    since: int = 1,
) -> Callable[[Convert], Convert]:
    """Register a function as the converter of the operators `names`."""

    def register(convert: Convert) -> Convert:
        for name in names:
            if name in CONVERTERS:
                raise InputError("an operator without converter", name, "register it once")
            CONVERTERS[name] = Converter(name, convert, types, result, since)
        return convert

    return register
