"""Addresses, regions, instructions and programs: what they mean and what they refuse."""

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st
from message_lists import assert_messages

from ascend_lab.errors import AscendLabError, ProgramError
from ascend_lab.machine.chip import PRESETS, load_chip
from ascend_lab.machine.isa import (
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
    check_instruction,
    data_copy,
    fixpipe,
    load2d,
    load3d,
    mmad,
    pipe_stream,
    program_unit,
    scalar,
    set_flag,
    var,
    vector,
    wait_flag,
)

TOY = load_chip("Toy")
SPLIT = load_chip("Ascend910B2")
NAMES = ("i", "j", "k")

affines = st.builds(
    lambda const, terms: sum((var(n) * c for n, c in terms.items()), Affine(const)),
    st.integers(-50, 50),
    st.dictionaries(st.sampled_from(NAMES), st.integers(-9, 9)),
)
environments = st.fixed_dictionaries({n: st.integers(0, 6) for n in NAMES})


# -- addresses -------------------------------------------------------------------------------------
@settings(max_examples=100)
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


@settings(max_examples=100)
@given(affines, st.fixed_dictionaries({n: st.integers(1, 5) for n in NAMES}))
def test_affine_bounds_are_reached(a, ranges):
    values = [
        a.at({"i": i, "j": j, "k": k})
        for i in range(ranges["i"])
        for j in range(ranges["j"])
        for k in range(ranges["k"])
    ]
    assert a.bounds(ranges) == (min(values), max(values))


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(-20, 20)), min_size=1, max_size=3),
    st.integers(0, 30),
)
def test_extent_is_the_lowest_and_highest_element(dims, offset):
    sizes = tuple(n for n, _ in dims)
    strides = tuple(s for _, s in dims)
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


DATA_TYPES = {
    "elements >= 1": lambda: Buffer("x", "GM", "fp16", 0),
    "slots >= 1": lambda: Buffer("x", "GM", "fp16", 4, slots=0),
    "address >= 0": lambda: Buffer("x", "GM", "fp16", 4, address=-32),
    "a number format; got fp8": lambda: Buffer("x", "GM", "fp8", 4),
    "a buffer name": lambda: Buffer("x y", "GM", "fp16", 4),
    "a whole number": lambda: Buffer("x", "GM", "fp16", 4.0),
    "32 bytes apart": lambda: Buffer("x", "UB", "fp16", 16, slots=2, slot_bytes=8),
    "one stride per size": lambda: Buffer("x", "GM", "fp16", 4).region(0, (2, 2), (1,)),
    "sizes >= 1": lambda: Buffer("x", "GM", "fp16", 4).region(0, (0,)),
    "no sizes": lambda: Buffer("x", "GM", "fp16", 4).region(0, ()),
    "a size of 1.5": lambda: Buffer("x", "GM", "fp16", 4).region(0, (1.5,)),
    "an offset of 0.5": lambda: Buffer("x", "GM", "fp16", 4).region(0.5),
    "a trip count >= 0": lambda: Loop("i", -1, ()),
    "a loop variable": lambda: Loop("i j", 1, ()),
    "counts >= 1": lambda: Program("p", (), (), (("core", 0),)),
    "params with different names": lambda: Program("p", (), (), (("core", 2), ("core", 3))),
    "a binding per core": lambda: Part(Program("p", (), ()), ()),
    "a binding of core in 0..1": lambda: Part(Program("p", (), (), (("core", 2),))),
    "a binding of no params": lambda: Part(Program("p", (), ()), ((("x", 0),),)),
}


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
    ub = tile("UB", 64)
    gm = tile("GM", 64)
    l1 = tile("L1", 64)
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


ROOMY = replace(TOY, buffers={**TOY.buffers, "L0A": 1 << 20, "L1": 1 << 20})
UB64 = tile("UB", 1, 64)

