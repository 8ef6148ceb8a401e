"""Checks of chapters 6 and 6a.

Ranges, tiles, a fold to repair, a scheduler; addresses, instructions, flags, depth, a lowering.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import combinations, product
from typing import Any

import numpy as np

from ascend_lab import errors
from ascend_lab.lab.checks import chapter03_04, core as ex
from ascend_lab.lab.figures.lowering import residual_sum
from ascend_lab.machine import isa
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim import simulate, simulate_kernel
from ascend_lab.operators import dsl, dsl as te
from ascend_lab.operators.dsl.boxes import Range
from ascend_lab.operators.dsl.run import steps

CHIP = "Ascend910B2"
CHIPS = ("Toy", "Ascend310", "Ascend910A", "Ascend910B2")
UNIT = 128
"""Elements of fp16 in one repeat of the vector unit: the step of tile sizes."""
SLACK = 1.25
"""A repaired schedule may take this many times the cycles of ours, not more."""
Arrays = Mapping[str, np.ndarray]


def _parts(n: int, factor: int, tail: str) -> list[tuple[int, int]]:
    """Return the parts that the interpreter walks for a loop split like that."""
    x = te.placeholder((n,), name="x")
    y = te.compute((n,), lambda i: x[i] * 2.0, name="y")
    s = te.split(te.create_schedule(y, load_chip("Toy")), "y", "i", factor, tail=tail)
    walked = steps(s.state.stage("y").loops[0], Range(isa.Affine(), n))
    return [(part.start.const, part.count) for part in walked]


def _fits(factor: int, ub_bytes: int, inputs: int, slots: int) -> bool:
    chip = next(name for name in CHIPS if load_chip(name).buffers["UB"] == ub_bytes)
    with suppress(errors.CapacityError):
        residual_sum(1_000_000, min(factor, 1_000_000), slots, chip, inputs)
        return True
    return False


def wrong_schedule(
    got: Any, feed: Arrays, expected: Any, near: float, ours: dsl.Schedule, slack: float = SLACK
) -> str | None:
    """Return what is wrong with a schedule: inputs, values of y, cycles beside ours, findings."""
    if not isinstance(got, dsl.Schedule):
        return "expected a schedule"
    if got.chip.name != ours.chip.name:
        return f"expected a schedule for the {ours.chip.name}"
    shapes = {entry.name: entry.shape for entry in got.state.inputs}
    if shapes != {name: array.shape for name, array in feed.items()}:
        return f"expected inputs of shape { ({name: a.shape for name, a in feed.items()}) }"
    try:
        kernel = te.lower(got)
        out = te.run(got, feed)
        wrong = abs(out["y"].astype(float) - expected).max() if "y" in out else np.inf
        if not wrong <= near:
            return f"expected the same values, they differ by up to {wrong:.3g}"
        cycles = simulate_kernel(kernel, got.chip).cycles
        most = slack * _cycles(ours)
        if cycles > most:
            return f"expected at most {most:,.0f} cycles, it takes {cycles:,}"
        findings = isa.sanitize(kernel, got.chip)
    except errors.AscendLabError as error:
        return f"expected a schedule that runs, but: {error}"
    return f"expected no findings, the sanitizer has {len(findings)}" if findings else None


@lru_cache(64)
def _cycles(schedule: dsl.Schedule) -> int:
    return simulate_kernel(te.lower(schedule), schedule.chip).cycles


@cache
def _table(rows: int, columns: int, chip_name: str = CHIP) -> dsl.Schedule:
    """Return our schedule of x + p: columns or rows over the cores, or the default."""
    x = te.placeholder((rows, columns), name="x")
    p = te.placeholder((columns,), name="p")
    y = te.compute((rows, columns), lambda i, j: x[i, j] + p[j], name="y")
    chip = load_chip(chip_name)
    cores = chip.cores_of("vector")
    default = te.auto_schedule(y, chip)
    found = {default: _cycles(default)}
    for by_columns, height in product((True, False), (2, 4, 16)):
        with suppress(errors.AscendLabError):
            s = _on_cores(te.create_schedule(y, chip), by_columns, height, cores)
            found[s] = _cycles(s)
    return min(found, key=lambda s: found[s])


def _on_cores(s: dsl.Schedule, by_columns: bool, height: int, cores: int) -> dsl.Schedule:
    """Give the cores columns or rows of y, tiles of `height` rows, p loaded once per piece."""
    rows = s.state.stage("y").loops[0].extent
    columns = s.state.stage("y").loops[1].extent
    if by_columns:
        s = te.tile(s, "y", "i", "j", height, -(-columns // (cores * UNIT)) * UNIT)
        s = te.bind(te.reorder(s, "y", "j_o", "i_o"), "y", "j_o")
    else:
        s = te.bind(te.split(s, "y", "i", -(-rows // cores)), "y", "i_o")
        s = te.reorder(te.tile(s, "y", "i_i", "j", height, min(columns, 8192)), "y", "j_o", "i_i_o")
    return te.double_buffer(te.compute_at(te.cache_read(s, "p", "UB"), "p_ub", "y", "j_o"), "y")


def _sums(rows: int, columns: int) -> dsl.Schedule:
    """Return our schedule of the sums: 32 partial sums of each row on 32 cores, then their sum."""
    x = te.placeholder((rows, columns), "fp32", "x")
    k = te.reduce_axis(columns, "k")
    y = te.compute((rows,), lambda i: te.sum(x[i, k], k), name="y")
    s = te.split(te.create_schedule(y, load_chip(CHIP)), "y", "k", columns // 32)
    s = te.split(te.rfactor(s, "y", "k_o"), "y_rf", "k", 4096)
    s = te.reorder(s, "y_rf", "p", "i", "k_o", "k_i")
    return te.double_buffer(te.bind(s, "y_rf", "p"), "y_rf")


PAIRS_2 = ((22, 8), (24, 8), (25, 8), (5, 5), (7, 1))


@ex.against(_parts, edges=[(*pair, tail) for pair in PAIRS_2 for tail in ("cut", "guard")])
def check_ex_06_1(rng: ex.Rng) -> ex.Case:
    """Check a split: `fn(n, factor, tail)` returns the parts [(first, count), ...] in order."""
    n, tail = ex.drawn(rng, n=range(1, 300), tail=("cut", "guard")).values()
    return {"n": n, "factor": int(rng.integers(1, n + 1)), "tail": tail}


@ex.judged(
    cases=12,
    ub_bytes=[load_chip(name).buffers["UB"] for name in CHIPS],
    inputs=range(1, 6),
    slots=range(1, 5),
)
def check_ex_06_3(got: Any, case: ex.Case) -> str | None:
    """Check a tile: `fn(ub_bytes, inputs, slots)` returns the largest factor that fits."""
    if not isinstance(got, int | np.integer) or got < UNIT or got % UNIT:
        return f"expected a whole number of elements, a multiple of {UNIT}"
    if not _fits(int(got), **case):
        return "expected less: CapacityError, the tiles do not fit"
    if _fits(int(got) + UNIT, **case):
        return f"expected more: {got + UNIT} still fits"
    return None


def _judge_06_5(got: Any, case: ex.Case) -> str | None:
    rows = case["rows"]
    columns = case["columns"]
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, columns))
    p = rng.normal(size=(columns,))
    feed = {"x": x.astype(np.float16), "p": p.astype(np.float16)}
    return wrong_schedule(got, feed, feed["x"] + feed["p"], 0.0, _table(**case), SCHEDULER_SLACK)


SCHEDULER_SLACK = 1.1
"""A schedule of exercise 5 may take this many times the cycles of the best of ours, not more."""


@ex.judged(
    _judge_06_5,
    edges=[(32, 32768, "Ascend910B2"), (2048, 256, "Ascend910A"), (8, 50000, "Ascend310P3")],
    cases=1,
)
def check_ex_06_5(rng: ex.Rng) -> ex.Case:
    """Check a scheduler: `fn(rows, columns, chip_name)` schedules y = x + p, p added to rows."""
    shapes = ((16, 32768), (48, 20000), (400, 1000), (1000, 300), (1, 20000))
    rows, columns = shapes[rng.integers(len(shapes))]
    names = ("Ascend910B2", "Ascend910A", "Ascend310P3")
    return {"rows": rows, "columns": columns, **ex.drawn(rng, chip_name=names)}


def _judge_06_4(got: Any, case: ex.Case) -> str | None:
    rows = case["rows"]
    columns = case["columns"]
    x = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
    near = 1e-6 * float(abs(x).sum(1).max())
    return wrong_schedule(got, {"x": x}, x.sum(1, dtype=float), near, _sums(rows, columns))


@ex.judged(_judge_06_4, edges=[(4, 262144)], cases=1)
def check_ex_06_4(rng: ex.Rng) -> ex.Case:
    """Check a fold on many cores: `fn(rows, columns)` schedules y[i] = sum over k of x[i, k]."""
    rows, columns = ((2, 524288), (8, 131072))[rng.integers(2)]
    return {"rows": rows, "columns": columns}


FORMATS = {1: "int8", 2: "fp16", 4: "fp32"}
Tile = tuple[int, int, int]
Work = Sequence[tuple[str, set[str], set[str]]]
Steps = Sequence[tuple[str, ...]]


# -- 6a.1 and 6a.4: what a builder has room for ----------------------------------------------------
def _chip_with(ub_bytes: int) -> Chip:
    return next(c for c in map(load_chip, ("Toy", "Ascend910B2")) if c.buffers["UB"] == ub_bytes)


def _addresses(tiles: Sequence[Tile], ub_bytes: int) -> list[int] | None:
    k = isa.KernelBuilder("tiles", _chip_with(ub_bytes))
    with suppress(errors.CapacityError):
        sized = enumerate(tiles)
        made = [k.buffer(f"t{i}", "UB", FORMATS[size], n, slots) for i, (n, size, slots) in sized]
        return [buffer.address for buffer in made]
    return None


@ex.against(
    _addresses,
    edges=[
        ([(22, 2, 2), (22, 4, 1), (5, 1, 3)], 32768),
        ([(4096, 2, 2), (4096, 2, 2)], 32768),
        ([(4096, 2, 2), (4096, 2, 1), (4081, 2, 1)], 32768),
        ([(4096, 2, 2), (4096, 2, 2), (1, 1, 1)], 32768),
        ([(16000, 2, 1), (400, 2, 1)], 32768),
        ([(5461, 2, 3)], 32768),  # three slots fit only if they are not rounded
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
        ([("MTE2", "V", 32)] * 9, 32768),  # nine queues, eight ids
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
    chunks = -(-columns // 128)
    blocks = -(-columns // 16)
    rest = rows % 8
    along = rows * (-(-(columns // 128) // 255) + (columns % 128 > 0)), rows * chunks
    down = chunks * -(-rows // 255), chunks * rows
    across = blocks * (-(-(rows // 8) // 255) + (rest > 0)), blocks * -(-rows // 8)
    return min(head * starts + slope * repeats for starts, repeats in (along, down, across))


SIDES_2 = (1, 128), (256, 128), (2, 128 * 300), (2041, 16), (2056, 16), (8, 17), (100, 48), (4, 200)


@ex.against(
    _fewest, edges=[*((*sides, 14, 1) for sides in SIDES_2), (3000, 40, 3, 5), (300, 127, 100, 1)]
)
def check_ex_06a_2(rng: ex.Rng) -> ex.Case:
    """Compare the fewest cycles of three ways over a tile."""
    high = int(rng.choice([20, 400, 5000]))
    wide = int(rng.choice([40, 300, 40000]))
    sides = {"rows": range(1, high), "columns": range(1, wide)}
    return ex.drawn(rng, **sides, head=range(1, 60), slope=range(1, 9))


# -- 6a.3: flags that others imply -----------------------------------------------------------------
def implied_by_none(work: Work) -> list[tuple[int, int]]:
    """Return the pairs that need a flag of their own: the transitive reduction of all orders."""
    pairs = [
        (i, j)
        for (i, (pipe, reads, writes)), (j, (other, used, made)) in combinations(enumerate(work), 2)
        if pipe == other or writes & (used | made) or reads & made
    ]

    def reach(i: int, j: int) -> bool:
        return (i, j) in pairs or detour(i, j)

    def detour(i: int, j: int) -> bool:
        return any((i, k) in pairs and reach(k, j) for k in range(i + 1, j))

    return [(i, j) for i, j in pairs if work[i][0] != work[j][0] and not detour(i, j)]


CHAIN_OF_THREE: Work = [
    ("MTE2", set(), {"x"}),
    ("V", {"x"}, {"y"}),
    ("MTE3", {"y"}, {"z"}),
    ("MTE1", {"z", "x"}, set()),
]
"""The last reads what the first wrote, and three other flags in a row order the two already."""


@ex.against(
    implied_by_none,
    edges=[
        ([("MTE2", set(), {"a"}), ("V", {"a"}, {"y"}), ("MTE3", {"y"}, set())],),
        ([("MTE2", set(), {"a"}), ("MTE2", set(), {"b"}), ("V", {"a", "b"}, {"y"})],),
        ([("MTE2", set(), {"a"}), ("V", {"a"}, {"y"}), ("MTE2", set(), {"a"})],),
        ([("V", set(), {"a"}), ("MTE2", set(), {"a"}), ("V", {"b"}, {"c"})],),
        (CHAIN_OF_THREE,),
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
LOWERING_SLACK = 1.05


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
    steps = case["steps"]
    n = case["n"]
    chip = case["chip"]
    if not isinstance(got, isa.Program):
        return "expected a program"
    names = {*inputs_of(steps), steps[-1][1]}
    if {(b.name, b.elements) for b in got.tensors} != {(name, n) for name in names}:
        return f"expected the GM tensors {', '.join(sorted(names))} of {n} elements, no other"
    rng = np.random.default_rng(n)
    last = steps[-1][1]
    feed = {name: np.asarray(rng.normal(size=n), np.float16) for name in inputs_of(steps)}
    right = te.interpret(schedule_of(steps, n, chip, min(n, 4096)), feed)[last]
    wanted = "the values of the formula", right, (None,), last
    if wrong := chapter03_04.wrong_run(got, chip, feed, *wanted):
        return wrong
    cycles = simulate(got, chip).cycles
    goal = LOWERING_SLACK * goal_cycles(steps, n, chip)
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
