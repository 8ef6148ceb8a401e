"""fp32 on the cube: chips that list it multiply a fractal of 16 x 8 in two cycles."""

import math

import numpy as np
import pytest
from test_chip import TOY, load, value

from ascend_lab.compiler import GraphBuilder, compile_stages
from ascend_lab.errors import ChipError, TypeMismatchError
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators import ops
from ascend_lab.operators.ops import verify

B2 = load_chip("Ascend910B2")


@pytest.mark.parametrize("name", ["matmul", "batch_matmul", "conv2d"])
def test_values_are_those_of_the_reference(name):
    operator = ops.get(name)
    for example in operator.examples:
        arrays = verify.sample(operator, example.shapes, "fp32", example.attrs)
        got = ops.run(name, *arrays, chip=B2, **example.attrs)
        verify.check_within(operator, got, operator.reference(*arrays, **example.attrs))


def test_it_takes_four_times_as_long_as_fp16_and_no_less_than_its_peak():
    sides = ((2048, 2048), (2048, 2048))
    times = {
        dtype: ops.time("matmul", sides, (dtype, dtype), B2, warm_l2=True).cycles
        for dtype in ("fp16", "fp32")
    }
    assert B2.macs_per_cycle("fp16") == 4 * B2.macs_per_cycle("fp32")
    least = 2048**3 / (B2.macs_per_cycle("fp32") * B2.core_count)
    assert least <= times["fp32"] <= 1.15 * least
    assert 2.5 * times["fp16"] < times["fp32"] <= 4.5 * times["fp16"]


def test_chips_without_it_and_graphs_refuse_it_by_name():
    with pytest.raises(TypeMismatchError, match="cube unit of Ascend910A: fp16 or int8; got fp32"):
        ops.compile("matmul", ((16, 16), (16, 16)), ("fp32", "fp32"), load_chip("Ascend910A"))
    net = GraphBuilder("one")
    net.output(net.matmul(net.input("x", (16, 16)), net.input("y", (16, 16))))
    with pytest.raises(TypeMismatchError, match="in a graph: fp16 or int8 or bf16; got fp32"):
        compile_stages(net.build(), B2, dtype="")


def test_a_file_may_take_a_fractal_in_several_steps_of_k_in_fp32_alone(tmp_path):
    sides = f"[cube.fp32]\nm = {value('16')}\nk = {value('4')}\nn = {value('16')}\n"
    energy = f"fp32_energy_pj = {value('4.6')}"
    text = TOY.replace("[launch]", f"[cube]\n{energy}\n{sides}[launch]", 1)
    chip = load(tmp_path, text)
    assert math.prod(chip.cube_shape("fp32")) == 1024
    for wrong in ("3", "16"):
        with pytest.raises(ChipError, match=r"cube\.fp32\.k needs 8, the side of a fractal"):
            load(tmp_path, text.replace(f"k = {value('4')}", f"k = {value(wrong)}"))
    assert np.isclose(chip.mac_energy_pj["fp32"], 4.6)
