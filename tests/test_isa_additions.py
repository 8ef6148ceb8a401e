"""bf16, compare and select, block instructions, rounding, atomic adds, rows picked at run time."""

import math
from functools import partial

import numpy as np
import pytest
from message_lists import assert_messages
from strategies import through

from ascend_lab.errors import CapacityError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import (
    Buffer,
    Instruction,
    KernelBuilder,
    Launch,
    Part,
    Program,
    binding_of,
    check_instruction,
    data_copy,
    mmad,
    parse_program,
    sanitize,
    vector,
)
from ascend_lab.machine.isa.memory import numpy_type
from ascend_lab.machine.sim import Surroundings, analyse, execute, instruction_cost, simulate

TOY = load_chip("Toy")
SPLIT = load_chip("Ascend910B2")
FIRST = load_chip("Ascend910A")
ALONE = Surroundings()


def lanes(dtype, count, repeats=1):
    return Buffer("q", "UB", dtype, count * repeats).region(0, (repeats, count))


def vector_program(chip, op, dtype, *, sources=1, row=(1, 64), to=None, out=None, **options):
    """x0 .. -> one vector instruction -> y, on one core, every pipe told by flags."""
    k = KernelBuilder(op, chip)
    to = to or row
    out = out or dtype
    xs = [k.tensor(f"x{i}", dtype, math.prod(row)).region() for i in range(sources)]

    def work(result, *tiles):
        k.vector(op, result.region(0, to), *(tile.region(0, row) for tile in tiles), **options)

    through(k, k.tensor("y", out, math.prod(to)).region(), *xs, work=work)
    return k.finish()


def run_once(chip, program, tensors):
    """Execute a program that must be clean and survive its own text form; return y."""
    assert sanitize(program, chip) == []
    assert parse_program(str(program)) == program
    assert simulate(program, chip).cycles > 0
    return execute(program, tensors, chip)["y"]


# -- bf16 ------------------------------------------------------------------------------------------
def multiply_whole_numbers(chip):
    four = (1, 1, 16, 16)
    operands = (("c", "L0C", "fp32"), ("a", "L0A", "int32"), ("b", "L0B", "int32"))
    return mmad(chip, *(Buffer(*names, 256).region(0, four) for names in operands))


# -- compare, select, round ------------------------------------------------------------------------
def test_select_takes_a_condition_tile_or_a_mask():
    rng = np.random.default_rng(2)
    cond = rng.integers(-1, 2, 64).astype(np.float16)
    a, b = (rng.normal(size=64).astype(np.float16) for _ in range(2))
    program = vector_program(TOY, "vsel", "fp16", sources=3)
    got = run_once(TOY, program, {"x0": cond, "x1": a, "x2": b})
    assert np.array_equal(got, np.where(cond != 0, a, b))
    program = vector_program(TOY, "vsel", "fp16", sources=2, mask=0b1011)
    got = run_once(TOY, program, {"x0": a, "x1": b})
    assert np.array_equal(got, np.where([i in (0, 1, 3) for i in range(64)], a, b))


@pytest.mark.parametrize(
    ("rounding", "f"),
    [("rint", np.rint), ("floor", np.floor), ("ceil", np.ceil), ("trunc", np.trunc)],
)
@pytest.mark.parametrize("out", ["int32", "int8"])
def test_vconv_rounds_as_asked_and_saturates(rounding, f, out):
    x = np.concatenate([np.arange(-8, 8) / 4, np.full(48, 1e9)]).astype(np.float32)
    x[20] = -1e9
    x[21] = 300.5
    program = vector_program(TOY, "vconv", "fp32", out=out, rounding=rounding)
    got = run_once(TOY, program, {"x0": x})
    info = np.iinfo(out)
    assert np.array_equal(got, np.clip(f(x.astype(np.float64)), info.min, info.max))
    assert ("round" in str(program)) == (rounding != "rint")


