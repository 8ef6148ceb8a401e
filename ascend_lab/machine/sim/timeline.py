"""What a simulation tells: cycles, busy shares, bytes, energy, and on demand every span.

A kernel of several phases tells the sums of its phases' timelines, a barrier over all cores between
any two, and what starts it: the host ("cold"), the device's queue ("queued"), or, within a super
kernel, a barrier after the one before it ("inside"; "across" if other cores go on there than came;
"both" if cube and vector cores did and do).
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
IDLE = ("barrier", "cross_set")
"""What a pipe stands still in."""
Key = TypeVar("Key", bound=Hashable)
Start = Literal["cold", "queued", "inside", "across", "both"]
"""What starts a kernel: see the module."""


def start_cycles(chip: Chip, start: Start, mix_cycles: int = 0) -> int:
    """Return the cycles of starting a kernel, and `mix_cycles` unless a launch contains it.

    Of two kinds one tells the other, cores of which tell each other, and then those they work with.
    """
    costs = {
        "cold": chip.launch_overhead_s,
        "queued": chip.queued_launch_s,
        "inside": chip.barrier_s,
        "across": 2 * chip.barrier_s,
        "both": 3 * chip.barrier_s,
    }
    return round(costs[start] * chip.clock_hz) + mix_cycles * (start in ("cold", "queued"))


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction in time: pipe, name, [start, end) in cycles.

    `stall_cycles` is how long a wait_flag stood still, `cause` the event or pipe that held it.
    `previous` is the index of the span that decided when this one ended (-1: none).
    """

    pipe: str
    name: str
    start: int
    end: int
    stall_cycles: int = 0
    cause: str = ""
    previous: int = -1


class Timed:
    """What follows from the cycles, bytes and multiply-accumulates of a launch or a kernel."""

    __slots__ = ()
    name: str
    chip: Chip
    if TYPE_CHECKING:  # what a launch has as fields, and a kernel as sums

        def __getattr__(self, name: str) -> Any: ...

    @property
    def launch_cycles(self) -> int:
        """What starts it, paid once, in cycles: the host, if nothing else is said."""
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

        task_s = (queued start + cycles) / clock; the host's part of a cold launch comes before it.
        """
        start = start_cycles(self.chip, "queued", int(self.mix_cycles))
        return (int(self.cycles) + start) / self.chip.clock_hz

    @property
    def ops_per_s(self) -> float:
        """Cube operations per second, 1 MAC = 2 ops; zeros that pad fractals count."""
        return 2.0 * int(self.macs) / self.time_s

    @property
    def busy(self) -> dict[str, float]:
        """Share of the total time each pipe of the slowest core spends working."""
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
    are the compiled programs and `pipe_cycles` their cycles were memory without limit.
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
    around: Surroundings
    parts: tuple[Compiled, ...]
    pipe_cycles: tuple[int, ...]
    mix_cycles: int = 0

    @cached_property
    def _stretched(self) -> Stretched:
        """Found when asked for: a search that wants cycles only does not pay for it."""
        longest = max(self.pipe_cycles)
        if self.cycles > longest:
            return stretch(self.parts, self.chip, self.around, self.cycles)
        return Stretched(1.0, self.parts[self.pipe_cycles.index(longest)])

    @property
    def memory_slowdown(self) -> float:
        """How much longer than alone memory's bytes take, where memory is the limit; else 1."""
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
        for step, runs, each in zip(program.steps, program.runs(), program.cycles, strict=True):
            if step.kind == WORK and program.sources[step.source].op not in IDLE:
                busy[program.pipes[step.pipe]] += runs * each
        return busy

    @property
    def energy_j(self) -> float:
        """Energy of moving and computing, all cores (assumed figures; leakage left out)."""
        return self.energy_pj * 1e-12

    @property
    def peak_share(self) -> float:
        """ops/s over the cube peak of the whole chip."""
        return self.ops_per_s / self.chip.peak_ops_per_s(self.dtype)

    @property
    def limit(self) -> str:
        """What limits it once it runs: "memory" or the busiest pipe."""
        if self.memory_slowdown > 1.0:
            return "memory"
        return max(self.busy_cycles, key=lambda p: self.busy_cycles[p], default="launch")

    @property
    def bound_by(self) -> str:
        """What limits it, launch included: "launch", "memory", or the busiest pipe."""
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
        out: list[Span] = []
        last: dict[int, int] = {}
        rows = zip(record.step, record.start, record.end, record.cause, strict=True)
        for index, (number, start, end, cause) in enumerate(rows):
            step = program.steps[number]
            source = program.sources[step.source]
            stall = end - start - program.cycles[number] if step.kind == WAIT else 0
            name = source.op if source.event is None else f"{source.op} {source.event}"
            why = str(program.events[step.event]) if stall else ""
            previous = cause if stall or cause >= 0 else last.get(step.pipe, -1)
            out.append(Span(program.pipes[step.pipe], name, start, end, stall, why, previous))
            last[step.pipe] = index
        return tuple(out)

    @cached_property
    def stalls(self) -> dict[tuple[str, str], int]:
        """Cycles each pipe stood still, by (pipe, event waited for), most first."""
        total = Counter[tuple[str, str]]()
        for span in self.spans:
            if span.stall_cycles:
                total[span.pipe, span.cause] += span.stall_cycles
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that fixes the end: each ended when the next could go on."""
        tails = dict(zip(self.compiled.pipes, self.compiled.tail_latency, strict=True))
        spans = self.spans
        if not spans:
            return ()
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
        before = 0
        for span in self.critical_path:
            ready = span.start + span.stall_cycles
            total[span.pipe] += span.end - ready
            if ready > before:
                total["latency"] += ready - before
            before = span.end
        if self.cycles > before and not self.memory_slowdown > 1.0:
            total["latency"] += self.cycles - before
        whole = max(sum(total.values()), 1)
        return {pipe: cycles / whole for pipe, cycles in total.items()}

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
    """Time of a kernel: `phases` holds one timeline per phase; the sums stand here.

    Pipes of all phases count together by name. It begins `early_cycles` before its barrier lets it
    pass, or `mix_cycles` later on cores of two kinds. L2 held shares `hits` of what it reads first.
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
        """Cycles of what starts it."""
        return max(0, start_cycles(self.chip, self.start, self.mix_cycles) - self.early_cycles)

    @property
    def sync_cycles(self) -> int:
        """Cycles of the barriers over all cores between the phases."""
        return (len(self.phases) - 1) * self.chip.all_cores_cycles

    @property
    def cycles(self) -> int:
        """Cycles of all phases and of the barriers between them, without the launch."""
        return sum(phase.cycles for phase in self.phases) + self.sync_cycles

    @property
    def core_count(self) -> int:
        """Cores of the phase that uses most of them."""
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
        """Share of the bytes read from GM that L2 serves: re-read in a phase, or left there."""
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
        """What limits most of the cycles: "launch", "sync", "memory", or a pipe."""
        if self.launch_cycles > self.cycles:
            return "launch"
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


