"""Times a compiled network: its kernels run one after another and share one L2 cache.

    time = sum over kernels of (start + cycles / clock)

The host starts the first kernel, the device's queue starts the others. A super kernel holds several
kernels in one launch: between two of them there is only a barrier over all cores.

Each kernel finds in L2 what earlier kernels left there: the bytes of a tensor come from L2 if they
are still in it, else from device memory. Every weight has its own address; activations share
memory as the plan says. `placement` decides what L2 keeps and what is fetched ahead.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ascend_lab import output
from ascend_lab.compiler.memory import Plan
from ascend_lab.compiler.placement import Prefetch, kernels_in_memory, places_of, plan_network
from ascend_lab.compiler.tasks import AI_CPU, AIPP, Compiled, CpuKernel, CpuTimeline, Task, time_cpu
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.timeline import Start, start_cycles

DEFAULT_PLAN_METHOD = "greedy-by-size"
"""The default memory plan: close to the least memory, and fast to compute."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One kernel of a network: its name, the operators that it computes, and its timeline."""

    name: str
    type: str
    timeline: sim.KernelTimeline

    @property
    def time_s(self) -> float:
        """Seconds, launch included."""
        return self.timeline.time_s

    @property
    def cube_utilisation(self) -> float:
        """Utilisation: multiply-accumulates done / (peak rate of all cubes * time)."""
        chip = self.timeline.chip
        dtype = next((p.dtype for p in self.timeline.phases if p.macs), "")
        if not dtype:
            return 0.0
        # of all cores of the chip, also those that this kernel leaves idle
        peak = chip.macs_per_cycle(dtype) * chip.core_count * self.timeline.total_cycles
        return self.timeline.macs / peak

    def summary(self) -> dict[str, Any]:
        """Return the numbers as plain data, ready for JSON."""
        timeline = self.timeline
        return {
            "name": self.name,
            "type": self.type,
            "time_s": self.time_s,
            "cycles": timeline.cycles,
            "bound_by": timeline.bound_by,
            "cube_utilisation": self.cube_utilisation,
            "bytes": {f"{a}->{b}": n for (a, b), n in timeline.path_bytes.items()},
            "memory_bytes": timeline.memory_bytes,
            "l2_hit_rate": timeline.l2_hit_rate,
        }


