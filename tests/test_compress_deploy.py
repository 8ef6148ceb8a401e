"""Deployed int8 networks: whole numbers from layer to layer, equal to ONNX Runtime's to a step."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_compress_quantise import onnx_runtime

from ascend_lab.compiler import GraphBuilder, evaluate
from ascend_lab.compiler.compile import compile_stages
from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.compiler.passes import run_passes
from ascend_lab.compiler.values import run_tasks
from ascend_lab.deploy import compress
from ascend_lab.deploy.compress.deployed import costs_before_and_after
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators import ops
from ascend_lab.operators.kernels.epilogue_plan import LARGEST_BIAS


# -- QDQ models, written node by node -------------------------------------------------------------
class Model:
    """A QDQ model under construction: every activation a quantised pair behind it."""

    def __init__(self, seed=0, kind="int8", per_channel=True):
        self.rng, self.kind, self.per_channel = (
            np.random.default_rng(seed),
            np.dtype(kind),
            per_channel,
        )
        self.nodes = []
        self.tensors = []

    def number(self, name, values):
        self.tensors.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, op, *inputs, **attrs):
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name, **attrs))
        return name

    def pair(self, x, scale, zero):
        zero += 128 if self.kind == np.uint8 else 0
        step = self.number(f"{x}_s{len(self.nodes)}", np.float32(scale))
        point = self.number(f"{x}_z{len(self.nodes)}", self.kind.type(zero))
        return self.node(
            "DequantizeLinear", self.node("QuantizeLinear", x, step, point), step, point
        )

    def weight(self, shape, axis=0):
        name = f"w{len(self.tensors)}"
        whole = self.rng.integers(-127, 128, shape).astype(np.int8)
        count = shape[axis] if self.per_channel else 1
        scales = self.rng.uniform(0.5, 1.5, count).astype(np.float32) / 1000
        q = self.number(name, whole)
        s = self.number(f"{name}_s", scales if count > 1 else scales[0])
        z = self.number(f"{name}_z", np.zeros(count, np.int8) if count > 1 else np.int8(0))
        return self.node("DequantizeLinear", q, s, z, **({"axis": axis} if count > 1 else {}))

    def conv(self, x, c, k, r, *, stride=1, group=1):
        bias = self.number(f"b{len(self.tensors)}", self.rng.normal(size=k).astype(np.float32))
        attrs = {
            "pads": [r // 2] * 4,
            "strides": [stride] * 2,
            "kernel_shape": [r, r],
            "group": group,
        }
        return self.node("Conv", x, self.weight((k, c // group, r, r)), bias, **attrs)

    def bytes(self, x, y, shape):
        inputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, shape)]
        outputs = [helper.make_tensor_value_info(y, TensorProto.FLOAT, ["a", "b"])]
        graph = helper.make_graph(self.nodes, "qdq", inputs, outputs, self.tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def residual_net(seed=0, *, zero=-7, per_channel=True, kind="int8", width=18):
    """Stem, pool, a block with a residual, pool and classifier; scales that use the range."""
    m = Model(seed, kind, per_channel)
    x = m.pair("x", 0.03, zero)
    y = m.pair(m.node("Relu", m.conv(x, 3, 20, 3, stride=2)), 0.02, -128)
    y = m.pair(m.node("MaxPool", y, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), 0.02, -128)
    z = m.pair(m.node("Relu", m.conv(y, 20, 24, 3)), 0.03, -128)
    z = m.pair(m.conv(z, 24, 20, 1), 0.05, 11)
    y = m.pair(m.node("Relu", m.node("Add", z, y)), 0.04, -128)
    y = m.pair(m.node("GlobalAveragePool", y), 0.02, zero)
    y = m.pair(m.node("Flatten", y), 0.02, zero)
    w = m.weight((10, 20))
    b = m.number("fc", m.rng.normal(size=10).astype(np.float32))
    y = m.pair(m.node("Gemm", y, w, b, transB=1), 0.02, 3)
    return m.bytes("x", y, [2, 3, 19, width]), 0.02


def drawn(shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 2


@pytest.mark.parametrize(
    ("kind", "per_channel", "zero"), [("int8", True, -7), ("int8", False, 0), ("uint8", False, 5)]
)
def test_folded_layers_equal_onnx_runtime_to_a_step(kind, per_channel, zero):
    model, step = residual_net(zero=zero, per_channel=per_channel, kind=kind)
    onnx.checker.check_model(model)
    x = drawn((2, 3, 19, 18))
    wanted = onnx_runtime(model, {"x": x}, plain=True)
    graph = run_passes(import_onnx(model))[0]
    ops = [node.op for node in graph.nodes]
    assert (ops.count("requantise"), ops.count("conv2d"), ops.count("add")) == (4, 3, 0)
    got = next(iter(evaluate(graph, {"x": x}).values()))
    assert np.abs(got - wanted).max() <= 1.001 * step
    assert (np.abs(got - wanted) < step / 2).mean() > 0.9
    assert np.unique(wanted).size > 8


@pytest.mark.parametrize("width", [18, 24])
@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910A"])
def test_kernels_compute_the_deployed_network(chip, width):
    """Whole layers in a kernel each: bytes between convolutions, halves only where it pools."""
    model, step = residual_net(width=width)
    x = drawn((2, 3, 19, width), 2)
    stages = compile_stages(import_onnx(model), chip)
    tasks = [task.op for task in stages.compiled.tasks]
    assert ("NC1HWC0:4" in str(stages.laid_out)) == (width == 24)
    assert "conv2d+requantise+dequantise+add_dequantised+relu+quantise" in tasks or (
        "conv2d+requantise+dequantise+add_dequantised+quantise" in tasks
    )
    pooled = tasks.index("max_pool2d")
    assert tasks[pooled - 1 : pooled + 2 : 2] == ["conv2d+requantise+dequantise", "quantise"]
    assert tasks.count("conv2d+requantise") == 1
    got = next(iter(run_tasks(stages.compiled, {"x": x.astype(np.float16)}).values()))
    wanted = onnx_runtime(model, {"x": x.astype(np.float16).astype(np.float32)}, plain=True)
    assert np.abs(got.astype(np.float64) - wanted).max() <= 1.1 * step  # fp16 output


def whole_conv(
    rng, c, k, *, groups=1, size=9, r=3, offset=-5, residual=False, small=False, most=20000
):
    net = GraphBuilder("whole")
    x = net.input("x", (2, c, size, size), "int8")
    w = net.constant(rng.integers(-127, 128, (k, c // groups, r, r)).astype(np.int8))
    s = net.constant((rng.uniform(0.5, 1, (k, 1, 1)) * 3e-4).astype(np.float32))
    bias = rng.integers(-most, most, (k, 1, 1)).astype(np.int32)
    bias[0] = most
    bias[-1] = -most
    b = net.constant(bias)
    y = net.conv2d(x, w, pad=r // 2, pad_value=offset, groups=groups)
    moved = 3 if residual else -7
    y = net.requantise(y, s, b, offset=moved, relu=not residual, small_bias=small)
    if residual:
        q = net.input("q", y.shape, "int8")
        y = net.dequantise(y, scale=0.5, offset=3, dtype="fp16")
        y = net.relu(net.add_dequantised(y, q, scale=0.3, offset=-4))
        y = net.quantise(y, scale=1.0, offset=-100)
    net.output(y)
    return net.build()


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend310P3"])
@pytest.mark.parametrize(
    "sizes", [(40, 33, 1, True), (3, 64, 1, False), (48, 48, 48, False), (64, 32, 8, False)]
)
def test_int8_convolutions_are_exact_in_any_number_of_channels(sizes, chip):
    """Odd blocks, groups, a pad that stands for zero, a residual in bytes."""
    c, k, groups, residual = sizes
    rng = np.random.default_rng(3)
    graph = whole_conv(rng, c, k, groups=groups, residual=residual)
    feed = {n: rng.integers(-128, 128, graph.types[n].shape).astype(np.int8) for n in graph.inputs}
    compiled = compile_stages(graph, chip).compiled
    assert sum(task.op.startswith("conv2d+requantise") for task in compiled.tasks) == 1
    got = run_tasks(compiled, feed)
    wanted = evaluate(graph, feed)
    for name, own in zip(graph.outputs, got.values(), strict=True):
        assert np.abs(own.astype(int) - wanted[name]).max() <= (1 if residual else 0)
        assert np.unique(own).size > 15


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910A"])
@pytest.mark.parametrize(
    ("c", "k", "groups", "residual"),
    [(32, 40, 1, False), (32, 33, 1, True), (32, 256, 1, True), (96, 96, 3, True),
     (64, 128, 4, False)],
)  # fmt: skip
def test_the_cube_adds_a_whole_bias_exactly(chip, c, k, groups, residual):
    """As digits of 127 in one more step of depth, up to the largest that a fractal holds."""
    seed = np.random.default_rng
    macs = []
    found = []
    for small in (True, False):
        graph = whole_conv(seed(7), c, k, groups=groups, size=16, r=1, residual=residual,
                           small=small, most=LARGEST_BIAS)  # fmt: skip
        kinds = {n: graph.types[n].shape for n in graph.inputs}
        feed = {n: seed(8).integers(-128, 128, shape).astype(np.int8) for n, shape in kinds.items()}
        stages = compile_stages(graph, chip)
        macs.append(stages.timeline().macs)
        found.append(next(iter(run_tasks(stages.compiled, feed).values())))
        assert np.array_equal(found[0], found[-1])
    wanted = next(iter(evaluate(graph, feed).values()))
    assert np.abs(found[0].astype(int) - wanted).max() <= (1 if residual else 0)
    assert macs[0] > macs[1]  # one step deeper


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910A"])
def test_the_sum_of_two_layers_is_in_steps_of_its_bytes(chip):
    """Two scales divided, no number of its own for the vector unit to multiply by."""
    m = Model(5)
    x = m.pair("x", 0.03, -7)
    y = m.node("Add", m.conv(x, 16, 64, 1), m.conv(x, 16, 64, 3))
    y = m.pair(m.node("Relu", y), 0.02, -128)
    model = m.bytes("x", m.pair(m.conv(y, 64, 32, 1), 0.05, 3), [1, 16, 9, 8])
    graph = run_passes(import_onnx(model))[0]
    sums = [n for n in graph.nodes if n.op == "quantise" and n.inputs[0] != "x"]
    assert not any(node.attr("scale") for node in sums)
    x = drawn((1, 16, 9, 8), 3)
    got = next(iter(evaluate(graph, {"x": x}).values()))
    wanted = onnx_runtime(model, {"x": x}, plain=True)
    assert np.abs(got - wanted).max() <= 1.001 * 0.05
    stages = compile_stages(import_onnx(model), chip)
    ops = [sorted(task.op.split("+")) for task in stages.compiled.tasks]
    assert sorted(["conv2d", "dequantise"] * 2 + ["add", "quantise"]) in ops  # two sums, one kernel
    got = next(iter(run_tasks(stages.compiled, {"x": x.astype(np.float16)}).values()))
    wanted = onnx_runtime(model, {"x": x.astype(np.float16).astype(np.float32)}, plain=True)
    assert np.abs(got.astype(np.float64) - wanted).max() <= 1.1 * 0.05


@pytest.mark.parametrize("chip", ["Toy", "Ascend310", "Ascend910A"])
@pytest.mark.parametrize(
    "case",
    [
        ((2, 40, 23, 30), {"kernel": 3, "stride": 2, "pad": 1}),
        ((1, 5, 9, 9), {"kernel": 2, "stride": 2}),
        ((1, 64, 7, 40), {"kernel": (1, 3), "stride": (1, 1), "pad": ((0, 0), (1, 1))}),
        ((3, 33, 12, 5), {"kernel": (4, 1), "stride": (3, 2), "pad": ((2, 1), (0, 0))}),
        ((1, 32, 50, 44), {"kernel": 5, "stride": 4, "pad": 2}),
    ],
)
def test_the_largest_of_bytes_is_exact(case, chip):
    shape, attrs = case
    x = np.random.default_rng(2).integers(-128, 128, shape).astype(np.int8)
    x[:, :, ::2] = -128  # as low as what pads
    wanted = ops.get("max_pool2d").reference(x, **attrs)
    assert np.array_equal(ops.run("max_pool2d", x, chip=load_chip(chip), **attrs), wanted)


@pytest.mark.parametrize("chip", ["Ascend310", "Ascend910A"])
@pytest.mark.parametrize(
    "shape", [(2, 3, 33, 35), (1, 16, 40, 40), (3, 9, 5, 7), (2, 3, 24, 32), (3, 4, 16, 16)]
)
def test_an_image_is_quantised_into_blocks_in_one_kernel(shape, chip):
    net = GraphBuilder("image", "fp16")
    x = net.input("x", shape)
    w = np.random.default_rng(4).integers(-127, 128, (32, shape[1], 3, 3)).astype(np.int8)
    sums = net.conv2d(net.quantise(x, scale=0.02, offset=-9), net.constant(w), pad=1, pad_value=-9)
    scales = np.full((32, 1, 1), 1e-3, np.float32)
    bias = np.arange(32, dtype=np.int32)
    net.output(net.requantise(sums, net.constant(scales), net.constant(bias.reshape(32, 1, 1))))
    graph = net.build()
    feed = {"x": drawn(shape).astype(np.float16)}
    compiled = compile_stages(graph, chip).compiled
    assert compiled.tasks[0].op == "quantise+trans_data"
    small = any(t.layout == "NC1HWC0:4" for t in compiled.graph.types.values())
    assert small == (shape[1] <= 4 and shape[3] % 8 == 0)  # rows of whole blocks of 32 bytes
    (got,) = run_tasks(compiled, feed).values()
    (wanted,) = evaluate(graph, feed).values()
    assert np.abs(got.astype(int) - wanted).max() <= 1 and (got == wanted).mean() > 0.9


# -- from records ---------------------------------------------------------------------------------
def block():
    """Two layers beside each other in floats, a sum, a product: what records say is quantised."""
    net = GraphBuilder("block")
    x = net.input("x", (2, 16, 12, 12))
    y = net.relu(net.conv2d(x, net.weight((64, 16, 3, 3)), net.weight((64,)), pad=1, name="a"))
    z = net.relu(net.conv2d(y, net.weight((64, 64, 3, 3)), pad=1, name="b"))
    z = net.conv2d(z, net.weight((64, 64, 1, 1)), net.weight((64,)), name="c")
    z = net.relu(net.add(z, y))
    z = net.conv2d(z, net.weight((32, 64, 1, 1)), name="d")
    z = net.reshape(net.global_avg_pool(z), shape=(2, 32))
    net.output(net.gemm(z, net.weight((10, 32)), net.weight((10,)), trans_b=True, name="e"))
    return net.build()


@pytest.mark.parametrize("asymmetric", [True, False])
def test_a_deployed_graph_computes_what_the_fake_quantised_one_does(asymmetric):
    graph = block()
    feeds = [{"x": drawn((2, 16, 12, 12), i)} for i in range(2)]
    found = compress.quantise_graph(
        graph, feeds, compress.Plan(compress.LayerPlan("minmax", asymmetric))
    )
    whole = compress.deploy(found.graph, found.layers)
    ops_of = [node.op for node in whole.nodes]
    assert ops_of.count("conv2d") == 4 and ops_of.count("add_dequantised") == 1
    assert {
        n.dtype for n in (whole.types[m.inputs[0]] for m in whole.nodes if m.op == "conv2d")
    } == {"int8"}
    fake, mine = (
        next(iter(evaluate(g, feeds[0]).values())) for g in (compress.fake_quantised(found), whole)
    )
    step = found.layers[-1].scale * max(found.layers[-1].weight_scales) * 127
    assert np.abs(fake - mine).max() <= 3 * step  # a step of what the classifier reads
    again = import_onnx(compress.qdq_model(found))
    one, two = (compile_stages(g, "Ascend310P3").timeline() for g in (whole, again))
    assert one.time_s == pytest.approx(two.time_s, rel=0.02)
    half, byte = costs_before_and_after(graph, found.layers, "Ascend310P3")
    assert (
        byte.weight_bytes < 0.62 * half.weight_bytes and byte.kernel_count <= half.kernel_count + 2
    )


def test_records_that_do_not_fit_are_refused_by_name():
    graph = block()
    plain = compress.LayerScales("a", 0.1, 0, (0.1,))
    with pytest.raises(InputError, match="a layer with constant weights; got nothing"):
        compress.deploy(graph, [replace(plain, name="nothing")])
    with pytest.raises(InputError, match="a layer with constant weights; got relu"):
        compress.deploy(graph, [replace(plain, name="relu")])
    for change in ({"bits": 4}, {"weight_bits": 16}):
        with pytest.raises(UnsupportedError, match="a: activations in 8 bits"):
            compress.deploy(graph, [replace(plain, **change)])


def test_a_chip_with_separate_cores_runs_bytes_too():
    """What its fix pipe does not do runs as kernels of their own, none of them on a processor."""
    times = compile_stages(block(), "Ascend910B2", dtype="int8").timeline()
    assert not times.on_ai_cpu
