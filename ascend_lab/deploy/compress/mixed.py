"""The network that goes to the chip: its layers in whole numbers, and which had better not be.

`deploy` puts every layer's scales into the graph and folds them: sums in int32, requantised in the
epilogue of the layer that computes them. A QDQ file comes to the same when it is compiled. What
differs from the fake-quantised graph is rounding, by a step of a tensor's scale at most.

Which layer in which format: the least time on a chip within a budget of error, exactly.

    minimise sum of time(layer, format)   where   sum of error(layer, format) <= budget

A multiple-choice knapsack. States (time, error) are kept layer by layer unless another is no worse
in both, or the rest, even with fractions of layers, cannot beat what is known: what is left is
exact. The published way beside it puts the least similar layers back, their number by bisection.

A layer's time is that of the kernel it is computed in, in fp16 and deployed in int8, launch
included; its error is the squared relative error of its own output when it alone is quantised.
Kernels between layers of different formats belong to no layer, so what is chosen is timed whole:
of the knapsack's mix, the published one and no int8 at all, the fastest is taken.

Errors are added: a layer's error is what it does to the output's squared error alone. That holds
while the errors of layers are small and independent, so that their squares add up. The published
bisection assumes that fewer quantised layers are never worse. Both can be wrong; the error of the
network that was chosen is measured. Sources: github hicann/amct (accuracy_based_auto_calibration);
Kellerer, Pferschy, Pisinger: Knapsack Problems (2004), chapter 11.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ascend_lab.compiler import Graph, compile_stages, constant_bytes, evaluate, ir
from ascend_lab.compiler.passes.formats import Steps, in_pairs
from ascend_lab.compiler.passes.quantised import fold
from ascend_lab.deploy.compress.fake_quantisation import fake_quantised
from ascend_lab.deploy.compress.layers import (
    Feeds,
    Quantised,
    by_node,
    output_of,
    weight_scales,
)
from ascend_lab.deploy.compress.scales import LayerScales, fake
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip

CUBE = ("convolution", "product")
MOST_STATES = 2_000_000
"""States held at once; more is refused."""


# -- on the chip ----------------------------------------------------------------------------------
def deploy(graph: Graph, layers: Sequence[LayerScales]) -> Graph:
    """Return the graph with some layers on whole numbers; others stay in floating point.

    The graph is one made ready (`Quantised.graph`). Raises `InputError` for a layer it has not, and
    `UnsupportedError` for activations in other than 8 bits or weights in more.
    """
    nodes = {node.name: node for node in graph.nodes}
    for layer in layers:
        reads = nodes[layer.name].inputs[1:2] if layer.name in nodes else ()
        if not reads or reads[0] not in graph.constants:
            raise InputError(f"{graph.name}: a layer with constant weights", layer.name, "check it")
        if layer.bits != 8 or layer.weight_bits > 8:
            got = f"{layer.bits} and {layer.weight_bits}"
            needed = f"{layer.name}: activations in 8 bits, weights in 8 at most"
            raise UnsupportedError(needed, got, "the cube multiplies int8")
    steps = {
        one.name: Steps(one.scale, one.offset, one.weight_scales, one.weight_bits, one.shared)
        for one in layers
    }
    return fold(in_pairs(graph, steps))[0]


@dataclass(frozen=True, slots=True)
class Bill:
    """What a network costs on a chip: time, its own bytes, bytes over the memory interface."""

    time_s: float
    weight_bytes: int
    memory_bytes: int
    kernels: int
    launch_s: float
    time_s_by_type: dict[str, float]


def bill(graph: Graph, chip: Chip | str) -> Bill:
    """Return the bill of a graph in fp16 where it is in floating point; raises as compiling."""
    stages = compile_stages(graph, chip)
    times = stages.timeline()
    weights = sum(constant_bytes(stages.compiled).values())
    return Bill(
        times.time_s,
        weights,
        times.memory_bytes,
        len(times.operators),
        times.launch_s,
        times.by_type(),
    )


def ledger(graph: Graph, layers: Sequence[LayerScales], chip: Chip | str) -> tuple[Bill, Bill]:
    """Return the bills of a network in fp16 and deployed in int8, for one batch on one chip."""
    return bill(graph, chip), bill(deploy(graph, layers), chip)


# -- what to choose from --------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Option:
    """A format for a layer: its seconds, and the squared error it adds to the output."""

    format: str
    time_s: float
    error: float


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and the formats it may have."""

    name: str
    options: tuple[Option, ...]

    def __post_init__(self) -> None:
        numbers = [n for one in self.options for n in (one.time_s, one.error)]
        if not self.options or not all(math.isfinite(n) and n >= 0 for n in numbers):
            raise InputError(f"{self.name}: options of finite times and errors", str(numbers)[:60])


