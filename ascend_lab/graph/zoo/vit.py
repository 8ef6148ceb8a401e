"""Vision transformers: ViT-B/16, the MobileViT block, and MobileViT V1 and V2."""

from functools import partial

from ascend_lab.errors import InputError
from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Fill, Graph, TensorType
from ascend_lab.graph.zoo.blocks import Net, image_network, rounded
from ascend_lab.graph.zoo.mobile import Inverted, inverted
from ascend_lab.graph.zoo.transformers import SPREAD, Size, check_size, encoder_block, norm


# -- ViT ------------------------------------------------------------------------------------------
def _patches(net: Net, x: Value, size: Size, patch: int) -> Value:
    """Append patch embedding, class token and positions: (tokens, width)."""
    x = net.conv(x, size.width, patch, stride=patch, pad=(0, 0), name="patches")
    x = net.transpose(net.reshape(x, shape=(size.batch, size.width, -1)), perm=(0, 2, 1))
    token = net.seeded("class_token", (1, 1, size.width), SPREAD)
    first = net.expand(token, shape=(size.batch, 1, size.width), name="class_token.expand")
    x = net.concat(first, x, axis=1, name="tokens")
    places = net.seeded("positions", (1, size.length, size.width), SPREAD)
    return net.reshape(net.add(x, places), shape=(size.tokens, size.width), name="tokens.rows")


