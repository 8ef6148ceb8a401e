"""Cores that work together: values, times of both engines, and what the sanitizer finds."""

from dataclasses import replace

import numpy as np
import pytest
from cube_checks import assert_conv, assert_gemm, pack_channels, run_checked
from hypothesis import HealthCheck, example, given, settings, strategies as st
from mix_cases import CHIP, Relay, relays
from test_conv import conv_shapes
from test_epilogue import RELU6, RESIDUAL, SHAPES, SIGMOID_GELU, WIDE_RESIDUAL

from ascend_lab.compiler import GraphBuilder, evaluate
from ascend_lab.compiler.canonical import canonical
from ascend_lab.compiler.layout import assign_layouts, cancel_trans_data
from ascend_lab.compiler.tasks import compile_tasks
from ascend_lab.compiler.values import run_tasks
from ascend_lab.machine.isa import parse_program, sanitize
from ascend_lab.machine.sim import execute, simulate
from ascend_lab.operators.kernels import (
    ConvShape,
    GemmSchedule,
    GemmShape,
    gemm_launch,
    pack_gemm,
    stacked_schedule,
    unpack_gemm,
)
from ascend_lab.operators.kernels.epilogue import Deq, Epilogue, Operand

FEW = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
GEMM = GemmShape(150, 70, 100, out_dtype="fp16")
TWICE = (2 * np.eye(16)).astype(np.float16).ravel()


def run(case: Relay, seed: int | None = None) -> None:
    tensors = {"x": case.x, "twice0": TWICE}
    tensors |= {"twice2": TWICE} if case.stages == 4 else {}
    y = execute(case.launch(), tensors, CHIP, seed=seed)["y"]
    mask = case.mask()
    np.testing.assert_array_equal(y[mask], case.expected(case.x)[mask])


@given(relays())
@FEW
def test_relays_compute_what_they_should(case: Relay) -> None:
    run(case)
    run(case, seed=7)


@given(relays())
@FEW
def test_both_engines_agree_and_no_false_alarm_is_raised(case: Relay) -> None:
    launch = case.launch()
    assert simulate(launch, CHIP).cycles == simulate(launch, CHIP, engine="reference").cycles
    assert sanitize(launch, CHIP) == []
    for part in launch.parts:
        assert parse_program(str(part.program)) == part.program


BIAS = Operand("bias", "channel", "int32")
SCALE = Operand("scale", "channel", "fp32")
AFTER = {
    "bias_gelu": (GEMM, SIGMOID_GELU),
    "residual": (GEMM, RESIDUAL),
    "wide_residual": (replace(GEMM, out_dtype="fp32"), WIDE_RESIDUAL),
}


@pytest.mark.parametrize("order", ["mn", "nm"])
@pytest.mark.parametrize("name", AFTER)
def test_products_with_any_epilogue_equal_numpy(name: str, order: str) -> None:
    """Odd sizes, tails on both axes, two classes of cores; no race, no flag left."""
    shape, epilogue = AFTER[name]
    schedule = GemmSchedule(48, 32, 48, 2, 2, 1, order=order)
    launch = assert_gemm(shape, CHIP, schedule, epilogue)
    assert launch.mix == 3 and launch.core_count == 2


CONV_AFTER = {"relu6": RELU6, "gelu": SIGMOID_GELU, "residual": RESIDUAL, "wide": WIDE_RESIDUAL}
ODD = ConvShape(3, 20, 7, 7, 40, 3, 3, 1, 1)
EVEN = ConvShape(16, 64, 14, 14, 64, 3, 3, 1, 1)
LOW = GemmSchedule(32, 16, 32, 1, 2, 2)


