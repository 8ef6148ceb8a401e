"""Checks of chapters 6 and 7.

6: split a range, the largest tile, a scheduler, a fold to repair.
7: a block's shape, bytes of a loop nest, the best tile, a schedule by search.
"""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_lab import dsl as te
from ascend_lab.chip import DTYPE_BYTES, Chip, load_chip
from ascend_lab.dsl import Schedule
from ascend_lab.dsl.boxes import Range
from ascend_lab.dsl.run import steps
from ascend_lab.errors import AscendLabError, CapacityError
from ascend_lab.isa import Affine, KernelBuilder, Program, Region, c0_of, sanitize
from ascend_lab.kernels import GemmSchedule, GemmShape, default_schedule, gemm_launch
from ascend_lab.lab.checks import core as ex
from ascend_lab.sim import simulate, simulate_kernel

CHIP = "Ascend910B2"
CHIPS = ("Toy", "Ascend310", "Ascend910A", "Ascend910B2")
UNIT = 128
"""Elements of fp16 in one repeat of the vector unit: the step of tile sizes."""

SLACK = 1.25
"""A repaired schedule may take this many times the cycles of ours, not more."""

Arrays = Mapping[str, NDArray[Any]]


# -- 2: split a range ------------------------------------------------------------------------------


def _parts(n: int, factor: int, tail: str) -> list[tuple[int, int]]:
    """Return the parts that the interpreter walks for a loop split like that."""
    x = te.placeholder((n,), name="x")
    y = te.compute((n,), lambda i: x[i] * 2.0, name="y")
    s = te.split(te.create_schedule(y, load_chip("Toy")), "y", "i", factor, tail=tail)
    walked = steps(s.state.stage("y").loops[0], Range(Affine(), n))
    return [(part.start.const, part.count) for part in walked]


# -- 3: the largest tile ---------------------------------------------------------------------------


def _judge_tile(got: Any, case: ex.Case) -> str | None:
    if not isinstance(got, int | np.integer) or got < UNIT or got % UNIT:
        return f"expected a whole number of elements, a multiple of {UNIT}"
    if not _fits(int(got), **case):
        return "expected less: CapacityError, the tiles do not fit"
    if _fits(int(got) + UNIT, **case):
        return f"expected more: {got + UNIT} still fits"
    return None


def _fits(factor: int, ub_bytes: int, inputs: int, slots: int) -> bool:
    chip = next(c for c in map(load_chip, CHIPS) if c.buffers["UB"] == ub_bytes)
    n = 1_000_000
    x = [te.placeholder((n,), name=f"x{k}") for k in range(inputs)]
    total = x[0]
    for other in x[1:]:
        total = te.vadd(total, other)
    s = te.create_schedule(te.renamed(te.vrelu(total), "y"), chip)
    for stage in s.state.stages[:-1]:
        s = te.inline(s, stage.name)
    s = te.double_buffer(te.split(s, "y", "i", min(factor, n)), "y", slots)
    try:
        te.lower(s)
    except CapacityError:
        return False
    return True


# -- 4 and 5: schedules to repair ------------------------------------------------------------------


def _judge(
    got: Any,
    feed: Arrays,
    expected: NDArray[Any],
    near: float,
    ours: Schedule,
    slack: float = SLACK,
) -> str | None:
    """Judge a schedule by inputs, values, findings and cycles, in this order."""
    if not isinstance(got, Schedule):
        return "expected a schedule"
    if got.chip.name != ours.chip.name:
        return f"expected a schedule for the {ours.chip.name}"
    shapes = {entry.name: entry.shape for entry in got.state.inputs}
    if shapes != {name: array.shape for name, array in feed.items()}:
        return f"expected inputs of shape { ({name: a.shape for name, a in feed.items()}) }"
    try:
        kernel = te.lower(got)
        out = te.run(got, feed)
        findings, cycles = sanitize(kernel, got.chip), simulate_kernel(kernel, got.chip).cycles
    except AscendLabError as error:
        return f"expected a schedule that runs, but: {error}"
    wrong = abs(out["y"].astype(float) - expected).max() if "y" in out else np.inf
    if not wrong <= near:
        return f"expected the same values, they differ by up to {wrong:.3g}"
    if findings:
        return f"expected no findings, the sanitizer has {len(findings)}"
    target = simulate_kernel(te.lower(ours), ours.chip).cycles
    if cycles > slack * target:
        return f"expected at most {slack * target:,.0f} cycles, it takes {cycles:,}"
    return None


