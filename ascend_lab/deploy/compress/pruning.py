"""Pruning: removes channels of a network; the smaller graph computes as if they were 0.

A channel's score is the L2 norm of its weights divided by their number, mapped to 0..1 in each
layer. Some channels can only be removed together: in y = conv1(x) + conv2(x) channel 3 of both
terms makes channel 3 of y. Their scores are added, and the lowest are removed. Source: github
hicann/amct, graph_based (balanced L2 norm filter pruning).

Channels are followed through the graph. A *set* is the channels that one layer writes; *segments*
list the sets from which the channels of a tensor come, in order. After a concatenation of sets a
(64 channels) and b (32) the segments are (a, 1), (b, 1); when an image of 7 x 7 pixels is then
flattened they are (a, 49), (b, 49), since each channel becomes 49 neighbours. A set is not pruned
if it reaches an output, an operator that does not work channel by channel, or one that turns zeros
into other numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ascend_lab.compiler import Graph, Node
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import Constant, Values, infer, operator_of
from ascend_lab.errors import InputError

UNIT = 16
"""Channels of a block in memory: 40 channels take as much room and time as 48."""
LAYERS = ("conv2d", "depthwise_conv2d", "matmul", "gemm")
CHANNEL_WISE = ("max_pool2d", "avg_pool2d", "global_avg_pool", "global_max_pool", "batch_norm")
"""Operators whose output has the channels of their input, each computed from that channel."""
Segments = tuple[tuple[str, int], ...]
"""Channels of a tensor in order: (a set, number of neighbours that each channel became)."""
Removed = Mapping[str, tuple[int, ...]]
"""Set -> the channels of it that are removed."""
Change = Callable[[Values, Values, int], Values]
"""A change of an array, given which of its channels along an axis are kept."""


# -- the channels to remove -----------------------------------------------------------------------
def pruned_count(channels: int, ratio: float, *, aligned: bool = True) -> int:
    """Return how many channels to remove: round(n ratio), or fewer so that the rest fills blocks.

    Of 64 channels at the ratio 0.3, 19 are removed; if aligned to blocks of 16, 16 are removed.
    """
    if not 0 <= ratio < 1:
        raise InputError("a ratio from 0 to below 1", str(ratio), "prune less")
    # at least one channel always stays, or the layer would be gone
    remaining = channels - round(channels * ratio)
    if aligned:
        remaining = min(channels, max(-(-remaining // UNIT) * UNIT, UNIT))
    return channels - max(remaining, 1)


def balanced_scores(weights: Values) -> Values:
    """Return a score from 0 to 1 for each output channel, the first axis of its weights."""
    rows = np.asarray(weights, np.float64).reshape(len(weights), -1)
    if not np.isfinite(rows).all():
        raise InputError("finite weights", "NaN or infinity", "correct them")
    # Divided by their number, so that layers of many weights a channel do not weigh more; mapped to
    # 0..1, so that layers of large weights do not. Equal norms are all worth keeping: score 1.
    norms: Values = np.sqrt((rows**2).sum(1)) / rows.shape[1]
    low = norms.min()
    high = norms.max()
    return (norms - low) / (high - low) if high > low else np.ones(len(rows))


def lowest(scores: Values, ratio: float, *, aligned: bool = True) -> tuple[int, ...]:
    """Return the channels to remove, in order; of channels with equal scores the first."""
    count = pruned_count(len(scores), ratio, aligned=aligned)
    return tuple(sorted(np.argsort(scores, kind="stable")[:count].tolist()))


# -- channels that can only be removed together ---------------------------------------------------
@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights that write a set: output channels are rows of a convolution's, columns of x @ w."""

    name: str
    in_columns: bool


