"""Training a graph, also one whose rounding is part of it: the slope passes straight through.

Forward, every layer reads rounded numbers; backward, rounding counts as the identity inside its
range (straight-through estimator) and as a constant outside. The ranges are learned as well:

    activations (ULQ)  s = (hi - lo) / (2^b - 1), offset -2^(b-1) - round(lo / s)
    weights (LSQ)      s itself, one a channel; its slope is divided by sqrt(numbers x largest)

ULQ: AMCT, github hicann/amct, custom_op/ulq_retrain. LSQ: Esser et al., arXiv 1902.08153.

A real task that fits on a page: 1,797 scanned digits of 8 x 8 pixels, and two networks for it. The
images come with scikit-learn (Alpaydin and Kaynak, UCI, 1998). Nothing is downloaded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab.cluster.parallel.values import Adam, Tape, Var
from ascend_lab.compiler import Graph, GraphBuilder, Node, Value, evaluate
from ascend_lab.compiler.ir import Values, operator_of
from ascend_lab.deploy.compress.quantise import (
    Feeds,
    Quantised,
    by_node,
    channel_axis,
    seen,
    with_values,
)
from ascend_lab.deploy.compress.scales import (
    EPSILON,
    LayerScales,
    along,
    fake,
    limits,
    scale_between,
)
from ascend_lab.errors import UnsupportedError

Loss = Callable[[Values, int], tuple[float, Values]]
"""From an output and the number of the feed to the loss and its slope."""


# -- quantisers and their slopes ------------------------------------------------------------------
def ulq(x: Values, low: float, high: float, bits: int = 8) -> Values:
    """Return x rounded and limited to the learned range; the offset is added before rounding."""
    found = scale_between(low, high, bits, True)
    kind = x.dtype.type
    whole = np.clip(np.rint(x / kind(found.scale) + found.offset), *limits(bits))
    y: Values = (whole - found.offset) * kind(found.scale)
    return y.astype(x.dtype, copy=False)


def ulq_slopes(
    x: Values, low: float, high: float, g: Values, bits: int = 8
) -> tuple[Values, float, float]:
    """Return the slopes with respect to x, low and high, from that of the result."""
    found = scale_between(low, high, bits, True)
    least, most = (found.scale * (end - found.offset) for end in limits(bits))
    under = x < least
    over = x > most
    steps = np.where(over, high, np.where(under, low, x)) / found.scale
    error = (np.rint(steps) - steps) / (2**bits - 1)
    inside: Values = g * ~(under | over)
    return inside, float(np.sum(g * (under - error))), float(np.sum(g * (over + error)))


def lsq_start(x: Values, bits: int = 8) -> float:
    """Return the step to start with, 2 mean|x| / sqrt(largest)."""
    return float(max(2 * np.abs(x).mean() / np.sqrt(limits(bits)[1]), EPSILON))


def lsq_slopes(
    x: Values, step: Values, g: Values, bits: int = 8, axis: int | None = None
) -> tuple[Values, Values]:
    """Return the slopes with respect to x and the step, or the steps along an axis."""
    low, high = limits(bits)
    steps = x / along(step, axis, x.ndim)
    inside = (steps > low) & (steps < high)
    terms = g * np.where(inside, np.rint(steps) - steps, np.clip(steps, low, high))
    others = None if axis is None else tuple(i for i in range(x.ndim) if i != axis)
    count = x.size / max(1, step.size)
    return g * inside, np.asarray(terms.sum(axis=others)).reshape(step.shape) / np.sqrt(
        count * high
    )


# -- a graph on the tape --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Rounded:
    """A layer's place on the tape: what it reads passes through here before it is computed.

    `fresh` steps of weights start from their mean, others from the record.
    """

    layer: LayerScales
    axis: int | None
    fresh: bool = True

    def start(self, weights: Values) -> dict[str, Values]:
        """Return the learned numbers to start with, by name."""
        low, high = (self.layer.scale * (n - self.layer.offset) for n in limits(self.layer.bits))
        steps = np.array(self.layer.weight_scales)
        if self.fresh:
            rows = np.moveaxis(weights, self.axis or 0, 0) if len(steps) > 1 else weights[None]
            steps = np.array([lsq_start(row, self.layer.weight_bits) for row in rows])
        return {
            self.name("low"): np.array(low),
            self.name("high"): np.array(high),
            self.name("steps"): steps,
        }

    def name(self, what: str) -> str:
        """Return the name of one of the learned numbers."""
        return f"{self.layer.name}.{what}"

    def reads(self, tape: Tape, x: Var, w: Var, learned: Mapping[str, Var]) -> list[Var]:
        """Return input and weights rounded."""
        ends = learned[self.name("low")], learned[self.name("high")]
        low, high = (float(end.values[0]) for end in ends)
        bits = self.layer.bits
        steps = learned[self.name("steps")]

        def x_slope(grads: Any) -> Any:
            return [[np.asarray(one)] for one in ulq_slopes(x.values[0], low, high, grads[0], bits)]

        step = steps.values[0]
        axis = self.axis if len(steps.values[0]) > 1 else None
        wide = along(step, axis, w.values[0].ndim)
        width = self.layer.weight_bits

        def w_slope(grads: Any) -> Any:
            return [[one] for one in lsq_slopes(w.values[0], step, grads[0], width, axis)]

        return [
            tape.record([x, *ends], [ulq(x.values[0], low, high, bits)], x_slope),
            tape.record([w, steps], [fake(w.values[0], wide, 0, width)], w_slope),
        ]

    def learnt(self, found: Mapping[str, Values]) -> LayerScales:
        """Return the layer's record with what was learned."""
        low, high = (float(found[self.name(key)]) for key in ("low", "high"))
        scale = scale_between(low, high, self.layer.bits, True)
        steps = tuple(found[self.name("steps")].astype(np.float32).tolist())
        return replace(self.layer, scale=scale.scale, offset=scale.offset, weight_scales=steps)


