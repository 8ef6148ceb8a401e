"""Execute a schedule on ordinary arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.dsl.fractals import matrix_map
from ascend_lab.dsl.lower import lower, matrices
from ascend_lab.dsl.matrices import Matrix
from ascend_lab.dsl.schedule import Schedule
from ascend_lab.dsl.tensor import topological, unique_names
from ascend_lab.errors import InputError
from ascend_lab.layout import pack, unpack
from ascend_lab.sim import execute


def run(schedule: Schedule, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Execute a schedule on row-major arrays and return its outputs, row-major, by name.

    Operands of the cube are packed into fractals, its results unpacked. Raises `InputError` for
    arrays of a wrong name, size or format.
    """
    stored = matrices(schedule.state)
    _check_inputs(schedule, arrays)
    feed = {}
    for name, array in arrays.items():
        feed[name] = np.asarray(array)
        if name in stored:
            entry = schedule.state.find(name)
            where = matrix_map(entry.shape, stored[name], entry.dtype)
            feed[name] = pack(where, feed[name].reshape(entry.shape))
    memory = execute(lower(schedule), feed, schedule.chip)
    names = unique_names(topological(schedule.outputs))
    return {
        names[t]: _fetched(names[t], t.shape, t.dtype, memory[names[t]], stored)
        for t in schedule.outputs
    }


def _check_inputs(schedule: Schedule, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Raise `InputError` unless every input is there, in its shape, and nothing else."""
    names = unique_names(topological(schedule.outputs))
    inputs = {names[t]: t.shape for t in names if t.body is None}
    for name, shape in inputs.items():
        if name not in arrays:
            raise InputError(f"an array for {name} {shape}", "none", "pass every input by its name")
        if np.shape(arrays[name]) != shape:
            raise InputError(
                f"{name}: an array of shape {shape}", str(np.shape(arrays[name])), "reshape it"
            )
    extra = next((name for name in arrays if name not in inputs), None)
    if extra is not None:
        raise InputError(f"the inputs {', '.join(inputs)}", extra, "leave it out")


def _fetched(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    array: NDArray[Any],
    stored: Mapping[str, Matrix],
) -> NDArray[Any]:
    if name not in stored:
        return array.reshape(shape)
    return unpack(matrix_map(shape, stored[name], dtype), array.reshape(-1))
