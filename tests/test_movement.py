"""Kernels that only move data: what operators and expressions do not ask of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from message_lists import assert_messages

from ascend_lab.errors import PathError, SimulationError
from ascend_lab.lab.kernels.grouped_scatter import group_indices, grouped_launch
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Kernel, sanitize
from ascend_lab.machine.isa.memory import numpy_type
from ascend_lab.machine.layout import (
    Move,
    View,
    address_map,
    conversion_launch,
    copy_launch,
    moves_launch,
    pack,
)
from ascend_lab.machine.sim import execute, simulate, simulate_kernel
from ascend_lab.operators.kernels.rearrange import (
    check_indices,
    concat_launch,
    gather_launch,
    one_hot_launch,
    pad_launch,
    reshape_launch,
    scatter_launch,
    slice_launch,
    split_launch,
)
from ascend_lab.operators.kernels.transpose import maps_phases, transpose_launch

CHIPS = {name: load_chip(name) for name in ("Toy", "Ascend910A", "Ascend910B2")}
FORMATS = ("fp16", "fp32", "int8", "int32")
SIZES = st.sampled_from([1, 2, 3, 7, 13, 15, 16, 17, 31, 32, 33, 127, 128, 129])
SMALL = st.sampled_from([1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33])
chips = st.sampled_from(list(CHIPS.values()))
formats = st.sampled_from(FORMATS)
seeds = st.integers(0, 2**32 - 1)


def numbers(rng, shape, dtype):
    """Small whole numbers: exact in every format, and so are their sums."""
    return rng.integers(-9, 10, shape).astype(numpy_type(dtype))


def run(launch, tensors, chip, *, seed=1):
    """Execute a launch that must be free of races, in an order of pipes drawn by `seed`."""
    assert sanitize(launch, chip, filled=set(tensors), limit_events=10**6) == []
    assert simulate(launch, chip).cycles > 0
    return execute(launch, tensors, chip, seed=seed)


def static_instructions(launch):
    return sum(sum(1 for _ in part.program.instructions()) for part in launch.parts)


# -- strided copies --------------------------------------------------------------------------------
@settings(max_examples=100)
@given(chips, formats, st.lists(SMALL, min_size=1, max_size=3), st.data())
def test_slices_are_numpys(chip, dtype, shape, data):
    slices = []
    for n in shape:
        step = data.draw(st.sampled_from([1, 1, 2, 3, -1, -2]))
        low, high = sorted(data.draw(st.tuples(*[st.integers(0, n - 1)] * 2)))
        slices.append((low, high + 1, step) if step > 0 else (high, low - 1, step))
    x = numbers(np.random.default_rng(0), shape, dtype)
    begin, end, step = zip(*slices, strict=True)
    launch = slice_launch(chip, shape, begin, end, dtype, step=step)
    want = x[tuple(slice(b, e if e >= 0 else None, s) for b, e, s in slices)]
    assert np.array_equal(run(launch, {"x": x}, chip)["y"], want.ravel())


def test_a_stride_of_zero_broadcasts():
    chip = CHIPS["Toy"]
    x = numbers(np.random.default_rng(4), 33, "fp16")
    launch = copy_launch(chip, "fp16", (7, 33), (0, 1), (33, 1))
    assert np.array_equal(run(launch, {"x": x}, chip)["y"], np.tile(x, 7))


def test_bf16_moves_where_the_chip_has_it():
    x = np.arange(105).astype(numpy_type("bf16")).reshape(3, 5, 7)
    chip = CHIPS["Ascend910B2"]
    got = run(transpose_launch(chip, x.shape, (2, 0, 1), "bf16"), {"x": x}, chip)["y"]
    assert np.array_equal(got, x.transpose(2, 0, 1).ravel())
    with pytest.raises(PathError, match="use fp16 or fp32"):
        transpose_launch(CHIPS["Ascend910A"], x.shape, (2, 0, 1), "bf16")


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_a_long_copy_is_bound_by_memory_and_its_code_is_short(chip):
    n = 256 * 2**20
    launch = copy_launch(chip, "fp16", (n,), (1,), (1,))
    assert static_instructions(launch) < 60
    least = 4 * n / chip.device_memory.rate_bytes_per_s * chip.clock_hz
    assert least <= simulate(launch, chip).cycles <= 1.05 * least


def test_moves_of_several_tensors_share_one_launch():
    chip = CHIPS["Toy"]
    moves = [
        Move((3, 4), View("y", (4, 1)), View("a", (1, 3))),
        Move((5,), View("y", (1,), 12), View("b", (-1,), 4)),
        Move((0, 9), View("y", (9, 1)), View("a", (9, 1))),
        Move((2,), View("y", (1,), 17), value=6.0),
    ]
    launch = moves_launch(chip, "fp32", {"a": 12, "b": 5, "y": 19}, moves, name="mix")
    a, b = (np.arange(n, dtype=np.float32) for n in (12, 5))
    want = np.concatenate([a.reshape(4, 3).T.ravel(), b[::-1], [6, 6]])
    assert np.array_equal(run(launch, {"a": a, "b": b}, chip)["y"], want)


# -- transpose -------------------------------------------------------------------------------------
@given(chips, formats, SIZES, SIZES, st.sampled_from(["auto", "strided"]), seeds)
def test_transposes_of_matrices(chip, dtype, rows, columns, method, seed):
    x = numbers(np.random.default_rng(seed), (rows, columns), dtype)
    launch = transpose_launch(chip, x.shape, (1, 0), dtype, method)
    assert np.array_equal(run(launch, {"x": x}, chip, seed=seed)["y"], x.T.ravel())


BLOCK_SHAPES = {
    "fp16": [(16, 16), (17, 16), (16, 31), (47, 129), (3, 33, 40), (256, 48)],
    "fp32": [(128, 8), (129, 9), (255, 15), (2, 300, 25), (640, 64)],
    "int32": [(128, 8), (257, 31)],
    "int8": [(32, 32), (33, 63), (2, 96, 128)],
    "uint8": [(45, 64)],
}


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
@pytest.mark.parametrize("dtype", BLOCK_SHAPES)
def test_blocks_turn_every_bit_pattern(chip, dtype):
    rng = np.random.default_rng(6)
    kind = np.dtype(numpy_type(dtype))
    for shape in BLOCK_SHAPES[dtype]:
        raw = rng.integers(0, 256, math.prod(shape) * kind.itemsize).astype(np.uint8)
        x = raw.view(kind).reshape(shape)
        perm = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
        launch = transpose_launch(chip, shape, perm, dtype, "blocks")
        got = run(launch, {"x": x}, chip)["y"]
        assert got.tobytes() == np.ascontiguousarray(x.transpose(perm)).tobytes()


IMAGES = st.sampled_from(
    [(2, 64, 5, 7), (1, 32, 9, 9), (3, 96, 1, 33), (2, 20, 6, 6), (1, 116, 9, 9), (2, 1, 3, 6)]
)
ENDS = st.permutations(["NCHW", "NHWC", "NC1HWC0"])


@given(chips, formats, IMAGES, ENDS, seeds)
def test_conversions_are_right_and_never_slower_than_strided(chip, dtype, shape, ends, seed):
    x = numbers(np.random.default_rng(seed), shape, dtype)
    source, target = (address_map(name, shape, dtype) for name in ends[:2])
    kernel = Kernel("convert", maps_phases(source, target, chip, "convert"))
    assert all(sanitize(phase, chip) == [] for phase in kernel.phases)
    y = execute(kernel, {"x": pack(source, x).ravel()}, chip)["y"]
    np.testing.assert_array_equal(y, pack(target, x).ravel())
    strided = conversion_launch(shape, dtype, *ends[:2], chip)
    assert simulate_kernel(kernel, chip).cycles <= simulate(strided, chip).cycles


# -- gather and scatter ----------------------------------------------------------------------------
def scattered(y, index, u, mode):
    want = y.copy()
    if mode == "add":
        np.add.at(want, index, u)
    else:
        for row, update in zip(index, u, strict=True):
            want[row] = update
    return want


@given(
    chips,
    st.sampled_from(["fp16", "fp32", "int32"]),
    st.sampled_from([(1, 1), (3, 2), (40, 1), (7, 4)]),
    st.sampled_from([1, 5, 8, 40, 100]),
    st.sampled_from(["sorted", "atomic", "owner", "auto"]),
    seeds,
)
def test_all_ways_to_scatter_agree(chip, dtype, table, picks, way, seed):
    rows = table[0]
    columns = table[1] * 16
    rng = np.random.default_rng(seed)
    y = numbers(rng, (rows, columns), dtype)
    u = numbers(rng, (picks, columns), dtype)
    index = rng.integers(0, rows, picks)
    tensors = {"y": y, "u": u}
    if way != "sorted":
        tensors["index"] = index.astype(np.int32)
        launch = scatter_launch(chip, rows, columns, picks, dtype, mode="add", method=way)
    else:
        cores = chip.core_count * chip.vector_cores_per_core
        groups = group_indices(index, rows, cores)
        tensors |= {"order": groups.order, "index": groups.index}
        launch = grouped_launch(chip, groups, rows, columns, picks, dtype)
    got = run(launch, tensors, chip, seed=seed)["y"]
    assert np.array_equal(got, scattered(y, index, u, "add"))


# -- bad inputs ------------------------------------------------------------------------------------

TOY = CHIPS["Toy"]
BAD = {
    "inside the 15 elements of x; got 0..15": lambda: copy_launch(
        TOY, "fp16", (4, 4), (4, 1), (4, 1), source_elements=15
    ),
    "-1..2": lambda: copy_launch(TOY, "fp16", (4,), (-1,), (1,), source_offset=2),
    "a stride of": lambda: copy_launch(TOY, "fp16", (4, 4), (1,), (4, 1)),
    "a number format": lambda: copy_launch(TOY, "fp8", (4,), (1,), (1,)),
    "an element to move": lambda: copy_launch(
        TOY, "fp16", (0,), (1,), (1,), source_elements=4, target_elements=4
    ),
    "0..3 on axis 1": lambda: slice_launch(TOY, (4, 4), (0, 0), (4, 5), "fp16"),
    "at least one": lambda: slice_launch(TOY, (4,), (2,), (2,), "fp16"),
    "not 0": lambda: slice_launch(TOY, (4,), (0,), (2,), "fp16", step=(0,)),
    "equal on all axes but 1; got (2, 3), (3, 3)": lambda: concat_launch(
        TOY, [(2, 3), (3, 3)], 1, "fp16"
    ),
    "nothing to join": lambda: concat_launch(TOY, [], 0, "fp16"),
    "an axis in -2..1 of (2, 3); got 2": lambda: concat_launch(TOY, [(2, 3)], 2, "fp16"),
    "sum to 5": lambda: split_launch(TOY, (4, 5), (2, 2), 1, "fp16"),
    "1 or more": lambda: split_launch(TOY, (4, 5), (5, 0), 1, "fp16"),
    "for each axis": lambda: pad_launch(TOY, (4,), ((-1, 0),), "fp16"),
    "a whole scalar for int8": lambda: pad_launch(TOY, (4,), ((1, 0),), "int8", value=0.5),
    "16 elements": lambda: reshape_launch(TOY, (4, 4), (3, 5), "fp16"),
    "name each axis once": lambda: transpose_launch(TOY, (2, 3), (0, 0), "fp16"),
    "axes 0..1": lambda: transpose_launch(TOY, (2, 3), (0,), "fp16"),
    "auto, strided, blocks": lambda: transpose_launch(TOY, (2, 3), (1, 0), "fp16", "magic"),
    "16 rows and 16 columns; got 15 and 64": lambda: transpose_launch(
        TOY, (15, 64), (1, 0), "fp16", "blocks"
    ),
    "runs of 32": lambda: transpose_launch(TOY, (32, 32, 32), (1, 0, 2), "fp16", "blocks"),
    "one or more of each": lambda: gather_launch(TOY, 4, 4, 0, "fp16"),
    "update or add": lambda: scatter_launch(TOY, 4, 16, 4, "fp16", mode="max"),
    "mode add": lambda: scatter_launch(TOY, 4, 16, 4, "fp16", method="atomic"),
    "fp32, fp16, int32; got add in int8": lambda: scatter_launch(
        TOY, 4, 32, 4, "int8", mode="add", method="atomic"
    ),
    "multiples of 16 columns, on Toy; got 17": lambda: scatter_launch(
        TOY, 4, 17, 4, "fp16", mode="add", method="atomic"
    ),
    "every index in 0..3; got 4 at position 2": lambda: check_indices(np.array([0, 3, 4, 9]), 4),
    "ids: every index in 0..3; got -1 at position 1": lambda: check_indices(
        np.array([[0], [-1]]), 4, "ids"
    ),
    "whole numbers; got float64": lambda: check_indices(np.array([0.5]), 4),
    "one or more": lambda: one_hot_launch(TOY, 4, 0, "fp16"),
}


def test_what_is_refused_says_what_is_needed():
    assert_messages("ops", "test_movement", BAD)


@pytest.mark.parametrize("columns", [3, 16, 40])
def test_a_bad_index_stops_a_launch_and_is_named(columns):
    index = np.array([1, 2, 7, 0], np.int32)
    x = np.zeros((5, columns), np.float16)
    u = np.zeros((4, columns), np.float16)
    with pytest.raises(SimulationError, match=r"an index of 0..4.* got 7 at .*[rp]=2"):
        execute(gather_launch(TOY, 5, columns, 4, "fp16"), {"x": x, "index": index}, TOY)
    launch = scatter_launch(TOY, 5, columns, 4, "fp16")
    with pytest.raises(SimulationError, match=r"an index of 0..4.* got 7 at .*[rp]=2"):
        execute(launch, {"u": u, "y": x, "index": index}, TOY)
