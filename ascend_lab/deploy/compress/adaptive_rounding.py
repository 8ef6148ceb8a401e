"""AdaRound (arXiv 2004.10568): rounds weights up or down so that a layer's output stays close.

    q = floor(w / s) + h(a)         h(a) = clip(1.2 sigmoid(a) - 0.1, 0, 1)

Rounding each weight to the nearest is best for the weight, but not for the sum that it is part of:
two weights of 0.4 steps, read together, come to 0.8 and should not both become 0. So a is learned,
one number per weight, by gradient descent on the squared error of the layer's output. A penalty is
added, sum(1 - |2h - 1|^beta), called the push, which is least where h is 0 or 1; beta falls from
20, where it hardly acts on numbers in the middle, to 2.
"""

import math
from collections.abc import Mapping

import numpy as np

from ascend_lab.cluster.parallel.values import Adam
from ascend_lab.compiler import Node
from ascend_lab.compiler.ir import Values, operator_of
from ascend_lab.deploy.compress.config import LayerPlan, Rounding
from ascend_lab.deploy.compress.layers import Quantised, output_of, weight_scales, with_values
from ascend_lab.deploy.compress.scales import fake_quantise, integer_range
from ascend_lab.operators.ops import gradient


def with_rounded_weights(
    quantised: Quantised, values: Mapping[str, list[Values]], plans: Mapping[str, LayerPlan]
) -> Quantised:
    """Return the graph with the weights of some layers rounded to multiples of scales by AdaRound.

    These are the layers whose plan asks for it; `values` holds samples of tensors by name.
    """
    graph = quantised.graph
    rounded_weights = dict[str, Values]()
    for layer in quantised.layers:
        node = graph.node(layer.name)
        rounding = plans[layer.name].rounding
        if rounding is None:
            continue
        x = np.concatenate(values[node.inputs[0]])
        constants = [graph.constants[name].array() for name in node.inputs[1:]]
        target = output_of(node, [x, *constants])
        scales = weight_scales(layer, node, graph)
        # the weights also have to compensate for the rounding of the layer's input
        reads = [fake_quantise(x, layer.scale, layer.offset, layer.bits), *constants]
        rounded_weights[node.inputs[1]] = adaptive_rounding(
            node, reads, target, scales, layer.weight_bits, rounding
        )
    return Quantised(with_values(graph, rounded_weights), quantised.layers)


def adaptive_rounding(
    node: Node,
    arrays: list[Values],
    target: Values,
    scales: Values,
    bits: int,
    rounding: Rounding,
) -> Values:
    """Return weights, multiples of their scales, that bring a layer's output close to a target.

    `arrays` are the inputs of the node, the quantised one first; `scales` broadcast with weights.
    """
    x, weights, *biases = (array.astype(np.float64) for array in arrays)
    steps = weights / scales
    (low, high) = integer_range(bits)
    floor = np.floor(steps)
    rng = np.random.default_rng(rounding.seed)
    # h(a) starts at the fraction of the weight, solved for a: nothing is rounded yet
    a = -np.log(1.2 / (steps - floor + 0.1) - 1)
    optimizer = Adam(rounding.lr)
    state = optimizer.start(a)
    operator = operator_of(node.op)
    attrs = {k: v for k, v in operator.settings(node.attrs).items() if k != "out_dtype"}
    for step in range(rounding.iterations):
        rows = rng.permutation(len(x))[: rounding.rows]
        h, h_slope = gate(a)
        q = np.clip(floor + h, low, high)
        reads = (x[rows], q * scales, *biases)
        out = np.asarray(operator.formula(*reads, **operator.settings(node.attrs)))
        # the squared error, summed over channels and averaged over rows (and pixels)
        out_slope = 2 * (out - target[rows]) * out.shape[1] / out.size
        w_slope = gradient(operator, [out_slope], reads, [out], **attrs)[1]
        assert w_slope is not None
        # chain rule: w = scale clip(floor + h(a)), flat where it is clipped
        inside = (floor + h > low) & (floor + h < high)
        push = _push_slope(h, h_slope, step, rounding)
        a_slope = w_slope * scales * inside * h_slope + push
        a, state = optimizer.update(a, a_slope, state, step + 1)
    # weights that were not pushed all the way to 0 or 1 are rounded at one half
    rounded: Values = np.clip(floor + (gate(a)[0] >= 0.5), low, high) * scales
    return rounded.astype(np.float32)


def gate(a: Values) -> tuple[Values, Values]:
    """Return h(a) = clip(1.2 sigmoid(a) - 0.1, 0, 1) and its slope.

    Stretched by 1.2, the sigmoid reaches 0 and 1 at a = -2.4 and 2.4 instead of at infinity.
    """
    s = 1 / (1 + np.exp(-a))
    stretched = 1.2 * s - 0.1
    inside = (stretched > 0) & (stretched < 1)
    return np.clip(stretched, 0, 1), np.where(inside, 1.2 * s * (1 - s), 0.0)


def _push_slope(h: Values, h_slope: Values, step: int, rounding: Rounding) -> Values:
    """Return the slope, with respect to a, of push * sum(1 - |2h - 1|^beta); 0 while warming up."""
    start = rounding.warm * rounding.iterations
    if step < start:
        return np.zeros_like(h)
    # beta falls along half a cosine wave: 20, at half the way 11, at the end 2
    first_beta, last_beta = rounding.beta
    share = (step - start) / (rounding.iterations - start)
    beta = last_beta + (first_beta - last_beta) / 2 * (1 + math.cos(math.pi * share))
    side = 2 * h - 1
    # d(1 - |u|^beta) / du = -beta |u|^(beta - 1) sign(u), with u = 2h - 1
    slope: Values = -rounding.push * beta * abs(side) ** (beta - 1) * np.sign(side) * 2 * h_slope
    return slope
