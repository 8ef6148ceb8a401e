"""Results of a simulation: cycles, busy shares, bytes, energy, the time of every instruction.

The time of a kernel is the sum of its start, its phases, and a barrier over all cores between any
two phases: phases of 800 and 300 cycles with a barrier of 100 take 1,200 cycles after the start.
There are five types of start. The host starts a "cold" kernel, the device's queue a "queued" one.
Inside a super kernel the start is a barrier after the previous kernel: "inside" if both kernels use
the same type of core, "across" if the types differ, and "both" if each of the two kernels uses cube
and vector cores together.
"""

import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ascend_lab import errors, output
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.compiled import WAIT, WORK, Compiled, run_reference
from ascend_lab.machine.sim.cost import Surroundings
from ascend_lab.machine.sim.fast import Stretched, stretch

MAX_SPANS = 300_000
"""Largest number of instructions for which a `Span` each is made."""
NOT_WORK = ("barrier", "cross_set")
"""Instructions that take a pipe's time but do not count as busy."""
Key = TypeVar("Key", bound=Hashable)
Start = Literal["cold", "queued", "inside", "across", "both"]
"""Types of start of a kernel, see the docstring of the module."""


def start_cycles(chip: Chip, start: Start, mix_cycles: int = 0) -> int:
    """Return the cycles of starting a kernel, plus `mix_cycles` if it is launched separately."""
    # "across" takes as long as two barriers: cores of one type signal those of the other type,
    # which then signal each other. "both" takes a third barrier: these signal the cores that they
    # work with.
    costs = {
        "cold": chip.launch_overhead_s,
        "queued": chip.queued_launch_s,
        "inside": chip.barrier_s,
        "across": 2 * chip.barrier_s,
        "both": 3 * chip.barrier_s,
    }
    cycles = round(costs[start] * chip.clock_hz)
    # a kernel inside a super kernel is not launched again, so that it pays no mix_cycles
    return cycles + mix_cycles if start in ("cold", "queued") else cycles


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction in time: pipe, name, [start, end) in cycles.

    A wait_flag waited `stall_cycles` for the event `waited_for`. `previous` is the index of the
    span that decided when this one ended (-1: none).
    """

    pipe: str
    name: str
    start: int
    end: int
    stall_cycles: int = 0
    waited_for: str = ""
    previous: int = -1


class Timed:
    """Figures derived from the cycles, bytes and multiply-accumulates of a launch or a kernel."""

    __slots__ = ()
    name: str
    chip: Chip
    if TYPE_CHECKING:  # cycles, macs, ...: fields of a launch, sums over its phases for a kernel

        def __getattr__(self, name: str) -> Any: ...

    @property
    def launch_cycles(self) -> int:
        """Cycles of the start, paid once: by default a start by the host."""
        return start_cycles(self.chip, "cold", int(self.mix_cycles))

    @property
    def total_cycles(self) -> int:
        """Kernel plus launch overhead."""
        return int(self.cycles) + self.launch_cycles

    @property
    def time_s(self) -> float:
        """Seconds from launch to end: total_cycles / clock."""
        return self.total_cycles / self.chip.clock_hz

    @property
    def task_s(self) -> float:
        """Seconds of the task on the device as a profiler counts them: its start and its work.

        task_s = (queued start + cycles) / clock. The host's part of a cold launch comes before the
        task and is not in it.
        """
        queued_cycles = start_cycles(self.chip, "queued", int(self.mix_cycles))
        return (int(self.cycles) + queued_cycles) / self.chip.clock_hz

    @property
    def ops_per_s(self) -> float:
        """Cube operations per second, 1 MAC = 2 ops; zeros that pad fractals count."""
        return 2.0 * int(self.macs) / self.time_s

    @property
    def busy(self) -> dict[str, float]:
        """Share of the total time each pipe of the slowest core spends working."""
        # 5,000 busy cycles of 8,000 with 2,000 of launch: 50 %
        return {p: c / self.total_cycles for p, c in self.busy_cycles.items()}

    def summary(self) -> dict[str, object]:
        """Return the numbers as plain data, ready for JSON."""
        return {
            "name": self.name,
            "chip": self.chip.name,
            "cycles": self.cycles,
            "launch_cycles": self.launch_cycles,
            "task_s": self.task_s,
            "time_s": self.time_s,
            "cores": self.core_count,
            "busy": self.busy,
            "bound_by": self.bound_by,
            "bytes": {f"{a}->{b}": n for (a, b), n in self.path_bytes.items()},
            "memory_bytes": self.memory_bytes,
            "energy_j": self.energy_j,
        }

    def _line(self, phases: str = "") -> str:
        """Return the text form; shares are of the whole time, launch included."""
        shares = ", ".join(f"{p} {s:.1%}" for p, s in self.busy.items())
        return (
            f"({self.name}: {phases}{self.cycles} cycles + {self.launch_cycles} launch = "
            f"{self.time_s * 1e6:.2f} us, of it busy {shares}, bound by {self.bound_by})"
        )


@dataclass(frozen=True)
class Timeline(Timed):
    """Time of one launch: its slowest core in detail, the launch as a whole in sums.

    `cycles` counts the kernel from first to last instruction of the slowest core;
    `launch_cycles` is the host's overhead before it, included in `time_s` and in shares. `parts`
    are the compiled programs; `pipe_cycles` are their cycles if memory had no limit.
    """

    name: str
    chip: Chip
    cycles: int
    core_count: int
    path_bytes: Mapping[tuple[str, str], int]
    memory_bytes: int
    l2_bytes: int
    macs: int
    dtype: str
    energy_pj: float
    surroundings: Surroundings
    parts: tuple[Compiled, ...]
    pipe_cycles: tuple[int, ...]
    mix_cycles: int = 0

    @cached_property
    def _stretched(self) -> Stretched:
        """The slowest part and memory's slowdown, computed when they are asked for."""
        slowest_cycles = max(self.pipe_cycles)
        if self.cycles > slowest_cycles:  # memory is the limit, not a pipe
            return stretch(self.parts, self.chip, self.surroundings, self.cycles)
        return Stretched(1.0, self.parts[self.pipe_cycles.index(slowest_cycles)])

    @property
    def memory_slowdown(self) -> float:
        """Factor by which copies from memory take longer where memory is the limit; else 1."""
        return self._stretched.slowdown

    @property
    def compiled(self) -> Compiled:
        """The slowest core's program with its durations."""
        return self._stretched.slowest

    @cached_property
    def busy_cycles(self) -> Mapping[str, int]:
        """Cycles each pipe of the slowest core works; flags and barriers do not count."""
        program = self.compiled
        busy = dict.fromkeys(program.pipes, 0)
        # a copy of 120 cycles that runs 16 times keeps its pipe busy for 1,920
        for step, runs, cycles in zip(program.steps, program.runs(), program.cycles, strict=True):
            if step.kind == WORK and program.sources[step.source].op not in NOT_WORK:
                busy[program.pipes[step.pipe]] += runs * cycles
        return busy

    @property
    def energy_j(self) -> float:
        """Energy of moving and computing, all cores (assumed figures; leakage left out)."""
        return self.energy_pj * 1e-12

    @property
    def peak_share(self) -> float:
        """ops/s divided by the cube peak of the whole chip."""
        return self.ops_per_s / self.chip.peak_ops_per_s(self.dtype)

    @property
    def limit(self) -> str:
        """The limit of the launch without its start: "memory" or the busiest pipe."""
        if self.memory_slowdown > 1.0:
            return "memory"
        return max(self.busy_cycles, key=lambda p: self.busy_cycles[p], default="launch")

    @property
    def bound_by(self) -> str:
        """The limit of the launch with its start: "launch", "memory", or the busiest pipe."""
        return "launch" if self.launch_cycles > self.cycles else self.limit

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every instruction of the slowest core; raises `SimulationError` above MAX_SPANS."""
        events = sum(self.compiled.runs())
        if events > MAX_SPANS:
            needed = f"at most {MAX_SPANS} instructions to draw"
            raise errors.SimulationError(needed, str(events), "simulate a smaller shape")
        _, _, record = run_reference(self.compiled, record=True)
        assert record is not None
        program = self.compiled
        spans: list[Span] = []
        last_of_pipe: dict[int, int] = {}
        rows = zip(record.step, record.start, record.end, record.cause, strict=True)
        for index, (number, start, end, cause) in enumerate(rows):
            step = program.steps[number]
            source = program.sources[step.source]
            # a wait takes its issue cycles in any case; the cycles beyond them are a stall
            stall = end - start - program.cycles[number] if step.kind == WAIT else 0
            name = source.op if source.event is None else f"{source.op} {source.event}"
            event = str(program.events[step.event]) if stall else ""
            # without another cause it began as soon as its pipe had ended the one before
            previous = cause if stall or cause >= 0 else last_of_pipe.get(step.pipe, -1)
            span = Span(
                program.pipes[step.pipe],
                name,
                start,
                end,
                stall_cycles=stall,
                waited_for=event,
                previous=previous,
            )
            spans.append(span)
            last_of_pipe[step.pipe] = index
        return tuple(spans)

    @cached_property
    def stalls(self) -> dict[tuple[str, str], int]:
        """Cycles each pipe stood still, by (pipe, event waited for), largest first."""
        total = Counter[tuple[str, str]]()
        for span in self.spans:
            if span.stall_cycles:
                total[span.pipe, span.waited_for] += span.stall_cycles
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that decides the end: each could end only after the previous one."""
        tails = dict(zip(self.compiled.pipes, self.compiled.tail_latency, strict=True))
        spans = self.spans
        if not spans:
            return ()
        # Backwards from the span whose result is visible last, to a span that did not wait. Of two
        # spans that end at the same time the later one counts.
        index = max(range(len(spans)), key=lambda i: (spans[i].end + tails[spans[i].pipe], i))
        chain = []
        while index >= 0:
            chain.append(spans[index])
            index = spans[index].previous
        return tuple(reversed(chain))

    def critical_share(self) -> dict[str, float]:
        """Share of the critical path's cycles spent on each pipe, and on "latency".

        Latency is the time between the end of an instruction and its result being visible.
        """
        total = Counter[str]()
        previous_end = 0
        for span in self.critical_path:
            # a stall is time of the span before it on the path: it must not count twice
            ready = span.start + span.stall_cycles
            total[span.pipe] += span.end - ready
            if ready > previous_end:  # it waited until the result of the previous span was visible
                total["latency"] += ready - previous_end
            previous_end = span.end
        # Where memory is the limit, the stretched pipes may end some cycles before memory does.
        if self.cycles > previous_end and not self.memory_slowdown > 1.0:
            total["latency"] += self.cycles - previous_end
        path_cycles = max(sum(total.values()), 1)
        return {pipe: cycles / path_cycles for pipe, cycles in total.items()}

    def _repr_html_(self) -> str:
        """Return a small table for notebooks."""
        rows = "".join(
            f"<tr><td>{p}</td><td>{c:,}</td><td>{c / max(self.total_cycles, 1):.1%}</td></tr>"
            for p, c in self.busy_cycles.items()
        )
        head = (
            f"<b>{escape(self.name)}</b> on {self.core_count} of {self.chip.core_count} cores "
            f"of {escape(self.chip.name)}: {self.cycles:,} cycles, {self.time_s * 1e6:.2f} µs "
            f"with launch, bound by {self.bound_by}"
        )
        return (
            f"<div>{head}<table><thead><tr><th>pipe</th><th>busy cycles</th>"
            f"<th>share with launch</th></tr></thead><tbody>{rows}</tbody></table></div>"
        )

    def __repr__(self) -> str:
        """Return one line."""
        return f"Timeline{self._line()}"


