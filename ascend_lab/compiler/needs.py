"""Which elements of its tensors a graph needs, whatever computes them: from the outputs backward.

A need is a mask per axis, None where every index is needed: at least all elements whose indices are
all in the masks. Of a need that has no such form a part is kept, and an operator without a rule
here asks for nothing: needs are never too large. A need of everything is () at its shortest.
Beside needs, how many numbers of a tensor may differ: what is repeated is computed once.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import ceil, prod

import numpy as np
from numpy.typing import NDArray

from ascend_lab.compiler.ir import Fill, Graph, Node
from ascend_lab.operators.ops import formats, slicing

Mask = NDArray[np.bool_] | None
Masks = tuple[Mask, ...]
PRODUCTS = ("matmul", "batch_matmul", "gemm", "attention_scores", "attention_context")
ATTENTION = ("attention", "flash_attention")
BY_ROW = ("softmax", "log_softmax", "masked_softmax", "layer_norm", "rms_norm")
"""Operators that compute a result from its row along one axis."""
NUMBER = 1
CHANNELS = 2
ROW = 3
WHOLE = (
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
"""Operators that need every element of what they read, though no trait of theirs says so."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows along an axis: how many hold a number of elements, what none leaves out."""

    counts: Counter[int]
    all_read: bool
    all_taps: bool
    least: float
    """Share of the taps that every element meets."""


