"""Checks of chapters 23 and 26.

23: micro-batches, bytes of a model's state, bytes sent, two matrices split over ranks, all plans, a
pipeline schedule.
26: waits, the batcher's decision, devices, sequences that keep their blocks, a whole server.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "whose tasks wait for each other for ever".
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from ascend_lab.cluster.parallel import bubble_share, orders, run_pipeline, state_bytes
from ascend_lab.cluster.parallel.plan import BACKWARD, FORWARD, PipelineTime, Task
from ascend_lab.deploy.serving import Arrivals, Policy, Scenario, Service, Step, simulate_serving
from ascend_lab.errors import ClusterError
from ascend_lab.lab.checks import core as ex

Values = np.ndarray

# -- chapter 23 ------------------------------------------------------------------------------------
Pass = tuple[Values, Values, Values, Values]
"""Output, and the slopes of input, first and second matrix."""


def least_micro_batches(stages: int, bubble: float) -> int:
    """Return the least m >= 1 with (P - 1) / (m + P - 1) <= bubble, P the stages.

    It counts up from just below the solution of the equation, which may be off by a rounding.
    """
    m = max(1, math.floor((stages - 1) * (1 / bubble - 1)) - 1)
    while bubble_share(stages, m) > bubble:
        m += 1
    return m


def sent_bytes(
    data: int, tensor: int, pipeline: int, layers: int, width: int, length: int, batch: int
) -> tuple[float, float, float]:
    """Return the bytes the busiest device sends in a step along data, tensor, pipeline.

    Numbers have 2 bytes. Rings send 2 (n - 1) / n of their tensor: of the weights among `data`
    devices, of the activations among `tensor` devices four times a layer. A middle stage of a
    pipeline sends activations to both sides.
    """
    # A transformer layer has 12 width^2 weights: 4 width^2 of attention, 8 of its two matrices.
    weights_bytes = 2.0 * 12 * layers * width**2 / (tensor * pipeline)
    activation_bytes = 2.0 * batch / data * length * width
    return (
        2 * (data - 1) / data * weights_bytes,
        layers / pipeline * 4 * 2 * (tensor - 1) / tensor * activation_bytes,
        min(pipeline - 1, 2) * activation_bytes,
    )


def _judge_ranks(found: Any, ranks: int, expected: Pass) -> str | None:
    """Judge four lists of arrays, one array a rank: a product of two matrices and its slopes."""
    try:
        lists = [[np.asarray(array, float) for array in arrays] for arrays in found]
    except (TypeError, ValueError):
        return "expected four lists of arrays"
    if [len(arrays) for arrays in lists] != [ranks] * 4:
        return f"expected four lists of {ranks} arrays"
    output, x, up, down = expected
    expected_lists = (
        ("output", [output] * ranks),
        ("slope of x", [x] * ranks),
        ("slope of its columns", np.split(up, ranks, 1)),
        ("slope of its rows", np.split(down, ranks, 0)),
    )
    for (name, right_arrays), arrays in zip(expected_lists, lists, strict=True):
        for rank, (array, right) in enumerate(zip(arrays, right_arrays, strict=True)):
            if array.shape != right.shape:
                return f"where on rank {rank} the {name} has shape {array.shape}, not {right.shape}"
            if places := np.argwhere(~np.isclose(array, right)).tolist():
                value = array[tuple(places[0])]
                right_value = right[tuple(places[0])]
                element = f"the {name} at {places[0]}"
                return f"where on rank {rank} {element} is {value:.4g}, expected {right_value:.4g}"
    return None


def degrees(devices: int, heads: int, layers: int, batch: int) -> list[tuple[int, int, int]]:
    """Return every (data, tensor, pipeline) of so many devices that divides what it cuts."""
    sides = product(range(1, devices + 1), repeat=2)
    triples = ((d, t, devices // (d * t)) for d, t in sides if devices % (d * t) == 0)
    return [(d, t, p) for d, t, p in triples if batch % d == heads % t == layers % p == 0]


@ex.judged(edges=[(1, 0.5), (2, 0.9), (4, 0.2)], stages=range(1, 40), bubble=ex.between(0.01, 0.95))
def check_ex_23_1(got: Any, case: ex.Case) -> str | None:
    """Check `fn(stages, bubble)`: the least micro-batches whose bubble is at most a share."""
    if isinstance(got, bool) or not isinstance(got, int | np.integer) or got < 1:
        return "expected a whole number of at least 1"
    best = least_micro_batches(**case)
    share = bubble_share(case["stages"], int(got))
    return f"with a bubble of {share:.4f}, expected {best}" if int(got) != best else None


@ex.against(
    lambda parameters, ranks, stage: sum(state_bytes(parameters, ranks, stage)),
    edges=[(10**9, 64, stage) for stage in range(4)],
    rel_tol=1e-9,
)
def check_ex_23_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(parameters, ranks, stage)`: bytes of weights, gradients, Adam's state a device."""
    return ex.drawn(rng, parameters=range(1, 10**10), ranks=range(1, 1025), stage=range(4))


