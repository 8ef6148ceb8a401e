"""A trained graph in eight bits: make it ready, run samples through it, choose scales.

    ready -> (balanced) -> scales of what each layer reads -> scales of weights -> (rounded)

Balance (DMQ; SmoothQuant, arXiv 2211.10438): y = (x / f) (f w), with a factor for each input
channel c, f_c = max|x_c|^m / max|w_c|^(1-m): what is hard in x moves into w.

AdaRound (arXiv 2004.10568): q = floor(w / s) + h(a), h between 0 and 1; a learns the layer's output
and is then pushed to one side by sum(1 - |2h - 1|^beta), beta falling from 20 to 2.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_lab.cluster.parallel.values import Adam
from ascend_lab.compiler import Constant, Draft, Graph, Node, TensorType, evaluate
from ascend_lab.compiler.ir import Values, operator_of
from ascend_lab.compiler.passes import formats, images, rewrite, simplify
from ascend_lab.deploy.compress import calibrators, scales as rule
from ascend_lab.deploy.compress.config import (
    CONVOLUTIONS,
    PRODUCTS,
    STRENGTHS,
    LayerPlan,
    Plan,
    Rounding,
)
from ascend_lab.deploy.compress.scales import EPSILON, LayerScales, Scale, along, fake, limits
from ascend_lab.errors import InputError
from ascend_lab.operators.ops import gradient

Feeds = Sequence[Mapping[str, Any]]
ATTENTION = ("attention", "flash_attention", "attention_scores", "attention_context")
HEAVY = (*CONVOLUTIONS, *PRODUCTS, *ATTENTION)
"""Operators that multiply matrices or convolve: what quantising is about."""
LEAST = 2.0**-10
"""Sizes from which numbers are raised by `RAISED` to choose a scale: rules know no scale below
FLT_EPSILON."""
RAISED = 2.0**20
BIAS_STEPS = 2.0**30
"""Most steps of sums that a bias is: int32 holds as many products of bytes besides."""
IDLE_STEPS = 2.0**18
"""Steps of sums that the bias of a channel of zeros is."""
HALF_STEP = 0.501
"""Half a step, and what rounding in fp32 adds."""


# -- layers ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Quantised:
    """A graph in fp32 made ready (norms folded, balanced, rounded), and the scales of its layers.

    Nodes without scales stay in floating point.
    """

    graph: Graph
    layers: tuple[LayerScales, ...]


def made_ready(graph: Graph, plan: Plan) -> Graph:
    """Return the graph with what is constant computed and, if the plan says so, norms folded.

    So the weights of a layer are a constant, whatever made them, but for those that are whole
    numbers already.
    """

    def constant(draft: Draft, node: Node) -> bool:
        return node.op != "dequantise" and simplify.fold_constants(draft, node)

    def into(draft: Draft, node: Node) -> bool:
        conv = draft.maker(node.inputs[0])
        kept = conv is not None and conv.name in plan.unfolded
        return not kept and images.into_convolution(draft, node)

    graph = rewrite.sweep(constant)(graph)[0]
    if not plan.fold:
        return graph
    graph = rewrite.sweep(_before_reshape, "batch_norm")(graph)[0]
    return rewrite.sweep(into, "batch_norm")(graph)[0]


def _before_reshape(draft: Draft, node: Node) -> bool:
    """Normalise the image that a row was: a convolution of rows is one of images of height 1."""
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


def layers_of(graph: Graph) -> tuple[Node, ...]:
    """Return the convolutions and products of fp32 tensors with constant weights, in order."""
    return tuple(node for node in graph.nodes if node.op in HEAVY and not why_not(node, graph))


def why_not(node: Node, graph: Graph) -> str:
    """Return why a convolution or product cannot be quantised, "" if it can."""
    made_by = [graph.producers[n].op for n in node.inputs[:2] if n in graph.producers]
    kinds = {graph.types[name].dtype for name in (*node.inputs[:2], node.output)}
    if node.op in ATTENTION:
        return "its factors are computed, not constant"
    if "dequantise" in made_by or kinds & {"int8", "uint8", "int32"}:
        return "it is in whole numbers already"
    if kinds != {"fp32"}:
        return f"it computes in {', '.join(sorted(kinds))}, not in fp32"
    if node.inputs[0] in graph.constants:
        return "what it reads is a constant"
    if node.inputs[1] not in graph.constants:
        return "its weights are computed, not constant"
    if node.attr("trans_a"):
        return "it transposes what it reads"
    return ""


def channel_axis(node: Node, graph: Graph) -> int | None:
    """Return the axis of a layer's weights along which its output channels lie.

    None for a transposed convolution in groups, whose channels lie along two axes, and for weights
    that are several matrices, which ONNX Runtime multiplies with one scale only.
    """
    if node.op in CONVOLUTIONS[:2]:
        return 0
    if node.op == "conv_transpose2d":
        return 1 if node.attr("groups", 1) == 1 else None
    rank = len(graph.types[node.inputs[1]].shape)
    if rank > 2:
        return None
    return rank - 2 if node.attr("trans_b") else rank - 1


def input_axes(node: Node, graph: Graph) -> tuple[int, int] | None:
    """Return the axes of a layer's input and weights along which input channels lie.

    None where they cannot be balanced: groups, whose weights see only some of the channels.
    """
    if node.op in PRODUCTS:
        rank = len(graph.types[node.inputs[1]].shape)
        last = len(graph.types[node.inputs[0]].shape) - 1
        return last, rank - 1 if node.attr("trans_b") else rank - 2
    grouped = node.op == "depthwise_conv2d" or node.attr("groups", 1) != 1
    return None if grouped else (1, 0 if node.op == "conv_transpose2d" else 1)


# -- samples --------------------------------------------------------------------------------------
def batches_of(graph: Graph, arrays: Mapping[str, Any]) -> Feeds:
    """Return arrays of many rows as feeds of as many rows as the graph's inputs have.

    Rows that fill no feed are left out. Raises `InputError` for missing or unknown inputs, shapes
    that do not fit, or too few rows.
    """
    if set(arrays) != set(graph.inputs):
        raise InputError(f"arrays for {', '.join(graph.inputs)}", ", ".join(arrays) or "none")
    counts = set()
    for name in graph.inputs:
        shape = graph.types[name].shape
        given = np.shape(arrays[name])
        if len(given) != len(shape) or given[1:] != shape[1:] or not shape:
            raise InputError(f"samples of {name} as rows of {shape[1:]}", str(given), "reshape")
        counts.add(given[0] // shape[0])
    if len(counts) != 1 or 0 in counts:
        raise InputError("as many whole batches of each input, at least one", str(sorted(counts)))
    sizes = {name: graph.types[name].shape[0] for name in graph.inputs}
    return [
        {name: arrays[name][i * n : (i + 1) * n] for name, n in sizes.items()}
        for i in range(counts.pop())
    ]


def seen(graph: Graph, feeds: Feeds, names: Iterable[str]) -> dict[str, list[Values]]:
    """Return what tensors hold, one array a feed."""
    wanted = tuple(dict.fromkeys(names))
    runs = [evaluate(replace(graph, outputs=wanted), feed) for feed in feeds]
    return {name: [run[name] for run in runs] for name in wanted}


def quantise_graph(graph: Graph, feeds: Feeds, plan: Plan | None = None) -> Quantised:
    """Return a graph made ready and the scales of its layers, chosen on samples.

    Raises `InputError` for a plan that names what is not there, samples that do not fit, numbers
    that are not finite, and a graph without a layer to quantise.
    """
    plan = plan or Plan()
    plan.check(graph)
    if plan.batches is not None and plan.batches > len(feeds):
        needed = f"samples for batch_num {plan.batches}"
        raise InputError(needed, f"{len(feeds)} batches", "add some")
    feeds = feeds[: plan.batches]
    graph = made_ready(graph, plan)
    chosen = {n.name: p for n in layers_of(graph) if (p := plan.of(n)) is not None}
    if not chosen:
        remedy = "skip fewer, or give a model whose layers compute in floating point"
        raise InputError(f"{graph.name}: a layer to quantise", "none", remedy)
    graph, factors = balanced(graph, feeds, chosen)
    nodes = [node for node in layers_of(graph) if node.name in chosen]
    values = seen(graph, feeds, (node.inputs[0] for node in nodes))
    scales: dict[tuple[str, str], Scale] = {}
    beside = {layer for _, layer in formats.summands(graph, [node.name for node in nodes])}
    layers = []
    for node in nodes:
        one = chosen[node.name]
        name = node.inputs[0]
        key = (name, repr((one.method, one.bits, one.with_offset, one.options)))
        if key not in scales:
            scales[key] = _read_steps(values[name], one)
        steps = scales[key]
        widths = _weight_steps(node, graph, one, steps.scale)
        found = (node.name, steps.scale, steps.offset, widths, one.bits, one.weight_bits)
        shared = node.name in beside and all(held_by(steps, x) for x in values[name])
        layers.append(LayerScales(*found, factors.get(node.name, ()), shared))
    return _rounded(Quantised(graph, tuple(layers)), values, chosen)


def held_by(steps: Scale, values: Values) -> bool:
    """Tell whether values are within the range of a scale: rounded by half a step, never cut."""
    off = np.abs(steps.fake(values) - values)
    return bool(off.max(initial=0.0) <= steps.scale * HALF_STEP)


def _read_steps(values: list[Values], plan: LayerPlan) -> Scale:
    """Return the scale of what a layer reads; tiny numbers are raised for it, and it is lowered."""
    most = max(float(np.abs(x).max(initial=0.0)) for x in values)
    factor = RAISED if 0 < most < LEAST else 1.0
    found = calibrators.calibrate(
        [x * np.float32(factor) for x in values] if factor != 1 else values,
        plan.method,
        bits=plan.bits,
        asymmetric=plan.with_offset,
        **plan.options,
    )
    return replace(found, scale=found.scale / factor)


def _weight_steps(node: Node, graph: Graph, plan: LayerPlan, step: float) -> tuple[float, ...]:
    """Return the scales of a layer's weights: by range, or by divergence if rounding is learned.

    They are widened where the layer's bias, in steps of what it reads times weights, would leave
    int32.
    """
    weights = rule.checked(graph.constants[node.inputs[1]].array(), f"weights of {node.name}")
    axis = channel_axis(node, graph) if plan.channel_wise else None
    rows = weights[None] if axis is None else np.moveaxis(weights, axis, 0)
    if plan.rounding is None:
        scales = np.array(rule.channel_scales(weights, axis, plan.weight_bits))
    else:
        one = [calibrators.calibrate(row, "kl", bits=plan.weight_bits).scale for row in rows]
        scales = np.array(one)
    sizes = np.abs(rows).reshape(len(rows), -1).max(axis=1)
    return tuple(fitting(scales, sizes, plan.weight_bits, bias_of(node, graph), step).tolist())


def fitting(scales: Values, sizes: Values, bits: int, bias: Values | None, step: float) -> Values:
    """Return the scales of weights, mended where they say nothing, and wide enough for a bias.

    `sizes` are the largest weights of each channel: below the least scale a rule knows, 1.2e-7,
    it writes 1, which is right for zeros only. `step` is the scale of what the layer reads.
    A channel of zeros is its bias, and takes its steps from that. One scale of many channels is not
    widened, which would cost the others: a bias that does not fit then stays in floats.
    """
    scales = np.asarray(scales, np.float64).copy()
    tiny = (sizes > 0) & (sizes / limits(bits)[1] < EPSILON)
    scales[tiny] = np.maximum(sizes[tiny] / limits(bits)[1], 1e-30)
    if bias is None:
        return scales.astype(np.float32).astype(np.float64)
    size = np.abs(bias.astype(np.float64))
    if len(scales) == len(size):
        scales = np.where((sizes == 0) & (size > 0), size / (step * IDLE_STEPS), scales)
        scales = np.maximum(scales, size / (step * BIAS_STEPS))
    elif not sizes.any():
        scales = np.full(1, max(float(size.max(initial=0.0)), EPSILON) / (step * IDLE_STEPS))
    return scales.astype(np.float32).astype(np.float64)


def bias_of(node: Node, graph: Graph) -> Values | None:
    """Return a layer's bias, one number a channel; None without such a constant one."""
    plain = node.attr("alpha", 1.0) == node.attr("beta", 1.0) == 1.0
    if len(node.inputs) < 3 or node.inputs[2] not in graph.constants or not plain:
        return None
    bias = graph.constants[node.inputs[2]].array()
    return bias if bias.ndim == 1 else None


