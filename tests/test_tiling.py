"""Huge inputs in tiles: the values of the whole network, within the memory, halos at borders."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st

from ascend_lab.cli import ascend_lab as main
from ascend_lab.compiler import GraphBuilder, evaluate, random_inputs, zoo
from ascend_lab.compiler.compile import finish_stages, front_stages
from ascend_lab.compiler.draft import pruned
from ascend_lab.compiler.evaluate import checked_inputs
from ascend_lab.compiler.fusion import fuse
from ascend_lab.compiler.onnx.export import export_onnx
from ascend_lab.compiler.placement import live_bytes, peak_bytes, weight_bytes
from ascend_lab.compiler.slice import Grid, obstacle
from ascend_lab.compiler.tasks import compile_tasks
from ascend_lab.compiler.tiled import Tiled, simulate_tiled, simulate_within, tile_for, tile_graph
from ascend_lab.compiler.values import run_tasks
from ascend_lab.compiler.zoo import macs
from ascend_lab.errors import AscendLabError, CapacityError
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators.ops.formats import numpy_type

CHIP = load_chip("Ascend310")


def whole_numbers(shape, seed, high=2):
    return np.random.default_rng(seed).integers(-high, high + 1, shape).astype(np.float32)


def cut_into(graph, rows, cols):
    """Return a graph, all of it local, in a grid of tiles."""
    step = Grid(graph, 10**12, None).step(rows, cols)
    return Tiled(graph, (step,), 10**12, 0)


def evaluate_tiled(tiled, inputs):
    """Return the outputs by name, with only one tile's tensors at a time: slice, compute, paste."""
    graph = tiled.graph
    live = dict(checked_inputs(graph, inputs))
    for i, step in enumerate(tiled.steps):
        own = {name: live[name] for name in step.graph.inputs}
        live.update(tiles_of(step, own) if step.tiles else evaluate(step.graph, own))
        later = {n for s in tiled.steps[i + 1 :] for n in s.graph.inputs} | set(graph.outputs)
        live = {name: value for name, value in live.items() if name in later}
    return {n: live[n] if n in live else graph.constants[n].array() for n in graph.outputs}


def tiles_of(step, inputs):
    types = step.graph.types
    found = {n: np.empty(types[n].shape, numpy_type(types[n].dtype)) for n in step.graph.outputs}
    for tile in step.tiles:
        own = {n: x[area(tile.reads[n])] if n in tile.reads else x for n, x in inputs.items()}
        kind = step.kinds[tile.kind]
        values = evaluate(kind, own)
        for name, inner in zip(step.graph.outputs, kind.outputs, strict=True):
            found[name][area(tile.writes[name])] = values[inner]
    return found


def area(box):
    return (slice(None), slice(None), *(slice(*r) for r in box))


def same(graph, tiled, inputs=None):
    """Assert equal values: sums of small whole numbers are exact in any order."""
    inputs = inputs or {n: whole_numbers(graph.types[n].shape, 1) for n in graph.inputs}
    found = evaluate_tiled(tiled, inputs)
    wanted = evaluate(graph, inputs)
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)


# -- values ---------------------------------------------------------------------------------------
pads = st.tuples(*(st.tuples(st.integers(0, 1), st.integers(0, 1)) for _ in range(2)))
steps = st.tuples(st.integers(1, 2), st.integers(1, 3))


@st.composite
def layers(draw):
    """Return (operator, kernel, attributes) of one layer on few channels."""
    kernel = draw(st.tuples(st.integers(2, 3), st.integers(2, 4)))
    op = draw(st.sampled_from(("conv2d", "depthwise", "pool", "mean", "deconv", "relu", "pad")))
    attrs = {"pad": draw(pads), "stride": draw(steps)}
    if op in ("conv2d", "depthwise", "deconv"):
        attrs["dilation"] = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    return op, kernel, attrs


