"""The cube's spaces, bounds and proofs."""

import math
import pickle
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cube_cases import (
    CHIPS,
    LAYERS,
    ON_CHIPS,
    TOGETHER,
    cases,
    conv_shapes,
    epilogue_for,
    gemm_shapes,
    rows_of,
)
from hypothesis import given, strategies as st

from ascend_lab.aoe.cube import CubeMeasure, cube_space, point_of, prove, schedule_of
from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.cube.conv_space import conv_row, conv_space
from ascend_lab.aoe.cube.space import (
    SLOT_GENES,
    even_sizes,
    gemm_row,
    gemm_space,
    side_options,
    word_of,
)
from ascend_lab.aoe.cube.work import image_tiles
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Affine
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels import (
    ConvShape,
    GemmSchedule,
    GemmShape,
    conv_launch,
    gemm_launch,
)
from ascend_lab.operators.kernels.conv_schedules import check_conv, conv_schedule
from ascend_lab.operators.kernels.conv_shape import stacked
from ascend_lab.operators.kernels.conv_windows import (
    area_of,
    dense_placement,
    tiles_per_image,
    window_of,
)
from ascend_lab.operators.kernels.default_schedules import default_schedule
from ascend_lab.operators.kernels.gemm_schedule import check_schedule


def legal(space, schedule):
    """Return what the kernels themselves say."""
    shape = space.shape
    chip = space.chip
    try:
        if isinstance(shape, ConvShape):
            check_conv(shape, schedule, chip)
        else:
            check_schedule(shape, schedule, chip)
    except AscendLabError:
        return False
    return True


def values_of(space, schedule):
    """Return the genes of a schedule, whether or not they are a point."""
    row_of = conv_row if isinstance(space.shape, ConvShape) else gemm_row
    row = row_of(space.shape, space.chip, schedule)
    return tuple(word_of(name, int(row[name][0])) for name in space.names)


@given(cases(), st.integers(0, 100))
def test_every_point_builds_and_comes_back(case, seed):
    measure = case.measure
    space = measure.space()
    for row in rows_of(space.size, 3, seed):
        point = space.point(int(row))
        schedule = schedule_of(measure.shape, point)
        assert legal(space, schedule)
        assert measure.launch(point).parts
        assert values_of(space, schedule) == point


