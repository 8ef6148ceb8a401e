"""Weights of grouped convolutions as the cube needs them: one block-diagonal matrix a bundle."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.kernels.conv_shape import ConvShape, bundles_of


def bundle_weights(shape: ConvShape, weight: NDArray[Any]) -> list[NDArray[Any]]:
    """Return the dense kernels (k_b, c_b, r, s) of each bundle from weights (k, c/groups, r, s).

    Off the diagonal blocks they are zero: the cube multiplies these zeros too.
    """
    bundle = bundles_of(shape)
    c, k = shape.c // shape.groups, shape.k // shape.groups
    dense = []
    for index in range(bundle.count):
        groups = bundle.last_groups if index == bundle.count - 1 else bundle.groups
        kernel = np.zeros((groups * k, groups * c, shape.r, shape.s), weight.dtype)
        for g in range(groups):
            first = (index * bundle.groups + g) * k
            kernel[g * k : (g + 1) * k, g * c : (g + 1) * c] = weight[first : first + k]
        dense.append(kernel)
    return dense
