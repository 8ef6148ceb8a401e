"""Tandem: a pointwise (1 x 1) and a depthwise convolution, one after the other, in one kernel.

An inverted residual block of MobileNetV2 widens 24 channels to 144, of 56 x 56 pixels:

    unfused        x (24) -> 1 x 1, relu -> GM (144);  GM -> 3 x 3 depthwise, relu -> GM (144)
    fused          x (24) -> 1 x 1, relu -> L1 -> 3 x 3 depthwise, relu -> GM (144)
    saved          writing and reading 2 x 144 x 56 x 56 bytes = 0.9 MB each, one kernel start

If squeeze and excite follows, the kernel also adds up the means of channels while the result is on
its way out (`means`), which saves reading it once more.

This file finds the nodes and lowers them; `tandem_shape` describes the problem, `tandem_schedules`
chooses how to divide it, `tandem_kernel` writes the program.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ascend_lab.compiler.fusion import elementwise_chain
from ascend_lab.compiler.ir import Graph, Node, only_reader
from ascend_lab.compiler.lower.conv import conv_job, near_cycles, packed_weights
from ascend_lab.compiler.lower.piece import Form, Lowered, Piece, refuse_packed_twice
from ascend_lab.compiler.rules import Fusion, Group, Rule
from ascend_lab.errors import UnsupportedError
from ascend_lab.fused import means
from ascend_lab.fused.added_convolutions import added_convolutions
from ascend_lab.fused.tandem_schedules import TIMED, tandem_launches
from ascend_lab.fused.tandem_shape import Tandem
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.isa import Kernel, Launch, as_kernel, renamed
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.epilogue import Epilogue


def propose(graph: Graph, node: Node) -> Group | None:
    """Propose a 1 x 1 and a depthwise convolution, their elementwise nodes, and channel means."""
    if not node.has("convolution") or graph.types[node.inputs[1]].shape[2:] != (1, 1):
        return None
    pointwise = [node, *elementwise_chain(graph, node)]
    reader = only_reader(graph, pointwise[-1])
    if reader is None or not reader.has("convolution"):
        return None
    # the reader must read the result as its image, not as weights or as an addend
    if reader.inputs[0] != pointwise[-1].output:
        return None
    channels = graph.types[pointwise[-1].output].shape[1]
    # depthwise weights are (channels, 1, r, s): one filter a channel
    if graph.types[reader.inputs[1]].shape[:2] != (channels, 1):
        return None
    # a convolution that is added to another one belongs to the kernel of `joint`
    if any(added_convolutions(graph, member) for member in pointwise):
        return None
    depthwise = [reader, *elementwise_chain(graph, reader)]
    depthwise_end = depthwise[-1]
    pools = [r for r in graph.readers[depthwise_end.output] if r.op == "global_avg_pool"]
    # With means the result has two readers: the pooling, and the scale by the gates.
    if only_reader(graph, depthwise_end) is None and len(pools) == 1:
        return [*pointwise, *depthwise, *pools]
    return [*pointwise, *depthwise]


def parts_of(graph: Graph, nodes: Group) -> Sequence[Group]:
    """Return pointwise nodes, depthwise nodes and channel means; () if the group is no tandem.

    (conv, relu, conv, relu, global_avg_pool) becomes (conv, relu), (conv, relu), (global_avg_pool);
    without means the third part is ().
    """
    if not nodes[0].has("convolution"):
        return ()
    for i, node in enumerate(nodes):
        if i and node.has("convolution") and node.inputs[0] == nodes[i - 1].output:
            has_means = nodes[-1].op == "global_avg_pool"
            means_start = len(nodes) - 1 if has_means else len(nodes)
            return nodes[:i], nodes[i:means_start], nodes[means_start:]
    return ()


def lower(piece: Piece, chip: Chip, parts: Sequence[Group]) -> Lowered:
    """Return the quickest of the tandem's kernels, over schedules and the unit that adds a bias."""
    refuse_packed_twice(piece)
    pools = parts[2]
    pointwise = piece.part(parts[0])
    depthwise = piece.part(parts[1])
    shared_constants = pointwise.constants & depthwise.constants
    weights = [half.graph.nodes[0].inputs[1] for half in (pointwise, depthwise)]
    if shared_constants or not {*weights} <= piece.constants:
        needed = "two convolutions in a row, constants of their own"
        raise UnsupportedError(needed, "others", "cut here")
    point, pointwise_epilogue, pointwise_forms = conv_job(pointwise, chip)
    depth, depthwise_jobs = _depthwise_jobs(depthwise, chip)
    candidates: list[tuple[Launch, Mapping[str, Form]]] = []
    for epilogue, forms in depthwise_jobs:
        tandem = Tandem(point, depth, pointwise_epilogue, epilogue, bool(pools))
        candidates += [(launch, forms) for launch in tandem_launches(tandem, chip)]
    # In a network the operator before has left x in L2.
    warm = replace(piece, graph=replace(piece.graph, inputs=(*piece.graph.inputs, "x")))

    def cycles(candidate: tuple[Launch, Mapping[str, Form]]) -> int:
        return near_cycles(as_kernel(candidate[0]), warm, chip)

    launch, depthwise_forms = min(candidates, key=cycles)
    names = {
        "x": piece.graph.nodes[0].inputs[0],
        "weight": weights[0],
        "depth_weight": weights[1],
        "y": depthwise.graph.outputs[-1],
    }
    if pools:
        names["means"] = pools[0].output
    packed_forms: dict[str, Form] = {
        weights[0]: partial(packed_weights, point),
        weights[1]: partial(packed_weights, depth),
    }
    kernel = Kernel("conv2d", (renamed(launch, names),))
    constants = {"ones": means.diagonal()} if pools else {}
    return Lowered(kernel, {**pointwise_forms, **depthwise_forms, **packed_forms}, constants)


def _depthwise_jobs(
    depthwise: Piece, chip: Chip
) -> tuple[ConvShape, list[tuple[Epilogue | None, Mapping[str, Form]]]]:
    """Return the depthwise convolution, and its epilogue with packed operands, in one way or two.

    Either unit can add a bias: the cube as a product ones x bias, the vector unit as a vadd. Which
    has less to do depends on the sizes, so both are written and timed.
    """
    depth, epilogue, forms = conv_job(depthwise, chip)
    jobs: list[tuple[Epilogue | None, Mapping[str, Form]]] = [(epilogue, forms)]
    if depth.mixed == 1 and epilogue and not epilogue.bias:
        _, epilogue_with_bias, forms_with_bias = conv_job(depthwise, chip, cube_adds=True)
        jobs.append((epilogue_with_bias, forms_with_bias))
    return depth, jobs


def unfused(parts: Sequence[Group]) -> Iterator[Sequence[Group]]:
    """Yield the kernels against which the tandem is timed.

    With means: the tandem without them, and a pooling. Without: each convolution with its
    elementwise nodes, then each node alone.
    """
    pointwise, depthwise, pools = parts
    if pools:
        yield [(*pointwise, *depthwise), pools]
        return
    yield [pointwise, depthwise]
    yield [(node,) for node in (*pointwise, *depthwise)]


def without_means(parts: Sequence[Group]) -> Group:
    """Return the tandem without its means, () if it has none; it must pay even without them."""
    pointwise, depthwise, pools = parts
    return (*pointwise, *depthwise) if pools else ()


FUSIONS = [
    Fusion(
        Rule("TandemConvolutionFusionPass", propose, needs_shared_launch=True),
        parts_of,
        lower,
        unfused,
        f"of a tandem the quickest of {TIMED} divisions is taken already",
        without_extra_result=without_means,
    )
]
