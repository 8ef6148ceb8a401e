"""Tuned kernels compute what the reference computes; one that does not is refused."""

from dataclasses import dataclass, replace

import engine_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.aoe import Settings, operators as values_module, tune_operator
from ascend_lab.aoe.engine import tune_network
from ascend_lab.aoe.operators import difference_of, outputs_of, random_inputs
from ascend_lab.aoe.tuning import job_of
from ascend_lab.compiler import compile_graph, evaluate, random_inputs as inputs_of
from ascend_lab.compiler.lower import lower
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import InputError

chips = st.sampled_from(cases.CHIPS)
FEW = Settings(budget=6, search="random", verify=False)


def assert_close(one, two, share):
    assert one.keys() == two.keys()
    for name in one:
        a = one[name].astype(np.float64)
        b = two[name].astype(np.float64)
        assert np.isfinite(b).all()
        assert np.abs(a - b).max() <= share * max(1.0, np.abs(b).max()), name


def check(graph, chip):
    """Tune without the tuner's own check; values equal the default's and NumPy's."""
    compiled = compile_graph(graph, chip)
    found = tune_network(compiled, FEW)
    inputs = inputs_of(compiled.graph)
    default = run_tasks(compiled, inputs)
    tuned = run_tasks(found.compiled, inputs)
    assert_close(tuned, default, 4e-3)
    assert_close(tuned, evaluate(compiled.graph, inputs), 4e-3)
    return found


@pytest.mark.parametrize("kind", ["products", "convolutions", "batches", "vectors"])
@settings(max_examples=4)
@given(data=st.data(), chip=chips)
def test_tuned_networks_compute_the_reference(kind, data, chip):
    found = check(data.draw(getattr(cases, kind)()), chip)
    if kind in ("products", "batches"):
        assert any(r.trials for r in found.results)


@settings(max_examples=5)
@given(cases.networks, chips, st.integers(0, 999))
def test_any_schedule_computes_the_same(graph, chip, seed):
    """Not winners only."""
    rng = np.random.default_rng(seed)
    for job in cases.jobs_of_graph(graph, chip):
        for _ in range(3):
            point = job.space.sample(rng)
            assert difference_of(job.operator, job.choice(point), seed) == "", point


@pytest.mark.parametrize("chip", cases.CHIPS)
@pytest.mark.parametrize("kind", ["product", "square", "convolution"])
def test_kernels_that_read_a_tensor_twice(kind, chip):
    found = check(cases.shared(kind), chip)
    assert any(r.operator.unit == "cube" and r.trials for r in found.results)


@dataclass(frozen=True)
class Wrong:
    """A job whose every choice computes something else: its kernel is that of another operator."""

    job: object

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "job"), name)

    def choice(self, point):
        return "wrong"


def wrong_kernels(monkeypatch, other):
    """Let choices of a wrong job lower to the kernel of another piece."""

    def lowered(piece, chip, choice=None):
        return lower(other.piece, chip) if choice == "wrong" else lower(piece, chip, choice)

    monkeypatch.setattr(values_module, "lower", lowered)
    monkeypatch.setattr("ascend_lab.aoe.tuning.job_of", lambda op: Wrong(job_of(op)))


@pytest.mark.parametrize("unit", ["cube", "vector", "product"])
def test_a_wrong_kernel_is_refused(unit, monkeypatch):
    net = cases.Net()  # a sum in place of a product
    net.output(net.add(*(net.input(n, (3, 32, 32)) for n in "ab")))
    right, other = {
        "cube": (cases.product(after="bias"), cases.product(after="bias relu")),
        "vector": (cases.vector((64, 300), "relu"), cases.vector((64, 300), "abs")),
        "product": (cases.batch(m=32, k=32, n=32, relu=False), net.build()),
    }[unit]
    operator = cases.first(right)
    other = cases.first(other)
    assert operator.unit == unit
    good = tune_operator(operator, Settings(budget=10))
    assert good.choice is not None and good.after_cycles < good.before_cycles and not good.note
    wrong_kernels(monkeypatch, other)
    found = tune_operator(operator, Settings(budget=10))
    assert found.choice is None and not found.proven
    assert found.after_cycles == found.before_cycles == operator.default_cycles
    assert found.bound_cycles <= found.after_cycles
    assert "refused" in found.note and "differs by" in found.note
    unseen = tune_operator(operator, Settings(budget=10, verify=False))
    assert unseen.choice == "wrong"  # what verification is for


def test_a_kernel_that_writes_too_little_or_fails_is_refused(monkeypatch):
    """Memory is poisoned before a kernel runs, and what it raises is an answer."""
    operator = cases.first(cases.product())
    choice = job_of(operator).choice(job_of(operator).start()[0])
    assert difference_of(operator, choice) == ""

    def poisoned(lowered, inputs, operator):
        found = outputs_of(lowered, inputs, operator)
        if lowered.kernel.name == "tuned":
            found = {n: np.where(np.arange(a.size).reshape(a.shape), a, np.nan)
                     for n, a in found.items()}  # fmt: skip
        return found

    def named(piece, chip, choice=None):
        found = lower(piece, chip, choice)
        return replace(found, kernel=replace(found.kernel, name="tuned")) if choice else found

    monkeypatch.setattr(values_module, "outputs_of", poisoned)
    monkeypatch.setattr(values_module, "lower", named)
    assert "differs" in difference_of(operator, choice)

    def failing(*_):
        raise InputError("a kernel", "none")

    monkeypatch.setattr(values_module, "outputs_of", failing)
    assert "a kernel; got none" in difference_of(operator, choice)


def overflowing():
    """A chain whose values are infinite or no numbers at all, by right."""
    net = cases.Net()
    x = net.input("x", (12, 40))
    far = net.exp(net.muls(net.abs(x), number=100.0))
    net.output(net.sub(far, net.muls(far, number=2.0)))
    return net.build()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910B2"])
def test_infinities_and_nans_of_the_default_are_no_differences(chip):
    operator = cases.first(overflowing(), chip)
    job = job_of(operator)
    lowered = lower(operator.piece, operator.chip)
    inputs = random_inputs(operator.piece, np.random.default_rng(0))
    (got,) = outputs_of(lowered, inputs, operator).values()
    assert np.isnan(got).any() and np.isfinite(got).any()
    rng = np.random.default_rng(1)
    for _ in range(4):
        assert difference_of(operator, job.choice(job.space.sample(rng))) == ""
