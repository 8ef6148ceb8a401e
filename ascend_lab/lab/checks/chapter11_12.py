"""Checks of chapters 11 and 12.

11: numbers of cores worth using, shares in whole blocks, when a tree of partial sums is faster than
a second pass, schedules for sums of rows, error bounds of fp16 sums.
12: bursts of a blocked transpose, a transpose on all cores, scatters with duplicates.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "expected shares up to 1000, they end at 992".
"""

import math
from functools import cache
from typing import Any

import numpy as np

from ascend_lab.lab.checks import chapter03_04, chapter06_06a, core as ex
from ascend_lab.lab.kernels.cross_core_folds import kept, two_pass
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import BLOCK_BYTES, load_chip
from ascend_lab.operators import dsl as te, kernels

SLACK = 1.1
"""The cycles or the error bound of an answer may be this many times ours."""

# -- chapter 11 ------------------------------------------------------------------------------------
CHIP = "Ascend910A"


def worth_using(units: int, most: int) -> list[int]:
    """Return the numbers of cores n, up to `most`, at which the largest share gets smaller.

    For example 5 units: 1, 2, 3 and 5 cores have at most 5, 3, 2 and 1 of them; 4 cores still 2.
    """
    largest = [-(-units // n) for n in range(1, most + 1)]
    return [n for n in range(1, most + 1) if n == 1 or largest[n - 1] < largest[n - 2]]


@ex.judged(edges=[(63, 32), (1, 8), (48, 48)], units=range(1, 400), most=range(1, 50))
def check_ex_11_1(got: Any, case: ex.Case) -> str | None:
    """Check `fn(units, most)`: the numbers of cores worth using, in rising order."""
    units = case["units"]
    right = worth_using(units, case["most"])
    if not isinstance(got, list | tuple):
        return "expected a list of numbers of cores"
    for n in got:
        if n not in right and 1 <= n <= case["most"]:
            fewer = max(m for m in right if m < n)
            share = -(-units // n)
            return f"expected {n} not to be in it: {fewer} cores have {share} units each, too"
    missing = [n for n in right if n not in got]
    if missing:
        return f"expected {missing[0]} to be in it: {missing[0] - 1} cores have larger shares"
    return None if list(got) == right else f"expected each once, rising, up to {case['most']}"


@ex.judged(
    edges=[(1000, 2, 48), (1000, 2, 32), (5, 4, 8), (64, 1, 2), (33, 2, 3)],
    elements=range(1, 3000),
    itemsize=(1, 2, 4),
    cores=range(1, 50),
)
def check_ex_11_2(got: Any, case: ex.Case) -> str | None:
    """Check `fn(elements, itemsize, cores)`: a list of (start, size), one per core that works."""
    elements = case["elements"]
    cores = case["cores"]
    block = BLOCK_BYTES // case["itemsize"]
    share_count = min(cores, -(-elements // block))
    if not isinstance(got, list | tuple) or len(got) != share_count:
        return f"expected a list of {share_count} pairs (start, size)"
    end = 0
    blocks = list[int]()
    for share in got:
        start, size = (int(n) for n in share)
        if start != end or size < 1:
            return f"expected a share of at least one element from {end} on, got {ex.show(share)}"
        if start % block:
            return f"expected starts at multiples of {block} elements, got {start}"
        end = start + size
        blocks.append(-(-size // block))
    if end != elements:
        return f"expected shares up to {elements}, they end at {end}"
    if max(blocks) - min(blocks) > 1:
        return f"expected shares that differ by a block at most, got {min(blocks)} to {max(blocks)}"
    return None


def tree_pays_from(parts: int, step_cycles: float) -> float:
    """Return the cycles t per row of partial sums from which a tree beats a second pass.

    The pass takes step + parts t cycles. The tree has log2(parts) rounds of step + 3 t cycles, as a
    core loads two rows in a round and stores one. Both are equal at the t returned, which is
    infinite if the tree never wins.
    """
    rounds = parts.bit_length() - 1
    if parts <= 3 * rounds:
        return math.inf
    return step_cycles * (rounds - 1) / (parts - 3 * rounds)


@ex.against(tree_pays_from, edges=[(p, 350) for p in (2, 8, 16, 32)], rel_tol=1e-9)
def check_ex_11_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(parts, step_cycles)`: the row cycles from which a tree beats a second pass."""
    return ex.drawn(rng, parts=[2**k for k in range(1, 10)], step_cycles=range(50, 2000))


GOALS = {
    (8, 65536): 1.0,
    (16, 16384): 0.96,
    (64, 8192): 1.0,
    (256, 2048): 0.8,
    (32, 1024): 0.55,
    (1024, 512): 1.05,
}
"""(rows, columns) -> the cycles that an answer to exercise 11.4 may take, as a multiple of the
faster of two schedules: `kept` divides the rows among the cores, `two_pass` the columns, and then
adds up partial sums."""
OTHER_GOAL = 1.05
"""The same for all other shapes."""


@cache
def _our_fold(rows: int, columns: int) -> te.Schedule:
    """Return the faster of the schedules `kept` and `two_pass` for the sums of rows."""
    chip = load_chip(CHIP)
    x = te.cast_to(te.placeholder((rows, columns), name="x"), "fp32")
    y = te.renamed(te.reduce_sum(x, axis=1), "y")
    schedules = (kept(y, chip), two_pass(y, chip))
    return min(schedules, key=lambda s: sim.simulate_kernel(te.lower(s), chip).cycles)


@ex.judged(edges=list(GOALS), cases=1, rows=[8 * 2**k for k in range(6)], columns=[4096])
def check_ex_11_4(got: Any, case: ex.Case) -> str | None:
    """Check `fn(rows, columns)`: a schedule for the 910A of the sums of rows of any shape."""
    if not isinstance(got, te.Schedule):
        return "expected a schedule (te.create_schedule and steps)"
    rows = case["rows"]
    columns = case["columns"]
    output = got.outputs[0]
    if (output.label, output.shape, output.dtype) != ("y", (rows,), "fp32"):
        return f"expected an output y ({rows},) in fp32"
    x = np.random.default_rng(rows + columns).integers(-8, 9, (rows, columns)).astype(np.float16)
    sums = x.sum(axis=1, dtype=np.float64)
    allowed_ratio = GOALS.get((rows, columns), OTHER_GOAL)
    ours = _our_fold(rows, columns)
    # Sums of small whole numbers are exact in fp32, so that values may differ by 0.0.
    return chapter06_06a.wrong_schedule(got, {"x": x}, sums, 0.0, ours, allowed_ratio)


FP16_UNIT = 2.0**-11
"""Half the distance from 1 to the next fp16 number: the largest relative error of one rounding."""
LOST = 0.99 * FP16_UNIT
"""A number just below half a step at 1: 1 + LOST rounds to 1, an error close to the largest."""
SUMMANDS = (
    [1, FP16_UNIT],
    [1, LOST, LOST],
    [1, LOST, LOST, LOST, 0],
    [1, -1, LOST, 0],
    [1, LOST, -1],
    [1] + [FP16_UNIT] * 200,
    [40000, -40000, 1],  # in fp16 the absolute values add up to infinity
)


def additions(size: int, order: str) -> int:
    """Return how many additions an element goes through at most."""
    return max(size - 1, 0) if order == "chain" else max(size - 1, 0).bit_length()


def narrow_sum(x: np.ndarray[Any, Any], order: str) -> np.float16:
    """Return the sum of fp16 numbers, every addition rounded to fp16.

    "chain" adds one number after the other; else a round adds the second half to the first.
    """
    if order == "chain":
        return np.float16(np.cumsum(x, dtype=np.float16)[-1])
    while x.size > 1:
        half = -(-x.size // 2)
        second_half = np.concatenate([x[half:], np.zeros(2 * half - x.size, np.float16)])
        x = (x[:half] + second_half).astype(np.float16)
    return np.float16(x[0])


def _judge_bound(got: Any, case: ex.Case) -> str | None:
    """Judge a bound of the error of an fp16 sum: not below the error, not far above our bound."""
    x = case["x"]
    order = case["order"]
    steps = additions(x.size, order)
    # Higham's bound: n roundings of relative error u each change a sum by at most
    # n u / (1 - n u) times the sum of the absolute values.
    relative = steps * FP16_UNIT / (1 - steps * FP16_UNIT)
    ours = relative * float(np.abs(x.astype(np.float64)).sum())
    error = abs(float(narrow_sum(x, order)) - float(x.astype(np.float64).sum()))
    if not np.isscalar(got) or isinstance(got, bool | str) or not float(got) >= error:  # type: ignore[arg-type]
        return f"expected at least the error that happens, {error:.6g}"
    if float(got) > SLACK * ours:  # type: ignore[arg-type]
        return f"expected at most {SLACK * ours:.6g}: no element goes through more than {steps}"
    return None


@ex.judged(
    _judge_bound,
    edges=[(np.array(x, np.float16), order) for x in SUMMANDS for order in ("chain", "tree")],
)
def check_ex_11_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(x, order)`: a bound of the error of adding up x in fp16, "chain" or "tree"."""
    size, low = ex.drawn(rng, size=range(2, 257), low=(-1.0, 0.0)).values()
    x = rng.uniform(low, 1.0, size).astype(np.float16)
    return {"x": x, **ex.drawn(rng, order=("chain", "tree"))}


# -- chapter 12 ------------------------------------------------------------------------------------


@ex.against(
    edges=[(64, 48, 16, 16), (17, 33, 16, 16), (5, 7, 1, 1)],
    rows=range(1, 70),
    columns=range(1, 70),
    block_rows=range(1, 70),
    block_columns=range(1, 70),
)
def check_ex_12_1(
    rows: int, columns: int, block_rows: int, block_columns: int
) -> tuple[int, int, int]:
    """Check a burst counter: `fn(rows, columns, block_rows, block_columns)`."""
    loads = stores = wire_bytes = 0
    for top in range(0, rows, block_rows):
        height = min(block_rows, rows - top)
        for left in range(0, columns, block_columns):
            width = min(block_columns, columns - left)
            loads += height
            stores += width
            # A burst of fp16 numbers takes whole blocks of 32 bytes on the wires.
            for bursts, length in ((height, width), (width, height)):
                wire_bytes += bursts * (-(-2 * length // BLOCK_BYTES) * BLOCK_BYTES)
    return loads, stores, wire_bytes


SIDE = 16
"""Rows, and columns, of the block of fp16 numbers that one vtranspose transposes."""


@ex.judged(edges=[(1, 1), (1, 8), (8, 1), (8, 8)], cases=4, m=range(1, 9), n=range(1, 9))
def check_ex_12_2(got: Any, case: ex.Case) -> str | None:
    """Check a block transpose: `fn(m, n)` returns a `Launch` for the cores of the Toy chip."""
    if not isinstance(got, isa.Launch):
        return "expected a Launch, a Part for each core"
    chip = load_chip("Toy")
    rows = case["m"] * SIDE
    columns = case["n"] * SIDE
    size = rows * columns
    for part in got.parts:
        tensors = sorted((t.name, t.dtype, t.elements) for t in part.program.tensors)
        if tensors != [("x", "fp16", size), ("y", "fp16", size)]:
            return f"expected fp16 tensors x and y of {size} elements"
    x = np.random.default_rng(size).standard_normal((rows, columns)).astype(np.float16)
    if wrong := chapter03_04.wrong_run(got, chip, {"x": x}, "x transposed", x.T.ravel()):
        return wrong
    blocks = kernels.transpose_launch(chip, (rows, columns), (1, 0), "fp16", "blocks")
    cycles = sim.simulate(got, chip).cycles
    ours = sim.simulate(blocks, chip).cycles
    if cycles > SLACK * ours:
        return f"expected at most {SLACK} x {ours} cycles, it takes {cycles}"
    return None


@ex.judged(
    edges=[(np.array(index),) for index in ([0], [2, 2, 2], [3, 1, 2], [1, 0, 1])],
    index=lambda rng: rng.integers(0, int(rng.integers(1, 12)), int(rng.integers(1, 40))),
)
def check_ex_12_3(got: Any, case: ex.Case) -> str | None:
    """Check `fn(index)`: positions of the updates that survive a scatter, by row."""
    last_update = {int(row): position for position, row in enumerate(case["index"])}
    survivors = np.array([last_update[row] for row in sorted(last_update)])
    return ex.equal_to(survivors)(np.asarray(got))


INDEX_BYTES = 4


def moved_bytes(updates: int, distinct: int, row_bytes: int, cores: int) -> dict[str, int]:
    """Return the bytes between memory and cores of three ways to add `updates` to `distinct` rows.

    For an update the owner of its row loads the update and the row, and stores the row: three rows.
    An atomic add loads the update and sends it to memory, which adds it: two rows. Sorted updates
    are loaded once each, and one sum for every distinct row is sent to memory. If rows have owners,
    every core reads the indices. Sorting reads them once and stores two lists of indices, of the
    updates and of the distinct rows, which the scatter loads.
    """
    indices = updates * INDEX_BYTES
    sorted_lists = (updates + distinct) * INDEX_BYTES
    return {
        "owner": 3 * updates * row_bytes + cores * indices,
        "atomic": 2 * updates * row_bytes + indices,
        "sorted": (updates + distinct) * row_bytes + 2 * sorted_lists + indices,
    }


def _judge_way(got: Any, case: ex.Case) -> str | None:
    """Judge the name of the way that moves the fewest bytes; of equal ones any will do."""
    *sizes, reproducible = case.values()
    bytes_by_way = moved_bytes(*sizes)
    if reproducible:  # the order of atomic additions, and so their rounding, may change
        del bytes_by_way["atomic"]
    least = min(bytes_by_way.values())
    best = [name for name, size in bytes_by_way.items() if size == least]
    if got in best:
        return None
    listed = ", ".join(f"{name} {size}" for name, size in bytes_by_way.items())
    return f"expected {' or '.join(map(repr, best))}, in bytes: {listed}"


@ex.judged(
    _judge_way,
    edges=[
        (64, 64, 32, 32, False),
        (64, 64, 32, 2, True),
        (64, 1, 32, 32, False),
        (64, 42, 32, 32, False),
        (64, 36, 32, 32, False),
        (64, 60, 512, 32, False),
        (64, 62, 512, 32, False),
        (64, 64, 4, 2, True),  # single numbers on two cores: here alone an owner pays least
    ],
)
def check_ex_12_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(updates, distinct, row_bytes, cores, reproducible)`: owner, atomic or sorted."""
    updates = int(rng.integers(1, 5000))
    other_arguments = ex.drawn(
        rng,
        distinct=range(1, updates + 1),
        row_bytes=[4 << k for k in range(9)],
        cores=(2, 32, 48),
        reproducible=(False, True),
    )
    return {"updates": updates, **other_arguments}
