"""A pointwise and a depthwise convolution as one kernel: values, bands, tiles, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, strategies as st

from ascend_lab.aoe.operators import operators_of
from ascend_lab.compiler import (
    GraphBuilder,
    bound_of,
    evaluate,
    ledger,
    random_inputs,
    run_tasks,
    simulate_graph,
)
from ascend_lab.compiler.compile import Road
from ascend_lab.compiler.switches import Switches
from ascend_lab.errors import CapacityError, InputError, UnsupportedError
from ascend_lab.fused.means import diagonal
from ascend_lab.fused.tandem_kernel import tandem_launch
from ascend_lab.fused.tandem_schedules import TIMED, ranked, tandem_launches
from ascend_lab.fused.tandem_shape import Tandem, TandemSchedule, ways_of
from ascend_lab.lab.kernels import conv2d_reference
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import as_kernel, sanitize
from ascend_lab.machine.sim import execute, simulate, simulate_kernel
from ascend_lab.operators.kernels import ConvShape
from ascend_lab.operators.kernels.conv_shape import pack_conv, pack_weights, unpack_conv
from ascend_lab.operators.kernels.epilogue import Epilogue, Step
from ascend_lab.operators.kernels.epilogue_plan import pack_bias

A910 = load_chip("Ascend910A")


def tandem_of(sizes, taps, step, pad, *, bias=False):
    """Two convolutions of `sizes` (n, c, h, w, k), each with a ReLU6 and maybe a bias."""
    n, c, h, w, k = sizes
    point = ConvShape(n, c, h, w, k, 1, 1, out_dtype="fp16")
    depth = ConvShape(n, k, h, w, k, taps, taps, step, pad, groups=k, out_dtype="fp16")
    steps = (
        Step("vconv", ("sums",), None, "fp16"),
        Step("vmaxs", (0,), 0.0),
        Step("vmins", (1,), 6.0),
    )
    names = ("b1", "b2") if bias else ("", "")
    after = [Epilogue((), steps, "fp16", bias=name) for name in names]
    return Tandem(point, depth, *after)


def operands(tandem, rng):
    """Small whole numbers, whose sums fp16 holds: image, both weights, both biases."""
    point = tandem.point
    depth = tandem.depth
    shapes = [(point.n, point.c, point.h, point.w), (point.k, point.c, 1, 1)]
    shapes += [(depth.k, 1, depth.r, depth.s), (point.k,), (depth.k,)]
    return [rng.integers(-2, 3, shape).astype(np.float16) for shape in shapes]


def run(tandem, schedule, chip, seed=0):
    """Return what the kernel writes, what NumPy says, and the launch."""
    x, one, two, b1, b2 = operands(tandem, np.random.default_rng(seed))
    launch = tandem_launch(tandem, chip, schedule)
    tensors = pack_conv(tandem.point, x, one) | {"depth_weight": pack_weights(tandem.depth, two)}
    biased = bool(tandem.after_point.bias)
    if biased:
        tensors |= {"b1": pack_bias(tandem.point, b1), "b2": pack_bias(tandem.depth, b2)}
    got = unpack_conv(
        tandem.depth, execute(as_kernel(launch), tensors, chip, seed=seed), dense=True
    )
    wide = [a.astype(np.float64) for a in (x, one, two, b1 * biased, b2 * biased)]
    between = conv2d_reference(wide[0], wide[1]) + wide[3][:, None, None]
    depth = tandem.depth
    full = np.zeros((depth.k, depth.k, depth.r, depth.s))
    full[np.arange(depth.k), np.arange(depth.k)] = wide[2][:, 0]
    sums = conv2d_reference(between.clip(0, 6), full, stride=depth.stride, pad=depth.pad)
    return got, (sums + wide[4][:, None, None]).clip(0, 6), launch


SIZES = st.tuples(*(st.integers(1, top) for top in (3, 40, 12, 12, 70)))


@given(
    SIZES, st.sampled_from((1, 3, 5)), st.integers(1, 2), st.booleans(),
    st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 4)), st.integers(1, 3),
    st.integers(1, 4), st.integers(1, 5), st.sampled_from(("rows", "weights")),
    st.integers(1, 3), st.sampled_from(("Ascend910A", "Ascend310", "Ascend310P3")),
    st.integers(0, 99),
)  # fmt: skip
@example((2, 24, 9, 11, 96), 3, 2, True, (3, 1, 2), 2, 2, 1, "weights", 1, "Ascend910A", 0)
@example((1, 16, 7, 7, 160), 5, 1, True, (2, 1, 1), 1, 2, 4, "rows", 1, "Ascend310", 1)
@example((1, 1, 1, 1, 1), 3, 1, False, (1, 1, 1), 1, 1, 1, "weights", 1, "Ascend910A", 0)
@example((3, 40, 12, 5, 33), 3, 1, False, (1, 2, 4), 1, 1, 1, "rows", 1, "Ascend910A", 2)
@example((4, 24, 7, 7, 48), 5, 1, True, (1, 2, 1), 1, 1, 3, "rows", 2, "Ascend310P3", 3)
@example((3, 16, 9, 5, 40), 3, 1, True, (3, 1, 2), 2, 1, 2, "weights", 3, "Ascend910A", 4)
def test_values_equal_numpy_however_it_is_divided(
    sizes, taps, step, bias, grid, bands, blocks, tile, stay, images, name, seed
):
    assume(min(sizes[2:4]) + 2 * (taps // 2) >= taps)
    tandem = tandem_of(sizes, taps, step, taps // 2, bias=bias)
    chip = load_chip(name)
    images = images if images in ways_of(tandem.depth) else 1
    most = tandem.depth.blocks[1], sizes[0] // images, tandem.depth.out_hw[0]
    grid = tuple(map(min, grid, most))
    assume(np.prod(grid) <= chip.core_count)
    assume(blocks * (taps**2 + 1) <= 64)  # of L0B
    schedule = TandemSchedule(grid, bands, blocks, tile, stay, images)
    got, wanted, launch = run(tandem, schedule, chip, seed)
    np.testing.assert_array_equal(got, wanted)
    assert sanitize(launch, chip) == []


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("sizes", "step", "schedule"),
    [
        ((4, 24, 7, 7, 96), 1, TandemSchedule((2, 1, 1), 1, 2, 4, "rows", 4)),
        ((6, 40, 5, 9, 33), 1, TandemSchedule((1, 2, 1), 2, 1, 3, "weights", 1)),
        ((3, 16, 20, 12, 48), 2, TandemSchedule((1, 1, 1), 3, 3, 2, "rows")),
        ((8, 24, 14, 14, 64), 1, TandemSchedule((2, 1, 1), 3, 2, 5, "weights", 2)),
        ((2, 8, 3, 3, 16), 1, TandemSchedule((1, 1, 1), 1, 1, 1, "rows", 2)),
    ],
)
def test_means_are_written_beside_what_they_are_the_means_of(sizes, step, schedule, bias):
    tandem = tandem_of(sizes, 3, step, 1, bias=bias)
    chip = load_chip("Ascend310P3")
    x, one, two, b1, b2 = operands(tandem, np.random.default_rng(7))
    _, wanted, _ = run(tandem, schedule, chip, 7)
    launch = tandem_launch(replace(tandem, means=True), chip, schedule)
    tensors = pack_conv(tandem.point, x, one) | {"depth_weight": pack_weights(tandem.depth, two)}
    tensors |= (
        {"b1": pack_bias(tandem.point, b1), "b2": pack_bias(tandem.depth, b2)} if bias else {}
    )
    got = execute(as_kernel(launch), tensors | {"ones": diagonal()}, chip, seed=1)
    np.testing.assert_array_equal(unpack_conv(tandem.depth, got, dense=True), wanted)
    means = got["means"].reshape(sizes[0], -1)[:, : sizes[4]]
    np.testing.assert_allclose(means, wanted.mean(axis=(2, 3)), rtol=2**-10, atol=2**-20)
    assert sanitize(launch, chip) == []
    fast, slow = (simulate(launch, chip, engine=e).cycles for e in ("fast", "reference"))
    assert fast == slow


def test_means_need_whole_images_and_flags():
    tandem = replace(tandem_of((2, 16, 9, 9, 32), 3, 1, 1), means=True)
    with pytest.raises(UnsupportedError, match="flags for six slots"):
        next(tandem_launches(tandem, A910))
    with pytest.raises(InputError, match="all rows of an image on a core"):
        tandem_launch(tandem, load_chip("Ascend310P3"), TandemSchedule((1, 1, 2), 1, 1, 1, "rows"))


def test_every_ranked_way_of_a_block_computes_the_same():
    tandem = tandem_of((2, 24, 14, 14, 96), 3, 1, 1, bias=True)
    for schedule in ranked(tandem, A910)[::17]:
        try:
            got, wanted, _ = run(tandem, schedule, A910)
        except CapacityError:
            continue
        np.testing.assert_array_equal(got, wanted)


def test_the_first_of_the_ranking_is_near_the_quickest():
    tandem = tandem_of((2, 32, 14, 14, 192), 3, 2, 1, bias=True)
    cycles = []
    for schedule in ranked(tandem, A910):
        try:
            cycles.append(
                simulate_kernel(as_kernel(tandem_launch(tandem, A910, schedule)), A910).cycles
            )
        except CapacityError:
            continue
    assert len(cycles) > 60
    assert min(cycles[:TIMED]) <= 1.15 * min(cycles)


def test_what_lies_between_never_goes_to_memory():
    tandem = tandem_of((4, 32, 28, 28, 192), 3, 1, 1)
    launch = next(tandem_launches(tandem, A910))
    moved = simulate_kernel(as_kernel(launch), A910).path_bytes
    written = sum(size for (_, to), size in moved.items() if to == "GM")
    assert written == 4 * 192 * 28 * 28 * 2


def test_what_is_no_tandem_is_refused():
    tandem = tandem_of((1, 16, 8, 8, 32), 3, 1, 1)
    wrong = [
        replace(tandem, point=replace(tandem.point, r=3, s=3, pad=1)),
        replace(tandem, depth=replace(tandem.depth, groups=1)),
        replace(tandem, depth=replace(tandem.depth, h=9)),
        replace(tandem, after_point=replace(tandem.after_point, out_dtype="fp32")),
    ]
    for other in wrong:
        with pytest.raises(UnsupportedError, match="for a tandem"):
            next(tandem_launches(other, A910))
    with pytest.raises(UnsupportedError, match="Ascend910B2"):
        next(tandem_launches(tandem, load_chip("Ascend910B2")))


def test_few_channels_and_images_are_divided_by_rows():
    tandem = tandem_of((1, 16, 112, 112, 16), 3, 1, 1)
    assert {s.grid for s in ranked(tandem, A910)} == {(1, 1, 28)}


@pytest.mark.parametrize(
    "wrong",
    [{"grid": (3, 1, 1)}, {"grid": (2, 1, 17)}, {"tile": 0}, {"bands": 0}, {"stay": "row"},
     {"images": 2}],
)  # fmt: skip
def test_a_division_into_nothing_is_refused(wrong):
    schedule = replace(TandemSchedule((1, 1, 1), 1, 1, 1, "rows"), **wrong)
    with pytest.raises(InputError, match=r"grid of at most|at least 1 band|images as one"):
        tandem_launch(tandem_of((1, 16, 40, 8, 32), 3, 1, 1), A910, schedule)


def test_rows_that_do_not_fit_l1_are_refused():
    tandem = tandem_of((1, 512, 3, 4000, 16), 3, 1, 1)
    with pytest.raises(CapacityError, match="a row of 32 channel blocks in L1"):
        list(tandem_launches(tandem, A910))


# -- in a network ---------------------------------------------------------------------------------
def blocks(*, last="silu", size=(2, 16, 14, 14), wide=96, taps=3, step=1):
    """Two inverted residual blocks, biases and functions behind each convolution."""
    net = GraphBuilder("blocks", "fp16")
    x = net.relu(net.input("x", size))
    for at in range(2):
        skip = x
        c = size[1]
        y = net.conv2d(x, net.weight((wide, c, 1, 1)), net.weight((wide,), scale=1.0))
        y = net.relu6(y, name=f"wide{at}")
        own = net.weight((wide, 1, taps, taps)), net.weight((wide,), scale=1.0)
        stride = step if at else 1
        y = net.conv2d(y, *own, stride=stride, pad=taps // 2, groups=wide, name=f"each{at}")
        y = getattr(net, last)(y)
        x = net.conv2d(y, net.weight((c, wide, 1, 1)))
        x = net.add(x, skip) if stride == 1 else x
    net.output(x)
    return net.build()


INSIDE = Road(start="inside")
TANDEM = "conv2d+relu6+conv2d"


@pytest.mark.parametrize("chip_name", ["Ascend910A", "Ascend310", "Ascend310P3"])
@pytest.mark.parametrize(("taps", "step", "last"), [(3, 2, "silu"), (5, 1, "relu")])
def test_inside_a_launch_blocks_become_tandems(chip_name, taps, step, last):
    graph = blocks(taps=taps, step=step, last=last)
    chip = load_chip(chip_name)
    stages = INSIDE.stages(graph, chip)
    apart = Road().stages(graph, chip)
    tandems = [task for task in stages.compiled.tasks if task.op == f"{TANDEM}+{last}"]
    assert len(tandems) == 2 and not any("conv2d+relu6+conv" in t.op for t in apart.compiled.tasks)
    feeds = random_inputs(graph, 1)
    (got,) = run_tasks(stages.compiled, feeds).values()
    (wanted,) = evaluate(graph, feeds).values()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=0.01 * np.abs(wanted).max())
    once = [replace(s.compiled, scopes=((0, len(s.compiled.tasks)),)) for s in (stages, apart)]
    times = [simulate_graph(compiled) for compiled in once]
    assert times[0].time_s < times[1].time_s
    bound = bound_of(stages.rewritten, chip)
    assert bound.time_s <= times[0].time_s
    assert sum(ledger(times[0], bound).values()) == pytest.approx(times[0].time_s, rel=1e-12)


def test_a_tandem_has_no_parameters_and_can_be_switched_off():
    graph = blocks()
    found = {op.op: op for op in operators_of(INSIDE.stages(graph, A910).compiled)}
    tandem = found[f"{TANDEM}+silu"]
    assert not tandem.unit and f"quickest of {TIMED}" in tandem.reason
    off = Switches({("UBFusion", "TandemConvolutionFusionPass"): False})
    kernels = [t.op for t in replace(INSIDE, switches=off).stages(graph, A910).compiled.tasks]
    assert "conv2d+relu6" in kernels and f"{TANDEM}+silu" not in kernels


def test_what_somebody_else_reads_is_stored():
    graph = blocks()
    graph = replace(graph, outputs=(*graph.outputs, "wide0"))
    kernels = [t.op for t in INSIDE.stages(graph, A910).compiled.tasks]
    assert kernels.count(f"{TANDEM}+silu") == 1 and "conv2d+relu6" in kernels


def test_added_convolutions_and_other_pairs_are_no_tandem():
    net = GraphBuilder("pairs", "fp16")
    x = net.relu(net.input("x", (2, 32, 14, 14)))
    one, two = (net.conv2d(x, net.weight((64, 32, 1, 1))) for _ in range(2))
    y = net.relu(net.add(one, two))
    y = net.relu(net.conv2d(y, net.weight((64, 64, 1, 1))))
    y = net.relu(net.conv2d(y, net.weight((64, 64, 3, 3)), pad=1))
    net.output(net.conv2d(y, net.weight((64, 2, 3, 3)), pad=1, groups=32))
    for chip_name in ("Ascend310", "Ascend910A"):
        kernels = [t.op for t in INSIDE.stages(net.build(), load_chip(chip_name)).compiled.tasks]
        assert "conv2d+conv2d+add+relu" in kernels
        assert not any("conv2d+relu+conv2d" in op for op in kernels)


@pytest.mark.parametrize("chip_name", ["Ascend310", "Ascend310P3"])
def test_means_that_scale_the_image_come_from_its_tandem(chip_name):
    net = GraphBuilder("squeezed", "fp16")
    chip = load_chip(chip_name)
    x = net.relu(net.input("x", (16, 32, 14, 14)))
    y = net.relu6(net.conv2d(x, net.weight((192, 32, 1, 1)), net.weight((192,))))
    own = net.weight((192, 1, 3, 3)), net.weight((192,))
    y = net.silu(net.conv2d(y, *own, pad=1, groups=192))
    inner = net.relu(net.conv2d(net.global_avg_pool(y), net.weight((16, 192, 1, 1))))
    scale = net.sigmoid(net.conv2d(inner, net.weight((192, 16, 1, 1))))
    net.output(net.conv2d(net.mul(y, scale), net.weight((32, 192, 1, 1))))
    graph = net.build()
    stages = INSIDE.stages(graph, chip)
    assert f"{TANDEM}+silu+global_avg_pool" in [task.op for task in stages.compiled.tasks]
    feeds = random_inputs(graph, 1)
    (got,) = run_tasks(stages.compiled, feeds).values()
    (wanted,) = evaluate(graph, feeds).values()
    np.testing.assert_allclose(got, wanted, rtol=0, atol=0.01 * np.abs(wanted).max())
    once = replace(stages.compiled, scopes=((0, len(stages.compiled.tasks)),))
    assert bound_of(stages.rewritten, chip).time_s <= simulate_graph(once).time_s
