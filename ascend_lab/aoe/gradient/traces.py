"""Reads the gradients of one backward pass from a trace of the PyTorch profiler.

A gradient has a name, a size and the time at which it is ready: "bucket 3", 4,194,304 bytes in
fp32, 2.1 ms after the pass began.

A trace in Chrome's format, written by Kineto (`ParamCommsUtils.hpp`, `saveNcclMeta` in
`profiler/util.cpp`), contains these events:

* `record_param_comms`, on the host, for every collective, with `Collective name`, `In msg nelems`,
  `dtype`; device kernels such as `ncclDevKernel_AllReduce_...` (category `kernel`) carry the same.
  One event is a bucket of DDP: record with a small `bucket_cap_mb`, so that it is one gradient.
* `nccl:all_reduce`, on the host, around the same call; older releases have only this event, with
  `Input Dims` and `Input type` if `record_shapes=True`.
* `torch::autograd::AccumulateGrad`, when a gradient is complete, with the same two attributes. Its
  times are those of the host: with a device they say when the work was issued.
* `autograd::engine::evaluate_function: ...`, for every function of the backward pass.
* `ProfilerStep#n` around a step, if the recording had a schedule; `Optimizer.step#...` at its end.

Gradients are read from the all-reduces on the device if there are any; they count as ready when the
all-reduce begins, which is too late if one waits for another. In a trace without a device they are
read from the AccumulateGrad events with shapes, ready at their end. Otherwise all-reduces on the
host are used, or at last AccumulateGrad events.

A trace may contain several steps, and a step several backward passes. The last pass of the last
step is used. Steps are delimited by `ProfilerStep#`, or else by the ends of `Optimizer.step#`.
Passes are delimited by operators of a forward pass between them. Kernels of the device run later
than on the host; they are divided into as many equal parts as the host has passes.

A trace that shows neither steps nor passes, but the same list of gradients several times, raises
`InputError`. Times count from the first backward function of the pass, or without one from the
first gradient; that shifts the ends of all splits equally.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ascend_lab.aoe.gradient.splits import MAX_BYTES, Gradient
from ascend_lab.errors import InputError
from ascend_lab.limits import json_number, shown

Event = dict[str, Any]
Row = tuple[str, float, int, str]
"""Name, time in microseconds, bytes, number format."""
ACCUMULATE_NAME = "torch::autograd::AccumulateGrad"
BACKWARD_PREFIX = "autograd::engine::evaluate_function"
STEP_PREFIX = "ProfilerStep#"
OPTIMISER_PREFIX = "Optimizer.step"
FORWARD_PREFIXES = ("aten::", "Optimizer.", "nn.Module")
"""Names of events that run between two backward passes begin so."""
TYPE_BYTES = {
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
SHORT_TYPE_NAMES = {
    "float": "fp32",
    "float32": "fp32",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
}
REMEDY = "profile with torch.profiler.schedule and step(), which marks the steps"


def gradients_of_trace(path: str, events: Sequence[Any]) -> tuple[Gradient, ...]:
    """Return the gradients of the last backward pass of a trace, in the order of their times.

    Raises `InputError` for a trace without gradients, or whose passes cannot be distinguished.
    """
    # Phase "X" is a complete event, with a begin `ts` and a duration `dur`, both in microseconds.
    timed = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
    timed = [e for e in timed if None not in map(json_number, (e.get("ts"), e.get("dur", 0)))]
    timed.sort(key=_begin)
    candidates, row_of = _gradient_events(path, timed)
    starts = _pass_starts(timed)
    if candidates[0].get("cat") == "kernel":
        begin, chosen = _of_device(path, timed, candidates, starts)
    else:
        begin, chosen = _of_host(path, timed, candidates, starts)
    rows = []
    for number, event in enumerate(chosen):
        where = f"{path} event {event.get('name')} at {event['ts']}"
        rows.append(row_of(where, number, event))
    first_ready_us = min(ready_us for _, ready_us, _, _ in rows)
    backward_begins = (_begin(e) for e in timed if str(e.get("name")).startswith(BACKWARD_PREFIX))
    # Times count from the first backward function; a trace of the device alone has none.
    zero_us = next((t for t in backward_begins if begin <= t <= first_ready_us), first_ready_us)
    return tuple(
        Gradient(name, max(ready_us - zero_us, 0.0) * 1e-6, size_bytes, dtype)
        for name, ready_us, size_bytes, dtype in rows
    )


def _begin(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event.get("dur", 0))


def _gradient_events(
    path: str, timed: Sequence[Event]
) -> tuple[list[Event], Callable[[str, int, Event], Row]]:
    """Return the events to read gradients from, and the function that reads one of them."""
    reduces = [e for e in timed if _is_all_reduce(e)]
    kernels = [e for e in reduces if e.get("cat") == "kernel"]
    has_device = any(e.get("cat") == "kernel" for e in timed)
    shaped = [e for e in timed if _shape(e) is not None]
    _check_shapes(path, timed)
    accumulations = [e for e in shaped if e.get("name") == ACCUMULATE_NAME]
    older = [e for e in shaped if str(e.get("name")).endswith(":all_reduce")]
    # types of events, starting with the most exact times
    sources: list[tuple[list[Event], Callable[[str, int, Event], Row]]] = [
        (kernels, _reduce_row),
        # with a device these times only say when the host issued work: the last choice then
        ([] if has_device else accumulations, _accumulation_row),
        (reduces, _reduce_row),
        (older, _older_row),
        (accumulations, _accumulation_row),
    ]
    for events, row_of in sources:
        if events:
            return events, row_of
    needed = f"{path}: all-reduces with sizes, or AccumulateGrad events with shapes"
    remedy = "profile a DDP step with record_shapes=True"
    raise InputError(needed, f"none of {len(timed)} timed events", remedy)


def _check_shapes(path: str, timed: Sequence[Event]) -> None:
    """Raise `InputError` if some gradients have a shape in the trace and others do not.

    Without this check the latter would be missing from the result. A gradient that is undefined
    has an empty type; in a trace recorded without shapes none has a shape.
    """
    accumulations = [e for e in timed if e.get("name") == ACCUMULATE_NAME]
    without_shape = [e for e in accumulations if _shape(e) is None and not _is_undefined(e)]
    if without_shape and len(without_shape) < len(accumulations):
        where = f"{path} event {ACCUMULATE_NAME} at {without_shape[0]['ts']}"
        got = shown(_args(without_shape[0]).get("Input Dims"))
        raise InputError(f"{where}: Input Dims and Input type", got, "record_shapes=True")


def _is_undefined(event: Event) -> bool:
    types = _args(event).get("Input type")
    return isinstance(types, list) and not any(types)


# -- steps and passes -----------------------------------------------------------------------------
def _step_begins(timed: Sequence[Event], *, of_device: bool = False) -> list[float]:
    """Return the times at which steps begin, from marks on the host or on the device."""
    marks = [e for e in timed if (e.get("cat") == "gpu_user_annotation") == of_device]
    step_begins = {_begin(e) for e in marks if str(e.get("name", "")).startswith(STEP_PREFIX)}
    if step_begins:
        return sorted(step_begins)
    # without marks of steps, a step begins where the optimiser of the previous one ends
    optimiser_ends = {_end(e) for e in marks if str(e.get("name", "")).startswith(OPTIMISER_PREFIX)}
    return sorted({-math.inf, *optimiser_ends}) if optimiser_ends else []


def _last_step(begins: Sequence[float], events: Sequence[Event]) -> tuple[float, float]:
    """Return begin and end of the last step that contains an event; infinite without any step."""
    # Step k lasts until step k + 1 begins; the last one, to the end of the trace.
    # without any step `begins` is empty; the slice below makes `ends` empty as well
    ends = [*begins[1:], math.inf]
    for begin, end in zip(reversed(begins), reversed(ends[: len(begins)]), strict=True):
        if any(begin <= _begin(e) < end for e in events):
            return begin, end
    return -math.inf, math.inf


def _of_host(
    path: str, timed: Sequence[Event], candidates: Sequence[Event], starts: Sequence[float]
) -> tuple[float, Sequence[Event]]:
    """Return the begin of the last backward pass of the last step, and its events on the host."""
    marks = _step_begins(timed)
    begin, end = _last_step(marks, candidates)
    in_step = [e for e in candidates if begin <= _begin(e) < end]
    starts = [t for t in starts if begin <= t < end]
    if len(starts) > 1:
        return _last_whole_pass(path, in_step, starts, is_one_step=bool(marks))
    return begin, _last_part(path, in_step, [len(starts)], is_one_step=bool(marks))


def _of_device(
    path: str, timed: Sequence[Event], kernels: Sequence[Event], starts: Sequence[float]
) -> tuple[float, Sequence[Event]]:
    """Return the begin of the last step, and its kernels on the device.

    The device runs later than the host. If it has no marks of steps, all its kernels are divided
    into as many equal parts as the host has passes, or steps.
    """
    host_begins = _step_begins(timed)
    device_begins = _step_begins(timed, of_device=True)
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
    return str(event.get("name")).startswith((BACKWARD_PREFIX, ACCUMULATE_NAME))


def _pass_starts(timed: Sequence[Event]) -> list[float]:
    """Return the times at which backward passes begin; empty without backward functions.

    Between two passes an operator of a forward pass or of the optimiser runs, outside all backward
    functions.
    """
    if not any(str(e.get("name")).startswith(BACKWARD_PREFIX) for e in timed):
        return []
    # [begin, end] of backward functions, merged if they overlap
    spans: list[list[float]] = []
    for event in timed:
        if not _is_backward(event):
            continue
        if spans and _begin(event) <= spans[-1][1]:
            spans[-1][1] = max(spans[-1][1], _end(event))
        else:
            spans.append([_begin(event), _end(event)])
    # operators_before[i]: number of operators between the spans i - 1 and i
    operators_before = [0] * (len(spans) + 1)
    span_begins = [begin for begin, _ in spans]
    for event in timed:
        if not str(event.get("name")).startswith(FORWARD_PREFIXES):
            continue
        # `index` spans begin before the operator: it is after span index - 1, unless it begins
        # inside it
        index = bisect_right(span_begins, _begin(event))
        is_after = index == 0 or _begin(event) >= spans[index - 1][1]
        is_before = index == len(spans) or _end(event) <= spans[index][0]
        operators_before[index] += is_after and is_before
    pass_begins = []
    for index, (begin, _) in enumerate(spans):
        if index == 0 or operators_before[index]:
            pass_begins.append(begin)
    return pass_begins


def _last_whole_pass(
    path: str, events: Sequence[Event], starts: Sequence[float], *, is_one_step: bool
) -> tuple[float, list[Event]]:
    """Return the begin of the last complete pass, and its events.

    A pass is complete if it has the most gradients: a recording without marks may begin and end in
    the middle of a pass. Raises `InputError` if complete passes have different gradients, as in a
    step that trains two networks.
    """
    times = [_begin(e) for e in events]
    cuts = [0, *(bisect_left(times, t) for t in starts[1:]), len(events)]
    passes = [list(events[a:b]) for a, b in pairwise(cuts)]
    sizes = [Counter(map(_size_of, one_pass)) for one_pass in passes]
    longest = max(map(len, passes))
    last_pass = max(k for k, one_pass in enumerate(passes) if len(one_pass) == longest)
    for number, counts in enumerate(sizes):
        may_be_cut = not is_one_step and number in (0, len(passes) - 1)
        # Counter <= Counter: no size occurs more often, as in a pass that the recording has cut off
        if counts != sizes[last_pass] and not (may_be_cut and counts <= sizes[last_pass]):
            needed = f"{path}: the same gradients in each backward pass of a step"
            got = f"{len(passes[number])} and {longest}, or other shapes"
            raise InputError(needed, got, "profile one backward pass a step")
    return starts[last_pass], passes[last_pass]


def _size_of(event: Event) -> tuple[str, str]:
    """Return the size of a gradient as the trace states it, to compare it with others."""
    return str(_args(event).get("In msg nelems")), str(_shape(event))


def _last_part(
    path: str, events: Sequence[Event], counts: Sequence[int], *, is_one_step: bool
) -> Sequence[Event]:
    """Return the events of the last pass, if the events are a pass repeated; else all events.

    `counts` are possible numbers of passes. If the events of one step do not repeat, gradients were
    accumulated and only those of the last pass were all-reduced. Raises `InputError` if events of
    several steps may be mixed.
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
    """Return how often the items repeat their shortest period: 3 for A B A B A B."""
    count = len(items)
    # a period longer than half of the items cannot repeat
    for length in range(1, count // 2 + 1):
        if count % length == 0 and items == items[:length] * (count // length):
            return count // length
    return 1


# -- single events --------------------------------------------------------------------------------
def _args(event: Event) -> Event:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _is_all_reduce(event: Event) -> bool:
    # "AllReduce", "all_reduce" and "allreduce_coalesced" are all-reduces
    name = str(_args(event).get("Collective name", "")).lower().replace("_", "")
    return name.startswith("allreduce") and "In msg nelems" in _args(event)


def _shape(event: Event) -> list[int] | None:
    """Return the shape of an event's first input, or None if it has none or was not recorded."""
    dims = _args(event).get("Input Dims")
    types = _args(event).get("Input type")
    has_input = isinstance(types, list) and types and types[0]
    if not has_input or not isinstance(dims, list) or not dims or not isinstance(dims[0], list):
        return None
    shape = dims[0]
    return shape if all(type(n) is int and 0 <= n <= MAX_BYTES for n in shape) else None


def _reduce_row(where: str, number: int, event: Event) -> Row:
    """Return the row of an all-reduce: it counts as ready when the all-reduce begins."""
    args = _args(event)
    count = args["In msg nelems"]
    # `type(...) is`, because isinstance counts True as an int
    if type(count) is not int or not 0 <= count <= MAX_BYTES:
        raise InputError(f"{where}: In msg nelems as a whole number", shown(count))
    size, dtype = _format(where, args.get("dtype"))
    return f"bucket {number}", float(event["ts"]), count * size, dtype


def _older_row(where: str, number: int, event: Event) -> Row:
    """Return the row of an all-reduce of an older release, whose size is that of its input."""
    _, _, size_bytes, dtype = _accumulation_row(where, number, event)
    return f"bucket {number}", float(event["ts"]), size_bytes, dtype


def _accumulation_row(where: str, number: int, event: Event) -> Row:
    """Return the row of a gradient that is complete: it is ready at the end of the event."""
    shape = _shape(event)
    assert shape is not None
    size, dtype = _format(where, _args(event)["Input type"][0])
    ready = float(event["ts"]) + float(event.get("dur", 0))
    name = f"gradient {number} {'x'.join(map(str, shape)) or 'scalar'}"
    return name, ready, math.prod(shape) * size, dtype


def _format(where: str, type_text: object) -> tuple[int, str]:
    """Return the bytes of a number format and its short name: (4, "fp32") for "c10::Float"."""
    name = str(type_text).lower().removeprefix("c10::")
    if name not in TYPE_BYTES:
        needed = f"{where}: a number format among {', '.join(TYPE_BYTES)}"
        raise InputError(needed, shown(type_text))
    return TYPE_BYTES[name], SHORT_TYPE_NAMES.get(name, name)