def chain(kinds, size):
    net = GraphBuilder("chain")
    x = net.input("x", (1, 2, *size))
    for i, (op, kernel, attrs) in enumerate(kinds):
        try:
            if op == "relu":
                x = net.relu(x)
            elif op == "pad":
                x = net.pad(x, pads=((0, 0), (0, 0), *attrs["pad"]), value=1.0)
            elif op == "pool":
                x = net.max_pool2d(x, kernel=kernel, **attrs)
            elif op == "mean":
                x = net.avg_pool2d(x, kernel=kernel, **attrs, count_include_pad=i % 2 == 0)
            elif op == "deconv":
                w = net.constant(whole_numbers((2, 2, *kernel), i, 1))
                x = net.conv_transpose2d(x, w, **attrs)
            else:
                groups = 2 if op == "depthwise" else 1
                w = net.constant(whole_numbers((2, 2 // groups, *kernel), i, 1))
                x = net.conv2d(x, w, groups=groups, **attrs)
        except AscendLabError:
            continue  # no window fits
    net.output(x)
    return net.build()


@given(
    st.lists(layers(), min_size=1, max_size=4),
    st.tuples(st.integers(9, 24), st.integers(9, 24)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_chains_of_windows_have_the_values_of_the_whole(kinds, size, grid):
    graph = chain(kinds, size)
    if graph.nodes and not any(obstacle(graph, node) for node in graph.nodes):
        # averages are no whole numbers: later sums may round differently
        x = {"x": whole_numbers((1, 2, *size), 5)}
        tiled = cut_into(graph, *grid)
        found, wanted = (f(g, x) for f, g in ((evaluate_tiled, tiled), (evaluate, graph)))
        close = np.testing.assert_allclose
        check = close if any(k[0] == "mean" for k in kinds) else np.testing.assert_array_equal
        for name in wanted:
            check(
                found[name],
                wanted[name],
                **({"rtol": 1e-5, "atol": 1e-5} if check is close else {}),
            )


def residual():
    net = GraphBuilder("residual")
    x = net.input("x", (2, 3, 21, 17))
    first, second = (net.constant(whole_numbers((3, 3, 3, 3), i, 1)) for i in range(2))
    y = net.conv2d(net.relu(net.conv2d(x, first, pad=1)), second, pad=1)
    net.output(net.max_pool2d(net.add(x, y), kernel=3, stride=2, pad=1))
    return net.build()


def up_and_down():
    net = GraphBuilder("up_and_down")
    x = net.input("x", (1, 2, 24, 20))
    w = [net.constant(whole_numbers((2, 2, k, k), k, 1)) for k in (3, 2)]
    fine = net.relu(net.conv2d(x, w[0], pad=1))
    coarse = net.conv2d(net.max_pool2d(fine, kernel=2), w[0], pad=1)
    up = net.conv_transpose2d(coarse, w[1], stride=2)
    joined = net.concat(fine, up, axis=1)
    left, right = net.split(joined, sizes=2, axis=1)
    net.output(net.sub(left, right), coarse)
    return net.build()


def inner_output():
    net = GraphBuilder("inner_output")
    x = net.input("x", (1, 4, 15, 15))
    scale = net.input("scale", (1, 4, 1, 1))
    y = net.mul(x, scale)
    z = net.conv2d(
        y, net.constant(whole_numbers((4, 4, 5, 5), 3, 1)), dilation=2, pad=((2, 3), (4, 1))
    )
    column = net.constant(whole_numbers((4, 1, 1), 4))
    net.output(y, net.add(z, column))
    return net.build()


@pytest.mark.parametrize("make", [residual, up_and_down, inner_output])
@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (5, 1), (1, 4), (4, 4), (99, 99)])
def test_branches_skips_and_several_outputs(make, grid):
    graph = make()
    tiled = cut_into(graph, *grid)
    assert (tiled.tile_count == 1) == (grid == (1, 1))
    same(graph, tiled)


# -- models ---------------------------------------------------------------------------------------
MODELS = {
    "resnet18": ({"size": 64}, 0.5),
    "mobilenet_v2": ({"size": 64}, 0.5),
    "squeezenet": ({"size": 96}, 0.4),
    "unet": ({"size": 256, "width": 2}, 0.75),
}
QUICK = ("mobilenet_v2", "unet")


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in MODELS],
)
def test_models_within_a_small_memory(name):
    arguments, share = MODELS[name]
    graph = zoo.build(name, **arguments)
    weights = weight_bytes(graph)
    limit = weights + int(share * (peak_bytes(graph) - weights))
    tiled = tile_graph(graph, limit)
    assert tiled.tile_count >= 2
    assert tiled.peak_bytes <= limit < peak_bytes(graph)
    inputs = random_inputs(graph)
    found = evaluate_tiled(tiled, inputs)
    for output, values in evaluate(graph, inputs).items():
        scale = np.abs(values).max()
        np.testing.assert_allclose(found[output], values, rtol=0, atol=1e-6 * scale)


# -- bytes and limits -----------------------------------------------------------------------------
def test_peak_counts_what_is_alive():
    net = GraphBuilder("live", "fp16")
    x = net.input("x", (1, 1, 8, 8))
    y = net.max_pool2d(x, kernel=2)
    net.output(net.add(net.relu(y), y))
    graph = net.build()
    assert live_bytes(graph) == [128 + 32, 32 + 32, 32 + 32 + 32]
    assert peak_bytes(graph) == 160
    conv = GraphBuilder("conv", "fp16")
    conv.output(conv.conv2d(conv.input("x", (1, 1, 4, 4)), conv.weight((2, 1, 1, 1))))
    assert peak_bytes(conv.build()) == 32 + 64 + 4


def stack(size=64, channels=8):
    net = GraphBuilder("stack")
    x = net.input("x", (1, 2, size, size))
    y = net.relu(net.conv2d(x, net.constant(whole_numbers((channels, 2, 3, 3), 0)), pad=1))
    z = net.max_pool2d(y, kernel=8)
    net.output(net.reshape(net.global_avg_pool(z), shape=(1, channels)))
    return net.build()


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4, 0.25])
def test_the_fewest_tiles_that_fit(share):
    graph = stack()
    limit = int(peak_bytes(graph) * share)
    tiled = tile_graph(graph, limit)
    assert tiled.peak_bytes <= limit
    assert (tiled.tile_count == 0) == (share == 1.0)
    same(graph, tiled)
    if tiled.tile_count > 1:
        part = next(step for step in tiled.steps if step.tiles)
        resident = sum(
            part.graph.types[n].size_bytes for n in (*part.graph.inputs, *part.graph.outputs)
        )
        room = limit - weight_bytes(graph) - resident
        grid = Grid(part.graph, room, None)
        count = tiled.tile_count
        few = [(r, c) for r in range(1, 9) for c in range(1, 9) if r * c < count]
        assert few and not any(grid.fits(*g) for g in few)


