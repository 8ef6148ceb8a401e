"""A bias behind a convolution: sums stay wide in memory, a vector phase adds and rounds once.

The convolution leaves (n, k1, pixels, 16), 16 channels side by side; the bias is (k1, 16).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.chip import Chip
from ascend_lab.dsl.handwritten import renamed
from ascend_lab.isa import Kernel, as_kernel
from ascend_lab.kernels.gemm_schedule import ACCUMULATOR, FRACTAL
from ascend_lab.ops.lifting import narrow
from ascend_lab.ops.template import Call, Template

Values = NDArray[Any]
Feed = Callable[[Call, Sequence[Values]], dict[str, Values]]
Fetch = Callable[[Call, Mapping[str, Values]], tuple[Values, ...]]
Build = Callable[[Call, Chip], Any]


def has_kernel(call: Call, chip: Chip) -> bool:
    """Tell whether the cube's kernels accumulate the operands' format."""
    return call.dtypes[0] in ACCUMULATOR


def with_bias(build: Build, feed: Feed, fetch: Fetch, result: Callable[..., str]) -> Template:
    """Return a template of a convolution, to which a third input adds a bias.

    `result(main, attrs)` is the output format.
    """

    def kernel(call: Call, chip: Chip) -> Kernel:
        if len(call.shapes) == 2:
            return as_kernel(build(call, chip))
        main = call.dtypes[0]
        wide = as_kernel(build(_without_bias(call, ACCUMULATOR[main]), chip))
        phases = tuple(renamed(phase, {"y": "sums"}) for phase in wide.phases)
        pixels = next(t.elements for t in wide.tensors if t.name == "y")
        added = _bias_kernel(call, chip, pixels, result(main, call.attrs))
        return Kernel(f"{wide.name}_bias", (*phases, *added.phases))

    def tensors(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
        packed = feed(_without_bias(call), arrays[:2])
        if len(arrays) > 2:
            packed["bias"] = _in_blocks(arrays[2], call.outputs[0][1])
        return packed

    def outputs(call: Call, memory: Mapping[str, Values]) -> tuple[Values, ...]:
        return fetch(_without_bias(call), memory)

    return Template(kernel, tensors, outputs, has_kernel)


def _without_bias(call: Call, out_dtype: str | None = None) -> Call:
    attrs = {**call.attrs, "out_dtype": out_dtype} if out_dtype else call.attrs
    return replace(call, shapes=call.shapes[:2], dtypes=call.dtypes[:2], attrs=attrs)


def _in_blocks(bias: Values, channels: int) -> Values:
    """Return the bias as (k1, 16), zero behind the last channel."""
    wide = np.zeros(-(-channels // FRACTAL) * FRACTAL, bias.dtype)
    wide[:channels] = bias
    return wide.reshape(-1, FRACTAL)


def _bias_kernel(call: Call, chip: Chip, elements: int, dtype: str) -> Kernel:
    """Return y = sums + bias on (n, k1, pixels, 16), cast to `dtype` at the end."""
    n, channels = call.outputs[0][:2]
    blocks = -(-channels // FRACTAL)
    pixels = elements // (n * blocks * FRACTAL)
    wide = ACCUMULATOR[call.dtypes[0]]
    sums = te.placeholder((n, blocks, pixels, FRACTAL), wide, "sums")
    bias = narrow(te.placeholder((blocks, FRACTAL), call.dtypes[2], "bias"), wide)
    column = te.reshape(bias, (1, blocks, 1, FRACTAL))
    total = narrow(te.vadd(sums, te.broadcast(column, sums.shape)), dtype)
    return te.lower(te.auto_schedule(te.renamed(total, "y"), chip))
