"""Branch and bound finds what exhaustion finds, and says so only when it is so."""

import math
import pickle

import numpy as np
import pytest
from cube_cases import LAYERS, ON_CHIPS, epilogue_for

from ascend_lab.aoe.cube.job import CubeMeasure, cube_space, prove
from ascend_lab.chip import load_chip
from ascend_lab.kernels import ConvShape, GemmShape

SMALL = (GemmShape(70, 100, 90), ConvShape(1, 24, 12, 10, 40, 3, 3, 1, 1))


@pytest.mark.parametrize("shape", SMALL, ids=str)
@pytest.mark.parametrize("name", ["Ascend310", "Ascend910B2"])
def test_the_proven_optimum_is_that_of_the_whole_table(
    shape: GemmShape | ConvShape, name: str
) -> None:
    chip = load_chip(name)
    measure = CubeMeasure(shape, chip, epilogue_for("bias", chip, "fp16"))
    space = cube_space(shape, chip, measure.demand, 250, default=False)
    costs = np.array([measure(point) for point in space.points()])
    proof = prove(space, measure)
    assert proof.proven
    assert np.isfinite(costs).all()
    assert proof.cycles == costs.min() == proof.lower_bound == measure(proof.point)
    assert proof.trials < len(costs) / 4


@pytest.mark.parametrize("name", ON_CHIPS)
@pytest.mark.parametrize("shape", LAYERS[:-1], ids=str)
def test_real_layers_are_proven_with_few_trials(shape: GemmShape | ConvShape, name: str) -> None:
    measure = CubeMeasure(shape, load_chip(name))
    proof = prove(measure.space(), measure)
    assert proof.proven
    assert proof.gap == 0.0
    assert proof.trials <= 100


def test_without_time_the_bound_holds_all_the_same() -> None:
    measure = CubeMeasure(LAYERS[0], load_chip("Ascend310"))
    space = measure.space()
    rushed, proof = prove(space, measure, time_limit_s=0.0), prove(space, measure)
    assert rushed.trials == 1
    assert rushed.lower_bound <= proof.cycles <= rushed.cycles
    assert math.isfinite(rushed.cycles)
    assert rushed.proven == (rushed.lower_bound == rushed.cycles)


def test_a_measure_travels_to_workers() -> None:
    measure = CubeMeasure(SMALL[0], load_chip("Ascend310"), None, frozenset({"a"}))
    point = next(measure.space().points())
    copy = pickle.loads(pickle.dumps(measure))
    assert copy == measure
    assert copy(point) == measure(point)