@given(conv_shapes(), st.sampled_from(sorted(CONV_AFTER)), st.sampled_from([None, LOW]))
@FEW
@example(ConvShape(2, 40, 9, 11, 40, 3, 3, 1, 1, groups=40), "relu6", LOW)
@example(ConvShape(1, 33, 1, 1, 70, 1, 1), "residual", None)
@example(ODD, "gelu", replace(LOW, order="nm"))
@example(EVEN, "residual", stacked_schedule(EVEN, CHIP, RESIDUAL))
@example(replace(SHAPES[2], dtype="fp16"), "wide", replace(LOW, window="strip"))
def test_convolutions_with_any_epilogue_equal_numpy(
    shape: ConvShape, name: str, schedule: GemmSchedule | None
) -> None:
    """Odd and even tiles, in one piece and in rows; no race, no flag left; engines agree."""
    shape = replace(shape, dtype="fp16", out_dtype="fp32" if name == "wide" else "fp16")
    launch = assert_conv(shape, CHIP, schedule, CONV_AFTER[name])
    assert launch.mix == 3


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("shape", [ODD, replace(EVEN, n=1)])
def test_as_many_vector_cores_as_a_chip_has_share_each_tile(shape: ConvShape, count: int) -> None:
    """What is no multiple of their number leaves the last one less, or nothing."""
    chip = replace(CHIP, vector_cores_per_core=count)
    shape = replace(shape, out_dtype="fp16")
    assert assert_conv(shape, chip, LOW, SIGMOID_GELU).mix == 1 + count
    assert assert_gemm(GEMM, chip, None, SIGMOID_GELU).mix == 1 + count


def test_sums_of_bytes_are_dequantised_on_the_vector_cores() -> None:
    """Bias in the cube's table, a scale per channel and ReLU behind it: exact in fp32."""
    shape = GemmShape(70, 70, 90, "int8", "fp16")
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-9, 9, s).astype(np.int8) for s in ((70, 70), (70, 90)))
    bias = rng.integers(-99, 99, 90).astype(np.int32)
    scale = rng.integers(-8, 8, 90) / 8
    after = Epilogue((BIAS, SCALE), (), "fp16", Deq("scale", "bias", relu=True, dtype="fp16"))
    launch = gemm_launch(shape, CHIP, None, after)
    tensors = pack_gemm(shape, a, b) | {"bias": pack_channels(bias)}
    tensors["scale"] = pack_channels(scale.astype(np.float32))
    got = unpack_gemm(shape, run_checked(launch, tensors, CHIP, seed=1))
    sums = a.astype(np.int64) @ b + bias
    np.testing.assert_array_equal(got, np.maximum(sums * scale, 0).astype(np.float16))
    assert launch.mix == 3


def test_a_network_runs_a_product_and_what_follows_as_one_mix_kernel() -> None:
    """Bias in the table of the cube; GELU and the residual on vector cores, read where it lies."""
    net = GraphBuilder("block", "fp16")
    x = net.input("x", (48, 64))
    y = net.input("y", (48, 96))
    product = net.add(net.matmul(x, net.weight((64, 96), scale=0.2)), net.weight((96,)))
    net.output(net.add(net.gelu(product), y))
    graph = cancel_trans_data(assign_layouts(canonical(net.build(), CHIP)))
    work = [n for n in graph.nodes if n.op != "trans_data"]
    groups = [(n,) for n in graph.nodes if n.op == "trans_data" and n.inputs[0] in graph.inputs]
    groups += [tuple(work)]
    groups += [(n,) for n in graph.nodes if n.op == "trans_data" and (n,) not in groups]
    compiled = compile_tasks(graph, CHIP, groups)
    assert any(p.mix for t in compiled.tasks if t.lowered for p in t.lowered.kernel.phases)
    rng = np.random.default_rng(3)
    inputs = {n: rng.normal(size=graph.types[n].shape).astype(np.float16) for n in ("x", "y")}
    (got,) = run_tasks(compiled, inputs).values()
    (wanted,) = evaluate(graph, inputs).values()
    assert np.abs(got.astype(np.float32) - wanted).max() < 0.02
