"""Checks of chapters 6 and 6a.

6: parts of a split loop, the largest tile, sums of rows on many cores, a scheduler.
6a: addresses of tiles, fewest vector instructions, flags, the depth of queues, a lowering.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "expected a program".
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
from ascend_lab.operators import dsl as te
from ascend_lab.operators.dsl.boxes import Range
from ascend_lab.operators.dsl.run import steps as loop_steps

CHIP = "Ascend910B2"
CHIPS = ("Toy", "Ascend310", "Ascend910A", "Ascend910B2")
UNIT = 128
"""Elements of fp16 in one repeat of the vector unit: the step of tile sizes."""
SLACK = 1.25
"""A repaired schedule may take this many times the cycles of ours, not more."""
Arrays = Mapping[str, np.ndarray]


# -- 6.1: the parts of a split loop ----------------------------------------------------------------
def _parts(n: int, factor: int, tail: str) -> list[tuple[int, int]]:
    """Return the parts that the interpreter walks for a loop split like that."""
    x = te.placeholder((n,), name="x")
    y = te.compute((n,), lambda i: x[i] * 2.0, name="y")
    s = te.split(te.create_schedule(y, load_chip("Toy")), "y", "i", factor, tail=tail)
    parts = loop_steps(s.state.stage("y").loops[0], Range(isa.Affine(), n))
    return [(part.start.const, part.count) for part in parts]


SIZES_AND_FACTORS = ((22, 8), (24, 8), (25, 8), (5, 5), (7, 1))


@ex.against(
    _parts,
    edges=[(n, factor, tail) for n, factor in SIZES_AND_FACTORS for tail in ("cut", "guard")],
)
def check_ex_06_1(rng: ex.Rng) -> ex.Case:
    """Check a split: `fn(n, factor, tail)` returns the parts [(first, count), ...] in order."""
    n, tail = ex.drawn(rng, n=range(1, 300), tail=("cut", "guard")).values()
    return {"n": n, "factor": int(rng.integers(1, n + 1)), "tail": tail}


# -- 6.3: the largest tile -------------------------------------------------------------------------
def _fits(factor: int, ub_bytes: int, inputs: int, slots: int) -> bool:
    """Return whether a residual sum of so many inputs, split by `factor`, can be lowered."""
    chip = next(name for name in CHIPS if load_chip(name).buffers["UB"] == ub_bytes)
    with suppress(errors.CapacityError):
        residual_sum(1_000_000, min(factor, 1_000_000), slots, chip, inputs)
        return True
    return False


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


# -- 6.4: sums of rows on many cores ---------------------------------------------------------------
def wrong_schedule(
    got: Any, feed: Arrays, expected: Any, tolerance: float, ours: te.Schedule, slack: float = SLACK
) -> str | None:
    """Return what is wrong with a schedule: inputs, values of y, cycles, findings; or None.

    Values may differ by `tolerance`, cycles may be `slack` times those of our schedule.
    """
    if not isinstance(got, te.Schedule):
        return "expected a schedule"
    if got.chip.name != ours.chip.name:
        return f"expected a schedule for the {ours.chip.name}"
    shapes = {entry.name: entry.shape for entry in got.state.inputs}
    if shapes != {name: array.shape for name, array in feed.items()}:
        return f"expected inputs of shape { ({name: a.shape for name, a in feed.items()}) }"
    try:
        kernel = te.lower(got)
        outputs = te.run(got, feed)
        difference = abs(outputs["y"].astype(float) - expected).max() if "y" in outputs else np.inf
        if not difference <= tolerance:
            return f"expected the same values, they differ by up to {difference:.3g}"
        cycles = simulate_kernel(kernel, got.chip).cycles
        limit = slack * _cycles(ours)
        if cycles > limit:
            return f"expected at most {limit:,.0f} cycles, it takes {cycles:,}"
        findings = isa.sanitize(kernel, got.chip)
    except errors.AscendLabError as error:
        return f"expected a schedule that runs, but: {error}"
    return f"expected no findings, the sanitizer has {len(findings)}" if findings else None


@lru_cache(64)
def _cycles(schedule: te.Schedule) -> int:
    return simulate_kernel(te.lower(schedule), schedule.chip).cycles


def _our_sums(rows: int, columns: int) -> te.Schedule:
    """Return our schedule of the sums: 32 partial sums of each row on 32 cores, then their sum."""
    x = te.placeholder((rows, columns), "fp32", "x")
    k = te.reduce_axis(columns, "k")
    y = te.compute((rows,), lambda i: te.sum(x[i, k], k), name="y")
    s = te.split(te.create_schedule(y, load_chip(CHIP)), "y", "k", columns // 32)
    s = te.split(te.rfactor(s, "y", "k_o"), "y_rf", "k", 4096)
    s = te.reorder(s, "y_rf", "p", "i", "k_o", "k_i")
    return te.double_buffer(te.bind(s, "y_rf", "p"), "y_rf")


def _judge_sums(got: Any, case: ex.Case) -> str | None:
    """Judge a schedule of sums of rows: sums within rounding, and its cycles."""
    rows = case["rows"]
    columns = case["columns"]
    x = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
    tolerance = 1e-6 * float(abs(x).sum(1).max())
    return wrong_schedule(got, {"x": x}, x.sum(1, dtype=float), tolerance, _our_sums(rows, columns))


@ex.judged(_judge_sums, edges=[(4, 262144)], cases=1)
def check_ex_06_4(rng: ex.Rng) -> ex.Case:
    """Check a fold on many cores: `fn(rows, columns)` schedules y[i] = sum over k of x[i, k]."""
    rows, columns = ((2, 524288), (8, 131072))[rng.integers(2)]
    return {"rows": rows, "columns": columns}


# -- 6.5: a scheduler ------------------------------------------------------------------------------
SCHEDULER_SLACK = 1.1
"""A schedule of exercise 5 may take this many times the cycles of the best of ours, not more."""


@cache
def _our_row_addition(rows: int, columns: int, chip_name: str = CHIP) -> te.Schedule:
    """Return our schedule of x + p, p added to every row: the fastest of seven.

    They are the default, and columns or rows divided among the cores, in tiles of three heights.
    """
    x = te.placeholder((rows, columns), name="x")
    p = te.placeholder((columns,), name="p")
    y = te.compute((rows, columns), lambda i, j: x[i, j] + p[j], name="y")
    chip = load_chip(chip_name)
    cores = chip.cores_of("vector")
    default = te.auto_schedule(y, chip)
    cycles = {default: _cycles(default)}
    for by_columns, height in product((True, False), (2, 4, 16)):
        with suppress(errors.AscendLabError):
            s = _on_cores(te.create_schedule(y, chip), by_columns, height, cores)
            cycles[s] = _cycles(s)
    return min(cycles, key=lambda s: cycles[s])


def _on_cores(s: te.Schedule, by_columns: bool, height: int, cores: int) -> te.Schedule:
    """Give the cores columns or rows of y, tiles of `height` rows, p loaded once per piece."""
    rows = s.state.stage("y").loops[0].extent
    columns = s.state.stage("y").loops[1].extent
    if by_columns:
        s = te.tile(s, "y", "i", "j", height, -(-columns // (cores * UNIT)) * UNIT)
        s = te.bind(te.reorder(s, "y", "j_o", "i_o"), "y", "j_o")
    else:
        s = te.bind(te.split(s, "y", "i", -(-rows // cores)), "y", "i_o")
        s = te.tile(s, "y", "i_i", "j", height, min(columns, 8192))
        s = te.reorder(s, "y", "j_o", "i_i_o")
    s = te.cache_read(s, "p", "UB")
    s = te.compute_at(s, "p_ub", "y", "j_o")
    return te.double_buffer(s, "y")


def _judge_row_addition(got: Any, case: ex.Case) -> str | None:
    """Judge a schedule of x + p: the same bits, and nearly the cycles of our best."""
    rows = case["rows"]
    columns = case["columns"]
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, columns))
    p = rng.normal(size=(columns,))
    feed = {"x": x.astype(np.float16), "p": p.astype(np.float16)}
    ours = _our_row_addition(**case)
    return wrong_schedule(got, feed, feed["x"] + feed["p"], 0.0, ours, SCHEDULER_SLACK)


@ex.judged(
    _judge_row_addition,
    edges=[(32, 32768, "Ascend910B2"), (2048, 256, "Ascend910A"), (8, 50000, "Ascend310P3")],
    cases=1,
)
def check_ex_06_5(rng: ex.Rng) -> ex.Case:
    """Check a scheduler: `fn(rows, columns, chip_name)` schedules y = x + p, p added to rows."""
    shapes = ((16, 32768), (48, 20000), (400, 1000), (1000, 300), (1, 20000))
    rows, columns = shapes[rng.integers(len(shapes))]
    names = ("Ascend910B2", "Ascend910A", "Ascend310P3")
    return {"rows": rows, "columns": columns, **ex.drawn(rng, chip_name=names)}


# -- 6a.1 and 6a.4: what a builder has room for ----------------------------------------------------
FORMATS = {1: "int8", 2: "fp16", 4: "fp32"}
Tile = tuple[int, int, int]
"""Elements, bytes of an element, slots."""


def _chip_with(ub_bytes: int) -> Chip:
    """Return the Toy chip or the 910B2, whichever has a UB of that size."""
    return next(c for c in map(load_chip, ("Toy", "Ascend910B2")) if c.buffers["UB"] == ub_bytes)


def _addresses(tiles: Sequence[Tile], ub_bytes: int) -> list[int] | None:
    """Return the addresses that a builder gives to tiles in UB, or None if they do not fit."""
    k = isa.KernelBuilder("tiles", _chip_with(ub_bytes))
    addresses = []
    try:
        for i, (elements, itemsize, slots) in enumerate(tiles):
            buffer = k.buffer(f"t{i}", "UB", FORMATS[itemsize], elements, slots)
            addresses.append(buffer.address)
    except errors.CapacityError:
        return None
    return addresses


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
    """Check `fn(tiles, ub_bytes)`: addresses in UB, or None, as a builder gives them."""
    ub_bytes = int(rng.choice([32768, 196608]))
    choices = {"elements": range(1, ub_bytes // 24), "size": (1, 2, 4), "slots": range(1, 4)}
    tiles = [tuple(ex.drawn(rng, **choices).values()) for _ in range(rng.integers(1, 6))]
    return {"tiles": tiles, "ub_bytes": ub_bytes}


def _deepest(queues: Sequence[tuple[str, str, int]], ub_bytes: int) -> int:
    """Return the largest number of slots with which a builder accepts queues (from, to, bytes)."""
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
    """Check `fn(queues, ub_bytes)`: the largest number of slots that all queues can have."""
    pipes = [("MTE2", "V"), ("V", "MTE3"), ("V", "MTE2"), ("MTE3", "V")]
    ub_bytes = int(rng.choice([32768, 196608]))
    max_bytes = int(ub_bytes / rng.choice([4, 12, 60]))
    picks = rng.integers(0, len(pipes), rng.integers(1, 5))
    queues = [(*pipes[i], int(rng.integers(1, max_bytes))) for i in picks]
    return {"queues": queues, "ub_bytes": ub_bytes}


# -- 6a.2: which way over a tile -------------------------------------------------------------------
MAX_REPEATS = 255
"""Repeats of one vector instruction; a repeat has 128 lanes of fp16 in 8 blocks of 16."""


def _fewest(rows: int, columns: int, head: int, slope: int) -> int:
    """Return the fewest cycles of three ways over a tile: head * instructions + slope * repeats."""
    chunks = -(-columns // 128)
    blocks = -(-columns // 16)
    # Along each row: its whole chunks of 128 lanes, and one instruction for the lanes after them.
    instructions_a_row = -(-(columns // 128) // MAX_REPEATS) + (columns % 128 > 0)
    along_rows = (rows * instructions_a_row, rows * chunks)
    # Down the rows: a chunk of 128 columns is one repeat in every row.
    down_rows = (chunks * -(-rows // MAX_REPEATS), chunks * rows)
    # Down the columns: a repeat takes a block of 16 columns in eight rows; up to seven rows more
    # are one instruction.
    instructions_a_block = -(-(rows // 8) // MAX_REPEATS) + (rows % 8 > 0)
    down_columns = (blocks * instructions_a_block, blocks * -(-rows // 8))
    ways = (along_rows, down_rows, down_columns)
    return min(head * instructions + slope * repeats for instructions, repeats in ways)


TILE_SIDES = (
    (1, 128),
    (256, 128),
    (2, 128 * 300),
    (2041, 16),
    (2056, 16),
    (8, 17),
    (100, 48),
    (4, 200),
)


@ex.against(
    _fewest,
    edges=[
        *((rows, columns, 14, 1) for rows, columns in TILE_SIDES),
        (3000, 40, 3, 5),
        (300, 127, 100, 1),
    ],
)
def check_ex_06a_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(rows, columns, head, slope)`: the fewest cycles of three ways over a tile."""
    max_rows = int(rng.choice([20, 400, 5000]))
    max_columns = int(rng.choice([40, 300, 40000]))
    sides = {"rows": range(1, max_rows), "columns": range(1, max_columns)}
    return ex.drawn(rng, **sides, head=range(1, 60), slope=range(1, 9))