def with_records(
    graph: Graph, layers: Iterable[LayerScales], plan: Plan | None = None
) -> Quantised:
    """Return a graph made ready for scales that are known: norms folded, layers balanced.

    Weights are not rounded by AdaRound again. Raises `InputError` for layers the graph has not.
    """
    plan = plan or Plan()
    layers = tuple(layers)
    graph = made_ready(graph, plan)
    factors = {layer.name: layer.balance for layer in layers if layer.balance}
    found = Quantised(with_balance(graph, factors), layers)
    by_node(found)
    return found


def at_batch(found: Quantised, graph: Graph, plan: Plan) -> Quantised:
    """Return the same quantised network for the graph of another batch."""
    other = with_records(graph, found.layers, plan).graph
    known = found.graph.constants
    own = {layer.name for layer in found.layers}
    weights = {node.inputs[1] for node in other.nodes if node.name in own}
    constants = {n: known[n] if n in weights else c for n, c in other.constants.items()}
    return Quantised(replace(other, constants=constants), found.layers)


# -- making ready ---------------------------------------------------------------------------------
def balanced(
    graph: Graph, feeds: Feeds, plans: Mapping[str, LayerPlan]
) -> tuple[Graph, dict[str, tuple[float, ...]]]:
    """Return the graph with x / f before some layers and f in their weights, and the factors."""
    wanted = [
        (node, axes)
        for node in layers_of(graph)
        if node.name in plans
        and plans[node.name].strength is not None
        and (axes := input_axes(node, graph))
    ]
    if not wanted:
        return graph, {}
    values = seen(graph, feeds, (node.inputs[0] for node, _ in wanted))
    factors: dict[str, tuple[float, ...]] = {}
    for node, (x_axis, w_axis) in wanted:
        most = np.max([largest_along(x, x_axis) for x in values[node.inputs[0]]], axis=0)
        weights = graph.constants[node.inputs[1]].array()
        strength = plans[node.name].strength or 0.0
        found = balance_factors(most, largest_along(weights, w_axis), strength)
        factors[node.name] = tuple(found.astype(np.float32).tolist())
    return with_balance(graph, factors), factors


