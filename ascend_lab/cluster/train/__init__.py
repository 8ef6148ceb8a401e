"""Computes the time of a training step on one device, and when each gradient is ready.

The submodules build the step as a graph, with mixed precision and recomputation (`step`,
`autodiff`), and compile it (`compile`).

`profile_training` times two graphs. The first graph is forward and backward. It reads the
parameters as constants in the number format of the computation, in the layout that each kernel
needs (as a graph engine stores its variables). It writes the gradients in that format, row-major,
in which they are exchanged. The second graph is the update. It reads gradients, fp32 master weights
and optimiser states, and writes the new weights and states and the copies for the next step. Each
of these is stored in a single tensor for all parameters, as in fused optimisers (torch_npu,
NpuFused optimisers), and so are the running averages of all batch norms. One kernel updates all
parameters, another one all averages. `step_timeline` then schedules a data-parallel step on two
lanes: compute, and exchange of gradients.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

# fmt: off
# isort: off
from ascend_lab.cluster.buckets import Segments, checked, closed
from ascend_lab.cluster.cost import Cost, Interpolated
from ascend_lab.machine.chip import DTYPE_BYTES, Chip, load_chip
from ascend_lab import cluster, errors
from ascend_lab.compiler import Graph, GraphBuilder, simulate_graph
from ascend_lab.compiler.network import NetworkTimeline
from ascend_lab.compiler.tasks import Compiled
from ascend_lab.compiler import fusion, layout, tasks, zoo
from ascend_lab.compiler.canonical import canonical
from ascend_lab.cluster.train.autodiff import training_graph
from ascend_lab.cluster.train.compile import averages, compile_step, compile_training, own_outputs
from ascend_lab.cluster.train.step import (
    RUNNING_MOMENTUM, DynamicLossScale, Optimiser, StepResult, TrainingGraph, at_step, cut_tensors,
    first_values, found_inf, optimiser, run_step, tensors_between_cuts,
)
# fmt: on
# isort: on

__all__ = [
    "DynamicLossScale",
    "GradientRow",
    "Optimiser",
    "StepProfile",
    "StepResult",
    "StepTimeline",
    "TrainingGraph",
    "at_step",
    "compile_training",
    "cut_tensors",
    "first_values",
    "found_inf",
    "profile_layers",
    "profile_training",
    "run_step",
    "step_timeline",
    "tensors_between_cuts",
    "training_graph",
]

PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True)
class GradientRow:
    """One gradient: its parameter, its bytes, and its time from the start of backward."""

    name: str
    ready_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One kernel of the step: the nodes that it computes, its phase and its time."""

    nodes: tuple[str, ...]
    phase: str
    time_s: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step on one device: seconds of each phase, and gradients in the order of writing.

    Recomputation counts as backward. `memory_bytes` are the bytes that forward and backward move
    over the memory interface.
    """

    name: str
    chip: str
    forward_s: float
    backward_s: float
    update_s: float
    gradients: tuple[GradientRow, ...]
    operators: tuple[OperatorRow, ...] = ()
    memory_bytes: int = 0

    @property
    def step_s(self) -> float:
        """Seconds of a step on one device."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(row.size_bytes for row in self.gradients)


def profile_training(
    graph: Graph, chip: Chip | str, *, optimizer: str = "sgd", dtype: str = "fp16"
) -> StepProfile:
    """Return the profile of a training step of a forward graph with its batch.

    `optimizer`: "sgd" (with momentum) or "adam", on fp32 masters. Gradients are exchanged in
    `dtype`, fp16 or bf16. Raises as `training_graph` and `compile_stages`.
    """
    chip = load_chip(chip) if isinstance(chip, str) else chip
    if dtype not in ("fp16", "bf16"):
        raise errors.InputError("dtype fp16 or bf16", repr(dtype), "choose one")
    step = training_graph(graph, optimizer=None, dtype=dtype)
    compiled = compile_step(step, chip)
    times = simulate_graph(compiled)
    rows = _operators(step, compiled, times)
    elements = sum(step.graph.types[name].elements for name in step.parameters)
    return StepProfile(
        name=graph.name,
        chip=chip.name,
        forward_s=sum(row.time_s for row in rows if row.phase == "forward"),
        backward_s=sum(row.time_s for row in rows if row.phase == "backward"),
        update_s=update_s(elements, chip, optimizer, dtype) + averages_s(step, chip),
        gradients=_gradients(step, compiled, rows, dtype),
        operators=rows,
        memory_bytes=times.memory_bytes,
    )