# -- blocks ----------------------------------------------------------------------------------------
def test_costs_count_repeats_of_eight_blocks():
    x = Buffer("x", "UB", "fp16", 64)
    y = Buffer("y", "UB", "fp16", 1024, address=128)
    brcb = TOY.vector_costs["vbrcb"]
    for n, repeats in ((1, 1), (8, 1), (9, 2), (64, 8)):
        code = vector(TOY, "vbrcb", y.region(0, (n, 16)), x.region(0, n))
        cycles = instruction_cost(TOY, code, ALONE).occupancy_cycles
        assert cycles == brcb.head_cycles + repeats * brcb.slope_cycles
    turn = TOY.vector_costs["vtranspose"]
    block = y.region(0, (16, 16))
    code = vector(TOY, "vtranspose", block, y.region(256, (16, 16)))
    cycles = instruction_cost(TOY, code, ALONE).occupancy_cycles
    assert cycles == turn.head_cycles + 2 * turn.slope_cycles
    code = vector(TOY, "vtranspose", y.region(0, (2, 16, 16)), y.region(512, (2, 16, 16)))
    cycles = instruction_cost(TOY, code, ALONE).occupancy_cycles
    assert cycles == turn.head_cycles + 4 * turn.slope_cycles
    code = vector(TOY, "vsel", *[lanes("fp16", 128, 4)] * 4)
    select = TOY.vector_costs["vsel"]
    assert instruction_cost(TOY, code, ALONE).occupancy_cycles == (
        select.head_cycles + 4 * select.slope_cycles
    )


def test_a_run_takes_whole_blocks_of_the_path():
    x = Buffer("x", "GM", "fp16", 4096)
    q = Buffer("q", "UB", "fp16", 4096)
    one, two, whole = (
        instruction_cost(SPLIT, data_copy(SPLIT, *ends, pad=True), ALONE).occupancy_cycles
        for ends in ([b.region(0, (64, n), (32, 1)) for b in (q, x)] for n in (16, 17, 32))
    )
    assert one < two == whole


# -- atomic adds -----------------------------------------------------------------------------------
def adding_launch(chip, dtype, cores=2, *, atomic="add", everywhere=True):
    """Every core adds its row of x (cores, 64) to the 64 numbers of y."""
    k = KernelBuilder("adding", chip)
    core = k.param("core", cores)
    x = k.tensor("x", dtype, 64 * cores)
    y = k.tensor("y", dtype, 64 * (1 if everywhere else cores))
    place = 0 if everywhere else core * 64
    through(k, y.region(place, 64), x.region(core * 64, 64), atomic=atomic)
    bindings = tuple(binding_of({"core": i}) for i in range(cores))
    return Launch("adding", (Part(k.finish(), bindings),))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int32"])
def test_atomic_adds_of_all_cores_arrive(dtype):
    kind = numpy_type(dtype)
    x = np.arange(128).astype(kind).reshape(2, 64)
    y = np.full(64, 5, kind)
    launch = adding_launch(TOY, dtype)
    assert sanitize(launch, TOY) == []
    got = execute(launch, {"x": x, "y": y}, TOY)["y"]
    assert np.array_equal(got, y + x.sum(0, dtype=kind))
    text = str(launch.parts[0].program)
    assert "atomic=add" in text
    assert parse_program(text) == launch.parts[0].program


def test_the_sanitizer_knows_what_an_atomic_add_may_meet():
    plain = adding_launch(TOY, "fp32", atomic=None)
    assert [f.kind for f in sanitize(plain, TOY)] == ["race"]
    adds = adding_launch(TOY, "fp32")
    empty = sanitize(adds, TOY, filled={"x"})
    assert [f.kind for f in empty] == ["uninitialised-read"]
    k = KernelBuilder("reader", TOY)
    y = k.tensor("y", "fp32", 64)
    z = k.tensor("z", "fp32", 64)
    through(k, z.region(), y.region())
    reader = Part(k.finish())
    for parts in ((*adds.parts, reader), (reader, *adds.parts)):
        found = sanitize(Launch("both", parts), TOY, filled={"x", "y"})
        assert [f.kind for f in found] == ["race"]
    mixed = Launch("mixed", (plain.parts[0], adds.parts[0]))
    assert [f.kind for f in sanitize(mixed, TOY, filled={"x", "y"})] == ["race"]


