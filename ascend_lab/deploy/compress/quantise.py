"""Quantises a trained graph to eight bits: prepares it, runs samples through it, chooses scales.

    made ready -> (balanced) -> scales of inputs of layers -> scales of weights -> (rounded)

"Made ready" means that constants are computed and batch norms folded into the convolutions before
them. The steps in brackets are done for the layers whose plan asks for them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, Node, evaluate
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import Values
from ascend_lab.compiler.passes import formats, images, rewrite, simplify
from ascend_lab.deploy.compress import calibrators, scales as rule
from ascend_lab.deploy.compress.adaptive_rounding import with_rounded_weights
from ascend_lab.deploy.compress.balance import balanced, with_balance
from ascend_lab.deploy.compress.config import CONVOLUTIONS, LayerPlan, Plan
from ascend_lab.deploy.compress.layers import (
    Feeds,
    Quantised,
    bias_of,
    by_node,
    channel_axis,
    layers_of,
    tensor_values,
)
from ascend_lab.deploy.compress.scales import BIAS_STEPS, EPSILON, LayerScales, Scale, integer_range
from ascend_lab.errors import InputError

TINY = 2.0**-10
"""Tensors of numbers below it are multiplied by `RAISED` before a rule chooses their scale."""
RAISED = 2.0**20
"""Rules know no scale below FLT_EPSILON, 1.2e-7; numbers up to 2^-20 in 8 bits need 7.5e-9."""
IDLE_STEPS = 2.0**18
"""Steps into which the bias of a channel with only zero weights is divided."""
HALF_STEP = 0.501
"""Half a step, and a small margin for rounding in fp32."""


# -- making ready ---------------------------------------------------------------------------------
def made_ready(graph: Graph, plan: Plan) -> Graph:
    """Return the graph with constants computed and, if the plan says so, batch norms folded.

    So the weights of a layer are one constant, even if nodes computed them, unless they are whole
    numbers already.
    """

    def compute_constant(draft: Draft, node: Node) -> bool:
        """Compute a node of constants, unless it makes floats of whole numbers."""
        return node.op != "dequantise" and simplify.fold_constants(draft, node)

    def fold_norm(draft: Draft, node: Node) -> bool:
        """Fold a batch norm into its convolution unless the plan excludes that."""
        conv = draft.maker(node.inputs[0])
        excluded = conv is not None and conv.name in plan.unfolded
        return not excluded and images.into_convolution(draft, node)

    # Exporters often write weights as constants that nodes transpose or cast before the layer.
    graph = rewrite.sweep(compute_constant)(graph)[0]
    if not plan.fold:
        return graph
    graph = rewrite.sweep(_norm_before_reshape, "batch_norm")(graph)[0]
    return rewrite.sweep(fold_norm, "batch_norm")(graph)[0]


def _norm_before_reshape(draft: Draft, node: Node) -> bool:
    """Move a batch norm of rows before the reshape from an image to rows; tell whether it moved.

    A convolution of rows (n, c, w) is computed as one of images (n, c, 1, w), followed by a
    reshape: the norm can be folded only if it directly follows the convolution.
    """
    row = draft.only(node.inputs[0], "reshape")
    conv = draft.maker(row.inputs[0]) if row is not None else None
    if row is None or conv is None or conv.op not in CONVOLUTIONS:
        return False
    image = row.inputs[0]
    shape = draft.type(node.output).shape
    if draft.type(image).shape[:2] != shape[:2]:
        return False
    normal = draft.insert("batch_norm", (image, *node.inputs[1:]), node.attrs, f"{node.name}_image")
    return draft.become(node, "reshape", (normal,), {"shape": shape})


# -- samples --------------------------------------------------------------------------------------
def batches_of(graph: Graph, arrays: Mapping[str, Any]) -> Feeds:
    """Return arrays of many rows as feeds of as many rows as the graph's inputs have.

    Rows that fill no feed are left out: 70 rows of a graph for batches of 32 are two feeds. Raises
    `InputError` for missing or unknown inputs, shapes that do not fit, or too few rows.
    """
    if set(arrays) != set(graph.inputs):
        raise InputError(f"arrays for {', '.join(graph.inputs)}", ", ".join(arrays) or "none")
    counts = set()
    for name in graph.inputs:
        shape = graph.types[name].shape
        sample_shape = np.shape(arrays[name])
        if len(sample_shape) != len(shape) or sample_shape[1:] != shape[1:] or not shape:
            needed = f"samples of {name} as rows of {shape[1:]}"
            raise InputError(needed, str(sample_shape), "reshape")
        counts.add(sample_shape[0] // shape[0])
    if len(counts) != 1 or 0 in counts:
        raise InputError("as many whole batches of each input, at least one", str(sorted(counts)))
    sizes = {name: graph.types[name].shape[0] for name in graph.inputs}
    return [
        {name: arrays[name][i * n : (i + 1) * n] for name, n in sizes.items()}
        for i in range(counts.pop())
    ]


# -- scales ---------------------------------------------------------------------------------------
def quantise_graph(graph: Graph, feeds: Feeds, plan: Plan | None = None) -> Quantised:
    """Return a graph made ready and the scales of its layers, chosen on samples.

    Raises `InputError` for a plan with unknown names, samples that do not fit, numbers that are not
    finite, and a graph without a layer to quantise.
    """
    plan = plan or Plan()
    plan.check(graph)
    if plan.batches is not None and plan.batches > len(feeds):
        needed = f"samples for batch_num {plan.batches}"
        raise InputError(needed, f"{len(feeds)} batches", "add some")
    feeds = feeds[: plan.batches]
    graph = made_ready(graph, plan)
    # plans are found before balancing, which changes what layers read but not their names
    plans = {}
    for node in layers_of(graph):
        layer_plan = plan.of(node)
        if layer_plan is not None:
            plans[node.name] = layer_plan
    if not plans:
        remedy = "skip fewer, or give a model whose layers compute in floating point"
        raise InputError(f"{graph.name}: a layer to quantise", "none", remedy)
    graph, factors = balanced(graph, feeds, plans)
    nodes = [node for node in layers_of(graph) if node.name in plans]
    values = tensor_values(graph, feeds, (node.inputs[0] for node in nodes))
    unbalanced = _scales_of_layers(graph, nodes, values, plans)
    layers = tuple(replace(s, balance=factors.get(s.name, ())) for s in unbalanced)
    return with_rounded_weights(Quantised(graph, layers), values, plans)


def _scales_of_layers(
    graph: Graph,
    nodes: Sequence[Node],
    values: Mapping[str, list[Values]],
    plans: Mapping[str, LayerPlan],
) -> list[LayerScales]:
    """Return the scales of some layers, from samples of what they read."""
    beside_additions = {name for _, name in formats.summands(graph, [node.name for node in nodes])}
    input_scales: dict[tuple[str, str], Scale] = {}
    layers = []
    for node in nodes:
        plan = plans[node.name]
        x = node.inputs[0]
        # Layers that read the same tensor by the same rule share its scale (query, key and value of
        # attention, for instance), so that it is calibrated and quantised once.
        key = (x, repr((plan.method, plan.bits, plan.with_offset, plan.options)))
        if key not in input_scales:
            input_scales[key] = _input_scale(values[x], plan)
        scale = input_scales[key]
        layers.append(
            LayerScales(
                name=node.name,
                scale=scale.scale,
                offset=scale.offset,
                weight_scales=_weight_scales(node, graph, plan, scale.scale),
                bits=plan.bits,
                weight_bits=plan.weight_bits,
                shared=node.name in beside_additions and all(covers(scale, v) for v in values[x]),
            )
        )
    return layers


def covers(scale: Scale, values: Values) -> bool:
    """Tell whether a scale clips no value: each is off by half a step at most."""
    # where numbers are clipped, the error is more than half a step
    errors = np.abs(scale.fake_quantise(values) - values)
    return bool(errors.max(initial=0.0) <= scale.scale * HALF_STEP)


def _input_scale(values: list[Values], plan: LayerPlan) -> Scale:
    """Return the scale of a layer's input, by the rule of its plan.

    Tiny numbers are multiplied before the rule sees them, and the scale is divided again.
    """
    largest = max(float(np.abs(x).max(initial=0.0)) for x in values)
    # 2^20 is a power of two, so multiplying and dividing by it rounds nothing
    factor = RAISED if 0 < largest < TINY else 1.0
    raised_scale = calibrators.calibrate(
        [x * np.float32(factor) for x in values] if factor != 1 else values,
        plan.method,
        bits=plan.bits,
        asymmetric=plan.with_offset,
        **plan.options,
    )
    return replace(raised_scale, scale=raised_scale.scale / factor)


def _weight_scales(
    node: Node, graph: Graph, plan: LayerPlan, input_scale: float
) -> tuple[float, ...]:
    """Return the scales of a layer's weights: by range, or by divergence if rounding is learned.

    They are widened if the bias of the layer would exceed int32: see `fitting`.
    """
    weights = rule.checked(graph.constants[node.inputs[1]].array(), f"weights of {node.name}")
    axis = channel_axis(node, graph) if plan.channel_wise else None
    rows = weights[None] if axis is None else np.moveaxis(weights, axis, 0)
    if plan.rounding is None:
        scales = np.array(rule.channel_scales(weights, axis, plan.weight_bits))
    else:
        row_scales = [calibrators.calibrate(row, "kl", bits=plan.weight_bits) for row in rows]
        scales = np.array([scale.scale for scale in row_scales])
    largest = np.abs(rows).reshape(len(rows), -1).max(axis=1)
    bias = bias_of(node, graph)
    return tuple(fitting(scales, largest, plan.weight_bits, bias, input_scale).tolist())


def fitting(
    scales: Values, largest: Values, bits: int, bias: Values | None, input_scale: float
) -> Values:
    """Return scales of weights corrected for tiny weights, and wide enough for a bias in int32.

    `largest` are the largest |w| of each channel. A bias b is added to sums of products, so it is
    written in steps of those: b / (input_scale x weight scale) must not leave int32.
    """
    corrected = np.asarray(scales, np.float64).copy()
    # Below 1.2e-7 the rule writes the scale 1, which is right for zeros only.
    tiny = (largest > 0) & (largest / integer_range(bits)[1] < EPSILON)
    corrected[tiny] = np.maximum(largest[tiny] / integer_range(bits)[1], 1e-30)
    if bias is not None:
        bias_size = np.abs(bias.astype(np.float64))
        if len(corrected) == len(bias_size):
            # A channel of zero weights has only its bias, which determines its steps.
            only_bias = (largest == 0) & (bias_size > 0)
            corrected[only_bias] = bias_size[only_bias] / (input_scale * IDLE_STEPS)
            corrected = np.maximum(corrected, bias_size / (input_scale * BIAS_STEPS))
        elif not largest.any():
            largest_bias = max(float(bias_size.max(initial=0.0)), EPSILON)
            corrected = np.full(1, largest_bias / (input_scale * IDLE_STEPS))
        # A scale of many channels is not widened for the bias of one, as the others would lose
        # precision: a bias that does not fit then stays in floats.
    # through fp32, the format of scales in files and on the chip
    return corrected.astype(np.float32).astype(np.float64)


# -- scales that are known ------------------------------------------------------------------------
def with_records(
    graph: Graph, layers: Iterable[LayerScales], plan: Plan | None = None
) -> Quantised:
    """Return a graph made ready for scales that are known: norms folded, layers balanced.

    Weights are not rounded by AdaRound again. Raises `InputError` for layers not in the graph.
    """
    plan = plan or Plan()
    layers = tuple(layers)
    graph = made_ready(graph, plan)
    factors = {layer.name: layer.balance for layer in layers if layer.balance}
    quantised = Quantised(with_balance(graph, factors), layers)
    by_node(quantised)  # raises for layers that are not in the graph
    return quantised


def at_batch(quantised: Quantised, graph: Graph, plan: Plan) -> Quantised:
    """Return the same quantised network for a graph of another batch size.

    `graph` is the network as it was before quantising, with that batch. Scales and the weights of
    quantised layers, which may have been rounded by AdaRound, are taken over.
    """
    resized = with_records(graph, quantised.layers, plan).graph
    layer_names = {layer.name for layer in quantised.layers}
    weights = {node.inputs[1] for node in resized.nodes if node.name in layer_names}
    constants = {
        name: quantised.graph.constants[name] if name in weights else constant
        for name, constant in resized.constants.items()
    }
    return Quantised(replace(resized, constants=constants), quantised.layers)


def output_error(graph: Graph, approximate: Graph, feeds: Feeds) -> float:
    """Return the relative error of the outputs: sqrt(sum (y' - y)^2 / sum y^2) over all feeds."""
    noise = 0.0
    total = 0.0
    for feed in feeds:
        exact_outputs = evaluate(graph, feed)
        outputs = evaluate(approximate, feed)
        for narrow_exact, output in zip(exact_outputs.values(), outputs.values(), strict=True):
            exact = narrow_exact.astype(np.float64)
            noise += float(np.sum((output - exact) ** 2))
            total += float(np.sum(exact**2))
    if total:
        return float(np.sqrt(noise / total))
    return float("inf") if noise else 0.0