def test_too_small_a_memory_says_what_the_smallest_tile_needs():
    graph = stack()
    with pytest.raises(CapacityError, match=r"stack: about \d+ B .* got 36000 B") as found:
        tile_graph(graph, 36_000)
    needed = int(found.value.needed.split("about ")[1].split()[0])
    assert tile_graph(graph, needed).peak_bytes <= needed
    with pytest.raises(CapacityError):
        tile_graph(graph, needed - 1)


def test_what_needs_the_whole_image_is_named():
    net = GraphBuilder("dense")
    x = net.input("x", (64, 256))
    net.output(net.matmul(x, net.weight((256, 256)), name="product"))
    with pytest.raises(CapacityError, match=r"product \(matmul\).*no image"):
        tile_graph(net.build(), 300_000)
    norm = GraphBuilder("norm")
    y = norm.input("x", (1, 1, 64, 64))
    norm.output(norm.softmax(y, axis=3, name="over_columns"))
    with pytest.raises(CapacityError, match=r"over_columns.*axis 3"):
        tile_graph(norm.build(), 20_000)


# -- on a chip ------------------------------------------------------------------------------------
def small_network():
    net = GraphBuilder("small", "fp16")
    x = net.input("x", (1, 3, 32, 32))
    y = net.relu(net.conv2d(x, net.weight((24, 3, 3, 3)), pad=1))
    z = net.conv2d(y, net.weight((24, 24, 3, 3)), pad=1)
    w = net.max_pool2d(net.relu(net.add(y, z)), kernel=2)
    net.output(net.reshape(net.global_avg_pool(w), shape=(1, 24)))
    return net.build()