@dataclass(frozen=True, slots=True)
class NetworkTimeline:
    """The times of all kernels of a network; nodes that only rename or reshape data take none."""

    name: str
    chip: Chip
    operators: tuple[OperatorTime, ...]
    written_back_bytes: int
    prefetched_bytes: int = field(default=0, kw_only=True)

    @property
    def time_s(self) -> float:
        """Seconds from the first launch to the last kernel's end."""
        return sum(op.time_s for op in self.operators)

    @property
    def memory_bytes(self) -> int:
        """Bytes that cross the memory interface, with those that L2 writes back at the end."""
        # bytes that no kernel's own time contains
        outside_kernels = self.written_back_bytes + self.prefetched_bytes
        return sum(op.timeline.memory_bytes for op in self.operators) + outside_kernels

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the cubes, including those with zeros that pad fractals."""
        return sum(op.timeline.macs for op in self.operators)

    @property
    def l2_hit_rate(self) -> float:
        """Share of the bytes read from GM that L2 serves."""
        total_bytes = 0
        hit_bytes = 0.0
        for op in self.operators:
            paths = op.timeline.path_bytes
            read_bytes = sum(size for (source, _), size in paths.items() if source == "GM")
            total_bytes += read_bytes
            # weighted by bytes: 30 MB at 0.5 and 10 MB at 0.9 are (15 + 9) / 40 = 0.6
            hit_bytes += read_bytes * op.timeline.l2_hit_rate
        return hit_bytes / total_bytes if total_bytes else 0.0

    @property
    def on_ai_cpu(self) -> tuple[OperatorTime, ...]:
        """The operators that no kernel computes."""
        pairs = ((op, op.timeline) for op in self.operators)
        return tuple(op for op, t in pairs if isinstance(t, CpuTimeline) and t.engine == AI_CPU)

    @property
    def launches(self) -> int:
        """Number of launches: one for a super kernel, none for AIPP, which is part of the core."""
        timelines = (op.timeline for op in self.operators)
        return sum(t.launch_cycles > 0 and t.start in ("cold", "queued") for t in timelines)

    @property
    def launch_s(self) -> float:
        """Seconds of all launches, also on the AI CPU, without barriers inside super kernels."""
        timelines = (op.timeline for op in self.operators)
        cycles = sum(t.launch_cycles for t in timelines if t.start in ("cold", "queued"))
        return cycles / self.chip.clock_hz

    @property
    def kernels(self) -> int:
        """Number of operators that run on the NPU: kernels, and AIPP, the core's image loader."""
        timelines = [op.timeline for op in self.operators]
        on_ai_cpu = [t for t in timelines if isinstance(t, CpuTimeline) and t.engine != AIPP]
        # 10 operators, one on the AI CPU and one on AIPP: 9
        return len(timelines) - len(on_ai_cpu)

    @property
    def ai_cpu_s(self) -> float:
        """Seconds on the AI CPU, launches included."""
        return sum(op.time_s for op in self.on_ai_cpu)

    def by_type(self) -> dict[str, float]:
        """Return the seconds for each type of kernel, the longest first."""
        seconds: dict[str, float] = {}
        for op in self.operators:
            seconds[op.type] = seconds.get(op.type, 0.0) + op.time_s
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def summary(self) -> dict[str, Any]:
        """Return the numbers as plain data, ready for JSON."""
        return {
            "name": self.name,
            "chip": self.chip.name,
            "time_s": self.time_s,
            "operators": [op.summary() for op in self.operators],
            "totals": {
                "kernels": self.kernels,
                "ai_cpu_operators": [op.name for op in self.on_ai_cpu],
                "ai_cpu_time_s": self.ai_cpu_s,
                "ai_cpu_share": self.ai_cpu_s / self.time_s if self.operators else 0.0,
                "launch_time_s": self.launch_s,
                "memory_bytes": self.memory_bytes,
                "macs": self.macs,
                "l2_hit_rate": self.l2_hit_rate,
                "energy_j": sum(o.timeline.energy_j for o in self.operators),
                "time_s_by_type": self.by_type(),
            },
        }


@sim.few_collections()
def simulate_graph(
    compiled: Compiled,
    plan: Plan | None = None,
    *,
    written: Sequence[str] = (),
    passed: Sequence[str] = (),
    first: Start = "cold",
    hints: bool = True,
) -> NetworkTimeline:
    """Return the times of a compiled network with memory as in `plan`, or in a default plan.

    L2 starts empty, or with the inputs `written` just before, in this order. A part of a network
    sets two more: `passed` names the outputs that later parts read, `first` is how the first kernel
    starts. Without `hints` the cache is not told when a tensor is read for the last time.
    """
    chip = compiled.chip
    times = list[OperatorTime]()
    # addresses matter: a tensor that takes the place of a dead one finds its lines in L2
    places = places_of(compiled, (plan or plan_network(compiled, DEFAULT_PLAN_METHOD)).offsets)
    l2 = sim.L2.of(chip)
    starts = _start_of_kernels(compiled, first)
    # a launch on cube and vector cores costs more, once: its first kernel takes longer
    mix_starters = _first_kernels_of_mix_launches(compiled, starts)
    prefetch = Prefetch(compiled, places) if compiled.prefetch and chip.l2.kind == "cache" else None
    use_hints = hints and compiled.hints
    for task, kernel, memory in kernels_in_memory(compiled, l2, places, written, passed, use_hints):
        start = starts.get(task.name, "queued")
        # nothing can be fetched ahead of the first kernel: there is no time before it
        if prefetch and times:
            prefetch.before(task, l2, start_cycles(chip, start))
        if isinstance(kernel, CpuKernel):
            title = f"{task.op} on the {kernel.engine}"
            timeline: sim.KernelTimeline = time_cpu(kernel, chip, memory)
        else:
            title = task.op
            started_cold = sim.simulate_kernel(kernel, chip, memory)
            timeline = _with_start(task, started_cold, start, mix_starters)
        times.append(OperatorTime(task.name, title, timeline))
        if prefetch:
            prefetch.after(task, kernel, timeline)
    fetched = prefetch.fetched_bytes if prefetch else 0
    return NetworkTimeline(
        compiled.graph.name, chip, tuple(times), l2.flush(), prefetched_bytes=fetched
    )


