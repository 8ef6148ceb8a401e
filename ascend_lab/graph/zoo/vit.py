"""Vision transformers: ViT-B/16, the MobileViT block, and MobileViT-S, which is made of it."""

from __future__ import annotations

from typing import Any

from ascend_lab.errors import InputError
from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.zoo.blocks import Net, image_network
from ascend_lab.graph.zoo.convolutional import Inverted, inverted
from ascend_lab.graph.zoo.transformers import SPREAD, Size, check_size, encoder_block, norm


# -- ViT ------------------------------------------------------------------------------------------
def _patches(net: Net, x: Value, size: Size, patch: int) -> Value:
    """Append patch embedding, class token and positions: (tokens, width)."""
    x = net.conv(x, size.width, patch, stride=patch, pad=(0, 0), name="patches")
    x = net.reshape(x, shape=(size.batch, size.width, -1), name="patches.flat")
    x = net.transpose(x, perm=(0, 2, 1), name="patches.rows")
    token = net.seeded("class_token", (1, 1, size.width), SPREAD)
    first = net.expand(token, shape=(size.batch, 1, size.width), name="class_token.expand")
    x = net.concat(first, x, axis=1, name="tokens")
    places = net.seeded("positions", (1, size.length, size.width), SPREAD)
    x = net.add(x, places, name="tokens.placed")
    out: Value = net.reshape(x, shape=(size.tokens, size.width), name="tokens.rows")
    return out


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
    x = norm(net, x, dims.epsilon, name="norm")
    x = net.reshape(x, shape=(batch, length, dims.width), name="norm.tokens")
    x = net.slice(x, begin=(0, 0, 0), end=(batch, 1, dims.width), name="first")
    x = net.reshape(x, shape=(batch, dims.width), name="first.rows")
    return net.finish(net.dense(x, classes, name="head"))


# -- MobileViT ------------------------------------------------------------------------------------
PATCH = 2
Steps = tuple[tuple[str, dict[str, Any]], ...]


def _moved(net: Net, x: Value, steps: Steps, name: str) -> Value:
    for i, (op, attrs) in enumerate(steps, 1):
        x = net.add_node(op, x, name=f"{name}{i}", **attrs)
    return x


def _unfolded(net: Net, x: Value, name: str) -> tuple[Value, Size]:
    """Append what puts pixels of equal place in their patch into one sequence.

    (n, d, h, w) -> rows of n * 4 sequences of h w / 4 tokens of width d.
    """
    n, d, h, w = x.shape
    length = h * w // PATCH**2
    steps: Steps = (
        ("reshape", {"shape": (n * d * h // PATCH, PATCH, w // PATCH, PATCH)}),
        ("transpose", {"perm": (0, 2, 1, 3)}),
        ("reshape", {"shape": (n, d, length, PATCH**2)}),
        ("transpose", {"perm": (0, 3, 2, 1)}),
        ("reshape", {"shape": (n * PATCH**2 * length, d)}),
    )
    return _moved(net, x, steps, f"{name}.unfold"), Size(d, 0, 4, length, n * PATCH**2, 1e-5)


def _folded(net: Net, x: Value, shape: tuple[int, ...], name: str) -> Value:
    """Append the inverse of `_unfolded`."""
    n, d, h, w = shape
    steps: Steps = (
        ("reshape", {"shape": (n, PATCH**2, h * w // PATCH**2, d)}),
        ("transpose", {"perm": (0, 3, 2, 1)}),
        ("reshape", {"shape": (n * d * h // PATCH, w // PATCH, PATCH, PATCH)}),
        ("transpose", {"perm": (0, 2, 1, 3)}),
        ("reshape", {"shape": shape}),
    )
    return _moved(net, x, steps, f"{name}.fold")


def _block(net: Net, start: Value, width: int, layers: int, name: str) -> Value:
    """Append local convolutions, transformers over patches, and the join with the input."""
    channels = start.shape[1]
    x = net.conv_norm(start, channels, 3, act="silu", name=f"{name}.local")
    x = net.conv(x, width, bias=False, name=f"{name}.up")
    shape = x.shape
    x, size = _unfolded(net, x, name)
    for i in range(layers):
        x = encoder_block(net, x, size, None, name=f"{name}.{i}", act="silu", inner=2 * width)
    x = _folded(net, norm(net, x, size.epsilon, name=f"{name}.norm"), shape, name)
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


@image_network(size=256, multiple=64)
def mobilevit_s(net: Net, x: Value, classes: int) -> Value:
    """Return MobileViT-S: inverted residuals and three MobileViT blocks."""
    x = net.conv_norm(x, 16, 3, stride=2, act="silu", name="stem")
    for i, (features, stride) in enumerate(((32, 1), (64, 2), (64, 1), (64, 1))):
        block = Inverted(4 * x.shape[1], features, stride=stride, act="silu")
        x = inverted(net, x, block, f"mv2.{i}")
    for i, (features, width, layers) in enumerate(((96, 144, 2), (128, 192, 4), (160, 240, 3)), 3):
        block = Inverted(4 * x.shape[1], features, stride=2, act="silu")
        x = _block(net, inverted(net, x, block, f"stage{i}.mv2"), width, layers, f"stage{i}.mvit")
    x = net.conv_norm(x, 640, act="silu", name="last")
    return net.head(x, classes)
