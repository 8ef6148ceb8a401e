"""Jobs: what they measure is what lowering gives, and their bounds hold whatever L2 holds."""

import engine_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe import Settings, tune_operator
from ascend_lab.aoe.cube.job import CubeJob
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.tuning import job_of
from ascend_lab.aoe.workers import attempt
from ascend_lab.errors import UnsupportedError
from ascend_lab.graph import compile_graph, simulate_graph
from ascend_lab.graph.lower import lower
from ascend_lab.graph.tasks import with_choices
from ascend_lab.ops.matmul import warm_cycles

chips = st.sampled_from(cases.CHIPS)


def check(job, seed):
    """A few points and the default: cycles are the lowered kernel's, and no bound exceeds them."""
    operator, rng = job.operator, np.random.default_rng(seed)
    points = [job.space.sample(rng) for _ in range(4)]
    low, proven = job.bound(())
    assert 0 < low <= operator.default_cycles
    assert proven == (low == operator.default_cycles)
    for point in points:
        cycles = job.measure(point)
        kernel = lower(operator.piece, operator.chip, job.choice(point)).kernel
        assert cycles == warm_cycles(kernel, operator.chip, operator.warm), point
        assert low <= cycles, point
    if isinstance(job, CubeJob):
        rows = [job.space.row(p) for p in points]
        walked = job.bounds.walked(np.array(rows))
        for point, row, tight in zip(points, rows, walked, strict=True):
            assert job.bounds.closed[row] <= tight <= job.measure(point), point
            assert job.measure.bound(point) == job.bounds.closed[row]
    assert job.measure(job.start()[0]) == operator.default_cycles


@settings(max_examples=10)
@given(cases.networks, chips, st.integers(0, 999))
def test_points_are_timed_as_lowered_and_bounded_from_below(graph, chip, seed):
    for job in cases.jobs_of_graph(graph, chip):
        rng = np.random.default_rng(seed)
        names = [n for n in job.operator.piece.graph.inputs if rng.random() < 0.5]
        check(job_of(cases.with_warm(job.operator, frozenset(names))), seed)


@pytest.mark.parametrize("chip", cases.CHIPS)
@pytest.mark.parametrize("kind", ["product", "square", "convolution"])
def test_a_tensor_read_twice_by_one_kernel(kind, chip):
    """It is fetched once, and warm for both its readers or for none."""
    graph = cases.shared(kind)
    jobs = [j for j in cases.jobs_of_graph(graph, chip) if j.operator.unit == "cube"]
    inputs = jobs[0].operator.piece.graph.inputs
    for warm in (frozenset(), frozenset(inputs[:1]), frozenset(inputs)):
        check(job_of(cases.with_warm(jobs[0].operator, warm)), 0)


@pytest.mark.parametrize("chip", cases.CHIPS)
def test_a_warm_l2_makes_kernels_and_bounds_shorter(chip):
    operator = cases.only(cases.product(200, 256, 240, "bias add relu"), chip, "cube")
    names = operator.piece.graph.inputs
    cold, warm = (job_of(cases.with_warm(operator, frozenset(held))) for held in ((), names))
    assert cold.operator.default_cycles > warm.operator.default_cycles
    rows = np.argsort(cold.bounds.closed)[:50]
    assert (warm.bounds.closed <= cold.bounds.closed).all()
    assert warm.bounds.walked(rows).min() < cold.bounds.walked(rows).min()


SMALL = {
    "product": cases.product(20, 40, 24, "relu"),
    "convolution": cases.convolution(1, 16, (5, 5), 16, 3, "bias add relu", pad=1),
    "batch": cases.batch(relu=False),
    "vector": cases.vector((3, 40), "relu"),
}
LARGER = SMALL | {"vector": cases.vector((48, 40), "relu")}


@pytest.mark.parametrize("chip", cases.CHIPS)
@pytest.mark.parametrize("kind", SMALL)
def test_what_is_proven_is_the_optimum_of_the_space(kind, chip):
    """Against every point of the space, measured."""
    graph = SMALL[kind]
    operator = cases.first(graph, chip)
    job = job_of(operator)
    assert job.space.size <= 400
    least = min(attempt(job.measure, p)[0] for p in job.space.points())
    found = tune_operator(operator, Settings(budget=job.space.size))
    assert found.bound_cycles <= least
    assert found.after_cycles == min(least, operator.default_cycles)
    assert found.proven
    short = tune_operator(operator, Settings(budget=2))
    assert short.bound_cycles <= least <= short.after_cycles <= operator.default_cycles
    if short.proven:
        assert short.after_cycles == min(least, operator.default_cycles)


@pytest.mark.parametrize("kind", SMALL)
def test_trials_only_raise_the_bound(kind):
    job = job_of(cases.first(LARGER[kind]))
    points = list(job.space.points())
    trials = [
        Trial(i, p, job.measure(p)) for i, p in enumerate(points[:: max(1, len(points) // 9)])
    ]
    best, before = job.operator.default_cycles, 0
    for count in range(len(trials) + 1):
        best = min([best, *(t.cost for t in trials[:count])])
        low, proven = job.bound(trials[:count])
        assert before <= low <= best
        assert not proven or low == best
        before = low


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("note", ["took longer than 1 s", "its worker process died"])
def test_what_was_not_measured_is_not_proven(kind, note):
    """A candidate lost on the way may still be the best one."""
    job = job_of(cases.first(LARGER[kind]))
    costs = {p: job.measure(p) for p in job.space.points()}
    least = min(costs.values())
    assert least < max(costs.values())
    trials = [
        Trial(i, p, c, "") if c > least else Trial(i, p, np.inf, note)
        for i, (p, c) in enumerate(costs.items())
    ]
    low, proven = job.bound(trials)
    assert low <= least
    assert not proven or job.operator.default_cycles == least


def test_schedules_that_suited_other_shapes_become_points_of_this_one():
    one = job_of(cases.only(cases.product(70, 200, 90), unit="cube"))
    other = job_of(cases.only(cases.product(33, 48, 100), unit="cube"))
    image = job_of(cases.only(cases.convolution(k=64), unit="cube"))
    rng = np.random.default_rng(0)
    for job, near in ((one, other), (other, one), (image, image)):
        choices = [near.choice(near.space.sample(rng)) for _ in range(5)]
        points = job.points(choices)
        assert len(points) == 5
        for point in points:
            job.space.row(point)
            assert job.measure(point) > 0
    assert one.points([one.choice(one.default)]) == [one.default]
    steps = job_of(cases.only(cases.vector(kind="relu")))
    assert one.points([steps.choice(steps.start()[0])]) == []


def test_choices_reach_the_network():
    """The time of a network changes by what its operator gained."""
    compiled = compile_graph(cases.batch(relu=False), "Ascend310")
    operator = next(o for o in cases.operators_of(compiled) if o.unit)
    found = tune_operator(operator, Settings(budget=10))
    tuned = with_choices(compiled, {operator.piece.key: found.choice})
    gained = (
        simulate_graph(compiled).time_s - simulate_graph(tuned).time_s
    ) * operator.chip.clock_hz
    assert gained == pytest.approx(found.before_cycles - found.after_cycles)
    assert gained > 0


def test_an_operator_without_a_schedule_says_why():
    compiled = compile_graph(cases.batch(relu=False), "Ascend310")
    operator = next(o for o in cases.operators_of(compiled) if not o.unit)
    with pytest.raises(UnsupportedError, match="hand-written"):
        job_of(operator)
