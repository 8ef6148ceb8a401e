"""Leading axes are rows: norms and softmax of (a, b, n) are those of (a b, n)."""

import numpy as np
import pytest

from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import simulate
from ascend_lab.operators import ops

CHIPS = {name: load_chip(name) for name in ("Ascend910B2", "Ascend310P3")}
SCALES = {"layer_norm": 2, "rms_norm": 1, "softmax": 0, "log_softmax": 0}
"""Operators along the last axis -> how many scales as long as a row they take."""
SHAPES = [(2, 3, 33), (16, 64, 512), (3, 5, 7, 129), (31, 1, 1000), (1, 77, 96)]


def time_of(operator, shape, dtype, chip):
    shapes = (shape, *((shape[-1],) for _ in range(SCALES[operator])))
    return ops.time(operator, shapes, (dtype,) * len(shapes), chip)


@pytest.mark.parametrize("operator", SCALES)
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_leading_axes_cost_no_more_than_folded_ones(operator, dtype, shape):
    for name, chip in CHIPS.items():
        if dtype == "bf16" and name == "Ascend310P3":
            continue
        apart = time_of(operator, shape, dtype, chip)
        folded = time_of(operator, (int(np.prod(shape[:-1])), shape[-1]), dtype, chip)
        assert len(apart.phases) == len(folded.phases)
        assert apart.total_cycles <= folded.total_cycles


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("operator", ["softmax", "log_softmax"])
def test_long_columns_of_a_middle_axis_are_loaded_once(operator, dtype):
    shape = (5, 373, 379)
    size_bytes = int(np.prod(shape)) * (2 if dtype == "fp16" else 4)
    chip = CHIPS["Ascend910B2"]
    kernel = ops.compile(operator, (shape,), (dtype,), chip, axis=1)
    loaded = sum(simulate(phase, chip).path_bytes["GM", "UB"] for phase in kernel.phases)
    assert loaded < 1.1 * size_bytes  # ends of rows are no whole blocks
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float16 if dtype == "fp16" else np.float32)
    power = np.exp(np.float64(x))
    wanted = power / power.sum(1, keepdims=True)
    wanted = wanted if operator == "softmax" else np.log(wanted)
    found = np.float64(ops.run(operator, x, chip=chip, axis=1))
    slack = 4e-3 if dtype == "fp16" else 1e-5
    np.testing.assert_allclose(found, wanted, rtol=slack, atol=slack)