def _total(parts: Sequence[Mapping[Key, int]]) -> dict[Key, int]:
    total = Counter[Key]()
    for part in parts:
        total.update(part)
    return dict(total)


# -- Chrome trace JSON: it opens in Perfetto and in MindStudio Insight -----------------------------
def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Return Chrome trace events with msprof's field names: ph, name, ts, dur, pid, tid, args.

    Times are microseconds. One complete event (ph "X") per instruction, waits marked with the
    flag that held them, and metadata events (ph "M") that name process and pipes.
    """
    scale = 1e6 / timeline.chip.clock_hz
    pipes = timeline.compiled.pipes
    told: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": f"AI Core ({timeline.chip.name})"})
    ]
    for tid, pipe in enumerate(pipes):
        told.append(("thread_name", tid, {"name": pipe}))
        told.append(("thread_sort_index", tid, {"sort_index": tid}))
    events = [{"name": n, "ph": "M", "pid": 0, "tid": tid, "args": args} for n, tid, args in told]
    for span in timeline.spans:
        args: dict[str, Any] = {"start_cycle": span.start, "cycles": span.end - span.start}
        if span.stall_cycles:
            args |= {"stall_cycles": span.stall_cycles, "waits_for": span.cause}
        kind = "stall" if span.stall_cycles else "instruction"
        times = {"ts": span.start * scale, "dur": (span.end - span.start) * scale}
        place = {"pid": 0, "tid": pipes.index(span.pipe), "args": args}
        events.append({"name": span.name, "cat": kind, "ph": "X", **times, **place})
    return events


def write_trace(timeline: Timeline, file: str | Path) -> None:
    """Write the trace to `file`; raise `InputError` if that cannot be done."""
    data = {"traceEvents": trace_events(timeline), "displayTimeUnit": "ns"}
    output.write_whole(file, json.dumps(data))
