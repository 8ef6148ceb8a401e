"""Deploys a quantised network to a chip with layers that compute in int8, and gives its cost there.

`deploy` inserts pairs of quantise and dequantise nodes around the layers and merges them into the
layers: sums are computed in int32 and requantised in the epilogue of the layer that computes them.
A model file that has such pairs (QDQ) gives the same when it is compiled. Values differ from those
of the fake-quantised graph by rounding only, one step of a tensor's scale at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ascend_lab.compiler import Graph, compile_stages
from ascend_lab.compiler.passes.formats import LayerQuantisation, fold, insert_quantise_pairs
from ascend_lab.compiler.placement import constant_bytes
from ascend_lab.deploy.compress.scales import LayerScales
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import Chip


def deploy(graph: Graph, layers: Sequence[LayerScales]) -> Graph:
    """Return the graph with some layers on whole numbers; others stay in floating point.

    The graph must be prepared (`Quantised.graph`). Raises `InputError` for a layer that it lacks,
    and `UnsupportedError` for activations not in 8 bits or weights of more than 8 bits.
    """
    nodes = {node.name: node for node in graph.nodes}
    for layer in layers:
        weights = nodes[layer.name].inputs[1:2] if layer.name in nodes else ()
        if not weights or weights[0] not in graph.constants:
            raise InputError(f"{graph.name}: a layer with constant weights", layer.name, "check it")
        if layer.bits != 8 or layer.weight_bits > 8:
            got = f"{layer.bits} and {layer.weight_bits}"
            needed = f"{layer.name}: activations in 8 bits, weights in 8 at most"
            raise UnsupportedError(needed, got, "the cube multiplies int8")
    # pairs are put around the layers, then folded into them: as if the graph came from a QDQ file
    quantisations = {
        layer.name: LayerQuantisation(
            layer.scale, layer.offset, layer.weight_scales, layer.weight_bits, layer.shared
        )
        for layer in layers
    }
    return fold(insert_quantise_pairs(graph, quantisations))[0]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a network on a chip: time, bytes of weights, bytes over the memory interface.

    `launch_s` is the part of the time that launches of the `kernel_count` kernels take;
    `time_s_by_type` has the time of each type of operator.
    """

    time_s: float
    weight_bytes: int
    memory_bytes: int
    kernel_count: int
    launch_s: float
    time_s_by_type: dict[str, float]


def cost_of(graph: Graph, chip: Chip | str) -> Cost:
    """Return a graph's costs, with floating point as fp16; raises the compiler's errors."""
    stages = compile_stages(graph, chip)
    times = stages.timeline()
    # as they are compiled, with what pads them to blocks
    weight_bytes = sum(constant_bytes(stages.compiled).values())
    return Cost(
        time_s=times.time_s,
        weight_bytes=weight_bytes,
        memory_bytes=times.memory_bytes,
        kernel_count=len(times.operators),
        launch_s=times.launch_s,
        time_s_by_type=times.by_type(),
    )


def costs_before_and_after(
    graph: Graph, layers: Sequence[LayerScales], chip: Chip | str
) -> tuple[Cost, Cost]:
    """Return the costs of a network in fp16 and deployed in int8, for one batch on one chip."""
    return cost_of(graph, chip), cost_of(deploy(graph, layers), chip)
