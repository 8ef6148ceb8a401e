"""Folds one axis on many cores: each core folds a part, then the partial results are folded.

A fold is a sum or another reduction of an axis to one number. There are four ways:

    two_pass   partial folds, then one fold of all of them                  2 phases
    tree       partial folds, then rounds that halve their number           1 + log2(parts) phases
    atomic     each core adds its partial sum to the result, all at once    2 phases
    chain      partial sums, then one core after another adds its own row   2 + parts phases

Between two phases all cores wait for each other. `kept` is the fold without partial results: the
cores divide the axes that are not folded. Source of rfactor: Suriana, Adams, Kamil, "Parallel
associative reductions in Halide", CGO 2017.

In `atomic` and `chain` device memory does the last addition (copies with atomic add), to a result
of zeros; a sum in fp32 that is stored as fp16 is converted in one phase more. The order in which
`atomic` adds, and so its rounding, may change from run to run; `chain` has a fixed order, for which
the cores wait.
"""

from collections.abc import Iterator
from dataclasses import replace

from ascend_lab.errors import ScheduleError
from ascend_lab.machine import isa
from ascend_lab.machine.chip import BLOCK_BYTES, Chip
from ascend_lab.operators.dsl import (
    Schedule,
    Tensor,
    create_schedule,
    lower,
    rfactor,
    split,
    stages,
)
from ascend_lab.operators.dsl.auto_fuse import Phase, fuse_stages, merge_axes, row_axes
from ascend_lab.operators.dsl.auto_tile import arrange, largest


def vector_cores(chip: Chip) -> int:
    """Return the cores of a chip that run vector programs."""
    return chip.cores_of("core" if chip.combined else "vector")


def kept(output: Tensor, chip: Chip, cores: int | None = None) -> Schedule:
    """Return the schedule in which `cores` divide the axes that stay, in blocks of 32 bytes.

    before: `y[i] = fold over k of x[i, k]`   after: core c: `y[i in part c] = fold over k`

    Raises `ScheduleError` for another number of folds than one, or of cores than the chip has.
    """
    s, _, phase = _fold_of(output, chip)
    return _scheduled(s, phase, core_limit(chip, cores))


def two_pass(
    output: Tensor, chip: Chip, cores: int | None = None, *, last_cores: int | None = None
) -> Schedule:
    """Return the schedule that folds a part of the axis per core, then the partial results.

    before: `y[i] = fold over k`
    after: core c: `y_rf[c, i] = fold over k in part c`, then `y[i] = fold over c of y_rf[c, i]`

    `last_cores` share the axes that stay in the second pass; default: all of the chip. Raises
    `ScheduleError` as `kept`, and if `cores` does not divide the axis.
    """
    s, _, phase = _partials(output, chip, core_limit(chip, cores))
    return _scheduled(s, phase, core_limit(chip, last_cores))


