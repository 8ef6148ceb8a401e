"""Moves of channels as products: joins, cuts and shuffles that are no views of an image.

An image in NC1HWC0 keeps 16 channels of a pixel together. A join or cut at whole blocks is a view,
of several images in C1NHWC0, where a block of all of them is one run. One of 58 channels, or a
shuffle of channels between groups, moves every number to another lane. The way over row-major
memory is several kernels: to (n, c, h, w), join, turn, cut, and back into blocks. The cube moves
channels as it adds them up, by weights that are 0 and 1:

    y[j] = x[p[j]]                    y = E x,  E[j, p[j]] = 1, a 1 x 1 convolution
    [x1 x2][p]                        y = E1 x1 + E2 x2: two convolutions that are added
    W (E x)                           (W E) x: weights with other columns take a move in

In E one term of each sum is not zero: finite numbers keep their bits but for the sign of zero. An
infinite one is NaN in every channel of its pixel, also where a cut has dropped it, as in every
product with zeros. Which way is quicker is timed, from images in blocks to images in blocks.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from ascend_lab.compiler import aliases, fusion, layout, lower, tasks
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import JOINS, MOVES, Constant, Graph, Node, TensorType, Values
from ascend_lab.compiler.lower.blocks import BLOCKS, IMAGES, alike
from ascend_lab.compiler.passes.rewrite import derived
from ascend_lab.errors import AscendLabError
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.ops.formats import is_float

UNARY = ("reshape", "transpose", "split", "slice")


@dataclass(slots=True)
class Family:
    """Nodes that only move channels of `sources`, and where each of their results has its own.

    `picks` are lanes of all sources, block behind block, with the lanes that pad them; they have
    the shape of the axes between images and rows.
    """

    sources: tuple[str, ...]
    counts: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list)
    picks: dict[str, Values] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)

    @property
    def lanes(self) -> list[Values]:
        """Where the channels of each source lie."""
        ends = np.cumsum([-(-count // layout.BLOCK) * layout.BLOCK for count in self.counts])
        lows = [0, *ends[:-1]]
        return [low + np.arange(n) for low, n in zip(lows, self.counts, strict=True)]

    def breaks(self, name: str) -> bool:
        """Tell whether a result is not made of whole blocks, or the last of a source."""
        picks = self.picks[name]
        ends = {own[-1] for own in self.lanes}
        blocks = [picks[i : i + layout.BLOCK] for i in range(0, len(picks), layout.BLOCK)]
        rows = all(b[0] % layout.BLOCK == 0 and (np.diff(b) == 1).all() for b in blocks)
        return not rows or (len(blocks[-1]) < layout.BLOCK and blocks[-1][-1] not in ends)


def channels_by_cube(graph: Graph, chip: Chip, *, joint: bool = True) -> Graph:
    """Return the graph in which the cube moves channels of images wherever that is quicker.

    Only where two convolutions may be `joint` in one kernel does one take a move of two sources in.
    """
    draft = Draft(graph)
    for family in filter(lambda one: _of_images(graph, one, chip), _families(graph)):
        for most in (2, 1) if joint else (1,):
            if (ways := _ways(graph, family, most)) and _pays(graph, family, ways, chip):
                _to_products(draft, family, ways)
                break
    return draft.finish()


# -- what moves channels ---------------------------------------------------------------------------
def _families(graph: Graph) -> list[Family]:
    """Return the joins and what follows them, or other sources, as far as only channels move."""
    found: dict[str, Family] = {}
    for node in graph.nodes:
        kind = graph.types[node.inputs[0]] if node.inputs else None
        if kind is None or not is_float(kind.dtype) or graph.constants.keys() & {*node.inputs}:
            continue
        joins = node.op == "concat" and len(kind.shape) == 4 and node.attr("axis", 0) % 4 == 1
        if not joins and node.op not in UNARY:
            continue
        if (own := found.get(node.inputs[0])) is None or joins:
            if len(kind.shape) != 4:
                continue
            own = Family(node.inputs, tuple(graph.types[n].shape[1] for n in node.inputs))
        before = own.picks.get(node.inputs[0], own.lanes[0])
        parts = [np.concatenate(own.lanes)] if joins else _moved(graph, node, before)
        if not parts:
            continue
        own.nodes.append(node)
        own.picks.update(zip(node.outputs, parts, strict=True))
        found.update(dict.fromkeys(node.outputs, own))
    for name, family in found.items():
        inside = {node.name for node in family.nodes}
        outside = any(reader.name not in inside for reader in graph.readers[name])
        if len(graph.types[name].shape) == 4 and (outside or name in graph.outputs):
            family.results.append(name)
    return list({id(family): family for family in found.values()}.values())


def _moved(graph: Graph, node: Node, picks: Values) -> list[Values]:
    """Return the channels of each result; nothing if a node moves more than channels."""
    given = graph.types[node.inputs[0]].shape
    out = graph.types[node.output].shape
    if len(out) < 4 or (given[0], *given[-2:]) != (out[0], *out[-2:]):
        return []
    if node.op == "reshape":
        return [picks.reshape(out[1:-2])] if picks.size == np.prod(out[1:-2]) else []
    if node.op == "transpose":
        perm = node.attr("perm")
        last = len(given) - 1
        if (perm[0], *perm[-2:]) != (0, last - 1, last):
            return []
        return [picks.transpose([axis - 1 for axis in perm[1:-2]])]
    found = aliases.cut_spans(graph, node)
    if found is None:
        return []
    axis, spans = found
    if not 0 < axis < len(given) - 2:
        return [picks]  # all of it
    return [np.take(picks, np.arange(low, high), axis - 1) for low, high in spans]


def _of_images(graph: Graph, family: Family, chip: Chip) -> bool:
    """Tell whether the cube or pooling makes all sources of a family, and reads all results."""
    fits = graph.types[family.sources[0]].dtype in chip.cube
    made = all(_near_cube(graph, name, back=True) for name in family.sources)
    read = [any(_near_cube(graph, r.output) for r in graph.readers[n]) for n in family.results]
    return fits and made and all(read)


def _near_cube(graph: Graph, name: str, back: bool = False) -> bool:
    """Tell whether an image is made by cube, pooling or a join, or else lane by lane.

    With `back` lanes and moves do not count: what is before them does.
    """
    while (node := graph.producers.get(name)) is not None:
        if node.has("convolution", "pooling") or node.op == "concat":
            return True
        if not back:
            return node.has("lanes")
        if not node.has("lanes") and node.op not in UNARY:
            return False
        name = next((n for n in node.inputs if n not in graph.constants), "")
    return False


# -- both ways -------------------------------------------------------------------------------------
Ways = dict[str, list[Node]]
"""Results that products stand for, and the convolutions that take each move in, if all can."""


def _ways(graph: Graph, family: Family, most: int) -> Ways:
    """Return what of a family is no view of its sources: whole blocks are.

    A convolution takes a move of at most so many sources in.
    """
    found = Ways()
    for name in family.results:
        readers = graph.readers[name]
        picked = [own for own in family.lanes if np.isin(family.picks[name], own).any()]
        taken = name not in graph.outputs and len(picked) <= most
        taken = taken and all(_takes_in(graph, node, name) for node in readers)
        if family.breaks(name):
            found[name] = list(readers) if taken else []
    return found


def _takes_in(graph: Graph, node: Node, name: str) -> bool:
    """Tell whether a node is a convolution of one tap whose weights can be others."""
    if node.op != "conv2d" or node.inputs[0] != name or node.attr("groups", 1) != 1:
        return False
    fixed = all(n in graph.constants for n in node.inputs[1:])
    same = graph.types[node.output].dtype == graph.types[name].dtype
    plain = set(node.attrs) <= {"groups"} and graph.types[node.inputs[1]].shape[2:] == (1, 1)
    return fixed and same and plain


def _pays(graph: Graph, family: Family, ways: Ways, chip: Chip) -> bool:
    """Tell whether the products of a family take fewer cycles than its moves, starts counted.

    A convolution that is cut in two must be one kernel: parts in memory are rounded, or too large.
    """
    kinds = {name: replace(graph.types[name], layout=IMAGES) for name in family.sources}
    taking = [node for nodes in ways.values() for node in nodes]
    ends = [name for name in family.results if not ways.get(name)]
    alone = replace(
        graph,
        inputs=tuple(dict.fromkeys(family.sources)),
        types={**graph.types, **kinds},
        nodes=(*family.nodes, *taking),
        outputs=(*ends, *(node.output for node in taking)),
    )
    draft = Draft(alone)
    _to_products(draft, family, ways)
    try:
        products = _compiled(draft.finish(), chip)
        kernels = [[node.op for node in task.piece.graph.nodes] for task in products.tasks]
        whole = all(ops.count("conv2d") > ops.count("add") for ops in kernels if "add" in ops)
        return (whole or not taking) and _cycles(products) < _cycles(_compiled(alone, chip))
    except AscendLabError:  # a chip with no room for one of them by itself
        return False


def _compiled(graph: Graph, chip: Chip) -> tasks.Compiled:
    """Return the kernels of a graph whose results stay in blocks."""
    laid_out = layout.cancel_trans_data(layout.Assigner(graph).assigned(IMAGES))
    return tasks.compile_tasks(laid_out, chip, fusion.fuse(laid_out, chip).groups)


def _cycles(compiled: tasks.Compiled) -> int:
    """Return the cycles of all kernels, one after another, operands in L2."""
    chip = compiled.chip
    pieces = [task.piece for task in compiled.tasks if task.lowered]
    return sum(tasks.cycles_started(piece, chip, "queued", warm=True) for piece in pieces)


def _to_products(draft: Draft, family: Family, ways: Ways) -> None:
    """Let products stand for results of a family, or for the convolutions that take them in."""
    for name, taking in ways.items():
        picks = family.picks[name]
        kind = draft.type(name)
        for node in taking:
            weight, *bias = node.inputs[1:]
            made = _sum(draft, family, picks, draft.constants[weight], bias, node.name)
            draft.replace(node.output, made)
        if not taking:
            unit = TensorType((kind.shape[1], kind.shape[1], 1, 1), kind.dtype)
            ones = Constant(unit, np.eye(kind.shape[1]).reshape(unit.shape))
            draft.replace(name, _sum(draft, family, picks, ones, (), f"{name}_moved"))


def _sum(
    draft: Draft, family: Family, picks: Values, weight: Constant, bias: Sequence[str], title: str
) -> str:
    """Insert weight * x[picks] as a sum of products with the sources; return its name."""
    total = ""
    for source, lanes in zip(family.sources, family.lanes, strict=True):
        mine = np.isin(picks, lanes)
        if mine.any():
            kind = replace(weight.type, shape=(weight.type.shape[0], len(lanes), 1, 1))
            wide = derived(kind, _spread(kind, mine, picks[mine] - lanes[0]), weight)
            own = draft.add(wide, f"{title}_weight")
            part = draft.insert("conv2d", (source, own, *(() if total else bias)), {}, title)
            total = draft.insert("add", (total, part), {}, f"{title}_sum") if total else part
    return total


def _spread(kind: TensorType, mine: Values, lanes: Values) -> Callable[[Values], Values]:
    """Return what puts the columns `mine` of weights at `lanes`, zeros elsewhere."""

    def wide(weight: Values) -> Values:
        made = np.zeros(kind.shape)
        made[:, lanes] = weight[:, mine]
        return made

    return wide


# -- joins of several images -----------------------------------------------------------------------
def blocks_outermost(graph: Graph, chip: Chip) -> Graph:
    """Return the graph in which joins and cuts of images are views wherever that is quicker.

    Images that are joined have their blocks of channels outermost: then a block of all images is
    one run, and a join or a cut at whole blocks is a view. One image is one run as it is. A join
    that begins as an earlier one reads that one's result. The copies that this saves are timed
    against the conversions it makes slower; convolutions read and write planes, which lie
    elsewhere, as before.
    """
    seen = set[str]()
    for node in graph.nodes:
        kind = graph.types[node.output]
        if node.output in seen or node.op not in JOINS or kind.layout != IMAGES:
            continue
        names = _lying_alike(graph, node.output)
        laid_out = _relaid(graph, names) if kind.shape[0] > 1 else graph
        moved = _nested(laid_out, names)
        seen |= names
        if aliases.view_nodes(moved) - aliases.view_nodes(graph):
            cycles = [_copying_cycles(one, names, chip) for one in (moved, graph)]
            graph = moved if cycles[0] < cycles[1] else graph
    return graph


def _lying_alike(graph: Graph, name: str) -> set[str]:
    """Return an image and those that lie as it does: operands and results of one operator."""
    found = set[str]()
    ahead = [name]
    while ahead:
        name = ahead.pop()
        if name in found or graph.types[name].layout != IMAGES:
            continue
        found.add(name)
        for node in (*filter(None, [graph.producers.get(name)]), *graph.readers[name]):
            if alike(node) and node.op not in MOVES:
                ahead += [*node.inputs, *node.outputs]
    return found


def _relaid(graph: Graph, names: Set[str]) -> Graph:
    """Return the graph in which some images have their blocks of channels outermost."""
    types = {n: replace(graph.types[n], layout=BLOCKS) for n in names}
    nodes = tuple(
        replace(node, attrs={"layout": BLOCKS})
        if node.op == "trans_data" and node.output in names
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes, types={**graph.types, **types})


def _nested(graph: Graph, names: Set[str]) -> Graph:
    """Return the graph in which a join that begins as an earlier one reads that one's result."""
    made = dict[tuple[str, ...], str]()
    nodes = list[Node]()
    for node in graph.nodes:
        given = new = node.inputs
        if node.op == "concat" and node.output in names and node.attr("axis", 0) % 4 == 1:
            counts = range(len(given) - 1, 1, -1)
            if count := next((n for n in counts if given[:n] in made), 0):
                new = made[given[:count]], *given[count:]
            made[given] = node.output
        nodes.append(replace(node, inputs=new))
    return replace(graph, nodes=tuple(nodes))


def _copying_cycles(graph: Graph, names: Set[str], chip: Chip) -> float:
    """Return the cycles of joins and cuts that are no views, and of what has to know the layout.

    Infinite if one has no kernel.
    """
    views = aliases.view_nodes(graph)
    total = 0.0
    for node in graph.nodes:
        own = not alike(node) and not node.has("convolution")
        copies = (own or node.op in (*JOINS, "trans_data")) and node.name not in views
        if copies and not names.isdisjoint((*node.inputs, *node.outputs)):
            try:
                piece = lower.piece_of(graph, (node,))
                warm = not {*node.inputs} & {*graph.inputs}
                total += tasks.cycles_started(piece, chip, "queued", warm=warm)
            except AscendLabError:
                return float("inf")
    return total
