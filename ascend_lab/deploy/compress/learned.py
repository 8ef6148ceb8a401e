"""Trains a graph by gradient descent, with or without the rounding of its layers.

    retrain    the whole network with rounding (QAT) and a loss on its output
    distil     each quantised layer alone, to give its output before rounding; needs no labels

Gradients come from the tape of `cluster.parallel.values`, which records each operator as it is
computed and applies the operator's own gradient rule on the way back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ascend_lab.cluster.parallel.values import Adam, Tape, Var
from ascend_lab.compiler import Graph, Node
from ascend_lab.compiler.ir import Values, operator_of
from ascend_lab.deploy.compress.layers import Feeds, Quantised, tensor_values, with_values
from ascend_lab.deploy.compress.learned_rounding import (
    LearnedRounding,
    in_bounds,
    roundings_of,
)

Loss = Callable[[Values, int], tuple[float, Values]]
"""From an output and the number of its feed to the loss and its gradient for the output."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long training goes on: steps of Adam at a learning rate, feeds drawn by a seed."""

    steps: int
    learning_rate: float = 0.01
    seed: int = 0


# -- a graph recorded on the tape -----------------------------------------------------------------
def run_on_tape(
    graph: Graph,
    tape: Tape,
    feed: Mapping[str, Any],
    parameters: Mapping[str, Var],
    roundings: Mapping[str, LearnedRounding],
) -> dict[str, Var]:
    """Return every tensor of a graph, computed in fp64 and recorded on a tape."""
    tensors = {name: Var([_in_fp64(feed[name])]) for name in graph.inputs}
    for name, constant in graph.constants.items():
        is_learned = name in parameters
        tensors[name] = parameters[name] if is_learned else Var([_in_fp64(constant.array())])
    for node in graph.nodes:
        reads = [tensors[name] for name in node.inputs]
        # input and weights are rounded on the way; a bias, if there is one, is read as it is
        if node.name in roundings:
            reads[:2] = roundings[node.name].rounded_reads(tape, reads[0], reads[1], parameters)
        tensors[node.output] = tape.apply(node.op, *reads, **node.attrs)
    return tensors


def _in_fp64(numbers: Any) -> Values:
    """Return floats in fp64, and whole numbers (tokens, say) as they are."""
    array = np.asarray(numbers)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def fit(
    graph: Graph,
    feeds: Feeds,
    loss: Loss,
    parameters: Sequence[str],
    schedule: Schedule,
    roundings: Mapping[str, LearnedRounding] | None = None,
) -> tuple[dict[str, Values], list[float]]:
    """Return the named constants after training, and the loss of each step.

    Each step reads one feed; the loss is that of the graph's first output. With `roundings` of some
    layers, their ranges and steps are learned too and returned among the constants.
    """
    roundings = roundings or {}
    values = {name: _in_fp64(graph.constants[name].array()) for name in parameters}
    for node in graph.nodes:
        if node.name in roundings:
            weights = _in_fp64(graph.constants[node.inputs[1]].array())
            values |= roundings[node.name].start(weights)
    rng = np.random.default_rng(schedule.seed)
    optimizer = Adam(schedule.learning_rate)
    losses = []
    states = {name: optimizer.start(value) for name, value in values.items()}
    order: list[int] = []
    for step in range(1, schedule.steps + 1):
        # when every feed has been read once, an epoch is over and they are shuffled anew
        order = order or rng.permutation(len(feeds)).tolist()
        feed_number = order.pop()
        tape = Tape()
        variables = {name: Var([value]) for name, value in values.items()}
        tensors = run_on_tape(graph, tape, feeds[feed_number], variables, roundings)
        out = tensors[graph.outputs[0]]
        loss_value, slope = loss(out.values[0], feed_number)
        losses.append(loss_value)
        # one rank, so lists of one array; afterwards each variable has its gradient in `grads`
        tape.backward(out, [slope])
        for name, var in variables.items():
            if var.grads is not None:  # a constant that no path leads from to the loss has none
                updated, states[name] = optimizer.update(
                    values[name], var.grads[0], states[name], step
                )
                values[name] = in_bounds(name, updated)
    return values, losses