# -- forward and backward -------------------------------------------------------------------------
def _operators(
    step: TrainingGraph, compiled: Compiled, times: NetworkTimeline
) -> tuple[OperatorRow, ...]:
    """Return the kernels with their phases; a kernel without a phase has that of the one before."""
    rows = []
    phase = "forward"
    tasks = [task for task in compiled.tasks if task.lowered is not None]
    for task, time in zip(tasks, times.operators, strict=True):
        phase = max((phase_of(step, name) or phase for name in task.nodes), key=PHASES.index)
        rows.append(OperatorRow(task.nodes, phase, time.time_s))
    return tuple(rows)


def phase_of(step: TrainingGraph, name: str) -> str:
    """Return the phase of a node, also if a rewrite has derived its name; "" if unknown."""
    node_phase = step.phases.get(name, "")
    if not node_phase:
        marks = {".update.": "update", ".grad.": "backward", ".again": "backward"}
        node_phase = next((phase for mark, phase in marks.items() if mark in name), "")
    return "backward" if node_phase == "recompute" else node_phase


def _gradients(
    step: TrainingGraph, compiled: Compiled, rows: Sequence[OperatorRow], dtype: str
) -> tuple[GradientRow, ...]:
    """Return the gradients, sorted by the end of the kernels that write them."""
    ends = {}
    clock = 0.0
    for row in rows:
        clock += row.time_s if row.phase == "backward" else 0.0
        ends.update(dict.fromkeys(row.nodes, clock))
    # rewrites give outputs other names, in the same order
    outputs_of = own_outputs(step)
    names = dict(zip(outputs_of, compiled.graph.outputs, strict=True))
    gradient_rows = []
    for parameter, gradient in step.gradients.items():
        size = step.graph.types[parameter].elements * DTYPE_BYTES[dtype]
        ready_s = _written_s(compiled.graph, names[gradient], ends)
        gradient_rows.append(GradientRow(parameter, ready_s, size))
    return tuple(sorted(gradient_rows, key=lambda row: row.ready_s))


def _written_s(graph: Graph, name: str, ends: Mapping[str, float]) -> float:
    """Return the time at which a tensor is written; for a view, that of the viewed tensor."""
    node = graph.producers.get(name)
    if node is None:
        return 0.0
    if node.name in ends:
        return ends[node.name]
    return max(_written_s(graph, input_name, ends) for input_name in node.inputs)


# -- update ---------------------------------------------------------------------------------------
@lru_cache(4096)
def update_s(elements: int, chip: Chip, optimizer: str, dtype: str = "fp16") -> float:
    """Return the seconds to update `elements` parameters in one tensor, with an empty L2."""
    rule = optimiser(optimizer)
    assert rule is not None
    net = GraphBuilder("update")
    weight = net.input("old", (elements,))
    grad = net.input("grad", (elements,), dtype)
    states = [net.input(name, (elements,)) for name in rule.states]
    updated = net.add_node(rule.operator.name, weight, net.cast(grad, dtype="fp32"), *states)
    # Adam, 10^6 parameters: it reads 12 MB of weights, means and squares in fp32 and 2 MB of
    # gradients in fp16, and writes 12 MB of new ones and 2 MB of fp16 copies.
    net.output(*updated, net.cast(updated[0], dtype=dtype))
    return _alone_s(net, chip)


def averages_s(step: TrainingGraph, chip: Chip) -> float:
    """Return the seconds to update the running averages of all batch norms, in one tensor."""
    elements = sum(averages(step).values())
    if not elements:
        return 0.0
    net = GraphBuilder("averages")
    average = net.input("old", (elements,))
    batch = net.input("batch", (elements,))
    old_share = net.muls(average, number=RUNNING_MOMENTUM)
    batch_share = net.muls(batch, number=1.0 - RUNNING_MOMENTUM)
    net.output(net.add(old_share, batch_share))
    return _alone_s(net, chip)


def _alone_s(net: GraphBuilder, chip: Chip) -> float:
    """Return the seconds of a small graph that runs after other work was queued."""
    graph = layout.assign_layouts(canonical(net.build(), chip))
    compiled = tasks.compile_tasks(graph, chip, fusion.fuse(graph, chip, None).groups)
    return simulate_graph(compiled, first="queued").time_s


# -- networks of equal layers ----------------------------------------------------------------------
# The layers of a transformer have equal kernels, which, except in the first and last layer, find
# the same data in L2. Profiling 3 layers instead of 24 takes an eighth of the time.
SAMPLE = 3
"""Layers that are profiled: first, middle, last."""


