"""Recomputation: the same numbers, fewer of them kept."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from grad_cases import NETWORKS, attention, given, mlp

from ascend_lab.graph import Graph, GraphBuilder, evaluate, zoo
from ascend_lab.graph.passes import run_passes
from ascend_lab.graph.placement import lifetimes
from ascend_lab.train import compile_training, cuts, every, training_graph
from ascend_lab.train.step import trainable


def _chain(layers: int, dtype: str = "fp32") -> Graph:
    """Linear layers with GELU, wide enough that activations outweigh weights."""
    net = GraphBuilder("chain", dtype)
    x = net.input("x", (512, 32))
    for i in range(layers):
        x = net.gelu(net.matmul(x, net.weight((32, 32), f"w{i}"), name=f"fc{i}"), name=f"act{i}")
    net.output(x)
    return net.build()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_values_are_equal_to_the_last_bit(name: str, dtype: str) -> None:
    forward = NETWORKS[name]()
    plain = training_graph(forward, dtype=dtype)
    nodes = [n.name for n in forward.nodes if n.output not in forward.outputs]
    again = training_graph(forward, dtype=dtype, recompute=nodes)
    assert "recompute" in again.phases.values()
    assert "recompute" not in plain.phases.values()
    inputs = given(plain)
    wanted, found = evaluate(plain.graph, inputs), evaluate(again.graph, inputs)
    for name_ in plain.graph.outputs:
        np.testing.assert_array_equal(wanted[name_], found[name_])


def _peak(steps: Sequence[Any]) -> int:
    """Return the most bytes of tensors needed at once."""
    end = max(life.last for life in steps)
    return max(
        sum(life.size_bytes for life in steps if life.first <= i <= life.last)
        for i in range(end + 1)
    )


def test_peak_memory_falls() -> None:
    forward = _chain(16)
    peaks = []
    for recompute in ((), 4):
        step = training_graph(forward, dtype="fp16", optimizer=None, recompute=recompute)
        peaks.append(_peak(lifetimes(compile_training(step, "Ascend910A").compiled)))
    assert peaks[1] < 0.7 * peaks[0]


def test_cuts_part_residual_blocks() -> None:
    forward = zoo.build("resnet18", size=32)
    found = cuts(forward, trainable(forward))
    blocks = {f"layer{stage}.{i}.relu" for stage in range(1, 5) for i in range(2)}
    assert blocks <= set(found)
    # inside a block the shortcut is alive too
    assert "layer1.0.1.relu" not in found
    assert "layer2.0.1.conv" not in found


def test_a_mask_is_no_activation() -> None:
    forward = zoo.build("bert_base", layers=3, vocabulary=50)
    found = cuts(forward, trainable(forward))
    assert {f"layer{i}.norm2" for i in range(3)} <= set(found)


def test_every_nth_block_keeps_the_cuts_between() -> None:
    forward = _chain(6)
    weights = trainable(forward)
    assert cuts(forward, weights)[:4] == ("fc0", "act0", "fc1", "act1")
    assert every(forward, 2, weights) == ("fc0", "fc1", "fc2", "fc3", "fc4")
    assert every(forward, 4, weights)[:4] == ("fc0", "act0", "fc1", "fc2")
    assert every(forward, 100, weights) == ()


def test_recomputed_nodes_stand_before_the_backward_that_needs_them() -> None:
    step = training_graph(_chain(4), optimizer=None, recompute=4)
    phases = [(n.op, step.phases[n.name]) for n in step.graph.nodes]
    first = next(i for i, (_, phase) in enumerate(phases) if phase == "recompute")
    assert any(phase == "backward" for _, phase in phases[:first])
    again = [op for op, phase in phases if phase == "recompute"]
    assert sorted(again) == ["gelu", "matmul", "matmul"]


def test_merging_equal_nodes_would_undo_it() -> None:
    step = training_graph(attention(), optimizer=None, recompute=["norm", "act", "qkv"])
    merged, _ = run_passes(step.graph, ["CommonSubexpressionEliminationPass"])
    assert not any(step.phases.get(n.name) == "recompute" for n in merged.nodes)
    kept = compile_training(training_graph(
        attention(), dtype="fp16", optimizer=None, recompute=["norm", "act", "qkv"]
    ), "Ascend910A").rewritten  # fmt: skip
    assert any(n.name.endswith(".again") for n in kept.nodes)


def test_outputs_are_kept_whatever_is_asked() -> None:
    step = training_graph(mlp(), recompute=["fc1", "act", "fc2"])
    again = [n.name for n in step.graph.nodes if step.phases[n.name] == "recompute"]
    assert again == ["fc1.again", "act.again"]
