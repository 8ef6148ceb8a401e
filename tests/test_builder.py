"""The kernel builder: queues become flags, slots rotate, misuse is refused with a remedy."""

import numpy as np
import pytest
from message_lists import assert_messages

from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import KernelBuilder, pipe_stream, sanitize, spread
from ascend_lab.machine.sim import execute

TOY = load_chip("Toy")


def relu(tiles: int, depth: int, tile: int = 128):
    k = KernelBuilder("relu", TOY)
    x, y = (k.tensor(n, "fp16", tile * max(tiles, 1)) for n in "xy")
    a = k.queue("a", "UB", "fp16", tile, src="MTE2", dst="V", depth=depth)
    b = k.queue("b", "UB", "fp16", tile, src="V", dst="MTE3", depth=depth)
    with k.loop("i", tiles) as i:
        k.copy(a.alloc().region(), x.region(i * tile, tile))
        a.enqueue()
        row = (tile // 128, 128)
        k.vector("vrelu", b.alloc().region(0, row), a.dequeue().region(0, row))
        a.free()
        b.enqueue()
        k.copy(y.region(i * tile, tile), b.dequeue().region())
        b.free()
    return k.finish()


def test_a_queue_becomes_flags_both_ways():
    text = str(relu(4, 2))
    body = [line.strip() for line in text.splitlines()]
    start = body.index("loop i 4:")
    assert body[start + 1 : start + 4] == [
        "wait_flag V>MTE2:0x2",
        "MTE2 data_copy a[i | 0 | 128:1] <- x[128*i | 128:1]",
        "set_flag MTE2>V:0x2",
    ]
    assert body[start - 4 : start] == ["set_flag V>MTE2:0x2"] * 2 + ["set_flag MTE3>V:0x2"] * 2
    assert body[-4:] == ["wait_flag V>MTE2:0x2"] * 2 + ["wait_flag MTE3>V:0x2"] * 2


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("inner", [1, 2, 3])
def test_slots_rotate_through_nested_loops(depth, outer, inner):
    """The k-th tile of a queue lies in slot k mod depth, however the loops are nested."""
    k = KernelBuilder("nest", TOY)
    x = k.tensor("x", "fp16", 4096)
    q = k.queue("q", "UB", "fp16", 16, src="MTE2", dst="V", depth=depth)
    out = k.buffer("out", "UB", "fp16", 16)

    def pass_on() -> None:
        k.copy(q.alloc().region(), x.region(0, 16))
        q.enqueue()
        k.vector("vcopy", out.region(0, (1, 16)), q.dequeue().region(0, (1, 16)))
        q.free()

    with k.loop("i", outer):
        pass_on()
        with k.loop("j", inner):
            pass_on()
        pass_on()
    program = k.finish()
    seen = [
        step.dst.slot.at(env) % depth
        for step, env in pipe_stream(program, "MTE2", {})
        if step.dst is not None
    ]
    assert seen == [n % depth for n in range(outer * (inner + 2))]
    assert sanitize(program, TOY) == []


def test_a_queue_made_inside_a_loop_rotates_too():
    k = KernelBuilder("inside", TOY)
    x = k.tensor("x", "fp16", 1024)
    with k.loop("i", 8) as i:
        q = k.queue("q", "UB", "fp16", 128, src="MTE2", dst="MTE3", depth=2)
        k.copy(q.alloc().region(), x.region(i * 128, 128))
        q.enqueue()
        k.copy(x.region(i * 128, 128), q.dequeue().region())
        q.free()
    assert sanitize(k.finish(), TOY, filled=["x"]) == []


def test_buffers_lie_side_by_side_and_aligned():
    k = KernelBuilder("memory", TOY)
    first = k.buffer("first", "UB", "fp16", 5)
    second = k.buffer("second", "UB", "fp16", 16, slots=3)
    third = k.buffer("third", "L0A", "fp16", 10)
    fourth = k.buffer("fourth", "L0A", "fp16", 10)
    assert (first.address, second.address, second.slot_bytes) == (0, 32, 32)
    assert (third.address, fourth.address) == (0, 512)


# -- refusals --------------------------------------------------------------------------------------
def builder(name: str = "bad") -> KernelBuilder:
    return KernelBuilder(name, TOY)


def unpaired_loop() -> None:
    k = builder()
    q = k.queue("q", "UB", "fp16", 16, src="MTE2", dst="V")
    with k.loop("i", 2):
        q.alloc()
        q.enqueue()


def unpaired_end() -> None:
    k = builder()
    k.queue("q", "UB", "fp16", 16, src="MTE2", dst="V").alloc()
    k.finish()


def loop_of(name, count) -> None:
    k = builder()
    with k.loop(name, count):
        k.scalar()


def name_twice() -> None:
    k = builder()
    k.tensor("x", "fp16", 4)
    k.buffer("x", "UB", "fp16", 4)


def region_past_the_end_on_the_last_core() -> None:
    k = builder()
    x = k.tensor("x", "fp16", 64)
    k.copy(k.buffer("t", "UB", "fp16", 16).region(), x.region(k.param("core", 4) * 16 + 16, 16))
    k.finish()


def path_of_another_chip() -> None:
    k = KernelBuilder("split", load_chip("Ascend910B2"))
    sums = k.buffer("c", "L0C", "fp32", 256)
    k.copy(k.buffer("t", "UB", "fp32", 256).region(), sums.region())


def hidden_loop() -> None:
    k = builder()
    with k.loop("i", 2), k.loop("i", 3):
        k.scalar()
    k.finish()


def hidden_param() -> None:
    k = builder()
    k.param("core", 2)
    with k.loop("core", 3):
        k.scalar()
    k.finish()


def cube_and_vector() -> None:
    k = KernelBuilder("mixed", load_chip("Ascend910B2"))
    x = k.tensor("x", "fp16", 256)
    ub = k.buffer("ub", "UB", "fp16", 16)
    l1 = k.buffer("l1", "L1", "fp16", 16)
    k.copy(ub.region(), x.region(0, 16))
    k.copy(l1.region(), x.region(0, 16))
    k.finish()


CALLS = {
    "loop i: as many alloc, enqueue, dequeue and free of q": unpaired_loop,
    "as many alloc, enqueue, dequeue and free of q": unpaired_end,
    "a new name for a loop inside i": hidden_loop,
    "a new name for a loop inside core": hidden_param,
    "cube and vector work in separate programs": cube_and_vector,
    "of 32768 bytes left": lambda: builder().buffer("b", "UB", "fp16", 1 << 20),
    "on-chip memory of Toy": lambda: builder().buffer("b", "L9", "fp16", 4),
    "tensor": lambda: builder().buffer("b", "GM", "fp16", 4),
    "9 event ids for MTE2>V": lambda: builder().queue(
        "q", "UB", "fp16", 4, src="MTE2", dst="V", depth=9
    ),
    "two different pipes": lambda: (
        builder().queue("q", "UB", "fp16", 4, src="V", dst="V", depth=1).alloc()
    ),
    "an event between two pipes": lambda: (
        builder().queue("q", "UB", "fp16", 4, src="DMA", dst="V").alloc()
    ),
    "event id 8": lambda: builder().set_flag("MTE2", "V", 8),
    "event id -1": lambda: builder().wait_flag("MTE2", "V", -1),
    "barrier: a pipe or ALL": lambda: builder().barrier("DMA"),
    "steps >= 1": lambda: builder().scalar(steps=0),
    "one buffer per name": name_twice,
    "elements of x, on the last core": region_past_the_end_on_the_last_core,
    "L0C to UB on the 910B2": path_of_another_chip,
}


LOOPS = {
    f"a loop {name!r} of {count!r} turns": lambda name=name, count=count: loop_of(name, count)
    for name, count in (
        ("i", -1),
        ("i", 1.5),
        ("i", "3"),
        ("", 2),
        ("2i", 2),
        ("a b", 2),
        ("i-j", 2),
    )
}


def test_what_is_refused_says_what_is_needed():
    assert_messages("isa", "test_builder", CALLS | LOOPS)


@pytest.mark.parametrize("elements", [1, 127, 128, 300, 256 * 128 + 5])
def test_each_covers_a_run_once_in_repeats_and_last_lanes(elements):
    chip = load_chip("Ascend910A")
    k = KernelBuilder("each", chip)
    room = -(-elements // 16) * 16 + 16
    y = k.tensor("y", "fp16", room)
    tile = k.queue("t", "UB", "fp16", room, src="V", dst="MTE3", depth=1)
    one = tile.alloc()
    k.each("vdup", room, (one, 0), scalar=1.0)
    k.each("vadds", elements, (one, 16), (one, 16), scalar=1.0)
    tile.enqueue()
    k.copy(y.region(), tile.dequeue().region())
    tile.free()
    wanted = np.ones(room, np.float16)
    wanted[16 : 16 + elements] = 2
    assert np.array_equal(execute(k.finish(), {}, chip)["y"], wanted)


def test_spread_gives_every_core_its_share_and_bands_a_program_of_their_own():
    seen = []

    def program(rows, columns, band):
        k = KernelBuilder("p", TOY)
        for param, (_, _, count) in (("row", rows), ("column", columns)):
            k.param(param, count)
        k.scalar()
        seen.append((rows, columns, band))
        return k.finish()

    launch = spread("s", {"row": [4, 4, 1], "column": [2]}, program, apart=[3, 2])
    whole = (4, 4, 2)
    tail = (1, 4, 3)
    assert seen == [(r, (2, 2, 1), b) for r in (whole, tail) for b in ((0, 0, 3), (1, 3, 5))]
    bound = [[dict(b)["row"] for b in part.bindings] for part in launch.parts]
    assert bound == [[0, 1], [0, 1], [2], [2]]
    assert launch.core_count == 6
