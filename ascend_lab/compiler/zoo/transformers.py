"""Builders of transformers: BERT, GPT-2, ViT-B/16 and MobileViT.

The tokens of all sequences of a batch are the rows of one matrix (batch * length, width). Attention
is five nodes on (batch, heads, length, depth): product, scale, mask, softmax, product, with
transposes before and after; a pass may replace them by one `attention`. Weights are normal with
standard deviation 0.02, the initial weights of BERT and GPT-2. GELU is the library's tanh form;
BERT's original has the error function (they differ by < 0.0005).
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ascend_lab.compiler.draft import Value
from ascend_lab.compiler.ir import Fill, Graph, TensorType
from ascend_lab.compiler.zoo.blocks import Net, family, image_network, rounded
from ascend_lab.compiler.zoo.mobile import Inverted, inverted
from ascend_lab.errors import InputError

WEIGHT_DEVIATION = 0.02
"""Standard deviation of the weights."""
WORDS = 30522
"""Tokens of BERT's vocabulary."""
POSITIONS = 512
"""The longest sequence of BERT, with a learned vector for each position."""
SEGMENTS = 2
"""BERT reads two sentences, with a learned vector for the tokens of each."""
GPT_VOCABULARY = 50257
GPT_POSITIONS = 1024
MASKED_SCORE = -10000.0
"""The number that a mask adds to the score of a token that is padding, or comes later."""


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a transformer: width of a token, layers, heads, sequence length, batch."""

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
    for word, count in (("batch", size.batch), ("layers", size.layers)):
        if count < 1:
            raise InputError(f"{name}: {word} of at least 1", str(count), "raise it")
    return size


def linear(net: Net, x: Value, features: int, *, name: str) -> Value:
    """Append x w + b in two nodes: (rows, inputs) to (rows, features)."""
    weight = net.seeded(f"{name}.weight", (x.shape[1], features), WEIGHT_DEVIATION)
    bias = net.seeded(f"{name}.bias", (features,), WEIGHT_DEVIATION)
    return net.add(net.matmul(x, weight, name=f"{name}.matmul"), bias, name=name)


def norm(net: Net, x: Value, epsilon: float, *, name: str) -> Value:
    """Append a layer norm over the width."""
    scale = net.seeded(f"{name}.scale", x.shape[-1:], 0.05, 1.0)
    bias = net.seeded(f"{name}.bias", x.shape[-1:], 0.05)
    return net.layer_norm(x, scale, bias, epsilon=epsilon, name=name)


def mlp(net: Net, x: Value, inner: int, act: str, *, name: str) -> Value:
    """Append the two linear layers of a block, with an activation between them."""
    y = net.act(linear(net, x, inner, name=f"{name}.1"), act, name=f"{name}.{act}")
    return linear(net, y, x.shape[1], name=f"{name}.2")


def heads(
    net: Net, x: Value, batch: int, count: int, order: tuple[int, ...], *, name: str
) -> Value:
    """Reshape rows (batch * length, width) to (batch, length, heads, depth) and transpose them.

    `count` is the number of heads, `order` the permutation of the four axes.
    """
    # BERT-base, batch 2, 128 tokens: (256, 768) to (2, 128, 12, 64), then to (2, 12, 128, 64)
    shape = (batch, x.shape[0] // batch, count, x.shape[1] // count)
    parts = net.reshape(x, shape=shape, name=f"{name}.reshape")
    return net.transpose(parts, perm=order, name=f"{name}.transpose")


def rows_of(net: Net, context: Value, *, name: str) -> Value:
    """Transpose and reshape (batch, heads, length, depth) to rows (batch * length, width)."""
    batch, count, length, depth = context.shape
    rows = net.transpose(context, perm=(0, 2, 1, 3), name=f"{name}.transpose")
    return net.reshape(rows, shape=(batch * length, count * depth), name=f"{name}.reshape")


def self_attention(
    net: Net, x: Value, size: Size, mask: Value | None, *, name: str, joined: bool = False
) -> Value:
    """Append softmax(q k^T / sqrt(depth) + mask) v and its linear layers.

    With `joined`, a single linear layer computes q, k and v.
    """
    if joined:
        joined_qkv = linear(net, x, 3 * size.width, name=f"{name}.qkv")
        q, k, v = net.split(joined_qkv, sizes=3, axis=1, name=f"{name}.split")
    else:
        q, k, v = (linear(net, x, size.width, name=f"{name}.{part}") for part in "qkv")
    # keys become (batch, heads, depth, length), so that the product needs no transposed operand
    parts = ((q, (0, 2, 1, 3), "q"), (k, (0, 2, 3, 1), "k"), (v, (0, 2, 1, 3), "v"))
    queries, keys, values = (
        heads(net, rows, size.batch, size.heads, order, name=f"{name}.{part}")
        for rows, order, part in parts
    )
    weights = net.attention_weights(queries, keys, mask, name=name)
    context = net.batch_matmul(weights, values, name=f"{name}.context")
    return linear(net, rows_of(net, context, name=name), size.width, name=f"{name}.out")


def encoder_block(
    net: Net,
    x: Value,
    size: Size,
    mask: Value | None,
    *,
    name: str,
    hidden: tuple[int, str] | None = None,
) -> Value:
    """Append a block with a layer norm before the attention and before the MLP (GPT-2, ViT).

    `hidden` is the width of the MLP's hidden layer and its activation, by default 4 times the
    width of a token and GELU.
    """
    y = norm(net, x, size.epsilon, name=f"{name}.norm1")
    y = self_attention(net, y, size, mask, name=f"{name}.attn", joined=True)
    x = net.add(x, y, name=f"{name}.add1")
    y = norm(net, x, size.epsilon, name=f"{name}.norm2")
    hidden_width, act = hidden or (4 * size.width, "gelu")
    y = mlp(net, y, hidden_width, act, name=f"{name}.mlp")
    return net.add(x, y, name=f"{name}.add2")


# -- BERT (Devlin et al. 2019): uncased vocabulary, with the pooler -------------------------------
def _embedded(net: Net, ids: Value, segments: Value, size: Size, vocabulary: int) -> Value:
    """Append the embedding: layer norm of token + position + segment vectors, (tokens, width)."""
    names = (("word", vocabulary), ("position", POSITIONS), ("kind", SEGMENTS))
    token_table, position_table, segment_table = (
        net.seeded(f"embeddings.{name}.weight", (rows, size.width), WEIGHT_DEVIATION)
        for name, rows in names
    )
    token_vectors = net.embedding(token_table, ids, name="embeddings.word")
    segment_vectors = net.embedding(segment_table, segments, name="embeddings.kind")
    x = net.add(token_vectors, segment_vectors, name="embeddings.add1")
    end = (size.length, size.width)
    positions = net.slice(position_table, begin=(0, 0), end=end, name="embeddings.place")
    x = net.add(x, positions, name="embeddings.add2")
    rows = net.reshape(x, shape=(size.tokens, size.width), name="embeddings.rows")
    return norm(net, rows, size.epsilon, name="embeddings.norm")


def _mask(net: Net, attention_mask: Value, size: Size) -> Value:
    """Append (1 - mask) * -10000, shaped to be added to (batch, heads, length, length)."""
    shape = (size.batch, 1, 1, size.length)
    column = net.reshape(attention_mask, shape=shape, name="mask.reshape")
    floats = net.cast(column, dtype=net.dtype, name="mask.cast")
    # a mask of 1, 1, 0 becomes 0, 0, -10000
    negative = net.muls(floats, number=-1.0, name="mask.neg")
    is_padding = net.adds(negative, number=1.0, name="mask.not")
    return net.muls(is_padding, number=MASKED_SCORE, name="mask")


def _bert_layer(net: Net, x: Value, size: Size, mask: Value, name: str) -> Value:
    """Append attention and the MLP; each is added to its input, and a layer norm follows."""
    y = self_attention(net, x, size, mask, name=f"{name}.attn")
    x = norm(net, net.add(y, x, name=f"{name}.add1"), size.epsilon, name=f"{name}.norm1")
    y = mlp(net, x, 4 * size.width, "gelu", name=f"{name}.mlp")
    return norm(net, net.add(y, x, name=f"{name}.add2"), size.epsilon, name=f"{name}.norm2")


def bert(name: str, size: Size, dtype: str, vocabulary: int) -> Graph:
    """Return a BERT of any size: ids, mask, segments (batch, length) int32 -> rows, pooled."""
    check_size(name, size, POSITIONS)
    net = Net(name, dtype)
    shape = (size.batch, size.length)
    ids = net.input("input_ids", shape, "int32")
    attention_mask = net.input("attention_mask", shape, "int32")
    segments = net.input("token_type_ids", shape, "int32")
    mask = _mask(net, attention_mask, size)
    x = _embedded(net, ids, segments, size, vocabulary)
    for i in range(size.layers):
        x = _bert_layer(net, x, size, mask, f"layer{i}")
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


# -- GPT-2 (Radford et al. 2019): causal attention, output weights tied to the embedding ----------
def causal(length: int) -> np.ndarray:
    """Return the mask (1, 1, length, length): 0 up to a token's position, then `MASKED_SCORE`."""
    # Length 3: rows (0, -1e4, -1e4), (0, 0, -1e4), (0, 0, 0).
    later = np.triu(np.ones((length, length), np.float32), 1)
    return (later * np.float32(MASKED_SCORE)).reshape(1, 1, length, length)


