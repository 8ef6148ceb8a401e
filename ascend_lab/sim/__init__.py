"""Programs executed for values (`execute`) and for time (`simulate`)."""

# fmt: off
# isort: off
from ascend_lab.errors import NotComposableError
from ascend_lab.sim.compiled import Compiled, compile_program, numba_available, run_reference
from ascend_lab.sim.cost import Cost, Surroundings, Traffic, analyse, instruction_cost
from ascend_lab.sim.fast import run_batch, run_fast
from ascend_lab.sim.l2 import L2, Access, DeviceMemory, Outcome
from ascend_lab.sim.simulate import simulate, simulate_kernel
from ascend_lab.sim.timeline import KernelTimeline, Span, Timeline, trace_events, write_trace
from ascend_lab.sim.values import execute

__all__ = [
    "L2", "Access", "Compiled", "Cost", "DeviceMemory", "KernelTimeline", "NotComposableError",
    "Outcome", "Span", "Surroundings", "Timeline", "Traffic", "analyse", "compile_program",
    "execute", "instruction_cost", "numba_available", "run_batch", "run_fast", "run_reference",
    "simulate", "simulate_kernel", "trace_events", "write_trace",
]
