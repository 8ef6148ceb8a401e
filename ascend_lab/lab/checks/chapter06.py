"""Checks of chapter 6: split a range, the largest tile, a scheduler, a fold to repair."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from ascend_lab import dsl, dsl as te, errors, isa
from ascend_lab.chip import load_chip
from ascend_lab.dsl.boxes import Range
from ascend_lab.dsl.run import steps
from ascend_lab.lab.checks import core as ex
from ascend_lab.lab.figures.lowering import residual_sum
from ascend_lab.sim import simulate_kernel

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


def _judge_tile(got: Any, case: ex.Case) -> str | None:
    if not isinstance(got, int | np.integer) or got < UNIT or got % UNIT:
        return f"expected a whole number of elements, a multiple of {UNIT}"
    if not _fits(int(got), **case):
        return "expected less: CapacityError, the tiles do not fit"
    if _fits(int(got) + UNIT, **case):
        return f"expected more: {got + UNIT} still fits"
    return None


def _fits(factor: int, ub_bytes: int, inputs: int, slots: int) -> bool:
    chip = next(name for name in CHIPS if load_chip(name).buffers["UB"] == ub_bytes)
    n = 1_000_000
    try:
        residual_sum(n, min(factor, n), slots, chip, inputs)
    except errors.CapacityError:
        return False
    return True


def wrong_schedule(
    got: Any,
    feed: Arrays,
    expected: np.ndarray,
    near: float,
    ours: dsl.Schedule,
    slack: float = SLACK,
) -> str | None:
    """Return what is wrong with a schedule: inputs, values of y, findings, cycles beside ours."""
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
        findings, cycles = isa.sanitize(kernel, got.chip), simulate_kernel(kernel, got.chip).cycles
    except errors.AscendLabError as error:
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


@cache
def _table(rows: int, columns: int, chip_name: str = CHIP) -> dsl.Schedule:
    """Return our schedule of x + p: columns or rows over the cores, or the default."""
    x, p = te.placeholder((rows, columns), name="x"), te.placeholder((columns,), name="p")
    y = te.compute((rows, columns), lambda i, j: x[i, j] + p[j], name="y")
    chip = load_chip(chip_name)
    cores, found = chip.cores_of("vector"), {te.auto_schedule(y, chip): 0}
    for by_columns, height in product((True, False), (2, 4, 16)):
        with suppress(errors.AscendLabError):
            found[_on_cores(te.create_schedule(y, chip), by_columns, height, cores)] = 0
    for s in found:
        try:
            found[s] = simulate_kernel(te.lower(s), chip).cycles
        except errors.AscendLabError:
            found[s] = 1 << 60
    return min(found, key=lambda s: found[s])


def _on_cores(s: dsl.Schedule, by_columns: bool, height: int, cores: int) -> dsl.Schedule:
    """Give the cores columns or rows of y, tiles of `height` rows, p loaded once per piece."""
    rows, columns = s.state.stage("y").loops[0].extent, s.state.stage("y").loops[1].extent
    if by_columns:
        s = te.tile(s, "y", "i", "j", height, -(-columns // (cores * UNIT)) * UNIT)
        s = te.bind(te.reorder(s, "y", "j_o", "i_o"), "y", "j_o")
    else:
        s = te.bind(te.split(s, "y", "i", -(-rows // cores)), "y", "i_o")
        s = te.reorder(te.tile(s, "y", "i_i", "j", height, min(columns, 8192)), "y", "j_o", "i_i_o")
    return te.double_buffer(te.compute_at(te.cache_read(s, "p", "UB"), "p_ub", "y", "j_o"), "y")


def _sums(rows: int, columns: int) -> dsl.Schedule:
    """Return our schedule of the sums: 32 partial sums of each row on 32 cores, then their sum."""
    x, k = te.placeholder((rows, columns), "fp32", "x"), te.reduce_axis(columns, "k")
    y = te.compute((rows,), lambda i: te.sum(x[i, k], k), name="y")
    s = te.split(te.create_schedule(y, load_chip(CHIP)), "y", "k", columns // 32)
    s = te.split(te.rfactor(s, "y", "k_o"), "y_rf", "k", 4096)
    s = te.reorder(s, "y_rf", "p", "i", "k_o", "k_i")
    return te.double_buffer(te.bind(s, "y_rf", "p"), "y_rf")


PAIRS_2 = ((22, 8), (24, 8), (25, 8), (5, 5), (7, 1))


@ex.against(_parts, edges=[(*pair, tail) for pair in PAIRS_2 for tail in ("cut", "guard")])
def check_ex_06_2(rng: ex.Rng) -> ex.Case:
    """Check a split: `fn(n, factor, tail)` returns the parts [(first, count), ...] in order."""
    n = int(rng.integers(1, 300))
    tail = ("cut", "guard")[rng.integers(2)]
    return {"n": n, "factor": int(rng.integers(1, n + 1)), "tail": tail}


@ex.judged(_judge_tile, cases=12)
def check_ex_06_3(rng: ex.Rng) -> ex.Case:
    """Check a tile: `fn(ub_bytes, inputs, slots)` returns the largest factor that fits."""
    chip = load_chip(CHIPS[rng.integers(len(CHIPS))])
    inputs, slots = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    return {"ub_bytes": chip.buffers["UB"], "inputs": inputs, "slots": slots}


def _judge_06_4(got: Any, case: ex.Case) -> str | None:
    rows, columns = case["rows"], case["columns"]
    rng = np.random.default_rng(rows)
    x, p = rng.normal(size=(rows, columns)), rng.normal(size=(columns,))
    feed = {"x": x.astype(np.float16), "p": p.astype(np.float16)}
    return wrong_schedule(got, feed, feed["x"] + feed["p"], 0.0, _table(**case), SCHEDULER_SLACK)


SCHEDULER_SLACK = 1.1
"""A schedule of exercise 4 may take this many times the cycles of the best of ours, not more."""


@ex.judged(
    _judge_06_4,
    edges=[(32, 32768, "Ascend910B2"), (2048, 256, "Ascend910A"), (8, 50000, "Ascend310P3")],
    cases=1,
)
def check_ex_06_4(rng: ex.Rng) -> ex.Case:
    """Check a scheduler: `fn(rows, columns, chip_name)` schedules y = x + p, p added to rows."""
    shapes = ((16, 32768), (48, 20000), (400, 1000), (1000, 300), (1, 20000))
    rows, columns = shapes[rng.integers(len(shapes))]
    name = ("Ascend910B2", "Ascend910A", "Ascend310P3")[rng.integers(3)]
    return {"rows": rows, "columns": columns, "chip_name": name}


def _judge_06_5(got: Any, case: ex.Case) -> str | None:
    rows, columns = case["rows"], case["columns"]
    x = np.random.default_rng(rows).normal(size=(rows, columns)).astype(np.float32)
    near = 1e-6 * float(abs(x).sum(1).max())
    return wrong_schedule(got, {"x": x}, x.sum(1, dtype=float), near, _sums(rows, columns))


@ex.judged(_judge_06_5, edges=[(4, 262144)], cases=1)
def check_ex_06_5(rng: ex.Rng) -> ex.Case:
    """Check a fold on many cores: `fn(rows, columns)` schedules y[i] = sum over k of x[i, k]."""
    rows, columns = ((2, 524288), (8, 131072))[rng.integers(2)]
    return {"rows": rows, "columns": columns}
