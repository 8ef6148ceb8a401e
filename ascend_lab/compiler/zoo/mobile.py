"""Builders of mobile networks: MobileNet V1 to V4, MnasNet, EfficientNet V1 and V2.

Nearly all consist of inverted residuals: a 1 x 1 convolution to more channels, a depthwise one, and
a 1 x 1 back to few. Each row of a table describes such a block. A depthwise convolution is a
`conv2d` with as many groups as channels; the compiler chooses its kernel. A width scales the
channels of every row and rounds them to multiples of 8.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.ir import Graph
from ascend_lab.compiler.zoo.blocks import BRANCH, Net, family, image_network, rounded

Rows = tuple[tuple[int, ...], ...]

MOBILENET_V1 = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)
"""Features and stride of each depthwise-separable layer."""
MOBILENET_V2: Rows = (
    (3, 1, 16, 1, 1),
    (3, 6, 24, 2, 2),
    (3, 6, 32, 3, 2),
    (3, 6, 64, 4, 2),
    (3, 6, 96, 3, 1),
    (3, 6, 160, 3, 2),
    (3, 6, 320, 1, 1),
)
"""In this and all tables of `Rows`: kernel, expansion, features, blocks, stride of the first."""
RELU = "relu"
HARD_SWISH = "hard_swish"
MOBILENET_V3_LARGE = (
    (3, 16, 16, 0, RELU, 1),
    (3, 64, 24, 0, RELU, 2),
    (3, 72, 24, 0, RELU, 1),
    (5, 72, 40, 1, RELU, 2),
    *((5, 120, 40, 1, RELU, 1),) * 2,
    (3, 240, 80, 0, HARD_SWISH, 2),
    (3, 200, 80, 0, HARD_SWISH, 1),
    *((3, 184, 80, 0, HARD_SWISH, 1),) * 2,
    (3, 480, 112, 1, HARD_SWISH, 1),
    (3, 672, 112, 1, HARD_SWISH, 1),
    (5, 672, 160, 1, HARD_SWISH, 2),
    *((5, 960, 160, 1, HARD_SWISH, 1),) * 2,
)
"""Kernel, expanded channels, features, squeeze and excite (0 or 1), activation, stride."""
MOBILENET_V3_SMALL = (
    (3, 16, 16, 1, RELU, 2),
    (3, 72, 24, 0, RELU, 2),
    (3, 88, 24, 0, RELU, 1),
    (5, 96, 40, 1, HARD_SWISH, 2),
    *((5, 240, 40, 1, HARD_SWISH, 1),) * 2,
    (5, 120, 48, 1, HARD_SWISH, 1),
    (5, 144, 48, 1, HARD_SWISH, 1),
    (5, 288, 96, 1, HARD_SWISH, 2),
    *((5, 576, 96, 1, HARD_SWISH, 1),) * 2,
)
MNASNET_B1: Rows = (
    (3, 3, 24, 3, 2),
    (5, 3, 40, 3, 2),
    (5, 6, 80, 3, 2),
    (3, 6, 96, 2, 1),
    (5, 6, 192, 4, 2),
    (3, 6, 320, 1, 1),
)
EFFICIENTNET_B0: Rows = (
    (3, 1, 16, 1, 1),
    (3, 6, 24, 2, 2),
    (5, 6, 40, 2, 2),
    (3, 6, 80, 3, 2),
    (5, 6, 112, 3, 1),
    (5, 6, 192, 4, 2),
    (3, 6, 320, 1, 1),
)
EFFICIENTNET_SCALES = (
    (1.0, 1.0, 224),
    (1.0, 1.1, 240),
    (1.1, 1.2, 260),
    (1.2, 1.4, 300),
    (1.4, 1.8, 380),
    (1.6, 2.2, 456),
    (1.8, 2.6, 528),
    (2.0, 3.1, 600),
)
"""Width, depth and pixels of EfficientNet B0 to B7, from the authors' table."""
EFFICIENTNET_V2: dict[str, Rows] = {
    "s": (
        (0, 1, 24, 2, 1),
        (0, 4, 48, 4, 2),
        (0, 4, 64, 4, 2),
        (3, 4, 128, 6, 2),
        (3, 6, 160, 9, 1),
        (3, 6, 256, 15, 2),
    ),
    "m": (
        (0, 1, 24, 3, 1),
        (0, 4, 48, 5, 2),
        (0, 4, 80, 5, 2),
        (3, 4, 160, 7, 2),
        (3, 6, 176, 14, 1),
        (3, 6, 304, 18, 2),
        (3, 6, 512, 5, 1),
    ),
    "l": (
        (0, 1, 32, 4, 1),
        (0, 4, 64, 7, 2),
        (0, 4, 96, 7, 2),
        (3, 4, 192, 10, 2),
        (3, 6, 224, 19, 1),
        (3, 6, 384, 25, 2),
        (3, 6, 640, 7, 1),
    ),
    "b": (
        (0, 1, 16, 1, 1),
        (0, 4, 32, 2, 2),
        (0, 4, 48, 2, 2),
        (3, 4, 96, 3, 2),
        (3, 6, 112, 5, 1),
        (3, 6, 192, 8, 2),
    ),
}
"""Rows of EfficientNet V2 by model; a kernel of 0 means a fused residual, a 3 x 3 convolution."""
EFFICIENTNET_V2_SCALES = {
    "s": (1.0, 1.0, 384),
    "m": (1.0, 1.0, 480),
    "l": (1.0, 1.0, 480),
    "b0": (1.0, 1.0, 224),
    "b1": (1.0, 1.1, 240),
    "b2": (1.1, 1.2, 260),
    "b3": (1.2, 1.4, 300),
}
"""Width, depth and pixels of EfficientNet V2; B1 to B3 scale B0."""


