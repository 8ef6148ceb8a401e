"""The road of the compiler that was measured: what it has, its tilings, and its words."""

from pathlib import Path

import numpy as np
import pytest
from command_lines import refused, run_json

from ascend_lab.compare import compare
from ascend_lab.compare.table import COLUMNS
from ascend_lab.compiler import GraphBuilder, evaluate, fusion, passes, random_inputs
from ascend_lab.compiler.compile import Road
from ascend_lab.compiler.like_cann import (
    NAMED,
    OURS,
    cann_road,
    convolution_tiling,
    product_tiling,
    switches,
    tiling_of,
    tiling_of_operator,
)
from ascend_lab.compiler.lower import Choice
from ascend_lab.compiler.tasks import lowered_once
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import PRESETS, load_chip
from ascend_lab.operators.kernels import ConvShape, GemmShape
from ascend_lab.operators.kernels.conv_schedules import check_conv
from ascend_lab.operators.kernels.gemm_schedule import check_schedule

P3 = load_chip("Ascend310P3")
B2 = load_chip("Ascend910B2")


# -- what the vendor has ---------------------------------------------------------------------------
def test_every_pass_and_rule_is_named_by_a_document_or_is_ours():
    known = {("GraphFusion", name) for name in passes.PASSES}
    known |= {("UBFusion", rule.name) for rule in fusion.rules()}
    known.add(("UBFusion", fusion.AUTOMATIC))
    assert NAMED.keys().isdisjoint(OURS)
    assert NAMED.keys() | OURS.keys() == known
    assert all(NAMED.values()) and all(OURS.values())


@pytest.mark.parametrize("name", ["Ascend310DK", "Ascend310P3", "Ascend910A", "Ascend910B2"])
def test_fused_attention_is_there_on_the_chips_that_have_it(name):
    found = switches(load_chip(name))
    assert found.is_on("FlashAttentionFusionPass", "GraphFusion") == name.startswith("Ascend910B")
    assert not found.is_on("TandemConvolutionFusionPass")
    assert found.is_on("TbeConvElemwiseFusionPass")


# -- tilings ---------------------------------------------------------------------------------------
def test_the_basic_block_of_a_large_product():
    wide = product_tiling(GemmShape(4096, 4096, 4096), B2)
    assert (wide.base_m, wide.base_n, wide.base_k) == (128, 256, 64)
    assert wide.step_k == 4  # 512 KiB / 2 / (256 x 64 x 2 B) / 2 buffers
    assert wide.grid_rows * wide.grid_cols <= B2.core_count
    square = product_tiling(GemmShape(4096, 4096, 4096), P3)
    assert (square.base_m, square.base_n) == (256, 256)  # 256 KiB of L0C
    assert product_tiling(GemmShape(4096, 4096, 4096, "int8"), B2).base_k == 128


def test_a_product_of_few_blocks_is_balanced_over_the_cores():
    found = product_tiling(GemmShape(512, 1024, 512), B2)
    blocks = -(-512 // found.base_m) * -(-512 // found.base_n)
    assert blocks > 8  # of 128 x 256 there are 8
    assert found.grid_rows * found.grid_cols > 8


SIZES = [(1, 16, 1), (64, 64, 64), (17, 100, 4096), (4096, 40, 33), (3000, 5000, 7000)]


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "Toy"])
@pytest.mark.parametrize("size", SIZES)
def test_a_tiling_of_an_operator_fits_its_chip(name, size):
    m, k, n = size
    chip = load_chip(name)
    tiling = tiling_of_operator([(m, k), (n, k)], ("fp16", "fp16"), chip, {"trans_b": True})
    check_schedule(GemmShape(m, k, n), tiling, chip)


def test_pixels_of_one_image_are_the_rows_of_a_convolution():
    shape = ConvShape(4, 64, 56, 56, 64, 3, 3, 1, 1)
    found = convolution_tiling(shape, P3)
    assert found.base_n == 64 and found.base_m % 16 == 0
    small = convolution_tiling(ConvShape(64, 512, 7, 7, 512, 3, 3, 1, 1), P3)
    assert small.base_m <= 64  # 49 pixels of an image are 4 fractals
    check_conv(shape, found, P3)


