"""Gradients from a Chrome trace of the PyTorch profiler (Kineto).

What such a trace holds (PyTorch's `ParamCommsUtils.hpp`, `saveNcclMeta` in `profiler/util.cpp`):

* `record_param_comms`, on the host, for every collective, with `Collective name`, `In msg nelems`,
  `dtype`; device kernels such as `ncclDevKernel_AllReduce_...` (category `kernel`) carry the same.
  One event is a bucket of DDP: record with a small `bucket_cap_mb`, so that it is one gradient.
* `nccl:all_reduce`, around the same on the host; older releases have only this, with `Input Dims`
  and `Input type` if `record_shapes=True`.
* `torch::autograd::AccumulateGrad`, when a gradient is done, with the same two. These are host
  times: with a device they say when work was given to it.
* `ProfilerStep#n` around a step; `autograd::engine::evaluate_function: ...` where backward runs.

Read are, of the last step that has any: the all-reduces of the device, ready when they begin (an
upper bound where one waits for another); without a device the AccumulateGrad events with shapes,
ready when they end; else what the host has, all-reduces before AccumulateGrad. Without steps all
of the trace is one. Times count from the first backward function, or, without one, from the first
gradient: that moves all ends alike and no split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ascend_lab.aoe.gradient.rows import MOST_BYTES, Gradient
from ascend_lab.errors import InputError
from ascend_lab.limits import json_number, shown

Event = dict[str, Any]
ACCUMULATE = "torch::autograd::AccumulateGrad"
BACKWARD = "autograd::engine::evaluate_function"
STEP = "ProfilerStep#"
BYTES = {
    "double": 8, "long": 8, "int64": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2,
    "float64": 8, "float32": 4, "float16": 2, "short": 2, "char": 1, "byte": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
SHORT = {"float": "fp32", "float32": "fp32", "half": "fp16", "float16": "fp16", "bfloat16": "bf16"}


def gradients_of_trace(path: str, events: Sequence[Any]) -> tuple[Gradient, ...]:
    """Return the gradients of a trace in the order of their times; `InputError` without any."""
    timed = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and _is_time(e)]
    timed.sort(key=lambda e: float(e["ts"]))
    reduces = [e for e in timed if _is_all_reduce(e)]
    kernels = [e for e in reduces if e.get("cat") == "kernel"]
    has_device = any(e.get("cat") == "kernel" for e in timed)
    shaped = [e for e in timed if _shape(e) is not None]
    sums = [e for e in shaped if e.get("name") == ACCUMULATE]
    older = [e for e in shaped if str(e.get("name")).endswith(":all_reduce")]
    sources: list[tuple[list[Event], Callable[[str, int, Event], _Row]]] = [
        (kernels, _reduce_row),
        ([] if has_device else sums, _sum_row),
        (reduces, _reduce_row),
        (older, _older_row),
        (sums, _sum_row),
    ]
    found, make = next((s for s in sources if s[0]), ([], _reduce_row))
    if not found:
        needed = f"{path}: all-reduces with sizes, or AccumulateGrad events with shapes"
        remedy = "profile a DDP step with record_shapes=True"
        raise InputError(needed, f"none of {len(timed)} timed events", remedy)
    begin, end = _last_step(timed, found)
    mine = [e for e in found if begin <= float(e["ts"]) < end]
    rows = [make(f"{path} event {e.get('name')} at {e['ts']}", i, e) for i, e in enumerate(mine)]
    start = _backward_start(timed, begin, min(at for _, at, _, _ in rows))
    return tuple(
        Gradient(name, max(at - start, 0.0) * 1e-6, size, dtype) for name, at, size, dtype in rows
    )


_Row = tuple[str, float, int, str]
"""Name, time in microseconds, bytes, number format."""


def _is_time(event: Event) -> bool:
    times = (event.get("ts"), event.get("dur", 0))
    return all(json_number(t) is not None for t in times)


def _args(event: Event) -> Event:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _is_all_reduce(event: Event) -> bool:
    args = _args(event)
    name = str(args.get("Collective name", "")).lower().replace("_", "")
    return name.startswith("allreduce") and "In msg nelems" in args


def _shape(event: Event) -> list[int] | None:
    """Return the shape of what an event was given; None if that was nothing."""
    dims, types = _args(event).get("Input Dims"), _args(event).get("Input type")
    known = isinstance(types, list) and types and types[0]
    shape = dims[0] if known and isinstance(dims, list) and dims else None
    good = isinstance(shape, list) and all(type(n) is int and 0 <= n <= MOST_BYTES for n in shape)
    return shape if good else None


def _last_step(timed: Sequence[Event], found: Sequence[Event]) -> tuple[float, float]:
    """Return begin and end of the last profiled step with one of the events; all without steps.

    The device runs behind the host: its own marks of steps count where there are any.
    """
    steps = [e for e in timed if str(e.get("name", "")).startswith(STEP)]
    on_device = [e for e in steps if e.get("cat") == "gpu_user_annotation"]
    device = found[0].get("cat") == "kernel" and bool(on_device)
    mine = on_device if device else [e for e in steps if e not in on_device]
    begins = sorted({float(e["ts"]) for e in mine})
    for begin, end in zip(reversed(begins), [math.inf, *reversed(begins[1:])], strict=False):
        if any(begin <= float(e["ts"]) < end for e in found):
            return begin, end
    return -math.inf, math.inf


def _backward_start(timed: Sequence[Event], begin: float, first: float) -> float:
    """Return when the first backward function of the step began, at most at the first gradient."""
    for event in timed:
        if begin <= float(event["ts"]) <= first and str(event.get("name")).startswith(BACKWARD):
            return float(event["ts"])
    return first


def _reduce_row(where: str, place: int, event: Event) -> _Row:
    args = _args(event)
    count = args["In msg nelems"]
    if type(count) is not int or not 0 <= count <= MOST_BYTES:
        raise InputError(f"{where}: In msg nelems as a whole number", shown(count))
    size, dtype = _format(where, args.get("dtype"))
    return f"bucket {place}", float(event["ts"]), count * size, dtype


def _older_row(where: str, place: int, event: Event) -> _Row:
    _, _, size, dtype = _sum_row(where, place, event)
    return f"bucket {place}", float(event["ts"]), size, dtype


def _sum_row(where: str, place: int, event: Event) -> _Row:
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
