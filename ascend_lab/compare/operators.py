"""A measured operator of the library: its kernel by the default schedule, and its bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ascend_lab.compare import unaligned
from ascend_lab.compare.chains import attention
from ascend_lab.compare.conversions import conversions_told, converting_s
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

HALVES_IN_FP32 = ("gelu", "sigmoid")
"""Operators of ours that compute halves in fp16 where the measured kernel does it in fp32.

With bf16 ours do the same work: as many bytes, a cast to fp32 and one back. Source: CANN toolkit,
TBE operators Gelu and Sigmoid on the 910B, whose default is high precision.
"""
TILED = "matmul"
"""The operator that a published tiling makes like the library's: its kernel is ours all the same.

Others are whole kernels of the library (see `row_kernels`), or ours.
"""


def operator_alone(work: Work, chip: Chip, like: str) -> Estimate:
    """Time one operator of the library by its default schedule."""
    from ascend_lab.operators import ops

    operator = ops.get(work.operator)
    if operator.name == attention.FLASH:
        work = attention.as_called(work)
    if not work.shapes:
        raise InputError(f"{work.operator}: a shape per input", "none", "write them in its order")
    settings = settings_of(work, chip, operator.attrs)
    if settings.cores is not None:
        chip = replace(chip, core_count=settings.cores)
    dtypes = _dtypes(work, settings.own)
    if work.operator in HALVES_IN_FP32 and dtypes[0] == "fp16" and "bf16" in chip.cube:
        dtypes = ("bf16",) * len(dtypes)
        settings.marks.append("halves computed in fp32 as measured: timed as bf16")
    tiling = None
    if like and work.operator == TILED:
        from ascend_lab.compiler.like_cann import tiling_of_operator

        tiling = tiling_of_operator(work.shapes, dtypes, chip, settings.own)
    line = _timeline(work, chip, dtypes, settings.own, tiling)
    line = replace(line, start="queued" if work.timing == "kernel" else "cold")
    beside_s = 0.0
    if operator.name == attention.FLASH and attention.is_causal(work):
        settings.marks.append(attention.SKIPPED)
    if attention.is_library(work):
        settings.marks.append(attention.LIBRARY)
        beside_s = attention.tiling_read_s(chip)
    if work.conversions and operator.has("convolution"):
        shapes = (*work.shapes[:2], *operator.infer(*work.shapes, **settings.own))
        beside_s = converting_s(shapes, dtypes[0], work.conversions, chip)
        settings.marks.append(conversions_told(work.conversions, dtypes[0]))
    bound_s = _bound_s(work, at_peak(chip), dtypes, settings.own)
    if work.l2 == "unknown":
        settings.marks.append("l2 unknown: timed cold")
    model_s = line.time_s + beside_s
    return Estimate(model_s, bound_s, _limit_of(line), _busy_of(line), tuple(settings.marks))


def as_library(work: Work, chip: Chip, found: Estimate, like: str) -> Estimate:
    """Return the time of the kernel that the vendor's library has, where its structure is known.

    Else the answer stays, `found`, that of our kernel; `like` "cann" then says so.
    """
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel

    if work.operator == TILED:
        return found
    kernel = row_kernel(work, chip)
    if kernel is None:
        if not like:
            return found
        return replace(found, marks=(*found.marks, "no kernel of CANN's is followed: ours"))
    line = simulate_kernel(kernel, chip, DeviceMemory.of(chip))
    line = replace(line, start="queued" if work.timing == "kernel" else "cold")
    of_row = (mark for mark in found.marks if mark.startswith("l2 "))  # the rest is on our kernel
    marks = (f"in the library's structure: {kernel.name}", *of_row)
    alike = Estimate(line.time_s, found.bound_s, _limit_of(line), _busy_of(line), marks)
    return fetched(alike, chip, sum(len(part.bindings) for part in kernel.parts))


def _busy_of(line: KernelTimeline) -> dict[str, float]:
    """Return the share of the time that each pipe works."""
    return {pipe: busy / max(line.total_cycles, 1) for pipe, busy in line.busy_cycles.items()}


def _limit_of(line: KernelTimeline) -> str:
    """Return what takes most of the time: a pipe, memory, barriers between phases, or the start."""
    cycles = Counter({"sync": line.sync_cycles, "start": line.launch_cycles})
    for phase in line.phases:
        cycles[phase.limit] += phase.cycles
    return max(cycles, key=lambda name: cycles[name])


def in_pairs(work: Work) -> Work:
    """Return a transpose of int64 as one of int32: halves of a number are a last axis, which stays.

    (a, b) with perm (1, 0) becomes (a, b, 2) with perm (1, 0, 2).
    """
    if len(work.shapes) != 1:
        raise InputError("transpose: one input", str(len(work.shapes)), "mend that row")
    (shape,) = work.shapes
    rank = len(shape)
    perm = work.attributes.get("perm") or tuple(reversed(range(rank)))
    if not isinstance(perm, tuple) or sorted(perm) != list(range(rank)):
        needed = f"transpose: perm with each of 0..{rank - 1} once"
        raise InputError(needed, shown(perm), "mend that row")
    attributes = {**work.attributes, "perm": (*perm, rank)}
    return replace(work, shapes=((*shape, 2),), dtypes=("int32",), attributes=attributes)


def _timeline(
    work: Work,
    chip: Chip,
    dtypes: Sequence[str],
    attributes: Mapping[str, Any],
    tiling: GemmSchedule | None,
) -> KernelTimeline:
    """Return the timeline of a kernel whose operands lie in L2, or not, and whose results may.

    An L2 that is a cache keeps what a kernel writes: 134 MB of results cost no trip to memory. A
    product with a given tiling is timed as `op` does: what it writes crosses if L2 cannot hold all.
    """
    from ascend_lab.machine import sim
    from ascend_lab.operators import ops

    if attention.is_library(work):
        chip = replace(chip, core_count=attention.dealt_cores(work, chip))
    if work.operator == attention.FLASH and attention.is_causal(work):
        work = attention.as_measured(work)
        dtypes = (dtypes[0],) * len(work.shapes)
        attributes = {**attributes, "causal": False}
    is_warm = work.l2 == "warm"
    if is_warm or tiling is not None:
        given = work.operator, work.shapes, dtypes, chip
        return ops.time(*given, warm_l2=is_warm, tiling=tiling, **attributes)
    kernel = ops.compile(work.operator, work.shapes, dtypes, chip, **attributes)
    if work.operator in unaligned.PRODUCTS:
        kernel = unaligned.with_conversions(kernel, work.shapes, dtypes, attributes, chip)
    return sim.simulate_kernel(kernel, chip, sim.DeviceMemory.of(chip))


def _dtypes(work: Work, attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a number format for each input; one given is the operator's main format."""
    from ascend_lab.operators import ops
    from ascend_lab.operators.dsl.tensor import ALIASES

    operator = ops.get(work.operator)
    given = tuple(ALIASES.get(dtype, dtype) for dtype in work.dtypes)
    if len(given) == 1:
        return operator.input_types(len(work.shapes), given[0], **attributes)
    if len(given) != len(work.shapes):
        needed = f"dtype: one, or one for each of {len(work.shapes)} inputs"
        raise InputError(needed, str(len(given)), "mend that row")
    return given


