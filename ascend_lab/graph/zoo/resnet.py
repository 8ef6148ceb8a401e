"""ResNet-18 and ResNet-50 (He et al. 2016), as torchvision has them: stride in the 3 x 3 layer."""

from __future__ import annotations

from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.zoo.blocks import BRANCH, Net

WIDTHS = (64, 128, 256, 512)


def _shortcut(net: Net, x: Value, features: int, stride: int, name: str) -> Value:
    if stride == 1 and x.shape[1] == features:
        return x
    return net.conv_norm(x, features, 1, stride=stride, act="", name=f"{name}.downsample")


def _basic(net: Net, x: Value, width: int, stride: int, name: str) -> Value:
    """Two 3 x 3 convolutions beside a shortcut."""
    y = net.conv_norm(x, width, 3, stride=stride, name=f"{name}.1")
    y = net.conv_norm(y, width, 3, act="", scale=BRANCH, name=f"{name}.2")
    total = net.add(y, _shortcut(net, x, width, stride, name), name=f"{name}.add")
    return net.act(total, "relu", name=f"{name}.relu")


def _bottleneck(net: Net, x: Value, width: int, stride: int, name: str) -> Value:
    """1 x 1 down to `width`, 3 x 3, 1 x 1 up to 4 `width`, beside a shortcut."""
    y = net.conv_norm(x, width, 1, name=f"{name}.1")
    y = net.conv_norm(y, width, 3, stride=stride, name=f"{name}.2")
    y = net.conv_norm(y, 4 * width, 1, act="", scale=BRANCH, name=f"{name}.3")
    total = net.add(y, _shortcut(net, x, 4 * width, stride, name), name=f"{name}.add")
    return net.act(total, "relu", name=f"{name}.relu")


def _resnet(
    name: str, bottleneck: bool, depths: tuple[int, ...], batch: int, size: int, dtype: str,
    classes: int,
) -> Graph:  # fmt: skip
    net = Net(name, dtype)
    x = net.conv_norm(net.images(batch, 3, size), 64, 7, stride=2, name="stem")
    x = net.max_pool2d(x, kernel=3, stride=2, pad=1, name="stem.pool")
    block = _bottleneck if bottleneck else _basic
    for stage, (width, depth) in enumerate(zip(WIDTHS, depths, strict=True), 1):
        for i in range(depth):
            stride = 2 if stage > 1 and i == 0 else 1
            x = block(net, x, width, stride, f"layer{stage}.{i}")
    return net.finish(net.head(x, classes, name="fc"))


def resnet18(batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000) -> Graph:
    """Return ResNet-18: x (batch, 3, size, size) -> logits (batch, classes)."""
    return _resnet("resnet18", False, (2, 2, 2, 2), batch, size, dtype, classes)


def resnet50(batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000) -> Graph:
    """Return ResNet-50: x (batch, 3, size, size) -> logits (batch, classes)."""
    return _resnet("resnet50", True, (3, 4, 6, 3), batch, size, dtype, classes)
