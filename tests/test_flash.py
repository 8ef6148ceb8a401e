"""FlashAttention: values, no races, no scores in GM, bytes by the law, time."""

from dataclasses import replace

import numpy as np
import pytest
from cube_checks import on, run_checked
from hypothesis import example, given, strategies as st
from message_lists import assert_messages

from ascend_lab.errors import InputError
from ascend_lab.fused.flash_attention import flash_kernel
from ascend_lab.lab.figures.flash import flash_traffic
from ascend_lab.lab.validation import published_flash
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import FRACTAL, as_kernel, sanitize
from ascend_lab.machine.layout import address_map, pack, unpack
from ascend_lab.machine.sim import DeviceMemory, execute, simulate, simulate_kernel
from ascend_lab.operators import ops
from ascend_lab.operators.kernels.flash import flash_launch
from ascend_lab.operators.kernels.flash_shape import (
    FlashShape,
    FlashTiling,
    FlashView,
    default_tiling,
    mask_shares,
    tile_bytes,
    traffic_bytes,
)
from ascend_lab.operators.kernels.flash_split import (
    SplitTiling,
    cube_parts,
    flash_pipeline_launch,
    split_tiling,
)
from ascend_lab.operators.ops import verify
from ascend_lab.operators.ops.expressions import prepare

FLASH = ops.get("flash_attention")
COUPLED = ("Toy", "Ascend310", "Ascend310P3", "Ascend910A")
CHIPS = (*COUPLED, "Ascend910B2")
SQUARE = FlashShape(1, 256, 256, 32, 32, 32**-0.5)
# (q, k, v[, mask]): whole blocks, several blocks, ragged everything, masks of every kind
SHAPES = (
    ((16, 16), (16, 16), (16, 16)),
    ((128, 64), (256, 64), (256, 64)),
    ((1, 3), (1, 3), (1, 5)),
    ((50, 20), (333, 20), (333, 41)),
    ((2, 3, 40, 16), (2, 3, 100, 16), (2, 3, 100, 16)),
    ((3, 33, 16), (1, 100, 16), (1, 100, 16), (33, 100)),
    ((2, 2, 40, 16), (2, 2, 72, 16), (2, 2, 72, 16), (2, 1, 1, 72)),
    ((2, 2, 40, 16), (1, 1, 72, 16), (1, 2, 72, 16), (2, 40, 72)),
    ((2, 17, 16), (2, 30, 16), (2, 30, 16), (17, 1)),
)


def case(*shapes, seed=0, spread=2.0):
    """Normal q, k, v and a mask that drops about a third of the scores."""
    rng = np.random.default_rng(seed)
    tensors = [rng.normal(0, spread, s).astype(np.float16) for s in shapes[:3]]
    masks = [np.where(rng.random(s) < 0.3, -10000, 0).astype(np.float16) for s in shapes[3:]]
    return tensors + masks


def check(arrays, chip, **attrs):
    chip = load_chip(chip)
    ready = prepare(FLASH, *arrays, chip=chip, **attrs)
    got = ready.fetch(run_checked(ready.kernel, ready.tensors, chip, filled=ready.tensors))[0]
    verify.check_within(FLASH, got, ops.get("attention").reference(*arrays, **attrs))


# -- values ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("chip", on(*CHIPS))
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values_are_those_of_attention(shapes, chip):
    check(case(*shapes), chip)


@pytest.mark.parametrize("chip", ["Toy", "Ascend910B2"])
def test_large_scores_do_not_overflow(chip):
    arrays = case((32, 64), (96, 64), (96, 64), spread=40.0)
    scores = arrays[0].astype(float) @ arrays[1].T.astype(float) / 8
    assert scores.max() > 1000  # e^1000 exceeds every format
    check(arrays, chip)


@pytest.mark.parametrize("chip", ["Toy", "Ascend910B2"])
def test_minus_infinity_drops_a_whole_block_of_keys(chip):
    q, k, v = case((32, 16), (200, 16), (200, 16))
    mask = np.zeros((32, 200), np.float16)
    mask[:, :130] = -np.inf  # the first blocks of every chip hold nothing else
    check([q, k, v, mask], chip)


