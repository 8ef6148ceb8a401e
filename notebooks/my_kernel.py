"""A kernel of your own: copy this file, change it, and run

ascend-lab run-kernel notebooks/my_kernel.py --chip Toy --sanitize
"""

import numpy as np

from ascend_lab.machine.isa import KernelBuilder

TILE, TILES = 1024, 8


def kernel(chip):
    """y = max(x, 0), tile by tile through two queues."""
    k = KernelBuilder("my_relu", chip)
    x = k.tensor("x", "fp16", TILE * TILES)
    y = k.tensor("y", "fp16", TILE * TILES)
    x_ub = k.queue("x_ub", "UB", "fp16", TILE, src="MTE2", dst="V", depth=2)
    y_ub = k.queue("y_ub", "UB", "fp16", TILE, src="V", dst="MTE3", depth=2)
    repeats = (TILE // 128, 128)
    with k.loop("i", TILES) as i:
        k.copy(x_ub.alloc().region(), x.region(i * TILE, TILE))
        x_ub.enqueue()
        source, target = x_ub.dequeue(), y_ub.alloc()
        k.vector("vrelu", target.region(0, repeats), source.region(0, repeats))
        x_ub.free()
        y_ub.enqueue()
        k.copy(y.region(i * TILE, TILE), y_ub.dequeue().region())
        y_ub.free()
    return k.finish()


def inputs(rng):
    """Arrays for the tensors the kernel reads."""
    return {"x": rng.standard_normal(TILE * TILES).astype(np.float16)}


def reference(arrays):
    """What the kernel should compute, with NumPy."""
    return {"y": np.maximum(arrays["x"], 0)}