@dataclass(frozen=True, slots=True)
class Inverted:
    """An inverted residual: 1 x 1 to `expanded` channels, depthwise, 1 x 1 to `features`.

    act          activation after the first two convolutions
    squeezed     channels between the two layers of squeeze and excite; 0: the block has none
    squeeze_act  activation between these layers
    gate         activation of the factors that they compute
    """

    expanded: int
    features: int
    kernel: int = 3
    stride: int = 1
    act: str = "relu6"
    squeezed: int = 0
    squeeze_act: str = "relu"
    gate: str = "hard_sigmoid"


def inverted(net: Net, x: Value, block: Inverted, name: str) -> Value:
    """Append an inverted residual; its input is added where size and channels stay the same."""
    start = x
    channels = x.shape[1]
    # an expansion of 1, as in the first stage, needs no 1 x 1 convolution in front
    if block.expanded != channels:
        x = net.conv_norm(x, block.expanded, act=block.act, name=f"{name}.expand")
    x = net.depthwise(x, block.kernel, stride=block.stride, act=block.act, name=f"{name}.depthwise")
    if block.squeezed:
        x = net.squeeze_excite(
            x, block.squeezed, name=f"{name}.se", act=block.squeeze_act, gate=block.gate
        )
    # input and result can be added only if they have the same shape
    keeps_shape = block.stride == 1 and channels == block.features
    x = net.conv_norm(
        x,
        block.features,
        act="",
        scale=BRANCH if keeps_shape else 1.0,
        name=f"{name}.project",
    )
    return net.add(start, x, name=f"{name}.add") if keeps_shape else x


def fused_residual(net: Net, x: Value, block: Inverted, name: str) -> Value:
    """Append an inverted residual whose first two convolutions are merged into one 3 x 3.

    A block that does not expand is a single 3 x 3 convolution.
    """
    start = x
    keeps_shape = block.stride == 1 and x.shape[1] == block.features
    scale = BRANCH if keeps_shape else 1.0
    settings: dict[str, Any] = {"stride": block.stride, "act": block.act}
    if block.expanded == x.shape[1]:
        x = net.conv_norm(x, block.features, 3, scale=scale, name=f"{name}.conv", **settings)
    else:
        x = net.conv_norm(x, block.expanded, 3, name=f"{name}.expand", **settings)
        x = net.conv_norm(x, block.features, act="", scale=scale, name=f"{name}.project")
    return net.add(start, x, name=f"{name}.add") if keeps_shape else x


