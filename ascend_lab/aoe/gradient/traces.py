"""The gradients of one backward pass, from a trace of the PyTorch profiler.

A Chrome trace of Kineto (`ParamCommsUtils.hpp`, `saveNcclMeta` in `profiler/util.cpp`) holds

* `record_param_comms`, on the host, for every collective, with `Collective name`, `In msg nelems`,
  `dtype`; device kernels such as `ncclDevKernel_AllReduce_...` (category `kernel`) carry the same.
  One event is a bucket of DDP: record with a small `bucket_cap_mb`, so that it is one gradient.
* `nccl:all_reduce`, around the same on the host; older releases have only this, with `Input Dims`
  and `Input type` if `record_shapes=True`.
* `torch::autograd::AccumulateGrad`, when a gradient is done, with the same two. These are host
  times: with a device they say when work was given to it.
* `autograd::engine::evaluate_function: ...` where backward runs.
* `ProfilerStep#n` around a step, if the recording had a schedule; `Optimizer.step#...` at its end.

Read are the all-reduces of the device, ready when they begin (an upper bound where one waits for
another); without a device the AccumulateGrad events with shapes, ready when they end; else what the
host has, all-reduces before AccumulateGrad. A trace may hold many steps, and a step many backward
passes. Taken is the last pass of the last step, told apart in this order:

1. steps by `ProfilerStep#`, without any by the ends of `Optimizer.step#`;
2. passes by what runs between them: an operator of a forward pass, outside all backward functions;
3. kernels of the device, which run behind the host, by as many equal parts as the host has passes.

Where a trace shows neither steps nor passes and its gradients are one row several times over, it is
refused. Times count from the first backward function of the pass, or, without one, from the first
gradient: that moves all ends alike and no split.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ascend_lab.aoe.gradient.splits import MOST_BYTES, Gradient
from ascend_lab.errors import InputError
from ascend_lab.limits import json_number, shown

Event = dict[str, Any]
Row = tuple[str, float, int, str]
"""Name, time in microseconds, bytes, number format."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
BACKWARD = "autograd::engine::evaluate_function"
STEP = "ProfilerStep#"
OPTIMISER = "Optimizer.step"
FORWARD = ("aten::", "Optimizer.", "nn.Module")
"""Beginnings of names of what runs between two backward passes."""
BYTES = {
    "double": 8,
    "long": 8,
    "int64": 8,
    "float": 4,
    "int": 4,
    "half": 2,
    "bfloat16": 2,
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "short": 2,
    "char": 1,
    "byte": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
SHORT = {"float": "fp32", "float32": "fp32", "half": "fp16", "float16": "fp16", "bfloat16": "bf16"}
REMEDY = "profile with torch.profiler.schedule and step(), which marks the steps"


def gradients_of_trace(path: str, events: Sequence[Any]) -> tuple[Gradient, ...]:
    """Return the gradients of the last backward pass of a trace, in the order of their times.

    Raises `InputError` for a trace without any, and for one whose passes cannot be told apart.
    """
    # Phase "X" is a complete event, with a begin `ts` and a duration `dur`, both in microseconds.
    timed = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
    timed = [e for e in timed if None not in map(json_number, (e.get("ts"), e.get("dur", 0)))]
    timed.sort(key=_begin)
    candidates, row_of = _source(path, timed)
    starts = _pass_starts(timed)
    if candidates[0].get("cat") == "kernel":
        begin, chosen = _of_device(path, timed, candidates, starts)
    else:
        begin, chosen = _of_host(path, timed, candidates, starts)
    rows = []
    for place, event in enumerate(chosen):
        where = f"{path} event {event.get('name')} at {event['ts']}"
        rows.append(row_of(where, place, event))
    start = min(at for _, at, _, _ in rows)
    backward = (_begin(e) for e in timed if str(e.get("name")).startswith(BACKWARD))
    # Times count from the first backward function; a trace of the device alone has none.
    zero = next((t for t in backward if begin <= t <= start), start)
    return tuple(
        Gradient(name, max(at - zero, 0.0) * 1e-6, size, dtype) for name, at, size, dtype in rows
    )


def _begin(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event.get("dur", 0))


def _source(
    path: str, timed: Sequence[Event]
) -> tuple[list[Event], Callable[[str, int, Event], Row]]:
    """Return the events that stand for gradients, and the function that reads such an event."""
    reduces = [e for e in timed if _is_all_reduce(e)]
    kernels = [e for e in reduces if e.get("cat") == "kernel"]
    has_device = any(e.get("cat") == "kernel" for e in timed)
    shaped = [e for e in timed if _shape(e) is not None]
    _check_shapes(path, timed)
    sums = [e for e in shaped if e.get("name") == ACCUMULATE]
    older = [e for e in shaped if str(e.get("name")).endswith(":all_reduce")]
    # The first kind of event that the trace has, from the most exact time to the least.
    sources: list[tuple[list[Event], Callable[[str, int, Event], Row]]] = [
        (kernels, _reduce_row),
        ([] if has_device else sums, _sum_row),
        (reduces, _reduce_row),
        (older, _older_row),
        (sums, _sum_row),
    ]
    for events, row_of in sources:
        if events:
            return events, row_of
    needed = f"{path}: all-reduces with sizes, or AccumulateGrad events with shapes"
    remedy = "profile a DDP step with record_shapes=True"
    raise InputError(needed, f"none of {len(timed)} timed events", remedy)


def _check_shapes(path: str, timed: Sequence[Event]) -> None:
    """Raise `InputError` if some gradients say their shape and others do not: none is left out.

    A gradient that is undefined has an empty type; a trace recorded without shapes has none.
    """
    sums = [e for e in timed if e.get("name") == ACCUMULATE]
    silent = [e for e in sums if _shape(e) is None and not _is_undefined(e)]
    if silent and len(silent) < len(sums):
        where = f"{path} event {ACCUMULATE} at {silent[0]['ts']}"
        got = shown(_args(silent[0]).get("Input Dims"))
        raise InputError(f"{where}: Input Dims and Input type", got, "record_shapes=True")


def _is_undefined(event: Event) -> bool:
    types = _args(event).get("Input type")
    return isinstance(types, list) and not any(types)


# -- steps and passes -----------------------------------------------------------------------------
def _marks(timed: Sequence[Event], *, of_device: bool = False) -> list[float]:
    """Return when the steps begin that are marked, on the host or on the device; none without."""
    marks = [e for e in timed if (e.get("cat") == "gpu_user_annotation") == of_device]
    profiled = {_begin(e) for e in marks if str(e.get("name", "")).startswith(STEP)}
    if profiled:
        return sorted(profiled)
    optimised = {_end(e) for e in marks if str(e.get("name", "")).startswith(OPTIMISER)}
    return sorted({-math.inf, *optimised}) if optimised else []


def _last_step(begins: Sequence[float], events: Sequence[Event]) -> tuple[float, float]:
    """Return begin and end of the last step with one of the events; of all time without steps."""
    # Step k lasts until step k + 1 begins; the last one, to the end of the trace.
    ends = [*begins[1:], math.inf]
    for begin, end in zip(reversed(begins), reversed(ends[: len(begins)]), strict=True):
        if any(begin <= _begin(e) < end for e in events):
            return begin, end
    return -math.inf, math.inf


def _of_host(
    path: str, timed: Sequence[Event], candidates: Sequence[Event], starts: Sequence[float]
) -> tuple[float, Sequence[Event]]:
    """Return when the last backward pass of the last step begins, and its events on the host."""
    marks = _marks(timed)
    begin, end = _last_step(marks, candidates)
    in_step = [e for e in candidates if begin <= _begin(e) < end]
    starts = [t for t in starts if begin <= t < end]
    if len(starts) > 1:
        return _last_whole_pass(path, in_step, starts, is_one_step=bool(marks))
    return begin, _last_part(path, in_step, [len(starts)], is_one_step=bool(marks))


def _of_device(
    path: str, timed: Sequence[Event], kernels: Sequence[Event], starts: Sequence[float]
) -> tuple[float, Sequence[Event]]:
    """Return when the last step begins, and its kernels.

    The device runs behind the host: where it has no marks of its own, all its kernels are parted
    in as many as the host has passes, or steps.
    """
    host_begins = _marks(timed)
    device_begins = _marks(timed, of_device=True)
    if not device_begins:
        counts = [len(starts), len(host_begins)]
        return -math.inf, _last_part(path, kernels, counts, is_one_step=False)
    begin, end = _last_step(device_begins, kernels)
    in_step = [e for e in kernels if begin <= _begin(e) < end]
    backward = [e for e in timed if _is_backward(e)]
    host_begin, host_end = _last_step(host_begins, backward)
    passes = sum(host_begin <= t < host_end for t in starts)
    return begin, _last_part(path, in_step, [passes], is_one_step=True)


def _is_backward(event: Event) -> bool:
    return str(event.get("name")).startswith((BACKWARD, ACCUMULATE))


def _pass_starts(timed: Sequence[Event]) -> list[float]:
    """Return when each backward pass begins; none where backward functions are not recorded.

    Between the events of two passes an operator runs outside all backward functions: of a forward
    pass, or of the optimiser.
    """
    if not any(str(e.get("name")).startswith(BACKWARD) for e in timed):
        return []
    # Spans of backward functions, merged where they overlap.
    spans: list[list[float]] = []
    for event in timed:
        if not _is_backward(event):
            continue
        if spans and _begin(event) <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], _end(event))
        else:
            spans.append([_begin(event), _end(event)])
    between = [0] * (len(spans) + 1)  # operators behind so many spans
    span_begins = [begin for begin, _ in spans]
    for event in timed:
        if not str(event.get("name")).startswith(FORWARD):
            continue
        # `place` spans begin before the operator: it lies behind span place - 1, unless it begins
        # inside it.
        place = bisect_right(span_begins, _begin(event))
        is_behind = place == 0 or _begin(event) >= spans[place - 1][1]
        is_in_front = place == len(spans) or _end(event) <= spans[place][0]
        between[place] += is_behind and is_in_front
    return [begin for place, (begin, _) in enumerate(spans) if place == 0 or between[place]]


