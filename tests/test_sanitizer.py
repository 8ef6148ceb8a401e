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
)
from ascend_lab.operators.kernels import GemmShape, elementwise_program, gemm_launch

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


COPY = "V vcopy u[0 | 8:128,128:1] <- t[0 | 8:128,128:1]"
LOW = FILL + f" mask={(1 << 64) - 1}"
HIGH = FILL + f" mask={((1 << 64) - 1) << 64}"
ALL = "ALL barrier"


def flag(pipes: str, number: str = "0", count: int = 1) -> tuple[str, ...]:
    """A flag that is set and waited for, `count` times each."""
    return (*[f"set_flag {pipes}:{number}"] * count, *[f"wait_flag {pipes}:{number}"] * count)


# Steps on a tile t of UB (u behind it): what is found, and words of the message.
FOUND = {
    "a store that does not wait for the work": (
        (FILL, STORE),
        "race",
        "data_copy on MTE3 reads UB byte 0 while nothing orders it after vdup; add a flag",
    ),
    "a load over what is still read": (
        (FILL, *flag("V>MTE2"), COPY, LOAD),
        "race",
        "data_copy on MTE2 overwrites UB byte 0 while nothing orders it after vcopy",
    ),
    "work over what is still loaded": ((LOAD, FILL), "race", "overwrites"),
    "a tile that nothing fills": (
        (STORE,),
        "uninitialised-read",
        "data_copy reads UB byte 0 that nothing has written",
    ),
    "lanes that a mask leaves out": ((LOW, ALL, STORE), "uninitialised-read", "UB byte 128"),
    "two pipes that wait for each other": (
        ("wait_flag V>MTE2:0", LOAD, *flag("MTE2>V"), RELU, "set_flag V>MTE2:0"),
        "deadlock",
        "the cycle",
        "MTE2 waits for V>MTE2:0",
        "V waits for MTE2>V:0",
    ),
    "a flag that is never set": (
        (LOAD, "wait_flag MTE2>V:3", RELU),
        "deadlock",
        "V waits for MTE2>V:3, but MTE2 has finished",
    ),
    "a barrier in front of the flag": (
        (LOAD, "wait_flag MTE2>V:0", RELU, ALL, "set_flag MTE2>V:0"),
        "deadlock",
        "MTE2 waits at a barrier",
    ),
    "a flag that is set twice": (
        (LOAD, *flag("MTE2>V", count=2), RELU),
        "event-overflow",
        "MTE2>V:0 may be set again before it was waited for",
    ),
    "a flag that nobody waits for": (
        (LOAD, "set_flag MTE2>V:0"),
        "leak",
        "MTE2>V:0 is set 1 times more than it is waited for",
    ),
    "two events of one id": (
        (LOAD, "set_flag MTE2>V:0x2", *flag("MTE2>V", "1"), "wait_flag MTE2>V:0x2", RELU),
        "illegal",
        "MTE2>V:1 and MTE2>V:0x2 share an id",
    ),
}
CLEAN = {
    "the read before the flag": (FILL, COPY, *flag("V>MTE2"), LOAD),
    "barriers between": (LOAD, ALL, RELU, ALL, STORE),
    "order through a third pipe": (LOAD, *flag("MTE2>S"), "S scalar steps=1", *flag("S>V"), RELU),
    "two masks that are all lanes": (LOW, HIGH, ALL, STORE),
    "one event": (LOAD, *flag("MTE2>V", "1"), RELU),
}


@pytest.mark.parametrize(("steps", "kind", "words"), [(s, k, w) for s, k, *w in FOUND.values()],
                         ids=FOUND)  # fmt: skip
def test_each_kind_of_finding_is_told(steps, kind, words):
    (finding,) = sanitize(raw(*steps, t=0, u=2 * TILE), TOY)
    assert finding.kind == kind
    assert [word for word in words if word not in finding.message] == []


@pytest.mark.parametrize("steps", CLEAN.values(), ids=CLEAN)
def test_what_is_in_order_is_clean(steps):
    assert sanitize(raw(*steps, t=0, u=2 * TILE), TOY) == []


def test_illegal_instructions_are_reported_with_the_rule():
    (finding,) = sanitize(raw(LOAD, t=TOY.buffers["UB"] - 64), TOY)
    assert finding.kind == "illegal"
    assert str(finding).startswith("illegal: ") and "of UB" in finding.message


def test_overlapping_buffers_of_other_types_race():
    last = Buffer("last", "UB", "fp32", 8, address=2 * TILE - 32)
    fill = Instruction("vdup", "V", last.region(0, (1, 8)), (), (("scalar", 0.0),))
    program = raw(LOAD, t=0)
    program = replace(program, buffers=(*program.buffers, last), body=(*program.body, fill))
    (finding,) = sanitize(program, TOY)
    assert finding.kind == "race"
    assert f"UB byte {2 * TILE - 32}" in finding.message


# -- the other kinds -----------------------------------------------------------------------------
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


def test_event_overflow_when_the_id_does_not_exist():
    event = Event("MTE2", "V", TOY.event_ids)
    body = (
        Instruction("set_flag", "MTE2", event=event),
        Instruction("wait_flag", "V", event=event),
    )
    found = sanitize(Program("ids", (), body), TOY)
    assert {finding.kind for finding in found} == {"event-overflow"}
    assert f"ids go from 0 to {TOY.event_ids - 1}" in found[0].message


def test_out_of_bounds_names_the_elements():
    program = Program("far", raw(LOAD, t=0).buffers, (Loop("i", 3, (raw(LOAD, t=0).body[0],)),))

    def drift(instruction: Instruction) -> Instruction:
        shifted = replace(instruction.srcs[0], offset=instruction.srcs[0].offset + 16)
        return replace(instruction, srcs=(shifted,))

    (finding,) = sanitize(edited(program, drift), TOY)
    assert finding.kind == "out-of-bounds"
    assert "elements 0..1023 of x; got 16..1039" in finding.message


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


CORES = {
    "both write": (("x", "y"), ("x", "y"), "cores 0 and 1 both write y"),
    "one reads": (("x", "y"), ("y", "z"), "core 1 reads y byte 0, which core 0 writes"),
    "one overwrites": (("y", "z"), ("x", "y"), "core 1 writes y byte 0, which core 0 read"),
}


@pytest.mark.parametrize("case", CORES)
def test_two_cores_at_the_same_bytes_race(case):
    *tensors, message = CORES[case]
    programs = [one_core(*names, 0, f"core{i}") for i, names in enumerate(tensors)]
    filled = ["x", "y"] if case == "one overwrites" else None
    (finding,) = sanitize(launch_of(*programs), TOY, filled=filled)
    assert finding.kind == "race"
    assert finding.message == f"{message}; no order between cores"


def test_every_core_starts_with_empty_memory():
    """What core 0 left in its UB is not there on core 1."""
    fill = raw(FILL, "ALL barrier", STORE, t=0)
    store = raw(STORE, t=0)
    launch = Launch("two", (Part(fill), Part(store)))
    assert {"uninitialised-read", "race"} == kinds(launch)  # and both write y


# -- limits --------------------------------------------------------------------------------------
def test_findings_in_a_loop_are_reported_once():
    program = without_flags(relu(tiles=16), "MTE2", "V")
    found = sanitize(program, TOY)
    assert len(found) == len({(f.kind, f.instruction) for f in found}) <= 4


def test_too_many_instructions_are_refused():
    with pytest.raises(SimulationError, match="at most 100 instructions to check"):
        sanitize(relu(tiles=64), TOY, limit_events=100)
