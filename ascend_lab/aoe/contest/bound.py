"""Times that no schedule of a problem can beat, and what an ideal unfused one would take."""

from __future__ import annotations

from ascend_lab.aoe.contest.problem import Problem


def compute_time(problem: Problem, operation: int) -> float:
    """Return base cost x native tiles of the result: the least time to compute an operation."""
    height, width = problem.shape(operation)
    wide, high = problem.native
    return problem.operations[operation].base_cost * (-(-width // wide) * -(-height // high))


def lower_bound(problem: Problem) -> float:
    """Return max(all compute, inputs and results of the graph / bandwidth).

    Certified: the step times of a schedule add up to at least its compute and at least its moves.
    """
    compute = sum(compute_time(problem, op) for op in range(len(problem.operations)))
    inputs = {tensor for tensor in problem.consumers if tensor not in problem.producer}
    results = {tensor for tensor in problem.producer if tensor not in problem.consumers}
    moved = sum(problem.size(tensor) for tensor in results)
    moved += sum(_needed(problem, tensor) for tensor in inputs)
    return max(compute, moved / problem.throughput)


def _needed(problem: Problem, tensor: int) -> int:
    """Return how many elements of a tensor its readers need, where shapes do not fit exactly."""
    most = 0
    for op in problem.consumers[tensor]:
        operation, (height, width) = problem.operations[op], problem.shape(op)
        for place, used in enumerate(operation.inputs):
            if used == tensor:
                product = operation.kind == "MatMul"
                rows = problem.depth(op) if product and place == 1 else height
                columns = problem.depth(op) if product and place == 0 else width
                area = min(rows, problem.heights[tensor]) * min(columns, problem.widths[tensor])
                most = max(most, area)
    return most


def unfused_floor(problem: Problem) -> float:
    """Return the sum over operations of max(compute, each of its tensors moved once).

    No schedule of single operations without retained tensors beats it; with a small fast memory
    none reaches it.
    """
    total = 0.0
    for index, operation in enumerate(problem.operations):
        tensors = {*operation.inputs, *operation.outputs}
        moved = sum(problem.size(tensor) for tensor in tensors) / problem.throughput
        total += max(compute_time(problem, index), moved)
    return total
