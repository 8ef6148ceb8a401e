"""Reduce, transpose, scatter: who owns what, one split for all, and what both ways cost."""

import numpy as np
import pytest
from cube_checks import on
from hypothesis import given, settings, strategies as st

from ascend_lab.compiler import GraphBuilder, evaluate
from ascend_lab.compiler.ir import operator_of
from ascend_lab.errors import CapacityError
from ascend_lab.lab.figures import fig_owners
from ascend_lab.lab.kernels import split_conflict as case
from ascend_lab.lab.kernels.split_conflict import Points, tile_units, turn_scatter_launch
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import sanitize
from ascend_lab.machine.sim import execute
from ascend_lab.operators.ops.slicing import cut, take

TOY, A910, B2, A310 = (load_chip(n) for n in ("Toy", "Ascend910A", "Ascend910B2", "Ascend310"))
FITS = Points(8192, 2, 512, 512)
EXCEEDS = Points(32768, 2, 512, 512)
"""h of 8 MiB and of 32 MiB; the L2 of the 910A has 32 MiB for all tensors."""
MIB = 2**20


# -- the kernel ------------------------------------------------------------------------------------
def drawn(sizes, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((sizes.points, sizes.group, sizes.channels)).astype(np.float16)
    index = rng.integers(0, sizes.rows, sizes.channels).astype(np.int32)
    table = rng.standard_normal((sizes.rows, sizes.points)).astype(np.float16)
    return {"x": x, "index": index, "table": table}


def expected(inputs):
    y = inputs["table"].copy()
    for channel, row in enumerate(inputs["index"]):
        y[row] = inputs["x"][:, :, channel].max(axis=1)
    return y


@settings(max_examples=15)
@given(
    st.sampled_from([TOY, A910, B2, A310]),
    st.integers(1, 40),
    st.integers(1, 5),
    st.sampled_from([1, 2, 8, 9]),
    st.integers(1, 300),
)
def test_the_kernel_scatters_maxima_by_any_index(chip, points, group, channels, rows):
    sizes = Points(16 * points, group, 16 * channels, rows)
    inputs = drawn(sizes, points)
    launch = turn_scatter_launch(chip, sizes)
    given_ = {"x": inputs["x"], "index": inputs["index"], "y": inputs["table"]}
    assert not sanitize(launch, chip, filled=given_)
    assert (execute(launch, given_, chip)["y"].reshape(rows, -1) == expected(inputs)).all()


def test_the_kernels_apart_compute_the_same():
    sizes = Points(160, 3, 48, 50)
    inputs = drawn(sizes)
    tensors = {"x": inputs["x"], "index": inputs["index"], "y": inputs["table"]}
    for kernel in case.apart_kernels(sizes, TOY):
        mine = {b.name: tensors[b.name] for b in kernel.tensors if b.name in tensors}
        tensors |= execute(kernel, mine, TOY)
    assert (tensors["y"].reshape(50, 160) == expected(inputs)).all()
    assert (evaluate(case.case_graph(sizes), inputs)["y"] == expected(inputs)).all()


def test_a_group_that_does_not_fit_is_refused():
    with pytest.raises(CapacityError, match="smaller groups"):
        turn_scatter_launch(TOY, Points(16, 8, 128, 128))
    assert tile_units(TOY, Points(16, 2, 128, 128), 1) == 1


# -- one split for all -----------------------------------------------------------------------------
def test_the_points_are_the_split_all_three_agree_on():
    graph = case.case_graph(FITS)
    found = case.common_split(graph, graph.nodes)
    assert found.splits[1] == {"y": 1, "table": 1, "u": 1, "h": 0, "x": 0}
    assert list(found.refusals) == [0]
    assert "scatter_update" in found.refusals[0]
    assert str(found).startswith("axis 0: no: y (scatter_update): axis 0")
    assert "axis 1: cut y along axis 1, table along axis 1, u along axis 1" in str(found)
    both = case.common_split(graph, graph.nodes[:2])
    assert {a: dict(s) for a, s in both.splits.items()} == {
        0: {"u": 0, "h": 1, "x": 2},
        1: {"u": 1, "h": 0, "x": 0},
    }


def test_without_a_common_axis_the_reason_is_named():
    net = GraphBuilder("none", "fp16")
    x = net.input("x", (64, 2, 32))
    table = net.input("table", (40, 64))
    h = net.reduce_max(x, axis=1, name="h")
    s = net.softmax(h, axis=0, name="s")
    u = net.transpose(s, perm=(1, 0), name="u")
    net.output(net.scatter_update(table, net.input("index", (32,), "int32"), u, name="y"))
    graph = net.build()
    found = case.common_split(graph, graph.nodes)
    assert not found.splits
    assert found.refusals[1].startswith("s (softmax): axis 0 does not split")


def test_pieces_must_not_need_all_of_what_is_made_on_the_way():
    net = GraphBuilder("whole", "fp16")
    x = net.input("x", (64, 32))
    w = net.input("w", (32, 48))
    net.output(net.matmul(x, net.relu(w, name="v"), name="y"))
    graph = net.build()
    found = case.common_split(graph, graph.nodes)
    assert found.refusals == {0: "y (matmul): every piece needs all of v"}
    assert found.splits[1] == {"y": 1, "v": 1, "w": 1}


def test_halos_one_element_and_two_axes_at_once_are_refused():
    net = GraphBuilder("halo", "fp16")
    x = net.input("x", (1, 16, 8, 8))
    net.output(net.max_pool2d(net.relu(x, name="r"), kernel=3, stride=1, pad=1, name="y"))
    found = case.common_split(graph := net.build(), graph.nodes)
    assert "one element" in found.refusals[0]
    assert "overlap" in found.refusals[2]
    assert 1 in found.splits

    net = GraphBuilder("both", "fp16")
    r = net.relu(net.input("x", (16, 16)), name="r")
    net.output(net.add(r, net.transpose(r, perm=(1, 0), name="t"), name="y"))
    found = case.common_split(graph := net.build(), graph.nodes)
    assert set(found.refusals) == {0, 1}
    assert "r is wanted along axis" in found.refusals[0]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_pieces_computed_by_a_split_are_the_whole(axis):
    """Cut every tensor as the split says and run all nodes on each piece alone."""
    net = GraphBuilder("pieces", "fp32")
    x = net.input("x", (6, 3, 4, 10))
    b = net.input("b", (4, 1, 1))
    r = net.relu(net.reduce_sum(x, axis=1, name="h"), name="r")
    t = net.transpose(r, perm=(1, 2, 0), name="t")
    net.output(net.mul(t, b, name="y"))
    graph = net.build()
    rng = np.random.default_rng(axis)
    inputs = {n: rng.standard_normal(graph.types[n].shape).astype(np.float32) for n in "xb"}
    whole = evaluate(graph, inputs)["y"]
    axes = case.common_split(graph, graph.nodes).splits[axis]
    size = whole.shape[axis]
    parts = []
    for piece in ((0, 1), (1, size)):
        live = {
            n: a[tuple(slice(*piece) if i == axes.get(n) else slice(None) for i in range(a.ndim))]
            for n, a in inputs.items()
        }
        for node in graph.nodes:
            operands = [live[n] for n in node.inputs]
            live[node.output] = operator_of(node.op).reference(*operands, **node.attrs)
        parts.append(live["y"])
    np.testing.assert_allclose(np.concatenate(parts, axis=axis), whole, rtol=1e-6)


@pytest.mark.parametrize("piece", [(0, 16), (16, 64)])
def test_the_split_is_what_cut_says(piece):
    graph = case.case_graph(Points(64, 2, 32, 40))
    axes = case.common_split(graph, graph.nodes).splits[1]
    for node in graph.nodes:
        shapes = [t.shape for t in graph.in_types(node)]
        rules = operator_of(node.op).slice_rules(shapes, node.attrs)
        ranges = cut(rules, shapes, node.attrs, axes[node.output], piece).ranges
        for name, wanted in zip(node.inputs, ranges, strict=True):
            assert wanted == ({axes[name]: piece} if name in axes else {})
        arrays = [np.zeros(s) for s in shapes]
        assert len(take(arrays, ranges)) == len(shapes)


# -- owners ----------------------------------------------------------------------------------------
def test_neighbours_apart_split_along_different_axes():
    maps = case.owner_maps(Points(512, 2, 512, 512), A910)
    point = np.arange(512)[:, None] // 16
    channel = np.arange(512)[None, :] // 16
    for name, core in (("h", point), ("u", channel), ("y", point), ("fused", point)):
        assert (maps[name] == core).all(), name
    text = fig_owners(maps).alt_text
    assert "reduce is cut along the points, 3.1% of its numbers stay" in text
    assert "transpose is cut along the channels, 3.1%" in text
    assert "one kernel is cut along the points" in text


# -- what both ways cost ---------------------------------------------------------------------------
def costs(sizes, chip) -> tuple[case.Cost, case.Cost, case.Cost]:
    apart = case.apart_kernels(sizes, chip)
    return (
        case.cost(apart, chip),
        case.cost([case.in_one_launch(apart)], chip),
        case.cost([case.fused_kernel(sizes, chip)], chip),
    )


@pytest.mark.parametrize("chip_name", on("Toy", "Ascend310", "Ascend910A", "Ascend910B2"))
@pytest.mark.parametrize("sizes", [FITS, EXCEEDS], ids=["fits", "exceeds"])
def test_bytes_are_counted_from_programs(chip_name, sizes):
    chip = load_chip(chip_name)
    apart, phases, fused = costs(sizes, chip)
    tensor = 2 * sizes.points * sizes.channels
    extra = apart.core_bytes - fused.core_bytes
    assert extra == pytest.approx(4 * tensor, rel=0.01)
    assert fused.core_bytes == pytest.approx((sizes.group + 1) * tensor, rel=0.01)
    assert phases.core_bytes == apart.core_bytes
    assert fused.memory_bytes == pytest.approx((sizes.group + 1) * tensor, rel=0.01)
    # h and u end in memory, and come back from there if L2 cannot hold what lies between
    assert apart.memory_bytes >= fused.memory_bytes + 2 * tensor
    assert fused.total_cycles < phases.total_cycles < apart.total_cycles


def test_l2_hides_a_part_of_the_handing_over():
    small = costs(FITS, A910)
    large = costs(EXCEEDS, A910)
    gains = [a.cycles / f.cycles for a, _, f in (small, large)]
    assert 1.9 < gains[0] < 2.0
    assert 2.4 < gains[1] < 2.5
    assert [round(c.memory_bytes / MIB) for c in small] == [40, 40, 24]
    assert [round(c.memory_bytes / MIB) for c in large] == [224, 224, 96]


def test_where_memory_is_the_limit_transpose_and_scatter_are_free():
    reduce = case.cost(case.apart_kernels(EXCEEDS, A910)[:1], A910)
    fused = case.cost([case.fused_kernel(EXCEEDS, A910)], A910)
    assert fused.cycles == pytest.approx(reduce.cycles, rel=0.001)


def test_one_launch_is_not_one_split():
    apart, phases, _ = costs(EXCEEDS, A910)
    assert apart.launch_cycles == 3 * phases.launch_cycles
    assert phases.cycles == apart.cycles + 2 * A910.all_cores_cycles


@pytest.mark.parametrize("chip_name", on("Ascend310", "Ascend910A", "Ascend910B2"))
@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("points", [512, 2048, 65536])
def test_the_common_split_pays_at_every_size(chip_name, group, points):
    sizes = Points(points, group, 512, 512)
    chip = load_chip(chip_name)
    apart = case.cost(case.apart_kernels(sizes, chip), chip)
    assert case.cost([case.fused_kernel(sizes, chip)], chip).cycles < apart.cycles
