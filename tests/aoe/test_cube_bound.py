"""No bound exceeds what the simulator says, and near the best tilings they are close to it."""

import numpy as np
import pytest
from cube_cases import LAYERS, ON_CHIPS, Case, cases, epilogue_for, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.cube.job import CubeMeasure
from ascend_lab.aoe.cube.work import image_tiles
from ascend_lab.chip import load_chip
from ascend_lab.kernels import ConvShape, GemmShape
from ascend_lab.kernels.conv_windows import tiles_per_image, window_of


@settings(max_examples=25, deadline=None)
@given(cases(), st.integers(0, 100))
def test_bounds_stay_below_the_simulator(case: Case, seed: int) -> None:
    measure = case.measure
    space = measure.space()
    bounds = Bounds(measure, space.genes)
    best = np.argsort(bounds.closed)[:3]
    rows = np.union1d(rows_of(space.size, 3, seed), best)
    walked = bounds.walked(rows)
    for row, low in zip(rows.tolist(), walked.tolist(), strict=True):
        point = space.point(row)
        cycles = measure(point)
        assert measure.bound(point) == bounds.closed[row] <= low <= cycles, point


@pytest.mark.parametrize("name", ON_CHIPS)
@pytest.mark.parametrize("shape", LAYERS, ids=str)
@pytest.mark.parametrize("kind", ["", "bias"])
def test_bounds_are_close_where_it_counts(
    shape: GemmShape | ConvShape, name: str, kind: str
) -> None:
    chip = load_chip(name)
    measure = CubeMeasure(shape, chip, epilogue_for(kind, chip, shape.dtype))
    space = measure.space()
    bounds = Bounds(measure, space.genes)
    near = np.argsort(bounds.closed)[:200]
    walked = bounds.walked(near)
    first = np.argsort(walked)[:6]
    cycles = np.array([measure(space.point(int(row))) for row in near[first]])
    assert (walked[first] <= cycles).all()
    launch = bounds.launch_cycles
    ratios = (walked[first] - launch) / (cycles - launch)
    uneven = isinstance(shape, ConvShape) and shape.groups > 1
    assert np.median(ratios) >= (0.75 if uneven else 0.95)


def test_a_walk_cut_short_is_still_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = CubeMeasure(LAYERS[0], load_chip("Ascend310"))
    space = measure.space()
    rows = rows_of(space.size, 12)
    whole = Bounds(measure, space.genes).walked(rows)
    monkeypatch.setattr("ascend_lab.aoe.cube.bound.TURNS", 40)
    short = Bounds(measure, space.genes).walked(rows)
    assert (short <= whole).all()
    assert (short < whole).any()


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("shape", [s for s in LAYERS if isinstance(s, ConvShape)], ids=str)
def test_windows_on_arrays_are_those_of_the_kernel(shape: ConvShape, strip: bool) -> None:
    oh, ow = shape.out_hw
    for m in (1, 2, 5):
        fractals, pixels, loaded, _ = image_tiles(shape, m, strip=strip)
        each = -(-ow // (16 * m))
        for t in range(tiles_per_image(shape, m, strip=strip)):
            at = t // each * ow + t % each * 16 * m if strip else t * 16 * m
            count = min(16 * m, (ow - at % ow) if strip else oh * ow - at)
            window = window_of(shape, at, count, strip=strip)
            assert (fractals[t], pixels[t]) == (window.fractals, window.pixels)
            assert loaded[t] == window.rows.count * window.columns.count


def test_warm_operands_lower_the_bound() -> None:
    shape, chip = GemmShape(128, 768, 768, "fp16", "fp16"), load_chip("Ascend310")
    cold, warm = CubeMeasure(shape, chip), CubeMeasure(shape, chip, None, frozenset({"b"}))
    genes = cold.space().genes
    before, after = Bounds(cold, genes).closed, Bounds(warm, genes).closed
    assert (after <= before).all()
    assert (after < before).any()
