"""Every well-known network becomes a training graph that is sound and trains all its parameters."""

from typing import Any

import numpy as np
import pytest
from grad_cases import doubled, given

from ascend_lab.graph import evaluate, verify, zoo
from ascend_lab.train import training_graph

SMALL: dict[str, dict[str, Any]] = {
    "bert_base": {"layers": 2},
    "bert_large": {"layers": 2},
    "gpt2_small": {"layers": 2},
    "vit_b16": {"layers": 2},
}
"""What makes a model of equal layers quick to build."""


CORE = ("alexnet", "resnet18", "mobilenet_v3_large", "shufflenet_v2", "densenet121", "unet",
        "gpt2_small", "vit_b16", "ghostnet_v2", "mobile_former_26m", "efficientformer_v2_s0",
        "resnext50")  # fmt: skip
"""One of each way to be built; the others only on demand."""
FIXED = ("ghostnet_v2", "efficientformer_v2")
"""They resample by fixed kernels, which a training graph takes for weights like any other."""
NAMES = [pytest.param(n, marks=() if n in CORE else pytest.mark.full) for n in zoo.ZOO]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["fp16", pytest.param("fp32", marks=pytest.mark.full)])
def test_networks_train_all_their_parameters(name: str, dtype: str) -> None:
    forward = zoo.build(name, **SMALL.get(name, {}))
    step = training_graph(forward, dtype=dtype, optimizer="adam", loss_scale=1024.0)
    verify(step.graph)
    extra = step.parameter_count - zoo.parameters(forward)
    assert extra > 0 if name.startswith(FIXED) else extra == 0
    assert set(step.gradients) == set(step.parameters)
    for parameter, slope in step.gradients.items():
        kind = step.graph.types[parameter]
        assert kind.dtype == "fp32"
        assert step.graph.types[slope].shape == kind.shape


@pytest.mark.parametrize("name", ["bert_base", "gpt2_small"])
def test_full_depth_counts_as_published(name: str) -> None:
    step = training_graph(zoo.build(name), dtype="fp16")
    assert step.parameter_count == {"bert_base": 109_482_240, "gpt2_small": 124_439_808}[name]


def test_inputs_that_are_images_become_narrow_and_tokens_stay() -> None:
    images = training_graph(zoo.build("resnet18", size=32), dtype="fp16")
    assert images.graph.types["x"].dtype == "fp16"
    tokens = training_graph(zoo.build("bert_base", layers=1), dtype="fp16")
    assert tokens.graph.types["input_ids"].dtype == "int32"
    assert len(tokens.targets) == 2  # one for the rows of tokens, one for the pooled ones


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mobilenet_v2", {"batch": 3, "size": 64, "classes": 5}),
        ("shufflenet_v2", {"batch": 3, "size": 64, "classes": 5}),
        ("unet", {"size": 16, "width": 4}),
    ],
)
def test_gradients_of_whole_networks_point_uphill(name: str, settings: dict[str, Any]) -> None:
    """The change of the loss along the gradient itself is the gradient's squared length."""
    step = training_graph(zoo.build(name, **settings), optimizer=None)
    graph, start = doubled(step.graph), given(step)
    found = evaluate(graph, start)
    slopes = {n: found[slope] for n, slope in step.gradients.items()}
    squared = sum(float((s**2).sum()) for s in slopes.values())
    length = 1e-7 / np.sqrt(squared)
    ends = [
        evaluate(graph, {**start, **{n: start[n] + sign * length * s for n, s in slopes.items()}})
        for sign in (1.0, -1.0)
    ]
    change = float(ends[0][step.loss][0] - ends[1][step.loss][0]) / (2 * length)
    assert change == pytest.approx(squared, rel=1e-4)