def balance_factors(x_most: Values, w_most: Values, strength: float = 0.5) -> Values:
    """Return f from the largest sizes of x and w of each input channel.

    A channel that is zero in both keeps 1; zero in one, it is stretched to the others' largest.
    Raises `InputError` for a strength outside 0.2 to 0.8.
    """
    least, most = STRENGTHS
    if not least <= strength <= most:
        raise InputError(f"migration strength from {least} to {most}", str(strength))
    x, w = (np.asarray(one, np.float64) for one in (x_most, w_most))
    no_x = x < EPSILON
    no_w = w < EPSILON
    whole = ~no_x & ~no_w
    if not whole.any():
        return np.ones_like(x)
    found = np.ones_like(x)
    found[whole] = x[whole] ** strength / w[whole] ** (1 - strength)
    largest_x = (x / found)[whole].max()
    largest_w = (w * found)[whole].max()
    found[no_x & ~no_w] = largest_w / w[no_x & ~no_w]
    found[~no_x & no_w] = x[~no_x & no_w] / largest_x
    return found


def largest_along(values: Values, axis: int) -> Values:
    """Return the largest |v| of each slice along an axis."""
    found: Values = np.abs(np.moveaxis(values, axis, 0)).reshape(values.shape[axis], -1).max(axis=1)
    return found


