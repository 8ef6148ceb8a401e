"""Computes the time of a training step under a parallel plan, and the memory of each device.

    forward of a stage  = its units' work + exchanges of tensor groups
    backward of a stage = the same for backward, + its forward again if it recomputes
    step = pipeline + gradient exchange that the last backward does not hide + update

Exchanges of tensor groups never overlap with compute. The gradients of a unit are sent when its
last backward has ended, one unit after another. ZeRO 3 gathers the weights of each unit ahead of
its forward and its backward; ZeRO 2 and 3 reduce-scatter gradients after every micro-batch. Both
overlap with compute.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from ascend_lab.cluster import Schedule, Topology, collective_time, make
from ascend_lab.cluster.algorithms import applied
from ascend_lab.cluster.cost import Interpolated
from ascend_lab.cluster.parallel import plan as plans
from ascend_lab.cluster.parallel.plan import (
    HALF_BYTES,
    DeviceMemory,
    Model,
    Plan,
    Unit,
    orders,
    peak_held,
)
from ascend_lab.cluster.quickest import servers_of
from ascend_lab.cluster.schedule import Round
from ascend_lab.cluster.timing import Prepared, pattern_of, prepare

Groups = tuple[tuple[int, ...], ...]


class Costs(Protocol):
    """The interface for the seconds of a plan's communication."""

    def collective(self, op: str, plan: Plan, axis: str, size_bytes: float) -> float:
        """Return the seconds of a collective that all groups along an axis run at the same time."""
        ...

    def transfer(self, plan: Plan, size_bytes: float) -> float:
        """Return the seconds in which all stages send a tensor to the next stage."""
        ...


@dataclass(frozen=True, slots=True)
class PlanTime:
    """The time of a plan: the step, its parts on the slowest device, and memory by stage.

    `compute_s` is the work of the slowest device and `exchange_s` its exchanges in tensor groups.
    `exposed_s` is the time that gradients and updates take after the end of the pipeline. `waits_s`
    is the rest of the step: waiting for other stages, and traffic of ZeRO 2 and 3 that compute does
    not hide.
    """

    plan: Plan
    batch: int
    step_s: float
    compute_s: float
    exchange_s: float
    pipeline_s: float
    bubble: float
    exposed_s: float
    memory: tuple[DeviceMemory, ...]

    @property
    def memory_bytes(self) -> float:
        """The bytes of the device that needs the most memory."""
        return max(m.total_bytes for m in self.memory)

    @property
    def waits_s(self) -> float:
        """The step time without compute, exchanges and exposed time."""
        return max(0.0, self.pipeline_s - self.compute_s - self.exchange_s)

    @property
    def samples_per_s(self) -> float:
        """Samples of the batch per second of the step."""
        return self.batch / self.step_s

    def as_dict(self) -> dict[str, Any]:
        """Return the plan and its times as a dictionary for JSON."""
        names = (
            "step_s",
            "samples_per_s",
            "compute_s",
            "exchange_s",
            "pipeline_s",
            "bubble",
            "exposed_s",
            "memory_bytes",
        )
        return {
            "plan": self.plan.label,
            **asdict(self.plan),
            "axes": list(self.plan.axes),
            **{name: getattr(self, name) for name in names},
            "memory_per_stage": [m.as_dict() for m in self.memory],
        }