@pytest.mark.parametrize("chip", on(*COUPLED))
@pytest.mark.parametrize(("scale", "roundings"), [(0.125, 1), (0.1, 3), (1.3, 3)])
def test_a_weight_is_off_by_what_is_rounded_before_and_behind_its_exponential(
    scale, roundings, chip
):
    arrays = case((48, 16), (200, 16), (200, 16), spread=3.0)
    arrays += [(-0.37 * np.arange(200.0)[None]).astype(np.float16)]  # as positions are told
    arrays[3][0, 50:90] = -np.inf
    q, k, v, mask = (x.astype(np.float64) for x in arrays)
    x = q @ k.T * scale + mask
    x -= x.max(axis=1, keepdims=True)
    weights = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    y = weights @ v
    tail = np.where(np.isfinite(x), -x, 0.0)
    far = np.abs(v[None] - y[:, None])
    bound = np.einsum("ij,ije->ie", weights * (1 + roundings * tail) * 2**-11, far)
    got = ops.run(FLASH, *arrays, chip=load_chip(chip), scale=scale)
    assert (np.abs(got - y) <= 1.05 * bound + 2**-11 * np.abs(y) + 2**-20).all()


def test_shares_of_a_mask_are_of_one_sign_and_whole():
    for scale in (2.0**-11, 0.1, 0.125, 64**-0.5, 3.0, 16.0):
        shares = [float(np.float16(share)) for share in mask_shares(scale)]
        assert min(shares) > 0
        assert sum(shares) * scale == pytest.approx(1, abs=2**-18)


def test_odd_scales_are_left_to_the_operator():
    arrays = case((20, 16), (20, 16), (20, 16))
    for scale in (-0.7, 0.0, 2.0**-12, 17.0):
        with pytest.raises(InputError, match="a scale of"):
            flash_launch(replace(SQUARE, scale=scale), load_chip("Ascend310"))
        check(arrays, "Ascend310", scale=scale)


# -- heads that are columns of one matrix ---------------------------------------------------------
def with_heads(sizes, names, mask=""):
    """Return attention on tensors side by side, and with some in the columns of one matrix."""
    b, h, n, t, d, e = sizes
    views = {
        name: FlashView(size * FRACTAL, width * b * size, b * size * FRACTAL)
        for name, size, width in (("q", n, d), ("k", t, d), ("v", t, e), ("y", n, e))
        if name in names
    }
    shape = FlashShape(b * h, n, t, d, e, d**-0.5, mask)
    return shape, replace(shape, heads=h, views=tuple(views.items()))


def fractals(array, joined):
    """Return (entries, heads, rows, columns) as it lies in memory."""
    b, h, n, d = array.shape
    array = array.transpose(0, 2, 1, 3).reshape(b * n, h * d) if joined else array
    return pack(address_map("FRACTAL_NZ", array.shape), array).reshape(-1)


@pytest.mark.parametrize("chip", on(*CHIPS))
@pytest.mark.parametrize(
    ("sizes", "names", "mask"),
    [
        ((3, 4, 32, 48, 16, 32), "qkvy", ""),
        ((2, 3, 160, 32, 32, 32), "qky", "rows"),
        ((1, 5, 32, 320, 16, 48), "vy", "full"),
        ((7, 1, 48, 48, 32, 16), "qv", ""),
    ],
    ids=str,
)
def test_heads_are_read_and_written_as_columns_of_a_matrix(sizes, names, mask, chip):
    (b, h, n, t, d, e) = sizes
    chip = load_chip(chip)
    near, far = (flash_kernel(shape, chip) for shape in with_heads(sizes, names, mask))
    masks = {"": [], "rows": [(b, h, 1, t)], "full": [(b, h, n, t)]}[mask]
    q, k, v, *masked = case((b, h, n, d), (b, h, t, d), (b, h, t, e), *masks)
    own = [("mask", fractals(m, False) if mask == "full" else m.reshape(-1)) for m in masked]
    given, moved = (
        dict([*own, *((x, fractals(a, x in some)) for x, a in zip("qkv", (q, k, v), strict=True))])
        for some in ("", names)
    )
    wanted = unpack(address_map("FRACTAL_NZ", (b, h, n, e)), execute(near, given, chip)["y"])
    assert np.array_equal(execute(far, moved, chip)["y"], fractals(wanted, "y" in names))
    assert sanitize(far, chip, filled=moved) == []
    times = [simulate_kernel(kernel, chip).cycles for kernel in (near, far)]
    assert times[1] == simulate_kernel(far, chip, engine="reference").cycles
    assert times[1] <= 1.05 * times[0]  # other grids, whose cores share memory at the start