@dataclass(slots=True)
class Channels:
    """The sets of channels of a graph: their sizes, which are tied, and which must stay.

    Tied sets, which lose the same channels, form a tree: `parents` maps a set to the set to which
    it was tied (union-find). `unprunable` sets lose no channel. `weights` holds the weights that
    write each set, and `segments` the channels of each tensor.
    """

    graph: Graph
    sizes: dict[str, int] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    unprunable: set[str] = field(default_factory=set)
    weights: dict[str, list[LayerWeights]] = field(default_factory=dict)
    segments: dict[str, Segments] = field(default_factory=dict)

    def root(self, name: str) -> str:
        """Return the set that represents all sets tied to a set."""
        while name in self.parents:
            name = self.parents[name]
        return name

    def new_set(self, name: str, size: int) -> Segments:
        """Add a set of channels, and return it as the segments of a tensor."""
        self.sizes[name] = size
        return ((name, 1),)

    def add_unprunable(self, names: Sequence[str]) -> None:
        """Add a set for each of some tensors, whose channels may not be removed."""
        for name in names:
            if len(self.graph.types[name].shape) > 1:
                self.segments[name] = self.new_set(name, self.graph.types[name].shape[1])
                self.keep_channels(name)

    def keep_channels(self, *names: str) -> None:
        """Keep all channels of some tensors."""
        for name in names:
            self.unprunable.update(key for key, _ in self.segments.get(name, ()))

    def channel_count(self, segments: Segments) -> int:
        """Return how many channels segments have."""
        return sum(self.sizes[key] * repeats for key, repeats in segments)

    def tie(self, segments: Segments, other_segments: Segments) -> bool:
        """Tie the sets of two tensors in order; return False if their segments differ in size.

        (a, 1), (b, 1) of 64 and 32 channels cannot be tied to one set of 96.
        """
        sizes = [(self.sizes[key], repeats) for key, repeats in segments]
        other_sizes = [(self.sizes[key], repeats) for key, repeats in other_segments]
        if sizes != other_sizes:
            return False
        for (key, _), (other_key, _) in zip(segments, other_segments, strict=True):
            root = self.root(key)
            other_root = self.root(other_key)
            if root != other_root:
                self.parents[other_root] = root
        return True

    def prunable_sets(self) -> dict[str, list[LayerWeights]]:
        """Return the weights that write each group of tied sets which may lose channels."""
        unprunable_roots = {self.root(name) for name in self.unprunable}
        weights_of_sets: dict[str, list[LayerWeights]] = {}
        for key, weights in self.weights.items():
            if self.root(key) not in unprunable_roots:
                weights_of_sets.setdefault(self.root(key), []).extend(weights)
        return weights_of_sets


def channels_of(graph: Graph) -> Channels:
    """Return the sets of a graph's channels."""
    channels = Channels(graph)
    channels.add_unprunable(graph.inputs)
    for node in graph.nodes:
        segments = _written_channels(channels, node)
        # a node that cannot be followed needs all channels it reads, and its outputs are new sets
        if segments is None:
            channels.keep_channels(*node.inputs)
            channels.add_unprunable(node.outputs)
        else:
            channels.segments[node.output] = segments
    channels.keep_channels(*graph.outputs)
    return channels


def _written_channels(channels: Channels, node: Node) -> Segments | None:
    """Return the channels that a node writes; None where they cannot be followed."""
    graph = channels.graph
    x = node.inputs[0]
    segments = channels.segments.get(x)
    has_constant_operands = all(name in graph.constants for name in node.inputs[1:])
    if segments is None or len(node.outputs) > 1:
        return None
    if node.op in LAYERS and has_constant_operands:
        return _layer_channels(channels, node, segments)
    if node.op in CHANNEL_WISE and has_constant_operands:
        return segments
    if node.op == "reshape":
        if not _flattens(graph, node):
            return None
        pixels = math.prod(graph.types[x].shape[2:])
        return tuple((key, repeats * pixels) for key, repeats in segments)
    if node.op == "concat" and node.attr("axis", 0) % len(graph.types[x].shape) == 1:
        joined: list[tuple[str, int]] = []
        for name in node.inputs:
            input_segments = channels.segments.get(name)
            if not input_segments:
                return None
            joined += input_segments
        return tuple(joined)
    return _elementwise_channels(channels, node, segments)


