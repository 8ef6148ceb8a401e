"""Batch norm in training steps of images: its gradients, and that all stays in NC1HWC0."""

from typing import Any

import numpy as np
import pytest
from grad_cases import check_gradients, given

from ascend_lab.chip import load_chip
from ascend_lab.graph import Graph, GraphBuilder, evaluate, run_tasks
from ascend_lab.graph.passes import DEFAULT, run_passes
from ascend_lab.train import compile_training, training_graph
from ascend_lab.train.compile import casts_apart
from ascend_lab.train.profile import compile_step

CHIP = "Ascend910A"


def _norm(net: GraphBuilder, x: Any, name: str) -> Any:
    c = x.shape[1]
    rows = [net.weight((c,), f"{name}.{key}") for key in ("scale", "bias")]
    rows += [net.fill((c,), 0.0, f"{name}.mean"), net.fill((c,), 1.0, f"{name}.variance")]
    return net.batch_norm(x, *rows, name=name)


def _residual(c: int = 32) -> Graph:
    """A block whose skip path has a norm of its own: both norms read one gradient."""
    net = GraphBuilder("residual")
    x = net.input("x", (2, c, 6, 6))
    main = _norm(net, net.conv2d(x, net.weight((c, c, 3, 3), "w"), pad=1, name="conv"), "bn")
    skip = _norm(net, net.conv2d(x, net.weight((c, c, 1, 1), "v"), name="skip"), "skip_bn")
    y = net.relu6(net.add(main, skip, name="sum"), name="relu")
    net.output(net.reshape(net.global_avg_pool(y), shape=(2, c)))
    return net.build()


@pytest.mark.parametrize("shape", [(3, 5, 4, 3), (2, 17, 1, 6), (6, 4)])
def test_gradients_equal_central_differences(shape: tuple[int, ...]) -> None:
    """Images, whose sums are one operator, and rows of features, whose sums are nodes."""
    net = GraphBuilder("norm")
    x = net.mul(net.input("x", shape), net.weight(shape, "w"), name="product")
    y = net.square(_norm(net, x, "bn"))
    net.output(net.reshape(y, shape=(shape[0], int(np.prod(shape[1:])))))
    step = training_graph(net.build(), optimizer=None)
    ops = {node.op for node in step.graph.nodes}
    assert ("bn_training_update_grad" in ops) == (len(shape) == 4)
    check_gradients(step, given(step))


@pytest.mark.parametrize(("c", "chip"), [(32, CHIP), (20, CHIP), (20, "Ascend910B2")])
def test_kernels_compute_what_the_graph_says(c: int, chip: str) -> None:
    step = training_graph(_residual(c), optimizer=None, dtype="fp16", loss_scale=64.0)
    compiled = compile_training(step, chip).compiled
    assert [node.op for node in compiled.graph.nodes].count("bn_training_reduce") == 2
    inputs = given(step)
    wanted, got = evaluate(step.graph, inputs), run_tasks(compiled, inputs)
    for left, right, name in zip(wanted.values(), got.values(), wanted, strict=True):
        wide = left.astype(np.float64)
        atol = 0.02 * np.abs(wide).max()
        np.testing.assert_allclose(right, wide, atol=atol, rtol=0, err_msg=name)


def test_nothing_between_convolutions_leaves_the_blocks() -> None:
    """What is converted is the image, the gradient behind the mean, and the weights' gradients."""
    step = training_graph(_residual(), optimizer=None, dtype="fp16")
    compiled = compile_step(step, load_chip(CHIP))
    image = (2, 32, 6, 6)
    moved = [n for n in compiled.graph.nodes if n.op == "trans_data"]
    large = [n.name for n in moved if compiled.graph.types[n.output].shape == image]
    assert sorted(large) == ["global_avg_pool.grad.expand.NC1HWC0", "x.NC1HWC0"]
    norms = [t.nodes for t in compiled.tasks if t.lowered and any("bn" in n for n in t.nodes)]
    # statistics, y twice (the second with sum and relu6), gradients of scale and bias, dx twice
    kernels = [names for names in norms if not any(".update." in n for n in names)]
    assert len(kernels) <= 9


def test_shared_casts_are_made_once_per_reader() -> None:
    step = training_graph(_residual(), optimizer=None, dtype="fp16", loss_scale=64.0)
    merged, _ = run_passes(step.graph, DEFAULT)
    changed = casts_apart(merged)
    assert len(changed.nodes) > len(merged.nodes)
    inputs = given(step)
    for one, two in zip(evaluate(merged, inputs).values(), evaluate(changed, inputs).values(),
                        strict=True):  # fmt: skip
        np.testing.assert_array_equal(one, two)
