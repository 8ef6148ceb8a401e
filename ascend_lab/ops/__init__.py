"""The operator library: definition, reference, types, slice rules, gradient, tests of each.

`ops.OPERATORS` holds every operator by name. `run` computes one on a chip's program, `time` times
that program, `make_test` writes its tests; `register` adds an operator of your own.
"""

from ascend_lab.ops import activations as activations
from ascend_lab.ops import attention as attention
from ascend_lab.ops import batch_norm as batch_norm
from ascend_lab.ops import conv_gradient as conv_gradient
from ascend_lab.ops import convolution as convolution
from ascend_lab.ops import cutting as cutting
from ascend_lab.ops import deconvolution as deconvolution
from ascend_lab.ops import elementwise as elementwise
from ascend_lab.ops import indexing as indexing
from ascend_lab.ops import matmul as matmul
from ascend_lab.ops import moving as moving
from ascend_lab.ops import normalise as normalise
from ascend_lab.ops import pool_gradient as pool_gradient
from ascend_lab.ops import pooling as pooling
from ascend_lab.ops import quantised as quantised
from ascend_lab.ops import reduction as reduction
from ascend_lab.ops import training as training
from ascend_lab.ops.build import check, compile, express, run, time  # noqa: A004 - what it does
from ascend_lab.ops.formats import Tolerance, TypeRule, exact, rounded
from ascend_lab.ops.gradients import Site, gradient
from ascend_lab.ops.operator import (
    OPERATORS,
    REQUIRED,
    Call,
    Domain,
    Example,
    Operator,
    Template,
    get,
    register,
)
from ascend_lab.ops.slicing import AxisRule, Cut, Reduction, SliceRules, Source, Window, cut, take
from ascend_lab.ops.verify import make_test

__all__ = [
    "OPERATORS",
    "REQUIRED",
    "AxisRule",
    "Call",
    "Cut",
    "Domain",
    "Example",
    "Operator",
    "Reduction",
    "Site",
    "SliceRules",
    "Source",
    "Template",
    "Tolerance",
    "TypeRule",
    "Window",
    "check",
    "compile",
    "cut",
    "exact",
    "express",
    "get",
    "gradient",
    "make_test",
    "register",
    "rounded",
    "run",
    "take",
    "time",
]
