"""Pipelines: stages pass micro-batches on; who computes what when, and who holds how much.

A device works through its own list of tasks in order. A forward waits for the stage before, a
backward for the stage behind (the last stage's for its own forward); between devices an activation
or its gradient travels `transfer_s`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ascend_lab.errors import ClusterError

SCHEDULES = ("gpipe", "1f1b", "interleaved")
FORWARD, BACKWARD = "forward", "backward"


class Task(NamedTuple):
    """One micro-batch through one stage, one way; virtual stage s is on device s mod P."""

    stage: int
    micro_batch: int
    phase: str


class TimedTask(NamedTuple):
    """A task and when its device works on it."""

    task: Task
    device: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """A schedule timed: all tasks, when the last ends, work and held micro-batches per device."""

    tasks: tuple[TimedTask, ...]
    end_s: float
    busy_s: tuple[float, ...]
    peak_held: tuple[dict[int, int], ...]

    @property
    def bubble(self) -> float:
        """Share of the devices' time in which they wait."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.end_s) if self.end_s else 0.0

    def last_backward(self, device: int) -> TimedTask:
        """Return the last backward of a device: its gradients are complete when it ends."""
        return max((t for t in self.tasks if t.device == device), key=lambda t: t.end_s)


def orders(schedule: str, stages: int, micro_batches: int, virtual: int = 1) -> list[list[Task]]:
    """Return each device's tasks in the order it takes them.

    "gpipe" ({cite}`gpipe2019`): all forwards, then all backwards. "1f1b" ({cite}`pipedream2019`):
    device i starts with P - 1 - i forwards, then takes one of each in turn. "interleaved"
    ({cite}`megatron2021`): 1F1B over `virtual` stages a device; wants a multiple of P
    micro-batches. Raises `ClusterError` for other names and counts.
    """
    if schedule not in SCHEDULES:
        raise ClusterError(f"a schedule of {', '.join(SCHEDULES)}", repr(schedule), "choose one")
    if min(stages, micro_batches, virtual) < 1:
        got = f"{stages}, {micro_batches}, {virtual}"
        raise ClusterError("stages, micro-batches, virtual stages of at least 1", got, "raise them")
    if virtual > 1 and (schedule != "interleaved" or micro_batches % stages):
        what = "virtual stages with schedule interleaved and a multiple of P micro-batches"
        raise ClusterError(what, f"{schedule}, P {stages}, {micro_batches}", "change one")
    turns = [_turn(k, stages, virtual) for k in range(micro_batches * virtual)]
    found = []
    for device in range(stages):
        ahead = [Task(c * stages + device, m, FORWARD) for c, m in turns]
        back = [Task((virtual - 1 - c) * stages + device, m, BACKWARD) for c, m in turns]
        first = len(turns)  # forwards before the first backward
        if schedule != "gpipe":
            behind = stages - 1 - device
            first = min(behind if virtual == 1 else 2 * behind + (virtual - 1) * stages, first)
        steady = [x for pair in zip(ahead[first:], back, strict=False) for x in pair]
        found.append([*ahead[:first], *steady, *back[len(turns) - first :]])
    return found


def _turn(k: int, stages: int, virtual: int) -> tuple[int, int]:
    """Return (chunk, micro-batch) of a device's k-th forward: P micro-batches a chunk in turn."""
    if virtual == 1:
        return 0, k
    group, place = divmod(k, stages * virtual)
    return place // stages, group * stages + place % stages


def run_pipeline(
    lists: Sequence[Sequence[Task]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float] = (),
) -> PipelineTime:
    """Time each device's list; `forward_s[s]`, `backward_s[s]` are of virtual stage s.

    `transfer_s[s]` is the way from stage s to s + 1, or back (default 0). Raises `ClusterError`
    for lists that wait for each other forever.
    """
    ends: dict[Task, float] = {}
    clock, places = [0.0] * len(lists), [0] * len(lists)
    done: list[TimedTask] = []
    total, last = sum(map(len, lists)), len(forward_s) - 1
    while len(done) < total:
        before = len(done)
        for device, tasks in enumerate(lists):
            while places[device] < len(tasks):
                task = tasks[places[device]]
                ready = _ready(task, last, ends, transfer_s)
                if ready is None:
                    break
                start = max(clock[device], ready)
                work = (forward_s if task.phase == FORWARD else backward_s)[task.stage]
                clock[device] = ends[task] = start + work
                done.append(TimedTask(task, device, start, start + work))
                places[device] += 1
        if len(done) == before:
            raise ClusterError("tasks in an order that can run", "a deadlock", "mend the lists")
    worked: list[list[float]] = [[] for _ in lists]
    for timed in done:
        worked[timed.device].append(timed.end_s - timed.start_s)
    held = tuple(map(peak_held, lists))
    return PipelineTime(tuple(done), max(clock), tuple(map(sum, worked)), held)


def _ready(
    task: Task, last: int, ends: dict[Task, float], transfer_s: Sequence[float]
) -> float | None:
    """Return when what a task reads is there, or None if what makes it has not been timed."""
    forward = task.phase == FORWARD
    if forward and task.stage == 0:
        return 0.0
    if not forward and task.stage == last:
        return ends.get(Task(task.stage, task.micro_batch, FORWARD))
    other = task.stage - 1 if forward else task.stage + 1
    end = ends.get(Task(other, task.micro_batch, task.phase))
    if end is None:
        return None
    return end + (transfer_s[min(other, task.stage)] if transfer_s else 0.0)


def peak_held(tasks: Sequence[Task]) -> dict[int, int]:
    """Return, per virtual stage of a device, the micro-batches held when it holds most in all.

    A micro-batch is held from its forward to the end of its backward.
    """
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for task in tasks:
        held[task.stage] = held.get(task.stage, 0) + (1 if task.phase == FORWARD else -1)
        if task.phase == FORWARD and sum(held.values()) > sum(most.values()):
            most = dict(held)
    return most


def bubble_share(stages: int, micro_batches: int, virtual: int = 1) -> float:
    """Return (P - 1) / (v m + P - 1): the bubble of equal stages and free transfers."""
    return (stages - 1) / (virtual * micro_batches + stages - 1)
