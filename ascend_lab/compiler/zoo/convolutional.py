"""Builders of convolutional networks: AlexNet to DenseNet, ShuffleNet, GhostNet and U-Net.

For image sizes other than 224 the first fully connected layer of AlexNet and VGG has as many inputs
as the last feature map has numbers.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.ir import Graph
from ascend_lab.compiler.zoo.blocks import BRANCH, Net, family, image_network, rounded
from ascend_lab.errors import InputError

Block = Callable[[Net, Value, int, int, str], Value]


def _stem(net: Net, x: Value, features: int, kernel: int = 7) -> Value:
    """Append the convolution and the pooling with which many networks begin."""
    # 224 pixels: 112 after the convolution, 56 after the pooling
    x = net.conv_norm(x, features, kernel, stride=2, name="stem")
    return net.max_pool2d(x, kernel=3, stride=2, pad=1, name="stem.pool")


# -- chains: AlexNet, VGG-16, SqueezeNet 1.1 ------------------------------------------------------
def _classifier(net: Net, x: Value, classes: int) -> Value:
    """Append three fully connected layers; the dropout between them is for training only."""
    x = net.flat(x)
    for name in ("fc1", "fc2"):
        x = net.act(net.dense(x, 4096, name=name), "relu", name=f"{name}.relu")
    return net.dense(x, classes, name="fc3")


@image_network()
def alexnet(net: Net, x: Value, classes: int) -> Value:
    """Return AlexNet in Krizhevsky's version of 2014: no groups, no local response norm."""
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


FIRE_FEATURES = (
    (16, 64),
    (16, 64),
    (32, 128),
    (32, 128),
    (48, 192),
    (48, 192),
    (64, 256),
    (64, 256),
)
"""Features of SqueezeNet's fire modules: after the 1 x 1 that squeezes, of each of two branches."""


def _squeezenet(
    stem: tuple[int, int], pooled: tuple[int, ...], net: Net, x: Value, classes: int
) -> Value:
    """Return SqueezeNet (Iandola et al. 2016).

    `stem` is kernel and features of the first layer, `pooled` the fire modules after a pooling.
    """
    x = net.conv_act(x, stem[1], stem[0], stride=2, pad=(0, 0), name="conv1")
    for i, (squeezed, expanded) in enumerate(FIRE_FEATURES, 2):
        if i in pooled:
            x = net.pool_up(x, 3, 2, name=f"pool{i}")
        x = net.conv_act(x, squeezed, name=f"fire{i}.squeeze")
        # fire2: 16 features become 64 by 1 x 1 and 64 by 3 x 3, concatenated to 128
        sides = [net.conv_act(x, expanded, k, name=f"fire{i}.expand{k}") for k in (1, 3)]
        x = net.concat(*sides, axis=1, name=f"fire{i}.concat")
    x = net.conv_act(x, classes, name="classifier")
    return net.flat(net.global_avg_pool(x, name="pool"))


SQUEEZENETS = family(
    "squeezenet",
    _squeezenet,
    {
        "": ((3, 64), (2, 4, 6)),  # 1.1, the authors' cheaper version
        "_1_0": ((7, 96), (2, 5, 9)),
        "_1_1": ((3, 64), (2, 4, 6)),
    },
)


# -- residual: ResNet-18 and ResNet-50 (He et al. 2016), as torchvision has them ------------------
def _with_shortcut(net: Net, x: Value, y: Value, stride: int, name: str) -> Value:
    """Append ReLU(y + x) of a branch y and its input x, which a 1 x 1 brings to y's shape."""
    features = y.shape[1]
    if stride > 1 or x.shape[1] != features:
        x = net.conv_norm(x, features, 1, stride=stride, act="", name=f"{name}.downsample")
    return net.act(net.add(y, x, name=f"{name}.add"), "relu", name=f"{name}.relu")


def _basic_block(net: Net, x: Value, width: int, stride: int, name: str) -> Value:
    """Append two 3 x 3 convolutions with a shortcut around them."""
    y = net.conv_norm(x, width, 3, stride=stride, name=f"{name}.1")
    y = net.conv_norm(y, width, 3, act="", scale=BRANCH, name=f"{name}.2")
    return _with_shortcut(net, x, y, stride, name)


