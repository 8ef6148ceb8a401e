"""Times a measured operator with the default schedule of its kernel, and computes its bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ascend_lab.compare import unaligned
from ascend_lab.compare.chains import attention
from ascend_lab.compare.conversions import conversions_mark, conversions_s
from ascend_lab.compare.estimates import Estimate, at_peak, fetched
from ascend_lab.compare.row_kernels import row_kernel
from ascend_lab.compare.rows import Work
from ascend_lab.compare.words import settings_of
from ascend_lab.errors import InputError
from ascend_lab.limits import shown
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from ascend_lab.compiler import Graph
    from ascend_lab.machine.sim import KernelTimeline
    from ascend_lab.operators.kernels import GemmSchedule

FP16_IN_FP32 = ("gelu", "sigmoid")
"""Operators that compute fp16 inputs in fp16 here, but in fp32 in the measured kernels.

On bf16 inputs our kernels do the same work as the measured ones on fp16: as many bytes, a cast to
fp32 and one back. Source: CANN toolkit, TBE operators Gelu and Sigmoid on the 910B, whose default
is high precision.
"""
PUBLISHED_TILING = "matmul"
"""The operator for which our kernel may use the library's tiling, which is published.

Other operators are timed with a kernel written as the library's (see `row_kernels`), or with ours.
"""

READ_WHOLE = ("transpose", "concat", "adam", "sgd_momentum")
"""Operators that a graph may compile away, so that its bound is 0; alone they read all inputs."""


def operator_alone(work: Work, chip: Chip, like: str) -> Estimate:
    """Time one operator of the library with its default schedule, or with CANN's tiling."""
    from ascend_lab.operators import ops

    operator = ops.get(work.operator)
    call = attention.as_called(work) if operator.name == attention.FLASH else work
    if not call.shapes:
        raise InputError(f"{call.operator}: a shape per input", "none", "write them in its order")
    settings = settings_of(call, chip, operator.attrs)
    # a row measured on 20 of 24 cores
    used_chip = chip
    if settings.cores is not None:
        used_chip = replace(chip, core_count=settings.cores)
    dtypes = _dtypes(call, settings.attributes)
    if call.operator in FP16_IN_FP32 and dtypes[0] == "fp16" and "bf16" in used_chip.cube:
        dtypes = ("bf16",) * len(dtypes)
        settings.marks.append("halves computed in fp32 as measured: timed as bf16")
    tiling = None
    if like and call.operator == PUBLISHED_TILING:
        from ascend_lab.compiler.like_cann import tiling_of_operator

        tiling = tiling_of_operator(call.shapes, dtypes, used_chip, settings.attributes)
    timeline = _timeline(call, used_chip, dtypes, settings.attributes, tiling)
    # a profiler's task begins on the device, a wall-clock time with the host's call
    timeline = replace(timeline, start="queued" if call.timing == "kernel" else "cold")
    extra_s, extra_marks = _extra_work(call, used_chip, dtypes, settings.attributes)
    marks = [*settings.marks, *extra_marks]
    bound_s = _bound_s(call, at_peak(used_chip), dtypes, settings.attributes)
    if call.l2 == "unknown":
        marks.append("l2 unknown: timed cold")
    model_s = timeline.time_s + extra_s
    return Estimate(model_s, bound_s, _limit_of(timeline), _busy_of(timeline), tuple(marks))


def _extra_work(
    call: Work, chip: Chip, dtypes: Sequence[str], attributes: Mapping[str, Any]
) -> tuple[float, list[str]]:
    """Return the seconds of work that was measured together with the kernel, and remarks on it."""
    from ascend_lab.operators import ops

    operator = ops.get(call.operator)
    extra_s = 0.0
    marks = []
    if operator.name == attention.FLASH and attention.is_causal(call):
        marks.append(attention.SKIPPED)
    if attention.is_library(call):
        marks.append(attention.LIBRARY)
        extra_s = attention.tiling_read_s(chip)
    if call.conversions and operator.has("convolution"):
        shapes = (*call.shapes[:2], *operator.infer(*call.shapes, **attributes))
        extra_s = conversions_s(shapes, dtypes[0], call.conversions, chip)
        marks.append(conversions_mark(call.conversions, dtypes[0]))
    return extra_s, marks


