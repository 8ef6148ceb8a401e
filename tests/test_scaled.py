"""A convolution of scaled images as one kernel: values, what it refuses, where it is taken."""

import numpy as np
import pytest

from ascend_lab.compiler import GraphBuilder, compile_stages, evaluate, random_inputs, run_tasks
from ascend_lab.errors import CapacityError, UnsupportedError
from ascend_lab.lab.kernels import conv2d_reference
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import as_kernel, sanitize
from ascend_lab.machine.layout import address_map, pack
from ascend_lab.machine.sim import execute, simulate
from ascend_lab.operators.kernels import ConvShape
from ascend_lab.operators.kernels.conv_shape import pack_conv, unpack_conv
from ascend_lab.operators.kernels.epilogue import Epilogue, Operand, Step
from ascend_lab.operators.kernels.squeeze import scaled_launch

OPERANDS = (Operand("bias", "channel", "fp16"), Operand("skip", "tile", "fp16"))
STEPS = (
    Step("vconv", ("sums",), None, "fp16"),
    Step("vadd", (0, "bias")),
    Step("vadd", (1, "skip")),
)
ADDED = Epilogue(OPERANDS, STEPS, "fp16")


def blocked(array):
    """Return an image as it lies in memory."""
    return pack(address_map("NC1HWC0", array.shape, "fp16"), array).reshape(-1)


@pytest.mark.parametrize("name", ["Ascend310", "Ascend310P3"])
@pytest.mark.parametrize(
    ("n", "c", "size", "k"),
    [(16, 40, 7, 33), (3, 70, 9, 33), (1, 20, 5, 16), (5, 16, 3, 16), (6, 33, 14, 80)],
)
def test_values_equal_numpy(name, n, c, size, k):
    rng, chip = np.random.default_rng(n + c), load_chip(name)
    shape = ConvShape(n, c, size, size, k, 1, 1, out_dtype="fp16")
    x, weight, scale, skip, bias = (
        rng.integers(-2, 3, s).astype(np.float16)
        for s in ((n, c, size, size), (k, c, 1, 1), (n, c, 1, 1), (n, k, size, size), (k,))
    )
    launch = scaled_launch(shape, chip, ADDED)
    tensors = pack_conv(shape, x, weight) | {"scale": blocked(scale), "skip": blocked(skip)}
    tensors["bias"] = np.pad(bias, (0, -k % 16))
    got = unpack_conv(shape, execute(as_kernel(launch), tensors, chip, seed=1), dense=True)
    sums = conv2d_reference((x * scale).astype(np.float64), weight.astype(np.float64))
    np.testing.assert_array_equal(got, sums + bias[:, None, None] + skip)
    assert sanitize(launch, chip) == []
    fast, slow = (simulate(launch, chip, engine=e).cycles for e in ("fast", "reference"))
    assert fast == slow


def test_other_convolutions_and_large_images_are_refused():
    chip = load_chip("Ascend310P3")
    with pytest.raises(UnsupportedError, match="a 1x1 convolution with a stride of 1"):
        scaled_launch(ConvShape(2, 16, 8, 8, 16, 3, 3, pad=1, out_dtype="fp16"), chip, None)
    with pytest.raises(CapacityError, match="sums of a whole image in L0C"):
        scaled_launch(ConvShape(8, 16, 112, 112, 64, 1, 1, out_dtype="fp16"), chip, None)


@pytest.mark.parametrize("size", [7, 40])
def test_in_a_network_the_quicker_way_is_taken(size):
    net, chip = GraphBuilder("squeeze", "fp16"), load_chip("Ascend310P3")
    x = net.relu(net.input("x", (8, 240, size, size)))
    scale = net.sigmoid(net.conv2d(net.global_avg_pool(x), net.weight((240, 240, 1, 1))))
    skip = net.relu(net.conv2d(x, net.weight((80, 240, 1, 1))))
    y = net.conv2d(net.mul(x, scale), net.weight((80, 240, 1, 1)), net.weight((80,)))
    net.output(net.add(y, skip))
    graph = net.build()
    compiled = compile_stages(graph, chip).compiled
    (task,) = (task for task in compiled.tasks if task.op == "mul+conv2d+add")
    assert len(task.lowered.kernel.phases) == (1 if size == 7 else 2)
    feeds = random_inputs(graph, 1)
    (got,), (wanted,) = run_tasks(compiled, feeds).values(), evaluate(graph, feeds).values()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=0.01 * np.abs(wanted).max())