def gpt2_small(
    batch: int = 1,
    length: int = 128,
    *,
    dtype: str = "fp32",
    layers: int = 12,
    vocabulary: int = GPT_VOCABULARY,
) -> Graph:
    """Return GPT-2 small: input_ids (batch, length) int32 -> logits (batch, length, words)."""
    size = check_size("gpt2_small", Size(768, layers, 12, length, batch, 1e-5), GPT_POSITIONS)
    net = Net("gpt2_small", dtype)
    ids = net.input("input_ids", (batch, length), "int32")
    token_table = net.seeded("wte.weight", (vocabulary, size.width), WEIGHT_DEVIATION)
    kind = TensorType((1, 1, length, length), dtype)
    mask = net.constant(partial(causal, length), kind, "causal_mask")
    position_table = net.seeded("wpe.weight", (GPT_POSITIONS, size.width), WEIGHT_DEVIATION)
    # sequences of 128 tokens use the first 128 of 1024 learned positions
    positions = net.slice(position_table, begin=(0, 0), end=(length, size.width), name="wpe")
    x = net.add(net.embedding(token_table, ids, name="wte"), positions, name="embedded")
    x = net.reshape(x, shape=(size.tokens, size.width), name="embedded.rows")
    for i in range(layers):
        x = encoder_block(net, x, size, mask, name=f"h{i}")
    x = norm(net, x, size.epsilon, name="ln_f")
    scores = net.matmul(x, token_table, trans_b=True, name="lm_head")
    return net.finish(net.reshape(scores, shape=(batch, length, vocabulary), name="logits"))


