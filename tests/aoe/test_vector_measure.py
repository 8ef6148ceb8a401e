"""Timing points of a vector space: bounds that hold, optima that are proven, better schedules."""

import pickle

import numpy as np
import pytest
from dsl_strategies import chip_of

from ascend_lab import dsl as te
from ascend_lab.aoe.vector import VectorMeasure, vector_bound
from ascend_lab.chip import Chip
from ascend_lab.lab.tuners import optimum

WARM = (None, frozenset(), frozenset({"x", "g"}))


def tensor(*shape, dtype="fp16", name="x"):
    return te.placeholder(shape, dtype, name)


def scaled():
    """A batch normalisation: one axis has 8 values, and 32 or 48 cores want work."""
    gain = te.broadcast(tensor(1, 8, 1, 1, 16, name="g"), (1, 8, 28, 28, 16))
    return te.vrelu(te.vmul(tensor(1, 8, 28, 28, 16), gain))


def softmax():
    x = tensor(16, 200)
    power = te.vexp(te.vsub(x, te.broadcast(te.reduce_max(x, -1, True), x.shape)))
    return te.vdiv(power, te.broadcast(te.reduce_sum(power, -1, True), x.shape))


CASES = {
    "chain": lambda: te.vrelu(tensor(64, 768)),
    "scaled": scaled,
    "softmax": softmax,
    "fold of rows": lambda: te.reduce_max(tensor(8192, 64), 0),
}


def measure(case, chip_name, warm=None):
    return VectorMeasure((CASES[case](),), chip_of(chip_name), warm)


@pytest.mark.parametrize("chip_name", ["Ascend310", "Ascend910B2"])
@pytest.mark.parametrize("case", CASES)
def test_no_point_beats_the_bound_whatever_l2_holds(case, chip_name):
    for warm in WARM:
        timed, rng = measure(case, chip_name, warm), np.random.default_rng(5)
        space = timed.space()
        bound = vector_bound(timed.outputs, timed.chip, warm or ())
        costs = [timed(space.sample(rng)) for _ in range(5)] + [timed(space.default_point)]
        assert 0 < bound <= min(costs)


def test_the_bound_of_a_large_chain_is_near_what_memory_allows():
    outputs = (te.vrelu(tensor(4096, 1024)),)
    timed = VectorMeasure(outputs, chip_of("Ascend910A"))
    assert timed(timed.space().default_point) < 1.15 * vector_bound(outputs, timed.chip)


def test_the_bound_is_lower_where_l2_holds_the_inputs():
    timed = measure("chain", "Ascend310")
    assert vector_bound(timed.outputs, timed.chip, {"x"}) < vector_bound(timed.outputs, timed.chip)


def test_a_measure_travels_to_other_processes_and_is_unpacked_once():
    timed = measure("softmax", "Ascend910A")
    data = pickle.dumps(timed)
    there = pickle.loads(data)
    assert there is pickle.loads(data)
    assert isinstance(there.chip, Chip) and there.chip == timed.chip
    rng, again = np.random.default_rng(1), np.random.default_rng(1)
    for _ in range(5):
        point = timed.space().sample(rng)
        assert there.space().sample(again) == point
        assert there(point) == timed(point)
        assert there.space().key(point) == timed.space().key(point)


def test_random_search_finds_a_better_schedule_than_the_default():
    timed, rng = measure("scaled", "Ascend910B2"), np.random.default_rng(0)
    space = timed.space()
    launch = round(timed.chip.launch_overhead_s * timed.chip.clock_hz)
    default = timed(space.default_point) - launch
    best = min(timed(space.sample(rng)) for _ in range(100)) - launch
    assert best < 0.8 * default


@pytest.mark.parametrize("case", ["chain", "fold of rows"])
def test_the_optimum_is_the_best_of_all_points(case):
    timed = measure(case, "Ascend310")
    space = timed.space()
    point, cycles = optimum(space)
    if case == "chain":
        assert cycles == min(map(timed, space.points()))
    rng = np.random.default_rng(2)
    assert cycles == timed(point) <= min(timed(space.sample(rng)) for _ in range(60))