def _bottleneck(net: Net, x: Value, width: int, stride: int, name: str, groups: int = 1) -> Value:
    """Append 1 x 1 to `width` channels, 3 x 3, 1 x 1 to 4 `width`, and a shortcut.

    With `groups` the 3 x 3 convolution has 2 `width` channels in groups.
    """
    # ResNeXt-50 32x4d, width 64: 128 channels in 32 groups of 4.
    inner_width = width if groups == 1 else 2 * width
    y = net.conv_norm(x, inner_width, 1, name=f"{name}.1")
    y = net.conv_norm(y, inner_width, 3, stride=stride, groups=groups, name=f"{name}.2")
    y = net.conv_norm(y, 4 * width, 1, act="", scale=BRANCH, name=f"{name}.3")
    return _with_shortcut(net, x, y, stride, name)


def _stages(net: Net, x: Value, classes: int, depths: tuple[int, ...], block: Block) -> Value:
    """Append the stem, four stages of blocks of growing width, and the head."""
    x = _stem(net, x, 64)
    for stage, depth in enumerate(depths, 1):
        for i in range(depth):
            stride = 2 if stage > 1 and i == 0 else 1
            # widths 64, 128, 256, 512; every stage but the first halves the size
            x = block(net, x, 32 << stage, stride, f"layer{stage}.{i}")
    return net.head(x, classes, name="fc")


@image_network()
def resnet18(net: Net, x: Value, classes: int) -> Value:
    """Return ResNet-18: x (batch, 3, size, size) -> logits (batch, classes)."""
    return _stages(net, x, classes, (2, 2, 2, 2), _basic_block)


@image_network()
def resnet50(net: Net, x: Value, classes: int) -> Value:
    """Return ResNet-50, stride in the 3 x 3 layer: x (batch, 3, size, size) -> logits."""
    return _stages(net, x, classes, (3, 4, 6, 3), _bottleneck)


@image_network()
def resnext50(net: Net, x: Value, classes: int) -> Value:
    """Return ResNeXt-50 32x4d: ResNet-50 with 32 groups of 4 channels in its 3 x 3 layers."""
    return _stages(net, x, classes, (3, 4, 6, 3), partial(_bottleneck, groups=32))


