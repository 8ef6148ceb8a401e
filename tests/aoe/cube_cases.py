"""Operators of the cube and epilogues for the tests of their spaces and bounds."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from ascend_lab.aoe.cube import CubeMeasure
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators.kernels import ConvShape, GemmShape
from ascend_lab.operators.kernels.epilogue import Epilogue, Operand, Step

CHIPS = ("Ascend310", "Ascend310P3", "Ascend910A", "Ascend910B2")
ON_CHIPS = [pytest.param(n, marks=() if "910" in n else pytest.mark.full) for n in CHIPS]
"""A coupled and a split chip by default, all of them with `-m full`."""
LAYERS = (
    GemmShape(128, 768, 768, "fp16", "fp16"),
    GemmShape(1, 2048, 1000),
    GemmShape(100, 300, 200, "int8"),
    ConvShape(1, 64, 56, 56, 64, 3, 3, 1, 1),
    ConvShape(1, 256, 14, 14, 1024, 1, 1),
    ConvShape(1, 256, 56, 56, 512, 1, 1, 2),
    ConvShape(2, 40, 9, 13, 50, 3, 3, 1, 1),
    ConvShape(1, 40, 15, 15, 60, 3, 3, 1, 1, groups=5),
)
TOGETHER = (ConvShape(16, 96, 7, 7, 80, 1, 1), ConvShape(6, 96, 7, 5, 80, 3, 3, 1, 1))
"""Tiles go on in the next image."""


def epilogue_for(kind, chip, dtype):
    """Return an epilogue the chip can do: "", "bias" or "residual" (combined chips only)."""
    if not kind or dtype == "int8":
        return None
    if not chip.combined:
        steps = (Step("vadd", ("sums", "bias")), Step("vrelu", (0,)))
        last = Step("vconv", (1,), None, "fp16")
        return Epilogue((Operand("bias", "channel", "fp32"),), (*steps, last), "fp16")
    steps = (Step("vconv", ("sums",), None, "fp16"), Step("vadd", (0, "bias")))
    operands = (Operand("bias", "channel", "fp16"),)
    if kind == "residual":
        steps = (*steps, Step("vadd", (1, "other")))
        operands = (*operands, Operand("other", "tile", "fp16"))
    return Epilogue(operands, (*steps, Step("vrelu", (len(steps) - 1,))), "fp16")


class Case(NamedTuple):
    """An operator with the name of its chip, which is shorter to print."""

    shape: GemmShape | ConvShape
    chip: str
    epilogue: str
    warm: tuple[str, ...]

    @property
    def measure(self):
        """The operator's measure."""
        chip = load_chip(self.chip)
        epilogue = epilogue_for(self.epilogue, chip, self.shape.dtype)
        return CubeMeasure(self.shape, chip, epilogue, frozenset(self.warm))


@st.composite
def cases(draw):
    """Draw an operator that has a space."""
    shape = draw(st.one_of(gemm_shapes(), conv_shapes()))
    kind = draw(st.sampled_from(("", "bias", "residual")))
    warm = draw(st.lists(st.sampled_from(("a", "b", "other")), max_size=2, unique=True))
    return Case(shape, draw(st.sampled_from(CHIPS)), kind, tuple(warm))


@st.composite
def gemm_shapes(draw):
    """Draw a product, mostly ragged."""
    side = st.integers(1, 700)
    dtype = draw(st.sampled_from(("fp16", "fp16", "int8")))
    out = draw(st.sampled_from(("", "fp16")))
    return GemmShape(draw(side), draw(side), draw(side), dtype, out)


@st.composite
def conv_shapes(draw):
    """Draw a convolution, mostly ragged, some in groups."""
    kernel = draw(st.sampled_from(((1, 1), (3, 3), (3, 5), (7, 7))))
    step = draw(st.integers(1, 2))
    groups = draw(st.sampled_from((1, 1, 1, 2, 5)))
    c, k = (groups * draw(st.integers(1, 60)) for _ in range(2))
    height = draw(st.integers(7, 60))
    width = draw(st.integers(7, 60))
    pad = draw(st.integers(0, 3) if kernel != (1, 1) else st.sampled_from((0, 0, 1)))
    return ConvShape(
        draw(st.integers(1, 3)), c, height, width, k, *kernel, step, pad, groups=groups
    )


def rows_of(size, count, seed=0):
    """Return some rows of a table."""
    rng = np.random.default_rng(seed)
    return np.unique(rng.integers(size, size=count))
