"""Choose the images that get the layout C1NHWC0, in which concatenations and slices are views.

A "join" below is a concatenation along channels, a "cut" a slice of channels. In NC1HWC0 the
blocks of 16 channels of one image lie together, so that joining batches of images needs a copy. In
C1NHWC0 a block of all images is one run of bytes, and a join at whole blocks only places operands
one behind the other:

    otherwise      a -> GM; b -> GM; join: GM -> UB -> GM, all of a and b
    here           a -> first bytes of y; b -> the bytes behind them: no kernel for the join
    saved          in DenseNet-121 with 8 images the joins of all 58 layers

The price: where an image enters or leaves the region in this layout, it must be converted, in
smaller copies. Both variants are timed. `block_kernels` adapts the kernels of the other operators.
"""

from collections.abc import Callable, Set
from dataclasses import replace

from ascend_lab.compiler import aliases, lower, tasks
from ascend_lab.compiler.ir import BLOCKS, IMAGES, JOINS, MOVES, Graph, Node
from ascend_lab.compiler.lower.piece import Lowered, Piece
from ascend_lab.compiler.rules import LayoutRewrite
from ascend_lab.errors import AscendLabError
from ascend_lab.fused.block_kernels import in_nc1hwc0, rewritten_for_c1nhwc0, treats_blocks_alike
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.timeline import Start


def blocks_outermost(graph: Graph, chip: Chip, start: Start = "queued") -> Graph:
    """Return the graph in which joins and cuts of images are views wherever that is quicker.

    With one image NC1HWC0 and C1NHWC0 are the same, and only `_nested` joins are tried. Only copies
    and conversions are timed: convolutions work plane by plane (a plane is one block of an image),
    and other addresses of planes cost them nothing.
    """
    best = graph
    decided = set[str]()
    for node in graph.nodes:
        tensor_type = best.types[node.output]
        # images that must share a layout are decided together, at their first join
        if node.output in decided or node.op not in JOINS or tensor_type.layout != IMAGES:
            continue
        names = _images_of_one_layout(best, node.output)
        decided |= names
        in_blocks = _with_blocks_outermost(best, names) if tensor_type.shape[0] > 1 else best
        nested = _nested(in_blocks, names)
        # nothing gained unless a copy becomes a view
        if aliases.view_nodes(nested) - aliases.view_nodes(best):
            # only the cycles that depend on the layout differ
            old_cycles = _copying_cycles(best, names, chip)
            best = nested if _copying_cycles(nested, names, chip) < old_cycles else best
    return best


def _images_of_one_layout(graph: Graph, name: str) -> set[str]:
    """Return the images that must share the layout of this one.

    Operators that treat all blocks alike (joins, relu, pooling) need one layout for what they read
    and write; convolutions do not, so the search ends there.
    """
    images = set[str]()
    stack = [name]
    while stack:
        image = stack.pop()
        if image in images or graph.types[image].layout != IMAGES:
            continue
        images.add(image)
        producer = graph.producers.get(image)
        neighbours = [producer] if producer is not None else []
        for node in (*neighbours, *graph.readers[image]):
            if treats_blocks_alike(node) and node.op not in MOVES:
                stack += [*node.inputs, *node.outputs]
    return images


def _with_blocks_outermost(graph: Graph, names: Set[str]) -> Graph:
    """Return the graph with these images in C1NHWC0; conversions to them get the new target."""
    types = {n: replace(graph.types[n], layout=BLOCKS) for n in names}
    nodes = tuple(
        replace(node, attrs={"layout": BLOCKS})
        if node.op == "trans_data" and node.output in names
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes, types={**graph.types, **types})


def _nested(graph: Graph, names: Set[str]) -> Graph:
    """Return the graph in which a join reads an earlier join of its first operands.

    concat(a, b, c) behind y = concat(a, b) becomes concat(y, c): as views, y are the first bytes of
    the result. A DenseNet joins all earlier layers anew in every layer.
    """
    joins = dict[tuple[str, ...], str]()
    nodes = list[Node]()
    for node in graph.nodes:
        operands = node.inputs
        if node.op != "concat" or node.output not in names or node.attr("axis", 0) % 4 != 1:
            nodes.append(node)
            continue
        # the longest list of first operands that an earlier join has
        counts = range(len(operands) - 1, 1, -1)
        count = next((n for n in counts if operands[:n] in joins), 0)
        joins_earlier = (joins[operands[:count]],) if count else ()
        nodes.append(replace(node, inputs=(*joins_earlier, *operands[count:])))
        joins[operands] = node.output
    return replace(graph, nodes=tuple(nodes))


def _copying_cycles(graph: Graph, images: Set[str], chip: Chip) -> float:
    """Return the cycles of the nodes whose time depends on the layout of these images.

    These are joins and cuts that copy, conversions, and operators that mix blocks, except for
    convolutions. The result is infinite if one of them has no kernel.
    """
    views = aliases.view_nodes(graph)
    total = 0.0
    for node in graph.nodes:
        bound_to_layout = not treats_blocks_alike(node) and not node.has("convolution")
        copies = (bound_to_layout or node.op in (*JOINS, "trans_data")) and node.name not in views
        if copies and not images.isdisjoint((*node.inputs, *node.outputs)):
            try:
                piece = lower.piece_of(graph, (node,))
                # the result of an earlier operator lies in L2, the network's inputs in memory
                warm = not {*node.inputs} & {*graph.inputs}
                total += tasks.cycles_started(piece, chip, "queued", warm=warm)
            except AscendLabError:
                return float("inf")
    return total


def kernel_among_blocks(
    piece: Piece, chip: Chip, lower_other: Callable[[Piece], Lowered]
) -> Lowered | None:
    """Return the kernel of a piece that reads or writes C1NHWC0 images; None if it does not."""
    plain = in_nc1hwc0(piece)
    return rewritten_for_c1nhwc0(piece, plain, lower_other(plain), chip) if plain else None


PIECE_KERNELS = [kernel_among_blocks]
LAYOUT_REWRITES = [LayoutRewrite("BlocksOutermost", blocks_outermost)]
