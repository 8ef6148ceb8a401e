"""A model of Ascend NPUs: chips, programs for their cores, a simulator, and tensor layouts.

- `chip`: chips as TOML files; every number has its source and says how far it can be trusted.
- `isa`: instructions and loops, the builder of kernels, and a sanitizer that finds races.
- `sim`: executes a program for its values, and simulates it for its time.
- `layout`: where the elements of a tensor are stored, and kernels that convert layouts.

`simulate` takes a program or a launch, `simulate_kernel` a whole kernel, which may have several
phases. An example is a kernel that adds two tensors of 4,096 numbers: its values, then its time.

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
    """Return the public names, including those whose modules are not imported yet."""
    return sorted(__all__)
