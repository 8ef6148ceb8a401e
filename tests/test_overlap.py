"""The sanitizer's finding `overlap`: against an oracle that follows every byte by hand."""

import pytest
from hypothesis import given, settings, strategies as st

from ascend_lab.errors import AscendLabError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Instruction, parse_program, sanitize
from ascend_lab.machine.isa.instructions import check_instruction
from ascend_lab.machine.isa.sanitizer import overlaps, sources_in_same_memory

TOY = load_chip("Toy")
HEAD = "program raw\nbuffer t UB fp16 2048 slots=1 at=0 pitch=0\n"
HEAD += (
    "buffer w UB fp32 1024 slots=1 at=0 pitch=0\nbuffer far UB fp16 512 slots=1 at=8192 pitch=0\n"
)


def instruction(text: str) -> Instruction:
    ((found, _),) = parse_program(f"{HEAD}V {text}\n").instructions()
    return found


FAULTS = (
    "vadds t[16 | 1:128,128:1] <- t[0 | 1:128,128:1] scalar=1.0",  # a block on
    "vadds t[0 | 1:128,128:1] <- t[16 | 1:128,128:1] scalar=1.0",  # a block back
    "vadds t[0 | 1:17,17:1] <- t[16 | 1:17,17:1] scalar=1.0",  # the last lane alone
    "vadds t[16 | 1:17,17:1] <- t[0 | 1:17,17:1] scalar=1.0",
    "vadds t[128 | 4:128,128:1] <- t[0 | 4:128,128:1] scalar=1.0",  # a repeat on
    "vadd t[64 | 2:64,64:1] <- far[0 | 2:64,64:1], t[0 | 2:64,64:1]",  # the second source
    "vadd t[0 | 4:128,128:1] <- t[0 | 4:128,128:1], t[0 | 4:0,128:1]",  # a row for all repeats
    "vmuls t[0 | 1:64,4:16,16:1] <- t[0 | 1:64,4:32,16:1] scalar=2.0",  # blocks packed in place
    "vconv w[0 | 2:64,64:1] <- t[0 | 2:64,64:1]",  # repeat 0 writes what 1 reads
    "vcadd t[16 | 4:1,1:1] <- t[0 | 4:128,128:1]",
    "vsel t[16 | 1:128,128:1] <- far[0 | 1:128,128:1], far[0 | 1:128,128:1], t[0 | 1:128,128:1]",
    "vbrcb t[0 | 16:16,16:1] <- t[0 | 16:1]",  # block 0 of repeat 0 covers element 8 of repeat 1
)
FINE = (
    "vadds t[0 | 4:128,128:1] <- t[0 | 4:128,128:1] scalar=1.0",  # in place
    "vadds t[512 | 4:128,128:1] <- t[0 | 4:128,128:1] scalar=1.0",  # apart
    "vadds t[16 | 2:128,4:32,16:1] <- t[0 | 2:128,4:32,16:1] scalar=1.0",  # between its blocks
    "vadd t[0 | 2:64,64:1] <- t[0 | 2:64,64:1], t[128 | 2:64,64:1]",
    "vconv t[0 | 2:64,64:1] <- w[0 | 2:64,64:1]",  # narrower, in place
    "vcadd t[0 | 4:1,1:1] <- t[0 | 4:128,128:1]",
    "vdup t[0 | 4:128,128:1] scalar=0.0",
    "vadds t[16 | 1:128,128:1] <- t[0 | 1:128,128:1] scalar=1.0 mask=65535",  # 16 lanes, apart
)


def found(ins, **env):
    return list(overlaps(ins, sources_in_same_memory(ins), env))


@pytest.mark.parametrize("text", FAULTS)
def test_a_destination_that_partly_overlaps_its_source_is_found(text):
    program = parse_program(f"{HEAD}V vdup t[0 | 16:128,128:1] scalar=0.0\nV {text}\n")
    (finding,) = [f for f in sanitize(program, TOY, filled=[]) if f.kind == "overlap"]
    assert "begins where its source does" in finding.message
    assert "UB byte" in finding.message
    assert finding.instruction.startswith("V")


@pytest.mark.parametrize("text", FINE)
def test_in_place_and_apart_is_fine(text):
    assert not found(instruction(text))


def test_slots_and_buffers_that_share_bytes_are_told_apart():
    buffers = "buffer t UB fp16 128 slots=2 at=0 pitch=256\n"
    buffers += "buffer u UB fp16 64 slots=1 at=128 pitch=0"
    row = "V vadds t[i | 32 | 1:64,64:1] <- u[0 | 1:64,64:1] scalar=1.0"
    program = parse_program(f"program p\n{buffers}\nloop i 2:\n  {row}\n")
    ((ins, _),) = program.instructions()
    assert [len(found(ins, i=i)) for i in range(2)] == [1, 0]


def walk(region):
    """Yield (repeat, lane in all, first byte)."""
    per = region.elements // region.sizes[0]
    for flat in range(region.elements):
        rest = flat
        place = region.offset.const
        for size, stride in zip(reversed(region.sizes), reversed(region.strides), strict=True):
            rest, digit = divmod(rest, size)
            place += digit * stride
        yield flat // per, flat, region.buffer.address + place * region.buffer.itemsize


def oracle(ins: Instruction) -> bool:
    """Walk all elements of both sides, byte by byte, in the order of the repeats."""

    mask = ins.attr("mask", None)
    per = ins.dst.elements // ins.dst.sizes[0]
    dst = [x for x in walk(ins.dst) if mask is None or mask >> x[1] % per & 1]
    for src in ins.srcs:
        starts = ins.dst.byte_at({}) == src.byte_at({})
        for repeat, lane, at in walk(src):
            if mask is not None and not mask >> lane % per & 1:
                continue
            for other, which, place in dst:
                if abs(at - place) >= 2:
                    continue
                if not starts or other < repeat or (other == repeat and which != lane):
                    return True
    return False


@settings(max_examples=150)
@given(
    repeats=st.integers(1, 3),
    blocks=st.integers(1, 3),
    steps=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    at=st.lists(st.integers(0, 8), min_size=2, max_size=2),
    mask=st.none() | st.integers(1, 2**16 - 1),
)
def test_findings_are_those_of_the_oracle(repeats, blocks, steps, at, mask):
    regions = [
        f"t[{16 * first} | {repeats}:{16 * outer},{blocks}:{16 * inner},16:1]"
        for first, outer, inner in zip(at, steps[:2], steps[2:], strict=True)
    ]
    end = "" if mask is None else f" mask={mask}"
    ins = instruction(f"vadds {regions[0]} <- {regions[1]} scalar=1.0{end}")
    try:
        check_instruction(TOY, ins)
    except AscendLabError:
        return
    places = [x[2] for x in walk(ins.dst)]
    if len(set(places)) == len(places):  # it writes no byte twice
        assert bool(found(ins)) == oracle(ins)
