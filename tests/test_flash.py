"""FlashAttention: values, no races, no scores in GM, bytes by the law, time."""

from dataclasses import replace

import numpy as np
import pytest
from cube_checks import on
from hypothesis import given, strategies as st

from ascend_lab.errors import CapacityError, InputError, PathError
from ascend_lab.lab.figures.flash import flash_traffic, separate_traffic
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
from ascend_lab.operators.ops.attention import flash_kernel
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
    got = ops.run(FLASH, *arrays, chip=load_chip(chip), **attrs)
    verify.check_within(FLASH, got, ops.get("attention").reference(*arrays, **attrs))


# -- values ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("chip", on(*CHIPS))
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values_are_those_of_attention(shapes, chip):
    check(case(*shapes), chip)


@given(
    st.tuples(*(st.integers(1, n) for n in (2, 90, 90, 40, 40))),
    st.sampled_from(("", "rows", "full")),
    st.sampled_from(CHIPS),
)
def test_any_sizes(sizes, mask, chip):
    b, n, t, d, e = sizes
    masks = {"": [], "rows": [(1, t)], "full": [(b, n, t)]}[mask]
    check(case((b, n, d), (b, t, d), (b, t, e), *masks), chip)


@pytest.mark.parametrize(("rows", "keys"), [(16, 16), (16, 48), (48, 16), (32, 64), (64, 32)])
def test_every_tiling_gives_the_same_values(rows, keys):
    chip = load_chip("Ascend310")
    shape = FlashShape(1, 70, 150, 32, 32, 32**-0.5)
    arrays = case((1, 70, 32), (1, 150, 32), (1, 150, 32))
    ready = prepare(FLASH, *arrays, chip=chip)
    launch = flash_launch(shape, chip, FlashTiling(rows, keys, 1, 2))
    got = ready.fetch(execute(launch, ready.tensors, chip))[0]
    verify.check_within(FLASH, got, FLASH.reference(*arrays))


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


def test_causal_mask_and_scale():
    q, k, v = case((2, 60, 16), (2, 60, 16), (2, 60, 16))
    mask = np.triu(np.full((60, 60), -10000.0), 1).astype(np.float16)
    check([q, k, v, mask], "Ascend910A", scale=0.7)
    check([q, k, v], "Ascend910A", scale=-0.7)


@pytest.mark.parametrize("chip", ["Ascend910A", "Ascend910B2"])
def test_width_256_fits_the_real_chips(chip):
    check(case((40, 256), (80, 256), (80, 256), (40, 80)), chip)


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


@given(
    st.integers(1, 6), st.integers(1, 6), st.sampled_from(CHIPS),
    st.sampled_from(((16, 16), (32, 48), (160, 32))),
)  # fmt: skip
def test_any_entries_and_heads_on_any_cores(entries, heads, chip, sides):
    sizes = (entries, heads, *sides, 16, 16)
    chip = load_chip(chip)
    arrays = case(*((entries, heads, n, 16) for n in (sides[0], sides[1], sides[1])))
    given = {x: fractals(a, True) for x, a in zip("qkv", arrays, strict=True)}
    got = execute(flash_kernel(with_heads(sizes, "qkvy")[1], chip), given, chip)["y"]
    wide = unpack(address_map("FRACTAL_NZ", (entries * sides[0], heads * 16)), got)
    split = wide.reshape(entries, sides[0], heads, 16).transpose(0, 2, 1, 3)
    verify.check_within(FLASH, split, FLASH.reference(*arrays))


def test_heads_divide_the_batch():
    with pytest.raises(InputError, match="heads that divide the batch"):
        FlashShape(8, 16, 16, 16, 16, 1.0, heads=3)


# -- programs -------------------------------------------------------------------------------------
@pytest.mark.parametrize("chip", on(*CHIPS))
@pytest.mark.parametrize("shapes", [SHAPES[3], SHAPES[5], SHAPES[6]], ids=str)
def test_programs_are_free_of_races(shapes, chip):
    chip = load_chip(chip)
    ready = prepare(FLASH, *case(*shapes), chip=chip)
    assert sanitize(ready.kernel, chip, filled=ready.tensors) == []