def trained_weights(graph: Graph) -> tuple[str, ...]:
    """Return the constants that training changes: fp32 weights of layers, summands and factors.

    Scalars stay as they are: they are settings, such as the factor 1/sqrt(d) of attention.
    """
    names: dict[str, None] = {}  # a dict keeps the order in which the graph reads them
    for node in graph.nodes:
        for place, name in enumerate(node.inputs):
            kind = graph.constants[name].type if name in graph.constants else None
            is_weight = place in operator_of(node.op).weights or node.op in ("add", "mul")
            if kind is not None and kind.dtype == "fp32" and kind.shape and is_weight:
                names[name] = None
    return tuple(names)


# -- losses ---------------------------------------------------------------------------------------
def cross_entropy(labels: Sequence[Values]) -> Loss:
    """Return the mean over rows of -log softmax(z)[label], with the labels of each feed."""

    def loss(z: Values, feed_number: int) -> tuple[float, Values]:
        # the largest logit is subtracted first, so that exp cannot overflow
        e = np.exp(z - z.max(axis=-1, keepdims=True))
        p = e / e.sum(axis=-1, keepdims=True)
        row_labels = labels[feed_number]
        rows = np.arange(len(z))
        # d(-log p_label) / dz = p - onehot(label), divided by the rows of the mean
        slope = p.copy()
        slope[rows, row_labels] -= 1
        label_shares = np.maximum(p[rows, row_labels], 1e-300)
        return float(-np.log(label_shares).mean()), slope / len(z)

    return loss


def squared(targets: Sequence[Values]) -> Loss:
    """Return the mean squared distance from a target for each feed."""

    def loss(y: Values, feed_number: int) -> tuple[float, Values]:
        error = y - targets[feed_number]
        return float(np.mean(error**2)), 2 * error / error.size

    return loss


# -- the whole network ----------------------------------------------------------------------------
def retrain(
    quantised: Quantised, feeds: Feeds, loss: Loss, *, steps: int, rate: float = 1e-3
) -> tuple[Quantised, list[float]]:
    """Train a quantised graph with its rounding (QAT); return the trained graph and the losses."""
    graph = quantised.graph
    roundings = roundings_of(quantised)
    values, losses = fit(
        graph, feeds, loss, trained_weights(graph), Schedule(steps, rate), roundings
    )
    layers = tuple(roundings[layer.name].layer_scales(values) for layer in quantised.layers)
    return Quantised(with_values(graph, values), layers), losses


# -- layer by layer -------------------------------------------------------------------------------
def distil(
    quantised: Quantised, feeds: Feeds, *, steps: int, rate: float = 3e-4
) -> tuple[Quantised, dict[str, list[float]]]:
    """Train each quantised layer alone to give its output without rounding.

    The teacher is the same graph without rounding, and each layer reads the teacher's tensors: so
    no layer has to compensate for errors of earlier layers. Returns the graph and the losses
    of each layer. No labels are needed.
    """
    graph = quantised.graph
    nodes = [graph.node(layer.name) for layer in quantised.layers]
    # inputs and outputs of each layer without rounding, on every feed: inputs and targets below
    names = {name for node in nodes for name in (node.inputs[0], node.output)}
    teacher = tensor_values(graph, feeds, names)
    roundings = roundings_of(quantised, fresh=False)
    layers = []
    losses: dict[str, list[float]] = {}
    learned_values: dict[str, Values] = {}
    for node in nodes:
        rounding = roundings[node.name]
        values, losses[node.name] = fit(
            _graph_of_one(graph, node),
            [{node.inputs[0]: x} for x in teacher[node.inputs[0]]],
            squared(teacher[node.output]),
            [name for name in node.inputs[1:] if name in graph.constants],
            Schedule(steps, rate),
            {node.name: rounding},
        )
        learned_values |= values
        layers.append(rounding.layer_scales(values))
    return Quantised(with_values(graph, learned_values), tuple(layers)), losses


def _graph_of_one(graph: Graph, node: Node) -> Graph:
    """Return a graph of one node, whose input is the node's first input."""
    return replace(
        graph,
        inputs=node.inputs[:1],
        outputs=node.outputs,
        nodes=(node,),
        types={n: graph.types[n] for n in (*node.inputs, *node.outputs)},
        constants={n: graph.constants[n] for n in node.inputs[1:] if n in graph.constants},
    )
