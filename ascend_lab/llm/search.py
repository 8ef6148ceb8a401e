"""The best plan under a latency limit, exact over its grid, and the frontier of all plans.

The grid: tp, ep and dp that use all devices and divide the decoder, batches of powers of two. A
point is left out without timing it if even its least time (`Model.least_s`) is above the limit, or
is no better than a point that was timed. So the answer is that of timing all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_lab.errors import CapacityError, InputError
from ascend_lab.llm.machine import Machine
from ascend_lab.llm.models import Decoder
from ascend_lab.llm.plan import Plan, decode
from ascend_lab.llm.step import Model, Step
from ascend_lab.llm.times import Times

LARGEST_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Plans:
    """What a search found: the best step under the limit, the frontier, and how many it timed.

    No point of the frontier is beaten in both step time and tokens per second by another.
    """

    best: Step
    frontier: tuple[Step, ...]
    points: int
    timed: int


def plans_of(decoder: Decoder, devices: int) -> Iterator[Plan]:
    """Yield the plans that use all devices: tp and ep are powers of two."""
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
    """Return the plan and batch with the most tokens per second whose decode step is in a limit.

    Raises `CapacityError` if no plan has room for the model, `InputError` if none is quick enough.
    """
    times = Times(machine.chip, machine.topology)
    points = list(_points(decoder, machine, devices, context, number_format, times))
    if not points:
        needed = f"devices with room for {decoder.title} and a sequence of {context} tokens"
        raise CapacityError(needed, f"{devices} of {machine.chip.name}", "take more devices")
    # The points that promise most come first: they leave least for the others to beat.
    points.sort(key=lambda point: point.batch / point.least_s, reverse=True)
    timed: list[Step] = []
    for point in points:
        # A point's least time gives the most tokens per second it could have: if a timed step is at
        # least as good in both, the point's own step cannot be on the frontier.
        is_beaten = any(
            step.time_s <= point.least_s and step.tokens_per_s >= point.batch / point.least_s
            for step in timed
        )
        if not is_beaten and point.least_s <= limit_s:
            timed.append(point.model.step(decode(point.batch, context)))
    in_limit = [step for step in timed if step.time_s <= limit_s]
    if not in_limit:
        quickest = min(point.least_s for point in points)
        needed = f"a step within {limit_s * 1e3:g} ms"
        got = f"at least {quickest * 1e3:.1f} ms on {devices} devices"
        raise InputError(needed, got, "raise the limit, or take more devices")
    best = max(in_limit, key=lambda step: (step.tokens_per_s, -step.time_s))
    return Plans(best, _frontier(in_limit), len(points), len(timed))


@dataclass(frozen=True, slots=True)
class _Point:
    """A plan and a batch that fit, and the least seconds of their step."""

    model: Model
    batch: int
    least_s: float


def _points(
    decoder: Decoder,
    machine: Machine,
    devices: int,
    context: int,
    number_format: str,
    times: Times,
) -> Iterator[_Point]:
    """Yield the points of the grid that the devices have room for."""
    for plan in plans_of(decoder, devices):
        try:
            model = Model(decoder, machine, plan, number_format, times)
        except InputError:  # this plan does not divide the decoder
            continue
        batch = plan.dp
        while batch <= LARGEST_BATCH:
            load = decode(batch, context)
            if not model.memory(load).fits:
                break
            yield _Point(model, batch, model.least_s(load))
            batch *= 2


def _frontier(steps: list[Step]) -> tuple[Step, ...]:
    """Return the steps that no other beats in both time and tokens per second, quickest first."""
    frontier: list[Step] = []
    # Steps of (10 ms, 100 tokens/s), (20 ms, 80), (30 ms, 150): the second is beaten by the first.
    for step in sorted(steps, key=lambda step: (step.time_s, -step.tokens_per_s)):
        if not frontier or step.tokens_per_s > frontier[-1].tokens_per_s:
            frontier.append(step)
    return tuple(frontier)
