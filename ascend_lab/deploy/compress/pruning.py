"""Channels taken out of a network: the same values as with them set to 0, in a smaller graph.

A channel's score is the L2 norm of its weights over their number, brought to 0..1 in each layer and
added over layers whose channels must go together: those joined by sums, and by depthwise layers.
The lowest go. Source: github hicann/amct, graph_based (balanced L2 norm filter pruning).

Channels are followed through the graph as segments: which set a tensor's channels come from. A set
that reaches an output, or an operator that does not work channel by channel or makes other numbers
of zeros, stays whole.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ascend_lab.compiler import Constant, Draft, Graph, Node
from ascend_lab.compiler.ir import Values, infer, operator_of
from ascend_lab.errors import InputError

UNIT = 16
LAYERS = ("conv2d", "depthwise_conv2d", "matmul", "gemm")
FOLLOWED = ("max_pool2d", "avg_pool2d", "global_avg_pool", "global_max_pool", "batch_norm")
Segments = tuple[tuple[str, int], ...]
"""Channels of a tensor in order: (the set they are of, how many neighbours each has)."""
Gone = Mapping[str, tuple[int, ...]]
"""Channels that go, by their set."""
Change = Callable[[Values, Values, int], Values]
"""What is done to an array whose channels along an axis stay or go."""


# -- which channels go ----------------------------------------------------------------------------
def pruned_count(channels: int, ratio: float, *, aligned: bool = True) -> int:
    """Return how many channels go: round(n ratio), fewer where the rest is to fill blocks of 16."""
    if not 0 <= ratio < 1:
        raise InputError("a ratio from 0 to below 1", str(ratio), "prune less")
    kept = channels - round(channels * ratio)
    if aligned:
        kept = min(channels, max(-(-kept // UNIT) * UNIT, UNIT))
    return channels - max(kept, 1)


def balanced_scores(weights: Values) -> Values:
    """Return a score from 0 to 1 for each output channel, the first axis of its weights."""
    rows = np.asarray(weights, np.float64).reshape(len(weights), -1)
    if not np.isfinite(rows).all():
        raise InputError("finite weights", "NaN or infinity", "mend them")
    norms: Values = np.sqrt((rows**2).sum(1)) / rows.shape[1]
    low = norms.min()
    high = norms.max()
    return (norms - low) / (high - low) if high > low else np.ones(len(rows))


def lowest(scores: Values, ratio: float, *, aligned: bool = True) -> tuple[int, ...]:
    """Return the channels that go, in order; of equal ones the first."""
    count = pruned_count(len(scores), ratio, aligned=aligned)
    return tuple(sorted(np.argsort(scores, kind="stable")[:count].tolist()))


# -- which channels go together -------------------------------------------------------------------
@dataclass(slots=True)
class Channels:
    """The sets of channels of a graph: sizes, scores, which are one, which must stay."""

    graph: Graph
    sizes: dict[str, int] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    weights: dict[str, list[str]] = field(default_factory=dict)
    held: dict[str, Segments] = field(default_factory=dict)

    def root(self, name: str) -> str:
        """Return the set that a set became part of."""
        while name in self.parents:
            name = self.parents[name]
        return name

    def new(self, name: str, size: int) -> Segments:
        """Begin a set."""
        self.sizes[name] = size
        return ((name, 1),)

    def begin(self, names: Sequence[str]) -> None:
        """Begin sets for some tensors that all stay."""
        for name in names:
            if len(self.graph.types[name].shape) > 1:
                self.held[name] = self.new(name, self.graph.types[name].shape[1])
                self.stop(name)

    def stop(self, *names: str) -> None:
        """Keep all channels of some tensors."""
        for name in names:
            self.fixed.update(key for key, _ in self.held.get(name, ()))

    def count(self, segments: Segments) -> int:
        """Return how many channels segments have."""
        return sum(self.sizes[key] * each for key, each in segments)

    def tie(self, one: Segments, two: Segments) -> bool:
        """Make sets of two tensors one; False if they are cut differently."""
        shape = [[(self.sizes[k], n) for k, n in s] for s in (one, two)]
        if shape[0] != shape[1]:
            return False
        for (a, _), (b, _) in zip(one, two, strict=True):
            left = self.root(a)
            right = self.root(b)
            if left != right:
                self.parents[right] = left
        return True

    def sets(self) -> dict[str, list[str]]:
        """Return the weights that produce each set which may lose channels."""
        stay = {self.root(name) for name in self.fixed}
        found: dict[str, list[str]] = {}
        for key, names in self.weights.items():
            if self.root(key) not in stay:
                found.setdefault(self.root(key), []).extend(names)
        return found


def channels_of(graph: Graph) -> Channels:
    """Return the sets of a graph's channels."""
    found = Channels(graph)
    found.begin(graph.inputs)
    for node in graph.nodes:
        segments = _behind(found, node)
        if segments is None:
            found.stop(*node.inputs)
            found.begin(node.outputs)
        else:
            found.held[node.output] = segments
    found.stop(*graph.outputs)
    return found