def _last_whole_pass(
    path: str, events: Sequence[Event], starts: Sequence[float], *, is_one_step: bool
) -> tuple[float, list[Event]]:
    """Return the last of the passes with the most gradients, and when it begins.

    A recording without marks may begin and end in the middle of a pass. Raises `InputError` where
    other passes have other gradients: a step that trains two networks, say.
    """
    times = [_begin(e) for e in events]
    cuts = [0, *(bisect_left(times, t) for t in starts[1:]), len(events)]
    passes = [list(events[a:b]) for a, b in pairwise(cuts)]
    sizes = [Counter(map(_size_of, one_pass)) for one_pass in passes]
    longest = max(map(len, passes))
    last_pass = max(k for k, one_pass in enumerate(passes) if len(one_pass) == longest)
    for place, counts in enumerate(sizes):
        may_be_cut = not is_one_step and place in (0, len(passes) - 1)
        if counts != sizes[last_pass] and not (may_be_cut and counts <= sizes[last_pass]):
            needed = f"{path}: the same gradients in each backward pass of a step"
            got = f"{len(passes[place])} and {longest}, or other shapes"
            raise InputError(needed, got, "profile one backward pass a step")
    return starts[last_pass], passes[last_pass]


def _size_of(event: Event) -> tuple[str, str]:
    """Return what tells the sizes of two gradients apart."""
    return str(_args(event).get("In msg nelems")), str(_shape(event))


