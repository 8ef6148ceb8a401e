"""SISD: one instruction, one element. An in-order core with a cache and a loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ascend_lab.machines.blocking import blocking, operands, product
from ascend_lab.machines.lanes import Timing, Trace, execute
from ascend_lab.machines.memory import Port
from ascend_lab.machines.program import Arith, Array, Kernel, Load, Matmul
from ascend_lab.machines.result import Breakdown, Line, Run, whole


@dataclass(frozen=True, slots=True)
class Scalar:
    """An in-order core that issues one instruction per cycle and stalls on a missing operand.

    `arith_cycles` and `load_cycles` (a cache hit) are latencies; a cache line that is touched for
    the first time costs the port's latency, divided by the `fetches_in_flight` that a prefetcher
    keeps going. The cache never evicts a line that is still needed.
    """

    name: str = "scalar"
    arith_cycles: int = 4
    load_cycles: int = 4
    fetches_in_flight: int = 4
    loop_instructions: int = 2
    local_bytes: int = 256 * 1024
    port: Port = field(default_factory=Port)

    def peak_ops_per_cycle(self, dtype: str = "float32") -> float:
        """Return the operations per cycle of one multiply-add after the other: 2."""
        return 2.0


def scalar_kernel(machine: Scalar, kernel: Kernel, inputs: Mapping[str, Array]) -> Run:
    """Execute the loop one element at a time; nothing overlaps, so cycles are the sum of parts."""
    trace = execute(kernel, inputs, 1, machine.port, _timing(machine))
    values = dict(trace.values)
    loop = machine.loop_instructions * kernel.n
    stalls = int(trace.stalls.sum())
    if trace.summand is not None:
        values[kernel_total(kernel)][0] = sequential_sum(trace.summand[:, 0])
        per_element = int(trace.slots[0] + trace.stalls[0]) + machine.loop_instructions
        stalls += kernel.n * max(0, machine.arith_cycles - per_element)
    lines_in, lines_out = cache_lines(trace)
    instructions = trace.count("groups") + loop
    stream = [Line(issue.text, issue.groups) for issue in trace.issues]
    stream.append(Line("next i, jump", kernel.n))
    return _finish(
        machine,
        kernel.name,
        values,
        (instructions, stalls, lines_in, lines_out),
        {"ops": trace.count("ops"), "bytes_used": trace.count("bytes_used")},
        tuple(stream),
    )


def scalar_matmul(machine: Scalar, program: Matmul, inputs: Mapping[str, Array]) -> Run:
    """Execute three nested loops: two loads, a multiply-add and the loop per product."""
    a, b, accumulate = operands(program, inputs)
    steps = program.m * program.k * program.n
    inner = Kernel("inner", 1, (Load("a", "A"), Load("b", "B"), Arith("c", "mad", ("a", "b", 0.0))))
    one = np.ones(1, accumulate)
    trace = execute(inner, {"A": one, "B": one}, 1, machine.port, _timing(machine))
    slots = int(trace.slots[0]) + machine.loop_instructions
    cut = blocking(program, a.itemsize, accumulate.itemsize, machine.local_bytes)
    line = machine.port.line_bytes
    work = (
        slots * steps + program.m * program.n,
        int(trace.stalls[0]) * steps,
        -(-cut.bytes_in // line),
        -(-cut.bytes_out // line),
    )
    used = a.nbytes + b.nbytes + cut.bytes_out
    stream = [Line(issue.text, steps) for issue in trace.issues]
    stream += [Line("next k, jump", steps), Line("st C[i,j], c", program.m * program.n)]
    values = {"C": product(a, b, accumulate)}
    counts = {"ops": program.ops, "bytes_used": used}
    return _finish(machine, program.name, values, work, counts, tuple(stream))


def cache_lines(trace: Trace) -> tuple[int, int]:
    """Return the distinct lines read and written; an array read twice is fetched once."""
    lines: dict[tuple[str, str], int] = {}
    for issue in trace.issues:
        key = (issue.kind, issue.array)
        lines[key] = max(lines.get(key, 0), issue.lines)
    read = sum(count for (kind, _), count in lines.items() if kind == "load")
    written = sum(count for (kind, _), count in lines.items() if kind == "store")
    return read, written


def kernel_total(kernel: Kernel) -> str:
    """Return the name of the array that the kernel's closing `Total` writes."""
    return str(getattr(kernel.body[-1], "array", ""))


def sequential_sum(values: Array) -> Array:
    """Return the sum from left to right, rounding in the format of the values at every step."""
    return np.cumsum(values, dtype=values.dtype)[-1]  # type: ignore[no-any-return]


def _timing(machine: Scalar) -> Timing:
    return Timing(machine.arith_cycles, machine.load_cycles, cache_bytes=machine.port.line_bytes)


def _finish(
    machine: Scalar,
    name: str,
    values: dict[str, Array],
    work: tuple[int, int, int, int],
    counts: dict[str, int],
    stream: tuple[Line, ...],
) -> Run:
    instructions, stalls, lines_in, lines_out = work
    port = machine.port
    bytes_moved = (lines_in + lines_out) * port.line_bytes
    misses = lines_in * port.latency_cycles / machine.fetches_in_flight
    move = whole(bytes_moved / port.rate_bytes_per_cycle)
    parts = Breakdown(instructions, move, whole(stalls + misses))
    counts = {"instructions": instructions, **counts, "bytes_moved": bytes_moved}
    counts["cache_misses"] = lines_in
    return Run(machine.name, name, values, parts.total, parts, counts, stream)
