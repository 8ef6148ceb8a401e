"""BERT (Devlin et al. 2019): base and large, uncased vocabulary, with the pooler.

GELU is the library's tanh form; the original has the error function (they differ by < 0.0005).
"""

from __future__ import annotations

from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph
from ascend_lab.graph.zoo.blocks import Net
from ascend_lab.graph.zoo.transformer import (
    SPREAD,
    Size,
    check_size,
    linear,
    mlp,
    norm,
    self_attention,
)

WORDS, POSITIONS, KINDS = 30522, 512, 2
DROPPED = -10000.0
"""What the mask adds to the score of a token that is padding."""


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
    out: Value = net.muls(turned, number=DROPPED, name="mask")
    return out


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
    batch: int = 1,
    length: int = 128,
    *,
    dtype: str = "fp32",
    layers: int = 12,
    vocabulary: int = WORDS,
) -> Graph:
    """Return BERT-base: width 768, 12 heads; fewer `layers` and words make it small to evaluate."""
    return bert("bert_base", Size(768, layers, 12, length, batch, 1e-12), dtype, vocabulary)


def bert_large(
    batch: int = 1,
    length: int = 128,
    *,
    dtype: str = "fp32",
    layers: int = 24,
    vocabulary: int = WORDS,
) -> Graph:
    """Return BERT-large: width 1024, 16 heads."""
    return bert("bert_large", Size(1024, layers, 16, length, batch, 1e-12), dtype, vocabulary)