def _behind(found: Channels, node: Node) -> Segments | None:
    """Return the channels a node writes; None where they cannot be followed."""
    graph = found.graph
    x = node.inputs[0]
    own = found.held.get(x)
    fixed = all(name in graph.constants for name in node.inputs[1:])
    if own is None or len(node.outputs) > 1:
        return None
    if node.op in LAYERS and fixed:
        return _layer(found, node, own)
    if node.op in FOLLOWED and fixed:
        return own
    if node.op == "reshape":
        before = graph.types[x].shape
        after = graph.types[node.output].shape
        each = math.prod(before[2:])
        flat = len(after) == 2 and after == (before[0], before[1] * each)
        return tuple((key, n * each) for key, n in own) if flat else None
    if node.op == "concat" and node.attr("axis", 0) % len(graph.types[x].shape) == 1:
        parts = [found.held.get(name) for name in node.inputs]
        return tuple(s for part in parts for s in part or ()) if all(parts) else None
    return _lanes(found, node, own)


def _layer(found: Channels, node: Node, own: Segments) -> Segments | None:
    graph = found.graph
    weight = node.inputs[1]
    shape = graph.types[weight].shape
    groups = node.attr("groups", 1)
    conv = node.op in LAYERS[:2]
    if len(shape) != (4 if conv else 2) or node.attr("trans_a", False):
        return None
    single = node.op == "depthwise_conv2d" or (groups > 1 and shape[1] == 1)
    if conv and single and shape[0] == found.count(own):
        for key, _ in own:
            found.weights.setdefault(key, [])
        return own
    if groups > 1:
        return None
    rows = conv or bool(node.attr("trans_b", False))
    segments = found.new(node.output, shape[0] if rows else shape[1])
    found.weights.setdefault(node.output, []).append(weight if rows else f"{weight}/columns")
    return segments


def _lanes(found: Channels, node: Node, own: Segments) -> Segments | None:
    """Tie the operands of an elementwise node that leaves zeros zero."""
    graph = found.graph
    if not node.has("lanes") and not operator_of(node.op).has("pointwise"):
        return None
    shape = graph.types[node.output].shape
    zeros = []
    for name in node.inputs:
        if name not in graph.constants:
            zeros.append(np.zeros(1))
            if graph.types[name].shape != shape or name not in found.held:
                return None
        elif graph.types[name].elements > 1 and node.op != "mul":
            return None
        else:
            zeros.append(graph.constants[name].array().ravel().astype(np.float64)[:1])
    with np.errstate(all="ignore"):
        value = operator_of(node.op).formula(*zeros, **operator_of(node.op).settings(node.attrs))
    if np.any(np.asarray(value) != 0):
        return None
    others = [found.held[n] for n in node.inputs[1:] if n not in graph.constants]
    return own if all(found.tie(own, other) for other in others) else None


# -- what is cut ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Pruned:
    """A smaller graph, the graph of the old size with the same values, and who went where."""

    graph: Graph
    masked: Graph
    removed: Gone


