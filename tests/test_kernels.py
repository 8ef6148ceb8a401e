"""Hand-written kernels against NumPy: odd sizes, both formats, every chip family, tails."""

import numpy as np
import pytest
from cube_checks import assert_gemm, on
from hypothesis import given, strategies as st
from message_lists import assert_messages
from strategies import gemm_cases

from ascend_lab.machine import isa
from ascend_lab.machine.chip import PRESETS, load_chip
from ascend_lab.machine.sim import execute, simulate
from ascend_lab.operators.kernels import (
    ConvShape,
    GemmSchedule,
    GemmShape,
    default_schedule,
    elementwise_launch,
    elementwise_program,
    gemm_launch,
    pack_conv,
    pack_gemm,
    run_file,
    tile_bytes,
)
from ascend_lab.operators.kernels.run_file import compare, run_kernel_file

TOY = load_chip("Toy")


@given(gemm_cases(), st.integers(0, 1000))
def test_matrix_products_equal_numpy(case, seed):
    shape, schedule, chip = case
    assert_gemm(shape, chip, schedule, seed=seed)


@pytest.mark.parametrize("chip_name", on(*PRESETS))
@pytest.mark.parametrize("side", [16, 257, 4096])
def test_default_schedules_fit_and_use_the_chip(chip_name, side):
    chip = load_chip(chip_name)
    shape = GemmShape(side, side, side)
    schedule = default_schedule(shape, chip)
    for space, needed in tile_bytes(shape, schedule).items():
        assert needed <= chip.buffers[space]
    timeline = simulate(gemm_launch(shape, chip, schedule), chip)
    assert timeline.core_count <= chip.core_count
    if side == 4096:
        assert timeline.core_count == chip.core_count
        # The Toy's memory feeds its cubes a tenth of what they could use.
        assert timeline.peak_share > (0.05 if chip_name == "Toy" else 0.4)


@pytest.mark.parametrize("chip_name", ["Toy", "Ascend910B2"])
@pytest.mark.parametrize("op", ["vadd", "vsub", "vmul", "vmax", "vrelu", "vexp"])
def test_elementwise_kernels_on_all_vector_cores(chip_name, op):
    chip = load_chip(chip_name)
    cores = chip.core_count * chip.vector_cores_per_core
    launch = elementwise_launch(chip, cores * 512, op=op, tile=256)
    assert launch.core_count == cores
    rng = np.random.default_rng(0)
    names = [b.name for b in launch.tensors if b.name != "y"]
    values = {n: rng.standard_normal(cores * 512).astype(np.float16) for n in names}
    functions = {
        "vadd": np.add,
        "vsub": np.subtract,
        "vmul": np.multiply,
        "vmax": np.maximum,
        "vrelu": lambda v: np.maximum(v, 0),
        "vexp": np.exp,
    }
    expected = functions[op](*(v.astype(np.float32) for v in values.values()))
    np.testing.assert_array_equal(execute(launch, values, chip)["y"], expected.astype(np.float16))


# -- refusals --------------------------------------------------------------------------------------

SHAPE = GemmShape(64, 64, 64)


CALLS = {
    "4 output elements for 3": lambda: compare("y", np.zeros(4, np.float16), np.zeros(3)),
    "at least 1": lambda: GemmShape(0, 1, 1),
    "sides below 0": lambda: GemmShape(1, -3, 1),
    "at most": lambda: GemmShape(1 << 40, 1, 1),
    "fp16, bf16, int8": lambda: GemmShape(1, 1, 1, "fp64"),
    "out dtype": lambda: GemmShape(1, 1, 1, "fp16", "int8"),
    "base_m": lambda: gemm_launch(SHAPE, TOY, GemmSchedule(24, 16, 16, 1, 1, 1)),
    "base_k": lambda: gemm_launch(SHAPE, TOY, GemmSchedule(16, 8, 16, 1, 1, 1)),
    "base_n": lambda: gemm_launch(SHAPE, TOY, GemmSchedule(16, 16, 0, 1, 1, 1)),
    "step_k": lambda: gemm_launch(SHAPE, TOY, GemmSchedule(16, 16, 16, 0, 1, 1)),
    "grid": lambda: gemm_launch(SHAPE, TOY, GemmSchedule(16, 16, 16, 1, 3, 1)),
    "L0A for tile m,k,n 512,16,16": lambda: gemm_launch(
        SHAPE, TOY, GemmSchedule(512, 16, 16, 1, 1, 1)
    ),
    "L1 for tile": lambda: gemm_launch(SHAPE, TOY, GemmSchedule(64, 32, 64, 9, 1, 1)),
    "multiple of 128": lambda: elementwise_program(TOY, 1024, tile=100),
    "divide 1000": lambda: elementwise_program(TOY, 1000, tile=256),
    "bytes of UB": lambda: elementwise_program(TOY, 1 << 20, tile=1 << 20),
    "multiple of 2": lambda: elementwise_launch(TOY, 1001),
    "A 64x64": lambda: pack_gemm(SHAPE, np.zeros((2, 2)), np.zeros((64, 64))),
    "x as": lambda: pack_conv(
        ConvShape(1, 1, 4, 4, 1, 1, 1), np.zeros((1, 1, 4, 5)), np.zeros((1, 1, 1, 1))
    ),
}