def tree(output: Tensor, chip: Chip, cores: int | None = None) -> Schedule:
    """Return the schedule that folds a part per core, then pairs of partial results, and so on.

    before: `y[i] = fold over c of y_rf[c, i]`
    after: `y_rf_2[p, i] = fold over c in 2 of y_rf[2 p + c, i]`, half as many each round

    Rounds go on while the number is even and more than 2. Raises what `two_pass` raises.
    """
    parts = core_limit(chip, cores)
    s, fold, phase = _partials(output, chip, parts)
    while parts > 2 and parts % 2 == 0:
        s, partial = _factored(s, fold, parts // 2)
        parts //= 2
        s = _scheduled(s, Phase(partial), parts)
    return _scheduled(s, phase, vector_cores(chip))


# -- pieces of schedules ------------------------------------------------------------------------
def core_limit(chip: Chip, cores: int | None) -> int:
    """Return `cores`, or all vector cores; raise `ScheduleError` if the chip has fewer."""
    chip_cores = vector_cores(chip)
    if cores is None:
        return chip_cores
    if not 1 <= cores <= chip_cores:
        raise ScheduleError(
            f"1 to {chip_cores} vector cores on {chip.name}", str(cores), "choose one"
        )
    return cores


def _fold_of(output: Tensor, chip: Chip) -> tuple[Schedule, str, Phase]:
    """Return the fused schedule of an output, the name of its only fold, and its phase."""
    s, phases = fuse_stages(create_schedule(output, chip))
    folds = [x.name for x in s.state.stages if isinstance(x, stages.Stage) and x.fold]
    if len(folds) != 1 or len(phases) != 1:
        needed = f"{output.label}: one fold and elementwise operations, in one phase"
        got = f"{len(folds)} folds, {len(phases)} phases"
        raise ScheduleError(needed, got, "schedule it by hand with rfactor")
    return s, folds[0], phases[0]


def _scheduled(s: Schedule, phase: Phase, cores: int) -> Schedule:
    """Return the schedule with the default nest of a phase, made for fewer cores."""
    narrow_chip = replace(s.chip, core_count=cores, vector_cores_per_core=1)
    narrow = merge_axes(replace(s, chip=narrow_chip), phase)
    rows = row_axes(narrow.state, phase)
    tile = largest(narrow, phase, rows)
    if tile is None:
        needed = f"{phase.root}: a tile that fits in UB"
        got = f"{s.chip.buffers['UB']} bytes on {s.chip.name}"
        raise ScheduleError(needed, got, "reshape the tensor so that an axis can be cut")
    return replace(arrange(narrow, phase, rows, tile), chip=s.chip)


def _partials(output: Tensor, chip: Chip, parts: int) -> tuple[Schedule, str, Phase]:
    """Return a schedule whose first phase folds one of `parts` equal parts of the axis per core."""
    s, fold, phase = _fold_of(output, chip)
    s = merge_axes(s, phase)
    s, partial = _factored(s, fold, parts)
    return _scheduled(s, Phase(partial), parts), fold, phase


def _factored(s: Schedule, fold: str, parts: int) -> tuple[Schedule, str]:
    """Return the schedule with a fold cut into `parts` partial folds, and the name of these."""
    stage = s.state.stage(fold)
    axis = max(stage.reduce, key=lambda a: a.extent)
    if axis.extent % parts:
        needed = f"{fold}: a number of parts that divides {axis.extent}"
        raise ScheduleError(needed, str(parts), "use fewer cores, or pad the axis")
    earlier_names = {x.name for x in s.state.stages}
    s = split(s, fold, axis.name, axis.extent // parts)
    s = rfactor(s, fold, f"{axis.name}_o")
    return s, next(x.name for x in s.state.stages if x.name not in earlier_names)


# -- sums in memory --------------------------------------------------------------------------------
def atomic(output: Tensor, chip: Chip, cores: int | None = None) -> isa.Kernel:
    """Return the kernel in which memory adds up the partial sums, in no fixed order.

    before: `y_rf[c, i] = sum over k in part c`, then `y[i] = sum over c`
    after: `y[i] = 0`, then core c: `y[i] += sum over k in part c`

    Raises `ScheduleError` as `two_pass`, and for folds that are no sums.
    """
    partial_launch, target, last_launches = _pieces(output, chip, core_limit(chip, cores))
    added = tuple(_adding(part, partial_launch.name, target) for part in partial_launch.parts)
    phases = (_zeros(chip, target), isa.Launch(f"{partial_launch.name}_add", added), *last_launches)
    return isa.Kernel(output.label, phases)


def chain(output: Tensor, chip: Chip, cores: int | None = None) -> isa.Kernel:
    """Return the kernel in which the cores add their partial sums one after another.

    before: `y[i] = sum over c of y_rf[c, i]`
    after: `y[i] = 0`, then for c = 0, 1, ...: core c alone: `y[i] += y_rf[c, i]`

    Raises what `atomic` raises.
    """
    parts = core_limit(chip, cores)
    partial_launch, target, last_launches = _pieces(output, chip, parts)
    k = isa.KernelBuilder("turn", chip)  # core c adds row c of the partial sums to the target
    target_tensor = k.tensor(target.name, target.dtype, target.elements)
    source = k.tensor(partial_launch.name, target.dtype, target.elements * parts)
    row = k.param("c", parts) * target.elements
    width = min(target.elements, chip.buffers["UB"] // 2 // target.itemsize)
    tile = k.queue("row", "UB", target.dtype, width, src="MTE2", dst="MTE3", depth=1)
    for start, size, pad in _runs(target, width):
        k.copy(tile.alloc().region(0, size), source.region(row + start, size), pad=pad)
        tile.enqueue()
        loaded = tile.dequeue().region(0, size)
        k.copy(target_tensor.region(start, size), loaded, pad=pad, atomic="add")
        tile.free()
    turn = k.finish()
    turns = []
    for core in range(parts):
        binding = isa.binding_of({"c": core})
        turns.append(isa.Launch(f"turn_{core}", (isa.Part(turn, (binding,)),)))
    return isa.Kernel(output.label, (partial_launch, _zeros(chip, target), *turns, *last_launches))


def _pieces(
    output: Tensor, chip: Chip, parts: int
) -> tuple[isa.Launch, isa.Buffer, tuple[isa.Launch, ...]]:
    """Return the launch of partial sums, the tensor they add up to, and the launches after it."""
    schedule = two_pass(output, chip, parts)
    fold = next(x for x in schedule.state.stages if isinstance(x, stages.Stage) and x.fold)
    if fold.fold != "sum":
        raise ScheduleError(f"{fold.name}: a sum, which memory can add", fold.fold, "use two_pass")
    partial_launch = lower(schedule).phases[0]
    # with one part, the second phase has a single partial sum, which it only converts
    single_part = lower(two_pass(output, chip, 1))
    # if the output is the fold itself, sums are stored as they are, without that second phase
    output_stage = next(x for x in schedule.state.stages if x.output)
    is_sum_stored = f"{output_stage.name}_rf" == fold.name
    target_name = output.label if is_sum_stored else fold.name
    target = next(tensor for tensor in single_part.tensors if tensor.name == target_name)
    total = target if is_sum_stored else replace(target, name=f"{target.name}_total")
    block = BLOCK_BYTES // target.itemsize
    if chip.combined and target.elements % block:
        needed = f"a result of whole 32-byte blocks ({block} elements) on {chip.name}"
        raise ScheduleError(needed, f"{target.elements} elements", "pad it, or use two_pass")
    if is_sum_stored:
        return partial_launch, total, ()
    names = {target.name: total.name}
    last_launches = tuple(isa.renamed(launch, names) for launch in single_part.phases[1:])
    return partial_launch, total, last_launches


def _adding(part: isa.Part, name: str, target: isa.Buffer) -> isa.Part:
    """Return a part that adds to `target` what it stored in its own row of tensor `name`."""
    partial_sums = next(b for b in part.program.tensors if b.name == name)

    def node(n: isa.Node) -> isa.Node:
        """Return a node that adds to the target if it stored partial sums."""
        if isinstance(n, isa.Loop):
            return replace(n, body=tuple(map(node, n.body)))
        if n.dst is None or n.dst.buffer != partial_sums:
            return n
        # the row of this core begins at a multiple of the target's size, which is taken off
        terms = [(loop, step) for loop, step in n.dst.offset.terms if step % target.elements]
        offset = isa.Affine(n.dst.offset.const % target.elements, tuple(terms))
        target_region = replace(n.dst, buffer=target, offset=offset)
        return replace(n, dst=target_region, attrs=(*n.attrs, ("atomic", "add")))

    program = part.program
    buffers = tuple(target if b == partial_sums else b for b in program.buffers)
    body = tuple(map(node, program.body))
    return replace(part, program=replace(program, buffers=buffers, body=body))


def _zeros(chip: Chip, target: isa.Buffer) -> isa.Launch:
    """Return the launch in which one core fills the target with zeros."""
    k = isa.KernelBuilder("zeros", chip)
    target_tensor = k.tensor(target.name, target.dtype, target.elements)
    lanes = chip.vector_bytes_per_repeat // target.itemsize
    repeats = min(-(-target.elements // lanes), 64)
    tile = k.queue("zero", "UB", target.dtype, repeats * lanes, src="V", dst="MTE3", depth=1)
    k.vector("vdup", tile.alloc().region(0, (repeats, lanes)), scalar=0.0)
    tile.enqueue()
    zero = tile.dequeue()
    for start, size, pad in _runs(target, repeats * lanes):
        k.copy(target_tensor.region(start, size), zero.region(0, size), pad=pad)
    tile.free()
    return isa.as_launch(k.finish())


def _runs(target: isa.Buffer, width: int) -> Iterator[tuple[int, int, bool]]:
    """Yield start and size of pieces of a tensor, and whether one ends inside a 32-byte block."""
    for start in range(0, target.elements, width):
        size = min(width, target.elements - start)
        yield start, size, size * target.itemsize % BLOCK_BYTES > 0
