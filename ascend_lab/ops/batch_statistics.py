"""The sums behind a batch norm that is trained: statistics of the batch, gradients of its numbers.

With m = n h w elements in a channel, r = 1 / sqrt(variance + epsilon), and sums over n, h and w:

    bn_training_reduce(x):                              mean = sum(x) / m, variance (biased)
    bn_training_update_grad(grad, x, mean, variance):   dscale = sum(grad (x - mean)) r,
                                                        dbias = sum(grad)

Images are (n, c, h, w); what there is one of per channel is fp32, (1, c, 1, 1), and so lies beside
the image in any layout. Names and division of labour are the vendor's.

Source: CANN operator list, BNTrainingReduce and BNTrainingUpdateGrad.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.chip import DTYPE_BYTES, Chip
from ascend_lab.errors import ShapeError
from ascend_lab.isa import Kernel
from ascend_lab.kernels.channel_sums import ChannelSums, channel_sums_kernel
from ascend_lab.layout import address_map, pack
from ascend_lab.ops.attributes import EPSILON
from ascend_lab.ops.formats import TypeRule, rounded
from ascend_lab.ops.lifting import along, wide
from ascend_lab.ops.operator import Domain, Example, Operator
from ascend_lab.ops.registry import register
from ascend_lab.ops.shapes import Shape, check_rank
from ascend_lab.ops.slicing import AxisRule, SliceRules, Source
from ascend_lab.ops.template import Call, Template

Values = NDArray[Any]
PIXELS = (0, 2, 3)
LANES = 16


def _channels(x: Shape) -> Shape:
    return (1, x[1], 1, 1)


def _sums(x: te.Tensor) -> te.Tensor:
    return te.reduce_sum(x, PIXELS)


def _kept(x: te.Tensor, shape: Shape) -> te.Tensor:
    return te.reshape(x, _channels(shape))


# -- statistics -----------------------------------------------------------------------------------
def _reduce_shape(x: Shape) -> tuple[Shape, ...]:
    check_rank("x (n, c, h, w)", x, 4)
    return (_channels(x),) * 2


def _reduce(x: te.Tensor) -> tuple[te.Tensor, te.Tensor]:
    values, share = wide(x), x.shape[1] / np.prod(x.shape)
    mean = te.vmuls(_sums(values), float(share))
    centred = te.vsub(values, along(mean, 1, x.shape))
    variance = te.vmuls(_sums(te.vmul(centred, centred)), float(share))
    return _kept(mean, x.shape), _kept(variance, x.shape)


def _reduce_values(x: Values) -> tuple[Values, Values]:
    return x.mean(axis=PIXELS, keepdims=True), x.var(axis=PIXELS, keepdims=True)


# -- gradients ------------------------------------------------------------------------------------
def _grad_shape(
    grad: Shape, x: Shape, mean: Shape, variance: Shape, *, epsilon: float
) -> tuple[Shape, ...]:
    check_rank("x (n, c, h, w)", x, 4)
    wanted = (x, _channels(x), _channels(x))
    if (grad, mean, variance) != wanted:
        got = f"grad {grad}, mean {mean}, variance {variance}"
        raise ShapeError(f"grad {x}, mean and variance {_channels(x)}", got, "reshape them")
    return (_channels(x),) * 2


def _grad(
    grad: te.Tensor, x: te.Tensor, mean: te.Tensor, variance: te.Tensor, *, epsilon: float
) -> tuple[te.Tensor, te.Tensor]:
    slope = wide(grad)
    centred = te.vsub(wide(x), te.broadcast(mean, x.shape))
    moment = _kept(_sums(te.vmul(slope, centred)), x.shape)
    rate = te.vrsqrt(te.vadds(variance, epsilon))
    return te.vmul(moment, rate), _kept(_sums(slope), x.shape)


def _grad_values(
    grad: Values, x: Values, mean: Values, variance: Values, *, epsilon: float
) -> tuple[Values, Values]:
    moment = (grad * (x - mean)).sum(axis=PIXELS, keepdims=True)
    return moment / np.sqrt(variance + epsilon), grad.sum(axis=PIXELS, keepdims=True)


# -- kernel ---------------------------------------------------------------------------------------
def _applies(call: Call, chip: Chip) -> bool:
    return DTYPE_BYTES[call.dtypes[0]] == 2


def _kernel(call: Call, chip: Chip) -> Kernel:
    n, c, h, w = call.shapes[0]
    job = ChannelSums(n, c, h, w, call.dtypes[0], call.attrs.get("epsilon"))
    return channel_sums_kernel(job, chip)


def _feed(call: Call, arrays: Sequence[Values]) -> dict[str, Values]:
    names = ("grad", "x", "mean", "variance") if len(arrays) > 1 else ("x",)
    tensors = {}
    for name, a, dtype in zip(names, arrays, call.dtypes, strict=True):
        tensors[name] = pack(address_map("NC1HWC0", a.shape, dtype, c0=LANES), a).reshape(-1)
    return tensors


def _fetch(call: Call, memory: Mapping[str, Values]) -> tuple[Values, ...]:
    """Return the channels without the padding of the last block."""
    return tuple(
        memory[name].reshape(-1)[: shape[1]].reshape(shape)
        for name, shape in zip(("y0", "y1"), call.outputs, strict=True)
    )


def _slices(shapes: tuple[Shape, ...], **attrs: Any) -> SliceRules:
    why = "sums over every image and pixel"
    sources = tuple(Source(i, 1) for i in range(len(shapes)))
    rules = [AxisRule(a, "reduce", reason=why, joins=(a, a)) for a in range(4)]
    rules[1] = AxisRule(1, "free", sources, (1, 1))
    return SliceRules("Reduce", tuple(rules))


# -- registration ---------------------------------------------------------------------------------
_IMAGES = ((1, 1, 1, 2), (2, 16, 3, 5), (2, 17, 4, 4), (3, 40, 7, 7))
_TEMPLATE = Template(_kernel, _feed, _fetch, _applies)
_STATISTICS = (("mean", "fp32"), ("variance", "fp32"))
register(
    Operator(
        "bn_training_reduce",
        ("x",),
        _reduce_values,
        _reduce,
        "mean and biased variance of each channel over images and pixels",
        outputs=("mean", "variance"),
        shape_rule=_reduce_shape,
        types=TypeRule(result=lambda main, attrs: ("fp32", "fp32")),
        slicing=_slices,
        template=_TEMPLATE,
        layouts=dict.fromkeys(("x", "mean", "variance"), "NC1HWC0"),
        examples=tuple(Example((x,)) for x in _IMAGES),
        tolerances=rounded(fp32_ulps=64, atol=2.0**-16),
    )
)
register(
    Operator(
        "bn_training_update_grad",
        ("grad", "x", "mean", "variance"),
        _grad_values,
        _grad,
        "gradients of a batch norm's scale and bias: sum(grad normalised x), sum(grad)",
        outputs=("dscale", "dbias"),
        attrs={"epsilon": 1e-5},
        ranges=EPSILON,
        shape_rule=_grad_shape,
        types=TypeRule(fixed=_STATISTICS, result=lambda main, attrs: ("fp32", "fp32")),
        slicing=_slices,
        template=_TEMPLATE,
        layouts=dict.fromkeys(("grad", "x", "mean", "variance", "dscale", "dbias"), "NC1HWC0"),
        domains={"variance": Domain(0.5, 2.0)},
        examples=tuple(Example((x, x, *((1, x[1], 1, 1),) * 2)) for x in _IMAGES),
        tolerances=rounded(fp32_ulps=64, atol=2.0**-12),
    )
)