def play(
    graph: Graph,
    tape: Tape,
    feed: Mapping[str, Any],
    learned: Mapping[str, Var],
    rounded: Mapping[str, Rounded],
) -> dict[str, Var]:
    """Return every tensor of a graph on a tape, in fp64."""
    found = {name: Var([_wide(feed[name])]) for name in graph.inputs}
    for name, constant in graph.constants.items():
        found[name] = learned[name] if name in learned else Var([_wide(constant.array())])
    for node in graph.nodes:
        reads = [found[name] for name in node.inputs]
        if node.name in rounded:
            reads[:2] = rounded[node.name].reads(tape, reads[0], reads[1], learned)
        found[node.output] = tape.apply(node.op, *reads, **node.attrs)
    return found


def _wide(array: Any) -> Values:
    given = np.asarray(array)
    return given.astype(np.float64) if given.dtype.kind == "f" else given


def fit(
    graph: Graph,
    feeds: Feeds,
    loss: Loss,
    *,
    steps: int,
    parameters: Sequence[str],
    rounded: Mapping[str, Rounded] | None = None,
    rate: float = 0.01,
    seed: int = 0,
) -> tuple[dict[str, Values], list[float]]:
    """Return parameters after so many steps of Adam on one feed each, and the losses.

    The first output is compared. With `rounded` layers their ranges and steps are learned too.
    """
    points = rounded or {}
    values = {name: _wide(graph.constants[name].array()) for name in parameters}
    for node in graph.nodes:
        if node.name in points:
            values |= points[node.name].start(_wide(graph.constants[node.inputs[1]].array()))
    rng = np.random.default_rng(seed)
    optimizer = Adam(rate)
    losses = []
    states = {name: optimizer.start(value) for name, value in values.items()}
    order: list[int] = []
    for step in range(1, steps + 1):
        order = order or rng.permutation(len(feeds)).tolist()
        place = order.pop()
        tape = Tape()
        learned = {name: Var([value]) for name, value in values.items()}
        out = play(graph, tape, feeds[place], learned, points)[graph.outputs[0]]
        value, slope = loss(out.values[0], place)
        losses.append(value)
        tape.backward(out, [slope])
        for name, var in learned.items():
            if var.grads is not None:
                new, states[name] = optimizer.update(values[name], var.grads[0], states[name], step)
                values[name] = _kept(name, new)
    return values, losses


def _kept(name: str, value: Values) -> Values:
    """Return a learned number within what makes sense: 0 stays in a range, a step positive."""
    if name.endswith(".low"):
        return np.minimum(value, 0.0)
    return np.maximum(value, EPSILON) if name.endswith((".high", ".steps")) else value


