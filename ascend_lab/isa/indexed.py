"""Copies whose row is picked at run time: one int32 in UB times a pitch moves the GM side.

    GM address = offset + index * pitch,   0 <= index < bound

What such a copy touches is not known before it runs, so everything that looks at a program without
values (bounds, traffic, sanitizer) takes the whole range of rows it may touch.
"""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.errors import PathError, ProgramError
from ascend_lab.isa.memory import Region
from ascend_lab.isa.program import Instruction


def index_of(instruction: Instruction) -> Region | None:
    """Return the index operand of an indexed data_copy or scalar, None for the others."""
    if instruction.op not in ("data_copy", "scalar") or len(instruction.srcs) < 2:
        return None
    return instruction.srcs[1]


def reach_of(instruction: Instruction, region: Region) -> Region:
    """Return what `region` may touch: every row, for the GM side of an indexed copy.

    The rows become a new outermost axis of `bound` steps of `pitch` elements.
    """
    if region.space != "GM" or index_of(instruction) is None:
        return region
    bound, pitch = instruction.number("bound", 1), instruction.number("pitch")
    return replace(region, sizes=(bound, *region.sizes), strides=(pitch, *region.strides))


def check_index(instruction: Instruction, dst: Region, src: Region) -> None:
    """Raise a `ProgramError` child unless index, pitch and bound of a copy make sense."""
    op = instruction.op
    index, names = index_of(instruction), [name for name, _ in instruction.attrs]
    given = [name for name in ("pitch", "bound") if name in names]
    if index is None:
        if given:
            raise ProgramError(
                f"{op}: pitch and bound only beside an index", ", ".join(given), "add index="
            )
        return
    if {src.space, dst.space} != {"GM", "UB"}:
        raise PathError(
            f"{op}: an index between GM and UB", f"{src.space}->{dst.space}", "go through UB"
        )
    if index.space != "UB" or index.buffer.dtype != "int32" or index.elements != 1:
        raise ProgramError(
            f"{op}: an index of one int32 element in UB",
            f"{index.elements} {index.buffer.dtype} in {index.space}",
            "copy the indices to UB and take one element",
        )
    if len(given) != 2 or instruction.number("bound") < 1 or instruction.number("pitch") < 0:
        got = ", ".join(f"{name}={instruction.attr(name, 'none')}" for name in ("pitch", "bound"))
        raise ProgramError(
            f"{op}: a pitch of 0 or more elements and a bound of 1 or more rows", got, "mend it"
        )