def test_atomic_places_may_repeat():
    k = KernelBuilder("fold", TOY)
    x = k.tensor("x", "fp32", 64)
    y = k.tensor("y", "fp32", 8)
    through(k, y.region(0, (8, 8), (0, 1)), x.region(), atomic="add")
    x0 = np.arange(64, dtype=np.float32)
    got = execute(k.finish(), {"x": x0, "y": np.zeros(8, np.float32)}, TOY)["y"]
    assert np.array_equal(got, x0.reshape(8, 8).sum(0))


# -- rows picked at run time -----------------------------------------------------------------------
def pick_launch(chip, table_rows, picks, *, store=False, cores=1, atomic=None, split=True):
    """y[i] = x[index[i]], or y[index[i]] = x[i]: 32-byte rows of fp32, indices through S."""
    k = KernelBuilder("pick", chip)
    core = k.param("core", cores)
    index = k.tensor("index", "int32", 8 * cores)
    x = k.tensor("x", "fp32", 8 * (8 * cores if store else table_rows))
    y = k.tensor("y", "fp32", 8 * (table_rows if store else 8 * cores))
    qi = k.queue("qi", "UB", "int32", 8, src="MTE2", dst="S", depth=1)
    one = k.queue("one", "UB", "int32", 1, src="S", dst="MTE3" if store else "MTE2")
    q = k.queue("q", "UB", "fp32", 8, src="MTE2", dst="MTE3")
    k.copy(qi.alloc().region(), index.region(core * 8, 8))
    qi.enqueue()
    batch = qi.dequeue()
    share = table_rows // cores
    start = core * (8 * share) if store and split else 0
    bound = share if store and split else table_rows
    with k.loop("i", picks) as i:
        k.scalar(one.alloc().region(), batch.region(i, 1))
        one.enqueue()
        if store:
            k.copy(q.alloc().region(), x.region(core * 64 + i * 8, 8))
            q.enqueue()
            row = one.dequeue().region()
            k.copy_row(y.region(start, 8), q.dequeue().region(), row, 8, bound, atomic=atomic)
            one.free()
        else:
            row = one.dequeue().region()
            k.copy_row(q.alloc().region(), x.region(0, 8), row, 8, bound)
            one.free(), q.enqueue()
            k.copy(y.region(core * 64 + i * 8, 8), q.dequeue().region())
        q.free()
    qi.free()
    return Launch("pick", (Part(k.finish(), tuple(binding_of({"core": c}) for c in range(cores))),))


def test_cores_may_store_by_index_into_ranges_of_their_own_only():
    assert sanitize(pick_launch(TOY, 8, 8, store=True, cores=2), TOY) == []
    torn = pick_launch(TOY, 8, 8, store=True, cores=2, split=False)
    assert [f.kind for f in sanitize(torn, TOY)] == ["race"]
    adds = pick_launch(TOY, 8, 8, store=True, cores=2, split=False, atomic="add")
    assert sanitize(adds, TOY) == []
    both = Launch("both", (torn.parts[0], adds.parts[0]))
    assert "race" in {f.kind for f in sanitize(both, TOY, filled={"x", "y", "index"})}


def test_an_indexed_store_makes_no_row_initialised():
    launch = pick_launch(TOY, 4, 8, store=True)
    k = KernelBuilder("reader", TOY)
    y = k.tensor("y", "fp32", 32)
    z = k.tensor("z", "fp32", 32)
    through(k, z.region(), y.region())
    found = sanitize(Launch("both", (*launch.parts, Part(k.finish()))), TOY)
    assert {f.kind for f in found} == {"uninitialised-read", "race"}


