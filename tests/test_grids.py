"""A tile of one's own gets the quickest grid of cores; a grid that is given is obeyed."""

import json
from dataclasses import replace

import pytest

from ascend_lab.cli import ascend_lab as main
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Launch
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels import (
    ConvShape,
    GemmSchedule,
    GemmShape,
    best_grid,
    conv_launch,
    conv_schedule,
    default_schedule,
    gemm_launch,
)

Shape = GemmShape | ConvShape
CASES: dict[str, tuple[str, Shape, tuple[int, int, int]]] = {
    "12 of 24 cores": ("Ascend910B2", GemmShape(192, 512, 8192), (96, 64, 128)),
    "square on 32": ("Ascend910A", GemmShape(2048, 512, 2048), (128, 64, 128)),
    "low": ("Ascend910A", GemmShape(100, 2000, 3000), (64, 32, 64)),
    "narrow": ("Ascend910A", GemmShape(512, 512, 77), (16, 16, 16)),
    "eight cores": ("Ascend310P3", GemmShape(1536, 512, 1536), (128, 64, 128)),
    "two cores": ("Toy", GemmShape(100, 200, 300), (64, 32, 64)),
    "int8": ("Ascend910B2", GemmShape(640, 256, 384, "int8"), (64, 64, 64)),
    "conv": ("Ascend310P3", ConvShape(2, 64, 28, 28, 64, 3, 3, 1, 1), (64, 48, 16)),
    "conv, fewer cores are quicker": (
        "Ascend310P3",
        ConvShape(3, 128, 28, 28, 32, 1, 1, 2, 0, "int8", ""),
        (48, 128, 48),
    ),
    "groups": ("Ascend910B2", ConvShape(2, 64, 14, 14, 64, 3, 3, 1, 1, groups=8), (64, 48, 16)),
}


def launch_of(shape: Shape, chip_name: str, schedule: GemmSchedule) -> Launch:
    chip = load_chip(chip_name)
    if isinstance(shape, ConvShape):
        return conv_launch(shape, chip, schedule)
    return gemm_launch(shape, chip, schedule)


def cycles_of(shape: Shape, chip_name: str, schedule: GemmSchedule) -> int:
    return simulate(launch_of(shape, chip_name, schedule), load_chip(chip_name)).cycles


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_grid_is_quicker(case: tuple[str, Shape, tuple[int, int, int]]) -> None:
    name, shape, (m, k, n) = case
    chip = load_chip(name)
    rule = conv_schedule if isinstance(shape, ConvShape) else default_schedule
    given = replace(rule(shape, chip), base_m=m, base_k=k, base_n=n, step_k=1)  # type: ignore[operator]
    found = best_grid(shape, chip, given)
    assert replace(found, grid_rows=given.grid_rows, grid_cols=given.grid_cols) == given
    every: dict[Launch, int] = {}
    for rows in range(1, chip.core_count + 1):
        for cols in range(1, chip.core_count // rows + 1):
            launch = launch_of(shape, name, replace(given, grid_rows=rows, grid_cols=cols))
            if launch not in every:
                every[launch] = simulate(launch, chip).cycles
    assert cycles_of(shape, name, found) == min(every.values())


def test_an_operator_takes_a_tile_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("op", "matmul", "2048x512", "2048x512", "--attr", "trans_b=True")
    words = (*words, "--chip", "Ascend910A", "--tile", "128,64,128", "--json", "-")
    cycles = {}
    for grid in ((), ("--grid", "1x12"), ("--grid", "2x16"), ("--grid", "8x4")):
        assert main([*words, *grid]) == 0
        data = json.loads(capsys.readouterr().out)
        cycles[grid] = data["cycles"]
        assert data["schedule"]["base_n"] == 128
    assert cycles[()] == min(cycles.values())
    assert main(["op", "relu", "64x64", "--chip", "Toy", "--tile", "16,16,16"]) == 2
    assert "matmul for --tile" in capsys.readouterr().err
