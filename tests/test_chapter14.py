"""The figure and checks of the chapter on rewrites, and what its prose claims."""

import numpy as np
import pytest

from ascend_lab.compiler import GraphBuilder, evaluate, random_inputs
from ascend_lab.compiler.passes import PASSES, Pass, convert, run_passes, sweep
from ascend_lab.errors import GraphError
from ascend_lab.lab.figures.networks import ORDERS
from ascend_lab.lab.graph_examples import exported_block

FOLD = "ConvBatchnormFusionPass"


# -- what the prose claims -------------------------------------------------------------------------
def test_the_exported_block_keeps_its_values_and_few_of_its_operators():
    block = exported_block(length=16, width=32, heads=2)
    after, _ = run_passes(block)
    inputs = random_inputs(block)
    wanted, got = (evaluate(graph, inputs)["y"] for graph in (block, after))
    assert np.abs(wanted - got).max() < 1e-5 * np.abs(wanted).max()
    ops = [node.op for node in after.nodes]
    assert len(block.nodes) == 61
    assert len(ops) == 26
    for op, count in {"layer_norm": 2, "gelu": 1, "flash_attention": 1, "gemm": 6}.items():
        assert ops.count(op) == count


def test_one_round_depends_on_the_order_and_many_do_not():
    block = exported_block()
    left = {
        (order, rounds): len(run_passes(block, names, rounds=rounds)[0].nodes)
        for order, names in ORDERS.items()
        for rounds in (1, 8)
    }
    assert left["default", 1] < len(block.nodes) < left["backwards", 1]
    assert left["default", 8] == left["backwards", 8] < left["default", 1]


def test_passes_that_undo_each_other_are_refused(monkeypatch):
    turn = sweep(lambda rw, node: rw.become(node, node.op, node.inputs[::-1]), "add")
    monkeypatch.setitem(PASSES, "Restless", Pass("Restless", "prepare", turn, "Turns sums round."))
    net = GraphBuilder("sums")
    net.output(net.add(net.input("x", (4,)), net.input("z", (4,))))
    with pytest.raises(GraphError, match="Restless still matches after 100 rounds"):
        run_passes(net.build(), ["Restless"])
    _, report = run_passes(net.build(), ["Restless"], rounds=3)
    assert (report.rounds, report.settled) == (3, False)
    assert str(report).endswith("1 -> 1 nodes, not settled")
    assert run_passes(net.build())[1].settled


def test_a_dead_channel_folds_in_fp32_only():
    net = GraphBuilder("dead", dtype="fp16")
    x = net.input("x", (1, 1, 1, 1))
    c = net.conv2d(x, net.constant(np.ones((1, 1, 1, 1), np.float16)))
    rows = [net.constant(np.array([v], np.float32)) for v in (1, 1, 0, 0)]
    net.output(net.batch_norm(c, *rows, epsilon=1e-12, name="y"))
    dead = net.build()
    zero = {"x": np.zeros((1, 1, 1, 1), np.float16)}
    wide = convert(PASSES[FOLD].run(convert(dead, "fp32", "fp16")[0]), "fp16")[0]
    assert evaluate(dead, zero)["y"].item() == evaluate(wide, zero)["y"].item() == 1
    assert np.isnan(evaluate(PASSES[FOLD].run(dead), zero)["y"]).all()
