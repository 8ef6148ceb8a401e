"""Sliced graphs compute what the whole graph does: every axis, halo, order, uneven sizes."""

import numpy as np
import pytest
from graph_strategies import whole_graphs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ascend_lab.aoe.subgraph import Region, SlicePlan, compiled, prepared, sliced
from ascend_lab.aoe.subgraph.slicing import AXES, HALOS, ORDERS, axis_number, ranges_of
from ascend_lab.chip import load_chip
from ascend_lab.errors import AscendLabError, InputError, ShapeError
from ascend_lab.graph import (
    GraphBuilder,
    TensorType,
    evaluate,
    random_inputs,
    run_compiled,
    run_tasks,
)  # fmt: skip
from ascend_lab.graph.canonical import canonical
from ascend_lab.graph.slice import part_of

CHIP = load_chip("Ascend310")


def whole_numbers(net, shape, seed, low=-1, high=1):
    drawn = np.random.default_rng(seed).integers(low, high + 1, shape)
    return net.constant(drawn.astype(np.float16))


def images(batch=3, channels=5, size=9, stride=1, kernel=3, pool=True):
    """Convolution, pooling, a branch that joins again, and elementwise work between."""
    net = GraphBuilder("images", "fp16")
    x = net.input("x", (batch, channels, size, size + 1))
    first = whole_numbers(net, (6, channels, kernel, kernel), 1)
    y = net.clip(net.conv2d(x, first, pad=kernel // 2), low=-4.0, high=4.0, name="y1")
    side = whole_numbers(net, (6, 6, 1, 1), 2)
    z = net.conv2d(y, whole_numbers(net, (6, 6, 3, 3), 3), pad=1, stride=stride, name="y2")
    w = net.conv2d(y, side, stride=stride, name="y3")
    total = net.clip(net.add(z, w), low=-4.0, high=4.0, name="y4")
    if pool:
        total = net.max_pool2d(total, kernel=2, stride=1, name="y5")
    net.output(net.mul(total, whole_numbers(net, (6, 1, 1), 4), name="y6"))
    return net.build()


def attention(batch=4, rows=6):
    """Scores, softmax and their product: rows of queries in slices, keys whole."""
    net = GraphBuilder("attention", "fp16")
    q, k, v = (net.input(n, (batch, rows, 16)) for n in "qkv")
    scores = net.batch_matmul(q, k, trans_b=True, name="scores")
    share = net.softmax(net.muls(scores, number=0.25), axis=-1, name="share")
    net.output(net.relu(net.batch_matmul(share, v, name="mixed"), name="out"))
    return net.build()


def dense(batch=6, rows=4):
    """Products with constants: columns in slices cut the weights."""
    net = GraphBuilder("dense", "fp16")
    x = net.input("x", (batch, rows, 8))
    flat = net.reshape(x, shape=(batch * rows, 8), name="flat")
    y = net.relu(net.matmul(flat, whole_numbers(net, (8, 32), 1), name="m1"), name="r1")
    z = net.add(y, whole_numbers(net, (32,), 2), name="a1")
    net.output(net.reshape(z, shape=(batch, rows, 32), name="nd"))
    return net.build()


def region(graph, axis, parts, order="depth", halo="recompute", first=None, last=None):
    names = [node.name for node in graph.nodes]
    return Region(first or names[0], last or names[-1], axis, tuple(parts), order, halo)


def agree(graph, plan, seed=0, compiled=False, rtol=0.0):
    new = sliced(graph, plan)
    assert new.inputs == graph.inputs and new.outputs == graph.outputs
    inputs = random_whole(graph, seed)
    wanted = evaluate(graph, inputs)
    found = evaluate(new, inputs)
    if compiled:
        runs = run_compiled(new, inputs, CHIP)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
        if compiled:
            got = runs[name].astype(float)
            np.testing.assert_allclose(got, value.astype(float), rtol=rtol, atol=rtol)
    return new


def random_whole(graph, seed):
    rng = np.random.default_rng(seed)
    return {n: rng.integers(-2, 3, graph.types[n].shape).astype(np.float16) for n in graph.inputs}


def sizes_of(draw, total, most=4):
    count = draw(st.integers(2, min(most, total)))
    cuts = draw(st.lists(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1,
                         unique=True).map(sorted))  # fmt: skip
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_images_on_every_axis(data):
    draw = data.draw
    stride, kernel, pool = (
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 3])),
        draw(st.booleans()),
    )
    graph = images(3, 5, draw(st.sampled_from([7, 8])), stride, kernel, pool)
    axis = draw(st.sampled_from(["batch", "height", "width"]))
    size = graph.types[graph.outputs[0]].shape[("batch", "", "height", "width").index(axis)]
    parts = sizes_of(draw, size)
    plan = SlicePlan((region(graph, axis, parts, draw(st.sampled_from(["depth", "zigzag"])),
                             draw(st.sampled_from(["recompute", "store"]))),))  # fmt: skip
    try:
        new = agree(graph, plan, draw(st.integers(0, 9)))
    except ShapeError as error:
        assume("only padding" not in str(error))
        raise
    assert len(new.nodes) > len(graph.nodes)