def with_balance(graph: Graph, factors: Mapping[str, tuple[float, ...]]) -> Graph:
    """Return the graph with each named layer balanced by its factors."""
    draft = Draft(graph)
    for node in graph.nodes:
        if node.name in factors:
            found = np.asarray(factors[node.name], np.float32)
            axes = input_axes(node, graph)
            x, w = node.inputs[:2]
            if axes is None or graph.types[x].shape[axes[0]] != len(found):
                raise InputError(f"{node.name}: factors for its input channels", str(len(found)))
            ranks = [len(graph.types[name].shape) for name in (x, w)]
            divisor = draft.add(constant_of(along(found, axes[0], ranks[0])), f"{x}_factors")
            weights = graph.constants[w].array() * along(found, axes[1], ranks[1])
            reads = (
                draft.insert("div", (x, divisor), {}, f"{x}_balanced"),
                draft.add(constant_of(weights), f"{w}_balanced"),
            )
            draft.become(node, node.op, (*reads, *node.inputs[2:]), node.attrs)
    return draft.finish()


def with_values(graph: Graph, values: Mapping[str, Values]) -> Graph:
    """Return the graph with other constants, in fp32."""
    new = {name: constant_of(v) for name, v in values.items() if name in graph.constants}
    return replace(graph, constants={**graph.constants, **new})


