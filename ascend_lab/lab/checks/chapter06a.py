"""Checks of chapter 6a: addresses, choice of instructions, implied flags, depth, a lowering."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np

from ascend_lab import dsl, dsl as te, errors, isa
from ascend_lab.chip import Chip, load_chip
from ascend_lab.lab.checks import core as ex
from ascend_lab.lab.checks.chapter03_04 import wrong_run
from ascend_lab.sim import simulate, simulate_kernel

FORMATS = {1: "int8", 2: "fp16", 4: "fp32"}
Tile = tuple[int, int, int]
Work = Sequence[tuple[str, set[str], set[str]]]
Steps = Sequence[tuple[str, ...]]


# -- 6a.1 and 6a.4: what a builder has room for ----------------------------------------------------
def _chip_with(ub_bytes: int) -> Chip:
    return next(c for c in map(load_chip, ("Toy", "Ascend910B2")) if c.buffers["UB"] == ub_bytes)


def _addresses(tiles: Sequence[Tile], ub_bytes: int) -> list[int] | None:
    k = isa.KernelBuilder("tiles", _chip_with(ub_bytes))
    try:
        made = [
            k.buffer(f"t{i}", "UB", FORMATS[size], elements, slots)
            for i, (elements, size, slots) in enumerate(tiles)
        ]
    except errors.CapacityError:
        return None
    return [buffer.address for buffer in made]


@ex.against(
    _addresses,
    edges=[
        ([(22, 2, 2), (22, 4, 1), (5, 1, 3)], 32768),
        ([(4096, 2, 2), (4096, 2, 2)], 32768),
        ([(4096, 2, 2), (4096, 2, 1), (4081, 2, 1)], 32768),
        ([(4096, 2, 2), (4096, 2, 2), (1, 1, 1)], 32768),
        ([(16000, 2, 1), (400, 2, 1)], 32768),
    ],
)
def check_ex_06a_1(rng: ex.Rng) -> ex.Case:
    """Compare addresses in UB, or None, with those of a builder."""
    ub = int(rng.choice([32768, 196608]))
    most = ub // 24
    one = {"elements": range(1, most), "size": (1, 2, 4), "slots": range(1, 4)}
    tiles = [tuple(ex.drawn(rng, **one).values()) for _ in range(rng.integers(1, 6))]
    return {"tiles": tiles, "ub_bytes": ub}


def _deepest(queues: Sequence[tuple[str, str, int]], ub_bytes: int) -> int:
    depth = 0
    while True:
        k = isa.KernelBuilder("deep", _chip_with(ub_bytes))
        try:
            for i, (src, dst, size) in enumerate(queues):
                k.queue(f"q{i}", "UB", "int8", size, src=src, dst=dst, depth=depth + 1)
        except errors.CapacityError:
            return depth
        depth += 1


@ex.against(
    _deepest,
    edges=[
        ([("MTE2", "V", 32)], 32768),
        ([("MTE2", "V", 32), ("V", "MTE2", 32)], 32768),
        ([("MTE2", "V", 4096), ("MTE2", "V", 4096), ("V", "MTE3", 8192)], 32768),
        ([("MTE2", "V", 33000)], 32768),
        ([("MTE2", "V", 4097), ("V", "MTE3", 4095)], 32768),
    ],
)
def check_ex_06a_4(rng: ex.Rng) -> ex.Case:
    """Compare the largest common depth of some queues with what a builder accepts."""
    ways = [("MTE2", "V"), ("V", "MTE3"), ("V", "MTE2"), ("MTE3", "V")]
    ub = int(rng.choice([32768, 196608]))
    most = int(ub / rng.choice([4, 12, 60]))
    picks = rng.integers(0, len(ways), rng.integers(1, 5))
    return {"queues": [(*ways[i], int(rng.integers(1, most))) for i in picks], "ub_bytes": ub}


# -- 6a.2: which way over a tile -------------------------------------------------------------------
def _fewest(rows: int, columns: int, head: int, slope: int) -> int:
    chunks, blocks, rest = -(-columns // 128), -(-columns // 16), rows % 8
    along = rows * (-(-(columns // 128) // 255) + (columns % 128 > 0)), rows * chunks
    down = chunks * -(-rows // 255), chunks * rows
    across = blocks * (-(-(rows // 8) // 255) + (rest > 0)), blocks * -(-rows // 8)
    return min(head * starts + slope * repeats for starts, repeats in (along, down, across))


@ex.against(
    _fewest,
    edges=[
        (1, 128, 14, 1),
        (256, 128, 14, 1),
        (2, 128 * 300, 14, 1),
        (2041, 16, 14, 1),
        (2056, 16, 14, 1),
        (8, 17, 14, 1),
        (100, 48, 14, 1),
        (4, 200, 14, 1),
        (3000, 40, 3, 5),
        (300, 127, 100, 1),
    ],
)
def check_ex_06a_2(rng: ex.Rng) -> ex.Case:
    """Compare the fewest cycles of three ways over a tile."""
    high, wide = int(rng.choice([20, 400, 5000])), int(rng.choice([40, 300, 40000]))
    sides = {"rows": range(1, high), "columns": range(1, wide)}
    return ex.drawn(rng, **sides, head=range(1, 60), slope=range(1, 9))


# -- 6a.3: flags that others imply -----------------------------------------------------------------
def _conflict(one: tuple[str, set[str], set[str]], two: tuple[str, set[str], set[str]]) -> bool:
    return bool(one[2] & (two[1] | two[2]) or one[1] & two[2])


def implied_by_none(work: Work) -> list[tuple[int, int]]:
    """Return the pairs that need a flag of their own: the transitive reduction of all orders."""
    pairs = [
        (i, j)
        for i, j in combinations(range(len(work)), 2)
        if work[i][0] == work[j][0] or _conflict(work[i], work[j])
    ]
    after: dict[int, set[int]] = {i: set() for i in range(len(work))}
    for i, j in pairs:
        after[i].add(j)

    def reach(i: int, j: int) -> bool:
        return any(k == j or (k < j and reach(k, j)) for k in after[i])

    return [
        (i, j)
        for i, j in pairs
        if work[i][0] != work[j][0] and not any(k != j and reach(k, j) for k in after[i] if k < j)
    ]


@ex.against(
    implied_by_none,
    edges=[
        ([("MTE2", set(), {"a"}), ("V", {"a"}, {"y"}), ("MTE3", {"y"}, set())],),
        ([("MTE2", set(), {"a"}), ("MTE2", set(), {"b"}), ("V", {"a", "b"}, {"y"})],),
        ([("MTE2", set(), {"a"}), ("V", {"a"}, {"y"}), ("MTE2", set(), {"a"})],),
        ([("V", set(), {"a"}), ("MTE2", set(), {"a"}), ("V", {"b"}, {"c"})],),
    ],
)
def check_ex_06a_3(rng: ex.Rng) -> ex.Case:
    """Compare the pairs of instructions that need a flag with the transitive reduction."""
    names = np.array(["a", "b", "c", "d"])
    work = []
    for _ in range(rng.integers(3, 9)):
        pipe = str(rng.choice(["MTE2", "V", "MTE3", "MTE1"]))
        reads, writes = ({str(x) for x in names[rng.random(4) < p]} for p in (0.4, 0.25))
        work.append((pipe, reads, writes))
    return {"work": work}


# -- 6a.5: a small lowering ------------------------------------------------------------------------
CHAINS: Sequence[Steps] = (
    (("vadd", "t", "a", "b"), ("vrelu", "y", "t")),
    (("vmul", "t", "a", "b"), ("vadd", "u", "t", "c"), ("vrelu", "y", "u")),
    (("vabs", "t", "x"), ("vexp", "u", "t"), ("vadd", "v", "u", "t"), ("vmul", "y", "v", "x")),
    (("vrelu", "y", "x"),),
)
SLACK = 1.05


def inputs_of(steps: Steps) -> list[str]:
    """Return the names a chain reads and never writes, in order of use."""
    written = {dst for _, dst, *_ in steps}
    return list(dict.fromkeys(s for _, _, *srcs in steps for s in srcs if s not in written))


def schedule_of(steps: Steps, n: int, chip: Chip, tile: int) -> dsl.Schedule:
    """Return the chain as one nest on one core, with two slots for each tile."""
    known = {name: te.placeholder((n,), name=name) for name in inputs_of(steps)}
    for op, last, *srcs in steps:
        known[last] = te.renamed(getattr(te, op)(*(known[s] for s in srcs)), last)
    s = te.create_schedule(known[last], chip)
    for _, name, *_ in steps[:-1]:
        s = te.inline(s, name)
    return te.double_buffer(te.split(s, last, "i", tile), last)


@cache
def goal_cycles(steps: Steps, n: int, chip: Chip) -> int:
    """Return the cycles of the best of our tiles: a power of two of repeats."""
    found = []
    for tile in (128 * 2**k for k in range(3, 10) if 128 * 2**k <= n):
        try:
            found.append(simulate_kernel(te.lower(schedule_of(steps, n, chip, tile)), chip).cycles)
        except errors.CapacityError:
            break
    return min(found)


def _judge_lowering(got: Any, case: ex.Case) -> str | None:
    steps, n, chip = case["steps"], case["n"], case["chip"]
    if not isinstance(got, isa.Program):
        return "expected a program"
    names = {*inputs_of(steps), steps[-1][1]}
    if {(b.name, b.elements) for b in got.tensors} != {(name, n) for name in names}:
        return f"expected the GM tensors {', '.join(sorted(names))} of {n} elements, no other"
    rng = np.random.default_rng(n)
    feed = {name: np.asarray(rng.normal(size=n), np.float16) for name in inputs_of(steps)}
    last = steps[-1][1]
    right = te.interpret(schedule_of(steps, n, chip, min(n, 4096)), feed)[last]
    if wrong := wrong_run(got, chip, feed, "the values of the formula", right, (None,), last):
        return wrong
    cycles, goal = simulate(got, chip).cycles, SLACK * goal_cycles(steps, n, chip)
    return None if cycles <= goal else f"expected at most {goal:,.0f} cycles, it takes {cycles:,}"


@ex.judged(
    _judge_lowering,
    edges=[
        (CHAINS[0], 64 * 56 * 56, load_chip("Ascend910B2")),
        (CHAINS[1], 16384 * 12 + 128, load_chip("Ascend910B2")),
        (CHAINS[2], 16384 * 4 + 128, load_chip("Ascend910A")),
        (CHAINS[3], 1024, load_chip("Toy")),
    ],
    cases=3,
)
def check_ex_06a_5(rng: ex.Rng) -> ex.Case:
    """Judge a lowering by findings, values and cycles."""
    name = str(rng.choice(["Toy", "Ascend910A", "Ascend910B2"]))
    return {
        "steps": CHAINS[int(rng.integers(len(CHAINS)))],
        "n": int(rng.integers(8, 64 if name == "Toy" else 1500)) * 128,
        "chip": load_chip(name),
    }
