"""Builders of Mobile-Former, EfficientFormer V1 and V2, which mix convolutions and attention."""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import numpy as np

from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.ir import Graph
from ascend_lab.compiler.zoo.blocks import Net, family
from ascend_lab.compiler.zoo.transformers import WEIGHT_DEVIATION, heads, linear, mlp, norm, rows_of

# -- Mobile-Former: an image and a few learned tokens ---------------------------------------------
MOBILE_FORMERS = {
    "26m": (4, 8, 3, 128, 1024, "3,12,2 3,12 D6,24 3,24 D6,48 4,48 6,64 D6,96 6,96"),
    "52m": (1, 8, 3, 128, 1024, "3,12,2 3,12 D6,24 3,24 D6,48 4,48 6,64 D6,96 6,96"),
    "96m": (1, 12, 4, 128, 1280, "2,12,1 D6,16 D6,32 3,32 D6,64 4,64 6,88 D6,128 6,128"),
    "151m": (
        1,
        12,
        6,
        192,
        1280,
        "2,12,1 D6,16 3,16 D6,32 3,32 D6,64 4,64 6,88 6,88 D6,128 6,128 6,128",
    ),
    "214m": (
        1,
        12,
        6,
        192,
        1600,
        "2,12,1 D6,20 3,20 D6,40 4,40 D6,80 4,80 6,112 6,112 D6,160 6,160 6,160",
    ),
    "294m": (
        1,
        16,
        6,
        192,
        1920,
        "2,16,1 D6,24 4,24 D6,48 4,48 D6,96 4,96 6,128 6,128 D6,192 6,192 6,192",
    ),
    "508m": (
        1,
        24,
        6,
        192,
        1920,
        "2,24,1 D6,40 3,40 D6,72 3,72 D6,128 4,128 6,176 6,176 D6,240 6,240 6,240",
    ),
}
"""Groups, channels of the stem, tokens, their width, features of the head, blocks as text.

A block is "expansion,features"; D halves the size. The first block, which also has a stride, does
not use the tokens.
"""
MAP_HEADS = 2
"""Heads of the attention between tokens and image."""
TOKEN_HEADS = 4
"""Heads of the attention among tokens."""
DOWN_EXPANSION = 4
"""Expansion inside a block that halves the size, after the halving."""


