"""The contest's cost model: the worked examples of PROBLEM.md, and a plain loop over all steps."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.errors import CapacityError, ScheduleError
from ascend_lab.lab.contest import Problem, Step, schedule_latencies, step_latency, working_set
from ascend_lab.lab.contest.cost import group_of
from ascend_lab.lab.contest.price import snake
from ascend_lab.lab.contest.problem import parse_problem

NATIVE = (128, 128, 1)


def square(count, inputs, costs, kinds, capacity, side=128) -> Problem:
    """Return a problem of `count` square tensors; operation i makes the next unused tensor."""
    outputs = [[count - len(costs) + i] for i in range(len(costs))]
    return parse_problem(
        {
            "widths": [side] * count,
            "heights": [side] * count,
            "inputs": inputs,
            "outputs": outputs,
            "base_costs": costs,
            "op_types": kinds,
            "fast_memory_capacity": capacity,
            "slow_memory_bandwidth": 10,
            "native_granularity": [128, 128],
        }
    )


POINTWISE = "Pointwise"
EXAMPLE_1 = square(3, [[0], [1]], [1000, 100], [POINTWISE] * 2, 35_000)
EXAMPLE_2 = square(3, [[0], [1]], [1000, 100], [POINTWISE] * 2, 35_000, side=256)
EXAMPLE_3 = square(4, [[0], [1], [1, 2]], [1500] * 3, [POINTWISE] * 3, 50_000)
EXAMPLE_4 = square(3, [[0, 1]], [1500], ["MatMul"], 25_000)
EXAMPLE_5 = square(5, [[0, 1], [3, 2]], [2000, 2000], ["MatMul"] * 2, 45_000)


@pytest.mark.parametrize(
    ("problem", "steps", "expected"),
    [
        (EXAMPLE_1, [Step((0,), NATIVE), Step((1,), NATIVE)], [3276.8, 3276.8]),
        (EXAMPLE_1, [Step((0, 1), NATIVE)], [3276.8]),
        (EXAMPLE_1, [Step((0, 1), (64, 64, 1))], [4400.0]),
        (EXAMPLE_2, [Step((0,), NATIVE), Step((1,), NATIVE)], [13_107.2, 13_107.2]),
        (EXAMPLE_2, [Step((0, 1), NATIVE)], [13_107.2]),
        # The published JSON lists 3276.8, 1638.4, 3276.8 here, which are the times with tensor 2
        # kept; its prose moves tensor 2 out and in, and adds up to the total it gives, 11 468.8.
        (
            EXAMPLE_3,
            [Step((0,), NATIVE), Step((1,), NATIVE), Step((2,), NATIVE)],
            [3276.8, 3276.8, 4915.2],
        ),
        (EXAMPLE_3, [Step((0, 1), NATIVE, (2,)), Step((0, 2), NATIVE)], [3000.0, 3276.8]),
        (EXAMPLE_3, [Step((0,), NATIVE, (1,)), Step((1, 2), NATIVE)], [1638.4, 3000.0]),
        (EXAMPLE_4, [Step((0,), (64, 64, 128))], [8192.0]),
        (EXAMPLE_4, [Step((0,), (64, 64, 128), (), (0, 1, 3, 2))], [6548.0]),
        # Raster order given by name: each row strip stays for the second tile of its row.
        (EXAMPLE_4, [Step((0,), (64, 64, 128), (), (0, 1, 2, 3))], [7096.0]),
        (EXAMPLE_5, [Step((0, 1), (128, 128, 32))], [6915.2]),
    ],
)
def test_worked_examples(problem, steps, expected):
    assert schedule_latencies(problem, steps) == pytest.approx(expected)


def test_example_3_totals():
    spilled = [Step((0,), NATIVE), Step((1,), NATIVE), Step((2,), NATIVE)]
    again = [Step((0, 1), NATIVE, (2,)), Step((0, 2), NATIVE)]
    kept = [Step((0,), NATIVE, (1,)), Step((1, 2), NATIVE)]
    totals = [sum(schedule_latencies(EXAMPLE_3, steps)) for steps in (spilled, again, kept)]
    assert totals == pytest.approx([11_468.8, 6276.8, 4638.4])


def test_example_5_fits_only_in_slices():
    chain = group_of(EXAMPLE_5, (0, 1))
    assert working_set(chain, (128, 128, 32)) == 40_960
    # The first product alone, its result whole in fast memory: the 49 152 of the text.
    assert working_set(group_of(EXAMPLE_5, (0,)), (128, 128, 128)) == 49_152
    for operations in ((0,), (0, 1)):
        with pytest.raises(CapacityError, match="at most 45000 elements"):
            step_latency(EXAMPLE_5, Step(operations, (128, 128, 128)))


@pytest.mark.parametrize(
    ("problem", "steps", "message"),
    [
        (EXAMPLE_1, [Step((0,), NATIVE)], "runs every operation"),
        (EXAMPLE_1, [Step((1,), NATIVE), Step((0,), NATIVE)], "in a memory before subgraph 0"),
        (EXAMPLE_3, [Step((0, 1), NATIVE), Step((2,), NATIVE)], "before subgraph 1"),
        (EXAMPLE_3, [Step((0,), NATIVE, (1,)), Step((1,), NATIVE), Step((2,), NATIVE)], "before"),
        (EXAMPLE_1, [Step((0, 1), NATIVE, (2,))], "slow memory at the end"),
        (EXAMPLE_1, [Step((0, 1), NATIVE, (1,))], "retained tensors"),
        (EXAMPLE_1, [Step((), NATIVE)], "operations of the problem"),
        (EXAMPLE_1, [Step((7,), NATIVE)], "operations of the problem"),
        (EXAMPLE_1, [Step((0, 1), (0, 1, 1))], "whole numbers from 1"),
        (EXAMPLE_4, [Step((0,), (64, 64, 128), (), (0, 1, 2))], "each of the 4 tiles once"),
        (EXAMPLE_4, [Step((0,), (64, 64, 128), (), (0, 1, 2, 2))], "each of the 4 tiles once"),
    ],
)
def test_illegal_schedules(problem, steps, message):
    with pytest.raises(ScheduleError, match=message):
        schedule_latencies(problem, steps)


def test_what_stays_resident_takes_room_in_both_subgraphs():
    tight = square(4, [[0], [1], [1, 2]], [1500] * 3, [POINTWISE] * 3, 3 * 128 * 128 - 1)
    with pytest.raises(CapacityError):
        schedule_latencies(tight, [Step((0, 1), NATIVE, (2,)), Step((0, 2), NATIVE)])


# -- a second opinion: every step of every tile, one at a time ------------------------------------

DEPTH, WIDE, HIGH, MIDDLE = 24, 40, 20, 12
LAYERS = {
    "widths": [DEPTH, WIDE, WIDE, MIDDLE, WIDE, WIDE, MIDDLE, MIDDLE],
    "heights": [HIGH, DEPTH, HIGH, WIDE, HIGH, HIGH, HIGH, HIGH],
    "inputs": [[0, 1], [4, 2], [5, 3], [6]],
    "outputs": [[4], [5], [6], [7]],
    "base_costs": [70, 9, 50, 3],
    "op_types": ["MatMul", "Pointwise", "MatMul", "Pointwise"],
    "fast_memory_capacity": 10**6,
    "slow_memory_bandwidth": 3,
    "native_granularity": [8, 4],
}
"""Two products of different depth and width with an element-wise operation after each."""


def one_step(problem: Problem, operations, granularity, i, j, s):
    """Return compute, slices held and elements written in step s of tile (i, j) of LAYERS."""
    w, h, k = granularity
    ops = [problem.operations[op] for op in operations]
    made = {tensor for op in ops for tensor in op.outputs}
    read = {tensor for op in ops for tensor in op.inputs}
    work, held, out, ready = 0.0, {}, 0, {}
    for op in ops:
        (result,) = op.outputs
        rows = min(h, problem.heights[result] - i * h)
        columns = min(w, problem.widths[result] - j * w)
        depth = problem.widths[op.inputs[0]]
        ready[result] = max((ready.get(tensor, 0) for tensor in op.inputs), default=0)
        if op.kind == "MatMul":
            ready[result] = math.ceil(depth / k) - 1
        if rows <= 0 or columns <= 0:
            continue
        tiles = math.ceil(rows / problem.native[1]) * math.ceil(columns / problem.native[0])
        long = min(k, depth - s * k)
        if op.kind == "MatMul" and long > 0:
            work += op.base_cost * tiles * long / depth
            held[op.inputs[0], "left", i, s] = rows * long
            held[op.inputs[1], "right", s, j] = long * columns
        elif op.kind == "Pointwise" and s == ready[result]:
            work += op.base_cost * tiles
            held |= {(tensor, "operand", i, j): rows * columns for tensor in op.inputs}
        out += rows * columns * (s == ready[result] and result not in read)
    return work, {key: area for key, area in held.items() if key[0] not in made}, out


def loop_latency(problem: Problem, operations, granularity, order) -> float:
    """Return the time of a subgraph of LAYERS, written down from the rules as plain loops."""
    w, h, k = granularity
    across = max(math.ceil(problem.shape(op)[1] / w) for op in operations)
    down = max(math.ceil(problem.shape(op)[0] / h) for op in operations)
    steps = max(math.ceil(problem.depth(op) / k) for op in operations)
    total, held = 0.0, {}
    for tile in range(across * down) if order is None else order:
        held = {} if order is None else held
        for s in range(steps):
            work, now, out = one_step(problem, operations, granularity, *divmod(tile, across), s)
            moved = sum(area for key, area in now.items() if key not in held) + out
            total += max(work, moved / problem.throughput)
            held = now
    return total


@settings(max_examples=25, deadline=None)
@given(
    operations=st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (2, 3), (0, 1, 2), (0, 1, 2, 3)]),
    w=st.integers(1, 45),
    h=st.integers(1, 25),
    k=st.integers(1, 45),
    walk=st.sampled_from(["none", "rows", "columns"]),
)
def test_the_price_is_that_of_a_plain_loop(operations, w, h, k, walk):
    problem = parse_problem(LAYERS)
    widest = max(problem.shape(op)[1] for op in operations)
    grid = (math.ceil(widest / w), math.ceil(HIGH / h))
    order = None if walk == "none" else snake(*grid, by_column=walk == "columns")
    found = step_latency(problem, Step(operations, (w, h, k), (), order))
    assert found == pytest.approx(loop_latency(problem, operations, (w, h, k), order))
