"""The two sums over each channel that batch norm needs in training, reading the images once.

    unfused        x -> GM -> sum -> GM;  x, mean -> GM -> sum of squares -> GM      x is read twice
    fused          x -> UB -> sum(x), sum(x x) -> GM                                 x is read once
    saved          for 32 images of 256 x 56 x 56 in fp16 one reading of 51 MB

The kernel (`channel_sums_kernel`) wants images in NC1HWC0, where each channel of a block of 16 has
its own lane. Without this file the sums are scheduled from their expressions, on row-major images.
"""

from ascend_lab.fused.channel_sums_kernel import ChannelSums, channel_sums_kernel
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import Kernel
from ascend_lab.operators.ops.operator import Call, Template


def _kernel(call: Call, chip: Chip) -> Kernel:
    n, c, h, w = call.shapes[0]
    # only the gradients have an epsilon
    job = ChannelSums(n, c, h, w, call.dtypes[0], call.attrs.get("epsilon"))
    return channel_sums_kernel(job, chip)


def _applies(call: Call, chip: Chip) -> bool:
    return DTYPE_BYTES[call.dtypes[0]] == 2


def _template(*names: str) -> Template:
    return Template(_kernel, names, "NC1HWC0:16", "NC1HWC0:16", applies=_applies)


TEMPLATES = [
    ("bn_training_reduce", _template("x")),
    ("bn_training_update_grad", _template("grad", "x", "mean", "variance")),
]
