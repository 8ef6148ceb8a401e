"""The checks of chapter 26: right answers pass, wrong ones that look right do not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from two_sided import two_sided

from ascend_lab.lab.checks import (
    check_ex_26_1,
    check_ex_26_2,
    check_ex_26_3,
    check_ex_26_4,
    check_ex_26_5,
)
from ascend_lab.lab.checks.chapter26 import decide, devices_for, finishes, waits, who_stays
from ascend_lab.lab.figures import fig_knee

Answer = Callable[..., Any]


def lindley(gaps: Any, services: Any, floor: float = 0.0, shift: int = 0) -> list[float]:
    found = [0.0]
    for n, gap in enumerate(gaps):
        found.append(max(found[-1] + services[n + shift] - gap, floor))
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        lambda g, s: lindley(g, s, -math.inf),  # a wait below 0
        lambda g, s: lindley(g, s, shift=1),  # one's own service
        lambda g, s: lindley(g, s)[1:],  # the first forgotten
        lambda g, s: [max(a - b, 0) for a, b in zip([0, *s], [0, *g], strict=False)],  # no memory
        lambda g, s: [w + x for w, x in zip(lindley(g, s), s, strict=True)],  # the time to the end
    ],
)
def test_waits(wrong: Answer) -> None:
    two_sided(check_ex_26_1, lindley, wrong)
    assert check_ex_26_1(waits).passed


@pytest.mark.parametrize(
    "wrong",
    [
        lambda ages, most, delay: min(len(ages), most),  # never waits
        lambda ages, most, delay: most if len(ages) >= most else 0,  # waits for ever
        lambda ages, most, delay: decide(ages[::-1], most, delay),  # the youngest's age
        lambda ages, most, delay: len(ages) if decide(ages, most, delay) else 0,  # no maximum
        lambda ages, most, delay: (
            decide(ages, most, delay) if not ages or ages[0] != delay else 0
        ),  # one moment too late
    ],
)
def test_send_or_wait(wrong: Answer) -> None:
    two_sided(check_ex_26_2, decide, wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rate, a, t0, most, target: math.ceil(rate * (a + t0) / target),  # one at a time
        lambda rate, a, t0, most, target: math.ceil(rate * (a * most + t0) / most),  # all busy
        lambda rate, a, t0, most, target: int(rate * (a * most + t0) / most / target),  # down
        lambda rate, a, t0, most, target: math.ceil(rate * a / target),  # no start
        lambda rate, a, t0, most, target: rate * (a * most + t0) / most / target,  # a part of one
    ],
)
def test_devices(wrong: Answer) -> None:
    two_sided(check_ex_26_3, devices_for, wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda lengths, block, blocks: len(lengths),
        lambda lengths, block, blocks: who_stays([n - 1 for n in lengths], block, blocks),
        lambda lengths, block, blocks: who_stays(sorted(lengths), block, blocks),  # not in order
        lambda lengths, block, blocks: min(len(lengths), blocks * block // max(lengths, default=1)),
        lambda lengths, block, blocks: sum(
            sum(lengths[: k + 1]) + k + 1 <= block * blocks for k in range(len(lengths))
        ),  # tokens in place of blocks
    ],
)  # fmt: skip
def test_who_stays(wrong: Answer) -> None:
    two_sided(check_ex_26_4, who_stays, wrong)


def own(times: Any, t0: float, a: float, most: int, delay: float, *, join: bool = True,
        from_last: bool = False, full: bool = True) -> list[float]:  # fmt: skip
    ends: list[float] = []
    free, i = 0.0, 0
    while i < len(times):
        filled = times[i + most - 1] if full and i + most <= len(times) else math.inf
        first = max(free, times[i]) if from_last else times[i]
        start = max(free, times[i], min(first + delay, filled))
        size = 0
        while i + size < len(times) and size < most and times[i + size] <= start:
            size += 1
        size = size if join else 1
        free = start + t0 + a * size
        ends += [free] * size
        i += size
    return ends


@pytest.mark.parametrize(
    "wrong",
    [
        lambda times, t0, a, most, delay: own(times, t0, a, most, 0.0),  # no delay
        lambda *case: own(*case, join=False),  # one at a time
        lambda *case: own(*case, from_last=True),  # the delay counts from the free instance
        lambda *case: own(*case, full=False),  # a full batch waits all the same
        lambda times, t0, a, most, delay: own(times, t0 + a, 0.0, most, delay),  # as long as one
    ],
)
def test_a_server_of_ones_own(wrong: Answer) -> None:
    two_sided(check_ex_26_5, own, wrong)
    assert check_ex_26_5(finishes).passed


def test_the_knee_tells_both_servers() -> None:
    alt = fig_knee([0.001, 0.0015, 0.002], max_batch=3).alt_text
    assert "capacity 1000" in alt and "capacity 1500" in alt