def trained_weights(graph: Graph) -> tuple[str, ...]:
    """Return the constants that training changes: fp32 arrays where weights stand, and vectors."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        for place, name in enumerate(node.inputs):
            kind = graph.constants[name].type if name in graph.constants else None
            weighs = place in operator_of(node.op).weights or node.op in ("add", "mul")
            if kind is not None and kind.dtype == "fp32" and kind.shape and weighs:
                found[name] = None
    return tuple(found)


# -- what to learn --------------------------------------------------------------------------------
def cross_entropy(labels: Sequence[Values]) -> Loss:
    """Return the mean -log softmax(z)[label] over rows."""

    def loss(z: Values, place: int) -> tuple[float, Values]:
        e = np.exp(z - z.max(axis=-1, keepdims=True))
        wanted = labels[place]
        p = e / e.sum(axis=-1, keepdims=True)
        rows = np.arange(len(z))
        slope = p.copy()
        slope[rows, wanted] -= 1
        return float(-np.log(np.maximum(p[rows, wanted], 1e-300)).mean()), slope / len(z)

    return loss


def squared(wanted: Sequence[Values]) -> Loss:
    """Return the mean squared distance from what is wanted."""

    def loss(y: Values, place: int) -> tuple[float, Values]:
        error = y - wanted[place]
        return float(np.mean(error**2)), 2 * error / error.size

    return loss


def retrain(
    found: Quantised, feeds: Feeds, loss: Loss, *, steps: int, rate: float = 1e-3
) -> tuple[Quantised, list[float]]:
    """Train a quantised graph as it rounds (QAT); return it with what was learned, and losses."""
    graph = found.graph
    points = rounded_layers(found)
    weights = trained_weights(graph)
    values, losses = fit(
        graph, feeds, loss, steps=steps, parameters=weights, rounded=points, rate=rate
    )
    layers = tuple(points[layer.name].learnt(values) for layer in found.layers)
    return Quantised(with_values(graph, values), layers), losses


def rounded_layers(found: Quantised, fresh: bool = True) -> dict[str, Rounded]:
    """Return the place of each quantised layer on the tape."""
    graph = found.graph
    return {
        name: Rounded(layer, channel_axis(graph.node(name), graph), fresh)
        for name, layer in by_node(found).items()
    }


def distil(
    found: Quantised, feeds: Feeds, *, steps: int, rate: float = 3e-4
) -> tuple[Quantised, dict[str, list[float]]]:
    """Train each quantised layer alone to give what it gave before: block-wise distillation.

    The teacher is the same graph without rounding; a block reads what the teacher's reads. Returns
    the graph and the losses of each layer; no labels are needed.
    """
    graph = found.graph
    nodes = [graph.node(layer.name) for layer in found.layers]
    names = {name for node in nodes for name in (node.inputs[0], node.output)}
    teacher = seen(graph, feeds, names)
    points = rounded_layers(found, fresh=False)
    layers = []
    losses: dict[str, list[float]] = {}
    new: dict[str, Values] = {}
    for node in nodes:
        block = _alone(graph, node)
        rows = [{node.inputs[0]: x} for x in teacher[node.inputs[0]]]
        own = tuple(name for name in node.inputs[1:] if name in graph.constants)
        values, losses[node.name] = fit(
            block,
            rows,
            squared(teacher[node.output]),
            steps=steps,
            parameters=own,
            rounded={node.name: points[node.name]},
            rate=rate,
        )
        new |= values
        layers.append(points[node.name].learnt(values))
    return Quantised(with_values(graph, new), tuple(layers)), losses


def _alone(graph: Graph, node: Node) -> Graph:
    """Return a graph of one node."""
    return replace(
        graph,
        inputs=node.inputs[:1],
        outputs=node.outputs,
        nodes=(node,),
        types={n: graph.types[n] for n in (*node.inputs, *node.outputs)},
        constants={n: graph.constants[n] for n in node.inputs[1:] if n in graph.constants},
    )


# -- digits ---------------------------------------------------------------------------------------
BATCH = 50
TRAIN = 1250
TEST = 500
"""Images to learn from, and the last ones, by other writers, to be tried on."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Images in batches as feeds of the networks, and their labels."""

    feeds: Sequence[Mapping[str, Values]]
    labels: Sequence[Values]


