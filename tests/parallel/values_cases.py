"""Small models and data, trained once on one device, and how far a plan's run is from that."""

from functools import cache

import numpy as np

from ascend_lab.parallel import values
from ascend_lab.parallel.values import Batch, Model, Run

SGD = values.Sgd(lr=0.1, momentum=0.9)
MODELS = {
    "transformer": values.transformer,
    "perceptron": values.perceptron,
    "experts": values.experts_transformer,
    "experts-top1": lambda: values.experts_transformer(top=1, factor=0.75),
}
STEPS = 3


@cache
def case(name: str) -> tuple[Model, list[Batch], Run]:
    """Return a model, its batches and its run on one device."""
    model = MODELS[name]()
    data = values.points(STEPS) if name == "perceptron" else values.sentences(STEPS)
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
