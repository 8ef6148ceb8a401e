"""Chapter 3: rooflines from counted bytes, closed forms against programs, figures and checks."""

import pytest

from ascend_lab.errors import CapacityError, InputError, MachineError
from ascend_lab.lab import figures
from ascend_lab.lab.checks.chapter03_04 import useful_share
from ascend_lab.lab.machines import roofline as rf
from ascend_lab.machine.chip import Chip, load_chip, presets
from ascend_lab.machine.isa import KernelBuilder, Launch, Part, binding_of
from ascend_lab.machine.sim import Timeline, simulate
from ascend_lab.operators.kernels import (
    ConvShape,
    GemmSchedule,
    GemmShape,
    conv_launch,
    gemm_launch,
)

CHIP = load_chip("Ascend910A")
PEAK = CHIP.peak_ops_per_s("fp16")


def matmul(chip: Chip, m: int, k: int, n: int, *tiling: int) -> Timeline:
    shape = GemmShape(m, k, n, "fp16", "fp16")
    return simulate(gemm_launch(shape, chip, GemmSchedule(*tiling)), chip)


def layer() -> Timeline:
    return matmul(CHIP, 64, 4096, 16384, 64, 32, 512, 8, 1, 32)


def convolution() -> Timeline:
    shape = ConvShape(n=32, c=64, h=56, w=56, k=64, r=3, s=3, stride=1, pad=1)
    return simulate(conv_launch(shape, CHIP, GemmSchedule(384, 16, 64, 32, 32, 1)), CHIP)


def stream(chip: Chip, size: int, passes: int, cores: int) -> Timeline:
    kernel = KernelBuilder("stream", chip)
    tensor = kernel.tensor("x", "fp16", size // 2)
    queue = kernel.queue("pieces", "UB", "fp16", 1 << 15, src="MTE2", dst="V")
    own = size // cores // 2
    start = kernel.param("core", cores) * own
    with kernel.loop("pass", passes), kernel.loop("piece", own >> 15) as i:
        kernel.copy(queue.alloc().region(), tensor.region(start + i * (1 << 15), 1 << 15))
        queue.enqueue()
        queue.dequeue()
        queue.free()
    who = tuple(binding_of({"core": core}) for core in range(cores))
    return simulate(Launch("stream", (Part(kernel.finish(), who),)), chip)


# --- levels and dots ------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "n"), [(16, 256), (64, 64), (128, 256), (48, 80)])
def test_intensity_into_l0_is_macs_per_element(m: int, n: int) -> None:
    run = matmul(CHIP, 4 * m, 256, 8 * n, m, 32, n, 1, 4, 8)
    dot = rf.level_dot("", run)
    assert dot.ops_per_byte(rf.INTO_L0) == pytest.approx(m * n / (m + n), rel=1e-12)
    assert dot.ops_per_byte(rf.INTO_L1) == dot.ops_per_byte(rf.INTO_L0)


def test_intensity_at_memory_is_that_of_three_matrices() -> None:
    dot = rf.level_dot("", layer())
    m = 64
    k = 4096
    n = 16384
    assert dot.ops_per_byte(rf.INTO_L2) == pytest.approx(m * k * n / (m * k + k * n + m * n))


@pytest.mark.parametrize("name", ["Ascend310", "Ascend310P3", "Ascend910A", "Ascend910B2", "Toy"])
def test_no_program_is_above_a_roof(name: str) -> None:
    chip = load_chip(name)
    peak = chip.peak_ops_per_s("fp16")
    for side in (16, 32, 64):
        run = matmul(chip, 512, 512, 512, side, 32, side, 2, 1, chip.core_count)
        dot = rf.level_dot("", run)
        for level in rf.levels_of(run):
            assert dot.ops_per_s <= rf.attainable(dot.ops_per_byte(level.name), peak, level)


@pytest.mark.parametrize("chip", presets().values(), ids=presets())
def test_ridges_rise_outward(chip: Chip) -> None:
    ridges = [rf.ridge_point(chip.peak_ops_per_s("fp16"), level) for level in rf.chip_levels(chip)]
    assert ridges == sorted(ridges)


def test_energy_parts_add_up_to_the_simulated_energy() -> None:
    for run in (layer(), convolution(), matmul(CHIP, 4096, 4096, 4096, 32, 256, 32, 4, 4, 8)):
        assert sum(rf.energy_parts(run).values()) * run.macs == pytest.approx(run.energy_pj)


def test_a_launch_without_a_matmul_has_no_levels() -> None:
    run = stream(CHIP, 1 << 18, 1, 2)
    for function in (rf.levels_of, rf.energy_parts):
        with pytest.raises(MachineError):
            function(run)


# --- what the chapter claims ----------------------------------------------------------------------
def test_the_sum_on_mte2_explains_what_the_roofs_do_not() -> None:
    for m, k, n in ((32, 256, 32), (64, 256, 64), (128, 128, 128), (128, 64, 256)):
        run = matmul(CHIP, 4096, 4096, 4096, m, k, n, 4, 4, 8)
        dot = rf.level_dot("", run)
        (l0, l1, memory) = rf.levels_of(run)
        _, roof = rf.binding_level(dot, PEAK, (l0, l1, memory))
        fresh = run.path_bytes["GM", "L1"] - run.l2_bytes
        mte2_s = fresh / memory.rate_bytes_per_s + run.l2_bytes / l1.rate_bytes_per_s
        summed = dot.ops / mte2_s
        assert dot.ops_per_s < summed < roof
        assert summed == pytest.approx(dot.ops_per_s, rel=0.04)
        assert roof > 1.15 * dot.ops_per_s


def test_padding_is_counted_by_the_program_as_by_the_formula() -> None:
    for dtype in ("fp16", "int8"):
        for side in (16, 17, 33, 50, 67):
            shape = GemmShape(side, side, side, dtype)
            run = simulate(gemm_launch(shape, CHIP, GemmSchedule(64, 64, 64, 1, 1, 1)), CHIP)
            assert side**3 / run.macs == pytest.approx(useful_share(side, dtype))


# --- figures --------------------------------------------------------------------------------------
def test_the_widget_figure_moves_and_refuses() -> None:
    small, large = (figures.fig_tile_roofline(side, side) for side in (32, 128))
    assert small.alt_text != large.alt_text
    with pytest.raises(CapacityError, match="L0C"):
        figures.fig_tile_roofline(256, 256, "Ascend910B2")
    with pytest.raises(InputError):
        figures.fig_tile_roofline(40, 64)
