"""Times the changes of layout that were measured together with a convolution."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ascend_lab.compare.rows import Shape
from ascend_lab.machine.chip import DTYPE_BYTES, Chip


def _transposes_blocks(dtype: str) -> bool:
    """Tell whether our kernel transposes 16 channels of a format at once, as the device does."""
    # vtranspose turns 16 x 16 numbers of two bytes; others move one by one
    return DTYPE_BYTES[dtype] == 2


def conversions_mark(count: int, dtype: str) -> str:
    """Return a remark on how the model timed the `count` changes of layout that were measured."""
    if _transposes_blocks(dtype):
        return f"with {count} changes of layout, as measured"
    return f"{count} changes of layout not timed: ours of {dtype} would move single elements"


def conversions_s(shapes: Sequence[Shape], dtype: str, count: int, chip: Chip) -> float:
    """Return the seconds of changing the layout of the `count` largest images and weights."""
    from ascend_lab.compiler import Graph, Node, TensorType
    from ascend_lab.compiler.compile import Front, Road, finish_stages

    if not _transposes_blocks(dtype):
        return 0.0
    total_s = 0.0
    # the row states the number of conversions but not the tensors: the largest ones cost most
    for shape in sorted(shapes, key=math.prod, reverse=True)[:count]:
        plain = TensorType(shape, dtype)
        types = {"x": plain, "y": replace(plain, layout="NC1HWC0")}
        node = Node("y", "trans_data", ("x",), ("y",), {"layout": "NC1HWC0"})
        graph = Graph("layout", ("x",), ("y",), (node,), types)
        times = finish_stages(Front({}, graph, graph), chip, Road(dtype="")).timeline()
        # kernels of a chain wait in the device's queue: only the first one pays the host's start
        total_s += times.time_s - (chip.launch_overhead_s - chip.queued_launch_s)
    return total_s