def test_a_copy_by_index_touches_at_most_its_rows():
    few = pick_launch(TOY, 1000, 8)
    many = pick_launch(TOY, 4, 8)
    assert analyse(few, TOY).memory_read_bytes == 8 * 32 + 8 * 4
    assert analyse(many, TOY).memory_read_bytes == 4 * 32 + 8 * 4
    assert analyse(many, TOY).path_bytes["GM", "UB"] == 8 * 32 + 8 * 4
    row = Buffer("q", "UB", "fp32", 8)
    table = Buffer("x", "GM", "fp32", 8000)
    i = Buffer("i", "UB", "int32", 1, address=64)
    plain = data_copy(TOY, row.region(), table.region(0, 8))
    picked = data_copy(TOY, row.region(), table.region(0, 8), index=i.region(), pitch=8, bound=1000)
    assert instruction_cost(TOY, plain, ALONE) == instruction_cost(TOY, picked, ALONE)


def test_the_rows_must_lie_inside_the_tensor():
    k = KernelBuilder("far", TOY)
    x = k.tensor("x", "fp32", 80)
    q = k.buffer("q", "UB", "fp32", 8)
    i = k.buffer("i", "UB", "int32", 1)
    k.copy_row(q.region(), x.region(8, 8), i.region(), 8, 10)
    with pytest.raises(CapacityError, match=r"elements 0..79 of x; got 8..87"):
        k.finish()
    program = Program("far", tuple(k._buffers), tuple(k._body))
    assert "out-of-bounds" in {f.kind for f in sanitize(program, TOY)}


# -- bad inputs ------------------------------------------------------------------------------------

BF16_UB = Buffer("q", "UB", "bf16", 64).region()
UB16 = Buffer("t", "UB", "fp16", 4096)
UB32 = Buffer("u", "UB", "fp32", 4096)
GM32 = Buffer("g", "GM", "fp32", 4096)
GM8 = Buffer("g8", "GM", "int8", 4096)
UB8 = Buffer("u8", "UB", "int8", 4096)
INDEX = Buffer("i", "UB", "int32", 8)
ROW = UB16.region(0, (2, 128))
BLOCK = UB16.region(0, (16, 16))
R32 = UB32.region(0, 8)
PICK = {"index": INDEX.region(0, 1), "pitch": 8, "bound": 4}