def constant_of(array: Values) -> Constant:
    """Return an array as a constant in fp32."""
    return Constant(TensorType(array.shape, "fp32"), array.astype(np.float32, copy=False))


def _rounded(
    found: Quantised, values: Mapping[str, list[Values]], plans: Mapping[str, LayerPlan]
) -> Quantised:
    """Return the graph with some weights put on their grid by AdaRound."""
    graph = found.graph
    learned = dict[str, Values]()
    for layer in found.layers:
        node = graph.node(layer.name)
        how = plans[layer.name].rounding
        if how is None:
            continue
        x = np.concatenate(values[node.inputs[0]])
        rest = [graph.constants[name].array() for name in node.inputs[1:]]
        wanted = output_of(node, [x, *rest])
        scales = weight_scales(layer, node, graph)
        given = [fake(x, layer.scale, layer.offset, layer.bits), *rest]
        weights = adaptive_rounding(node, given, wanted, scales, layer.weight_bits, how)
        learned[node.inputs[1]] = weights
    return Quantised(with_values(graph, learned), found.layers)


def adaptive_rounding(
    node: Node, arrays: list[Values], wanted: Values, scales: Values, bits: int, how: Rounding
) -> Values:
    """Return weights on the grid that bring a layer's output close to what is wanted.

    `arrays` are what the node reads, the quantised input first; `scales` broadcast with weights.
    """
    x, weights, *rest = (one.astype(np.float64) for one in arrays)
    steps = weights / scales
    (low, high) = limits(bits)
    floor = np.floor(steps)
    rng = np.random.default_rng(how.seed)
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


def gate(a: Values) -> tuple[Values, Values]:
    """Return h(a) = clip(1.2 sigmoid(a) - 0.1, 0, 1) and its slope."""
    s = 1 / (1 + np.exp(-a))
    wide = 1.2 * s - 0.1
    return np.clip(wide, 0, 1), np.where((wide > 0) & (wide < 1), 1.2 * s * (1 - s), 0.0)


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


def output_of(node: Node, arrays: Sequence[Values], kind: type = np.float64) -> Values:
    """Return what a layer alone makes of what it reads, computed in a format."""
    operator = operator_of(node.op)
    wide: list[Values] = [array.astype(kind) for array in arrays]
    return np.asarray(operator.formula(*wide, **operator.settings(node.attrs)))


# -- what others ask of it ------------------------------------------------------------------------
def weight_scales(layer: LayerScales, node: Node, graph: Graph) -> Values:
    """Return the scales of a layer's weights, shaped to broadcast with them."""
    axis = channel_axis(node, graph)
    kind = graph.types[node.inputs[1]]
    many = len(layer.weight_scales)
    if many > 1 and (axis is None or kind.shape[axis] != many):
        raise InputError(f"{node.name}: one weight scale, or one a channel", str(many))
    return along(np.array(layer.weight_scales, np.float32), axis or 0, len(kind.shape))


def by_node(found: Quantised) -> dict[str, LayerScales]:
    """Return the scales by layer; raise `InputError` for a layer the graph has not."""
    known = {node.name for node in layers_of(found.graph)}
    for layer in found.layers:
        if layer.name not in known:
            raise InputError(f"{found.graph.name}: a layer", repr(layer.name), "check the records")
    return {layer.name: layer for layer in found.layers}


def output_error(graph: Graph, found: Graph, feeds: Feeds) -> float:
    """Return how far the outputs are off: sqrt(sum (y' - y)^2 / sum y^2) over all feeds."""
    noise = total = 0.0
    for feed in feeds:
        one = evaluate(graph, feed)
        other = evaluate(found, feed)
        for y, z in zip(one.values(), other.values(), strict=True):
            wide = y.astype(np.float64)
            noise = noise + float(np.sum((z - wide) ** 2))
            total = total + float(np.sum(wide**2))
    return float(np.sqrt(noise / total)) if total else 0.0 if not noise else float("inf")