copy = partial(data_copy, TOY)
compute = partial(vector, TOY)
INSTRUCTIONS = {
    "GM->L0C": lambda: copy(tile("L0C", 64), tile("GM", 64)),
    "use load2d": lambda: copy(tile("L0A", 1, 256), tile("L1", 1, 256)),
    "a padding copy": lambda: copy(tile("UB", 24), tile("GM", 24), pad=True),
    "relu on the path L0C->UB": lambda: copy(tile("UB", 64), tile("GM", 64), relu=True),
    "GM->L7": lambda: copy(at("L7", 64).region(), tile("GM", 64)),
    "an instruction of pipe V on Toy": lambda: fixpipe(
        TOY, tile("UB", 64), tile("L0C", 64, dtype="fp32")
    ),
    "an instruction of pipe MTE2": lambda: fixpipe(SPLIT, tile("L1", 64), tile("GM", 64)),
    "L0A or L0B": lambda: load2d(TOY, tile("UB", 1, 256), tile("L1", 1, 256)),
    "UB->L0A": lambda: good_load3d(src=tile("UB", 1, 5, 5, 16)),
    "A in L0A": lambda: good_mmad(a=tile("L1", 2, 3, 16, 16)),
    "number format of the Toy cube": lambda: good_mmad(a=tile("L0A", 2, 3, 16, 16, dtype="fp32")),
    "fp16 x int8": lambda: good_mmad(b=tile("L0B", 3, 4, 16, 16, dtype="int8")),
    "-> int32": lambda: good_mmad(c=tile("L0C", 4, 2, 16, 16, dtype="int32")),
    "BT": lambda: good_mmad(bias=tile("UB", 64, dtype="fp32")),
    "in UB": lambda: compute("vrelu", UB64, tile("L1", 1, 64)),
    "equal shapes": lambda: copy(tile("UB", 64), tile("GM", 4, 16)),
    "one number format": lambda: copy(tile("UB", 64), tile("GM", 64, dtype="fp32")),
    "fixpipe: equal shapes": lambda: fixpipe(
        SPLIT, tile("GM", 64), tile("L0C", 4, 16, dtype="fp32")
    ),
    "fractals of 512 bytes": lambda: load2d(TOY, tile("L0A", 2, 128), tile("L1", 2, 128)),
    "load2d: one number format": lambda: load2d(
        TOY, tile("L0A", 1, 256), tile("L1", 1, 256, dtype="fp32")
    ),
    "L0A": lambda: good_load3d(dst=tile("L0B", 1, 1, 16, 16)),
    "M1, K1, 16, 16": lambda: good_load3d(dst=tile("L0A", 16, 16)),
    "C1, H, W, 16": lambda: good_load3d(src=tile("L1", 5, 5, 16)),
    "kernel as 2 numbers": lambda: good_load3d(kernel=(0, 3)),
    "kernel as 2 numbers of at least 1; got '33'": lambda: good_load3d(kernel="33"),
    "stride as 2 numbers": lambda: good_load3d(stride=(1, 0)),
    "pad as 4 numbers": lambda: good_load3d(pad=(1, 1)),
    "at least 0": lambda: good_load3d(pad=(0, 0, 0, -1)),
    "within the padded image": lambda: good_load3d(kernel=(8, 3)),
    "padded image": lambda: good_load3d(dilation=(4, 1)),
    "must agree": lambda: good_mmad(b=tile("L0B", 2, 4, 16, 16)),
    "got (1536,).*must agree": lambda: good_mmad(a=tile("L0A", 1536)),
    "a bias of 64 fp32": lambda: good_mmad(SPLIT, bias=tile("BT", 32, dtype="fp32")),
    "use one of": lambda: compute("vfoo", UB64, UB64),
    "2 source regions": lambda: compute("vadd", UB64, UB64),
    "a scalar": lambda: compute("vadds", UB64, UB64),
    "no scalar": lambda: compute("vrelu", UB64, UB64, scalar=1.0),
    "a whole scalar for int32": lambda: compute(
        "vdup", tile("UB", 1, 64, dtype="int32"), scalar=0.5
    ),
    "64 ele": lambda: compute("vrelu", UB64, tile("UB", 1, 32)),
    "cast with vconv": lambda: compute("vadd", UB64, UB64, tile("UB", 1, 64, dtype="int32")),
    "a mask with a bit for each of 64 lanes": lambda: compute("vrelu", UB64, UB64, mask=1 << 64),
    "mask": lambda: compute("vrelu", UB64, UB64, mask=0),
    "1 elements": lambda: compute("vcadd", UB64, UB64),
    "steps >= 1": lambda: scalar(TOY, steps=0),
    "give both or neither": lambda: scalar(TOY, tile("GM", 1)),
    "one element": lambda: scalar(TOY, tile("GM", 2), tile("GM", 2)),
    "two pipes": lambda: set_flag(TOY, Event("X", "V", 0)),
    "different pipes": lambda: set_flag(TOY, Event("V", "V", 0)),
    "a pipe or ALL": lambda: barrier(TOY, "V2"),
    "runs of whole 32-byte blocks in ub; got 48 bytes": lambda: copy(
        tile("UB", 24), tile("GM", 24)
    ),
    "multiples of 32 bytes; got 16 bytes; step by 16 elements": lambda: copy(
        at("UB").region(8, 64), tile("GM", 64)
    ),
    "multiples of 32 bytes": lambda: copy(at("UB").region(var("i") * 8, 64), tile("GM", 64)),
    "multiples of 32 bytes apart; got 84 bytes; pad the rows to whole blocks": lambda: compute(
        "vcadd", tile("UB", 4), at("UB", 168).region(0, (4, 42))
    ),
    "UB addresses in multiples of 32 bytes": lambda: copy(
        at("UB", 64, address=16).region(), tile("GM", 64)
    ),
    "multiples of 512 bytes": lambda: load2d(
        TOY, at("L0A").region(16, (1, 256)), tile("L1", 1, 256)
    ),
    "multiples of 16": lambda: good_load3d(k_start=8),
    "multiples of 32": lambda: compute("vrelu", at("UB").region(1, (1, 64)), UB64),
    "whole 32-byte blocks": lambda: compute("vcgadd", tile("UB", 1, 1), tile("UB", 1, 24)),
    "bytes 32704..32831 of UB; got 32768 bytes on Toy": lambda: copy(
        at("UB", 64, address=32768 - 64).region(), tile("GM", 64)
    ),
    "at most 255 repeats; got 256": lambda: load2d(
        ROOMY, tile("L0A", 256, 256), tile("L1", 256, 256)
    ),
    "vrelu: at most 255 repeats; got 256": lambda: compute(
        "vrelu", tile("UB", 256, 16), tile("UB", 256, 16)
    ),
    "256 bytes a repeat": lambda: compute("vrelu", tile("UB", 1, 256), tile("UB", 1, 256)),
    "0..7": lambda: wait_flag(TOY, Event("S", "V", 7, 2)),
}


def test_what_is_refused_says_what_is_needed():
    numbers = {f"{factor!r} times i": lambda f=factor: var("i") * f for factor in (2.5, "2", None)}
    assert_messages("isa", "test_isa", DATA_TYPES | numbers | INSTRUCTIONS)


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


@settings(max_examples=100)
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
    assert program.executed_count == 1 + 3 + 12 == count(program, "S")
    assert program.pipes == ("S",)
    assert [times for _, times in program.instructions()] == [1, 3, 12]
    assert [ranges for _, ranges in program.scoped()] == [{}, {"i": 3}, {"i": 3, "j": 4}]


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