@given(gemm_shapes(), st.sampled_from(CHIPS), st.data())
def test_a_product_of_legal_genes_is_a_point(shape, name, data):
    chip = load_chip(name)
    space = gemm_space(shape, chip)
    m1, k1, n1 = shape.fractals
    pick = lambda values: data.draw(st.sampled_from(list(values)))  # noqa: E731
    rows, m = pick(side_options(m1, 128, chip.core_count, 1.0).tolist())
    cols, n = pick(side_options(n1, 128, chip.core_count, 1.0).tolist())
    k = int(pick(even_sizes(k1).tolist()))
    order, keep, bypass = (pick(space.values[space.names.index(g)]) for g in space.names[4:7])
    slots = {f"{s}_slots": pick((1, 2)) for s in SLOT_GENES}
    step = int(pick(even_sizes(-(-k1 // k)).tolist()))
    c0 = 32 if shape.dtype == "int8" else 16
    tiling = GemmSchedule(16 * m, c0 * k, 16 * n, step, rows, cols, order, keep)
    tiling = replace(tiling, bypass=bypass, **slots)
    point = values_of(space, tiling)
    if not legal(space, tiling):
        assert not _has(space, point)
    elif order == "mn" or keep:  # order alone is left out where it changes nothing
        assert _has_more_slots(space, point)


@given(conv_shapes(), st.sampled_from(CHIPS), st.data())
def test_a_convolution_of_legal_genes_is_a_point(shape, name, data):
    space = conv_space(shape, load_chip(name))
    row = {n: data.draw(st.sampled_from(v)) for n, v in zip(space.names, space.values, strict=True)}
    tiling = schedule_of(shape, tuple(row.values()))
    point = values_of(space, tiling)
    same = all(p == row[n] for n, p in zip(space.names, point, strict=True))
    if same and row["rows"] * row["cols"] <= space.chip.core_count and legal(space, tiling):
        assert _has_more_slots(space, point)
    elif not legal(space, tiling):
        assert not _has(space, tuple(row.values()))


def _has(space, point):
    try:
        return space.row(point) >= 0
    except InputError:
        return False


def _has_more_slots(space, point):
    own = point[-4:]
    more = [
        s for s in product((1, 2), repeat=4) if all(a >= b for a, b in zip(s, own, strict=True))
    ]
    return any(_has(space, (*point[:-4], *slots)) for slots in more)


@pytest.mark.parametrize("name", ON_CHIPS)
@pytest.mark.parametrize("shape", [*LAYERS, *TOGETHER], ids=str)
def test_the_default_is_a_point(shape, name):
    chip = load_chip(name)
    measure = CubeMeasure(shape, chip, epilogue_for("bias", chip, shape.dtype))
    space = measure.space()
    rule = default_schedule
    if isinstance(shape, ConvShape):
        tiling = conv_schedule(shape, chip, measure.epilogue)
        launch = conv_launch(shape, chip, tiling, dense_placement(shape), measure.epilogue)
    else:
        tiling = rule(shape, chip, measure.epilogue)
        launch = gemm_launch(shape, chip, tiling, measure.epilogue)
    point = values_of(space, tiling)
    assert point_of(space, tiling) == space.point(space.row(point)) == point
    assert simulate(launch, chip).total_cycles == measure(point)


def test_no_two_points_are_one_kernel():
    shape = GemmShape(64, 96, 48)
    chip = load_chip("Ascend310")
    space = gemm_space(shape, chip)
    texts = [repr(CubeMeasure(shape, chip).launch(p)) for p in list(space.points())[::7]]
    assert len(set(texts)) == len(texts) > 100


def test_what_is_left_out_cannot_win():
    shape = GemmShape(80, 64, 48)
    chip = load_chip("Ascend310")
    space = gemm_space(shape, chip)
    measure = CubeMeasure(shape, chip)
    plain = [p for p in space.points() if p[5] == p[6] == ""]
    best = min(map(measure, plain))
    grids = ((1, 1), (1, 2), (2, 1))
    for m, n, k, (rows, cols), order in product(range(1, 6), (1, 2, 3), (1, 2, 3, 4), grids, "mn"):
        tiling = GemmSchedule(16 * m, 16 * k, 16 * n, 1 + (order == "m"), rows, cols)
        assert best <= simulate(gemm_launch(shape, chip, tiling), chip).total_cycles
    tiling = schedule_of(shape, plain[len(plain) // 2])
    for slots in product((1, 2), repeat=4):
        fewer = replace(tiling, **{f"{n}_slots": s for n, s in zip(SLOT_GENES, slots, strict=True)})
        cycles = simulate(gemm_launch(shape, chip, fewer), chip).total_cycles
        assert cycles >= simulate(gemm_launch(shape, chip, tiling), chip).total_cycles - 8


def test_a_problem_without_room_names_it():
    chip = load_chip("Ascend310")
    tiny = replace(chip, buffers={**chip.buffers, "L1": 512})
    with pytest.raises(AscendLabError, match="fit"):
        conv_space(LAYERS[3], tiny)  # type: ignore[arg-type]


@given(cases(), st.integers(0, 100))
def test_bounds_stay_below_the_simulator(case, seed):
    measure = case.measure
    space = measure.space()
    bounds = Bounds(measure, space.genes)
    best = np.argsort(bounds.closed_form)[:3]
    rows = np.union1d(rows_of(space.size, 3, seed), best)
    walked = bounds.walk(rows)
    for row, low in zip(rows.tolist(), walked.tolist(), strict=True):
        point = space.point(row)
        cycles = measure(point)
        assert measure.bound(point) == bounds.closed_form[row] <= low <= cycles, point


@pytest.mark.parametrize("name", ON_CHIPS)
@pytest.mark.parametrize("shape", LAYERS, ids=str)
@pytest.mark.parametrize("kind", ["", "bias"])
def test_bounds_are_close_where_it_counts(shape, name, kind):
    chip = load_chip(name)
    measure = CubeMeasure(shape, chip, epilogue_for(kind, chip, shape.dtype))
    space = measure.space()
    bounds = Bounds(measure, space.genes)
    near = np.argsort(bounds.closed_form)[:200]
    walked = bounds.walk(near)
    first = np.argsort(walked)[:6]
    cycles = np.array([measure(space.point(int(row))) for row in near[first]])
    assert (walked[first] <= cycles).all()
    launch = bounds.launch_cycles
    ratios = (walked[first] - launch) / (cycles - launch)
    uneven = isinstance(shape, ConvShape) and shape.groups > 1
    assert np.median(ratios) >= (0.75 if uneven else 0.95)


def test_a_walk_cut_short_is_still_a_bound(monkeypatch):
    measure = CubeMeasure(LAYERS[0], load_chip("Ascend310"))
    space = measure.space()
    rows = rows_of(space.size, 12)
    whole = Bounds(measure, space.genes).walk(rows)
    monkeypatch.setattr("ascend_lab.aoe.cube.bound.MAX_TURNS", 40)
    short = Bounds(measure, space.genes).walk(rows)
    assert (short <= whole).all()
    assert (short < whole).any()


@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize(
    "shape", [*(s for s in LAYERS if isinstance(s, ConvShape)), *map(stacked, TOGETHER)], ids=str
)
def test_windows_on_arrays_are_those_of_the_kernel(shape, strip):
    oh, ow = shape.out_hw
    for m in (1, 2, 5):
        fractals, pixels, loaded, runs, _ = image_tiles(shape, m, strip=strip)
        assert shape.mixed > 1 or (runs == 1).all()
        each = -(-ow // (16 * m))
        for t in range(tiles_per_image(shape, m, strip=strip)):
            at = t // each * ow + t % each * 16 * m if strip else t * 16 * m
            count = min(16 * m, (ow - at % ow) if strip else oh * ow - at)
            window = window_of(shape, at, count, strip=strip)
            assert (fractals[t], pixels[t]) == (window.fractals, window.pixels)
            assert loaded[t] == window.rows.count * window.columns.count
            pieces = area_of(shape, dense_placement(shape), Affine(), Affine(), (at, 1, window))
            assert shape.mixed == 1 or runs[t] == len(pieces.pieces)


SMALL = (GemmShape(70, 100, 90), ConvShape(1, 24, 12, 10, 40, 3, 3, 1, 1))


@pytest.mark.parametrize(
    ("shape", "name"), [(SMALL[0], "Ascend310"), (SMALL[1], "Ascend910B2")], ids=str
)
def test_the_proven_optimum_is_that_of_the_whole_table(shape, name):
    chip = load_chip(name)
    measure = CubeMeasure(shape, chip, epilogue_for("bias", chip, "fp16"))
    space = cube_space(shape, chip, measure.demand, 250, default=False)
    costs = np.array([measure(point) for point in space.points()])
    proof = prove(space, measure)
    assert proof.proven
    assert np.isfinite(costs).all()
    assert proof.cycles == costs.min() == proof.lower_bound == measure(proof.point)
    assert proof.trials < len(costs) / 4


@pytest.mark.parametrize("name", ON_CHIPS)
@pytest.mark.parametrize("shape", LAYERS[:-1], ids=str)
def test_real_layers_are_proven_with_few_trials(shape, name):
    measure = CubeMeasure(shape, load_chip(name))
    proof = prove(measure.space(), measure)
    assert proof.proven
    assert proof.gap == 0.0
    assert proof.trials <= 100


@pytest.mark.parametrize("shape", LAYERS[:2], ids=str)
def test_without_time_the_bound_holds_all_the_same(shape):
    measure = CubeMeasure(shape, load_chip("Ascend310"))
    space = measure.space()
    rushed = prove(space, measure, time_limit_s=0.0)
    proof = prove(space, measure)
    assert rushed.trials == 1
    assert rushed.lower_bound <= proof.cycles <= rushed.cycles
    assert math.isfinite(rushed.cycles)
    assert rushed.proven == (rushed.lower_bound == rushed.cycles)
    assert type(rushed.proven) is bool  # the bank keeps no other


def test_a_measure_travels_to_workers():
    measure = CubeMeasure(SMALL[0], load_chip("Ascend310"), None, frozenset({"a"}))
    point = next(measure.space().points())
    copy = pickle.loads(pickle.dumps(measure))
    assert copy == measure
    assert copy(point) == measure(point)
