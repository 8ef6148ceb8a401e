"""Addresses, regions, instructions and programs: what they mean and what they refuse."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.chip import PRESETS, load_chip
from ascend_lab.errors import AlignmentError, AscendLabError, CapacityError, PathError, ProgramError
from ascend_lab.isa import (
    Affine,
    Buffer,
    Event,
    Instruction,
    Launch,
    Loop,
    Part,
    Program,
    Region,
    as_launch,
    barrier,
    binding_of,
    c0_of,
    check_instruction,
    data_copy,
    fixpipe,
    interleave,
    load2d,
    load3d,
    mmad,
    mmad_shape,
    pipe_stream,
    program_unit,
    scalar,
    set_flag,
    var,
    vector,
    wait_flag,
)

TOY, SPLIT = load_chip("Toy"), load_chip("Ascend910B2")
NAMES = ("i", "j", "k")

affines = st.builds(
    lambda const, terms: sum((var(n) * c for n, c in terms.items()), Affine(const)),
    st.integers(-50, 50),
    st.dictionaries(st.sampled_from(NAMES), st.integers(-9, 9)),
)
environments = st.fixed_dictionaries({n: st.integers(0, 6) for n in NAMES})


# -- addresses -------------------------------------------------------------------------------------


@given(affines, affines, st.integers(-9, 9), environments)
def test_affine_arithmetic_is_arithmetic(a, b, factor, env):
    assert (a + b).at(env) == a.at(env) + b.at(env)
    assert (a - b).at(env) == a.at(env) - b.at(env)
    assert (a * factor).at(env) == (factor * a).at(env) == a.at(env) * factor
    assert (a + factor).at(env) == (factor + a).at(env) == a.at(env) + factor
    assert (factor - a).at(env) == factor - a.at(env)
    assert (-a).at(env) == -a.at(env)
    assert a + b == b + a
    assert a - a == Affine(0)


@given(affines, st.fixed_dictionaries({n: st.integers(1, 5) for n in NAMES}))
def test_affine_bounds_are_reached(a, ranges):
    values = [
        a.at({"i": i, "j": j, "k": k})
        for i in range(ranges["i"])
        for j in range(ranges["j"])
        for k in range(ranges["k"])
    ]
    assert a.bounds(ranges) == (min(values), max(values))


@pytest.mark.parametrize("factor", [2.5, "2", None])
def test_affine_refuses_what_is_no_whole_number(factor):
    with pytest.raises(ProgramError, match="a whole number"):
        var("i") * factor
    with pytest.raises(ProgramError, match="a whole number"):
        var("i") + factor


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(-20, 20)), min_size=1, max_size=3),
    st.integers(0, 30),
)
def test_extent_is_the_lowest_and_highest_element(dims, offset):
    sizes, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
    region = Buffer("x", "GM", "fp16", 1000).region(offset, sizes, strides)
    points = [offset]
    for size, stride in dims:
        points = [p + i * stride for p in points for i in range(size)]
    assert region.extent({}) == (min(points), max(points))
    assert region.elements == len(points) == math.prod(sizes)
    assert region.size_bytes == 2 * len(points)


@pytest.mark.parametrize(
    ("sizes", "strides", "run"),
    [
        ((64,), None, 128),
        ((4, 16), None, 128),
        ((4, 16), (32, 1), 32),
        ((4, 1), (1, 7), 8),
        ((4, 16), (16, 2), 2),
        ((1, 16), (999, 1), 32),
        ((2, 4, 16), (128, 16, 1), 128),
        ((8,), (0,), 2),
    ],
)
def test_runs_are_what_lies_in_one_piece(sizes, strides, run):
    assert Buffer("x", "GM", "fp16", 4096).region(0, sizes, strides).run_bytes == run


def test_slots_count_modulo_the_queue():
    buffer = Buffer("q", "UB", "fp16", 16, slots=3, slot_bytes=32)
    region = buffer.region(slot=var("i") * 4 + 5)
    assert region.slot == var("i") + 2
    assert buffer.size_bytes == 96
    assert str(region) == "q[i+2 | 0 | 16:1]"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buffer("x", "GM", "fp16", 0), "elements >= 1"),
        (lambda: Buffer("x", "GM", "fp16", 4, slots=0), "slots >= 1"),
        (lambda: Buffer("x", "GM", "fp16", 4, address=-32), "address >= 0"),
        (lambda: Buffer("x", "GM", "fp8", 4), "a number format; got fp8"),
        (lambda: Buffer("x y", "GM", "fp16", 4), "a buffer name"),
        (lambda: Buffer("x", "GM", "fp16", 4.0), "a whole number"),
        (lambda: Buffer("x", "UB", "fp16", 16, slots=2, slot_bytes=8), "32 bytes apart"),
        (lambda: Buffer("x", "GM", "fp16", 4).region(0, (2, 2), (1,)), "one stride per size"),
        (lambda: Buffer("x", "GM", "fp16", 4).region(0, (0,)), "sizes >= 1"),
        (lambda: Buffer("x", "GM", "fp16", 4).region(0, ()), "sizes >= 1"),
        (lambda: Buffer("x", "GM", "fp16", 4).region(0, (1.5,)), "a whole number"),
        (lambda: Buffer("x", "GM", "fp16", 4).region(0.5), "a whole number"),
        (lambda: Loop("i", -1, ()), "a trip count >= 0"),
        (lambda: Loop("i j", 1, ()), "a loop variable"),
        (lambda: Program("p", (), (), (("core", 0),)), "counts >= 1"),
        (lambda: Part(Program("p", (), ()), ()), "a binding per core"),
        (lambda: Part(Program("p", (), (), (("core", 2),))), "a binding of core in 0..1"),
        (lambda: Part(Program("p", (), ()), ((("x", 0),),)), "a binding of no params"),
    ],
)
def test_data_types_refuse_nonsense(make, message):
    with pytest.raises(ProgramError, match=message):
        make()


# -- instructions ----------------------------------------------------------------------------------


def at(space: str, elements: int = 4096, dtype: str = "fp16", address: int = 0) -> Buffer:
    return Buffer(space.lower(), space, dtype, elements, address=address)


def tile(space: str, *sizes: int, dtype: str = "fp16") -> Region:
    return at(space, math.prod(sizes), dtype).region(0, sizes)


def good_load3d(**changes):
    options = {"kernel": (3, 3), "pad": (1, 1, 1, 1)} | changes
    dst = options.pop("dst", tile("L0A", 1, 1, 16, 16))
    src = options.pop("src", tile("L1", 1, 5, 5, 16))
    return load3d(TOY, dst, src, **options)


def good_mmad(chip=TOY, **changes):
    a = changes.pop("a", tile("L0A", 2, 3, 16, 16))
    b = changes.pop("b", tile("L0B", 3, 4, 16, 16))
    c = changes.pop("c", tile("L0C", 4, 2, 16, 16, dtype="fp32"))
    return mmad(chip, c, a, b, **changes)


def test_instructions_know_their_pipe():
    ub, gm, l1 = tile("UB", 64), tile("GM", 64), tile("L1", 64)
    fractal = tile("L1", 1, 256)
    assert data_copy(TOY, ub, gm).pipe == "MTE2"
    assert data_copy(TOY, gm, ub).pipe == "MTE3"
    assert data_copy(TOY, l1, gm).pipe == "MTE2"
    assert data_copy(TOY, ub, tile("L0C", 64, dtype="fp32")).pipe == "V"
    assert load2d(TOY, tile("L0A", 1, 256), fractal).pipe == "MTE1"
    assert good_load3d().pipe == "MTE1"
    assert good_mmad().pipe == "M"
    assert fixpipe(SPLIT, gm, tile("L0C", 64, dtype="fp32")).pipe == "FIX"
    assert vector(TOY, "vrelu", tile("UB", 1, 64), tile("UB", 1, 64)).pipe == "V"
    assert scalar(TOY).pipe == "S"
    assert set_flag(TOY, Event("S", "V", 0)).pipe == "S"
    assert wait_flag(TOY, Event("S", "V", 0)).pipe == "V"
    assert barrier(TOY).pipe == "ALL"


def test_shapes_and_formats():
    assert mmad_shape(good_mmad()) == (32, 48, 64)
    assert (c0_of("fp16"), c0_of("int8"), c0_of("fp32")) == (16, 32, 8)
    copy = data_copy(TOY, tile("UB", 64), tile("GM", 64))
    assert copy.attr("pad", 7) == 7
    assert [r.space for r in copy.regions] == ["UB", "GM"]
    with pytest.raises(ProgramError, match="an integer attribute scale"):
        Instruction("fixpipe", "FIX", attrs=(("scale", 0.5),)).number("scale")


ROOMY = replace(TOY, buffers={**TOY.buffers, "L0A": 1 << 20, "L1": 1 << 20})
UB64 = tile("UB", 1, 64)

REFUSED = {
    # moves
    "no path": (lambda: data_copy(TOY, tile("L0C", 64), tile("GM", 64)), PathError, "GM->L0C"),
    "into L0A by copy": (
        lambda: data_copy(TOY, tile("L0A", 1, 256), tile("L1", 1, 256)),
        PathError,
        "use load2d",
    ),
    "shapes differ": (
        lambda: data_copy(TOY, tile("UB", 64), tile("GM", 4, 16)),
        ProgramError,
        "equal shapes",
    ),
    "formats differ": (
        lambda: data_copy(TOY, tile("UB", 64), tile("GM", 64, dtype="fp32")),
        ProgramError,
        "one number format",
    ),
    "ragged run": (
        lambda: data_copy(TOY, tile("UB", 24), tile("GM", 24)),
        AlignmentError,
        "runs of whole 32-byte blocks in ub; got 48 bytes",
    ),
    "odd address": (
        lambda: data_copy(TOY, at("UB").region(8, 64), tile("GM", 64)),
        AlignmentError,
        "multiples of 32 bytes; got 16 bytes; step by 16 elements",
    ),
    "odd step": (
        lambda: data_copy(TOY, at("UB").region(var("i") * 8, 64), tile("GM", 64)),
        AlignmentError,
        "multiples of 32 bytes",
    ),
    "repeats between blocks": (
        lambda: vector(TOY, "vcadd", tile("UB", 4), at("UB", 168).region(0, (4, 42))),
        AlignmentError,
        "multiples of 32 bytes apart; got 84 bytes; pad the rows to whole blocks",
    ),
    "padding on a coupled chip": (
        lambda: data_copy(TOY, tile("UB", 24), tile("GM", 24), pad=True),
        PathError,
        "a padding copy",
    ),
    "buffer beyond its space": (
        lambda: data_copy(TOY, at("UB", 64, address=32768 - 64).region(), tile("GM", 64)),
        CapacityError,
        r"bytes 32704\.\.32831 of UB; got 32768 bytes on Toy",
    ),
    "buffer misaligned": (
        lambda: data_copy(TOY, at("UB", 64, address=16).region(), tile("GM", 64)),
        AlignmentError,
        "UB addresses in multiples of 32 bytes",
    ),
    "space unknown": (
        lambda: data_copy(TOY, at("L7", 64).region(), tile("GM", 64)),
        PathError,
        "GM->L7",
    ),
    "no fix pipe": (
        lambda: fixpipe(TOY, tile("UB", 64), tile("L0C", 64, dtype="fp32")),
        PathError,
        "fixpipe",
    ),
    "fixpipe from L1": (
        lambda: fixpipe(SPLIT, tile("L1", 64), tile("GM", 64)),
        PathError,
        "fixpipe",
    ),
    "fixpipe shapes": (
        lambda: fixpipe(SPLIT, tile("GM", 64), tile("L0C", 4, 16, dtype="fp32")),
        ProgramError,
        "equal shapes",
    ),
    "load2d is no fractal": (
        lambda: load2d(TOY, tile("L0A", 2, 128), tile("L1", 2, 128)),
        ProgramError,
        "fractals of 512 bytes",
    ),
    "load2d repeats": (
        lambda: load2d(ROOMY, tile("L0A", 256, 256), tile("L1", 256, 256)),
        CapacityError,
        "at most 255 repeats; got 256",
    ),
    "load2d into UB": (
        lambda: load2d(TOY, tile("UB", 1, 256), tile("L1", 1, 256)),
        PathError,
        "L0A or L0B",
    ),
    "load2d address": (
        lambda: load2d(TOY, at("L0A").region(16, (1, 256)), tile("L1", 1, 256)),
        AlignmentError,
        "multiples of 512 bytes",
    ),
    "load2d formats": (
        lambda: load2d(TOY, tile("L0A", 1, 256), tile("L1", 1, 256, dtype="fp32")),
        ProgramError,
        "one number format",
    ),
    "load3d into L0B": (lambda: good_load3d(dst=tile("L0B", 1, 1, 16, 16)), ProgramError, "L0A"),
    "load3d tile": (lambda: good_load3d(dst=tile("L0A", 16, 16)), ProgramError, "M1, K1, 16, 16"),
    "load3d image": (lambda: good_load3d(src=tile("L1", 5, 5, 16)), ProgramError, "C1, H, W, 16"),
    "load3d from UB": (lambda: good_load3d(src=tile("UB", 1, 5, 5, 16)), PathError, "UB->L0A"),
    "load3d kernel": (lambda: good_load3d(kernel=(0, 3)), ProgramError, "kernel as 2 numbers"),
    "load3d kernel text": (lambda: good_load3d(kernel="33"), ProgramError, "kernel as 2 numbers"),
    "load3d stride": (lambda: good_load3d(stride=(1, 0)), ProgramError, "stride as 2 numbers"),
    "load3d pad": (lambda: good_load3d(pad=(1, 1)), ProgramError, "pad as 4 numbers"),
    "load3d negative pad": (lambda: good_load3d(pad=(0, 0, 0, -1)), ProgramError, "at least 0"),
    "load3d window": (lambda: good_load3d(kernel=(8, 3)), ProgramError, "within the padded image"),
    "load3d dilation": (lambda: good_load3d(dilation=(4, 1)), ProgramError, "padded image"),
    "load3d k_start": (lambda: good_load3d(k_start=8), AlignmentError, "multiples of 16"),
    # cube
    "mmad spaces": (lambda: good_mmad(a=tile("L1", 2, 3, 16, 16)), PathError, "A in L0A"),
    "mmad format": (
        lambda: good_mmad(a=tile("L0A", 2, 3, 16, 16, dtype="fp32")),
        PathError,
        "number format of the Toy cube",
    ),
    "mmad mixed": (
        lambda: good_mmad(b=tile("L0B", 3, 4, 16, 16, dtype="int8")),
        PathError,
        "fp16 x int8",
    ),
    "mmad output": (
        lambda: good_mmad(c=tile("L0C", 4, 2, 16, 16, dtype="int32")),
        PathError,
        "-> int32",
    ),
    "mmad shapes": (lambda: good_mmad(b=tile("L0B", 2, 4, 16, 16)), ProgramError, "must agree"),
    "mmad flat": (lambda: good_mmad(a=tile("L0A", 1536)), ProgramError, "must agree"),
    "mmad bias place": (lambda: good_mmad(bias=tile("UB", 64, dtype="fp32")), PathError, "BT"),
    "mmad bias size": (
        lambda: good_mmad(SPLIT, bias=tile("BT", 32, dtype="fp32")),
        ProgramError,
        "a bias of 64 fp32",
    ),
    # vector
    "vector name": (lambda: vector(TOY, "vfoo", UB64, UB64), ProgramError, "use one of"),
    "vector arity": (lambda: vector(TOY, "vadd", UB64, UB64), ProgramError, "2 source regions"),
    "vector scalar missing": (lambda: vector(TOY, "vadds", UB64, UB64), ProgramError, "a scalar"),
    "vector scalar extra": (
        lambda: vector(TOY, "vrelu", UB64, UB64, scalar=1.0),
        ProgramError,
        "no scalar",
    ),
    "vector scalar format": (
        lambda: vector(TOY, "vdup", tile("UB", 1, 64, dtype="int32"), scalar=0.5),
        ProgramError,
        "a whole scalar for int32",
    ),
    "vector place": (lambda: vector(TOY, "vrelu", UB64, tile("L1", 1, 64)), PathError, "in UB"),
    "vector repeats": (
        lambda: vector(TOY, "vrelu", tile("UB", 256, 16), tile("UB", 256, 16)),
        CapacityError,
        "at most 255 repeats; got 256",
    ),
    "vector width": (
        lambda: vector(TOY, "vrelu", tile("UB", 1, 256), tile("UB", 1, 256)),
        CapacityError,
        "256 bytes a repeat",
    ),
    "vector sizes": (lambda: vector(TOY, "vrelu", UB64, tile("UB", 1, 32)), ProgramError, "64 ele"),
    "vector formats": (
        lambda: vector(TOY, "vadd", UB64, UB64, tile("UB", 1, 64, dtype="int32")),
        ProgramError,
        "cast with vconv",
    ),
    "vector address": (
        lambda: vector(TOY, "vrelu", at("UB").region(1, (1, 64)), UB64),
        AlignmentError,
        "multiples of 32",
    ),
    "vector mask": (
        lambda: vector(TOY, "vrelu", UB64, UB64, mask=1 << 64),
        ProgramError,
        "a mask with a bit for each of 64 lanes",
    ),
    "vector empty mask": (lambda: vector(TOY, "vrelu", UB64, UB64, mask=0), ProgramError, "mask"),
    "reduction size": (lambda: vector(TOY, "vcadd", UB64, UB64), ProgramError, "1 elements"),
    "group reduction": (
        lambda: vector(TOY, "vcgadd", tile("UB", 1, 1), tile("UB", 1, 24)),
        AlignmentError,
        "whole 32-byte blocks",
    ),
    # scalar, flags, barriers
    "scalar steps": (lambda: scalar(TOY, steps=0), ProgramError, "steps >= 1"),
    "scalar half": (lambda: scalar(TOY, tile("GM", 1)), ProgramError, "give both or neither"),
    "scalar tile": (lambda: scalar(TOY, tile("GM", 2), tile("GM", 2)), ProgramError, "one element"),
    "event pipe": (lambda: set_flag(TOY, Event("X", "V", 0)), ProgramError, "two pipes"),
    "event loop": (lambda: set_flag(TOY, Event("V", "V", 0)), ProgramError, "different pipes"),
    "event id": (lambda: wait_flag(TOY, Event("S", "V", 7, 2)), CapacityError, r"0\.\.7"),
    "barrier pipe": (lambda: barrier(TOY, "V2"), ProgramError, "a pipe or ALL"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_illegal_instructions_say_what_is_needed(case):
    make, error, message = REFUSED[case]
    with pytest.raises(error, match=message) as caught:
        make()
    assert caught.value.needed
    assert caught.value.remedy


@pytest.mark.parametrize(
    "instruction",
    [
        Instruction("foo", "V", UB64, (UB64,)),
        Instruction("vrelu", "V", None, (UB64,)),
        Instruction("vrelu", "V", UB64),
        Instruction("mmad", "M"),
        Instruction("data_copy", "MTE3", tile("UB", 64), (tile("GM", 64),)),
        Instruction("vrelu", "MTE2", UB64, (UB64,)),
        Instruction("set_flag", "V"),
        Instruction("set_flag", "V", event=Event("S", "V", 0)),
        Instruction("load3d", "MTE1", tile("L0A", 1, 1, 16, 16), (tile("L1", 1, 5, 5, 16),)),
        Instruction("scalar", "S", attrs=(("steps", 0.5),)),
    ],
)
def test_hand_made_instructions_are_checked_like_built_ones(instruction):
    with pytest.raises(ProgramError):
        check_instruction(TOY, instruction)


@settings(max_examples=60)
@given(st.data())
def test_no_region_makes_a_constructor_fail_untyped(data):
    """Whatever regions it is given, a constructor returns or raises the error family."""
    spaces = st.sampled_from(("GM", "L1", "L0A", "L0B", "L0C", "UB", "BT", "XX"))
    regions = st.builds(
        lambda space, dtype, offset, dims: Buffer("b", space, dtype, 4096).region(
            offset, tuple(n for n, _ in dims), tuple(s for _, s in dims)
        ),
        spaces,
        st.sampled_from(("fp16", "fp32", "int8", "uint8", "int32")),
        st.integers(-64, 64),
        st.lists(st.tuples(st.integers(1, 20), st.integers(-20, 300)), min_size=1, max_size=4),
    )
    a, b, c = (data.draw(regions) for _ in range(3))
    chip = data.draw(st.sampled_from((TOY, SPLIT)))
    makers = (
        lambda: data_copy(chip, a, b, pad=data.draw(st.booleans())),
        lambda: load2d(chip, a, b),
        lambda: load3d(chip, a, b, kernel=(2, 2)),
        lambda: mmad(chip, a, b, c),
        lambda: mmad(chip, a, b, c, bias=a),
        lambda: fixpipe(chip, a, b),
        lambda: vector(chip, data.draw(st.sampled_from(("vadd", "vsel", "vcadd"))), a, b, c),
        lambda: vector(chip, data.draw(st.sampled_from(("vcadd", "vcgmax", "vconv"))), a, b),
        lambda: vector(chip, "vdup", a, scalar=1.0),
        lambda: scalar(chip, a, b),
    )
    for make in makers:
        try:
            made = make()
        except AscendLabError:
            continue
        assert check_instruction(chip, made) is made


# -- programs --------------------------------------------------------------------------------------


def count(program: Program, pipe: str) -> int:
    return sum(1 for _ in pipe_stream(program, pipe, {}))


def test_what_stands_behind_a_loop_does_not_see_its_variables():
    step = Instruction("barrier", "MTE2")
    inner = Loop("i", 2, (Loop("j", 2, (step,)), step))
    program = Program("scopes", (), (step, inner, step, Loop("k", 1, (step,)), step))
    seen = ["".join(env) for _, env in pipe_stream(program, "MTE2", {})]
    assert seen == ["", "ij", "ij", "i", "ij", "ij", "i", "", "k", ""]


def test_programs_count_what_runs():
    step = Instruction("scalar", "S", attrs=(("steps", 1),))
    program = Program("count", (), (step, Loop("i", 3, (step, Loop("j", 4, (step,))))))
    assert program.event_count == 1 + 3 + 12 == count(program, "S")
    assert program.pipes == ("S",)
    assert [times for _, times in program.instructions()] == [1, 3, 12]
    assert [ranges for _, ranges in program.scoped()] == [{}, {"i": 3}, {"i": 3, "j": 4}]


def test_interleaving_keeps_each_pipes_order():
    steps = [Instruction("scalar", "S", attrs=(("steps", n),)) for n in (1, 2, 3)]
    others = [Instruction("barrier", pipe) for pipe in ("V", "MTE2", "V")]
    program = Program("two", (), (*steps, *others))
    for pick in (lambda ready: ready[0], lambda ready: ready[-1]):
        order = [i for i, _ in interleave(program, {}, pick)]
        assert [i for i in order if i.pipe == "S"] == steps
        assert len(order) == 6


def test_launches_name_their_tensors_and_cores():
    x = Buffer("x", "GM", "fp16", 4)
    program = Program("p", (x,), (), (("core", 3),))
    launch = Launch("l", (Part(program, tuple(binding_of({"core": c}) for c in range(3))),) * 2)
    assert launch.core_count == 6
    assert launch.tensors == (x,)
    assert as_launch(launch) is launch
    assert as_launch(program).parts[0].bindings == ((("core", 0),),)


@pytest.mark.parametrize("name", PRESETS)
def test_programs_know_which_cores_run_them(name):
    chip = load_chip(name)
    copy = data_copy(chip, tile("UB", 64), tile("GM", 64))
    stage = data_copy(chip, tile("L1", 64), tile("GM", 64))
    units = [program_unit(chip, Program("p", (), (i,))) for i in (copy, stage, good_mmad(chip))]
    assert units == (["core"] * 3 if chip.combined else ["vector", "cube", "cube"])
    assert program_unit(chip, Program("p", (), ())) in ("core", "cube")
