"""The converters by ONNX operator: what each takes, and the decorator that registers one.

    @converter("LeakyRelu", types=(FLOATS,), attrs={"alpha": 0.01})
    def _leaky_relu(ctx: Context) -> Value:
        return ctx.emit("leaky_relu", ctx.input(0), alpha=ctx.attr("alpha"))

What a registration does not state is refused before the converter runs: another attribute, another
number of inputs, another element type. So a converter computes each case it is given, or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    """How nodes of one ONNX operator enter a graph.

    `least` to `most` inputs (None: any number); `types` the element types of each input, the last
    for all that follow; `attrs` the attributes understood, with the standard's defaults; `result`
    the element type of the outputs (None: that of the first input); `since` the first opset.
    """

    op: str
    convert: Convert
    least: int = 1
    most: int | None = 1
    types: tuple[tuple[str, ...], ...] = (EVERY,)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    result: str | None = None
    since: int = 1


CONVERTERS: dict[str, Converter] = {}
"""Every ONNX operator that can be imported."""


def converter(
    *names: str, inputs: int | tuple[int, int | None] = 1, **how: Any
) -> Callable[[Convert], Convert]:
    """Register a function as the converter of the operators `names`; `inputs` is (least, most)."""
    least, most = inputs if isinstance(inputs, tuple) else (inputs, inputs)

    def register(convert: Convert) -> Convert:
        for name in names:
            if name in CONVERTERS:
                raise InputError("an operator without converter", name, "register it once")
            CONVERTERS[name] = Converter(name, convert, least, most, **how)
        return convert

    return register
