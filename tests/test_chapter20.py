"""The checks and figures of chapter 20, and what its prose claims."""

import numpy as np
import pytest

from ascend_lab.aoe.cube import CubeMeasure
from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.drive import drive
from ascend_lab.aoe.space import completed, crossed, mutated
from ascend_lab.errors import CapacityError
from ascend_lab.lab.tuning import SimpleGenetic
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import simulate
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
    return space, Bounds(LAYER, space.genes).closed_form


def from_table(space, costs):
    return lambda point: float(costs[space.row(point)])


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
