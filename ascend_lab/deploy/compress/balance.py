"""Balance (DMQ; SmoothQuant, arXiv 2211.10438): moves the size of large input channels to weights.

    y = x w = (x / f) (f w)         one factor for each input channel c
    f_c = max|x_c|^m / max|w_c|^(1-m)

One scale serves all channels of x: a channel of numbers up to 100 leaves others, up to 1, only one
level in a hundred. With the strength m = 0.5 and weights up to 1 everywhere the factor of this
channel is 10, that of the others 1: then this channel of x and its weights are both up to 10. Both
ranges are wider than others, but both lose far less precision than x did.
"""

from collections.abc import Mapping

import numpy as np

from ascend_lab.compiler import Graph
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import Values
from ascend_lab.deploy.compress.config import STRENGTHS, LayerPlan
from ascend_lab.deploy.compress.layers import (
    Feeds,
    constant_of,
    input_axes,
    layers_of,
    tensor_values,
)
from ascend_lab.deploy.compress.scales import EPSILON, broadcast_along
from ascend_lab.errors import InputError


def balanced(
    graph: Graph, feeds: Feeds, plans: Mapping[str, LayerPlan]
) -> tuple[Graph, dict[str, tuple[float, ...]]]:
    """Return the graph with x / f before some layers and f in their weights, and the factors.

    These are the layers whose plan has a strength; samples say how large their input channels are.
    """
    to_balance = []
    for node in layers_of(graph):
        axes = input_axes(node, graph)
        if node.name in plans and plans[node.name].strength is not None and axes:
            to_balance.append((node, axes))
    if not to_balance:
        return graph, {}
    values = tensor_values(graph, feeds, (node.inputs[0] for node, _ in to_balance))
    factors: dict[str, tuple[float, ...]] = {}
    for node, (x_axis, w_axis) in to_balance:
        # the largest |x| of each input channel over all feeds
        x_largest = np.max([largest_along(x, x_axis) for x in values[node.inputs[0]]], axis=0)
        weights = graph.constants[node.inputs[1]].array()
        strength = plans[node.name].strength or 0.0
        node_factors = balance_factors(x_largest, largest_along(weights, w_axis), strength)
        factors[node.name] = tuple(node_factors.astype(np.float32).tolist())
    return with_balance(graph, factors), factors


def balance_factors(x_largest: Values, w_largest: Values, strength: float = 0.5) -> Values:
    """Return f from the largest magnitudes of x and of w, by input channel.

    A channel that is zero in both has the factor 1; one that is zero in one of them is stretched to
    the largest of all channels. Raises `InputError` for a strength outside 0.2 to 0.8.
    """
    lowest, highest = STRENGTHS
    if not lowest <= strength <= highest:
        raise InputError(f"migration strength from {lowest} to {highest}", str(strength))
    x, w = (np.asarray(largest, np.float64) for largest in (x_largest, w_largest))
    no_x = x < EPSILON
    no_w = w < EPSILON
    in_both = ~no_x & ~no_w
    if not in_both.any():
        return np.ones_like(x)
    factors = np.ones_like(x)
    factors[in_both] = x[in_both] ** strength / w[in_both] ** (1 - strength)
    # If a channel of x is 0, no factor harms x: its weights may grow to the largest of all others;
    # if its weights are 0, the channel of x may.
    balanced_x = (x / factors)[in_both].max()
    balanced_w = (w * factors)[in_both].max()
    factors[no_x & ~no_w] = balanced_w / w[no_x & ~no_w]
    factors[~no_x & no_w] = x[~no_x & no_w] / balanced_x
    return factors


def largest_along(values: Values, axis: int) -> Values:
    """Return the largest |v| of each slice along an axis."""
    # (n, c, h, w) along axis 1 becomes c rows of n h w numbers
    rows = np.abs(np.moveaxis(values, axis, 0)).reshape(values.shape[axis], -1)
    largest: Values = rows.max(axis=1)
    return largest


def with_balance(graph: Graph, factors: Mapping[str, tuple[float, ...]]) -> Graph:
    """Return the graph with each named layer balanced by its factors."""
    draft = Draft(graph)
    for node in graph.nodes:
        if node.name not in factors:
            continue
        f = np.asarray(factors[node.name], np.float32)
        axes = input_axes(node, graph)
        x, w = node.inputs[:2]
        if axes is None or graph.types[x].shape[axes[0]] != len(f):
            raise InputError(f"{node.name}: factors for its input channels", str(len(f)))
        # f broadcasts as (1, c, 1, 1) in an image x, and as (1, c, 1, 1) in weights (k, c, r, s)
        x_rank, w_rank = (len(graph.types[name].shape) for name in (x, w))
        divisor = draft.add(constant_of(broadcast_along(f, axes[0], x_rank)), f"{x}_factors")
        weights = graph.constants[w].array() * broadcast_along(f, axes[1], w_rank)
        reads = (
            draft.insert("div", (x, divisor), {}, f"{x}_balanced"),
            draft.add(constant_of(weights), f"{w}_balanced"),
        )
        draft.become(node, node.op, (*reads, *node.inputs[2:]), node.attrs)
    return draft.finish()
