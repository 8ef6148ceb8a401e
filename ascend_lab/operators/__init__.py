"""Operators: the language they are written in, the library, and kernels written by hand.

- `dsl`: tensor expressions (what to compute) and their schedules (how).
- `ops`: the library: formula, types, slices, gradient and tests of each operator.
- `kernels`: kernels written by hand: matrix products, convolutions, attention, copies.

For example, compute the softmax of 128 rows, compare it with NumPy's, and estimate its time:

>>> import numpy as np
>>> from ascend_lab.machine import load_chip
>>> from ascend_lab.operators import run, time
>>> chip = load_chip("Ascend910B2")
>>> x = np.random.default_rng(0).normal(size=(128, 256)).astype(np.float16)
>>> y = run("softmax", x, chip=chip)
>>> powers = np.exp(x.astype(np.float32))
>>> bool(np.allclose(y, powers / powers.sum(axis=1, keepdims=True), atol=1e-3))
True
>>> 0 < time("softmax", [(128, 256)], ["fp16"], chip).time_s < 1e-4
True
"""

from ascend_lab.facade import names_of

__all__ = [
    "Operator",
    "auto_schedule",
    "compile",
    "compute",
    "create_schedule",
    "get",
    "lower",
    "placeholder",
    "register",
    "run",
    "time",
]

__getattr__ = names_of(
    __name__,
    {
        "dsl": "auto_schedule compute create_schedule lower placeholder",
        "ops": "Operator compile get register run time",
    },
)


def __dir__() -> list[str]:
    """Return the names that are offered, loaded or not."""
    return sorted(__all__)