def _tokens_attend_to_image(net: Net, x: Value, tokens: Value, name: str) -> Value:
    """Append the attention of tokens to an image, which itself serves as keys and values."""
    n, c, h, w = x.shape
    q = linear(net, tokens, c, name=f"{name}.q")
    q = heads(net, q, n, MAP_HEADS, (0, 2, 1, 3), name=f"{name}.q")
    # keys and values are the image itself: no weights
    k = net.reshape(x, shape=(n, MAP_HEADS, c // MAP_HEADS, h * w))
    weights = net.attention_weights(q, k, name=name)
    context = rows_of(net, net.batch_matmul(weights, k, trans_b=True), name=name)
    gate = net.hard_sigmoid(linear(net, tokens, c, name=f"{name}.gate"))
    gated = net.mul(context, net.muls(gate, number=2.0))
    y = net.add(tokens, linear(net, gated, tokens.shape[1], name=f"{name}.out"))
    return norm(net, y, 1e-5, name=f"{name}.norm")


def _tokens_attend_to_tokens(net: Net, tokens: Value, n: int, name: str) -> Value:
    """Append the attention of tokens to each other, and an MLP on each token."""
    d = tokens.shape[1]
    q = linear(net, tokens, d, name=f"{name}.q")
    q = heads(net, q, n, TOKEN_HEADS, (0, 2, 1, 3), name=f"{name}.q")
    # tokens are keys and values: (n, heads, depth, tokens), transposed where they are values
    k = heads(net, tokens, n, TOKEN_HEADS, (0, 2, 3, 1), name=f"{name}.k")
    weights = net.attention_weights(q, k, name=name)
    context = rows_of(net, net.batch_matmul(weights, k, trans_b=True), name=name)
    mixed = net.add(tokens, linear(net, context, d, name=f"{name}.out"))
    mixed = norm(net, mixed, 1e-5, name=f"{name}.norm1")
    y = mlp(net, mixed, 2 * d, "gelu", name=f"{name}.mlp")
    return norm(net, net.add(mixed, y), 1e-5, name=f"{name}.norm2")


def _image_attends_to_tokens(net: Net, x: Value, tokens: Value, name: str) -> Value:
    """Append the sum of an image and its attention to the tokens, in (n, channels, pixels)."""
    n, c, h, w = x.shape
    k, v = (
        heads(net, linear(net, tokens, c, name=part), n, MAP_HEADS, (0, 2, 3, 1), name=part)
        for part in (f"{name}.k", f"{name}.v")
    )
    q = net.reshape(x, shape=(n, MAP_HEADS, c // MAP_HEADS, h * w))
    weights = net.attention_weights(q, k, name=name, trans_a=True)
    return net.add(x, net.reshape(net.batch_matmul(v, weights, trans_b=True), shape=x.shape))


def _first_token(net: Net, token_rows: Value, n: int) -> Value:
    """Append the first token of each image, cut from the rows of all tokens."""
    tokens = net.reshape(token_rows, shape=(n, -1, token_rows.shape[1]))
    token = net.slice(tokens, begin=(0, 0, 0), end=(n, 1, token_rows.shape[1]))
    return net.reshape(token, shape=(n, token_rows.shape[1]))


def _dynamic_relu(net: Net, x: Value, tokens: Value, name: str) -> Value:
    """Append max(a x, b x); the first token decides the slopes a and b of each channel."""
    n, c = x.shape[:2]
    first = _first_token(net, tokens, n)
    y = net.relu(linear(net, first, tokens.shape[1] // 4, name=f"{name}.fc1"))
    y = net.muls(net.hard_sigmoid(linear(net, y, 2 * c, name=f"{name}.fc2")), number=2.0)
    # y has numbers in 0 .. 2: one slope is a, the other b - 1; a = 1 and b = 1 make a plain ReLU
    a, b = net.split(y, sizes=2, axis=1)
    slopes = (net.reshape(s, shape=(n, c, 1, 1)) for s in (a, net.adds(b, number=-1.0)))
    return net.max(*(net.mul(x, slope) for slope in slopes))


def _point(net: Net, x: Value, features: int, groups: int, shuffled: int, name: str) -> Value:
    """Append a 1 x 1 convolution, and a channel shuffle of `shuffled` groups if that is above 1."""
    y = net.conv_norm(x, features, groups=groups, act="", name=name)
    return net.channel_shuffle(y, shuffled, name=name) if shuffled > 1 else y


def _expanded_depthwise(
    net: Net, x: Value, features: int, groups: int, stride: int, name: str
) -> Value:
    """Append a depthwise layer that writes several features for each channel."""
    channels = x.shape[1]
    y = net.conv_norm(x, features, 3, stride=stride, groups=channels, act="", name=name)
    return net.channel_shuffle(y, channels, name=name) if groups > 1 else y


def _former_block(
    net: Net, x: Value, tokens: Value, text: str, groups: int, name: str
) -> tuple[Value, Value]:
    """Append a block: tokens attend to the image and to each other, set the slopes of its ReLUs,
    and the image attends to the tokens.
    """
    halves_size = text[0] == "D"
    # "D6,24": halves the size, 6 times the channels inside the block, 24 channels after it
    expansion, features = (int(n) for n in text.lstrip("D").split(","))
    channels = x.shape[1]
    tokens = _tokens_attend_to_image(net, x, tokens, f"{name}.see")
    tokens = _tokens_attend_to_tokens(net, tokens, x.shape[0], f"{name}.mix")
    if halves_size:
        y = _expanded_depthwise(net, x, channels * expansion, groups, 2, f"{name}.down")
        y = _dynamic_relu(net, y, tokens, f"{name}.act1")
        start = _point(net, y, features, groups, 1, f"{name}.point1")
        y = _expanded_depthwise(
            net, start, features * DOWN_EXPANSION, groups, 1, f"{name}.depthwise"
        )
        y = _dynamic_relu(net, y, tokens, f"{name}.act2")
        y = _point(net, y, features, groups, 1, f"{name}.point2")
        y = net.add(start, y)
    else:
        y = _point(net, x, channels * expansion, groups, groups, f"{name}.point1")
        y = _dynamic_relu(net, y, tokens, f"{name}.act1")
        y = net.depthwise(y, name=f"{name}.depthwise")
        y = _dynamic_relu(net, y, tokens, f"{name}.act2")
        y = _point(net, y, features, groups, groups, f"{name}.point2")
    y = _image_attends_to_tokens(net, y, tokens, f"{name}.look")
    has_shortcut = not halves_size and channels == features
    return (net.add(x, y) if has_shortcut else y), tokens


class FormerSizes(NamedTuple):
    """A row of `MOBILE_FORMERS`: the sizes of a Mobile-Former, and its blocks as text."""

    groups: int
    stem: int
    tokens: int
    width: int
    last_features: int
    blocks: str


def _mobile_former(sizes: FormerSizes, net: Net, x: Value, classes: int) -> Value:
    """Return Mobile-Former (Chen et al. 2022); names contain the multiply-accumulates, e.g. 26m."""
    groups, stem, tokens, width, last_features, text = sizes
    n = x.shape[0]
    first_block, *blocks = text.split()
    learned_tokens = net.seeded("tokens", (1, tokens, width), 1.0)
    of_each_image = net.expand(learned_tokens, shape=(n, tokens, width))
    token_rows = net.reshape(of_each_image, shape=(n * tokens, width))
    x = start = net.conv_norm(x, stem, 3, stride=2, act="relu6", name="stem")
    expansion, features, stride = (int(k) for k in first_block.split(","))
    x = net.relu6(_expanded_depthwise(net, x, stem * expansion, 1, stride, "first.wide"))
    if groups > 1:
        x = net.channel_shuffle(x, stem, name="first")
    x = _point(net, x, features, groups, 1, "first.point")
    if x.shape == start.shape:
        x = net.add(x, start)
    for i, block in enumerate(blocks, 1):
        x, token_rows = _former_block(net, x, token_rows, block, groups, f"block{i}")
    token_rows = _tokens_attend_to_image(net, x, token_rows, "last.see")
    x = net.conv_norm(x, 6 * x.shape[1], groups=groups, act="", name="last")
    pooled = net.hard_swish(net.global_avg_pool(x))
    y = net.concat(net.flat(pooled), _first_token(net, token_rows, n), axis=1)
    y = net.dense(y, last_features, name="fc1")
    column = net.norm(net.reshape(y, shape=(n, last_features, 1, 1)), name="fc1.bn")
    y = net.flat(net.hard_swish(column), name="fc1.row")
    return net.dense(y, classes, name="fc2")


# -- EfficientFormer ------------------------------------------------------------------------------
EFFICIENTFORMERS = {
    "l1": ((48, 96, 224, 448), (3, 2, 6, 4), 1),
    "l3": ((64, 128, 320, 512), (4, 4, 12, 6), 4),
    "l7": ((96, 192, 384, 768), (6, 6, 18, 8), 8),
}
"""Widths and depths of the stages, and how many of the last blocks are attention."""
EFFICIENTFORMERS_V2 = {
    "s0": ((32, 48, 96, 176), ("44", "44", "433344", "4334"), 2),
    "s1": ((32, 48, 120, 224), ("444", "444", "443333444", "443344"), 2),
    "s2": ((32, 64, 144, 288), ("4444", "4444", "443333334444", "44333344"), 4),
    "l": ((40, 80, 192, 384), ("44444", "44444", "444433333334444", "4443333444"), 6),
}
"""Widths of the stages, the expansion of each block, and how many of the last have attention."""
HEADS = 8
KEY_DEPTH = 32
"""Attention heads of EfficientFormer, and the numbers of a key in each; a value has four times as
many.
"""


def _distance_biases(net: Net, side: int, step: int, name: str) -> Value:
    """Append biases (heads, queries, keys): a parameter for each head, row and column distance.

    There is a query at every `step`-th pixel of a square of `side` pixels, a key at each pixel.
    """
    # one parameter for each distance (rows, columns) and head
    table = net.seeded(f"{name}.table", (side * side, HEADS), WEIGHT_DEVIATION)
    # side 2: pixels (0, 0), (0, 1), (1, 0), (1, 1); the distance from the first to the last is
    # (1, 1), row 1 * 2 + 1 = 3 of the table
    keys = np.array([*product(range(side), repeat=2)])
    queries = np.array([*product(range(0, side, step), repeat=2)])
    distances = np.abs(queries[:, None] - keys[None])
    table_rows = (distances[..., 0] * side + distances[..., 1]).astype(np.int32)
    rows = net.constant(table_rows.reshape(-1), name=f"{name}.places")
    biases = net.reshape(net.embedding(table, rows), shape=(*table_rows.shape, HEADS))
    return net.transpose(biases, perm=(2, 0, 1))


def _pool_block(net: Net, x: Value, name: str) -> Value:
    """Append x + (3 x 3 mean of x - x) and an MLP of 1 x 1 layers, each with a layer scale."""
    mean = net.avg_pool2d(x, kernel=3, stride=1, pad=1)
    x = net.branch(x, net.sub(mean, x), name=f"{name}.mix")
    y = net.conv_norm(x, 4 * x.shape[1], act="gelu", bias=True, name=f"{name}.fc1")
    y = net.conv_norm(y, x.shape[1], act="", bias=True, name=f"{name}.fc2")
    return net.branch(x, y, name=f"{name}.mlp")


def _token_block(net: Net, x: Value, n: int, side: int, name: str) -> Value:
    """Append attention over tokens with biases by distance, then an MLP."""
    width = x.shape[1]
    value_depth = 4 * KEY_DEPTH
    y = norm(net, x, 1e-5, name=f"{name}.norm1")
    y = linear(net, y, HEADS * (2 * KEY_DEPTH + value_depth), name=f"{name}.qkv")
    y = heads(net, y, n, HEADS, (0, 2, 1, 3), name=f"{name}.qkv")
    # 8 heads of 32 + 32 + 128 numbers: 1536 columns
    q, k, v = net.split(y, sizes=(KEY_DEPTH, KEY_DEPTH, value_depth), axis=3)
    bias = _distance_biases(net, side, 1, f"{name}.bias")
    weights = net.attention_weights(q, k, bias, name=name, trans_b=True)
    y = rows_of(net, net.batch_matmul(weights, v), name=name)
    x = net.branch(x, linear(net, y, width, name=f"{name}.out"), name=f"{name}.mix", shape=(width,))
    y = mlp(net, norm(net, x, 1e-5, name=f"{name}.norm2"), 4 * width, "gelu", name=f"{name}.mlp")
    return net.branch(x, y, name=f"{name}.mlp", shape=(width,))


def _two_heads(net: Net, x: Value, classes: int) -> Value:
    """Append the mean of two classifiers' logits, one of them trained by distillation."""
    logits = [net.dense(x, classes, name=name) for name in ("head", "head.distilled")]
    return net.muls(net.add(*logits), number=0.5, name="logits")


def _quartering_stem(net: Net, x: Value, width: int, act: str) -> Value:
    """Append two 3 x 3 layers, each of which halves the size."""
    x = net.conv_norm(x, width // 2, 3, stride=2, act=act, bias=True, name="stem1")
    return net.conv_norm(x, width, 3, stride=2, act=act, bias=True, name="stem2")


def _efficientformer(
    widths: tuple[int, ...],
    depths: tuple[int, ...],
    attending: int,
    net: Net,
    x: Value,
    classes: int,
) -> Value:
    """Return EfficientFormer (Li et al. 2022): pooling blocks, then attention over 1/32 pixels."""
    x = _quartering_stem(net, x, widths[0], "relu")
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True), 1):
        if stage > 1:
            x = net.conv_norm(x, width, 3, stride=2, act="", bias=True, name=f"down{stage}")
        # the last blocks of the last stage are attention, appended below
        # L1, stage 4: 4 blocks, of which 1 is attention, so 3 pooling blocks here
        for i in range(depth - (attending if stage == len(widths) else 0)):
            x = _pool_block(net, x, f"stage{stage}.{i}")
    n, c, side, _ = x.shape
    x = net.transpose(net.reshape(x, shape=(n, c, side * side)), perm=(0, 2, 1))
    # 224 x 224 pixels: 7 x 7 tokens for each image
    x = net.reshape(x, shape=(n * side * side, c))
    for i in range(attending):
        x = _token_block(net, x, n, side, f"tokens.{i}")
    x = net.reshape(norm(net, x, 1e-5, name="norm"), shape=(n, side * side, c))
    return _two_heads(net, net.reduce_mean(x, axis=(1,)), classes)


# -- EfficientFormer V2 ---------------------------------------------------------------------------
def _biased_layer(
    net: Net, x: Value, features: int, name: str, act: str = "", **conv: int
) -> Value:
    """Append a convolution with bias and batch norm: all layers of V2 have both."""
    kernel = conv.pop("kernel", 1)
    return net.conv_norm(x, features, kernel, bias=True, act=act, name=name, **conv)


def _attended(
    net: Net, operands: tuple[Value, Value, Value], name: str, *, step: int, talking: bool
) -> Value:
    """Append attention over pixels: (n, heads, value depth, queries).

    The operands are queries (one at every `step`-th pixel), keys and values. With `talking`
    a 1 x 1 convolution mixes the heads before and after the softmax.
    """
    q, k, v = operands
    bias = _distance_biases(net, k.shape[2], step, f"{name}.bias")
    queries, keys, values = (
        net.reshape(m, shape=(m.shape[0], HEADS, m.shape[1] // HEADS, m.shape[2] * m.shape[3]))
        for m in (q, k, v)
    )
    scores = net.batch_matmul(net.transpose(queries, perm=(0, 1, 3, 2)), keys)
    scores = net.add(net.muls(scores, number=keys.shape[2] ** -0.5), bias)
    if talking:
        scores = net.conv(scores, HEADS, name=f"{name}.talk1")
    weights = net.softmax(scores, axis=-1)
    if talking:
        weights = net.conv(weights, HEADS, name=f"{name}.talk2")
    return net.batch_matmul(values, weights, trans_b=True)


def _attention(net: Net, x: Value, at_half_size: bool, name: str) -> Value:
    """Append talking-head attention and a depthwise filter of values, perhaps at half the size."""
    c = x.shape[1]
    value_width = HEADS * 4 * KEY_DEPTH
    start = x
    if at_half_size:
        x = _biased_layer(net, x, c, f"{name}.down", kernel=3, stride=2, groups=c)
    q, k = (_biased_layer(net, x, HEADS * KEY_DEPTH, f"{name}.{part}") for part in "qk")
    v = _biased_layer(net, x, value_width, f"{name}.v")
    local = _biased_layer(net, v, value_width, f"{name}.local", kernel=3, groups=value_width)
    y = net.add(
        net.reshape(_attended(net, (q, k, v), name, step=1, talking=True), shape=v.shape), local
    )
    if at_half_size:
        small = y.shape[2]
        large = start.shape[2]
        # 4 pixels from 2: positions 0, 0.25, 0.75 and 1
        positions = np.clip((np.arange(large) + 0.5) * small / large - 0.5, 0, small - 1)
        # bilinear interpolation: a pixel between two others takes both, by distance
        weights = np.maximum(0.0, 1 - np.abs(positions[:, None] - np.arange(small)))
        y = net.resized(y, weights, name=f"{name}.up")
    return _biased_layer(net, net.gelu(y), c, f"{name}.out")


def _attention_down(net: Net, x: Value, features: int, name: str) -> Value:
    """Append attention with a query at every second pixel, and add a 3 x 3 layer of stride 2."""
    c = x.shape[1]
    key_channels = HEADS * KEY_DEPTH // 2
    local_query = net.conv(x, c, 3, stride=2, groups=c, name=f"{name}.near")
    # average pooling over 1 pixel with stride 2 picks every second pixel
    every_second_pixel = net.avg_pool2d(x, kernel=1, stride=2)
    q = _biased_layer(net, net.add(local_query, every_second_pixel), key_channels, f"{name}.q")
    k = _biased_layer(net, x, key_channels, f"{name}.k")
    v = _biased_layer(net, x, 4 * key_channels, f"{name}.v")
    local = _biased_layer(
        net, v, 4 * key_channels, f"{name}.local", kernel=3, stride=2, groups=4 * key_channels
    )
    y = net.reshape(_attended(net, (q, k, v), name, step=2, talking=False), shape=local.shape)
    y = _biased_layer(net, net.gelu(net.add(y, local)), features, f"{name}.out")
    return net.add(y, _biased_layer(net, x, features, f"{name}.conv", kernel=3, stride=2))


def _efficientformer_v2(
    widths: tuple[int, ...],
    ratios: tuple[str, ...],
    attending: int,
    net: Net,
    x: Value,
    classes: int,
) -> Value:
    """Return EfficientFormer V2 (Li et al. 2023): attention in the last blocks of two stages."""
    x = _quartering_stem(net, x, widths[0], "gelu")
    for stage, (width, expansions) in enumerate(zip(widths, ratios, strict=True), 1):
        if stage == len(widths):
            x = _attention_down(net, x, width, f"down{stage}")
        elif stage > 1:
            x = _biased_layer(net, x, width, f"down{stage}", kernel=3, stride=2)
        for i, expansion in enumerate(expansions):
            name = f"stage{stage}.{i}"
            # S0, stage 3, "433344" with 2 attending: blocks 4 and 5
            if stage > 2 and i >= len(expansions) - attending:
                y = _attention(net, x, stage == 3, f"{name}.attn")
                x = net.branch(x, y, name=f"{name}.mix")
            inner = int(expansion) * width
            y = _biased_layer(net, x, inner, f"{name}.fc1", act="gelu")
            y = _biased_layer(net, y, inner, f"{name}.mid", act="gelu", kernel=3, groups=inner)
            x = net.branch(x, _biased_layer(net, y, width, f"{name}.fc2"), name=f"{name}.mlp")
    x = net.norm(x, name="norm")
    return _two_heads(net, net.flat(net.global_avg_pool(x, name="pool")), classes)


BUILDERS: tuple[Callable[..., Graph], ...] = (
    *family(
        "mobile_former_",
        _mobile_former,
        {name: (FormerSizes(*row),) for name, row in MOBILE_FORMERS.items()},
        multiple=32,
    ),
    *family("efficientformer_", _efficientformer, EFFICIENTFORMERS, multiple=32),
    *family("efficientformer_v2_", _efficientformer_v2, EFFICIENTFORMERS_V2, multiple=32),
)
