"""Sums on many cores in which device memory does the last addition (copies with atomic add).

    atomic     each core adds its partial sum to the result, all at once       2 phases
    chain      partial sums, then one core after another adds its own row      2 + parts phases

Both begin with a result of zeros; a sum in fp32 that is stored as fp16 is converted in one phase
more. In which order `atomic` rounds is left to chance; `chain` has one order, and waits for it.
"""

from __future__ import annotations

from dataclasses import replace

from ascend_lab.chip import BLOCK_BYTES, Chip
from ascend_lab.dsl.cross_core import core_limit, two_pass
from ascend_lab.dsl.lower import lower
from ascend_lab.dsl.renaming import renamed
from ascend_lab.dsl.stages import Stage
from ascend_lab.dsl.tensor import Tensor
from ascend_lab.errors import ScheduleError
from ascend_lab.isa import (
    Affine,
    Buffer,
    Kernel,
    KernelBuilder,
    Launch,
    Loop,
    Node,
    Part,
    Program,
    as_launch,
    binding_of,
)


def atomic(output: Tensor, chip: Chip, cores: int | None = None) -> Kernel:
    """Return the kernel in which memory adds up the partial sums, in no fixed order.

    before: `y_rf[c, i] = sum over k in part c`, then `y[i] = sum over c`
    after: `y[i] = 0`, then core c: `y[i] += sum over k in part c`

    Raises `ScheduleError` as
    `two_pass`, and for folds that are no sums.
    """
    first, target, rest = _pieces(output, chip, core_limit(chip, cores))
    added = tuple(_adding(part, first.name, target) for part in first.parts)
    phases = (_zeros(chip, target), Launch(f"{first.name}_add", added), *rest)
    return Kernel(output.label, phases)


def chain(output: Tensor, chip: Chip, cores: int | None = None) -> Kernel:
    """Return the kernel in which the cores add their partial sums one after another.

    before: `y[i] = sum over c of y_rf[c, i]`
    after: `y[i] = 0`, then for c = 0, 1, ...: core c alone: `y[i] += y_rf[c, i]`

    Raises what `atomic` raises.
    """
    parts = core_limit(chip, cores)
    first, target, rest = _pieces(output, chip, parts)
    turn = _turn(chip, first.name, target, parts)
    turns = [Launch(f"turn_{c}", (Part(turn, (binding_of({"c": c}),)),)) for c in range(parts)]
    return Kernel(output.label, (first, _zeros(chip, target), *turns, *rest))


def _pieces(output: Tensor, chip: Chip, parts: int) -> tuple[Launch, Buffer, tuple[Launch, ...]]:
    """Return the launch of partial sums, the tensor they add up to, and the launches after it."""
    several = two_pass(output, chip, parts)
    fold = next(x for x in several.state.stages if isinstance(x, Stage) and x.fold)
    if fold.fold != "sum":
        raise ScheduleError(f"{fold.name}: a sum, which memory can add", fold.fold, "use two_pass")
    first = lower(several).phases[0]
    one = lower(two_pass(output, chip, 1))  # its second phase has one partial sum to convert
    direct = next(x for x in several.state.stages if x.output).name + "_rf" == fold.name
    target = next(t for t in one.tensors if t.name == (output.label if direct else fold.name))
    total = target if direct else replace(target, name=f"{target.name}_total")
    block = BLOCK_BYTES // target.itemsize
    if chip.combined and target.elements % block:
        raise ScheduleError(
            f"a result of whole 32-byte blocks ({block} elements) on {chip.name}",
            f"{target.elements} elements",
            "pad it, or use two_pass",
        )
    rest = () if direct else tuple(renamed(x, {target.name: total.name}) for x in one.phases[1:])
    return first, total, rest


def _adding(part: Part, name: str, target: Buffer) -> Part:
    """Return a part that adds to `target` what it stored in its own row of tensor `name`."""
    old = next(b for b in part.program.tensors if b.name == name)

    def node(n: Node) -> Node:
        if isinstance(n, Loop):
            return replace(n, body=tuple(map(node, n.body)))
        if n.dst is None or n.dst.buffer != old:
            return n
        inside = [(v, c) for v, c in n.dst.offset.terms if c % target.elements]
        offset = Affine(n.dst.offset.const % target.elements, tuple(inside))
        place = replace(n.dst, buffer=target, offset=offset)
        return replace(n, dst=place, attrs=(*n.attrs, ("atomic", "add")))

    program = part.program
    buffers = tuple(target if b == old else b for b in program.buffers)
    body = tuple(map(node, program.body))
    return replace(part, program=replace(program, buffers=buffers, body=body))


def _zeros(chip: Chip, target: Buffer) -> Launch:
    """Return the launch in which one core fills the target with zeros."""
    k = KernelBuilder("zeros", chip)
    goal = k.tensor(target.name, target.dtype, target.elements)
    lanes = chip.vector_bytes_per_repeat // target.itemsize
    repeats = min(-(-target.elements // lanes), 64)
    tile = k.queue("zero", "UB", target.dtype, repeats * lanes, src="V", dst="MTE3", depth=1)
    k.vector("vdup", tile.alloc().region(0, (repeats, lanes)), scalar=0.0)
    tile.enqueue()
    zero = tile.dequeue()
    for start in range(0, target.elements, repeats * lanes):
        size = min(repeats * lanes, target.elements - start)
        k.copy(goal.region(start, size), zero.region(0, size), pad=size * target.itemsize % 32 > 0)
    tile.free()
    return as_launch(k.finish())


def _turn(chip: Chip, name: str, target: Buffer, parts: int) -> Program:
    """Return the program with which core c adds row c of the partial sums to the target."""
    k = KernelBuilder("turn", chip)
    goal = k.tensor(target.name, target.dtype, target.elements)
    source = k.tensor(name, target.dtype, target.elements * parts)
    row = k.param("c", parts) * target.elements
    width = min(target.elements, chip.buffers["UB"] // 2 // target.itemsize)
    tile = k.queue("row", "UB", target.dtype, width, src="MTE2", dst="MTE3", depth=1)
    for start in range(0, target.elements, width):
        size = min(width, target.elements - start)
        pad = size * target.itemsize % 32 > 0
        k.copy(tile.alloc().region(0, size), source.region(row + start, size), pad=pad)
        tile.enqueue()
        k.copy(goal.region(start, size), tile.dequeue().region(0, size), pad=pad, atomic="add")
        tile.free()
    return k.finish()