@dataclass(frozen=True, slots=True)
class Mix:
    """A format for each layer, and the sums of times and errors."""

    formats: Mapping[str, str]
    time_s: float
    error: float


def mix_of(layers: Sequence[Layer], places: Sequence[int]) -> Mix:
    """Return the mix that takes an option, by its place, for each layer."""
    chosen = [layer.options[place] for layer, place in zip(layers, places, strict=True)]
    names = {layer.name: one.format for layer, one in zip(layers, chosen, strict=True)}
    return Mix(names, math.fsum(o.time_s for o in chosen), math.fsum(o.error for o in chosen))


# -- exactly --------------------------------------------------------------------------------------
def fastest(layers: Sequence[Layer], budget: float) -> Mix:
    """Return the mix of least time with at most `budget` of error, of equal ones least error.

    Raises `InputError` where even the most exact formats are over the budget.
    """
    least = math.fsum(min(o.error for o in layer.options) for layer in layers)
    if not budget >= least * (1 - 1e-12):
        raise InputError("a budget that the exact formats keep", f"{budget:g} below {least:g}")
    hulls = _rest_hulls(layers)
    best = _greedy_time(layers, budget)
    # sums of floats end where they may
    slack = 1e-9 * (best + budget)
    near = 1e-12 * budget
    times = np.zeros(1)
    errors = np.zeros(1)
    trail = []
    for at, layer in enumerate(layers):
        count = len(layer.options)
        step = np.array([(o.time_s, o.error) for o in layer.options])
        grown = [(v[:, None] + step[:, i]).ravel() for i, v in enumerate((times, errors))]
        left = budget + near - grown[1]
        (rest_errors, rest_times) = hulls[at + 1]
        # the least time of the layers to come, fractions allowed; infinite if none fits
        rest = np.where(left < rest_errors[0], np.inf, np.interp(left, rest_errors, rest_times))
        bound = grown[0] + rest
        alive = np.flatnonzero(bound <= best + slack)
        kept = alive[_undominated(grown[0][alive], grown[1][alive])]
        if len(kept) > MOST_STATES:
            raise InputError(f"at most {MOST_STATES} states", str(len(kept)), "round the errors")
        times = grown[0][kept]
        errors = grown[1][kept]
        trail.append((kept // count, kept % count))
    place = int(np.lexsort((errors, times))[0])
    found = []
    for before, option in reversed(trail):
        found.append(int(option[place]))
        place = int(before[place])
    return mix_of(layers, found[::-1])


def _undominated(times: ir.Values, errors: ir.Values) -> ir.Values:
    """Return the places of states that no other beats or equals in both, by time."""
    order = np.lexsort((errors, times))
    before = np.minimum.accumulate(np.append(np.inf, errors[order]))[:-1]
    return order[errors[order] < before]


def _hull(layer: Layer) -> list[tuple[float, float]]:
    """Return the options on the lower convex hull of (error, time), by error."""
    points: list[tuple[float, float]] = []
    for error, time in sorted((o.error, o.time_s) for o in layer.options):
        if points and time >= points[-1][1]:
            continue
        while len(points) > 1:
            (e0, t0), (e1, t1) = points[-2:]
            if (t1 - t0) * (error - e1) < (time - t1) * (e1 - e0):
                break
            points.pop()
        points.append((error, time))
    return points


def _rest_hulls(layers: Sequence[Layer]) -> list[tuple[ir.Values, ir.Values]]:
    """Return, for each number of layers passed, the least time of the rest over the error left."""
    found = [(np.zeros(1), np.zeros(1))]
    error = 0.0
    time = 0.0
    slopes: list[tuple[float, float, float]] = []
    for layer in reversed(layers):
        hull = _hull(layer)
        error = error + hull[0][0]
        time = time + hull[0][1]
        for (e0, t0), (e1, t1) in pairwise(hull):
            slopes.append(((t0 - t1) / max(e1 - e0, 1e-300), e1 - e0, t0 - t1))
        slopes.sort(key=lambda s: -s[0])
        widths = np.cumsum([0.0, *(s[1] for s in slopes)])
        drops = np.cumsum([0.0, *(s[2] for s in slopes)])
        found.append((error + widths, time - drops))
    return found[::-1]


def _greedy_time(layers: Sequence[Layer], budget: float) -> float:
    """Return the time of a mix within the budget: the best exchanges first."""
    places = [min(layer.options, key=lambda o: (o.error, o.time_s)) for layer in layers]
    left = budget - math.fsum(o.error for o in places)
    steps = [
        ((places[i].time_s - o.time_s) / max(o.error - places[i].error, 1e-300), i, j)
        for i, layer in enumerate(layers)
        for j, o in enumerate(layer.options)
        if o.time_s < places[i].time_s
    ]
    for _, i, j in sorted(steps, reverse=True):
        other = layers[i].options[j]
        more = other.error - places[i].error
        if other.time_s < places[i].time_s and more <= left:
            left -= more
            places[i] = other
    return math.fsum(o.time_s for o in places)


# -- as published ---------------------------------------------------------------------------------
def similarity(wanted: ir.Values, got: ir.Values) -> float:
    """Return 0.5 + 0.5 cos(wanted, got): 1 for zeros wanted, 0 for zeros got."""
    one, two = (np.asarray(a, np.float64).ravel() for a in (wanted, got))
    if not one.any():
        return 1.0
    if not two.any():
        return 0.0
    return float(0.5 + 0.5 * (one @ two) / (np.linalg.norm(one) * np.linalg.norm(two)))


def put_back(ranking: Sequence[str], accepts: Callable[[frozenset[str]], bool]) -> frozenset[str]:
    """Return how many of a ranking, least similar first, go back to float: by bisection.

    `accepts` says whether a set of layers in float is good enough. Raises `InputError` if all of
    them are not.
    """
    if accepts(frozenset()):
        return frozenset()
    low = 0
    high = len(ranking)
    if not accepts(frozenset(ranking)):
        raise InputError("a metric that the network in float meets", "it fails", "loosen it")
    while high - low > 1:
        middle = (low + high) // 2
        fine = accepts(frozenset(ranking[:middle]))
        low, high = (low, middle) if fine else (middle, high)
    return frozenset(ranking[:high])


def published_mix(layers: Sequence[Layer], back: frozenset[str], exact: str = "fp16") -> Mix:
    """Return the mix with some layers `exact`, where they can be, and the others fastest."""
    places = []
    for layer in layers:
        fast = min(range(len(layer.options)), key=lambda i: layer.options[i].time_s)
        own = [i for i, option in enumerate(layer.options) if option.format == exact]
        places.append(own[0] if layer.name in back and own else fast)
    return mix_of(layers, places)


def bisected(layers: Sequence[Layer], ranking: Sequence[str], budget: float) -> Mix:
    """Return the published choice under the sum of errors."""
    back = put_back(ranking, lambda some: published_mix(layers, some).error <= budget)
    return published_mix(layers, back)


# -- of a network ---------------------------------------------------------------------------------
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


def layer_errors(found: Quantised, feeds: Feeds) -> dict[str, float]:
    """Return the squared relative error of each layer's output, quantised alone, over all samples.

    A layer whose output is all zero has none.
    """
    graph = found.graph
    layers = by_node(found)
    nodes = [node for node in graph.nodes if node.name in layers]
    names = tuple(dict.fromkeys(node.inputs[0] for node in nodes))
    sums = {node.name: np.zeros(2) for node in nodes}
    for feed in feeds:
        values = evaluate(replace(graph, outputs=names), feed)
        for node in nodes:
            layer = layers[node.name]
            rest = [graph.constants[n].array() for n in node.inputs[1:]]
            x = values[node.inputs[0]]
            scales = weight_scales(layer, node, graph)
            wanted = output_of(node, [x, *rest], np.float32)
            given = fake(x, layer.scale, layer.offset, layer.bits)
            weights = fake(rest[0], scales, 0, layer.weight_bits)
            gap = output_of(node, [given, weights, *rest[1:]], np.float32) - wanted
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