@pytest.mark.parametrize("order", ["depth", "zigzag"])
@pytest.mark.parametrize(
    ("axis", "halo", "parts"),
    [
        ("batch", "recompute", (1, 2)),
        ("height", "recompute", (3, 4)),
        ("height", "store", (3, 4)),
        ("width", "store", (2, 6)),
    ],
)
def test_compiled_slices_of_images(axis, halo, parts, order):
    graph = images(3, 20, 8)
    agree(graph, SlicePlan((region(graph, axis, parts, order, halo),)), compiled=True)


def test_stored_rows_are_computed_once():
    graph = images(1, 5, 9, pool=False)
    part = part_of(graph, graph.nodes, "p")

    def rows(halo):
        found = ranges_of(part, region(graph, "height", (3, 3, 3), halo=halo)).spans
        return sum(high - low for (name, _), (low, high) in found.items() if name == "y1")

    assert rows("store") == 9 < rows("recompute") == 9 + 4


def test_channels_cut_the_weights():
    graph = images(2, 5, 6)
    last = graph.node("y2")
    plan = SlicePlan((region(graph, "channel", (4, 2), first="y2", last="y2"),))
    new = agree(graph, plan, compiled=True)
    weights = [n for n in new.constants if n.startswith(last.inputs[1])]
    assert [new.types[n].shape[0] for n in sorted(weights)] == [4, 2]
    whole = SlicePlan((region(graph, "channel", (4, 2)),))
    with pytest.raises(InputError, match="needs it whole"):
        sliced(graph, whole)


def test_shared_weights_stay_shared():
    graph = images()
    new = agree(graph, SlicePlan((region(graph, "batch", (1, 1, 1)),)))
    assert set(new.constants) == set(graph.constants)
    readers = [len(new.readers[n]) for n in graph.constants]
    assert readers == [3] * len(readers)


@settings(max_examples=10, deadline=None)
@given(data=st.data(), axis=st.sampled_from(["batch", "sequence"]))
def test_attention(data, axis):
    graph = attention()
    parts = sizes_of(data.draw, 4 if axis == "batch" else 6)
    agree(
        graph,
        SlicePlan((region(graph, axis, parts, data.draw(st.sampled_from(["depth", "zigzag"]))),)),
    )


@pytest.mark.parametrize("axis", ["batch", "sequence"])
def test_compiled_attention(axis):
    graph = attention(rows=32)
    parts = (3, 1) if axis == "batch" else (16, 16)
    agree(graph, SlicePlan((region(graph, axis, parts),)), compiled=True, rtol=2e-2)


@pytest.mark.parametrize(("axis", "parts"), [("batch", (4, 2)), ("channel", (16, 16))])
def test_products(axis, parts):
    graph = dense()
    first = "m1" if axis == "channel" else None
    new = agree(graph, SlicePlan((region(graph, axis, parts, first=first),)), compiled=True)
    assert len([n for n in new.nodes if n.op == "matmul"]) == 2


