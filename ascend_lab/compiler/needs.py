"""Finds which elements of its tensors a graph needs, from its outputs back to its inputs.

`bound` uses this: no schedule can leave out work on needed elements.

A need is one mask for each axis, or None for an axis of which every index is needed: an element is
needed if the masks of all axes contain its indices. In a matrix (4, 6), masks (None, [0, 0, 1, 1,
0, 0]) are columns 2 and 3. The shortest form of "everything" is (). A need that has no such form is
replaced by a part of it, and an operator without a rule here needs nothing: a need may be too
small, never too large, as a lower bound requires.

The module also counts how many numbers of a tensor may differ: repeated ones are computed once.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ascend_lab.compiler.ir import Fill, Graph, Node, rules_of
from ascend_lab.operators.ops import slicing

Mask = NDArray[np.bool_] | None
"""Which indices of an axis are needed; None: all."""
Masks = tuple[Mask, ...]
PRODUCTS = ("matmul", "batch_matmul", "gemm", "attention_scores", "attention_context")
ATTENTION = ("attention", "flash_attention")
BY_ROW = ("softmax", "log_softmax", "masked_softmax", "layer_norm", "rms_norm")
"""Operators that compute each result from a whole row, along one axis, of their operand."""
NUMBER = 1
CHANNELS = 2
ROW = 3
"""At least how much depends on a given number: one number, all channels of a pixel, or a row."""
READS_WHOLE = (
    *PRODUCTS,
    *ATTENTION,
    *BY_ROW,
    "batch_norm",
    "lrn",
    "trans_data",
    "erf",
    "log",
    "rsqrt",
    "rec",
)
"""Operators that need every element of their inputs, though none of their traits says so."""
WITH_EXACT_RULES = (*PRODUCTS, *ATTENTION, *BY_ROW, "trans_data", "transpose")
"""Operators whose results need exactly the elements that the slice rules name.

Rules of other operators may name too many: for windows with gaps, the elements between, too.
"""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows along an axis.

    counts        how many windows hold 0, 1, 2, ... elements that are not padding
    all_read      every element is in some window
    all_taps      every tap of the kernel meets some element
    least_share   smallest share of the taps that an element meets
    """

    counts: Counter[int]
    all_read: bool
    all_taps: bool
    least_share: float


