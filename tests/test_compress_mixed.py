"""Formats per layer as an exact knapsack, and the published bisection beside it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import GraphBuilder, evaluate
from ascend_lab.deploy.compress import fake_quantised, knapsack, mixed, quantise_graph
from ascend_lab.errors import InputError


@st.composite
def problems(draw, most=6):
    whole = st.integers(0, 40)
    layers = [
        knapsack.Layer(f"l{i}", tuple(
            knapsack.Option(f"f{j}", draw(whole) / 8, draw(whole) / 16)
            for j in range(draw(st.integers(1, 4)))
        ))
        for i in range(draw(st.integers(1, most)))
    ]  # fmt: skip
    return layers, draw(st.integers(0, 300)) / 16


@settings(max_examples=150)
@given(problems())
def test_the_knapsack_equals_brute_force(problem):
    layers, budget = problem
    every = [
        knapsack.mix_of(layers, p)
        for p in itertools.product(*(range(len(x.options)) for x in layers))
    ]
    fits = [m for m in every if m.error <= budget]
    if not fits:
        with pytest.raises(InputError, match="a budget that the exact formats keep"):
            knapsack.fastest(layers, budget)
        return
    best = knapsack.fastest(layers, budget)
    assert best.error <= budget
    assert best.time_s == min(m.time_s for m in fits)
    assert best.error == min(m.error for m in fits if m.time_s == best.time_s)


def two_ways(count, seed=0):
    rng = np.random.default_rng(seed)
    times = rng.lognormal(size=count)
    errors = rng.lognormal(0, 2, count)
    shares = rng.uniform(0.4, 1.1, count)
    return [
        knapsack.Layer(
            f"l{i}",
            (knapsack.Option("fp16", t, 0.0), knapsack.Option("int8", t * shares[i], errors[i])),
        )
        for i, t in enumerate(times)
    ]


def test_large_networks_are_solved_exactly_and_never_lose_to_the_bisection():
    layers = two_ways(120)
    errors = {layer.name: layer.options[1].error for layer in layers}
    ranking = sorted(errors, key=lambda name: -errors[name])
    wins = 0
    for share in (0.02, 0.1, 0.3, 0.7):
        published = mixed.bisected(layers, ranking, share * sum(errors.values()))
        exact = knapsack.fastest(layers, published.error)
        assert exact.error <= published.error * (1 + 1e-12)
        assert exact.time_s <= published.time_s
        wins += exact.time_s < 0.999 * published.time_s
    assert wins >= 3


def test_less_error_takes_no_less_time_from_one_end_to_the_other():
    layers = two_ways(30, 4)
    errors = [layer.options[1].error for layer in layers]
    mixes = [
        knapsack.fastest(layers, share * sum(errors)) for share in (0, 1e-3, 0.01, 0.1, 0.5, 1)
    ]
    assert [m.error for m in mixes] == sorted(m.error for m in mixes)
    times = [m.time_s for m in mixes]
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times)
    ends = [sum(o.time_s for o in way) for way in zip(*(x.options for x in layers), strict=True)]
    least = sum(min(o.time_s for o in layer.options) for layer in layers)
    assert mixes[0].error == 0 and mixes[0].time_s == pytest.approx(ends[0])
    assert mixes[-1].time_s == pytest.approx(least)


def test_similarity_and_bisection_as_published():
    assert mixed.similarity([0, 0], [3, 4]) == 1 and mixed.similarity([3, 4], [0, 0]) == 0
    assert mixed.similarity([1, 0], [0, 1]) == 0.5 and mixed.similarity([1, 2], [-1, -2]) < 1e-15
    names = [f"l{i}" for i in range(13)]
    for needed in range(14):
        asked = []

        def accepts(back, needed=needed, asked=asked):
            asked.append(len(back))
            return len(back) >= needed

        assert mixed.put_back(names, accepts) == frozenset(names[:needed])
        assert len(asked) <= 2 + math.ceil(math.log2(13))
    with pytest.raises(InputError, match="a metric that the network in float meets"):
        mixed.put_back(names, lambda back: False)


@pytest.mark.parametrize("number", [-1.0, math.nan, math.inf])
def test_options_are_checked(number):
    with pytest.raises(InputError, match="x: options of finite times and errors"):
        knapsack.Layer("x", (knapsack.Option("fp16", number, 0.0),))
    with pytest.raises(InputError, match="a budget"):
        knapsack.fastest(two_ways(2), math.nan)


NAMES = ["a", "a_b", "c", "d", "e"]
"""The second begins like the first: a kernel is of the layer whose name says more of its own."""


def small_net():
    net = GraphBuilder("small")
    x = net.input("x", (1, 16, 28, 28))
    y = net.relu(net.conv2d(x, net.weight((64, 16, 3, 3)), net.weight((64,)), pad=1, name="a"))
    y = net.relu(net.conv2d(y, net.weight((64, 64, 3, 3)), pad=1, name="a_b"))
    z = net.relu(net.conv2d(y, net.weight((64, 64, 1, 1)), name="c"))
    y = net.add(net.conv2d(z, net.weight((64, 64, 3, 3)), pad=1, name="d"), y)
    y = net.reshape(net.global_avg_pool(y), shape=(1, 64))
    net.output(net.gemm(y, net.weight((10, 64)), net.weight((10,)), trans_b=True, name="e"))
    return net.build()


def test_formats_of_a_network_are_chosen_by_its_own_times_and_errors():
    graph = small_net()
    feeds = [{"x": np.random.default_rng(i).normal(size=(1, 16, 28, 28))} for i in range(2)]
    found = quantise_graph(graph, feeds)
    choice = mixed.choose(found, feeds, "Ascend310P3", share=0.5)
    assert [layer.name for layer in choice.layers] == NAMES
    assert all(o.time_s > 0 for layer in choice.layers for o in layer.options)
    errors = [layer.options[1].error for layer in choice.layers]
    assert all(1e-7 < error < 1e-2 for error in errors)
    assert choice.exact.error <= choice.published.error <= 0.5 * sum(errors)
    assert choice.exact.time_s <= choice.published.time_s
    assert choice.time_s <= choice.published_s
    assert sorted(mixed.ranking_of(found, feeds)) == NAMES
    # errors add up, as the sum of all layers says of the whole network within an order
    whole = next(iter(evaluate(fake_quantised(found), feeds[0]).values()))
    wanted = next(iter(evaluate(found.graph, feeds[0]).values()))
    gap = ((whole - wanted) ** 2).sum() / (wanted**2).sum()
    assert 0.02 * sum(errors) < gap < 5 * sum(errors)
