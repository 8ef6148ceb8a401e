"""Check the inputs of a kernel before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ascend_lab.errors import MachineError
from ascend_lab.machines.program import Array, Kernel, Load, walk


def check_inputs(kernel: Kernel, inputs: Mapping[str, Array]) -> None:
    """Raise `MachineError` unless every parameter and every array is there and long enough."""
    for name in kernel.params:
        if name not in inputs or np.ndim(inputs[name]) != 0:
            raise MachineError(f"{kernel.name} needs a number {name!r}", _have(inputs), "add it")
    for instr in walk(kernel.body):
        if not isinstance(instr, Load):
            continue
        need = 1 if instr.index else instr.stride * (kernel.n - 1) + instr.offset + 1
        array = inputs.get(instr.array)
        if array is None or np.ndim(array) != 1 or len(array) < need:
            got = _have(inputs) if array is None else f"shape {np.shape(array)}"
            raise MachineError(
                f"{kernel.name} needs an array {instr.array!r} of one axis and {need} elements",
                got,
                "pass it in inputs",
            )


def _have(inputs: Mapping[str, Array]) -> str:
    return "inputs " + (", ".join(sorted(inputs)) or "that are empty")


def number_format(kernel: Kernel, inputs: Mapping[str, Array]) -> np.dtype[Any]:
    """Return the one number format of the arrays that arithmetic works on."""
    indices = {instr.index for instr in walk(kernel.body) if isinstance(instr, Load)}
    loads = [instr for instr in walk(kernel.body) if isinstance(instr, Load)]
    names = [load.array for load in loads if load.dst not in indices]
    kinds = {np.dtype(inputs[n].dtype) for n in names if inputs[n].dtype != np.bool_}
    if len(kinds) > 1:
        raise MachineError(
            f"{kernel.name} needs all its arrays in one number format",
            ", ".join(sorted(str(kind) for kind in kinds)),
            "convert them first",
        )
    return kinds.pop() if kinds else np.dtype(np.float32)