@lru_cache(1024)
def along(
    size: int, kernel: int, stride: int, pads: slicing.Range, dilation: int, out: int, spread: bool
) -> Windows:
    """Return the `out` windows along an axis of `size` elements; padding holds none.

    `spread`: those of a transposed convolution, where the stride moves between elements read.
    """
    counts = Counter[int]()
    read = Counter[int]()
    taps = set[int]()
    for at in range(out):
        if spread:
            steps = ((at + pads[0] - t * dilation, t) for t in range(kernel))
            held = [(low // stride, t) for low, t in steps if low % stride == 0]
        else:
            held = [(at * stride - pads[0] + t * dilation, t) for t in range(kernel)]
        held = [(i, t) for i, t in held if 0 <= i < size]
        counts[len(held)] += 1
        read.update(i for i, _ in held)
        taps.update(t for _, t in held)
    least = min(read[i] for i in range(size)) / kernel
    return Windows(counts, len(read) == size, len(taps) == kernel, least)


def slides(node: Node) -> bool:
    """Tell whether a node is a convolution, a transposed one, or a pooling."""
    return node.op == "conv_transpose2d" or node.has("convolution", "pooling")


def _windows(graph: Graph, node: Node) -> tuple[Windows, Windows]:
    size = graph.types[node.inputs[0]].shape[2:]
    out = graph.types[node.output].shape[2:]
    shape = () if node.has("pooling") else graph.types[node.inputs[1]].shape[2:]
    kernel = shape or formats.pair("kernel", node.attr("kernel"))
    stride = formats.pair("stride", node.attr("stride") or (1 if shape else kernel))
    pads = formats.pad_pairs("window", node.attr("pad", 0))
    spread = node.op == "conv_transpose2d"
    dilation = formats.pair("dilation", node.attr("dilation", 1))
    rows, columns = (
        along(size[i], kernel[i], stride[i], pads[i], dilation[i], out[i], spread) for i in range(2)
    )
    return rows, columns


def moves(node: Node) -> bool:
    """Tell whether a node computes nothing: some day it may be a view."""
    return node.op in ("trans_data", "pad", "embedding") or node.has("moves")


class Needs:
    """What of each tensor is needed, as masks by name, and what some kernel has to read whole.

    `varies` names what depends on an input, `distinct` counts a tensor's numbers that may differ.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.windows = {node.name: _windows(graph, node) for node in graph.nodes if slides(node)}
        """Along rows and columns of every convolution and pooling."""
        self.masks: dict[str, Masks] = dict.fromkeys(graph.outputs, ())
        self.read: set[str] = set()
        for node in reversed(graph.nodes):
            works = self.read.issuperset(node.outputs) or not moves(node)
            for name, masks in self._asked(node):
                self._add(name, masks)
                if works and self.is_whole(name):
                    self.read.add(name)
        self.varies, self.distinct = set(graph.inputs), dict[str, int]()
        for node in graph.nodes:
            if not self.varies.isdisjoint(node.inputs):
                self.varies.update(node.outputs)
            for name in node.outputs:
                self.distinct[name] = self._different(node, graph.types[name].elements)

    def is_whole(self, name: str) -> bool:
        """Tell whether every element of a tensor is needed."""
        return name in self.masks and not any(m is not None for m in self.masks[name])

    def share(self, name: str) -> float:
        """Return the share of a tensor's elements that is needed, at least."""
        if name not in self.masks:
            return 0.0
        return prod(float(m.mean()) for m in self.masks[name] if m is not None)

    def _add(self, name: str, masks: Masks) -> None:
        masks = tuple(None if m is None or m.all() else m for m in masks)
        before = self.masks.get(name)
        self.masks[name] = masks if any(m is not None for m in masks) else ()
        if before is not None and self.share(name) < prod(
            float(m.mean()) for m in before if m is not None
        ):
            self.masks[name] = before

    def _asked(self, node: Node) -> Iterable[tuple[str, Masks]]:
        """Yield the inputs of a node with what it needs of them."""
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
        return self._part(node, out or (None,) * rank)

    def whole(self, node: Node) -> Iterable[str]:
        """Return the inputs whose every element a node needs, to give all its results."""
        if node.name in self.windows:
            windows = self.windows[node.name]
            kept = (all(w.all_read for w in windows), all(w.all_taps for w in windows), True)
            return [name for name, is_whole in zip(node.inputs, kept, strict=False) if is_whole]
        if node.op in ("gather", "embedding", "pad"):
            return node.inputs[1:]
        traits = ("pointwise", "broadcasts", "reduction", "moves", "lanes", "image fold")
        return node.inputs if node.has(*traits) or node.op in WHOLE else ()

    def _part(self, node: Node, out: Masks) -> Iterator[tuple[str, Masks]]:
        """Yield what a node needs for a part of its result."""
        shapes = [self.graph.types[name].shape for name in node.inputs]
        if node.op in PRODUCTS or node.op in ATTENTION:
            for name, shape, masks in zip(node.inputs, shapes, _factors(node, out), strict=False):
                yield name, _fit(masks, shape)
        elif node.op in BY_ROW:
            axis = node.attr("axis", -1) % len(out)
            yield node.inputs[0], (*out[:axis], None, *out[axis + 1 :])
        elif node.op == "trans_data" or node.has("pointwise", "broadcasts"):
            yield from ((n, _fit(out, shape)) for n, shape in zip(node.inputs, shapes, strict=True))
        elif node.op == "transpose":
            order = node.attr("perm") or tuple(reversed(range(len(out))))
            back = {axis % len(out): at for at, axis in enumerate(order)}
            yield node.inputs[0], tuple(out[back[axis]] for axis in range(len(out)))
        elif node.op == "reshape":
            yield node.inputs[0], _reshaped(out, self.graph.types[node.output].shape, shapes[0])
        elif node.op == "slice":
            steps = node.attr("step") or (1,) * len(out)
            bounds = zip(node.attr("begin"), node.attr("end"), steps, strict=True)
            read = [np.zeros(size, bool) for size in shapes[0]]
            for mask, bound, inner in zip(read, bounds, out, strict=True):
                mask[slice(*bound)] = True if inner is None else inner
            yield node.inputs[0], tuple(read)

    def _split(self, node: Node) -> Iterator[tuple[str, Masks]]:
        """Yield what the pieces need that are whole but for the axis of the cut."""
        shape = self.graph.types[node.inputs[0]].shape
        axis = node.attr("axis", 0) % len(shape)
        sizes = [self.graph.types[name].shape[axis] for name in node.outputs]
        mask = np.zeros(shape[axis], bool)
        for name, (low, high) in zip(
            node.outputs, pairwise(accumulate(sizes, initial=0)), strict=True
        ):
            mask[low:high] = self.is_whole(name)
        if mask.any():
            yield node.inputs[0], tuple(mask if i == axis else None for i in range(len(shape)))

    def _different(self, node: Node, size: int) -> int:
        """Return how many results of a node may differ: what is repeated is computed once."""
        known = [self.distinct.get(n, self.graph.types[n].elements) for n in node.inputs]
        sizes = [self.graph.types[n].elements for n in node.inputs]
        if node.op in ("gather", "embedding", "one_hot"):  # which rows, a compiler cannot know
            return size if not self.varies.isdisjoint(node.inputs[-1:]) else 0
        if node.op == "concat":
            return sum(dict(zip(node.inputs, known, strict=True)).values())
        if node.has("pointwise", "broadcasts") or node.op in ("select", "expand", "pad"):
            return min(size, max(known, default=0))
        if node.has("moves") or node.op == "trans_data":
            return max(0, size - (sizes[0] - known[0]))
        shares = [k / n for k, n in zip(known, sizes, strict=True)]
        if node.op in PRODUCTS or node.op in ATTENTION or node.op in BY_ROW:
            return int(size * prod(shares))
        return size if min(shares, default=1.0) == 1.0 else 0

    def count(self, name: str) -> int:
        """Return how many different results a tensor has that are needed, at least."""
        size = self.graph.types[name].elements
        needed = ceil(self.share(name) * size - 1e-6)
        return max(0, needed + self.distinct.get(name, size) - size)

    # -- products -------------------------------------------------------------------------------
    def sums(self, node: Node, depth: int) -> float:
        """Return the sums of a node's products, each as often as steps of `depth` products fill it.

        0 for what the vector unit may do as well, and for attention under a mask, which may be left
        out. Of causal attention the keys that a query sees count.
        """
        out = self.graph.types[node.output]
        if node.op in PRODUCTS:
            first = self.graph.types[node.inputs[0]].shape
            return out.elements * _up(first[-2 if node.attr("trans_a", False) else -1], depth)
        if node.op in ATTENTION and len(node.inputs) == 3:
            (*many, s, d), (*_, t, _), (*_, e) = (self.graph.types[n].shape for n in node.inputs)
            seen = range(t - s + 1, t + 1) if node.attr("causal", False) else (t,) * s
            return prod(many) * sum(keys * _up(d, depth) + e * _up(keys, depth) for keys in seen)
        if node.op not in ("conv2d", "conv_transpose2d"):
            return 0
        groups = node.attr("groups", 1)
        weight = self.graph.types[node.inputs[1]].shape
        channels = weight[1] if node.op == "conv2d" else weight[0] // groups
        if channels < 16 and groups > 1:
            return 0
        rows, columns = self.windows[node.name]
        steps = sum(
            many * each * _up(channels * high * wide, depth)
            for high, many in rows.counts.items()
            for wide, each in columns.counts.items()
        )
        return out.shape[0] * out.shape[1] * steps

    def meets(self, node: Node) -> bool:
        """Tell whether each result of a product needs every number of what it multiplies."""
        if node.op in ATTENTION or node.inputs[0] not in self.varies:
            return False
        numbers = self.graph.types[node.inputs[0]].elements
        return self.sums(node, 1) == self.graph.types[node.output].elements * numbers

    def tapped(self, nodes: Sequence[Node], count: int) -> list[tuple[int, int]]:
        """Return `count` results of the fewest products, as (products, results)."""
        if len(nodes) > 1:
            return [(1, count)]
        (node,) = nodes
        (rows, columns) = self.windows[node.name]
        found = Counter[int]()
        planes = prod(self.graph.types[node.output].shape[:2])
        for high, many in rows.counts.items():
            for wide, each in columns.counts.items():
                found[high * wide] += planes * many * each
        kept = []
        for taps, size in sorted(found.items()):
            kept.append((taps, min(size, count)))
            count -= kept[-1][1]
        return [(taps, size) for taps, size in kept if size]

    def weights(self, nodes: Sequence[Node]) -> set[str]:
        """Return the constants that products need to the last number."""
        found: set[str] = set()
        for node in nodes:
            source = self.graph.producers.get(node.inputs[0])
            padded = source is not None and source.op == "pad"
            if (
                node.name in self.windows and not node.has("pooling") and not padded
            ) or node.op in PRODUCTS:
                found.update(n for n in node.inputs[:2] if self.is_whole(n))
        constants = self.graph.constants
        return {n for n in found if n in constants and not isinstance(constants[n].data, Fill)}

    # -- order ----------------------------------------------------------------------------------
    def later(self, weights: Collection[str]) -> dict[str, float]:
        """Return tensors that all passes through, with the bytes of `weights` used after each.

        Whichever number of it comes last, these multiply what depends on that one: see `_spread`.
        """
        parts = list[tuple[str, float, int, int]]()
        size = 0.0
        passed = self._passed()
        one = dict[str, int]()
        row = dict[str, int]()
        last = {name: node for node in self.graph.nodes for name in node.inputs}
        for node in self.graph.nodes:
            name = node.output
            weight = "".join(node.inputs[1:2])
            enough = row.get(node.inputs[0]) == (CHANNELS if node.name in self.windows else ROW)
            if enough and weight in weights and last[weight] is node:
                kind = self.graph.types[weight]
                size += kind.data_bytes * self._hit(node)
            one[name], row[name] = self._spread(node, one), self._spread(node, row)
            if name in passed:
                parts.append((name, size, one[name], row[name]))
                wide = CHANNELS if len(self.graph.types[name].shape) == 4 else ROW
                one = {name: NUMBER}
                row = {name: wide}
                size = 0.0
        after = (0.0, 0.0, size, size)
        found = dict[str, float]()
        for name, size, from_one, from_row in reversed(parts):
            found[name] = after[NUMBER]
            of_row = size + after[from_row]
            after = (0.0, after[from_one], of_row, of_row)
        return found

    def _passed(self) -> set[str]:
        """Return the tensors wholly needed beside which no other is read later."""
        last = {name: at for at, node in enumerate(self.graph.nodes) for name in node.inputs}
        last |= dict.fromkeys(self.graph.outputs, len(self.graph.nodes))
        found = set[str]()
        live = set(self.graph.inputs)
        for at, node in enumerate(self.graph.nodes):
            live.update(self.varies.intersection(node.outputs))
            live = {name for name in live if last.get(name, -1) > at}
            if live == {node.output} and self.is_whole(node.output):
                found.add(node.output)
        return found

    def _spread(self, node: Node, given: Mapping[str, int]) -> int:
        """Return how much of a node's result depends on what is given at the least.

        0, a `NUMBER`, all `CHANNELS` of a pixel, or a `ROW`, along the last axis; of it a number,
        if nothing else is known, wherever it stands.
        """
        if len(node.outputs) > 1 or not self.is_whole(node.output):
            return 0
        from_ = max((given.get(name, 0) for name in self.whole(node)), default=0)
        if not from_:
            return 0
        if node.name in self.windows and not node.has("pooling") and node.attr("groups", 1) == 1:
            return CHANNELS
        if node.op in PRODUCTS and given.get(node.inputs[0]) and not node.attr("trans_a", False):
            return ROW
        if node.op == "reshape" and from_ > NUMBER:  # of a single pixel, or row
            one, two = (self.graph.types[name].shape for name in (node.inputs[0], node.output))
            alone = [n for n in one if n > 1] == [n for n in two if n > 1]
            if alone and {len(one), len(two)} == {2, 4} and max(map(prod, (one[2:], two[2:]))) < 2:
                return CHANNELS if len(two) == 4 else ROW
        keeps = (
            node.has("pointwise", "broadcasts", "pooling", "image fold")
            or node.name in self.windows
        )
        return from_ if keeps else NUMBER

    def _hit(self, node: Node) -> float:
        """Return the share of its weights that each row of what a node reads multiplies."""
        many = prod(self.graph.types[node.inputs[1]].shape[:-2])
        return (
            prod(w.least for w in self.windows[node.name])
            if node.name in self.windows
            else 1 / many
        )


def _factors(node: Node, out: Masks) -> tuple[Masks, ...]:
    """Return what of its factors a product of matrices needs."""
    *many, rows, columns = out
    if node.op in ATTENTION:
        return (*many, rows, None), (*many, None, None), (*many, None, columns)
    one: Masks = (rows, None)
    two: Masks = (None, columns)
    if node.attr("trans_a", False):
        one = (None, rows)
    if node.attr("trans_b", False) or node.op == "attention_scores":
        two = (columns, None)
    return (*many, *one), (*many, *two)


def _fit(masks: Masks, shape: Sequence[int]) -> Masks:
    """Return the masks of the last axes, where those are not stretched ones of size 1."""
    ends = zip(masks[len(masks) - len(shape) :], shape, strict=True)
    return tuple(m if m is not None and len(m) == size else None for m, size in ends)


def _reshaped(out: Masks, shape: Sequence[int], given: Sequence[int]) -> Masks:
    """Return a part of what a reshape to `shape` needs: masks of runs of axes that stay together.

    Of elements picked freely from an axis that was several, those with one pattern are kept.
    """
    found: list[Mask] = []
    at = 0
    for run in _runs(given, shape):
        count = len(run[1])
        flat = np.ones(1, bool)
        for size, mask in zip(run[1], out[at : at + count], strict=True):
            flat = np.multiply.outer(flat, np.ones(size, bool) if mask is None else mask).ravel()
        at += count
        for size in run[0]:
            table = flat.reshape(size, -1)
            some = table[table.any(1)][0] if table.any() else table[0]
            found.append((table == some).all(1))
            flat = some
    return tuple(found)


def _runs(one: Sequence[int], two: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yield the shortest runs of axes of two shapes that have as many elements."""
    i = j = 0
    while i < len(one) or j < len(two):
        first = i
        second = j
        i = min(i + 1, len(one))
        j = min(j + 1, len(two))
        while (left := prod(one[first:i])) != (right := prod(two[second:j])):
            if left < right:
                i += 1
            else:
                j += 1
        yield one[first:i], two[second:j]


def _up(size: int, unit: int) -> int:
    return -(-size // unit)