@pytest.mark.parametrize("chip", on(*COUPLED))
@pytest.mark.parametrize("mask", ["", "rows", "full"])
def test_both_engines_give_the_same_cycles(chip, mask):
    chip = load_chip(chip)
    shape = FlashShape(3, 200, 333, 48, 64, 0.1, mask)
    launch = flash_launch(shape, chip)
    fast = simulate(launch, chip)
    assert fast.cycles == simulate(launch, chip, engine="reference").cycles > 0


@pytest.mark.parametrize("mask", ["", "rows", "full"])
def test_no_tensor_in_gm_is_as_large_as_the_scores(mask):
    shape = FlashShape(1, 1024, 1024, 64, 64, 0.125, mask)
    launch = flash_launch(shape, load_chip("Ascend910A"))
    sizes = {t.name: t.elements for t in launch.tensors}
    assert set(sizes) - {"mask"} == {"q", "k", "v", "y"}
    assert sizes == {
        **dict.fromkeys("qkvy", 1024 * 64),
        **({"mask": 1024 * (1024 if mask == "full" else 1)} if mask else {}),
    }


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


def test_program_size_does_not_grow_with_the_sequence():
    chip = load_chip("Ascend910A")
    counts = set()
    for n in (1024, 4096, 16384):
        launch = flash_launch(replace(SQUARE, rows=n, keys=n), chip, FlashTiling(64, 64, 1, 4))
        (part,) = launch.parts
        counts.add(len(part.program.instructions()))
    assert len(counts) == 1


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


def traffic(n, rows, depth=64):
    shape = FlashShape(1, n, n, depth, depth, 0.125)
    return flash_traffic(shape, load_chip("Ascend910A"), FlashTiling(rows, 64, 1, 4))


def test_bytes_are_quadratic_in_length_and_fall_with_the_rows_of_a_block():
    assert traffic(8192, 64).gm_bytes / traffic(4096, 64).gm_bytes == pytest.approx(4, rel=0.02)
    for rows in (32, 64):
        ratio = traffic(4096, rows).gm_bytes / traffic(4096, 2 * rows).gm_bytes
        assert ratio == pytest.approx(2, rel=0.04)


@pytest.mark.parametrize("depth", [32, 64, 128])
def test_bytes_follow_the_law_of_the_paper(depth):
    """Elements moved = c n^2 d^2 / M, with M the elements of UB in use; c is 8 to 110 here."""
    constants = []
    for n in (2048, 4096, 8192):
        for rows in (32, 64, 128):
            got = traffic(n, rows, depth)
            law = n**2 * depth**2 / (got.ub_bytes / 2)
            constants.append(got.gm_bytes / 2 / law)
    assert max(constants) < 1.15 * min(constants)  # the law: one constant for all n and M
    weight = got.ub_bytes / 2 / 128  # elements of UB for a row of Q
    assert constants[-1] == pytest.approx(2 * weight / depth, rel=0.05)


def test_flash_beats_three_kernels_on_long_sequences():
    chip = load_chip("Ascend910A")
    shape = FlashShape(1, 4096, 4096, 64, 64, 0.125)
    flash = flash_traffic(shape, chip)
    three = separate_traffic(shape, chip)
    assert flash.gm_bytes == 68_157_440
    assert three.gm_bytes > 7 * flash.gm_bytes
    assert three.memory_bytes > 100 * flash.memory_bytes
    assert three.cycles > 2.5 * flash.cycles


@pytest.mark.parametrize("chip", on("Ascend310", "Ascend310P3"))
def test_flash_beats_three_kernels_on_the_other_chips(chip):
    shape = FlashShape(2, 1024, 1024, 64, 64, 0.125)
    flash, three = (f(shape, load_chip(chip)) for f in (flash_traffic, separate_traffic))
    assert three.cycles > 2 * flash.cycles
    assert three.gm_bytes > 10 * flash.gm_bytes


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
PIPELINES = {
    SplitTiling(16, 16, 0): "full",
    SplitTiling(16, 48, 1, 1): "",
    SplitTiling(48, 16, 2): "rows",
    SplitTiling(64, 32, 3): "",
    SplitTiling(96, 160, 4): "full",
    SplitTiling(128, 64, 7, 1): "rows",
}


