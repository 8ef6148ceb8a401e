"""A tiny network, and jobs for its operators with few tilings, so that tuning takes no time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ascend_lab.aoe.operators import Tunable
from ascend_lab.aoe.space import TableSpace
from ascend_lab.compiler.lower import Choice, lower
from ascend_lab.errors import UnsupportedError


def saved(path, name, nodes, weights, ends):
    """Write nodes, weights w0, w1, ... and the shapes of `ends` as an ONNX model."""
    first, last = (helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in ends)
    given = [numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(weights)]
    graph = helper.make_graph(nodes, name, [first], [last], given)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


def write_mlp(path, sizes=(512, 256, 64), batch=128):
    """Write two products with a softmax behind them."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape, np.float32) / 16 for shape in pairwise(sizes)]
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "w1"], ["y"], "second"),
        helper.make_node("Softmax", ["y"], ["p"], "prob", axis=-1),
    ]
    return saved(path, "mlp", nodes, weights, (("x", [batch, sizes[0]]), ("p", [batch, sizes[-1]])))


def write_convolutions(path):
    """Write three convolutions whose feature maps together exceed L2."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((16, 16, 3, 3), np.float32) / 12 for _ in range(3)]
    nodes = [
        helper.make_node("Conv", [old, f"w{i}"], [new], f"conv{i}", pads=[1, 1, 1, 1])
        for i, (old, new) in enumerate(pairwise("xaby"))
    ]
    return saved(path, "convs", nodes, weights, [(name, [16, 16, 128, 128]) for name in "xy"])


@dataclass(frozen=True)
class SmallJob:
    """A product with its default tiling and some with other tiles."""

    operator: Tunable
    search: str = "exhaustive"

    @cached_property
    def default(self):
        """The tiling that tuning starts from."""
        tiling = lower(self.operator.piece, self.operator.chip).tiling
        assert tiling is not None
        return tiling

    @property
    def space(self):
        """Tiles of 16 to 64 rows and 32 to 128 columns, on the default's grid of cores."""
        rows = [(m, n, k) for m in (16, 32, 64) for n in (32, 64, 128) for k in (64, 128)]
        return TableSpace(("base_m", "base_n", "base_k"), list(zip(*rows, strict=True)))

    @property
    def measure(self):
        """What a candidate costs."""
        return SmallMeasure(self)

    def choice(self, point):
        """Return the default tiling with other tiles."""
        m, n, k = point
        return Choice(tiling=replace(self.default, base_m=m, base_n=n, base_k=k))

    def start(self):
        """Return no points."""
        return ()

    def points(self, choices):
        """Return no points."""
        return []

    def bound(self, trials):
        """Return a bound that is far too low, and whether all points were tried."""
        return 1, len(trials) == self.space.size


@dataclass(frozen=True)
class SmallMeasure:
    """Cycles of a candidate of a small job."""

    job: SmallJob

    def __call__(self, point):
        """Lower the candidate and time it."""
        operator = self.job.operator
        return operator.cycles(lower(operator.piece, operator.chip, self.job.choice(point)).kernel)


def small_job_of(operator):
    """Return a job for products only."""
    if operator.unit != "cube":
        raise UnsupportedError("a product", operator.op)
    return SmallJob(operator)
