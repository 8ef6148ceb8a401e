"""How long a network takes: its kernels one after another, on one L2.

    time = sum over kernels of (start + cycles / clock)

The host starts the first kernel, the device's queue the others; within a scope of a super kernel
only a barrier over all cores separates two.

Each kernel finds in L2 what earlier ones left there: a tensor's bytes come from L2 where they still
are, else from device memory. Weights have addresses of their own; activations those of the plan.
What L2 keeps, and what is fetched ahead, stands in `placement`.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ascend_lab import output
from ascend_lab.compiler.memory import Plan
from ascend_lab.compiler.placement import Prefetch, kernels_in_memory, places_of, plan_network
from ascend_lab.compiler.tasks import LOADER, NAME, Compiled, CpuKernel, CpuTimeline, Task, time_cpu
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.machine.sim.timeline import Start, start_cycles

PLAN = "greedy-by-size"
"""How memory is planned unless a plan is given: close to the least, and found at once."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One kernel of a network: its nodes' operators, and its timeline."""

    name: str
    type: str
    timeline: sim.KernelTimeline

    @property
    def time_s(self) -> float:
        """Seconds, launch included."""
        return self.timeline.time_s

    @property
    def cube_utilisation(self) -> float:
        """Multiply-accumulates done / those the cubes of all cores could do in the time."""
        chip = self.timeline.chip
        dtype = next((p.dtype for p in self.timeline.phases if p.macs), "")
        if not dtype:
            return 0.0
        peak = chip.macs_per_cycle(dtype) * chip.core_count * self.timeline.total_cycles
        return self.timeline.macs / peak

    def summary(self) -> dict[str, Any]:
        """Return the numbers as plain data, ready for JSON."""
        t = self.timeline
        return {
            "name": self.name,
            "type": self.type,
            "time_s": self.time_s,
            "cycles": t.cycles,
            "bound_by": t.bound_by,
            "cube_utilisation": self.cube_utilisation,
            "bytes": {f"{a}->{b}": n for (a, b), n in t.path_bytes.items()},
            "memory_bytes": t.memory_bytes,
            "l2_hit_rate": t.l2_hit_rate,
        }


@dataclass(frozen=True, slots=True)
class NetworkTimeline:
    """The times of all kernels of a network; views take none."""

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
        """Bytes that cross the memory interface, what is left dirty in L2 at the end included."""
        beside = self.written_back_bytes + self.prefetched_bytes
        return sum(op.timeline.memory_bytes for op in self.operators) + beside

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the cubes, zeros that pad fractals included."""
        return sum(op.timeline.macs for op in self.operators)

    @property
    def l2_hit_rate(self) -> float:
        """Share of the bytes read from GM that L2 serves."""
        reads = [
            (sum(n for (a, _), n in op.timeline.path_bytes.items() if a == "GM"), op.timeline)
            for op in self.operators
        ]
        total = sum(n for n, _ in reads)
        return sum(n * t.l2_hit_rate for n, t in reads) / total if total else 0.0

    @property
    def on_ai_cpu(self) -> tuple[OperatorTime, ...]:
        """The operators that no kernel computes."""
        found = ((op, op.timeline) for op in self.operators)
        return tuple(op for op, t in found if isinstance(t, CpuTimeline) and t.engine == NAME)

    @property
    def launches(self) -> int:
        """Launches made: one a scope, none for the core's own loader."""
        lines = (op.timeline for op in self.operators)
        return sum(t.launch_cycles > 0 and t.start in ("cold", "queued") for t in lines)

    @property
    def launch_s(self) -> float:
        """Seconds of launches, those of the AI CPU too; barriers are none."""
        lines = (op.timeline for op in self.operators)
        cycles = sum(t.launch_cycles for t in lines if t.start in ("cold", "queued"))
        return cycles / self.chip.clock_hz

    @property
    def kernels(self) -> int:
        """Operators that kernels compute, or the core's own loader."""
        outside = (t for t in (op.timeline for op in self.operators) if isinstance(t, CpuTimeline))
        return len(self.operators) - sum(t.engine != LOADER for t in outside)

    @property
    def ai_cpu_s(self) -> float:
        """Seconds on the AI CPU, launches included."""
        return sum(op.time_s for op in self.on_ai_cpu)

    def by_type(self) -> dict[str, float]:
        """Return the seconds per kind of kernel, the longest first."""
        found: dict[str, float] = {}
        for op in self.operators:
            found[op.type] = found.get(op.type, 0.0) + op.time_s
        return dict(sorted(found.items(), key=lambda item: -item[1]))

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
    """Time a compiled network, its activations where the plan says (default: `plan_network`).

    L2 starts empty, or as writing some inputs, in the order given, leaves it. Of a part of a
    network, `passed` are the outputs that what follows reads, and `first` is "queued": what starts
    the first kernel. Without `hints` a cache does not know what is read for the last time.
    """
    chip = compiled.chip
    times = list[OperatorTime]()
    places = places_of(compiled, (plan or plan_network(compiled, PLAN)).offsets)
    l2 = sim.L2.of(chip)
    starts = _starts(compiled, first)
    mixed = _mixed(compiled, starts)
    mix_cycles = round(chip.mix_start_s * chip.clock_hz)
    ahead = Prefetch(compiled, places) if compiled.prefetch and chip.l2.kind == "cache" else None
    told = hints and compiled.hints
    for task, kernel, own in kernels_in_memory(compiled, l2, places, written, passed, told):
        title = task.op
        start = starts.get(task.name, "queued")
        if ahead and times:
            ahead.before(task, l2, start_cycles(chip, start))
        if isinstance(kernel, CpuKernel):
            title = f"{title} on the {kernel.engine}"
            timeline: sim.KernelTimeline = time_cpu(kernel, chip, own)
        else:
            early = early_cycles(task, chip) if start not in ("cold", "queued") else 0
            timeline = sim.simulate_kernel(kernel, chip, own)
            mix = mix_cycles if task.name in mixed else 0
            timeline = replace(timeline, start=start, early_cycles=early, mix_cycles=mix)
        times.append(OperatorTime(task.name, title, timeline))
        if ahead:
            ahead.after(task, kernel, timeline)
    fetched = ahead.fetched_bytes if ahead else 0
    return NetworkTimeline(
        compiled.graph.name, chip, tuple(times), l2.flush(), prefetched_bytes=fetched
    )


