"""Searches for the quickest parallel plan of a training step, and gives its time and memory.

A `Plan` cuts a model over the axes data, tensor, pipeline (and experts); `plan_time` says how long
a step takes and what a device keeps; `best_plans` tries all plans for a number of devices and
returns those that fit into memory, the quickest first.
"""

# fmt: off
# isort: off
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from ascend_lab.cluster import Topology
from ascend_lab.errors import ClusterError
from ascend_lab.cluster.parallel.model import GraphModel, model_of
from ascend_lab.cluster.parallel.plan import (
    AXES, FixedModel, Model, Plan, Unit, bubble_share, orders, run_pipeline, state_bytes,
)
from ascend_lab.cluster.parallel.timing import (
    Cut, PlanTime, TopologyCosts, cut_model, plan_time,
)

__all__ = [
    "FixedModel", "GraphModel", "Plan", "PlanTime", "Ranking", "TopologyCosts", "Unit",
    "best_plans", "bubble_share", "cut_model", "model_of", "orders", "placements", "plan_time",
    "run_pipeline", "state_bytes",
]
# fmt: on
# isort: on
MAX_MICRO_BATCHES = 64
"""Largest number of micro-batches to try."""
VIRTUAL_STAGES = (2, 4)
"""Numbers of virtual stages per device to try for interleaving."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The quickest plans that fit into memory, the quickest first.

    `tried` counts all plans and `too_large` those that do not fit; plans that differ only in the
    order of their axes count once. `least_bytes` is the least memory with which some plan fits.
    """

    plans: tuple[PlanTime, ...]
    tried: int
    too_large: int
    least_bytes: float
    limit_bytes: float = float("inf")

    @property
    def best(self) -> PlanTime:
        """The quickest plan; raise `ClusterError` if none fits."""
        if not self.plans:
            least_bytes, got = (
                f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size:,.0f} bytes"
                for size in (self.least_bytes, self.limit_bytes)
            )
            needed = f"device memory of {least_bytes}, the least any plan needs"
            raise ClusterError(needed, got, "use more devices, a smaller batch or another chip")
        return self.plans[0]


def best_plans(
    model: Model,
    topology: Topology,
    devices: int,
    batch: int,
    *,
    memory_bytes: float = float("inf"),
    keep: int = 20,
) -> Ranking:
    """Return the `keep` quickest plans for a batch on `devices` devices; ties go to less memory.

    Plans that need more than `memory_bytes` a device are dropped. The others are timed in the order
    of their lower bounds, until the next bound is above the time of the last plan that is kept.
    Raises `ClusterError` if the topology has too few devices or the batch cannot be divided.
    """
    if not 1 <= devices <= topology.size:
        needed = f"{topology.name}: from 1 to {topology.size} devices"
        raise ClusterError(needed, str(devices), "choose a larger topology or fewer devices")
    costs = TopologyCosts(topology)
    cuts: list[Cut] = []
    least_bytes = float("inf")
    tried = 0
    for plan in shapes(devices, batch, model.tensor_degrees(), len(model.units(1, 1, False))):
        cut = cut_model(plan, model, batch)
        tried = tried + 1
        needed_bytes = max(m.total_bytes for m in cut.memory(model.optimizer))
        least_bytes = min(least_bytes, needed_bytes)
        if needed_bytes <= memory_bytes:
            cuts.append(cut)
    if not tried:
        needed = f"a batch of at least one sample on each of {devices} devices that plans can share"
        raise ClusterError(needed, str(batch), "raise the batch or use fewer devices")
    times: list[PlanTime] = []
    for bound_s, i in sorted((cut.bound_s, i) for i, cut in enumerate(cuts)):
        # Bounds rise from here on, so no later plan can be among the quickest either.
        if len(times) >= keep and bound_s > times[keep - 1].step_s:
            break
        places = placements(cuts[i].plan)
        times += [plan_time(plan, model, costs, batch, model.optimizer) for plan in places]
        times = sorted(times, key=lambda t: (t.step_s, t.memory_bytes, t.plan.label))[:keep]
    return Ranking(tuple(times), tried, tried - len(cuts), least_bytes, memory_bytes)


def shapes(devices: int, batch: int, tensor: Sequence[int], units: int) -> Iterator[Plan]:
    """Yield all plans in the default order of axes; their degrees multiply to `devices`.

    The numbers of micro-batches are powers of two. ZeRO is tried if there is a data axis, sequence
    parallelism if there is a tensor axis, and interleaving if there is a pipeline. GPipe is not
    tried: it takes as long as 1F1B and needs more memory.
    """
    # 2 devices, batch 4, tensor degrees 1 and 2, 8 units: 40 plans, from "D2 T1 P1" to "D1 T2 P1 m4
    # sequence recompute".
    for t, p in _tensor_and_pipeline(devices, tensor):
        d = devices // t // p
        rank_samples = batch // d if batch % d == 0 else 0
        zero_stages = range(4) if d > 1 else range(1)
        sequences = (False, True) if t > 1 else (False,)
        for m in _powers(rank_samples, p):
            options = product(_schedules(p, m, units), zero_stages, sequences, (False, True))
            for (schedule, virtual), zero_stage, sequence, recompute in options:
                yield Plan(
                    data=d,
                    tensor=t,
                    pipeline=p,
                    sequence=sequence,
                    zero_stage=zero_stage,
                    micro_batches=m,
                    schedule=schedule,
                    virtual=virtual,
                    recompute=recompute,
                )


def _tensor_and_pipeline(devices: int, tensor: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (tensor degree, pipeline stages) whose product divides `devices`."""
    for t in tensor:
        if devices % t == 0:
            for p in _divisors(devices // t):
                yield t, p


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _powers(samples: int, stages: int) -> list[int]:
    """Return the powers of two that divide `samples`; below `stages` at most the largest one."""
    # 12 samples: micro-batches 1, 2 and 4; with 4 stages only 4 keeps every stage busy.
    if not samples:
        return []
    powers = [2**k for k in range(MAX_MICRO_BATCHES.bit_length()) if samples % 2**k == 0]
    return [m for m in powers if m >= stages or m == powers[-1]]


def _schedules(stages: int, micro_batches: int, units: int) -> list[tuple[str, int]]:
    """Return the schedules to try, each with its number of virtual stages per device."""
    if stages > units:
        return []
    # 2 stages, 4 micro-batches, 8 units: 1F1B and interleaving by 2 and by 4. With 3 micro-batches
    # only 1F1B, since interleaving passes micro-batches in groups of one per stage.
    schedules = [("1f1b", 1)]
    if stages > 1 and micro_batches % stages == 0:
        schedules += [("interleaved", v) for v in VIRTUAL_STAGES if v * stages <= units]
    return schedules


def placements(plan: Plan) -> list[Plan]:
    """Return the plan with every order of its axes that assigns the devices differently."""
    # D2 T2 P2 has 6 orders; D4 T1 P1 has one, because an axis of 1 device changes no assignment.
    plans: dict[tuple[str, ...], Plan] = {}
    for order in permutations(AXES):
        key = tuple(axis for axis in order if getattr(plan, axis) > 1)
        plans.setdefault(key, replace(plan, axes=order))
    return list(plans.values())
