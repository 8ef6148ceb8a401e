"""The operators of neural networks: formula, kernel, number formats, slices and gradient of each.

`ops.OPERATORS` has every operator by name. `run` computes an operator by its kernel on a chip,
`time` returns the kernel's timeline, `make_test` writes a test file, and `register` adds an
operator of your own. For example, `ops.get("relu").reference(x)` is max(x, 0).
"""

# fmt: off
# isort: off
from ascend_lab.operators.ops import (  # noqa: F401 - they define the operators
    elementwise, casts, quantised, matmul, reduction, attention, batch_norm, convolution,
    conv_gradient, moving, indexing, pooling, training,
)
from ascend_lab.operators.ops.expressions import (
    check, compile, express, run, time,  # noqa: A004 - it is what the function does
)
from ascend_lab.operators.ops.formats import Tolerance, TypeRule, exact, rounded
from ascend_lab.operators.ops.gradients import Site, gradient
from ascend_lab.operators.ops.operator import (
    OPERATORS, REQUIRED, Call, Domain, Example, Operator, Template, get, register,
)
from ascend_lab.operators.ops.slicing import (
    AxisRule, Cut, Reduction, SliceRules, Source, Window, cut, take,
)
from ascend_lab.operators.ops.verify import make_test

__all__ = [
    "OPERATORS", "REQUIRED", "AxisRule", "Call", "Cut", "Domain", "Example", "Operator",
    "Reduction", "Site", "SliceRules", "Source", "Template", "Tolerance", "TypeRule", "Window",
    "check", "compile", "cut", "exact", "express", "get", "gradient", "make_test", "register",
    "rounded", "run", "take", "time",
]