def vit_b16(
    batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000, layers: int = 12
) -> Graph:
    """Return ViT-B/16 (Dosovitskiy et al. 2021): x (batch, 3, size, size) -> logits."""
    if size % 16:
        raise InputError("vit_b16: a size divisible by 16", str(size), "pad the image")
    net, length = Net("vit_b16", dtype), (size // 16) ** 2 + 1
    dims = check_size("vit_b16", Size(768, layers, 12, length, batch, 1e-6), 1 << 16)
    x = _patches(net, net.images(batch, 3, size), dims, 16)
    for i in range(layers):
        x = encoder_block(net, x, dims, None, name=f"layer{i}")
    x = net.reshape(norm(net, x, dims.epsilon, name="norm"), shape=(batch, length, dims.width))
    x = net.slice(x, begin=(0, 0, 0), end=(batch, 1, dims.width), name="first")
    x = net.reshape(x, shape=(batch, dims.width))
    return net.finish(net.dense(x, classes, name="head"))


# -- MobileViT ------------------------------------------------------------------------------------
PATCH = 2


def _unfolded(net: Net, x: Value, order: tuple[int, ...]) -> Value:
    """Append an image (n, d, h, w) as (n, d, patches, places), its axes in an order."""
    n, d, h, w = x.shape
    x = net.reshape(x, shape=(n * d * h // PATCH, PATCH, w // PATCH, PATCH))
    x = net.reshape(net.transpose(x, perm=(0, 2, 1, 3)), shape=(n, d, h * w // PATCH**2, PATCH**2))
    return net.transpose(x, perm=order)


def _folded(net: Net, x: Value, order: tuple[int, ...], shape: tuple[int, ...]) -> Value:
    """Append the inverse of `_unfolded`."""
    n, d, h, w = shape
    x = net.transpose(x, perm=order)
    x = net.reshape(x, shape=(n * d * h // PATCH, w // PATCH, PATCH, PATCH))
    return net.reshape(net.transpose(x, perm=(0, 2, 1, 3)), shape=shape)


def _block(net: Net, start: Value, width: int, layers: int, name: str) -> Value:
    """Append local convolutions, transformers over patches, and the join with the input."""
    channels = start.shape[1]
    x = net.conv_norm(start, channels, 3, act="silu", name=f"{name}.local")
    x = net.conv(x, width, bias=False, name=f"{name}.up")
    n, d, h, w = shape = x.shape
    # pixels of equal place in their patch are one sequence
    size = Size(d, 0, 4, h * w // PATCH**2, n * PATCH**2, 1e-5)
    x = net.reshape(_unfolded(net, x, (0, 3, 2, 1)), shape=(size.tokens, d))
    for i in range(layers):
        x = encoder_block(net, x, size, None, name=f"{name}.{i}", act="silu", inner=2 * width)
    x = norm(net, x, size.epsilon, name=f"{name}.norm")
    x = net.reshape(x, shape=(n, PATCH**2, size.length, d))
    x = _folded(net, x, (0, 3, 2, 1), shape)
    x = net.conv_norm(x, channels, act="silu", name=f"{name}.down")
    x = net.concat(start, x, axis=1, name=f"{name}.concat")
    return net.conv_norm(x, channels, 3, act="silu", name=f"{name}.join")


def mobilevit_block(
    batch: int = 1, *, size: int = 32, dtype: str = "fp32", channels: int = 96, width: int = 144,
    layers: int = 2,
) -> Graph:  # fmt: skip
    """Return a MobileViT block (Mehta & Rastegari 2022), by default the first of MobileViT-S.

    x (batch, channels, size, size) keeps its shape; raises `InputError` for an odd size.
    """
    if size % PATCH:
        raise InputError("mobilevit_block: an even size", str(size), "pad the image")
    net = Net("mobilevit_block", dtype)
    return net.finish(_block(net, net.images(batch, channels, size), width, layers, "mvit"))


VIT_SIZES = {
    "xxs": (2, (16, 24, 48, 64, 80), (64, 80, 96), 320),
    "xs": (4, (32, 48, 64, 80, 96), (96, 120, 144), 384),
    "s": (4, (32, 64, 96, 128, 160), (144, 192, 240), 640),
}
"""Expansion, features of five stages, widths of the transformers, features of the last layer."""
LAYERS = (2, 4, 3)


def _mobilevit(
    expansion: int, features: tuple[int, ...], widths: tuple[int, ...], last: int,
    net: Net, x: Value, classes: int,
) -> Value:  # fmt: skip
    """Return MobileViT: inverted residuals and three MobileViT blocks."""
    x = net.conv_norm(x, 16, 3, stride=2, act="silu", name="stem")
    one, two, *rest = features
    for i, (wide, stride) in enumerate(((one, 1), (two, 2), (two, 1), (two, 1))):
        block = Inverted(expansion * x.shape[1], wide, stride=stride, act="silu")
        x = inverted(net, x, block, f"mv2.{i}")
    for i, (wide, width, layers) in enumerate(zip(rest, widths, LAYERS, strict=True), 3):
        block = Inverted(expansion * x.shape[1], wide, stride=2, act="silu")
        x = _block(net, inverted(net, x, block, f"stage{i}.mv2"), width, layers, f"stage{i}.mvit")
    x = net.conv_norm(x, last, act="silu", name="last")
    return net.head(x, classes)


# -- MobileViT V2: attention whose cost grows with the tokens, not with their square --------------
def _image_norm(net: Net, x: Value, name: str) -> Value:
    """Append a group norm of one group: over all of an image, scaled by channel."""
    n, c = x.shape[:2]
    rows = net.reshape(x, shape=(n, -1))
    one, zero = (
        net.constant(Fill(number), TensorType(rows.shape[1:], net.dtype), f"{name}.{number:g}")
        for number in (1.0, 0.0)
    )
    normal = net.reshape(net.layer_norm(rows, one, zero), shape=x.shape)
    scale = net.seeded(f"{name}.scale", (c, 1, 1), 0.05, 1.0)
    bias = net.seeded(f"{name}.bias", (c, 1, 1), 0.05)
    return net.add(net.mul(normal, scale), bias, name=name)


def _linear_attention(net: Net, x: Value, name: str) -> Value:
    """Append attention by one score a token: its shares weigh the keys to a single context."""
    d = x.shape[1]
    y = net.conv(x, 1 + 2 * d, name=f"{name}.qkv")
    scores, keys, values = net.split(y, sizes=(1, d, d), axis=1)
    weighed = net.mul(keys, net.softmax(scores, axis=-1))
    context = net.reduce_sum(weighed, axis=(3,), keepdims=True)
    return net.conv(net.mul(net.relu(values), context), d, name=f"{name}.out")


def _block_v2(net: Net, x: Value, width: int, layers: int, name: str) -> Value:
    """Append a depthwise layer and blocks of linear attention over the places of 2 x 2 patches."""
    c = x.shape[1]
    x = net.conv_norm(x, c, 3, groups=c, act="silu", name=f"{name}.local")
    x = net.conv(x, width, bias=False, name=f"{name}.up")
    shape = x.shape
    x = _unfolded(net, x, (0, 1, 3, 2))
    for i in range(layers):
        y = _linear_attention(net, _image_norm(net, x, f"{name}.{i}.norm1"), f"{name}.{i}.attn")
        x = net.add(x, y)
        y = _image_norm(net, x, f"{name}.{i}.norm2")
        y = net.conv_act(y, 2 * width, act="silu", name=f"{name}.{i}.fc1")
        x = net.add(x, net.conv(y, width, name=f"{name}.{i}.fc2"))
    x = _folded(net, _image_norm(net, x, f"{name}.norm"), (0, 1, 3, 2), shape)
    return net.conv_norm(x, c, act="", name=f"{name}.down")


def _mobilevit_v2(net: Net, x: Value, classes: int, width: float = 1.0) -> Value:
    """Return MobileViT V2 (Mehta & Rastegari 2022)."""
    x = net.conv_norm(x, int(32 * width), 3, stride=2, act="silu", name="stem")
    one, two, *rest = (int(c * width) for c in (64, 128, 256, 384, 512))
    for i, (wide, stride) in enumerate(((one, 1), (two, 2), (two, 1))):
        block = Inverted(rounded(2 * x.shape[1]), wide, stride=stride, act="silu")
        x = inverted(net, x, block, f"mv2.{i}")
    for i, (wide, layers) in enumerate(zip(rest, LAYERS, strict=True), 3):
        block = Inverted(rounded(2 * x.shape[1]), wide, stride=2, act="silu")
        x = inverted(net, x, block, f"stage{i}.mv2")
        x = _block_v2(net, x, rounded(wide / 2), layers, f"stage{i}.mvit")
    return net.head(x, classes)


MOBILEVITS = (
    *(
        image_network(size=256, multiple=64, name=f"mobilevit_{name}")(partial(_mobilevit, *row))
        for name, row in VIT_SIZES.items()
    ),
    image_network(size=256, multiple=64, scaled=True, name="mobilevit_v2")(_mobilevit_v2),
)
