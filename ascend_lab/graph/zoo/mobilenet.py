"""Networks of depthwise convolutions: MobileNet V1, V2, V3 (large) and EfficientNet-B0.

A depthwise convolution is a `conv2d` with as many groups as channels; which kernel computes it is
for the compiler to choose.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.zoo.blocks import BRANCH, Net

V1 = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2),
      (1024, 1))  # fmt: skip
"""Features and stride of each depthwise-separable layer."""
V2 = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
      (6, 320, 1, 1))  # fmt: skip
"""Expansion, features, blocks, stride of the first."""
V3_LARGE = (
    (3, 16, 16, 0, "relu", 1), (3, 64, 24, 0, "relu", 2), (3, 72, 24, 0, "relu", 1),
    (5, 72, 40, 24, "relu", 2), (5, 120, 40, 32, "relu", 1), (5, 120, 40, 32, "relu", 1),
    (3, 240, 80, 0, "hard_swish", 2), (3, 200, 80, 0, "hard_swish", 1),
    (3, 184, 80, 0, "hard_swish", 1), (3, 184, 80, 0, "hard_swish", 1),
    (3, 480, 112, 120, "hard_swish", 1), (3, 672, 112, 168, "hard_swish", 1),
    (5, 672, 160, 168, "hard_swish", 2), (5, 960, 160, 240, "hard_swish", 1),
    (5, 960, 160, 240, "hard_swish", 1),
)  # fmt: skip
"""Kernel, expanded channels, features, channels of squeeze and excite, activation, stride."""
B0 = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3),
      (6, 5, 2, 192, 4), (6, 3, 1, 320, 1))  # fmt: skip
"""Expansion, kernel, stride of the first, features, blocks."""


@dataclass(frozen=True, slots=True)
class Inverted:
    """An inverted residual: 1 x 1 up to `expanded`, depthwise, 1 x 1 down to `features`."""

    expanded: int
    features: int
    kernel: int = 3
    stride: int = 1
    act: str = "relu6"
    squeezed: int = 0
    squeeze_act: str = "relu"
    gate: str = "hard_sigmoid"
    epsilon: float = 1e-5


def inverted(net: Net, x: Value, block: Inverted, name: str) -> Value:
    """Append an inverted residual, with the sum where size and channels stay."""
    start, channels, eps = x, x.shape[1], block.epsilon
    if block.expanded != channels:
        x = net.conv_norm(x, block.expanded, act=block.act, epsilon=eps, name=f"{name}.expand")
    x = net.conv_norm(x, block.expanded, block.kernel, stride=block.stride, act=block.act,
                      groups=block.expanded, epsilon=eps, name=f"{name}.depthwise")  # fmt: skip
    if block.squeezed:
        x = net.squeeze_excite(x, block.squeezed, name=f"{name}.se", act=block.squeeze_act,
                               gate=block.gate)  # fmt: skip
    stays = block.stride == 1 and channels == block.features
    x = net.conv_norm(x, block.features, act="", scale=BRANCH if stays else 1.0, epsilon=eps,
                      name=f"{name}.project")  # fmt: skip
    out: Value = net.add(start, x, name=f"{name}.add") if stays else x
    return out


def mobilenet_v1(
    batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000
) -> Graph:
    """Return MobileNet V1 (Howard et al. 2017), width 1.0."""
    net = Net("mobilenet_v1", dtype)
    x = net.conv_norm(net.images(batch, 3, size), 32, 3, stride=2, name="stem")
    for i, (features, stride) in enumerate(V1, 1):
        width = x.shape[1]
        x = net.conv_norm(x, width, 3, stride=stride, groups=width, name=f"layer{i}.depthwise")
        x = net.conv_norm(x, features, name=f"layer{i}.pointwise")
    return net.finish(net.head(x, classes))


def mobilenet_v2(
    batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000
) -> Graph:
    """Return MobileNet V2 (Sandler et al. 2018), width 1.0."""
    net = Net("mobilenet_v2", dtype)
    x = net.conv_norm(net.images(batch, 3, size), 32, 3, stride=2, act="relu6", name="stem")
    for stage, (expansion, features, depth, first) in enumerate(V2, 1):
        for i in range(depth):
            block = Inverted(x.shape[1] * expansion, features, stride=first if i == 0 else 1)
            x = inverted(net, x, block, f"stage{stage}.{i}")
    x = net.conv_norm(x, 1280, act="relu6", name="last")
    return net.finish(net.head(x, classes))


def mobilenet_v3_large(
    batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000
) -> Graph:
    """Return MobileNet V3 large (Howard et al. 2019)."""
    net, eps = Net("mobilenet_v3_large", dtype), 1e-3
    x = net.images(batch, 3, size)
    x = net.conv_norm(x, 16, 3, stride=2, act="hard_swish", epsilon=eps, name="stem")
    for i, (kernel, expanded, features, squeezed, act, stride) in enumerate(V3_LARGE, 1):
        block = Inverted(expanded, features, kernel, stride, act, squeezed, epsilon=eps)
        x = inverted(net, x, block, f"block{i}")
    x = net.conv_norm(x, 960, act="hard_swish", epsilon=eps, name="last")
    x = net.act(net.head(x, 1280, name="fc1"), "hard_swish", name="fc1.act")
    return net.finish(net.dense(x, classes, name="fc2"))


def efficientnet_b0(
    batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000
) -> Graph:
    """Return EfficientNet-B0 (Tan & Le 2019); squeeze and excite to a quarter of the input."""
    net = Net("efficientnet_b0", dtype)
    x = net.conv_norm(net.images(batch, 3, size), 32, 3, stride=2, act="silu", name="stem")
    for stage, (expansion, kernel, first, features, depth) in enumerate(B0, 1):
        for i in range(depth):
            width = x.shape[1]
            block = Inverted(width * expansion, features, kernel, first if i == 0 else 1, "silu",
                             width // 4, "silu", "sigmoid")  # fmt: skip
            x = inverted(net, x, block, f"stage{stage}.{i}")
    x = net.conv_norm(x, 1280, act="silu", name="last")
    return net.finish(net.head(x, classes))
