"""The vector tuner: its space and what it measures."""

import pickle

import numpy as np
import pytest
from dsl_strategies import ANYTHING, CHIPS, FUSABLE, assert_values, chip_of, programs
from hypothesis import HealthCheck, given, settings, strategies as st

from ascend_lab.aoe.vector import VectorMeasure, VectorSpace, vector_bound
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.lab.tuning import optimum
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators import dsl as te

SOME = settings(max_examples=15, suppress_health_check=list(HealthCheck))


def tensor(*shape, dtype="fp16", name="x"):
    return te.placeholder(shape, dtype, name)


def soft(*shape, dtype="fp16"):
    x = tensor(*shape, dtype=dtype)
    top = te.broadcast(te.reduce_max(x, -1, True), shape)
    power = te.vexp(te.vsub(x, top))
    return te.vdiv(power, te.broadcast(te.reduce_sum(power, -1, True), shape))


def normalised(*shape):
    x = tensor(*shape)
    mean = te.vmuls(te.reduce_sum(x, -1, True), 1 / shape[-1])
    off = te.vsub(x, te.broadcast(mean, shape))
    spread = te.vmuls(te.reduce_sum(te.vmul(off, off), -1, True), 1 / shape[-1])
    return te.vmul(off, te.broadcast(te.vrsqrt(te.vadds(spread, 1e-5)), shape))


def both(*shape):
    a = tensor(*shape, name="a")
    b = tensor(*shape, name="b")
    return [te.renamed(te.vadd(a, b), "s"), te.renamed(te.vmul(a, b), "p")]


def scaled():
    """A batch normalisation: one axis has 8 values, and 32 or 48 cores want work."""
    gain = te.broadcast(tensor(1, 8, 1, 1, 16, name="g"), (1, 8, 28, 28, 16))
    return te.vrelu(te.vmul(tensor(1, 8, 28, 28, 16), gain))


CASES = {
    "chain": lambda: te.vrelu(te.vadd(tensor(64, 768), tensor(64, 768, name="y"))),
    "broadcast": lambda: te.vmul(
        tensor(8, 28, 16), te.broadcast(tensor(8, 1, 16, name="g"), (8, 28, 16))
    ),
    "scaled": scaled,
    "fold of rows": lambda: te.reduce_sum(tensor(256, 96, dtype="fp32"), 0),
    "fold along rows": lambda: te.reduce_sum(tensor(33, 500, dtype="fp32"), 1),
    "softmax": lambda: soft(16, 200),
    "one row": lambda: soft(1, 1000),
    "norm": lambda: normalised(24, 160),
    "two outputs": lambda: both(40, 100),
    "ragged": lambda: te.vrelu(tensor(103, 37)),
    "long rows": lambda: soft(3, 20000),
    "copy": lambda: te.vmuls(te.transpose(tensor(30, 50), (1, 0)), 2.0),
}
EACH = [pytest.param("Ascend910A", marks=pytest.mark.full), "Ascend910B2"]


def cycles(schedule):
    return simulate_kernel(te.lower(schedule), schedule.chip).total_cycles


@pytest.mark.parametrize("chip_name", EACH)
@pytest.mark.parametrize("case", CASES)
def test_the_default_is_a_point_of_the_space(case, chip_name):
    space = VectorSpace(CASES[case](), chip_of(chip_name))
    point = space.default_point
    for at, value in enumerate(point):
        assert value in space.options(point[:at]), space.names[at]
    assert cycles(space.build(point)) == cycles(te.auto_schedule(space.outputs, space.chip))


@pytest.mark.parametrize("chip_name", EACH)
@pytest.mark.parametrize("case", CASES)
def test_random_points_are_legal_distinct_schedules(case, chip_name):
    space = VectorSpace(CASES[case](), chip_of(chip_name))
    rng = np.random.default_rng(3)
    built = {}
    for _ in range(3):
        point = space.sample(rng)
        schedule = space.build(point)
        assert sanitize(te.lower(schedule), space.chip) == []
        assert built.setdefault(space.key(point), schedule) == schedule
        assert te.replay(space.outputs, space.chip, schedule.to_json()).steps == schedule.steps
    assert len(set(built.values())) == len(built)