# -- 6a.3: flags that others imply -----------------------------------------------------------------
Work = Sequence[tuple[str, set[str], set[str]]]
"""Instructions: pipe, tiles read, tiles written."""


def implied_by_none(work: Work) -> list[tuple[int, int]]:
    """Return the pairs that need a flag of their own: the transitive reduction of all orders."""

    def is_ordered(i: int, j: int) -> bool:
        """Return whether j must run after i: on one pipe, or as one writes what the other uses."""
        pipe_i, reads_i, writes_i = work[i]
        pipe_j, reads_j, writes_j = work[j]
        has_conflict = writes_i & (reads_j | writes_j) or reads_i & writes_j
        return pipe_i == pipe_j or bool(has_conflict)

    pairs = {(i, j) for i, j in combinations(range(len(work)), 2) if is_ordered(i, j)}

    def is_reached(i: int, j: int) -> bool:
        return (i, j) in pairs or has_detour(i, j)

    def has_detour(i: int, j: int) -> bool:
        return any((i, k) in pairs and is_reached(k, j) for k in range(i + 1, j))

    flags = [(i, j) for i, j in pairs if work[i][0] != work[j][0] and not has_detour(i, j)]
    return sorted(flags)


CHAIN_OF_THREE: Work = [
    ("MTE2", set(), {"x"}),
    ("V", {"x"}, {"y"}),
    ("MTE3", {"y"}, {"z"}),
    ("MTE1", {"z", "x"}, set()),
]
"""The last reads what the first wrote, but three flags in a row order these two already."""


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
    """Check `fn(work)`: the pairs of instructions that need a flag of their own."""
    names = np.array(["a", "b", "c", "d"])
    work = []
    for _ in range(rng.integers(3, 9)):
        pipe = str(rng.choice(["MTE2", "V", "MTE3", "MTE1"]))
        reads, writes = ({str(x) for x in names[rng.random(4) < p]} for p in (0.4, 0.25))
        work.append((pipe, reads, writes))
    return {"work": work}