def _flattens(graph: Graph, node: Node) -> bool:
    """Tell whether a reshape is (n, c, h, w) to (n, c h w): a channel becomes h w neighbours."""
    old_shape = graph.types[node.inputs[0]].shape
    return graph.types[node.output].shape == (old_shape[0], math.prod(old_shape[1:]))


def _layer_channels(channels: Channels, node: Node, x_segments: Segments) -> Segments | None:
    """Return the channels that a layer writes: a new set, or those of its input if depthwise."""
    graph = channels.graph
    weight = node.inputs[1]
    shape = graph.types[weight].shape
    groups = node.attr("groups", 1)
    is_convolution = node.op in ("conv2d", "depthwise_conv2d")
    if len(shape) != (4 if is_convolution else 2) or node.attr("trans_a", False):
        return None
    is_depthwise = node.op == "depthwise_conv2d" or (groups > 1 and shape[1] == 1)
    if is_convolution and is_depthwise and shape[0] == channels.channel_count(x_segments):
        # its channels go with those of its input; its own weights do not count for the score
        for key, _ in x_segments:
            channels.weights.setdefault(key, [])
        return x_segments
    if groups > 1:
        return None
    output_rows = is_convolution or bool(node.attr("trans_b", False))
    segments = channels.new_set(node.output, shape[0] if output_rows else shape[1])
    layer_weights = LayerWeights(weight, in_columns=not output_rows)
    channels.weights.setdefault(node.output, []).append(layer_weights)
    return segments


def _elementwise_channels(channels: Channels, node: Node, segments: Segments) -> Segments | None:
    """Tie the operands of an elementwise node that leaves zeros zero; None for another node.

    A ReLU qualifies, a sigmoid does not: a channel of zeros would become one of 0.5.
    """
    graph = channels.graph
    if not node.has("lanes") and not operator_of(node.op).has("pointwise"):
        return None
    shape = graph.types[node.output].shape
    zeros = []
    for name in node.inputs:
        if name not in graph.constants:
            zeros.append(np.zeros(1))
            if graph.types[name].shape != shape or name not in channels.segments:
                return None
        elif graph.types[name].elements > 1 and node.op != "mul":
            return None
        else:
            zeros.append(graph.constants[name].array().ravel().astype(np.float64)[:1])
    # the operator itself is applied to zeros, with its constants, to see whether they stay zeros
    with np.errstate(all="ignore"):
        value = operator_of(node.op).formula(*zeros, **operator_of(node.op).settings(node.attrs))
    if np.any(np.asarray(value) != 0):
        return None
    for name in node.inputs[1:]:
        if name not in graph.constants and not channels.tie(segments, channels.segments[name]):
            return None
    return segments


# -- removing channels ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Pruned:
    """A smaller graph, one of the old size with the same values, and which channels were removed.

    `masked` has zeros for the channels that `graph` lacks, to check that both give equal values.
    """

    graph: Graph
    masked: Graph
    removed: Removed


def prune(
    graph: Graph, ratio: float, *, aligned: bool = True, keep: frozenset[str] = frozenset()
) -> Pruned:
    """Return the graph without the channels of least score, the same share of each set.

    `keep` names nodes whose channels all stay. Raises `InputError` for a ratio outside 0..1, for a
    name in `keep` that no node has, and for weights that are not finite.
    """
    names = {node.name for node in graph.nodes}
    if keep - names:
        raise InputError(f"{graph.name}: layers of the graph", str(sorted(keep - names)), "check")
    channels = channels_of(graph)
    channels.unprunable.update(graph.node(name).output for name in keep)
    removed: dict[str, tuple[int, ...]] = {}
    for key, set_weights in channels.prunable_sets().items():
        if set_weights:  # tied layers: their scores are added, channel by channel
            scores = [balanced_scores(_channel_rows(graph, weights)) for weights in set_weights]
            lowest_channels = lowest(np.sum(scores, axis=0), ratio, aligned=aligned)
            if lowest_channels:
                removed[key] = lowest_channels
    return Pruned(
        _changed_graph(channels, removed, np.compress),
        _changed_graph(channels, removed, _masked),
        removed,
    )