def test_compiled_tiles_compute_what_their_graphs_say():
    front = front_stages(small_network(), CHIP)
    tiled = tile_for(front, CHIP, 2 * peak_bytes(front.laid_out) // 3)
    kinds = [kind for step in tiled.steps for kind in step.kinds]
    cuts = [n for kind in kinds for n in kind.nodes if n.op == "slice"]
    assert len(kinds) > 1
    assert any(kinds[0].types[n.output].layout == "NC1HWC0" for n in cuts[:1])
    for kind in kinds:
        inputs = random_inputs(kind, 3)
        compiled = compile_tasks(kind, CHIP, fuse(kind, CHIP).groups)
        wanted = evaluate(kind, inputs)
        for name, values in run_tasks(compiled, inputs).items():
            np.testing.assert_allclose(values, wanted[name], rtol=2e-2, atol=2e-2)


def test_time_is_the_sum_of_tiles_copies_and_the_rest():
    front = front_stages(small_network(), CHIP)
    tiled = tile_for(front, CHIP, 2 * peak_bytes(front.laid_out) // 3)
    times = simulate_tiled(tiled, CHIP)
    assert times.tiled.tile_count == tiled.tile_count > 1
    rows = times.summary()["operators"]
    assert sum(row["time_s"] for row in rows) == pytest.approx(times.time_s)
    (step,) = [step for step in tiled.steps if step.tiles]
    boxes = sum(len(t.reads) + len(t.writes) for t in step.tiles)
    names = [op.name.split()[0] for op in times.operators]
    assert names.count("slice") + names.count("paste") == boxes
    whole, _ = simulate_within(front, CHIP)
    assert times.time_s > whole.time_s


def test_what_fits_only_when_fused_is_not_refused():
    graph = zoo.build("mobilenet_v3_large", size=32)
    front = front_stages(graph, CHIP)
    compiled = finish_stages(front, CHIP).compiled
    times, fused = simulate_within(front, CHIP, peak_bytes(front.laid_out))
    assert len(times.operators) == sum(task.lowered is not None for task in compiled.tasks)
    assert fused.counts
    with pytest.raises(CapacityError):
        simulate_within(front, CHIP, weight_bytes(front.laid_out))


@pytest.mark.full
def test_a_remote_sensing_image_on_the_smallest_chip():
    """10000 x 10000 pixels through the first block of ResNet-50: 8 GB do not hold its maps."""
    whole = zoo.build("resnet50", size=10_000)
    graph = pruned(replace(whole, outputs=("layer1.0.relu",)))
    front = front_stages(graph, CHIP)
    memory = CHIP.device_memory.size_bytes
    assert peak_bytes(front.laid_out) > memory
    times, _ = simulate_within(front, CHIP)
    assert times.tiled.tile_count >= 2
    assert times.tiled.peak_bytes <= memory
    assert 0.0 < times.tiled.halo_share < 0.02
    least = macs(graph) / (CHIP.peak_ops_per_s("fp16") / 2)
    least_moved = graph.types["stem.relu"].size_bytes / CHIP.device_memory.rate_bytes_per_s
    assert least + least_moved < times.time_s < 60.0


def test_the_command_line_tiles_by_itself(tmp_path, capsys):
    model = tmp_path / "small.onnx"
    graph = zoo.build("squeezenet", size=96)
    onnx.save(export_onnx(graph), model)
    laid_out = front_stages(graph, CHIP).laid_out
    limit = peak_bytes(laid_out) - 100_000
    base = ["simulate", str(model), "--chip", "Ascend310"]
    assert main([*base, "--json", "-"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert "tiles" not in whole
    assert main([*base, "--memory-limit", str(limit), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tiles"] >= 2
    assert found["halo_share"] >= 0.0
    assert found["peak_bytes"] <= found["limit_bytes"] == limit
    assert found["time_s"] > whole["time_s"]
    assert main([*base, "--memory-limit", str(limit)]) == 0
    assert f"in {found['tiles']} tiles" in capsys.readouterr().out
    assert main([*base, "--memory-limit", "1000"]) == 2
    assert "device memory" in capsys.readouterr().err