def as_library(work: Work, chip: Chip, ours: Estimate, like: str) -> Estimate:
    """Return the estimate of the vendor's kernel, where its structure is known.

    Otherwise return `ours`, the estimate of our kernel; with `like` "cann" a remark says so.
    """
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel

    if work.operator == PUBLISHED_TILING:
        return ours
    # only kernels on rows are written in the library's structure
    kernel = row_kernel(work, chip)
    if kernel is None:
        if not like:
            return ours
        return replace(ours, marks=(*ours.marks, "no kernel of CANN's is followed: ours"))
    timeline = simulate_kernel(kernel, chip, DeviceMemory.of(chip))
    timeline = replace(timeline, start="queued" if work.timing == "kernel" else "cold")
    # Marks on L2 are about the row and stay; all others are about our kernel.
    row_marks = (mark for mark in ours.marks if mark.startswith("l2 "))
    marks = (f"in the library's structure: {kernel.name}", *row_marks)
    limit = _limit_of(timeline)
    library = Estimate(timeline.time_s, ours.bound_s, limit, _busy_of(timeline), marks)
    return fetched(library, chip, sum(len(program.bindings) for program in kernel.parts))


def _busy_of(timeline: KernelTimeline) -> dict[str, float]:
    """Return the share of the time that each pipe works."""
    # an empty kernel has 0 cycles
    total = max(timeline.total_cycles, 1)
    return {pipe: busy / total for pipe, busy in timeline.busy_cycles.items()}


def _limit_of(timeline: KernelTimeline) -> str:
    """Return what takes most of the time: a pipe, memory, barriers between phases, or the start."""
    cycles = Counter({"sync": timeline.sync_cycles, "start": timeline.launch_cycles})
    for phase in timeline.phases:
        cycles[phase.limit] += phase.cycles
    return max(cycles, key=lambda name: cycles[name])


def in_pairs(work: Work) -> Work:
    """Return a transpose of int64 as one of int32 pairs, which form a last axis that stays last.

    (a, b) with perm (1, 0) becomes (a, b, 2) with perm (1, 0, 2).
    """
    if len(work.shapes) != 1:
        raise InputError("transpose: one input", str(len(work.shapes)), "correct that row")
    # int64 has no lanes in the vector unit, but a transpose only moves bytes
    (shape,) = work.shapes
    rank = len(shape)
    perm = work.attributes.get("perm") or tuple(reversed(range(rank)))
    if not isinstance(perm, tuple) or sorted(perm) != list(range(rank)):
        needed = f"transpose: perm with each of 0..{rank - 1} once"
        raise InputError(needed, shown(perm), "correct that row")
    attributes = {**work.attributes, "perm": (*perm, rank)}
    return replace(work, shapes=((*shape, 2),), dtypes=("int32",), attributes=attributes)


def _timeline(
    work: Work,
    chip: Chip,
    dtypes: Sequence[str],
    attributes: Mapping[str, Any],
    tiling: GemmSchedule | None,
) -> KernelTimeline:
    """Return the timeline of a kernel whose operands lie in L2 if the row says so, else in memory.

    An L2 that is a cache keeps what the kernel writes, up to its size. A product with a given
    tiling is timed as the command `op` does it: its results cross to memory if L2 cannot hold all
    that the product touches.
    """
    from ascend_lab.machine import sim
    from ascend_lab.operators import ops

    used_chip = chip
    if attention.is_library(work):
        used_chip = replace(chip, core_count=attention.busy_cores(work, chip))
    shapes = work.shapes
    formats = tuple(dtypes)
    used_attributes = dict(attributes)
    if work.operator == attention.FLASH and attention.is_causal(work):
        # the measured kernel computes all scores, also those that a causal kernel skips, and adds a
        # mask to them
        shapes = attention.as_measured(work).shapes
        formats = (dtypes[0],) * len(shapes)
        used_attributes["causal"] = False
    # measured loops repeat a call on the same tensors, which then lie in L2
    is_warm = work.l2 == "warm"
    if is_warm or tiling is not None:
        arguments = work.operator, shapes, formats, used_chip
        return ops.time(*arguments, warm_l2=is_warm, tiling=tiling, **used_attributes)
    kernel = ops.compile(work.operator, shapes, formats, used_chip, **used_attributes)
    if work.operator in unaligned.PRODUCTS:
        kernel = unaligned.with_conversions(kernel, shapes, formats, used_attributes, used_chip)
    return sim.simulate_kernel(kernel, used_chip, sim.DeviceMemory.of(used_chip))


