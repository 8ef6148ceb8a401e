"""Matrices as the cube keeps them in device memory: fractals of 16 rows by C0 columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.dsl.emit_cube import Matrix
from ascend_lab.ops.shapes import Shape

Values = NDArray[Any]


def _order(matrix: Matrix) -> tuple[int, ...]:
    """Return the axes as they are stored: batches, fractal columns (major), fractal rows."""
    return (*matrix.batch, matrix.major, matrix.minor)


def pack_matrix(array: Values, matrix: Matrix) -> Values:
    """Return (..., rows, columns) as (..., major1, minor1, minor unit, major unit), zero-padded."""
    turned = array.transpose(_order(matrix))
    lead, (major, minor) = turned.shape[:-2], turned.shape[-2:]
    majors, minors = -(-major // matrix.major_unit), -(-minor // matrix.minor_unit)
    wide = np.zeros((*lead, majors * matrix.major_unit, minors * matrix.minor_unit), array.dtype)
    wide[..., :major, :minor] = turned
    split = wide.reshape((*lead, majors, matrix.major_unit, minors, matrix.minor_unit))
    n = len(lead)
    return np.ascontiguousarray(split.transpose((*range(n), n, n + 2, n + 3, n + 1)))


def unpack_matrix(stored: Values, matrix: Matrix, shape: Shape) -> Values:
    """Return a stored matrix row-major in its `shape`, without the padding."""
    order = _order(matrix)
    sizes = tuple(shape[d] for d in order)
    lead, (major, minor) = sizes[:-2], sizes[-2:]
    majors, minors = -(-major // matrix.major_unit), -(-minor // matrix.minor_unit)
    split = stored.reshape((*lead, majors, minors, matrix.minor_unit, matrix.major_unit))
    n = len(lead)
    wide = split.transpose((*range(n), n, n + 3, n + 1, n + 2))
    flat = wide.reshape((*lead, majors * matrix.major_unit, minors * matrix.minor_unit))
    back = np.argsort(order)
    return flat[..., :major, :minor].transpose(back)
