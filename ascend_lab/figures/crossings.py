"""Which tensors cross which level of memory on their way to the vector unit and back."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from ascend_lab.chip import Chip
from ascend_lab.isa import Kernel, Launch
from ascend_lab.sim.traffic import Traffic, analyse


@dataclass(frozen=True, slots=True)
class Crossing:
    """An operand of a vector instruction, all its tiles together: up to the unit or down from it.

    `tensor` is its name in GM, "" if it lives in UB only. Bytes of all cores: between UB and the
    vector unit, between L2 and UB, between memory and L2.
    """

    tensor: str
    up: bool
    port_bytes: int
    path_bytes: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """A vector operation of a nest, all its tiles together: UB buffers and bytes per operand.

    The last entry of both is the result.
    """

    op: str
    buffers: tuple[str, ...]
    sizes: tuple[int, ...]


def operations(launch: Launch) -> list[Operation]:
    """Return the vector operations of a launch in order.

    Instructions on other parts of the same buffers belong to one operation; one on the very same
    part is the next operation.
    """
    found: dict[tuple[Any, ...], Operation] = {}
    for part in launch.parts:
        seen: Counter[str] = Counter()
        for step, times in part.program.instructions():
            if step.pipe != "V" or step.dst is None or not step.srcs:
                continue
            regions = (*step.srcs, step.dst)
            names = tuple(r.buffer.name for r in regions)
            sizes = tuple(r.size_bytes * times * part.core_count for r in regions)
            place = f"{step.op} {names} {step.dst}"
            key = (step.op, *names, seen[place])
            seen[place] += 1
            old = found.get(key, Operation(step.op.removeprefix("v"), names, (0,) * len(names)))
            sums = tuple(a + b for a, b in zip(old.sizes, sizes, strict=True))
            found[key] = replace(old, sizes=sums)
    return list(found.values())


def crossings(kernel: Kernel, chip: Chip) -> list[Crossing]:
    """Return the operands and the result of every vector operation, in order."""
    return [found for launch in kernel.phases for found in _of_launch(launch, chip)]


def _of_launch(launch: Launch, chip: Chip) -> list[Crossing]:
    traffic = analyse(launch, chip)
    loads, stores = _copies(launch, "MTE2"), _copies(launch, "MTE3")
    ops = operations(launch)
    last = {op.buffers[-1]: number for number, op in enumerate(ops)}
    out: list[Crossing] = []
    for number, op in enumerate(ops):
        for name, size in zip(op.buffers[:-1], op.sizes, strict=False):
            out.append(_in_memory(Crossing("", True, size), loads.pop(name, None), traffic))
        result = op.buffers[-1]
        stored = stores.get(result) if last[result] == number else None
        out.append(_in_memory(Crossing("", False, op.sizes[-1]), stored, traffic))
    return out


def _in_memory(found: Crossing, copied: tuple[str, int] | None, traffic: Traffic) -> Crossing:
    """Add what a tile's copy from or to GM moves, if it has one."""
    if copied is None:
        return found
    tensor, size = copied
    share = traffic.fresh.get(tensor, 1.0) if found.up else float(traffic.memory_write_bytes > 0)
    return replace(found, tensor=tensor, path_bytes=size, memory_bytes=round(share * size))


def _copies(launch: Launch, pipe: str) -> dict[str, tuple[str, int]]:
    """Return, by UB buffer, the GM tensor it is copied from or to, and the bytes of all cores."""
    found: dict[str, tuple[str, int]] = {}
    for part in launch.parts:
        for step, times in part.program.instructions():
            if step.pipe == pipe and step.dst is not None and step.srcs:
                ends = (step.srcs[0].buffer.name, step.dst.buffer.name)
                tensor, tile = ends if pipe == "MTE2" else ends[::-1]
                before = found.get(tile, (tensor, 0))[1]
                size = min(step.dst.size_bytes, step.srcs[0].size_bytes)
                found[tile] = (tensor, before + size * times * part.core_count)
    return found
