"""Small models and data, trained once on one device, and how far a plan's run is from that."""

from functools import cache

import numpy as np

from ascend_lab.cluster.parallel import values
from ascend_lab.cluster.parallel.values import Batch, Model, Piece, Run, models


def perceptron(features: int = 6, width: int = 8, classes: int = 4) -> Model:
    """Return a classifier: a linear map, two residual layers, head; no gradient of it is 0."""
    rng = np.random.default_rng(0)
    blocks = [
        Piece(
            f"layer{i}",
            models.mlp_weights(width, 4 * width, rng),
            lambda net, x, _: models.mlp(net, x),
            models.MLP_SHARDS,
        )
        for i in range(2)
    ]
    weights = {"weight": models.normal(rng, features, width), "bias": 0.1 * rng.normal(size=width)}
    first = Piece("input", weights, lambda net, x, _: net.linear(x, "weight", "bias"))
    return Model((first, *blocks, models.head("head", width, classes, rng)))


def points(batches: int = 3, batch: int = 16, features: int = 6, classes: int = 4) -> list[Batch]:
    """Return batches of points whose class is the largest of a few random projections."""
    rng = np.random.default_rng(1)
    truth = rng.normal(size=(features, classes))
    inputs = [rng.normal(size=(batch, features)) for _ in range(batches)]
    return [Batch(x, np.argmax(x @ truth, axis=1).astype(np.int32)) for x in inputs]


SGD = values.Sgd(lr=0.1, momentum=0.9)
MODELS = {
    "transformer": values.transformer,
    "perceptron": perceptron,
    "experts": values.experts_transformer,
    "experts-top1": lambda: values.experts_transformer(routing=values.Routing(top=1, factor=0.75)),
}
STEPS = 3


@cache
def case(name: str) -> tuple[Model, list[Batch], Run]:
    """Return a model, its batches and its run on one device."""
    model = MODELS[name]()
    data = points(STEPS) if name == "perceptron" else values.sentences(STEPS)
    return model, data, values.train_single(model, data, SGD)


def distance(run: Run, single: Run) -> float:
    """Return the largest relative difference of losses, gradients and parameters.

    Each tensor is measured against its own largest element, but the gradient of a bias of keys,
    which is 0 but for rounding, against the largest of all gradients.
    """
    found = [abs(a - b) / b for a, b in zip(run.losses, single.losses, strict=True)]
    for a, b in zip(run.gradients, single.gradients, strict=True):
        found.append(apart(a, b))
    return max(*found, apart(run.parameters, single.parameters))


def apart(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """Return the largest relative difference of two sets of tensors."""
    assert found.keys() == wanted.keys()
    top = max(np.abs(w).max() for w in wanted.values())
    return max(
        np.abs(found[k] - w).max() / (top if "key.bias" in k else np.abs(w).max())
        for k, w in wanted.items()
    )