def layer_prefix(names: Sequence[str]) -> str:
    """Return the common prefix of the layers of a network: "layer" for layer0., layer1., layer2.

    Raises `InputError` if no names are numbered in this way.
    """
    layers_by_prefix: dict[str, set[str]] = {}
    for name in names:
        if match := re.match(r"(\D*)(\d+)\.", name):
            layers_by_prefix.setdefault(match[1], set()).add(match[2])
    fitting = [prefix for prefix, numbers in layers_by_prefix.items() if numbers == {"0", "1", "2"}]
    if not fitting:
        raise errors.InputError("a network of 3 layers numbered from 0", "none", "profile it whole")
    return fitting[0]


def equal_layers(model: str) -> int:
    """Return how many equal layers a model of the zoo has by default; 0 if it has no such count."""
    setting = inspect.signature(zoo.find(model)).parameters.get("layers")
    return setting.default if setting and setting.default > SAMPLE else 0


def profile_layers(
    build: Callable[[int], Graph],
    layers: int,
    chip: Chip | str,
    *,
    optimizer: str = "sgd",
    dtype: str = "fp16",
) -> StepProfile:
    """Return the profile of the network `build(layers)`, extrapolated from that of `build(3)`."""
    chip = load_chip(chip) if isinstance(chip, str) else chip
    graph = build(min(SAMPLE, layers))
    profile = profile_training(graph, chip, optimizer=optimizer, dtype=dtype)
    if layers <= SAMPLE:
        return profile
    prefix = layer_prefix([node.name for node in graph.nodes])
    # The first and the last layer differ from the others (they touch embedding and head);
    # 12 layers are first + 10 times middle + last, of which the sample has one middle layer.
    added_layers = layers - SAMPLE
    middle = [row for row in profile.operators if row.nodes[0].startswith(f"{prefix}1.")]
    layer_forward_s = sum(row.time_s for row in middle if row.phase == "forward")
    layer_backward_s = sum(row.time_s for row in middle if row.phase == "backward")
    layer_rows = [row for row in profile.gradients if row.name.startswith(f"{prefix}1.")]
    # The update depends on the total number of parameters, so it is simulated for both networks.
    parameters = profile.gradient_bytes // DTYPE_BYTES[dtype]
    layer_parameters = sum(row.size_bytes for row in layer_rows) // DTYPE_BYTES[dtype]
    all_parameters = parameters + added_layers * layer_parameters
    sample_update_s = update_s(parameters, chip, optimizer, dtype)
    all_update_s = update_s(all_parameters, chip, optimizer, dtype)
    return replace(
        profile,
        forward_s=profile.forward_s + added_layers * layer_forward_s,
        backward_s=profile.backward_s + added_layers * layer_backward_s,
        update_s=profile.update_s - sample_update_s + all_update_s,
        gradients=_all_gradients(profile.gradients, prefix, added_layers, layer_backward_s),
        operators=_all_operators(profile.operators, prefix, added_layers),
        memory_bytes=0,
    )


def _renamed(name: str, prefix: str, layer: int, new_layer: int) -> str:
    """Return the name of a tensor or node with another number of the layer."""
    # ("layer1.ffn", "layer", 1, 5) gives "layer5.ffn".
    start = f"{prefix}{layer}."
    return f"{prefix}{new_layer}.{name[len(start) :]}" if name.startswith(start) else name


def _all_gradients(
    rows: Sequence[GradientRow], prefix: str, more: int, period_s: float
) -> tuple[GradientRow, ...]:
    """Return the gradients of all layers, each layer `period_s` after the one above it."""
    layer_rows = [row for row in rows if row.name.startswith(f"{prefix}1.")]
    begin = min((row.ready_s for row in layer_rows), default=0.0)
    all_rows = []
    for row in rows:
        if row in layer_rows:
            for k in range(more + 1):
                # 5 layers from 3, so 2 more: the sampled layer 1 stands for layers 3, 2 and 1,
                # written in this order, each one period of backward after the layer above it.
                name = _renamed(row.name, prefix, 1, 1 + more - k)
                all_rows.append(replace(row, name=name, ready_s=row.ready_s + k * period_s))
        else:
            # Gradients after the middle layer are delayed by all the added layers.
            later = more * period_s if row.ready_s >= begin else 0.0
            name = _renamed(row.name, prefix, 2, 2 + more)
            all_rows.append(replace(row, name=name, ready_s=row.ready_s + later))
    return tuple(sorted(all_rows, key=lambda row: row.ready_s))


