"""Chains of convolutions: AlexNet, VGG-16, SqueezeNet 1.1.

At sizes other than 224 the first fully connected layer of AlexNet and VGG takes what is there.
"""

from __future__ import annotations

from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.zoo.blocks import Net


def _classifier(net: Net, x: Value, classes: int) -> Graph:
    """Append three fully connected layers; the dropout between them is for training only."""
    x = net.flat(x)
    for name in ("fc1", "fc2"):
        x = net.act(net.dense(x, 4096, name=name), "relu", name=f"{name}.relu")
    return net.finish(net.dense(x, classes, name="fc3"))


def alexnet(batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000) -> Graph:
    """Return AlexNet as Krizhevsky 2014 put it on one device: no groups, no LRN."""
    net = Net("alexnet", dtype)
    x = net.conv_act(net.images(batch, 3, size), 64, 11, stride=4, pad=(2, 2), name="conv1")
    x = net.max_pool2d(x, kernel=3, stride=2, name="pool1")
    x = net.conv_act(x, 192, 5, name="conv2")
    x = net.max_pool2d(x, kernel=3, stride=2, name="pool2")
    for i, features in enumerate((384, 256, 256), 3):
        x = net.conv_act(x, features, 3, name=f"conv{i}")
    return _classifier(net, net.pool_up(x, 3, 2, name="pool5"), classes)


def vgg16(batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000) -> Graph:
    """Return VGG-16 (Simonyan & Zisserman 2015), configuration D."""
    net = Net("vgg16", dtype)
    x = net.images(batch, 3, size)
    for stage, (features, depth) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), 1):
        for i in range(1, depth + 1):
            x = net.conv_act(x, features, 3, name=f"conv{stage}_{i}")
        x = net.max_pool2d(x, kernel=2, name=f"pool{stage}")
    return _classifier(net, x, classes)


def _fire(net: Net, x: Value, squeezed: int, expanded: int, name: str) -> Value:
    """Append 1 x 1 down to `squeezed`, then 1 x 1 and 3 x 3 side by side."""
    x = net.conv_act(x, squeezed, name=f"{name}.squeeze")
    sides = [net.conv_act(x, expanded, k, name=f"{name}.expand{k}") for k in (1, 3)]
    out: Value = net.concat(*sides, axis=1, name=f"{name}.concat")
    return out


def squeezenet(
    batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000
) -> Graph:
    """Return SqueezeNet 1.1 (Iandola et al. 2016; 1.1 is the authors' cheaper version)."""
    net = Net("squeezenet", dtype)
    x = net.conv_act(net.images(batch, 3, size), 64, 3, stride=2, pad=(0, 0), name="conv1")
    rows = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    for i, (squeezed, expanded) in enumerate(rows, 2):
        if i in (2, 4, 6):
            x = net.pool_up(x, 3, 2, name=f"pool{i}")
        x = _fire(net, x, squeezed, expanded, f"fire{i}")
    x = net.conv_act(x, classes, name="classifier")
    return net.finish(net.flat(net.global_avg_pool(x, name="pool")))