@dataclass(frozen=True, slots=True)
class KernelTimeline(Timed):
    """Time of a kernel: the timelines of its `phases`, and their sums.

    Pipes of different phases with the same name count as one. The kernel begins `early_cycles`
    before the end of the barrier that separates it from the previous kernel. If it needs cube and
    vector cores, a launch takes `mix_cycles` more. `hits` are the shares of its tensors that L2
    held at their first read.
    """

    name: str
    chip: Chip
    phases: tuple[Timeline, ...]
    start: Start = field(default="cold", kw_only=True)
    early_cycles: int = field(default=0, kw_only=True)
    mix_cycles: int = field(default=0, kw_only=True)
    hits: Mapping[str, float] = field(default_factory=dict, kw_only=True)

    @property
    def launch_cycles(self) -> int:
        """Cycles of the start that are not hidden behind the kernel before."""
        # a start of 3,000 cycles that begins 1,000 early costs 2,000
        return max(0, start_cycles(self.chip, self.start, self.mix_cycles) - self.early_cycles)

    @property
    def sync_cycles(self) -> int:
        """Cycles of the barriers over all cores between the phases."""
        # 3 phases have 2 barriers between them
        return (len(self.phases) - 1) * self.chip.all_cores_cycles

    @property
    def cycles(self) -> int:
        """Cycles of all phases and of the barriers between them, without the launch."""
        return sum(phase.cycles for phase in self.phases) + self.sync_cycles

    @property
    def core_count(self) -> int:
        """Cores of the phase that uses the most."""
        return max(phase.core_count for phase in self.phases)

    @property
    def busy_cycles(self) -> Mapping[str, int]:
        """Cycles each pipe works, on the slowest core of every phase."""
        return _total([phase.busy_cycles for phase in self.phases])

    @property
    def path_bytes(self) -> Mapping[tuple[str, str], int]:
        """Bytes moved per (src, dst) by all cores."""
        return _total([phase.path_bytes for phase in self.phases])

    @property
    def memory_bytes(self) -> int:
        """Bytes read from and written to device memory."""
        return sum(phase.memory_bytes for phase in self.phases)

    @property
    def l2_hit_rate(self) -> float:
        """Share of the bytes read from GM that hit L2: read before in the phase, or left there."""
        read = sum(n for (src, _), n in self.path_bytes.items() if src == "GM")
        return sum(phase.l2_bytes for phase in self.phases) / read if read else 0.0

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the cube; zeros that pad fractals count."""
        return sum(phase.macs for phase in self.phases)

    @property
    def energy_j(self) -> float:
        """Energy of moving and computing, all cores (assumed figures; leakage left out)."""
        return sum(phase.energy_j for phase in self.phases)

    @property
    def bound_by(self) -> str:
        """The limit of the largest share of the cycles: "launch", "sync", "memory", or a pipe."""
        if self.launch_cycles > self.cycles:
            return "launch"
        # phases of 800 and 300 cycles bound by MTE2 outweigh one of 900 bound by the cube
        limits = _total([{phase.limit: phase.cycles} for phase in self.phases])
        limits["sync"] = self.sync_cycles
        return max(limits, key=lambda name: limits[name])

    def summary(self) -> dict[str, object]:
        """Return the numbers, and those of the phases, as plain data, ready for JSON."""
        rows = [
            {"name": p.name, "cycles": p.cycles, "cores": p.core_count, "bound_by": p.limit}
            for p in self.phases
        ]
        return {**Timed.summary(self), "phases": rows}

    def __repr__(self) -> str:
        """Return one line."""
        return f"KernelTimeline{self._line(f'{len(self.phases)} phases, ')}"


def _total(counts: Sequence[Mapping[Key, int]]) -> dict[Key, int]:
    """Return the sums of several counts, key by key."""
    # Counter.update adds to the counts; dict.update would replace them
    total = Counter[Key]()
    for count in counts:
        total.update(count)
    return dict(total)


# -- Chrome trace JSON: it opens in Perfetto and in MindStudio Insight -----------------------------
def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return Chrome trace events with msprof's field names: ph, name, ts, dur, pid, tid, args.

    Times are microseconds. Every instruction is a complete event (ph "X"), a wait with the flag it
    waited for; metadata events (ph "M") name process and pipes.
    """
    # microseconds of a cycle: 0.001 at 1 GHz
    scale = 1e6 / timeline.chip.clock_hz
    pipes = timeline.compiled.pipes
    metadata: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"AI Core ({timeline.chip.name})"})
    ]
    for tid, pipe in enumerate(pipes):
        metadata.append(("thread_name", tid, {"name": pipe}))
        metadata.append(("thread_sort_index", tid, {"sort_index": tid}))
    events = [
        {"name": n, "ph": "M", "pid": 0, "tid": tid, "args": args} for n, tid, args in metadata
    ]
    for span in timeline.spans:
        args: dict[str, Any] = {"start_cycle": span.start, "cycles": span.end - span.start}
        if span.stall_cycles:
            args |= {"stall_cycles": span.stall_cycles, "waits_for": span.waited_for}
        kind = "stall" if span.stall_cycles else "instruction"
        times = {"ts": span.start * scale, "dur": (span.end - span.start) * scale}
        place = {"pid": 0, "tid": pipes.index(span.pipe), "args": args}
        events.append({"name": span.name, "cat": kind, "ph": "X", **times, **place})
    return events


def write_trace(timeline: Timeline, file: str | Path) -> None:
    """Write the trace to `file`; raise `InputError` if the file cannot be written."""
    data = {"traceEvents": trace_events(timeline), "displayTimeUnit": "ns"}
    output.write_whole(file, json.dumps(data))
