"""Folds across cores, the figures and checks of chapter 11, and what its prose claims."""

import numpy as np
import pytest

from ascend_lab.errors import ScheduleError
from ascend_lab.lab.checks.chapter11_12 import (
    FP16_UNIT,
    additions,
    narrow_sum,
    worth_using,
)
from ascend_lab.lab.figures.many_cores import balance, cuttable, row_sums, unit_shares
from ascend_lab.lab.kernels.cross_core_folds import (
    atomic,
    chain,
    kept,
    tree,
    two_pass,
    vector_cores,
)
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Kernel, sanitize
from ascend_lab.machine.sim import execute, simulate_kernel
from ascend_lab.operators import dsl as te

TOY, A910, B910 = (load_chip(name) for name in ("Toy", "Ascend910A", "Ascend910B2"))
WAYS = {"kept": kept, "two_pass": two_pass, "tree": tree, "atomic": atomic, "chain": chain}
FOLDS = {
    "sum": (te.reduce_sum, np.sum),
    "max": (te.reduce_max, np.max),
    "min": (te.reduce_min, np.min),
}


def lowered(made):
    return made if isinstance(made, Kernel) else te.lower(made)


def timed(made, chip=A910):
    return simulate_kernel(lowered(made), chip)


def folded(shape, axis, fold="sum", wide=False):
    x = te.placeholder(shape, name="x")
    x = te.cast_to(x, "fp32") if wide else x
    return te.renamed(FOLDS[fold][0](x, axis), "y")


# -- the library -----------------------------------------------------------------------------------
@pytest.mark.parametrize("chip", [TOY, A910, B910], ids=lambda c: c.name)
@pytest.mark.parametrize(
    ("way", "shape", "axis", "fold", "wide"),
    [
        (way, *case)
        for case in (
            ((16, 768), 1, "sum", False),
            ((8, 1536), 1, "sum", True),
            ((768, 48), 0, "sum", True),
            ((2, 96, 32), 1, "sum", True),
            ((16, 1536), 1, "max", False),
            ((768, 48), 0, "min", False),
        )
        for way in WAYS
        if case[2] == "sum" or way in ("kept", "two_pass", "tree")  # memory adds, no more
    ],
)
def test_every_way_gives_the_values_and_no_findings(chip, way, shape, axis, fold, wide):
    made = WAYS[way](folded(shape, axis, fold, wide), chip)
    x = np.random.default_rng(1).integers(-4, 5, shape).astype(np.float16)
    kernel = lowered(made)
    got = execute(kernel, {"x": x}, chip, seed=3)["y"]
    want = FOLDS[fold][1](x.astype(np.float64), axis=axis).ravel()
    assert (got == want).all()
    assert sanitize(kernel, chip) == []
    time = simulate_kernel(kernel, chip)
    assert time.memory_bytes / chip.device_memory.rate_bytes_per_s <= time.cycles / chip.clock_hz
    if way != "kept":
        assert time.phases[0 if way != "atomic" else 1].core_count == vector_cores(chip)


@pytest.mark.parametrize("parts", [2, 3, 4, 12, 32])
def test_bytes_and_phases_follow_the_formulas(parts):
    rows = 8
    columns = 12288
    big = 2 * rows * columns
    small = 4 * rows
    y = folded((rows, columns), 1, wide=True)
    rounds = 0
    left = parts
    written = parts
    while left > 2 and left % 2 == 0:
        left = left // 2
        rounds = rounds + 1
        written += left
    if parts == 32:
        assert written == 2 * parts - 2
    expected = {
        "kept": (0, 1),
        "two_pass": (2 * parts * small, 2),
        "tree": (2 * written * small, 2 + rounds),
        "atomic": (parts * small, 2),
        "chain": (3 * parts * small, 2 + parts),
    }
    for name, (more, phases) in expected.items():
        time = timed(WAYS[name](y, A910, parts))
        moved = sum(time.path_bytes.values())
        assert (moved - big - small, len(time.phases)) == (more, phases), name


def test_what_cannot_be_cut_says_why():
    y = folded((8, 1000), 1)
    for cores in (0, 33):
        with pytest.raises(ScheduleError, match=f"1 to 32 vector cores on Ascend910A; got {cores}"):
            kept(y, A910, cores)
    for way in (two_pass, tree, atomic, chain):
        with pytest.raises(ScheduleError, match="a number of parts that divides 1000; got 32"):
            way(y, A910)
    for way in (atomic, chain):
        with pytest.raises(ScheduleError, match="a sum, which memory can add; got max"):
            way(folded((8, 1024), 1, "max"), A910)
        with pytest.raises(ScheduleError, match=r"blocks \(8 elements\) .* got 3 elem"):
            way(folded((3, 1024), 1), A910)
    x = te.placeholder((8, 1024), name="x")
    total = te.broadcast(te.reduce_sum(x, 1, keepdims=True), x.shape)
    with pytest.raises(ScheduleError, match="2 folds"):
        two_pass(te.reduce_max(te.vsub(x, total), 1), A910)
    with pytest.raises(ScheduleError, match="0 folds"):
        kept(te.vrelu(x), A910)
    s = te.split(te.create_schedule(folded((8, 1024), 1, wide=True), A910), "y", "rj", 32)
    with pytest.raises(ScheduleError, match="folded"):
        te.bind(s, "y", "rj_o")


# -- figures ---------------------------------------------------------------------------------------
def test_shares_and_teeth_by_counting():
    for units in (1, 7, 63, 64):
        for cores in (1, 5, 31, 32, 48):
            dealt = unit_shares(units, cores)
            assert sum(dealt) == units
            assert len(dealt) == cores
            assert balance(units, cores) == pytest.approx(units / (cores * max(dealt)))
    assert cuttable(1024, 32) == [1, 2, 4, 8, 16, 32]
    assert cuttable(96, 32) == [1, 2, 3, 6]


# -- what the chapter says -------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["chain", "tree"])
def test_fp16_sums_keep_the_bound_and_need_it(order):
    rng = np.random.default_rng(5)
    worst = 0.0
    for size in (1, 2, 3, 17, 256, 1000):
        x = rng.random(size).astype(np.float16)
        steps = additions(size, order)
        bound = steps * FP16_UNIT / (1 - steps * FP16_UNIT) * float(x.astype(np.float64).sum())
        error = abs(float(narrow_sum(x, order)) - float(x.astype(np.float64).sum()))
        assert error <= bound
        worst = max(worst, error / bound if bound else 0.0)
    assert worst > 0.01


def test_thirty_one_cores_are_as_fast_as_twenty_one():
    cycles = {n: timed(kept(row_sums(1000, 1024), A910, n)).cycles for n in (20, 21, 22, 31, 32)}
    assert cycles[21] == cycles[22] == cycles[31] < cycles[20]
    assert cycles[32] < 0.85 * cycles[31]
    assert 21 in worth_using(63, 32)
    assert not set(range(22, 32)) & set(worth_using(63, 32))
