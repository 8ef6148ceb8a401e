"""Squeeze and excite as one kernel: values, what is refused, where it is taken, what it saves."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from ascend_lab.aoe.operators import unit_of
from ascend_lab.compiler import (
    GraphBuilder,
    bound_of,
    compile_stages,
    evaluate,
    ledger,
    random_inputs,
    run_tasks,
    simulate_graph,
)
from ascend_lab.compiler.compile import Road
from ascend_lab.compiler.switches import parse_switches
from ascend_lab.errors import CapacityError
from ascend_lab.fused.excitation import Excitation, excitation_launches
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Kernel, sanitize
from ascend_lab.machine.layout import address_map, pack
from ascend_lab.machine.sim import execute, simulate, simulate_kernel
from ascend_lab.operators.kernels.epilogue import PLAIN, Epilogue, Step

CHIPS = ("Ascend310", "Ascend310P3", "Ascend910A", "Ascend910B2")
RULE = "ChannelGatesFusionPass"
INSIDE = Road(start="inside")


def limited(most):
    """Limits 0 and `most`."""
    return Epilogue((), (Step("vmaxs", ("sums",), 0.0), Step("vmins", (0,), most)), "fp16")


def run(job, chip, plain=False, seed=0):
    """Return what the kernel writes, what NumPy says, and its phases."""
    rng = np.random.default_rng(seed)
    after = (PLAIN, PLAIN) if plain else (limited(90.0), limited(1.0))
    job = replace(job, after=after)
    (n, c, mid) = (job.n, job.c, job.mid)
    wide = job.blocks * 16
    x = rng.integers(-3, 4, (n, c, job.h, job.w)).astype(np.float16)
    one = rng.integers(-2, 3, (mid, c))
    two = rng.integers(-2, 3, (c, mid)) / 256
    b1 = rng.integers(-2, 3, mid)
    b2 = rng.integers(-2, 3, c) / 8
    weight = rng.integers(-4, 5, (job.blocks, max(job.rows, 1), 16))
    sides = {
        "squeeze": (one, (job.hidden, wide), "f2"), "excite": (two, (wide, job.hidden), "f2"),
        "bias1": (b1, (job.hidden,), "f4"), "bias2": (b2, (wide,), "f4"),
        "weight": (weight, weight.shape, "f2"),
    }  # fmt: skip
    tensors = {"x": pack(address_map("NC1HWC0", x.shape, "fp16"), x).reshape(-1)}
    for name, (array, size, kind) in sides.items():
        if name != "weight" or job.rows:
            missing = [(0, s - a) for s, a in zip(size, array.shape, strict=True)]
            tensors[name] = np.pad(array, missing).astype(kind).reshape(-1)
    kernel = Kernel("gates", excitation_launches(job, chip))
    found = execute(kernel, tensors, chip, seed=seed)["y"].reshape(n, -1, max(job.rows, 1), 16)
    hidden = x.astype(np.float64).mean((2, 3)) @ one.T + b1
    gates = (hidden if plain else hidden.clip(0, 90)) @ two.T + b2
    gates = gates if plain else gates.clip(0, 1)
    gates = np.pad(gates, ((0, 0), (0, wide - c))).reshape(n, -1, 1, 16)
    return found, gates * weight if job.rows else gates, kernel


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 200), st.integers(1, 20), st.integers(1, 20)),
    st.integers(1, 80), st.sampled_from((0, 0, 1, 5, 24)), st.booleans(), st.sampled_from(CHIPS),
    st.integers(0, 99),
)  # fmt: skip
@example((1, 1152, 7, 7), 48, 192, False, "Ascend910A", 0)
@example((1, 32, 112, 112), 8, 16, False, "Ascend910B2", 1)  # some pixels at a time
@example((1, 32, 112, 112), 8, 16, False, "Ascend310", 2)  # more than the cube takes at once
@example((2, 40, 1, 1), 10, 0, True, "Ascend310P3", 3)  # means
@example((5, 16, 4, 4), 300, 0, False, "Ascend910B2", 4)  # more rows than an instruction has
def test_values_equal_numpy(sizes, mid, rows, plain, name, seed):
    chip = load_chip(name)
    found, wanted, kernel = run(Excitation(*sizes, mid, (), rows), chip, plain, seed)
    np.testing.assert_allclose(found, wanted, rtol=2**-9, atol=2**-9)
    for phase in kernel.phases:
        assert sanitize(phase, chip) == []
        fast, slow = (simulate(phase, chip, engine=e).cycles for e in ("fast", "reference"))
        assert fast == slow


def test_matrices_that_ub_cannot_hold_are_refused():
    with pytest.raises(CapacityError, match="of UB"):
        excitation_launches(Excitation(1, 4096, 1, 1, 512, (PLAIN, PLAIN)), load_chip("Ascend310"))


def test_every_core_sums_pixels_of_a_few_wide_planes():
    """32 channels are 2 blocks; 112 rows of each are shared, and no core waits for the means."""
    for name in ("Ascend910A", "Ascend910B2"):
        chip = load_chip(name)
        job = Excitation(1, 32, 112, 112, 8, (PLAIN, PLAIN))
        first, last = excitation_launches(job, chip)
        assert first.core_count > 0.9 * chip.cores_of("vector") and last.core_count == 2
        moved = simulate_kernel(Kernel("gates", (first, last)), chip).path_bytes
        pixels = 2 * 32 * 112 * 112
        assert pixels < sum(size for (at, _), size in moved.items() if at == "GM") < 1.2 * pixels


# -- in a network ---------------------------------------------------------------------------------
def squeezed(n=1, c=192, size=14, *, behind=True, shared=False, act="silu", mid=16, after=""):
    """Convolutions of channels one by one, squeeze and excite, a projection, and what is added.

    Without the projection an activation may follow the scale.
    """
    net = GraphBuilder("squeezed", "fp16")
    x = net.input("x", (n, c, size, size))
    y = net.silu(net.conv2d(x, net.weight((c, 1, 3, 3)), net.weight((c,)), pad=1, groups=c))
    one = net.weight((mid, c, 1, 1))
    two = net.weight((c, mid, 1, 1))
    inner = net.conv2d(net.global_avg_pool(y), one, net.weight((mid,)))
    scale = net.sigmoid(net.conv2d(getattr(net, act)(inner), two, net.weight((c,))))
    y = net.mul(y, scale)
    if behind:
        y = net.conv2d(y, net.weight((40, c, 1, 1)), net.weight((40,)))
        y = net.add(y, net.conv2d(x, net.weight((40, c, 1, 1))))
    if after:
        y = getattr(net, after)(y)
    net.output(*([y, inner] if shared else [y]))
    return net.build()


def check(stages, graph):
    """Values of kernels on poisoned memory equal the formulas, the time is above the bound."""
    feeds = random_inputs(graph, 1)
    found = run_tasks(stages.compiled, feeds)
    wanted = evaluate(graph, feeds)
    for got, exact in zip(found.values(), wanted.values(), strict=True):
        np.testing.assert_allclose(got, exact, rtol=0, atol=0.01 * np.abs(exact).max())
    bound = bound_of(stages.rewritten, stages.compiled.chip)
    ledger(stages.timeline(), bound)
    once = replace(stages.compiled, scopes=((0, len(stages.compiled.tasks)),), prefetch=True)
    assert bound.time_s <= simulate_graph(once).time_s


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("road", [Road(), INSIDE])
def test_gates_scale_the_weights_of_the_convolution_behind(name, road):
    chip = load_chip(name)
    graph = squeezed()
    stages = road.stages(graph, chip)
    check(stages, graph)
    (task,) = (task for task in stages.compiled.tasks if "sigmoid" in task.op)
    if chip.combined or road != INSIDE:  # a barrier is cheaper than weights that are scaled
        assert "conv2d+silu+conv2d+sigmoid+mul+conv2d" in task.op
        assert len(task.lowered.kernel.phases) == 3
    off = replace(road, switches=parse_switches(f"{RULE}:off")).stages(graph, chip)
    assert stages.timeline().time_s < off.timeline().time_s


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("n", [1, 3])
def test_gates_alone_where_nothing_but_a_product_reads_them(name, n):
    graph = squeezed(n, 72, 9, behind=False, act="relu")
    stages = compile_stages(graph, name)
    (task,) = (t for t in stages.compiled.tasks if t.op.endswith("conv2d+relu+conv2d+sigmoid"))
    assert unit_of(task.piece, load_chip(name))[1].startswith("gates of channels")
    check(stages, graph)


def test_what_is_read_elsewhere_is_no_part_of_it():
    graph = squeezed(shared=True)
    stages = compile_stages(graph, "Ascend910A")
    assert not any("conv2d+silu+conv2d" in task.op for task in stages.compiled.tasks)
    check(stages, graph)


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("act", ["relu", "hard_swish", "tanh", "neg"])
def test_an_activation_may_follow_the_scale(name, act):
    """The scale of images has one reader, which is no convolution: nothing to take weights from."""
    graph = squeezed(2, 40, 5, behind=False, after=act, mid=8)
    stages = compile_stages(graph, name)
    assert any(task.op.endswith("conv2d+silu+conv2d+sigmoid") for task in stages.compiled.tasks)
    check(stages, graph)


@pytest.mark.parametrize("name", ["Ascend310P3", "Ascend910B2"])
def test_joined_images_whose_blocks_lie_apart_have_gates_too(name):
    net = GraphBuilder("joined", "fp16")
    x = net.input("x", (2, 32, 10, 10))
    parts = [net.relu(net.conv2d(x, net.weight((64, 32, 1, 1)))) for _ in range(2)]
    y = net.concat(*parts, axis=1)
    inner = net.relu(net.conv2d(net.global_avg_pool(y), net.weight((16, 128, 1, 1))))
    scale = net.sigmoid(net.conv2d(inner, net.weight((128, 16, 1, 1))))
    net.output(net.conv2d(net.mul(y, scale), net.weight((32, 128, 1, 1))))
    graph = net.build()
    check(compile_stages(graph, name), graph)
