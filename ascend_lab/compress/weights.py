"""Weights made fit for few bits: balanced against what they read, rounded up or down on purpose.

Balance (DMQ; SmoothQuant, arXiv 2211.10438): y = (x / f) (f w), with a factor for each input
channel c, f_c = max|x_c|^m / max|w_c|^(1-m): what is hard in x moves into w.

AdaRound (arXiv 2004.10568): q = floor(w / s) + h(a), h between 0 and 1; a learns the layer's output
and is then pushed to one side by sum(1 - |2h - 1|^beta), beta falling from 20 to 2.
"""

import math
from dataclasses import dataclass

import numpy as np

from ascend_lab.compress.scales import EPSILON, limits
from ascend_lab.errors import InputError
from ascend_lab.graph.ir import Node, Values, operator_of
from ascend_lab.ops import gradient
from ascend_lab.parallel.values import Adam

WEAKEST, STRONGEST = 0.2, 0.8


def balance_factors(x_most: Values, w_most: Values, strength: float = 0.5) -> Values:
    """Return f from the largest sizes of x and w of each input channel.

    A channel that is zero in both keeps 1; zero in one, it is stretched to the others' largest.
    Raises `InputError` for a strength outside 0.2 to 0.8.
    """
    if not WEAKEST <= strength <= STRONGEST:
        raise InputError(f"migration strength from {WEAKEST} to {STRONGEST}", str(strength))
    x, w = (np.asarray(one, np.float64) for one in (x_most, w_most))
    no_x, no_w = x < EPSILON, w < EPSILON
    whole = ~no_x & ~no_w
    if not whole.any():
        return np.ones_like(x)
    found = np.ones_like(x)
    found[whole] = x[whole] ** strength / w[whole] ** (1 - strength)
    largest_x, largest_w = (x / found)[whole].max(), (w * found)[whole].max()
    found[no_x & ~no_w] = largest_w / w[no_x & ~no_w]
    found[~no_x & no_w] = x[~no_x & no_w] / largest_x
    return found


@dataclass(frozen=True, slots=True)
class Rounding:
    """How AdaRound learns: steps, weight of the push, beta from and to, share without push.

    `lr` is the step of Adam, `rows` the size of a minibatch.
    """

    iterations: int = 10000
    push: float = 0.01
    beta: tuple[float, float] = (20.0, 2.0)
    warm: float = 0.2
    lr: float = 1e-3
    rows: int = 32
    seed: int = 0


def gate(a: Values) -> tuple[Values, Values]:
    """Return h(a) = clip(1.2 sigmoid(a) - 0.1, 0, 1) and its slope."""
    s = 1 / (1 + np.exp(-a))
    wide = 1.2 * s - 0.1
    return np.clip(wide, 0, 1), np.where((wide > 0) & (wide < 1), 1.2 * s * (1 - s), 0.0)


def adaptive_rounding(
    node: Node, arrays: list[Values], wanted: Values, scales: Values, bits: int, how: Rounding
) -> Values:
    """Return weights on the grid that bring a layer's output close to what is wanted.

    `arrays` are what the node reads, the quantised input first; `scales` broadcast with weights.
    """
    x, weights, *rest = (one.astype(np.float64) for one in arrays)
    steps, (low, high) = weights / scales, limits(bits)
    floor, rng = np.floor(steps), np.random.default_rng(how.seed)
    a = -np.log(1.2 / (steps - floor + 0.1) - 1)
    optimizer = Adam(how.lr)
    state = optimizer.start(a)
    operator = operator_of(node.op)
    attrs = {k: v for k, v in operator.settings(node.attrs).items() if k != "out_dtype"}
    for step in range(how.iterations):
        rows = rng.permutation(len(x))[: how.rows]
        h, slope = gate(a)
        whole = np.clip(floor + h, low, high)
        given = (x[rows], whole * scales, *rest)
        out = np.asarray(operator.formula(*given, **operator.settings(node.attrs)))
        error = 2 * (out - wanted[rows]) * out.shape[1] / out.size
        found = gradient(operator, [error], given, [out], **attrs)[1]
        assert found is not None
        inside = (floor + h > low) & (floor + h < high)
        grad = found * scales * inside * slope + _push(h, slope, step, how)
        a, state = optimizer.update(a, grad, state, step + 1)
    chosen: Values = np.clip(floor + (gate(a)[0] >= 0.5), low, high) * scales
    return chosen.astype(np.float32)


def _push(h: Values, slope: Values, step: int, how: Rounding) -> Values:
    """Return the slope of push * sum(1 - |2h - 1|^beta); 0 while warming up."""
    start = how.warm * how.iterations
    if step < start:
        return np.zeros_like(h)
    first, last = how.beta
    share = (step - start) / (how.iterations - start)
    beta = last + (first - last) / 2 * (1 + math.cos(math.pi * share))
    side = 2 * h - 1
    found: Values = -how.push * beta * abs(side) ** (beta - 1) * np.sign(side) * 2 * slope
    return found


def largest_along(values: Values, axis: int) -> Values:
    """Return the largest |v| of each slice along an axis."""
    found: Values = np.abs(np.moveaxis(values, axis, 0)).reshape(values.shape[axis], -1).max(axis=1)
    return found
