"""Small models and data to train: a transformer language model and a multi-layer perceptron."""

from __future__ import annotations

import numpy as np

from ascend_lab.errors import ClusterError
from ascend_lab.parallel.values.blocks import layer, mlp_layer
from ascend_lab.parallel.values.experts import experts_layer
from ascend_lab.parallel.values.group import Ranked
from ascend_lab.parallel.values.pieces import Batch, Model, Net, Piece, normal
from ascend_lab.parallel.values.tape import Var
from ascend_lab.parallel.values.vocabulary import embed, head


def transformer(
    layers: int = 2,
    width: int = 16,
    heads: int = 4,
    vocabulary: int = 24,
    length: int = 8,
    seed: int = 0,
) -> Model:
    """Return a causal language model: embedding, layers of 4 x width hidden units, head."""
    rng = np.random.default_rng(seed)
    inner = (layer(f"layer{i}", width, heads, 4 * width, rng) for i in range(layers))
    first = embed("embed", vocabulary, length, width, rng)
    return Model((first, *inner, head("head", width, vocabulary, rng)))


def experts_transformer(
    layers: int = 1,
    width: int = 16,
    heads: int = 4,
    experts: int = 4,
    top: int = 2,
    factor: float = 1.25,
    vocabulary: int = 24,
    length: int = 8,
    seed: int = 0,
) -> Model:
    """Return a language model with `experts` in place of the second half of each layer."""
    rng = np.random.default_rng(seed)
    inner = (
        experts_layer(f"layer{i}", width, heads, 2 * width, experts, rng, top, factor)
        for i in range(layers)
    )
    first = embed("embed", vocabulary, length, width, rng)
    return Model((first, *inner, head("head", width, vocabulary, rng)))


def perceptron(
    features: int = 6, width: int = 8, layers: int = 2, classes: int = 4, seed: int = 0
) -> Model:
    """Return a classifier: a linear map, residual layers of 4 x width hidden units, head."""
    rng = np.random.default_rng(seed)
    inner = (mlp_layer(f"layer{i}", width, 4 * width, rng) for i in range(layers))
    first = _project("input", features, width, rng)
    return Model((first, *inner, head("head", width, classes, rng)))


def _project(name: str, features: int, width: int, rng: np.random.Generator) -> Piece:
    """Return x w + b, the same on every tensor rank."""

    def forward(net: Net, x: Var, targets: Ranked) -> Var:
        if net.sequence:
            raise ClusterError("inputs (batch, sequence) to split", str(x.shape), "no sequence")
        return net.linear(x, "weight", "bias")

    weights = {"weight": normal(rng, features, width), "bias": 0.1 * rng.normal(size=width)}
    return Piece(name, weights, forward)


def sentences(
    batches: int = 3, batch: int = 8, length: int = 8, vocabulary: int = 24, seed: int = 1
) -> list[Batch]:
    """Return batches of a language where word w is mostly followed by 3 w + 1 modulo the words."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(batches):
        words = rng.integers(vocabulary, size=(batch, length + 1))
        for t in range(length):
            follows = rng.random(batch) < 0.9
            words[:, t + 1] = np.where(follows, (3 * words[:, t] + 1) % vocabulary, words[:, t + 1])
        found.append(Batch(words[:, :-1].astype(np.int32), words[:, 1:].astype(np.int32)))
    return found


def points(
    batches: int = 3, batch: int = 16, features: int = 6, classes: int = 4, seed: int = 1
) -> list[Batch]:
    """Return batches of points whose class is the largest of a few random projections."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(features, classes))
    inputs = [rng.normal(size=(batch, features)) for _ in range(batches)]
    return [Batch(x, np.argmax(x @ truth, axis=1).astype(np.int32)) for x in inputs]
