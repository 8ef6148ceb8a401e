"""What the transformers share: linear layers and attention in separate nodes, as exporters write.

Rows of all tokens of a batch are one matrix (batch length, width). Attention is
five nodes on (batch, heads, length, depth): product, scale, mask, softmax, product, with
transposes before and behind; a rewrite may find them and put one `attention` there.
Weights are normal with standard deviation 0.02, as BERT and GPT-2 start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ascend_lab.errors import InputError
from ascend_lab.graph.draft import Value
from ascend_lab.graph.zoo.blocks import Net

SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class Size:
    """Width of a token, layers, heads, tokens of one sequence, sequences of a batch."""

    width: int
    layers: int
    heads: int
    length: int
    batch: int
    epsilon: float

    @property
    def tokens(self) -> int:
        """Rows of the matrix of all tokens."""
        return self.batch * self.length


def check_size(name: str, size: Size, longest: int) -> Size:
    """Return the size; raise `InputError` unless heads and length fit the model."""
    if not 1 <= size.length <= longest:
        raise InputError(f"{name}: length from 1 to {longest}", str(size.length), "shorten it")
    if size.batch < 1 or size.layers < 1:
        got = f"{size.batch}, {size.layers}"
        raise InputError(f"{name}: batch and layers of at least 1", got, "raise them")
    return size


def linear(net: Net, x: Value, features: int, *, name: str) -> Value:
    """Append x w + b in two nodes: (rows, inputs) to (rows, features)."""
    weight = net.seeded(f"{name}.weight", (x.shape[1], features), SPREAD)
    bias = net.seeded(f"{name}.bias", (features,), SPREAD)
    out: Value = net.add(net.matmul(x, weight, name=f"{name}.matmul"), bias, name=name)
    return out


def norm(net: Net, x: Value, epsilon: float, *, name: str) -> Value:
    """Append a layer norm over the width."""
    scale = net.seeded(f"{name}.scale", x.shape[-1:], 0.05, 1.0)
    bias = net.seeded(f"{name}.bias", x.shape[-1:], 0.05)
    out: Value = net.layer_norm(x, scale, bias, epsilon=epsilon, name=name)
    return out


def mlp(net: Net, x: Value, inner: int, act: str, *, name: str) -> Value:
    """Append the two linear layers of a block, an activation between them."""
    y = net.act(linear(net, x, inner, name=f"{name}.1"), act, name=f"{name}.{act}")
    return linear(net, y, x.shape[1], name=f"{name}.2")


def _heads(net: Net, x: Value, size: Size, order: tuple[int, ...], name: str) -> Value:
    shape = (size.batch, size.length, size.heads, x.shape[1] // size.heads)
    parts = net.reshape(x, shape=shape, name=f"{name}.reshape")
    out: Value = net.transpose(parts, perm=order, name=f"{name}.transpose")
    return out


def attention_of(
    net: Net, q: Value, k: Value, v: Value, size: Size, mask: Value | None, *, name: str
) -> Value:
    """Append softmax(q k^T / sqrt(depth) + mask) v on (tokens, width) matrices."""
    queries = _heads(net, q, size, (0, 2, 1, 3), f"{name}.q")
    keys = _heads(net, k, size, (0, 2, 3, 1), f"{name}.k")
    values = _heads(net, v, size, (0, 2, 1, 3), f"{name}.v")
    scores = net.batch_matmul(queries, keys, name=f"{name}.scores")
    scores = net.muls(scores, number=1.0 / math.sqrt(queries.shape[-1]), name=f"{name}.scale")
    if mask is not None:
        scores = net.add(scores, mask, name=f"{name}.mask")
    shares = net.softmax(scores, axis=-1, name=f"{name}.softmax")
    context = net.batch_matmul(shares, values, name=f"{name}.context")
    rows = net.transpose(context, perm=(0, 2, 1, 3), name=f"{name}.transpose")
    out: Value = net.reshape(rows, shape=(size.tokens, q.shape[1]), name=f"{name}.reshape")
    return out


def self_attention(
    net: Net, x: Value, size: Size, mask: Value | None, *, name: str, joined: bool = False
) -> Value:
    """Append attention of x to itself with its four linear layers; `joined`: q, k, v in one."""
    if joined:
        wide = linear(net, x, 3 * size.width, name=f"{name}.qkv")
        q, k, v = net.split(wide, sizes=3, axis=1, name=f"{name}.split")
    else:
        q, k, v = (linear(net, x, size.width, name=f"{name}.{part}") for part in "qkv")
    context = attention_of(net, q, k, v, size, mask, name=name)
    return linear(net, context, size.width, name=f"{name}.out")


def encoder_block(
    net: Net,
    x: Value,
    size: Size,
    mask: Value | None,
    *,
    name: str,
    act: str = "gelu",
    inner: int = 0,
    joined: bool = True,
) -> Value:
    """Append a block that norms before each half (GPT-2, ViT); `inner` is 4 widths unless given."""
    y = norm(net, x, size.epsilon, name=f"{name}.norm1")
    y = self_attention(net, y, size, mask, name=f"{name}.attn", joined=joined)
    x = net.add(x, y, name=f"{name}.add1")
    y = norm(net, x, size.epsilon, name=f"{name}.norm2")
    y = mlp(net, y, inner or 4 * size.width, act, name=f"{name}.mlp")
    out: Value = net.add(x, y, name=f"{name}.add2")
    return out
