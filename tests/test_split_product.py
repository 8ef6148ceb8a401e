"""Products in phases, K divided: values on poisoned memory, simulators, the default."""

from dataclasses import replace

import numpy as np
import pytest
from cube_checks import numbers, on, run_checked

from ascend_lab.compiler import GraphBuilder, compile_graph, evaluate
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import CapacityError, InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.sim.timeline import start_cycles
from ascend_lab.operators.kernels import (
    GemmSchedule,
    GemmShape,
    gemm_launch,
    pack_gemm,
    unpack_gemm,
)
from ascend_lab.operators.kernels.epilogue import Epilogue, Step
from ascend_lab.operators.ops.matmul import (
    default_product,
    least_cycles,
    product_kernel,
    warm_cycles,
)

WAYS = ({}, {"keep": "a"}, {"keep": "b", "order": "nm"}, {"step_k": 1, "a_l1_slots": 1})


@pytest.mark.parametrize("chip_name", on("Toy", "Ascend310P3", "Ascend910A", "Ascend910B2"))
@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_divided_products_are_right(chip_name, dtype, way):
    """Ragged sides, and shares of K that are not equal: 13 fractals, or 7, in three."""
    chip = load_chip(chip_name)
    shape = GemmShape(50, 205, 70, dtype)
    cores = 1 if chip_name == "Toy" else 2
    schedule = GemmSchedule(32, 32, 32, 2, 1, cores, split_k=2 if chip_name == "Toy" else 3)
    kernel = product_kernel(shape, chip, replace(schedule, **way))
    rng = np.random.default_rng(7)
    a = numbers(rng, (50, 205), dtype)
    b = numbers(rng, (205, 70), dtype)
    found = run_checked(kernel, pack_gemm(shape, a, b), chip, seed=3)
    wide = np.int64 if dtype == "int8" else np.float64
    assert np.array_equal(unpack_gemm(shape, found), a.astype(wide) @ b.astype(wide))


def test_what_does_not_go_with_a_division_is_refused():
    chip = load_chip("Ascend910A")
    shape = GemmShape(64, 512, 64)
    whole = GemmSchedule(16, 16, 16, 1, 4, 4, split_k=2)
    with pytest.raises(InputError, match="no epilogue behind a part of K"):
        gemm_launch(shape, chip, whole, Epilogue((), (Step("vrelu", ("sums",)),), "fp32"))
    with pytest.raises(InputError, match="at most 32 cores"):
        gemm_launch(shape, chip, replace(whole, split_k=3))
    with pytest.raises(InputError, match="split_k of at least 1"):
        gemm_launch(shape, chip, replace(whole, split_k=0))
    deep = GemmShape(64, 32768, 64)
    with pytest.raises(CapacityError):
        gemm_launch(deep, chip, replace(whole, keep="a"))
    alone = replace(whole, keep="a", split_k=32, grid_rows=1, grid_cols=1)
    assert gemm_launch(deep, chip, alone).core_count == 32


DEEP = {
    "skinny": ("Ascend910B2", GemmShape(128, 3072, 768, "fp16", "fp16"), 0.85),
    "coupled": ("Ascend910A", GemmShape(128, 3072, 768, "fp16", "fp16"), 0.9),
    "bytes, few tiles": ("Ascend910B2", GemmShape(128, 16384, 256, "int8"), 0.6),
}


@pytest.mark.parametrize("case", DEEP.values(), ids=DEEP)
def test_the_default_divides_k_where_that_is_quicker(case):
    """Within a launch that has cores of both kinds; alone not where they start later."""
    name, shape, share = case
    chip = load_chip(name)

    def body(schedule, start="inside"):
        cycles = warm_cycles(product_kernel(shape, chip, schedule), chip, (), start)
        return cycles - start_cycles(chip, start)

    chosen, alone = (default_product(shape, chip, start=start) for start in ("inside", "cold"))
    assert chosen.split_k > 1 and body(alone, "cold") <= body(chosen, "cold")
    later = round(chip.mix_start_s * chip.clock_hz)
    assert body(chosen, "cold") == body(chosen) + later
    assert (alone.split_k > 1) == (later == 0)
    epilogue = Epilogue((), (Step("vrelu", ("sums",)),), "fp32") if shape.dtype == "fp16" else None
    if epilogue:  # K stays whole where nobody says how to finish
        assert default_product(shape, chip, epilogue).split_k == 1
    whole = [GemmSchedule(64, 128, 64, 1, 2, 12), GemmSchedule(64, 256, 32, 1, 2, 8)]
    assert body(chosen) <= share * min(map(body, whole))
    assert body(chosen) >= least_cycles(shape, chip)


@pytest.mark.parametrize("chip_name", ["Ascend910A", "Ascend910B2"])
@pytest.mark.parametrize("follows", ["", "bias", "bias, residual, relu"])
def test_networks_divide_k_and_keep_their_values(chip_name, follows):
    """What follows the sums is done by the phase that adds them."""
    net = GraphBuilder("deep", "fp16")
    rng = np.random.default_rng(1)
    y = net.matmul(net.input("x", (20, 2048)), net.weight((2048, 48)))
    if follows:
        y = net.add(y, net.constant(numbers(rng, (48,), "fp16")))
    if "relu" in follows:
        y = net.relu(net.add(y, net.input("r", (20, 48))))
    net.output(y)
    graph = net.build()
    compiled = compile_graph(graph, replace(load_chip(chip_name), mix_start_s=0.0))
    product = next(t for t in compiled.tasks if t.piece.graph.nodes[0].op == "matmul")
    assert len(product.lowered.kernel.phases) == 2
    inputs = {name: numbers(rng, graph.types[name].shape, "fp16") for name in graph.inputs}
    wanted = evaluate(graph, inputs)
    found = run_tasks(compiled, inputs)
    (got,) = found.values()
    (true,) = wanted.values()
    np.testing.assert_allclose(got, true, rtol=4e-3, atol=4e-3)