@ex.against(
    sent_bytes,
    edges=[
        (1, 1, 1, 8, 64, 128, 16),
        (8, 1, 1, 8, 64, 128, 16),
        (1, 8, 1, 8, 64, 128, 16),
        (1, 1, 2, 8, 64, 128, 16),
        (1, 1, 8, 8, 64, 128, 16),
    ],
    rel_tol=1e-9,
)
def check_ex_23_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(data, tensor, pipeline, layers, width, length, batch)`: bytes a device sends."""
    data, tensor, pipeline = (int(2**k) for k in rng.integers(0, 5, 3))
    return {
        "data": data,
        "tensor": tensor,
        "pipeline": pipeline,
        "layers": pipeline * int(rng.integers(1, 9)),
        "width": 64 * int(rng.integers(1, 65)),
        "length": int(2 ** rng.integers(7, 12)),
        "batch": data * int(rng.integers(1, 33)),
    }


@ex.judged(
    edges=[(1, 1, 1, 1), (8, 1, 1, 1), (64, 40, 48, 256)],
    devices=(1, 2, 6, 8, 12, 16, 24, 64, 96),
    heads=(1, 12, 16, 25, 40),
    layers=(1, 12, 24, 48),
    batch=(1, 8, 32, 96, 256),
)
def check_ex_23_5(got: Any, case: ex.Case) -> str | None:
    """Check `fn(devices, heads, layers, batch)`: every (data, tensor, pipeline) that can be."""
    try:
        plans = [tuple(int(n) for n in plan) for plan in got]
    except (TypeError, ValueError):
        return "expected triples (data, tensor, pipeline)"
    right = set(degrees(**case))
    if missing := sorted(right - set(plans)):
        return f"expected {missing[0]} too"
    if extra := sorted(set(plans) - right):
        return f"expected no {extra[0]}"
    return "expected every plan once" if len(plans) != len(right) else None


def _with_all_reduce(fn: Any) -> Any:
    """Return a function that gives `fn` an all-reduce, and returns its sums beside the answer."""

    def counted(x: Values, ups: list[Values], downs: list[Values], slope: Values) -> Any:
        sums: list[Values] = []

        def all_reduce(arrays: list[Values]) -> list[Values]:
            total = np.sum(np.stack(list(arrays)), axis=0)
            sums.append(total)
            return [total.copy() for _ in arrays]

        return fn(x, ups, downs, slope, all_reduce), sums

    return counted


def _judge_tensor_pair(got: Any, case: ex.Case) -> str | None:
    """Judge relu(x up) down and its slopes on several ranks, and the all-reduces between them."""
    found, sums = got
    ranks = len(case["ups"])
    x = case["x"]
    up = np.hstack(case["ups"])
    down = np.vstack(case["downs"])
    hidden = x @ up
    slope = case["slope"]
    active = np.maximum(hidden, 0)
    back = (slope @ down.T) * (hidden > 0)
    expected = active @ down, back @ up.T, x.T @ back, active.T @ slope
    wrong = _judge_ranks(found, ranks, expected)
    if wrong is not None:
        return wrong
    if len(sums) > 2 or (ranks > 1 and len(sums) < 2):
        return f"after {len(sums)} all-reduces, expected 2: ranks see nothing else of each other"
    # With several ranks one sum is the output, the other the slope of x, in either order.
    for total in sums:
        if not any(_is_close(total, right) for right in expected[:2]):
            return f"with an all-reduce to {ex.show(total)}, which is neither result nor slope"
    return None


def _is_close(a: Values, b: Values) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b))


_BY_HAND = {
    "x": np.array([[1.0]]),
    "ups": [np.array([[1.0]]), np.array([[2.0]])],
    "downs": [np.array([[1.0]]), np.array([[1.0]])],
    "slope": np.array([[2.0]]),
}
"""Two ranks with one column each: the result is 1 + 2 = 3, the slope of x 2 (1 + 2) = 6."""
_PADDED = {
    "x": np.array([[0.0, 0.0], [1.0, -1.0]]),
    "ups": [np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]])],
    "downs": [np.array([[1.0, 2.0]]), np.array([[3.0, 4.0]])],
    "slope": np.ones((2, 2)),
}
"""A first token of zeros: relu gets 0, where its slope counts as 0."""


@ex.judged(_judge_tensor_pair, edges=[_BY_HAND, _PADDED], wrap=_with_all_reduce)
def check_ex_23_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(x, ups, downs, slope, all_reduce)`: relu(x up) down and its slopes on t ranks."""
    tokens, width, ranks = (int(n) for n in rng.integers(1, 6, 3))
    hidden = ranks * int(rng.integers(1, 5))
    return {
        "x": rng.normal(size=(tokens, width)),
        "ups": np.split(rng.normal(size=(width, hidden)), ranks, 1),
        "downs": np.split(rng.normal(size=(hidden, width)), ranks, 0),
        "slope": rng.normal(size=(tokens, width)),
    }


def _run(lists: list[list[Task]], stages: int, virtual: int) -> PipelineTime:
    """Return the times of a pipeline whose backward passes take twice as long as the forward."""
    forward, backward = ([work / virtual] * stages * virtual for work in (1, 2))
    return run_pipeline(lists, forward, backward, [0.05] * (stages * virtual - 1))


def _judge_pipeline(got: Any, case: ex.Case) -> str | None:
    """Judge a pipeline schedule: complete, as quick as ours, and with as few activations held."""
    stages, micro, virtual = case.values()
    try:
        lists = [[Task(int(s), int(m), way) for s, m, way in device] for device in got]
    except (TypeError, ValueError):
        return "expected a list of (virtual stage, micro-batch, way) a device"
    expected_tasks = {
        Task(stage, batch, way)
        for stage, batch, way in product(range(stages * virtual), range(micro), (FORWARD, BACKWARD))
    }
    tasks = [task for device_tasks in lists for task in device_tasks]
    # Virtual stage s lives on device s mod stages.
    are_placed = all(
        task.stage % stages == device
        for device, device_tasks in enumerate(lists)
        for task in device_tasks
    )
    are_complete = len(tasks) == len(expected_tasks) and set(tasks) == expected_tasks
    if len(lists) != stages or not are_placed or not are_complete:
        return f"expected each of the {len(expected_tasks)} tasks once, on its device"
    try:
        time = _run(lists, stages, virtual)
    except ClusterError:
        return "whose tasks wait for each other for ever"
    our_schedule = "interleaved" if virtual > 1 else "1f1b"
    ours = _run(orders(our_schedule, stages, micro, virtual), stages, virtual)
    if time.end_s > ours.end_s * (1 + 1e-9):
        return f"which end at {time.end_s:.2f}, expected {ours.end_s:.2f} at most"
    for device, (held, our_held) in enumerate(zip(time.peak_held, ours.peak_held, strict=True)):
        if sum(held.values()) > sum(our_held.values()):
            return f"with which device {device} holds {sum(held.values())}, expected fewer"
    return None


@ex.judged(_judge_pipeline, edges=[(1, 3, 1), (4, 2, 1), (4, 8, 1), (4, 4, 2), (3, 6, 4)], cases=12)
def check_ex_23_6(rng: ex.Rng) -> ex.Case:
    """Check `fn(stages, micro, virtual)`: tasks of each device, as quick and small as ours."""
    stages = int(rng.integers(2, 7))
    virtual = int(rng.integers(1, 4))
    micro = int(rng.integers(1, 13)) if virtual == 1 else stages * int(rng.integers(1, 4))
    return {"stages": stages, "micro": micro, "virtual": virtual}


# -- chapter 26 ------------------------------------------------------------------------------------
CLOSE = 1e-9


def waits(gaps: Sequence[float], services: Sequence[float]) -> list[float]:
    """Return how long each request waits: W' = max(W + S - gap, 0), the first not at all."""
    wait_times = [0.0]
    for gap, service in zip(gaps, services, strict=False):
        wait_times.append(max(wait_times[-1] + service - gap, 0.0))
    return wait_times


