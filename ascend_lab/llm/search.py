"""Searches for the plan and batch with the most tokens per second under a latency limit.

The grid has all plans without a pipeline that use all devices and divide the decoder, with powers
of two as tp and ep, and batches that are powers of two times dp. A point is skipped without timing
it if its lower bound (`Model.lower_bound_s`) is above the limit, or if a timed point is at least as
good as the bound. So the answer is the same as if all points were timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.errors import CapacityError, InputError
from ascend_lab.llm.machine import Machine
from ascend_lab.llm.models import Decoder
from ascend_lab.llm.plan import Plan, decode, shard_of
from ascend_lab.llm.step import Model, Step
from ascend_lab.llm.times import KernelTimer

LARGEST_BATCH = 4096
"""Largest number of sequences of a point, of all groups together."""


@dataclass(frozen=True, slots=True)
class Plans:
    """The best step under the limit, the Pareto frontier, and how many of the points were timed.

    No step is better than a step of the frontier in both time and tokens per second. Of the grid's
    `points` that fit into memory, `timed` were timed; bounds ruled out the others.
    """

    best: Step
    frontier: tuple[Step, ...]
    points: int
    timed: int


def plans_of(decoder: Decoder, devices: int) -> Iterator[Plan]:
    """Yield the plans that use all devices, with powers of two as tp and ep."""
    # 8 devices without experts: (tp, dp) = (1, 8), (2, 4), (4, 2), (8, 1).
    powers = [2**bits for bits in range(11) if 2**bits <= devices]
    for tp in powers:
        if devices % tp:
            continue
        for ep in powers if decoder.experts is not None else [1]:
            yield Plan(tp=tp, ep=ep, dp=devices // tp)


def best_plans(
    decoder: Decoder,
    machine: Machine,
    devices: int,
    context: int,
    limit_s: float,
    number_format: str = "",
) -> Plans:
    """Return the plan and batch with the most tokens per second among decode steps within a limit.

    Raises `CapacityError` if the model fits in no plan, `InputError` if no plan is fast enough.
    """
    timer = KernelTimer(machine.chip, machine.topology)
    points = list(_points(decoder, machine, devices, context, number_format, timer))
    if not points:
        needed = f"devices with room for {decoder.title} and a sequence of {context} tokens"
        raise CapacityError(needed, f"{devices} of {machine.chip.name}", "take more devices")
    # The points with the best bounds come first: once timed, they rule out most of the others.
    points.sort(key=lambda point: point.batch / point.lower_bound_s, reverse=True)
    timed: list[Step] = []
    for point in points:
        # A point's least time gives the most tokens per second it could have: if a timed step is at
        # least as good in both, the point's own step cannot be on the frontier.
        is_beaten = any(
            step.time_s <= point.lower_bound_s
            and step.tokens_per_s >= point.batch / point.lower_bound_s
            for step in timed
        )
        if not is_beaten and point.lower_bound_s <= limit_s:
            timed.append(point.model.step(decode(point.batch, context)))
    in_limit = [step for step in timed if step.time_s <= limit_s]
    if not in_limit:
        # No bound within the limit: no step was timed, so the least bound stands for the time.
        fastest_s = min(
            (step.time_s for step in timed), default=min(point.lower_bound_s for point in points)
        )
        needed = f"a step within {limit_s * 1e3:g} ms"
        at_least = "" if timed else "at least "
        got = f"{at_least}{fastest_s * 1e3:.1f} ms on {devices} devices"
        raise InputError(needed, got, "raise the limit, or take more devices")
    best = max(in_limit, key=lambda step: (step.tokens_per_s, -step.time_s))
    return Plans(best, _frontier(in_limit), len(points), len(timed))


@dataclass(frozen=True, slots=True)
class _Point:
    """A plan and a batch that fit, and a lower bound of the seconds of their step."""

    model: Model
    batch: int
    lower_bound_s: float


def _points(
    decoder: Decoder,
    machine: Machine,
    devices: int,
    context: int,
    number_format: str,
    timer: KernelTimer,
) -> Iterator[_Point]:
    """Yield the points of the grid that fit into the memory of the devices."""
    for plan in plans_of(decoder, devices):
        try:
            shard_of(decoder, plan)
        except InputError:  # this plan does not divide the decoder
            continue
        # an unknown format is refused here, by name: no plan would help
        model = Model(decoder, machine, plan, number_format, timer)
        batch = plan.dp
        while batch <= LARGEST_BATCH:
            load = decode(batch, context)
            if not model.memory(load).fits:
                break
            yield _Point(model, batch, model.lower_bound_s(load))
            batch *= 2


def _frontier(steps: list[Step]) -> tuple[Step, ...]:
    """Return the Pareto-optimal steps in time and tokens per second, the shortest step first."""
    frontier: list[Step] = []
    # Of (10 ms, 100 tokens/s), (20 ms, 80) and (30 ms, 150), the first is better than the second.
    for step in sorted(steps, key=lambda step: (step.time_s, -step.tokens_per_s)):
        if not frontier or step.tokens_per_s > frontier[-1].tokens_per_s:
            frontier.append(step)
    return tuple(frontier)