# -- a model cut into stages ----------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Cut:
    """A model cut by a plan: the units of every virtual stage, and the micro-batches it holds."""

    plan: Plan
    chunks: tuple[tuple[Unit, ...], ...]
    held: tuple[dict[int, int], ...]

    def of_device(self, device: int) -> list[tuple[Unit, ...]]:
        """Return the chunks (virtual stages) of a pipeline device."""
        return list(self.chunks[device :: self.plan.pipeline])

    def units_of(self, device: int) -> list[Unit]:
        """Return the units of a pipeline device."""
        return [unit for chunk in self.of_device(device) for unit in chunk]

    def work_s(self, device: int) -> float:
        """Return the work of a device for one micro-batch, forward and backward."""
        times = 2 if self.plan.recompute else 1
        return sum(times * u.forward_s + u.backward_s for u in self.units_of(device))

    @property
    def bound_s(self) -> float:
        """A lower bound on the step: a device's work, and a micro-batch's way to it and back."""
        plan = self.plan
        path_s = 0.0
        busiest_s = 0.0
        for device in range(plan.pipeline):
            work = self.work_s(device)
            busiest_s = max(busiest_s, plan.micro_batches * work + path_s)
            # The first micro-batch reaches stage s after the forwards of the s stages before it,
            # and its gradient then passes through their backwards. So the bound is the work of
            # stage s, plus the work of these stages for one micro-batch.
            path_s += work if plan.virtual == 1 else 0.0
        return busiest_s

    def memory(self, optimizer: str) -> tuple[DeviceMemory, ...]:
        """Return the memory of one device of every pipeline stage."""
        stages = self.plan.pipeline
        helds = ({s // stages: n for s, n in self.held[d].items()} for d in range(stages))
        return tuple(
            plans.stage_memory(self.of_device(d), held_by_chunk, self.plan, optimizer)
            for d, held_by_chunk in enumerate(helds)
        )


def cut_model(plan: Plan, model: Model, batch: int) -> Cut:
    """Return a model cut into the plan's virtual stages, with the slowest as fast as possible.

    Raises `ClusterError` for batches and models that cannot be divided in this way.
    """
    units = model.units(plan.micro_batch(batch), plan.tensor, plan.sequence)
    ranges = _ranges(tuple(u.forward_s + u.backward_s for u in units), plan.pipeline * plan.virtual)
    chunks = tuple(tuple(units[i] for i in unit_range) for unit_range in ranges)
    micro_batches_held = _held(plan.schedule, plan.pipeline, plan.micro_batches, plan.virtual)
    return Cut(plan, chunks, micro_batches_held)


_ranges = lru_cache(512)(plans.split_units)


@lru_cache(512)
def _held(schedule: str, stages: int, micro: int, virtual: int) -> tuple[dict[int, int], ...]:
    return tuple(map(peak_held, orders(schedule, stages, micro, virtual)))


# -- the step -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Traffic:
    """The communication times of a plan's units; equal sizes are timed only once."""

    plan: Plan
    costs: Costs
    seconds: dict[tuple[str, str, float], float] = field(default_factory=dict)

    def timed(self, op: str, axis: str, size_bytes: float) -> float:
        key = (op, axis, size_bytes)
        if key not in self.seconds:
            self.seconds[key] = self.costs.collective(op, self.plan, axis, size_bytes)
        return self.seconds[key]

    def exchange_s(self, unit: Unit) -> float:
        """Return the seconds of a unit's tensor-group exchanges in one direction.

        Sequence parallelism turns each all-reduce into a reduce-scatter and an all-gather.
        """
        if self.plan.tensor == 1 or not unit.exchanges:
            return 0.0
        # On a ring of p devices both variants send 2 (p - 1) / p bytes for each byte of the tensor.
        ops = ("reduce_scatter", "all_gather") if self.plan.sequence else ("all_reduce",)
        return unit.exchanges * sum(self.timed(op, "tensor", unit.exchange_bytes) for op in ops)

    def gradient_s(self, op: str, unit: Unit) -> float:
        """Return the seconds of an operation on all gradients (or weights) of a unit, in fp16."""
        if self.plan.data == 1 or not unit.parameters:
            return 0.0
        return self.timed(op, "data", float(HALF_BYTES * unit.parameters))

    def gather_s(self, unit: Unit) -> float:
        """Return the seconds in which ZeRO 3 gathers a unit's weights; 0 for other plans."""
        return self.gradient_s("all_gather", unit) if self.plan.zero_stage == 3 else 0.0

    def scatter_s(self, unit: Unit) -> float:
        """Return the seconds in which ZeRO 2 and 3 reduce-scatter a unit's gradients; else 0."""
        return self.gradient_s("reduce_scatter", unit) if self.plan.zero_stage >= 2 else 0.0


def plan_time(
    plan: Plan, model: Model, costs: Costs, batch: int, optimizer: str = "adam"
) -> PlanTime:
    """Return the step time and memory of a plan; raises as `cut_model`."""
    cut = cut_model(plan, model, batch)
    traffic = _Traffic(plan, costs)
    forwards_s = [_forward_s(chunk, traffic) for chunk in cut.chunks]
    backwards_s = [_backward_s(chunk, traffic) for chunk in cut.chunks]
    transfers_s = [costs.transfer(plan, c[-1].boundary_bytes) for c in cut.chunks[:-1]]
    lists = orders(plan.schedule, plan.pipeline, plan.micro_batches, plan.virtual)
    timed = plans.run_pipeline(lists, forwards_s, backwards_s, transfers_s)
    step_s = max(_finished_s(cut, model, traffic, timed, d) for d in range(plan.pipeline))
    # Forward and backward exchange once each, and a forward that is recomputed exchanges again.
    passes = 3 if plan.recompute else 2
    device_times = []
    for device in range(plan.pipeline):
        exchange_s = sum(map(traffic.exchange_s, cut.units_of(device)))
        device_times.append((cut.work_s(device), passes * exchange_s))
    work_s, exchanges_s = max(device_times)
    return PlanTime(
        plan=plan,
        batch=batch,
        step_s=step_s,
        compute_s=plan.micro_batches * work_s,
        exchange_s=plan.micro_batches * exchanges_s,
        pipeline_s=timed.end_s,
        bubble=timed.bubble,
        exposed_s=step_s - timed.end_s,
        memory=cut.memory(optimizer),
    )


def _forward_s(units: Sequence[Unit], traffic: _Traffic) -> float:
    """Return the seconds of a chunk's forward pass for one micro-batch."""
    work = [u.forward_s + traffic.exchange_s(u) for u in units]
    return _two_lanes(work, list(map(traffic.gather_s, units)), [0.0] * len(units))


def _backward_s(units: Sequence[Unit], traffic: _Traffic) -> float:
    """Return the seconds of a chunk's backward pass for one micro-batch."""
    # with recomputation the unit's forward runs a second time, with its exchange
    forwards = 1 if traffic.plan.recompute else 0
    work_s = []
    for unit in reversed(units):
        exchanges_s = (1 + forwards) * traffic.exchange_s(unit)
        work_s.append(unit.backward_s + forwards * unit.forward_s + exchanges_s)
    gathers_s = [traffic.gather_s(unit) for unit in reversed(units)]
    scatters_s = [traffic.scatter_s(unit) for unit in reversed(units)]
    return _two_lanes(work_s, gathers_s, scatters_s)


def _two_lanes(
    compute_s: Sequence[float], gather_s: Sequence[float], scatter_s: Sequence[float]
) -> float:
    """Return the end of a sequence of units: each is gathered, computed, then reduce-scattered.

    One lane computes and the other one communicates; the two overlap.
    """
    # Compute 2 s and 2 s, gathers 1 s and 1 s: only the first gather is not hidden, 5 s in all.
    # Scatters of 1 s and 3 s instead: the last one is not hidden, 4 + 3 = 7 s.
    gather_end = compute_end = scatter_end = 0.0
    for unit_s, gather, scatter in zip(compute_s, gather_s, scatter_s, strict=True):
        gather_end += gather
        compute_end = max(compute_end, gather_end) + unit_s
        # A unit without a reduce-scatter (in a forward pass) must not wait for the communication
        # lane.
        scatter_end = max(scatter_end, compute_end) + scatter if scatter else scatter_end
    # Gathers and reduce-scatters share the links, so their sum is a bound as well.
    return max(compute_end, scatter_end, sum(gather_s) + sum(scatter_s))


def _finished_s(
    cut: Cut, model: Model, traffic: _Traffic, timed: plans.PipelineTime, device: int
) -> float:
    """Return when a device has updated (and in ZeRO 1 and 2 gathered) its parameters."""
    plan = cut.plan
    backward = timed.last_backward(device)
    chunks = cut.of_device(device)
    # ZeRO 2 and 3 have sent the gradients after every micro-batch
    op = {0: "all_reduce", 1: "reduce_scatter"}.get(plan.zero_stage)
    gradient_ready_s = backward.start_s
    lane_end_s = 0.0
    last_chunk = backward.task.stage // plan.pipeline
    # The gradients of all other chunks are complete when the device's last task starts.
    for chunk in sorted(range(len(chunks)), key=lambda c: c == last_chunk):
        chunk_s = sum(unit.backward_s for unit in chunks[chunk]) or 1.0
        for unit in chunks[chunk][::-1]:
            if chunk == last_chunk:
                # The units of a chunk divide its task in proportion to their backward passes.
                share = unit.backward_s / chunk_s
                gradient_ready_s += share * (backward.end_s - backward.start_s)
            lane_end_s = max(lane_end_s, gradient_ready_s)
            lane_end_s += traffic.gradient_s(op, unit) if op else 0.0
    units = cut.units_of(device)
    # ZeRO shards the optimiser: a replica updates only its shard of the parameters.
    shard = sum(u.parameters for u in units) / (plan.data if plan.zero_stage else 1)
    end_s = max(lane_end_s, backward.end_s) + shard * model.update_s_per_parameter
    if plan.zero_stage in (1, 2):
        end_s += sum(traffic.gradient_s("all_gather", u) for u in units)
    return end_s


# -- times of collectives for groups of devices on a topology -------------------------------------
@dataclass(frozen=True)
class TopologyCosts:
    """Times of collectives that all groups of an axis run at once; results are cached.

    Only the first group is timed, together with the groups that have devices in the same servers
    and share its links. Times are interpolated between a few sizes.
    """

    topology: Topology
    _costs: dict[tuple[Any, ...], Interpolated] = field(default_factory=dict)
    _prepared: dict[tuple[str, Groups, str], Prepared] = field(default_factory=dict)

    def collective(self, op: str, plan: Plan, axis: str, size_bytes: float) -> float:
        """Return the seconds of a collective along an axis by the best algorithm for its size."""
        return self._cost(op, plan, axis)(size_bytes)

    def transfer(self, plan: Plan, size_bytes: float) -> float:
        """Return the seconds of the slowest transfer to a next stage, while all pipelines send."""
        return self._cost("transfer", plan, "pipeline")(size_bytes)

    def _cost(self, op: str, plan: Plan, axis: str) -> Interpolated:
        """Return the cost function of a collective; plans with equal groups share it."""
        key = (op, axis, plan.data, plan.tensor, plan.pipeline, plan.axes)
        if key not in self._costs:
            groups = self.groups_sharing_links(plan.groups(axis))
            cost = Interpolated(lambda size_bytes: self._timed(op, groups, size_bytes))
            self._costs[key] = self._costs.setdefault((op, groups), cost)
        return self._costs[key]

    def groups_sharing_links(self, groups: Sequence[tuple[int, ...]]) -> Groups:
        """Return the first group and the groups that have devices in the same servers."""
        server_of = {d: i for i, group in enumerate(self.topology.groups) for d in group}
        # 910a-roce:16 as D8 T2: of 8 tensor groups (0, 1), (2, 3), ... the four on server 0 run
        # together.
        first_servers = {server_of[device] for device in groups[0]}
        return tuple(g for g in groups if any(server_of[device] in first_servers for device in g))

    def _timed(self, op: str, groups: Groups, size_bytes: float) -> float:
        """Return the seconds of a collective that all `groups` run at the same time."""
        ranks = len(groups[0])
        if ranks == 1:
            return 0.0
        if op == "transfer":
            return self._hop(groups, size_bytes)
        quickest = collective_time(op, self.topology, size_bytes, placement=groups[0])
        if len(groups) == 1:
            return quickest.time_s
        key = (op, groups, quickest.algorithm)
        if key not in self._prepared:
            servers = servers_of(self.topology, groups[0])
            schedule = make(op, quickest.algorithm, ranks, groups=servers)
            places = tuple(device for group in groups for device in group)
            self._prepared[key] = prepare(
                side_by_side(schedule, len(groups)), self.topology, places
            )
        return self._prepared[key].time_s(size_bytes * (ranks if op == "all_to_all" else 1))

    def _hop(self, groups: Groups, size_bytes: float) -> float:
        """Return the seconds of the slowest of the transfers from one stage to the next."""
        all_devices = tuple(range(self.topology.size))
        block_numbers = np.zeros((len(groups), 1), np.int64)
        times_s = []
        # row i of the transposed groups: the devices of stage i in all pipelines
        for senders, receivers in pairwise(np.array(groups).T):
            hop = Round.of(senders, receivers, block_numbers)
            pattern = pattern_of(hop, self.topology, all_devices)
            times_s.append(pattern.time_s(size_bytes, self.topology))
        return max(times_s)


def side_by_side(schedule: Schedule, count: int) -> Schedule:
    """Return one schedule in which `count` groups run `schedule` at the same time, for timing.

    Rank r of group g is rank g * ranks + r. Only the rounds of the result are meaningful.
    """
    # Two rings of 2 ranks: the first round sends 1 -> 0, 0 -> 1, 3 -> 2 and 2 -> 3 at once.
    ranks = np.arange(count * schedule.ranks).reshape(count, -1)
    rounds = applied(schedule.rounds, ranks, np.arange(schedule.blocks)[None, :, None])
    return Schedule("all_reduce", schedule.algorithm, ranks.size, schedule.blocks, rounds)