def _starts(compiled: Compiled, first: Start) -> dict[str, Start]:
    """Return what starts each kernel; one on the AI CPU, or the core's loader, ends a scope."""
    scopes = {i: scope for scope in compiled.scopes for i in range(*scope)}
    found: dict[str, Start] = {}
    start = first
    last = None
    near = frozenset[str]()
    for i, task in enumerate(compiled.tasks):
        kernel = task.lowered.kernel if task.lowered else None
        if kernel is None or isinstance(kernel, CpuKernel):
            if kernel is not None:
                last = None
                start = "queued" if kernel.engine == NAME else start
            continue
        scope = scopes.get(i)
        units = near if scope is None else sim.units_of(kernel, compiled.chip)
        kinds = len(units) + len(near)
        within: Start = "both" if kinds > 3 else "across" if units != near else "inside"
        found[task.name] = within if scope is not None and scope == last else start
        start = "queued"
        last = scope
        near = units
    return found


def _mixed(compiled: Compiled, starts: Mapping[str, Start]) -> set[str]:
    """Return the first kernels of the launches that run on cube and on vector cores."""
    first = ""
    launched = dict[str, list[frozenset[str]]]()
    for task in compiled.tasks:
        if task.lowered is not None and task.name in starts:
            apart = starts[task.name] in ("cold", "queued")
            first = task.name if apart or not first else first
            launched.setdefault(first, []).append(sim.units_of(task.lowered.kernel, compiled.chip))
    return {name for name, units in launched.items() if len(frozenset().union(*units)) > 1}


def early_cycles(task: Task, chip: Chip) -> int:
    """Return the cycles that a kernel of a super kernel works before its barrier, on every core.

    Each core tells the others that it is done and goes on: it fetches the first tile of each of its
    weights, which depend on no kernel, and waits before it loads what another core has written. Of
    a core that first waits for another of its own AI core that one tells.
    """
    assert task.lowered is not None
    parts = task.lowered.kernel.phases[0].parts
    own = task.piece.constants
    return int(min(_cycles_ahead(part.program, own, chip) for part in parts))


def _cycles_ahead(program: isa.Program, own: Collection[str], chip: Chip) -> float:
    """Return the cycles of the first loads of a program's `own` tensors, infinite if it waits."""
    first = dict[str, float]()
    loaded = False
    for instruction, _ in program.instructions():
        src = instruction.srcs[0] if instruction.srcs else None
        dst = instruction.dst
        if instruction.op == "cross_wait" and not loaded:
            return float("inf")
        if src is None or src.space != "GM":
            continue
        if src.buffer.name.partition(".")[0] not in own:
            loaded = True
            continue
        path = chip.path("GM", dst.space if dst else "")
        cycles = path.startup_cycles + src.size_bytes / path.rate_bytes_per_cycle
        first.setdefault(src.buffer.name, cycles)
    return sum(first.values())


# -- a trace for chrome://tracing, in msprof's field names ----------------------------------------
def network_events(times: NetworkTimeline) -> list[dict[str, Any]]:
    """Return one event per launch and per phase, microseconds from the start of the network.

    Rows: what the host launches, kernels, and per pipe how long it works within each kernel.
    """
    scale = 1e6 / times.chip.clock_hz
    pipes = sorted({pipe for op in times.operators for pipe in op.timeline.busy_cycles})
    rows = ["launch", "kernel", *pipes]
    events = [_meta("process_name", 0, f"Ascend Hardware ({times.chip.name})")]
    events += [_meta("thread_name", i, name) for i, name in enumerate(rows)]
    now = 0.0
    for op in times.operators:
        t = op.timeline
        what = "launch" if t.start in ("cold", "queued") else "barrier"
        events.append(_span(f"{what} {op.name}", now, t.launch_cycles * scale, 0, {}))
        now += t.launch_cycles * scale
        args = {key: value for key, value in op.summary().items() if key != "name"}
        events.append(_span(op.name, now, t.cycles * scale, 1, args))
        for pipe, cycles in t.busy_cycles.items():
            events.append(_span(op.type, now, cycles * scale, rows.index(pipe), {"busy": cycles}))
        now += t.cycles * scale
    return events


def _meta(name: str, tid: int, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": 0, "tid": tid, "args": {"name": value}}


def _span(name: str, start: float, length: float, tid: int, args: Any) -> dict[str, Any]:
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
