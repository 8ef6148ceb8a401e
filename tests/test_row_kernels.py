"""Row kernels in the structure of the vendor's library: which one, what it moves and pays."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from ascend_lab.compare import compare
from ascend_lab.compare.estimates import Estimate, fetched
from ascend_lab.compare.row_kernels import row_kernel
from ascend_lab.compare.row_writer import Rows, RowWriter
from ascend_lab.compare.rows import Work
from ascend_lab.compare.table import COLUMNS
from ascend_lab.compare.unaligned import ARCH22_FAMILIES
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim import analyse, simulate
from ascend_lab.operators import ops

CHIP = load_chip("Ascend910B2")
WHOLE = ((1023, 1024), (1, 1024), (1023,))


def kernel(operator, *shapes, dtype="fp16", chip=CHIP, **work):
    return row_kernel(Work(operator, chip.name, shapes, dtypes=(dtype,), **work), chip)


@pytest.mark.parametrize(
    ("operator", "shapes", "dtype", "name"),
    [
        ("rms_norm", ((4096, 4096), (4096,)), "fp16", "rms_norm"),
        ("rms_norm", ((4096, 1021), (1021,)), "fp16", "rms_norm_merged"),
        ("rms_norm", ((4096, 10240), (10240,)), "fp32", "rms_norm"),
        ("rms_norm", ((4096, 10241), (10241,)), "fp32", None),  # rows that are cut
        ("rms_norm", ((64, 4, 1024), (1024,)), "fp16", None),  # a decoding batch
        ("rms_norm", ((4096, 16, 64), (16, 64)), "fp32", "rms_norm_merged"),
        ("dynamic_quant", ((1023, 1023),), "fp16", "dynamic_quant"),
        ("dynamic_quant", ((1023, 1024),), "bf16", "dynamic_quant_rows"),
        ("dynamic_quant", ((1023, 64),), "bf16", "dynamic_quant"),
        ("dynamic_quant", ((100, 4096),), "fp16", None),  # few rows of a usual length
        ("dynamic_quant", ((4096, 40001),), "fp16", None),
        ("dynamic_quant", ((1023, 1023), (1023,)), "fp16", None),  # smoothed
        ("add_rms_norm_dynamic_quant", ((99, 8192), (99, 8192), (8192,)), "bf16", "same"),
        ("add_rms_norm_dynamic_quant", ((99, 14336), (99, 14336), (14336,)), "bf16", None),
        ("dequant_swiglu_quant", ((99, 2048),), "bf16", "same"),
        ("dequant_swiglu_quant", WHOLE, "int32", "same"),
        ("dequant_swiglu_quant", ((99, 8192), (99,)), "int32", None),  # one scale is missing
        ("softmax", ((99, 2048),), "fp16", None),
    ],
)
def test_a_shape_has_the_kernel_of_the_tiling_or_none(operator, shapes, dtype, name):
    found = kernel(operator, *shapes, dtype=dtype)
    assert (found.name if found else None) == (operator if name == "same" else name)


def test_none_where_the_library_has_another_one_or_l2_holds_the_operands():
    shape = (1023, 1023)
    assert kernel("dynamic_quant", shape)
    assert kernel("dynamic_quant", shape, l2="warm") is None
    assert kernel("dynamic_quant", shape, attributes={"cores": 4}) is None
    for other in ("Ascend310P3", "Ascend950PR"):
        assert not other.startswith(ARCH22_FAMILIES)
        assert kernel("dynamic_quant", shape, chip=load_chip(other)) is None


@pytest.mark.parametrize("columns", [1, 129, 511, 1000, 2048, 4097])
@pytest.mark.parametrize("count", [1, 47, 97, 1025])
def test_every_row_is_moved_once_whatever_its_length(count, columns):
    shape = (count, columns)
    moved = {
        "dynamic_quant": (shape,),
        "add_rms_norm_dynamic_quant": (shape, shape, (columns,)),
        "rms_norm": (shape, (columns,)),
    }
    for operator, shapes in moved.items():
        launch = kernel(operator, *shapes)
        if launch is None:
            continue
        own = count * columns * 2 * (2 if operator.startswith("add") else 1)
        gamma = 0 if operator == "dynamic_quant" else columns * 2 * launch.core_count
        assert analyse(launch, CHIP).path_bytes["GM", "UB"] == own + gamma


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int32"])
@pytest.mark.parametrize("half", [7, 64, 512, 1537, 4097])
@pytest.mark.parametrize("smooth", [False, True])
def test_both_halves_of_a_row_come_in_and_one_goes_out(half, dtype, smooth):
    count = 200
    shapes = [(count, 2 * half)]
    constants = 0
    if dtype == "int32":
        shapes += [(1, 2 * half), (count,)]
        constants += 2 * half * 4
    if smooth:
        shapes += [(1, half)]
        constants += half * 4
    launch = kernel("dequant_swiglu_quant", *shapes, dtype=dtype)
    traffic = analyse(launch, CHIP).path_bytes
    own = count * 2 * half * (4 if dtype == "int32" else 2)
    assert traffic["GM", "UB"] == own + constants * launch.core_count
    assert traffic["UB", "GM"] == count * half


def test_few_short_rows_take_twelve_cores_and_tiles_come_before_cores():
    assert kernel("dequant_swiglu_quant", (127, 1024)).core_count == 12
    assert kernel("dequant_swiglu_quant", (128, 1024)).core_count == 43  # 3 rows each
    assert kernel("dynamic_quant", (512, 1024)).core_count == 32  # 34 tiles of 15, 16 rows each
    assert kernel("dynamic_quant", (513, 1025)).core_count == 47  # 11 rows each


def test_barriers_are_paid_behind_nearly_every_vector_instruction():
    launch = kernel("dynamic_quant", (4800, 373))
    free = replace(CHIP, barrier_cycles=0)
    saved = simulate(launch, CHIP).cycles - simulate(launch, free).cycles
    # Of 13 instructions for a row of 100, the last two and the first have no barrier.
    assert 100 * 9 * CHIP.barrier_cycles <= saved <= 100 * 12 * CHIP.barrier_cycles


def test_halving_adds_what_is_behind_the_largest_power_of_two_first():
    writer = RowWriter("one", CHIP, Rows(1, 1000, "fp32"), 1, 1)
    writer.halving_sum(1000)
    sums = [i for i, _ in writer.k.finish().instructions() if i.op in ("vadd", "vcadd")]
    assert [i.srcs[0].sizes[0] * 64 for i in sums] == [512, 256, 128, 64, 64]


def test_compare_takes_the_librarys_structure_and_keeps_the_bound(tmp_path: Path):
    given = {"group": "rows", "chip": CHIP.name, "l2": "cold", "timing": "kernel"}
    given |= {"operator": "rms_norm", "dtype": "fp16", "attributes": "axis=-1"}
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for columns in (4096, 65536):
            inputs = f"1024x{columns};{columns}"
            table.writerow({**given, "case": str(columns), "inputs": inputs, "measured_us": 100})
    whole, cut = compare(path).rows
    alone = ops.time("rms_norm", [(1024, 4096), (4096,)], ["fp16", "fp16"], CHIP, axis=-1)
    assert whole.model_s > alone.time_s
    assert "in the library's structure: rms_norm" in whole.marks
    fetch_us = 1e6 * 47 * CHIP.library_fetch_s  # 1024 rows: 22 to a core
    assert f"with {fetch_us:.1f} us until 47 cores have fetched its code" in whole.marks
    assert not any("library" in mark for mark in cut.marks)  # it cuts such a row: not written
    like = compare(path, like="cann").rows
    assert [row.model_s for row in like] == [whole.model_s, cut.model_s]
    assert [row.bound_s for row in like] == [whole.bound_s, cut.bound_s]
    assert "ours" in " ".join(like[1].marks)


def test_the_fetch_of_a_chip_without_a_number_is_none():
    row = Estimate(1e-5, None, "V")
    assert fetched(row, load_chip("Ascend310P3"), 8).model_s == row.model_s
    assert fetched(row, CHIP, 10).model_s == row.model_s + 10 * CHIP.library_fetch_s
