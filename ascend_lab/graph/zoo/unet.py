"""U-Net (Ronneberger et al. 2015): down, up, and the features of each level joined on the way up.

Convolutions are padded so that the output has the input's size, as most users have it; the paper's
are not, and crop instead. The parameters are the same.
"""

from __future__ import annotations

import math

from ascend_lab.errors import InputError
from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.zoo.blocks import Net

LEVELS = 4


def _double(net: Net, x: Value, features: int, name: str) -> Value:
    x = net.conv_act(x, features, 3, name=f"{name}.1")
    return net.conv_act(x, features, 3, name=f"{name}.2")


def _up(net: Net, x: Value, name: str) -> Value:
    """Append the transposed 2 x 2 convolution that doubles the size and halves the channels."""
    channels = x.shape[1]
    shape = (channels, channels // 2, 2, 2)
    weight = net.weight(shape, f"{name}.weight", scale=1 / math.sqrt(channels))
    bias = net.seeded(f"{name}.bias", (channels // 2,), 0.02)
    out: Value = net.conv_transpose2d(x, weight, bias, stride=2, name=name)
    return out


def unet(
    batch: int = 1, *, size: int = 256, dtype: str = "fp32", classes: int = 2, channels: int = 1,
    width: int = 64,
) -> Graph:  # fmt: skip
    """Return U-Net: x (batch, channels, size, size) -> scores (batch, classes, size, size).

    `width` is the features of the first level. Raises `InputError` unless 16 divides the size.
    """
    if size % 2**LEVELS:
        raise InputError(f"unet: a size divisible by {2**LEVELS}", str(size), "pad the image")
    net = Net("unet", dtype)
    x = net.images(batch, channels, size)
    passed = []
    for level in range(LEVELS):
        x = _double(net, x, width << level, f"down{level}")
        passed.append(x)
        x = net.max_pool2d(x, kernel=2, name=f"down{level}.pool")
    x = _double(net, x, width << LEVELS, "bottom")
    for level in reversed(range(LEVELS)):
        x = _up(net, x, f"up{level}")
        x = net.concat(passed[level], x, axis=1, name=f"up{level}.concat")
        x = _double(net, x, width << level, f"up{level}")
    return net.finish(net.conv(x, classes, name="out"))
