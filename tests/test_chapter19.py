"""The checks and figures of chapter 19, and what its prose claims."""

import numpy as np
import pytest

from ascend_lab.aoe.drive import drive
from ascend_lab.aoe.search import Mcts, tree_of
from ascend_lab.aoe.space import TableSpace
from ascend_lab.aoe.vector import VectorMeasure
from ascend_lab.lab.checks.chapter19_20 import small_space
from ascend_lab.lab.tuning import NestCosts
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators import dsl

TOY = load_chip("Toy")
PLAIN = {"batch": 1, "completions": 1}


@pytest.fixture(scope="module")
def small():
    return small_space((12, 512))


# -- claims ----------------------------------------------------------------------------------------
def test_minimum_backup_and_closed_subtrees(small):
    space, costs = small
    search = Mcts(**PLAIN)
    trace = drive(search, space, costs.__getitem__, 60, seed=2)
    for prefix, node in tree_of(search.root).items():
        below = [t.cost for t in trace.trials if t.point[: len(prefix)] == prefix]
        assert (node.best, node.visits) == (min(below), len(below))
    whole = drive(search, space, costs.__getitem__, 1000, seed=2)
    assert whole.end == "exhausted"
    assert search.root.closed
    assert len(whole.trials) == space.size == len(costs)


def test_transpositions_are_tried_once():
    class Unordered(TableSpace):
        def key(self, point):
            return frozenset(point)

    steps = [("i", 2), ("i", 4), ("j", 16), ("j", 32)]
    pairs = [(a, b) for a in steps for b in steps if a[0] != b[0]]
    space = Unordered(("first", "second"), list(zip(*pairs, strict=True)))
    trace = drive(Mcts(**PLAIN), space, lambda p: float(sum(w for _, w in p)), 100)
    assert (space.size, len(trace.trials), trace.end) == (8, 4, "exhausted")


def test_nests_add_up():
    x = dsl.placeholder((8, 64), "fp16", "x")
    mean = dsl.vmuls(dsl.reduce_sum(x, -1, True), 1 / 64)
    measure = VectorMeasure((dsl.vsub(x, dsl.broadcast(mean, (8, 64))),), TOY)
    space = measure.space()
    rng = np.random.default_rng(0)
    costs = NestCosts(measure)
    points = [space.sample(rng) for _ in range(12)]
    assert [costs(point) for point in points] == [measure(point) for point in points]
    assert len(costs.extra_cycles) > 1
    assert len(points) > len(costs.extra_cycles)
