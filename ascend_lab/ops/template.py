"""Hand-written kernels behind operators: what they build, how tensors go in, where results lie.

A kernel takes its operands in the layouts it prefers (matrices as fractals, images as NC1HWC0).
Bringing them there is the work of conversion operators between kernels, not of the kernel, so
`run` packs and unpacks on the host and `time` does not count it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ascend_lab.chip import Chip
from ascend_lab.isa import Kernel, Launch, as_kernel
from ascend_lab.ops.shapes import Shape

Values = NDArray[Any]
Memory = Mapping[str, Values]


@dataclass(frozen=True, slots=True)
class Call:
    """One use of an operator: input shapes, formats and attributes, and the output shapes."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    attrs: Mapping[str, Any]
    outputs: tuple[Shape, ...]


def always(call: Call, chip: Chip) -> bool:
    """Tell that a template applies to every call."""
    return True


@dataclass(frozen=True, slots=True)
class Template:
    """A kernel builder, its GM tensors from the inputs, its outputs from the GM tensors.

    Where `applies` says no, the operator's expression is scheduled instead.
    """

    build: Callable[[Call, Chip], Kernel | Launch]
    feed: Callable[[Call, Sequence[Values]], dict[str, Values]]
    fetch: Callable[[Call, Memory], tuple[Values, ...]]
    applies: Callable[[Call, Chip], bool] = always

    def kernel(self, call: Call, chip: Chip) -> Kernel:
        """Return the kernel of a call."""
        return as_kernel(self.build(call, chip))


def plain(
    build: Callable[[Call, Chip], Kernel | Launch],
    *,
    feed: tuple[str, ...] = ("x",),
    applies: Callable[[Call, Chip], bool] = always,
) -> Template:
    """Return a template whose tensors are row-major: `feed` names the inputs, y the output.

    Several inputs beyond the names are x0, x1, ...; several outputs y0, y1, ...
    """

    def tensors(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
        names = feed or tuple(f"x{i}" for i in range(len(arrays)))
        return dict(zip(names, arrays, strict=True))

    return Template(build, tensors, results, applies)


def results(call: Call, memory: Memory) -> tuple[Values, ...]:
    """Return the outputs y, or y0, y1, ..., in their shapes."""
    shapes = call.outputs
    names = ("y",) if "y" in memory else tuple(f"y{i}" for i in range(len(shapes)))
    return tuple(memory[name].reshape(s) for name, s in zip(names, shapes, strict=True))
