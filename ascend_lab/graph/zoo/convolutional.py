"""Convolutional networks: chains, residual, branching, depthwise, and U-Net.

A depthwise convolution is a `conv2d` with as many groups as channels; which kernel computes it is
for the compiler to choose. At sizes other than 224 the first fully connected layer of AlexNet and
VGG takes what is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ascend_lab.errors import InputError
from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.zoo.blocks import BRANCH, Net, image_network

Block = Callable[[Net, Value, int, int, str], Value]


# -- chains: AlexNet, VGG-16, SqueezeNet 1.1 ------------------------------------------------------
def _classifier(net: Net, x: Value, classes: int) -> Value:
    """Append three fully connected layers; the dropout between them is for training only."""
    x = net.flat(x)
    for name in ("fc1", "fc2"):
        x = net.act(net.dense(x, 4096, name=name), "relu", name=f"{name}.relu")
    return net.dense(x, classes, name="fc3")


@image_network()
def alexnet(net: Net, x: Value, classes: int) -> Value:
    """Return AlexNet as Krizhevsky 2014 put it on one device: no groups, no LRN."""
    x = net.conv_act(x, 64, 11, stride=4, pad=(2, 2), name="conv1")
    x = net.max_pool2d(x, kernel=3, stride=2, name="pool1")
    x = net.conv_act(x, 192, 5, name="conv2")
    x = net.max_pool2d(x, kernel=3, stride=2, name="pool2")
    for i, features in enumerate((384, 256, 256), 3):
        x = net.conv_act(x, features, 3, name=f"conv{i}")
    return _classifier(net, net.pool_up(x, 3, 2, name="pool5"), classes)


@image_network()
def vgg16(net: Net, x: Value, classes: int) -> Value:
    """Return VGG-16 (Simonyan & Zisserman 2015), configuration D."""
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


@image_network()
def squeezenet(net: Net, x: Value, classes: int) -> Value:
    """Return SqueezeNet 1.1 (Iandola et al. 2016; 1.1 is the authors' cheaper version)."""
    x = net.conv_act(x, 64, 3, stride=2, pad=(0, 0), name="conv1")
    rows = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    for i, (squeezed, expanded) in enumerate(rows, 2):
        if i in (2, 4, 6):
            x = net.pool_up(x, 3, 2, name=f"pool{i}")
        x = _fire(net, x, squeezed, expanded, f"fire{i}")
    x = net.conv_act(x, classes, name="classifier")
    return net.flat(net.global_avg_pool(x, name="pool"))


# -- residual: ResNet-18 and ResNet-50 (He et al. 2016), as torchvision has them ------------------
def _joined(net: Net, x: Value, y: Value, stride: int, name: str) -> Value:
    """Append the sum of a branch y and its start x, brought to the same size, and ReLU."""
    features = y.shape[1]
    if stride > 1 or x.shape[1] != features:
        x = net.conv_norm(x, features, 1, stride=stride, act="", name=f"{name}.downsample")
    return net.act(net.add(y, x, name=f"{name}.add"), "relu", name=f"{name}.relu")


def _basic(net: Net, x: Value, width: int, stride: int, name: str) -> Value:
    """Two 3 x 3 convolutions beside a shortcut."""
    y = net.conv_norm(x, width, 3, stride=stride, name=f"{name}.1")
    y = net.conv_norm(y, width, 3, act="", scale=BRANCH, name=f"{name}.2")
    return _joined(net, x, y, stride, name)


def _bottleneck(net: Net, x: Value, width: int, stride: int, name: str) -> Value:
    """1 x 1 down to `width`, 3 x 3, 1 x 1 up to 4 `width`, beside a shortcut."""
    y = net.conv_norm(x, width, 1, name=f"{name}.1")
    y = net.conv_norm(y, width, 3, stride=stride, name=f"{name}.2")
    y = net.conv_norm(y, 4 * width, 1, act="", scale=BRANCH, name=f"{name}.3")
    return _joined(net, x, y, stride, name)


def _stages(net: Net, x: Value, classes: int, depths: tuple[int, ...], block: Block) -> Value:
    """Append the stem, four stages of blocks of growing width, and the head."""
    x = net.conv_norm(x, 64, 7, stride=2, name="stem")
    x = net.max_pool2d(x, kernel=3, stride=2, pad=1, name="stem.pool")
    for stage, depth in enumerate(depths, 1):
        for i in range(depth):
            stride = 2 if stage > 1 and i == 0 else 1
            x = block(net, x, 32 << stage, stride, f"layer{stage}.{i}")
    return net.head(x, classes, name="fc")


@image_network()
def resnet18(net: Net, x: Value, classes: int) -> Value:
    """Return ResNet-18: x (batch, 3, size, size) -> logits (batch, classes)."""
    return _stages(net, x, classes, (2, 2, 2, 2), _basic)


@image_network()
def resnet50(net: Net, x: Value, classes: int) -> Value:
    """Return ResNet-50, stride in the 3 x 3 layer: x (batch, 3, size, size) -> logits."""
    return _stages(net, x, classes, (3, 4, 6, 3), _bottleneck)


# -- branches: GoogLeNet (Inception v1), DenseNet-121, ShuffleNet V2 ------------------------------
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


@image_network()
def inception_v1(net: Net, x: Value, classes: int) -> Value:
    """Return GoogLeNet (Szegedy et al. 2015) as torchvision has it, without auxiliary heads.

    It differs from the paper: batch norms, and 3 x 3 where the paper has 5 x 5.
    """
    x = net.conv_norm(x, 64, 7, stride=2, epsilon=EPSILON, name="conv1")
    x = net.pool_up(x, 3, 2, name="pool1")
    x = net.conv_norm(x, 64, 1, epsilon=EPSILON, name="conv2")
    x = net.conv_norm(x, 192, 3, epsilon=EPSILON, name="conv3")
    for name, widths in INCEPTION.items():
        if name in ("3a", "4a", "5a"):
            x = net.pool_up(x, 2 if name == "5a" else 3, 2, name=f"pool{name[0]}")
        x = _inception(net, x, widths, f"inception{name}")
    return net.head(x, classes)


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


@image_network()
def densenet121(net: Net, x: Value, classes: int) -> Value:
    """Return DenseNet-121 (Huang et al. 2017): growth 32, blocks of 6, 12, 24, 16 layers."""
    x = net.conv_norm(x, 64, 7, stride=2, name="stem")
    x = net.max_pool2d(x, kernel=3, stride=2, pad=1, name="stem.pool")
    for block, depth in enumerate((6, 12, 24, 16), 1):
        if block > 1:
            x = _norm_conv(net, x, x.shape[1] // 2, 1, f"transition{block - 1}")
            x = net.avg_pool2d(x, kernel=2, name=f"transition{block - 1}.pool")
        x = _dense_block(net, x, depth, 32, f"block{block}")
    x = net.act(net.norm(x, name="last.bn"), "relu", name="last.relu")
    return net.head(x, classes)


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


@image_network()
def shufflenet_v2(net: Net, x: Value, classes: int) -> Value:
    """Return ShuffleNet V2 x1.0 (Ma et al. 2018)."""
    x = net.conv_norm(x, 24, 3, stride=2, name="stem")
    x = net.max_pool2d(x, kernel=3, stride=2, pad=1, name="stem.pool")
    for stage, (features, depth) in enumerate(((116, 4), (232, 8), (464, 4)), 2):
        for i in range(depth):
            x = _unit(net, x, features, i == 0, f"stage{stage}.{i}")
    x = net.conv_norm(x, 1024, name="last")
    return net.head(x, classes)


# -- depthwise: MobileNet V1, V2, V3 (large), EfficientNet-B0 -------------------------------------
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


@image_network()
def mobilenet_v1(net: Net, x: Value, classes: int) -> Value:
    """Return MobileNet V1 (Howard et al. 2017), width 1.0."""
    x = net.conv_norm(x, 32, 3, stride=2, name="stem")
    for i, (features, stride) in enumerate(V1, 1):
        width = x.shape[1]
        x = net.conv_norm(x, width, 3, stride=stride, groups=width, name=f"layer{i}.depthwise")
        x = net.conv_norm(x, features, name=f"layer{i}.pointwise")
    return net.head(x, classes)


@image_network()
def mobilenet_v2(net: Net, x: Value, classes: int) -> Value:
    """Return MobileNet V2 (Sandler et al. 2018), width 1.0."""
    x = net.conv_norm(x, 32, 3, stride=2, act="relu6", name="stem")
    for stage, (expansion, features, depth, first) in enumerate(V2, 1):
        for i in range(depth):
            block = Inverted(x.shape[1] * expansion, features, stride=first if i == 0 else 1)
            x = inverted(net, x, block, f"stage{stage}.{i}")
    x = net.conv_norm(x, 1280, act="relu6", name="last")
    return net.head(x, classes)


@image_network()
def mobilenet_v3_large(net: Net, x: Value, classes: int) -> Value:
    """Return MobileNet V3 large (Howard et al. 2019)."""
    eps = 1e-3
    x = net.conv_norm(x, 16, 3, stride=2, act="hard_swish", epsilon=eps, name="stem")
    for i, (kernel, expanded, features, squeezed, act, stride) in enumerate(V3_LARGE, 1):
        block = Inverted(expanded, features, kernel, stride, act, squeezed, epsilon=eps)
        x = inverted(net, x, block, f"block{i}")
    x = net.conv_norm(x, 960, act="hard_swish", epsilon=eps, name="last")
    x = net.act(net.head(x, 1280, name="fc1"), "hard_swish", name="fc1.act")
    return net.dense(x, classes, name="fc2")


@image_network()
def efficientnet_b0(net: Net, x: Value, classes: int) -> Value:
    """Return EfficientNet-B0 (Tan & Le 2019); squeeze and excite to a quarter of the input."""
    x = net.conv_norm(x, 32, 3, stride=2, act="silu", name="stem")
    for stage, (expansion, kernel, first, features, depth) in enumerate(B0, 1):
        for i in range(depth):
            width = x.shape[1]
            block = Inverted(width * expansion, features, kernel, first if i == 0 else 1, "silu",
                             width // 4, "silu", "sigmoid")  # fmt: skip
            x = inverted(net, x, block, f"stage{stage}.{i}")
    x = net.conv_norm(x, 1280, act="silu", name="last")
    return net.head(x, classes)


# -- U-Net: down, up, and the features of each level joined on the way up -------------------------
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
    """Return U-Net (Ronneberger et al. 2015): (batch, channels, size, size) -> scores.

    Convolutions are padded, as most users have them; the paper's are not, and crop instead: the
    parameters are the same. `width` is the features of the first level. Raises `InputError` unless
    16 divides the size.
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
