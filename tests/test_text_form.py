"""Programs as text: what is printed reads back equal, what cannot be read names its line."""

import pytest
from hypothesis import given, settings, strategies as st
from strategies import flag_programs, gemm_cases, kernels, launches

from ascend_lab.errors import ProgramError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import (
    Affine,
    Buffer,
    Event,
    Instruction,
    Loop,
    Program,
    parse_program,
    var,
)
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels import elementwise_program, gemm_launch

TOY = load_chip("Toy")


def assert_round_trip(program: Program) -> None:
    text = str(program)
    assert str(program) == text
    back = parse_program(text)
    assert back == program
    assert str(back) == text


@settings(max_examples=100)
@given(kernels())
def test_random_kernels_round_trip(case):
    assert_round_trip(case.program)


@given(launches())
def test_programs_of_several_cores_round_trip(case):
    for part in case.program.parts:
        assert_round_trip(part.program)


@given(gemm_cases())
def test_matrix_products_round_trip(case):
    shape, schedule, chip = case
    for part in gemm_launch(shape, chip, schedule).parts:
        assert_round_trip(part.program)


@settings(max_examples=100)
@given(flag_programs())
def test_raw_flags_round_trip(program):
    assert_round_trip(program)


affines = st.builds(
    lambda const, terms: sum((var(n) * c for n, c in terms.items()), Affine(const)),
    st.integers(-1000, 1000),
    st.dictionaries(st.sampled_from(("i", "j", "k0", "row_1")), st.integers(-300, 300)),
)
buffers = st.sampled_from(
    (
        Buffer("x", "GM", "int8", 100),
        Buffer("a.b_2", "UB", "fp32", 16, slots=3, address=64, slot_bytes=96),
        Buffer("t", "L1", "fp16", 16, address=32),
    )
)
regions = st.builds(
    lambda buffer, offset, dims, slot: buffer.region(
        offset, tuple(n for n, _ in dims), tuple(s for _, s in dims), slot
    ),
    buffers,
    affines,
    st.lists(st.tuples(st.integers(1, 999), st.integers(-999, 999)), min_size=1, max_size=4),
    affines,
)
attributes = st.lists(
    st.one_of(
        st.tuples(st.just("scalar"), st.floats(allow_nan=False)),
        st.tuples(st.just("mask"), st.integers(1, 1 << 128)),
        st.tuples(st.just("pad"), st.tuples(*[st.integers(0, 9)] * 4)),
        st.tuples(st.sampled_from(("accumulate", "m_start", "k_start")), affines),
    ),
    unique_by=lambda pair: pair[0],
    max_size=3,
).map(tuple)


@settings(max_examples=200)
@given(
    st.sampled_from(("vadd", "data_copy", "mmad", "load3d", "foo")),
    st.sampled_from(("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")),
    regions,
    st.lists(regions, max_size=3),
    attributes,
)
def test_any_instruction_round_trips_even_an_illegal_one(op, pipe, dst, srcs, attrs):
    instruction = Instruction(op, pipe, dst, tuple(srcs), attrs)
    used = {r.buffer.name: r.buffer for r in instruction.regions}
    assert_round_trip(Program("any", tuple(used.values()), (instruction,)))


def test_the_text_reads_like_a_program():
    text = str(elementwise_program(TOY, 1024, op="vrelu", tile=256, depth=1))
    assert text == (
        "program vrelu\n"
        "param core 1\n"
        "buffer x1 GM fp16 1024\n"
        "buffer y GM fp16 1024\n"
        "buffer x1_ub UB fp16 256 slots=1 at=0 pitch=512\n"
        "buffer y_ub UB fp16 256 slots=1 at=512 pitch=512\n"
        "set_flag V>MTE2:0\n"
        "set_flag MTE3>V:0\n"
        "loop i 4:\n"
        "  wait_flag V>MTE2:0\n"
        "  MTE2 data_copy x1_ub[0 | 256:1] <- x1[1024*core+256*i | 256:1]\n"
        "  set_flag MTE2>V:0\n"
        "  wait_flag MTE2>V:0\n"
        "  wait_flag MTE3>V:0\n"
        "  V    vrelu y_ub[0 | 2:128,128:1] <- x1_ub[0 | 2:128,128:1]\n"
        "  set_flag V>MTE2:0\n"
        "  set_flag V>MTE3:0\n"
        "  wait_flag V>MTE3:0\n"
        "  MTE3 data_copy y[1024*core+256*i | 256:1] <- y_ub[0 | 256:1]\n"
        "  set_flag MTE3>V:0\n"
        "wait_flag V>MTE2:0\n"
        "wait_flag MTE3>V:0\n"
    )


def test_names_with_spaces_and_empty_loops_survive():
    inner = Loop("j", 0, ())
    event = Event("MTE2", "V", 3, 2)
    body = (Loop("i", 2, (inner, Instruction("set_flag", "MTE2", event=event))), Loop("i", 1, ()))
    assert_round_trip(Program("a program of mine", (), body, (("core", 2),)))


def test_a_text_written_by_hand_runs():
    text = """
        program mine
        loop i 3:
            S scalar steps=4
            loop j 2:
                ALL barrier
        S scalar steps=1
    """
    program = parse_program(text)
    assert program.executed_count == 3 * (1 + 2) + 1
    assert simulate(program, TOY).cycles == 3 * (4 + 2 * TOY.barrier_cycles) + 1


HEAD = "program bad\nbuffer x GM fp16 64\nbuffer t UB fp16 64 slots=1 at=0 pitch=0\n"


@pytest.mark.parametrize(
    "line",
    [
        "program",
        "buffer y GM fp16",
        "buffer y GM fp16 many",
        "buffer y GM fp16 8 slots",
        "buffer y GM fp99 8",
        "buffer y GM fp16 0",
        "param core",
        "param core two",
        "loop i",
        "loop i many:",
        "loop i -2:",
        "loop 2i 2:",
        "set_flag",
        "set_flag MTE2-V:0",
        "set_flag MTE2>V",
        "wait_flag MTE2>V:one",
        "MTE2",
        "MTE2 data_copy t[0 | 64:1] <- nowhere[0 | 64:1]",
        "MTE2 data_copy t[0 | 64] <- x[0 | 64:1]",
        "MTE2 data_copy t[2** | 64:1] <- x[0 | 64:1]",
        "MTE2 data_copy t[i+ | 64:1] <- x[0 | 64:1]",
        "MTE2 data_copy t[0 | 0:1] <- x[0 | 64:1]",
        "V vadds t[0 | 1:64,64:1] <- t[0 | 1:64,64:1] scalar=one",
        "V vadds t[0 | 1:64,64:1] <- t[0 | 1:64,64:1] pad=(1,x)",
        "M mmad accumulate=2**i",
    ],
)
def test_what_cannot_be_read_names_its_line(line):
    with pytest.raises(ProgramError, match="line 4 in program text form"):
        parse_program(HEAD + line + "\n")


@settings(max_examples=200)
@given(st.text(alphabet="programbufelt xiVMTE123[]|:<->=*+(), \n", max_size=80))
def test_noise_never_raises_anything_else(noise):
    try:
        parse_program(HEAD + noise)
    except ProgramError:
        return