def _all_operators(rows: Sequence[OperatorRow], prefix: str, more: int) -> tuple[OperatorRow, ...]:
    """Return the kernels, in which those of the middle layer are repeated `more` times."""

    def moved(row: OperatorRow, layer: int, new_layer: int) -> OperatorRow:
        nodes = tuple(_renamed(name, prefix, layer, new_layer) for name in row.nodes)
        return replace(row, nodes=nodes)

    all_rows: list[OperatorRow] = []
    for phase in PHASES:
        phase_rows = [row for row in rows if row.phase == phase]
        middle = [i for i, row in enumerate(phase_rows) if row.nodes[0].startswith(f"{prefix}1.")]
        layer_rows = [phase_rows[i] for i in middle]
        # Forward runs layers 2, 3, ... upwards after layer 1, backward from the last one down
        # before it.
        if phase == "forward":
            order = range(2, 2 + more)
            start = middle[-1] + 1 if middle else len(phase_rows)
        else:
            order = range(1 + more, 1, -1)
            start = middle[0] if middle else len(phase_rows)
        last_moved = [moved(row, 2, 2 + more) for row in phase_rows]
        added_rows = [moved(row, 1, layer) for layer in order for row in layer_rows]
        all_rows += [*last_moved[:start], *added_rows, *last_moved[start:]]
    return tuple(all_rows)


# -- a data-parallel step on two lanes: compute, and the exchange of gradients in buckets ----------
#     compute:        forward | backward                | update
#     communication:            bucket 0 | bucket 1 | ...
# A bucket starts when its last gradient is written and the bucket before has arrived; the update
# starts when all have. Compute and communication do not slow each other here.
@dataclass(frozen=True, slots=True)
class Span:
    """One activity of a lane, with start and end."""

    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The timeline of a step: its spans and end, seconds of compute and communication, tail.

    `tail_s` is the time from the end of backward to the arrival of the last bucket.
    """

    name: str
    spans: tuple[Span, ...]
    step_s: float
    compute_s: float
    communication_s: float
    tail_s: float

    @property
    def exposed_s(self) -> float:
        """The time in which only communication takes place: step - compute."""
        return self.step_s - self.compute_s

    def lane(self, name: str) -> tuple[Span, ...]:
        """Return the spans of a lane, "compute" or "communication"."""
        return tuple(span for span in self.spans if span.lane == name)


def step_timeline(
    profile: StepProfile, cost: Cost, segments: Sequence[tuple[int, int]] | None = None
) -> StepTimeline:
    """Return the timeline of a step in which each segment of gradients is one all-reduce.

    The default segments are buckets of 25 MiB. Raises `InputError` unless the segments contain all
    gradients in order.
    """
    rows = profile.gradients
    buckets = bucketed(rows) if segments is None else checked(segments, len(rows))
    backward_start_s = profile.forward_s
    backward_end_s = profile.forward_s + profile.backward_s
    spans = [
        Span("compute", "forward", 0.0, backward_start_s),
        Span("compute", "backward", backward_start_s, backward_end_s),
    ]
    sent_s = 0.0
    communication_s = 0.0
    for number, (first_row, last_row) in enumerate(buckets):
        bucket_rows = rows[first_row : last_row + 1]
        bucket_s = cost(sum(row.size_bytes for row in bucket_rows))
        ready_s = backward_start_s + max(row.ready_s for row in bucket_rows)
        # A bucket waits for its last gradient and for the bucket ahead of it on the network.
        begin_s = max(sent_s, ready_s)
        sent_s = begin_s + bucket_s
        communication_s = communication_s + bucket_s
        spans.append(Span("communication", f"bucket {number}", begin_s, sent_s))
    update_start_s = max(backward_end_s, sent_s)
    end_s = update_start_s + profile.update_s
    spans.append(Span("compute", "update", update_start_s, end_s))
    return StepTimeline(
        name=profile.name,
        spans=tuple(spans),
        step_s=end_s,
        compute_s=profile.step_s,
        communication_s=communication_s,
        tail_s=max(0.0, sent_s - backward_end_s),
    )


def bucketed(rows: Sequence[GradientRow], *limits_bytes: int) -> Segments:
    """Return the buckets of gradients, as `closed` forms them with these limits."""
    return closed([0, *accumulate(row.size_bytes for row in rows)], *limits_bytes)


def all_reduce_cost(topology: cluster.Topology) -> Cost:
    """Return the cost of an all-reduce among all devices, the best algorithm at each size."""
    if topology.size == 1:
        return lambda size_bytes: 0.0
    return Interpolated(lambda n: cluster.collective_time("all_reduce", topology, n).time_s)