def _inverted_stages(
    net: Net,
    x: Value,
    rows: Rows,
    scale_channels: Callable[[int], int],
    act: str = "relu6",
    squeezes: bool = False,
) -> Value:
    """Append stages of inverted residuals, whose channels `scale_channels` scales.

    With `squeezes`, blocks squeeze and excite, with a quarter of the channels of a block's input.
    """
    for stage, (kernel, expansion, features, blocks, first_stride) in enumerate(rows, 1):
        for i in range(blocks):
            channels = x.shape[1]
            # only the first block of a stage changes the size: four blocks with stride 2 have the
            # strides 2, 1, 1, 1
            stride = first_stride if i == 0 else 1
            name = f"stage{stage}.{i}"
            block = Inverted(
                expanded=channels * expansion,
                features=scale_channels(features),
                kernel=kernel,
                stride=stride,
                act=act,
                squeezed=channels // 4 if squeezes else 0,
                squeeze_act="silu",
                gate="sigmoid",
            )
            append = inverted if kernel else fused_residual
            x = append(net, x, block, name)
    return x


# -- MobileNet V1, V2, MnasNet --------------------------------------------------------------------
@image_network(scaled=True)
def mobilenet_v1(net: Net, x: Value, classes: int, width: float = 1.0) -> Value:
    """Return MobileNet V1 (Howard et al. 2017)."""
    x = net.conv_norm(x, rounded(32 * width), 3, stride=2, name="stem")
    for i, (features, stride) in enumerate(MOBILENET_V1, 1):
        x = net.depthwise(x, stride=stride, act=RELU, name=f"layer{i}.depthwise")
        x = net.conv_norm(x, rounded(features * width), name=f"layer{i}.pointwise")
    return net.head(x, classes)


@image_network(scaled=True)
def mobilenet_v2(net: Net, x: Value, classes: int, width: float = 1.0) -> Value:
    """Return MobileNet V2 (Sandler et al. 2018).

    A width below 1 does not make its last convolution narrower than 1280 features.
    """
    x = net.conv_norm(x, rounded(32 * width), 3, stride=2, act="relu6", name="stem")
    x = _inverted_stages(net, x, MOBILENET_V2, lambda channels: rounded(channels * width))
    x = net.conv_norm(x, rounded(1280 * max(1.0, width)), act="relu6", name="last")
    return net.head(x, classes)


@image_network(scaled=True)
def mnasnet(net: Net, x: Value, classes: int, width: float = 1.0) -> Value:
    """Return MnasNet-B1 (Tan et al. 2019), without squeeze and excite."""
    x = net.conv_norm(x, rounded(32 * width), 3, stride=2, name="stem")
    x = net.depthwise(x, act=RELU, name="first.depthwise")
    x = net.conv_norm(x, rounded(16 * width), act="", name="first.project")
    x = _inverted_stages(net, x, MNASNET_B1, lambda channels: rounded(channels * width), act=RELU)
    return net.head(net.conv_norm(x, 1280, name="last"), classes)


# -- MobileNet V3 ---------------------------------------------------------------------------------
MobileNetV3Rows = tuple[tuple[int, int, int, int, str, int], ...]


def _mobilenet_v3(
    rows: MobileNetV3Rows, hidden: int, net: Net, x: Value, classes: int, width: float = 1.0
) -> Value:
    """Return MobileNet V3 (Howard et al. 2019) with `hidden` features in its first dense layer.

    A width changes neither that layer nor a row's ratio of expansion; a width below 0.75 does not
    change the first convolution (the stem) either.
    """
    net.epsilon = 1e-3
    last_features = 16
    stem = rounded(16 * width) if width >= 0.75 else 16
    x = net.conv_norm(x, stem, 3, stride=2, act=HARD_SWISH, name="stem")
    for i, (kernel, expanded, features, squeezes, act, stride) in enumerate(rows, 1):
        # a row's ratio, as 64 / 16 = 4, times the channels of the scaled network
        inner = rounded(x.shape[1] * expanded / last_features)
        last_features = features
        block = Inverted(
            expanded=inner,
            features=rounded(features * width),
            kernel=kernel,
            stride=stride,
            act=act,
            squeezed=rounded(inner / 4) if squeezes else 0,
        )
        x = inverted(net, x, block, f"block{i}")
    # 160 features become 960
    x = net.conv_norm(x, rounded(6 * last_features * width), act=HARD_SWISH, name="last")
    x = net.act(net.head(x, hidden, name="fc1"), HARD_SWISH, name="fc1.act")
    return net.dense(x, classes, name="fc2")


