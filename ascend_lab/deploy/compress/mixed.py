"""Mixed precision: chooses by time and error which layers of a network are computed in int8.

    published    the layers whose outputs change most go back to fp16, their number by bisection
    exact        the least time at no more error than that: a knapsack, see `knapsack`

A layer's time is that of its kernel in fp16 or in int8, launch included; its error is the squared
relative error of its own output when it alone is quantised. Kernels between layers of different
formats belong to no layer, so the network is timed with each choice, and the fastest is taken: the
exact mix, the published mix, or no int8 at all.

Errors are added, as if each layer alone contributed its error to that of the output. That holds
while the errors of layers are small and independent, so that their squares add up. The published
bisection assumes that fewer quantised layers are never worse. Both can be wrong; the error of the
network that was chosen is measured. Source: github hicann/amct, accuracy_based_auto_calibration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ascend_lab.compiler import Graph, compile_stages, evaluate, ir
from ascend_lab.deploy.compress.deployed import deploy
from ascend_lab.deploy.compress.fake_quantisation import fake_quantised
from ascend_lab.deploy.compress.knapsack import Layer, Mix, Option, fastest, mix_of
from ascend_lab.deploy.compress.layers import (
    Feeds,
    Quantised,
    by_node,
    output_of,
    weight_scales,
)
from ascend_lab.deploy.compress.scales import LayerScales, fake_quantise
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import Chip

CUBE = ("convolution", "product")
"""Properties of operators that the cube computes."""


# -- the published choice -------------------------------------------------------------------------
def similarity(exact: ir.Values, approximate: ir.Values) -> float:
    """Return 0.5 + 0.5 cos(exact, approximate), from 0 to 1.

    The cosine is undefined for zeros: the result is 1 if `exact` is zero, 0 if only the other is.
    """
    u, v = (np.asarray(array, np.float64).ravel() for array in (exact, approximate))
    if not u.any():
        return 1.0
    if not v.any():
        return 0.0
    return float(0.5 + 0.5 * (u @ v) / (np.linalg.norm(u) * np.linalg.norm(v)))


def put_back(ranking: Sequence[str], accepts: Callable[[frozenset[str]], bool]) -> frozenset[str]:
    """Return by bisection the layers that go back to float; the ranking has the worst first.

    `accepts` says whether a set of layers in float is good enough. Raises `InputError` if all of
    them are not.
    """
    if accepts(frozenset()):
        return frozenset()
    if not accepts(frozenset(ranking)):
        raise InputError("a metric that the network in float meets", "it fails", "loosen it")
    # always: the first `refused` layers of the ranking are too few, the first `accepted` enough
    refused = 0
    accepted = len(ranking)
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        if accepts(frozenset(ranking[:middle])):
            accepted = middle
        else:
            refused = middle
    return frozenset(ranking[:accepted])


def published_mix(layers: Sequence[Layer], back: frozenset[str], exact: str = "fp16") -> Mix:
    """Return the mix with the layers in `back` in the `exact` format, if they have it.

    All other layers take their fastest format.
    """
    choices = []
    for layer in layers:
        # int8 is not always faster: a small layer may pay more for rounding its input than it saves
        fast = min(range(len(layer.options)), key=lambda i: layer.options[i].time_s)
        exact_options = [i for i, option in enumerate(layer.options) if option.format == exact]
        choices.append(exact_options[0] if layer.name in back and exact_options else fast)
    return mix_of(layers, choices)


def bisected(layers: Sequence[Layer], ranking: Sequence[str], budget: float) -> Mix:
    """Return the published choice, accepted if the sum of errors keeps the budget."""
    back = put_back(ranking, lambda names: published_mix(layers, names).error <= budget)
    return published_mix(layers, back)


# -- times and errors of layers -------------------------------------------------------------------
def layer_times(graph: Graph, layers: Sequence[LayerScales], chip: Chip | str) -> dict[str, float]:
    """Return the seconds of the kernels that compute some layers; 0 for one without a kernel."""
    stages = compile_stages(graph, chip)
    times = {op.name: op.time_s for op in stages.timeline().operators}
    time_s_by_layer = {layer.name: 0.0 for layer in layers}
    for task in stages.compiled.tasks:
        cube_nodes = [n.name for n in map(stages.laid_out.node, task.nodes) if n.has(*CUBE)]
        for node in cube_nodes:
            # passes add to names, as in "fc_sums" and "fc_1"; of "fc" and "fc_1" the longer fits
            owners = [
                name for name in time_s_by_layer if node == name or node.startswith(f"{name}_")
            ]
            if owners:
                time_s_by_layer[max(owners, key=len)] += times.get(task.name, 0.0)
    return time_s_by_layer


def layer_errors(quantised: Quantised, feeds: Feeds) -> dict[str, float]:
    """Return sum (y' - y)^2 / sum y^2 of each layer's output, quantised alone, over all samples.

    A layer whose output is all zero has the error 0.
    """
    graph = quantised.graph
    layers = by_node(quantised)
    nodes = [node for node in graph.nodes if node.name in layers]
    names = tuple(dict.fromkeys(node.inputs[0] for node in nodes))
    sums = {node.name: np.zeros(2) for node in nodes}
    for feed in feeds:
        # the inputs of all layers, from one run without rounding: each layer's error is its own
        values = evaluate(replace(graph, outputs=names), feed)
        for node in nodes:
            layer = layers[node.name]
            weights, *biases = (graph.constants[n].array() for n in node.inputs[1:])
            x = values[node.inputs[0]]
            exact = output_of(node, [x, weights, *biases], np.float32)
            rounded_x = fake_quantise(x, layer.scale, layer.offset, layer.bits)
            scales = weight_scales(layer, node, graph)
            rounded_weights = fake_quantise(weights, scales, 0, layer.weight_bits)
            approximate = output_of(node, [rounded_x, rounded_weights, *biases], np.float32)
            sums[node.name] += [np.vdot(v, v) for v in (approximate - exact, exact)]
    return {name: float(noise / total) if total else 0.0 for name, (noise, total) in sums.items()}


def options_of(quantised: Quantised, feeds: Feeds, chip: Chip | str) -> tuple[Layer, ...]:
    """Return fp16 and int8 for each layer, with their times on a chip and their errors."""
    layers = quantised.layers
    # two networks are compiled, one all in fp16 and one all in int8, and timed kernel by kernel
    fp16_s = layer_times(quantised.graph, layers, chip)
    int8_s = layer_times(deploy(quantised.graph, layers), layers, chip)
    errors = layer_errors(quantised, feeds)
    return tuple(
        Layer(name, (Option("fp16", fp16_s[name], 0.0), Option("int8", int8_s[name], errors[name])))
        for name in fp16_s
    )


def ranking_of(quantised: Quantised, feeds: Feeds) -> tuple[str, ...]:
    """Return the layers, the least similar first, by their outputs before and after quantising.

    All layers are quantised at once, so a layer also shows the errors of those before it.
    """
    layers = by_node(quantised)
    nodes = [node for node in quantised.graph.nodes if node.name in layers]
    outputs = {node.name: node.output for node in nodes}
    graphs = (quantised.graph, fake_quantised(quantised))
    similarities = dict.fromkeys(outputs, 0.0)
    for feed in feeds:
        exact, approximate = (
            evaluate(replace(graph, outputs=tuple(outputs.values())), feed) for graph in graphs
        )
        for name, output in outputs.items():
            similarities[name] += similarity(exact[output], approximate[output])
    return tuple(sorted(similarities, key=lambda name: similarities[name]))


# -- the choice -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Choice:
    """The published mix, an exact mix with no more error, and the network's time with each.

    `float_s` is its time with no layer in int8.
    """

    layers: tuple[Layer, ...]
    published: Mix
    exact: Mix
    published_s: float
    exact_s: float
    float_s: float

    @property
    def best(self) -> Mix:
        """Return the mix whose network is fastest: published, exact, or no layer in int8."""
        candidates = [
            (self.exact_s, self.exact),
            (self.published_s, self.published),
            (self.float_s, mix_of(self.layers, [0] * len(self.layers))),
        ]
        return min(candidates, key=lambda pair: pair[0])[1]

    @property
    def time_s(self) -> float:
        """Return the seconds of the network with the best mix."""
        return min(self.exact_s, self.published_s, self.float_s)


def mixed_graph(quantised: Quantised, mix: Mix) -> Graph:
    """Return the network with the layers of a mix in int8, and the others in floating point."""
    in_int8 = [layer for layer in quantised.layers if mix.formats.get(layer.name) == "int8"]
    return deploy(quantised.graph, in_int8) if in_int8 else quantised.graph


def choose(quantised: Quantised, feeds: Feeds, chip: Chip | str, share: float = 0.3) -> Choice:
    """Return formats for layers with at most `share` of the error of all layers in int8.

    The exact mix has at most the error of the published one. Raises the compiler's errors.
    """
    layers = options_of(quantised, feeds, chip)
    # option 0 of a layer is fp16, option 1 int8
    budget = share * sum(layer.options[1].error for layer in layers)
    published = bisected(layers, ranking_of(quantised, feeds), budget)
    # the published mix rarely uses its whole budget: the exact one must not have more error than it
    exact = fastest(layers, published.error)
    seconds = [
        compile_stages(mixed_graph(quantised, mix), chip).timeline().time_s
        for mix in (published, exact, mix_of(layers, [0] * len(layers)))
    ]
    return Choice(layers, published, exact, *seconds)
