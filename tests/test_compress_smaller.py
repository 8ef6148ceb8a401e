"""Fewer weights: 4:2 sparsity, channels pruned, convolutions split; golden values of sources."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from ascend_lab.compiler import GraphBuilder, evaluate, zoo
from ascend_lab.compiler.evaluate import random_inputs
from ascend_lab.deploy.compress import low_rank, pruning, sparsity
from ascend_lab.deploy.compress.digits import transformer
from ascend_lab.errors import InputError, UnsupportedError


# -- 4:2 ------------------------------------------------------------------------------------------
def test_the_mask_of_two_rows_is_the_golden_one():
    mask = sparsity.mask_of(np.sin(np.arange(12)).reshape(2, 6))
    assert mask.tolist() == [[0, 1, 1, 0, 1, 1]] * 2
    assert sparsity.mask_of(np.ones((3, 2, 5, 5))).all()
    turned = sparsity.mask_of(np.sin(np.arange(12)).reshape(2, 6).T, axis=0)
    assert np.array_equal(turned, mask.T)
    with pytest.raises(InputError, match="finite weights"):
        sparsity.mask_of(np.array([[1.0, np.nan, 2.0]]))


ROWS = [
    ((0, 0, 5, 7), (5, 7), (2, 2)), ((0, 5, 0, 7), (5, 7), (1, 2)), ((0, 0, 0, 7), (0, 7), (0, 2)),
    ((0, 0, 5, 0), (5, 0), (2, 1)), ((0, 0, 0, 0), (0, 0), (0, 0)), ((5, 7, 0, 0), (5, 7), (0, 0)),
    ((5, 0, 0, 7), (5, 7), (0, 2)), ((0, 5, 7, 0), (5, 7), (1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("row", "kept", "indexes"), ROWS)
def test_indexes_are_the_published_ones(row, kept, indexes):
    packed = sparsity.pack(np.array([row], np.int8))
    assert tuple(packed.indexes[0, 0].tolist()) == indexes
    assert tuple(packed.kept[0, 0].tolist()) == kept


@settings(max_examples=100)
@given(hnp.arrays(np.int8, st.tuples(st.integers(1, 5), st.integers(3, 21))))
def test_packed_weights_unpack_and_take_five_eighths(weights):
    wide = weights.astype(np.int64)  # |-128| is no int8
    sparse = (wide * sparsity.mask_of(wide)).astype(np.int8)
    packed = sparsity.pack(sparse)
    assert np.array_equal(sparsity.unpack(packed, weights.shape[1]), sparse)
    groups = weights.shape[0] * -(-weights.shape[1] // 4)
    assert packed.size_bytes == 2 * groups + -(-groups // 2)
    assert (np.abs(sparse.astype(int)).sum(1) >= np.abs(wide).sum(1) / 2).all()


def test_dense_rows_are_refused():
    with pytest.raises(InputError, match="at most 2 weights in a group of 4; got 3"):
        sparsity.pack(np.array([[1, 2, 3, 0]], np.int8))
    with pytest.raises(InputError, match="rows of int8"):
        sparsity.pack(np.ones((2, 4)))


def test_sparse_networks_cost_less_where_the_chip_reads_them():
    graph = zoo.build("resnet18")
    cost = sparsity.sparse_cost(graph, "Ascend910B2")
    assert cost.packed_bytes / cost.dense_bytes == pytest.approx(0.625, rel=0.01)
    assert 0 < cost.saved_s < 1e-4
    for chip in ("Ascend310", "Ascend310P3", "Ascend910A"):
        with pytest.raises(UnsupportedError, match=f"reads 4:2 weights.*got {chip}"):
            sparsity.sparse_cost(graph, chip)


def test_a_sparsified_graph_has_half_its_weights():
    net = GraphBuilder("s")
    x = net.input("x", (2, 8, 6, 6))
    y = net.relu(net.conv2d(x, net.weight((16, 8, 3, 3), "w"), pad=1))
    y = net.reshape(net.global_avg_pool(y), shape=(2, 16))
    net.output(net.gemm(y, net.weight((10, 16), "m"), net.weight((10,)), trans_b=True))
    graph = net.build()
    found = sparsity.sparsified(graph)
    arrays = [found.constants[n.inputs[1]].array() for n in sparsity.sparse_layers(found)]
    assert [a.shape for a in arrays] == [(16, 8, 3, 3), (10, 16)]
    assert all((a != 0).mean() == 0.5 for a in arrays)
    assert (arrays[1].reshape(10, 4, 4) != 0).sum(2).max() == 2


# -- channels -------------------------------------------------------------------------------------
def test_counts_and_places_are_the_golden_ones():
    cases = [(20, 0.25, 5, 4), (64, 0.3, 19, 16), (64, 0.5, 32, 32)]
    for count, ratio, plain, aligned in cases:
        assert pruning.pruned_count(count, ratio, aligned=False) == plain
        assert pruning.pruned_count(count, ratio) == aligned
    assert pruning.pruned_count(16, 0.9) == 0
    weights = np.sin(0.7 * np.arange(120)).reshape(20, 6) * np.linspace(1, 2, 20)[:, None]
    scores = pruning.balanced_scores(weights)
    assert pruning.lowest(scores, 0.25, aligned=False) == (0, 1, 2, 3, 6)
    assert pruning.lowest(scores, 0.25) == (0, 1, 2, 3)
    for ratio in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match="a ratio from 0 to below 1"):
            pruning.pruned_count(64, ratio)


def tied_net():
    """Sums, a join, depthwise layers, norms, and a classifier on flattened pixels."""
    net = GraphBuilder("tied")
    x = net.input("x", (2, 3, 8, 8))
    a = net.relu(net.conv2d(x, net.weight((48, 3, 3, 3)), net.weight((48,)), pad=1, name="a"))
    b = net.conv2d(a, net.weight((48, 48, 1, 1)), net.weight((48,)), name="b")
    y = net.relu(net.add(a, b))
    parts = [net.weight((48,)) for _ in range(3)]
    y = net.batch_norm(y, *parts, net.fill((48,), 1.0))
    y = net.conv2d(y, net.weight((48, 1, 3, 3)), net.weight((48,)), pad=1, groups=48, name="d")
    c = net.conv2d(a, net.weight((32, 48, 1, 1)), name="c")
    y = net.concat(y, c, axis=1)
    y = net.max_pool2d(y, kernel=2, stride=2)
    y = net.reshape(y, shape=(2, 80 * 16))
    y = net.gemm(y, net.weight((80 * 16, 64)), net.weight((64,)), name="e")
    net.output(net.matmul(net.relu(y), net.weight((5, 64)), trans_b=True, name="f"))
    return net.build()


@pytest.mark.parametrize("aligned", [True, False])
def test_a_pruned_graph_is_smaller_and_equals_the_masked_one(aligned):
    graph = tied_net()
    found = pruning.prune(graph, 0.4, aligned=aligned)
    sizes = {n.name: found.graph.types[n.output].shape[1] for n in found.graph.nodes}
    wanted = (32, 32, 48) if aligned else (29, 19, 38)
    assert (sizes["a"], sizes["c"], sizes["e"]) == wanted
    assert sizes["a"] == sizes["b"] == sizes["d"] and sizes["f"] == 5
    inputs = random_inputs(graph)
    masked, small = (next(iter(evaluate(g, inputs).values())) for g in (found.masked, found.graph))
    assert np.allclose(masked, small, rtol=1e-4, atol=1e-4 * np.abs(masked).max())
    whole = next(iter(evaluate(graph, inputs).values()))
    assert not np.allclose(whole, small, rtol=1e-2)


def test_a_transformer_that_folds_its_batch_into_rows_can_be_pruned():
    """Its reshapes join batch and rows, (50, 1, 8, 8) to (400, 8): they flatten no channels."""
    graph = transformer()
    pruned = pruning.prune(graph, 0.4)
    assert set(pruned.removed) == {graph.node("up").output}
    inputs = random_inputs(graph)
    masked, small = (
        next(iter(evaluate(g, inputs).values())) for g in (pruned.masked, pruned.graph)
    )
    assert np.allclose(masked, small, rtol=1e-4, atol=1e-4 * np.abs(masked).max())


def test_what_makes_numbers_of_zeros_keeps_its_channels():
    for op, free in (("sigmoid", False), ("tanh", True), ("relu", True), ("exp", False)):
        net = GraphBuilder("z")
        x = net.input("x", (1, 3, 6, 6))
        y = net.add_node(op, net.conv2d(x, net.weight((64, 3, 3, 3))))
        net.output(net.conv2d(y, net.weight((16, 64, 1, 1))))
        assert bool(pruning.prune(net.build(), 0.5).removed) == free, op
    with pytest.raises(InputError, match="layers of the graph"):
        pruning.prune(tied_net(), 0.5, keep=frozenset({"nothing"}))
    assert set(pruning.prune(tied_net(), 0.5, keep=frozenset({"b", "c"})).removed) == {"e"}


# -- low rank -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "rank"),
    [((64, 64, 3, 3), 32), ((128, 128, 3, 3), 64), ((64, 3, 7, 7), 16), ((64, 64, 5, 5), 48)],
)
def test_ranks_of_noise_are_the_golden_ones(shape, rank):
    thin = low_rank.ConvSizes(shape[0], shape[1], shape[2:])
    weights = np.random.default_rng(0).normal(size=shape)
    found = low_rank.evbmf_rank(low_rank._unfolded(thin, weights))
    assert found == 0 and low_rank.rank_of(thin, found) == rank
    assert low_rank.rank_of(low_rank.ConvSizes(512, 512, (3, 3)), 0) == 304


def test_the_rank_of_a_signal_in_noise_is_found():
    rng = np.random.default_rng(1)
    for rank in (1, 7, 20):
        signal = rng.normal(size=(120, rank)) @ rng.normal(size=(rank, 200))
        assert low_rank.evbmf_rank(signal + 0.3 * rng.normal(size=(120, 200))) == rank
    assert low_rank.evbmf_rank(np.zeros((4, 5))) == 0
    with pytest.raises(InputError, match="a matrix of finite numbers"):
        low_rank.evbmf_rank(np.array([[np.nan, 1.0]]))


def test_kinds_are_the_golden_ones_and_the_rest_is_left_alone():
    cases = [(128, 64, (3, 5), "FCFK"), (128, 64, (5, 3), "FCSK"), (64, 128, (5, 3), "SCSK"),
             (3, 64, (7, 7), "SCFK")]  # fmt: skip
    for channels, features, kernel, kind in cases:
        assert low_rank.ConvSizes(features, channels, kernel).kind == kind
    left = [(63, 64, 3, {}), (3, 64, 3, {}), (64, 64, 1, {}), (64, 64, 3, {"stride": 3}),
            (64, 64, 3, {"groups": 2}), (64, 64, 3, {"dilation": 2}),
            (64, 64, 3, None)]  # fmt: skip
    for channels, features, kernel, attrs in left:
        net = GraphBuilder("k")
        x = net.input("x", (1, channels, 9, 9))
        given = attrs or {}
        shape = (features, channels // given.get("groups", 1), kernel, kernel)
        net.output(net.conv2d(x, net.weight(shape), **given))
        graph = net.build()
        assert (low_rank.thin_of(graph, graph.nodes[0]) is None) == (attrs is not None)


@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (64, 96, 5, 3), (96, 64, 5, 3), (64, 96, 3, 5)])
def test_parts_of_full_rank_are_the_convolution_and_the_cut_is_the_best(shape):
    """The error of a truncated SVD is the norm of the singular values left out."""
    net = GraphBuilder("c")
    x = net.input("x", (1, shape[1], 10, 9))
    pads = (shape[2] // 2, shape[3] // 2)
    y = net.conv2d(x, net.weight(shape), net.weight((shape[0],)), pad=pads, stride=(2, 1), name="c")
    net.output(y)
    graph = net.build()
    thin = low_rank.thin_of(graph, graph.nodes[0])
    weights = graph.constants[graph.nodes[0].inputs[1]].array()
    unfolded = low_rank._unfolded(thin, weights)
    for rank in (16, min(thin.matrix)):
        parts = low_rank.split_weights(thin, weights, rank)
        subs = "rchx,orxw->ochw" if thin.rows_first else "rcxw,orhx->ochw"
        gap = np.linalg.norm(np.einsum(subs, *parts) - weights)
        left = np.linalg.svd(unfolded, compute_uv=False)[rank:]
        assert gap == pytest.approx(np.linalg.norm(left), rel=1e-6, abs=1e-9)
    assert low_rank.decomposed(graph)[1] == {"c": 32}
    cut = np.einsum(subs, *low_rank.split_weights(thin, weights, 16)).astype(np.float32)
    data = replace(graph.constants[graph.nodes[0].inputs[1]], data=cut)
    exact = replace(graph, constants={**graph.constants, graph.nodes[0].inputs[1]: data})
    small, ranks = low_rank.decomposed(exact, {"c": 16})
    assert ranks == {"c": 16} and [n.op for n in small.nodes] == ["conv2d", "conv2d"]
    inputs = random_inputs(graph)
    whole, thinner = (next(iter(evaluate(g, inputs).values())) for g in (exact, small))
    assert np.allclose(whole, thinner, rtol=1e-3, atol=1e-4 * np.abs(whole).max())
    with pytest.raises(InputError, match="a rank from 1"):
        low_rank.decomposed(graph, {"c": 5000})
    with pytest.raises(InputError, match="convolutions to split"):
        low_rank.decomposed(graph, {"d": 16})