def test_several_regions_and_graphs_between():
    graph = images(4)
    plan = SlicePlan(
        (
            region(graph, "batch", (3, 1), first=graph.nodes[0].name, last="y1"),
            region(graph, "height", (4, 4), first="y3", last="y6"),
        )
    )
    new = agree(graph, plan)
    assert SlicePlan.of(plan.plain()) == plan
    assert "batch 3+1, depth" in str(plan) and str(SlicePlan()) == "whole"
    assert sliced(graph, SlicePlan()) is not None and len(new.nodes) > len(graph.nodes)
    assert canonical(new, CHIP).outputs == graph.outputs


def test_equal_slices_are_lowered_once():
    from ascend_lab.graph import compile_stages

    graph = images(4, 16, 8)
    new = sliced(graph, SlicePlan((region(graph, "batch", (2, 2)),)))
    tasks = [t for t in compile_stages(new, CHIP).compiled.tasks if t.op.startswith("conv2d")]
    assert len(tasks) == 2 * len({id(t.lowered) for t in tasks})


def test_exported_slices_come_back(tmp_path):
    pytest.importorskip("onnx")
    from ascend_lab.graph.onnx import import_onnx, save_onnx

    graph = images(4)
    new = sliced(graph, SlicePlan((region(graph, "batch", (3, 1), "zigzag"),)))
    save_onnx(new, tmp_path / "sliced.onnx")
    back = import_onnx(tmp_path / "sliced.onnx")
    back = getattr(back, "graph", back)
    inputs = random_whole(graph, 3)
    wanted = evaluate(graph, inputs).values()
    for got, value in zip(evaluate(back, inputs).values(), wanted, strict=True):
        np.testing.assert_array_equal(got, value)


def test_what_is_refused():
    graph = images()
    names = [node.name for node in graph.nodes]
    for plan, message in (
        (SlicePlan((region(graph, "batch", (1, 2), first="nobody"),)), "nobody"),
        (SlicePlan((region(graph, "batch", (1, 2), first=names[3], last=names[1]),)), "in order"),
        (SlicePlan((region(graph, "batch", (1, 2)), region(graph, "batch", (1, 2)))), "in order"),
        (SlicePlan((region(graph, "batch", (1,) * 4),)), "slices of 3 entries"),
        (SlicePlan((region(graph, "channel", (3, 3)),)), "whole"),
    ):
        with pytest.raises(AscendLabError, match=message):
            sliced(graph, plan)
    for wrong in (("depth", (0, 1)), ("batch", ())):
        with pytest.raises(InputError):
            Region("a", "b", wrong[0], wrong[1])
    with pytest.raises(InputError, match="axis height"):
        axis_number("height", TensorType((2, 3), "fp16"), "x")
    with pytest.raises(InputError, match="zigzag"):
        Region("a", "b", "batch", (1, 1), "sideways")


def test_random_inputs_fit_the_sliced_graph():
    graph = images()
    new = sliced(graph, SlicePlan((region(graph, "batch", (2, 1)),)))
    assert random_inputs(new, 1).keys() == random_inputs(graph, 1).keys()


@settings(max_examples=25, deadline=None)
@given(graph=whole_graphs(), data=st.data())
def test_any_region_of_any_graph_keeps_its_values(graph, data):
    """Whole numbers: results are equal bit for bit, or the region is refused."""
    draw = data.draw
    graph = prepared(graph, CHIP)
    assume(graph.nodes)
    low = draw(st.integers(0, len(graph.nodes) - 1))
    high = draw(st.integers(low, min(low + 4, len(graph.nodes) - 1)))
    axis, order = draw(st.sampled_from(AXES)), draw(st.sampled_from(ORDERS))
    halo = draw(st.sampled_from(HALOS))
    names = graph.nodes[low].name, graph.nodes[high].name
    parts = tuple(draw(st.lists(st.integers(1, 2), min_size=2, max_size=3)))
    try:
        new = sliced(graph, SlicePlan((Region(*names, axis, parts, order, halo),)))
    except AscendLabError:
        return
    inputs = random_whole(graph, 5)
    wanted, found = evaluate(graph, inputs), evaluate(new, inputs)
    runs = run_tasks(compiled(new, CHIP), inputs)
    whole = run_tasks(compiled(graph, CHIP), inputs)
    for name in graph.outputs:
        np.testing.assert_array_equal(found[name], wanted[name])
    for got, value in zip(runs.values(), whole.values(), strict=True):
        np.testing.assert_array_equal(got, value)
