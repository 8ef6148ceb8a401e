"""Mixed precision of a real network: times of its layers on a chip, errors on samples, the choice.

A layer's time is that of the kernel it is computed in, in fp16 and deployed in int8, launch
included; its error is the squared relative error of its own output when it alone is quantised.
Kernels between layers of different formats belong to no layer, so what is chosen is timed whole:
of the knapsack's mix, the published one and no int8 at all, the fastest is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ascend_lab.chip import Chip
from ascend_lab.compress.deploy import deploy
from ascend_lab.compress.layers import Quantised
from ascend_lab.compress.mixed import Layer, Mix, Option, bisected, fastest, mix_of, similarity
from ascend_lab.compress.quantise import Feeds, by_node, fake_quantised, weight_scales
from ascend_lab.compress.records import LayerScales
from ascend_lab.compress.scales import fake
from ascend_lab.graph import Graph, compile_stages, evaluate
from ascend_lab.graph.ir import Node, Values, operator_of

CUBE = ("convolution", "product")


def layer_times(graph: Graph, layers: Sequence[LayerScales], chip: Chip | str) -> dict[str, float]:
    """Return the seconds of the kernels that compute some layers; 0 where a layer has none."""
    stages = compile_stages(graph, chip)
    times = {op.name: op.time_s for op in stages.timeline().operators}
    found = {layer.name: 0.0 for layer in layers}
    for task in stages.compiled.tasks:
        heavy = [n.name for n in map(stages.laid_out.node, task.nodes) if n.has(*CUBE)]
        for node in heavy:  # passes add to names, as in "fc_sums" and "fc_1"
            own = [name for name in found if node == name or node.startswith(f"{name}_")]
            if own:
                found[max(own, key=len)] += times.get(task.name, 0.0)
    return found


def _alone(node: Node, arrays: Sequence[Values]) -> Values:
    operator = operator_of(node.op)
    wide = [array.astype(np.float32) for array in arrays]
    return np.asarray(operator.formula(*wide, **operator.settings(node.attrs)))


def layer_errors(found: Quantised, feeds: Feeds) -> dict[str, float]:
    """Return the squared relative error of each layer's output, quantised alone, over all samples.

    A layer whose output is all zero has none.
    """
    graph, layers = found.graph, by_node(found)
    nodes = [node for node in graph.nodes if node.name in layers]
    names = tuple(dict.fromkeys(node.inputs[0] for node in nodes))
    sums = {node.name: np.zeros(2) for node in nodes}
    for feed in feeds:
        values = evaluate(replace(graph, outputs=names), feed)
        for node in nodes:
            layer, rest = layers[node.name], [graph.constants[n].array() for n in node.inputs[1:]]
            x, scales = values[node.inputs[0]], weight_scales(layer, node, graph)
            wanted = _alone(node, [x, *rest])
            given = fake(x, layer.scale, layer.offset, layer.bits)
            weights = fake(rest[0], scales, 0, layer.weight_bits)
            gap = _alone(node, [given, weights, *rest[1:]]) - wanted
            sums[node.name] += [np.vdot(v, v) for v in (gap, wanted)]
    return {name: float(gap / whole) if whole else 0.0 for name, (gap, whole) in sums.items()}


def options_of(found: Quantised, feeds: Feeds, chip: Chip | str) -> tuple[Layer, ...]:
    """Return fp16 and int8 for each layer, with their times on a chip and their errors."""
    half = layer_times(found.graph, found.layers, chip)
    byte = layer_times(deploy(found.graph, found.layers), found.layers, chip)
    errors = layer_errors(found, feeds)
    return tuple(
        Layer(n, (Option("fp16", half[n], 0.0), Option("int8", byte[n], errors[n]))) for n in half
    )


def ranking_of(found: Quantised, feeds: Feeds) -> tuple[str, ...]:
    """Return the layers, the least similar first: outputs of the network and its quantised self."""
    outs = {node.name: node.output for node in found.graph.nodes if node.name in by_node(found)}
    graphs = (found.graph, fake_quantised(found))
    totals = dict.fromkeys(outs, 0.0)
    for feed in feeds:
        one, two = (evaluate(replace(g, outputs=tuple(outs.values())), feed) for g in graphs)
        for name, out in outs.items():
            totals[name] += similarity(one[out], two[out])
    return tuple(sorted(totals, key=lambda name: totals[name]))


@dataclass(frozen=True, slots=True)
class Choice:
    """The published mix and the exact one at no more error, and the network's time with each.

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
        """The mix whose network is fastest: never slower than the published one, or than none."""
        known = [(self.exact_s, self.exact), (self.published_s, self.published)]
        known.append((self.float_s, mix_of(self.layers, [0] * len(self.layers))))
        return min(known, key=lambda pair: pair[0])[1]

    @property
    def time_s(self) -> float:
        """Seconds of the network with the best mix."""
        return min(self.exact_s, self.published_s, self.float_s)


def mixed_graph(found: Quantised, mix: Mix) -> Graph:
    """Return the network with the layers in int8 that a mix says, the others in floating point."""
    whole = [layer for layer in found.layers if mix.formats.get(layer.name) == "int8"]
    return deploy(found.graph, whole) if whole else found.graph


def choose(found: Quantised, feeds: Feeds, chip: Chip | str, share: float = 0.3) -> Choice:
    """Return formats for the layers of a network that keep `share` of the error of all in int8.

    The exact mix has at most the error of the published one. Raises as compiling.
    """
    layers = options_of(found, feeds, chip)
    budget = share * sum(layer.options[1].error for layer in layers)
    published = bisected(layers, ranking_of(found, feeds), budget)
    exact = fastest(layers, published.error)
    seconds = [
        compile_stages(mixed_graph(found, mix), chip).timeline().time_s
        for mix in (published, exact, mix_of(layers, [0] * len(layers)))
    ]
    return Choice(layers, published, exact, *seconds)
