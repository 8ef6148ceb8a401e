"""Cheap features: ShuffleNet V1 and V2 mix groups of channels, GhostNet V1 and V2 derive half."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.zoo.blocks import BRANCH, Net, image_network, rounded

DEPTHS = (4, 8, 4)
"""Units of the three stages of both ShuffleNets."""
SHUFFLE_V1 = {
    "g3_x0_5": (3, 12, (120, 240, 480)), "g3_x1_0": (3, 24, (240, 480, 960)),
    "g3_x1_5": (3, 24, (360, 720, 1440)), "g3_x2_0": (3, 48, (480, 960, 1920)),
    "g8_x0_5": (8, 16, (192, 384, 768)), "g8_x1_0": (8, 24, (384, 768, 1536)),
    "g8_x1_5": (8, 24, (576, 1152, 2304)), "g8_x2_0": (8, 48, (768, 1536, 3072)),
}  # fmt: skip
"""Groups, features of the stem and of the stages."""
SHUFFLE_V2 = {
    "": ((116, 232, 464), 1024), "_x0_5": ((48, 96, 192), 1024), "_x1_0": ((116, 232, 464), 1024),
    "_x1_5": ((176, 352, 704), 1024), "_x2_0": ((244, 488, 976), 2048),
}  # fmt: skip
"""Features of the stages and of the last convolution."""
GHOST = (
    (3, 16, 16, 0, 1), (3, 48, 24, 0, 2), (3, 72, 24, 0, 1), (5, 72, 40, 1, 2), (5, 120, 40, 1, 1),
    (3, 240, 80, 0, 2), (3, 200, 80, 0, 1), (3, 184, 80, 0, 1), (3, 184, 80, 0, 1),
    (3, 480, 112, 1, 1), (3, 672, 112, 1, 1), (5, 672, 160, 1, 2), (5, 960, 160, 0, 1),
    (5, 960, 160, 1, 1), (5, 960, 160, 0, 1), (5, 960, 160, 1, 1),
)  # fmt: skip
"""Kernel, expanded channels, features, whether squeeze and excite, stride."""


def _stem(net: Net, x: Value, features: int) -> Value:
    """Append the convolution and the pooling in front of the units of both ShuffleNets."""
    x = net.conv_norm(x, features, 3, stride=2, name="stem")
    return net.max_pool2d(x, kernel=3, stride=2, pad=1, name="stem.pool")


# -- ShuffleNet V1 --------------------------------------------------------------------------------
def _grouped(
    net: Net, x: Value, features: int, groups: int, reduce_groups: int, first: bool, name: str
) -> Value:
    """Append 1 x 1 in groups, shuffle, depthwise, 1 x 1 in groups, beside the input or its mean."""
    inner = features // 4
    y = net.conv_norm(x, inner, groups=reduce_groups, name=f"{name}.reduce")
    y = net.channel_shuffle(y, groups, name=name)
    y = net.conv_norm(y, inner, 3, stride=2 if first else 1, groups=inner, act="",
                      name=f"{name}.depthwise")  # fmt: skip
    width = features - x.shape[1] if first else features
    y = net.conv_norm(y, width, groups=groups, act="", scale=1.0 if first else BRANCH,
                      name=f"{name}.expand")  # fmt: skip
    if not first:
        return net.relu(net.add(x, y))
    y = net.relu(y)
    mean = net.avg_pool2d(x, kernel=3, stride=2, pad=1, count_include_pad=True)
    return net.concat(mean, y, axis=1)


def _shufflenet_v1(
    groups: int, stem: int, features: tuple[int, ...], net: Net, x: Value, classes: int
) -> Value:
    """Return ShuffleNet V1 (Zhang et al. 2018), in 3 or 8 groups."""
    x = _stem(net, x, stem)
    for stage, (width, depth) in enumerate(zip(features, DEPTHS, strict=True), 2):
        for i in range(depth):
            ungrouped = stage == 2 and i == 0
            x = _grouped(net, x, width, groups, 1 if ungrouped else groups, i == 0,
                         f"stage{stage}.{i}")  # fmt: skip
    x = net.flat(net.global_avg_pool(x, name="pool"))
    return net.dense(x, classes, name="classifier", bias=False)


# -- ShuffleNet V2 --------------------------------------------------------------------------------
def _separable(net: Net, x: Value, width: int, stride: int, name: str) -> Value:
    """Append a depthwise 3 x 3 without activation, then 1 x 1 to `width`."""
    own = x.shape[1]
    x = net.conv_norm(x, own, 3, stride=stride, groups=own, act="", name=f"{name}.depthwise")
    return net.conv_norm(x, width, name=f"{name}.pointwise")


def _unit(net: Net, x: Value, features: int, first: bool, name: str) -> Value:
    """Append a unit: half the channels pass; in the first of a stage both halves shrink."""
    width = features // 2
    if first:
        left, right = _separable(net, x, width, 2, f"{name}.left"), x
    else:
        left, right = net.split(x, sizes=2, axis=1)
    right = net.conv_norm(right, width, name=f"{name}.reduce")
    right = _separable(net, right, width, 2 if first else 1, f"{name}.right")
    return net.channel_shuffle(net.concat(left, right, axis=1), 2, name=name)


def _shufflenet_v2(features: tuple[int, ...], last: int, net: Net, x: Value, classes: int) -> Value:
    """Return ShuffleNet V2 (Ma et al. 2018); without a width in its name x1.0."""
    x = _stem(net, x, 24)
    for stage, (width, depth) in enumerate(zip(features, DEPTHS, strict=True), 2):
        for i in range(depth):
            x = _unit(net, x, width, i == 0, f"stage{stage}.{i}")
    x = net.conv_norm(x, last, name="last")
    return net.head(x, classes)


# -- GhostNet V1 and V2 ---------------------------------------------------------------------------
def ghost(
    net: Net, x: Value, features: int, act: str, name: str, ratio: int = 2, scale: float = 1.0
) -> Value:
    """Append a ghost module: 1 x 1 to a part of the features, the others depthwise from these."""
    own = math.ceil(features / ratio)
    first = net.conv_norm(x, own, act=act, scale=scale, name=f"{name}.primary")
    if ratio == 1:
        return first
    rest = net.conv_norm(first, own * (ratio - 1), 3, groups=own, act=act, name=f"{name}.cheap")
    both = net.concat(first, rest, axis=1)
    n, channels, h, w = both.shape
    if channels == features:
        return both
    return net.slice(both, begin=(0, 0, 0, 0), end=(n, features, h, w))


def _gated(net: Net, x: Value, y: Value, name: str) -> Value:
    """Append y times a gate of x at half the size, along rows and columns (DFC attention)."""
    c, size = y.shape[1], y.shape[2]
    g = net.avg_pool2d(x, kernel=2, stride=2)
    g = net.conv_norm(g, c, act="", name=f"{name}.point")
    for part, kernel in (("row", (1, 5)), ("column", (5, 1))):
        g = net.conv_norm(g, c, kernel, groups=c, act="", name=f"{name}.{part}")
    nearest = np.arange(size) * g.shape[2] // size
    return net.mul(y, net.resized(net.sigmoid(g), np.eye(g.shape[2])[nearest], name=f"{name}.up"))


def _ghost_bottleneck(
    net: Net, x: Value, row: tuple[int, ...], width: float, gated: bool, name: str
) -> Value:
    """Append two ghost modules, a depthwise layer between them where the size halves."""
    kernel, expanded, features, squeezes, stride = row
    inner, features = (rounded(n * width, 4) for n in (expanded, features))
    start, y = x, ghost(net, x, inner, "relu", f"{name}.ghost1")
    if gated:
        y = _gated(net, x, y, f"{name}.gate")
    if stride > 1:
        y = net.conv_norm(y, inner, kernel, stride=stride, groups=inner, act="", name=f"{name}.dw")
    if squeezes:
        y = net.squeeze_excite(y, rounded(inner / 4, 4), name=f"{name}.se", act="relu",
                               gate="hard_sigmoid")  # fmt: skip
    y = ghost(net, y, features, "", f"{name}.ghost2", scale=BRANCH)
    if stride > 1 or x.shape[1] != features:
        own = x.shape[1]
        start = net.conv_norm(x, own, kernel, stride=stride, groups=own, act="",
                              name=f"{name}.short.dw")  # fmt: skip
        start = net.conv_norm(start, features, act="", name=f"{name}.short")
    return net.add(start, y, name=f"{name}.add")


def _ghostnet(gates: bool, net: Net, x: Value, classes: int, width: float = 1.0) -> Value:
    """Return GhostNet (Han et al. 2020); V2 (Tang et al. 2022) gates all but two bottlenecks."""
    x = net.conv_norm(x, rounded(16 * width, 4), 3, stride=2, name="stem")
    for i, row in enumerate(GHOST):
        x = _ghost_bottleneck(net, x, row, width, gates and i > 1, f"block{i}")
    x = net.conv_norm(x, rounded(960 * width, 4), name="last")
    x = net.conv_act(net.global_avg_pool(x, name="pool"), 1280, name="head")
    return net.dense(net.flat(x), classes, name="classifier")


BUILDERS: tuple[Callable[..., Graph], ...] = (
    *(
        image_network(name=f"shufflenet_v1_{name}")(partial(_shufflenet_v1, *row))
        for name, row in SHUFFLE_V1.items()
    ),
    *(
        image_network(name=f"shufflenet_v2{name}")(partial(_shufflenet_v2, *row))
        for name, row in SHUFFLE_V2.items()
    ),
    image_network(scaled=True, name="ghostnet")(partial(_ghostnet, False)),
    image_network(scaled=True, name="ghostnet_v2")(partial(_ghostnet, True)),
)
