"""Times measured kernels that this package builds as small graphs, and grouped matrix products.

SwiGlu, for example, is one kernel of the vendor's library; here (see `chains`) it is a graph of
slices, silu and a product, which is compiled into one or more kernels. The estimate says how many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ascend_lab.compare.chains import GROUPS, KERNELS
from ascend_lab.compare.estimates import Estimate, at_peak, fetched, of_tasks, with_bytes
from ascend_lab.compare.rows import Work
from ascend_lab.compare.words import cores_of
from ascend_lab.compiler import Graph
from ascend_lab.machine.chip import Chip

if TYPE_CHECKING:
    from ascend_lab.machine.isa import Kernel
    from ascend_lab.machine.sim import DeviceMemory, KernelTimeline

READ_IN_PART = (
    "gather_elements",
    "moe_finalize_routing",
    "resize_bilinear",
)
"""Chains (measured kernels built as graphs) that read only the parts indices point to."""

MIX_KERNELS = ("grouped_matmul",)
"""Kernels launched on cube and vector cores together, though only the cube cores work.

GroupedMatmul is of type MIX_AIC_1_0. Source: hicann/ops-transformer @9c9d397a,
gmm/grouped_matmul/op_kernel/grouped_matmul_tiling_key.h.
"""
FETCHED = {
    "foreach_addcdiv_scalar": ("",),
    "foreach_norm": ("",),
    "swi_glu": ("", "Slice+SwiGlu"),
}
"""Chains whose measured kernel is written in Ascend C, so that all vector cores fetch its code.

The value lists what the table's column `kernels` says in such rows: "" for a single kernel.
"""
SUPER_KERNELS = ("mla_prolog",)
"""Chains that were measured as one kernel but are several here, with only barriers between them.

They are timed like a super kernel of a network: with one launch, of cube and vector cores.
"""


def ends_as_given(graph: Graph) -> Graph:
    """Return a graph with layouts: results of the cube are in blocks if an input is, else plain."""
    from ascend_lab.compiler.layout import Assigner

    blocked = any(graph.types[name].layout != "ND" for name in graph.inputs)
    return Assigner(graph).assign(None if blocked else "ND")


def chain(work: Work, graph: Graph, chip: Chip) -> Estimate:
    """Time the kernels of a small graph whose tensors have the number formats of the row."""
    from ascend_lab.compiler import bound_of, network, tasks
    from ascend_lab.compiler.compile import Layouts, Road, finish_stages, front_stages

    used_chip = chip
    # the row was measured on some of the chip's cores
    if "cores" in work.attributes:
        cores = cores_of(chip, "cores", work.attributes["cores"])
        used_chip = replace(chip, core_count=cores)
    # dtype "": the graph's number formats stay as they are
    road = Road(dtype="", layouts=Layouts(ends_as_given))
    front = front_stages(graph, used_chip, road)
    if cut := KERNELS.get(work.operator):
        groups = cut(work, front.laid_out)
        compiled = tasks.compile_tasks(front.laid_out, used_chip, groups, road.start)
        times = network.simulate_graph(compiled)
        cut_by = "cut as the source's"
    else:
        compiled = finish_stages(front, used_chip, road).compiled
        cut_by = "fused by our rules"
        if work.operator in SUPER_KERNELS:
            compiled = replace(compiled, scopes=((0, len(compiled.tasks)),))
            cut_by = "in one launch, barriers between"
        times = network.simulate_graph(compiled)
    bound = bound_of(front.rewritten, at_peak(used_chip))
    # no schedule is quicker than the transfer of the bytes that it has to read
    if work.operator not in READ_IN_PART:
        bound = with_bytes(bound, graph, at_peak(used_chip))
    marks = [f"kernels of ours: {len(times.operators)}, {cut_by}"]
    if work.l2 != "cold":
        marks.append(f"l2 {work.l2}: timed cold")
    if on_ai_cpu := times.on_ai_cpu:
        marks.append(", ".join(line.type for line in on_ai_cpu))
    estimate = of_tasks(work, used_chip, times, bound, tuple(marks))
    if work.kernels in FETCHED.get(work.operator, ()):
        return fetched(estimate, used_chip, used_chip.cores_of("vector"))
    return estimate


def grouped(work: Work, chip: Chip) -> Estimate:
    """Time a grouped product, the conversions of its operands and the steps on its result.

    Each kernel has a launch of its own, except conversions that share the product's launch
    (`together`). The product reads from L2 what a conversion has left there; what does not fit is
    written to memory while the product runs.
    """
    from ascend_lab.compiler import bound_of, simulate_graph
    from ascend_lab.compiler.compile import Layouts, Road
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel

    product = GROUPS[work.operator](work)
    bound = with_bytes(bound_of(product.products, at_peak(chip)), product.products, at_peak(chip))
    kernel = product.kernel(chip)
    memory = DeviceMemory.of(chip)
    parts: dict[str, float] = {}
    kernels = 1
    if product.operand_graph:
        conversions, memory = converted(product.operand_graph, kernel, chip)
        if product.together:
            # between two phases of a launch all cores wait for each other
            cycles = sum(timeline.cycles + chip.all_cores_cycles for timeline in conversions)
            parts["operands"] = cycles / chip.clock_hz
        else:
            parts["operands"] = sum(timeline.task_s for timeline in conversions)
            kernels += len(conversions)
    timeline = simulate_kernel(kernel, chip, memory)
    if work.operator in MIX_KERNELS:
        timeline = replace(timeline, mix_cycles=round(chip.mix_start_s * chip.clock_hz))
    parts["products"] = timeline.task_s
    # the host's part of the first start, which a profiler's task does not include
    host_start_s = chip.launch_overhead_s - chip.queued_launch_s
    if product.result_graph:
        stages = Road(dtype="", layouts=Layouts(ends_as_given)).stages(product.result_graph, chip)
        times = simulate_graph(stages.compiled, written=("y",))
        parts["behind"] = times.time_s - host_start_s
        kernels += len(times.operators)
    marks = (f"kernels of ours: {kernels}, the product's by hand",)
    limit = max(parts, key=lambda part: parts[part])
    model_s = sum(parts.values())
    if work.timing == "kernel":
        return Estimate(model_s, bound.work_s, limit, {}, marks)
    return Estimate(model_s + host_start_s, bound.time_s, limit, {}, marks)


def converted(
    graph: Graph, kernel: Kernel, chip: Chip
) -> tuple[list[KernelTimeline], DeviceMemory]:
    """Return the timelines of the kernels that convert a kernel's operands, and L2 after them.

    The graph's outputs are named like the kernel's tensors.
    """
    from ascend_lab.compiler.compile import Front, Road, finish_stages
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel

    sizes = {b.name: b.size_bytes for b in kernel.tensors}
    memory = DeviceMemory.of(chip)
    timelines: list[KernelTimeline] = []
    place_of: dict[str, tuple[int, int]] = {}
    for task in finish_stages(Front({}, graph, graph), chip, Road(dtype="")).compiled.tasks:
        assert task.lowered is not None
        tensors = task.lowered.kernel.tensors
        timelines.append(simulate_kernel(task.lowered.kernel, chip, memory))
        addresses = memory.addresses(tensors)
        address_of = {task.value(name): address for name, address in addresses.items()}
        place_of.update({name: (address_of[name], sizes[name]) for name in task.writes})
        # the next kernel's own tensors lie above all of these
        workspace_start = max(addresses[b.name] + b.size_bytes for b in tensors)
        memory = replace(memory, workspace_bytes=workspace_start)
    return timelines, memory.at(place_of)
