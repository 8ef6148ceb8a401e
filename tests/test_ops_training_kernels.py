"""Kernels of training's own operators: gradients of convolution weights and of pooling."""

import numpy as np
import pytest

from ascend_lab.compiler import GraphBuilder, compile_graph, evaluate, random_inputs, run_compiled
from ascend_lab.errors import CapacityError, ShapeError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import as_kernel, sanitize
from ascend_lab.machine.layout import address_map, pack
from ascend_lab.machine.sim import execute
from ascend_lab.operators import ops
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.weight_gradient import ZEROS, splits_of, weight_gradient_launch
from ascend_lab.operators.kernels.weight_plan import Stage, WeightPlan, weight_plan
from ascend_lab.operators.ops import verify
from ascend_lab.operators.ops.convolution import Geometry, conv_weight_slope

CHIPS = ("Ascend910A", "Ascend910B2")
WEIGHT = ops.get("conv2d_grad_weight")
CONV = ops.get("conv2d")


def fp64(shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape)


# -- weights of a convolution: what the operator says ---------------------------------------------
def test_gradients_of_parts_of_a_batch_add_up_and_of_channels_join():
    image = fp64((4, 6, 8, 8))
    grad = fp64((4, 10, 8, 8), 1)
    whole = WEIGHT.reference(image, grad, kernel=3, pad=1)
    rules = WEIGHT.slice_rules((image.shape, grad.shape), {"kernel": 3, "pad": 1})
    assert [rule.kind for rule in rules.axes] == ["free", "free", "whole", "whole"]
    assert [r.sources for r in rules.reductions] == [((0, 0), (1, 0))]
    halves = [WEIGHT.reference(image[i::2], grad[i::2], kernel=3, pad=1) for i in range(2)]
    np.testing.assert_allclose(sum(halves), whole, atol=1e-12)
    part = ops.cut(rules, (image.shape, grad.shape), {"kernel": 3, "pad": 1}, 0, (4, 10))
    rows = WEIGHT.reference(*ops.take((image, grad), part.ranges), **part.attrs)
    np.testing.assert_allclose(rows, whole[4:10], atol=1e-12)


# -- weights of a convolution: the kernel ---------------------------------------------------------
def values_of(shape, chip, plan):
    """Return dW by the kernel, partial sums added, and by the formula."""
    rng = np.random.default_rng(3)
    oh, ow = shape.out_hw
    x, grad = (
        rng.standard_normal(s).astype(np.float16)
        for s in ((shape.n, shape.c, shape.h, shape.w), (shape.n, shape.k, oh, ow))
    )
    kernel = as_kernel(weight_gradient_launch(shape, chip, plan))
    tensors = {
        "x": pack(address_map("NC1HWC0", x.shape, "fp16"), x),
        "grad": pack(address_map("NC1HWC0", grad.shape, "fp16"), grad),
        "zeros": np.zeros(ZEROS, np.float16),
    }
    assert sanitize(kernel, chip, filled=tensors) == []
    memory = execute(kernel, tensors, chip)
    (c1, k1) = shape.blocks
    parts = memory["y"][None] if "y" in memory else memory["partial"]
    total = parts.reshape(splits_of(shape, plan), -1).astype(np.float64).sum(axis=0)
    dw = total.reshape(c1, shape.r, shape.s, k1 * 16, 16).transpose(3, 0, 4, 1, 2)
    top, bottom, left, right = shape.pads
    geom = Geometry(shape.strides, ((top, bottom), (left, right)), shape.dilations)
    wanted = conv_weight_slope(grad.astype(float), x.astype(float), (shape.r, shape.s), geom, 1)
    return dw.reshape(k1 * 16, c1 * 16, shape.r, shape.s)[: shape.k, : shape.c], wanted


