"""The spaces of cube operators: legal tilings and only these, each kernel once, the default in."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from cube_cases import (
    CHIPS,
    LAYERS,
    ON_CHIPS,
    Case,
    cases,
    conv_shapes,
    epilogue_for,
    gemm_shapes,
    rows_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe.cube.conv_space import conv_row, conv_space
from ascend_lab.aoe.cube.job import CubeMeasure, cube_space, point_of, schedule_of
from ascend_lab.aoe.cube.space import SLOTS, CubeSpace, evens, gemm_row, gemm_space, sides, word_of
from ascend_lab.chip import load_chip
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.kernels import ConvShape, GemmSchedule, GemmShape, conv_launch, gemm_launch
from ascend_lab.kernels.default_schedules import check_conv, conv_schedule, default_schedule
from ascend_lab.kernels.gemm_schedule import check_schedule
from ascend_lab.sim import simulate


def legal(space: CubeSpace, schedule: GemmSchedule) -> bool:
    """Return what the kernels themselves say."""
    shape, chip = space.shape, space.chip
    try:
        if isinstance(shape, ConvShape):
            check_conv(shape, schedule, chip)
        else:
            check_schedule(shape, schedule, chip)
    except AscendLabError:
        return False
    return True


def values_of(space: CubeSpace, schedule: GemmSchedule) -> tuple[object, ...]:
    """Return the genes of a schedule, whether or not they are a point."""
    row_of = conv_row if isinstance(space.shape, ConvShape) else gemm_row
    row = row_of(space.shape, space.chip, schedule)
    return tuple(word_of(name, int(row[name][0])) for name in space.names)


@settings(max_examples=20, deadline=None)
@given(cases(), st.integers(0, 100))
def test_every_point_builds_and_comes_back(case: Case, seed: int) -> None:
    measure = case.measure
    space = measure.space()
    for row in rows_of(space.size, 3, seed):
        point = space.point(int(row))
        schedule = schedule_of(measure.shape, point)
        assert legal(space, schedule)
        assert measure.launch(point).parts
        assert values_of(space, schedule) == point


@settings(max_examples=25, deadline=None)
@given(gemm_shapes(), st.sampled_from(CHIPS), st.data())
def test_a_product_of_legal_genes_is_a_point(
    shape: GemmShape, name: str, data: st.DataObject
) -> None:
    chip = load_chip(name)
    space = gemm_space(shape, chip)
    m1, k1, n1 = shape.fractals
    pick = lambda values: data.draw(st.sampled_from(list(values)))  # noqa: E731
    rows, m = pick(sides(m1, 128, chip.core_count, 1.0).tolist())
    cols, n = pick(sides(n1, 128, chip.core_count, 1.0).tolist())
    k = int(pick(evens(k1).tolist()))
    order, keep, bypass = (pick(space.values[space.names.index(g)]) for g in space.names[4:7])
    slots = {f"{s}_slots": pick((1, 2)) for s in SLOTS}
    step = int(pick(evens(-(-k1 // k)).tolist()))
    c0 = 32 if shape.dtype == "int8" else 16
    tiling = GemmSchedule(16 * m, c0 * k, 16 * n, step, rows, cols, order, keep)
    tiling = replace(tiling, bypass=bypass, **slots)
    point = values_of(space, tiling)
    if not legal(space, tiling):
        assert not _has(space, point)
    elif order == "mn" or keep:  # order alone is left out where it changes nothing
        assert _has_more_slots(space, point)


@settings(max_examples=25, deadline=None)
@given(conv_shapes(), st.sampled_from(CHIPS), st.data())
def test_a_convolution_of_legal_genes_is_a_point(
    shape: ConvShape, name: str, data: st.DataObject
) -> None:
    space = conv_space(shape, load_chip(name))
    row = {n: data.draw(st.sampled_from(v)) for n, v in zip(space.names, space.values, strict=True)}
    tiling = schedule_of(shape, tuple(row.values()))
    point = values_of(space, tiling)
    same = all(p == row[n] for n, p in zip(space.names, point, strict=True))
    if same and row["rows"] * row["cols"] <= space.chip.core_count and legal(space, tiling):
        assert _has_more_slots(space, point)
    elif not legal(space, tiling):
        assert not _has(space, tuple(row.values()))


def _has(space: CubeSpace, point: tuple[object, ...]) -> bool:
    try:
        return space.row(point) >= 0
    except InputError:
        return False


def _has_more_slots(space: CubeSpace, point: tuple[object, ...]) -> bool:
    own = point[-4:]
    more = [
        s for s in product((1, 2), repeat=4) if all(a >= b for a, b in zip(s, own, strict=True))
    ]
    return any(_has(space, (*point[:-4], *slots)) for slots in more)


@pytest.mark.parametrize("name", ON_CHIPS)
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_the_default_is_a_point(shape: GemmShape | ConvShape, name: str) -> None:
    chip = load_chip(name)
    measure = CubeMeasure(shape, chip, epilogue_for("bias", chip, shape.dtype))
    space, rule = measure.space(), default_schedule
    if isinstance(shape, ConvShape):
        tiling = conv_schedule(shape, chip, measure.epilogue)
        launch = conv_launch(shape, chip, tiling, None, measure.epilogue)
    else:
        tiling = rule(shape, chip, measure.epilogue)
        launch = gemm_launch(shape, chip, tiling, measure.epilogue)
    point = values_of(space, tiling)
    assert point_of(space, tiling) == space.point(space.row(point)) == point
    if isinstance(shape, GemmShape):
        assert simulate(launch, chip).total_cycles == measure(point)


def test_no_two_points_are_one_kernel() -> None:
    shape, chip = GemmShape(64, 96, 48), load_chip("Ascend310")
    space = gemm_space(shape, chip)
    texts = [repr(CubeMeasure(shape, chip).launch(p)) for p in list(space.points())[::7]]
    assert len(set(texts)) == len(texts) > 100


def test_other_numbers_for_one_kernel_are_one_point() -> None:
    space = gemm_space(GemmShape(64, 96, 48), load_chip("Ascend310"))
    one = values_of(space, GemmSchedule(64, 96, 48, 1, 1, 1))
    assert one == values_of(space, GemmSchedule(128, 128, 64, 4, 2, 1))
    assert one == values_of(space, GemmSchedule(64, 96, 48, 1, 1, 2, order="nm"))


def test_what_is_left_out_cannot_win() -> None:
    shape, chip = GemmShape(80, 64, 48), load_chip("Ascend310")
    space, measure = gemm_space(shape, chip), CubeMeasure(shape, chip)
    plain = [p for p in space.points() if p[5] == p[6] == ""]
    best = min(map(measure, plain))
    grids = ((1, 1), (1, 2), (2, 1))
    for m, n, k, (rows, cols), order in product(range(1, 6), (1, 2, 3), (1, 2, 3, 4), grids, "mn"):
        tiling = GemmSchedule(16 * m, 16 * k, 16 * n, 1 + (order == "m"), rows, cols)
        assert best <= simulate(gemm_launch(shape, chip, tiling), chip).total_cycles
    tiling = schedule_of(shape, plain[len(plain) // 2])
    for slots in product((1, 2), repeat=4):
        fewer = replace(tiling, **{f"{n}_slots": s for n, s in zip(SLOTS, slots, strict=True)})
        cycles = simulate(gemm_launch(shape, chip, fewer), chip).total_cycles
        assert cycles >= simulate(gemm_launch(shape, chip, tiling), chip).total_cycles - 8


def test_spaces_stay_small() -> None:
    chip = load_chip("Ascend910A")
    for shape in (GemmShape(4096, 4096, 4096), LAYERS[0], LAYERS[4]):
        for most in (3000, 100_000):
            space = cube_space(shape, chip, None, most)
            assert 1 <= space.size <= most
        coarse = cube_space(shape, chip, None, 3000, default=False)
        assert coarse.size <= 3000
        assert np.all(np.diff(coarse.genes["rows"]) >= 0)


def test_a_problem_without_room_names_it() -> None:
    chip = load_chip("Ascend310")
    tiny = replace(chip, buffers={**chip.buffers, "L1": 512})
    with pytest.raises(AscendLabError, match="fit"):
        conv_space(LAYERS[3], tiny)  # type: ignore[arg-type]