# -- programs -------------------------------------------------------------------------------------
@pytest.mark.parametrize("mask", ["", "rows", "full"])
@pytest.mark.parametrize("chip", on(*COUPLED))
def test_the_planner_counts_the_bytes_that_are_allocated(chip, mask):
    chip = load_chip(chip)
    shape = FlashShape(1, 256, 256, 32, 48, 1.0, mask)
    tiling = default_tiling(shape, chip)
    program = flash_launch(shape, chip, tiling).parts[0].program
    used = dict.fromkeys(tile_bytes(shape, tiling), 0)
    for buffer in program.buffers:
        if buffer.space != "GM":
            used[buffer.space] += buffer.slots * buffer.slot_bytes
    assert used == tile_bytes(shape, tiling)


# -- bytes and time -------------------------------------------------------------------------------
@given(
    st.tuples(*(st.integers(1, n) for n in (3, 300, 300, 64, 64))),
    st.sampled_from(("", "rows", "full")),
    st.sampled_from(((16, 16), (32, 64), (64, 32))),
)
def test_bytes_of_the_program_are_those_of_the_formula(sizes, mask, tile):
    shape = FlashShape(*sizes, 1.0, mask)
    tiling = FlashTiling(*tile)
    got = flash_traffic(shape, load_chip("Ascend910A"), tiling)
    assert got.gm_bytes == traffic_bytes(shape, tiling)


def test_the_vector_unit_never_waits_for_the_cube():
    line = simulate(
        flash_launch(FlashShape(32, 4096, 4096, 64, 64, 0.125), load_chip("Ascend910A")),
        load_chip("Ascend910A"),
    )
    assert line.limit == "V"
    assert line.busy_cycles["V"] > 0.97 * line.cycles


# -- separate cores -------------------------------------------------------------------------------
FAR = load_chip("Ascend910B2")
HEAD = FlashShape(1, 2048, 2048, 128, 128, 128**-0.5)


@given(
    st.tuples(st.integers(1, 5), st.integers(2, 130), *(st.integers(1, n) for n in (200, 40, 40))),
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 6), st.integers(1, 2)),
    st.sampled_from(("", "rows", "full")),
    st.sampled_from(("Ascend310", "Ascend910A", "Ascend910B2")),
)
@example((2, 40, 58, 16, 32), (1, 1, 0, 2), "full", "Ascend910B2")
@example((2, 120, 490, 16, 32), (6, 10, 4, 2), "full", "Ascend910B2")
@example((2, 152, 202, 16, 32), (8, 4, 7, 1), "rows", "Ascend910B2")
@example((1, 832, 16, 16, 16), (1, 1, 1, 2), "", "Ascend910B2")  # cores with unlike rings
@example((1, 70, 150, 32, 32), (4, 2, 0, 2), "", "Ascend310")
def test_any_tiling_is_right(sizes, cut, mask, chip):
    """Tiles, blocks or matrices are ahead on cores of two kinds; the last of each is ragged."""
    b, n, t, d, e = sizes
    chip = load_chip(chip)
    masks = {"": [], "rows": [(t,)], "full": [(b, n, t)]}[mask]
    arrays = case((b, n, d), (b, t, d), (b, t, e), *masks)
    shape = FlashShape(b, n, t, d, e, d**-0.5, mask, ("mask",) if mask == "rows" else ())
    rows, keys, *ahead = 16 * cut[0], 16 * cut[1], *cut[2:]
    if chip.combined:
        launch = flash_launch(shape, chip, FlashTiling(rows, keys))
    else:
        launch = flash_pipeline_launch(shape, chip, SplitTiling(rows, keys, *ahead))
    ready = prepare(FLASH, *arrays, chip=chip)
    got = ready.fetch(run_checked(launch, ready.tensors, chip, filled=ready.tensors))[0]
    verify.check_within(FLASH, got, FLASH.reference(*arrays))