def _dtypes(work: Work, attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a number format for each input; a single one is the operator's main format.

    The operator then decides those of the others, such as int32 for indices.
    """
    from ascend_lab.operators import ops
    from ascend_lab.operators.dsl.tensor import ALIASES

    operator = ops.get(work.operator)
    dtypes = tuple(ALIASES.get(dtype, dtype) for dtype in work.dtypes)
    # a row may name the main format only
    if len(dtypes) == 1:
        return operator.input_types(len(work.shapes), dtypes[0], **attributes)
    if len(dtypes) != len(work.shapes):
        needed = f"dtype: one, or one for each of {len(work.shapes)} inputs"
        raise InputError(needed, str(len(dtypes)), "correct that row")
    return dtypes


def _bound_s(work: Work, chip: Chip, dtypes: Sequence[str], attributes: Mapping[str, Any]) -> float:
    """Return the bound of a graph of this one operator (see `compiler.bound`).

    It includes the launch unless the row's time is that of a task on the device.
    """
    from ascend_lab.compiler import GraphBuilder, bound_of

    # bounds are defined for graphs: this is one with a single node
    draft = GraphBuilder(work.operator)
    tensors = [
        draft.input(f"x{place}", shape, dtype)
        for place, (shape, dtype) in enumerate(zip(work.shapes, dtypes, strict=True))
    ]
    results = draft.add_node(work.operator, *tensors, **attributes)
    all_results = results if isinstance(results, tuple) else (results,)
    for result in all_results:
        draft.output(result)
    graph = draft.build()
    bound = bound_of(graph, chip)
    if work.operator in READ_WHOLE and not bound.launch:
        bound = replace(bound, launch=chip.launch_overhead_s)
    bound = replace(bound, memory=_memory_s(work, graph, chip, bound.memory))
    return bound.work_s if work.timing == "kernel" else bound.time_s


def _memory_s(work: Work, graph: Graph, chip: Chip, network_s: float) -> float:
    """Return the least seconds of one operator's bytes across the memory interface.

    `network_s` is that least time for a network of this operator, whose results go to memory;
    results of a single operator may stay in L2. A tensor changed in place is not read or written
    where no index points, so only the bytes of the other inputs are certain.
    """
    from ascend_lab.operators import ops

    # operands in L2: no byte has to cross the memory interface
    if work.l2 == "warm":
        return 0.0
    rate = chip.device_memory.rate_bytes_per_s
    if ops.get(work.operator).has("in place"):
        return sum(graph.types[name].data_bytes for name in graph.inputs[1:]) / rate
    written = sum(graph.types[name].data_bytes for name in graph.outputs)
    # 60 MB written, an L2 of 48 MB that keeps what it can: 12 MB have to leave
    kept_in_l2 = min(written, chip.l2.size_bytes)
    if work.operator in READ_WHOLE:
        read = sum(graph.types[name].data_bytes for name in graph.inputs)
        return (read + written - kept_in_l2) / rate
    is_cache = chip.l2.kind == "cache"  # then the network's bound has left these bytes out already
    return network_s if is_cache else max(0.0, network_s - kept_in_l2 / rate)