def _bound_s(work: Work, chip: Chip, dtypes: Sequence[str], attributes: Mapping[str, Any]) -> float:
    """Return the bound of a graph that is this one operator (see `graph.bound`).

    Without the launch for a kernel.
    """
    from ascend_lab.compiler import GraphBuilder, bound_of

    draft = GraphBuilder(work.operator)
    tensors = [
        draft.input(f"x{place}", shape, dtype)
        for place, (shape, dtype) in enumerate(zip(work.shapes, dtypes, strict=True))
    ]
    results = draft.add_node(work.operator, *tensors, **attributes)
    many = results if isinstance(results, tuple) else (results,)
    for result in many:
        draft.output(result)
    graph = draft.build()
    bound = bound_of(graph, chip)
    if work.operator in READ_WHOLE and not bound.launch:
        bound = replace(bound, launch=chip.launch_overhead_s)
    bound = replace(bound, memory=_memory_s(work, graph, chip, bound.memory))
    return bound.work_s if work.timing == "kernel" else bound.time_s


def _memory_s(work: Work, graph: Graph, chip: Chip, of_network_s: float) -> float:
    """Return the least seconds of one operator's bytes across the memory interface.

    A network's results go to memory, those of one operator may stay in an L2 of either kind. What
    is changed in place is neither read nor written where no index points: only the rest is read.
    """
    from ascend_lab.operators import ops

    if work.l2 == "warm":
        return 0.0
    rate = chip.device_memory.rate_bytes_per_s
    if ops.get(work.operator).has("in place"):
        return sum(graph.types[name].data_bytes for name in graph.inputs[1:]) / rate
    written = sum(graph.types[name].data_bytes for name in graph.outputs)
    kept = min(written, chip.l2.size_bytes)
    if work.operator in READ_WHOLE:
        read = sum(graph.types[name].data_bytes for name in graph.inputs)
        return (read + written - kept) / rate
    in_cache = chip.l2.kind == "cache"  # the network's bound has left them out already
    return of_network_s if in_cache else max(0.0, of_network_s - kept / rate)


READ_WHOLE = ("transpose", "concat", "adam", "sgd_momentum")
"""Operators without a bound as a graph (a graph may do without a move), alone they read it all."""
