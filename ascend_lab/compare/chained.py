"""Measured kernels that are small graphs here (see `chains`), and grouped products."""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.compare.chains import GROUPS, KERNELS
from ascend_lab.compare.estimates import Estimate, at_peak, of_tasks, with_bytes
from ascend_lab.compare.rows import Work
from ascend_lab.compare.words import cores_of
from ascend_lab.compiler import Graph
from ascend_lab.machine.chip import Chip

READ_IN_PART = (
    "gather_elements",
    "moe_finalize_routing",
    "moe_re_routing",
    "resize_bilinear",
    "sparse_flash_attention",
)
"""Chains that need not read all of their inputs: indices say what."""


def ends_as_given(graph: Graph) -> Graph:
    """Return a graph with layouts; where an input lies in blocks, so do the cube's results."""
    from ascend_lab.compiler.layout import Assigner

    blocked = any(graph.types[name].layout != "ND" for name in graph.inputs)
    return Assigner(graph).assigned(None if blocked else "ND")


def chain(work: Work, graph: Graph, chip: Chip) -> Estimate:
    """Time the kernels of a small graph, each tensor in the format that the row gives it."""
    from ascend_lab.compiler import Road, bound_of, finish_stages, front_stages, network, tasks

    if "cores" in work.attributes:
        cores = cores_of(chip, "cores", work.attributes["cores"])
        chip = replace(chip, core_count=cores)
    road = Road(dtype="", layouts=ends_as_given)
    front = front_stages(graph, chip, road)
    if cut := KERNELS.get(work.operator):
        groups = cut(work, front.laid_out)
        compiled = tasks.compile_tasks(front.laid_out, chip, groups, road.start)
        times = network.simulate_graph(compiled)
        cut_by = "cut as the source's"
    else:
        times = finish_stages(front, chip, road).timeline()
        cut_by = "fused by our rules"
    bound = bound_of(front.rewritten, at_peak(chip))
    if work.operator not in READ_IN_PART:
        bound = with_bytes(bound, graph, at_peak(chip))
    marks = [f"kernels of ours: {len(times.operators)}, {cut_by}"]
    if work.l2 != "cold":
        marks.append(f"l2 {work.l2}: timed cold")
    if aside := times.on_ai_cpu:
        marks.append(", ".join(line.type for line in aside))
    return of_tasks(work, chip, times, bound, tuple(marks))


def grouped(work: Work, chip: Chip) -> Estimate:
    """Time a grouped product, and what stands before and behind it; each starts on its own."""
    from ascend_lab.compiler import bound_of, simulate_graph
    from ascend_lab.compiler.compile import Front, Road, finish_stages
    from ascend_lab.machine.sim import DeviceMemory, simulate_kernel
    from ascend_lab.operators.ops.grouped import default_grouped

    found, road = GROUPS[work.operator](work), Road(dtype="", layouts=ends_as_given)
    bound = with_bytes(bound_of(found.products, at_peak(chip)), found.products, at_peak(chip))
    kernel = default_grouped(found.shape, chip, found.epilogue)
    line = simulate_kernel(kernel, chip, DeviceMemory.of(chip))
    by_host_s = chip.launch_overhead_s - chip.queued_launch_s
    parts = {"products": line.task_s}
    kernels = 1
    if found.before:
        stages = finish_stages(Front({}, found.before, found.before), chip, road)
        times = stages.timeline()
        parts["weights"] = times.time_s - by_host_s
        kernels += len(times.operators)
    if found.behind:
        times = simulate_graph(road.stages(found.behind, chip).compiled, written=("y",))
        parts["behind"] = times.time_s - by_host_s
        kernels += len(times.operators)
    marks = (f"{kernels} kernels of ours, the groups in one",)
    limit = max(parts, key=lambda part: parts[part])
    model_s = sum(parts.values())
    if work.timing == "kernel":
        return Estimate(model_s, bound.work_s, limit, {}, marks)
    return Estimate(model_s + by_host_s, bound.time_s, limit, {}, marks)