def _with_start(
    task: Task, timeline: sim.KernelTimeline, start: Start, mix_starters: set[str]
) -> sim.KernelTimeline:
    """Return the timeline of a kernel with the price of its start.

    `mix_starters` names the first kernels of mix launches, those on cube and vector cores. A kernel
    after a barrier can load weights before it: if that takes 300 cycles, a barrier of 1,000 cycles
    costs 700.
    """
    chip = timeline.chip
    early = early_cycles(task, chip) if start not in ("cold", "queued") else 0
    mix_cycles = round(chip.mix_start_s * chip.clock_hz) if task.name in mix_starters else 0
    return replace(timeline, start=start, early_cycles=early, mix_cycles=mix_cycles)


def _start_of_kernels(compiled: Compiled, first: Start) -> dict[str, Start]:
    """Return how each kernel starts; an operator on the AI CPU or AIPP ends a super kernel.

    Inside a super kernel the barrier depends on the types of cores, cube or vector: "inside" if
    both kernels use the same, "across" if they differ, "both" if both kernels use both types.
    """
    scopes = {i: scope for scope in compiled.scopes for i in range(*scope)}
    starts: dict[str, Start] = {}
    start = first
    last_scope = None
    last_units = frozenset[str]()
    for i, task in enumerate(compiled.tasks):
        kernel = task.lowered.kernel if task.lowered else None
        if kernel is None or isinstance(kernel, CpuKernel):
            if kernel is not None:
                last_scope = None
                start = "queued" if kernel.engine == AI_CPU else start
            continue
        # outside a super kernel every kernel is started by itself, whatever its cores
        scope = scopes.get(i)
        units = last_units if scope is None else sim.units_of(kernel, compiled.chip)
        # two types of cores in each of the two kernels: 2 + 2
        kind_count = len(units) + len(last_units)
        barrier: Start = "inside"
        if kind_count > 3:
            barrier = "both"
        elif units != last_units:
            barrier = "across"
        starts[task.name] = barrier if scope is not None and scope == last_scope else start
        start = "queued"
        last_scope = scope
        last_units = units
    return starts


def _first_kernels_of_mix_launches(compiled: Compiled, starts: Mapping[str, Start]) -> set[str]:
    """Return the first kernel of every launch that runs on cube and on vector cores."""
    launch_head = ""
    units_of_launch = dict[str, list[frozenset[str]]]()
    for task in compiled.tasks:
        if task.lowered is not None and task.name in starts:
            # a launched kernel opens a new launch; the others belong to the last one opened
            is_launched = starts[task.name] in ("cold", "queued")
            launch_head = task.name if is_launched or not launch_head else launch_head
            units_of_launch.setdefault(launch_head, []).append(
                sim.units_of(task.lowered.kernel, compiled.chip)
            )
    return {name for name, units in units_of_launch.items() if len(frozenset().union(*units)) > 1}


