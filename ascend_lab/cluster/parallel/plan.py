"""Parallel plans: the devices along each axis, the order of pipeline tasks, and device memory.

Along the axis "pipeline", each stage passes micro-batches on to the next. A device works through
its own list of tasks in order. A forward task waits for the previous stage, a backward task for the
next stage (in the last stage, for its own forward task). Sending an activation or its gradient
between devices takes `transfer_s`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from ascend_lab.errors import ClusterError, InputError

SCHEDULES = ("gpipe", "1f1b", "interleaved")
AXES = ("tensor", "data", "pipeline")
"""The default order of axes, the innermost first: neighbouring devices exchange the most."""
HALF_BYTES = 2
"""Bytes of a number in fp16 or bf16."""
STATE_BYTES = {"sgd": 8, "adam": 12}
"""Bytes of fp32 optimiser state per parameter: master copy and momentum, or Adam's two moments."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan for data * tensor * pipeline devices; `expert` of the data axis share the experts.

    With `sequence`, operators that all tensor ranks would repeat are cut along the tokens instead
    ({cite}`korthikanti2022`). `zero_stage` 1 distributes the optimiser's state over the data axis,
    2 also the gradients, 3 also the weights ({cite}`zero2020`). With `recompute` a device keeps
    only the inputs of each layer and computes the layer again in the backward pass
    ({cite}`chen2016sublinear`). `axes` is the order in which devices are numbered, the fastest axis
    first. Raises `ClusterError` for impossible plans.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    sequence: bool = False
    zero_stage: int = 0
    micro_batches: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: bool = False
    axes: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        """Check counts, names, and options that exclude each other."""
        counts = (self.data, self.tensor, self.pipeline, self.expert, self.micro_batches)
        if min(*counts, self.virtual) < 1:
            raise ClusterError("a plan with counts of at least 1", self.label, "raise them")
        if self.schedule not in SCHEDULES or sorted(self.axes) != sorted(AXES):
            got = f"{self.schedule}, {self.axes}"
            raise ClusterError(f"a schedule of {SCHEDULES} and all axes {AXES}", got, "choose")
        if self.zero_stage not in range(4):
            raise ClusterError("a ZeRO stage from 0 to 3", str(self.zero_stage), "choose one")
        if self.data % self.expert:
            needed = "experts spread over a divisor of the data axis"
            raise ClusterError(needed, f"{self.expert} of {self.data}", "change one")
        if self.virtual > 1 and (self.pipeline == 1 or self.micro_batches % self.pipeline):
            needed = "virtual stages with P > 1 and a multiple of P micro-batches"
            raise ClusterError(needed, self.label, "change one")

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.data * self.tensor * self.pipeline

    @property
    def label(self) -> str:
        """The plan in a few letters: "D4 T2 P2 1f1b m8 Z1 recompute"."""
        virtual = f" v{self.virtual}" if self.virtual > 1 else ""
        order = "<".join(axis[0].upper() for axis in self.axes)
        parts = [
            (f"D{self.data} T{self.tensor} P{self.pipeline}", True),
            (f"E{self.expert}", self.expert > 1),
            (self.schedule + virtual, self.pipeline > 1),
            (f"m{self.micro_batches}", self.micro_batches > 1),
            (f"Z{self.zero_stage}", self.zero_stage),
            ("sequence", self.sequence),
            ("recompute", self.recompute),
            (order, self.axes != AXES),
        ]
        return " ".join(text for text, is_shown in parts if is_shown)

    def micro_batch(self, batch: int) -> int:
        """Return the samples of a micro-batch; raise `ClusterError` if `batch` does not divide."""
        pieces = self.data * self.micro_batches
        if batch % pieces or batch < pieces:
            needed = f"{self.label}: a batch that is a multiple of {pieces}"
            raise ClusterError(needed, str(batch), "change the batch")
        return batch // pieces

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return all groups of devices along an axis, which communicate at the same time.

        The groups of axis "pipeline" list the stages in order.
        """
        # D2 T2 P2 in the order tensor, data, pipeline: tensor groups (0, 1), (2, 3), (4, 5), (6,
        # 7); data groups (0, 2), (1, 3), (4, 6), (5, 7); pipelines (0, 4), (1, 5), (2, 6), (3, 7).
        grid_axes = [*reversed(self.axes)]  # along the first of `axes` device numbers rise by 1
        numbers = np.arange(self.devices).reshape([getattr(self, name) for name in grid_axes])
        other_axes = [grid_axes.index(name) for name in AXES if name != axis]
        rows = numbers.transpose([*other_axes, grid_axes.index(axis)])
        return list(map(tuple, rows.reshape(-1, getattr(self, axis)).tolist()))


# -- the description of a network that a plan needs ------------------------------------------------
@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that stay on one stage: sizes and times on one device for one micro-batch.

    The device is one of a tensor group and holds `parameters` of the unit. It keeps
    `activation_bytes` from forward to backward, of which `input_bytes` are the unit's inputs, and
    passes `boundary_bytes` on to the next unit. Forward and backward each take `exchanges`
    all-reduces of `exchange_bytes` in the tensor group.
    """

    name: str
    parameters: int
    forward_s: float
    backward_s: float
    activation_bytes: float
    input_bytes: float
    boundary_bytes: float
    exchanges: int = 0
    exchange_bytes: float = 0.0

    def towards(self, other: "Unit", share: float) -> "Unit":
        """Return the linear interpolation from this unit (`share` 0) to `other` (`share` 1)."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in PER_SAMPLE)
        return replace(self, **{name: a + (b - a) * share for name, a, b in pairs})


PER_SAMPLE = (
    *("forward_s", "backward_s", "activation_bytes", "input_bytes", "boundary_bytes"),
    "exchange_bytes",
)
"""The fields of a unit that grow with the micro-batch."""


class Model(Protocol):
    """The interface of a network that plans can cut."""

    @property
    def name(self) -> str:
        """The network's name."""
        ...

    @property
    def optimizer(self) -> str:
        """The optimiser that updates it, a key of `STATE_BYTES`."""
        ...

    @property
    def update_s_per_parameter(self) -> float:
        """Seconds of the optimiser's update per parameter."""
        ...

    def units(self, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
        """Return the units in order; raise `ClusterError` for a degree that is not allowed."""
        ...

    def tensor_degrees(self) -> tuple[int, ...]:
        """Return the tensor degrees that the network allows, which always include 1."""
        ...


@dataclass(frozen=True, slots=True)
class FixedModel:
    """A model whose units are proportional to the micro-batch; only tensor degree 1 is allowed."""

    name: str
    samples: tuple[Unit, ...]
    update_s_per_parameter: float = 0.0
    optimizer: str = "adam"

    def units(self, micro_batch: int, tensor: int, sequence: bool) -> tuple[Unit, ...]:
        """Return the units, given for one sample, multiplied by the micro-batch."""
        if tensor > 1 or sequence:
            raise ClusterError(f"{self.name}: tensor degree 1", str(tensor), "use a transformer")
        return tuple(
            replace(unit, **{name: getattr(unit, name) * micro_batch for name in PER_SAMPLE})
            for unit in self.samples
        )

    def tensor_degrees(self) -> tuple[int, ...]:
        """Return (1,)."""
        return (1,)


def split_units(costs: Sequence[float], pieces: int) -> list[range]:
    """Return consecutive ranges of units, one per piece, with the least maximum cost.

    Exact dynamic programming over prefixes, O(pieces * units^2). Raises `ClusterError` if there
    are fewer units than pieces.
    """
    n = len(costs)
    if pieces > n:
        raise ClusterError(f"{pieces} stages of at least one unit", f"{n} units", "fewer stages")
    # range_costs[end, start] = prefix[end] - prefix[start], the cost of units start .. end - 1.
    prefix = np.concatenate([[0.0], np.cumsum(costs)])
    range_costs = prefix[:, None] - prefix[None, :]
    range_costs[np.tri(n + 1, dtype=bool).T] = np.inf  # a piece starts before it ends
    # best[end]: the least possible cost of the most expensive piece if the first `end` units are
    # cut into as many pieces as there were passes. Costs 4, 1, 1, 2 in two pieces: [4] and [1, 1,
    # 2], cost 4.
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    best_starts = []  # of the last piece, one array per pass
    for _ in range(pieces):
        highest_costs = np.maximum(best[None, :], range_costs)
        best_starts.append(highest_costs.argmin(axis=1))
        best = highest_costs.min(axis=1)
    edges = [n]
    for starts in reversed(best_starts):
        edges.append(int(starts[edges[-1]]))
    return [range(start, end) for end, start in pairwise(edges)][::-1]


# -- the schedule of a pipeline: the order of each device's tasks ---------------------------------
FORWARD = "forward"
BACKWARD = "backward"


class Task(NamedTuple):
    """The forward or backward of one micro-batch in virtual stage s, which is on device s mod P."""

    stage: int
    micro_batch: int
    phase: str


class TimedTask(NamedTuple):
    """A task with the times at which its device begins and ends it."""

    task: Task
    device: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """A timed schedule: its tasks, its end, and the work and held micro-batches by device."""

    tasks: tuple[TimedTask, ...]
    end_s: float
    busy_s: tuple[float, ...]
    peak_held: tuple[dict[int, int], ...]

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait (the pipeline bubble)."""
        # 4 stages, 8 micro-batches, forward 1 s, backward 2 s: each device works 24 s of 33 s, so
        # that the bubble is 27 %.
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.end_s) if self.end_s else 0.0

    def last_backward(self, device: int) -> TimedTask:
        """Return the last backward task of a device, at whose end its gradients are complete."""
        return max((t for t in self.tasks if t.device == device), key=lambda t: t.end_s)


def orders(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> list[list[Task]]:
    """Return each device's tasks in the order in which the device runs them.

    "gpipe" ({cite}`gpipe2019`): all forwards, then all backwards. "1f1b" ({cite}`pipedream2019`):
    device i starts with P - 1 - i forwards, then alternates between a forward and a backward.
    "interleaved" ({cite}`megatron2021`): 1F1B with `virtual` stages per device; the number of
    micro-batches must be a multiple of P. Raises `ClusterError` for other names and counts.
    """
    if schedule not in SCHEDULES:
        raise ClusterError(f"a schedule of {', '.join(SCHEDULES)}", repr(schedule), "choose one")
    if min(stages, micro_batches, virtual) < 1:
        got = f"{stages}, {micro_batches}, {virtual}"
        raise ClusterError("stages, micro-batches, virtual stages of at least 1", got, "raise them")
    if virtual > 1 and (schedule != "interleaved" or micro_batches % stages):
        needed = "virtual stages with schedule interleaved and a multiple of P micro-batches"
        raise ClusterError(needed, f"{schedule}, P {stages}, {micro_batches}", "change one")
    turns = [_turn(k, stages, virtual) for k in range(micro_batches * virtual)]
    task_lists = []
    for device in range(stages):
        forwards = [Task(c * stages + device, m, FORWARD) for c, m in turns]
        backwards = [Task((virtual - 1 - c) * stages + device, m, BACKWARD) for c, m in turns]
        warm_up = len(turns)  # forwards before the first backward
        if schedule != "gpipe":
            later_stages = stages - 1 - device
            # 2 stages of 2 chunks, device 0: 2 * 1 + 1 * 2 = 4 forwards first (F of chunk 0 for
            # micro-batches 0 and 1, then of chunk 1), and after the fifth forward the first
            # backward.
            interleaved = 2 * later_stages + (virtual - 1) * stages
            warm_up = min(later_stages if virtual == 1 else interleaved, warm_up)
        # The first of 4 stages runs F0 F1 F2, then F3 B0, F4 B1, ...; the last runs F0 B0, F1 B1.
        tasks = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            tasks += [forward, backward]
        task_lists.append([*tasks, *backwards[len(turns) - warm_up :]])
    return task_lists


def _turn(k: int, stages: int, virtual: int) -> tuple[int, int]:
    """Return (chunk, micro-batch) of a device's k-th forward; chunks alternate every P forwards."""
    if virtual == 1:
        return 0, k
    # 2 stages of 2 chunks: micro-batches 0 and 1 through chunk 0, then both through chunk 1, and
    # only then micro-batches 2 and 3.
    group, position = divmod(k, stages * virtual)
    return position // stages, group * stages + position % stages


def run_pipeline(
    lists: Sequence[Sequence[Task]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float] = (),
) -> PipelineTime:
    """Time each device's list of tasks, which take `forward_s[s]` or `backward_s[s]` in stage s.

    Stages are virtual stages. `transfer_s[s]` is the transfer time from stage s to s + 1, or back
    (default 0). Raises `ClusterError` for lists that wait for each other forever.
    """
    ends: dict[Task, float] = {}
    clock_s = [0.0] * len(lists)
    next_task = [0] * len(lists)
    timed_tasks: list[TimedTask] = []
    total = sum(map(len, lists))
    last_stage = len(forward_s) - 1
    while len(timed_tasks) < total:
        count = len(timed_tasks)
        for device, tasks in enumerate(lists):
            # run the device until a task waits for another device
            while next_task[device] < len(tasks):
                task = tasks[next_task[device]]
                ready_s = _ready(task, last_stage, ends, transfer_s)
                if ready_s is None:
                    break
                start_s = max(clock_s[device], ready_s)
                work_s = (forward_s if task.phase == FORWARD else backward_s)[task.stage]
                clock_s[device] = start_s + work_s
                ends[task] = clock_s[device]
                timed_tasks.append(TimedTask(task, device, start_s, clock_s[device]))
                next_task[device] += 1
        if len(timed_tasks) == count:
            raise ClusterError("tasks in an order that can run", "a deadlock", "correct the lists")
    busy_s: list[list[float]] = [[] for _ in lists]
    for timed in timed_tasks:
        busy_s[timed.device].append(timed.end_s - timed.start_s)
    peaks = tuple(map(peak_held, lists))
    return PipelineTime(tuple(timed_tasks), max(clock_s), tuple(map(sum, busy_s)), peaks)


def _ready(
    task: Task, last_stage: int, ends: dict[Task, float], transfer_s: Sequence[float]
) -> float | None:
    """Return the time at which a task's input exists, or None if its producer is not timed yet."""
    forward = task.phase == FORWARD
    if forward and task.stage == 0:
        return 0.0
    if not forward and task.stage == last_stage:
        return ends.get(Task(task.stage, task.micro_batch, FORWARD))
    neighbour = task.stage - 1 if forward else task.stage + 1
    end = ends.get(Task(neighbour, task.micro_batch, task.phase))
    if end is None:
        return None
    return end + (transfer_s[min(neighbour, task.stage)] if transfer_s else 0.0)


def peak_held(tasks: Sequence[Task]) -> dict[int, int]:
    """Return how many micro-batches each virtual stage holds when the device holds the most.

    A micro-batch is held from its forward to the end of its backward.
    """
    # 4 stages, 8 micro-batches: GPipe holds 8 on every stage, 1F1B 4, 3, 2 and 1.
    in_flight: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for task in tasks:
        in_flight[task.stage] = in_flight.get(task.stage, 0) + (1 if task.phase == FORWARD else -1)
        if task.phase == FORWARD and sum(in_flight.values()) > sum(peaks.values()):
            peaks = dict(in_flight)
    return peaks


def bubble_share(stages: int, micro_batches: int, virtual: int = 1) -> float:
    """Return (P - 1) / (v m + P - 1): the bubble of equal stages and free transfers."""
    # 4 stages, 8 micro-batches: 3 / 11 = 27 %; with 2 virtual stages a device 3 / 19 = 16 %.
    return (stages - 1) / (virtual * micro_batches + stages - 1)


# -- memory ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of memory of one device of a stage, by purpose."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float

    @property
    def total_bytes(self) -> float:
        """The sum of all bytes; workspaces of kernels are not counted."""
        state = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self.activations_bytes

    def as_dict(self) -> dict[str, float]:
        """Return the bytes by purpose, ready for JSON."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def state_bytes(
    parameters: float, sharers: int, zero_stage: int = 0, optimizer: str = "adam"
) -> tuple[float, float, float]:
    """Return the bytes of a device's weights, gradients and optimiser state in mixed precision.

    A parameter takes 2 bytes and its gradient 2 bytes in fp16, and K bytes in fp32, K = 12 for Adam
    (16 in all). ZeRO stage 1 divides K by the `sharers`, stage 2 also the gradients, stage 3 also
    the weights ({cite}`zero2020`).
    """
    if optimizer not in STATE_BYTES:
        raise InputError(f"an optimiser of {', '.join(STATE_BYTES)}", repr(optimizer), "choose one")
    # 10^9 parameters, Adam, 8 sharers, in GB: 2 + 2 + 12 without ZeRO, 2 + 2 + 1.5 in stage 1, 2 +
    # 0.25 + 1.5 in stage 2, 0.25 + 0.25 + 1.5 in stage 3.
    weights = gradients = float(HALF_BYTES * parameters)
    state = float(STATE_BYTES[optimizer] * parameters)
    return (
        weights / sharers if zero_stage >= 3 else weights,
        gradients / sharers if zero_stage >= 2 else gradients,
        state / sharers if zero_stage >= 1 else state,
    )


def stage_memory(
    chunks: Sequence[Sequence[Unit]], held: Mapping[int, int], plan: Plan, optimizer: str = "adam"
) -> DeviceMemory:
    """Return the memory of a device with these chunks (virtual stages) of units.

    `held[i]` is the number of micro-batches of chunk i at the time of highest memory. For each of
    them a device keeps the activations of every unit; with recomputation only the units' inputs,
    and all activations of a single unit.
    """
    units = [unit for chunk in chunks for unit in chunk]
    parameters = sum(u.parameters for u in units)
    weights, gradients, state = state_bytes(parameters, plan.data, plan.zero_stage, optimizer)
    if plan.zero_stage == 3:  # the weights of one unit are gathered at a time
        weights += HALF_BYTES * max((u.parameters for u in units), default=0) * (1 - 1 / plan.data)
    activations = 0.0
    for i, chunk in enumerate(chunks):
        unit_bytes = [u.input_bytes if plan.recompute else u.activation_bytes for u in chunk]
        activations += held.get(i, 0) * sum(unit_bytes)
    if plan.recompute:
        # While one unit is recomputed, all its activations exist again, in addition to the inputs
        # of the others.
        activations += max((u.activation_bytes - u.input_bytes for u in units), default=0.0)
    return DeviceMemory(weights, gradients, state, activations)
