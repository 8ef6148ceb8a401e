"""The checks and figures of chapter 20, and what its prose claims."""

import numpy as np
import pytest

from ascend_lab.aoe.cube import CubeMeasure
from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.drive import Rules, drive
from ascend_lab.aoe.search import SEARCHES
from ascend_lab.aoe.space import completed, crossed, mutated
from ascend_lab.errors import CapacityError
from ascend_lab.lab.checks.chapter19_20 import interval
from ascend_lab.lab.tuning import SimpleGenetic
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels.conv import conv_launch
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.gemm import gemm_launch
from ascend_lab.operators.kernels.gemm_schedule import GemmSchedule, GemmShape

TOY = load_chip("Toy")
SMALL = CubeMeasure(GemmShape(64, 64, 64), TOY)
LAYER = CubeMeasure(ConvShape(1, 512, 7, 7, 512, 3, 3, pad=1), load_chip("Ascend910A"))


@pytest.fixture(scope="module")
def small():
    space = SMALL.space()
    return space, np.array([SMALL(point) for point in space.points()])


@pytest.fixture(scope="module")
def layer():
    space = LAYER.space()
    return space, Bounds(LAYER, space.genes).closed


def from_table(space, costs):
    return lambda point: float(costs[space.row(point)])


# -- exercises -------------------------------------------------------------------------------------
def test_the_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    draws = [interval(rng.normal(1.0, 2.0, 30)) for _ in range(400)]
    hits = sum(low <= 1.0 <= high for low, high in draws)
    assert 0.92 <= hits / 400 <= 0.98


# -- the simple search -----------------------------------------------------------------------------
def test_the_simple_search_finds_the_best_of_a_small_space(small):
    space, costs = small
    search = SimpleGenetic(population=12, keep=2, mutation=1.0)
    trace = drive(search, space, from_table(space, costs), space.size, seed=1)
    assert trace.best.cost == costs.min()
    assert {len(people) for people in search.log} == {12}
    best = [people[0][0] for people in search.log]
    assert best == sorted(best, reverse=True)
    assert all(people == sorted(people, key=lambda p: p[0]) for people in search.log)


def test_one_seed_gives_one_run(small):
    space, costs = small
    runs = [drive(SimpleGenetic(), space, from_table(space, costs), 60, seed=5) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0] != drive(SimpleGenetic(), space, from_table(space, costs), 60, seed=6)


def test_it_starts_from_what_it_is_given(small):
    space, costs = small
    best = space.point(int(costs.argmin()))
    trace = drive(SimpleGenetic(), space, from_table(space, costs), 30, rules=Rules(start=[best]))
    assert trace.trials[0].point == best


# -- claims ----------------------------------------------------------------------------------------
def test_the_toy_has_sixteen_tilings_of_which_three_do_not_fit():
    cycles = {}
    refused = []
    for m in (1, 2, 3, 6):
        for n in (1, 2, 3, 6):
            schedule = GemmSchedule(16 * m, 16, 16 * n, 2, 1, 1)
            try:
                launch = gemm_launch(GemmShape(96, 32, 96), TOY, schedule)
                cycles[m, n] = simulate(launch, TOY).cycles
            except CapacityError as error:
                refused.append((m, n, str(error)[:3]))
    assert refused == [(3, 6, "L0C"), (6, 3, "L0C"), (6, 6, "L0C")]
    assert min(cycles, key=cycles.__getitem__) == (2, 3)


def test_tens_of_thousands_of_tilings_and_bounds_below_all_of_them(layer):
    space, low = layer
    assert space.size > 50_000
    rows = np.random.default_rng(1).choice(space.size, 12, replace=False)
    exact = np.array([LAYER(space.point(int(row))) for row in rows])
    assert (low[rows] <= exact).all()
    assert np.median(low[rows] / exact) > 0.9


@pytest.mark.full
def test_breeding_beats_random_order_and_stops_without_mutation(layer):
    space, low = layer
    cost = from_table(space, low)
    ends = {"simple": [], "random": [], "no mutation": []}
    for seed in range(8):
        ends["simple"].append(drive(SimpleGenetic(), space, cost, 200, seed=seed))
        ends["random"].append(drive(SEARCHES["random"], space, cost, 200, seed=seed))
        ends["no mutation"].append(drive(SimpleGenetic(mutation=0), space, cost, 200, seed=seed))
    middle = {name: np.median([t.best.cost for t in runs]) for name, runs in ends.items()}
    assert middle["simple"] < middle["no mutation"]
    assert middle["simple"] < 0.95 * middle["random"]
    assert {t.end for t in ends["no mutation"]} == {"exhausted"}


def test_crossing_keeps_a_tiling_legal_and_mixing_does_not(layer):
    space, _ = layer
    rng = np.random.default_rng(20)
    legal = 0
    for _ in range(100):
        one = space.sample(rng)
        two = space.sample(rng)
        assert space.row(crossed(space, one, two, rng)) >= 0
        assert space.row(mutated(space, one, rng)) >= 0
        mixed = [a if p else b for a, b, p in zip(one, two, rng.random(12) < 0.5, strict=True)]
        legal += completed(space, mixed) == tuple(mixed)
    assert 20 < legal < 80


@pytest.mark.parametrize(
    ("tile", "step", "where"), [((128, 128, 512), 2, "L0B"), ((64, 32, 512), 72, "L1")]
)
def test_tilings_that_do_not_fit_are_refused(tile, step, where):
    with pytest.raises(CapacityError, match=where):
        conv_launch(LAYER.shape, LAYER.chip, GemmSchedule(*tile, step, 1, 1))
