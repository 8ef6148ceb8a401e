"""The distinct kernels of a network as tuning tasks; whether a tuned one computes the same.

An operator is timed alone, on an L2 that holds those of its inputs of which the network finds most
there: the same state for every candidate, and for the default.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ascend_lab import errors
from ascend_lab.aoe.drive import Trial
from ascend_lab.compiler import Compiled, Task, evaluate, ir, lower as lowering, network, tasks
from ascend_lab.compiler.lower import (
    CONVOLUTIONS,
    PRODUCTS,
    Choice,
    Lowered,
    Piece,
    lower,
)
from ascend_lab.compiler.lower.conv import by_vector, conv_shape_of
from ascend_lab.compiler.lower.matmul import is_plain, is_turned
from ascend_lab.compiler.lower.piece import packed
from ascend_lab.compiler.lower.vector import mixed_blocks
from ascend_lab.compiler.rules import special_form
from ascend_lab.machine import isa, layout, sim
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.ops import formats, matmul

WARM_SHARE = 0.5
"""A tensor counts as held by L2 if at least this share of its bytes hits."""
NO_PARAMETERS = "it has no kernel and runs on the AI CPU, without parameters"


@dataclass(frozen=True, slots=True)
class Tunable:
    """An operator as a task: a kernel that occurs `count` times, and what L2 holds at its start.

    `unit` is "cube", "product" (a batch of them), "joint" (two convolutions added), "vector", or ""
    where there is nothing to tune, for the `reason` given.
    """

    name: str
    op: str
    piece: Piece
    chip: Chip
    count: int
    warm: frozenset[str]
    default_cycles: int
    unit: str
    reason: str = ""

    @property
    def problem(self) -> str:
        """Text that is equal for equal problems, whatever network they are in."""
        return f"{self.piece.key} warm {' '.join(sorted(self.warm))}"

    def cycles(self, kernel: isa.Kernel) -> int:
        """Return the cycles of a kernel for this operator, launch included."""
        return matmul.warm_cycles(kernel, self.chip, self.warm)

    def cycles_of(self, choice: Choice) -> int:
        """Return the cycles with a choice, launch included; raises what lowering raises."""
        return self.cycles(lower(self.piece, self.chip, choice).kernel)

    def bounded(
        self, lower_bound: int, trials: Sequence[Trial], size: int | None
    ) -> tuple[int, bool]:
        """Return cycles that no schedule beats, and whether the best trial is proven optimal.

        It is if all `size` points of the space ran, or if it reaches the `lower_bound`.
        """
        best = int(min([self.default_cycles, *(t.cost for t in trials)]))
        if sum(t.cost < math.inf for t in trials) == size:
            return best, True
        return min(lower_bound, best), best <= lower_bound


def operators_of(compiled: Compiled) -> tuple[Tunable, ...]:
    """Return the distinct kernels of a network, in order of their first occurrence."""
    groups: dict[str, list[tuple[Task, frozenset[str]]]] = {}
    lines = {op.name: op.timeline for op in network.simulate_graph(compiled).operators}
    for task in compiled.tasks:
        if task.lowered is not None:
            # A tensor named "w.0" is a part of "w": both count under the name in front of the dot.
            hits = lines[task.name].hits.items()
            warm = frozenset(n.partition(".")[0] for n, s in hits if s >= WARM_SHARE)
            groups.setdefault(task.piece.key, []).append((task, warm))
    return tuple(_operator(compiled.chip, group) for group in groups.values())


def _operator(chip: Chip, group: list[tuple[Task, frozenset[str]]]) -> Tunable:
    task = group[0][0]
    assert task.lowered is not None
    # Of 12 equal kernels, 11 may find their input in L2 and the first not: they are tuned for the
    # 11.
    warm = Counter(warm_names for _, warm_names in group).most_common(1)[0][0]
    kernel = task.lowered.kernel
    if isinstance(kernel, tasks.CpuKernel):
        unit = ""
        reason = NO_PARAMETERS
        cycles = tasks.time_cpu(kernel, chip).total_cycles
    else:
        unit, reason = unit_of(task.piece, chip, task.lowered)
        cycles = matmul.warm_cycles(kernel, chip, warm)
    return Tunable(task.name, task.op, task.piece, chip, len(group), warm, cycles, unit, reason)


def unit_of(piece: Piece, chip: Chip, lowered: Lowered | None = None) -> tuple[str, str]:
    """Return which tuner suits a piece, or "" and the reason why none does."""
    nodes = piece.graph.nodes
    op = nodes[0].op
    if why := _fixed(piece):
        return "", why
    if op in CONVOLUTIONS:
        if special_form(piece.graph, nodes):
            return "joint", ""
        if nodes[0].inputs[1] not in piece.constants:
            return "", "its weights are computed, not constant"
        shape = conv_shape_of(piece, nodes[0], piece.output.dtype)
        lowered = lowered or tasks.lowered_once(piece, chip)
        if by_vector(shape) and not _multiplied(lowered.kernel):
            return "", "a depthwise convolution on the vector unit has no parameters"
        return "cube", ""
    # Each unit has a tuner of its own; what follows sorts operators, special kernels first.
    if op in PRODUCTS:
        if is_turned(nodes[0], [piece.type(n) for n in nodes[0].inputs]):
            return "", "a product a^T b has a hand-written kernel without parameters"
        return ("cube" if is_plain(piece) else "product"), ""
    if mixed_blocks(piece):
        return "", "bytes beside wider numbers: they change blocks in kernels without parameters"
    lowered = lowered or tasks.lowered_once(piece, chip) if op == "layer_norm" else None
    by_cube = lowered is not None and _multiplied(lowered.kernel)
    if all(n.op in ir.MOVES for n in nodes) or by_cube or lowering.by_template(piece, chip):
        return "", "it has a hand-written kernel without parameters"
    return "vector", ""


def _fixed(piece: Piece) -> str:
    """Return why a kernel with convolutions has nothing to choose; "" if it may."""
    nodes = piece.graph.nodes
    if special := special_form(piece.graph, nodes):
        return special[0].no_tuning_reason
    return ""


def _multiplied(kernel: isa.Kernel) -> bool:
    """Tell whether the cube works in a kernel."""
    programs = (core_part.program for phase in kernel.phases for core_part in phase.parts)
    return any(
        instruction.op == "mmad"
        for program in programs
        for instruction, _ in program.instructions()
    )


# -- does a tuned kernel compute what the default one computes? ----------------------------------

Values = np.ndarray
POSITIVE = frozenset(("log", "sqrt", "rsqrt", "pow"))
"""Operators that take positive numbers only."""
TOLERANCE = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 3e-2}
"""Share of the largest value by which results may differ: sums in another order, then rounded."""


def agree(operator: Tunable, choice: Choice, seed: int = 0) -> str:
    """Return "" if the chosen kernel gives the default's values, else what differs.

    Both get the same random inputs. The operators' definitions are computed first, which is
    quicker: only a kernel that is not close to these is compared with the default one.
    """
    piece = operator.piece
    chip = operator.chip
    inputs = random_inputs(piece, np.random.default_rng(seed))
    try:
        tuned = run(lower(piece, chip, choice), piece, inputs, operator)
        # half the tolerance: the default may be as far on the other side
        if not _differs(piece, tuned, evaluate(piece.graph, inputs), 0.5):
            return ""
        return _differs(piece, tuned, run(lower(piece, chip), piece, inputs, operator))
    except errors.AscendLabError as error:
        return str(error)


def _differs(
    piece: Piece, tuned: Mapping[str, Values], expected: Mapping[str, Values], share: float = 1.0
) -> str:
    """Return "" if values agree within a share of the tolerance, else what differs."""
    for name, values in expected.items():
        apart = _apart(tuned[name], values)
        if not apart <= share * TOLERANCE.get(piece.type(name).dtype, 0.0):
            return f"{piece.names[name]} differs by {apart:.2g} of its largest value"
    return ""


def _apart(got: Values, reference: Values) -> float:
    """Return the largest difference as a share of the largest finite value; NaN equals NaN."""
    got = got.reshape(-1)
    reference = reference.reshape(-1)
    places = np.flatnonzero(got != reference)
    got_values = got[places].astype(np.float64)
    expected = reference[places].astype(np.float64)
    both_nan = np.isnan(got_values) & np.isnan(expected)
    got_values = got_values[~both_nan]
    expected = expected[~both_nan]
    if not got_values.size:
        return 0.0
    # Differences are measured against the largest value: 1e-3 is much for a result below 1e-2, and
    # rounding for sums near 100. Results below 1 count as 1.
    finite = np.abs(reference, where=np.isfinite(reference), out=np.zeros_like(reference))
    return float(np.abs(got_values - expected).max()) / max(1.0, float(finite.max(initial=0)))


def random_inputs(piece: Piece, rng: np.random.Generator) -> dict[str, Values]:
    """Return an array per input: small numbers, or indices and counts that every operator takes."""
    arrays = {}
    for name in piece.graph.inputs:
        kind = piece.type(name)
        if kind.dtype.startswith(("int", "uint")):
            # Indices of 0 and 1 are legal for every table of at least two rows.
            array = rng.integers(0, 2, kind.shape)
        else:
            # No zeros: a division or a reciprocal of them would make infinities in both kernels,
            # which agree.
            array = rng.uniform(0.1, 1.0, kind.shape) * rng.choice([-1.0, 1.0], kind.shape)
            readers = {n.op for n in piece.graph.nodes if name in n.inputs}
            array = np.abs(array) if readers & POSITIVE else array
        arrays[name] = array.astype(formats.numpy_type(kind.dtype))
    return arrays


def run(
    lowered: Lowered, piece: Piece, inputs: Mapping[str, Values], operator: Tunable
) -> dict[str, Values]:
    """Return what a kernel writes, on poisoned memory, operands stored as it asks."""
    # Tables and constants that the kernel brings along; all other tensors are the piece's inputs.
    tensors = dict(lowered.extra)
    for buffer in lowered.kernel.tensors:
        base = matmul.base_name(buffer)
        if base in inputs and buffer.name not in tensors:
            form = lowered.forms.get(buffer.name)
            array = inputs[base]
            tensors[buffer.name] = form(array) if form else packed(piece.type(base), array)
    # All other memory is poisoned: a kernel that reads what nobody wrote does not agree by chance.
    memory = sim.execute(lowered.kernel, tensors, operator.chip)
    results = {}
    for name in piece.graph.outputs:  # what pads a layout is left out
        kind = piece.type(name)
        flat = np.asarray(memory[name]).reshape(-1)
        results[name] = flat if kind.layout == "ND" else layout.unpack(kind.map, flat)
    return results