# -- ViT ------------------------------------------------------------------------------------------
def vit_b16(
    batch: int = 1, *, size: int = 224, dtype: str = "fp32", classes: int = 1000, layers: int = 12
) -> Graph:
    """Return ViT-B/16 (Dosovitskiy et al. 2021): x (batch, 3, size, size) -> logits."""
    if size % 16:
        raise InputError("vit_b16: a size divisible by 16", str(size), "pad the image")
    net = Net("vit_b16", dtype)
    # 224 x 224 pixels are 14 x 14 patches; with one token for the class 197
    length = (size // 16) ** 2 + 1
    sizes = check_size("vit_b16", Size(768, layers, 12, length, batch, 1e-6), 1 << 16)
    x = net.images(batch, 3, size)
    x = net.conv(x, sizes.width, 16, stride=16, pad=(0, 0), name="patches")
    x = net.transpose(net.reshape(x, shape=(batch, sizes.width, -1)), perm=(0, 2, 1))
    token = net.seeded("class_token", (1, 1, sizes.width), WEIGHT_DEVIATION)
    first = net.expand(token, shape=(batch, 1, sizes.width), name="class_token.expand")
    x = net.concat(first, x, axis=1, name="tokens")
    positions = net.seeded("positions", (1, length, sizes.width), WEIGHT_DEVIATION)
    x = net.reshape(net.add(x, positions), shape=(sizes.tokens, sizes.width), name="tokens.rows")
    for i in range(layers):
        x = encoder_block(net, x, sizes, None, name=f"layer{i}")
    x = net.reshape(norm(net, x, sizes.epsilon, name="norm"), shape=(batch, length, sizes.width))
    x = net.slice(x, begin=(0, 0, 0), end=(batch, 1, sizes.width), name="first")
    x = net.reshape(x, shape=(batch, sizes.width))
    return net.finish(net.dense(x, classes, name="head"))


# -- MobileViT ------------------------------------------------------------------------------------
PATCH_SIZE = 2


def _unfolded(net: Net, x: Value, order: tuple[int, ...]) -> Value:
    """Reshape an image (n, d, h, w) to (n, d, patches, pixels of a patch), then transpose it."""
    n, d, h, w = x.shape
    # (1, 96, 32, 32): (1536, 2, 16, 2), transposed to (1536, 16, 2, 2), reshaped to (1, 96, 256, 4)
    # with 256 patches of 2 x 2 pixels
    x = net.reshape(x, shape=(n * d * h // PATCH_SIZE, PATCH_SIZE, w // PATCH_SIZE, PATCH_SIZE))
    x = net.reshape(
        net.transpose(x, perm=(0, 2, 1, 3)), shape=(n, d, h * w // PATCH_SIZE**2, PATCH_SIZE**2)
    )
    return net.transpose(x, perm=order)


def _folded(net: Net, x: Value, order: tuple[int, ...], shape: tuple[int, ...]) -> Value:
    """Append the inverse of `_unfolded`."""
    n, d, h, w = shape
    x = net.transpose(x, perm=order)
    x = net.reshape(x, shape=(n * d * h // PATCH_SIZE, w // PATCH_SIZE, PATCH_SIZE, PATCH_SIZE))
    return net.reshape(net.transpose(x, perm=(0, 2, 1, 3)), shape=shape)


def _mobilevit_block(net: Net, start: Value, width: int, layers: int, name: str) -> Value:
    """Append convolutions, transformer layers over patches, and a concatenation with the input."""
    channels = start.shape[1]
    x = net.conv_norm(start, channels, 3, act="silu", name=f"{name}.local")
    x = net.conv(x, width, bias=False, name=f"{name}.up")
    n, d, h, w = shape = x.shape
    # pixels at the same position of all patches are one sequence
    # (1, 144, 32, 32): 4 sequences of 256 tokens
    size = Size(d, 0, 4, h * w // PATCH_SIZE**2, n * PATCH_SIZE**2, 1e-5)
    x = net.reshape(_unfolded(net, x, (0, 3, 2, 1)), shape=(size.tokens, d))
    for i in range(layers):
        x = encoder_block(net, x, size, None, name=f"{name}.{i}", hidden=(2 * width, "silu"))
    x = norm(net, x, size.epsilon, name=f"{name}.norm")
    x = net.reshape(x, shape=(n, PATCH_SIZE**2, size.length, d))
    x = _folded(net, x, (0, 3, 2, 1), shape)
    x = net.conv_norm(x, channels, act="silu", name=f"{name}.down")
    x = net.concat(start, x, axis=1, name=f"{name}.concat")
    return net.conv_norm(x, channels, 3, act="silu", name=f"{name}.join")


def mobilevit_block(
    batch: int = 1,
    *,
    size: int = 32,
    dtype: str = "fp32",
    channels: int = 96,
    width: int = 144,
    layers: int = 2,
) -> Graph:
    """Return a MobileViT block (Mehta & Rastegari 2022), by default the first of MobileViT-S.

    x (batch, channels, size, size) keeps its shape; raises `InputError` for an odd size.
    """
    if size % PATCH_SIZE:
        raise InputError("mobilevit_block: an even size", str(size), "pad the image")
    net = Net("mobilevit_block", dtype)
    return net.finish(
        _mobilevit_block(net, net.images(batch, channels, size), width, layers, "mvit")
    )


MOBILEVIT_SIZES = {
    "xxs": (2, (16, 24, 48, 64, 80), (64, 80, 96), 320),
    "xs": (4, (32, 48, 64, 80, 96), (96, 120, 144), 384),
    "s": (4, (32, 64, 96, 128, 160), (144, 192, 240), 640),
}
"""Expansion, features of five stages, widths of the transformers, features of the last layer."""
MOBILEVIT_LAYERS = (2, 4, 3)


class MobileViTSizes(NamedTuple):
    """A row of `MOBILEVIT_SIZES`: the sizes of a MobileViT."""

    expansion: int
    features: tuple[int, ...]
    widths: tuple[int, ...]
    last_features: int


def _mobilevit(sizes: MobileViTSizes, net: Net, x: Value, classes: int) -> Value:
    """Return MobileViT: inverted residuals and three MobileViT blocks."""
    expansion, features, widths, last_features = sizes
    x = net.conv_norm(x, 16, 3, stride=2, act="silu", name="stem")
    first_features, second_features, *later_features = features
    for i, (stage_features, stride) in enumerate(
        ((first_features, 1), (second_features, 2), (second_features, 1), (second_features, 1))
    ):
        block = Inverted(expansion * x.shape[1], stage_features, stride=stride, act="silu")
        x = inverted(net, x, block, f"mv2.{i}")
    for i, (stage_features, width, layers) in enumerate(
        zip(later_features, widths, MOBILEVIT_LAYERS, strict=True), 3
    ):
        block = Inverted(expansion * x.shape[1], stage_features, stride=2, act="silu")
        x = _mobilevit_block(
            net, inverted(net, x, block, f"stage{i}.mv2"), width, layers, f"stage{i}.mvit"
        )
    x = net.conv_norm(x, last_features, act="silu", name="last")
    return net.head(x, classes)


# -- MobileViT V2: attention whose cost grows with the tokens, not with their square --------------
def _image_norm(net: Net, x: Value, name: str) -> Value:
    """Append a group norm of one group: over the whole image, with a scale for each channel."""
    n, c = x.shape[:2]
    # a layer norm over rows (n, c h w) is a group norm of one group without scale and bias: those
    # follow, one number for each channel
    rows = net.reshape(x, shape=(n, -1))
    ones, zeros = (
        net.constant(Fill(number), TensorType(rows.shape[1:], net.dtype), f"{name}.{number:g}")
        for number in (1.0, 0.0)
    )
    normalised = net.reshape(net.layer_norm(rows, ones, zeros), shape=x.shape)
    scale = net.seeded(f"{name}.scale", (c, 1, 1), 0.05, 1.0)
    bias = net.seeded(f"{name}.bias", (c, 1, 1), 0.05)
    return net.add(net.mul(normalised, scale), bias, name=name)


def _linear_attention(net: Net, x: Value, name: str) -> Value:
    """Append linear attention: each token has one score, and the context is one weighted sum.

    The softmax of the scores weighs the keys.
    """
    d = x.shape[1]
    # each token has one score, d numbers of its key and d of its value
    y = net.conv(x, 1 + 2 * d, name=f"{name}.qkv")
    scores, keys, values = net.split(y, sizes=(1, d, d), axis=1)
    weighted_keys = net.mul(keys, net.softmax(scores, axis=-1))
    # one context vector for each sequence: the cost grows with the tokens only
    context = net.reduce_sum(weighted_keys, axis=(3,), keepdims=True)
    return net.conv(net.mul(net.relu(values), context), d, name=f"{name}.out")


def _mobilevit_v2_block(net: Net, x: Value, width: int, layers: int, name: str) -> Value:
    """Append a depthwise layer and blocks of linear attention over patches of 2 x 2 pixels."""
    c = x.shape[1]
    x = net.depthwise(x, act="silu", name=f"{name}.local")
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
    first_features, second_features, *later_features = (
        int(c * width) for c in (64, 128, 256, 384, 512)
    )
    for i, (stage_features, stride) in enumerate(
        ((first_features, 1), (second_features, 2), (second_features, 1))
    ):
        block = Inverted(rounded(2 * x.shape[1]), stage_features, stride=stride, act="silu")
        x = inverted(net, x, block, f"mv2.{i}")
    for i, (stage_features, layers) in enumerate(
        zip(later_features, MOBILEVIT_LAYERS, strict=True), 3
    ):
        block = Inverted(rounded(2 * x.shape[1]), stage_features, stride=2, act="silu")
        x = inverted(net, x, block, f"stage{i}.mv2")
        x = _mobilevit_v2_block(net, x, rounded(stage_features / 2), layers, f"stage{i}.mvit")
    return net.head(x, classes)


MOBILEVITS = (
    *family(
        "mobilevit_",
        _mobilevit,
        {name: (MobileViTSizes(*row),) for name, row in MOBILEVIT_SIZES.items()},
        size=256,
        multiple=64,
    ),
    image_network(size=256, multiple=64, scaled=True, name="mobilevit_v2")(_mobilevit_v2),
)
