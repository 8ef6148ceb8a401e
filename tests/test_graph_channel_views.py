"""Blocks of channels of images, and columns of one matrix: cut out and joined as views."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from test_placement import run_in_arena

from ascend_lab.compiler import GraphBuilder, compile_stages, evaluate
from ascend_lab.compiler.aliases import BLOCK_BYTES, Alias, run_offset
from ascend_lab.compiler.ir import TensorType
from ascend_lab.compiler.memory import METHODS, Plan, verify
from ascend_lab.compiler.placement import (
    aliases_of,
    buffers_of,
    in_place_pairs,
    places_of,
    plan_network,
)
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import UnsupportedError
from ascend_lab.fused import block_kernels as blocks
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Buffer, Instruction, check_program, var
from ascend_lab.machine.layout import addresses
from ascend_lab.machine.sim import simulate

CHIP = load_chip("Ascend310")


def few(shape, axis=0):
    """Return weights of which two of an output channel are 1 or -1: sums of them stay exact."""
    rng = np.random.default_rng(sum(shape))
    weights = np.zeros(shape, np.float16)
    for channel in np.moveaxis(weights, axis, 0):
        for place in rng.choice(channel.size, 2, replace=False):
            channel[np.unravel_index(place, channel.shape)] = rng.choice([-1, 1])
    return weights


def conv(net, x, channels, name=""):
    return net.conv2d(x, net.constant(few((channels, x.shape[1], 1, 1))), name=name)


def inception(batch=1):
    """Branches that are joined, read by a convolution, and joined once more with its result."""
    net = GraphBuilder("inception", "fp16")
    x = net.relu(conv(net, net.input("x", (batch, 20, 6, 6)), 32), name="stem")
    parts = [net.abs(conv(net, x, n), name=f"branch{i}") for i, n in enumerate((16, 32))]
    parts.append(conv(net, net.max_pool2d(x, kernel=3, stride=1, pad=1), 16, "branch2"))
    join = net.concat(*parts, axis=1, name="join")
    again = net.relu(conv(net, join, 16), name="again")
    dense = net.concat(join, again, axis=1, name="dense")
    net.output(net.global_max_pool(conv(net, dense, 24)), net.neg(parts[0], name="early"))
    return net.build()


def unet(batch=1):
    """Down, up, and a join across; elementwise nodes before and behind it."""
    net = GraphBuilder("unet", "fp16")
    skip = net.relu(conv(net, net.input("x", (batch, 3, 8, 8)), 16), name="skip")
    low = net.relu(conv(net, net.max_pool2d(skip, kernel=2), 32))
    up = net.conv_transpose2d(low, net.constant(few((32, 16, 2, 2), axis=1)), stride=2)
    bias = net.constant(np.arange(16, dtype=np.float16).reshape(16, 1, 1))
    join = net.concat(skip, net.abs(net.add(up, bias), name="lifted"), axis=1, name="join")
    net.output(conv(net, net.abs(net.neg(join)), 16))
    return net.build()


def cuts(batch=1):
    """Blocks of channels, one over the other, the last one ragged; the whole is needed after."""
    net = GraphBuilder("cuts", "fp16")
    y = conv(net, net.input("x", (batch, 20, 4, 4)), 40, "y")
    for low, high in ((0, 16), (16, 40), (0, 32)):
        part = net.slice(y, begin=(0, low, 0, 0), end=(batch, high, 4, 4), name=f"c{low}_{high}")
        net.output(net.neg(part))
    net.output(net.square(y))
    return net.build()


def dense(batch=1):
    """Every join has all that was made before; a cut and a join with a ragged end beside them."""
    net = GraphBuilder("dense", "fp16")
    made = [conv(net, net.input("x", (batch, 20, 6, 6)), 32, "first")]
    for i in range(3):
        y = net.concat(*made, axis=1, name=f"join{i}") if i else made[0]
        made.append(conv(net, net.relu(y), 16, f"layer{i}"))
    top, rest = net.split(net.concat(*made, axis=1, name="last"), sizes=(48, 32), axis=1, name="s")
    net.output(net.global_max_pool(conv(net, top, 24)), net.max_pool2d(net.neg(rest), kernel=2))
    return net.build()


BLOCKS = {"inception": inception, "unet": unet, "cuts": cuts, "dense": dense}
VIEWS = {
    "inception": {
        "branch0": Alias("dense", 0), "branch1": Alias("dense", 1 * 6 * 6 * 32),
        "branch2": Alias("dense", 3 * 6 * 6 * 32), "join": Alias("dense", 0),
        "again": Alias("dense", 4 * 6 * 6 * 32),
    },
    "unet": {"skip": Alias("join", 0), "lifted": Alias("join", 8 * 8 * 32)},
    "cuts": {"c0_16": Alias("y", 0), "c16_40": Alias("y", 4 * 4 * 32), "c0_32": Alias("y", 0)},
    "dense": {
        **{f"join{i}": Alias("last", 0) for i in (1, 2)},
        **{f"layer{i}": Alias("last", (2 + i) * 6 * 6 * 32) for i in range(3)},
    },
}  # fmt: skip


def compiled(graph, fusion=True):
    return compile_stages(graph, CHIP, fusion=fusion).compiled


def moving(network):
    """Return the joins and cuts that are kernels."""
    ops = ("concat", "slice", "split")
    return [t.name for t in network.tasks if t.op in ops and t.lowered is not None]


def whole_numbers(graph, seed=1):
    rng = np.random.default_rng(seed)
    return {n: rng.integers(-3, 4, graph.types[n].shape).astype(np.float16) for n in graph.inputs}


def clobbered(network, places, shared=()):
    """Return (task, tensor) where a kernel writes over bytes that somebody reads later.

    Every tensor counts from the task that makes it, views included, to its last reader. What a
    kernel itself reads for the last time it may overwrite if the pair is `shared`.
    """
    graph = network.graph
    tasks = network.tasks
    born = dict.fromkeys(graph.inputs, -1) | {n: i for i, t in enumerate(tasks) for n in t.writes}
    last = {n: i for i, t in enumerate(tasks) for n in t.reads if n not in graph.constants}
    last |= dict.fromkeys(graph.outputs, len(tasks))
    found = []
    for i, task in enumerate(tasks):
        for target in task.writes if task.lowered is not None else ():
            low, size = places[target]
            for name, end in last.items():
                start, length = places[name]
                apart = low + size <= start or start + length <= low
                mine = end == i and any(places[a] == (start, length) for a, b in shared)
                if born[name] < i <= end and not apart and not mine:
                    found.append((task.name, name))
    return found


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_channels_are_views(name, batch):
    """Of several images, too: a block of all of them is one run then.

    Joins that begin alike are one after the other, of one image as of several.
    """
    network = compiled(BLOCKS[name](batch))
    assert moving(network) == []
    layouts = {kind.layout for kind in network.graph.types.values()}
    assert ("C1NHWC0" in layouts) == (batch > 1)
    found = {str(k).removesuffix(".relu"): v for k, v in aliases_of(network).items()}
    for part, alias in VIEWS[name].items():
        assert found[part] == Alias(alias.owner, batch * alias.offset_bytes), part


def branches(batch):
    """Kernels of all kinds between images that are joined."""
    net = GraphBuilder("branches", "fp16")
    x = net.relu(conv(net, net.input("x", (batch, 3, 9, 7)), 48))
    wide = net.constant(few((32, 48, 3, 3)))
    parts = [
        net.conv2d(x, wide, pad=1),
        net.depthwise_conv2d(x, net.constant(few((48, 1, 3, 3))), pad=1),
        net.relu(net.conv2d(x, net.constant(few((48, 16, 3, 3))), pad=1, groups=3)),
        net.max_pool2d(x, kernel=3, stride=1, pad=1),
        net.add(x, conv(net, x, 48)),
        net.mul(x, net.sigmoid(conv(net, net.global_max_pool(x), 48))),
    ]
    y = net.concat(*parts, axis=1, name="join")
    up = net.conv_transpose2d(y, net.constant(few((y.shape[1], 16, 2, 2), axis=1)), stride=2)
    net.output(up, net.conv2d(y, net.constant(few((20, y.shape[1], 3, 3))), stride=2))
    return net.build()


def check_values(network, graph):
    assert network.graph.types["join"].layout == "C1NHWC0" and not moving(network)
    inputs = whole_numbers(graph)
    wanted = evaluate(graph, inputs).values()
    for got, value in zip(run_tasks(network, inputs).values(), wanted, strict=True):
        np.testing.assert_allclose(got.astype(float), value.astype(float), rtol=2e-3, atol=2e-2)


def phases(network):
    return [p for t in network.tasks if t.lowered is not None for p in t.lowered.kernel.phases]


@pytest.mark.parametrize("chip", ["Ascend310P3", "Ascend910B2"])
def test_kernels_find_blocks_where_they_are(chip):
    graph = branches(3)
    network = compile_stages(graph, chip).compiled
    check_values(network, graph)
    for launch in phases(network):
        assert launch.name not in ("images", "blocks")
        quick, slow = (simulate(launch, network.chip, engine=e) for e in ("fast", "reference"))
        assert quick.cycles == slow.cycles
        for part in launch.parts:
            check_program(network.chip, part.program)


STEPS = ((512, 3, 256), (256, 2, 768), (1, 256, 1))
"""Of 3 images of 2 blocks of 256 numbers: blocks of 3 images."""


def touched(region, ranges):
    """Return every address of a region, turn by turn of its loops, in the order of its elements."""
    inner = sum(
        s * i for s, i in zip(region.strides, np.indices(region.sizes), strict=True)
    ).ravel()
    turns = (dict(zip(ranges, at, strict=True)) for at in np.ndindex(*ranges.values()))
    return np.concatenate([region.offset.at(env) + inner for env in turns])


def copy_of(region):
    near = Buffer("near", "UB", "fp16", 2048).region(0, region.sizes)
    return Instruction("data_copy", "MTE2", near, (region,))


def moved(region, ranges):
    """Return a region of images among blocks, None if it is none; what it is copied to is alike."""
    try:
        found = blocks._instruction_at_new_addresses(copy_of(region), 1, STEPS, ranges)
    except UnsupportedError:
        return None
    assert found.dst.sizes == found.srcs[0].sizes
    np.testing.assert_array_equal(touched(found.dst, {}), touched(copy_of(region).dst, {}))
    return found.srcs[0]


def where(address):
    image = address // 512
    block = address // 256 % 2
    place = address % 256
    return block * 768 + image * 256 + place


@pytest.mark.parametrize(
    ("offset", "sizes", "strides", "may"),
    [
        (512 * var("i"), (512,), (1,), True),  # an image is two runs
        (0, (1536,), (1,), True),
        (256 * var("j") + 16, (32,), (1,), True),
        (400, (2, 16), (224, 1), True),  # the end of one block, the start of the next
        (624, (2, 16), (-224, 1), True),
        (128 * var("i"), (128,), (1,), False),  # on from block to block
        (200, (100,), (1,), False),
        (256 * var("i"), (16,), (1,), False),
        (1024 - 256 * var("i"), (16,), (1,), False),
    ],
)
def test_addresses_move_digit_by_digit(offset, sizes, strides, may):
    region = Buffer("x", "GM", "fp16", 1536).region(offset, sizes, strides)
    ranges = {"i": 3, "j": 2}
    found = moved(region, ranges)
    assert (found is not None) == may
    if may:
        np.testing.assert_array_equal(touched(found, ranges), where(touched(region, ranges)))


@settings(max_examples=200)
@given(data=st.data())
def test_what_moves_goes_where_its_images_are(data):
    units = st.sampled_from([-512, -256, -16, 1, 16, 32, 128, 224, 240, 256, 512, 768])
    ranges = {"i": data.draw(st.integers(1, 3)), "j": data.draw(st.integers(1, 3))}
    const = data.draw(st.integers(0, 95)) * 16
    offset = const + data.draw(units) * var("i") + data.draw(units) * var("j")
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 16, 32]), min_size=1, max_size=3))
    strides = [data.draw(units) for _ in sizes]
    region = Buffer("x", "GM", "fp16", 1536).region(offset, sizes, strides)
    low, high = region.extent(ranges)
    found = moved(region, ranges) if low >= 0 and high < 1536 else None
    if found is not None:
        np.testing.assert_array_equal(touched(found, ranges), where(touched(region, ranges)))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    ("batch", "fusion"),
    [
        (1, False),
        (3, True),
        *(pytest.param(*x, marks=pytest.mark.full) for x in ((1, True), (2, False))),
    ],
)
def test_values_are_equal_bit_for_bit_and_survive_in_planned_memory(name, batch, fusion):
    graph = BLOCKS[name](batch)
    network = compiled(graph, fusion)
    inputs = whole_numbers(graph)
    own = run_tasks(network, inputs)
    wanted = evaluate(graph, inputs)
    for got, output in zip(own.values(), graph.outputs, strict=True):
        assert np.any(wanted[output] != 0)
        np.testing.assert_array_equal(got, wanted[output])
    for method in METHODS:
        for in_place in (False, True):
            plan = plan_network(network, method, in_place=in_place)
            planned = run_in_arena(network, plan, inputs)
            for output, value in own.items():
                np.testing.assert_array_equal(planned[output].reshape(value.shape), value)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("batch", "fusion"), [(1, False), (1, True), (2, True)])
def test_no_kernel_writes_over_what_is_read_later(name, batch, fusion):
    network = compiled(BLOCKS[name](batch), fusion)
    pairs = in_place_pairs(network)
    for method in METHODS:
        plan = plan_network(network, method, in_place=False)
        verify(plan, buffers_of(network))
        assert not clobbered(network, places_of(network, plan.offsets))
        tight = places_of(network, plan_network(network, method, in_place=True).offsets)
        assert not clobbered(network, tight, pairs)
    heap = Plan(dict.fromkeys(plan.offsets, 0), plan.height_bytes, 0, "wrong", False)
    assert clobbered(network, places_of(network, heap.offsets), pairs)


def test_pairs_in_place_leave_parts_of_joins_alone():
    network = compiled(unet(), fusion=False)
    pairs = in_place_pairs(network)
    views = aliases_of(network)
    assert pairs
    assert not {target for _, target in pairs} & set(views)
    assert any(source == "join" for source, _ in pairs)  # the whole join, read for the last time
    network = compiled(cuts(), fusion=False)
    overwritten = [target for source, target in in_place_pairs(network) if source == "y"]
    assert [network.graph.node(n).op for n in overwritten] in ([], ["square"])  # its last reader


def ragged(widths, batch=1):
    net = GraphBuilder("ragged", "fp16")
    x = net.input("x", (batch, 20, 5, 5))
    parts = [net.muls(conv(net, x, n), number=i + 1) for i, n in enumerate(widths)]
    join = net.concat(*parts, axis=1, name="join")
    net.output(net.global_max_pool(conv(net, join, 16)))
    return net.build()


@settings(max_examples=12)
@given(
    widths=st.lists(st.sampled_from([8, 16, 20, 32]), min_size=2, max_size=3).map(tuple),
    fusion=st.booleans(),
)
def test_ragged_parts_are_never_views_of_blocks(widths, fusion):
    graph = ragged(widths)
    network = compiled(graph, fusion)
    inputs = whole_numbers(graph)
    whole = all(n % 16 == 0 for n in widths)
    joined = network.graph.types.get("join")  # the cube may move what breaks blocks
    assert (joined is not None and joined.layout == "NC1HWC0") == whole
    if whole:
        assert not moving(network)
    (got,) = run_tasks(network, inputs).values()
    (wanted,) = evaluate(graph, inputs).values()
    np.testing.assert_array_equal(got, wanted)
    (planned,) = run_in_arena(network, plan_network(network), inputs).values()
    np.testing.assert_array_equal(planned.reshape(got.shape), got)


# -- runs, against the addresses of all elements ---------------------------------------------------
def run_by_addresses(whole, part, axis, span):
    """Return the distance in bytes that all elements of a part share, None if they do not.

    None too if bytes of other elements of the whole lie between them, or it is off the grid.
    """
    taken = np.moveaxis(addresses(whole.map), axis, 0)
    inside = np.moveaxis(taken[span[0] : span[1]], 0, axis)
    shift = np.unique(inside - addresses(part.map))
    outside = np.concatenate([taken[: span[0]].ravel(), taken[span[1] :].ravel()])
    low = int(shift[0])
    size = part.map.elements
    if len(shift) > 1 or np.any((outside >= low) & (outside < low + size)):
        return None
    fits = low + size <= whole.map.elements and low * 2 % BLOCK_BYTES == 0
    return low * 2 if fits else None


@settings(max_examples=100)
@given(data=st.data())
def test_a_run_is_where_all_addresses_say(data):
    layout = data.draw(st.sampled_from(["ND", "NC1HWC0", "C1NHWC0", "FRACTAL_NZ"]))
    sizes = st.sampled_from([1, 2, 3, 16, 20, 32, 40])
    if layout.endswith("HWC0"):
        shape = [
            data.draw(st.integers(1, 2)),
            data.draw(sizes),
            *data.draw(st.tuples(*[st.integers(1, 3)] * 2)),
        ]
    else:
        shape = [data.draw(st.integers(1, 2)), data.draw(sizes), data.draw(sizes)]
    axis = data.draw(st.integers(0, len(shape) - 1))
    ends = [n for n in range(shape[axis] + 1) if n % 8 == 0 or n == shape[axis] or n < 4]
    low = data.draw(st.sampled_from(ends[:-1]))
    high = data.draw(st.sampled_from([n for n in ends if n > low]))
    whole = TensorType(tuple(shape), "fp16", layout)
    part_shape = (*shape[:axis], high - low, *shape[axis + 1 :])
    part = TensorType(tuple(part_shape), "fp16", layout)
    found = run_offset(whole, part, axis, (low, high))
    if found is not None:
        assert found == run_by_addresses(whole, part, axis, (low, high))


# -- convolutions of one image --------------------------------------------------------------------
def siblings(widths, batch=1, taps=1, alike=True, joined=False, added=False, spread=False):
    """Convolutions of one image, a ReLU behind each, their largest numbers."""
    net = GraphBuilder("siblings", "fp16")
    x = net.relu(net.input("x", (batch, 20, 6, 7)))
    parts = []
    for i, k in enumerate(widths):
        size = taps if alike or not i else taps + 2
        weight = net.constant(few((k, 20, size, size)))
        far = 1 + spread * i
        bias = net.weight((k,), scale=1.0)
        y = net.conv2d(x, weight, bias, pad=size // 2 * far, dilation=far)
        parts.append(y if added else net.relu(y, name=f"part{i}"))
    if added:
        parts = [net.add(*parts)]
    if joined:
        net.output(net.concat(parts[0], net.abs(x), axis=1))
    net.output(*(net.neg(conv(net, part, 8)) for part in parts[joined:]))
    return net.build()


@pytest.mark.parametrize(
    ("settings", "merged"),
    [
        ({"widths": (16, 48)}, [64]),
        ({"widths": (24, 32, 16), "taps": 3}, [72]),
        ({"widths": (24, 40, 16)}, [40, 40]),
        ({"widths": (16, 32, 16), "joined": True}, [16, 48]),
        ({"widths": (16, 32), "batch": 2}, [16, 32]),
        ({"widths": (16, 32), "alike": False}, [16, 32]),
        ({"widths": (16, 32), "taps": 3, "spread": True}, [16, 32]),
        ({"widths": (32, 32), "added": True}, []),
    ],
)
@pytest.mark.parametrize("name", ["Ascend310", "Ascend310P3", "Ascend910B2"])
def test_convolutions_of_one_image_are_one(settings, merged, name):
    graph = siblings(**settings)
    network = compile_stages(graph, load_chip(name)).compiled
    made = [t for t in network.tasks if t.lowered and t.op.startswith("conv2d+relu")]
    assert sorted(network.graph.types[t.writes[-1]].shape[1] for t in made) == sorted(merged)
    assert not any(t.op == "slice" and t.lowered for t in network.tasks)
    inputs = whole_numbers(graph)
    wanted = evaluate(graph, inputs)
    got = run_tasks(network, inputs)
    for one, other in zip(wanted.values(), got.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2**-9, atol=2**-6)