# -- how a student's values are judged -------------------------------------------------------------
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
FIVE = np.array([0, 1, 2, 3, 0, 0], np.float32)


@pytest.mark.parametrize(
    ("got", "expected", "error", "words"),
    [
        (np.float16([1.0, 2.0]), [1.0, 2.0], 0.0, None),
        (np.float16([1.0, 2.0]), [1.001, 2.0], 0.001, None),
        (np.float16([1.0, 2.0]), [1.0, 3.0], 1.0, "y[1]: expected 3, got 2"),
        (np.float16([1.0, np.nan]), [1.0, 2.0], np.inf, "y[1]: expected 2, got nan"),
        (np.float16([1.0, np.inf]), [1.0, 2.0], np.inf, "y[1]: expected 2, got inf"),
        (np.int32([7]), [7], 0.0, None),
        (np.int32([7]), [8], 1.0, "y[0]: expected 8, got 7, tolerance 0"),
        (FIVE, ROWS, 5.0, "y[1, 1]: expected 4, got 0, tolerance 0.005"),
    ],
)
def test_values_are_compared_with_the_tolerance_of_their_format(got, expected, error, words):
    largest, mismatch = compare("y", got, np.array(expected))
    assert largest == pytest.approx(error, rel=1e-2)
    assert mismatch is None if words is None else str(mismatch).startswith(words)


def test_what_is_refused_says_what_is_needed():
    assert_messages("cube", "test_kernels", CALLS)


SCALED = """
import numpy as np
from ascend_lab.machine.isa import KernelBuilder

def kernel(chip):
    k = KernelBuilder("scaled", chip)
    x, y = (k.tensor(name, "fp16", 1024) for name in "xy")
    x_ub, y_ub = (k.buffer(f"{name}_ub", "UB", "fp16", 1024) for name in "xy")
    k.copy(x_ub.region(), x.region())
    k.barrier()
    k.vector("vmuls", y_ub.region(0, (8, 128)), x_ub.region(0, (8, 128)), scalar=FACTOR)
    k.barrier()
    k.copy(y.region(), y_ub.region())
    return k.finish()

def inputs(rng):
    return {"x": rng.standard_normal(1024).astype(np.float16)}

def reference(arrays):
    return {"y": arrays["x"].astype(np.float32) * 1.5}
"""


@pytest.mark.parametrize(("factor", "right"), [(1.5, True), (1.51, False), (1.502, False)])
def test_an_elementwise_kernel_is_judged_by_units_in_the_last_place(tmp_path, factor, right):
    file = tmp_path / "scaled.py"
    file.write_text(SCALED.replace("FACTOR", str(factor)), "utf-8")
    assert run_kernel_file(file, load_chip("Toy")).values_ok is right


def test_a_sum_is_judged_by_the_length_of_sums():
    chip = load_chip("Toy")
    k = isa.KernelBuilder("sums", chip)
    x = k.buffer("x", "UB", "fp16", 128)
    k.vector("vadds", x.region(0, (1, 128)), x.region(0, (1, 128)), scalar=1.0)
    assert run_file.roundings(k.finish()) == 1
    k = isa.KernelBuilder("sums", chip)
    x = k.buffer("x", "UB", "fp16", 128)
    with k.loop("i", 4):
        k.vector("vadds", x.region(0, (1, 128)), x.region(0, (1, 128)), scalar=1.0)
    assert run_file.roundings(k.finish()) is None