def decide(ages: Sequence[float], max_batch: int, delay: float) -> int:
    """Return how many of the waiting requests to send now, the oldest first; 0: wait."""
    is_full = len(ages) >= max_batch
    is_due = bool(ages) and ages[0] >= delay
    return min(len(ages), max_batch) if is_full or is_due else 0


def finishes(times: Sequence[float], t0: float, a: float, most: int, delay: float) -> Values:
    """Return when each request is answered by one instance with a dynamic batcher."""
    step = Step("model", Service("deterministic", t0, a), Policy(1, most, delay))
    return simulate_serving(Scenario(Arrivals(times_s=tuple(times)), (step,), len(times))).finish_s


@ex.against(waits, edges=[([], [1.0]), ([1.0], [3.0, 1.0])], rel_tol=CLOSE)
def check_ex_26_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(gaps, services)`: how long each request waits for a single server."""
    count = int(rng.integers(1, 12))
    gaps = rng.exponential(1.0, count - 1)
    services = rng.exponential(0.9, count)
    return {"gaps": gaps.tolist(), "services": services.tolist()}


@ex.against(
    decide,
    edges=[
        ([], 4, 0.0),
        ([0.0], 4, 0.0),
        ([0.0], 1, 5.0),
        ([5.0, 1.0], 4, 5.0),
        ([4.0, 1.0], 4, 5.0),
        ([9.0, 8.0, 7.0], 2, 5.0),
    ],
)
def check_ex_26_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(ages, max_batch, delay)`: how many requests a free instance takes now."""
    ages = sorted(rng.exponential(2.0, int(rng.integers(0, 9))).tolist(), reverse=True)
    delay = float(rng.choice([0.0, 1.0, 3.0]))
    return {"ages": ages, "max_batch": int(rng.integers(1, 9)), "delay": delay}


@ex.against(
    lambda rate, a, t0, most, target: math.ceil(rate * (a * most + t0) / most / target - 1e-9),
    edges=[(1000.0, 0.001, 0.001, 1, 1.0), (2000.0, 0.002, 0.001, 4, 0.5)],
)
def check_ex_26_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(rate, a, t0, most, target)`: devices for a rate, at a share of their capacity."""
    costs = {
        "rate": ex.between(100, 9000),
        "a": ex.between(1e-4, 2e-3),
        "t0": ex.between(1e-4, 5e-3),
    }
    return ex.drawn(rng, **costs, most=range(1, 33), target=ex.between(0.5, 0.95))