MOBILENETS_V3 = family(
    "mobilenet_v3_",
    _mobilenet_v3,
    {"large": (MOBILENET_V3_LARGE, 1280), "small": (MOBILENET_V3_SMALL, 1024)},
    scaled=True,
)


# -- EfficientNet V1 and V2 -----------------------------------------------------------------------
def _efficientnet(
    rows: Rows, scales: tuple[float, float], most_lost: float, net: Net, x: Value, classes: int
) -> Value:
    """Return EfficientNet (Tan & Le 2019, 2021), `scales` times as wide and deep as its rows.

    Rounding channels to multiples of 8 loses at most the share `most_lost` of them.
    """
    width, depth = scales

    def scaled(channels: int) -> int:
        # B2, width 1.1: 32 * 1.1 = 35.2 becomes 32, which loses 9 %, less than a tenth.
        return rounded(channels * width, most_lost=most_lost)

    # The stem has 32 channels, as published. In V2 s, m and l the first row has several blocks, and
    # the stem has as many channels as this row: 24 in V2 s.
    (_, _, first_features, first_blocks, _) = rows[0]
    stem_features = first_features if first_blocks > 1 else 32
    x = net.conv_norm(x, scaled(stem_features), 3, stride=2, act="silu", name="stem")
    # a depth of 1.1 makes 2 blocks 3: rounded up, as published
    deep_rows = tuple((*row[:3], math.ceil(row[3] * depth), row[4]) for row in rows)
    x = _inverted_stages(net, x, deep_rows, scaled, "silu", True)
    x = net.conv_norm(x, scaled(1280), act="silu", name="last")
    return net.head(x, classes)


EFFICIENTNETS = (
    *(
        image_network(size=size, name=f"efficientnet_b{i}")(
            partial(_efficientnet, EFFICIENTNET_B0, (width, depth), 0.1)
        )
        for i, (width, depth, size) in enumerate(EFFICIENTNET_SCALES)
    ),
    *(
        image_network(size=size, name=f"efficientnet_v2_{name}")(
            partial(_efficientnet, EFFICIENTNET_V2[name[0]], (width, depth), 1.0)
        )
        for name, (width, depth, size) in EFFICIENTNET_V2_SCALES.items()
    ),
)


