"""Concatenations, slices and shuffles of channels that need copies, done as products on the cube.

An image in NC1HWC0 keeps 16 channels of a pixel together. A concatenation ("join") of two times 58
channels, or a shuffle of channels between groups (ShuffleNet), moves numbers to other lanes:

    unfused        blocks -> (n, c, h, w); join; transpose; slice; -> blocks    up to five copies
    fused          blocks -> 1 x 1 convolution with weights 0 and 1 -> blocks   one kernel, or none
    saved          the copies; if a 1 x 1 convolution follows, the move goes into its weights

    y[j] = x[p[j]]                    y = E x,  E[j, p[j]] = 1, a 1 x 1 convolution
    [x1 x2][p]                        y = E1 x1 + E2 x2: two convolutions that are added
    W (E x)                           (W E) x: the next convolution takes the move into its weights

Only one term of each sum of E x is not zero, so that finite numbers keep their bits, except for the
sign of zero. An infinity makes every channel of its pixel NaN, even an infinity in a channel that a
slice drops, as 0 * infinity is NaN. Both ways are timed, from NC1HWC0 to NC1HWC0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ascend_lab.compiler import aliases, fusion, layout, tasks
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.ir import IMAGES, Constant, Graph, Node, TensorType, Values
from ascend_lab.compiler.passes.rewrite import derived
from ascend_lab.errors import AscendLabError
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.ops.formats import is_float

UNARY = ("reshape", "transpose", "split", "slice")


@dataclass(slots=True)
class Family:
    """Nodes that only move channels of the images `sources`.

    counts     channels of each source
    picks      for each tensor, the source lane that each channel comes from, as an array shaped
               like the axes between batch and rows. Lanes are numbered across all sources,
               with their padding: sources of 20 and 16 channels have lanes 0 .. 31 and 32 .. 47
    results    images that are read outside the family
    """

    sources: tuple[str, ...]
    counts: tuple[int, ...]
    nodes: list[Node] = field(default_factory=list)
    picks: dict[str, Values] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)

    @property
    def lanes(self) -> list[Values]:
        """The lanes of each source's channels."""
        ends = np.cumsum([-(-count // layout.BLOCK) * layout.BLOCK for count in self.counts])
        lows = [0, *ends[:-1]]
        return [low + np.arange(n) for low, n in zip(lows, self.counts, strict=True)]

    def breaks(self, name: str) -> bool:
        """Tell whether a result is not a view, as it does not consist of whole blocks of a source.

        A source's last block may be partial: channels 16 .. 57 of 58 are a view (three blocks, the
        last one of 10 channels); channels 29 .. 57 are not.
        """
        picks = self.picks[name]
        ends = {lanes[-1] for lanes in self.lanes}
        blocks = [picks[i : i + layout.BLOCK] for i in range(0, len(picks), layout.BLOCK)]
        # each block starts at a block of the source and is in order
        whole_blocks = all(b[0] % layout.BLOCK == 0 and (np.diff(b) == 1).all() for b in blocks)
        return not whole_blocks or (len(blocks[-1]) < layout.BLOCK and blocks[-1][-1] not in ends)


def channels_by_cube(graph: Graph, chip: Chip, joint: bool = True) -> Graph:
    """Return the graph in which the cube moves channels of images wherever that is quicker.

    `joint` says that two added convolutions may become one kernel: then a move of two sources may
    go into a convolution's weights, else a move of one source only.
    """
    draft = Draft(graph)
    families = [family for family in _families(graph) if _of_images(graph, family, chip)]
    for family in families:
        # A convolution with two sources is two convolutions that are added: that needs `joint`.
        for max_sources in (2, 1) if joint else (1,):
            replaced = _ways(graph, family, max_sources)
            if replaced and _pays(graph, family, replaced, chip):
                _to_products(draft, family, replaced)
                break
    return draft.finish()


# -- what moves channels ---------------------------------------------------------------------------
def _families(graph: Graph) -> list[Family]:
    """Return all families: a join or a single image, and the nodes behind it that move channels."""
    family_of: dict[str, Family] = {}
    for node in graph.nodes:
        kind = graph.types[node.inputs[0]] if node.inputs else None
        if kind is None or not is_float(kind.dtype) or graph.constants.keys() & {*node.inputs}:
            continue
        joins = node.op == "concat" and len(kind.shape) == 4 and node.attr("axis", 0) % 4 == 1
        if not joins and node.op not in UNARY:
            continue
        earlier_family = None if joins else family_of.get(node.inputs[0])
        if earlier_family is None and len(kind.shape) != 4:
            continue
        family = earlier_family or _new_family(graph, node)
        # a source that no node has moved yet: its channels in their order
        picks = family.picks.get(node.inputs[0], family.lanes[0])
        result_picks = [np.concatenate(family.lanes)] if joins else _moved(graph, node, picks)
        if not result_picks:
            continue
        family.nodes.append(node)
        family.picks.update(zip(node.outputs, result_picks, strict=True))
        family_of.update(dict.fromkeys(node.outputs, family))
    families: list[Family] = []
    for name, family in family_of.items():
        names_inside = {node.name for node in family.nodes}
        read_outside = any(reader.name not in names_inside for reader in graph.readers[name])
        if len(graph.types[name].shape) == 4 and (read_outside or name in graph.outputs):
            family.results.append(name)
        if not any(family is other for other in families):
            families.append(family)
    return families


def _new_family(graph: Graph, node: Node) -> Family:
    """Return a family whose sources are the inputs of its first node."""
    return Family(node.inputs, tuple(graph.types[name].shape[1] for name in node.inputs))


def _moved(graph: Graph, node: Node, picks: Values) -> list[Values]:
    """Return the picks of each result; [] if a node moves more than channels.

    A shuffle of 6 channels in 2 groups: reshape gives [[0 1 2] [3 4 5]], transpose
    [[0 3] [1 4] [2 5]], reshape [0 3 1 4 2 5].
    """
    shape = graph.types[node.inputs[0]].shape
    out = graph.types[node.output].shape
    if len(out) < 4 or (shape[0], *shape[-2:]) != (out[0], *out[-2:]):
        return []
    if node.op == "reshape":
        return [picks.reshape(out[1:-2])] if picks.size == np.prod(out[1:-2]) else []
    if node.op == "transpose":
        perm = node.attr("perm")
        width_axis = len(shape) - 1
        # batch, rows and columns stay where they are
        if (perm[0], *perm[-2:]) != (0, width_axis - 1, width_axis):
            return []
        return [picks.transpose([axis - 1 for axis in perm[1:-2]])]
    cut = aliases.cut_spans(graph, node)
    if cut is None:
        return []
    axis, spans = cut
    if not 0 < axis < len(shape) - 2:
        return [picks]  # a cut of rows or images that keeps all of them
    return [np.take(picks, np.arange(low, high), axis - 1) for low, high in spans]


def _of_images(graph: Graph, family: Family, chip: Chip) -> bool:
    """Tell whether convolutions or pooling write all sources of a family and read all results."""
    # the products that replace the moves run on the cube
    fits = graph.types[family.sources[0]].dtype in chip.cube
    made_near_cube = all(_near_cube(graph, name, back=True) for name in family.sources)

    def read_near_cube(name: str) -> bool:
        return any(_near_cube(graph, reader.output) for reader in graph.readers[name])

    return fits and made_near_cube and all(map(read_near_cube, family.results))


def _near_cube(graph: Graph, name: str, back: bool = False) -> bool:
    """Tell whether a convolution, pooling, join or elementwise node writes an image.

    With `back` elementwise nodes and moves are skipped: the node in front of them counts.
    """
    node = graph.producers.get(name)
    while node is not None:
        if node.has("convolution", "pooling") or node.op == "concat":
            return True
        if not back:
            return node.has("lanes")
        if not node.has("lanes") and node.op not in UNARY:
            return False
        operand = next((n for n in node.inputs if n not in graph.constants), "")
        node = graph.producers.get(operand)
    return False


# -- moves or products -----------------------------------------------------------------------------
Ways = dict[str, list[Node]]
"""Results to be replaced by products, each with the convolutions that take the move in.

The list is empty if not all readers can take it in: then a convolution of its own moves channels.
"""


def _ways(graph: Graph, family: Family, max_sources: int) -> Ways:
    """Return the results of a family that are not views, each with convolutions that read it.

    These are the convolutions into whose weights the move can go, from at most `max_sources`
    sources.
    """
    replaced = Ways()
    for name in family.results:
        readers = graph.readers[name]
        read_sources = [
            source_lanes
            for source_lanes in family.lanes
            if np.isin(family.picks[name], source_lanes).any()
        ]
        few_sources = name not in graph.outputs and len(read_sources) <= max_sources
        all_take_it_in = few_sources and all(_takes_in(graph, node, name) for node in readers)
        if family.breaks(name):
            replaced[name] = list(readers) if all_take_it_in else []
    return replaced


def _takes_in(graph: Graph, node: Node, name: str) -> bool:
    """Tell whether a node is a 1 x 1 convolution with constant weights that reads `name`."""
    # W (E x) = (W E) x needs a plain 1 x 1 convolution: one matrix product per pixel
    if node.op != "conv2d" or node.inputs[0] != name or node.attr("groups", 1) != 1:
        return False
    constant_weights = all(n in graph.constants for n in node.inputs[1:])
    same_dtype = graph.types[node.output].dtype == graph.types[name].dtype
    plain = set(node.attrs) <= {"groups"} and graph.types[node.inputs[1]].shape[2:] == (1, 1)
    return constant_weights and same_dtype and plain


def _pays(graph: Graph, family: Family, ways: Ways, chip: Chip) -> bool:
    """Tell whether the products of a family take fewer cycles than its moves, with kernel starts.

    A convolution that becomes a sum of two must still be one kernel: between two kernels the first
    sum would be rounded in memory.
    """
    # the family is compiled alone, from blocks to blocks, as it lies in the network
    kinds = {name: replace(graph.types[name], layout=IMAGES) for name in family.sources}
    taking = [node for nodes in ways.values() for node in nodes]
    moved_results = [name for name in family.results if not ways.get(name)]
    family_graph = replace(
        graph,
        inputs=tuple(dict.fromkeys(family.sources)),
        types={**graph.types, **kinds},
        nodes=(*family.nodes, *taking),
        outputs=(*moved_results, *(node.output for node in taking)),
    )
    draft = Draft(family_graph)
    _to_products(draft, family, ways)
    try:
        # both variants of the family alone, as small graphs
        products = _compiled(draft.finish(), chip)
        one_kernel_each = all(_adds_its_own_sums(task.piece.graph) for task in products.tasks)
        if taking and not one_kernel_each:
            return False
        return _cycles(products) < _cycles(_compiled(family_graph, chip))
    except AscendLabError:  # a chip with no room for one of them by itself
        return False


def _adds_its_own_sums(graph: Graph) -> bool:
    """Tell whether every sum of a kernel's graph is one of its own convolutions' results."""
    ops = [node.op for node in graph.nodes]
    return "add" not in ops or ops.count("conv2d") > ops.count("add")


def _compiled(graph: Graph, chip: Chip) -> tasks.Compiled:
    """Return the kernels of a graph whose outputs stay in blocks."""
    laid_out = layout.cancel_trans_data(layout.Assigner(graph).assign(IMAGES))
    return tasks.compile_tasks(laid_out, chip, fusion.fuse(laid_out, chip).groups)


def _cycles(compiled: tasks.Compiled) -> int:
    """Return the cycles of all kernels, one after another, with their operands in L2."""
    chip = compiled.chip
    pieces = [task.piece for task in compiled.tasks if task.lowered]
    return sum(tasks.cycles_started(piece, chip, "queued", warm=True) for piece in pieces)


def _to_products(draft: Draft, family: Family, ways: Ways) -> None:
    """Replace results of a family, or the convolutions that take them in, by products."""
    for name, taking in ways.items():
        picks = family.picks[name]
        kind = draft.type(name)
        for node in taking:
            weight, *bias = node.inputs[1:]
            total = _sum(draft, family, picks, draft.constants[weight], bias, node.name)
            draft.replace(node.output, total)
        if not taking:
            # E is the identity until `_sum` spreads its columns over the sources
            unit = TensorType((kind.shape[1], kind.shape[1], 1, 1), kind.dtype)
            ones = Constant(unit, np.eye(kind.shape[1]).reshape(unit.shape))
            draft.replace(name, _sum(draft, family, picks, ones, (), f"{name}_moved"))


def _sum(
    draft: Draft, family: Family, picks: Values, weight: Constant, bias: Sequence[str], title: str
) -> str:
    """Insert weight * x[picks] as a sum of one convolution per source; return the sum's name."""
    total = ""
    # E = [E1 E2]: the columns of each source
    for source, lanes in zip(family.sources, family.lanes, strict=True):
        # the output channels whose lanes are in this source
        from_source = np.isin(picks, lanes)
        if from_source.any():
            kind = replace(weight.type, shape=(weight.type.shape[0], len(lanes), 1, 1))
            spread = _spread(kind, from_source, picks[from_source] - lanes[0])
            source_weight = draft.add(derived(kind, spread, weight), f"{title}_weight")
            # the first convolution adds the bias, the others add to its sum
            term = draft.insert(
                "conv2d", (source, source_weight, *(() if total else bias)), {}, title
            )
            total = draft.insert("add", (total, term), {}, f"{title}_sum") if total else term
    return total


def _spread(kind: TensorType, columns_read: Values, lanes: Values) -> Callable[[Values], Values]:
    """Return the function that puts some columns of weights at `lanes`, zeros elsewhere.

    This is W E without a product: column `columns_read[i]` of W becomes column `lanes[i]`.
    """

    def wide(weight: Values) -> Values:
        columns = np.zeros(kind.shape)
        columns[:, lanes] = weight[:, columns_read]
        return columns

    return wide


OPERATOR_REWRITES = [channels_by_cube]
