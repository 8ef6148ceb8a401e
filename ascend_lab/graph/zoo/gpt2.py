"""GPT-2 small (Radford et al. 2019): causal attention, output weights tied to the embedding."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab.graph.draft import Value
from ascend_lab.graph.ir import Graph, TensorType
from ascend_lab.graph.zoo.blocks import Net
from ascend_lab.graph.zoo.transformer import SPREAD, Size, check_size, encoder_block, norm

WORDS, POSITIONS = 50257, 1024
DROPPED = -10000.0
"""What the mask adds to the score of a token that comes later."""


def causal(length: int) -> NDArray[Any]:
    """Return the mask (1, 1, length, length): 0 up to a token's own position, then `DROPPED`."""
    later = np.triu(np.ones((length, length), np.float32), 1)
    return (later * np.float32(DROPPED)).reshape(1, 1, length, length)


def _embedded(net: Net, ids: Value, words: Value, size: Size) -> Value:
    """Append word + position: (tokens, width)."""
    places = net.seeded("wpe.weight", (POSITIONS, size.width), SPREAD)
    used = net.slice(places, begin=(0, 0), end=(size.length, size.width), name="wpe")
    x = net.add(net.embedding(words, ids, name="wte"), used, name="embedded")
    out: Value = net.reshape(x, shape=(size.tokens, size.width), name="embedded.rows")
    return out


def gpt2_small(
    batch: int = 1,
    length: int = 128,
    *,
    dtype: str = "fp32",
    layers: int = 12,
    vocabulary: int = WORDS,
) -> Graph:
    """Return GPT-2 small: input_ids (batch, length) int32 -> logits (batch, length, words)."""
    size = check_size("gpt2_small", Size(768, layers, 12, length, batch, 1e-5), POSITIONS)
    net = Net("gpt2_small", dtype)
    ids = net.input("input_ids", (batch, length), "int32")
    words = net.seeded("wte.weight", (vocabulary, size.width), SPREAD)
    kind = TensorType((1, 1, length, length), dtype)
    mask = net.constant(partial(causal, length), kind, "causal_mask")
    x = _embedded(net, ids, words, size)
    for i in range(layers):
        x = encoder_block(net, x, size, mask, name=f"h{i}")
    x = norm(net, x, size.epsilon, name="ln_f")
    scores = net.matmul(x, words, trans_b=True, name="lm_head")
    return net.finish(net.reshape(scores, shape=(batch, length, vocabulary), name="logits"))
