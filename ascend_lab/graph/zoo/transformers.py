"""Transformers of language, BERT and GPT-2, from linear layers and attention in separate nodes.

Rows of all tokens of a batch are one matrix (batch length, width). Attention is
five nodes on (batch, heads, length, depth): product, scale, mask, softmax, product, with
transposes before and behind; a rewrite may find them and put one `attention` there.
Weights are normal with standard deviation 0.02, as BERT and GPT-2 start. GELU is the library's tanh
form; BERT's original has the error function (they differ by < 0.0005).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.errors import InputError
from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph, TensorType
from ascend_lab.graph.zoo.blocks import Net

SPREAD = 0.02
WORDS, POSITIONS, KINDS = 30522, 512, 2
GPT_WORDS, GPT_POSITIONS = 50257, 1024
DROPPED = -10000.0
"""What a mask adds to the score of a token that is padding, or comes later."""


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
    return net.add(net.matmul(x, weight, name=f"{name}.matmul"), bias, name=name)


def norm(net: Net, x: Value, epsilon: float, *, name: str) -> Value:
    """Append a layer norm over the width."""
    scale = net.seeded(f"{name}.scale", x.shape[-1:], 0.05, 1.0)
    bias = net.seeded(f"{name}.bias", x.shape[-1:], 0.05)
    return net.layer_norm(x, scale, bias, epsilon=epsilon, name=name)


def mlp(net: Net, x: Value, inner: int, act: str, *, name: str) -> Value:
    """Append the two linear layers of a block, an activation between them."""
    y = net.act(linear(net, x, inner, name=f"{name}.1"), act, name=f"{name}.{act}")
    return linear(net, y, x.shape[1], name=f"{name}.2")


def heads(
    net: Net, x: Value, batch: int, count: int, order: tuple[int, ...], *, name: str
) -> Value:
    """Append rows (batch length, width) as heads of each sequence, the axes in an order."""
    shape = (batch, x.shape[0] // batch, count, x.shape[1] // count)
    parts = net.reshape(x, shape=shape, name=f"{name}.reshape")
    return net.transpose(parts, perm=order, name=f"{name}.transpose")


def shares_of(
    net: Net, q: Value, k: Value, mask: Value | None = None, *, name: str, **how: bool
) -> Value:
    """Append softmax(q k / sqrt(depth) + mask)."""
    depth = k.shape[-1 if how.get("trans_b") else -2]
    scores = net.batch_matmul(q, k, name=f"{name}.scores", **how)
    scores = net.muls(scores, number=1.0 / math.sqrt(depth), name=f"{name}.scale")
    if mask is not None:
        scores = net.add(scores, mask, name=f"{name}.mask")
    return net.softmax(scores, axis=-1, name=f"{name}.softmax")


def rows_of(net: Net, context: Value, *, name: str) -> Value:
    """Append (batch, heads, length, depth) as rows (batch length, width)."""
    batch, count, length, depth = context.shape
    rows = net.transpose(context, perm=(0, 2, 1, 3), name=f"{name}.transpose")
    return net.reshape(rows, shape=(batch * length, count * depth), name=f"{name}.reshape")


def attention_of(
    net: Net, q: Value, k: Value, v: Value, size: Size, mask: Value | None, *, name: str
) -> Value:
    """Append softmax(q k^T / sqrt(depth) + mask) v on (tokens, width) matrices."""
    parts = ((q, (0, 2, 1, 3), "q"), (k, (0, 2, 3, 1), "k"), (v, (0, 2, 1, 3), "v"))
    queries, keys, values = (
        heads(net, x, size.batch, size.heads, order, name=f"{name}.{part}")
        for x, order, part in parts
    )
    shares = shares_of(net, queries, keys, mask, name=name)
    context = net.batch_matmul(shares, values, name=f"{name}.context")
    return rows_of(net, context, name=name)


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
    net: Net, x: Value, size: Size, mask: Value | None, *, name: str, act: str = "gelu",
    inner: int = 0, joined: bool = True,
) -> Value:  # fmt: skip
    """Append a block that norms before each half (GPT-2, ViT); `inner` is 4 widths unless given."""
    y = norm(net, x, size.epsilon, name=f"{name}.norm1")
    y = self_attention(net, y, size, mask, name=f"{name}.attn", joined=joined)
    x = net.add(x, y, name=f"{name}.add1")
    y = norm(net, x, size.epsilon, name=f"{name}.norm2")
    y = mlp(net, y, inner or 4 * size.width, act, name=f"{name}.mlp")
    return net.add(x, y, name=f"{name}.add2")


# -- BERT (Devlin et al. 2019): uncased vocabulary, with the pooler -------------------------------
def _embedded(net: Net, ids: Value, kinds: Value, size: Size, vocabulary: int) -> Value:
    """Append word + position + sentence kind, normed: (tokens, width)."""
    names = (("word", vocabulary), ("position", POSITIONS), ("kind", KINDS))
    words, places, sorts = (
        net.seeded(f"embeddings.{name}.weight", (rows, size.width), SPREAD) for name, rows in names
    )
    x = net.embedding(words, ids, name="embeddings.word")
    x = net.add(x, net.embedding(sorts, kinds, name="embeddings.kind"), name="embeddings.add1")
    used = net.slice(places, begin=(0, 0), end=(size.length, size.width), name="embeddings.place")
    x = net.add(x, used, name="embeddings.add2")
    rows = net.reshape(x, shape=(size.tokens, size.width), name="embeddings.rows")
    return norm(net, rows, size.epsilon, name="embeddings.norm")


def _mask(net: Net, kept: Value, size: Size) -> Value:
    """Append (1 - mask) * -10000, shaped to be added to (batch, heads, length, length)."""
    column = net.reshape(kept, shape=(size.batch, 1, 1, size.length), name="mask.reshape")
    real = net.cast(column, dtype=net.dtype, name="mask.cast")
    turned = net.adds(net.muls(real, number=-1.0, name="mask.neg"), number=1.0, name="mask.not")
    return net.muls(turned, number=DROPPED, name="mask")


def _layer(net: Net, x: Value, size: Size, mask: Value, name: str) -> Value:
    """Append attention and the two linear layers, each added to its input and then normed."""
    y = self_attention(net, x, size, mask, name=f"{name}.attn")
    x = norm(net, net.add(y, x, name=f"{name}.add1"), size.epsilon, name=f"{name}.norm1")
    y = mlp(net, x, 4 * size.width, "gelu", name=f"{name}.mlp")
    return norm(net, net.add(y, x, name=f"{name}.add2"), size.epsilon, name=f"{name}.norm2")


def bert(name: str, size: Size, dtype: str, vocabulary: int) -> Graph:
    """Return a BERT of any size: ids, mask, kinds (batch, length) int32 -> rows, pooled."""
    check_size(name, size, POSITIONS)
    net = Net(name, dtype)
    shape = (size.batch, size.length)
    ids = net.input("input_ids", shape, "int32")
    kept = net.input("attention_mask", shape, "int32")
    kinds = net.input("token_type_ids", shape, "int32")
    mask = _mask(net, kept, size)
    x = _embedded(net, ids, kinds, size, vocabulary)
    for i in range(size.layers):
        x = _layer(net, x, size, mask, f"layer{i}")
    hidden = net.reshape(x, shape=(*shape, size.width), name="last_hidden_state")
    first = net.slice(hidden, begin=(0, 0, 0), end=(size.batch, 1, size.width), name="first")
    row = net.reshape(first, shape=(size.batch, size.width), name="first.rows")
    pooled = net.tanh(linear(net, row, size.width, name="pooler"), name="pooler_output")
    return net.finish(hidden, pooled)


def bert_base(
    batch: int = 1, length: int = 128, *, dtype: str = "fp32", layers: int = 12,
    vocabulary: int = WORDS,
) -> Graph:  # fmt: skip
    """Return BERT-base: width 768, 12 heads; fewer `layers` and words make it small to evaluate."""
    return bert("bert_base", Size(768, layers, 12, length, batch, 1e-12), dtype, vocabulary)


def bert_large(
    batch: int = 1, length: int = 128, *, dtype: str = "fp32", layers: int = 24,
    vocabulary: int = WORDS,
) -> Graph:  # fmt: skip
    """Return BERT-large: width 1024, 16 heads."""
    return bert("bert_large", Size(1024, layers, 16, length, batch, 1e-12), dtype, vocabulary)


# -- GPT-2 (Radford et al. 2019): causal attention, output weights tied to the embedding ----------
def causal(length: int) -> NDArray[Any]:
    """Return the mask (1, 1, length, length): 0 up to a token's own position, then `DROPPED`."""
    later = np.triu(np.ones((length, length), np.float32), 1)
    return (later * np.float32(DROPPED)).reshape(1, 1, length, length)


