"""Networks whose layers branch: GoogLeNet (Inception v1), DenseNet-121, ShuffleNet V2."""

from __future__ import annotations

from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.zoo.blocks import Net

INCEPTION = {
    "3a": (64, 96, 128, 16, 32, 32), "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64), "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64), "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128), "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}  # fmt: skip
"""Features of the 1 x 1 branch; two branches' reductions and features; of the pooled branch."""
EPSILON = 1e-3


def _inception(net: Net, x: Value, widths: tuple[int, ...], name: str) -> Value:
    """Append four branches side by side: 1 x 1, two reduced 3 x 3, pooled 1 x 1."""
    one, reduce_a, a, reduce_b, b, pooled = widths

    def layer(y: Value, features: int, kernel: int, part: str) -> Value:
        return net.conv_norm(y, features, kernel, epsilon=EPSILON, name=f"{name}.{part}")

    parts = (
        layer(x, one, 1, "1"),
        layer(layer(x, reduce_a, 1, "2a"), a, 3, "2b"),
        layer(layer(x, reduce_b, 1, "3a"), b, 3, "3b"),
        layer(net.max_pool2d(x, kernel=3, stride=1, pad=1, name=f"{name}.pool"), pooled, 1, "4"),
    )
    out: Value = net.concat(*parts, axis=1, name=f"{name}.concat")
    return out


def inception_v1(
    batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000
) -> Graph:
    """Return GoogLeNet (Szegedy et al. 2015) as torchvision has it, without auxiliary heads.

    It differs from the paper: batch norms, and 3 x 3 where the paper has 5 x 5.
    """
    net = Net("inception_v1", dtype)
    x = net.images(batch, 3, size)
    x = net.conv_norm(x, 64, 7, stride=2, epsilon=EPSILON, name="conv1")
    x = net.pool_up(x, 3, 2, name="pool1")
    x = net.conv_norm(x, 64, 1, epsilon=EPSILON, name="conv2")
    x = net.conv_norm(x, 192, 3, epsilon=EPSILON, name="conv3")
    for name, widths in INCEPTION.items():
        if name in ("3a", "4a", "5a"):
            x = net.pool_up(x, 2 if name == "5a" else 3, 2, name=f"pool{name[0]}")
        x = _inception(net, x, widths, f"inception{name}")
    return net.finish(net.head(x, classes))


# -- DenseNet -------------------------------------------------------------------------------------
def _norm_conv(net: Net, x: Value, features: int, kernel: int, name: str) -> Value:
    """Append batch norm, ReLU, convolution without bias: the order of DenseNet."""
    x = net.act(net.norm(x, name=f"{name}.bn"), "relu", name=f"{name}.relu")
    return net.conv(x, features, kernel, bias=False, name=f"{name}.conv")


def _dense_block(net: Net, x: Value, depth: int, growth: int, name: str) -> Value:
    """Append layers that each read all before them and add `growth` channels."""
    parts = [x]
    for i in range(depth):
        y = net.concat(*parts, axis=1, name=f"{name}.{i}.concat") if i else x
        y = _norm_conv(net, y, 4 * growth, 1, f"{name}.{i}.1")
        parts.append(_norm_conv(net, y, growth, 3, f"{name}.{i}.2"))
    out: Value = net.concat(*parts, axis=1, name=f"{name}.concat")
    return out


def densenet121(
    batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000
) -> Graph:
    """Return DenseNet-121 (Huang et al. 2017): growth 32, blocks of 6, 12, 24, 16 layers."""
    net = Net("densenet121", dtype)
    x = net.conv_norm(net.images(batch, 3, size), 64, 7, stride=2, name="stem")
    x = net.max_pool2d(x, kernel=3, stride=2, pad=1, name="stem.pool")
    for block, depth in enumerate((6, 12, 24, 16), 1):
        if block > 1:
            x = _norm_conv(net, x, x.shape[1] // 2, 1, f"transition{block - 1}")
            x = net.avg_pool2d(x, kernel=2, name=f"transition{block - 1}.pool")
        x = _dense_block(net, x, depth, 32, f"block{block}")
    x = net.act(net.norm(x, name="last.bn"), "relu", name="last.relu")
    return net.finish(net.head(x, classes))


# -- ShuffleNet -----------------------------------------------------------------------------------
def _shuffle(net: Net, parts: list[Value], name: str) -> Value:
    """Append concat and the channel shuffle of two groups: reshape, transpose, reshape."""
    x = net.concat(*parts, axis=1, name=f"{name}.concat")
    n, c, h, w = x.shape
    x = net.reshape(x, shape=(n, 2, c // 2, h, w), name=f"{name}.groups")
    x = net.transpose(x, perm=(0, 2, 1, 3, 4), name=f"{name}.turned")
    out: Value = net.reshape(x, shape=(n, c, h, w), name=f"{name}.shuffled")
    return out


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
        left, right = net.split(x, sizes=2, axis=1, name=f"{name}.split")
    right = net.conv_norm(right, width, name=f"{name}.reduce")
    right = _separable(net, right, width, 2 if first else 1, f"{name}.right")
    return _shuffle(net, [left, right], name)


def shufflenet_v2(
    batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000
) -> Graph:
    """Return ShuffleNet V2 x1.0 (Ma et al. 2018)."""
    net = Net("shufflenet_v2", dtype)
    x = net.conv_norm(net.images(batch, 3, size), 24, 3, stride=2, name="stem")
    x = net.max_pool2d(x, kernel=3, stride=2, pad=1, name="stem.pool")
    for stage, (features, depth) in enumerate(((116, 4), (232, 8), (464, 4)), 2):
        for i in range(depth):
            x = _unit(net, x, features, i == 0, f"stage{stage}.{i}")
    x = net.conv_norm(x, 1024, name="last")
    return net.finish(net.head(x, classes))