# -- 6a.5: a small lowering ------------------------------------------------------------------------
Steps = Sequence[tuple[str, ...]]
"""Operations: operator, result, operands."""
CHAINS: Sequence[Steps] = (
    (("vadd", "t", "a", "b"), ("vrelu", "y", "t")),
    (("vmul", "t", "a", "b"), ("vadd", "u", "t", "c"), ("vrelu", "y", "u")),
    (("vabs", "t", "x"), ("vexp", "u", "t"), ("vadd", "v", "u", "t"), ("vmul", "y", "v", "x")),
    (("vrelu", "y", "x"),),
)
LOWERING_SLACK = 1.05
"""A lowering may take this many times the cycles of ours, not more."""


def inputs_of(steps: Steps) -> list[str]:
    """Return the names a chain reads and never writes, in order of use."""
    written = {dst for _, dst, *_ in steps}
    inputs = []
    for _, _, *operands in steps:
        inputs += [name for name in operands if name not in written]
    return list(dict.fromkeys(inputs))


def schedule_of(steps: Steps, n: int, chip: Chip, tile: int) -> te.Schedule:
    """Return the chain as one nest on one core, with two slots for each tile."""
    tensors = {name: te.placeholder((n,), name=name) for name in inputs_of(steps)}
    for op, result, *operands in steps:
        operation = getattr(te, op)
        tensors[result] = te.renamed(operation(*(tensors[name] for name in operands)), result)
    output = steps[-1][1]
    s = te.create_schedule(tensors[output], chip)
    for _, name, *_ in steps[:-1]:
        s = te.inline(s, name)
    return te.double_buffer(te.split(s, output, "i", tile), output)