def _last_part(
    path: str, events: Sequence[Event], counts: Sequence[int], *, is_one_step: bool
) -> Sequence[Event]:
    """Return the last of equal parts, where one of the counts says how many there are, or all.

    In one step that is no row of equal parts only the last pass was all-reduced: gradients were
    accumulated before. Raises `InputError` where events of several steps may be mixed.
    """
    sizes = [_size_of(e) for e in events]
    for count in counts:
        length, extra = divmod(len(sizes), max(count, 1))
        # 160 kernels in 2 passes: the sizes of the second 80 must repeat those of the first.
        if count > 1 and not extra and sizes == sizes[:length] * count:
            return events[-length:]
    if is_one_step:
        return events
    if max(counts) > 1:
        needed = f"{path}: marks of steps, or the same all-reduces in each backward pass"
        raise InputError(needed, f"{len(events)} in {max(counts)} passes", REMEDY)
    if max(counts) == 0 and (times := _repetitions(sizes)) > 1:
        needed = f"{path}: marks of steps, or operators between the backward passes"
        raise InputError(needed, f"{len(events)} gradients, one row {times} times", REMEDY)
    return events


def _repetitions(items: list[Any]) -> int:
    """Return how often the shortest row that makes up all items is repeated in them."""
    count = len(items)
    # The shortest period of the row: A B A B A B has period 2 and is repeated 3 times.
    for length in range(1, count // 2 + 1):
        if count % length == 0 and items == items[:length] * (count // length):
            return count // length
    return 1


# -- single events --------------------------------------------------------------------------------
def _args(event: Event) -> Event:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _is_all_reduce(event: Event) -> bool:
    name = str(_args(event).get("Collective name", "")).lower().replace("_", "")
    return name.startswith("allreduce") and "In msg nelems" in _args(event)


def _shape(event: Event) -> list[int] | None:
    """Return the shape of what an event was given; None if that was nothing."""
    dims = _args(event).get("Input Dims")
    types = _args(event).get("Input type")
    has_shapes = isinstance(types, list) and types and types[0]
    shape = dims[0] if has_shapes and isinstance(dims, list) and dims else None
    good = isinstance(shape, list) and all(type(n) is int and 0 <= n <= MOST_BYTES for n in shape)
    return shape if good else None


def _reduce_row(where: str, place: int, event: Event) -> Row:
    args = _args(event)
    count = args["In msg nelems"]
    if type(count) is not int or not 0 <= count <= MOST_BYTES:
        raise InputError(f"{where}: In msg nelems as a whole number", shown(count))
    size, dtype = _format(where, args.get("dtype"))
    return f"bucket {place}", float(event["ts"]), count * size, dtype


def _older_row(where: str, place: int, event: Event) -> Row:
    return f"bucket {place}", float(event["ts"]), *_sum_row(where, place, event)[2:]


def _sum_row(where: str, place: int, event: Event) -> Row:
    shape = _shape(event)
    assert shape is not None
    size, dtype = _format(where, _args(event)["Input type"][0])
    ready = float(event["ts"]) + float(event.get("dur", 0))
    name = f"gradient {place} {'x'.join(map(str, shape)) or 'scalar'}"
    return name, ready, math.prod(shape) * size, dtype


def _format(where: str, word: object) -> tuple[int, str]:
    """Return bytes and name of a number format as PyTorch writes it."""
    name = str(word).lower().removeprefix("c10::")
    if name not in BYTES:
        raise InputError(f"{where}: a number format among {', '.join(BYTES)}", shown(word))
    return BYTES[name], SHORT.get(name, name)
