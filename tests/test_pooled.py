"""A convolution whose result is pooled before it leaves the core: values and refusals."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cube_checks import run_checked
from hypothesis import assume, example, given, strategies as st
from message_lists import assert_messages
from test_cube_networks import stem

from ascend_lab.compiler import GraphBuilder, evaluate, random_inputs
from ascend_lab.compiler.compile import Road
from ascend_lab.compiler.passes import PASSES
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import CapacityError
from ascend_lab.lab.kernels import conv2d_reference
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import FRACTAL, as_kernel, ceil_div
from ascend_lab.machine.sim import simulate_kernel
from ascend_lab.operators.kernels import ConvShape, conv_launch, conv_schedule, dense_placement
from ascend_lab.operators.kernels.conv_windows import rows_seen
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue, Operand, Step
from ascend_lab.operators.kernels.epilogue_plan import pack_bias
from ascend_lab.operators.kernels.operand_packing import pack_conv, unpack_conv

COMBINED = ("Ascend310", "Ascend310P3", "Ascend910A")
NARROW = Step("vconv", ("sums",), None, "fp16")
ENDS = {
    "plain": PLAIN,
    "vector": Epilogue(
        (Operand("bias", "channel", "fp16"),),
        (NARROW, Step("vadd", (0, "bias")), Step("vmaxs", (1,), 0.0), Step("vmins", (2,), 6.0)),
        "fp16",
    ),
    "cube": Epilogue((), (NARROW, Step("vrelu", (0,))), "fp16", bias="bias"),
}
"""A bias and a limit on the vector unit, or by the cube."""


def pooled(conv, size, step=1, pad=0):
    """The convolution with windows of its result."""
    n = conv.n
    k = conv.k
    windows = ConvShape(n, k, *conv.out_hw, k, *size, step, pad, groups=k)
    return replace(conv, out_dtype="fp16", pool=windows)


def run(shape, end, chip, schedule, seed=0):
    """Return what the kernel writes, and what NumPy says."""
    rng = np.random.default_rng(seed)
    sizes = ((shape.n, shape.c, shape.h, shape.w), (shape.k, shape.c, shape.r, shape.s), shape.k)
    x, weight, bias = (rng.integers(-2, 3, size).astype(np.float16) for size in sizes)
    weight = weight[:, : shape.c // shape.groups]
    epilogue = ENDS[end]
    pool = shape.pool
    launch = conv_launch(shape, chip, schedule, dense_placement(shape), epilogue)
    flat = np.zeros(ceil_div(shape.k, FRACTAL) * FRACTAL, np.float16)
    flat[: shape.k] = bias
    tensors = pack_conv(shape, x, weight)
    tensors |= {"bias": pack_bias(shape, bias) if end == "cube" else flat} if end != "plain" else {}
    got = unpack_conv(pool, run_checked(launch, tensors, chip, seed=seed), dense=True)
    settings = {"stride": shape.stride, "pad": shape.pads, "groups": shape.groups}
    sums = conv2d_reference(x.astype(np.float64), weight.astype(np.float64), **settings)
    sums = sums + bias[:, None, None] * (end != "plain")
    limits = {"plain": (None, None), "vector": (0, 6), "cube": (0, None)}[end]
    y = sums if end == "plain" else sums.clip(*limits)
    top, bottom, left, right = pool.pads
    y = np.pad(y, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(y, (pool.r, pool.s), (2, 3))
    down, across = pool.strides
    return got, windows[:, :, ::down, ::across].max((4, 5))


@given(
    st.tuples(*(st.integers(1, top) for top in (3, 40, 24, 24, 70))),
    st.sampled_from(((1, 1, 0), (3, 1, 1), (3, 2, 0), (7, 2, 3))),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(*(st.integers(0, 1),) * 4),
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 2)),
    st.sampled_from(tuple(ENDS)), st.sampled_from(COMBINED), st.integers(0, 99),
)  # fmt: skip
@example((2, 3, 24, 24, 64), (7, 2, 3), (3, 3), (2, 2), (1, 1, 1, 1), (2, 2, 2), "cube",
         "Ascend910A", 0)  # fmt: skip
@example((3, 16, 13, 11, 33), (3, 1, 1), (3, 2), (3, 1), (0, 1, 1, 0), (1, 3, 1), "vector",
         "Ascend310", 1)  # fmt: skip
@example((1, 1, 1, 1, 1), (1, 1, 0), (1, 1), (1, 1), (0,) * 4, (1, 1, 1), "plain", "Ascend310P3", 2)
def test_values_equal_numpy_however_it_is_cut(sizes, taps, size, step, pad, cut, end, name, seed):
    (n, c, h, w, k) = sizes
    (r, stride, pads) = taps
    chip = load_chip(name)
    assume(min(h, w) + 2 * pads >= r and max(pad[:2]) < size[0] and max(pad[2:]) < size[1])
    conv = ConvShape(n, c, h, w, k, r, r, stride, pads)
    oh, ow = conv.out_hw
    assume(oh + sum(pad[:2]) >= size[0] and ow + sum(pad[2:]) >= size[1])
    shape = pooled(conv, size, step, pad)
    (rows, columns, cores) = cut
    high = min(rows_seen(shape.pool, min(rows, shape.pool.out_hw[0])), oh)
    base = {"base_m": ceil_div(high * ow, FRACTAL) * FRACTAL, "base_n": columns * FRACTAL}
    schedule = replace(conv_schedule(shape, chip, ENDS[end]), **base, base_k=16, step_k=r * r)
    try:
        schedule = replace(schedule, grid_rows=cores, grid_cols=1)
        got, wanted = run(shape, end, chip, schedule, seed)
    except CapacityError:
        assume(False)
    np.testing.assert_array_equal(got, wanted)


def test_only_what_windows_leave_goes_to_memory():
    chip = load_chip("Ascend910A")
    shape = pooled(ConvShape(2, 16, 32, 32, 32, 3, 3, 1, 1), (2, 2), 2)
    launch = conv_launch(shape, chip, None, dense_placement(shape), PLAIN)
    moved = simulate_kernel(as_kernel(launch), chip).path_bytes
    assert sum(size for (_, to), size in moved.items() if to == "GM") == 2 * 32 * 16 * 16 * 2


ABS = replace(PLAIN, steps=(NARROW, Step("vabs", (0,))))
FALLING = replace(PLAIN, steps=(NARROW, Step("vmuls", (0,), -1.0)))
LATE = replace(PLAIN, steps=(Step("vrelu", ("sums",)), Step("vconv", (0,), None, "fp16")))


def refused(epilogue=PLAIN, chip="Ascend310", schedule=None, **changes):
    conv = ConvShape(1, 16, 8, 40, 16, 3, 3, 1, 1)
    shape = replace(pooled(conv, (3, 3), 2), **changes)
    low = replace(conv_schedule(shape, load_chip(chip), PLAIN), base_m=64) if schedule else None
    return conv_launch(shape, load_chip(chip), low, dense_placement(shape), epilogue)


def test_what_is_refused_says_what_is_needed():
    calls = {
        "no epilogue": partial(refused, None),
        "absolute values": partial(refused, ABS),
        "values that fall": partial(refused, FALLING),
        "narrow in the end only": partial(refused, LATE),
        "other images": partial(refused, n=2),
        "wide results": partial(refused, out_dtype="fp32"),
        "separate cores": partial(refused, chip="Ascend910B2"),
        "tiles lower than a window": partial(refused, schedule="low"),
    }
    assert_messages("cube", "test_pooled", calls)


SIGMOID = (NARROW, Step("vmuls", (0,), -1.0), Step("vexp", (1,)), Step("vadds", (2,), 1.0))


@pytest.mark.parametrize(
    ("steps", "rises"),
    [
        ((*SIGMOID, Step("vrec", (3,))), True),
        ((*SIGMOID, Step("vrec", (3,)), Step("vmul", (0, 4))), False),  # SiLU
        (SIGMOID, False),
        ((*SIGMOID[:3], Step("vadds", (2,), -1.0), Step("vrec", (3,))), False),  # of both signs
        ((*SIGMOID, Step("vadd", (0, 3))), False),
        ((NARROW, Step("vrec", (0,))), False),
    ],
)
def test_what_rises_with_the_sums(steps, rises):
    epilogue = Epilogue((), steps, "fp16")
    assert epilogue.is_increasing == rises
    sums = np.linspace(-8, 8, 801, dtype=np.float16)
    with np.errstate(divide="ignore"):
        values = {"vmuls": np.multiply, "vadds": np.add, "vmul": np.multiply, "vadd": np.add}
        found = []
        for step in steps:
            given = [sums if x == "sums" else found[x] for x in step.sources]
            given += [] if step.number is None else [np.float16(step.number)]
            own = {"vconv": np.copy, "vexp": np.exp, "vrec": np.reciprocal} | values
            found.append(own[step.op](*given))
    assert bool(np.all(np.diff(found[-1]) >= 0)) == rises


def test_a_relu_behind_the_windows_goes_in_front_of_them_only_behind_a_convolution():
    for late in (True, False):
        net = GraphBuilder("late", "fp16")
        y = net.max_pool2d(net.input("x", (1, 16, 8, 8)), kernel=2)
        net.output(net.relu(y), *([] if late else [y]))
        assert PASSES["AlgebraicSimplificationPass"].apply(net.build())[1] == 0
    graph = stem("relu", late=True)
    after, count = PASSES["AlgebraicSimplificationPass"].apply(graph)
    assert count == 1 and [n.op for n in after.nodes][:3] == ["conv2d", "relu", "max_pool2d"]
    feeds = random_inputs(graph, 3)
    for one, other in zip(*(evaluate(g, feeds).values() for g in (graph, after)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("channels", [8, 16, 24])
def test_images_of_wide_numbers_are_pooled_apart_in_blocks_of_16(channels):
    net = GraphBuilder("wide", "fp16")
    x = net.input("x", (1, 16, 64, 64))
    y = net.conv2d(x, net.weight((channels, 16, 3, 3)), pad=1, out_dtype="fp32")
    net.output(net.max_pool2d(y, kernel=2, stride=2), net.avg_pool2d(net.relu(y), kernel=3, pad=1))
    graph = net.build()
    feeds = random_inputs(net.build(), 1)
    alone = replace(graph, outputs=graph.outputs[:1])
    for one in (graph, alone):
        stages = Road(dtype="").stages(one, load_chip("Ascend310"))
        got = run_tasks(stages.compiled, feeds).values()
        wanted = evaluate(one, feeds).values()
        for left, right in zip(got, wanted, strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", COMBINED)
@pytest.mark.parametrize("changes", [{"lanes": 4}, {"groups": 2, "c": 4}, {}])
def test_first_layers_and_groups_are_pooled_too(name, changes):
    whole = replace(ConvShape(2, 3, 31, 32, 40, 3, 3, 2, 1), **changes)
    shape = pooled(whole, (3, 3), 2, 1)
    chip = load_chip(name)
    got, wanted = run(shape, "cube", chip, None)
    np.testing.assert_array_equal(got, wanted)
