"""The kernel builder: queues become flags, slots rotate, misuse is refused with a remedy."""

import numpy as np
import pytest
from hypothesis import given
from strategies import kernels

from ascend_lab.errors import CapacityError, PathError, ProgramError, SyncError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import (
    Affine,
    Event,
    KernelBuilder,
    Loop,
    check_instruction,
    check_program,
    instructions,
    pipe_stream,
    sanitize,
    spread,
)
from ascend_lab.machine.sim import execute, simulate

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


@given(kernels())
def test_every_flag_is_set_as_often_as_it_is_waited_for(case):
    program, chip = case
    balance: dict[Event, int] = {}
    for instruction, times in program.instructions():
        if instruction.event is not None:
            sign = 1 if instruction.op == "set_flag" else -1
            balance[instruction.event] = balance.get(instruction.event, 0) + sign * times
    assert set(balance.values()) <= {0}
    assert check_program(chip, program) is program
    for instruction, _ in program.instructions():
        assert check_instruction(chip, instruction) is instruction


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


def test_software_pipelining_by_hand_is_possible():
    """Fetch one tile ahead: an alloc before the loop, the last dequeue behind it."""
    k = KernelBuilder("ahead", TOY)
    x = k.tensor("x", "fp16", 1024)
    y = k.tensor("y", "fp16", 1024)
    q = k.queue("q", "UB", "fp16", 128, src="MTE2", dst="MTE3", depth=2)

    def fetch(place: Affine | int) -> None:
        k.copy(q.alloc().region(), x.region(place, 128))
        q.enqueue()

    def store(place: Affine | int) -> None:
        k.copy(y.region(place, 128), q.dequeue().region())
        q.free()

    fetch(0)
    with k.loop("i", 7) as i:
        fetch(i * 128 + 128)
        store(i * 128)
    store(7 * 128)
    program = k.finish()
    assert sanitize(program, TOY) == []
    assert simulate(program, TOY).cycles == simulate(program, TOY, engine="reference").cycles


def test_buffers_lie_side_by_side_and_aligned():
    k = KernelBuilder("memory", TOY)
    first = k.buffer("first", "UB", "fp16", 5)
    second = k.buffer("second", "UB", "fp16", 16, slots=3)
    third = k.buffer("third", "L0A", "fp16", 10)
    fourth = k.buffer("fourth", "L0A", "fp16", 10)
    assert (first.address, second.address, second.slot_bytes) == (0, 32, 32)
    assert (third.address, fourth.address) == (0, 512)


def test_event_ids_do_not_overlap():
    k = KernelBuilder("ids", TOY)
    queues = [
        k.queue(name, "UB", "fp16", 16, src="MTE2", dst="V", depth=depth)
        for name, depth in (("a", 1), ("b", 3), ("c", 2))
    ]
    assert [q.full for q in queues] == [
        Event("MTE2", "V", 0, 1),
        Event("MTE2", "V", 1, 3),
        Event("MTE2", "V", 4, 2),
    ]


def test_params_are_variables_of_the_launch():
    k = KernelBuilder("param", TOY)
    core = k.param("core", 4)
    x = k.tensor("x", "fp16", 64)
    t = k.buffer("t", "UB", "fp16", 16)
    k.copy(t.region(), x.region(core * 16, 16))
    program = k.finish()
    assert program.params == (("core", 4),)
    k.copy(t.region(), x.region(core * 16 + 16, 16))
    with pytest.raises(CapacityError, match=r"elements 0\.\.63 of x; got 16\.\.79"):
        k.finish()


def test_an_empty_kernel_is_legal():
    program = KernelBuilder("empty", TOY).finish()
    assert program.body == ()
    assert program.pipes == ()


def test_loops_of_no_turns_leave_nothing_behind():
    program = relu(0, 2)
    assert isinstance(program.body[0], Loop)
    assert program.event_count == 0
    assert sanitize(program, TOY) == []


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


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (unpaired_loop, SyncError, "loop i: as many alloc, enqueue, dequeue and free of q"),
        (unpaired_end, SyncError, "as many alloc, enqueue, dequeue and free of q"),
        (hidden_loop, ProgramError, "a new name for a loop inside i"),
        (hidden_param, ProgramError, "a new name for a loop inside core"),
        (cube_and_vector, PathError, "cube and vector work in separate programs"),
        (
            lambda: builder().buffer("b", "UB", "fp16", 1 << 20),
            CapacityError,
            "of 32768 bytes left",
        ),
        (lambda: builder().buffer("b", "UB", "fp16", 0), ProgramError, "elements >= 1"),
        (lambda: builder().buffer("b", "UB", "fp16", 2.5), ProgramError, "a whole number"),
        (lambda: builder().buffer("b", "UB", "fp16", 4, 0), ProgramError, "slots >= 1"),
        (lambda: builder().buffer("b", "UB", "fp12", 4), ProgramError, "a number format"),
        (lambda: builder().buffer("b", "L9", "fp16", 4), PathError, "on-chip memory of Toy"),
        (lambda: builder().buffer("b", "GM", "fp16", 4), PathError, "tensor"),
        (
            lambda: builder().queue("q", "UB", "fp16", 4, src="MTE2", dst="V", depth=9),
            CapacityError,
            "9 event ids for MTE2>V",
        ),
        (
            lambda: builder().queue("q", "UB", "fp16", 4, src="V", dst="V", depth=1).alloc(),
            ProgramError,
            "two different pipes",
        ),
        (
            lambda: builder().queue("q", "UB", "fp16", 4, src="DMA", dst="V").alloc(),
            ProgramError,
            "an event between two pipes",
        ),
        (lambda: builder().set_flag("MTE2", "V", 8), CapacityError, r"event ids 0\.\.7"),
        (lambda: builder().wait_flag("MTE2", "V", -1), CapacityError, r"event ids 0\.\.7"),
        (lambda: builder().barrier("DMA"), ProgramError, "barrier: a pipe or ALL"),
        (lambda: builder().scalar(steps=0), ProgramError, "steps >= 1"),
    ],
)
def test_misuse_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_names_are_unique():
    k = builder()
    k.tensor("x", "fp16", 4)
    with pytest.raises(ProgramError, match="one buffer per name"):
        k.buffer("x", "UB", "fp16", 4)


@pytest.mark.parametrize("count", [-1, 1.5, "3", None])
def test_loops_need_a_whole_trip_count(count):
    k = builder()
    with pytest.raises(ProgramError), k.loop("i", count):
        k.scalar()


@pytest.mark.parametrize("name", ["", "2i", "a b", "i-j"])
def test_loops_need_a_name_that_addresses_can_use(name):
    k = builder()
    with pytest.raises(ProgramError, match="a loop variable"), k.loop(name, 2):
        k.scalar()


def test_instructions_of_another_chip_do_not_slip_in():
    k = KernelBuilder("split", load_chip("Ascend910B2"))
    c = k.buffer("c", "L0C", "fp32", 256)
    t = k.buffer("t", "UB", "fp32", 256)
    with pytest.raises(PathError, match="L0C->UB on Ascend910B2"):
        k.copy(t.region(), c.region())
    toy = builder()
    acc = toy.buffer("c", "L0C", "fp32", 256)
    ub = toy.buffer("t", "UB", "fp16", 256)
    with pytest.raises(PathError, match="FIX"):
        instructions.fixpipe(TOY, ub.region(), acc.region())


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