@cache
def goal_cycles(steps: Steps, n: int, chip: Chip) -> int:
    """Return the cycles of the best of our tiles: a power of two of repeats."""
    cycles = []
    for tile in (128 * 2**k for k in range(3, 10) if 128 * 2**k <= n):
        try:
            kernel = te.lower(schedule_of(steps, n, chip, tile))
        except errors.CapacityError:  # larger tiles do not fit either
            break
        cycles.append(simulate_kernel(kernel, chip).cycles)
    return min(cycles)


def _judge_lowering(got: Any, case: ex.Case) -> str | None:
    """Judge the program of a chain: tensors, findings and exact values, cycles."""
    steps = case["steps"]
    n = case["n"]
    chip = case["chip"]
    if not isinstance(got, isa.Program):
        return "expected a program"
    inputs = inputs_of(steps)
    output = steps[-1][1]
    names = {*inputs, output}
    if {(tensor.name, tensor.elements) for tensor in got.tensors} != {(name, n) for name in names}:
        return f"expected the GM tensors {', '.join(sorted(names))} of {n} elements, no other"
    rng = np.random.default_rng(n)
    feed = {name: np.asarray(rng.normal(size=n), np.float16) for name in inputs}
    right = te.interpret(schedule_of(steps, n, chip, min(n, 4096)), feed)[output]
    what = "the values of the formula"
    if wrong := chapter03_04.wrong_run(got, chip, feed, what, right, (None,), output):
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
    """Check `fn(steps, n, chip)`: the program of a chain, by findings, values and cycles."""
    name = str(rng.choice(["Toy", "Ascend910A", "Ascend910B2"]))
    return {
        "steps": CHAINS[int(rng.integers(len(CHAINS)))],
        "n": int(rng.integers(8, 64 if name == "Toy" else 1500)) * 128,
        "chip": load_chip(name),
    }
