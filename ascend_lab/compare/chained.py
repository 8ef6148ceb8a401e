"""Measured kernels that are small graphs here (see `chains`), and grouped products."""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.chip import Chip
from ascend_lab.compare.chains import GROUPS, KERNELS
from ascend_lab.compare.estimates import Estimate, at_peak, of_tasks, with_bytes
from ascend_lab.compare.rows import Work
from ascend_lab.compare.words import cores_of
from ascend_lab.graph import Graph

READ_IN_PART = (
    "gather_elements",
    "moe_finalize_routing",
    "moe_re_routing",
    "resize_bilinear",
    "sparse_flash_attention",
)
"""Chains that need not read all of their inputs: indices say what."""

MIX_KERNELS = ("grouped_matmul",)
"""Kernels started as those of cube and vector cores together, though only cubes work.

GroupedMatmul is of type MIX_AIC_1_0. Source: hicann/ops-transformer @9c9d397a,
gmm/grouped_matmul/op_kernel/grouped_matmul_tiling_key.h.
"""
SUPER_KERNELS = ("mla_prolog",)
"""Chains in one measured kernel that no fusion of ours makes: barriers part its pieces, no starts.

They are timed as a super kernel of a network: one start, of cores of both kinds.
"""


def ends_as_given(graph: Graph) -> Graph:
    """Return a graph with layouts; where an input lies in blocks, so do the cube's results."""
    from ascend_lab.graph.layout import Assigner

    blocked = any(graph.types[name].layout != "ND" for name in graph.inputs)
    return Assigner(graph).assigned(None if blocked else "ND")


def chain(work: Work, graph: Graph, chip: Chip) -> Estimate:
    """Time the kernels of a small graph, each tensor in the format that the row gives it."""
    from ascend_lab.graph import Road, bound_of, finish_stages, front_stages, network, tasks

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
        compiled = finish_stages(front, chip, road).compiled
        cut_by = "fused by our rules"
        if work.operator in SUPER_KERNELS:
            compiled = replace(compiled, scopes=((0, len(compiled.tasks)),))
            cut_by = "in one launch, barriers between"
        times = network.simulate_graph(compiled)
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
    """Time a product by hand, and what stands before and behind it; each starts on its own.

    The product finds of its weights what their conversion has left in L2, and has to make room:
    what that wrote and L2 cannot hold goes to memory meanwhile.
    """
    from ascend_lab.graph import bound_of, simulate_graph
    from ascend_lab.graph.compile import Front, Road, finish_stages
    from ascend_lab.sim import DeviceMemory, simulate_kernel

    found, road = GROUPS[work.operator](work), Road(dtype="", layouts=ends_as_given)
    bound = with_bytes(bound_of(found.products, at_peak(chip)), found.products, at_peak(chip))
    memory, parts, kernels = DeviceMemory.of(chip), dict[str, float](), 1
    kernel = found.kernel(chip)
    if found.before:
        (task,) = finish_stages(Front({}, found.before, found.before), chip, road).compiled.tasks
        assert task.lowered is not None
        conversion = task.lowered.kernel
        parts["weights"] = simulate_kernel(conversion, chip, memory).task_s
        kernels += 1
        (result,) = task.piece.graph.outputs
        (weights,) = (b for b in kernel.tensors if b.name == "b")
        place = memory.addresses(conversion.tensors)[result], weights.size_bytes
        memory = memory.at({weights.name: place})
    line = simulate_kernel(kernel, chip, memory)
    if work.operator in MIX_KERNELS:
        line = replace(line, mix_cycles=round(chip.mix_start_s * chip.clock_hz))
    parts["products"] = line.task_s
    by_host_s = chip.launch_overhead_s - chip.queued_launch_s
    if found.behind:
        times = simulate_graph(road.stages(found.behind, chip).compiled, written=("y",))
        parts["behind"] = times.time_s - by_host_s
        kernels += len(times.operators)
    marks = (f"kernels of ours: {kernels}, the product's by hand",)
    limit = max(parts, key=lambda part: parts[part])
    model_s = sum(parts.values())
    if work.timing == "kernel":
        return Estimate(model_s, bound.work_s, limit, {}, marks)
    return Estimate(model_s + by_host_s, bound.time_s, limit, {}, marks)
