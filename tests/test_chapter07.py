"""The figures of chapter 7 say what the data say; its checks are two-sided and ask programs."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from ascend_lab.chip import load_chip
from ascend_lab.errors import PathError
from ascend_lab.isa import c0_of
from ascend_lab.kernels import GemmSchedule, GemmShape, default_schedule, gemm_launch, tile_bytes
from ascend_lab.lab.checks import check_ex_07_1, check_ex_07_3, check_ex_07_5
from ascend_lab.lab.checks.chapter07 import AXES, ORDERS, nest
from ascend_lab.lab.figures.matmul import fig_tile_fit
from ascend_lab.sim import execute, simulate

CHIP = load_chip("Ascend910A")
DEEP = GemmShape(64, 65536, 64)

# --- figures --------------------------------------------------------------------------------------


def reds(ax: Any) -> list[int]:
    """Return the rows of the bars that are hatched as too much."""
    return [round(p.get_y() + p.get_height() / 2) for p in ax.patches if p.get_hatch() == "xxx"]


@pytest.mark.parametrize("chip_name", ["Ascend910A", "Ascend910B2", "Toy"])
def test_what_overflows_is_red_and_named(chip_name: str) -> None:
    chip = load_chip(chip_name)
    schedule = GemmSchedule(512, 16, 256, 1, 1, 1)
    needs = tile_bytes(GemmShape(64, 64, 64), schedule)
    over = [row for row, (b, size) in enumerate(needs.items()) if size > chip.buffers[b]]
    fig = fig_tile_fit(512, 256, 16, 1, chip_name)
    left, right = fig.axes
    assert over
    assert reds(left) == over
    assert "does not fit" in right.texts[0].get_text()
    for row in over:
        assert list(needs)[row] in right.texts[0].get_text()


# --- the nest -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_computes_the_product(order: str) -> None:
    trips, rng = {"m": 2, "k": 3, "n": 4}, np.random.default_rng(3)
    full = {
        x: rng.integers(-4, 5, (16 * trips[p], 16 * trips[q])) for x, ((p, q), *_) in AXES.items()
    }

    def tiled(x: str, values: Any) -> Any:
        (p, q), *_ = AXES[x]
        fractals = values.reshape(trips[p], 16, trips[q], 16).swapaxes(1, 2)
        return (fractals.swapaxes(2, 3) if x == "b" else fractals).ravel()

    kinds = {"fp16": np.float16, "fp32": np.float32}
    inputs = {x: tiled(x, full[x]).astype(kinds[AXES[x][2]]) for x in AXES}
    got = execute(nest(CHIP, order, trips, tile=1), inputs, CHIP)["c"]
    assert np.array_equal(got, tiled("c", full["c"] + full["a"] @ full["b"]))


def test_the_split_chip_cannot_bring_sums_back() -> None:
    with pytest.raises(PathError):
        nest(load_chip("Ascend910B2"), "mkn", {"m": 1, "k": 1, "n": 1}, tile=1)


# --- exercise 1 -----------------------------------------------------------------------------------


def block(macs: int, in_bytes: int, sum_bytes: int) -> tuple[int, int, int]:
    powers = [1 << i for i in range(macs.bit_length())]
    boxes = [(m, macs // (m * n), n) for m, n in product(powers, powers) if m * n <= macs]
    return min(boxes, key=lambda b: in_bytes * b[1] * (b[0] + b[2]) + 2 * sum_bytes * b[0] * b[2])


def test_the_best_block_passes_and_others_do_not() -> None:
    assert all(check_ex_07_1(block, seed=seed) for seed in (7, 1, 2))
    cube = check_ex_07_1(lambda macs, *_: (16, 16, 16))
    assert not cube
    assert "3072 bytes a cycle; expected one that moves 2560" in cube.message


# --- exercise 3 -----------------------------------------------------------------------------------


def best_tile(chip_name: str, dtype: str, slots: int) -> tuple[int, int, int]:
    chip, c0, size = load_chip(chip_name), c0_of(dtype), 1 if dtype == "int8" else 2
    a, b = (chip.path("L1", space).rate_bytes_per_cycle for space in ("L0A", "L0B"))
    room_a, room_b = (chip.buffers[space] // (2 * c0 * size) for space in ("L0A", "L0B"))
    sides = product(range(16, room_a + 1, 16), range(16, room_b + 1, 16))
    legal = [(m, n) for m, n in sides if 4 * slots * m * n <= chip.buffers["L0C"]]
    m, n = min(legal, key=lambda t: 1 / (a * t[1]) + 1 / (b * t[0]))
    return m, min(room_a // m, room_b // n) * c0, n


def test_the_best_tile_passes_and_says_what_is_wrong_with_others() -> None:
    assert all(check_ex_07_3(best_tile, seed=seed) for seed in (7, 1))
    assert best_tile("Ascend910A", "fp16", 2) == (256, 64, 128)
    for wrong, word in (
        ((256, 32, 256), "MTE1|depth"),
        ((368, 16, 176), "depth of 32"),
        ((512, 16, 512), "L0C holds 262144"),
        ((100, 16, 100), "multiples of 16"),
        ((16, 16, 16), "keeps MTE1 busy"),
        (None, "expected"),
    ):
        told = check_ex_07_3(lambda *_, wrong=wrong: wrong)
        assert not told
        assert any(part in told.message for part in word.split("|")), told.message


# --- exercise 5 -----------------------------------------------------------------------------------


def test_a_schedule_must_come_near_the_best() -> None:
    start = check_ex_07_5(lambda m, k, n: default_schedule(GemmShape(m, k, n), CHIP))
    assert not start
    assert "expected at most" in start.message
    refused = check_ex_07_5(lambda *_: GemmSchedule(16, 2048, 16, 1, 4, 4))
    assert not refused
    assert "cannot run" in refused.message


def test_what_the_chapter_says_about_its_deep_product_holds() -> None:
    """The text says that longer stages are faster, and that the rule's choice is not the best."""
    rule = default_schedule(DEEP, CHIP)
    steps = [
        simulate(gemm_launch(DEEP, CHIP, GemmSchedule(16, 128, 16, step, 4, 4)), CHIP).cycles
        for step in (1, 2, 4)
    ]
    assert steps == sorted(steps, reverse=True)
    chosen = simulate(gemm_launch(DEEP, CHIP, rule), CHIP).cycles
    best = simulate(gemm_launch(DEEP, CHIP, GemmSchedule(16, 1024, 16, 1, 4, 4)), CHIP).cycles
    assert best < chosen