STRIDE_1 = ConvShape(4, 20, 12, 9, 33, 3, 3, 1, 1)
STRIDE_2 = ConvShape(4, 20, 12, 9, 33, 3, 3, 2, 1)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("grid", [(1, 1, 1, 1), (2, 2, 2, 2)])
@pytest.mark.parametrize(
    ("shape", "stage"),
    [
        *((STRIDE_1, stage) for stage in (Stage(2, 12), Stage(1, 12), Stage(1, 4), Stage(1, 1))),
        *((STRIDE_2, stage) for stage in (Stage(4, 6), Stage(1, 3), Stage(1, 1))),
    ],
)
def test_any_stage_and_grid_gives_the_same_weights(chip, shape, stage, grid):
    plan = WeightPlan(2, 1, 4, stage, grid)
    got, wanted = values_of(shape, load_chip(chip), plan)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    "shape",
    [
        ConvShape(1, 16, 8, 8, 16, 1, 1),
        ConvShape(2, 20, 9, 8, 33, 1, 1, 2, 0),
        ConvShape(2, 20, 9, 7, 33, 3, 2, 2, (1, 0, 0, 1)),
        ConvShape(3, 3, 12, 13, 40, 5, 3, (2, 3), (2, 2, 1, 1), dilation=(1, 2)),
        ConvShape(2, 20, 9, 8, 33, 3, 3, 1, 2, dilation=2),
        ConvShape(1, 3, 22, 20, 70, 7, 7, 2, 3),
        ConvShape(2, 40, 3, 3, 90, 3, 3, 3, 2),
    ],
)
def test_strides_pads_and_dilations(chip, shape):
    chip = load_chip(chip)
    got, wanted = values_of(shape, chip, weight_plan(shape, chip))
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)


def test_sums_of_too_many_taps_are_refused_and_the_vector_unit_does_them():
    shape = ConvShape(1, 16, 20, 20, 16, 20, 20)
    chip = load_chip("Ascend910A")
    with pytest.raises(CapacityError, match="400 taps in L0C"):
        weight_plan(shape, chip)
    verify.check_values(WEIGHT, ((1, 2, 20, 20), (1, 3, 1, 1)), {"kernel": 20}, "fp16", chip)


# -- pooling --------------------------------------------------------------------------------------
def test_of_equal_elements_the_first_gets_the_gradient():
    image = np.ones((1, 1, 4, 4))
    grad = np.arange(1.0, 5.0).reshape(1, 1, 2, 2)
    got = ops.get("max_pool2d_grad").reference(image, np.ones_like(grad), grad, kernel=2)
    np.testing.assert_array_equal(got[0, 0, ::2, ::2], grad[0, 0])
    assert got.sum() == grad.sum()
    with pytest.raises(ShapeError, match=r"grad of shape \(1, 1, 2, 2\)"):
        ops.get("max_pool2d_grad").infer(image.shape, grad.shape, image.shape, kernel=2)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("x", "attrs"),
    [
        ((1, 16, 112, 112), {"kernel": 3, "stride": 2, "pad": 1}),
        ((2, 33, 57, 40), {"kernel": 2}),
        ((1, 20, 40, 61), {"kernel": 2, "stride": 3}),
        ((1, 16, 50, 120), {"kernel": (5, 3), "stride": 1, "pad": (2, 1)}),
    ],
)
def test_blocks_of_rows_join(chip, x, attrs):
    chip = load_chip(chip)
    forward = ops.get("max_pool2d")
    image = np.rint(fp64(x) * 4).astype(np.float16)
    y = forward.reference(image, **attrs)
    grad = np.rint(fp64(y.shape, 1) * 64).astype(np.float16)
    operator = ops.get("max_pool2d_grad")
    got = ops.run(operator, image, y, grad, chip=chip, **attrs)
    np.testing.assert_array_equal(got, operator.reference(image, y, grad, **attrs))
    average = ops.get("avg_pool2d_grad")
    got = ops.run(average, grad, chip=chip, size=x[2:], **attrs)
    wanted = average.reference(grad, size=x[2:], **attrs)
    np.testing.assert_allclose(got, wanted, rtol=4e-3, atol=0.1)


# -- in graphs ------------------------------------------------------------------------------------
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("out_dtype", [None, "fp32"])
def test_gradients_in_a_graph(chip, out_dtype):
    net = GraphBuilder("backward")
    x = net.input("x", (2, 20, 9, 9), "fp16")
    y = net.max_pool2d(x, kernel=3, stride=2, pad=1)
    grad = net.input("grad", y.shape, "fp16")
    dx = net.max_pool2d_grad(x, y, grad, kernel=3, stride=2, pad=1)
    net.output(net.avg_pool2d_grad(y, kernel=3, stride=2, pad=1, size=(9, 9)))
    net.output(net.conv2d_grad_weight(x, dx, kernel=3, pad=1, out_dtype=out_dtype))
    graph = net.build()
    kinds = {n.op: compiled_layout for n, compiled_layout in layouts_of(graph, chip)}
    assert kinds["max_pool2d_grad"] == kinds["avg_pool2d_grad"] == "NC1HWC0"
    assert kinds["conv2d_grad_weight"].startswith("FRACTAL_Z")
    inputs = random_inputs(graph)
    got = run_compiled(graph, inputs, chip=load_chip(chip))
    wanted = evaluate(graph, inputs)
    for name in graph.outputs:
        np.testing.assert_allclose(got[name], wanted[name], rtol=4e-3, atol=0.06)