@lru_cache(1024)
def windows_along(size: int, window: slicing.Window, count: int) -> Windows:
    """Return `count` windows along an axis of `size` elements; padding does not count as one.

    5 elements, a window of 3, stride 1, one padded element on each side: `counts` are {2: 2, 3: 3},
    for the first and the last window hold two elements and the three between them three.
    """
    counts = Counter[int]()
    taps_met = Counter[int]()
    taps = set[int]()
    kernel = (window.before + window.after) // window.dilation + 1
    for out in range(count):
        if window.inverse:
            # output i of a transposed convolution reads element (i + pad - t * dilation) / stride
            # at tap t, where that is a whole number
            steps = ((out + window.before - t * window.dilation, t) for t in range(kernel))
            elements = [(p // window.stride, t) for p, t in steps if p % window.stride == 0]
        else:
            start = out * window.stride - window.before
            elements = [(start + t * window.dilation, t) for t in range(kernel)]
        elements = [(i, t) for i, t in elements if 0 <= i < size]
        counts[len(elements)] += 1
        taps_met.update(i for i, _ in elements)
        taps.update(t for _, t in elements)
    # each window meets an element with another tap, so that windows count as taps
    least_share = min(taps_met[i] for i in range(size)) / kernel
    return Windows(counts, len(taps_met) == size, len(taps) == kernel, least_share)


def slides(node: Node) -> bool:
    """Tell whether a node is a convolution, a transposed one, or a pooling."""
    return node.op == "conv_transpose2d" or node.has("convolution", "pooling")


def _windows(graph: Graph, node: Node) -> tuple[Windows, Windows]:
    """Return the windows along rows and columns that the slice rules of the node state."""
    image = graph.types[node.inputs[0]].shape
    out = graph.types[node.output].shape
    rules = rules_of(graph, node)
    rows, columns = (
        windows_along(image[axis], rules.axes[axis].sources[0].window, out[axis]) for axis in (2, 3)
    )
    return rows, columns


def moves(node: Node) -> bool:
    """Tell whether a node only moves elements: a better compiler might make it a view."""
    return node.op in ("trans_data", "pad", "embedding") or node.has("moves")


class _Segment(NamedTuple):
    """The part of a graph that ends at a tensor through which all data flow.

    end            the tensor
    weight_bytes   bytes of weights that multiply each row of the segment's start
    from_number    what of `end` depends, at least, on one number of the start: see `_spread`
    from_row       what of `end` depends, at least, on one row of the start
    """

    end: str
    weight_bytes: float
    from_number: int
    from_row: int


class Needs:
    """The needs of a graph, as masks by the names of its tensors.

    read       tensors that some kernel has to read whole
    varies     tensors that depend on an input
    distinct   how many numbers of a tensor may differ
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.windows = {node.name: _windows(graph, node) for node in graph.nodes if slides(node)}
        """By node, the windows along rows and columns of convolutions and poolings."""
        self.masks: dict[str, Masks] = dict.fromkeys(graph.outputs, ())
        self.read: set[str] = set()
        for node in reversed(graph.nodes):
            # a move counts as reading only if a kernel reads its result whole
            reads_whole = self.read.issuperset(node.outputs) or not moves(node)
            for name, masks in self._needs_of(node):
                self._add(name, masks)
                if reads_whole and self.is_whole(name):
                    self.read.add(name)
        self.varies = set(graph.inputs)
        self.distinct = dict[str, int]()
        for node in graph.nodes:
            if not self.varies.isdisjoint(node.inputs):
                self.varies.update(node.outputs)
            for name in node.outputs:
                self.distinct[name] = self._distinct_results(node, graph.types[name].elements)

    def is_whole(self, name: str) -> bool:
        """Tell whether every element of a tensor is needed."""
        return name in self.masks and not any(m is not None for m in self.masks[name])

    def share(self, name: str) -> float:
        """Return the least share of a tensor's elements that is needed."""
        if name not in self.masks:
            return 0.0
        return prod(float(m.mean()) for m in self.masks[name] if m is not None)

    def _add(self, name: str, masks: Masks) -> None:
        """Enter the need of one reader of a tensor; of several needs the largest is kept."""
        shortened = tuple(None if m is None or m.all() else m for m in masks)
        previous = self.masks.get(name)
        self.masks[name] = shortened if any(m is not None for m in shortened) else ()
        if previous is None:
            return
        previous_share = prod(float(m.mean()) for m in previous if m is not None)
        if self.share(name) < previous_share:
            self.masks[name] = previous

    def _needs_of(self, node: Node) -> Iterable[tuple[str, Masks]]:
        """Return pairs (input of a node, masks that the node needs of it)."""
        if node.op in BY_ROW and self.graph.types[node.output].shape[node.attr("axis", -1)] == 1:
            return []  # the same number whatever the input
        if node.op != "slice" and all(map(self.is_whole, node.outputs)):
            return [(name, ()) for name in self.whole(node)]
        if node.op == "split":
            return self._split(node)
        out = self.masks.get(node.output)
        if out is None or len(node.outputs) > 1:
            return []
        rank = len(self.graph.types[node.output].shape)
        return self._need_for(node, out or (None,) * rank)

    def whole(self, node: Node) -> Iterable[str]:
        """Return the inputs that a node needs whole to compute all its results."""
        if node.name in self.windows:
            windows = self.windows[node.name]
            needed_whole = (
                all(w.all_read for w in windows),
                all(w.all_taps for w in windows),
                True,
            )
            return [
                name for name, is_whole in zip(node.inputs, needed_whole, strict=False) if is_whole
            ]
        if node.op in ("gather", "embedding", "pad"):
            return node.inputs[1:]
        traits = ("pointwise", "broadcasts", "reduction", "moves", "lanes", "image fold")
        return node.inputs if node.has(*traits) or node.op in READS_WHOLE else ()

    def _need_for(self, node: Node, out: Masks) -> Iterator[tuple[str, Masks]]:
        """Yield (input, masks) that a node needs to compute the results in the masks `out`."""
        if node.op in WITH_EXACT_RULES or node.has("pointwise", "broadcasts"):
            yield from self._followed(node, out)
        elif node.op == "reshape":
            in_shape = self.graph.types[node.inputs[0]].shape
            yield node.inputs[0], _reshaped(out, self.graph.types[node.output].shape, in_shape)
        elif node.op == "slice":
            steps = node.attr("step") or (1,) * len(out)
            bounds = zip(node.attr("begin"), node.attr("end"), steps, strict=True)
            read = [np.zeros(size, bool) for size in self.graph.types[node.inputs[0]].shape]
            for mask, bound, inner in zip(read, bounds, out, strict=True):
                mask[slice(*bound)] = True if inner is None else inner
            yield node.inputs[0], tuple(read)

    def _followed(self, node: Node, out: Masks) -> Iterator[tuple[str, Masks]]:
        """Yield the needs of a node whose slice rules say which input axes follow an output axis.

        Rows 2 and 3 of a product (8, 100) x (100, 5) need rows 2 and 3 of the first factor, and all
        of its 100 columns: no output axis follows these.
        """
        rules = rules_of(self.graph, node)
        for place, name in enumerate(node.inputs):
            masks: list[Mask] = [None] * len(self.graph.types[name].shape)
            for rule, mask in zip(rules.axes, out, strict=True):
                for source in rule.sources:
                    if source.input == place:
                        masks[source.axis] = mask
            yield name, tuple(masks)

    def _split(self, node: Node) -> Iterator[tuple[str, Masks]]:
        """Yield the need of a split: along its axis, the ranges of those pieces needed whole."""
        shape = self.graph.types[node.inputs[0]].shape
        axis = node.attr("axis", 0) % len(shape)
        sizes = [self.graph.types[name].shape[axis] for name in node.outputs]
        along_axis = np.zeros(shape[axis], bool)
        for name, (low, high) in zip(
            node.outputs, pairwise(accumulate(sizes, initial=0)), strict=True
        ):
            along_axis[low:high] = self.is_whole(name)
        if along_axis.any():
            yield (
                node.inputs[0],
                tuple(along_axis if i == axis else None for i in range(len(shape))),
            )

    def _distinct_results(self, node: Node, size: int) -> int:
        """Return how many results of a node may differ, 0 if unknown; repeats are computed once."""
        # for each input: how many numbers may differ, and how many there are
        distinct = [self.distinct.get(n, self.graph.types[n].elements) for n in node.inputs]
        sizes = [self.graph.types[n].elements for n in node.inputs]
        if node.op in ("gather", "embedding", "one_hot"):  # the indices are known at run time only
            return size if not self.varies.isdisjoint(node.inputs[-1:]) else 0
        if node.op == "concat":
            # an operand that is joined twice counts once
            return sum(dict(zip(node.inputs, distinct, strict=True)).values())
        if node.has("pointwise", "broadcasts") or node.op in ("select", "expand", "pad"):
            return min(size, max(distinct, default=0))
        if node.has("moves") or node.op == "trans_data":
            # in the worst case all repeated numbers of the input are in the result
            return max(0, size - (sizes[0] - distinct[0]))
        shares = [k / n for k, n in zip(distinct, sizes, strict=True)]
        if node.op in PRODUCTS or node.op in ATTENTION or node.op in BY_ROW:
            # a row that repeats another has equal results: 1/4 of the rows, 1/4 of the results
            return int(size * prod(shares))
        return size if min(shares, default=1.0) == 1.0 else 0

    def count(self, name: str) -> int:
        """Return the least number of different results of a tensor that are needed."""
        size = self.graph.types[name].elements
        # 1e-6 for rounding: 3.0000000000000004 needed elements are 3, not 4
        needed = ceil(self.share(name) * size - 1e-6)
        return max(0, needed + self.distinct.get(name, size) - size)

    # -- products -------------------------------------------------------------------------------
    def sums(self, node: Node, depth: int) -> float:
        """Return the steps of all sums of a node, if one step adds up to `depth` products to a sum.

        A product (32, 100) x (100, 8) has 256 sums of 100 products: 256 for depth 100, 1,792 for
        depth 16, as ceil(100 / 16) = 7. Returns 0 for nodes that a vector unit may compute as well,
        and for attention with a mask, which may hide any key. Causal attention counts only the keys
        that each query sees.
        """
        out = self.graph.types[node.output]
        if node.op in PRODUCTS:
            first_shape = self.graph.types[node.inputs[0]].shape
            return out.elements * _ceil_div(
                first_shape[-2 if node.attr("trans_a", False) else -1], depth
            )
        if node.op in ATTENTION and len(node.inputs) == 3:
            # queries (s, d), keys (t, d), values (t, e)
            (*batch, queries, d), (*_, t, _), (*_, e) = (
                self.graph.types[n].shape for n in node.inputs
            )
            # query i of s queries sees t - s + 1 + i of t keys
            visible_keys = (
                range(t - queries + 1, t + 1) if node.attr("causal", False) else (t,) * queries
            )
            return prod(batch) * sum(
                keys * _ceil_div(d, depth) + e * _ceil_div(keys, depth) for keys in visible_keys
            )
        if node.op not in ("conv2d", "conv_transpose2d"):
            return 0
        groups = node.attr("groups", 1)
        weight = self.graph.types[node.inputs[1]].shape
        channels = weight[1] if node.op == "conv2d" else weight[0] // groups
        # narrow groups leave most of a 16 x 16 fractal empty: vector units may compute them
        if channels < 16 and groups > 1:
            return 0
        rows, columns = self.windows[node.name]
        steps = sum(
            row_count * column_count * _ceil_div(channels * taps_high * taps_wide, depth)
            for taps_high, row_count in rows.counts.items()
            for taps_wide, column_count in columns.counts.items()
        )
        return out.shape[0] * out.shape[1] * steps

    def needs_all_products(self, node: Node) -> bool:
        """Tell whether each result of a product needs every number of its first operand.

        True for (1, k) x (k, n), false for two rows: a result needs its own row only.
        """
        if node.op in ATTENTION or node.inputs[0] not in self.varies:
            return False
        numbers = self.graph.types[node.inputs[0]].elements
        return self.sums(node, 1) == self.graph.types[node.output].elements * numbers

    def fewest_products(self, nodes: Sequence[Node], count: int) -> list[tuple[int, int]]:
        """Return the `count` results with the fewest products, as pairs (products, results).

        At the border of an image windows hold fewer elements, so that these results come first.
        """
        if len(nodes) > 1:
            return [(1, count)]
        (node,) = nodes
        (rows, columns) = self.windows[node.name]
        results = Counter[int]()
        planes = prod(self.graph.types[node.output].shape[:2])
        for taps_high, row_count in rows.counts.items():
            for taps_wide, column_count in columns.counts.items():
                results[taps_high * taps_wide] += planes * row_count * column_count
        pairs = []
        remaining = count
        for taps, result_count in sorted(results.items()):
            chosen = min(result_count, remaining)
            remaining -= chosen
            if chosen:
                pairs.append((taps, chosen))
        return pairs

    def weights(self, nodes: Sequence[Node]) -> set[str]:
        """Return the constants that products and convolutions among `nodes` need whole."""
        candidates: set[str] = set()
        for node in nodes:
            source = self.graph.producers.get(node.inputs[0])
            # after an explicit `pad`, border taps may read only zeros
            is_padded = source is not None and source.op == "pad"
            if (
                node.name in self.windows and not node.has("pooling") and not is_padded
            ) or node.op in PRODUCTS:
                candidates.update(n for n in node.inputs[:2] if self.is_whole(n))
        constants = self.graph.constants
        return {n for n in candidates if n in constants and not isinstance(constants[n].data, Fill)}

    # -- order ----------------------------------------------------------------------------------
    def later(self, weights: Collection[str]) -> dict[str, float]:
        """Return the tensors through which all data flow, with bytes of weights used after each.

        Whichever number of such a tensor is the last, these bytes of `weights` are multiplied with
        numbers that depend on it: see `_spread`. The method walks forward from one such tensor to
        the next, both for a single number and for a row (or the channels of a pixel) that depend on
        the last number; then it adds the bytes up from the back.
        """
        segments, last_bytes = self._segments(weights)
        # by what depends on the last number of a tensor, the bytes that are used after that tensor:
        # index 0 is nothing, then NUMBER, CHANNELS and ROW
        after_by_start = (0.0, 0.0, last_bytes, last_bytes)
        bytes_after = dict[str, float]()
        for segment in reversed(segments):
            bytes_after[segment.end] = after_by_start[NUMBER]
            of_row = segment.weight_bytes + after_by_start[segment.from_row]
            after_by_start = (0.0, after_by_start[segment.from_number], of_row, of_row)
        return bytes_after

    def _segments(self, weights: Collection[str]) -> tuple[list["_Segment"], float]:
        """Return the parts of the graph between bottlenecks, and the weight bytes after the last.

        Only weights count with which each row (or the channels of a pixel) of a segment's start is
        multiplied.
        """
        segments = list[_Segment]()
        weight_bytes = 0.0
        bottlenecks = self._bottlenecks()
        from_number = dict[str, int]()
        from_row = dict[str, int]()
        last_reader = {name: node for node in self.graph.nodes for name in node.inputs}
        for node in self.graph.nodes:
            name = node.output
            weight = "".join(node.inputs[1:2])
            needed_spread = CHANNELS if node.name in self.windows else ROW
            meets_all = from_row.get(node.inputs[0]) == needed_spread
            if meets_all and weight in weights and last_reader[weight] is node:
                kind = self.graph.types[weight]
                weight_bytes += kind.data_bytes * self._weight_share(node)
            from_number[name] = self._spread(node, from_number)
            from_row[name] = self._spread(node, from_row)
            if name in bottlenecks:
                segments.append(_Segment(name, weight_bytes, from_number[name], from_row[name]))
                # the next segment begins with a single number of this tensor, or with a row
                is_image = len(self.graph.types[name].shape) == 4
                from_number = {name: NUMBER}
                from_row = {name: CHANNELS if is_image else ROW}
                weight_bytes = 0.0
        return segments, weight_bytes

    def _bottlenecks(self) -> set[str]:
        """Return tensors needed whole; after each of them, no tensor made before it is read."""
        last_read = {name: at for at, node in enumerate(self.graph.nodes) for name in node.inputs}
        last_read |= dict.fromkeys(self.graph.outputs, len(self.graph.nodes))
        bottlenecks = set[str]()
        live = set(self.graph.inputs)
        for at, node in enumerate(self.graph.nodes):
            live.update(self.varies.intersection(node.outputs))
            # tensors that some later node still reads
            live = {name for name in live if last_read.get(name, -1) > at}
            if live == {node.output} and self.is_whole(node.output):
                bottlenecks.add(node.output)
        return bottlenecks

    def _spread(self, node: Node, inputs_given: Mapping[str, int]) -> int:
        """Return how much of a node's result depends, at least, on given parts of its inputs.

        `inputs_given` holds for each input 0 (nothing), `NUMBER`, `CHANNELS` (all those of a pixel)
        or `ROW` (along the last axis); the result is one of these, too. `NUMBER` stands for a
        single number at an unknown place. A convolution without groups turns a number into
        `CHANNELS`: each of its filters multiplies that number.
        """
        if len(node.outputs) > 1 or not self.is_whole(node.output):
            return 0
        spread = max((inputs_given.get(name, 0) for name in self.whole(node)), default=0)
        if not spread:
            return 0
        if node.name in self.windows and not node.has("pooling") and node.attr("groups", 1) == 1:
            return CHANNELS
        if (
            node.op in PRODUCTS
            and inputs_given.get(node.inputs[0])
            and not node.attr("trans_a", False)
        ):
            return ROW
        if node.op == "reshape" and spread > NUMBER:  # of a single pixel, or row
            in_shape, out_shape = (
                self.graph.types[name].shape for name in (node.inputs[0], node.output)
            )
            is_single = [n for n in in_shape if n > 1] == [n for n in out_shape if n > 1]
            if (
                is_single
                and {len(in_shape), len(out_shape)} == {2, 4}
                and max(map(prod, (in_shape[2:], out_shape[2:]))) < 2
            ):
                return CHANNELS if len(out_shape) == 4 else ROW
        keeps_spread = (
            node.has("pointwise", "broadcasts", "pooling", "image fold")
            or node.name in self.windows
        )
        return spread if keeps_spread else NUMBER

    def _weight_share(self, node: Node) -> float:
        """Return the share of a node's weights with which each row that it reads is multiplied.

        An element at the border of an image meets only some taps of a kernel; a row of one of 8
        batched matrices meets an eighth of the weights.
        """
        batches = prod(self.graph.types[node.inputs[1]].shape[:-2])
        return (
            prod(w.least_share for w in self.windows[node.name])
            if node.name in self.windows
            else 1 / batches
        )


def _reshaped(out: Masks, out_shape: Sequence[int], in_shape: Sequence[int]) -> Masks:
    """Return masks of the input of a reshape, of shape `in_shape`, for masks `out` of its result.

    Axes are treated in the shortest runs with equally many elements: (6, 4) -> (2, 3, 4) has runs
    (6) -> (2, 3) and (4) -> (4). Within a run, the needed elements of the result need not be a
    product of masks of the input: then only the rows that share the first row's pattern are kept.
    """
    masks: list[Mask] = []
    axis = 0
    for run in _runs(in_shape, out_shape):
        count = len(run[1])
        flat = np.ones(1, bool)
        for size, mask in zip(run[1], out[axis : axis + count], strict=True):
            # the need of the run in the result, flattened: an outer product of its masks
            flat = np.multiply.outer(flat, np.ones(size, bool) if mask is None else mask).ravel()
        axis += count
        for size in run[0]:
            # a row of the table for each index of the input's axis; equal rows are needed alike
            table = flat.reshape(size, -1)
            pattern = table[table.any(1)][0] if table.any() else table[0]
            masks.append((table == pattern).all(1))
            flat = pattern
    return tuple(masks)


def _runs(
    in_shape: Sequence[int], out_shape: Sequence[int]
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield the shortest runs of axes of two shapes with equally many elements."""
    i = j = 0
    while i < len(in_shape) or j < len(out_shape):
        i_start = i
        j_start = j
        i = min(i + 1, len(in_shape))
        j = min(j + 1, len(out_shape))
        while (first_count := prod(in_shape[i_start:i])) != (
            second_count := prod(out_shape[j_start:j])
        ):
            if first_count < second_count:
                i += 1
            else:
                j += 1
        yield in_shape[i_start:i], out_shape[j_start:j]


def _ceil_div(size: int, unit: int) -> int:
    return -(-size // unit)
