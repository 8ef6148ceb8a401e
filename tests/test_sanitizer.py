"""The sanitizer: silent on legal kernels, one tested example of every kind of finding."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from strategies import edited, gemm_cases, kernels, launches, through, without_flags

from ascend_lab.errors import SimulationError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import (
    Buffer,
    Event,
    Instruction,
    KernelBuilder,
    Launch,
    Loop,
    Part,
    Program,
    binding_of,
    parse_program,
    sanitize,
    set_flag,
    wait_flag,
)
from ascend_lab.operators.kernels import (
    GemmShape,
    elementwise_launch,
    elementwise_program,
    gemm_launch,
)

TOY = load_chip("Toy")
TILE = 1024


def kinds(program, chip=TOY, **options) -> set[str]:
    return {finding.kind for finding in sanitize(program, chip, **options)}


def relu(tiles: int = 4, depth: int = 2) -> Program:
    return elementwise_program(TOY, TILE * tiles, op="vrelu", tile=TILE, depth=depth)


def raw(*steps: str, **buffers: int) -> Program:
    """A program in text form: x and y in GM, buffers of UB by name and address."""
    lines = ["program raw", f"buffer x GM fp16 {TILE}", f"buffer y GM fp16 {TILE}"]
    lines += [f"buffer {n} UB fp16 {TILE} slots=1 at={a} pitch=0" for n, a in buffers.items()]
    return parse_program("\n".join((*lines, *steps)) + "\n")


LOAD = f"MTE2 data_copy t[0 | {TILE}:1] <- x[0 | {TILE}:1]"
FILL = "V vdup t[0 | 8:128,128:1] scalar=1.0"
STORE = f"MTE3 data_copy y[0 | {TILE}:1] <- t[0 | {TILE}:1]"
RELU = "V vrelu t[0 | 8:128,128:1] <- t[0 | 8:128,128:1]"


# -- legal programs ------------------------------------------------------------------------------
@given(kernels(budget=40))
def test_builder_kernels_are_clean(case):
    program, chip = case
    assert sanitize(program, chip) == []


@given(launches(budget=20))
def test_launches_of_several_cores_are_clean(case):
    launch, chip = case
    assert sanitize(launch, chip) == []


@given(gemm_cases())
def test_matrix_products_are_clean(case):
    shape, schedule, chip = case
    assert sanitize(gemm_launch(shape, chip, schedule), chip) == []


# -- races ---------------------------------------------------------------------------------------
ORDER = ("MTE2", "MTE1", "M", "FIX", "V", "MTE3")


def needed_pairs(program: Program) -> list[tuple[str, str]]:
    """Pairs of pipes that race without the flags between them.

    Along the pipeline a flag means "full": needed as soon as it is used. Against it a flag means
    "empty": needed once slots are used again; a barrier somewhere may stand in for it.
    """
    waits: dict[Event, int] = {}
    for instruction, times in program.instructions():
        if instruction.op == "wait_flag" and instruction.event is not None:
            waits[instruction.event] = waits.get(instruction.event, 0) + times
    barriers = any(i.pipe == "ALL" for i, _ in program.instructions())
    found = set()
    for event, runs in waits.items():
        full = ORDER.index(event.src) < ORDER.index(event.dst)
        if runs and (full or (runs > 2 * event.count and not barriers)):
            found.add((event.src, event.dst))
    return sorted(found)


@settings(max_examples=100)
@given(kernels(budget=30), st.data())
def test_deleted_flags_between_two_pipes_are_found(case, data):
    """Without "full" the consumer reads too early; without "empty" a slot is overwritten."""
    program, chip = case
    pairs = needed_pairs(program)
    if not pairs:
        return
    pair = data.draw(st.sampled_from(pairs))
    found = kinds(without_flags(program, *pair), chip)
    assert found & {"race", "uninitialised-read"}, pair


@given(kernels(budget=30, kind="vector"), st.data())
def test_a_swapped_slot_is_found(case, data):
    program, chip = case
    slots = sorted(
        {
            region.buffer.name
            for instruction, times in program.instructions()
            for region in instruction.srcs
            if region.buffer.slots > 1 and times
        }
    )
    if not slots:
        return
    name = data.draw(st.sampled_from(slots))

    def swap(instruction: Instruction) -> Instruction:
        srcs = tuple(
            replace(r, slot=r.slot + 1) if r.buffer.name == name else r for r in instruction.srcs
        )
        return replace(instruction, srcs=srcs)

    assert kinds(edited(program, swap), chip) & {"race", "uninitialised-read"}


def test_a_race_names_both_instructions_and_the_byte():
    (finding,) = sanitize(raw(FILL, STORE, t=64), TOY)
    assert finding.kind == "race"
    assert str(finding) == (
        "race: data_copy on MTE3 reads UB byte 64 while nothing orders it after vdup; "
        "add a flag between them"
    )
    assert finding.instruction == STORE


def test_write_after_read_is_a_race():
    read = "V vcopy u[0 | 8:128,128:1] <- t[0 | 8:128,128:1]"
    steps = ("set_flag V>MTE2:0", "wait_flag V>MTE2:0", read)
    (finding,) = sanitize(raw(FILL, *steps, LOAD, t=0, u=2 * TILE), TOY)
    assert finding.kind == "race"
    assert "data_copy on MTE2 overwrites UB byte 0" in finding.message
    assert "after vcopy" in finding.message
    ordered = (read, *steps[:2])
    assert sanitize(raw(FILL, *ordered, LOAD, t=0, u=2 * TILE), TOY) == []


def test_write_after_write_is_a_race():
    (finding,) = sanitize(raw(LOAD, FILL, t=0), TOY)
    assert finding.kind == "race"
    assert "overwrites" in finding.message


def test_overlapping_buffers_of_other_types_race():
    last = Buffer("last", "UB", "fp32", 8, address=2 * TILE - 32)
    fill = Instruction("vdup", "V", last.region(0, (1, 8)), (), (("scalar", 0.0),))
    program = raw(LOAD, t=0)
    program = replace(program, buffers=(*program.buffers, last), body=(*program.body, fill))
    (finding,) = sanitize(program, TOY)
    assert finding.kind == "race"
    assert f"UB byte {2 * TILE - 32}" in finding.message


def test_a_barrier_orders_everything_before_it():
    assert sanitize(raw(LOAD, "ALL barrier", RELU, "ALL barrier", STORE, t=0), TOY) == []


def test_order_passes_through_a_third_pipe():
    steps = (
        "set_flag MTE2>S:0",
        "wait_flag MTE2>S:0",
        "S scalar steps=1",
        "set_flag S>V:0",
        "wait_flag S>V:0",
        RELU,
    )
    assert sanitize(raw(LOAD, *steps, t=0), TOY) == []


# -- the other kinds -----------------------------------------------------------------------------
def test_uninitialised_read():
    (finding,) = sanitize(raw(STORE, t=64), TOY)
    assert finding.kind == "uninitialised-read"
    assert "data_copy reads UB byte 64 that nothing has written" in finding.message


def test_masked_lanes_stay_uninitialised():
    half = f"V vdup t[0 | 8:128,128:1] scalar=1.0 mask={(1 << 64) - 1}"
    (finding,) = sanitize(raw(half, "ALL barrier", STORE, t=0), TOY)
    assert finding.kind == "uninitialised-read"
    assert "UB byte 128" in finding.message
    both = half.replace(f"mask={(1 << 64) - 1}", f"mask={((1 << 64) - 1) << 64}")
    assert sanitize(raw(half, both, "ALL barrier", STORE, t=0), TOY) == []


def test_accumulating_into_an_empty_l0c_is_an_uninitialised_read():
    shape = GemmShape(16, 64, 16)
    program = gemm_launch(shape, TOY).parts[0].program

    def always_add(instruction: Instruction) -> Instruction:
        if instruction.op != "mmad":
            return instruction
        return replace(instruction, attrs=(("accumulate", 1),))

    assert kinds(program) == set()
    assert kinds(edited(program, always_add)) == {"uninitialised-read"}


def test_tensors_filled_from_outside_can_be_named():
    """y += x in place: y is written, so by default it counts as empty before the launch."""
    k = KernelBuilder("in_place", TOY)
    x = k.tensor("x", "fp16", 128)
    y = k.tensor("y", "fp16", 128)

    def add(*tiles):
        k.vector("vadd", *(tile.region(0, (1, 128)) for tile in tiles))

    through(k, y.region(), x.region(), y.region(), work=add)
    program = k.finish()
    assert kinds(program) == {"uninitialised-read"}
    assert kinds(program, filled=["x", "y"]) == set()


def test_deadlock_with_its_cycle_of_events():
    steps = (
        "wait_flag V>MTE2:0",
        LOAD,
        "set_flag MTE2>V:0",
        "wait_flag MTE2>V:0",
        RELU,
        "set_flag V>MTE2:0",
    )
    (finding,) = sanitize(raw(*steps, t=0), TOY)
    assert finding.kind == "deadlock"
    assert "the cycle" in finding.message
    assert "MTE2 waits for V>MTE2:0" in finding.message
    assert "V waits for MTE2>V:0" in finding.message


def test_deadlock_because_a_flag_is_never_set():
    (finding,) = sanitize(raw(LOAD, "wait_flag MTE2>V:3", RELU, t=0), TOY)
    assert finding.kind == "deadlock"
    assert "V waits for MTE2>V:3, but MTE2 has finished" in finding.message


def test_deadlock_at_a_barrier():
    steps = ("ALL barrier", "set_flag MTE2>V:0")
    (finding,) = sanitize(raw(LOAD, "wait_flag MTE2>V:0", RELU, *steps, t=0), TOY)
    assert finding.kind == "deadlock"
    assert "MTE2 waits at a barrier" in finding.message


def test_event_overflow_when_a_flag_is_set_twice():
    steps = ("set_flag MTE2>V:0", "set_flag MTE2>V:0", "wait_flag MTE2>V:0", "wait_flag MTE2>V:0")
    (finding,) = sanitize(raw(LOAD, *steps, RELU, t=0), TOY)
    assert finding.kind == "event-overflow"
    assert "MTE2>V:0 may be set again before it was waited for" in finding.message


def test_event_overflow_when_the_id_does_not_exist():
    event = Event("MTE2", "V", TOY.event_ids)
    body = (
        Instruction("set_flag", "MTE2", event=event),
        Instruction("wait_flag", "V", event=event),
    )
    found = sanitize(Program("ids", (), body), TOY)
    assert {finding.kind for finding in found} == {"event-overflow"}
    assert f"ids go from 0 to {TOY.event_ids - 1}" in found[0].message


def test_leak_of_a_flag_that_nobody_waits_for():
    (finding,) = sanitize(raw(LOAD, "set_flag MTE2>V:0", t=0), TOY)
    assert finding.kind == "leak"
    assert finding.message == "MTE2>V:0 is set 1 times more than it is waited for"


def test_out_of_bounds_names_the_elements():
    program = Program("far", raw(LOAD, t=0).buffers, (Loop("i", 3, (raw(LOAD, t=0).body[0],)),))

    def drift(instruction: Instruction) -> Instruction:
        shifted = replace(instruction.srcs[0], offset=instruction.srcs[0].offset + 16)
        return replace(instruction, srcs=(shifted,))

    (finding,) = sanitize(edited(program, drift), TOY)
    assert finding.kind == "out-of-bounds"
    assert "elements 0..1023 of x; got 16..1039" in finding.message


def test_illegal_instructions_are_reported_with_the_rule():
    program = raw(LOAD, t=TOY.buffers["UB"] - 64)
    (finding,) = sanitize(program, TOY)
    assert finding.kind == "illegal"
    assert "bytes" in finding.message
    assert "UB" in finding.message


def test_two_events_may_not_share_an_id():
    """On the machine the wait of one would take the flag of the other."""
    steps = ("set_flag MTE2>V:1", "wait_flag MTE2>V:1")
    assert kinds(raw(LOAD, *steps, RELU, t=0)) == set()
    both = ("set_flag MTE2>V:0x2", *steps, "wait_flag MTE2>V:0x2")
    (finding,) = sanitize(raw(LOAD, *both, RELU, t=0), TOY)
    assert finding.kind == "illegal"
    assert "MTE2>V:1 and MTE2>V:0x2 share an id" in finding.message


# -- several cores -------------------------------------------------------------------------------
def one_core(source: str, target: str, at: int, name: str) -> Program:
    """Copy 128 elements from tensor to tensor through UB, from and to element core * at."""
    k = KernelBuilder(name, TOY)
    tensors = {n: k.tensor(n, "fp16", 512) for n in "xyz"}
    place = k.param("core", 2) * at
    through(k, tensors[target].region(place, 128), tensors[source].region(place, 128))
    return k.finish()


def launch_of(*programs: Program) -> Launch:
    return Launch(
        "both", tuple(Part(p, (binding_of({"core": i}),)) for i, p in enumerate(programs))
    )


def test_cores_that_own_their_part_are_clean():
    assert sanitize(launch_of(*[one_core("x", "y", 128, "own")] * 2), TOY) == []


def test_two_cores_that_write_the_same_bytes_race():
    (finding,) = sanitize(launch_of(*[one_core("x", "y", 0, "same")] * 2), TOY)
    assert finding.kind == "race"
    assert finding.message == "cores 0 and 1 both write y; no order between cores"


def test_a_core_that_reads_what_another_writes_races():
    first = one_core("x", "y", 0, "first")
    second = one_core("y", "z", 0, "second")
    (finding,) = sanitize(launch_of(first, second), TOY)
    assert finding.message == "core 1 reads y byte 0, which core 0 writes; no order between cores"


def test_a_core_that_overwrites_what_another_reads_races():
    first = one_core("y", "z", 0, "first")
    second = one_core("x", "y", 0, "second")
    (finding,) = sanitize(launch_of(first, second), TOY, filled=["x", "y"])
    assert finding.message == "core 1 writes y byte 0, which core 0 read; no order between cores"


def test_every_core_starts_with_empty_memory():
    """What core 0 left in its UB is not there on core 1."""
    fill = raw(FILL, "ALL barrier", STORE, t=0)
    store = raw(STORE, t=0)
    launch = Launch("two", (Part(fill), Part(store)))
    assert {"uninitialised-read", "race"} == kinds(launch)  # and both write y


def test_many_readers_of_one_tensor_are_fine():
    chip = load_chip("Ascend910A")
    assert sanitize(elementwise_launch(chip, 32 * 2048, op="vadd"), chip) == []


# -- limits --------------------------------------------------------------------------------------
def test_findings_in_a_loop_are_reported_once():
    program = without_flags(relu(tiles=16), "MTE2", "V")
    found = sanitize(program, TOY)
    assert len(found) == len({(f.kind, f.instruction) for f in found}) <= 4


def test_too_many_instructions_are_refused():
    with pytest.raises(SimulationError, match="at most 100 instructions to check"):
        sanitize(relu(tiles=64), TOY, limit_events=100)


def test_flags_built_by_hand_are_checked():
    body = (set_flag(TOY, Event("S", "V", 0)), wait_flag(TOY, Event("S", "V", 0)))
    assert sanitize(Program("flags", (), body), TOY) == []