@ex.against(
    edges=[([], 4, 2), ([4, 4], 4, 3), ([3, 4], 4, 3), ([7, 1, 1], 4, 2)],
    lengths=lambda rng: rng.integers(1, 40, int(rng.integers(1, 9))).tolist(),
    block=range(1, 9),
    blocks=range(8, 40),
)
def check_ex_26_4(lengths: Sequence[int], block: int, blocks: int) -> int:
    """Check `fn(lengths, block, blocks)`: how many sequences, in order, get another token."""
    total = 0
    for sequences, length in enumerate(lengths):
        total += -(-(length + 1) // block)
        if total > blocks:
            return sequences
    return len(lengths)


def _judge_finishes(got: Any, case: ex.Case) -> str | None:
    """Judge the times at which a batching server answers by those of a simulated one."""
    expected = finishes(*case.values())
    try:
        times = np.array(got, float)
    except (TypeError, ValueError):
        return "expected a time for each request"
    if times.shape != (len(expected),):
        return f"expected {len(expected)} times"
    for n in np.flatnonzero(~np.isclose(times, expected, rtol=1e-9, atol=1e-9)):
        return f"whose request {n} ends at {times[n]:.4f}, expected {expected[n]:.4f}"
    return None


_TIMES = [0.0, 0.1, 0.2, 3.0, 3.1, 9.0]


@ex.judged(
    _judge_finishes,
    edges=[
        (_TIMES, 1.0, 0.1, 2, 0.0),
        (_TIMES, 1.0, 0.1, 4, 0.5),
        (_TIMES, 4.0, 0.0, 2, 0.15),
        ([1.0], 1.0, 0.1, 4, 2.0),
    ],
)
def check_ex_26_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(times, t0, a, most, delay)`: when a batching server answers each request."""
    times = np.cumsum(rng.exponential(0.5, int(rng.integers(1, 30)))).tolist()
    costs = {"t0": ex.between(0.1, 1.5), "a": ex.between(0, 0.4)}
    return {"times": times, **ex.drawn(rng, **costs, most=range(1, 6), delay=(0.0, 0.2, 1.0))}