@pytest.mark.parametrize("tiling", PIPELINES, ids=str)
def test_every_pipeline_gives_the_same_values(tiling):
    """Several blocks and tiles, the last of each ragged."""
    b = 2
    n = tiling.rows + 24
    t = 3 * tiling.keys + 10
    mask = PIPELINES[tiling]
    masks = {"": [], "rows": [(t,)], "full": [(b, n, t)]}[mask]
    arrays = case((b, n, 16), (b, t, 16), (b, t, 32), *masks)
    shape = FlashShape(b, n, t, 16, 32, 0.25, mask, ("mask",) if mask == "rows" else ())
    ready = prepare(FLASH, *arrays, chip=FAR)
    kernel = as_kernel(flash_pipeline_launch(shape, FAR, tiling))
    assert sanitize(kernel, FAR, filled=ready.tensors) == []
    got = ready.fetch(execute(kernel, ready.tensors, FAR))[0]
    verify.check_within(FLASH, got, FLASH.reference(*arrays))


@given(
    st.tuples(*(st.integers(1, n) for n in (5, 130, 200, 40, 40))),
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 6), st.integers(1, 2)),
)
def test_any_pipeline_runs_ahead_of_something_and_is_right(sizes, cut):
    """Tiles, blocks or matrices are ahead, whatever there are enough of."""
    b, n, t, d, e = sizes
    tiling = SplitTiling(16 * cut[0], 16 * cut[1], *cut[2:])
    arrays = case((b, n, d), (b, t, d), (b, t, e))
    ready = prepare(FLASH, *arrays, chip=FAR)
    launch = flash_pipeline_launch(FlashShape(b, n, t, d, e, d**-0.5), FAR, tiling)
    got = ready.fetch(execute(launch, ready.tensors, FAR))[0]
    verify.check_within(FLASH, got, FLASH.reference(*arrays))
    assert simulate(launch, FAR).cycles == simulate(launch, FAR, engine="reference").cycles


@pytest.mark.parametrize(("rows", "keys", "ahead"), [(832, 16, 1), (448, 32, 2)])
def test_cores_with_unlike_shares_have_rings_of_their_own(rows, keys, ahead):
    """The last core has fewer blocks, and other numbers of tiles in flight."""
    batch = 1 if rows == 832 else 2
    arrays = case((batch, rows, 16), (batch, keys, 16), (batch, keys, 16))
    launch = flash_pipeline_launch(
        FlashShape(batch, rows, keys, 16, 16, 0.25), FAR, SplitTiling(16, 16, ahead)
    )
    slots = [{b.slots for b in p.program.tensors if b.name == "s"} for p in launch.parts]
    assert len(set.union(*slots)) > 1
    ready = prepare(FLASH, *arrays, chip=FAR)
    got = ready.fetch(execute(launch, ready.tensors, FAR))[0]
    verify.check_within(FLASH, got, FLASH.reference(*arrays))


def warm(shape, tiling=None, engine="fast"):
    kernel = as_kernel(flash_pipeline_launch(shape, FAR, tiling))
    memory = DeviceMemory.holding(FAR, kernel.tensors, ("q", "k", "v"))
    return simulate_kernel(kernel, FAR, memory, engine=engine)


@pytest.mark.parametrize(
    "sizes", [(1, 300, 900, 48, 64), (40, 100, 100, 32, 32), (3, 400, 77, 40, 40)]
)
def test_both_engines_time_the_pipeline_alike(sizes):
    shape = FlashShape(*sizes, 0.1)
    assert warm(shape).cycles == warm(shape, engine="reference").cycles > 0


def test_scores_never_reach_device_memory():
    kernel = as_kernel(flash_pipeline_launch(HEAD, FAR))
    line = simulate_kernel(kernel, FAR, DeviceMemory.of(FAR))
    assert line.memory_bytes == 3 * 2 * 2048 * 128
    assert warm(HEAD).memory_bytes == 0


def test_the_fix_pipe_is_the_limit_and_cube_and_vector_cores_work_together():
    shape = replace(HEAD, rows=8192, keys=8192)
    busy = {p: cycles / warm(shape).cycles for p, cycles in warm(shape).busy_cycles.items()}
    assert busy["AIC.FIX"] > 0.95 and busy["AIV.V"] > 0.7


def test_each_rung_of_the_ladder_is_quicker():
    rungs = (SplitTiling(128, 256, 0, 1), SplitTiling(128, 256, 1, 1), SplitTiling(128, 256, 1),
             SplitTiling(128, 256, 2), SplitTiling(128, 256, 4))  # fmt: skip
    times = [warm(HEAD, rung).cycles for rung in rungs]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[-1]


