"""Batches of tilings equal the reference simulator to the cycle."""

import itertools

import numpy as np
import pytest

from ascend_lab.errors import AscendLabError, CapacityError, InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels import GemmSchedule, GemmShape, gemm_launch
from ascend_lab.operators.kernels.gemm_schedule import check_schedule
from ascend_lab.operators.kernels.timed_schedules import time_tilings

CASES = [
    ("Toy", 256, "fp16"),
    ("Ascend310", 768, "int8"),
    ("Ascend910A", 1024, "fp16"),
    ("Ascend910B2", 768, "fp16"),
    ("Ascend310", 4096, "fp16"),
]


def legal_tilings(shape: GemmShape, chip_name: str) -> list[GemmSchedule]:
    chip = load_chip(chip_name)
    cores = chip.core_count
    found = []
    for m, n, k, step, rows in itertools.product(
        (16, 64, 128), (16, 32, 128), (32, 64), (1, 4), (1, 2, 4)
    ):
        schedule = GemmSchedule(m, k, n, step, rows, max(cores // rows, 1))
        try:
            check_schedule(shape, schedule, chip)
            time_tilings(shape, chip, [schedule])
        except AscendLabError:
            continue
        found.append(schedule)
    return found


@pytest.mark.parametrize(("chip_name", "size", "dtype"), CASES)
def test_batch_equals_reference(chip_name: str, size: int, dtype: str) -> None:
    chip, shape = load_chip(chip_name), GemmShape(size, size, size, dtype)
    tilings = legal_tilings(shape, chip_name)
    assert len(tilings) >= 8
    cycles = time_tilings(shape, chip, tilings)
    engine = "reference" if size <= 1024 else "fast"
    picks = np.random.default_rng(1).choice(len(tilings), min(12, len(tilings)), replace=False)
    for i in picks:
        alone = simulate(gemm_launch(shape, chip, tilings[i]), chip, engine=engine)
        assert alone.cycles == cycles[i], tilings[i]


def test_batch_is_slowed_by_memory_like_a_single_simulation() -> None:
    chip, shape = load_chip("Ascend310"), GemmShape(4096, 64, 4096)
    tilings = [GemmSchedule(m, 64, 128, 1, 1, 2) for m in (16, 32, 64, 128)]
    alone = [simulate(gemm_launch(shape, chip, t), chip) for t in tilings]
    assert any(t.memory_slowdown > 1 for t in alone)
    assert list(time_tilings(shape, chip, tilings)) == [t.cycles for t in alone]


def test_a_tiling_that_leaves_a_tail_is_refused() -> None:
    chip = load_chip("Ascend910B2")
    with pytest.raises(InputError, match="evenly"):
        time_tilings(GemmShape(100, 64, 64), chip, [GemmSchedule(64, 64, 64, 1, 1, 1)])


def test_a_tiling_that_does_not_fit_is_refused() -> None:
    chip = load_chip("Ascend910B2")
    with pytest.raises(CapacityError, match="L0"):
        time_tilings(GemmShape(1024, 1024, 1024), chip, [GemmSchedule(512, 64, 256, 1, 1, 1)])
