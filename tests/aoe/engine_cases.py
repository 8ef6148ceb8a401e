"""Small networks for the tests of the engine: one operator each, or a few, with shapes drawn."""

import os
import time
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from ascend_lab.aoe.operators import operators_of
from ascend_lab.aoe.space import Point
from ascend_lab.aoe.tuning import job_of
from ascend_lab.aoe.workers import Measure
from ascend_lab.compiler import GraphBuilder, compile_graph
from ascend_lab.compiler.lower import lower
from ascend_lab.errors import InputError, UnsupportedError

CHIPS = ("Ascend910A", "Ascend910B2")
"""A coupled and a split chip; what names none is tuned for Ascend310."""


class Net(GraphBuilder):
    """A graph whose constants are small random numbers."""

    def __init__(self, dtype="fp16"):
        super().__init__("net", dtype)
        self.rng = np.random.default_rng(3)

    def numbers(self, *shape):
        """Declare a constant of small numbers."""
        return self.constant((self.rng.uniform(-1, 1, shape) / 4).astype(np.float16))


def product(m=40, k=48, n=32, after="bias relu"):
    """Return a product of two matrices with what follows it."""
    net = Net()
    y = net.matmul(net.input("x", (m, k)), net.numbers(k, n))
    for step in after.split():
        if step == "bias":
            y = net.add(y, net.numbers(n))
        elif step == "add":
            y = net.add(y, net.input("r", (m, n)))
        else:
            y = getattr(net, step)(y)
    net.output(y)
    return net.build()


def convolution(n=1, c=16, side=(9, 7), k=32, size=3, after="bias add relu", **how):
    """Return a convolution with what follows it."""
    net = Net()
    reads = [net.input("x", (n, c, *side)), net.numbers(k, c // how.get("groups", 1), size, size)]
    y = net.conv2d(*reads, *([net.numbers(k)] if "bias" in after else []), **how)
    if "add" in after:
        y = net.add(y, net.input("r", y.shape))
    net.output(net.relu(y) if "relu" in after else y)
    return net.build()


def batch(lead=(3,), m=20, k=24, n=17, relu=True, **how):
    """Return a batch of products."""
    net = Net()
    a = (k, m) if how.get("trans_a") else (m, k)
    b = (n, k) if how.get("trans_b") else (k, n)
    y = net.batch_matmul(net.input("x", (*lead, *a)), net.input("w", (*lead, *b)), **how)
    net.output(net.relu(y) if relu else y)
    return net.build()


def vector(shape=(12, 40), kind="softmax"):
    """Return an operator of the vector unit, or a chain of them."""
    net = Net()
    x = net.input("x", shape)
    if kind == "chain":
        net.output(net.relu(net.mul(net.add(x, net.input("r", shape)), net.numbers(shape[-1]))))
    elif kind == "layer_norm":
        net.output(net.layer_norm(x, net.numbers(shape[-1]), net.numbers(shape[-1])))
    elif kind.startswith("reduce"):
        net.output(getattr(net, kind)(net.abs(x), axis=len(shape) - 2, keepdims=True))
    else:
        net.output(getattr(net, kind)(x, **({"axis": -1} if kind == "softmax" else {})))
    return net.build()


def shared(kind="product"):
    """Return a network in which one tensor is read twice by one kernel."""
    net = Net()
    if kind == "product":  # columns of sums are added to the rows they were made of
        x = net.input("x", (40, 48))
        net.output(net.relu(net.add(net.matmul(x, net.numbers(48, 48)), x)))
    elif kind == "square":
        x = net.input("x", (40, 48))
        net.output(net.matmul(x, x, trans_b=True))
    else:
        x = net.input("x", (1, 16, 7, 7))
        net.output(net.relu(net.add(net.conv2d(x, net.numbers(16, 16, 3, 3), pad=1), x)))
    return net.build()


side = st.integers(1, 70)


@st.composite
def products(draw):
    """Draw a product with an epilogue."""
    after = draw(st.sampled_from(("", "bias", "bias relu", "add relu", "bias add", "gelu")))
    return product(draw(side), draw(side), draw(side), after)


@st.composite
def convolutions(draw):
    """Draw a convolution: ragged, strided, padded, spread, in groups."""
    size = draw(st.sampled_from((1, 2, 3)))
    stride = draw(st.integers(1, 2))
    how = {"stride": stride, "pad": draw(st.integers(0, size - 1))}
    groups = draw(st.sampled_from((1, 1, 1, 2)))
    how |= {"dilation": draw(st.sampled_from((1, 1, 2)))} if size > 1 else {}
    how |= {"groups": groups} if groups > 1 else {}
    sides = tuple(draw(st.integers(5, 14)) for _ in range(2))
    after = draw(st.sampled_from(("", "bias", "bias relu", "add relu", "bias add relu")))
    c, k = (groups * draw(st.integers(1, 20)) for _ in range(2))
    return convolution(draw(st.integers(1, 2)), c, sides, k, size, after, **how)


@st.composite
def batches(draw):
    """Draw a batch of products, some transposed."""
    lead = draw(st.sampled_from(((1,), (3,), (2, 2))))
    how = {name: True for name in ("trans_a", "trans_b") if draw(st.booleans())}
    few = st.integers(1, 40)
    return batch(lead, draw(few), draw(few), draw(few), draw(st.booleans()), **how)


@st.composite
def vectors(draw):
    """Draw work for the vector unit."""
    kinds = ("chain", "softmax", "layer_norm", "reduce_sum", "reduce_max", "gelu", "sigmoid")
    kind = draw(st.sampled_from(kinds))
    rank = draw(st.integers(2, 3))
    return vector(tuple(draw(st.integers(1, 24)) for _ in range(rank)), kind)


networks = st.one_of(products(), convolutions(), batches(), vectors())


def jobs_of_graph(graph, chip, dtype="fp16"):
    """Return the jobs of all operators of a graph that have one."""
    found = []
    for operator in operators_of(compile_graph(graph, chip, dtype=dtype)):
        try:
            found.append(job_of(operator))
        except UnsupportedError:
            assert not operator.unit or operator.unit == "vector", operator
    return found


def first(graph, chip="Ascend310", unit=""):
    """Return the first operator of a network that can be tuned, or tuned by that unit."""
    found = operators_of(compile_graph(graph, chip))
    return next(op for op in found if op.unit and unit in ("", op.unit))


def with_warm(operator, warm):
    """Return the operator as it is where L2 holds other tensors at its start."""
    cold = replace(operator, warm=warm)
    return replace(cold, default_cycles=cold.cycles(lower(cold.piece, cold.chip).kernel))


@dataclass(frozen=True)
class Trap:
    """A measure with one candidate that raises, never ends, or ends its process."""

    measure: Measure
    point: Point
    how: str

    def __getattr__(self, name):
        """Return everything else as the measure has it."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.measure, name)

    def __call__(self, point):
        """Measure a point that is no trap."""
        if point == self.point:
            if self.how == "raises":
                raise InputError("a kernel", "none")
            if self.how == "breaks":
                raise RuntimeError("broken")
            if self.how == "kills":
                os._exit(1)
            while True:
                time.sleep(0.01)
        return self.measure(point)


class TrapAll(Trap):
    """A measure all of whose candidates do that."""

    def __call__(self, point):
        """Measure nothing."""
        return super().__call__(self.point)


def trapped(job, point, how):
    """Return the job with such a measure."""
    job.measure = Trap(job.measure, point, how)
    return job