def load_digits() -> tuple[Digits, Digits]:
    """Return the images to train on and those to test on; pixels are 0 to 1.

    The table is read by itself: importing scikit-learn takes longer than training on it. Raises
    `UnsupportedError` where scikit-learn is not installed.
    """
    package = find_spec("sklearn")
    folder = Path(package.origin).parent if package and package.origin else None
    if folder is None:
        needed = "scikit-learn for the digits"
        raise UnsupportedError(needed, "none", "pip install 'ascend_lab[compress]'")
    table = np.loadtxt(folder / "datasets/data/digits.csv.gz", delimiter=",")
    images = (table[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    labels = table[:, -1].astype(np.int64)
    return _cut(images, labels, 0, TRAIN), _cut(images, labels, -TEST, TEST)


def _cut(images: Values, labels: Values, start: int, count: int) -> Digits:
    images = images[start:][:count]
    labels = labels[start:][:count]
    places = range(0, count, BATCH)
    return Digits(
        [{"image": images[i : i + BATCH]} for i in places], [labels[i : i + BATCH] for i in places]
    )


def convolutional() -> Graph:
    """Return a network of a plain, a depthwise and two pointwise convolutions, and a product."""
    net = GraphBuilder("digits_cnn")

    def bias(size: int) -> Value:
        return net.constant(np.zeros(size, np.float32), name="bias")

    y = net.input("image", (BATCH, 1, 8, 8))
    y = net.relu(net.conv2d(y, net.weight((12, 1, 3, 3)), bias(12), pad=1, name="first"))
    y = net.max_pool2d(y, kernel=2, stride=2)
    y = net.relu(net.depthwise_conv2d(y, net.weight((12, 1, 3, 3)), pad=1, name="deep"))
    y = net.relu(net.conv2d(y, net.weight((32, 12, 1, 1)), bias(32), name="wide"))
    y = net.reshape(y, shape=(BATCH, 32 * 16))
    net.output(net.gemm(y, net.weight((32 * 16, 10)), bias(10), name="last"))
    return net.build()


def transformer(width: int = 24) -> Graph:
    """Return one layer of attention over the eight rows of an image, and one of two products."""
    net = GraphBuilder("digits_transformer")
    rows = BATCH * 8

    def linear(x: Value, inputs: int, outputs: int, name: str) -> Value:
        bias = net.constant(np.zeros(outputs, np.float32), name="bias")
        weight = net.weight((inputs, outputs), scale=(1 / inputs) ** 0.5)
        found: Value = net.gemm(x, weight, bias, name=name)
        return found

    def normed(x: Value) -> Value:
        both = (net.constant(np.full(width, one, np.float32)) for one in (1, 0))
        found: Value = net.layer_norm(x, *both)
        return found

    x = linear(net.reshape(net.input("image", (BATCH, 1, 8, 8)), shape=(rows, 8)), 8, width, "rows")
    places = net.constant((np.eye(8, width) * 0.5).astype(np.float32), name="places")
    x = net.reshape(net.add(net.reshape(x, shape=(BATCH, 8, width)), places), shape=(rows, width))
    y = normed(x)
    q, k, v = (
        net.reshape(linear(y, width, width, name), shape=(BATCH, 8, width))
        for name in ("query", "key", "value")
    )
    shares = net.softmax(net.muls(net.batch_matmul(q, k, trans_b=True), number=width**-0.5))
    y = net.reshape(net.batch_matmul(shares, v), shape=(rows, width))
    x = net.add(x, linear(y, width, width, "mixed"))
    y = net.gelu(linear(normed(x), width, 2 * width, "up"))
    x = normed(net.add(x, linear(y, 2 * width, width, "down")))
    net.output(linear(net.reshape(x, shape=(BATCH, 8 * width)), 8 * width, 10, "last"))
    return net.build()


def trained(graph: Graph, data: Digits, steps: int = 250, rate: float = 0.005) -> Graph:
    """Return a network after so many steps of Adam."""
    weights = trained_weights(graph)
    loss = cross_entropy(data.labels)
    values, _ = fit(graph, data.feeds, loss, steps=steps, parameters=weights, rate=rate)
    return with_values(graph, values)


def accuracy(graph: Graph, data: Digits) -> float:
    """Return the share of images that a network names rightly."""
    right = 0
    for feed, labels in zip(data.feeds, data.labels, strict=True):
        (logits,) = evaluate(graph, feed).values()
        right += int(np.sum(logits.argmax(axis=1) == labels))
    return right / sum(map(len, data.labels))