def warm(shape, tiling=None, engine="fast"):
    kernel = as_kernel(flash_pipeline_launch(shape, FAR, tiling))
    memory = DeviceMemory.holding(FAR, kernel.tensors, ("q", "k", "v"))
    return simulate_kernel(kernel, FAR, memory, engine=engine)


def test_scores_never_reach_device_memory():
    kernel = as_kernel(flash_pipeline_launch(HEAD, FAR))
    line = simulate_kernel(kernel, FAR, DeviceMemory.of(FAR))
    assert line.memory_bytes == 3 * 2 * 2048 * 128
    assert warm(HEAD).memory_bytes == 0


def test_the_fix_pipe_is_the_limit_and_cube_and_vector_cores_work_together():
    shape = replace(HEAD, rows=8192, keys=8192)
    busy = {p: cycles / warm(shape).cycles for p, cycles in warm(shape).busy_cycles.items()}
    assert busy["AIC.FIX"] > 0.95 and busy["AIV.V"] > 0.7


def test_published_times():
    """The rows, their conditions and the tiling are published; nothing is fitted to them."""
    assert [row.name for row in published_flash()] == ["flash 1024", "flash 4096", "flash 16384"]
    for row in published_flash():
        assert abs(row.time_error) < 0.20, row


# -- refusals -------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [40, 128])
def test_latent_heads_come_in_parts(rows):
    """576 numbers a key: 36 fractals, in fifths to L0, and in eighths to L1 beside 128 rows."""
    b2 = load_chip("Ascend910B2")
    shape = FlashShape(1, rows, 272, 576, 512, 1 / 24)
    parts = cube_parts(shape, split_tiling(shape, b2), b2)
    assert parts is not None and parts.columns < 36
    check(case((rows, 576), (272, 576), (272, 512), spread=0.5), "Ascend910B2")


@pytest.mark.parametrize(("chip", "depth", "width"), [("Toy", 256, 256), ("Ascend910B2", 16, 4112)])
def test_what_does_not_fit_runs_as_attention(chip, depth, width):
    arrays = case((16, depth), (16, depth), (16, width))
    names = {t.name for t in prepare(FLASH, *arrays, chip=load_chip(chip)).kernel.tensors}
    assert "y" not in names
    check(arrays, chip)


TOY = load_chip("Toy")
CALLS = {
    "heads that do not divide": lambda: FlashShape(8, 16, 16, 16, 16, 1.0, heads=3),
    "no rows": lambda: replace(SQUARE, rows=0),
    "a mask of columns": lambda: replace(SQUARE, mask="columns"),
    "a shared x": lambda: replace(SQUARE, shared=("x",)),
    "one launch on separate cores": lambda: flash_launch(SQUARE, FAR),
    "8 rows": lambda: flash_launch(SQUARE, TOY, FlashTiling(8, 16)),
    "40 keys": lambda: flash_launch(SQUARE, TOY, FlashTiling(16, 40)),
    "a grid of 4 cores": lambda: flash_launch(SQUARE, TOY, FlashTiling(16, 16, 2, 2)),
    "a grid of none": lambda: flash_launch(SQUARE, TOY, FlashTiling(16, 16, 0)),
    "a large block": lambda: flash_launch(SQUARE, TOY, FlashTiling(128, 128)),
    "wide heads": lambda: flash_launch(replace(SQUARE, depth=256, width=256), TOY),
    "8 rows of a pipeline": lambda: flash_pipeline_launch(HEAD, FAR, SplitTiling(8, 16)),
    "40 keys of a pipeline": lambda: flash_pipeline_launch(HEAD, FAR, SplitTiling(16, 40)),
    "15 tiles ahead": lambda: flash_pipeline_launch(HEAD, FAR, SplitTiling(16, 16, 15)),
    "large tiles": lambda: flash_pipeline_launch(SQUARE, FAR, SplitTiling(1024, 1024)),
    "heads of 4112": lambda: flash_pipeline_launch(replace(SQUARE, width=4112), FAR),
}


def test_what_is_refused_says_what_is_needed():
    assert_messages("cube", "test_flash", CALLS)