G32 = GM32.region(0, 8)
copy = partial(data_copy, TOY)
compute = partial(vector, TOY)
CALLS = {
    "bf16 copied on the 910A": lambda: data_copy(
        FIRST, BF16_UB, Buffer("x", "GM", "bf16", 64).region()
    ),
    "bf16 added on the 910A": lambda: vector(FIRST, "vadd", *[lanes("bf16", 64)] * 3),
    "bf16 multiplied on the 910A": lambda: FIRST.macs_per_cycle("bf16"),
    "a format that is none": lambda: numpy_type("fp8"),
    "whole numbers multiplied on the Toy": lambda: multiply_whole_numbers(TOY),
    "whole numbers multiplied on the 910B2": lambda: multiply_whole_numbers(SPLIT),
    "op as one": lambda: compute("vcmp", ROW, ROW, ROW),
    "gt, ge, lt, le, eq, ne; got 'lte'": lambda: compute("vcmp", ROW, ROW, ROW, compare="lte"),
    "no comparison": lambda: compute("vadd", ROW, ROW, ROW, compare="gt"),
    "2 source regions": lambda: compute("vcmp", ROW, ROW, ROW, ROW, compare="gt"),
    "a condition tile or a mask": lambda: compute("vsel", ROW, ROW, ROW, ROW, mask=3),
    "2 or 3 source regions": lambda: compute("vsel", ROW, *[ROW] * 4),
    "to whole numbers; got 'floor' to fp16": lambda: compute(
        "vconv", ROW, UB32.region(0, (4, 64)), rounding="floor"
    ),
    "only in a vconv": lambda: compute("vadd", ROW, ROW, ROW, rounding="floor"),
    "rint, floor, ceil, trunc": lambda: compute(
        "vconv", INDEX.region(0, (1, 8)), UB32.region(0, (1, 8)), rounding="up"
    ),
    "n blocks (n, 16)": lambda: compute("vbrcb", UB16.region(0, (8, 8)), UB16.region(0, 8)),
    "n neighbours": lambda: compute("vbrcb", UB16.region(0, (8, 16)), UB16.region(0, 8, (2,))),
    "give each source element a block": lambda: compute(
        "vbrcb", UB16.region(0, (8, 16), (24, 1)), UB16.region(0, 8)
    ),
    "no attributes": lambda: compute("vbrcb", UB16.region(0, (8, 16)), UB16.region(0, 8), mask=1),
    "one block": lambda: compute("vtranspose", *[UB16.region(0, (32, 16))] * 2),
    "alike": lambda: compute("vtranspose", UB16.region(0, (1, 16, 16)), BLOCK),
    "whole blocks": lambda: compute("vtranspose", BLOCK, UB16.region(0, (16, 16), (24, 1))),
    "one number format": lambda: vector(
        SPLIT, "vtranspose", BLOCK, Buffer("b", "UB", "bf16", 256).region(0, (16, 16))
    ),
    "only beside an index; got pitch, bound": lambda: copy(R32, G32, pitch=8, bound=2),
    "a bound of 1 or more rows; got pitch=8, bound=0": lambda: copy(
        R32, G32, index=INDEX.region(0, 1), pitch=8
    ),
    "a pitch of 0 or more": lambda: copy(R32, G32, **{**PICK, "pitch": -8}),
    "one int32 element in UB; got 2 int32 in UB": lambda: copy(
        R32, G32, **{**PICK, "index": INDEX.region(0, 2)}
    ),
    "got 1 fp32 in UB": lambda: copy(R32, G32, **{**PICK, "index": UB32.region(0, 1)}),
    "got 1 int32 in GM": lambda: copy(
        R32, G32, **{**PICK, "index": Buffer("gi", "GM", "int32", 8).region(0, 1)}
    ),
    "1 or 2 source regions": lambda: check_instruction(
        TOY, Instruction("data_copy", "MTE2", R32, (G32,) * 3)
    ),
    "elements of 2 or 4 bytes": lambda: compute("vbrcb", UB8.region(0, (8, 32)), UB8.region(0, 8)),
    "elements of 2 bytes; got fp32": lambda: compute("vtranspose", *[UB32.region(0, (16, 16))] * 2),
    "operands in UB; got GM": lambda: compute(
        "vtranspose", BLOCK, Buffer("g", "GM", "fp16", 256).region(0, (16, 16))
    ),
    "operands in UB; got L0C": lambda: compute(
        "vadd", *[UB32.region(0, (1, 8))] * 2, Buffer("c", "L0C", "fp32", 8).region(0, (1, 8))
    ),
    "on the path UB->GM; got 'add', GM->UB": lambda: copy(R32, G32, atomic="add"),
    "got 'max'": lambda: copy(G32, R32, atomic="max"),
    "an atomic add in fp32, fp16, int32; got int8": lambda: copy(
        GM8.region(0, 32), UB8.region(0, 32), atomic="add"
    ),
    "between GM and UB; got GM->L1": lambda: copy(
        Buffer("l", "L1", "fp32", 8).region(), G32, **PICK
    ),
    "255 repeats of 8 blocks, 2040; got 2041 blocks": lambda: vector(
        SPLIT,
        "vbrcb",
        Buffer("b", "UB", "fp16", 2041 * 16).region(0, (2041, 16)),
        Buffer("s", "UB", "fp16", 2048, address=65536 + 1024).region(0, 2041),
    ),
    "multiples of 32": lambda: compute("vtranspose", BLOCK, UB16.region(8, (16, 16))),
}


def test_what_is_refused_says_what_is_needed():
    assert_messages("isa", "test_isa_additions", CALLS)