def _added(rows: int, columns: int) -> te.Tensor:
    x, p = te.placeholder((rows, columns), name="x"), te.placeholder((columns,), name="p")
    return te.compute((rows, columns), lambda i, j: x[i, j] + p[j], name="y")


@cache
def _table(rows: int, columns: int, chip_name: str = CHIP) -> Schedule:
    """Return our schedule of x + p: columns or rows over the cores, or the default."""
    chip, y = load_chip(chip_name), _added(rows, columns)
    cores, found = chip.cores_of("vector"), {te.auto_schedule(y, chip): 0}
    for by_columns, height in product((True, False), (2, 4, 16)):
        with suppress(AscendLabError):
            found[_on_cores(te.create_schedule(y, chip), by_columns, height, cores)] = 0
    for s in found:
        try:
            found[s] = simulate_kernel(te.lower(s), chip).cycles
        except AscendLabError:
            found[s] = 1 << 60
    return min(found, key=lambda s: found[s])


def _on_cores(s: Schedule, by_columns: bool, height: int, cores: int) -> Schedule:
    """Give the cores columns or rows of y, tiles of `height` rows, p loaded once per piece."""
    rows, columns = s.state.stage("y").loops[0].extent, s.state.stage("y").loops[1].extent
    if by_columns:
        s = te.tile(s, "y", "i", "j", height, -(-columns // (cores * UNIT)) * UNIT)
        s = te.bind(te.reorder(s, "y", "j_o", "i_o"), "y", "j_o")
    else:
        s = te.bind(te.split(s, "y", "i", -(-rows // cores)), "y", "i_o")
        s = te.reorder(te.tile(s, "y", "i_i", "j", height, min(columns, 8192)), "y", "j_o", "i_i_o")
    return te.double_buffer(te.compute_at(te.cache_read(s, "p", "UB"), "p_ub", "y", "j_o"), "y")


def _sums(rows: int, columns: int) -> Schedule:
    """Return our schedule of the sums: 32 partial sums of each row on 32 cores, then their sum."""
    x, k = te.placeholder((rows, columns), "fp32", "x"), te.reduce_axis(columns, "k")
    y = te.compute((rows,), lambda i: te.sum(x[i, k], k), name="y")
    s = te.split(te.create_schedule(y, load_chip(CHIP)), "y", "k", columns // 32)
    s = te.split(te.rfactor(s, "y", "k_o"), "y_rf", "k", 4096)
    s = te.reorder(s, "y_rf", "p", "i", "k_o", "k_i")
    return te.double_buffer(te.bind(s, "y_rf", "p"), "y_rf")


@ex.against(
    _parts,
    edges=[
        {"n": n, "factor": factor, "tail": tail}
        for n, factor in ((22, 8), (24, 8), (25, 8), (5, 5), (7, 1))
        for tail in ("cut", "guard")
    ],
)
def check_ex_06_2(rng: ex.Rng) -> ex.Case:
    """Check a split: `fn(n, factor, tail)` returns the parts [(first, count), ...] in order."""
    n = int(rng.integers(1, 300))
    tail = ("cut", "guard")[rng.integers(2)]
    return {"n": n, "factor": int(rng.integers(1, n + 1)), "tail": tail}


@ex.judged(_judge_tile, cases=12)
def check_ex_06_3(rng: ex.Rng) -> ex.Case:
    """Check a tile: `fn(ub_bytes, inputs, slots)` returns the largest factor that fits.

    The formula adds `inputs` fp16 vectors; factors are multiples of 128. The judge lowers the
    schedule with that factor, which must fit, and with the next larger one, which must not.
    """
    chip = load_chip(CHIPS[rng.integers(len(CHIPS))])
    inputs, slots = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    return {"ub_bytes": chip.buffers["UB"], "inputs": inputs, "slots": slots}


def _judge_06_4(got: Any, case: ex.Case) -> str | None:
    rows, columns = case["rows"], case["columns"]
    rng = np.random.default_rng(rows)
    x, p = rng.normal(size=(rows, columns)), rng.normal(size=(columns,))
    feed = {"x": x.astype(np.float16), "p": p.astype(np.float16)}
    return _judge(got, feed, feed["x"] + feed["p"], 0.0, _table(**case), SCHEDULER_SLACK)


SCHEDULER_SLACK = 1.1
"""A schedule of exercise 4 may take this many times the cycles of the best of ours, not more."""


@ex.judged(
    _judge_06_4,
    edges=ex.rows(
        "rows columns chip_name",
        (32, 32768, "Ascend910B2"),
        (2048, 256, "Ascend910A"),
        (8, 50000, "Ascend310P3"),
    ),
    cases=1,
)
def check_ex_06_4(rng: ex.Rng) -> ex.Case:
    """Check a scheduler: `fn(rows, columns, chip_name)` schedules y = x + p, p added to every row.

    Inputs x (rows, columns) and p (columns,), fp16: the same bits, no finding of the sanitizer, and
    at most 1.1 times the cycles of the best of ours.
    """
    shapes = ((16, 32768), (48, 20000), (400, 1000), (1000, 300), (1, 20000))
    rows, columns = shapes[rng.integers(len(shapes))]
    name = ("Ascend910B2", "Ascend910A", "Ascend310P3")[rng.integers(3)]
    return {"rows": rows, "columns": columns, "chip_name": name}


def _judge_06_5(got: Any, case: ex.Case) -> str | None:
    rows, columns = case["rows"], case["columns"]
    x = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
    near = 1e-6 * float(abs(x).sum(1).max())
    return _judge(got, {"x": x}, x.sum(1, dtype=float), near, _sums(rows, columns))


@ex.judged(_judge_06_5, edges=[{"rows": 4, "columns": 262144}], cases=1)
def check_ex_06_5(rng: ex.Rng) -> ex.Case:
    """Check a fold on many cores: `fn(rows, columns)` schedules y[i] = sum over k of x[i, k].

    Input x (rows, columns) in fp32, columns a multiple of 131,072, on the Ascend910B2: the sums
    within rounding, no finding, and at most 1.25 times the cycles of ours.
    """
    rows, columns = ((2, 524288), (8, 131072))[rng.integers(2)]
    return {"rows": rows, "columns": columns}


# -- chapter 7 -------------------------------------------------------------------------------------
# Bytes and cycles are judged by what real programs count, tiles by trying all of them.
PRODUCT_CHIPS = ("Ascend310", "Ascend910A", "Ascend910B2", "Toy")
ORDERS = tuple("".join(order) for order in permutations("mkn"))

PRODUCT_SLACK = 1.02
"""A schedule found by search may take this many times the cycles of the best one we know."""


def _block(macs: int, in_bytes: int, sum_bytes: int) -> ex.Case:
    return {"macs": macs, "in_bytes": in_bytes, "sum_bytes": sum_bytes}


def _judge_block(got: Any, case: ex.Case) -> str | None:
    macs = case["macs"]
    sides = _three_sides(got)
    if sides is None or any(side & (side - 1) for side in sides):
        return "expected three powers of two, (m, k, n)"
    if sides[0] * sides[1] * sides[2] != macs:
        return f"expected m k n = {macs}"
    powers = [1 << i for i in range(macs.bit_length())]
    every = [(m, macs // (m * n), n) for m, n in product(powers, powers) if m * n <= macs]
    best = min(every, key=lambda block: _block_bytes(block, case))
    mine, least = _block_bytes(sides, case), _block_bytes(best, case)
    if mine > least:
        return f"which moves {mine} bytes a cycle; expected one that moves {least}"
    return None


def _three_sides(got: Any) -> tuple[int, int, int] | None:
    """Return a tuple or list of three positive whole numbers as one, else None."""
    if not isinstance(got, tuple | list) or len(got) != 3:
        return None
    if not all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in got):
        return None
    m, k, n = (int(x) for x in got)
    return (m, k, n) if min(m, k, n) > 0 else None


def _block_bytes(block: tuple[int, int, int], case: ex.Case) -> int:
    m, k, n = block
    return int(case["in_bytes"] * (m * k + k * n) + 2 * case["sum_bytes"] * m * n)


def _nest_case(order: str, m: int, k: int, n: int, *, tile: int) -> ex.Case:
    return {"order": order, "m": m, "k": k, "n": n, "tile": tile}


def _judge_nest(got: Any, case: ex.Case) -> str | None:
    side, tile = case["tile"] // 16, case["tile"]
    trips = {axis: case[axis] // tile for axis in "mkn"}
    chip = load_chip("Ascend910A")
    moved = simulate(nest(chip, case["order"], trips, side), chip).path_bytes
    c = moved["GM", "UB"] + moved["UB", "GM"]
    return ex.equal_to((moved["GM", "L0A"], moved["GM", "L0B"], c))(got)


AXES = {
    "a": (("m", "k"), "L0A", "fp16"),
    "b": (("k", "n"), "L0B", "fp16"),
    "c": (("m", "n"), "L0C", "fp32"),
}
"""Per operand of the nest: the loops it depends on, its buffer, its number format."""


def nest(chip: Chip, order: str, trips: Mapping[str, int], tile: int = 8) -> Program:
    """Return C += A B in tiles of `tile` x `tile` fractals, loops in `order` from outer to inner.

    Every operand is loaded under the innermost loop that it depends on; C is stored where that
    loop's body ends. Tiles lie in GM one after the other. Barriers everywhere: it is for counting.
    """
    k, area = KernelBuilder(order, chip), (tile * tile, 256)
    size, at = tile * tile * 256, dict[str, Affine]()
    gm = {x: k.tensor(x, t, size * trips[p] * trips[q]) for x, ((p, q), _, t) in AXES.items()}
    l0 = {x: k.buffer(f"{x}_l0", space, t, size) for x, (_, space, t) in AXES.items()}
    ub = k.buffer("c_ub", "UB", "fp32", size).region(0, area)

    def move(*way: Region) -> None:
        for src, dst in pairwise(way):
            (k.load2d if dst.space in ("L0A", "L0B") else k.copy)(dst, src)
            k.barrier()

    with ExitStack() as loops:
        for axis in order:
            at[axis] = loops.enter_context(k.loop(axis, trips[axis]))
            for x, ((p, q), _, _) in AXES.items():
                if axis not in (p, q) or not {p, q} <= set(at):
                    continue
                here = l0[x].region(0, area)
                there = gm[x].region((at[p] * trips[q] + at[q]) * size, area)
                move(*((there, ub, here) if x == "c" else (there, here)))
                if x == "c":
                    loops.callback(move, here, ub, there)
        k.mmad(*(l0[x].region(0, (tile, tile, 16, 16)) for x in "cab"), accumulate=1)
        k.barrier()
    return k.finish()


def _judge_product_tile(got: Any, case: ex.Case) -> str | None:
    chip, dtype, slots = load_chip(case["chip_name"]), case["dtype"], case["slots"]
    c0, sides = c0_of(dtype), _three_sides(got)
    if sides is None or sides[0] % 16 or sides[2] % 16 or sides[1] % c0:
        return f"expected (m, k, n): m and n multiples of 16, k of {c0}"
    m, k, n = sides
    if (full := _overflow(chip, dtype, slots, sides)) is not None:
        return f"but {full}"
    legal = [
        (one, c0, two)
        for one, two in product(range(16, 2049, 16), repeat=2)
        if _overflow(chip, dtype, slots, (one, c0, two)) is None
    ]
    mine = _feed(chip, dtype, sides)
    least = min(_feed(chip, dtype, tile) for tile in legal)
    if mine > least * (1 + 1e-9):
        return (
            f"which keeps MTE1 busy for {mine * 4096:.2f} cycles for every 4096 MACs; "
            f"expected {least * 4096:.2f}"
        )
    if _overflow(chip, dtype, slots, (m, k + c0, n)) is None:
        return f"but a depth of {k + c0} fits as well"
    return None


def _overflow(chip: Chip, dtype: str, slots: int, tile: tuple[int, int, int]) -> str | None:
    """Name the first buffer a tile overflows: two slots of A and B, `slots` of C."""
    (m, k, n), size = tile, DTYPE_BYTES[dtype]
    for space, needed in (
        ("L0A", 2 * m * k * size),
        ("L0B", 2 * k * n * size),
        ("L0C", slots * m * n * 4),
    ):
        if needed > chip.buffers[space]:
            return f"{space} holds {chip.buffers[space]} bytes and {needed} are needed"
    return None


def _feed(chip: Chip, dtype: str, tile: tuple[int, int, int]) -> float:
    """Return cycles of MTE1 per MAC: an element of A is used n times, one of B m times."""
    m, _, n = tile
    a, b = (chip.path("L1", space).rate_bytes_per_cycle for space in ("L0A", "L0B"))
    return DTYPE_BYTES[dtype] * (1 / (a * n) + 1 / (b * m))


def _judge_schedule(got: Any, case: ex.Case) -> str | None:
    if not isinstance(got, GemmSchedule):
        return "expected a GemmSchedule"
    shape, chip = GemmShape(case["m"], case["k"], case["n"]), load_chip("Ascend910A")
    try:
        cycles = simulate(gemm_launch(shape, chip, got), chip).cycles
    except AscendLabError as error:
        return f"which cannot run: {error}"
    enough = int(PRODUCT_SLACK * _best_cycles(shape))
    return None if cycles <= enough else f"which takes {cycles} cycles; expected at most {enough}"


SIDES = ("base_m", "base_k", "base_n", "step_k", "grid_rows", "grid_cols")


@cache
def _best_cycles(shape: GemmShape) -> int:
    """Return the cycles at the end of a walk from the default to ever faster neighbours.

    A neighbour doubles one number of the schedule, halves one, or both.
    """
    chip = load_chip("Ascend910A")

    def cycles_of(s: GemmSchedule) -> int:
        try:
            return simulate(gemm_launch(shape, chip, s), chip).cycles
        except AscendLabError:
            return 1 << 60

    best = default_schedule(shape, chip)
    cycles = cycles_of(best)
    while True:
        for up, down in permutations((None, *SIDES), 2):
            change = {up: 2 * getattr(best, up)} if up else {}
            if down and getattr(best, down) % 2 == 0:
                change[down] = getattr(best, down) // 2
            tried = replace(best, **change)
            if (found := cycles_of(tried)) < cycles:
                best, cycles = tried, found
                break
        else:
            return cycles


@ex.judged(
    _judge_block, edges=[_block(4096, 2, 4), _block(4096, 2, 0), _block(64, 2, 4), _block(1, 2, 4)]
)
def check_ex_07_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(macs, in_bytes, sum_bytes)`: (m, k, n) of the block that moves the fewest bytes."""
    macs = 2 ** int(rng.integers(0, 19))
    return _block(macs, int(rng.choice([1, 2, 4])), int(rng.choice([0, 1, 2, 4, 8])))


@ex.judged(
    _judge_product_tile,
    edges=[{"chip_name": "Ascend910A", "dtype": "fp16", "slots": s} for s in (1, 2)],
    cases=12,
)
def check_ex_07_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(chip_name, dtype, slots)`: (m, k, n) of the tile that is cheapest to feed."""
    return {
        "chip_name": str(rng.choice(PRODUCT_CHIPS)),
        "dtype": str(rng.choice(["fp16", "int8"])),
        "slots": int(rng.integers(1, 5)),
    }


@ex.judged(
    _judge_schedule,
    edges=ex.rows("m k n", (64, 65536, 64), (77, 3000, 77), (256, 256, 256)),
    cases=1,
)
def check_ex_07_5(rng: ex.Rng) -> ex.Case:
    """Check `fn(m, k, n)`: a `GemmSchedule` for an fp16 product on the Ascend910A near the best."""
    m, n = (int(side) for side in rng.integers(20, 400, 2))
    return {"m": m, "k": int(rng.integers(1, 20)) * 100, "n": n}


@ex.judged(
    _judge_nest,
    edges=[
        *[_nest_case(order, 256, 384, 512, tile=64) for order in ORDERS],
        _nest_case("knm", 64, 64, 64, tile=64),
        _nest_case("mkn", 64, 640, 64, tile=64),
    ],
)
def check_ex_07_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(order, m, k, n, tile)`: bytes of A, B and C that the nest C += A B moves."""
    tile = 16 * int(rng.integers(1, 9))
    sides = (tile * int(x) for x in rng.integers(1, 30, 3))
    return _nest_case(str(rng.choice(ORDERS)), *sides, tile=tile)
