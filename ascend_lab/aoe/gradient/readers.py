"""Profiles from files: a CSV table, the bank of CANN's gradient tuner, a PyTorch profiler trace.

CSV: a header, then a row a gradient in backward order. Columns `name`, `ready_us` and `bytes`, also
`dtype`; those of CANN's `gradient_summary.csv` (`gradient_node_name`, `gradient_size(byte)`,
`data_type`) are taken too, which has no times of its own: add a column `ready_us`.

JSON with a list of `modelvalue`: CANN's `<soc>_gradient_fusion.json`, `gradientTime` nanoseconds
since the gradient before (the first counts as 0), `gradientSize` bytes.

Any other JSON: a Chrome trace of the PyTorch profiler (Kineto; `ParamCommsUtils.hpp`,
`saveNcclMeta` in `profiler/util.cpp`). Such a trace holds

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

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ascend_lab.aoe.gradient.splits import LONGEST_S, MOST_BYTES, Gradient
from ascend_lab.errors import InputError
from ascend_lab.limits import csv_of, json_number, json_of, number_of, read_file, shown

COLUMNS = {
    "name": ("name", "gradient_node_name"),
    "ready": ("ready_us",),
    "bytes": ("bytes", "gradient_size(byte)"),
    "dtype": ("dtype", "data_type"),
}
MOST_ROWS = 10_000
BANK_LISTS = ("gradientTime", "gradientSize")
Event = dict[str, Any]
Row = tuple[str, float, int, str]
"""Of a trace: name, time in microseconds, bytes, number format."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
BACKWARD = "autograd::engine::evaluate_function"
STEP = "ProfilerStep#"
BYTES = {
    "double": 8, "long": 8, "int64": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2,
    "float64": 8, "float32": 4, "float16": 2, "short": 2, "char": 1, "byte": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
SHORT = {"float": "fp32", "float32": "fp32", "half": "fp16", "float16": "fp16", "bfloat16": "bf16"}


def read_profile(file: str | Path) -> tuple[Gradient, ...]:
    """Return the gradients of a .csv, .json or .json.gz file.

    Raises `InputError` with the line or the event for what cannot be read.
    """
    path = Path(file)
    data = read_file(path, "a profile that can be read")
    kind = _from_json if path.name.endswith((".json", ".json.gz")) else _from_csv
    rows = kind(path, data)
    if not rows:
        raise InputError(f"{path}: at least one gradient", "none", "check the file")
    if len(rows) > MOST_ROWS:
        raise InputError(f"{path}: at most {MOST_ROWS} gradients", str(len(rows)), "join some")
    return rows


def _number(where: str, name: str, value: object) -> float:
    found = number_of(value) if isinstance(value, str) else json_number(value)
    if found is None:
        raise InputError(f"{where}: {name} as a number", shown(value), "mend the row")
    return found


def _gradient(where: str, name: str, ready_s: float, size: float, dtype: str) -> Gradient:
    """Return a row, or raise `InputError` that says where the wrong one stands."""
    if not 0 <= ready_s <= LONGEST_S:
        raise InputError(f"{where}: a ready time of at least 0", str(ready_s), "mend the row")
    if not (0 <= size <= MOST_BYTES and size == int(size)):
        raise InputError(f"{where}: a whole number of bytes, at least 0", str(size), "round it")
    return Gradient(name, ready_s, int(size), dtype or "fp16")


# -- tables and banks -----------------------------------------------------------------------------
def _from_csv(path: Path, data: bytes) -> tuple[Gradient, ...]:
    table = [(number, row) for number, row in csv_of(data, path) if not row[0].startswith("#")]
    if not table:
        raise InputError(f"{path}: a header name,ready_us,bytes", "an empty file", "check the path")
    places = _places(path, table[0][1])
    return tuple(_row(f"{path} line {number}", row, places) for number, row in table[1:])


def _places(path: Path, header: list[str]) -> dict[str, int]:
    """Return the column of each value."""
    found = {}
    for key, names in COLUMNS.items():
        places = [i for i, word in enumerate(header) if word.lower() in names]
        if places:
            found[key] = places[0]
        elif key != "dtype":
            remedy = "columns are name, ready_us, bytes and, where wanted, dtype"
            raise InputError(f"{path} line 1: a column {names[0]}", ",".join(header)[:80], remedy)
    return found


def _row(where: str, row: list[str], places: Mapping[str, int]) -> Gradient:
    if len(row) <= max(places.values()):
        raise InputError(f"{where}: {max(places.values()) + 1} columns", str(len(row)), "mend it")
    size = _number(where, "bytes", row[places["bytes"]])
    ready = _number(where, "ready_us", row[places["ready"]])
    dtype = row[places["dtype"]] if "dtype" in places else ""
    return _gradient(where, row[places["name"]], ready / 1e6, size, dtype)


def _from_json(path: Path, data: bytes) -> tuple[Gradient, ...]:
    found = json_of(data, str(path))
    first = found[0] if isinstance(found, list) and found else None
    if isinstance(first, dict) and "modelvalue" in first:
        return _from_bank(path, first["modelvalue"])
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        needed = (
            f"{path}: a Chrome trace (an object whose key traceEvents holds a list) or CANN's bank "
            "(a list whose first object has the key modelvalue)"
        )
        keys = ", ".join(map(str, found))[:60] if isinstance(found, dict) else ""
        got = f"an object with the keys {keys or 'none'}" if isinstance(found, dict) else ""
        remedy = "a table of gradients is a .csv with the columns name, ready_us, bytes"
        raise InputError(needed, got or type(found).__name__, remedy)
    return _from_trace(str(path), events)


def _from_bank(path: Path, value: Any) -> tuple[Gradient, ...]:
    """Return the profile of the first model in a bank of CANN's tuner."""
    times, sizes = (value.get(k) if isinstance(value, dict) else None for k in BANK_LISTS)
    if not isinstance(times, list) or not isinstance(sizes, list) or len(times) != len(sizes):
        needed = f"{path}: modelvalue with {' and '.join(BANK_LISTS)} of one length"
        raise InputError(needed, shown(value))
    rows, ready = list[Gradient](), 0.0
    for i, (time, size) in enumerate(zip(times, sizes, strict=True)):
        where = f"{path} gradient {i}"
        ready += _number(where, BANK_LISTS[0], time) * 1e-9 if i else 0.0
        count = _number(where, BANK_LISTS[1], size)
        rows.append(_gradient(where, f"gradient {i}", ready, count, ""))
    return tuple(rows)


# -- traces ---------------------------------------------------------------------------------------
def _from_trace(path: str, events: Sequence[Any]) -> tuple[Gradient, ...]:
    """Return the gradients of a trace in the order of their times; `InputError` without any."""
    timed = [e for e in events if isinstance(e, dict) and e.get("ph") == "X"]
    timed = [e for e in timed if None not in map(json_number, (e.get("ts"), e.get("dur", 0)))]
    timed.sort(key=lambda e: float(e["ts"]))
    reduces = [e for e in timed if _is_all_reduce(e)]
    kernels = [e for e in reduces if e.get("cat") == "kernel"]
    has_device = any(e.get("cat") == "kernel" for e in timed)
    shaped = [e for e in timed if _shape(e) is not None]
    sums = [e for e in shaped if e.get("name") == ACCUMULATE]
    older = [e for e in shaped if str(e.get("name")).endswith(":all_reduce")]
    sources: list[tuple[list[Event], Callable[[str, int, Event], Row]]] = [
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
    first = min(at for _, at, _, _ in rows)
    before = (e for e in timed if begin <= float(e["ts"]) <= first)
    begun = (float(e["ts"]) for e in before if str(e.get("name")).startswith(BACKWARD))
    start = next(begun, first)
    return tuple(
        Gradient(name, max(at - start, 0.0) * 1e-6, size, dtype) for name, at, size, dtype in rows
    )


def _args(event: Event) -> Event:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _is_all_reduce(event: Event) -> bool:
    name = str(_args(event).get("Collective name", "")).lower().replace("_", "")
    return name.startswith("allreduce") and "In msg nelems" in _args(event)


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