# -- MobileNet V4 ---------------------------------------------------------------------------------
# A network is its pixels, the channels of its stem, and its stages as text, one "features: blocks"
# for each stage; the first block of a stage has stride 2.
#
#     a/m/e     inverted residual: kernels of the first and the middle depthwise layer (0: none),
#               and the expansion
#     c3, c1    a 3 x 3 or 1 x 1 convolution
#     f3        a fused residual of expansion 4
#     q4/64/2   attention with 4 heads of 64 channels, which share keys and values of half the size
#
# The features "96-64" are 96 for the first block and 64 after c1.
MOBILENET_V4: dict[str, tuple[int, int, str]] = {
    "conv_small": (
        224,
        32,
        (
            "32: c3 c1 | 96-64: c3 c1 | 96: 5/5/3 0/3/2*4 3/0/4 | "
            "128: 3/3/6 5/5/4 0/5/4 0/5/3 0/3/4*2"
        ),
    ),
    "conv_medium": (
        224,
        32,
        (
            "48: f3 | 80: 3/5/4 3/3/2 | "
            "160: 3/5/6 3/3/4*2 3/5/4 3/3/4 3/0/4 0/0/2 3/0/4 | "
            "256: 5/5/6 5/5/4 3/5/4*2 0/0/4 3/0/4 3/5/2 5/5/4 0/0/4*2 5/0/2"
        ),
    ),
    "conv_large": (
        256,
        24,
        (
            "48: f3 | 96: 3/5/4 3/3/4 | 192: 3/5/4 3/3/4*3 3/5/4 5/3/4*5 3/0/4 | "
            "512: 5/5/4*4 5/0/4 5/3/4 5/0/4*2 5/3/4 5/5/4 5/0/4*3"
        ),
    ),
    "hybrid_medium": (
        224,
        32,
        (
            "48: f3 | 80: 3/5/4 3/3/2 | 160: 3/5/6 0/0/2 3/3/4 3/5/4 q4/64/2 "
            "3/3/4 q4/64/2 3/0/4 q4/64/2 3/3/4 q4/64/2 3/0/4 | 256: 5/5/6 5/5/4 "
            "3/5/4*2 0/0/2 3/5/2 0/0/2 0/0/4 q4/64/1 3/0/4 q4/64/1 5/5/4 q4/64/1 5/0/4 "
            "q4/64/1 5/0/4"
        ),
    ),
    "hybrid_large": (
        384,
        24,
        (
            "48: f3 | 96: 3/5/4 3/3/4 | 192: 3/5/4 3/3/4*3 3/5/4 5/3/4*2 "
            "q8/48/2 5/3/4 q8/48/2 5/3/4 q8/48/2 5/3/4 q8/48/2 3/0/4 | 512: 5/5/4*4 5/0/4 "
            "5/3/4 5/0/4*2 5/3/4 5/5/4 q8/64/1 5/0/4 q8/64/1 5/0/4 q8/64/1 5/0/4 q8/64/1 "
            "5/0/4"
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class _Universal:
    """A universal inverted bottleneck, which `MOBILENET_V4` writes as a/m/e.

    3/5/4 is depthwise 3 x 3, 1 x 1 to 4 times the channels, depthwise 5 x 5 and 1 x 1 back; 0/0/2
    has only the two 1 x 1 convolutions. Hybrid models, which have attention, scale each branch by a
    parameter per channel.
    """

    first_kernel: int
    middle_kernel: int
    expansion: int
    features: int
    stride: int
    is_hybrid: bool


def _universal_of(text: str, features: int, stride: int, is_hybrid: bool) -> _Universal:
    """Return the bottleneck of a text such as "3/5/4"."""
    (first_kernel, middle_kernel, expansion) = (int(n) for n in text.split("/"))
    return _Universal(first_kernel, middle_kernel, expansion, features, stride, is_hybrid)


def _universal(net: Net, x: Value, block: _Universal, name: str) -> Value:
    """Append a universal inverted bottleneck."""
    start = x
    channels = x.shape[1]
    has_shortcut = block.stride == 1 and channels == block.features
    if block.first_kernel:
        # the middle layer has the stride if there is one: the first layer then keeps all pixels
        first_stride = 1 if block.middle_kernel else block.stride
        x = net.depthwise(x, block.first_kernel, stride=first_stride, name=f"{name}.first")
    x = net.conv_norm(x, rounded(channels * block.expansion), name=f"{name}.expand")
    if block.middle_kernel:
        x = net.depthwise(
            x, block.middle_kernel, stride=block.stride, act=RELU, name=f"{name}.middle"
        )
    scale = BRANCH if has_shortcut and not block.is_hybrid else 1.0
    x = net.conv_norm(x, block.features, act="", scale=scale, name=f"{name}.project")
    if block.is_hybrid and has_shortcut:
        return net.branch(start, x, name=name)
    if block.is_hybrid:
        deviation = 0.02
        mean = 1.0
        gamma = net.seeded(f"{name}.gamma", (1, block.features, 1, 1), deviation, mean)
        x = net.mul(x, gamma, name=f"{name}.scale")
    return net.add(start, x, name=f"{name}.add") if has_shortcut else x


def _multi_query(net: Net, x: Value, text: str, name: str) -> Value:
    """Append attention whose heads share one map of keys and one of values."""
    # "4/64/2": 4 heads of 64 channels, keys and values at half the size.
    heads, depth, stride = (int(n) for n in text.split("/"))
    n, c, h, w = x.shape
    y = net.norm(x, name=f"{name}.bn")
    query_map = net.conv(y, heads * depth, bias=False, name=f"{name}.q")
    keys, values = (_shared_map(net, y, depth, stride, f"{name}.{part}") for part in "kv")
    # the heads' queries become rows of one matrix: all share the keys
    by_head = net.reshape(query_map, shape=(n, heads, depth, h * w))
    # 4 heads on 14 x 14 pixels: 784 rows against one map of keys.
    queries = net.reshape(
        net.transpose(by_head, perm=(0, 1, 3, 2)), shape=(n, heads * h * w, depth)
    )
    weights = net.attention_weights(queries, keys, name=f"{name}.heads")
    # values are (n, 64, 49), too: transposed, each key's value is a row
    context_rows = net.batch_matmul(weights, values, trans_b=True)
    context_by_head = net.reshape(context_rows, shape=(n, heads, h * w, depth))
    context = net.reshape(
        net.transpose(context_by_head, perm=(0, 1, 3, 2)), shape=(n, heads * depth, h, w)
    )
    return net.branch(x, net.conv(context, c, bias=False, name=f"{name}.out"), name=name)


def _shared_map(net: Net, y: Value, depth: int, stride: int, name: str) -> Value:
    """Append the keys or values that all heads share, as (n, depth, pixels).

    (n, 64, 7, 7) becomes (n, 64, 49): each column is a key.
    """
    if stride > 1:
        y = net.depthwise(y, stride=stride, name=f"{name}.down")
    pixels = net.conv(y, depth, bias=False, name=name)
    return net.reshape(pixels, shape=(y.shape[0], depth, -1))


def _mobilenet_v4(
    stem: int, stages: str, net: Net, x: Value, classes: int, width: float = 1.0
) -> Value:
    """Return MobileNet V4 (Qin et al. 2024); a width below 1 does not change the stem."""
    has_attention = "q" in stages
    x = net.conv_norm(x, rounded(stem * max(1.0, width)), 3, stride=2, name="stem")
    for s, stage in enumerate(stages.split(" | "), 1):
        sizes, _, blocks = stage.partition(": ")
        # "96-64: c3 c1": 96 features after the 3 x 3, 64 after the 1 x 1.
        features = [rounded(int(n) * width) for n in sizes.split("-")]
        i = 0
        for word in blocks.split():
            # "3/5/4*2" is the block 3/5/4 twice
            text, _, times = word.partition("*")
            for _ in range(int(times or 1)):
                name = f"stage{s}.{i}"
                # i counts the blocks of a stage: only the first has stride 2
                stride = 1 if i else 2
                if text[0] == "c":
                    kernel = int(text[1])
                    conv_features = features[0] if kernel == 3 else features[-1]
                    x = net.conv_norm(x, conv_features, kernel, stride=stride, name=name)
                elif text[0] == "f":
                    # an expansion of 4, as "f3" means
                    block = Inverted(4 * x.shape[1], features[0], stride=stride, act="relu")
                    x = fused_residual(net, x, block, name)
                elif text[0] == "q":
                    x = _multi_query(net, x, text[1:], name)
                else:
                    universal = _universal_of(text, features[0], stride, has_attention)
                    x = _universal(net, x, universal, name)
                i += 1
    x = net.conv_norm(x, rounded(960 * width), name="last")
    x = net.global_avg_pool(x, name="pool")
    x = net.conv_norm(x, 1280, name="head")
    return net.dense(net.flat(x), classes, name="classifier")


BUILDERS: tuple[Callable[..., Graph], ...] = (
    mobilenet_v1,
    mobilenet_v2,
    *MOBILENETS_V3,
    *(
        image_network(size=size, scaled=True, name=f"mobilenet_v4_{name}")(
            partial(_mobilenet_v4, stem, stages)
        )
        for name, (size, stem, stages) in MOBILENET_V4.items()
    ),
    mnasnet,
    *EFFICIENTNETS,
)