def _channel_rows(graph: Graph, weights: LayerWeights) -> Values:
    """Return weights with a row for each output channel."""
    array = graph.constants[weights.name].array()
    return array.T if weights.in_columns else array


def _staying(channels: Channels, removed: Removed, segments: Segments) -> Values:
    """Return True for each channel of segments that stays."""
    masks = []
    for key, repeats in segments:
        stays = np.ones(channels.sizes[key], bool)
        stays[list(removed.get(channels.root(key), ()))] = False
        masks.append(np.repeat(stays, repeats))
    return np.concatenate(masks)


def _masked(stays: Values, array: Values, axis: int) -> Values:
    """Return an array with zeros for the removed channels along an axis.

    The arguments are those of `np.compress`, which leaves these channels out instead.
    """
    shape = [1] * array.ndim
    shape[axis] = len(stays)
    return array * stays.reshape(shape)


def _changed_constants(
    channels: Channels, removed: Removed, node: Node, change: Change
) -> dict[int, Values]:
    """Return the constants of a node that change as channels are removed, by input number."""
    graph = channels.graph
    arrays = dict[int, Values]()
    x_segments = channels.segments.get(node.inputs[0])
    y_segments = channels.segments.get(node.output)
    if not x_segments or not y_segments:
        return arrays
    x_stays = _staying(channels, removed, x_segments)
    y_stays = _staying(channels, removed, y_segments)
    if x_stays.all() and y_stays.all():
        return arrays
    # weights of a product have output channels in columns, unless they are stored transposed
    outputs_in_columns = node.op in ("matmul", "gemm") and not node.attr("trans_b", False)
    for place, name in enumerate(node.inputs):
        if name not in graph.constants or not graph.constants[name].type.elements:
            continue
        array = graph.constants[name].array()
        if node.op in LAYERS and place == 1:
            array = change(y_stays, array, 1 if outputs_in_columns else 0)
            if node.op != "depthwise_conv2d" and node.attr("groups", 1) == 1:
                array = change(x_stays, array, 0 if outputs_in_columns else 1)
        # a bias, a norm's vector, or a factor (c, 1, 1): one number for each channel
        elif array.size == len(y_stays) and array.size > 1:
            array = change(y_stays, array, array.shape.index(len(y_stays)))
        arrays[place] = array
    return arrays


def _changed_graph(channels: Channels, removed: Removed, change: Change) -> Graph:
    """Return the graph with its constants changed and all types inferred anew."""
    graph = channels.graph
    draft = Draft(graph, nodes=())
    for node in graph.nodes:
        inputs = list(node.inputs)
        attrs = dict(node.attrs)
        for place, array in _changed_constants(channels, removed, node, change).items():
            kind = replace(graph.constants[inputs[place]].type, shape=array.shape)
            inputs[place] = draft.add(Constant(kind, array), f"{inputs[place]}_pruned")
        x_shape = draft.types[inputs[0]].shape
        if node.op == "reshape" and _flattens(graph, node):
            # its rows have become shorter
            attrs["shape"] = (x_shape[0], math.prod(x_shape[1:]))
        if node.op == "conv2d" and node.attr("groups", 1) > 1:
            # one group a channel: fewer channels are fewer groups
            is_depthwise = graph.types[node.inputs[1]].shape[1] == 1
            attrs["groups"] = x_shape[1] if is_depthwise else node.attr("groups")
        kinds = infer(node.op, [draft.types[name] for name in inputs], attrs)
        draft.put(replace(node, inputs=tuple(inputs), attrs=attrs), *kinds)
    return draft.finish()
