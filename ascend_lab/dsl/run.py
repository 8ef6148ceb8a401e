"""Execute a schedule on ordinary arrays."""

from __future__ import annotations

import math
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
    feed = {}
    for name, array in arrays.items():
        feed[name] = np.asarray(array)
        if name in stored:
            entry = schedule.state.find(name)
            if feed[name].size != math.prod(entry.shape):
                raise InputError(
                    f"{name}: an array of shape {entry.shape}", str(feed[name].shape), "reshape it"
                )
            where = matrix_map(entry.shape, stored[name], entry.dtype)
            feed[name] = pack(where, feed[name].reshape(entry.shape))
    memory = execute(lower(schedule), feed, schedule.chip)
    names = unique_names(topological(schedule.outputs))
    return {
        names[t]: _fetched(names[t], t.shape, t.dtype, memory[names[t]], stored)
        for t in schedule.outputs
    }


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