# -- branches: GoogLeNet (Inception v1), DenseNet-121 ------------------------------
INCEPTION = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Features of the 1 x 1 branch, then of the reduction and the 3 x 3 of two branches, then of the
pooled branch."""


def _inception(net: Net, x: Value, widths: tuple[int, ...], name: str) -> Value:
    """Append four branches, concatenated: 1 x 1, two of 1 x 1 and 3 x 3, and pooled 1 x 1."""
    # 3a: 64 + 128 + 32 + 32 = 256 features
    features_1x1, reduce_a, a, reduce_b, b, pooled = widths

    def layer(y: Value, features: int, kernel: int, branch: str) -> Value:
        return net.conv_norm(y, features, kernel, name=f"{name}.{branch}")

    branches = (
        layer(x, features_1x1, 1, "1"),
        layer(layer(x, reduce_a, 1, "2a"), a, 3, "2b"),
        layer(layer(x, reduce_b, 1, "3a"), b, 3, "3b"),
        layer(net.max_pool2d(x, kernel=3, stride=1, pad=1, name=f"{name}.pool"), pooled, 1, "4"),
    )
    return net.concat(*branches, axis=1, name=f"{name}.concat")


@image_network()
def inception_v1(net: Net, x: Value, classes: int) -> Value:
    """Return GoogLeNet (Szegedy et al. 2015) as torchvision has it, without auxiliary heads.

    It differs from the paper: batch norms, and 3 x 3 where the paper has 5 x 5.
    """
    net.epsilon = 1e-3
    x = net.conv_norm(x, 64, 7, stride=2, name="conv1")
    x = net.pool_up(x, 3, 2, name="pool1")
    x = net.conv_norm(x, 64, 1, name="conv2")
    x = net.conv_norm(x, 192, 3, name="conv3")
    for name, widths in INCEPTION.items():
        if name in ("3a", "4a", "5a"):
            x = net.pool_up(x, 2 if name == "5a" else 3, 2, name=f"pool{name[0]}")
        x = _inception(net, x, widths, f"inception{name}")
    return net.head(x, classes)


# -- DenseNet -------------------------------------------------------------------------------------
def _norm_conv(net: Net, x: Value, features: int, kernel: int, name: str) -> Value:
    """Append batch norm, ReLU and a convolution without bias, in this order as in DenseNet."""
    x = net.act(net.norm(x, name=f"{name}.bn"), "relu", name=f"{name}.relu")
    return net.conv(x, features, kernel, bias=False, name=f"{name}.conv")


@image_network()
def densenet121(net: Net, x: Value, classes: int) -> Value:
    """Return DenseNet-121 (Huang et al. 2017): growth 32, blocks of 6, 12, 24, 16 layers."""
    x = _stem(net, x, 64)
    for block, depth in enumerate((6, 12, 24, 16), 1):
        if block > 1:
            # Block 1 of 6 layers ends with 64 + 6 * 32 = 256 channels; 128 go on.
            x = _norm_conv(net, x, x.shape[1] // 2, 1, f"transition{block - 1}")
            x = net.avg_pool2d(x, kernel=2, name=f"transition{block - 1}.pool")
        parts = [x]  # each layer reads all tensors before it, and adds 32 channels
        for i in range(depth):
            name = f"block{block}.{i}"
            y = net.concat(*parts, axis=1, name=f"{name}.concat") if i else x
            y = _norm_conv(net, y, 128, 1, f"{name}.1")
            parts.append(_norm_conv(net, y, 32, 3, f"{name}.2"))
        x = net.concat(*parts, axis=1, name=f"block{block}.concat")
    x = net.act(net.norm(x, name="last.bn"), "relu", name="last.relu")
    return net.head(x, classes)


# -- ShuffleNet V1 and V2 mix groups of channels, GhostNet V1 and V2 compute half of them cheaply --
SHUFFLE_DEPTHS = (4, 8, 4)
"""Units of the three stages of both ShuffleNets."""
SHUFFLE_V1 = {
    "g3_x0_5": (3, 12, (120, 240, 480)),
    "g3_x1_0": (3, 24, (240, 480, 960)),
    "g3_x1_5": (3, 24, (360, 720, 1440)),
    "g3_x2_0": (3, 48, (480, 960, 1920)),
    "g8_x0_5": (8, 16, (192, 384, 768)),
    "g8_x1_0": (8, 24, (384, 768, 1536)),
    "g8_x1_5": (8, 24, (576, 1152, 2304)),
    "g8_x2_0": (8, 48, (768, 1536, 3072)),
}
"""Groups, features of the stem and of the stages."""
SHUFFLE_V2 = {
    "": ((116, 232, 464), 1024),
    "_x0_5": ((48, 96, 192), 1024),
    "_x1_0": ((116, 232, 464), 1024),
    "_x1_5": ((176, 352, 704), 1024),
    "_x2_0": ((244, 488, 976), 2048),
}
"""Features of the three stages, and of the last convolution, by model."""
GHOST = (
    (3, 16, 16, 0, 1),
    (3, 48, 24, 0, 2),
    (3, 72, 24, 0, 1),
    (5, 72, 40, 1, 2),
    (5, 120, 40, 1, 1),
    (3, 240, 80, 0, 2),
    (3, 200, 80, 0, 1),
    (3, 184, 80, 0, 1),
    (3, 184, 80, 0, 1),
    (3, 480, 112, 1, 1),
    (3, 672, 112, 1, 1),
    (5, 672, 160, 1, 2),
    (5, 960, 160, 0, 1),
    (5, 960, 160, 1, 1),
    (5, 960, 160, 0, 1),
    (5, 960, 160, 1, 1),
)
"""Kernel, expanded channels, features, squeeze and excite (0 or 1), stride."""


# -- ShuffleNet V1 --------------------------------------------------------------------------------
def _shuffle_block_v1(
    net: Net, x: Value, features: int, groups: tuple[int, int], halves_size: bool, name: str
) -> Value:
    """Append 1 x 1 in groups, shuffle, depthwise, 1 x 1 in groups, and a shortcut.

    `groups` are those of the two 1 x 1. A block with `halves_size` concatenates the pooled input
    instead of adding the input.
    """
    reduce_groups, expand_groups = groups
    # 240 features: 60 channels between the two 1 x 1
    inner = features // 4
    y = net.conv_norm(x, inner, groups=reduce_groups, name=f"{name}.reduce")
    y = net.channel_shuffle(y, expand_groups, name=name)
    y = net.depthwise(y, stride=2 if halves_size else 1, name=f"{name}.depthwise")
    # the pooled input is concatenated below: only the other channels are computed here
    width = features - x.shape[1] if halves_size else features
    scale = 1.0 if halves_size else BRANCH
    y = net.conv_norm(y, width, groups=expand_groups, act="", scale=scale, name=f"{name}.expand")
    if not halves_size:
        return net.relu(net.add(x, y))
    y = net.relu(y)
    mean = net.avg_pool2d(x, kernel=3, stride=2, pad=1, count_include_pad=True)
    return net.concat(mean, y, axis=1)


def _shufflenet_v1(
    groups: int, stem: int, features: tuple[int, ...], net: Net, x: Value, classes: int
) -> Value:
    """Return ShuffleNet V1 (Zhang et al. 2018), in 3 or 8 groups."""
    x = _stem(net, x, stem, 3)
    for stage, (width, depth) in enumerate(zip(features, SHUFFLE_DEPTHS, strict=True), 2):
        for i in range(depth):
            # the stem has few channels: the first 1 x 1 has one group, as published
            reduced = 1 if stage == 2 and i == 0 else groups
            x = _shuffle_block_v1(net, x, width, (reduced, groups), i == 0, f"stage{stage}.{i}")
    return net.head(x, classes, bias=False)


# -- ShuffleNet V2 --------------------------------------------------------------------------------
def _separable(net: Net, x: Value, width: int, stride: int, name: str) -> Value:
    """Append a depthwise 3 x 3 without activation, then 1 x 1 to `width`."""
    x = net.depthwise(x, stride=stride, name=f"{name}.depthwise")
    return net.conv_norm(x, width, name=f"{name}.pointwise")


def _shuffle_block_v2(net: Net, x: Value, features: int, is_first: bool, name: str) -> Value:
    """Append a block: half the channels pass unchanged, half go through three layers.

    In the first block of a stage all channels go through both branches, which halve the size.
    """
    # 116 channels: 58 pass, 58 go through three layers.
    width = features // 2
    if is_first:
        left_branch = _separable(net, x, width, 2, f"{name}.left")
        right = x
    else:
        left_branch, right = net.split(x, sizes=2, axis=1)
    right = net.conv_norm(right, width, name=f"{name}.reduce")
    right = _separable(net, right, width, 2 if is_first else 1, f"{name}.right")
    return net.channel_shuffle(net.concat(left_branch, right, axis=1), 2, name=name)


def _shufflenet_v2(features: tuple[int, ...], last: int, net: Net, x: Value, classes: int) -> Value:
    """Return ShuffleNet V2 (Ma et al. 2018); a name without a width means x1.0."""
    x = _stem(net, x, 24, 3)
    for stage, (width, depth) in enumerate(zip(features, SHUFFLE_DEPTHS, strict=True), 2):
        for i in range(depth):
            x = _shuffle_block_v2(net, x, width, i == 0, f"stage{stage}.{i}")
    x = net.conv_norm(x, last, name="last")
    return net.head(x, classes)


# -- GhostNet V1 and V2 ---------------------------------------------------------------------------
def _ghost(net: Net, x: Value, features: int, act: str, name: str, scale: float = 1.0) -> Value:
    """Append a ghost module: 1 x 1 computes half of the features, depthwise filters the rest."""
    # 24 features: 12 by 1 x 1, and 12 by a depthwise filter on each of these
    primary_count = math.ceil(features / 2)
    primary = net.conv_norm(x, primary_count, act=act, scale=scale, name=f"{name}.primary")
    cheap = net.depthwise(primary, act=act, name=f"{name}.cheap")
    features_joined = net.concat(primary, cheap, axis=1)
    n, channels, h, w = features_joined.shape
    if channels == features:
        return features_joined
    return net.slice(features_joined, begin=(0, 0, 0, 0), end=(n, features, h, w))


def _gated(net: Net, x: Value, y: Value, name: str) -> Value:
    """Append y times a gate that is computed from x at half the size (DFC attention)."""
    c = y.shape[1]
    size = y.shape[2]
    g = net.avg_pool2d(x, kernel=2, stride=2)
    g = net.conv_norm(g, c, act="", name=f"{name}.point")
    for direction, kernel in (("row", (1, 5)), ("column", (5, 1))):
        g = net.depthwise(g, kernel, name=f"{name}.{direction}")
    # nearest-neighbour upsampling as a product with a matrix of ones and zeros
    # 4 pixels take the gates of pixels 0, 0, 1, 1
    nearest = np.arange(size) * g.shape[2] // size
    return net.mul(y, net.resized(net.sigmoid(g), np.eye(g.shape[2])[nearest], name=f"{name}.up"))


def _ghost_bottleneck(
    net: Net, x: Value, row: tuple[int, ...], width: float, gated: bool, name: str
) -> Value:
    """Append two ghost modules; a depthwise layer between them if the size is halved."""
    kernel, expanded, features, squeezes, stride = row
    inner, features = (rounded(n * width, 4) for n in (expanded, features))
    start = x
    y = _ghost(net, x, inner, "relu", f"{name}.ghost1")
    if gated:
        y = _gated(net, x, y, f"{name}.gate")
    if stride > 1:
        y = net.depthwise(y, kernel, stride=stride, name=f"{name}.dw")
    if squeezes:
        y = net.squeeze_excite(
            y, rounded(inner / 4, 4), name=f"{name}.se", act="relu", gate="hard_sigmoid"
        )
    y = _ghost(net, y, features, "", f"{name}.ghost2", scale=BRANCH)
    if stride > 1 or x.shape[1] != features:
        start = net.depthwise(x, kernel, stride=stride, name=f"{name}.short.dw")
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


SHUFFLED: tuple[Callable[..., Graph], ...] = (
    *family("shufflenet_v1_", _shufflenet_v1, SHUFFLE_V1),
    *family("shufflenet_v2", _shufflenet_v2, SHUFFLE_V2),
    *family("ghostnet", _ghostnet, {"": (False,), "_v2": (True,)}, scaled=True),
)


# -- U-Net: down, then up, with the features of each level concatenated ---------------------------
LEVELS = 4


def _two_convolutions(net: Net, x: Value, features: int, name: str) -> Value:
    x = net.conv_act(x, features, 3, name=f"{name}.1")
    return net.conv_act(x, features, 3, name=f"{name}.2")


def _upsampled(net: Net, x: Value, name: str) -> Value:
    """Append the transposed 2 x 2 convolution that doubles the size and halves the channels."""
    c = x.shape[1]
    # at stride 2 each output pixel is a sum over one tap of c channels: variance 1 / c
    weight = net.weight((c, c // 2, 2, 2), f"{name}.weight", scale=1 / math.sqrt(c))
    bias = net.seeded(f"{name}.bias", (c // 2,), 0.02)
    return net.conv_transpose2d(x, weight, bias, stride=2, name=name)


def unet(
    batch: int = 1,
    *,
    size: int = 256,
    dtype: str = "fp32",
    classes: int = 2,
    channels: int = 1,
    width: int = 64,
) -> Graph:
    """Return U-Net (Ronneberger et al. 2015): (batch, channels, size, size) -> scores.

    Convolutions are padded, as in most implementations; the paper crops instead, with the same
    parameters. `width` is the number of features of the first level. Raises `InputError` for a size
    that 16 does not divide.
    """
    if size % 2**LEVELS:
        raise InputError(f"unet: a size divisible by {2**LEVELS}", str(size), "pad the image")
    net = Net("unet", dtype)
    x = net.images(batch, channels, size)
    skips = []
    for level in range(LEVELS):
        # width 64: 64, 128, 256 and 512 features on the way down, 1024 at the lowest level
        x = _two_convolutions(net, x, width << level, f"down{level}")
        skips.append(x)
        x = net.max_pool2d(x, kernel=2, name=f"down{level}.pool")
    x = _two_convolutions(net, x, width << LEVELS, "bottom")
    for level in reversed(range(LEVELS)):
        x = _upsampled(net, x, f"up{level}")
        x = net.concat(skips[level], x, axis=1, name=f"up{level}.concat")
        x = _two_convolutions(net, x, width << level, f"up{level}")
    return net.finish(net.conv(x, classes, name="out"))
