"""Training graphs on a chip: passes keep values, kernels compute them, images stay in blocks."""

from typing import Any

import numpy as np
import pytest
from grad_cases import NETWORKS, convolutions, given

from ascend_lab.errors import UnsupportedError
from ascend_lab.graph import Graph, GraphBuilder, evaluate, run_tasks, simulate_graph
from ascend_lab.graph.passes import DEFAULT, run_passes
from ascend_lab.train import compile_training, training_graph
from ascend_lab.train.compile import as_convolutions, batch_norms_apart

CHIP = "Ascend910A"
NOISE = {"b0"}
"""A bias in front of a batch norm changes nothing: its gradient is rounding alone."""


def _close(step: Any, one: Any, two: Any, tolerance: float) -> None:
    """Compare all outputs, relative to the largest number of each."""
    skipped = {o for n, o in step.updates.items() if n.partition(".")[0] in NOISE}
    for left, right, name in zip(one.values(), two.values(), one, strict=True):
        wide = left.astype(np.float64)
        if name not in skipped:
            np.testing.assert_allclose(
                right.astype(np.float64), wide, atol=tolerance * np.abs(wide).max(), rtol=0,
                err_msg=name,
            )  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_kernels_compute_what_the_graph_says(name: str, optimizer: str) -> None:
    step = training_graph(NETWORKS[name](), dtype="fp16", loss_scale=128.0, optimizer=optimizer)
    compiled = compile_training(step, CHIP).compiled
    inputs = given(step)
    # Adam's first step divides gradients by their size: signs, however small they are
    tolerance = 0.02 if optimizer == "sgd" else 0.2
    _close(step, evaluate(step.graph, inputs), run_tasks(compiled, inputs), tolerance)


@pytest.mark.parametrize("name", NETWORKS)
def test_default_passes_keep_the_values(name: str) -> None:
    step = training_graph(NETWORKS[name](), optimizer="sgd")
    inputs = given(step)
    wanted = evaluate(step.graph, inputs)
    for one in (*((p,) for p in DEFAULT), DEFAULT):
        changed, _ = run_passes(step.graph, one)
        _close(step, wanted, evaluate(changed, inputs), 1e-4)


@pytest.mark.parametrize("rewrite", [as_convolutions, batch_norms_apart])
def test_rewrites_for_kernels_keep_the_values(rewrite: Any) -> None:
    step = training_graph(convolutions(), dtype="fp16", loss_scale=128.0)
    changed = rewrite(step.graph)
    assert changed is not step.graph
    inputs = given(step)
    _close(step, evaluate(step.graph, inputs), evaluate(changed, inputs), 0.01)


def test_rewrites_leave_no_operator_without_a_kernel() -> None:
    step = training_graph(convolutions(), dtype="fp16")
    ops = {node.op for node in as_convolutions(batch_norms_apart(step.graph)).nodes}
    assert not ops & {"conv_transpose2d", "batch_norm_training"}


def _strided(kernel: Any, stride: Any, pad: Any, dilation: int, size: tuple[int, int]) -> Graph:
    net = GraphBuilder("strided")
    x = net.conv2d(net.input("x", (2, 3, *size)), net.weight((4, 3, 1, 1), "first"), name="one")
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    weight = net.weight((5, 4, *kernel), "second")
    y = net.conv2d(x, weight, stride=stride, pad=pad, dilation=dilation, name="two")
    net.output(net.reshape(net.global_avg_pool(net.square(y)), shape=(2, 5)))
    return net.build()


@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "dilation", "size"),
    [
        (1, 2, 0, 1, (7, 8)),
        (3, 2, 1, 1, (8, 7)),
        ((3, 2), (2, 3), ((1, 0), (0, 1)), 1, (9, 8)),
        (3, 1, 2, 2, (7, 7)),
        (2, 4, 0, 1, (10, 11)),
        (1, 1, 1, 1, (5, 5)),
    ],
)
def test_images_gradients_as_convolutions(
    kernel: Any, stride: Any, pad: Any, dilation: int, size: tuple[int, int]
) -> None:
    step = training_graph(_strided(kernel, stride, pad, dilation, size), optimizer=None)
    changed = as_convolutions(step.graph)
    left = [n.op for n in changed.nodes].count("conv_transpose2d")
    assert left == (1 if (kernel, pad) == (1, 1) else 0)  # padding beyond the kernel stays
    inputs = given(step)
    _close(step, evaluate(step.graph, inputs), evaluate(changed, inputs), 1e-6)


def test_images_stay_in_blocks_of_channels() -> None:
    """Only what enters is converted: the images, and the gradient behind the mean of channels."""
    net = GraphBuilder("blocks")
    x = net.input("x", (2, 16, 8, 8))
    for i in range(3):
        x = net.conv2d(x, net.weight((16, 16, 3, 3), f"w{i}"), pad=1, name=f"conv{i}")
        rows = [net.weight((16,), f"{key}{i}") for key in ("s", "b")]
        rows += [net.fill((16,), 0.0, f"m{i}"), net.fill((16,), 1.0, f"v{i}")]
        x = net.relu(net.batch_norm(x, *rows, name=f"bn{i}"), name=f"relu{i}")
    net.output(net.reshape(net.global_avg_pool(x), shape=(2, 16)))
    stages = compile_training(training_graph(net.build(), dtype="fp16"), CHIP)
    moved = [n for n in stages.laid_out.nodes if n.op == "trans_data"]
    large = [n.name for n in moved if stages.laid_out.types[n.output].shape == (2, 16, 8, 8)]
    assert large == ["x.NC1HWC0", "global_avg_pool.grad.expand.NC1HWC0"]


def test_a_step_takes_longer_than_its_forward_half() -> None:
    step = training_graph(convolutions(), dtype="fp16")
    times = simulate_graph(compile_training(step, CHIP).compiled)
    marks = (".grad.", ".update.")
    ahead = sum(o.time_s for o in times.operators if not any(m in o.name for m in marks))
    assert 0 < ahead < times.time_s


def test_groups_with_weights_that_change_are_refused() -> None:
    net = GraphBuilder("groups")
    x = net.conv2d(net.input("x", (1, 32, 8, 8)), net.weight((32, 8, 3, 3), "w"), groups=4, pad=1)
    net.output(net.reshape(net.global_avg_pool(x), shape=(1, 32)))
    with pytest.raises(UnsupportedError, match="constant weights"):
        compile_training(training_graph(net.build(), dtype="fp16"), CHIP)
