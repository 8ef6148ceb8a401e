"""Rules a whole program must keep; each error gives needed, got and a remedy."""

from __future__ import annotations

from ascend_lab.chip import Chip
from ascend_lab.errors import CapacityError, PathError, ProgramError
from ascend_lab.isa.indexed import reach_of
from ascend_lab.isa.memory import Ranges, Region
from ascend_lab.isa.program import Instruction, Loop, Node, Program


def check_program(chip: Chip, program: Program) -> Program:
    """Return `program` if every access stays inside its buffer and all cores of a kind can run it.

    Raises `CapacityError` with the element touched and the size, `PathError` for a mix of cube and
    vector work on a chip whose cores are split, `ProgramError` for names used twice or unknown.
    """
    _check_names(program)
    units = set()
    for instruction, ranges in program.scoped():
        if instruction.event is not None:
            continue
        for region in instruction.regions:
            check_bounds(reach_of(instruction, region), ranges, instruction.op)
        if instruction.op not in ("barrier", "scalar"):
            units.add(unit_of(chip, instruction))
    if len(units - {"core"}) > 1:
        raise PathError(
            f"{program.name}: cube and vector work in separate programs on {chip.name}",
            "both in one program",
            "exchange the data through GM between two programs",
        )
    return program


def unit_of(chip: Chip, instruction: Instruction) -> str:
    """Return which kind of core runs it: "core" on coupled chips, else "cube" or "vector"."""
    if chip.combined:
        return "core"
    if instruction.op == "mmad":
        return "cube"
    if instruction.pipe == "V" or instruction.dst is None or not instruction.srcs:
        return "vector"
    return chip.path(instruction.srcs[0].space, instruction.dst.space).unit


def program_unit(chip: Chip, program: Program) -> str:
    """Return the kind of core a program runs on ("core", "cube" or "vector")."""
    for instruction, _ in program.instructions():
        if instruction.event is None and instruction.op not in ("barrier", "scalar"):
            return unit_of(chip, instruction)
    return "core" if chip.combined else "cube"


def check_bounds(region: Region, ranges: Ranges, op: str) -> None:
    """Raise `CapacityError` if the region leaves its buffer for some loop values."""
    for name, _ in (*region.offset.terms, *region.slot.terms):
        if name not in ranges:
            raise ProgramError(
                f"{op}: loop variables of the loops around it ({', '.join(ranges) or 'none'})",
                name,
                "move the instruction into the loop",
            )
    low, high = region.extent(ranges)
    if low < 0 or high >= region.buffer.elements:
        raise CapacityError(
            f"{op}: elements 0..{region.buffer.elements - 1} of {region.buffer.name}",
            f"{low}..{high}",
            "check offset, tile size and loop count",
        )


def _check_names(program: Program) -> None:
    names = [b.name for b in program.buffers]
    if len(set(names)) != len(names):
        raise ProgramError(f"{program.name}: one name per buffer", str(sorted(names)), "rename")
    _check_loops(program.name, program.body, frozenset(name for name, _ in program.params))


def _check_loops(name: str, nodes: tuple[Node, ...], outer: frozenset[str]) -> None:
    for node in nodes:
        if isinstance(node, Loop):
            if node.var in outer:
                raise ProgramError(
                    f"{name}: a new name for a loop inside {', '.join(sorted(outer))}",
                    node.var,
                    "the inner loop would hide the outer one",
                )
            _check_loops(name, node.body, outer | {node.var})
