"""Learned quantisation ranges: rounding within a network during training (QAT).

Forward, a layer reads rounded numbers. Backward, rounding has no useful slope, since it is flat
almost everywhere; the straight-through estimator takes 1 inside the range and 0 outside. The ends
of the range are learned together with the weights:

    input (ULQ)      low and high; s = (high - low) / (2^b - 1), offset -2^(b-1) - round(low / s)
    weights (LSQ)    the step s, one a channel; its slope is divided by sqrt(numbers x largest q)

The slopes with respect to a step or an end come from x' = s round(x / s):

    dx'/ds = round(x / s) - x / s     inside: the rounding error in steps
    dx'/ds = the least or largest q   outside, where x' = s q

ULQ: AMCT, github hicann/amct, custom_op/ulq_retrain. LSQ: Esser et al., arXiv 1902.08153.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_lab.cluster.parallel.values import Tape, Var
from ascend_lab.compiler.ir import Values
from ascend_lab.deploy.compress.layers import Quantised, by_node, channel_axis
from ascend_lab.deploy.compress.scales import (
    EPSILON,
    LayerScales,
    broadcast_along,
    fake_quantise,
    integer_range,
    scale_between,
)


# -- the slopes -----------------------------------------------------------------------------------
def ulq(x: Values, low: float, high: float, bits: int = 8) -> Values:
    """Return x rounded and clipped to the range from low to high.

    The offset is added before rounding, as in AMCT; `scales.quantise` adds it after rounding.
    """
    scale = scale_between(low, high, bits, True)
    kind = x.dtype.type
    q = np.clip(np.rint(x / kind(scale.scale) + scale.offset), *integer_range(bits))
    y: Values = (q - scale.offset) * kind(scale.scale)
    return y.astype(x.dtype, copy=False)


def ulq_slopes(
    x: Values, low: float, high: float, g: Values, bits: int = 8
) -> tuple[Values, float, float]:
    """Return the slopes with respect to x, low and high, from `g`, the slope of the rounded x.

    An end moves the numbers clipped to it by 1. Since s = (high - low) / (2^b - 1), it also moves
    all numbers by their rounding error in steps, divided by the 2^b - 1 steps.
    """
    scale = scale_between(low, high, bits, True)
    # the real numbers of the least and the largest level, which differ from low and high a little
    least_q, largest_q = integer_range(bits)
    lowest = scale.scale * (least_q - scale.offset)
    highest = scale.scale * (largest_q - scale.offset)
    under = x < lowest
    over = x > highest
    steps = np.where(over, high, np.where(under, low, x)) / scale.scale
    error = (np.rint(steps) - steps) / (2**bits - 1)
    x_slope: Values = g * ~(under | over)
    return x_slope, float(np.sum(g * (under - error))), float(np.sum(g * (over + error)))


def lsq_start(x: Values, bits: int = 8) -> float:
    """Return the step to start with: 2 mean|x| / sqrt(largest q)."""
    return float(max(2 * np.abs(x).mean() / np.sqrt(integer_range(bits)[1]), EPSILON))


def lsq_slopes(
    x: Values, step: Values, g: Values, bits: int = 8, axis: int | None = None
) -> tuple[Values, Values]:
    """Return the slopes with respect to x and the step, or the steps along an axis.

    `g` is the slope with respect to the rounded numbers.
    """
    low, high = integer_range(bits)
    steps = x / broadcast_along(step, axis, x.ndim)
    inside = (steps > low) & (steps < high)
    terms = g * np.where(inside, np.rint(steps) - steps, np.clip(steps, low, high))
    summed_axes = None if axis is None else tuple(i for i in range(x.ndim) if i != axis)
    # A step gets the slopes of all its numbers added up. Divided by sqrt(numbers x largest q) it
    # moves, relative to its size, about as fast as a weight: 48,000 weights in 8 bits give 1/2469.
    numbers = x.size / max(1, step.size)
    step_slope = np.asarray(terms.sum(axis=summed_axes)).reshape(step.shape)
    return g * inside, step_slope / np.sqrt(numbers * high)


# -- the rounding of one layer, recorded for gradients --------------------------------------------
@dataclass(frozen=True, slots=True)
class LearnedRounding:
    """The rounding of one layer's input and weights, recorded on a tape for the gradients.

    `layer` holds the scales from which learning starts, `axis` is the axis of the weights' output
    channels. With `fresh` the steps of weights start from their mean size, otherwise from `layer`.
    """

    layer: LayerScales
    axis: int | None
    fresh: bool = True

    def start(self, weights: Values) -> dict[str, Values]:
        """Return the learned numbers to start with, by name."""
        # scale 0.02 and offset -28 in 8 bits: the range starts as -2 to 3.1
        least_q, largest_q = integer_range(self.layer.bits)
        low = self.layer.scale * (least_q - self.layer.offset)
        high = self.layer.scale * (largest_q - self.layer.offset)
        steps = np.array(self.layer.weight_scales)
        if self.fresh:
            rows = np.moveaxis(weights, self.axis or 0, 0) if len(steps) > 1 else weights[None]
            steps = np.array([lsq_start(row, self.layer.weight_bits) for row in rows])
        return {
            self.name("low"): np.array(low),
            self.name("high"): np.array(high),
            self.name("steps"): steps,
        }

    def name(self, number: str) -> str:
        """Return the name that "low", "high" or "steps" of this layer has among all parameters."""
        return f"{self.layer.name}.{number}"

    def rounded_reads(self, tape: Tape, x: Var, w: Var, parameters: Mapping[str, Var]) -> list[Var]:
        """Return the layer's input and weights rounded, recorded with their slopes."""
        ends = [parameters[self.name("low")], parameters[self.name("high")]]
        low, high = (float(end.values[0]) for end in ends)
        bits = self.layer.bits

        def x_slope(grads: Any) -> Any:
            """Return the slopes of x and of its two limits."""
            slopes = ulq_slopes(x.values[0], low, high, grads[0], bits)
            return [[np.asarray(slope)] for slope in slopes]

        steps = parameters[self.name("steps")]
        step_values = steps.values[0]
        axis = self.axis if len(step_values) > 1 else None
        weight_bits = self.layer.weight_bits

        def w_slope(grads: Any) -> Any:
            """Return the slopes of the weights and of their steps."""
            slopes = lsq_slopes(w.values[0], step_values, grads[0], weight_bits, axis)
            return [[slope] for slope in slopes]

        rounded_x = ulq(x.values[0], low, high, bits)
        broadcast_steps = broadcast_along(step_values, axis, w.values[0].ndim)
        rounded_w = fake_quantise(w.values[0], broadcast_steps, 0, weight_bits)
        # a variable of the tape has one array a rank; here there is one rank
        return [
            tape.record([x, *ends], [rounded_x], x_slope),
            tape.record([w, steps], [rounded_w], w_slope),
        ]

    def layer_scales(self, parameters: Mapping[str, Values]) -> LayerScales:
        """Return the layer's record with the scales given by its learned numbers."""
        low = float(parameters[self.name("low")])
        high = float(parameters[self.name("high")])
        scale = scale_between(low, high, self.layer.bits, True)
        steps = tuple(parameters[self.name("steps")].astype(np.float32).tolist())
        return replace(self.layer, scale=scale.scale, offset=scale.offset, weight_scales=steps)


def in_bounds(name: str, value: Values) -> Values:
    """Return a learned number clipped to its valid range after a step of training.

    A range keeps 0 inside (low <= 0 <= high) and a step stays positive.
    """
    # names are those of `LearnedRounding.name`; weights pass through unchanged
    if name.endswith(".low"):
        return np.minimum(value, 0.0)
    return np.maximum(value, EPSILON) if name.endswith((".high", ".steps")) else value


def roundings_of(quantised: Quantised, fresh: bool = True) -> dict[str, LearnedRounding]:
    """Return the rounding to be learned of each quantised layer, by the layer's name."""
    graph = quantised.graph
    return {
        name: LearnedRounding(layer, channel_axis(graph.node(name), graph), fresh)
        for name, layer in by_node(quantised).items()
    }