def layouts_of(graph, chip):
    """Return each node of the compiled graph with the layout it writes."""
    compiled = compile_graph(graph, chip)
    return [(node, compiled.graph.types[node.output].layout) for node in compiled.graph.nodes]


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("rows", "k", "columns"), [(16, 1, 1), (32, 20, 33), (208, 48, 17), (33, 20, 33)]
)
def test_gradients_of_dense_weights_read_fractals_as_they_lie(chip, rows, k, columns):
    net = GraphBuilder("dense")
    a = net.input("a", (rows, k), "fp16")
    b = net.input("b", (rows, columns), "fp16")
    net.output(net.relu(net.matmul(a, b, trans_a=True)))
    graph = net.build()
    layouts = [layout for node, layout in layouts_of(graph, chip) if node.op == "trans_data"]
    turned = ["FRACTAL_NZ", "FRACTAL_NZ"] if rows % 16 == 0 else ["FRACTAL_ZN", "FRACTAL_ZN"]
    assert layouts[:2] == turned
    inputs = random_inputs(graph)
    got = run_compiled(graph, inputs, load_chip(chip))
    wanted = evaluate(graph, inputs)
    name = graph.outputs[0]
    np.testing.assert_allclose(got[name], wanted[name], rtol=4e-3, atol=4e-3)


# -- depthwise ------------------------------------------------------------------------------------
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("out_dtype", [None, "fp32"])
@pytest.mark.parametrize(
    ("n", "c", "size", "attrs"),
    [
        (4, 33, 14, {"kernel": 3, "stride": 2, "pad": 1}),
        (1, 16, 30, {"kernel": 5, "pad": 2}),
        (3, 20, 9, {"kernel": (3, 2), "dilation": 2}),
    ],
)
def test_depthwise_weights_on_the_cube(chip, out_dtype, n, c, size, attrs):
    attrs = {**attrs, "groups": c, "out_dtype": out_dtype}
    weight = (c, 1, *np.broadcast_to(attrs["kernel"], 2).tolist())
    plain = {k: v for k, v in attrs.items() if k not in ("kernel", "out_dtype")}
    (y,) = CONV.infer((n, c, size, size), weight, **plain)
    shapes = ((n, c, size, size), y)
    verify.check_values(WEIGHT, shapes, attrs, "fp16", load_chip(chip))
    verify.check_program(WEIGHT, shapes, attrs, "fp16", load_chip(chip))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("stride", "extra"), [(1, 0), (2, 0), (2, 1)])
def test_depthwise_layers_with_computed_weights(chip, stride, extra):
    """Forward, the image's and the weights' gradients: weights are packed in the kernel."""
    net = GraphBuilder("depthwise")
    x = net.input("x", (2, 33, 9 + extra, 9 + extra), "fp16")
    w = net.input("w", (33, 1, 3, 3))
    w = net.cast(w, dtype="fp16")
    y = net.depthwise_conv2d(x, w, stride=stride, pad=1)
    attrs = {"stride": stride, "pad": 1, "groups": 33}
    net.output(y, net.conv_transpose2d(y, w, output_padding=extra, **attrs))
    net.output(net.conv2d_grad_weight(x, y, kernel=3, **attrs))
    graph = net.build()
    kinds = {node.op: layout for node, layout in layouts_of(graph, chip)}
    assert kinds["depthwise_conv2d"] == kinds["conv_transpose2d"] == "NC1HWC0"
    inputs = random_inputs(graph)
    got = run_compiled(graph, inputs, load_chip(chip))
    wanted = evaluate(graph, inputs)
    for name in graph.outputs:
        scale = float(np.abs(wanted[name]).max())
        np.testing.assert_allclose(got[name], wanted[name], rtol=8e-3, atol=4e-3 * scale)