@pytest.mark.parametrize("kinds", [FUSABLE, ANYTHING], ids=["fusable", "anything"])
@SOME
@given(data=st.data(), chip_name=st.sampled_from(CHIPS), seed=st.integers(0, 2**16))
def test_random_points_of_random_programs_compute_the_reference(kinds, data, chip_name, seed):
    """Two random points: legal, the values of the oracle, no faster than the bound."""
    program = data.draw(programs(kinds=kinds))
    rng = np.random.default_rng(seed)
    space = VectorSpace([o.tensor for o in program.outputs], chip_of(chip_name))
    bound = vector_bound(space.outputs, space.chip)
    for _ in range(2):
        kernel = te.lower(space.build(space.sample(rng)))
        assert_values(program.outputs, program.arrays, kernel, space.chip)
        assert sanitize(kernel, space.chip) == []
        assert bound <= simulate_kernel(kernel, space.chip).total_cycles


def test_points_of_a_space_are_counted_and_all_different_in_key():
    space = VectorSpace(te.vrelu(tensor(40, 64)), chip_of("Toy"))
    points = list(space.points())
    assert len(points) == space.size == len(set(points))
    assert space.default_point in points
    rng = np.random.default_rng(0)
    assert all(space.sample(rng) in points for _ in range(20))


def test_a_point_that_is_none_is_refused():
    space = VectorSpace(te.vrelu(tensor(40, 64)), chip_of("Toy"))
    with pytest.raises(InputError, match="decisions"):
        space.build(())
    with pytest.raises(InputError, match="a point of the space"):
        space.build(("nonsense", *space.default_point[1:]))


def test_products_are_refused():
    a = tensor(32, 32, name="a")
    b = tensor(32, 32, name="b")
    with pytest.raises(UnsupportedError, match="a product"):
        VectorSpace(te.matmul(a, b), chip_of("Toy"))


WARM = (None, frozenset(), frozenset({"x", "g"}))
MEASURED = {
    "chain": lambda: te.vrelu(tensor(64, 768)),
    "scaled": scaled,
    "softmax": CASES["softmax"],
    "fold of rows": lambda: te.reduce_max(tensor(8192, 64), 0),
}


def measure(case, chip_name, warm=None):
    return VectorMeasure((MEASURED[case](),), chip_of(chip_name), warm)


@pytest.mark.parametrize("chip_name", ["Ascend310", "Ascend910B2"])
@pytest.mark.parametrize("case", MEASURED)
def test_no_point_beats_the_bound_whatever_l2_holds(case, chip_name):
    for warm in WARM:
        timed = measure(case, chip_name, warm)
        rng = np.random.default_rng(5)
        space = timed.space()
        bound = vector_bound(timed.outputs, timed.chip, warm or ())
        costs = [timed(space.sample(rng)) for _ in range(5)] + [timed(space.default_point)]
        assert 0 < bound <= min(costs)


def test_a_measure_travels_to_other_processes_and_is_unpacked_once():
    timed = measure("softmax", "Ascend910A")
    data = pickle.dumps(timed)
    there = pickle.loads(data)
    assert there is pickle.loads(data)
    assert isinstance(there.chip, Chip) and there.chip == timed.chip
    rng = np.random.default_rng(1)
    again = np.random.default_rng(1)
    for _ in range(5):
        point = timed.space().sample(rng)
        assert there.space().sample(again) == point
        assert there(point) == timed(point)
        assert there.space().key(point) == timed.space().key(point)


@pytest.mark.parametrize("case", ["chain", "fold of rows"])
def test_the_optimum_is_the_best_of_all_points(case):
    timed = measure(case, "Ascend310")
    space = timed.space()
    point, cycles = optimum(space)
    if case == "chain":
        assert cycles == min(map(timed, space.points()))
    rng = np.random.default_rng(2)
    assert cycles == timed(point) <= min(timed(space.sample(rng)) for _ in range(60))
