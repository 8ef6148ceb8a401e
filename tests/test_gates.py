"""Squeeze and excite as one kernel: values of any sizes, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from cube_checks import run_checked
from hypothesis import example, given, strategies as st

from ascend_lab.errors import CapacityError
from ascend_lab.fused.excitation import Excitation, excitation_launches
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Kernel
from ascend_lab.machine.layout import address_map, pack
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue, Step

CHIPS = ("Ascend310", "Ascend310P3", "Ascend910A", "Ascend910B2")


def limited(most):
    """Limits 0 and `most`."""
    return Epilogue((), (Step("vmaxs", ("sums",), 0.0), Step("vmins", (0,), most)), "fp16")


def run(job, chip, plain=False, seed=0):
    """Return what the kernel writes, and what NumPy says."""
    rng = np.random.default_rng(seed)
    functions = (PLAIN, PLAIN) if plain else (limited(90.0), limited(1.0))
    job = replace(job, functions=functions)
    (n, c, mid) = (job.n, job.c, job.mid)
    wide = job.blocks * 16
    x = rng.integers(-3, 4, (n, c, job.h, job.w)).astype(np.float16)
    one = rng.integers(-2, 3, (mid, c))
    two = rng.integers(-2, 3, (c, mid)) / 256
    b1 = rng.integers(-2, 3, mid)
    b2 = rng.integers(-2, 3, c) / 8
    weight = rng.integers(-4, 5, (job.blocks, max(job.rows, 1), 16))
    sides = {
        "squeeze": (one, (job.hidden, wide), "f2"), "excite": (two, (wide, job.hidden), "f2"),
        "bias1": (b1, (job.hidden,), "f4"), "bias2": (b2, (wide,), "f4"),
        "weight": (weight, weight.shape, "f2"),
    }  # fmt: skip
    tensors = {"x": pack(address_map("NC1HWC0", x.shape, "fp16"), x).reshape(-1)}
    for name, (array, size, kind) in sides.items():
        if name != "weight" or job.rows:
            missing = [(0, s - a) for s, a in zip(size, array.shape, strict=True)]
            tensors[name] = np.pad(array, missing).astype(kind).reshape(-1)
    kernel = Kernel("gates", excitation_launches(job, chip))
    found = run_checked(kernel, tensors, chip, seed=seed)["y"].reshape(n, -1, max(job.rows, 1), 16)
    hidden = x.astype(np.float64).mean((2, 3)) @ one.T + b1
    gates = (hidden if plain else hidden.clip(0, 90)) @ two.T + b2
    gates = gates if plain else gates.clip(0, 1)
    gates = np.pad(gates, ((0, 0), (0, wide - c))).reshape(n, -1, 1, 16)
    return found, gates * weight if job.rows else gates


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 200), st.integers(1, 20), st.integers(1, 20)),
    st.integers(1, 80), st.sampled_from((0, 0, 1, 5, 24)), st.booleans(), st.sampled_from(CHIPS),
    st.integers(0, 99),
)  # fmt: skip
@example((1, 1152, 7, 7), 48, 192, False, "Ascend910A", 0)
@example((1, 32, 112, 112), 8, 16, False, "Ascend910B2", 1)  # some pixels at a time
@example((1, 32, 112, 112), 8, 16, False, "Ascend310", 2)  # more than the cube takes at once
@example((2, 40, 1, 1), 10, 0, True, "Ascend310P3", 3)  # means
@example((5, 16, 4, 4), 300, 0, False, "Ascend910B2", 4)  # more rows than an instruction has
def test_values_equal_numpy(sizes, mid, rows, plain, name, seed):
    chip = load_chip(name)
    found, wanted = run(Excitation(*sizes, mid, (), rows), chip, plain, seed)
    np.testing.assert_allclose(found, wanted, rtol=2**-9, atol=2**-9)


def test_matrices_that_ub_cannot_hold_are_refused():
    with pytest.raises(CapacityError, match="of UB"):
        excitation_launches(Excitation(1, 4096, 1, 1, 512, (PLAIN, PLAIN)), load_chip("Ascend310"))