def gpt2_small(
    batch: int = 1, length: int = 128, *, dtype: str = "fp32", layers: int = 12,
    vocabulary: int = GPT_WORDS,
) -> Graph:  # fmt: skip
    """Return GPT-2 small: input_ids (batch, length) int32 -> logits (batch, length, words)."""
    size = check_size("gpt2_small", Size(768, layers, 12, length, batch, 1e-5), GPT_POSITIONS)
    net = Net("gpt2_small", dtype)
    ids = net.input("input_ids", (batch, length), "int32")
    words = net.seeded("wte.weight", (vocabulary, size.width), SPREAD)
    kind = TensorType((1, 1, length, length), dtype)
    mask = net.constant(partial(causal, length), kind, "causal_mask")
    places = net.seeded("wpe.weight", (GPT_POSITIONS, size.width), SPREAD)
    used = net.slice(places, begin=(0, 0), end=(length, size.width), name="wpe")
    x = net.add(net.embedding(words, ids, name="wte"), used, name="embedded")
    x = net.reshape(x, shape=(size.tokens, size.width), name="embedded.rows")
    for i in range(layers):
        x = encoder_block(net, x, size, mask, name=f"h{i}")
    x = norm(net, x, size.epsilon, name="ln_f")
    scores = net.matmul(x, words, trans_b=True, name="lm_head")
    return net.finish(net.reshape(scores, shape=(batch, length, vocabulary), name="logits"))
