"""Checks of chapter 12: bursts of a blocked transpose, a block kernel, scatters with duplicates."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ascend_lab.chip import BLOCK_BYTES, Chip, load_chip
from ascend_lab.errors import AscendLabError
from ascend_lab.isa import KernelBuilder, Program, sanitize
from ascend_lab.lab.checks import core as ex
from ascend_lab.sim import execute, simulate

SIDE = 16
"""Side of the block vtranspose turns."""

SLACK = 1.1
"""A block kernel may take this many times the cycles of ours, not more."""

INDEX_BYTES = 4


def count_bursts(
    rows: int, columns: int, block_rows: int, block_columns: int
) -> tuple[int, int, int]:
    """Return (loads, stores, wire bytes) of a transpose in blocks, counted one by one."""
    loads = stores = wire_bytes = 0
    for top in range(0, rows, block_rows):
        height = min(block_rows, rows - top)
        for left in range(0, columns, block_columns):
            width = min(block_columns, columns - left)
            loads, stores = loads + height, stores + width
            for count, length in ((height, width), (width, height)):
                wire_bytes += count * (-(-2 * length // BLOCK_BYTES) * BLOCK_BYTES)
    return loads, stores, wire_bytes


def _judge_turn(got: Any, case: ex.Case) -> str | None:
    if not isinstance(got, Program):
        return "expected a Program (end with k.finish())"
    chip, rows, columns = load_chip("Toy"), case["m"] * SIDE, case["n"] * SIDE
    tensors = sorted((t.name, t.dtype, t.elements) for t in got.tensors)
    size = rows * columns
    if tensors != [("x", "fp16", size), ("y", "fp16", size)]:
        return f"expected fp16 tensors x and y of {size} elements"
    findings = sanitize(got, chip)
    if findings:
        return f"expected no findings, the sanitizer has {len(findings)}, for example {findings[0]}"
    x = np.random.default_rng(size).standard_normal((rows, columns)).astype(np.float16)
    try:
        y = execute(got, {"x": x}, chip, seed=1)["y"]
    except AscendLabError as error:
        return f"expected a program that runs, but: {error}"
    wrong = int((y != x.T.ravel()).sum())
    if wrong:
        return f"expected x transposed, {wrong} of {size} elements differ"
    cycles, ours = simulate(got, chip).cycles, _our_cycles(case["m"], case["n"])
    if cycles > SLACK * ours:
        return f"expected runs in and out: {cycles} cycles, {ours} are enough"
    return None


@cache
def _our_cycles(m: int, n: int) -> int:
    chip = load_chip("Toy")
    return simulate(_turn(chip, m, n), chip).cycles


def _turn(chip: Chip, m: int, n: int) -> Program:
    """Return the transpose the exercise asks for: one block of 16 x 16 after the other."""
    k, side = KernelBuilder("turn", chip), (SIDE, SIDE)
    x, y = (k.tensor(name, "fp16", m * n * SIDE * SIDE) for name in "xy")
    before = k.queue("before", "UB", "fp16", SIDE * SIDE, src="MTE2", dst="V")
    after = k.queue("after", "UB", "fp16", SIDE * SIDE, src="V", dst="MTE3")
    with k.loop("i", m) as i, k.loop("j", n) as j:
        source = x.region((i * n * SIDE + j) * SIDE, side, (n * SIDE, 1))
        k.copy(before.alloc().region(0, side), source)
        before.enqueue()
        k.vector("vtranspose", after.alloc().region(0, side), before.dequeue().region(0, side))
        before.free()
        after.enqueue()
        target = y.region((j * m * SIDE + i) * SIDE, side, (m * SIDE, 1))
        k.copy(target, after.dequeue().region(0, side))
        after.free()
    return k.finish()


def _judge_last(got: Any, case: ex.Case) -> str | None:
    last = {int(row): place for place, row in enumerate(case["index"])}
    return ex.equal_to(np.array([last[row] for row in sorted(last)]))(np.asarray(got))


def moved_bytes(updates: int, distinct: int, row_bytes: int, cores: int) -> dict[str, int]:
    """Bytes between memory and cores of three ways to add `updates` rows to `distinct` rows.

    Sorting is charged with reading the indices and writing both lists.
    """
    lists = INDEX_BYTES * (updates + distinct)
    return {
        "owner": 3 * updates * row_bytes + cores * updates * INDEX_BYTES,
        "atomic": 2 * updates * row_bytes + updates * INDEX_BYTES,
        "sorted": (updates + distinct) * row_bytes + 2 * lists + updates * INDEX_BYTES,
    }


def _judge_way(got: Any, case: ex.Case) -> str | None:
    numbers = {name: case[name] for name in ("updates", "distinct", "row_bytes", "cores")}
    ways = moved_bytes(**numbers)
    if case["reproducible"]:
        del ways["atomic"]
    best = min(ways.values())
    names = [name for name, size in ways.items() if size == best]
    if got in names:
        return None
    listed = ", ".join(f"{name} {size}" for name, size in ways.items())
    return f"expected {' or '.join(map(repr, names))}, in bytes: {listed}"


@ex.against(
    count_bursts,
    edges=ex.rows(
        "rows columns block_rows block_columns", (64, 48, 16, 16), (17, 33, 16, 16), (5, 7, 1, 1)
    ),
)
def check_ex_12_1(rng: ex.Rng) -> ex.Case:
    """Check a burst counter: `fn(rows, columns, block_rows, block_columns)`.

    It returns (loads, stores, wire_bytes) of a transpose of fp16 numbers, block after block; the
    blocks at the edges are smaller, and a burst takes whole 32-byte blocks on the wires.
    """
    names = ("rows", "columns", "block_rows", "block_columns")
    return {name: int(rng.integers(1, 70)) for name in names}


@ex.judged(_judge_turn, edges=ex.rows("m n", (1, 1), (1, 4), (4, 1)), cases=5)
def check_ex_12_2(rng: ex.Rng) -> ex.Case:
    """Check a block transpose: `fn(m, n)` returns a `Program` for the Toy chip.

    y (16n, 16m) = x (16m, 16n) transposed, fp16, no finding of the sanitizer, and as fast as blocks
    of 16 x 16 are: moving single elements is right, and too slow.
    """
    return {"m": int(rng.integers(1, 6)), "n": int(rng.integers(1, 6))}


@ex.judged(
    _judge_last, edges=[{"index": np.array(i)} for i in ([0], [2, 2, 2], [3, 1, 2], [1, 0, 1])]
)
def check_ex_12_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(index)`: positions of the updates that survive a scatter, by row.

    The last update of a row wins. Position p of the answer belongs to the p-th smallest row that is
    updated at all; with these positions no row is written twice.
    """
    rows = int(rng.integers(1, 12))
    return {"index": rng.integers(0, rows, int(rng.integers(1, 40)))}


@ex.judged(
    _judge_way,
    edges=[
        {"updates": 64, "distinct": d, "row_bytes": b, "cores": c, "reproducible": r}
        for d, b, c, r in ((64, 32, 32, False), (64, 32, 2, True), (1, 32, 32, False))
    ],
)
def check_ex_12_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(updates, distinct, row_bytes, cores, reproducible)`: owner, atomic or sorted.

    The way that moves the fewest bytes between memory and cores for a scatter-add; `reproducible`
    rules out atomic.
    """
    updates = int(rng.integers(1, 5000))
    return {
        "updates": updates,
        "distinct": int(rng.integers(1, updates + 1)),
        "row_bytes": 32 * int(2 ** rng.integers(0, 6)),
        "cores": int(rng.choice([2, 32, 48])),
        "reproducible": bool(rng.integers(0, 2)),
    }
