"""Chapter 3: rooflines from counted bytes, closed forms against programs, figures and checks."""

from dataclasses import replace

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
def test_the_layer_of_the_question_is_on_both_sides() -> None:
    dot = rf.level_dot("layer", layer())
    levels = rf.levels_of(layer())
    above = [dot.ops_per_byte(lv.name) / rf.ridge_point(PEAK, lv) for lv in levels]
    assert above[0] > 1.5
    assert above[2] < 0.5
    assert rf.binding_level(dot, PEAK, levels)[0] == rf.INTO_L2


@pytest.mark.parametrize(("m", "n"), [(16, 256), (64, 64), (128, 256), (48, 80)])
def test_intensity_into_l0_is_macs_per_element(m: int, n: int) -> None:
    run = matmul(CHIP, 4 * m, 256, 8 * n, m, 32, n, 1, 4, 8)
    dot = rf.level_dot("", run)
    assert dot.ops_per_byte(rf.INTO_L0) == pytest.approx(m * n / (m + n), rel=1e-12)
    assert dot.ops_per_byte(rf.INTO_L1) == dot.ops_per_byte(rf.INTO_L0)


def test_a_convolution_reuses_l1() -> None:
    dot = rf.level_dot("", convolution())
    assert dot.ops_per_byte(rf.INTO_L1) > 3 * dot.ops_per_byte(rf.INTO_L0)


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


def test_the_rate_into_l0_follows_the_mix_of_a_and_b() -> None:
    only_b, even, only_a = (rf.chip_levels(CHIP, share_of_a=s)[0] for s in (0.0, 0.5, 1.0))
    per_core = CHIP.clock_hz * CHIP.core_count
    assert only_b.rate_bytes_per_s == pytest.approx(256 * per_core)
    assert only_a.rate_bytes_per_s == pytest.approx(512 * per_core)
    assert even.rate_bytes_per_s == pytest.approx(2 / (1 / 256 + 1 / 512) * per_core)


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


def test_n_cores_share_and_a_second_pass_hits_up_to_the_size_of_l2() -> None:
    for n in (1, 8, 16, 32):
        memory = (n << 20) / stream(CHIP, n << 20, 1, n).cycles
        l2 = 256 * (n << 20) / stream(CHIP, n << 20, 256, n).cycles
        assert memory == pytest.approx(min(n * 110, 1200), rel=0.07)
        assert l2 == pytest.approx(min(n * 110, 4000), rel=0.04)
        assert memory <= min(n * 110, 1200)
    edge = load_chip("Ascend310")
    for size, times in ((edge.l2.size_bytes, 1), (edge.l2.size_bytes + (1 << 20), 2)):
        assert stream(edge, size, 2, 2).memory_bytes == times * size


def test_the_cliff_lies_where_a_pass_outgrows_l2() -> None:
    edge = load_chip("Ascend310")
    before, after = (matmul(edge, 2048, side, side, 128, 64, 128, 4, 1, 2) for side in (1792, 2048))
    assert after.memory_bytes > 5 * before.memory_bytes
    assert after.peak_share < 0.7 * before.peak_share
    roomy = replace(edge, l2=replace(edge.l2, size_bytes=1 << 24))
    assert matmul(roomy, 2048, 2048, 2048, 128, 64, 128, 4, 1, 2).peak_share > 0.8


def test_padding_is_counted_by_the_program_as_by_the_formula() -> None:
    for dtype in ("fp16", "int8"):
        for side in (16, 17, 33, 50, 67):
            shape = GemmShape(side, side, side, dtype)
            run = simulate(gemm_launch(shape, CHIP, GemmSchedule(64, 64, 64, 1, 1, 1)), CHIP)
            assert side**3 / run.macs == pytest.approx(useful_share(side, dtype))


def test_the_tile_of_the_deliberate_failure_overflows_l0c() -> None:
    with pytest.raises(CapacityError, match=r"L0C.* 524288 .*262144"):
        matmul(CHIP, 4096, 4096, 4096, 256, 32, 512, 1, 4, 8)


# --- figures --------------------------------------------------------------------------------------
def test_the_widget_figure_moves_and_refuses() -> None:
    small, large = (figures.fig_tile_roofline(side, side) for side in (32, 128))
    assert small.alt_text != large.alt_text
    with pytest.raises(CapacityError, match="L0C"):
        figures.fig_tile_roofline(256, 256, "Ascend910B2")
    with pytest.raises(InputError):
        figures.fig_tile_roofline(40, 64)