def test_published_times():
    """The rows, their conditions and the tiling are published; nothing is fitted to them."""
    assert [row.name for row in published_flash()] == ["flash 1024", "flash 4096", "flash 16384"]
    for row in published_flash():
        assert abs(row.time_error) < 0.20, row


def test_the_pipeline_does_not_grow_with_the_sequence():
    counts = set()
    for n in (4096, 8192, 32768):
        launch = flash_pipeline_launch(replace(HEAD, rows=n, keys=n, batch=24), FAR)
        counts.add(tuple(len(part.program.instructions()) for part in launch.parts))
    assert len(counts) == 1


def test_short_matrices_run_ahead_of_each_other():
    """One tile of keys: what is in flight are whole matrices, and no core waits for the others."""
    shape = FlashShape(240, 128, 128, 64, 64, 0.125)
    one = warm(replace(shape, batch=24)).cycles
    ten = warm(shape).cycles
    assert ten < 5 * one


@pytest.mark.parametrize(("length", "times"), [(512, 1.3), (4096, 2.5)])
def test_flash_beats_three_kernels_on_separate_cores(length, times):
    shape = FlashShape(4, length, length, 64, 64, 0.125)
    flash = flash_traffic(shape, FAR)
    three = separate_traffic(shape, FAR)
    assert three.cycles > times * flash.cycles
    assert three.memory_bytes > 1.5 * flash.memory_bytes


@pytest.mark.parametrize(
    "wrong", [SplitTiling(8, 16), SplitTiling(16, 40), SplitTiling(16, 16, 15)]
)
def test_wrong_pipelines(wrong):
    with pytest.raises(InputError, match="multiples of 16"):
        flash_pipeline_launch(HEAD, FAR, wrong)


# -- refusals -------------------------------------------------------------------------------------
def test_one_launch_needs_coupled_cores():
    with pytest.raises(PathError, match=r"UB->L1 on one core of Ascend910B2"):
        flash_launch(SQUARE, load_chip("Ascend910B2"))


@pytest.mark.parametrize("rows", [40, 128])
def test_latent_heads_come_in_parts(rows):
    """576 numbers a key: 36 fractals, in fifths to L0, and in eighths to L1 beside 128 rows."""
    b2 = load_chip("Ascend910B2")
    shape = FlashShape(1, rows, 272, 576, 512, 1 / 24)
    parts = cube_parts(shape, split_tiling(shape, b2), b2)
    assert parts is not None and parts.columns < 36
    check(case((rows, 576), (272, 576), (272, 512), spread=0.5), "Ascend910B2")


def test_a_matrix_too_wide_is_refused():
    chip = load_chip("Ascend910B2")
    wide = replace(SQUARE, width=4112)
    with pytest.raises(CapacityError, match="width 4112 on chip"):
        flash_pipeline_launch(wide, chip)
    with pytest.raises(CapacityError, match="halve rows or keys"):
        flash_pipeline_launch(SQUARE, chip, SplitTiling(1024, 1024))
    check(case((16, 16), (16, 16), (16, 4112)), "Ascend910B2")


def test_what_does_not_fit_says_so_and_runs_as_attention():
    chip = load_chip("Toy")
    wide = replace(SQUARE, depth=256, width=256)
    with pytest.raises(CapacityError, match=r"width 256: 77824 bytes.*65536 on Toy"):
        flash_launch(wide, chip)
    with pytest.raises(CapacityError, match="halve a block"):
        flash_launch(SQUARE, chip, FlashTiling(128, 128))
    arrays = case((16, 256), (16, 256), (16, 256))
    names = {t.name for t in prepare(FLASH, *arrays, chip=chip).kernel.tensors}
    assert "y" not in names
    check(arrays, "Toy")


@pytest.mark.parametrize(
    "tiling",
    [FlashTiling(8, 16), FlashTiling(16, 40), FlashTiling(16, 16, 2, 2), FlashTiling(16, 16, 0)],
)
def test_wrong_tilings(tiling):
    with pytest.raises(InputError):
        flash_launch(SQUARE, load_chip("Toy"), tiling)


@pytest.mark.parametrize("change", [{"rows": 0}, {"mask": "columns"}, {"shared": ("x",)}])
def test_wrong_shapes(change):
    with pytest.raises(InputError, match="sizes of at least 1"):
        replace(SQUARE, **change)
