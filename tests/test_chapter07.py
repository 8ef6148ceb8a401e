"""The figures of chapter 7 say what the data say; its checks are two-sided and ask programs."""

from typing import Any

import numpy as np
import pytest

from ascend_lab.lab.checks.chapter07_08 import ORDERS
from ascend_lab.lab.figures import fig_tile_fit
from ascend_lab.lab.kernels.product_nests import AXES, in_tiles, product_nest
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import execute
from ascend_lab.operators.kernels import (
    GemmSchedule,
    GemmShape,
    tile_bytes,
)

CHIP = load_chip("Ascend910A")


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
    trips = {"m": 2, "k": 3, "n": 4}
    rng = np.random.default_rng(3)
    full = {
        x: rng.integers(-4, 5, (16 * trips[p], 16 * trips[q])) for x, ((p, q), *_) in AXES.items()
    }

    kinds = {"fp16": np.float16, "fp32": np.float32}
    inputs = {x: in_tiles(full[x], x).astype(kinds[AXES[x][2]]) for x in AXES}
    got = execute(product_nest(CHIP, order, trips, tile=1), inputs, CHIP)["c"]
    assert np.array_equal(got, in_tiles(full["c"] + full["a"] @ full["b"], "c"))
