"""What a plan's groups of devices take to communicate where the plan puts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.cluster import Round, Schedule, Topology, collective_time, make, together
from ascend_lab.cluster.collectives.choice import servers_of
from ascend_lab.cluster.patterns import Plan as Prepared
from ascend_lab.cluster.patterns import pattern_of, plan_of
from ascend_lab.parallel.plans.plan import Plan
from ascend_lab.train.cost import Interpolated

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TopologyCosts:
    """Times of collectives of all groups of an axis at once; those found are remembered.

    The first group stands for all; the groups that have devices in its servers run beside it and
    share the links. Sizes in between are interpolated.
    """

    topology: Topology
    _known: dict[tuple[str, Groups], Interpolated] = field(default_factory=dict)
    _prepared: dict[tuple[str, Groups, str], Prepared] = field(default_factory=dict)
    _places: dict[tuple[object, ...], Groups] = field(default_factory=dict)
    _found: dict[tuple[object, ...], Interpolated] = field(default_factory=dict)

    def collective(self, op: str, plan: Plan, axis: str, size_bytes: float) -> float:
        """Return the seconds of an operation along an axis, the best algorithm for its size."""
        return self._cost(op, plan, axis)(size_bytes)

    def transfer(self, plan: Plan, size_bytes: float) -> float:
        """Return the seconds from a stage to the next, all pipelines at once, the slowest hop."""
        return self._cost("transfer", plan, "pipeline")(size_bytes)

    def _cost(self, op: str, plan: Plan, axis: str) -> Interpolated:
        where = (axis, plan.data, plan.tensor, plan.pipeline, plan.expert, plan.axes)
        key = (op, *where)
        if key not in self._found:
            if where not in self._places:
                self._places[where] = self.beside(plan.groups(axis))
            groups = self._places[where]
            if (op, groups) not in self._known:
                self._known[op, groups] = Interpolated(lambda n: self._timed(op, groups, n))
            self._found[key] = self._known[op, groups]
        return self._found[key]

    def beside(self, groups: Sequence[tuple[int, ...]]) -> Groups:
        """Return the first group and those that have devices in its servers."""
        homes = {d: i for i, group in enumerate(self.topology.groups) for d in group}
        near = {homes[device] for device in groups[0]}
        return tuple(g for g in groups if any(homes[device] in near for device in g))

    def _timed(self, op: str, groups: Groups, size_bytes: float) -> float:
        if len(groups[0]) == 1:
            return 0.0
        if op == "transfer":
            return self._hop(groups, size_bytes)
        return self._at_once(op, groups, size_bytes)

    def _at_once(self, op: str, groups: Groups, size_bytes: float) -> float:
        first = collective_time(op, self.topology, size_bytes, placement=groups[0])
        if len(groups) == 1:
            return first.time_s
        key = (op, groups, first.algorithm)
        ranks = len(groups[0])
        if key not in self._prepared:
            servers = servers_of(self.topology, np.array(groups[0]))
            one = make(op, first.algorithm, ranks, groups=servers)
            self._prepared[key] = plan_of(
                side_by_side(one, len(groups)), self.topology, np.array(groups).reshape(-1)
            )
        blocks_per_part = ranks if op == "all_to_all" else 1
        return self._prepared[key].time_s(size_bytes * blocks_per_part)

    def _hop(self, groups: Groups, size_bytes: float) -> float:
        pairs = np.array(groups)
        everyone = np.arange(self.topology.size)
        times = []
        for stage in range(pairs.shape[1] - 1):
            rows = np.zeros((len(pairs), 1), np.int64)
            step = Round.of(pairs[:, stage], pairs[:, stage + 1], rows)
            times.append(
                pattern_of(step, self.topology, everyone).time_s(size_bytes, self.topology)
            )
        return max(times)


def side_by_side(schedule: Schedule, count: int) -> Schedule:
    """Return `count` groups that run the same schedule at once, as one to be timed.

    Group g's rank r is rank g * ranks + r. Only its rounds mean something: sizes count its blocks.
    """
    p = schedule.ranks
    rounds = tuple(
        together(
            Round(step.sources + g * p, step.targets + g * p, step.blocks, step.reduces)
            for g in range(count)
        )
        for step in schedule.rounds
    )
    return Schedule("all_reduce", schedule.algorithm, p * count, schedule.blocks, rounds)
