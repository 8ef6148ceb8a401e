"""The machine: chips as data, programs for their cores, values and times of programs, layouts.

- `chip`: chips in TOML files: every number with its source and how far it can be trusted.
- `isa`: instructions, loops, the builder of kernels, the sanitizer.
- `sim`: a program executed for its values, and simulated for its time.
- `layout`: where the elements of a tensor lie, and kernels that move them.

`simulate` takes a program or a launch, `simulate_kernel` a whole kernel, which may have several
phases. A kernel that adds two tensors of 4,096 numbers: its values, then its time:

>>> import numpy as np
>>> from ascend_lab.machine import execute, load_chip, simulate_kernel
>>> from ascend_lab.operators import compile
>>> chip = load_chip("Ascend910B2")
>>> kernel = compile("add", [(4096,), (4096,)], ["fp16", "fp16"], chip)
>>> ones = np.ones(4096, np.float16)
>>> execute(kernel, {"x": ones, "y": ones}, chip)["z"][:3]
array([2., 2., 2.], dtype=float16)
>>> 0 < simulate_kernel(kernel, chip).time_s < 1e-3
True
"""

from ascend_lab.facade import names_of

__all__ = [
    "Chip",
    "DeviceMemory",
    "Kernel",
    "KernelBuilder",
    "Program",
    "Timeline",
    "convert",
    "execute",
    "load_chip",
    "sanitize",
    "simulate",
    "simulate_kernel",
]

__getattr__ = names_of(
    __name__,
    {
        "chip": "Chip load_chip",
        "isa": "Kernel KernelBuilder Program sanitize",
        "sim": "DeviceMemory Timeline execute simulate simulate_kernel",
        "layout": "convert",
    },
)


def __dir__() -> list[str]:
    """Return the names that are offered, loaded or not."""
    return sorted(__all__)