# -- the road --------------------------------------------------------------------------------------
def block():
    """Return two convolutions with a shortcut, a pooling and a product, small enough to run."""
    net = GraphBuilder("block")
    x = net.input("x", (2, 3, 24, 24))
    first = net.relu(net.conv2d(x, net.weight((32, 3, 3, 3), "w1"), pad=1))
    low = net.max_pool2d(first, kernel=2, stride=2)
    second = net.conv2d(low, net.weight((32, 32, 3, 3), "w2"), pad=1)
    net.output(net.relu(net.add(second, low)))
    return net.build()


@pytest.mark.parametrize("small", [False, True])
def test_values_are_those_of_the_evaluator(small):
    graph = block()
    chip = load_chip("Ascend310")
    stages = cann_road(chip, small_channel=small).stages(graph, chip)
    inputs = random_inputs(graph, 3)
    found = run_tasks(stages.compiled, inputs, graph.outputs)
    wanted = evaluate(graph, inputs)
    for name in graph.outputs:
        scale = np.abs(wanted[name]).max()
        assert np.abs(found[name] - wanted[name]).max() <= 0.01 * scale


def test_pooling_is_a_kernel_of_its_own_and_a_cache_gets_no_hints():
    stages = cann_road(P3).stages(block(), P3)
    kinds = [task.op for task in stages.compiled.tasks if task.lowered]
    assert "max_pool2d" in kinds and not stages.compiled.hints
    ours = Road().stages(block(), P3).compiled
    assert ours.hints and len(ours.tasks) < len(stages.compiled.tasks)


def test_kernels_of_the_cube_have_the_published_tiling():
    stages = cann_road(P3).stages(block(), P3)
    tiled = [task for task in stages.compiled.tasks if task.op.startswith("conv2d")]
    assert tiled
    for task in tiled:
        rule = tiling_of(task.piece, P3)
        assert rule is not None
        assert task.lowered is lowered_once(task.piece, P3, Choice(rule))  # remembered


# -- words -----------------------------------------------------------------------------------------
def test_simulate_takes_the_road(capsys):
    words = ["simulate", "zoo:resnet18", "--chip", "Ascend310P3", "--json", "-"]
    ours = run_json(capsys, *words)
    like = run_json(capsys, *words, "--like", "cann")
    small = run_json(capsys, *words, "--like", "cann", "--enable_small_channel", "1")
    assert ours["time_s"] < small["time_s"] < like["time_s"]


def test_words_that_do_not_go_together_are_refused(capsys):
    words = ["simulate", "zoo:resnet18", "--chip", "Ascend310P3"]
    assert "--no-fusion" in refused(capsys, *words, "--like", "cann", "--no-fusion")
    assert "--enable_small_channel" in refused(capsys, *words, "--enable_small_channel", "1")
    product = ["op", "softmax", "64x64", "--chip", "Ascend310P3", "--like", "cann"]
    assert "matmul" in refused(capsys, *product)


def row(**given: str) -> str:
    """Return a line of a table of measured rows; what is not given is empty."""
    return ",".join(given.get(name, "") for name in COLUMNS)


def test_compare_takes_the_road_and_says_where_there_is_none(tmp_path: Path):
    common = {"chip": "Ascend310P3", "dtype": "fp16", "measured_us": "100", "l2": "cold"}
    net = {"group": "network", "operator": "zoo:squeezenet_1_1", "timing": "step"}
    lines = [
        ",".join(COLUMNS),
        row(case="plain", attributes="batch=1", inputs="1x3x224x224", **net, **common),
        row(
            case="small",
            attributes="batch=1;small_channel=1",
            inputs="1x3x224x224",
            **net,
            **common,
        ),
        row(case="product", group="gemm", operator="matmul", inputs="512x512;512x512",
            timing="kernel", **common),
        row(case="sum", group="elementwise", operator="add", inputs="512x512;512x512",
            timing="kernel", **common),
    ]  # fmt: skip
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines), "utf-8")
    ours = compare(path).rows
    like = compare(path, like="cann").rows
    assert all(one.error is not None for one in (*ours, *like))
    assert ours[0].model_s == ours[1].model_s  # our compiler decides by itself
    assert ours[1].model_s < like[1].model_s < like[0].model_s
    assert like[2].model_s >= ours[2].model_s
    assert like[3].model_s == ours[3].model_s
    assert "CANN" in " ".join(like[3].marks) and not like[2].marks
    with pytest.raises(InputError, match="cann"):
        compare(path, like="another")
