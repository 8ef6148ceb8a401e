"""Max pooling of fp16 images that computes once what overlapping windows have in common.

A 3 x 3 window is the largest of 3 columns, each of which is the largest of 3 neighbours in a row:

    otherwise      each window by itself: 8 comparisons for a result
    here           neighbours in each row, then rows: 6 for a stride of 2, 4 for a stride of 1
    saved          vector work, and copies of the image with its border

The kernel is in `operators.kernels.pooling`. It wants NC1HWC0, where 16 channels of a pixel lie
side by side; other formats, and rows too long for UB, are scheduled from the expression.
"""

from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Launch
from ascend_lab.operators.kernels import pooling as kernels
from ascend_lab.operators.ops.operator import Call, Template
from ascend_lab.operators.ops.pooling import as_convolution


def _kernel(call: Call, chip: Chip) -> Launch:
    return kernels.max_pool_launch(as_convolution(call.attrs, call.shapes[0]), chip)


def _applies(call: Call, chip: Chip) -> bool:
    shape = as_convolution(call.attrs, call.shapes[0])
    return call.dtypes[0] == "fp16" and kernels.row_fits(shape, chip)


TEMPLATES = [("max_pool2d", Template(_kernel, ("x",), "NC1HWC0", "NC1HWC0", applies=_applies))]
