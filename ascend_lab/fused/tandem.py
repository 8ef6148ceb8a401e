"""A pointwise convolution and the depthwise one that reads it, in one kernel.

What lies between the two stays in L1. The means of channels that squeeze and excite asks for may be
added up beside them. Kernels are `tandem_kernel`, their divisions `tandem_schedules`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from ascend_lab.compiler.fusion import elementwise_chain
from ascend_lab.compiler.ir import Graph, Node, only_reader
from ascend_lab.compiler.lower.conv import added_convolutions, conv_job, near_cycles, packed_weights
from ascend_lab.compiler.lower.piece import Form, Lowered, Piece, refuse_packed_twice
from ascend_lab.compiler.rules import Fusion, Group, Rule
from ascend_lab.errors import UnsupportedError
from ascend_lab.fused import means
from ascend_lab.fused.tandem_schedules import TIMED, tandem_launches
from ascend_lab.fused.tandem_shape import Tandem
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Kernel, as_kernel, renamed


def propose(graph: Graph, node: Node) -> Group | None:
    """Propose a 1x1 convolution, the depthwise one that reads it, what follows each, and means."""
    if not node.has("convolution") or graph.types[node.inputs[1]].shape[2:] != (1, 1):
        return None
    pointwise = [node, *elementwise_chain(graph, node)]
    reader = only_reader(graph, pointwise[-1])
    if reader is None or not reader.has("convolution"):
        return None
    if reader.inputs[0] != pointwise[-1].output:
        return None
    channels = graph.types[pointwise[-1].output].shape[1]
    if graph.types[reader.inputs[1]].shape[:2] != (channels, 1):  # not one filter a channel
        return None
    if any(added_convolutions(graph, one) for one in pointwise):  # two that are added are one
        return None
    depthwise = [reader, *elementwise_chain(graph, reader)]
    last = depthwise[-1]
    pools = [r for r in graph.readers[last.output] if r.op == "global_avg_pool"]
    if only_reader(graph, last) is None and len(pools) == 1:
        return [*pointwise, *depthwise, *pools]
    return [*pointwise, *depthwise]


def parts_of(graph: Graph, nodes: Group) -> Sequence[Group]:
    """Return a convolution with what follows it, the one that reads this with the same, and means.

    Means are those of all channels behind the second, () if there are none. Other groups: ().
    """
    if not nodes[0].has("convolution"):
        return ()
    for i, node in enumerate(nodes):
        if i and node.has("convolution") and node.inputs[0] == nodes[i - 1].output:
            end = len(nodes) - (nodes[-1].op == "global_avg_pool")
            return nodes[:i], nodes[i:end], nodes[end:]
    return ()


def lower(piece: Piece, chip: Chip, parts: Sequence[Group]) -> Lowered:
    """Return two convolutions and what follows each, all in one kernel, the quickest of some."""
    refuse_packed_twice(piece)
    pools = parts[2]
    first = piece.part(parts[0])
    second = piece.part(parts[1])
    shared = first.constants & second.constants
    weights = [part.graph.nodes[0].inputs[1] for part in (first, second)]
    if shared or not {*weights} <= piece.constants:
        needed = "two convolutions in a row, constants of their own"
        raise UnsupportedError(needed, "others", "cut here")
    point, point_epilogue, forms = conv_job(first, chip)
    depth, depth_epilogue, depth_forms = conv_job(second, chip)
    ways = [(depth_epilogue, depth_forms)]
    if depth.mixed == 1 and depth_epilogue and not depth_epilogue.bias:
        # the cube may add the bias in place of the vector unit: of both, one may have less to do
        ways.append(conv_job(second, chip, cube_adds=True)[1:])
    launches = [
        (launch, forms_of_way)
        for epilogue, forms_of_way in ways
        for launch in tandem_launches(
            Tandem(point, depth, point_epilogue, epilogue, bool(pools)), chip
        )
    ]
    warm = replace(piece, graph=replace(piece.graph, inputs=(*piece.graph.inputs, "x")))
    launch, depth_forms = min(launches, key=lambda way: near_cycles(as_kernel(way[0]), warm, chip))
    names = {
        "x": piece.graph.nodes[0].inputs[0],
        "weight": weights[0],
        "depth_weight": weights[1],
        "y": second.graph.outputs[-1],
    }
    if pools:
        names["means"] = pools[0].output
    packed: dict[str, Form] = {
        weights[0]: partial(packed_weights, point),
        weights[1]: partial(packed_weights, depth),
    }
    kernel = Kernel("conv2d", (renamed(launch, names),))
    constants = {"ones": means.diagonal()} if pools else {}
    return Lowered(kernel, {**forms, **depth_forms, **packed}, constants)


def apart(parts: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yield the means apart; without means each convolution apart, then each node."""
    first, second, pools = parts
    if pools:
        yield [(*first, *second), pools]
        return
    yield [first, second]
    yield [(node,) for node in (*first, *second)]


def without_means(parts: Sequence[Group]) -> Group:
    """Return both convolutions alone, which must pay by themselves, if means stand beside them."""
    first, second, pools = parts
    return (*first, *second) if pools else ()


FUSIONS = [
    Fusion(
        Rule("TandemConvolutionFusionPass", propose, inside=True),
        parts_of,
        lower,
        apart,
        f"of a tandem the quickest of {TIMED} divisions is taken already",
        smaller=without_means,
    )
]