def early_cycles(task: Task, chip: Chip) -> int:
    """Return the cycles of a kernel's work that overlap with the barrier before it.

    In a super kernel a core signals that it has finished the previous kernel and goes on: it loads
    the first tile of each of its weights, which depend on no other kernel. It waits at the barrier
    only before it loads what other cores have written. All cores overlap at least the minimum over
    cores. A vector core that first waits for the cube core of its AI core, or the cube core that
    first waits for a vector core, is left out of the minimum: only the other one counts.
    """
    assert task.lowered is not None
    core_parts = task.lowered.kernel.phases[0].parts
    weights = task.piece.constants
    return int(min(_cycles_ahead(part.program, weights, chip) for part in core_parts))


def _cycles_ahead(program: isa.Program, weights: Collection[str], chip: Chip) -> float:
    """Return the cycles to load the first tile of each of the weights of a program.

    Returns infinity, which is never the minimum, if the program first waits for another core.
    """
    first_tiles = dict[str, float]()
    past_barrier = False
    for instruction, _ in program.instructions():
        src = instruction.srcs[0] if instruction.srcs else None
        dst = instruction.dst
        if instruction.op == "cross_wait" and not past_barrier:
            return float("inf")
        if src is None or src.space != "GM":
            continue
        if src.buffer.name.partition(".")[0] not in weights:
            # an activation: the program is past the barrier, and later waits are other ones
            past_barrier = True
            continue
        path = chip.path("GM", dst.space if dst else "")
        # 16 KB at 32 bytes a cycle: 512 cycles, and those in which the path starts up
        cycles = path.startup_cycles + src.size_bytes / path.rate_bytes_per_cycle
        # `setdefault`: later tiles of the same weight do not count
        first_tiles.setdefault(src.buffer.name, cycles)
    return sum(first_tiles.values())


# -- a trace for chrome://tracing, in msprof's field names ----------------------------------------
def network_events(times: NetworkTimeline) -> list[dict[str, Any]]:
    """Return trace events for launches, kernels and pipes, in microseconds from the start.

    The rows are launches, kernels, and one for each pipe: how long it works in each kernel.
    """
    us_per_cycle = 1e6 / times.chip.clock_hz
    pipes = sorted({pipe for op in times.operators for pipe in op.timeline.busy_cycles})
    rows = ["launch", "kernel", *pipes]
    events = [_metadata_event("process_name", 0, f"Ascend Hardware ({times.chip.name})")]
    events += [_metadata_event("thread_name", i, name) for i, name in enumerate(rows)]
    time_us = 0.0
    for op in times.operators:
        timeline = op.timeline
        label = "launch" if timeline.start in ("cold", "queued") else "barrier"
        events.append(
            _work_event(f"{label} {op.name}", time_us, timeline.launch_cycles * us_per_cycle, 0, {})
        )
        # events are drawn one after another: a launch, then its kernel
        time_us += timeline.launch_cycles * us_per_cycle
        args = {key: value for key, value in op.summary().items() if key != "name"}
        events.append(_work_event(op.name, time_us, timeline.cycles * us_per_cycle, 1, args))
        for pipe, cycles in timeline.busy_cycles.items():
            events.append(
                _work_event(
                    op.type, time_us, cycles * us_per_cycle, rows.index(pipe), {"busy": cycles}
                )
            )
        time_us += timeline.cycles * us_per_cycle
    return events


def _metadata_event(name: str, tid: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": tid, "args": {"name": value}}


def _work_event(name: str, start: float, length: float, tid: int, args: Any) -> dict[str, Any]:
    """Return the event of a bar in row `tid` of the trace; start and length are microseconds."""
    return {
        "name": name,
        "ph": "X",
        "ts": start,
        "dur": length,
        "pid": 0,
        "tid": tid,
        "cat": "operator",
        "args": args,
    }


def write_network_trace(times: NetworkTimeline, file: str | Path) -> None:
    """Write the trace to `file`; raise `InputError` if that cannot be done."""
    output.write_whole(
        file, json.dumps({"traceEvents": network_events(times), "displayTimeUnit": "ns"})
    )