def prune(
    graph: Graph, ratio: float, *, aligned: bool = True, keep: frozenset[str] = frozenset()
) -> Pruned:
    """Return the graph without the channels of least score, a share of each set; norms folded.

    `keep` names layers whose channels all stay. Raises `InputError` for a ratio outside 0..1, a
    name that is no layer, or weights that are not finite.
    """
    names = {node.name for node in graph.nodes}
    if keep - names:
        raise InputError(f"{graph.name}: layers of the graph", str(sorted(keep - names)), "check")
    found = channels_of(graph)
    found.fixed.update(graph.node(name).output for name in keep)
    gone: dict[str, tuple[int, ...]] = {}
    for key, names_of in found.sets().items():
        if names_of:
            total = np.sum([balanced_scores(_rows(graph, name)) for name in names_of], axis=0)
            gone[key] = lowest(total, ratio, aligned=aligned)
    gone = {key: places for key, places in gone.items() if places}
    return Pruned(_changed(found, gone, np.compress), _changed(found, gone, _masked), gone)


def _rows(graph: Graph, name: str) -> Values:
    weight, _, columns = name.partition("/")
    array = graph.constants[weight].array()
    return array.T if columns else array


def _kept(found: Channels, gone: Gone, segments: Segments) -> Values:
    """Return True for each channel of segments that stays."""
    parts = []
    for key, each in segments:
        stay = np.ones(found.sizes[key], bool)
        stay[list(gone.get(found.root(key), ()))] = False
        parts.append(np.repeat(stay, each))
    return np.concatenate(parts)


def _masked(keep: Values, array: Values, axis: int) -> Values:
    """Return an array with zeros for channels that go along an axis: `np.compress`, size kept."""
    sides = [1] * array.ndim
    sides[axis] = len(keep)
    return array * keep.reshape(sides)


def _cut(found: Channels, gone: Gone, node: Node, change: Change) -> dict[int, Values]:
    """Return a node's constants changed where channels go, by place."""
    graph = found.graph
    arrays = dict[int, Values]()
    ends = [found.held.get(name) for name in (node.inputs[0], node.output)]
    x, y = (_kept(found, gone, segments) if segments else None for segments in ends)
    if x is None or y is None or (x.all() and y.all()):
        return arrays
    layer = node.op in LAYERS
    turned = node.op in LAYERS[2:] and not node.attr("trans_b", False)
    for place, name in enumerate(node.inputs):
        if name not in graph.constants or not graph.constants[name].type.elements:
            continue
        array = graph.constants[name].array()
        if layer and place == 1:
            array = change(y, array, 1 if turned else 0)
            if node.op != "depthwise_conv2d" and node.attr("groups", 1) == 1:
                array = change(x, array, 0 if turned else 1)
        elif array.size == len(y) and array.size > 1:
            array = change(y, array, array.shape.index(len(y)))
        arrays[place] = array
    return arrays


def _changed(found: Channels, gone: Gone, change: Change) -> Graph:
    """Return the graph with its constants changed and all types inferred anew."""
    graph = found.graph
    draft = Draft(graph, nodes=())
    for node in graph.nodes:
        inputs = list(node.inputs)
        attrs = dict(node.attrs)
        for place, array in _cut(found, gone, node, change).items():
            kind = replace(graph.constants[inputs[place]].type, shape=array.shape)
            inputs[place] = draft.add(Constant(kind, array), f"{inputs[place]}_pruned")
        x = draft.types[inputs[0]].shape
        if node.op == "reshape" and found.held.get(node.output) and len(attrs["shape"]) == 2:
            attrs["shape"] = (x[0], math.prod(x[1:]))
        if node.op == "conv2d" and node.attr("groups", 1) > 1:
            single = graph.types[node.inputs[1]].shape[1] == 1
            attrs["groups"] = x[1] if single else node.attr("groups")
        kinds = infer(node.op, [draft.types[name] for name in inputs], attrs)
        draft.put(replace(node, inputs=tuple(inputs), attrs=attrs), *kinds)
    return draft.finish()
